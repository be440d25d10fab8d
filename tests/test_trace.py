"""What a run writes down of itself: times that add up, who was waited for, how noisy the gradient is."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import LockstepError
from lockstep.step.step_types import Stop
from lockstep.trace.gradient_noise import AVERAGED_STEPS, FadingMean, NoiseScale, ShardNorms
from lockstep.trace.metrics import TensorBoardWriter
from lockstep.trace.step_timer import AFTER, APART_S, PHASES, StepTimer, StepTimes, TimedSpan, next_detailed_step
from lockstep.trace.trace_file import TraceFile
from lockstep.trace.trace_writer import StepWindow, TraceWriter, merge
from on_workers import on_workers

CPU = torch.device("cpu")
SLOW = pytest.mark.slow


# ---- pure ------------------------------------------------------------------------------------------------------------


def times(waited_s: float) -> StepTimes:
    return StepTimes(3, 0.0, 1.0, {"data": 0.1, "forward": 0.2, "wait": waited_s, "between": 0.7 - waited_s})


@pytest.mark.parametrize(
    ("waits_s", "exposed_s", "waiting_s", "for_whom"),
    [
        ([0.5, 0.1, 0.3], 0.1, 0.4, 1),  # rank 1 came last
        ([0.5, 0.5, 0.5], 0.5, 0.0, None),  # all together: nothing but communication
        ([0.5, 0.9], 0.5, 0.0, None),  # the others waited for us
        ([0.5], 0.5, 0.0, None),
    ],
)
def test_the_worker_that_waits_least_is_waited_for(
    waits_s: list[float], exposed_s: float, waiting_s: float, for_whom: int | None
) -> None:
    one = times(0.5)
    one.set_waits(waits_s)
    phases = one.phases()
    assert (phases["exposed"], phases["waiting"], one.waited_for) == (exposed_s, pytest.approx(waiting_s), for_whom)
    assert sum(phases.values()) == pytest.approx(1.0)


def test_a_stopwatch_gives_all_time_to_a_phase() -> None:
    watch = StepTimer(CPU)
    assert watch.begin_step(1) is None
    began_s = time.monotonic()
    for name, shard in (("data", -1), ("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("wait", -1)):
        time.sleep(0.002)
        watch.lap(name, shard)
    watch.add_bucket(0, began_s + 0.004, began_s + 0.006)
    found = watch.begin_step(2)
    assert found is not None
    assert sum(found.laps.values()) == pytest.approx(found.ended_s - found.began_s)
    assert found.laps["forward"] > 0.0035
    names = [span.name for span in found.spans]
    assert names == ["data", "forward 0", "backward 0", "forward 1", "backward 1", "wait", "between", "bucket 0"]


def test_few_steps_are_looked_at_closely_and_some_at_every_scale() -> None:
    looked, step = [], 0
    while (step := next_detailed_step(step)) < 1_000_000:
        looked.append(step)
        step += 1
    assert len(looked) < 60
    assert {1, 2, 5, 10, 12, 200, 50_001, 500_002} <= set(looked)
    assert 0 not in looked  # it is like no other
    assert all(next_detailed_step(step) == min(one for one in looked if one >= step) for step in range(1, 6000))


def test_the_first_step_is_not_looked_at_closely() -> None:
    watch = StepTimer(CPU)

    def looked(steps: range) -> list[int]:
        found = []
        for number in steps:
            watch.begin_step(number)
            found += [number] if watch.is_detailed else []
        return found

    assert looked(range(15)) == [1, 2, 3, 4, 5, 6, 7, 10, 11, 12]
    watch.reset()  # other workers
    assert looked(range(15, 30)) == [20, 21, 22]


def timed(watch: StepTimer, steps: range) -> list[int]:
    found = []
    for number in steps:
        watch.begin_step(number)
        found += [number] if watch.is_timed else []
    return found


def test_long_steps_are_timed_and_of_short_ones_a_few_without_a_rhythm() -> None:
    watch = StepTimer(CPU)
    assert timed(watch, range(50)) == list(range(50))  # how long they take is not known
    watch.set_pace({0: APART_S / 10, 1: APART_S / 16})
    found = timed(watch, range(600, 5000))
    assert len(found) == pytest.approx(440, rel=0.2)
    for period in range(2, 40):
        in_turn = [sum(number % period == turn for number in found) for turn in range(period)]
        assert max(in_turn) < 3 * len(found) / period, period  # a period of a program sees every part of itself timed
        assert min(in_turn) > 0.3 * len(found) / period - 1, period
    watch.set_pace({0: 2 * APART_S})
    assert timed(watch, range(7000, 7100)) == list(range(7000, 7100))


def test_all_workers_time_the_same_steps() -> None:
    one, other = StepTimer(CPU), StepTimer(CPU)
    other.reset()  # it joined later, when there were other workers
    for watch in (one, other):
        watch.set_pace({0: APART_S / 7})
    assert timed(one, range(30, 900)) == timed(other, range(30, 900))


def test_what_was_not_timed_counts_as_what_was() -> None:
    window = StepWindow(began_s=10.0, totals=None)
    window.add(times(0.5))
    window.count = 3  # of which one was timed: it took a second
    line = window.close(ended_s=14.0, totals=None)
    assert sum(line["phases"].values()) == pytest.approx(4.0)
    assert line["phases"]["forward"] == pytest.approx(0.6)
    assert line["phases"]["between"] == pytest.approx(3 * 0.2 + 1.0)  # an evaluation, say


def test_what_is_known_of_all_steps_is_not_guessed() -> None:
    """Of ten steps one was timed, and it was not one that waited for data, or before an evaluation."""
    window = StepWindow(began_s=10.0, totals=(1.0, 2.0))
    window.add(StepTimes(3, 0.0, 1.0, {"data": 0.01, "forward": 0.3, "backward": 0.6, AFTER: 0.09}))
    window.count = 10
    line = window.close(ended_s=20.0, totals=(4.0, 3.5))
    assert line["phases"]["data"] == pytest.approx(3.0)
    assert line["phases"]["between"] == pytest.approx(1.5)
    assert (line["phases"]["forward"], line["phases"]["backward"]) == (pytest.approx(5.5 / 3), pytest.approx(11 / 3))


def test_a_window_in_which_no_step_was_timed_is_like_the_one_before() -> None:
    before = dict.fromkeys(PHASES, 0.0) | {"forward": 0.3, "backward": 0.5, "data": 0.1, "between": 0.2}
    for totals in (None, (0.0, 0.0)):
        window = StepWindow(10.0, totals)
        window.count = 5
        later = None if totals is None else (0.1, 0.3)  # of two seconds: data, and what is done between steps
        phases = window.close(12.0, later, before)["phases"]
        assert sum(phases.values()) == pytest.approx(2.0)
        assert phases["backward"] == pytest.approx(5 / 3 * phases["forward"])
        assert phases["between"] == pytest.approx(0.0 if totals is None else 0.3)
    nothing = StepWindow(10.0, None)
    nothing.count = 5
    assert nothing.close(12.0, None)["phases"]["between"] == 2.0


def test_every_line_belongs_to_the_workers_above_it(tmp_path: Path) -> None:
    """Steps of a new generation that end before it was described, and those of one that was never described."""
    trace_writer = TraceWriter(tmp_path / "trace", "rank0", torch.device("cpu"))
    trace_writer.begin(None)
    for generation, steps in ((1, range(3)), (2, range(3, 4)), (3, range(4, 8))):
        trace_writer.set_world(None, generation=generation, rank=0, size=1, first=steps[0])
        for step in steps:
            at_s = time.monotonic()
            spans = [TimedSpan("forward 0", 0.0, 0.01)]
            times = StepTimes(step, at_s, at_s + 0.01, {"forward": 0.01}, spans)
            trace_writer.count_step(step, 0.5, 8, time.monotonic())
            trace_writer.add_timed_step(times, describe=dict)
    trace_writer.close(None, succeeded=True)
    told: dict[int, list[Any]] = {}
    generation = 0
    for path in (tmp_path / "trace").glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            generation = line["generation"] if line["kind"] == "world" else generation
            if line["kind"] == "spans":
                told.setdefault(generation, []).append(line["step"])
            if line["kind"] == "steps":
                told.setdefault(-generation, []).append((line["first"], line["count"]))
    assert told == {1: [0, 1, 2], -1: [(0, 3)], 2: [3], -2: [(3, 1)], 3: [4, 5, 6, 7], -3: [(4, 4)]}


def test_windows_that_follow_each_other_make_one() -> None:
    lines = []
    for first, loss in ((0, 4.0), (3, 1.0)):
        window = StepWindow(began_s=10.0 + first, totals=(0.0, 0.0))
        window.first, window.count, window.samples, window.loss = first, 3 - first // 3, 30, loss * (3 - first // 3)
        window.add(StepTimes(first, 0.0, 1.0, {"forward": 0.4, "wait": 0.6}, exposed_s=0.1, waited_for=first))
        lines.append(window.close(ended_s=13.0 + first // 3 * 2, totals=(0.0, 0.0)) | {"rss": first})
    one = merge(merge(None, lines[0]), lines[1])
    assert (one["t0"], one["t1"], one["first"], one["count"], one["samples"], one["rss"]) == (10.0, 15.0, 0, 5, 60, 3)
    assert one["loss"] == pytest.approx((3 * 4 + 2 * 1) / 5)
    assert one["waited_for"] == {"0": pytest.approx(1.5), "3": pytest.approx(1.0)}
    assert sum(one["phases"].values()) == pytest.approx(5.0)


def test_who_is_slow_to_tell_is_waited_for_and_not_for_ever() -> None:
    trace_writer = TraceWriter(None, "rank0", CPU)
    trace_writer.set_world(None, size=2, first=0)
    for number in range(40):
        trace_writer.add_timed_step(StepTimes(number, 0.0, 1.0, {"wait": 0.5}), describe=dict)
        if number % 2 == 0:
            # Rank 1 is a step behind, and skips some.
            trace_writer.add_reports([(number, 0.5, 1.0), (number - 1, 0.2, 1.0)])
    heard = trace_writer._window.waited_for
    assert heard == {}  # no step was told of by both
    assert trace_writer._window.phases["exposed"] > 0  # those that are old enough count all the same
    assert len(trace_writer._unreported) < 20


# ---- noise -----------------------------------------------------------------------------------------------------------


def test_noise_is_told_from_signal() -> None:
    """Gradients (2, 0) plus or minus (0, 3): signal 4, noise 9, so the scale is 9/4."""
    scale = NoiseScale()
    for step in range(50):
        scale.add_batch(step, (4 + 9 / 32) ** 0.5, samples=32)
        scale.add_shards(ShardNorms(step, mean_sq=4 + 9 / 4, shards=8, samples=32))
    facts = scale.facts()
    assert facts is not None
    assert facts["scale"] == pytest.approx(9 / 4)
    scale.population = 32  # a batch is all there is: then its gradient has no noise
    assert (scale.facts() or {})["signal"] == pytest.approx(4 + 9 / 32)


def test_nothing_is_said_without_both() -> None:
    scale = NoiseScale()
    scale.add_batch(1, 1.0, samples=8)
    assert scale.facts() is None
    scale.add_shards(ShardNorms(1, mean_sq=2.0, shards=1, samples=8))  # one shard is the whole batch
    scale.add_shards(ShardNorms(7, mean_sq=2.0, shards=8, samples=8))  # of a step that we do not know
    scale.add_shards(ShardNorms(1, mean_sq=float("nan"), shards=8, samples=8))
    assert scale.facts() is None


def test_old_values_fade() -> None:
    mean = FadingMean()
    mean.add(0, 100.0)
    mean.add(20 * AVERAGED_STEPS, 1.0)
    assert mean.value == pytest.approx(1.0)


def of_all_samples(model: nn.Module, data: TensorDataset, loss: Any) -> float:
    """Every sample's gradient, one by one: their variance over the square of their mean."""
    state = {name: value.detach() for name, value in model.named_parameters()}

    def one(state: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(model, state, (x[None],)), y[None])

    found = vmap(grad(one), in_dims=(None, 0, 0))(state, *data.tensors)
    gradients = torch.cat([value.flatten(1) for value in found.values()], 1).double()
    mean = gradients.mean(0)
    return float((gradients - mean).square().sum() / (len(gradients) - 1) / mean.square().sum())


