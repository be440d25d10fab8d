"""The card at the end of the output of a failed run: who failed, what, where, why, and what to do. Pure.

Known causes of failures are explained by rules. They match the exception of the worker, or its last lines if there is
no exception; signals are explained by number.
"""

from __future__ import annotations

import re
import signal
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

WIDTH: Final = 100
NARROWEST: Final = 50
MOST_LINES: Final = 9  # per entry


@dataclass(frozen=True)
class Card:
    """The entries of a card. Empty ones are not shown."""

    title: str
    who: str = ""
    what: str = ""
    place: tuple[str, ...] = ()  # file, line and source of the user's own code; not wrapped
    where: str = ""
    why: str = ""
    do: str = ""
    logs: str = ""


@dataclass(frozen=True)
class Box:
    corner: str
    side: str
    bar: str
    end: str


ASCII: Final = Box("+-- ", "| ", "-", "+")
LINES: Final = Box("╭── ", "│ ", "─", "╰")


def draw(card: Card, *, width: int = WIDTH, box: Box = ASCII) -> str:
    """Returns the card as text. It has no right border, which a long path would break."""
    width = max(NARROWEST, min(width, WIDTH))
    head = f"{box.corner}{card.title} "
    lines = [head + box.bar * (width - len(head))]
    for name, text in (("who", card.who), ("what", card.what)):
        lines += _entry(name, text, width, box)
    lines += [f"{box.side}       {line}" for line in card.place]
    for name, text in (("where", card.where), ("why", card.why), ("do", card.do), ("logs", card.logs)):
        lines += _entry(name, text, width, box)
    lines.append(box.end + box.bar * (width - 1))
    return "\n".join(line if box is not ASCII else line.encode("ascii", "replace").decode() for line in lines) + "\n"


def _entry(name: str, text: str, width: int, box: Box) -> list[str]:
    if not text:
        return []
    lines = [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, width - 9, break_long_words=False, break_on_hyphens=False)
    ]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], "[...]"]
    return [f"{box.side}{name if n == 0 else '':7}{line}" for n, line in enumerate(lines)]


# ---- known causes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    what: str  # the exception as in a traceback; "" if there was none
    last_lines: str  # the end of the worker's output
    code: int  # exit status; negative for a signal
    out_of_memory: str = ""  # what the kernel's counters say about processes killed meanwhile
    stop_sent: bool = False  # the launcher had asked it to stop
    memory: Mapping[str, int] = field(default_factory=dict)  # of its device, in bytes by kind: see `Run.memory`
    device: str = ""  # "cpu" or "cuda"; "" if it is not known


@dataclass(frozen=True)
class Explanation:
    why: str
    do: str


# For a worker that ends with status 0 in the middle of its Run, while the others continue.
TOO_EARLY: Final = Explanation(
    "the program ended on this worker only, and the others cannot continue without it",
    "look for sys.exit, exit or os._exit in the loop, the loss function, a callback or a library, behind a condition "
    "that depends on the worker. To end the training, `break` out of the loop on all workers, or call run.stop()",
)


_SHM: Final = (
    "give the container more shared memory (docker: --shm-size=8g or --ipc=host), or free /dev/shm; "
    "a DataLoader with num_workers=0 needs none, nor do run.batches(num_workers=...)"
)
_SAME_DATA: Final = (
    "let the dataset give every worker the same samples: do not split it by rank yourself, Lockstep deals them out; "
    'or, for a stream that must split itself, run.batches(split="worker"). Make random data and random splits inside '
    "of the `with` block of the Run, or with a seed; sort lists of files"
)

_OUT_OF_GPU_MEMORY: Final = r"CUDA out of memory|OutOfMemoryError"
_OUT_OF_MEMORY: Final = r"MemoryError|can't allocate memory|Cannot allocate memory|std::bad_alloc|not enough memory"
# What to change, by the kind of memory that is the largest.
_LESS_MEMORY: Final = {
    "weights": "most of it is weights: use a smaller model, or weights of a smaller dtype",
    "gradients": "most of it is gradients: use a smaller model, or weights of a smaller dtype",
    "buckets": "most of it is buckets, in which gradients are exchanged: use fewer shards for each worker",
    "optimizer": "most of it is the state of the optimiser: Run(shard_optimizer=True), or in a loop of your own "
    "lockstep.ShardedOptimizer, keeps 1/N of it on each of N workers (with redundancy=1: 2/N); or use one with "
    "less state (SGD, Adafactor)",
    "graphs": "most of it is CUDA graphs: Run(capture=False) makes none",
    "rest": "most of it is activations: use more shards of the global batch (shards=), a smaller global_batch_size, "
    "precision='bf16', or torch.utils.checkpoint in the model",
}

