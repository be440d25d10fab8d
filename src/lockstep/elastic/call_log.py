"""The call log: the collective calls before the training loop and their results, which newcomers replay.

Calls whose results no worker has any more are made again. The generation that does so is `anew` (membership.py):
entries from before it are void.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, final

from lockstep.elastic.membership import START, Generation, HostRecord, Standing, Worker
from lockstep.elastic.records import PendingWrite, Records
from lockstep.elastic.worker_state import LocalWorker


@final
class CallLog:
    def __init__(self, records: Records) -> None:
        self._records = records

    @property
    def entries(self) -> list[Any]:
        """The settled calls before the loop, in order, each [name, result]."""
        return [json.loads(text) for text in self._texts(self._records.generation.anew)]

    @property
    def in_loop(self) -> bool:
        entry = self._records.client.snapshot().get(self._records.keys.loop)
        return entry is not None and bool(entry.value == self._records.generation.anew)

    def _texts(self, anew: int) -> list[str]:
        """The entries as the store has them: as JSON text, because results may contain NaN, which the store refuses."""
        snapshot, texts = self._records.client.snapshot(), list[str]()
        while (entry := snapshot.get(self._key(anew, len(texts)))) is not None:
            texts.append(entry.value)
        return texts

    def _key(self, anew: int, number: int) -> str:
        return f"{self._records.keys.call_log}{anew}/{number:06d}"

    # -- from members ------------------------------------------------------------------------------------------------

    def publish(self, sender: Worker, first: int, entries: Sequence[Any]) -> None:
        anew = self._records.generation.anew
        if sender.generation < anew:
            return  # these calls are made again
        for number, entry in enumerate(entries, first):
            self._records.pending_writes.setdefault(
                self._key(anew, number), PendingWrite(json.dumps(entry), until=anew)
            )

    def enter_loop(self) -> None:
        anew = self._records.generation.anew
        self._records.pending_writes[self._records.keys.loop] = PendingWrite(anew, force=True, until=anew)

    def carry_over(self, before: Generation, now: Generation, workers: Iterable[LocalWorker]) -> None:
        """Copy the entries that still hold into the new log: calls after them were lost, and are made again."""
        kept = (now.position or START)[1] if now.number == now.anew else 0
        for local in workers:
            if local.known_calls <= kept:
                local.known_anew = now.anew  # all entries that it has still hold
        for number, text in enumerate(self._texts(before.anew)[:kept]):
            self._records.pending_writes[self._key(now.anew, number)] = PendingWrite(text, until=now.anew)
        self._records.flush_pending()  # before the old entries are deleted
        self._records.drop_older(self._records.keys.call_log, now.anew)

    # -- to newcomers ------------------------------------------------------------------------------------------------

    def send_welcome(self, local: LocalWorker) -> None:
        """Send the whole log to a worker that has created its Run."""
        now, entries = self._records.generation, self.entries
        local.known_calls, local.known_in_loop, local.known_anew = len(entries), self.in_loop, now.anew
        local.pipe.send(
            {
                "do": "welcome",
                "id": local.id,
                "slot": local.slot,
                "wanted": self._records.want.workers,
                "journal": entries,
                "loop": local.known_in_loop,
                "generation": now.number,
            }
        )

    def send_updates(self, workers: Iterable[LocalWorker]) -> list[tuple[LocalWorker, str]]:
        """Send new entries to newcomers that have not reached the loop yet.

        Returns the newcomers that replayed calls which were made again since, and why these are of no use.
        """
        now, loop, void = self._records.generation, self.in_loop, []
        for local in (one for one in workers if one.has_run and one.record.standing is Standing.STARTING):
            entries = self.entries
            if local.known_anew < now.anew and local.known_calls > 0:
                void.append((local, f"what it replayed was done again in generation {now.anew}"))
            elif len(entries) > local.known_calls or loop != local.known_in_loop:
                more = entries[local.known_calls :]
                local.pipe.send({"do": "journal", "entries": more, "loop": loop, "generation": now.number})
                local.known_calls, local.known_in_loop, local.known_anew = len(entries), loop, now.anew
        return void

    def stragglers(self, now: Generation, hosts: Iterable[HostRecord]) -> list[Worker]:
        """Newcomers that wait at a call before the loop while the others are in the loop by now.

        They got an incomplete log, and READY is final. A worker must have reached the loop to receive the state.
        """
        if not self.in_loop:
            return []
        loop = (-1, len(self.entries))
        newcomers = [w for host in hosts for w in host.workers if w.standing is Standing.READY]
        return [worker for worker in newcomers if worker.position < loop and worker.id not in now.members]
