"""The journal: what was called before the loop, and with which results. From it newcomers learn how to get there.

Calls that were lost for all are made again. The generation that does so is `anew` (membership.py): what was settled
before it does not count any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, final

from lockstep.elastic.membership import START, Generation, Host, Standing, Worker
from lockstep.elastic.records import Records, Wish
from lockstep.elastic.worker_state import Person


@final
class Journal:
    def __init__(self, records: Records) -> None:
        self._records = records

    @property
    def entries(self) -> list[Any]:
        """Calls before the loop that are settled, in order, each [what, result]."""
        return [json.loads(text) for text in self._texts(self._records.generation.anew)]

    @property
    def in_loop(self) -> bool:
        entry = self._records.arbiter.snapshot().get(self._records.keys.loop)
        return entry is not None and bool(entry.value == self._records.generation.anew)

    def _texts(self, anew: int) -> list[str]:
        """Entries as the store has them: it refuses NaN, and results have it."""
        snapshot, texts = self._records.arbiter.snapshot(), list[str]()
        while (entry := snapshot.get(self._key(anew, len(texts)))) is not None:
            texts.append(entry.value)
        return texts

    def _key(self, anew: int, number: int) -> str:
        return f"{self._records.keys.journal}{anew}/{number:06d}"

    # -- what members tell -------------------------------------------------------------------------------------------

    def publish(self, teller: Worker, first: int, entries: Sequence[Any]) -> None:
        anew = self._records.generation.anew
        if teller.generation < anew:
            return  # it speaks of calls that are made again
        for number, entry in enumerate(entries, first):
            self._records.wishes.setdefault(self._key(anew, number), Wish(json.dumps(entry), until=anew))

    def enter_loop(self) -> None:
        anew = self._records.generation.anew
        self._records.wishes[self._records.keys.loop] = Wish(anew, force=True, until=anew)

    def carry_over(self, before: Generation, now: Generation, people: Iterable[Person]) -> None:
        """Calls were lost for all, and are made again: what comes before them stays."""
        kept = (now.position or START)[1] if now.number == now.anew else 0
        for person in people:
            if person.journal <= kept:
                person.knows_anew = now.anew  # all that it knows still holds
        for number, text in enumerate(self._texts(before.anew)[:kept]):
            self._records.wishes[self._key(now.anew, number)] = Wish(text, until=now.anew)
        self._records.fulfil()  # before the others go
        self._records.drop_older(self._records.keys.journal, now.anew)

    # -- what newcomers hear -----------------------------------------------------------------------------------------

    def welcome(self, person: Person) -> None:
        """It has come to its Run."""
        now, entries = self._records.generation, self.entries
        person.journal, person.knows_loop, person.knows_anew = len(entries), self.in_loop, now.anew
        person.line.send(
            {
                "do": "welcome",
                "id": person.id,
                "slot": person.slot,
                "wanted": self._records.want.workers,
                "journal": entries,
                "loop": person.knows_loop,
                "generation": now.number,
            }
        )

    def push(self, people: Iterable[Person]) -> list[tuple[Person, str]]:
        """Newcomers that are still on their way through the program hear of what has been settled since.

        Those who were told what has been done again since are of no use. Returns them, and why.
        """
        now, loop, void = self._records.generation, self.in_loop, []
        for person in (one for one in people if one.spoke and one.worker.standing is Standing.STARTING):
            entries = self.entries
            if person.knows_anew < now.anew and person.journal > 0:
                void.append((person, f"what it replayed was done again in generation {now.anew}"))
            elif len(entries) > person.journal or loop != person.knows_loop:
                more = entries[person.journal :]
                person.line.send({"do": "journal", "entries": more, "loop": loop, "generation": now.number})
                person.journal, person.knows_loop, person.knows_anew = len(entries), loop, now.anew
        return void

    def left_behind(self, now: Generation, hosts: Iterable[Host]) -> list[Worker]:
        """Newcomers that wait at a call before the loop, and the others are in the loop by now.

        They were too early for the whole journal, and READY is final. Who takes over state must have come to the loop.
        """
        if not self.in_loop:
            return []
        loop = (-1, len(self.entries))
        newcomers = [w for host in hosts for w in host.workers if w.standing is Standing.READY]
        return [worker for worker in newcomers if worker.position < loop and worker.id not in now.members]