# (pattern, why, do). The first pattern that matches is used: specific ones come before general ones. `why` and `do` may
# contain groups of the pattern.
# fmt: off
_RULES: Final = (
    (r"DirectoryInUseError",
     "two programs would write into one run directory, and spoil each other's checkpoints",
     "end the other one, or give this one a directory of its own: Run(directory)"),
    (r"SharedMemoryFullError|of shared memory, and \S+ is full"
     r"|unable to (?:write to|allocate shared memory|mmap|resize) .*(?:/torch_|shared|shm)"
     r"|No space left on device.*(?:/dev/shm|/torch_|shm_open)|(?:/dev/shm|/torch_\d).*No space left on device",
     "shared memory is full (/dev/shm is too small)",
     _SHM),
    (r"PeerLostError.*rank (?P<rank>\d+) .*left after (?P<passes>\d+) backward passes: its program ended",
     "rank {rank} had fewer batches than the others: it ended after {passes} backward passes",
     "give every worker the same number of batches (a DistributedSampler, drop_last=True), or wrap the loop in "
     "`with model.join():`"),
    (r"UnevenDataError.*the data of rank (?P<rank>[\d, ]+) ended before step (?P<step>\d+)",
     "rank {rank} has fewer batches than the others",
     _SAME_DATA),
    (r"UnevenDataError.*the end of an epoch: (?:False on rank 0, )?True on rank (?P<rank>\d+)",
     "rank {rank} has fewer batches than the others: its data ends here",
     _SAME_DATA),
    (r"UnevenDataError.*samples: (?P<many>\d+) on rank 0, (?P<few>\d+) on rank (?P<rank>\d+)",
     "rank {rank} has other data than rank 0: a batch of {few} samples where that one has {many}",
     _SAME_DATA),
    (r"(?P<workers>\d+) workers for (?P<shards>\d+) shards?: the run in ",
     "the run was begun with fewer shards of a batch than there are workers now: {shards} for {workers}",
     "start fewer workers: -n {shards} at most; or start over (--fresh) with shards={workers} or more in run.batches"),
    (r"(?P<workers>\d+) workers for (?P<shards>\d+) shards?: ",
     "there are more workers than parts of a batch: {workers} for {shards}",
     "start fewer workers: -n {shards} at most; or set shards={workers} or more in run.batches"),
    (r"UnevenDataError",
     "the workers do not see the same data",
     _SAME_DATA),
    (r"Expected to have finished reduction in the prior iteration",
     "a parameter got no gradient: the loss does not depend on it",
     "use every parameter in the loss, freeze it (requires_grad_(False)), or pass find_unused_parameters=True"),
    (r"NonFiniteError",
     "the loss or the gradient became infinite or not a number",
     "look at the data of that step and at log, sqrt and / in the loss; a lower learning rate, warm-up or "
     'max_grad_norm= may help; Run(on_nonfinite="skip") leaves such batches out'),
    (r"FailOnRecompileLimitHit",
     "torch.compile met too many shapes: in a Run it compiles once for each, so that the bits do not depend on "
     "which ones a worker met before",
     "compile once for all shapes, torch.compile(model, dynamic=True); or pad to few lengths (drop_last=True leaves "
     "out the smaller last batch); or give Run exact=False"),
    (_OUT_OF_GPU_MEMORY,
     "the GPU is out of memory: the numbers are above",
     "use more shards of the global batch (shards=), a smaller global_batch_size or model, or precision='bf16'; see "
     "who else is on the GPU with nvidia-smi"),
    (_OUT_OF_MEMORY,
     "the worker could not get more memory: the machine, or its limit (ulimit -v, the container's), is full",
     "use fewer workers (-n), fewer loaders, more shards of a smaller global_batch_size, or allow more memory"),
    (r"cannot listen on MASTER_PORT=(?P<port>\d+)|EADDRINUSE|[Aa]ddress already in use",
     "another program has the port at which the workers meet",
     "leave MASTER_PORT unset and let `lockstep run` choose one, or set it to a free port; `ss -ltnp` names who has "
     "it"),
    (r"exited unexpectedly|is killed by signal|a loader process (?:was lost|died)",
     "a loader process was killed: most often the machine is short of memory, or /dev/shm is full",
     "use a smaller num_workers= or prefetch_factor=; look for 'Out of memory' in the kernel's log (dmesg)"),
    (r"DesyncError|collective mismatch|EnforceNotMet|op\.preamble\.length|Detected mismatch between collectives",
     "mismatching collectives: the workers did not make the same calls in the same order",
     "look for `if rank == 0:` (or a condition that differs between workers) around run.evaluate, run.log, a "
     "barrier or a reduction; all workers call them, run.on_main(...) runs something on one"),
    (r"ReplicaMismatchError",
     "the workers do not run the same program: other models, arguments or data",
     "start all workers with the same arguments and the same seed, and build the model without looking at the rank"),
    (r"DivergenceError",
     "replicas that must be equal are not",
     "run `lockstep doctor`, and look for code that changes weights on one worker only"),
    (r"WorldError.*(?:SLURM|srun)",
     "the variables of SLURM do not fit to the processes that run",
     "start one process for each task with `srun -n N python train.py`; or unset SLURM_PROCID and SLURM_NTASKS and "
     "use `lockstep run -n N`"),
    (r"WorldError",
     "the workers did not find each other",
     "see above: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must fit together; `lockstep run` sets them"),
    (r"CheckpointError",
     "what was saved does not fit to this program, or cannot be read",
     "`lockstep checkpoint ls DIRECTORY` shows what there is; a new directory begins anew"),
    (r"DataError",
     "the dataset, or its collate function, failed",
     "try that sample alone in a Python prompt: dataset[i]"),
    (r"^(?:SyntaxError|IndentationError|TabError): ",
     "Python cannot read that file",
     "correct the syntax of that line, or of the one before it"),
    (r"^ModuleNotFoundError: No module named '(?P<module>[^']+)'",
     "there is no module {module} where this Python looks for it",
     f"install it for {sys.executable} (`python -m pip install ...`), or correct its name; modules of your own are "
     "looked for beside the script, and in PYTHONPATH"),
    (r"^the program called sys\.exit",
     "the program ended itself, with a status that is not 0",
     "see what it said last, and why it ends there; a program that is done ends with sys.exit(0), or just ends"),
    (r"SharedMemory|No space left on device",
     "a disk is full",
     "free some space; `df -h` shows which disk it is"),
)
# fmt: on


