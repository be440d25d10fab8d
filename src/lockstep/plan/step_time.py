"""Predicts how long a step takes, from what was measured of a program. Pure functions; all times are in seconds.

Note [Model of a step]
A worker computes its shards one after the other. Buckets of gradients become ready during the backward pass of its last
shard and are summed one after the other. What is left of the sums when the backward pass ends is exposed. Then the
optimiser updates the weights.

A host has so many slots (cores or GPUs), which its workers share if they are more. A sum takes CPU time, too: for how
much of its time a worker's CPU is busy with it is measured, and where a core is shared with a backward pass, both are
slowed down (`overlap`). All workers compute at once, which slows each of them down even on a core of its own, since
they share the memory: this factor is the one that explains the measured step of two workers.

A step ends when the slowest worker is done. How the shards of a worker differ from each other was measured; the median
of the largest of N such values is a quantile of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist, median
from typing import Final

from lockstep.plan.configuration import FP32, Configuration, configuration_of
from lockstep.plan.profile import MIB, BucketTiming, ProbeResult, ProgramProfile
from lockstep.plan.sum_cost import overlap, sum_costs

Curve = tuple[tuple[float, float], ...]  # (argument, value), ascending
FIRST_BUCKET_BYTES: Final = MIB
FIRST_WEIGHTS: Final = 0.3  # share of the exchange of weights before a forward pass can begin, or that it waits for
SMALLEST: Final = 0.3  # share of the time of the smallest measured shard that any smaller one takes
NOISE: Final = 0.04  # of a step between two runs, at least; relative standard deviation
UNMEASURED_SD: Final = 0.20  # relative standard deviation of parts that were not measured, but computed from a formula
SHARED_UPDATE: Final = 0.3  # exponent with which updates of workers that share a GPU grow with their number
DRIFT_FREE: Final = 16  # workers up to which the measured distribution of steps says how slow the slowest is


@dataclass(frozen=True)
class StepForecast:
    """A predicted step. `parts_s` add up to `mid_s`; `low_s` to `high_s` is the 90 % interval."""

    mid_s: float
    low_s: float
    high_s: float
    parts_s: dict[str, float]
    computed: tuple[str, ...]  # what was computed from a formula, and not measured


# ---- the step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComputeModel:
    """How long a step of one worker alone takes, without the update.

    shard       samples of a shard, and seconds of its forward and backward; ascending
    rest        samples of the worker, and seconds of everything else in a step with one shard; ascending
    more_s      what each further shard costs beyond its own forward and backward: its gradients are added
    device      samples of the worker, and the seconds in which its device is busy with one shard; ascending
    device_more_s  what each further shard adds to that
    """

    shard: Curve
    rest: Curve
    more_s: float
    device: Curve
    device_more_s: float
    update_s: float
    backward_share: float
    spread: tuple[float, ...]  # shards over their median, ascending

    def step_s(self, samples: float, shards: int) -> float:
        """A step without the update, of a worker that has so many samples in so many shards."""
        each_s = interpolate(self.shard, samples / shards)
        return interpolate(self.rest, samples) + shards * each_s + (shards - 1) * self.more_s

    def device_s(self, samples: float, shards: int) -> float:
        """How long the device of that worker computes in a step."""
        return interpolate(self.device, samples) + (shards - 1) * self.device_more_s

    def covers(self, samples: float) -> bool:
        return self.rest[0][0] / 2 <= samples <= 2 * self.rest[-1][0]


def interpolate(curve: Curve, at: float) -> float:
    """Interpolate between points; beyond them the nearest two are continued as a line, to not less than SMALLEST."""
    if len(curve) == 1:
        return curve[0][1] * (0.1 + 0.9 * at / curve[0][0])
    above = next((n for n, (size, _) in enumerate(curve) if at <= size), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[max(0, above - 1)], curve[max(1, above)]
    return max(y0 + (at - x0) * (y1 - y0) / (x1 - x0), SMALLEST * curve[0][1])


def fit_compute(probes: Sequence[ProbeResult]) -> ComputeModel:
    """Fit the times of one worker from the runs with the fewest workers."""
    least = min(one.workers for one in probes)
    alone = [one for one in probes if one.workers == least and one.grad_comm == FP32 and not one.shard_optimizer]
    fewest = min(one.shards for one in alone)
    single = [one for one in alone if one.shards == fewest]
    update_s = median([median(one.update_s) for one in alone])
    several = [one for one in alone if one.shards >= fewest + one.workers]
    sizes = [(one.samples_per_shard, median(one.first_shard_s)) for one in single]
    smaller = [one for one in several if one.later_shard_s and one.samples_per_shard < min(sizes)[0]]
    shard = _curve([*sizes, *((one.samples_per_shard, median(one.later_shard_s)) for one in smaller)])
    rest = _curve(
        (one.global_batch_size / one.workers, one.step_s - update_s - median(one.first_shard_s)) for one in single
    )
    device = _curve((one.global_batch_size / one.workers, _device_s(one)) for one in single)
    fitted = ComputeModel(
        shard=shard,
        rest=rest,
        more_s=0.0,
        device=device,
        device_more_s=0.0,
        update_s=update_s,
        backward_share=single[0].backward_share,
        spread=_spread(alone),
    )
    more, device_more = [], []
    for one in several:
        samples, count = one.global_batch_size / one.workers, one.shards // one.workers
        more.append((one.step_s - update_s - fitted.step_s(samples, count)) / (count - 1))
        device_more.append((_device_s(one) - fitted.device_s(samples, count)) / (count - 1))
    more_s, device_more_s = (max(0.0, median(values)) if values else 0.0 for values in (more, device_more))
    return replace(fitted, more_s=more_s, device_more_s=device_more_s)


def _device_s(probe: ProbeResult) -> float:
    """The time in a step in which a worker computes its shards."""
    later = (probe.shards / probe.workers - 1) * median(probe.later_shard_s) if probe.later_shard_s else 0.0
    return median(probe.first_shard_s) + later + median(probe.wait_s)


def _curve(points: Iterable[tuple[float, float]]) -> Curve:
    found: dict[float, list[float]] = {}
    for at, value in points:
        found.setdefault(at, []).append(value)
    return tuple(sorted((at, median(values)) for at, values in found.items()))


def _spread(probes: Sequence[ProbeResult]) -> tuple[float, ...]:
    found = []
    for one in probes:
        middle = median(one.first_shard_s)
        found += [seconds / middle for seconds in one.first_shard_s if middle > 0]
    return tuple(sorted(found)) or (1.0,)


def slowest_of(spread: Sequence[float], workers: int) -> float:
    """The median of the largest of `workers` values that are distributed like `spread`, ascending.

    Beyond what so few values can say, a normal distribution with their middle half continues them.
    """
    share: float = 0.5 ** (1 / workers)
    at = share * len(spread) - 0.5
    if at <= len(spread) - 1:
        low = max(0, math.floor(at))
        return spread[low] + max(0.0, at - low) * (spread[min(low + 1, len(spread) - 1)] - spread[low])
    quarter, three = spread[len(spread) // 4], spread[3 * len(spread) // 4]
    return max(spread[-1], 1.0 + (three - quarter) / 1.349 * NormalDist().inv_cdf(share))


@dataclass(frozen=True)
class StepModel:
    """Predicts steps of a program."""

    profile: ProgramProfile

    @cached_property
    def compute(self) -> ComputeModel:
        return fit_compute(self.profile.probes)

    @cached_property
    def pair(self) -> ProbeResult | None:
        """A plain run on two workers or more of one host, from which the factors of shared memory are taken."""
        several = [one for one in self.profile.probes if one.workers > 1 and one.hosts == 1]
        plain = [one for one in several if one.grad_comm == FP32 and not one.shard_optimizer]
        return min(plain, key=lambda one: (one.shards // one.workers, one.workers)) if plain else None

    @cached_property
    def factors(self) -> tuple[float, float]:
        """How much longer a worker takes for its step, and to update, if all slots of its host are busy."""
        pair = self.pair
        if pair is None:
            return 1.0, 1.0
        config = configuration_of(pair)
        cores = max(1.0, config.workers / config.slots) if self._on_cpu else 1.0
        update = median(pair.update_s) / (self.compute.update_s * cores)
        rest_s = pair.step_s - median(pair.update_s)
        factor = 1.0
        for _ in range(8):  # what is hidden depends on the factor, a little
            exchanged = self._compute_and_exchange(config, factor * cores)
            waits_s = (self._slowness(config) - 1) * exchanged.compute_s
            factor *= rest_s / (exchanged.compute_s + exchanged.exposed_s + waits_s)
        return max(0.1, factor), max(0.1, update)

    @property
    def _on_cpu(self) -> bool:
        return self.profile.device == "cpu"

    @cached_property
    def gather(self) -> tuple[float, int]:
        """How long the exchange of new weights took in a run with a sharded optimiser, and on how many workers."""
        sharded = [one for one in self.profile.probes if one.shard_optimizer and one.workers > 1]
        if not sharded:
            return 0.0, 0
        probe = min(sharded, key=lambda one: one.workers)
        config = replace(configuration_of(probe), shard_optimizer=False)
        exchanged = self._compute_and_exchange(config, self._busy_factors(config)[0])
        update_s = self.compute.update_s * self._busy_factors(config)[1] / probe.workers
        waits_s = (self._slowness(config) - 1) * exchanged.compute_s
        return max(0.0, probe.step_s - exchanged.compute_s - exchanged.exposed_s - waits_s - update_s), probe.workers

    def _slowness(self, config: Configuration) -> float:
        """How much longer the slowest worker takes than a typical one."""
        spread = self.compute.spread
        return slowest_of(spread, config.workers) / slowest_of(spread, 1) if config.workers > 1 else 1.0

    def buckets(self, config: Configuration) -> list[BucketTiming]:
        """The buckets of the program, or evenly cut ones if they were not measured or others are asked for."""
        known = [p.buckets for p in self.profile.probes if p.buckets and p.grad_comm == FP32]
        total = self.profile.gradient_bytes
        if known and config.bucket_mib is None:
            measured = sum(one.size_bytes for one in known[0])
            if measured < 1.5 * total or total == 0:  # rows of several subtrees are counted several times
                return list(known[0])
        limit = (config.bucket_mib or 25.0) * MIB
        sizes, left = list[float](), total
        while left > 0:
            size = min(left, FIRST_BUCKET_BYTES if not sizes else limit)
            sizes.append(size)
            left -= size
        done, found = 0.0, []
        for size in sizes:
            done += size
            found.append(BucketTiming(int(size), done / total))
        return found

    def predict(self, config: Configuration) -> StepForecast:
        parts, computed = self._parts(config)
        mid_s = sum(parts.values())
        spread = self._relative_error(config, parts, mid_s, computed)
        low_s, high_s = mid_s * math.exp(-1.645 * spread), mid_s * math.exp(1.645 * spread)
        return StepForecast(mid_s, low_s, high_s, parts, computed)

    def _parts(self, config: Configuration) -> tuple[dict[str, float], tuple[str, ...]]:
        compute, computed = self.compute, []
        busy = self._busy_factors(config)
        exchanged = self._compute_and_exchange(config, busy[0])
        if not sum_costs(self.profile, config).is_measured:
            computed.append("sums of gradients")
        if not compute.covers(config.global_batch_size / config.workers):
            computed.append("compute time of another batch size")
        update_s, gather_s = compute.update_s * busy[1], 0.0
        if config.shard_optimizer and config.workers > 1:
            update_s *= min(1.0, (1 + config.redundancy) / config.workers)
            gather_s = self._gather_s(config)
            if config.hosts > 1 and self._on_cpu:  # it runs during the next forward pass
                shard_s = interpolate(compute.shard, config.samples_per_shard) * busy[0]
                forward_s = config.shards_per_worker * shard_s * (1 - compute.backward_share)
                gather_s = max(FIRST_WEIGHTS * gather_s, gather_s - forward_s)
            if not self.gather[1]:
                computed.append("exchange of weights")
        parts = {
            "forward and backward": exchanged.compute_s,
            "exposed communication": exchanged.exposed_s + gather_s,
            "waiting for the slowest": (self._slowness(config) - 1) * exchanged.compute_s,
            "update": update_s,
        }
        return parts, tuple(computed)

    def _busy_factors(self, config: Configuration) -> tuple[float, float]:
        """How much longer a worker computes, and updates, than one that has its host for itself."""
        together = config.workers_per_host * (config.hosts if config.hosts_are_virtual else 1)
        if together == 1 or self.pair is None:
            return (config.sharing, config.sharing) if self._on_cpu else (1.0, 1.0)
        compute, update = self.factors
        pair = configuration_of(self.pair)
        if self._on_cpu:
            share = min(1.0, (min(together, config.slots) - 1) / max(1, min(pair.workers, pair.slots) - 1))
            share = 1.0 if config.slots == 1 else share
            return (1 + (compute - 1) * share) * config.sharing, (1 + (update - 1) * share) * config.sharing
        if together <= config.slots or pair.workers <= pair.slots:
            return (compute, update) if pair.workers <= pair.slots else (1.0, 1.0)
        more = together / config.slots / (pair.workers / pair.slots)
        return compute, update * more**SHARED_UPDATE

    def _compute_and_exchange(self, config: Configuration, busy: float) -> _Exchanged:
        compute, count = self.compute, config.shards_per_worker
        samples = count * config.samples_per_shard
        if self._on_cpu or config.workers_per_host <= config.slots:
            whole_s = compute.step_s(samples, count) * busy
        else:  # while one worker loads data or launches kernels, the GPU computes for another
            whole_s = compute.device_s(samples, count) * config.sharing * busy
        if config.workers == 1:
            return _Exchanged(whole_s, 0.0)
        shard_s = interpolate(compute.shard, config.samples_per_shard) * busy
        backward_s = min(whole_s, shard_s * compute.backward_share)
        costs = sum_costs(self.profile, config)
        queue = [(one.ready, costs.at(one.size_bytes)) for one in self.buckets(config)]
        cores = config.slots / config.workers_per_host if self._on_cpu else math.inf
        found = overlap(backward_s, queue, cores=cores)
        return _Exchanged(whole_s - backward_s + found.backward_s, found.exposed_s + costs.at(256).seconds)

    def _gather_s(self, config: Configuration) -> float:
        """The exchange of new weights: as measured, or from an all-reduce, if nothing is computed meanwhile."""
        plain, total = replace(config, grad_comm=FP32, shard_optimizer=False), self.profile.base.memory_bytes["weights"]
        cost_s = sum_costs(self.profile, plain).at(total).seconds
        measured_s, workers = self.gather
        # Between hosts the parts are gathered, as in the second half of an all-reduce; within one they are broadcast.
        share = 0.55 if config.hosts > 1 else 0.7
        if not workers:
            return share * cost_s
        probe = next(one for one in self.profile.probes if one.shard_optimizer and one.workers == workers)
        there = sum_costs(self.profile, replace(configuration_of(probe), grad_comm=FP32, shard_optimizer=False))
        there_s = there.at(total).seconds
        return measured_s + share * max(0.0, cost_s - there_s)

    def _relative_error(
        self, config: Configuration, parts: dict[str, float], mid_s: float, computed: Sequence[str]
    ) -> float:
        """The relative standard deviation of the prediction."""
        noise = max(NOISE, self.profile.run_noise, _noise_of(self.profile.probes))
        exposed = parts["exposed communication"] / mid_s if mid_s else 0.0
        unknown = 0.05 + exposed * UNMEASURED_SD if "sums of gradients" in computed else 0.1 * exposed
        if "compute time of another batch size" in computed:
            unknown += 0.1
        if not self._on_cpu and config.workers_per_host > config.slots:
            unknown += 0.05 * math.log2(config.workers_per_host / config.slots)
        if config.workers > 1 and self.pair is None:
            unknown += 0.1
        if config.workers > DRIFT_FREE:
            unknown += 0.02 * math.log2(config.workers / DRIFT_FREE)
        if self._on_cpu and config.sharing > 1:
            unknown += 0.04
        return math.hypot(noise, unknown)


@dataclass(frozen=True)
class _Exchanged:
    compute_s: float
    exposed_s: float


def _noise_of(probes: Sequence[ProbeResult]) -> float:
    """How much the median of a run's steps is off, judged by its halves: a relative standard deviation.

    Where runs were repeated it is 0, and `run_noise` says more.
    """
    found = []
    for one in probes:
        half = len(one.period_s) // 2
        if half >= 3:
            a, b = median(one.period_s[:half]), median(one.period_s[half:])
            found.append(abs(math.log(a / b)) / math.sqrt(2))
    return median(found) if found else 0.0
