"""The ledger of a run: which samples went into which applied step, and the proof that each was used once per epoch.

Note [Fingerprints]
A set of samples is recorded as its size and the sum, modulo 2**64, of a hash of each sample. Sums do not depend on
order and can be added, so a line of the file may describe one step or a thousand. Samples 0 to N-1, each once, have one
known sum. A sample that is missing, foreign or used twice gives another sum, except with probability 2**-64. Each
worker computes the sum from the samples that it loaded for its shards, and sends it with their losses: it describes
what was computed, not what was planned.

Note [Hashes]
The samples of a stream have no numbers. If a stream splits itself (`split="worker"`), a hash of each sample is
recorded, so that a sample that two workers have used is found. In a long epoch only hashes below a limit are kept; the
limit is halved whenever there are too many. Equal samples have equal hashes, so either both are kept or neither.

Note [Which worker writes]
All workers have all entries, and rank 0 writes them. After a loss, another worker is rank 0. A worker that sends its
state to a new worker writes first, because the new worker may become rank 0. A writer continues after the last line of
the file, and reads the file again whenever its size is not what it was after its own last write.
Lines end where checkpoints are: a run that returns to a checkpoint writes a line that says so, and the lines written
after that checkpoint no longer count.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from lockstep.data.sample_order import Sequential, Shuffled, count_steps
from lockstep.errors import LockstepError
from lockstep.run_files import Appender

NAME: Final = "ledger.jsonl"
WRITE_EVERY_S: Final = 1.0
MOST_WAITING: Final = 4096  # entries that are not written yet
MOST_SEEN: Final = 8192  # hashes that are kept of an epoch
_FACTS: Final = ("samples", "global_batch_size", "seed", "order", "drop_last")  # required in the first line
WORD: Final = 2**64  # fingerprints and hashes are integers below it
_AT_ONCE: Final = 1 << 20


def fingerprint(samples: Sequence[int] | range) -> int:
    """Return the sum of the hashes of these samples: see Note [Fingerprints]. The hash is splitmix64's finaliser."""
    if not len(samples):
        return 0
    if isinstance(samples, range):
        x = torch.arange(samples.start, samples.stop, samples.step)
    else:
        x = torch.tensor(samples, dtype=torch.int64)
    x = x + signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * signed(0x94D049BB133111EB)
    return int((x ^ _shifted(x, 31)).sum()) % WORD


def signed(word: int) -> int:
    """Return the same 64 bits as a signed integer, for torch."""
    return word - WORD if word >= WORD // 2 else word


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@functools.lru_cache(maxsize=8)
def fingerprint_of_all(samples: int) -> int:
    starts = range(0, samples, _AT_ONCE)
    return sum(fingerprint(range(at, min(at + _AT_ONCE, samples))) for at in starts) % WORD


@dataclass(frozen=True)
class LedgerEntry:
    """One or more consecutive applied steps of one epoch."""

    start: int
    stop: int
    epoch: int
    samples: int
    fingerprint: int
    seen: tuple[int, ...] = ()  # hashes of the samples of a stream that splits itself: see Note [Hashes]
    below: int = WORD  # only hashes below this limit were kept

    def merged(self, after: LedgerEntry) -> LedgerEntry:
        total = (self.fingerprint + after.fingerprint) % WORD
        seen, below = self.seen + after.seen, min(self.below, after.below)
        return LedgerEntry(self.start, after.stop, self.epoch, self.samples + after.samples, total, seen, below)

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        if self.below == WORD and not self.seen:
            del fields["seen"], fields["below"]
        return fields


@dataclass
class _HashLimit:
    """Limits the number of hashes of an epoch: see Note [Hashes]."""

    epoch: int = -1
    count: int = 0  # hashes kept
    below: int = WORD

    def select(self, epoch: int, seen: Sequence[int]) -> tuple[int, ...]:
        """Return the hashes below the limit, and halve the limit if there are too many."""
        if epoch != self.epoch:
            self.epoch, self.count, self.below = epoch, 0, WORD
        kept = tuple(word for word in seen if word < self.below)
        self.count += len(kept)
        if self.count > MOST_SEEN:
            self.below, self.count = self.below // 2, self.count // 2
        return kept


class LedgerEnd(NamedTuple):
    """The end of the ledger file."""

    size: int  # bytes
    step: int  # after the last line


