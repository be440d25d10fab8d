"""The messages between a control store and its clients, as JSON objects. Pure.

    request  {"id": 7, "do": "cas", ...}                       FIELDS has the fields of each `do`
    answer   {"id": 7, ...} or {"id": 7, "error": "why nothing was changed"}
    push     {"changes": [[key, revision, value, lease] or [key, revision], ...],
              "revision": r, "anew": bool, "complete": bool}
    last     {"trouble": "why the sender ends the connection"}  only from a bridge to etcd

A client that watches a prefix gets everything below it once (`anew`), and then the changes, in rounds. A round may take
several pushes; with the last one (`complete`) the receiver has the state as of the revision. If a key changes faster
than it can be sent, only its last state is sent, so that a slow reader costs no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

from lockstep.control.frames import Message, WireError
from lockstep.control.store import Change, ControlStore, StoreEntry, write_json

# A page that exceeds this by the largest value and the longest key still fits into a frame.
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
    """Raise WireError unless the message is a request with exactly the fields in FIELDS."""
    fields = FIELDS.get(read_field(message, "do", str))
    if fields is None:
        raise WireError(f"there is no request {message['do'][:40]!r}")
    read_field(message, "id", int)
    if message.keys() != {"id", "do", *fields}:
        raise WireError(f"{message['do']} takes {sorted(fields)}, and not {sorted(message.keys() - {'id', 'do'})}")
    for name, kinds in fields.items():
        read_field(message, name, *kinds)


def read_field(message: Message, name: str, *kinds: type) -> Any:
    """The value of a field. Raises WireError unless its type is exactly one of `kinds`: True is no number."""
    if name not in message or type(message[name]) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise WireError(f"a message whose {name!r} is not {wanted}")
    return message[name]


def change_as_row(change: Change) -> list[Any]:
    entry = change.entry
    return [change.key, change.revision] if entry is None else [change.key, entry.revision, entry.value, entry.lease]


def entry_as_row(key: str, entry: StoreEntry | None) -> list[Any] | None:
    return None if entry is None else change_as_row(Change(key, entry.revision, entry))


def row_as_change(row: Any) -> Change:
    match row:
        case [str(key), int(revision)]:
            return Change(key, revision, None)
        case [str(key), int(revision), value, (str() | None) as lease]:
            return Change(key, revision, StoreEntry(value, revision, lease))
    raise WireError("a row that is neither [key, revision] nor [key, revision, value, lease]")


def message_as_push(message: Message) -> Push:
    return Push(
        changes=[row_as_change(row) for row in read_field(message, "changes", list)],
        revision=read_field(message, "revision", int),
        anew=read_field(message, "anew", bool),
        complete=read_field(message, "complete", bool),
    )


def cut_pages(changes: Iterable[Change]) -> list[list[Change]]:
    """Split changes into pages of about PAGE_BYTES. Returns at least one page, which may be empty."""
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


def follow(store: ControlStore, prefix: str) -> Iterator[Push | None]:
    """Endless iterator over the pushes for a client that watches the prefix; None when there is nothing to send now."""
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
