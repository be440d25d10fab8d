"""The keys and values with which the members of a generation form their process groups, kept in the control store.

The operations are those of torch's stores. A request may have to wait, for a value or for the control store.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from lockstep.control.json_pipe import Message
from lockstep.control.store import StoreEntry
from lockstep.control.store_client import StoreClient
from lockstep.elastic.worker_state import LocalWorker


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
        value, added = _value_and_additions(entry)
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


def _value_and_additions(entry: StoreEntry | None) -> tuple[str | None, dict[str, int]]:
    """The value of a key and, if it is a counter, the total after each addition, by "<worker>/<request id>"."""
    if entry is None:
        return None, {}
    if isinstance(entry.value, list):
        value, added = entry.value
        return value, added
    return entry.value, {}