class Ledger:
    """The ledger of a run. Every worker records all steps; one worker writes them to the file."""

    def __init__(self, directory: Path | None) -> None:
        self._file = Appender(directory / NAME, "the ledger") if directory is not None else None
        self._waiting: deque[LedgerEntry] = deque(maxlen=MOST_WAITING)
        self._beginning: dict[str, Any] | None = None  # the first line since the last start or return
        self._begin: dict[str, Any] | None = None  # the same, if this worker has yet to write it
        self._wrote_s = time.monotonic()
        self._end = LedgerEnd(size=-1, step=0)  # after this worker's last write
        self._workers = 0
        self._hash_limit = _HashLimit()

    def begin(self, step: int, facts: dict[str, Any], *, writes: bool) -> None:
        """Start, or return to, `step`. `facts` are those of `Batches.facts`; `writes`: this worker writes the file."""
        self._waiting.clear()
        self._hash_limit = _HashLimit()
        self._beginning = {"begin": step, **facts}
        if writes:
            self._begin = self._beginning
            self.write()

    def set_workers(self, workers: int) -> None:
        self._workers = workers

    def record(
        self, number: int, *, epoch: int, samples: int, fingerprint: int, writes: bool, seen: Sequence[int] = ()
    ) -> None:
        """Record an applied step, and write from time to time. `seen`: hashes of samples that have no numbers."""
        kept = self._hash_limit.select(epoch, seen) if seen else ()
        below = self._hash_limit.below if seen else WORD
        self._waiting.append(LedgerEntry(number, number + 1, epoch, samples, fingerprint, kept, below))
        due = time.monotonic() - self._wrote_s > WRITE_EVERY_S or len(self._waiting) > MOST_WAITING // 2
        if writes and due:
            self.write()

    def write(self) -> None:
        """Write all entries; called by rank 0 and by a worker that sends its state. After an error they are kept."""
        self._wrote_s = time.monotonic()
        if self._file is None:
            self._waiting.clear()
            return
        try:
            size = _size_of(self._file.path)
            if size == 0 and self._begin is None:
                self._begin = self._beginning  # the worker that had to write it was lost before it did
            if self._begin is None and self._end.size != size:
                # Another worker has written since.
                self._end = LedgerEnd(size=-1, step=_read(self._file.path).end if self._file.path.exists() else 0)
        except (OSError, LockstepError) as error:
            self._file.report_failure(error)
            return
        begin = [self._begin] if self._begin is not None else []
        entries = _merge(self._waiting, self._begin["begin"] if self._begin is not None else self._end.step)
        self._waiting = deque(entries, maxlen=MOST_WAITING)
        lines = begin + [entry.to_json() | {"workers": self._workers} for entry in entries]
        if not lines:
            return
        wrote = self._file.add(map(json.dumps, lines))
        if wrote is not None:
            self._waiting.clear()
            self._begin = None
            self._end = LedgerEnd(wrote, entries[-1].stop if entries else lines[0]["begin"])


def _merge(entries: Iterable[LedgerEntry], start: int) -> list[LedgerEntry]:
    """Return the entries from step `start` on, merged where possible. Another worker has written the earlier ones."""
    merged: list[LedgerEntry] = []
    for entry in entries:
        if entry.start < start:
            continue
        if merged and merged[-1].epoch == entry.epoch and merged[-1].stop == entry.start:
            merged[-1] = merged[-1].merged(entry)
        else:
            merged.append(entry)
    return merged


