"""The records of a run in the control store: what its hosts share, each record with its key and type.

What a host publishes about itself is bound to its lease, and is deleted with it. Every other write is pending until the
store has it, and is tried again: the store cannot always be reached, and another host may write first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, final

from lockstep.control.store import StoreEntry
from lockstep.control.store_client import PREFIX, StoreClient, ThenEntry
from lockstep.elastic.membership import Generation, HostRecord, Want, Worker, as_json, from_json


class Keys:
    """The keys of the records of a run in the store."""

    def __init__(self, prefix: str) -> None:
        self.run, self.want, self.loop = prefix + "run", prefix + "want", prefix + "loop"
        self.hosts = prefix + "host/"  # a record for each host, bound to its lease
        self.networks = prefix + "network/"  # another for each host, about the hosts that it reaches
        self.values = prefix + "kv/"  # see generation_store.py
        self.call_log = prefix + "journal/"
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

    def set_want(self, want: Want) -> None:
        self.pending_writes[self.keys.want] = PendingWrite(as_json(want), force=True)

    def publish_run_options(self, **facts: Any) -> None:
        self.pending_writes[self.keys.run_options] = PendingWrite(facts)

    def publish_over(self, status: int) -> None:
        self.pending_writes.setdefault(self.keys.over, PendingWrite({"status": status}))

    def publish_failure(self, **facts: Any) -> None:
        self.pending_writes[self.keys.failure] = PendingWrite(facts)

    def leave(self) -> None:
        """Publish that this host ends regularly."""
        self.pending_writes[self.keys.left + self.name] = PendingWrite(True)

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

    def _put(self, key: str, value: Any, *, force: bool) -> None:
        """Write a value if the store can be reached. An existing value is replaced only with `force`."""
        entry = self.client.snapshot().get(key)
        if key in self._writing or (entry is not None and (entry.value == value or not force)):
            return
        self._writing.add(key)
        revision = entry.revision if entry is not None else 0
        self.client.cas(key, value, revision, then=lambda _: self._writing.discard(key))

    # -- writes under the lease of this host -------------------------------------------------------------------------

    @property
    def is_listed(self) -> bool:
        """Whether the record of this host is in the store, and what the others wrote before that has been read."""
        return self.found is not None

    def set_network(self, *, probe_address: tuple[str, int], unreached: Collection[str]) -> None:
        self._network = {"door": list(probe_address), "missed": sorted(unreached)}

    def list_workers(self, workers: Iterable[Worker]) -> None:
        """Write the record of this host. One under an earlier lease is replaced even if equal: it will be deleted."""
        mine, lease_losses = as_json(HostRecord(self.name, tuple(workers))), self._lease_losses

        def then(result: Any) -> None:
            if isinstance(result, StoreEntry) and lease_losses == self._lease_losses and self.found is None:
                self.found = self.generation.number

        self._put_leased(self.keys.hosts + self.name, mine, then=then)
        if self._network is not None:
            self._put_leased(self.keys.networks + self.name, self._network)

    def unlist(self) -> None:
        """The lease of this host has ended: its records have to be written again."""
        self._lease_losses += 1
        self.found = None

    def _put_leased(self, key: str, value: Any, *, then: ThenEntry = lambda _: None) -> None:
        """Write a value that is deleted when the lease of this host ends."""
        entry = self.client.snapshot().get(key)
        if key in self._writing or (self.is_listed and entry is not None and entry.value == value):
            return

        def written(result: Any) -> None:
            self._writing.discard(key)
            then(result)

        self._writing.add(key)
        self.client.cas(key, value, entry.revision if entry is not None else 0, leased=True, then=written)

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
