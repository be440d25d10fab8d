"""The campaign of kills in training runs: a campaign that cannot turn red proves nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parent.parent / "chaos"
sys.path.append(str(TOOL))
import training  # noqa: E402
import training_behind  # noqa: E402
import training_soak  # noqa: E402
import training_stops  # noqa: E402
from lockstep import faults  # noqa: E402
from training_check import Fault, Hit, Mark, Result, Seen, judge, quantile, recoveries, table, too_slow  # noqa: E402
from training_job import References, carry_out, strike_all  # noqa: E402
from training_plan import (  # noqa: E402
    ALL,
    BODIES,
    ENDING,
    FORMING,
    OUTSIDE,
    STALL_S,
    STOPPED_AT,
    TURNS,
    Case,
    Strike,
    Who,
    in_order,
    plan,
    plan_stops,
    surely_noticed,
)
from training_soak import Moment, Sample, growth  # noqa: E402

# ------------------------------------------------------------------------------------------------------------ the plan


def test_a_case_is_a_function_of_seed_and_number() -> None:
    assert plan(7, 11) == plan(7, 11)
    assert plan(7, 11).strikes != plan(8, 11).strikes
    assert plan_stops(7, 11) == plan_stops(7, 11)


def test_a_campaign_has_everything_in_it() -> None:
    cases = [plan(seed, number) for seed in range(10) for number in range(4)]
    strikes = [strike for case in cases for strike in case.strikes]
    assert {strike.place for strike in strikes} == set(TURNS)
    assert len(set(TURNS) - {OUTSIDE}) >= 12
    assert {(case.workers, case.backend) for case in cases} == {(n, b) for n in range(2, 7) for b in ("shm", "gloo")}
    assert {case.variant for case in cases} == {"mlp", "cnn", "gpt", "tiny", *BODIES}
    assert {strike.also for strike in strikes} == {0, 1, ALL}
    assert {strike.who for strike in strikes} == set(Who)
    assert all(strike.also in (0, ALL) for case in cases if case.workers == 2 for strike in case.strikes)


def test_every_place_is_one_of_the_library() -> None:
    assert set(TURNS) | set(STOPPED_AT) | set(FORMING) <= {*faults.PLACES, OUTSIDE}


def test_strikes_come_in_an_order_in_which_they_can_hit() -> None:
    assert in_order([ENDING, "sending-state", "top", "receiving-state"]) == [
        "top", "receiving-state", "sending-state", ENDING]  # fmt: skip
    assert in_order(["receiving-state"] * 2 + ["write"]) == ["write", "receiving-state", "receiving-state"]


def test_stops_are_of_all_lengths() -> None:
    strikes = [strike for number in range(40) for strike in plan_stops(0, number).strikes]
    noticed = [surely_noticed(strike, STALL_S) for strike in strikes]
    assert 0.3 < sum(noticed) / len(noticed) < 0.7
    assert {strike.place for strike in strikes} == set(STOPPED_AT)
    assert all(strike.late_s is not None and strike.late_s < 3 * STALL_S for strike in strikes)


# --------------------------------------------------------------------------------------------------------- the checks

STRIKES = (Strike("reduced"), Strike("top", late_s=2.0))
CASE = replace(plan(0, 0), variant="mlp", workers=3, strikes=STRIKES, stall_s=1.0)
REFERENCE: dict[str, Any] = {"digest": "d", "body": "", "losses": {"0": "a", "1": "b"}, "figures": {}, "steps": 2}
PIDS = {"h0.0": 10, "h0.1": 11, "h0.2": 12, "h0.3": 13}


def generation(number: int, at_s: float, *members: str) -> dict[str, Any]:
    return {"event": "generation", "number": number, "monotonic": at_s, "members": list(members)}


def lost(worker: str, at_s: float, code: int = -9) -> dict[str, Any]:
    return {"event": "lost", "worker": worker, "monotonic": at_s, "code": code}


def computes(at_s: float, number: int, *steps: int) -> list[Mark]:
    """A worker takes these steps, in this generation."""
    places = ("batch", "loss", "reduced", "applied")
    return [Mark(at_s + n / 100, number, 0, step, place) for n, step in enumerate(steps) for place in places]


def seen(**changes: Any) -> Seen:
    """Two steps of three workers; h0.2 is killed in the second, and the others compute it again."""
    known: dict[str, Any] = {
        "status": 0,
        "hits": [Hit(0, "reduced", 12, 101.0)],
        "events": [
            generation(1, 100.0, "h0.0", "h0.1", "h0.2"),
            lost("h0.2", 101.01),
            generation(2, 101.02, "h0.0", "h0.1"),
        ],
        "pids": PIDS,
        "traces": {
            10: [*computes(100.1, 1, 0), Mark(100.9, 1, 0, 1, "loss"), *computes(101.08, 2, 1)],
            11: [*computes(100.1, 1, 0), Mark(100.9, 1, 1, 1, "loss"), *computes(101.06, 2, 1)],
            12: [*computes(100.1, 1, 0), Mark(100.9, 1, 2, 1, "loss")],
        },
        "ends": {10: REFERENCE, 11: {**REFERENCE, "losses": {"1": "b"}}},
        "checkpoints": ["step-000000001", "step-000000002"],
    }
    return Seen(CASE, **(known | changes))


def found(one: Seen) -> list[Fault]:
    return [finding.fault for finding in judge(one, REFERENCE).findings]


def test_a_run_in_which_all_held_has_no_findings() -> None:
    assert found(seen()) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"status": 137}, Fault.STATUS),
        ({"ends": {}}, Fault.STATUS),
        ({"status": None, "stuck": "all are in all_reduce"}, Fault.STUCK),
        ({"ends": {10: {**REFERENCE, "digest": "other"}}}, Fault.DIGEST),
        ({"ends": {10: {**REFERENCE, "body": "other"}}}, Fault.DIGEST),
        ({"ends": {10: {**REFERENCE, "losses": {"1": "c"}}}}, Fault.DIGEST),
        ({"ends": {10: {**REFERENCE, "steps": 1}}}, Fault.DIGEST),
        ({"ledger": "exit status 1"}, Fault.SAMPLES),
        ({"left": ["process 12: (python) S"]}, Fault.LEFTOVERS),
        ({"checkpoints": ["step-000000002", ".step-000000002.x.partial"]}, Fault.LEFTOVERS),
        ({"checkpoints": ["step-000000001"]}, Fault.CHECKPOINT),
        ({"hits": []}, Fault.DIED),
        ({"slow": ["nothing has happened"]}, Fault.SLOW),
    ],
)
def test_whatever_is_wrong_is_found(changes: dict[str, Any], fault: Fault) -> None:
    assert found(seen(**changes)) == [fault]


def test_a_step_that_is_applied_twice_is_found() -> None:
    again = [*seen().traces[10], *computes(101.2, 2, 1)]
    assert found(seen(traces={10: again})) == [Fault.TWICE]


def test_one_step_may_be_computed_again_per_loss() -> None:
    twice = {10: [*computes(100.1, 1, 0, 1), *(Mark(101.1, 2, 0, step, "loss") for step in (0, 1))]}
    assert found(seen(traces=twice)) == [Fault.AGAIN]
    also_lost = [*seen().events[:2], lost("h0.1", 101.015), generation(2, 101.02, "h0.0")]
    hits = [*seen().hits, Hit(0, "reduced", 11, 101.0)]
    assert found(seen(traces=twice, events=also_lost, hits=hits)) == []


def test_nothing_may_be_computed_again_when_a_worker_joins() -> None:
    events = [seen().events[0], generation(2, 101.02, "h0.0", "h0.1", "h0.2", "h0.3")]
    assert found(seen(events=events, hits=[])) == [Fault.AGAIN]


def test_what_only_a_dead_worker_had_begun_is_not_computed_again() -> None:
    traces = seen().traces
    alone = [*traces[12], Mark(100.95, 1, 2, 2, "loss")]
    after = [*traces[10], Mark(101.2, 2, 0, 2, "loss")]
    result = judge(seen(traces={**traces, 12: alone, 10: after}), REFERENCE)
    assert result.again == [1]
    assert not result.findings


def test_a_loss_of_all_is_counted_apart() -> None:
    events = [seen().events[0], *(lost(f"h0.{n}", 101.01) for n in range(3)), generation(2, 104.0, "h0.3")]
    hits = [Hit(0, "reduced", pid, 101.0) for pid in (10, 11, 12)]
    traces = {10: computes(100.1, 1, 0, 1), 13: computes(104.1, 2, 0, 1)}
    result = judge(seen(events=events, hits=hits, traces=traces), REFERENCE)
    assert (result.again, result.after_all, result.findings, result.recoveries) == ([], [2], [], [])


def test_a_recovery_lasts_until_the_last_survivor_works() -> None:
    (recovery,) = recoveries(seen())
    assert recovery.took_s == pytest.approx(0.08)
    assert recovery.noticed_s == pytest.approx(0.01)
    assert recovery.survivors == 2


def test_a_recovery_that_is_disturbed_lasts_until_the_next_one() -> None:
    """h0.1 dies before it works in generation 2: that one does not count."""
    events = [*seen().events, lost("h0.1", 101.1), generation(3, 101.2, "h0.0")]
    traces = {10: [*seen().traces[10], Mark(101.3, 3, 0, 1, "loss")], 11: seen().traces[11][:-4]}
    hits = [*seen().hits, Hit(1, "joining", 11, 101.05)]
    assert [one.took_s for one in recoveries(seen(events=events, traces=traces, hits=hits))] == [
        pytest.approx(0.3), pytest.approx(0.25)]  # fmt: skip


def test_a_worker_that_was_stopped_for_too_long_must_be_named() -> None:
    hits = [Hit(1, "top", 12, 100.5, stopped=True)]
    assert found(seen(hits=hits, output="all is well")) == [Fault.NOT_NAMED]
    said = "lockstep: worker 2 (pid 12) is killed: it gave no sign of life for 1.1 s (stopped, or stuck)"
    assert found(seen(hits=hits, output=said)) == []


def test_half_of_the_recoveries_and_nearly_all_must_be_fast() -> None:
    def result(*took_s: float) -> Result:
        one = judge(seen(), REFERENCE)
        one.recoveries = [one.recoveries[0]._replace(took_s=each) for each in took_s]
        return one

    assert too_slow([result(0.1, 0.19, 1.4)]) == []
    assert len(too_slow([result(0.1, 0.3, 1.4)])) == 1
    assert len(too_slow([result(0.1, 0.1, 1.6)])) == 1
    assert "reduced" in table([result(0.1)])


def test_quantiles() -> None:
    assert quantile([], 0.99) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile([float(n) for n in range(1, 201)], 0.99) == 198.0


# ---------------------------------------------------------------------------------------------------------- the others


def test_growth_is_found_and_noise_is_not() -> None:
    def moments(**grows: float) -> list[Moment]:
        flat = {"resident_mb": 200.0, "threads": 5, "descriptors": 20, "mappings": 9}
        each = [{name: value + n * grows.get(name, 0) for name, value in flat.items()} for n in range(45)]
        launcher = Sample(**flat)  # type: ignore[arg-type]
        return [Moment(launcher, Sample(**one), 0) for one in each]  # type: ignore[arg-type]

    assert growth(moments()) == []
    assert growth(moments(resident_mb=0.01)) == []
    assert len(growth(moments(resident_mb=1.0))) == 1
    assert len(growth(moments(threads=1, descriptors=2))) == 2


def test_arguments() -> None:
    for kind in (training.KILLS, training_stops.PAUSES, training_behind.BEHINDS):
        assert training.read_arguments(kind, []).wanted == kind.wanted
        assert training.read_arguments(kind, ["--quick"]).wanted == kind.quick_wanted
        assert training.read_arguments(kind, [f"--{kind.what}", "7"]).wanted == 7
    assert training_soak.read_arguments(["--quick"]).recoveries == training_soak.QUICK
    for wrong in (["--kills", "-1"], ["--only-case", "-1"], ["--times", "0"]):
        with pytest.raises(SystemExit):
            training.read_arguments(training.KILLS, wrong)


def test_cases_are_dealt_out_over_the_seeds_until_there_are_enough_hits() -> None:
    results: list[Result] = []
    taken = []
    for case in training.until_enough(range(3, 5), 6, results, plan):
        taken.append((case.seed, case.number))
        results.append(judge(seen(hits=[*seen().hits, Hit(0, "reduced", 99, 0.0)]), REFERENCE))
    assert taken == [(3, 0), (3, 1), (4, 0)]


@pytest.mark.slow
def test_one_real_case(tmp_path: Path) -> None:
    """Three strikes: in a step, while the next generation forms, and from outside."""
    strikes = (Strike("reduced", members=3), Strike("joining", members=0), Strike(OUTSIDE, Who.FIRST, members=3))
    case = Case(
        seed=0,
        number=0,
        variant="tiny",
        run_seed=0,
        backend="shm",
        workers=3,
        save_every=3,
        num_workers=0,
        strikes=strikes,
        epochs=8,
    )
    references = References()
    references.need({case.program}, more=("--epochs", str(case.epochs)))
    one = carry_out(case, tmp_path / "case", strike_all)
    result = judge(one, references.of(case.program))
    assert result.findings == []
    assert {hit.strike for hit in one.hits} == {0, 1, 2}
    assert result.recoveries
