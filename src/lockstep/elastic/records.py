"""What a run has in the control store: the records that its hosts share, the call log, and the keys of its generations.

What a host publishes about itself is bound to its lease, and is deleted with it. Every other write is pending until the
store has it, and is tried again: the store cannot always be reached, and another host may write first.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from lockstep.control.store import PREFIX, StoreClient, StoreEntry, ThenEntry
from lockstep.elastic.agent_client import Message
from lockstep.elastic.membership import START, Generation, HostRecord, Standing, Want, Worker
from lockstep.elastic.record_json import as_json, from_json
from lockstep.elastic.worker_state import LocalWorker


class Keys:
    """The keys of the records of a run in the store."""

    def __init__(self, prefix: str) -> None:
        self.run, self.want, self.loop = prefix + "run", prefix + "want", prefix + "loop"
        self.hosts = prefix + "host/"  # a record for each host, bound to its lease
        self.networks = prefix + "network/"  # another for each host, about the hosts that it reaches
        self.values = prefix + "kv/"  # see GenerationStore
        self.call_log = prefix + "call_log/"
        self.run_options = prefix + "terms"  # options that must be the same on all hosts
        self.over = prefix + "over"  # the program has ended for a member
        self.failure = prefix + "blame"  # a host has given up the run
        self.left = prefix + "left/"  # the hosts that have ended regularly


@dataclass(frozen=True)
class PendingWrite:
    """A write that is tried again until the store has it."""

    value: Any
    force: bool = False  # replace an existing value
    until: int | None = None  # drop the write once `anew` is a later generation than this one


@final
class Records:
    """The records as the host `name` sees them."""

    def __init__(self, name: str, client: StoreClient, want: Want, *, prefix: str = PREFIX) -> None:
        self.name, self.client, self.keys = name, client, Keys(prefix)
        self.pending_writes: dict[str, PendingWrite] = {}  # by key
        self.is_clean = False  # whether the store has nothing of an earlier run
        self.found: int | None = None  # see `membership.orders`; None: the workers of this host are not listed yet
        self.is_leaving = False  # this host: see `HostRecord`
        self._first_want = want
        self._network: dict[str, Any] | None = None
        self._cleaning: set[tuple[str, int]] = set()  # (key, revision) of deletions under way
        self._writing: set[str] = set()  # keys with a change under way
        self._lease_losses = 0  # how often the lease of this host has ended

    # -- reads -------------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> Generation:
        entry = self.client.snapshot().get(self.keys.run)
        return Generation(0) if entry is None else from_json(Generation, entry.value)

    @property
    def want(self) -> Want:
        entry = self.client.snapshot().get(self.keys.want)
        return self._first_want if entry is None else from_json(Want, entry.value)

    @property
    def hosts(self) -> list[HostRecord]:
        return [from_json(HostRecord, record) for record in self._below(self.keys.hosts).values()]

    @property
    def networks(self) -> dict[str, dict[str, Any]]:
        """By host: the address of its port for probes (`door`), and the hosts that it does not reach (`missed`)."""
        return {name: dict(record) for name, record in self._below(self.keys.networks).items()}

    @property
    def hosts_left(self) -> set[str]:
        """The hosts that have ended regularly."""
        return set(self._below(self.keys.left))

    @property
    def run_options(self) -> dict[str, Any] | None:
        """The options of the first host."""
        return self._facts(self.keys.run_options) if self.is_clean else None

    @property
    def over(self) -> dict[str, Any] | None:
        """{"status": exit status of the program} once it has ended for a member."""
        return self._facts(self.keys.over)

    @property
    def failure(self) -> dict[str, Any] | None:
        """The exit status of the run and why it was given up, if it was."""
        return self._facts(self.keys.failure) if self.is_clean else None

    def _facts(self, key: str) -> dict[str, Any] | None:
        entry = self.client.snapshot().get(key)
        return None if entry is None else dict(entry.value)

    def _below(self, prefix: str) -> dict[str, Any]:
        found = self.client.snapshot().items()
        return {key.removeprefix(prefix): entry.value for key, entry in found if key.startswith(prefix)}

    # -- writes ------------------------------------------------------------------------------------------------------

    def publish(self, key: str, value: Any) -> None:
        self.pending_writes[key] = PendingWrite(value)

    def publish_failure(self, *, status: int, why: str) -> None:
        self.publish(self.keys.failure, {"status": status, "why": why})

    def publish_over(self, status: int) -> None:
        self.pending_writes.setdefault(self.keys.over, PendingWrite({"status": status}))

    def set_want(self, want: Want) -> None:
        self.pending_writes[self.keys.want] = PendingWrite(as_json(want), force=True)

    def flush_pending(self) -> None:
        """Try the pending writes again, and drop those that the store has."""
        snapshot, anew = self.client.snapshot(), self.generation.anew
        for key, pending in list(self.pending_writes.items()):
            entry = snapshot.get(key)
            has = entry is not None and (entry.value == pending.value or not pending.force)
            if has or (pending.until is not None and anew > pending.until):
                del self.pending_writes[key]
            else:
                self._put(key, pending.value, force=pending.force)

    def propose(self, following: Generation) -> None:
        """Write the next generation once: it is not tried again, because it may not follow another host's proposal."""
        self._put(self.keys.run, as_json(following), force=True)

    def _put(
        self, key: str, value: Any, *, force: bool, leased: bool = False, then: ThenEntry = lambda _: None
    ) -> None:
        """Write a value if the store can be reached. An existing value is replaced only with `force`.

        `leased`: it is deleted when the lease of this host ends. While this host is not listed, a value under an
        earlier lease is replaced even if equal: it will be deleted.
        """
        entry = self.client.snapshot().get(key)
        is_there = entry is not None and entry.value == value and (self.is_listed or not leased)
        if key in self._writing or is_there or (entry is not None and not force):
            return

        def written(result: Any) -> None:
            self._writing.discard(key)
            then(result)

        self._writing.add(key)
        self.client.cas(key, value, entry.revision if entry is not None else 0, leased=leased, then=written)

    # -- writes under the lease of this host -------------------------------------------------------------------------

    @property
    def is_listed(self) -> bool:
        """Whether the record of this host is in the store, and what the others wrote before that has been read."""
        return self.found is not None

    def set_network(self, *, probe_address: tuple[str, int], unreached: Collection[str]) -> None:
        self._network = {"door": list(probe_address), "missed": sorted(unreached)}

    def list_workers(self, workers: Iterable[Worker]) -> None:
        """Write the records of this host."""
        mine = as_json(HostRecord(self.name, tuple(workers), self.is_leaving))
        lease_losses = self._lease_losses

        def then(result: Any) -> None:
            if isinstance(result, StoreEntry) and lease_losses == self._lease_losses and self.found is None:
                self.found = self.generation.number

        self._put(self.keys.hosts + self.name, mine, force=True, leased=True, then=then)
        if self._network is not None:
            self._put(self.keys.networks + self.name, self._network, force=True, leased=True)

    def unlist(self) -> None:
        """The lease of this host has ended: its records have to be written again."""
        self._lease_losses += 1
        self.found = None

    # -- deletions ---------------------------------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Delete what an earlier run has left, if no host is listed. By revision, so that newer values stay."""
        if self.client.is_connected and not self.is_clean:
            stale = {} if self.hosts else self.client.snapshot()
            self.is_clean = not stale
            for key, entry in stale.items():
                if (key, entry.revision) not in self._cleaning:
                    self._cleaning.add((key, entry.revision))
                    self.client.delete(key, entry.revision, then=lambda _: None)

    def drop_older(self, prefix: str, number: int) -> None:
        """Delete the keys "<prefix><generation>/..." of generations before `number`."""
        for key, entry in self.client.snapshot().items():
            if key.startswith(prefix) and int(key.removeprefix(prefix).partition("/")[0]) < number:
                self.client.delete(key, entry.revision, then=lambda _: None)


