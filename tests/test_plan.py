"""`lockstep plan`: the model of a step, of memory, and the command, on programs that were measured or made up."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import LockstepError
from lockstep.plan import check, command, measure, quantities
from lockstep.plan.configuration import Configuration
from lockstep.plan.forecast import Question, make_plan
from lockstep.plan.links import Link, parse_link
from lockstep.plan.memory import INT_SUM_BUFFERS, fit_memory
from lockstep.plan.profile import (
    MIB,
    BucketTiming,
    MeasuredSums,
    ProbeResult,
    ProgramProfile,
    SumPoint,
    merge_runs,
    read_links,
)
from lockstep.plan.step_time import StepForecast, StepModel, interpolate, slowest_of
from lockstep.plan.sum_cost import ENCODE_SHARE, overlap, rows_per_worker, sum_costs, wire_bytes
from lockstep.report import command as report
from lockstep.train.probe import scale_schedule
from traces import Plan as TracePlan, write_trace

GRADIENTS = 40 * MIB


def sample_probe(workers: int, batch: int, shards: int, *, together: float = 1.0, **changes: Any) -> ProbeResult:
    """A shard takes 10 ms, and 0.5 ms for each sample; each further shard 4 ms more; the update 20 ms."""
    own, per = shards // workers, batch / shards
    shard_s = (0.010 + 0.0005 * per) * together
    compute_s = own * shard_s + 0.004 * (own - 1) * together
    exposed_s = 0.006 if workers > 1 else 0.0
    step_s = compute_s + 0.020 * together + exposed_s
    sharded = changes.get("shard_optimizer", False)
    kinds = {"weights": GRADIENTS, "gradients": GRADIENTS, "buckets": 0.0, "graphs": 0.0}
    kinds["optimizer"] = 2 * GRADIENTS / (workers if sharded else 1)
    peak = 300 * MIB + sum(kinds.values()) + per * 2 * MIB + math.log2(own) * GRADIENTS
    values: dict[str, Any] = {
        "workers": workers,
        "hosts": 1,
        "backend": "shm",
        "device": "cpu",
        "slots": 2,
        "shards": shards,
        "global_batch_size": batch,
        "grad_comm": "fp32",
        "shard_optimizer": False,
        "period_s": [step_s] * 20,
        "first_shard_s": [shard_s] * 20,
        "later_shard_s": [shard_s] * 20 if own > 1 else [],
        "backward_share": 2 / 3,
        "update_s": [0.020 * together] * 20,
        "wait_s": [exposed_s] * 20,
        "data_s": [0.0] * 20,
        "other_s": [0.0] * 20,
        "buckets": [BucketTiming(15 * MIB, 0.4), BucketTiming(25 * MIB, 1.0)] if workers > 1 else [],
        "memory_bytes": {**kinds, "peak": peak},
    }
    return ProbeResult(**{**values, **changes})


def sample_sums(backend: str = "shm", workers: int = 2, ms_per_mib: float = 0.2, **changes: Any) -> MeasuredSums:
    points = tuple(SumPoint(size, 1e-4 + 1e-3 * ms_per_mib * size / MIB, 0.0) for size in (1024, MIB, 25 * MIB))
    values = {"hosts": 1, "workers_per_host": workers, "grad_comm": "fp32", "device": "cpu", "mbit": 0} | changes
    return MeasuredSums(backend=backend, points=points, **values)  # type: ignore[arg-type]


def sample_profile(**changes: Any) -> ProgramProfile:
    probes = (sample_probe(1, 128, 1), sample_probe(1, 32, 1), sample_probe(1, 128, 4), sample_probe(2, 128, 2))
    values: dict[str, Any] = {"program": "train.py", "probes": probes, "sums": (sample_sums(), sample_sums("gloo"))}
    return ProgramProfile(**{**values, **changes})


def config(workers: int = 1, batch: int = 128, shards: int = 0, **changes: Any) -> Configuration:
    values = {"hosts": 1, "workers_per_host": workers, "slots": 8, "global_batch_size": batch} | changes
    return Configuration(shards=shards or workers * values["hosts"], **values)  # type: ignore[operator]


# ---- one step --------------------------------------------------------------------------------------------------------


def test_what_was_measured_is_predicted_as_it_was() -> None:
    model = StepModel(sample_profile())
    for probe in model.profile.probes:
        slots = config(probe.workers, probe.global_batch_size, probe.shards, slots=2)
        assert model.predict(slots).mid_s == pytest.approx(probe.step_s, rel=1e-3)


def test_a_worker_with_other_samples_and_shards() -> None:
    model = StepModel(sample_profile())
    assert model.predict(config(1, 256)).mid_s == pytest.approx(
        0.010 + 0.0005 * 256 + 0.020
    )  # beyond what was measured
    assert model.predict(config(1, 64, 8)).mid_s == pytest.approx(8 * 0.010 + 0.0005 * 64 + 7 * 0.004 + 0.020)
    assert "compute time of another batch size" in model.predict(config(1, 1024)).computed


def test_workers_that_slow_each_other_down() -> None:
    probes = (*sample_profile().probes[:3], sample_probe(2, 128, 2, together=1.5))
    model = StepModel(sample_profile(probes=probes))
    compute, update = model.factors
    assert compute == pytest.approx(1.5, rel=0.1)
    assert update == pytest.approx(1.5)
    both, more = model.predict(config(2, slots=2)).mid_s, model.predict(config(4, slots=2)).mid_s
    assert both == pytest.approx(probes[3].step_s, rel=1e-3)
    # Four workers on two cores: each has half the samples, and half a core.
    expected = 2 * 1.5 * (0.010 + 0.0005 * 32 + 0.020)
    assert expected < more < 1.25 * expected
    assert model.predict(config(1)).mid_s == pytest.approx(probes[0].step_s)  # alone on its host


def test_virtual_hosts_share_the_memory_of_one_machine() -> None:
    model = StepModel(sample_profile(probes=(*sample_profile().probes[:3], sample_probe(2, 128, 2, together=1.5))))
    for slots in (1, 2):
        hosts = config(1, hosts=2, slots=slots, backend="hierarchy", link=parse_link("100Gbit/s"))
        apart, together = model.predict(hosts), model.predict(replace(hosts, hosts_are_virtual=True))
        assert together.parts_s["update"] == pytest.approx(1.5 * apart.parts_s["update"])
        computed = "forward and backward"
        assert together.parts_s[computed] == pytest.approx(1.5 * apart.parts_s[computed], rel=0.1)


def test_small_shards_take_what_was_measured_of_them() -> None:
    """A sixteenth of the batch takes less than a line through the whole and a quarter would say."""
    probes = sample_profile().probes
    step_s = 16 * 0.008 + 15 * 0.004 + 0.020
    many = replace(sample_probe(1, 128, 16), later_shard_s=[0.008] * 20, period_s=[step_s] * 20)
    model = StepModel(sample_profile(probes=(*probes[:2], many, probes[3])))
    (size, seconds), *_ = model.compute.shard
    assert (size, seconds) == (8, 0.008)
    assert model.predict(config(1, 64, 8)).mid_s == pytest.approx(8 * 0.008 + 7 * 0.004 + 0.020)


@pytest.mark.parametrize(
    ("sums", "backward_s", "exposed_s"),
    [
        ([], 1.0, 0.0),
        ([(0.2, 0.1), (0.5, 0.1)], 1.0, 0.0),  # all done before
        ([(0.2, 0.1), (1.0, 0.3)], 1.0, 0.3),  # only the last one
        ([(0.2, 0.9), (0.4, 0.5), (1.0, 0.1)], 1.0, 0.7),  # one waits for the other
        ([(1.0, 0.5), (1.0, 0.25)], 1.0, 0.75),  # nothing is hidden
        ([(0.0, 2.0)], 1.0, 1.0),
    ],
)
def test_sums_behind_a_backward_pass(sums: list[tuple[float, float]], backward_s: float, exposed_s: float) -> None:
    points = [(ready, SumPoint(1.0, seconds, 0.0)) for ready, seconds in sums]
    found = overlap(backward_s, points, cores=math.inf)
    assert found.exposed_s == pytest.approx(exposed_s)
    assert found.backward_s == pytest.approx(backward_s)
    random.Random(0).shuffle(points)
    assert overlap(backward_s, points, cores=1.0).exposed_s == pytest.approx(exposed_s)  # they need no CPU


def test_a_sum_that_needs_the_core_of_the_backward_pass() -> None:
    sums = [(0.5, SumPoint(1.0, 0.2, 0.2))]  # it computes all the time
    free, shared = overlap(1.0, sums, cores=2.0), overlap(1.0, sums, cores=1.0)
    assert (free.backward_s, free.exposed_s) == pytest.approx((1.0, 0.0))
    assert (shared.backward_s, shared.exposed_s) == pytest.approx((1.2, 0.0))  # both at half speed for 0.4 s
    mostly_waiting = overlap(1.0, [(0.5, SumPoint(1.0, 0.2, 0.02))], cores=1.0)
    assert mostly_waiting.backward_s == pytest.approx(1.02)


def test_slow_links_are_exposed_and_small_messages_are_not() -> None:
    profile = sample_profile()
    fast = config(1, hosts=2, backend="hierarchy", link=parse_link("100Gbit/s"))
    slow = replace(fast, link=parse_link("100Mbit/s"))
    model = StepModel(profile)
    at_least_s = 8 * GRADIENTS / 100e6  # two hosts send the whole gradient once
    assert model.predict(slow).parts_s["exposed communication"] > 0.9 * at_least_s
    assert model.predict(fast).mid_s < 0.1 * model.predict(slow).mid_s
    int8 = model.predict(replace(slow, grad_comm="int8")).mid_s
    int4 = model.predict(replace(slow, grad_comm="int4")).mid_s
    assert 0.2 < int8 / model.predict(slow).mid_s < 0.35
    assert int4 < 0.65 * int8


def test_measured_sums_are_preferred_to_formulas() -> None:
    link = Link("1 Gbit/s", 5e-5, 1.25e8)
    hosts = config(1, hosts=2, backend="hierarchy", link=link)
    assert not sum_costs(sample_profile(), hosts).is_measured
    measured = sample_sums("hierarchy", 1, 8.0, hosts=2, mbit=1000)
    profile = sample_profile(sums=(measured,))
    assert sum_costs(profile, hosts).is_measured
    assert sum_costs(profile, hosts).at(10 * MIB).seconds == pytest.approx(1e-4 + 0.080)
    other_link = replace(hosts, link=Link("10 Gbit/s", 5e-5, 1.25e9))
    assert not sum_costs(profile, other_link).is_measured
    assert StepModel(profile).predict(hosts).computed == ()


def test_sums_between_hosts_say_nothing_about_one_host() -> None:
    slow = sample_sums("hierarchy", 1, 80.0, hosts=2, mbit=100)
    only_hosts, nothing = (sum_costs(sample_profile(sums=sums), config(2)).at(25 * MIB) for sums in ((slow,), ()))
    assert only_hosts == nothing


def test_integers_of_more_shards_take_longer() -> None:
    """Each shard is rounded for itself, and between hosts their sum has more bits."""
    found = sample_sums(grad_comm="int8"), sample_sums("hierarchy", 1, 8.0, hosts=2, mbit=1000, grad_comm="int8")
    near, far = (replace(one, points=tuple(replace(p, cpu_s=p.seconds / 2) for p in one.points)) for one in found)
    profile = sample_profile(sums=(near, far))
    for hosts, link in ((1, None), (2, Link("1 Gbit/s", 5e-5, 1.25e8))):
        one = config(2 // hosts, hosts=hosts, backend="hierarchy" if link else "shm", link=link, grad_comm="int8")
        few, many = (sum_costs(profile, replace(one, shards=n)).at(10 * MIB) for n in (2, 8))
        measured = (far if link else near).at(10 * MIB)
        encode_s = 3 * ENCODE_SHARE * ((far if link else near).at(20 * MIB).cpu_s - measured.cpu_s)
        assert (few.seconds, few.cpu_s) == pytest.approx((measured.seconds, measured.cpu_s))
        assert many.cpu_s == pytest.approx(measured.cpu_s + encode_s)
        bits = 18 / 16 if link else 1.0  # the sum of four shards of a host has two bits more
        wire_s = (measured.seconds - measured.cpu_s) * bits
        assert many.seconds == pytest.approx(measured.cpu_s + wire_s + encode_s, rel=0.01)
        elsewhere = replace(one, hosts=2 * hosts, shards=4), replace(one, hosts=2 * hosts, shards=16)
        few, many = (sum_costs(profile, other).at(10 * MIB) for other in elsewhere)
        assert many.cpu_s > few.cpu_s  # where nothing was measured, too


def test_bytes_on_the_wire() -> None:
    two = config(1, hosts=2, backend="hierarchy")
    assert wire_bytes(100.0, two) == 100.0
    assert wire_bytes(100.0, replace(two, grad_comm="bf16")) == 50.0
    assert wire_bytes(400.0, config(8, hosts=4, backend="hierarchy")) == 600.0  # only the sum of a host leaves it
    assert wire_bytes(400.0, config(8, hosts=4, backend="ring")) == 2 * 400 * 31 / 32
    assert wire_bytes(400.0, config(8, hosts=4, backend="nccl")) == 2 * 400 * 8 * 24 / 32  # all to all workers
    assert wire_bytes(600.0, config(6, hosts=2, backend="hierarchy")) == 2 * 600 * 6 * 6 / 12  # not a power of two
    # A byte for each of a quarter of the bytes, there and back for half of them, and the scales.
    assert wire_bytes(4 * 128.0, replace(two, grad_comm="int8")) == pytest.approx(128 + 4)
    assert wire_bytes(4 * 128.0, replace(two, grad_comm="int8", shards=4)) == pytest.approx(128 * 17 / 16 + 4)


def test_sums_that_were_not_measured_are_not_free() -> None:
    profile = sample_profile(sums=())
    for asked in (config(2), config(8), config(2, grad_comm="bf16"), config(4, backend="gloo")):
        found = sum_costs(profile, asked)
        assert not found.is_measured
        assert found.at(25 * MIB).seconds > 0.005
    half = config(2, grad_comm="bf16")
    assert sum_costs(sample_profile(), half).at(25 * MIB).seconds == pytest.approx(0.0051)  # as fp32 was measured
    wide, narrow = (
        StepModel(one).predict(config(4)) for one in (profile, sample_profile(sums=(sample_sums("shm", 4),)))
    )
    assert wide.high_s / wide.low_s > narrow.high_s / narrow.low_s


def test_shards_that_do_not_fit_the_tree_send_more() -> None:
    assert [rows_per_worker(shards, workers) for shards, workers in ((8, 8), (8, 4), (8, 2), (3, 3))] == [1.0] * 4
    assert rows_per_worker(8, 3) == pytest.approx(5 / 3)


def test_the_slowest_of_many() -> None:
    rng = random.Random(0)
    values = sorted(rng.gauss(1.0, 0.05) for _ in range(400))
    for count in (1, 2, 8, 64):
        largest = sorted(max(rng.choices(values, k=count)) for _ in range(2001))
        assert slowest_of(values, count) == pytest.approx(largest[1000], rel=0.02)
    assert slowest_of(values, 65_536) > slowest_of(values, 64)
    assert slowest_of([1.0], 100) == 1.0


def test_a_curve_is_a_line_between_and_beyond_its_points() -> None:
    curve = ((10.0, 1.0), (20.0, 3.0), (40.0, 4.0))
    assert [interpolate(curve, at) for at in (10, 15, 30, 60)] == pytest.approx([1.0, 2.0, 3.5, 5.0])
    assert interpolate(curve, 1) > 0
    assert interpolate(((10.0, 1.0),), 20) == pytest.approx(1.9)


# ---- repeated runs ---------------------------------------------------------------------------------------------------


def test_equal_runs_are_joined_at_their_geometric_mean() -> None:
    fast, slow = sample_probe(1, 128, 1), sample_probe(1, 128, 1, together=4.0)
    joined = merge_runs([fast, slow])
    assert joined.step_s == pytest.approx(math.sqrt(fast.step_s * slow.step_s))
    assert len(joined.period_s) == len(fast.period_s) + len(slow.period_s)
    assert joined.update_s[0] / joined.step_s == pytest.approx(fast.update_s[0] / fast.step_s)
    assert measure.run_noise([[fast, fast], [fast]]) == 0
    assert measure.run_noise([[fast, slow]]) == pytest.approx(math.log(slow.step_s / fast.step_s) / math.sqrt(2))


def test_a_check_is_made_beside_one_worker_or_two() -> None:
    model = StepModel(sample_profile())
    assert check.reference_run(model, config(1)).workers == 1
    assert check.reference_run(model, config(4)).workers == 2
    assert check.reference_run(StepModel(sample_profile(probes=sample_profile().probes[:3])), config(4)).workers == 1


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_by_kind() -> None:
    model = fit_memory(sample_profile().probes)
    found = model.predict(config(1, 256))
    assert found.by_kind["activations"] == pytest.approx(512 * MIB)
    assert found.by_kind["rest"] == pytest.approx(300 * MIB)
    assert found.total_bytes == pytest.approx((300 + 512) * MIB + 4 * GRADIENTS)
    assert model.predict(config(1, 128, 8)).by_kind["rest"] == pytest.approx(300 * MIB + 3 * GRADIENTS)
    assert model.predict(config(4, shard_optimizer=True)).by_kind["optimizer"] == pytest.approx(GRADIENTS / 2)
    copies = model.predict(config(4, shard_optimizer=True, redundancy=1))
    assert copies.by_kind["optimizer"] == pytest.approx(GRADIENTS)
    assert model.predict(config(4, backend="gloo")).by_kind["buckets"] == 3.5 * GRADIENTS  # the tree over workers
    between_hosts = model.predict(config(1, shard_optimizer=True, hosts=2, backend="hierarchy"))
    assert between_hosts.by_kind["buckets"] == 1.5 * GRADIENTS  # the exchange of weights
    assert model.predict(config(4, backend="shm")).by_kind["buckets"] == 2 * GRADIENTS  # of the third and the fourth
    assert model.predict(config(3, 128, 8)).by_kind["buckets"] == pytest.approx(2 * 5 / 3 * GRADIENTS)  # rows of a tree
    four = fit_memory([sample_probe(4, 128, 4)])
    assert four.predict(config(4, 128)).total_bytes == sample_probe(4, 128, 4).memory_bytes["peak"]
    assert model.predict(config(4, 128, 8, grad_comm="int8")).by_kind["buckets"] == (1 + INT_SUM_BUFFERS) * GRADIENTS


def captured(probe: ProbeResult, extra: float) -> ProbeResult:
    memory = {**probe.memory_bytes, "graphs": GRADIENTS, "peak": probe.memory_bytes["peak"] + extra}
    return replace(probe, device="cuda", memory_bytes=memory)


def test_memory_of_a_gpu_with_and_without_graphs() -> None:
    """One set of gradients belongs to a graph; four graphs keep three sets more, two of which were sums before."""
    probes = [captured(sample_probe(1, batch, 1), GRADIENTS) for batch in (128, 32)]
    probes += [captured(sample_probe(1, 128, 4), 2 * GRADIENTS), captured(sample_probe(2, 128, 2), 2 * GRADIENTS)]
    model = fit_memory(probes)
    alone, four = model.predict(config(1, 128, 1)), model.predict(config(1, 128, 4))
    assert alone.by_kind["graphs"] == pytest.approx(GRADIENTS)
    assert alone.needed_bytes == pytest.approx((300 + 256) * MIB + 4 * GRADIENTS)
    assert four.total_bytes - four.needed_bytes == pytest.approx(2 * GRADIENTS)
    assert four.needed_bytes == pytest.approx((300 + 64) * MIB + 6 * GRADIENTS)
    two, many = model.predict(config(2)), model.predict(config(4, 256))
    assert two.total_bytes == many.total_bytes == pytest.approx((300 + 128) * MIB + 6 * GRADIENTS)
    assert model.predict(config(2, grad_comm="int8")).total_bytes == pytest.approx(two.total_bytes + GRADIENTS)
    many_shards = model.predict(config(1, 128, 16, grad_comm="int8"))
    assert many_shards.total_bytes == many_shards.needed_bytes == pytest.approx((300 + 16) * MIB + 20 * GRADIENTS)
    eager = fit_memory([replace(one, memory_bytes={**one.memory_bytes, "graphs": 0.0}) for one in probes])
    kept = [eager.predict(config(1, 128, shards, grad_comm="int8")).by_kind["buckets"] for shards in (1, 4)]
    assert kept == [GRADIENTS, 4 * GRADIENTS]
    limit = (four.total_bytes + four.needed_bytes) / 2
    question = Question(layouts=((1, 1),), global_batch_sizes=(128,), shards=(4,), memory_bytes=limit)
    (found,) = make_plan(ProgramProfile("train.py", tuple(probes)), question).forecasts
    assert found.fits
    assert found.fits_without_graphs
    less = replace(found, memory_limit=0.99 * four.needed_bytes)
    assert (less.fits, less.fits_without_graphs) == (False, False)
    # The fastest is not recommended if it is predicted with graphs that do not fit.
    question = Question(layouts=((1, 1),), global_batch_sizes=(128,), shards=(1, 4), memory_bytes=alone.total_bytes - 1)
    plan = make_plan(ProgramProfile("train.py", tuple(probes)), question)
    fastest, other = sorted(plan.forecasts, key=lambda one: one.step.mid_s)
    assert fastest.fits_without_graphs
    assert other.is_best
    assert any("1 of 2 fit only without CUDA graphs" in note for note in plan.notes)


# ---- a plan ----------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_does_not_fit_and_what_it_costs() -> None:
    question = Question(
        layouts=((1, 1), (1, 2), (1, 4)),
        slots=8,
        global_batch_sizes=(128, 1024),
        memory_bytes=1000 * MIB,
        price_per_hour=2.0,
        target_steps=36_000,
        mtbf_s=3600.0 * 1000,
    )
    plan = make_plan(sample_profile(), question)
    found = {(one.config.workers, one.config.global_batch_size): one for one in plan.forecasts}
    assert found[1, 1024].fits is False
    assert found[1, 1024].to_json()["does_not_fit_by"] == "activations"
    assert found[4, 128].fits
    alone = found[1, 128]
    assert alone.hours == pytest.approx(10 * alone.step.mid_s / alone.goodput["recovery_in_place"])  # type: ignore[index]
    assert alone.cost == pytest.approx(2 * alone.hours)  # type: ignore[operator]
    assert found[4, 128].cost == pytest.approx(8 * found[4, 128].hours)  # type: ignore[operator]
    assert found[4, 128].goodput["recovery_in_place"] > found[4, 128].goodput["restart"]  # type: ignore[index]
    assert plan.best.fits
    assert sum(one.is_best for one in plan.forecasts) == 1
    front = [one for one in plan.forecasts if one.is_pareto]
    assert not any(a.hours < b.hours and a.cost < b.cost for a in plan.forecasts for b in front if a.fits)  # type: ignore[operator]
    text = json.dumps(plan.to_json())
    assert "do not fit into memory" in text


def test_a_configuration_that_hardly_scales_is_not_recommended() -> None:
    layouts = tuple((1, count) for count in (1, 2, 4, 8, 64))
    plan = make_plan(sample_profile(), Question(layouts=layouts, slots=64))
    fastest = min(plan.forecasts, key=lambda one: one.step.mid_s)
    assert fastest.efficiency < 0.5 <= plan.best.efficiency
    slow = make_plan(sample_profile(), Question(layouts=((1, 64),), slots=64))
    assert slow.best.efficiency < 0.5  # the only one there is


def test_65536_workers_in_seconds_and_the_same_every_time() -> None:
    question = Question(
        layouts=tuple((hosts, 8) for hosts in (1, 8, 64, 512, 4096, 8192)),
        links=(parse_link("25gbe"), parse_link("ib-ndr")),
        inside=parse_link("nvlink4"),
        global_batch_sizes=(65_536, 524_288),
        grad_comms=("fp32", "int8"),
        shard_optimizer=(False, True),
        mtbf_s=3600.0 * 5000,
        target_steps=1e5,
        price_per_hour=3.0,
    )
    tracemalloc.start()
    began_s = time.monotonic()
    plan = make_plan(sample_profile(), question)
    took_s, peak = time.monotonic() - began_s, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(one.config.workers for one in plan.forecasts) == 65_536
    assert took_s < 5
    assert peak < 1e9
    again = make_plan(sample_profile(), question)
    assert [one.to_json() for one in again.forecasts] == [one.to_json() for one in plan.forecasts]


def test_grids_that_make_no_sense_are_refused() -> None:
    profile = sample_profile()
    with pytest.raises(LockstepError, match="256 workers need 256 shards or more"):
        make_plan(profile, Question(layouts=((1, 256),), shards=(8,)))
    with pytest.raises(LockstepError, match="configurations"):
        make_plan(profile, Question(layouts=tuple((1, n) for n in range(1, 300)), bucket_mib=tuple(range(1, 100))))


# ---- the command -----------------------------------------------------------------------------------------------------


def test_questions_in_one_text() -> None:
    found = quantities.read_question_text("64 gpus, 8 per host, 100 Gbit/s, 3 $/h, 80 GiB, batch 512, int8")
    assert found["workers"] == (64,)
    assert found["per_host"] == (8,)
    assert found["link"][0].bytes_per_s == pytest.approx(12.5e9)
    assert found["price"] == (3.0, "$")
    assert found["memory"] == 80 * 2**30
    assert (found["batch"], found["grad_comm"]) == ((512,), ("int8",))
    for text, words in (("64 gpus, 100", "which unit"), ("64 elephants", "64 elephants"), ("3 yen/h", "price")):
        with pytest.raises(ValueError, match=words):
            quantities.read_question_text(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0", "x.py"], "'0' is not a whole number"),
        (["--memory", "80", "x.py"], "which unit"),
        (["--link", "100", "x.py"], "which unit"),
        (["--price", "cheap", "x.py"], "price per worker and hour"),
        (["--mtbf", "5", "x.py"], "which unit"),
        (["--bucket-mib", "-1", "x.py"], "whole number"),
        (["--workers", "8", "--hosts", "2", "x.py"], "--workers is for all hosts together"),
        (["--save", "missing/x.json", "x.py"], "there is no folder"),
        (["--target-loss", "1", "x.py"], "belong to --branch"),
        ([], "plan for what"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_plan_from_the_trace_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_trace(tmp_path / "run", TracePlan(workers=2, steps=60))
    page = tmp_path / "plan.html"
    status = command.main([str(run), "--workers", "2,64", "--per-host", "8", "--json", "--out", str(page)])
    found = json.loads(capsys.readouterr().out)
    assert status == 0
    assert [(one["workers"], one["hosts"]) for one in found["forecasts"]] == [(2, 1), (64, 8)]
    assert found["forecasts"][0]["step_ms"]["low"] < found["forecasts"][0]["step_ms"]["mid"]
    assert "<html" in page.read_text()


def test_a_report_shows_what_was_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_trace(tmp_path / "run", TracePlan(workers=2, steps=60, jitter=0.0))
    assert command.main([str(run), "--workers", "2,4", "--json", "--for", str(run)]) == 0
    capsys.readouterr()
    assert report.main([str(run), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["planned"]
    assert planned["predicted_ms"]["mid"] == pytest.approx(planned["measured_ms"], rel=0.05)
    assert report.main([str(run)]) == 0
    assert "inside the interval" in capsys.readouterr().out
    for text in ("{", "[]", '{"forecasts": [3]}', '{"forecasts": []}'):  # damaged, or of other workers
        (run / "plan.json").write_text(text)
        assert report.main([str(run)]) == 0
        assert "planned" not in capsys.readouterr().out


def test_runs_without_steps_and_files_that_are_no_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    (empty / "trace").mkdir(parents=True)
    (empty / "trace" / "1-rank0-1.jsonl").write_text(
        '{"kind":"head","worker":"rank0","t":1.0,"unix_s":2.0,"host":"a","device":"cpu","pid":1}\n'
    )
    assert command.main([str(empty)]) == 1
    assert "has no steps" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text('{"probes": 3}')
    assert command.main([str(tmp_path / "bad.json")]) == 1
    assert "cannot be read as a profile" in capsys.readouterr().err
    assert command.main(["nowhere.py"]) == 1
    assert "there is no script, run or profile 'nowhere.py'" in capsys.readouterr().err
    with pytest.raises(LockstepError, match="doctor --links"):
        read_links(tmp_path / "bad.json")


def test_a_prediction_beside_its_measurement() -> None:
    step = StepForecast(mid_s=0.1, low_s=0.09, high_s=0.11, parts_s={}, computed=())
    close, slower, far = (
        check.CheckedForecast("2 workers", step, measured_s, slowdown)
        for measured_s, slowdown in ((0.1, 1.0), (0.2, 2.0), (0.15, 1.0))
    )
    assert (close.error, slower.error, far.error) == pytest.approx((0.0, 0.0, -1 / 3))  # a machine at half its speed
    assert (close.inside, slower.inside, far.inside) == (True, True, False)
    assert check.holds([close, far])
    assert not check.holds([close, far, far])
    table = check.as_table([one.to_json() for one in (slower, far)])
    assert "200.0" in table
    assert "-33.3%" in table
    with pytest.raises(LockstepError, match="this machine can run none of the grid"):
        plan = make_plan(sample_profile(), Question(layouts=((2, 2),)))
        check.check_plan(plan, ["never_started.py"], Path("unused"), timeout_s=1, say=print)
    how = check.program_run(config(2, grad_comm="int8", shard_optimizer=True, redundancy=1), 20)
    assert how.options == {"grad_comm": "int8", "shard_optimizer": True, "redundancy": 1}
    assert (how.workers, how.shards, how.backend) == (2, 2, "shm")


def test_learning_rates_of_a_branch_change_with_their_schedulers() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    warm_up = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    later = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, later], milestones=[1])
    scale_schedule(both, 4.0)
    assert (warm_up.base_lrs, later.base_lrs) == ([pytest.approx(0.4)], [pytest.approx(0.4)])


PROGRAM = """
import torch, torch.nn.functional as F, lockstep
from torch.utils.data import TensorDataset

