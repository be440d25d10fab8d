"""How long sums of gradients take in a configuration, and how much of them a backward pass hides. Pure functions.

Where sums between the same workers were measured, those are used. Otherwise the time on the wire follows from the link,
and the CPU time from the measurement that is most like it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from lockstep.comm.integer_codec import BLOCK, IntegerCodec
from lockstep.comm.tree_order import subtrees
from lockstep.plan import collective_cost
from lockstep.plan.configuration import FP32, HALF, INT4, INT8, Configuration
from lockstep.plan.links import Link
from lockstep.plan.profile import MIB, MeasuredSums, ProgramProfile, SumPoint

ASSUMED_INSIDE: Final = Link("assumed", 3e-4, 3e9, "assumed")  # between workers of a host, if nothing was measured
WIRE_OVERHEAD: Final = 1.05  # bytes on a network over bytes of the message: headers and acknowledgements
ENCODE_SHARE: Final = 0.4  # of the CPU time that each byte of a sum of integers takes: rounding it, for one shard
# How time on the wire and CPU time combine. 1: no overlap, both times add; infinite: full overlap, the longer counts.
WIRE_CPU_NORM: Final = 1.25


# ---- overlap of sums and the backward pass ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    backward_s: float  # how long the backward pass takes
    exposed_s: float  # how much longer the sums take


def overlap(backward_s: float, buckets: Sequence[tuple[float, SumPoint]], *, cores: float) -> Overlap:
    """Simulate a backward pass with sums behind it.

    backward_s  how long it takes without sums
    buckets     for each bucket the share of the backward pass after which it is ready, and its sum
    cores       how many cores a worker has for both: 1 or less if every core has a worker; infinite: no limit
    """
    at = progress = 0.0
    waiting = sorted(buckets, key=lambda one: one[0])
    queue: list[SumPoint] = []
    left_s = 0.0  # of the sum that is running
    while progress < 1.0:
        while waiting and waiting[0][0] <= progress + 1e-12:
            queue.append(waiting.pop(0)[1])
        if left_s <= 0 and queue:
            running = queue.pop(0)
            left_s, busy = running.seconds, running.cpu_s / running.seconds if running.seconds > 0 else 0.0
        to_ready = ((waiting[0][0] if waiting else 1.0) - progress) * backward_s
        if left_s <= 0:
            progress, at = (waiting[0][0] if waiting else 1.0), at + to_ready
            continue
        # The scheduler gives a thread that needs less than its fair share all it needs.
        share = min(busy, max(cores / 2, cores - 1))
        compute_rate, sum_rate = min(1.0, cores - share), share / busy if busy > 0 else 1.0
        alone_rate = min(1.0, cores)
        step_s = min(to_ready / (compute_rate / alone_rate), left_s / sum_rate)
        at, left_s = at + step_s, left_s - step_s * sum_rate
        progress = min(1.0, progress + step_s * compute_rate / alone_rate / backward_s) if backward_s > 0 else 1.0
        left_s = 0.0 if left_s < 1e-12 else left_s
    rest_s = left_s + sum(one.seconds for one in queue) + sum(one.seconds for _, one in waiting)
    return Overlap(at, rest_s)


# ---- sums ------------------------------------------------------------------------------------------------------------


def wire_bytes(size_bytes: float, config: Configuration) -> float:
    """The bytes that leave each host for the sum of a gradient of `size_bytes`, without headers."""
    hosts, workers, per_host = config.hosts, config.workers, config.workers_per_host
    share = (hosts - 1) / hosts
    if config.grad_comm in (INT8, INT4):
        codec, numel = IntegerCodec(8 if config.grad_comm == INT8 else 4), size_bytes / 4
        bits = codec.sum_bits(-(-config.shards // hosts)) + codec.result_bits
        return share * numel * bits / 8 + 2 * numel / BLOCK
    is_ring = config.backend == "ring"  # what other libraries do: it passes through each host once
    if is_ring or config.sums_by_host or workers == 2:
        sent = collective_cost.sent_bytes_per_host(size_bytes, hosts, per_host, hierarchical=not is_ring)
    else:  # all workers exchange sections with all others
        sent = 2 * per_host * (workers - per_host) / workers * size_bytes
    widened = config.sums_by_host and per_host > 1  # rows of a host are added as float32
    return sent * (0.5 if config.grad_comm in HALF and not widened else 1.0)


@dataclass(frozen=True)
class SumCosts:
    """How long sums of gradients take in a configuration, and how that is known."""

    at: Callable[[float], SumPoint]
    is_measured: bool


def sum_costs(profile: ProgramProfile, config: Configuration) -> SumCosts:
    """Find measured sums for the configuration, or compute them from the link and what was measured elsewhere."""
    if config.workers == 1:
        return SumCosts(lambda size: SumPoint(size, 0.0, 0.0), True)
    exact = _find(profile, config)
    if config.grad_comm in (INT8, INT4):
        costs = _computed_costs(profile, config, 1.0) if exact is None else _with_more_bits(exact, config)
        return SumCosts(_rounded_by_shard(costs, config) if profile.device == "cpu" else costs, exact is not None)
    is_sharded = config.shard_optimizer and config.hosts > 1 and profile.device == "cpu"
    scatters = is_sharded and config.grad_comm in (FP32, *HALF)
    factor = (rows_per_worker(config.shards, config.workers) + (not scatters)) / 2  # a reduce-scatter sends no results
    if exact is not None:
        return SumCosts(lambda size: _scale(exact.at(size), factor), True)
    return SumCosts(_computed_costs(profile, config, factor), False)


def _computed_costs(profile: ProgramProfile, config: Configuration, factor: float) -> Callable[[float], SumPoint]:
    """The costs of sums that were not measured. `factor`: how often the gradients are sent."""
    local = _local_costs(profile, config)

    def at(size_bytes: float) -> SumPoint:
        here = local(size_bytes)
        if config.hosts == 1 and config.inside is None:
            return SumPoint(size_bytes, here.seconds * factor, here.cpu_s * factor)
        inside_s = 0.0
        if config.inside is not None:
            inside_s = collective_cost.ring_all_reduce(size_bytes, config.workers_per_host, config.inside) * factor
        wire_s = _between_hosts_s(size_bytes * factor, config)
        busy_s = here.cpu_s * config.sharing * factor
        seconds = float(((wire_s + inside_s) ** WIRE_CPU_NORM + busy_s**WIRE_CPU_NORM) ** (1 / WIRE_CPU_NORM))
        return SumPoint(size_bytes, seconds, min(here.cpu_s * factor, seconds))

    return at


def _with_more_bits(measured: MeasuredSums, config: Configuration) -> Callable[[float], SumPoint]:
    """The costs of sums of integers, measured with one shard per worker: the sum of more shards has more bits."""
    bits = (
        wire_bytes(MIB, config) / wire_bytes(MIB, replace(config, shards=config.workers)) if config.hosts > 1 else 1.0
    )

    def at(size_bytes: float) -> SumPoint:
        found = measured.at(size_bytes)
        return replace(found, seconds=found.seconds + (bits - 1) * max(0.0, found.seconds - found.cpu_s))

    return at


def _rounded_by_shard(costs: Callable[[float], SumPoint], config: Configuration) -> Callable[[float], SumPoint]:
    """Add the time in which a worker rounds the gradients of its other shards to integers, each for itself."""

    def at(size_bytes: float) -> SumPoint:
        found, twice = costs(size_bytes), costs(2 * size_bytes)
        encode_s = (config.shards_per_worker - 1) * ENCODE_SHARE * max(0.0, twice.cpu_s - found.cpu_s)
        return SumPoint(size_bytes, found.seconds + encode_s * config.sharing, found.cpu_s + encode_s)

    return at


def _between_hosts_s(size_bytes: float, config: Configuration) -> float:
    if config.hosts == 1 or config.link is None:
        return 0.0
    if config.backend == "tree":
        return collective_cost.tree_all_reduce(size_bytes, config.hosts, config.link)
    # Libraries change to trees for many hosts, so that the latency does not grow with their number for ever.
    steps = min(2 * (config.hosts - 1), 2 * math.ceil(math.log2(config.hosts)) + 62)
    sent = wire_bytes(size_bytes, config)
    return WIRE_OVERHEAD * sent / config.link.bytes_per_s + steps * config.link.latency_s


def rows_per_worker(shards: int, workers: int) -> float:
    """How many subtrees a worker has to send, on average (comm/tree_order.py, Note [Subtrees])."""
    if workers >= shards or (shards % workers == 0 and (shards // workers).bit_count() == 1):
        return 1.0
    base, more = divmod(shards, workers)
    starts = [0]
    for rank in range(workers):
        starts.append(starts[-1] + base + (rank < more))
    return sum(len(subtrees(a, b, shards)) for a, b in pairwise(starts)) / workers


def _find(profile: ProgramProfile, config: Configuration) -> MeasuredSums | None:
    """Sums that were measured between the same workers over the same link."""
    for one in profile.sums:
        same = (one.backend, one.hosts, one.workers_per_host) == (config.backend, config.hosts, config.workers_per_host)
        if same and (one.grad_comm, one.device) == (config.grad_comm, profile.device) and _same_link(one, config):
            return one
    return None


def _same_link(sums: MeasuredSums, config: Configuration) -> bool:
    if config.hosts == 1:
        return True
    if config.link is None:
        return False
    mbit = config.link.bytes_per_s * 8 / 1e6
    return abs(sums.mbit - mbit) < 0.02 * mbit if sums.mbit else config.link.source == "measured"


def _local_costs(profile: ProgramProfile, config: Configuration) -> Callable[[float], SumPoint]:
    """What a sum costs the workers of a host, from the measurement that is most like it, or from a guess."""
    on_cpu, network = profile.device == "cpu", config.hosts > 1
    alike = [one for one in profile.sums if one.device == profile.device]
    kinds = [one for one in alike if one.grad_comm == config.grad_comm]
    if not kinds and config.grad_comm in HALF:
        kinds = [one for one in alike if one.grad_comm == FP32]
    if not network:  # the time of the others is that of a link
        kinds = [one for one in kinds if one.hosts == 1]
    if network and not on_cpu:
        return lambda size: SumPoint(size, 0.0, 0.0)  # the GPUs do it
    if not kinds:
        link, cpu = ASSUMED_INSIDE, 1.0 if on_cpu else 0.0

        def guess(size: float) -> SumPoint:
            seconds = collective_cost.ring_all_reduce(size, config.workers_per_host, link) * config.sharing
            return SumPoint(size, seconds, cpu * seconds / config.sharing)

        return guess
    wanted = ("hierarchy", "gloo") if network else (config.backend,)
    near = [one for one in kinds if one.backend in wanted] or kinds
    best = min(
        near,
        key=lambda one: (
            abs(one.workers_per_host - config.workers_per_host),
            -one.mbit if network else one.hosts,
            abs(one.hosts - config.hosts),
        ),
    )
    more = max(1.0, 0.5 + 0.5 * config.workers_per_host / best.workers_per_host)  # rows of others that each adds

    def measured(size: float) -> SumPoint:
        point = best.at(size)
        seconds = max(point.seconds * more, point.cpu_s * more * config.sharing)
        return SumPoint(size, seconds, point.cpu_s * more)

    return measured


def _scale(point: SumPoint, factor: float) -> SumPoint:
    return SumPoint(point.size_bytes, point.seconds * factor, point.cpu_s * factor)
