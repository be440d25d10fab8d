"""The ledger of a run: which samples went into which applied step, and the proof that each was used once per epoch.

Note [Fingerprints]
A set of samples is written down as their number and the sum, modulo 2**64, of a hash of each. Sums do not depend on
order and can be added up, so a line of the file may stand for one step or a thousand. Samples 0 to N-1, each once, have
one known sum. A sample too many, too few, or twice gives another, but for one chance in 2**64. Each worker computes it
from the samples that it loaded for its shards, and it travels with their losses: it tells what was computed, not what
was planned.

Note [Hashes]
The samples of a stream have no numbers. Where a stream splits itself (`split="worker"`), a hash of each sample is
written down, so that one that two workers have used is found. Of a long epoch only hashes below a limit are kept,
which is halved whenever there are too many: equal samples have equal hashes, so both are kept or none is.

Note [Who writes]
All workers know all entries, and rank 0 writes them; after a loss that is another one, and whoever hands its state over
to a newcomer writes first, because the newcomer may be rank 0 next. Everybody goes on behind the last line that it
finds, and looks for it again whenever the file is not as it left it.
Lines end where checkpoints are: a run that goes back to one says so, and what was written after it does not count.
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
MOST_WAITING: Final = 4096
MOST_SEEN: Final = 8192  # hashes of an epoch
_FACTS: Final = ("samples", "global_batch_size", "seed", "order", "drop_last")  # that a ledger begins with
_WORD: Final = 2**64
_AT_ONCE: Final = 1 << 20


def fingerprint(samples: Sequence[int] | range) -> int:
    """See Note [Fingerprints]. The hash is the finaliser of splitmix64."""
    if not len(samples):
        return 0
    if isinstance(samples, range):
        x = torch.arange(samples.start, samples.stop, samples.step)
    else:
        x = torch.tensor(samples, dtype=torch.int64)
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return int((x ^ _shifted(x, 31)).sum()) % _WORD


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@functools.lru_cache(maxsize=8)
def fingerprint_of_all(samples: int) -> int:
    starts = range(0, samples, _AT_ONCE)
    return sum(fingerprint(range(at, min(at + _AT_ONCE, samples))) for at in starts) % _WORD


@dataclass(frozen=True)
class Entry:
    """Applied steps, one or more in a row, of one epoch."""

    start: int
    stop: int
    epoch: int
    samples: int
    fingerprint: int
    seen: tuple[int, ...] = ()  # hashes of samples, of a stream that splits itself: see Note [Hashes]
    below: int = _WORD  # only hashes below this one were kept

    def joined(self, after: Entry) -> Entry:
        total = (self.fingerprint + after.fingerprint) % _WORD
        seen, below = self.seen + after.seen, min(self.below, after.below)
        return Entry(self.start, after.stop, self.epoch, self.samples + after.samples, total, seen, below)

    def plain(self) -> dict[str, Any]:
        found = asdict(self)
        if self.below == _WORD and not self.seen:
            del found["seen"], found["below"]
        return found


@dataclass
class _Kept:
    """How many hashes of an epoch were kept, and below which value."""

    epoch: int = -1
    count: int = 0
    below: int = _WORD

    def thin_out(self, epoch: int, seen: Sequence[int]) -> tuple[int, ...]:
        if epoch != self.epoch:
            self.epoch, self.count, self.below = epoch, 0, _WORD
        found = tuple(word for word in seen if word < self.below)
        self.count += len(found)
        if self.count > MOST_SEEN:
            self.below, self.count = self.below // 2, self.count // 2
        return found


class End(NamedTuple):
    """Of the file: its size in bytes, and the step behind its last line."""

    size: int
    step: int


class Ledger:
    """Kept by every worker, written by one."""

    def __init__(self, directory: Path | None) -> None:
        self._file = Appender(directory / NAME, "the ledger") if directory is not None else None
        self._waiting: deque[Entry] = deque(maxlen=MOST_WAITING)
        self._beginning: dict[str, Any] | None = None  # the line that this life of the run begins with
        self._begin: dict[str, Any] | None = None  # the same, if it is for us to write it
        self._wrote_s = time.monotonic()
        self._end = End(size=-1, step=0)  # of the file, when we wrote last
        self._workers = 0
        self._kept = _Kept()

    def begin(self, step: int, facts: dict[str, Any], *, writes: bool) -> None:
        """The run begins at this step, or goes back to it."""
        self._waiting.clear()
        self._kept = _Kept()
        self._beginning = {"begin": step, **facts}
        if writes:
            self._begin = self._beginning
            self.write()

    def share_out(self, workers: int) -> None:
        self._workers = workers

    def note(
        self, number: int, *, epoch: int, samples: int, fingerprint: int, writes: bool, seen: Sequence[int] = ()
    ) -> None:
        """`seen`: hashes of the samples, if they have no numbers."""
        kept = self._kept.thin_out(epoch, seen) if seen else ()
        below = self._kept.below if seen else _WORD
        self._waiting.append(Entry(number, number + 1, epoch, samples, fingerprint, kept, below))
        due = time.monotonic() - self._wrote_s > WRITE_EVERY_S or len(self._waiting) > MOST_WAITING // 2
        if writes and due:
            self.write()

    def write(self) -> None:
        """By rank 0, or by whoever hands its state over. What cannot be written waits."""
        self._wrote_s = time.monotonic()
        if self._file is None:
            self._waiting.clear()
            return
        try:
            size = _size_of(self._file.path)
            if size == 0 and self._begin is None:
                self._begin = self._beginning  # whoever was to write it was lost before
            if self._begin is None and self._end.size != size:
                self._end = End(size=-1, step=_end_of(self._file.path))  # somebody else has written since
        except (OSError, LockstepError) as error:
            self._file.fails(error)
            return
        begin = [self._begin] if self._begin is not None else []
        entries = _joined(self._waiting, self._begin["begin"] if self._begin is not None else self._end.step)
        self._waiting = deque(entries, maxlen=MOST_WAITING)
        lines = begin + [entry.plain() | {"workers": self._workers} for entry in entries]
        if not lines:
            return
        wrote = self._file.add(map(json.dumps, lines))
        if wrote is not None:
            self._waiting.clear()
            self._begin = None
            self._end = End(wrote, entries[-1].stop if entries else lines[0]["begin"])


def _joined(entries: Iterable[Entry], start: int) -> list[Entry]:
    """Those from this step on, as few as possible. What comes before was written by whoever was rank 0 then."""
    found: list[Entry] = []
    for entry in entries:
        if entry.start < start:
            continue
        if found and found[-1].epoch == entry.epoch and found[-1].stop == entry.start:
            found[-1] = found[-1].joined(entry)
        else:
            found.append(entry)
    return found


def _size_of(path: Path) -> int:
    """Of the file as it is now: on a network disk, opening asks the server again, and `stat` may not."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0


