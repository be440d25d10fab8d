"""Runs the Python of pages, and says what became of every block: `python page_driver.py RESULTS PAGE...`.

Everything is forked from this process, which has torch imported and has not used it: a page costs what it does, and not
the seconds of an import. The blocks of a page run in one process, one after the other, in one namespace. A block that
is a complete program runs in a process of its own, or in several that find each other as workers do. All have the
page's folder.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from on_workers import run_to_end
from pages import ROOT, Block, blocks_of, expected_output, name_of

DEADLINE_S = 300.0  # of a block
GRACE_S = 1.5  # of other workers, when one has failed: they may have something to say, too
FORK = multiprocessing.get_context("fork")


@dataclass
class Outcome:
    where: str
    problem: str = ""
    took_s: float = 0.0
    not_run: str = ""


@dataclass(frozen=True)
class Ran:
    output: str
    failed: bool
    late: bool = False


def run_page(path: Path) -> list[Outcome]:
    outcomes: list[Outcome] = []
    last: Ran | None = None
    folder = Path(tempfile.mkdtemp(prefix="page-"))
    inside = Inside(folder)
    try:
        for block in blocks_of(name_of(path), path.read_text()):
            if "output" in block.marks:
                outcomes.append(Outcome(block.where, compare(block, last)))
            if block.language != "python":
                continue
            if "not run" in block.marks:
                outcomes.append(Outcome(block.where, not_run=block.marks["not run"]))
                continue
            began = time.monotonic()
            is_program = "workers" in block.marks or "file" in block.marks
            last = run_program(block, folder) if is_program else inside.run(block)
            outcomes.append(Outcome(block.where, judge(block, last), time.monotonic() - began))
    finally:
        inside.end()
        shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def judge(block: Block, ran: Ran) -> str:
    """What is wrong, in words; nothing if nothing is."""
    wanted = block.marks.get("raises", "")
    if ran.late:
        return f"did not end within {DEADLINE_S:.0f} s\n{ran.output}"
    if not wanted:
        return ran.output if ran.failed else ""
    if not ran.failed:
        return f"should raise {wanted}, and did not\n{ran.output}"
    return "" if expected_output(wanted).search(" ".join(ran.output.split())) else f"not {wanted}, but\n{ran.output}"


def compare(block: Block, ran: Ran | None) -> str:
    if ran is None:
        return "there is no program above this output"
    found = expected_output(block.code).search(" ".join(ran.output.split()))
    return "" if found else f"the program above printed something else:\n{ran.output}"


# ---- programs ------------------------------------------------------------------------------------------------------


def run_program(block: Block, folder: Path) -> Ran:
    size = int(block.marks.get("workers", "1"))
    script = folder / block.marks.get("file", f"block{block.line}.py")
    script.write_text(code_of(block))
    port = free_port()
    told = [about(rank, size, port) for rank in range(size)] if size > 1 else [{}]
    outputs = [folder / f".output{rank}" for rank in range(size)]
    workers = [FORK.Process(target=be_program, args=(script, env, out)) for env, out in zip(told, outputs, strict=True)]
    for worker in workers:
        worker.start()
    late = not await_all(workers)
    text = "\n".join(out.read_text(errors="replace") for out in outputs)
    return Ran(text, failed=late or any(worker.exitcode for worker in workers), late=late)


def await_all(workers: list[Any]) -> bool:
    """Whether they ended by themselves; if one fails the others have little time left."""
    deadline, failed = time.monotonic() + DEADLINE_S, False
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        if not failed and any(worker.exitcode for worker in workers):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.01)
    alone = failed or not any(worker.is_alive() for worker in workers)
    for worker in workers:
        if worker.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        worker.join()
    return alone


def about(rank: int, size: int, port: str) -> dict[str, str]:
    """What a launcher tells a worker."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def be_program(script: Path, env: dict[str, str], output: Path) -> None:
    os.setsid()
    write_to(output)
    os.chdir(script.parent)
    os.environ.update(env)
    sys.argv = [script.name]
    sys.path.insert(0, str(script.parent))
    run_to_end(lambda: run_script(script))


def run_script(script: Path) -> None:
    try:
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__", "__file__": str(script)})
    except Exception:
        traceback.print_exc()  # without the prefix "[rank0]:" of torch
        sys.exit(1)


def write_to(output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)  # for good
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def code_of(block: Block) -> str:
    return "\n".join(filter(None, [block.marks.get("before", ""), block.code]))


# ---- blocks that share a namespace ---------------------------------------------------------------------------------


class Inside:
    """The process of one page."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._line, theirs = FORK.Pipe()
        self._process = FORK.Process(target=be_page, args=(theirs, self._line, folder))
        self._process.start()
        theirs.close()

    def run(self, block: Block) -> Ran:
        output = self._folder / f".output-{block.line}"
        script = self._folder / f"block{block.line}.py"
        script.write_text(code_of(block))
        try:
            self._line.send((str(script), str(output)))
            if not self._line.poll(DEADLINE_S):
                self._process.kill()
                return Ran(output.read_text(errors="replace"), failed=True, late=True)
            failed = self._line.recv()
        except (EOFError, OSError):
            return Ran(f"its process ended\n{output.read_text() if output.exists() else ''}", failed=True)
        return Ran(output.read_text(errors="replace"), failed=failed)

    def end(self) -> None:
        self._line.close()
        self._process.join(GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def be_page(line: Any, other_end: Any, folder: Path) -> None:
    other_end.close()  # or we would never hear that it is closed
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    run_to_end(lambda: run_blocks(line))


def run_blocks(line: Any) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    while True:
        try:
            script, output = line.recv()
        except EOFError:
            return
        write_to(Path(output))
        failed = False
        try:
            exec(compile(Path(script).read_text(), script, "exec"), namespace)
        except BaseException:
            traceback.print_exc()
            failed = True
        sys.stdout.flush()
        line.send(failed)


def main(results: Path, pages: list[Path]) -> None:
    for module in ("sklearn.datasets", "torch.utils.data.distributed", "lockstep.train.run", "lockstep.ddp.wrapper"):
        importlib.import_module(module)
    importlib.import_module("torch._dynamo.trace_rules")  # what the first optimiser of a process loads, for seconds
    with results.open("w") as file:
        for page in pages:
            for outcome in run_page(page):
                print(json.dumps(asdict(outcome)), file=file, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [ROOT / name for name in sys.argv[2:]])