@final
class CallLog:
    """The collective calls before the training loop and their results, which newcomers replay.

    Calls whose results no worker has any more are made again. The generation that does so is `anew` (membership.py):
    entries from before it are void.
    """

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
            write = PendingWrite(json.dumps(entry), until=anew)
            self._records.pending_writes.setdefault(self._key(anew, number), write)

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
        message = {"do": "welcome", "id": local.id, "slot": local.slot, "wanted": self._records.want.workers}
        local.pipe.send({**message, "call_log": entries, "loop": local.known_in_loop, "generation": now.number})

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
                local.pipe.send({"do": "call_log", "entries": more, "loop": loop, "generation": now.number})
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


@dataclass
class StoreRequest:
    """A request of a worker that has not been answered yet."""

    worker: str
    generation: int
    message: Message
    answer: tuple[Any] | None = None  # what to answer, once the change is made
    in_flight: bool = False


@final
class GenerationStore:
    """The keys and values with which the members of a generation form their process groups.

    The operations are those of torch's stores. A request may have to wait, for a value or for the control store.
    """

    def __init__(self, client: StoreClient, prefix: str) -> None:
        self._client, self._prefix = client, prefix
        self._requests: list[StoreRequest] = []

    def submit(self, local: LocalWorker, message: Message) -> None:
        self._requests.append(StoreRequest(local.id, int(message["generation"]), message))

    def answer_all(self, workers: Mapping[str, LocalWorker], generation: int) -> None:
        """Answer all requests that can be answered by now."""
        waiting = []
        for request in self._requests:
            local = workers.get(request.worker)
            if local is None or request.generation < generation:
                continue  # the worker has left, or is about to
            try:
                answer = self._answer(request)
            except ValueError as error:  # a key or value that the store does not take
                local.pipe.send({"do": "kv", "id": request.message["id"], "error": str(error)})
                continue
            if answer is None:
                waiting.append(request)
            else:
                local.pipe.send({"do": "kv", "id": request.message["id"], "value": answer[0]})
        self._requests = waiting

    def _answer(self, request: StoreRequest) -> tuple[Any] | None:
        """The answer as a tuple of one; None if there is none yet."""
        if request.answer is not None or request.in_flight:
            return request.answer
        message, key = request.message, f"{self._prefix}{request.generation}/{request.message['key']}"
        entry = self._client.snapshot().get(key)
        value, added = None if entry is None else entry.value, dict[str, int]()
        if isinstance(value, list):  # a counter, and the total after each addition, by "<worker>/<request id>"
            value, added = value
        match message["op"]:
            case "get":
                return None if entry is None else (value,)
            case "check":
                return (entry is not None,)
            case "set":
                self._swap(request, key, entry, message["value"], None)
            case "add":
                # The value records who has added: if the store's answer is lost, that shows whether it was done.
                adder = f"{request.worker}/{message['id']}"
                if adder in added:
                    return (added[adder],)
                total = int(base64.b64decode(value or "") or b"0") + int(message["amount"])
                coded = base64.b64encode(str(total).encode()).decode()
                self._swap(request, key, entry, [coded, added | {adder: total}], total)
            case "compare_set":
                if (value or "") != message["expected"]:
                    return (value if value is not None else message["expected"],)
                self._swap(request, key, entry, message["value"], message["value"])
            case "delete":
                if entry is not None:
                    self._client.delete(key, entry.revision, then=lambda _: None)
                return (entry is not None,)
            case _:
                return (None,)
        return None

    def _swap(self, request: StoreRequest, key: str, entry: StoreEntry | None, value: Any, answer: Any) -> None:
        """If another write came first, the request is evaluated again."""

        def then(result: Any) -> None:
            request.in_flight = False
            if isinstance(result, StoreEntry):
                request.answer = (answer,)

        request.in_flight = True
        self._client.cas(key, value, entry.revision if entry is not None else 0, then=then)