def _end_of(path: Path) -> int:
    return _read(path).end if path.exists() else 0


# ---- the proof -------------------------------------------------------------------------------------------------------


@dataclass
class Read:
    """The lines that count."""

    facts: dict[str, Any]
    entries: list[Entry]
    end: int
    restarts: int
    of_epoch: dict[int, dict[str, Any]] = field(default_factory=dict)  # facts: a later start may have another order


@dataclass(frozen=True)
class Epoch:
    number: int
    steps: int
    samples: int
    complete: bool
    exact: bool  # each sample once; of an epoch that is not complete: not known
    problem: str = ""
    note: str = ""  # why it need not have each sample once


@dataclass(frozen=True)
class Proof:
    steps: int
    restarts: int
    samples: int
    epochs: list[Epoch]
    problems: list[str]

    @property
    def holds(self) -> bool:
        return not self.problems

    @property
    def claims_each_once(self) -> bool:
        """False for an order that may use a sample twice or not at all."""
        return not any(epoch.note for epoch in self.epochs)


def _read(path: Path) -> Read:
    found = Read({}, [], 0, -1)
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise LockstepError(f"{path} is no ledger: {error}") from None
    for n, line in enumerate(lines):
        try:
            record = json.loads(line)
            if "begin" in record:
                _go_back(found, record, f"{path}, line {n + 1}")
                continue
            record.pop("workers")
            entry = Entry(**(record | {"seen": tuple(record.get("seen", ()))}))
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


def _go_back(found: Read, record: dict[str, Any], where: str) -> None:
    step = record["begin"]
    kept = [entry for entry in found.entries if entry.stop <= step]
    end = kept[-1].stop if kept else 0
    if end != step:
        raise LockstepError(f"{where}: the run went back to step {step}, but the lines before end at step {end}")
    found.facts, found.entries, found.end, found.restarts = record, kept, end, found.restarts + 1


