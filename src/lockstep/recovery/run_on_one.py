"""Runs a function on one worker, while the others wait without a time limit."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lockstep._torch import PrefixStore, Store
from lockstep.comm.peer_watch import Reporter, diagnose, find_other_call
from lockstep.errors import LockstepError, PeerLostError

POLL_EVERY_S = 0.02
LEAVE_WITHIN_S = 2.0  # all other workers, after one has called sys.exit
CHECK_EVERY_S = 1.0  # for whether the process that is waited for still exists
PRINT_AFTER_S = 5.0
PRINT_EVERY_S = 30.0


class RunOnOne:
    """All workers call `run`, in the same order. The results are passed through the store."""

    def __init__(self, store: Store, group: dist.ProcessGroup) -> None:
        """Called by all workers of `group`, before any of them can be in the next group."""
        self._rank = group.rank()
        # Every worker adds one, so the number is equal on all of them, and no worker reads results of another run.
        self._size = size = group.size()
        number = (store.add(f"lockstep/once/{size}", 1) - 1) // size
        self.store = self._store = PrefixStore(f"lockstep/once/{size}/{number}", store)
        self._reporter = Reporter.of(group)
        self._calls = 0

    def run(self, call: Callable[[], Any], *, on: int = 0) -> Any:
        """Return, on every worker, what `call` returned on rank `on`. An error in it is raised on every worker."""
        self._calls += 1
        key, name = f"{self._calls}", getattr(call, "__name__", type(call).__name__)
        if self._rank == on:
            return self._execute(call, key, name)
        answer = json.loads(self._wait(key, name, on))
        if "error" in answer:
            raise LockstepError(f"on_main({name}) failed on rank {on}: {answer['error']}")
        return answer["value"]

    def note_leaving(self) -> None:
        """Publish that this worker leaves the Run by sys.exit."""
        with suppress(Exception):  # the process of the store may have ended
            self._store.set(f"leaves/{self._rank}", "")

    def do_all_leave(self) -> bool:
        """Whether all workers have published that they leave, within LEAVE_WITHIN_S."""
        keys, end_s = [f"leaves/{rank}" for rank in range(self._size)], time.monotonic() + LEAVE_WITHIN_S
        with suppress(Exception):
            while not self._store.check(keys):
                if time.monotonic() > end_s:
                    return False
                time.sleep(POLL_EVERY_S)
            return True
        return False

    def _execute(self, call: Callable[[], Any], key: str, name: str) -> Any:
        try:
            text = _as_text(call(), name)
        except BaseException as error:
            self._store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
        self._store.set(key, text)
        return json.loads(text)["value"]  # a tuple becomes a list on this worker, too

    def _wait(self, key: str, name: str, on: int) -> str:
        """No deadline: a download may take hours. But prints which rank is waited for, and notices when it is lost."""
        began = time.monotonic()
        print_at, check_at = began + PRINT_AFTER_S, began + CHECK_EVERY_S
        while True:
            try:
                if self._store.check([key]):
                    return self._store.get(key).decode()
            except RuntimeError as error:
                raise PeerLostError(
                    f"rank {self._rank} waited for rank {on} in on_main({name}), and the store is gone: the process "
                    f"that kept it (rank 0, or torchrun) has ended. Look at the end of its log. "
                    f"({str(error).splitlines()[0]})"
                ) from error
            now = time.monotonic()
            if now >= check_at:
                self._check_peer(on, f"on_main({name})")
                check_at = now + CHECK_EVERY_S
            if now >= print_at:
                waited = now - began
                said = f"lockstep: rank {self._rank} waits for rank {on} in on_main({name}), {waited:.0f} s"
                print(said, file=sys.stderr, flush=True)
                print_at = now + PRINT_EVERY_S
            time.sleep(POLL_EVERY_S)

    def _check_peer(self, rank: int, where: str) -> None:
        if self._reporter is not None:
            them = [report for report in self._reporter.read_reports() if report.rank == rank]
            error = diagnose(self._reporter.make_report(), them, dead=self._reporter.find_dead(them), where=where)
            if isinstance(error, PeerLostError):
                raise error
            if (elsewhere := find_other_call(self._reporter.make_report(), them)) is not None:
                raise elsewhere


def _as_text(value: Any, name: str) -> str:
    try:
        return json.dumps({"value": value})
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"on_main({name}) ran, but returned a {type(value).__name__}, which cannot be handed to the other workers "
            f"({error}); return None, or numbers, strings, lists and dicts of them"
        ) from None
