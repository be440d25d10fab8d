"""Audits: now and then a shard is computed again on another worker, which finds machines that compute wrongly.

The worker that owns the shard records digests of the output of every module and of the gradient of every parameter.
Another worker with the same weights, the auditor, computes the shard with the same samples and random numbers. Their
digests must be equal. If not, all workers compute the shard once more, and those that differ from the majority are
wrong. Without a majority the computation does not repeat, or a known-answer test tells which worker is wrong.

Note [What an audit shows]
In a *round* one shard of every worker is audited. A worker that passes has computed this step correctly. A fault that
stays (a defective core, a damaged weight) would have shown, so it has not begun before this step: all steps up to this
one are right, if the replicas are equal after it (recovery/replica_check.py). That is what `verified steps` counts. A
fault of a single moment is found only if it hits a shard that is audited.

Note [Idle slots]
If the shards cannot be shared out equally, some workers compute fewer of them and would wait. Once between two rounds
they audit a shard first. That costs what its owner takes to record it, and a small message.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor, nn

from lockstep.comm import agreement
from lockstep.comm.shard_sum import ShardSum
from lockstep.data.batches import Batch, Shard
from lockstep.ddp.autograd_graph import find_tensors
from lockstep.ddp.replica import Leaf, position_digests
from lockstep.errors import DivergenceError

SHARE_OF_TIME: Final = 0.004  # the share of the time that audits may take with "auto"; 0.01 is promised
# A step with a round takes longer by more than the time to compute shards again and to compare replicas: workers also
# record their own shards, and exchange digests. Until that was measured, it is assumed to be so many times as long.
FIRST_FACTOR: Final = 4
FIRST_ROUND: Final = 10  # steps: with "auto" the first round shows how long one takes
MIN_EVERY, MAX_EVERY = 10, 2000

LARGE: Final = 3e4  # of a gradient that is certainly finite in half precision, and in a sum
SAMPLES: Final = "the samples"
Recompute = Callable[[Shard, AbstractContextManager[None]], Tensor]
Digests = list[tuple[str, int]]  # (description, 64-bit digest) of each output and gradient, in order


# -- which shard is audited, and which worker is wrong -----------------------------------------------------------------


@dataclass(frozen=True)
class AuditTask:
    """One shard that is computed twice in a step, by the ranks `owner` and `auditor`."""

    shard: int
    owner: int
    auditor: int


def is_audited(number: int, every: int) -> bool:
    """Whether something may be audited in this step: in a round, or between two rounds, by workers that would wait."""
    return every > 0 and (number + 1) % every in (0, every // 2)


def is_round(number: int, every: int) -> bool:
    """Whether one shard of every worker is audited in this step."""
    return every > 0 and (number + 1) % every == 0


def audit_tasks(number: int, shares: Sequence[Sequence[int]], every: int) -> list[AuditTask]:
    """Return what is audited in step `number`.

    shares  the shards of each rank that have samples
    every   steps between two rounds; 0: nothing is audited
    """
    if not is_audited(number, every):
        return []
    size, turn = len(shares), (number + 1) // every
    if is_round(number, every):
        owners = [(rank, share) for rank, share in enumerate(shares) if share]
        return [AuditTask(share[turn % len(share)], rank, (rank + 1) % size) for rank, share in owners]
    most, tasks = max(map(len, shares)), list[AuditTask]()
    # Where shares differ by more than one, shards were assigned by speed, and no worker has to wait.
    idle = [rank for rank, share in enumerate(shares) if len(share) == most - 1 == min(map(len, shares))]
    for rank in idle:
        owner = (rank + 1 + turn % (size - 1)) % size  # never the rank itself
        if shares[owner]:
            tasks.append(AuditTask(shares[owner][turn // (size - 1) % len(shares[owner])], owner, rank))
    return tasks


def judge(first: Mapping[int, int], again: Sequence[int]) -> tuple[int, ...] | None:
    """Return which ranks are wrong; None if no majority tells.

    first  the results, by rank, that were not equal
    again  the results of all ranks, when all of them computed the shard once more
    """
    right, votes = Counter(again).most_common(1)[0]
    if 2 * votes <= len(again) or len(again) < 2:
        return None
    wrong = {rank for rank, result in (*enumerate(again), *first.items()) if result != right}
    return tuple(sorted(wrong))


def count_wrong_answers(device: torch.device) -> int:
    """Return how many of some computations with known results give another result on this device.

    They multiply and add whole numbers that are small enough for floating point to be exact in any order.
    """
    wrong = 0
    for n in (16, 64, 192):
        a = torch.arange(n * n, device="cpu").reshape(n, n) * 7 % 17 - 8
        b = torch.arange(n * n, device="cpu").reshape(n, n) * 11 % 13 - 6
        pairs = [(x.to(device), y.to(device)) for x, y in ((a.float(), b.float()), (a.double(), b.double()))]
        for x, y in pairs:
            for answer, known in ((x @ y, a @ b), (x * y + x, a * b + a), ((x @ y).sum(0), (a @ b).sum(0))):
                wrong += int((answer.cpu().to(torch.int64) != known).sum())
    return wrong


class AuditSchedule:
    """How many steps are between two rounds; with "auto" so many that rounds take little time. Equal on all workers."""

    def __init__(self, every: int | str) -> None:
        self._is_auto = isinstance(every, str)
        self.every = FIRST_ROUND if isinstance(every, str) else every
        self.next_every = self.every  # from the next batch on: all optimisers audit the same batches
        self._number = -1
        self.round_s = 0.0  # the time that this worker spent to compute shards again in the last round
        self.comparison_s = 0.0  # and to compare the replicas after it
        self._step_began_s = 0.0
        self._turn = 0  # which step of the batch it is: each optimiser takes one
        self._steps_s: dict[int, list[float]] = {}  # by turn: of the last steps without a round
        self._extra_s: dict[int, list[float]] = {}  # by turn: by which the last rounds made their steps longer

    def begin_step(self, number: int) -> None:
        self._turn = self._turn + 1 if number == self._number else 0
        if number != self._number:
            self._number, self.every = number, self.next_every
        self._step_began_s = time.perf_counter()

    def end_step(self, *, is_round: bool) -> None:
        """Called after the step, before the program continues: what it does then takes time as well."""
        if not self._is_auto:
            return
        took_s, steps_s = time.perf_counter() - self._step_began_s, self._steps_s.setdefault(self._turn, [])
        if not is_round:
            steps_s.append(took_s)
            del steps_s[:-FIRST_ROUND]
        elif steps_s:
            extra_s = self._extra_s.setdefault(self._turn, [])
            extra_s.append(max(took_s - _median(steps_s), 0.0))
            del extra_s[:-3]

    def wanted_every(self) -> int:
        """The number of steps between two rounds that this worker wants, from what the last rounds took; the largest of
        all workers counts."""
        steps_s, extra_s = (sum(map(_median, by_turn.values())) for by_turn in (self._steps_s, self._extra_s))
        if not self._is_auto or not self._steps_s:
            return self.next_every
        least_s = self.round_s + self.comparison_s
        cost_s = max(extra_s, least_s) if self._extra_s else FIRST_FACTOR * least_s
        return min(max(math.ceil(cost_s / (SHARE_OF_TIME * max(steps_s, 1e-6))), MIN_EVERY), MAX_EVERY)


def _median(values: Sequence[float]) -> float:
    """The median; of none 0, of two the smaller one, since the first round takes longer than others."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


