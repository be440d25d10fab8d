"""The records of membership.py as JSON, in the store and on the pipe to a worker. What is read is not trusted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, TypeVar

from lockstep.elastic.membership import Generation, GenerationPhase, HostRecord, Position, Standing, Want, Worker

Record = TypeVar("Record", bound=Generation | HostRecord | Want | Worker)


def as_json(value: Any) -> Any:
    """A record, or what is in one, as plain JSON."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [as_json(one) for one in value]
    return {name: as_json(one) for name, one in vars(value).items()} if is_dataclass(value) else value


def from_json(kind: type[Record], value: object) -> Record:
    """The record in `value`. Raises ValueError saying what is wrong: a broken or hostile peer may have written it."""
    name, readers = kind.__name__, _READERS[kind]
    if not isinstance(value, dict):
        raise ValueError(f"{name}: {_short(value)} is not an object")
    if value.keys() != readers.keys():
        raise ValueError(f"{name}: has the fields {_short(list(value))}, must have {list(readers)}")
    read: dict[str, Any] = {}
    for field, reader in readers.items():
        try:
            read[field] = reader(value[field])
        except ValueError as error:
            raise ValueError(f"{name}.{field}: {error}") from None
    record = kind(**read)
    if wrong := _find_wrong(record):
        raise ValueError(f"{name}: {wrong}")
    return record


def _find_wrong(record: object) -> str:
    """Check what no single field shows. Returns what is wrong; "" if nothing is."""
    match record:
        case Generation() if len(set(record.members)) < len(record.members):
            return f"a worker is a member twice: {_short(record.members)}"
        case Generation() if record.source is not None and record.source not in record.members:
            return f"the source {_short(record.source)} is no member"
        case Generation() if record.source is not None and record.position is None:
            return f"the source {_short(record.source)} has no position"
        case Generation() if record.anew > record.number:
            return f"anew is {record.anew}, after its number, {record.number}"
        case Worker() if record.standing is Standing.READY and record.position[0] != -1:
            return f"{_short(record.id)} is ready, so its top is -1, not {record.position[0]}"
        case HostRecord():
            ids = [worker.id for worker in record.workers]
            strange = [one for one in ids if not re.fullmatch(rf"{re.escape(record.name)}\.[0-9]+", one)]
            if strange:
                return f"{_short(strange[0])} is not <host>.<serial> with the host {_short(record.name)}"
            if len(set(ids)) < len(ids):
                return f"a worker is on the list twice: {_short(ids)}"
        case Want() if not 1 <= record.least <= record.workers <= record.most:
            return f"1 <= least <= workers <= most does not hold: {record.least}, {record.workers}, {record.most}"
    return ""


def _short(value: object) -> str:
    return f"{value!r:.80}"


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} is not a string")
    return value


def _read_int(value: object, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{_short(value)} is not a whole number of at least {least}")
    return value


def _read_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{_short(value)} is neither true nor false")
    return value


def _read_list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{_short(value)} is not a list")
    return value


def _read_position(value: object) -> Position:
    pair = _read_list(value)
    if len(pair) != 2:
        raise ValueError(f"{_short(value)} is not a pair (top, calls)")
    return _read_int(pair[0], -1), _read_int(pair[1])


def _read_enum(kind: type[Enum]) -> Callable[[object], object]:
    known = {one.value: one for one in kind}

    def read(value: object) -> object:
        if _read_text(value) not in known:
            raise ValueError(f"{_short(value)} is none of {list(known)}")
        return known[value]

    return read


def _read_optional(reader: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: None if value is None else reader(value)


def _read_all(reader: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: tuple(reader(one) for one in _read_list(value))


_READERS: dict[type, dict[str, Callable[[object], object]]] = {
    Generation: {
        "number": _read_int,
        "members": _read_all(_read_text),
        "phase": _read_enum(GenerationPhase),
        "position": _read_optional(_read_position),
        "source": _read_optional(_read_text),
        "why": _read_text,
        "shrinks": _read_bool,
        "anew": _read_int,
    },
    Worker: {
        "id": _read_text,
        "standing": _read_enum(Standing),
        "generation": _read_int,
        "position": _read_position,
        "is_leaving": _read_bool,
    },
    HostRecord: {
        "name": _read_text,
        "workers": _read_all(lambda value: from_json(Worker, value)),
        "is_leaving": _read_bool,
    },
    Want: {"workers": _read_int, "least": _read_int, "most": _read_int},
}
