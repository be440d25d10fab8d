"""A worker of `lockstep.launch`: a fork of the process that called it. It runs the function and hands back the result.

What it inherits and must not use is put away first: handlers of signals, what the notebook's kernel wants to do when it
ends, and streams that lead to the kernel's own threads, which are not here.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from lockstep.errors import LockstepError
from lockstep.launcher.parent_watch import name_semaphores

_PUT_AWAY: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


@dataclass(frozen=True)
class Answer:
    """How the function ended on one worker. At most one of them is not None."""

    result: bytes | None = None  # pickled; of rank 0
    failure: str | None = None  # a traceback


@dataclass(frozen=True)
class Pipes:
    """Writing ends."""

    out: int
    err: int
    answer: int


@dataclass(frozen=True)
class Task:
    call: Callable[[], Any]
    rank: int
    env: Mapping[str, str]
    pipes: Pipes


def work(task: Task, enrol: Callable[[], None], guardian: int) -> None:
    """The whole life of a worker. `enrol` with the guardian, at whose pipe we shall not stay."""
    os.setsid()  # Ctrl-C in a terminal, or the notebook's, reaches the caller alone, which passes it on
    enrol()
    os.close(guardian)
    _settle(task)
    try:
        try:
            _refuse_broken_cuda()
            answer = _answer(task.call(), task.rank)
        except Exception as error:
            sys.last_value = error  # whoever leaves a group at exit does not wait for peers then
            _send(task.pipes.answer, Answer(failure=_describe(error)))
            raise SystemExit(1) from None
        _send(task.pipes.answer, answer)
    finally:
        atexit._run_exitfuncs()


def _settle(task: Task) -> None:
    signal.set_wakeup_fd(-1)  # an event loop of the kernel may have set it, and would hear our signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for one in _PUT_AWAY:
        signal.signal(one, signal.SIG_DFL)
    atexit._clear()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (task.pipes.out, 1), (task.pipes.err, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(one, "w", closefd=False), encoding="utf-8", errors="replace", write_through=True)
        for one in (1, 2)
    )
    os.environ.clear()
    os.environ.update(task.env)
    name_semaphores({})
    # The threads with which torch shares out an operation are the caller's, and not here: to wait for them is to hang.
    torch.set_num_threads(1)


def _refuse_broken_cuda() -> None:
    if torch.cuda._is_in_bad_fork():
        raise LockstepError(
            "this process has asked CUDA something before lockstep.launch (torch.cuda.is_available() is enough), and "
            "the driver does not work in a fork of it; restart the kernel and leave the GPU to the workers, or set "
            "PYTORCH_NVML_BASED_CUDA_CHECK=1 before it starts"
        )


def _answer(result: Any, rank: int) -> Answer:
    if rank != 0:
        return Answer()
    packed = io.BytesIO()
    try:
        _Packer(packed, protocol=pickle.HIGHEST_PROTOCOL).dump(result)
    except Exception as error:
        raise TypeError(
            f"what the function returned, a {type(result).__name__}, cannot be handed back ({error}); return numbers, "
            "text, tensors, a state dict, or lists and dicts of these"
        ) from None
    return Answer(result=packed.getvalue())


class _Packer(pickle.Pickler):
    """Tensors go to the CPU: the caller shall not have to open a GPU for them."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor) and thing.device.type != "cpu":
            here: Any = thing.detach().cpu().requires_grad_(thing.requires_grad)
            return here.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _describe(error: BaseException) -> str:
    """Its traceback, which begins with the function and not with us."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _send(pipe: int, answer: Answer) -> None:
    with os.fdopen(pipe, "wb") as out:
        pickle.dump((answer.result, answer.failure), out)
