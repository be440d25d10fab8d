"""Runs a function on several real workers, joined by Gloo, and brings back what each returned.

The workers come from a fork server that has torch loaded already, so that starting two takes a tenth of a second.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import runpy
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn

OTHERS_END_WITHIN_S = 10.0  # after one worker of a program has failed

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["worker_imports"])


def fork_server() -> ForkServerContext:
    """Return a context whose processes come from the fork server, which it starts if it does not run yet."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))  # of worker_imports
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return _context


class WorkerFailedError(AssertionError):
    """Carries every worker's outcome: a result, or the text of its error."""

    def __init__(self, outcomes: list[Any]) -> None:
        self.outcomes = outcomes
        super().__init__("\n".join(f"rank {r}: {o}" for r, o in enumerate(outcomes)))


def on_workers(function: Callable[..., Any], workers: int, *args: Any, timeout_s: float = 300) -> list[Any]:
    """`[function(rank, size, *args) for every rank]`, each in a process. Raises WorkerFailedError if any fails."""
    outcomes = try_on_workers(function, workers, *args, timeout_s=timeout_s)
    if any(isinstance(o, Failure) for o in outcomes):
        raise WorkerFailedError(outcomes)
    return outcomes


class Failure(str):
    """The text of an error, or of a silent death."""


def try_on_workers(function: Callable[..., Any], workers: int, *args: Any, timeout_s: float = 300) -> list[Any]:
    """Like `on_workers`, with a Failure in the place of a worker that failed.

    A worker that waits for two seconds for a core while Gloo connects is hung up on by its peer. That is no fault of
    `function`, which has not begun then, so the workers are started once more.
    """
    outcomes = _run(function, workers, *args, timeout_s=timeout_s)
    if any(isinstance(o, Failure) and "connectFullMesh" in o and "in _join_group" in o for o in outcomes):
        outcomes = _run(function, workers, *args, timeout_s=timeout_s)
    return outcomes


def _run(function: Callable[..., Any], workers: int, *args: Any, timeout_s: float) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes, context = [], [], fork_server()
        for rank in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(function, rank, workers, os.path.join(folder, "store"), theirs, args), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.join(timeout=2)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    outcomes: list[Any] = [Failure("did not finish in time") for _ in pipes]
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and time.monotonic() < deadline:
        for pipe in wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic())):
            rank = open_pipes.pop(pipe)
            try:
                outcomes[rank] = pipe.recv()
            except EOFError:
                outcomes[rank] = Failure("died without an error message")
    return outcomes


def _work(
    function: Callable[..., Any], rank: int, size: int, store: str, pipe: Connection, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        _join_group(rank, size, store)
        result = function(rank, size, *args)
        dist.barrier()  # no worker closes its connections while another still uses them
        dist.destroy_process_group()
    except BaseException:
        result = Failure(traceback.format_exc())
    pipe.send(result)
    pipe.close()
    os._exit(0)


def run_program(script: Path, *arguments: str, workers: int = 1, timeout_s: float = 240, **env: str) -> tuple[int, str]:
    """Run a program as `python script` would, in its folder and with `env`; or on several workers, as under torchrun.

    Returns its exit status, the highest of all workers, and the output of the first worker, or of those that failed.
    The processes come from the fork server: importing torch takes longer than a small training.
    """
    outputs = [script.parent / f"output of rank {rank}" for rank in range(workers)]
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0 may listen there, and no other process
        held.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        processes: list[Any] = []
        try:
            for rank, output in enumerate(outputs):
                ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
                told = {name: str(value) for name, value in ranks.items()} | where if workers > 1 else {}
                args = (script, arguments, output, dict(os.environ) | told | env)
                processes.append(fork_server().Process(target=_be_program, args=args, daemon=True))
                processes[-1].start()
            _wait_for_all(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    failed = [output for process, output in zip(processes, outputs, strict=True) if process.exitcode]
    text = "\n".join(output.read_text(errors="replace") for output in failed or outputs[:1])
    return max(128 - code if code < 0 else code for code in (process.exitcode for process in processes)), text


def _wait_for_all(processes: list[Any], deadline: float) -> None:
    """Wait until all have ended, until the deadline, or for some seconds after one has failed."""
    running = {process.sentinel: process for process in processes}
    while running and time.monotonic() < deadline:
        for sentinel in wait(list(running), timeout=max(0.0, deadline - time.monotonic())):
            process = running.pop(sentinel)  # type: ignore[index]
            process.join()
            if process.exitcode:
                deadline = min(deadline, time.monotonic() + OTHERS_END_WITHIN_S)


def _be_program(script: Path, arguments: tuple[str, ...], output: Path, env: dict[str, str]) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(script.parent)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    run_to_end(lambda: runpy.run_path(str(script), run_name="__main__"))


def run_to_end(run: Callable[[], object]) -> NoReturn:
    """Run a program in this forked process, and end as an interpreter does, not as a child of multiprocessing."""
    atexit._clear()  # what the process has registered that this one was forked from
    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start processes
    status = 0
    try:
        run()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if status and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _join_group(rank: int, size: int, store: str) -> None:
    import torch.distributed as dist

    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout)
    dist.barrier()  # no worker begins with its function unless all have joined
