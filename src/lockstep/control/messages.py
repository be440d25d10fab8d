"""What a control store and its clients say to each other, as JSON objects. Pure.

    asked    {"id": 7, "do": "cas", ...}                       what belongs to which `do` is in FIELDS
    answer   {"id": 7, ...} or {"id": 7, "error": "why nothing was changed"}
    pushed   {"changes": [[key, revision, value, lease] or [key, revision], ...],
              "revision": r, "anew": bool, "complete": bool}
    last     {"trouble": "why the sender ends the connection"}  from a bridge to etcd alone

Somebody who watches a prefix is pushed everything below it once (`anew`), and then what changes, in rounds. A round may
take several pushes; with the last one (`complete`) the receiver has all that was true at the revision. Of a key that
changes faster than it can be sent only the last state is, so that a slow reader costs no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

from lockstep.control.frames import Message, WireError
from lockstep.control.store import Change, Entry, Store, write_json

# With the largest value and the longest key on top, a page still fits into a frame.
PAGE_BYTES: Final = 512 << 10

_ANYTHING: Final = (NoneType, bool, int, float, str, list, dict)
FIELDS: Final[dict[str, dict[str, tuple[type, ...]]]] = {
    "get": {"key": (str,)},
    "list": {"prefix": (str,), "after": (str,)},
    "cas": {"key": (str,), "value": _ANYTHING, "revision": (int,), "lease": (str, NoneType)},
    "delete": {"key": (str,), "revision": (int,)},
    "grant": {"ttl_s": (int, float)},
    "keep_alive": {"lease": (str,)},
    "revoke": {"lease": (str,)},
    "watch": {"prefix": (str,)},
}


@dataclass(frozen=True)
class Push:
    changes: Sequence[Change]
    revision: int
    anew: bool
    complete: bool

    def as_message(self) -> Message:
        rows = [change_as_row(change) for change in self.changes]
        return {"changes": rows, "revision": self.revision, "anew": self.anew, "complete": self.complete}


def check_request(message: Message) -> None:
    """WireError unless it is one of FIELDS, whole and with nothing else in it."""
    fields = FIELDS.get(take(message, "do", str))
    if fields is None:
        raise WireError(f"nobody can do {message['do'][:40]!r}")
    take(message, "id", int)
    if message.keys() != {"id", "do", *fields}:
        raise WireError(f"{message['do']} takes {sorted(fields)}, and not {sorted(message.keys() - {'id', 'do'})}")
    for name, kinds in fields.items():
        take(message, name, *kinds)


def take(message: Message, name: str, *kinds: type) -> Any:
    """A field of a message. Types are compared exactly: True is no number."""
    if name not in message or type(message[name]) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise WireError(f"a message whose {name!r} is not {wanted}")
    return message[name]


def change_as_row(change: Change) -> list[Any]:
    entry = change.entry
    return [change.key, change.revision] if entry is None else [change.key, entry.revision, entry.value, entry.lease]


def entry_as_row(key: str, entry: Entry | None) -> list[Any] | None:
    return None if entry is None else change_as_row(Change(key, entry.revision, entry))


def row_as_change(row: Any) -> Change:
    match row:
        case [str(key), int(revision)]:
            return Change(key, revision, None)
        case [str(key), int(revision), value, (str() | None) as lease]:
            return Change(key, revision, Entry(value, revision, lease))
    raise WireError("a row that is neither [key, revision] nor [key, revision, value, lease]")


def message_as_push(message: Message) -> Push:
    return Push(
        changes=[row_as_change(row) for row in take(message, "changes", list)],
        revision=take(message, "revision", int),
        anew=take(message, "anew", bool),
        complete=take(message, "complete", bool),
    )


def cut_pages(changes: Iterable[Change]) -> list[list[Change]]:
    """At least one page, which may be empty."""
    pages: list[list[Change]] = [[]]
    size = 0
    for change in changes:
        own = len(write_json(change_as_row(change)))
        if pages[-1] and size + own > PAGE_BYTES:
            pages.append([])
            size = 0
        pages[-1].append(change)
        size += own
    return pages


def cut_round(changes: Iterable[Change], revision: int, *, anew: bool) -> Iterator[Push]:
    pages = cut_pages(changes)
    for number, page in enumerate(pages):
        yield Push(page, revision, anew=anew and number == 0, complete=number == len(pages) - 1)


def follow(store: Store, prefix: str) -> Iterator[Push | None]:
    """Without end: the next push for somebody who watches the prefix, None when there is nothing to say just now."""
    seen = -1
    while True:
        news = store.changes_after(seen)
        anew = news is None
        if news is None:
            news = [Change(key, entry.revision, entry) for key, entry in store.list(prefix).items()]
        seen = store.revision
        below = [change for change in news if change.key.startswith(prefix)]
        if below or anew:
            yield from cut_round(below, seen, anew=anew)
        if store.revision == seen:
            yield None