def explain(evidence: Evidence) -> Explanation | None:
    """Returns None if nothing is known beyond the exception itself."""
    if evidence.code < 0 and not evidence.what and (found := _explain_signal(evidence)) is not None:
        return found
    # The output only if there is no exception: it may contain old errors and warnings.
    text = evidence.what or evidence.last_lines
    for pattern, why, do in _RULES:
        if (match := re.search(pattern, text, re.DOTALL)) is not None:
            device = {_OUT_OF_GPU_MEMORY: "cuda", _OUT_OF_MEMORY: "cpu"}.get(pattern)
            if device == evidence.device and evidence.memory.keys() > {"rest", "peak"}:
                return _explain_memory(why, do, evidence)
            return Explanation(*(_fill(words, match.groupdict()) for words in (why, do)))
    return None


def _explain_memory(why: str, do: str, evidence: Evidence) -> Explanation:
    """Say what the worker used its memory for, and what to change in the largest part of it."""
    parts = {name: size for name, size in evidence.memory.items() if name in _LESS_MEMORY and size > 0}
    listed = ", ".join(f"{name} {_size(size)}" for name, size in sorted(parts.items(), key=lambda part: -part[1]))
    tried = re.search(r"Tried to allocate ([\d.]+) (GiB|MiB)", evidence.what)
    if tried is not None:  # most often for activations
        parts["rest"] = parts.get("rest", 0) + int(float(tried[1]) * (2**30 if tried[2] == "GiB" else 2**20))
    largest = max(parts, key=lambda name: parts[name])
    if largest != "rest" or evidence.device == "cuda":  # on a CPU the rest may be anything
        do = f"{_LESS_MEMORY[largest]}; or: {do}"
    return Explanation(
        f"{why.partition(': the numbers')[0]}. It had used {_size(evidence.memory['peak'])}: {listed}", do
    )


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def _fill(text: str, groups: dict[str, str]) -> str:
    for name, value in groups.items():
        text = text.replace("{" + name + "}", value or "?")
    return text


def _explain_signal(evidence: Evidence) -> Explanation | None:
    number = -evidence.code
    if number == signal.SIGKILL and evidence.stop_sent:
        return Explanation(
            "the launcher killed it: it had to end, and did not", "look at what it was doing, in its log"
        )
    if number == signal.SIGKILL:
        why = "it got SIGKILL; most often the kernel sends that, out of memory, though its counters do not say so"
        if evidence.out_of_memory:
            why = f"out of memory: the kernel killed it ({evidence.out_of_memory})"
        fewer = "use fewer workers (-n), fewer loaders or a smaller global_batch_size"
        return Explanation(why, f"{fewer}; `dmesg` names whom the kernel killed")
    if number == signal.SIGBUS:
        return Explanation("SIGBUS: memory that was mapped is not there; most often /dev/shm is full", _SHM)
    if number == signal.SIGABRT:
        pattern, why, do = next(rule for rule in _RULES if "EnforceNotMet" in rule[0])
        if re.search(pattern, evidence.last_lines, re.DOTALL):
            return Explanation(why, do)
    if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        name = signal.Signals(number).name
        return Explanation(
            f"{name}: native code crashed, not Python",
            "set PYTHONFAULTHANDLER=1 and start it again: its log will show where; `lockstep doctor` tries the machine",
        )
    return None


def advise(evidence: Evidence) -> str:
    """Returns what to do if no cause is known."""
    if evidence.what:
        return "correct the line above; the whole traceback is in the log"
    if evidence.code > 0:
        return "it ended without an exception, and not by sys.exit (os._exit, in a library?): see the end of its log"
    return "see the end of its log"
