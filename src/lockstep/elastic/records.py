"""The records of a run in the store: what its hosts have in common, each with its name and type.

What a host says of itself hangs on its lease, and goes with it. All else that somebody wants to be there is a wish,
which we repeat until the store has it: it cannot always be asked, and others may be faster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, final

from lockstep.control.store import Entry
from lockstep.control.store_client import PREFIX, Arbiter, ThenEntry
from lockstep.elastic.membership import Generation, Host, Want, Worker, as_json, from_json


class Keys:
    """Where the records of a run are in the store."""

    def __init__(self, prefix: str) -> None:
        self.run, self.want, self.loop = prefix + "run", prefix + "want", prefix + "loop"
        self.hosts = prefix + "host/"  # each has a record, which hangs on its lease
        self.networks = prefix + "network/"  # and another, about whom it reaches
        self.values = prefix + "kv/"  # what the members of a generation tell each other
        self.journal = prefix + "journal/"
        self.terms = prefix + "terms"  # on what the hosts must agree
        self.over = prefix + "over"  # the program has ended for somebody
        self.blame = prefix + "blame"  # somebody has given the run up
        self.left = prefix + "left/"  # the hosts that ended when it was time


@dataclass(frozen=True)
class Wish:
    """Something that the store shall have, however often we must ask."""

    value: Any
    force: bool = False  # in place of what is there
    until: int | None = None  # not when calls were made again in a generation after this one


@final
class Records:
    """As the host called `name` sees them."""

    def __init__(self, name: str, arbiter: Arbiter, want: Want, *, prefix: str = PREFIX) -> None:
        self.name, self.arbiter, self.keys = name, arbiter, Keys(prefix)
        self.wishes: dict[str, Wish] = {}  # by key
        self.is_clean = False  # nothing in the store is of an earlier run
        self.found: int | None = None  # as `membership.orders` has it; None: our workers are not listed yet
        self._first_want = want
        self._network: dict[str, Any] | None = None
        self._cleaning: set[tuple[str, int]] = set()  # what is being taken away
        self._writing: set[str] = set()  # keys with a change under way
        self._lapses = 0  # of our lease

    # -- what the store says -----------------------------------------------------------------------------------------

    @property
    def generation(self) -> Generation:
        entry = self.arbiter.snapshot().get(self.keys.run)
        return Generation(0) if entry is None else from_json(Generation, entry.value)

    @property
    def want(self) -> Want:
        entry = self.arbiter.snapshot().get(self.keys.want)
        return self._first_want if entry is None else from_json(Want, entry.value)

    @property
    def hosts(self) -> list[Host]:
        return [from_json(Host, record) for record in self._below(self.keys.hosts).values()]

    @property
    def networks(self) -> dict[str, dict[str, Any]]:
        """By host: its `door`, and the hosts that it has `missed` there."""
        return {name: dict(record) for name, record in self._below(self.keys.networks).items()}

    @property
    def hosts_left(self) -> set[str]:
        """Those that ended when it was time."""
        return set(self._below(self.keys.left))

    @property
    def terms(self) -> dict[str, Any] | None:
        """Those of the first host."""
        return self._facts(self.keys.terms) if self.is_clean else None

    @property
    def over(self) -> dict[str, Any] | None:
        """{"status": that of the program}, once it has ended for a member."""
        return self._facts(self.keys.over)

    @property
    def blame(self) -> dict[str, Any] | None:
        """Where the run was given up, why, and because of whom."""
        return self._facts(self.keys.blame) if self.is_clean else None

    def _facts(self, key: str) -> dict[str, Any] | None:
        entry = self.arbiter.snapshot().get(key)
        return None if entry is None else dict(entry.value)

    def _below(self, prefix: str) -> dict[str, Any]:
        found = self.arbiter.snapshot().items()
        return {key.removeprefix(prefix): entry.value for key, entry in found if key.startswith(prefix)}

    # -- what it shall have ------------------------------------------------------------------------------------------

    def set_want(self, want: Want) -> None:
        self.wishes[self.keys.want] = Wish(as_json(want), force=True)

    def propose_terms(self, **facts: Any) -> None:
        self.wishes[self.keys.terms] = Wish(facts)

    def say_over(self, status: int) -> None:
        self.wishes.setdefault(self.keys.over, Wish({"status": status}))

    def accuse(self, **facts: Any) -> None:
        self.wishes[self.keys.blame] = Wish(facts)

    def leave(self) -> None:
        """We end, and it is time."""
        self.wishes[self.keys.left + self.name] = Wish(True)

    def fulfil(self) -> None:
        """Ask the store for what it shall have, until it has it."""
        snapshot, anew = self.arbiter.snapshot(), self.generation.anew
        for key, wish in list(self.wishes.items()):
            entry = snapshot.get(key)
            has = entry is not None and (entry.value == wish.value or not wish.force)
            if has or (wish.until is not None and anew > wish.until):
                del self.wishes[key]
            else:
                self._put(key, wish.value, force=wish.force)

    def propose(self, following: Generation) -> None:
        """No wish: once the store has another, it may not follow any more."""
        self._put(self.keys.run, as_json(following), force=True)

    def _put(self, key: str, value: Any, *, force: bool) -> None:
        """If the store can be asked. A key that is there stays, unless by `force`."""
        entry = self.arbiter.snapshot().get(key)
        if key in self._writing or (entry is not None and (entry.value == value or not force)):
            return
        self._writing.add(key)
        revision = entry.revision if entry is not None else 0
        self.arbiter.cas(key, value, revision, then=lambda _: self._writing.discard(key))

    # -- what hangs on our lease -------------------------------------------------------------------------------------

    @property
    def is_listed(self) -> bool:
        """The others can see us, and we have seen what they did before that."""
        return self.found is not None

    def tell_network(self, *, door: tuple[str, int], missed: Collection[str]) -> None:
        self._network = {"door": list(door), "missed": sorted(missed)}

    def list_workers(self, workers: Iterable[Worker]) -> None:
        """A record that hangs on an earlier lease of ours is about to go, even if it says the same."""
        mine, lapses = as_json(Host(self.name, tuple(workers))), self._lapses

        def then(result: Any) -> None:
            if isinstance(result, Entry) and lapses == self._lapses and self.found is None:
                self.found = self.generation.number

        self._keep(self.keys.hosts + self.name, mine, then=then)
        if self._network is not None:
            self._keep(self.keys.networks + self.name, self._network)

    def unlist(self) -> None:
        """Our lease has ended."""
        self._lapses += 1
        self.found = None

    def _keep(self, key: str, value: Any, *, then: ThenEntry = lambda _: None) -> None:
        """As long as our lease holds."""
        entry = self.arbiter.snapshot().get(key)
        if key in self._writing or (self.is_listed and entry is not None and entry.value == value):
            return

        def written(result: Any) -> None:
            self._writing.discard(key)
            then(result)

        self._writing.add(key)
        self.arbiter.cas(key, value, entry.revision if entry is not None else 0, leased=True, then=written)

    # -- what nobody needs -------------------------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Whoever comes first takes away what an earlier run has left. By revision: what is new stays."""
        if self.arbiter.is_connected and not self.is_clean:
            stale = {} if self.hosts else self.arbiter.snapshot()
            self.is_clean = not stale
            for key, entry in stale.items():
                if (key, entry.revision) not in self._cleaning:
                    self._cleaning.add((key, entry.revision))
                    self.arbiter.delete(key, entry.revision, then=lambda _: None)

    def drop_older(self, prefix: str, number: int) -> None:
        """Of keys that are `prefix`, the number of a generation, and more: those of earlier ones."""
        for key, entry in self.arbiter.snapshot().items():
            if key.startswith(prefix) and int(key.removeprefix(prefix).partition("/")[0]) < number:
                self.arbiter.delete(key, entry.revision, then=lambda _: None)
