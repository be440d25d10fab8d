"""The control store of an elastic run: keys, revisions and leases, in memory. Pure: time is an argument.

It is the only arbiter. What is true of a run is what a compare-and-swap here has accepted, and one revision number
says in which order. A key may hang on a lease; when its holder does not renew that in time, the key is gone.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, TypeAlias, final

Json: TypeAlias = Any  # None, bool, int, float, str, and lists and dicts of these

LONGEST_KEY_BYTES: Final = 256
LARGEST_VALUE_BYTES: Final = 1 << 20
DEEPEST_VALUE: Final = 32
MOST_KEYS: Final = 100_000
MOST_LEASES: Final = 10_000
MOST_DELETIONS: Final = 10_000
SHORTEST_LEASE_S: Final = 0.05
LONGEST_LEASE_S: Final = 86400.0


@dataclass(frozen=True)
class Entry:
    """What a key has. `value` belongs to the store: read it, do not change it."""

    value: Json
    revision: int
    lease: str | None = None


@dataclass(frozen=True)
class Change:
    """The last thing that happened to a key. Without an entry it is gone."""

    key: str
    revision: int
    entry: Entry | None


class NoLease(ValueError):
    """A key should hang on a lease that has ended."""


@dataclass
class _Lease:
    ttl_s: float
    ends_s: float
    keys: set[str] = field(default_factory=set)


@final
class Store:
    def __init__(self) -> None:
        # A new store must not take a revision for one of its own that somebody saw in another store's life.
        self.revision = 1 + secrets.randbelow(2**40)
        self._entries: dict[str, Entry] = {}  # in the order of their revisions, and so is the next
        self._gone: dict[str, int] = {}
        self._forgotten = self.revision  # deletions up to here may be missing in _gone
        self._leases: dict[str, _Lease] = {}

    def get(self, key: str) -> Entry | None:
        return self._entries.get(check_key(key))

    def list(self, prefix: str) -> dict[str, Entry]:
        return {key: entry for key, entry in self._entries.items() if key.startswith(prefix)}

    def cas(self, key: str, value: Json, expected_revision: int, lease: str | None = None) -> Entry | None:
        """Set the key if its revision is the expected one (0: it must not exist). None if it is not."""
        check_key(key)
        check_revision(expected_revision)
        value = copy_value(value)
        held = None if lease is None else self._leases.get(lease)
        if lease is not None and held is None:
            raise NoLease(f"key {key!r} should hang on lease {lease[:8]}..., which has ended; ask for a new one")
        if self._revision_of(key) != expected_revision:
            return None
        if key not in self._entries and len(self._entries) >= MOST_KEYS:
            raise ValueError(f"key {key!r} would be one more than {MOST_KEYS} keys; delete some")
        self._detach(key)
        self._gone.pop(key, None)
        self.revision += 1
        self._entries[key] = entry = Entry(value, self.revision, lease)
        if held is not None:
            held.keys.add(key)
        return entry

    def delete(self, key: str, expected_revision: int) -> bool:
        """False if the key has another revision, or is not there."""
        check_key(key)
        check_revision(expected_revision)
        if key not in self._entries or self._revision_of(key) != expected_revision:
            return False
        self._drop(key)
        return True

    def grant(self, ttl_s: float, now_s: float) -> str:
        """A new lease. Only who was told its name can renew or end it."""
        if not (isinstance(ttl_s, int | float) and SHORTEST_LEASE_S <= ttl_s <= LONGEST_LEASE_S):
            raise ValueError(f"a lease of {ttl_s!r} s: it must be {SHORTEST_LEASE_S} to {LONGEST_LEASE_S:g} s")
        if len(self._leases) >= MOST_LEASES:
            raise ValueError(f"there are {MOST_LEASES} leases already; end some, or wait until they expire")
        lease = secrets.token_hex(16)
        self._leases[lease] = _Lease(ttl_s, now_s + ttl_s)
        return lease

    def keep_alive(self, lease: str, now_s: float) -> bool:
        """False if the lease has ended. One that is late but not yet expired goes on: see `expire`."""
        held = self._leases.get(lease)
        if held is None:
            return False
        held.ends_s = max(held.ends_s, now_s + held.ttl_s)
        return True

    def revoke(self, lease: str) -> bool:
        """End a lease, and drop its keys."""
        held = self._leases.pop(lease, None)
        if held is None:
            return False
        for key in sorted(held.keys):
            self._drop(key)
        return True

    def expire(self, now_s: float) -> None:
        """End the leases whose time is over. Leases end here and in `revoke`, nowhere else: a host that was stopped
        for a while reads the renewals that wait in its sockets first, and then expires who did not send one."""
        for lease in [name for name, held in self._leases.items() if held.ends_s <= now_s]:
            self.revoke(lease)

    def next_end_s(self) -> float:
        """When `expire` has something to do at the earliest."""
        return min((held.ends_s for held in self._leases.values()), default=math.inf)

    def changes_after(self, revision: int) -> Sequence[Change] | None:
        """The last change of every key that changed after `revision`, in order. None if it is too old to know, or from
        another store: then `list` everything."""
        if not self._forgotten <= revision <= self.revision:
            return None
        changed = takewhile(lambda pair: pair[1].revision > revision, reversed(self._entries.items()))
        gone = takewhile(lambda pair: pair[1] > revision, reversed(self._gone.items()))
        changes = [Change(key, entry.revision, entry) for key, entry in changed]
        changes += [Change(key, at, None) for key, at in gone]
        return sorted(changes, key=lambda change: change.revision)

    def changed_at(self, key: str) -> int:
        """The revision at which the key last changed or went; 0 if never, or long ago."""
        return self._revision_of(key) or self._gone.get(key, 0)

    def _revision_of(self, key: str) -> int:
        entry = self._entries.get(key)
        return 0 if entry is None else entry.revision

    def _detach(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and entry.lease in self._leases:
            self._leases[entry.lease].keys.discard(key)

    def _drop(self, key: str) -> None:
        self._detach(key)
        self.revision += 1
        self._gone[key] = self.revision
        while len(self._gone) > MOST_DELETIONS:
            self._forgotten = self._gone.pop(next(iter(self._gone)))


def check_key(key: str) -> str:
    if not isinstance(key, str) or not key:
        raise ValueError(f"a key must be text of at least one character, not {key!r}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"key {key[:40]!r} is not valid Unicode text: {error.reason}") from None
    if size > LONGEST_KEY_BYTES:
        raise ValueError(f"key {key[:40]!r}... has {size} bytes; at most {LONGEST_KEY_BYTES} are allowed")
    return key


def check_revision(revision: int) -> None:
    if type(revision) is not int or revision < 0:
        raise ValueError(f"an expected revision must be a whole number, 0 for a key that must not exist: {revision!r}")


def write_json(value: Json) -> str:
    """As it travels, and as its size is counted."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def copy_value(value: Json) -> Json:
    """As everybody will read it: tuples become lists, keys become text. ValueError if it is no JSON, or too large."""
    try:
        text = write_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a value must be plain JSON, without NaN, infinities or cycles: {error}") from None
    if len(text) > LARGEST_VALUE_BYTES:
        raise ValueError(f"a value has {len(text)} bytes as JSON; at most {LARGEST_VALUE_BYTES} are allowed")
    copied = json.loads(text)
    level: list[Json] = [copied]
    for _ in range(DEEPEST_VALUE):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise ValueError(f"a value is nested more than {DEEPEST_VALUE} deep; make it flatter")
    return copied


def _inside(value: Json) -> Iterable[Json]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
