"""Predicts the peak memory of a worker by kind, from the peaks of short runs. Pure functions.

The peak beyond weights, gradients, buckets and optimiser state is a constant (libraries, and what the program itself
keeps) and activations, which grow with the samples of a shard: a line through the peaks of two sizes. A worker with
several shards adds their gradients along a tree, and keeps one more sum for every doubling of its shards. CUDA graphs
keep gradients of their own; where they do not fit, `Run` goes on without them. What sums over shm need beyond that is
measured with two workers; on a CPU every further worker adds its gradients, which are in shared memory. Sums of
integers keep the gradients of all shards and codes of them instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from lockstep.plan.configuration import FP32, INT4, INT8, Configuration, configuration_of
from lockstep.plan.profile import ProbeResult
from lockstep.plan.sum_cost import rows_per_worker

CAPTURED_AT_ONCE = 4  # shards that a GPU replays at the same time (step/shard_graphs.py)
# Measured on a CPU, in sizes of the gradients (campaigns/plan_accuracy.py):
INT_SUM_BUFFERS = 2.5  # of a sum of integers
TREE_SUM_BUFFERS = 3.5  # of a sum along the tree over Gloo, one row for each worker; while buckets are packed again
MOST_SHM_BUFFERS, MOST_SHM_BYTES = 3.5, 12 * 2**20  # of a sum over shm, with the memory of the group itself
# Buffers of the exchange of new weights between hosts of one worker, and of several, in sizes of what is sent at once.
EXCHANGE_BUFFERS, EXCHANGE_BUFFERS_BY_HOST, EXCHANGED_BYTES = 1.5, 5.0, 50 * 2**20


@dataclass(frozen=True)
class MemoryForecast:
    by_kind: dict[str, float]  # bytes of weights, gradients, buckets, optimizer, activations, graphs and rest
    computed: tuple[str, ...]  # what was computed and not measured

    @property
    def total_bytes(self) -> float:
        return sum(self.by_kind.values())

    @property
    def needed_bytes(self) -> float:
        """Without CUDA graphs, which a run can do without."""
        return self.total_bytes - self.by_kind["graphs"]

    @property
    def largest_kind(self) -> str:
        """The largest part of what is needed."""
        return max((kind for kind in self.by_kind if kind != "graphs"), key=lambda kind: self.by_kind[kind])


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of one worker. `by_sample` is the slope of activations, 0 if only one size was measured."""

    weights: float
    gradients: float
    optimizer: float
    rest: float
    by_sample: float
    by_shard: float  # for each of `_kept`
    measured_samples: tuple[float, ...]
    shm_bytes: float = 0.0  # with two workers over shm
    on_gpu: bool = False
    captures: bool = False  # shards are CUDA graphs, which keep the memory of their activations

    def predict(self, config: Configuration) -> MemoryForecast:
        parts, size = {"weights": self.weights, "gradients": self.gradients}, config.workers
        parts["buckets"] = self._buckets(config) + self._exchange(config)
        share = min(1.0, (1 + config.redundancy) / size) if config.shard_optimizer else 1.0
        parts["optimizer"] = self.optimizer * share
        parts["activations"] = self.by_sample * config.samples_per_shard
        is_rounded = config.grad_comm in (INT8, INT4)
        parts["rest"] = self.rest
        if self.on_gpu or not is_rounded:
            parts["rest"] += self.by_shard * _kept(config.shards_per_worker, captures=self.captures)
        parts["graphs"] = 0.0
        if self.captures:
            more = config.shards_per_worker - 1 if is_rounded else math.log2(config.shards_per_worker)
            without = max(0.0, self.rest - self.gradients) + more * self.gradients
            parts["graphs"] = max(0.0, parts["rest"] - without)
            parts["rest"] = without
        known = self.measured_samples
        computed = [] if len(known) > 1 else ["activations of another batch"]
        if not known[0] / 4 <= config.samples_per_shard <= 4 * known[-1]:
            computed.append("activations far from the measured sizes")
        return MemoryForecast(parts, tuple(dict.fromkeys(computed)))

    def _buckets(self, config: Configuration) -> float:
        """Memory of the buckets without the part in which the gradients of parameters are (comm/shard_sum.py)."""
        uses_shm = config.backend == "shm" and config.workers_per_host > 1
        if config.grad_comm in (INT8, INT4):
            if self.on_gpu:  # gradients of several shards are memory of their graphs, if there are some
                rows = 0 if self.captures else config.shards_per_worker - 1
                return (rows + 1) * self.gradients + self.shm_bytes * uses_shm
            return (config.shards_per_worker - 1 + INT_SUM_BUFFERS) * self.gradients
        if config.workers == 1:
            return 0.0
        tree_rows = rows_per_worker(config.shards, config.workers)
        if uses_shm and tree_rows == 1:
            return self.shm_bytes + (0.0 if self.on_gpu else (config.workers_per_host - 2) * self.gradients)
        by_backend = config.workers == 2 or config.sums_by_host
        if by_backend and tree_rows == 1:
            return 0.0
        more = 0.0 if self.on_gpu or uses_shm else TREE_SUM_BUFFERS - 2
        return (2 * tree_rows + more) * self.gradients + self.shm_bytes * uses_shm

    def _exchange(self, config: Configuration) -> float:
        """Memory of the exchange of new weights, if the optimiser's state is distributed over hosts."""
        if not config.shard_optimizer or config.hosts == 1 or self.on_gpu:
            return 0.0
        buffers = EXCHANGE_BUFFERS if config.workers_per_host == 1 else EXCHANGE_BUFFERS_BY_HOST
        return buffers * min(self.weights, EXCHANGED_BYTES)


