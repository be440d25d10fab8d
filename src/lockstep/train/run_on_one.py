"""Something that one worker does while the others wait, for as long as it takes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lockstep.comm.peer_watch import Reporter, in_other_call, judge
from lockstep.errors import LockstepError, PeerLostError

ASK_EVERY_S = 0.02
LEAVE_WITHIN_S = 2.0  # the others, after one has called sys.exit
LOOK_EVERY_S = 1.0  # whether the one we wait for still lives
SAY_AFTER_S = 5.0
SAY_EVERY_S = 30.0


class Once:
    """`run` is called by all workers, in the same order. The answers travel through the store."""

    def __init__(self, store: Store, group: dist.ProcessGroup) -> None:
        """All workers of `group` together, and before any of them can be in the next one."""
        self._rank = group.rank()
        # Every worker counts one up, so this is the same number for all, and nobody finds the answers of another run.
        self._size = size = group.size()
        number = (store.add(f"lockstep/once/{size}", 1) - 1) // size
        self.store = self._store = PrefixStore(f"lockstep/once/{size}/{number}", store)
        self._reporter = Reporter.of(group)
        self._calls = 0

    def run(self, call: Callable[[], Any], *, on: int = 0) -> Any:
        """What `call` returned on rank `on`, on every worker; an error there is an error everywhere."""
        self._calls += 1
        key, name = f"{self._calls}", getattr(call, "__name__", type(call).__name__)
        if self._rank == on:
            return self._do(call, key, name)
        answer = json.loads(self._await(key, name, on))
        if "error" in answer:
            raise LockstepError(f"on_main({name}) failed on rank {on}: {answer['error']}")
        return answer["value"]

    def note_leaving(self) -> None:
        """Tell the others that this worker leaves the Run by sys.exit."""
        with suppress(Exception):  # the store may be gone, with whoever kept it
            self._store.set(f"leaves/{self._rank}", "")

    def do_all_leave(self) -> bool:
        """Whether all workers have told that they leave, or do so within a moment."""
        keys, end_s = [f"leaves/{rank}" for rank in range(self._size)], time.monotonic() + LEAVE_WITHIN_S
        with suppress(Exception):
            while not self._store.check(keys):
                if time.monotonic() > end_s:
                    return False
                time.sleep(ASK_EVERY_S)
            return True
        return False

    def _do(self, call: Callable[[], Any], key: str, name: str) -> Any:
        try:
            text = _as_text(call(), name)
        except BaseException as error:
            self._store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
        self._store.set(key, text)
        return json.loads(text)["value"]  # a tuple is a list for everybody, not for the others only

    def _await(self, key: str, name: str, on: int) -> str:
        """No deadline: a download may take hours. But we say whom we wait for, and notice when that one is gone."""
        began = time.monotonic()
        say_at, look_at = began + SAY_AFTER_S, began + LOOK_EVERY_S
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
            if now >= look_at:
                self._look_for(on, f"on_main({name})")
                look_at = now + LOOK_EVERY_S
            if now >= say_at:
                waited = now - began
                said = f"lockstep: rank {self._rank} waits for rank {on} in on_main({name}), {waited:.0f} s"
                print(said, file=sys.stderr, flush=True)
                say_at = now + SAY_EVERY_S
            time.sleep(ASK_EVERY_S)

    def _look_for(self, rank: int, where: str) -> None:
        if self._reporter is not None:
            them = [report for report in self._reporter.hear() if report.rank == rank]
            error = judge(self._reporter.now(), them, dead=self._reporter.dead(them), where=where)
            if isinstance(error, PeerLostError):
                raise error
            if (elsewhere := in_other_call(self._reporter.now(), them)) is not None:
                raise elsewhere


def _as_text(value: Any, name: str) -> str:
    try:
        return json.dumps({"value": value})
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"on_main({name}) ran, but returned a {type(value).__name__}, which cannot be handed to the other workers "
            f"({error}); return None, or numbers, strings, lists and dicts of them"
        ) from None