def line_data() -> TensorDataset:
    torch.manual_seed(0)
    x = torch.randn(2000, 10)
    return TensorDataset(x, x @ torch.randn(10, 1) + 0.5 * torch.randn(2000, 1))


def blob_data() -> TensorDataset:
    torch.manual_seed(1)
    labels = torch.arange(1200) % 4
    return TensorDataset(torch.randn(1200, 6) + 0.8 * F.one_hot(labels, 6), labels)


MODELS = {
    "a line": (line_data, lambda: nn.Linear(10, 1), F.mse_loss, 64),
    "blobs": (blob_data, lambda: nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4)), F.cross_entropy, 128),
}


@pytest.mark.parametrize("which", ["a line", pytest.param("blobs", marks=SLOW)])
def test_the_noise_scale_is_what_all_samples_one_by_one_give(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_data, make_model, of, batch = MODELS[which]
    monkeypatch.setattr(
        "lockstep.trace.gradient_noise.SHARE_OF_TIME", 1.0
    )  # so that the machine does not decide how often
    data = make_data()

    def loss(model: nn.Module, part: Any) -> tuple[Tensor, int]:
        return of(model(part[0]), part[1], reduction="sum"), len(part[1])

    with lockstep.Run(seed=1, progress=False, device="cpu") as run:
        model = run.replicate(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for part in run.train(run.batches(data, global_batch_size=batch, shards=8, epochs=None), optimizer, steps=500):
            run.step(loss, part)
        measured = run.noise_scale
    assert measured == pytest.approx(of_all_samples(model, data, lambda y, to: of(y, to, reduction="sum")), rel=0.1)


# ---- real runs -------------------------------------------------------------------------------------------------------


class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples that take their time."""

    is_random = False

    def __init__(self, each_s: float) -> None:
        self._each_s = each_s

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._each_s)
        return torch.full((8,), index / 400), torch.tensor(index % 2)


def train(rank: int, size: int, folder: Path, planted: str, options: Any = None) -> dict[str, float]:
    """Returns what this worker's loop took, measured from outside, by step."""

    def loss(model: nn.Module, part: Any) -> tuple[Tensor, int]:
        if planted == "slow worker" and rank == 1:
            time.sleep(0.005)
        return F.cross_entropy(model(part[0]), part[1], reduction="sum"), len(part[1])

    dataset = Slow(0.002 if planted == "slow data" else 0.0)
    with lockstep.Run(folder, seed=1, progress=False, device="cpu", backend="gloo", **(options or {})) as run:
        model = run.replicate(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = run.batches(dataset, global_batch_size=16, shards=4, epochs=4)
        began_s = time.monotonic()
        for part in run.train(batches, optimizer):
            run.step(loss, part)
            now_s = time.monotonic()
            began_s = now_s if part.number == 0 else began_s
            took_s = now_s - began_s
        run.log(accuracy=0.5)
    return {"took_s": took_s, "steps": 99}


def lines_of(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("trace/*.jsonl")):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            if found["kind"] == kind:
                yield found | {"file": path.name}


@pytest.mark.parametrize(
    "planted", ["slow worker", pytest.param("nothing", marks=SLOW), pytest.param("slow data", marks=SLOW)]
)
def test_times_add_up_and_show_what_was_planted(planted: str, tmp_path: Path) -> None:
    options = {"balance_shards": False}  # a slow worker would be given fewer shards, and be waited for less
    outcome = on_workers(train, 2, tmp_path, planted, options)
    for rank in range(2):
        mine = [line for line in lines_of(tmp_path, "steps") if f"-rank{rank}-" in line["file"]]
        assert sum(line["count"] for line in mine) == 100
        for line in mine:
            assert list(line["phases"]) == list(PHASES)
            assert sum(line["phases"].values()) == pytest.approx(line["t1"] - line["t0"], rel=1e-3)
        whole_s = mine[-1]["t1"] - mine[0]["t0"]
        first_s = whole_s - outcome[rank]["took_s"]  # the first step is not in what was measured outside
        assert -0.5 < first_s < 30  # it imports the compiler, on a machine that may be busy
    sums: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    waited_for: dict[str, float] = {}
    for line in lines_of(tmp_path, "steps"):
        for name, seconds in line["phases"].items():
            sums[name] += seconds
        for rank_name, seconds in line["waited_for"].items():
            waited_for[rank_name] = waited_for.get(rank_name, 0.0) + seconds
    if planted == "slow worker":  # of 200 steps, each waits 10 ms for two shards of rank 1: on rank 0
        assert max(waited_for, key=waited_for.__getitem__) == "1"
        assert sums["waiting"] > 0.5 * 100 * 0.010
    if planted == "slow data":
        assert max(sums, key=sums.__getitem__) == "data"


def test_a_trace_says_who_wrote_it_and_how_things_are(tmp_path: Path) -> None:
    on_workers(train, 2, tmp_path, "nothing")
    heads, worlds = list(lines_of(tmp_path, "head")), list(lines_of(tmp_path, "world"))
    assert {head["worker"] for head in heads} == {"rank0", "rank1"}
    assert [world["size"] for world in worlds] == [2, 2]
    (bucket_bytes,), ((_, _, parameters),) = worlds[0]["buckets"], worlds[0]["bucket_names"]
    assert parameters == 4
    assert bucket_bytes > worlds[0]["memory"]["gradients"] > 0  # and the marks of those that were used
    assert [end["step"] for end in lines_of(tmp_path, "end")] == [100, 100]
    assert list(lines_of(tmp_path, "noise"))
    spans = list(lines_of(tmp_path, "spans"))
    assert {1, 2, 3, 4, 5, 6, 10, 20, 50} <= {one["step"] for one in spans}
    assert any(name == "bucket 0" for one in spans for name, *_ in one["spans"])
    now = json.loads((tmp_path / "trace" / "rank0.now").read_text())
    assert (now["state"], now["step"], now["steps"], now["metrics"]) == ("ended", 100, 100, {"accuracy": 0.5})


@SLOW
def test_tensorboard_gets_figures_once(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    on_workers(train, 2, tmp_path, "nothing", {"tensorboard": True})
    (file,) = (tmp_path / "tensorboard").iterdir()
    found = reader.EventAccumulator(str(file))
    found.Reload()
    assert {"loss", "learning rate", "samples per second", "accuracy"} <= set(found.Tags()["scalars"])
    assert [(event.step, event.value) for event in found.Scalars("accuracy")] == [(100, 0.5)]


def test_tensorboard_needs_a_place_and_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LockstepError, match="tensorboard=True: where shall its files go"):
        TensorBoardWriter(None, enabled=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LockstepError, match="pip install tensorboard"):
        TensorBoardWriter(tmp_path, enabled=True)


def test_a_run_that_cannot_begin_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_RUN_DIR", str(tmp_path))  # as a launcher does, so there is a trace
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the Run has one of its own until its error is at the top
    with pytest.raises(LockstepError, match="tensorboard=True: where"), lockstep.Run(tensorboard=True, device="cpu"):
        raise AssertionError("not reached")
    assert "lockstep-trace" not in {thread.name for thread in threading.enumerate()}
    (event,) = lines_of(tmp_path, "event")
    assert event["what"] == "error"
    assert "where shall its files go" in event["text"]


@pytest.mark.slow
def test_a_run_that_cannot_end_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the disk is gone"), lockstep.Run(tmp_path, progress=False, device="cpu") as run:
        run._session.stops.agreed = Stop.SIGNAL  # the error is what the user must see, not that it was told to end
        run._session.checkpoints.saver.close = lambda: fail(OSError("the disk is gone"))  # type: ignore[method-assign]
    assert "lockstep-trace" not in {thread.name for thread in threading.enumerate()}
    assert [event["what"] for event in lines_of(tmp_path, "event")] == ["error"]
    assert list(lines_of(tmp_path, "end")) == []
    stranger = "import sys, lockstep\nwith lockstep.Run(sys.argv[1], progress=False, device='cpu'): print('mine')"
    done = subprocess.run([sys.executable, "-c", stranger, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.stdout == "mine\n", done.stderr


def fail(error: Exception) -> None:
    raise error


def test_what_follows_the_last_step_is_no_part_of_it(tmp_path: Path) -> None:
    with lockstep.Run(tmp_path, progress=False, device="cpu") as run:
        model = run.replicate(nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part in run.train(run.batches(Slow(0), global_batch_size=16, shards=8), optimizer, steps=3):
            run.step(lambda model, part: (model(part[0]).sum(), len(part[1])), part)
        time.sleep(0.5)  # an evaluation
    (end,) = lines_of(tmp_path, "end")
    assert end["t"] - max(line["t1"] for line in lines_of(tmp_path, "steps")) >= 0.499


class Named(torch.optim.SGD):
    """Keeps something that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = torch.tensor([1])  # type: ignore[index]
        self.param_groups[0]["rate"] = self.param_groups[0]["lr"]
        return super().step(closure)


def test_an_optimiser_may_keep_what_it_likes(tmp_path: Path) -> None:
    with lockstep.Run(tmp_path, progress=False, device="cpu", save_every="1h") as run:
        model = run.replicate(nn.Linear(8, 2))
        for part in run.train(
            run.batches(Slow(0), global_batch_size=16, shards=8), Named(model.parameters(), lr=0.1), steps=4
        ):
            run.step(lambda model, part: (model(part[0]).sum(), len(part[1])), part)
        run.directory = None  # no checkpoint can hold such a state
        run._session.checkpoints.saver._store = None
    assert [world["memory"]["weights"] for world in lines_of(tmp_path, "world")] == [72]


def test_lines_are_written_once_though_the_other_file_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "rank0.now").mkdir()  # so it cannot be replaced
    file = TraceFile(tmp_path, "name", "rank0")
    file.begin(lambda: {"state": "training"})
    for number in range(3):
        file.add("event", number=number)
    time.sleep(1.2)
    file.close()
    assert [json.loads(line)["number"] for line in (tmp_path / "name.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_no_trace_where_none_is_wanted(tmp_path: Path) -> None:
    with lockstep.Run(tmp_path, progress=False, trace=False, device="cpu") as run:
        model = run.replicate(nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part in run.train(run.batches(Slow(0), global_batch_size=16, shards=8), optimizer, steps=2):
            run.step(lambda model, part: (model(part[0]).sum(), len(part[1])), part)
    assert not (tmp_path / "trace").exists()


def test_a_trace_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("in the way")  # so no folder can be made there
    with lockstep.Run(tmp_path, progress=False, device="cpu") as run:
        model = run.replicate(nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part in run.train(run.batches(Slow(0), global_batch_size=16, shards=8), optimizer, steps=3):
            run.step(lambda model, part: (model(part[0]).sum(), len(part[1])), part)
    assert (tmp_path / "trace").read_text() == "in the way"