# -- the audit of a step -----------------------------------------------------------------------------------------------


class ShardAudit:
    """The audits of one optimiser's steps."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        leaves: list[Leaf],
        *,
        schedule: AuditSchedule,
        fetch: Callable[[Batch, int], Shard],
    ) -> None:
        """
        modules  the modules whose outputs are compared, by name; none if the model is compiled, since a hook in a
                 compiled model changes what it computes
        leaves   the parameters whose gradients are compared
        fetch    loads a shard of another worker
        """
        self._modules, self._leaves, self._schedule, self._fetch = modules, leaves, schedule, fetch
        self._digests: Digests = []  # of the pass that is recorded now
        self._owned: dict[int, Digests] = {}  # of the shards of this worker that are audited
        self._recomputed: dict[int, Digests] = {}  # of the shards of other workers, by shard
        self._handles: list[Any] = []
        self._tasks: list[AuditTask] = []
        self._rank = 0
        self._found_nonfinite: bool | None = None  # in a shard that was computed again; None: it is not looked for
        self.is_round = False  # one shard of every worker is audited in this step

    def begin(self, batch: Batch, sum_: ShardSum, recompute: Recompute) -> None:
        """Compute the shards of other workers that this one audits. Called before the worker computes its own shards.

        `recompute` runs a shard forward, in the context that it is given, and backward. It changes nothing but `.grad`,
        and returns the loss.
        """
        self._schedule.begin_step(batch.number)
        self._rank = sum_.group.rank()
        self._tasks, self.is_round, self._owned, self._recomputed = [], False, {}, {}
        if not is_audited(batch.number, self._schedule.every):
            return
        counts = sum_.merge_counts(batch.counts)
        shares = [[shard for shard in share if counts[shard]] for share in sum_.shares]
        self._tasks = audit_tasks(batch.number, shares, self._schedule.every)
        self.is_round = is_round(batch.number, self._schedule.every) and all(shares)
        if self._tasks:
            began_s = time.perf_counter()
            self._recompute(batch, recompute)
            if self.is_round:
                self._schedule.round_s = time.perf_counter() - began_s

    def _recompute(self, batch: Batch, recompute: Recompute) -> None:
        for task in self._tasks:
            if task.auditor == self._rank:
                self._recomputed[task.shard] = self._record(self._fetch(batch, task.shard), recompute)

    def is_owned_task(self, shard: int) -> bool:
        """Whether another worker audits this shard, which this worker computes."""
        return any(task.shard == shard and task.owner == self._rank for task in self._tasks)

    def recording(self, shard: Shard) -> AbstractContextManager[None]:
        """Record the forward pass in this context, and its backward pass until `stop_recording`."""
        self.stop_recording()
        if not self.is_owned_task(shard.number):
            return nullcontext()
        self._owned[shard.number] = self._digests = [digest_of_samples(shard)]
        return self._hooks()

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Register hooks that record digests: on modules in this context, on parameters until `stop_recording`."""
        hooks = [m.register_forward_hook(self._output_hook(name, m)) for name, m in self._modules.items()]
        parameters: list[Any] = [leaf.parameter for leaf in self._leaves]
        names = [leaf.name for leaf in self._leaves]
        self._handles = [p.register_hook(self._gradient_hook(n)) for n, p in zip(names, parameters, strict=True)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _output_hook(self, name: str, module: nn.Module) -> Callable[..., None]:
        what = f"the output of {name or 'the model'} ({type(module).__name__})"

        def on_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
            with torch.no_grad():
                self._digests.append((what, sum(position_digests(find_tensors(output)))))

        return on_output

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def on_gradient(gradient: Tensor) -> None:
            with torch.no_grad():
                self._digests.append((f"the gradient of {name}", position_digests([gradient])[0]))

        return on_gradient

    def stop_recording(self) -> None:
        """Remove the hooks on parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _record(self, shard: Shard, recompute: Recompute) -> Digests:
        """Compute a shard, and return the digests. The gradients of parameters are left as they were."""
        self.stop_recording()
        if not shard.count:
            return []
        kept, before = [leaf.parameter.grad for leaf in self._leaves], self._digests
        for leaf in self._leaves:
            leaf.parameter.grad = None
        self._digests = [digest_of_samples(shard)]
        try:
            total = recompute(shard, self._hooks())
            if self._found_nonfinite is not None:
                gradients = [leaf.parameter.grad for leaf in self._leaves if leaf.parameter.grad is not None]
                values = [total, *(g.coalesce().values() if g.is_sparse else g for g in gradients)]
                # Or so large that a sum, a norm or a conversion to half precision may not be finite.
                self._found_nonfinite |= not all(bool((v.detach().abs() < LARGE).all()) for v in values)
            return self._digests
        finally:
            self.stop_recording()
            self._digests = before
            for leaf, gradient in zip(self._leaves, kept, strict=True):
                leaf.parameter.grad = gradient

    def compare(self, batch: Batch, sum_: ShardSum, recompute: Recompute) -> None:
        """Compare the digests. Called by all workers, before the step is applied.

        Raises DivergenceError on all workers if results differ; `wrong_ranks` says which are wrong, if that is known.
        """
        if not self._tasks:
            return
        self.stop_recording()
        row = [0] * (2 * len(self._tasks))
        for n, task in enumerate(self._tasks):
            if task.owner == self._rank:
                row[2 * n] = agreement.fingerprint(self._owned.get(task.shard, []))
            if task.auditor == self._rank:
                row[2 * n + 1] = agreement.fingerprint(self._recomputed[task.shard])
        rows = agreement.gather_rows(sum_.group, [*row, self._schedule.wanted_every()], device=sum_.device)
        for n, task in enumerate(self._tasks):
            first = rows[task.owner][2 * n], rows[task.auditor][2 * n + 1]
            if first[0] != first[1]:
                self._resolve(batch, task, sum_, recompute, first)
        if self.is_round:
            self._schedule.next_every = max(one[-1] for one in rows)

    def check_nonfinite(self, batch: Batch, sum_: ShardSum, recompute: Recompute) -> None:
        """Find out whether a faulty machine is the reason for a gradient that is not finite: compute every shard of the
        step again, on its own worker and on another. Called by all workers, before the step is applied.

        Raises DivergenceError on all workers if results differ, or if losses and gradients are finite now.
        """
        if not self._schedule.every or sum_.size == 1:
            return
        owners = [(rank, shard) for rank, share in enumerate(sum_.shares) for shard in share]
        self._tasks = [AuditTask(shard, rank, (rank + 1) % sum_.size) for rank, shard in owners]
        self._owned, self._recomputed, self._found_nonfinite = {}, {}, False
        for shard in sum_.shares[self._rank]:
            self._owned[shard] = self._record(self._fetch(batch, shard), recompute)
        self._recompute(batch, recompute)
        self.compare(batch, sum_, recompute)
        found = agreement.gather_rows(sum_.group, [int(self._found_nonfinite)], device=sum_.device)
        self._found_nonfinite = None
        if not any(count for (count,) in found):
            raise DivergenceError(
                f"step {batch.number}: a loss or gradient was not finite, and when all workers computed the step "
                "again, it was. A faulty machine, but it cannot be told which",
                [],
            )

    def _resolve(
        self, batch: Batch, task: AuditTask, sum_: ShardSum, recompute: Recompute, first: tuple[int, int]
    ) -> None:
        """Let all workers compute the shard once more, and raise the error that names those that are wrong."""
        mine = [self._owned.get(task.shard, []), self._recomputed.get(task.shard, [])]
        told = agreement.gather_values(sum_.group, mine, device=sum_.device)
        again = agreement.fingerprint(self._record(self._fetch(batch, task.shard), recompute))
        results = [result for (result,) in agreement.gather_rows(sum_.group, [again], device=sum_.device)]
        wrong = judge({task.owner: first[0], task.auditor: first[1]} if task.owner != task.auditor else {}, results)
        what = first_difference(told[task.owner][0], told[task.auditor][1])
        if what == SAMPLES:
            raise DivergenceError(
                f"step {batch.number}, shard {task.shard}: rank {task.owner} computed it, and rank {task.auditor} "
                "loaded other samples for it. Samples must be the same whenever they are loaded: change them in the "
                "dataset, in collate_fn or in the loss function, not in the loop, and draw random numbers from torch, "
                "numpy or random"
            )
        found = (
            f"step {batch.number}, shard {task.shard}: rank {task.owner} computed it, rank {task.auditor} computed it "
            f"again from the same weights, samples and random numbers, and {what} is the first that differs. "
        )
        if wrong is None and sum_.size > 1:
            failed = agreement.gather_rows(sum_.group, [count_wrong_answers(sum_.device)], device=sum_.device)
            if faulty := [rank for rank, (count,) in enumerate(failed) if count]:
                named = ", ".join(map(str, faulty))
                raise DivergenceError(f"{found}Rank {named} fails a test with known answers: a faulty machine", faulty)
        if wrong is None and first == (results[task.owner], results[task.auditor]) and sum_.size > 1:
            raise DivergenceError(
                f"{found}Both get their own result again: one of them is a faulty machine, and it cannot be told "
                "which; with three or more workers it could",
                [],
            )
        if wrong is None:
            raise DivergenceError(
                f"{found}It does not repeat: an operation without a fixed order, random numbers from a source of its "
                "own, state outside the model, or a faulty machine"
            )
        named, agree = ", ".join(map(str, wrong)), sum_.size - len(wrong)
        raise DivergenceError(
            f"{found}All workers computed it once more, and {agree} of {sum_.size} agree: rank {named} is wrong. A "
            "faulty machine; or random numbers or state that only this worker has",
            wrong,
        )


def digest_of_samples(shard: Shard) -> tuple[str, int]:
    with torch.no_grad():
        return SAMPLES, sum(position_digests(find_tensors(shard.data)))


def first_difference(first: Sequence[Sequence[Any]], second: Sequence[Sequence[Any]]) -> str:
    """Describe the first output or gradient that differs between two records."""
    end = ["nothing more", 0]
    for a, b in zip_longest(first, second, fillvalue=end):
        if list(a) != list(b):
            return str(a[0]) if a[0] == b[0] else f"{a[0]} (in its place came {b[0]})"
    raise AssertionError("the records are equal")