def _kept(shards: int, *, captures: bool) -> float:
    """What a worker with several shards keeps beside the first: graphs of up to four, else sums of the tree."""
    return min(shards, CAPTURED_AT_ONCE) - 1 if captures else math.log2(shards)


def fit_memory(probes: Sequence[ProbeResult]) -> MemoryModel:
    """Fit the model from runs of one program; those with the fewest workers and a shard each say most."""
    least = min(one.workers for one in probes)
    plain = [one for one in probes if one.workers == least and one.grad_comm == FP32 and not one.shard_optimizer]
    single = [one for one in plain if one.shards == one.workers] or plain
    peaks: dict[float, list[float]] = {}
    for one in single:
        kinds = sum(one.memory_bytes[kind] for kind in ("weights", "gradients", "buckets", "optimizer"))
        peaks.setdefault(one.samples_per_shard, []).append(max(0.0, one.memory_bytes["peak"] - kinds))
    sizes = sorted((size, median(values)) for size, values in peaks.items())
    by_sample = 0.0
    if len(sizes) > 1:
        (x0, y0), (x1, y1) = sizes[0], sizes[-1]
        by_sample = max(0.0, (y1 - y0) / (x1 - x0))
    base = single[0].memory_bytes
    rest = median([max(0.0, value - by_sample * size) for size, value in sizes])
    more = []
    for one in plain:
        count = one.shards // one.workers
        if count > 1 and len(sizes) > 1:
            kinds = sum(one.memory_bytes[kind] for kind in ("weights", "gradients", "buckets", "optimizer"))
            extra = one.memory_bytes["peak"] - kinds - rest - by_sample * one.samples_per_shard
            more.append(max(0.0, extra) / _kept(count, captures=base["graphs"] > 0))
    model = MemoryModel(
        weights=base["weights"],
        gradients=base["gradients"],
        optimizer=max(one.memory_bytes["optimizer"] for one in plain),
        rest=rest,
        by_sample=by_sample,
        by_shard=median(more) if more else 0.0,
        measured_samples=tuple(size for size, _ in sizes),
        on_gpu=single[0].device == "cuda",
        captures=base["graphs"] > 0,
    )
    pairs = [
        one
        for one in probes
        if one.workers > least and (one.hosts, one.backend) == (1, "shm")
        if one.grad_comm == FP32 and not one.shard_optimizer
    ]
    if least > 1:  # what sums of these workers need is a part of `rest` already
        return replace(model, rest=max(0.0, rest + base["buckets"] - model._buckets(configuration_of(single[0]))))
    if not pairs:
        return model
    pair = min(pairs, key=lambda one: one.workers)
    extra = pair.memory_bytes["peak"] - model.predict(configuration_of(pair)).total_bytes
    most = math.inf if model.on_gpu else MOST_SHM_BUFFERS * model.gradients + MOST_SHM_BYTES  # the rest is chance
    return replace(model, shm_bytes=min(max(0.0, extra), most))