def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)

with lockstep.Run("own-run", seed=7) as run:
    model = run.replicate(torch.nn.Linear(8, 4))
    data = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    batches = run.batches(data, global_batch_size={batch}, epochs=1)
    for batch in run.train(batches, torch.optim.AdamW(model.parameters())):
        run.step(loss, batch)
    raise SystemExit("the program went on after its probe")
"""


@pytest.mark.slow
def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """`lockstep plan profile.json --json | head` ends without a traceback."""
    (tmp_path / "profile.json").write_text(json.dumps(sample_profile().to_json()))
    command = [sys.executable, "-m", "lockstep", "plan", "profile.json", "--json"]
    plan = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert plan.stdout is not None
    plan.stdout.close()
    assert plan.wait(60) == 0
    assert plan.stderr is not None
    assert plan.stderr.read() == ""


@pytest.mark.slow
def test_sigterm_ends_the_programs_that_it_has_started(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    plan = subprocess.Popen([sys.executable, "-m", "lockstep", "plan", "train.py"], cwd=tmp_path)
    try:
        end_s = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < end_s
            time.sleep(0.05)
        plan.send_signal(signal.SIGTERM)
        assert plan.wait(60) == 128 + signal.SIGTERM
    finally:
        plan.kill()
        plan.wait()
        is_left = (worker := Path("/proc", (tmp_path / "pid").read_text())).exists()
        if is_left:
            os.kill(int(worker.name), signal.SIGKILL)  # its launcher ends with it
    assert not is_left


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("batch", "measured"),
    [
        (3, [(1, 3, 1), (2, 3, 2)]),  # workers, batch, shards
        (8, [(1, 2, 1), (1, 8, 1), (1, 8, 4), (2, 8, 2)]),
        (16, [(1, 4, 1), (1, 16, 1), (1, 16, 16), (2, 16, 2)]),
    ],
)
def test_a_program_is_measured_and_its_profile_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    batch: int,
    measured: list[tuple[int, int, int]],
) -> None:
    monkeypatch.chdir(tmp_path)
    if batch == 3:  # the case of `make test`
        monkeypatch.setattr(measure, "CPU_ROUNDS", 1)
    (tmp_path / "train.py").write_text(PROGRAM.replace("{batch}", str(batch)))
    options = ["--probe-steps", "10", "--no-links", "--save", "profile.json", "--timeout-s", "60"]
    assert command.main([*options, "--json", "train.py"]) == 0
    output = capfd.readouterr()
    found = json.loads(output.out)
    assert "train.py on 2 workers" in output.err
    assert {one["workers"] for one in found["forecasts"]} >= {1}
    assert all(one["memory_mib"]["weights"] > 0 for one in found["forecasts"])
    assert not (tmp_path / "own-run").exists()  # the program's own directory is left alone
    profile = ProgramProfile.from_json(json.loads((tmp_path / "profile.json").read_text()))
    assert sorted((one.workers, one.global_batch_size, one.shards) for one in profile.probes) == measured
    assert all(len(one.losses) == 10 for one in profile.probes)
    # Shards have the same samples on any number of workers: with as many samples the first losses are equal.
    assert command.main(["profile.json", "--workers", "1,2"]) == 0
    assert "lockstep-plan.html" in capfd.readouterr().out