def prove(directory: Path) -> Proof:
    """That every sample went into exactly one applied step of every complete epoch. Raises if it cannot be read."""
    path = directory / NAME
    if not path.exists():
        raise LockstepError(f"{path} is not there: the run had no directory, or has not made a step yet")
    read = _read(path)
    missing = [name for name in _FACTS if name not in read.facts]
    if missing:
        what = f"does not say {', '.join(missing)} in its first line" if read.end else "is empty"
        raise LockstepError(f"{path} {what}: the run was lost before it had noted a step, or the file is damaged")
    size = int(read.facts["samples"])
    if size < 0 and read.facts.get("split") == "worker":
        return _prove_parts(read)
    if size < 0:
        raise LockstepError(f"{path} is of a stream, whose samples have no numbers; there is nothing to prove")
    epochs = []
    for number in sorted({entry.epoch for entry in read.entries}):
        parts = [entry for entry in read.entries if entry.epoch == number]
        facts = read.of_epoch[number]
        if facts.get("each_once", True):
            epochs.append(_judge(number, parts, _order(facts), int(facts.get("order_size", facts["samples"]))))
        else:
            epochs.append(_count_up(number, parts, facts))
    problems = [f"epoch {epoch.number}: {epoch.problem}" for epoch in epochs if epoch.problem]
    return Proof(read.end, read.restarts, size, epochs, problems)


def _prove_parts(read: Read) -> Proof:
    """Of a stream that splits itself: that no sample came twice in an epoch."""
    epochs = []
    for number in sorted({entry.epoch for entry in read.entries}):
        parts = [entry for entry in read.entries if entry.epoch == number]
        below = min(entry.below for entry in parts)
        seen = [word for entry in parts for word in entry.seen if word < below]
        again = len(seen) - len(set(seen))
        note = f"{len(seen)} of them compared by content, none came twice"
        problem = (
            f"{again} of {len(seen)} samples that were compared came twice: two workers have read the same part of the "
            "stream, or it has equal samples"
        )
        steps, samples = sum(entry.stop - entry.start for entry in parts), sum(entry.samples for entry in parts)
        epochs.append(
            Epoch(number, steps, samples, complete=False, exact=not again, problem=problem if again else "", note=note)
        )
    problems = [f"epoch {epoch.number}: {epoch.problem}" for epoch in epochs if epoch.problem]
    return Proof(read.end, read.restarts, sum(epoch.samples for epoch in epochs), epochs, problems)


def _order(facts: dict[str, Any]) -> Shuffled | Sequential | None:
    size, seed = facts.get("order_size", facts["samples"]), facts.get("order_seed", facts["seed"])
    batch, drop_last = facts["global_batch_size"], facts["drop_last"]
    if facts["order"] == "Shuffled":
        return Shuffled(size, batch, seed, drop_last)
    return Sequential(size, batch, drop_last) if facts["order"] == "Sequential" else None


def _count_up(number: int, parts: Sequence[Entry], facts: dict[str, Any]) -> Epoch:
    """An epoch of a sampler that may use a sample twice or not at all."""
    steps, samples = sum(entry.stop - entry.start for entry in parts), sum(entry.samples for entry in parts)
    note = f"chosen by {facts['sampler']}, which need not use each sample once"
    return Epoch(number, steps, samples, complete=steps == facts.get("epoch_steps"), exact=False, note=note)


def _judge(number: int, parts: Sequence[Entry], order: Shuffled | Sequential | None, size: int) -> Epoch:
    steps = sum(entry.stop - entry.start for entry in parts)
    samples = sum(entry.samples for entry in parts)
    total = sum(entry.fingerprint for entry in parts) % _WORD
    planned = count_steps(order, number) if order is not None else None
    complete = steps == planned if planned is not None else samples >= size
    if not complete:
        # How far it should have come is known, if the order is.
        if order is None or steps > (planned or 0):
            problem = "" if samples <= size else f"{samples} samples were used, and there are {size}"
            return Epoch(number, steps, samples, complete=False, exact=False, problem=problem)
        wanted = [sample for step in range(steps) for sample in order.batch(number, step)]
        right = (len(wanted), fingerprint(wanted)) == (samples, total)
        return Epoch(number, steps, samples, False, right, "" if right else "other samples were used than were due")
    if order is not None and order.drop_last:
        wanted = [sample for step in range(steps) for sample in order.batch(number, step)]
        right = (len(wanted), fingerprint(wanted)) == (samples, total)
    else:
        right = (samples, total) == (size, fingerprint_of_all(size))
    problem = "" if right else f"{samples} samples were used, but not each of {size} once"
    return Epoch(number, steps, samples, True, right, problem)