def _size_of(path: Path) -> int:
    """Return the current size of the file. On a network disk opening it queries the server, which `stat` may not do."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0


# ---- the proof -------------------------------------------------------------------------------------------------------


@dataclass
class LedgerContents:
    """The contents of a ledger file, without the lines that no longer count."""

    facts: dict[str, Any]
    entries: list[LedgerEntry]
    end: int  # step after the last line
    restarts: int
    of_epoch: dict[int, dict[str, Any]] = field(default_factory=dict)  # facts by epoch: a restart may change the order


@dataclass(frozen=True)
class EpochProof:
    number: int
    steps: int
    samples: int
    complete: bool
    exact: bool  # each sample was used once; of an incomplete epoch: the samples so far are those of the order
    problem: str = ""
    note: str = ""  # why the epoch need not use each sample once


@dataclass(frozen=True)
class Proof:
    steps: int
    restarts: int
    samples: int
    epochs: list[EpochProof]
    problems: list[str]

    @property
    def holds(self) -> bool:
        return not self.problems

    @property
    def claims_each_once(self) -> bool:
        """Whether each sample must be used once; False for an order that may use one twice or not at all."""
        return not any(epoch.note for epoch in self.epochs)


def _read(path: Path) -> LedgerContents:
    found = LedgerContents({}, [], 0, -1)
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise LockstepError(f"{path} is no ledger: {error}") from None
    for n, line in enumerate(lines):
        try:
            record = json.loads(line)
            if "begin" in record:
                _rewind(found, record, f"{path}, line {n + 1}")
                continue
            record.pop("workers")
            entry = LedgerEntry(**(record | {"seen": tuple(record.get("seen", ()))}))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LockstepError(f"{path}, line {n + 1}, is no line of a ledger ({error}): {line[:80]!r}") from None
        if entry.start != found.end or entry.stop <= entry.start:
            raise LockstepError(
                f"{path}, line {n + 1}: steps {entry.start} to {entry.stop - 1} come after step {found.end - 1}; "
                "steps are missing, or were applied twice"
            )
        found.entries.append(entry)
        found.of_epoch[entry.epoch] = found.facts
        found.end = entry.stop
    return found


def _rewind(found: LedgerContents, record: dict[str, Any], where: str) -> None:
    """Drop the entries after the step to which the run returned."""
    step = record["begin"]
    kept = [entry for entry in found.entries if entry.stop <= step]
    end = kept[-1].stop if kept else 0
    if end != step:
        raise LockstepError(f"{where}: the run went back to step {step}, but the lines before end at step {end}")
    found.facts, found.entries, found.end, found.restarts = record, kept, end, found.restarts + 1


def prove(directory: Path) -> Proof:
    """Check that every sample was used in exactly one applied step of every complete epoch.

    Raises LockstepError if the ledger is missing, damaged, or that of a stream that all workers read.
    """
    path = directory / NAME
    if not path.exists():
        raise LockstepError(f"{path} is not there: the run had no directory, or has not made a step yet")
    read = _read(path)
    missing = [name for name in _FACTS if name not in read.facts]
    if missing:
        what = f"does not say {', '.join(missing)} in its first line" if read.end else "is empty"
        raise LockstepError(f"{path} {what}: the run was lost before it had noted a step, or the file is damaged")
    if not read.end:
        raise LockstepError(f"{path} has no step yet, or all of them were taken back; there is nothing to prove")
    size = int(read.facts["samples"])
    is_split = size < 0 and read.facts.get("split") == "worker"
    if size < 0 and not is_split:
        raise LockstepError(f"{path} is of a stream, whose samples have no numbers; there is nothing to prove")
    epochs = []
    for number in sorted({entry.epoch for entry in read.entries}):
        parts = [entry for entry in read.entries if entry.epoch == number]
        steps, samples = sum(entry.stop - entry.start for entry in parts), sum(entry.samples for entry in parts)
        facts = read.of_epoch[number]
        if is_split:
            epochs.append(_check_split(number, steps, samples, parts))
        elif facts.get("each_once", True):
            total = sum(entry.fingerprint for entry in parts) % WORD
            epochs.append(_check_epoch(number, steps, samples, total, facts))
        else:
            note = f"chosen by {facts['sampler']}, which need not use each sample once"
            epochs.append(EpochProof(number, steps, samples, steps == facts.get("epoch_steps"), exact=False, note=note))
    problems = [f"epoch {epoch.number}: {epoch.problem}" for epoch in epochs if epoch.problem]
    samples = sum(epoch.samples for epoch in epochs) if is_split else size
    return Proof(read.end, read.restarts, samples, epochs, problems)


def _check_split(number: int, steps: int, samples: int, parts: Sequence[LedgerEntry]) -> EpochProof:
    """Check, for a stream that splits itself, that no sample was used twice in an epoch."""
    below = min(entry.below for entry in parts)
    seen = [word for entry in parts for word in entry.seen if word < below]
    again = len(seen) - len(set(seen))
    note = f"{len(seen)} of them compared by content, none came twice"
    problem = (
        f"{again} of {len(seen)} samples that were compared came twice: two workers have read the same part of the "
        "stream, or it has equal samples"
    )
    return EpochProof(number, steps, samples, False, not again, problem if again else "", note)


def _check_epoch(number: int, steps: int, samples: int, total: int, facts: dict[str, Any]) -> EpochProof:
    """Check that these are the samples that an epoch must have. `total` is their fingerprint."""
    order, size = _order(facts), int(facts.get("order_size", facts["samples"]))
    planned = count_steps(order, number) if order is not None else None
    complete = steps == planned if planned is not None else samples >= size
    if not complete and (order is None or steps > (planned or 0)):
        problem = "" if samples <= size else f"{samples} samples were used, and there are {size}"
        return EpochProof(number, steps, samples, complete=False, exact=False, problem=problem)
    if order is not None and (order.drop_last or not complete):
        # The order is known, and so are the samples of these steps.
        wanted = [sample for step in range(steps) for sample in order.batch(number, step)]
        right = (samples, total) == (len(wanted), fingerprint(wanted))
    else:
        right = (samples, total) == (size, fingerprint_of_all(size))
    wrong = f"{samples} samples were used, but not each of {size} once"
    problem = wrong if complete else "other samples were used than were due"
    return EpochProof(number, steps, samples, complete, right, "" if right else problem)


def _order(facts: dict[str, Any]) -> Shuffled | Sequential | None:
    size, seed = facts.get("order_size", facts["samples"]), facts.get("order_seed", facts["seed"])
    batch, drop_last = facts["global_batch_size"], facts["drop_last"]
    if facts["order"] == "Shuffled":
        return Shuffled(size, batch, seed, drop_last)
    return Sequential(size, batch, drop_last) if facts["order"] == "Sequential" else None
