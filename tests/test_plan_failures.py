"""Goodput under failures: published values, limits, directions, and a simulation that agrees with the formulas."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lockstep.plan.failures import (
    FailureModel,
    best_interval_s,
    daly_interval_s,
    goodput_in_place,
    goodput_with_restart,
    young_interval_s,
)

MINUTE, HOUR, DAY, YEAR = 60.0, 3600.0, 86400.0, 365.25 * 86400.0


def model(**changes: Any) -> FailureModel:
    """64 workers on 8 hosts; the run fails every few hours."""
    values: dict[str, Any] = {
        "mtbf_worker_s": 20 * DAY,
        "mtbf_host_s": 60 * DAY,
        "workers": 64,
        "hosts": 8,
        "step_s": 0.5,
        "checkpoint_s": 30.0,
        "checkpoint_is_async": False,
        "restart_s": 300.0,
        "recovery_s": 10.0,
        "replacement_s": 600.0,
    }
    return FailureModel(**(values | changes))


SHARDED = {"shard_optimizer": True, "redundancy": False}
COPIED = {"shard_optimizer": True, "redundancy": True}


# ---- published values ------------------------------------------------------------------------------------------------


def test_youngs_interval_of_64_machines() -> None:
    # Low et al., Distributed GraphLab, 2012: 64 machines that fail once a year, checkpoints of 2 minutes: 3 hours.
    assert young_interval_s(2 * MINUTE, YEAR / 64) == pytest.approx(3 * HOUR, rel=0.01)


@pytest.mark.parametrize(
    ("mtbf_s", "published_minutes", "digits"), [(24 * HOUR, 117, 0), (6 * HOUR, 57, 0), (15 * MINUTE, 9.1, 1)]
)
def test_dalys_interval(mtbf_s: float, published_minutes: float, digits: int) -> None:
    # Daly 2006, figures 3 to 5: checkpoints of 5 minutes, restarts of 10 minutes.
    assert round(daly_interval_s(5 * MINUTE, mtbf_s, 10 * MINUTE) / MINUTE, digits) == published_minutes


def test_dalys_interval_where_checkpoints_take_longer_than_the_run_lives() -> None:
    # Daly 2006: with a checkpoint of at least twice the mean time between failures, the interval is that time.
    assert daly_interval_s(200.0, 100.0) == daly_interval_s(1e6, 100.0) == 100.0
    assert daly_interval_s(199.999, 100.0) == pytest.approx(88.89, abs=0.01)  # 200 (1 + 1/3 + 1/9) - 200
    assert daly_interval_s(0.0, 100.0) == young_interval_s(0.0, 100.0) == 0.0


@pytest.mark.parametrize(("gpus", "published_hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_mean_time_between_failures_of_a_large_run(gpus: int, published_hours: float) -> None:
    # Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, 2025: 6.5 failures per
    # thousand days of a host with 8 GPUs give 1.8 hours with 16,384 GPUs and 0.23 hours with 131,072.
    hosts = gpus // 8
    run = model(mtbf_worker_s=math.inf, mtbf_host_s=DAY / 6.5e-3, workers=gpus, hosts=hosts)
    assert run.mtbf_s / HOUR == pytest.approx(published_hours, rel=0.03)


@pytest.mark.parametrize("hosts", [32, 128, 512])
def test_goodput_agrees_with_the_published_first_order_formula_where_losses_are_small(hosts: int) -> None:
    # The same paper: (1 - N r (u + d / 2)) / (1 + w / d), with N hosts, r failures per host and second, u the time of a
    # restart, d the interval, w the time of a checkpoint.
    rate = 6.5e-3 / DAY
    run = model(mtbf_worker_s=math.inf, mtbf_host_s=1 / rate, workers=8 * hosts, hosts=hosts)
    interval_s = 30 * MINUTE
    published = (1 - hosts * rate * (run.restart_s + interval_s / 2)) / (1 + run.checkpoint_s / interval_s)
    assert goodput_with_restart(run, interval_s) == pytest.approx(published, rel=0.005)


# ---- intervals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint_s", [1.0, 30.0, 600.0])
def test_the_best_interval_is_the_best(checkpoint_s: float) -> None:
    run = model(checkpoint_s=checkpoint_s)
    best_s = best_interval_s(run)
    best = goodput_with_restart(run, best_s)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert goodput_with_restart(run, best_s * factor) < best
    assert best_s == pytest.approx(daly_interval_s(checkpoint_s, run.mtbf_s), rel=1e-3)


def test_the_best_interval_where_checkpoints_are_nearly_as_long_as_the_run_lives() -> None:
    run = model(mtbf_worker_s=64 * HOUR, mtbf_host_s=None, checkpoint_s=HOUR)
    best_s = best_interval_s(run)
    assert 1 - best_s / HOUR == pytest.approx(math.exp(-(best_s + HOUR) / HOUR))  # Daly 2006: the derivative is zero
    assert goodput_with_restart(run, best_s) >= goodput_with_restart(run, daly_interval_s(HOUR, HOUR))


def test_an_interval_is_a_step_at_least() -> None:
    assert best_interval_s(model(checkpoint_s=0.0, step_s=7.0)) == 7.0
    assert best_interval_s(model(checkpoint_s=1e-9, step_s=7.0)) == 7.0
    assert best_interval_s(model(checkpoint_is_async=True, checkpoint_s=30.0)) == 30.0
    assert best_interval_s(model(checkpoint_is_async=True, checkpoint_s=30.0, step_s=45.0)) == 45.0


# ---- limits and directions -------------------------------------------------------------------------------------------


def with_restart(run: FailureModel) -> float:
    return goodput_with_restart(run, best_interval_s(run))


GOODPUTS: tuple[Callable[[FailureModel], float], ...] = (with_restart, goodput_in_place)


@pytest.mark.parametrize("goodput", GOODPUTS)
@pytest.mark.parametrize("options", [{}, SHARDED, COPIED, {"checkpoint_is_async": True}])
def test_a_run_that_never_fails_loses_nothing(
    goodput: Callable[[FailureModel], float], options: dict[str, bool]
) -> None:
    assert goodput(model(mtbf_worker_s=math.inf, mtbf_host_s=None, **options)) == 1.0
    assert goodput(model(mtbf_worker_s=math.inf, mtbf_host_s=math.inf, **options)) == 1.0
    assert goodput(model(mtbf_worker_s=1e18, mtbf_host_s=1e18, **options)) == pytest.approx(1.0, abs=1e-6)


def test_without_failures_only_checkpoints_that_stop_training_cost_time() -> None:
    never = model(mtbf_worker_s=math.inf, mtbf_host_s=None)
    assert best_interval_s(never) == math.inf
    assert goodput_with_restart(never, 300.0) == goodput_in_place(never, interval_s=300.0) == pytest.approx(10 / 11)
    assert goodput_with_restart(replace(never, checkpoint_is_async=True), 300.0) == 1.0


@pytest.mark.parametrize("goodput", GOODPUTS)
@pytest.mark.parametrize("options", [{}, SHARDED, COPIED, {"checkpoint_is_async": True} | SHARDED])
def test_directions(goodput: Callable[[FailureModel], float], options: dict[str, bool]) -> None:
    times = [0.0, 1.0, 60.0, 3600.0, 1e5, 1e9]
    for name in ("checkpoint_s", "restart_s", "recovery_s", "recompute_steps", "replacement_s"):
        row = [goodput(model(**{name: value}, **options)) for value in times]
        assert row == sorted(row, reverse=True), name
    for name in ("mtbf_worker_s", "mtbf_host_s"):
        row = [goodput(model(**{name: value}, **options)) for value in (1e-3, 1.0, 1e3, 1e5, 1e7, 1e9, math.inf)]
        assert row == sorted(row), name
        assert row[0] < row[-1]
    row = [goodput(model(workers=count, **options)) for count in (8, 64, 512, 4096, 10**6)]
    if goodput is with_restart or options == SHARDED:
        assert row == sorted(row, reverse=True)


def test_what_changes_which_goodput() -> None:
    run = model()
    for name in ("recovery_s", "recompute_steps", "replacement_s"):
        assert goodput_in_place(replace(run, **{name: 5000.0})) < goodput_in_place(run)
        assert with_restart(replace(run, **{name: 5000.0})) == with_restart(run)
    for name in ("checkpoint_s", "restart_s"):
        assert with_restart(replace(run, **{name: 5000.0})) < with_restart(run)
        assert goodput_in_place(replace(run, **{name: 5000.0})) == goodput_in_place(run)


def test_copies_of_a_sharded_optimizer() -> None:
    whole, copied, sharded = (
        goodput_in_place(model()),
        goodput_in_place(model(**COPIED)),
        goodput_in_place(model(**SHARDED)),
    )
    assert sharded < copied < whole
    assert whole - copied < 0.05 * (whole - sharded)
    assert goodput_in_place(model(redundancy=True)) == whole  # there is nothing to copy
    # With every failure a return to the checkpoint, only the missing workers set it apart from a restart.
    run = model(**SHARDED)
    assert sharded == pytest.approx(with_restart(run) * run.share_of_workers_present)
    # The longer the copy is missing, the more often both are lost.
    assert model(**COPIED, recovery_s=100.0).fallbacks_per_s == pytest.approx(
        10 * model(**COPIED).fallbacks_per_s, rel=0.01
    )


def test_which_failures_are_not_repaired_in_place() -> None:
    assert model().fallbacks_per_s == 0.0
    assert model(**SHARDED).fallbacks_per_s == model().failures_per_s
    assert model(workers=8, hosts=1).fallbacks_per_s == pytest.approx(1 / (60 * DAY))  # the only host
    alone = model(workers=1, hosts=1)
    assert alone.fallbacks_per_s == alone.failures_per_s
    # One worker per host: it or its host fails, then one of two with the other copy, or its host, does.
    run = model(workers=8, hosts=8, **COPIED)
    one_per_s = 1 / (20 * DAY) + 1 / (60 * DAY)
    assert run.fallbacks_per_s == pytest.approx(8 * one_per_s * 2 * one_per_s * 10.0, rel=1e-4)
    pair = model(workers=2, hosts=2, **COPIED)
    assert pair.fallbacks_per_s == pytest.approx(2 * one_per_s * one_per_s * 10.0, rel=1e-4)


def test_parts_of_the_goodput_in_place() -> None:
    # One failure per 1,000 s: 10 s of recovery and 2 steps of 5 s leave exp(-20 / 1000).
    run = model(
        mtbf_worker_s=64_000.0, mtbf_host_s=None, recovery_s=10.0, step_s=5.0, recompute_steps=2.0, replacement_s=0.0
    )
    assert goodput_in_place(run) == pytest.approx(math.exp(-0.02))
    # Each worker is missing for 1,600 of 65,600 s.
    missing = replace(run, replacement_s=1600.0)
    assert goodput_in_place(missing) == pytest.approx(math.exp(-0.02) * 64_000 / 65_600)
    # A host that is lost takes all of its workers with it.
    hosts = replace(missing, mtbf_worker_s=math.inf, mtbf_host_s=8000.0)
    assert goodput_in_place(hosts) == pytest.approx(math.exp(-0.02) * 8000 / 9600)


@pytest.mark.parametrize("mtbf_s", [1e-12, 1e-3, 1.0, 1e3, 1e12])
@pytest.mark.parametrize("options", [{}, SHARDED, COPIED, {"checkpoint_is_async": True}])
def test_goodput_is_above_0_and_at_most_1(mtbf_s: float, options: dict[str, bool]) -> None:
    run = model(mtbf_worker_s=mtbf_s, mtbf_host_s=mtbf_s, **options)
    for goodput in (with_restart(run), goodput_in_place(run), goodput_with_restart(run, 1e6)):
        assert 0 < goodput <= 1


def test_checkpoints_in_the_background() -> None:
    blocking, background = model(), model(checkpoint_is_async=True)
    assert with_restart(background) > with_restart(blocking)
    # A checkpoint starts when the one before is written.
    assert goodput_with_restart(background, 1.0) == goodput_with_restart(background, 30.0)
    assert goodput_with_restart(background, 30.0) > goodput_with_restart(background, 31.0)


# ---- simulation ------------------------------------------------------------------------------------------------------


def simulated_restarts(run: FailureModel, interval_s: float, *, failures: int, dice: random.Random) -> float:
    """Progress per second of a run that returns to the last complete checkpoint after each failure."""
    clock_s = progress_s = 0.0
    for _ in range(failures):
        lives_s = dice.expovariate(1 / run.mtbf_s)
        clock_s += lives_s
        now_s, computed_s, saved_s = 0.0, 0.0, 0.0
        while True:
            now_s, computed_s = now_s + interval_s, computed_s + interval_s
            written_s = now_s + run.checkpoint_s
            if written_s > lives_s:
                break
            saved_s = computed_s
            if not run.checkpoint_is_async:
                now_s = written_s
        progress_s += saved_s
        while (until_failure_s := dice.expovariate(1 / run.mtbf_s)) < run.restart_s:
            clock_s += until_failure_s
        clock_s += run.restart_s
    return progress_s / clock_s


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mtbf_s", [2000.0, 20_000.0])
@pytest.mark.parametrize(("interval_s", "restart_s"), [(100.0, 300.0), (1000.0, 300.0), (1000.0, 4000.0)])
def test_restarts_agree_with_a_simulation(is_async: bool, mtbf_s: float, interval_s: float, restart_s: float) -> None:
    times = {"checkpoint_s": 60.0, "restart_s": restart_s}
    run = model(mtbf_worker_s=64 * mtbf_s, mtbf_host_s=None, checkpoint_is_async=is_async, **times)
    simulated = simulated_restarts(run, interval_s, failures=20_000, dice=random.Random(1))
    assert goodput_with_restart(run, interval_s) == pytest.approx(simulated, rel=0.015)


class InPlace:
    """A run with workers that come and go, event by event: failures, replacements, and ends of phases."""

    def __init__(self, run: FailureModel, interval_s: float, dice: random.Random) -> None:
        self.run, self.interval_s, self.dice = run, interval_s, dice
        self.clock_s = self.progress = self.saved = self.undoable = 0.0
        self.worker_back_s = [0.0] * run.workers
        self.host_back_s = [0.0] * run.hosts
        self.back_s: list[float] = []
        self.phase, self.left_s = "compute", interval_s
        self.interrupted = ("compute", interval_s)
        self.copies_at_risk: list[tuple[float, int]] = []  # until when, and which worker has the only copy

    def goodput(self, failures: int) -> float:
        for _ in range(failures):
            self.run_until_failure()
            self.fail()
        return self.progress / self.clock_s

    def is_present(self, worker: int) -> bool:
        host = worker * self.run.hosts // self.run.workers
        return max(self.worker_back_s[worker], self.host_back_s[host]) <= self.clock_s

    def share_present(self) -> float:
        return sum(map(self.is_present, range(self.run.workers))) / self.run.workers

    def run_until_failure(self) -> None:
        failure_s = self.clock_s + self.dice.expovariate(self.run.failures_per_s)
        share = self.share_present()
        while self.clock_s < failure_s:
            if self.back_s and self.back_s[0] <= self.clock_s:
                heapq.heappop(self.back_s)
                share = self.share_present()
                continue
            passed_s = min(self.left_s, min([failure_s, *self.back_s[:1]]) - self.clock_s)
            is_end = passed_s == self.left_s
            self.clock_s += passed_s
            self.left_s -= passed_s
            if self.phase == "compute":
                self.progress += share * passed_s
                self.undoable += share * passed_s
            if is_end:
                self.next_phase()
            elif passed_s == 0:  # too short for the clock
                return

    def next_phase(self) -> None:
        if self.phase == "compute":
            self.phase, self.left_s = "write", self.run.checkpoint_s
        elif self.phase == "write":
            self.saved, self.phase, self.left_s = self.progress, "compute", self.interval_s
        elif self.phase == "recover":
            self.phase, self.left_s = self.interrupted
        else:
            self.phase, self.left_s = "compute", self.interval_s

    def fail(self) -> None:
        run = self.run
        per_host = run.workers // run.hosts
        is_host = self.dice.random() < (run.hosts / (run.mtbf_host_s or math.inf)) / run.failures_per_s
        if is_host:
            host = self.dice.randrange(run.hosts)
            if self.host_back_s[host] > self.clock_s:
                return  # it is not there
            lost = set(range(host * per_host, (host + 1) * per_host))
            self.host_back_s[host] = self.clock_s + run.replacement_s
        else:
            worker = self.dice.randrange(run.workers)
            if not self.is_present(worker):
                return
            lost = {worker}
            self.worker_back_s[worker] = self.clock_s + run.replacement_s
        heapq.heappush(self.back_s, self.clock_s + run.replacement_s)
        self.copies_at_risk = [(until_s, holder) for until_s, holder in self.copies_at_risk if until_s > self.clock_s]
        is_lost_for_good = run.shard_optimizer and (
            not run.redundancy or any(holder in lost for _, holder in self.copies_at_risk)
        )
        if run.redundancy:
            # A copy of each part is on the next host, at the same place: these have the only one now, of either part.
            holders = {(worker + side) % run.workers for worker in lost for side in (per_host, -per_host)}
            self.copies_at_risk += [(self.clock_s + run.recovery_s, holder) for holder in holders]
        if is_lost_for_good or self.phase == "restart":
            self.progress, self.phase, self.left_s = self.saved, "restart", run.restart_s
            self.copies_at_risk = []
        else:
            lost_s = min(self.undoable, run.recompute_steps * run.step_s)
            self.progress -= lost_s
            if self.phase != "recover":
                self.interrupted = (self.phase, self.left_s + lost_s * (self.phase == "compute"))
            self.phase, self.left_s = "recover", run.recovery_s
        self.undoable = 0.0


OFTEN: dict[str, Any] = {
    "mtbf_worker_s": 2 * DAY,
    "mtbf_host_s": 6 * DAY,
    "step_s": 20.0,
    "checkpoint_s": 0.0,
    "recovery_s": 60.0,
    "replacement_s": 2 * HOUR,
}
TWO_AT_ONCE: dict[str, Any] = {
    "workers": 8,
    "mtbf_worker_s": 30_000.0,
    "mtbf_host_s": None,
    "checkpoint_s": 5.0,
    "restart_s": 3000.0,
    "recovery_s": 300.0,
    "replacement_s": 0.0,
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "changes",
    [
        OFTEN,
        OFTEN | {"recompute_steps": 10.0},
        OFTEN | {"replacement_s": 8 * HOUR},
        OFTEN | {"recovery_s": 600.0, "replacement_s": 0.0},
        OFTEN | {"mtbf_host_s": None},
        OFTEN | {"mtbf_worker_s": 1e15, "mtbf_host_s": 2 * DAY},
        OFTEN | {"checkpoint_s": 60.0, "replacement_s": 600.0} | SHARDED,
        OFTEN | {"checkpoint_s": 60.0} | COPIED,
        TWO_AT_ONCE | COPIED,
        TWO_AT_ONCE | COPIED | {"recovery_s": 500.0, "mtbf_worker_s": 40_000.0},
        TWO_AT_ONCE | COPIED | {"workers": 16, "hosts": 4, "mtbf_worker_s": 400_000.0, "mtbf_host_s": 30_000.0},
    ],
)
def test_recovery_in_place_agrees_with_a_simulation(changes: dict[str, Any]) -> None:
    run = model(**changes)
    simulated = InPlace(run, 1000.0, random.Random(2)).goodput(failures=20_000)
    assert simulated < 0.97
    assert goodput_in_place(run, interval_s=1000.0) == pytest.approx(simulated, rel=0.01)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("mtbf_worker_s", [0.0, -1.0, math.nan]),
        ("mtbf_host_s", [0.0, -1.0, math.nan]),
        ("workers", [0, -8, 2.5]),
        ("hosts", [0, -1, 2.5]),
        ("step_s", [0.0, -1.0, math.nan, math.inf]),
        ("checkpoint_s", [-1.0, math.nan, math.inf]),
        ("restart_s", [-1.0, math.nan, math.inf]),
        ("recovery_s", [-1.0, math.nan, math.inf]),
        ("recompute_steps", [-1.0, math.nan, math.inf]),
        ("replacement_s", [-1.0, math.nan, math.inf]),
    ],
)
def test_a_value_that_cannot_be_is_named(name: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{name}={value}"):
            model(**{name: value})


def test_hosts_have_equally_many_workers() -> None:
    with pytest.raises(ValueError, match="workers=65 is not a multiple of hosts=8"):
        model(workers=65)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_an_interval_that_cannot_be_is_named(value: float) -> None:
    with pytest.raises(ValueError, match=f"interval_s={value}"):
        goodput_with_restart(model(), value)
    with pytest.raises(ValueError, match=f"interval_s={value}"):
        goodput_in_place(model(**SHARDED), interval_s=value)


def test_formulas_name_what_cannot_be() -> None:
    for interval in (young_interval_s, daly_interval_s):
        with pytest.raises(ValueError, match="checkpoint_s=-1"):
            interval(-1.0, 10.0)
        with pytest.raises(ValueError, match="mtbf_s=0"):
            interval(1.0, 0.0)
        with pytest.raises(ValueError, match="mtbf_s=nan"):
            interval(1.0, math.nan)
    with pytest.raises(ValueError, match="restart_s=-2"):
        daly_interval_s(1.0, 10.0, -2.0)
