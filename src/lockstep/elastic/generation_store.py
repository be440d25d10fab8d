"""What the members of a generation tell each other while they form their process groups: keys and values, in the store.

They ask as torch's stores are asked. An answer may have to wait, for a value or for the control store.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from lockstep.control.json_pipe import Message
from lockstep.control.store import Entry
from lockstep.control.store_client import Arbiter
from lockstep.elastic.worker_state import Person


@dataclass
class Ask:
    """Something about a key that somebody waits to be answered."""

    person: str
    generation: int
    message: Message
    answer: tuple[Any] | None = None  # what to answer, once the change is made
    under_way: bool = False


@final
class Values:
    def __init__(self, arbiter: Arbiter, prefix: str) -> None:
        self._arbiter, self._prefix = arbiter, prefix
        self._asks: list[Ask] = []

    def ask(self, person: Person, message: Message) -> None:
        self._asks.append(Ask(person.id, int(message["generation"]), message))

    def answer_all(self, people: Mapping[str, Person], generation: int) -> None:
        """That is, all that can be by now."""
        waiting = []
        for ask in self._asks:
            person = people.get(ask.person)
            if person is None or ask.generation < generation:
                continue  # whoever asked has left, or is about to
            try:
                answer = self._answer(ask)
            except ValueError as error:  # a key or value that the store does not take
                person.line.send({"do": "kv", "id": ask.message["id"], "error": str(error)})
                continue
            if answer is None:
                waiting.append(ask)
            else:
                person.line.send({"do": "kv", "id": ask.message["id"], "value": answer[0]})
        self._asks = waiting

    def _answer(self, ask: Ask) -> tuple[Any] | None:
        """None: not yet."""
        if ask.answer is not None or ask.under_way:
            return ask.answer
        message, key = ask.message, f"{self._prefix}{ask.generation}/{ask.message['key']}"
        entry = self._arbiter.snapshot().get(key)
        value, added = _counted(entry)
        match message["op"]:
            case "get":
                return None if entry is None else (value,)
            case "check":
                return (entry is not None,)
            case "set":
                self._swap(ask, key, entry, message["value"], None)
            case "add":
                # Who has added is written down: without an answer of the store we do not know whether we have.
                us = f"{ask.person}/{message['id']}"
                if us in added:
                    return (added[us],)
                total = int(base64.b64decode(value or "") or b"0") + int(message["amount"])
                coded = base64.b64encode(str(total).encode()).decode()
                self._swap(ask, key, entry, [coded, added | {us: total}], total)
            case "compare_set":
                if (value or "") != message["expected"]:
                    return (value if value is not None else message["expected"],)
                self._swap(ask, key, entry, message["value"], message["value"])
            case "delete":
                if entry is not None:
                    self._arbiter.delete(key, entry.revision, then=lambda _: None)
                return (entry is not None,)
            case _:
                return (None,)
        return None

    def _swap(self, ask: Ask, key: str, entry: Entry | None, value: Any, answer: Any) -> None:
        """If somebody else is faster, the question is looked at again."""

        def then(result: Any) -> None:
            ask.under_way = False
            if isinstance(result, Entry):
                ask.answer = (answer,)

        ask.under_way = True
        self._arbiter.cas(key, value, entry.revision if entry is not None else 0, then=then)


def _counted(entry: Entry | None) -> tuple[str | None, dict[str, int]]:
    """What a key has; and if it was added to, by whom, and what each made of it."""
    if entry is None:
        return None, {}
    if isinstance(entry.value, list):
        value, added = entry.value
        return value, added
    return entry.value, {}
