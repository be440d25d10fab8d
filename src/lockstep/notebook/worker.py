"""A worker of `lockstep.launch`: a fork of the calling process that runs the function and returns its result.

It first resets what it inherits and must not use: signal handlers, the kernel's atexit functions, and streams that
write through threads of the notebook's kernel, which a fork does not have.
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

from lockstep import _torch
from lockstep.errors import LockstepError
from lockstep.launcher.parent_watch import name_semaphores

_RESET_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


@dataclass(frozen=True)
class WorkerResult:
    """How the function ended on one worker. At most one field is not None."""

    result: bytes | None = None  # pickled; on rank 0 only
    failure: str | None = None  # a traceback


@dataclass(frozen=True)
class Pipes:
    """The writing ends of a worker's pipes."""

    out: int
    err: int
    answer: int


@dataclass(frozen=True)
class Task:
    call: Callable[[], Any]
    rank: int
    env: Mapping[str, str]
    pipes: Pipes


def work(task: Task, register: Callable[[], None], watch_pipe: int) -> None:
    """Main function of a worker. `register` writes to the pipe of ParentWatch, which is closed after that."""
    os.setsid()  # Ctrl-C in a terminal or notebook reaches the caller only, which passes it on
    register()
    os.close(watch_pipe)
    _set_up(task)
    try:
        try:
            _refuse_broken_cuda()
            answer = _pack_result(task.call(), task.rank)
        except Exception as error:
            sys.last_value = error  # process groups that are left at exit then do not wait for peers
            _send(task.pipes.answer, WorkerResult(failure=_describe(error)))
            raise SystemExit(1) from None
        _send(task.pipes.answer, answer)
    finally:
        atexit._run_exitfuncs()


def _set_up(task: Task) -> None:
    signal.set_wakeup_fd(-1)  # an event loop of the kernel may have set it, and would get this process's signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for one in _RESET_SIGNALS:
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
    # A fork does not have torch's intra-op threads: an operation that waits for them would hang.
    torch.set_num_threads(1)


def _refuse_broken_cuda() -> None:
    if _torch.is_in_bad_fork():
        raise LockstepError(
            "this process has asked CUDA something before lockstep.launch (torch.cuda.is_available() is enough), and "
            "the driver does not work in a fork of it; restart the kernel and leave the GPU to the workers, or set "
            "PYTORCH_NVML_BASED_CUDA_CHECK=1 before it starts"
        )


def _pack_result(result: Any, rank: int) -> WorkerResult:
    if rank != 0:
        return WorkerResult()
    packed = io.BytesIO()
    try:
        _Packer(packed, protocol=pickle.HIGHEST_PROTOCOL).dump(result)
    except Exception as error:
        raise TypeError(
            f"what the function returned, a {type(result).__name__}, cannot be handed back ({error}); return numbers, "
            "text, tensors, a state dict, or lists and dicts of these"
        ) from None
    return WorkerResult(result=packed.getvalue())


class _Packer(pickle.Pickler):
    """Moves tensors to the CPU, so that the caller need not initialise CUDA."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor) and thing.device.type != "cpu":
            here: Any = thing.detach().cpu().requires_grad_(thing.requires_grad)
            return here.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _describe(error: BaseException) -> str:
    """Returns its traceback without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _send(pipe: int, answer: WorkerResult) -> None:
    with os.fdopen(pipe, "wb") as out:
        pickle.dump((answer.result, answer.failure), out)
