"""What a report says of traces with planted troubles, of damaged ones, and of nothing at all."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import main
from lockstep.errors import LockstepError
from lockstep.report.generations import choose_excerpt, find_excerpts, find_generations, split_buckets
from lockstep.report.page import mark_code
from lockstep.report.run_folder import worker_name
from lockstep.report.summary import MOST_POINTS, RunSummary, Status, advise_batch, draw, summarize, thin_out
from lockstep.report.time_shares import COMPUTE, TimeUsage, ms
from lockstep.report.trace_reader import PHASES, DetailedStep, TraceSpan, read_trace
from lockstep.run_files import write_pointers
from traces import UNIX_S, Plan, make_trace, write_trace

NOW_S = UNIX_S + 1e6
EVIL = "</script><img src=x onerror=\"document.title='harm'\">"


def story_of(run: Path) -> RunSummary:
    return summarize(read_trace(run, now_s=NOW_S))


def plant(tmp_path: Path, **plan: Any) -> RunSummary:
    return story_of(write_trace(tmp_path / "run", Plan(**plan)))


def rewrite(run: Path, change: Any) -> None:
    """Every line of every file through `change`, which returns text or None for none."""
    for path in (run / "trace").glob("*.jsonl"):
        lines = [change(line) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{line}\n" for line in lines if line is not None))


# ---- the planted cause is on top


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_slow_worker_is_named_with_its_figures(tmp_path: Path, rank: int) -> None:
    story = plant(tmp_path, slow={rank: 1.6})
    worst = story.causes[0]
    assert worst.kind == "worker"
    assert f"for rank {rank}, which computes slower" in worst.sentence
    late = story.late[0]
    assert (late.worker, late.reason) == (f"rank {rank}", "compute")
    assert late.own_s["compute"] == pytest.approx(0.08 * 1.6 * 1.015 + 0.004, rel=0.02)
    others = [usage for usage in story.usages if usage.rank != rank]
    waited = sum(usage.phases["waiting"] for usage in others) / sum(usage.seconds for usage in others)
    assert worst.cost == pytest.approx(waited, rel=0.01)


def test_a_slow_loader_is_named(tmp_path: Path) -> None:
    worst = plant(tmp_path, data_s=0.07).causes[0]
    assert worst.kind == "data"
    assert "for the loader: 70 ms of a step of" in worst.sentence
    assert "num_workers" in worst.advice


def test_a_slow_network_is_named(tmp_path: Path) -> None:
    story = plant(tmp_path, exposed_s=0.06)
    assert story.causes[0].kind == "communication"
    assert "60 ms of a step of" in story.causes[0].sentence
    assert [bucket.exposed_s for bucket in story.buckets] == pytest.approx([0, 0, 0, 0.06], abs=1e-4)


def test_the_loader_of_one_worker_is_told_as_that_worker(tmp_path: Path) -> None:
    story = plant(tmp_path, hungry={2: 30.0})
    assert story.causes[0].kind == "worker"
    assert "rank 2, which gets its data later than the others: 60 ms per step against 2 ms" in story.causes[0].sentence


def test_a_program_that_does_much_between_steps(tmp_path: Path) -> None:
    assert plant(tmp_path, between_s=0.09).causes[0].kind == "between"


def test_chance_alone_blames_no_worker(tmp_path: Path) -> None:
    for workers in (2, 4, 8):
        story = plant(tmp_path / str(workers), workers=workers, jitter=1.0)
        assert story.causes[0].kind == "turns"


def test_a_run_without_trouble(tmp_path: Path) -> None:
    for workers in (1, 4):
        story = plant(tmp_path / str(workers), workers=workers)
        assert [cause.kind for cause in story.causes] == ["none"]
        assert "compute 92 % of the time" in story.causes[0].sentence


def test_recoveries_that_took_long(tmp_path: Path) -> None:
    run = write_trace(tmp_path, Plan())
    line = {"kind": "event", "t": 5.0, "step": 50, "what": "recovery", "took_s": 6.0}
    rewrite(run, lambda old: f"{json.dumps(line)}\n{old}" if '"end"' in old else old)
    assert story_of(run).causes[0].kind == "recovery"


# ---- figures


@pytest.mark.parametrize("plan", [Plan(), Plan(slow={1: 2.0}), Plan(workers=1), Plan(exposed_s=0.1, hosts=2)])
def test_phases_add_up_to_the_time_of_the_steps(tmp_path: Path, plan: Plan) -> None:
    run = write_trace(tmp_path, plan)
    story = story_of(run)
    for usage, process in zip(story.usages, read_trace(run, now_s=NOW_S).processes, strict=True):
        took_s = sum(window.took_s for window in process.records[0].windows)
        assert sum(usage.phases.values()) == usage.seconds == pytest.approx(took_s, rel=0.03)
    total = story.total
    assert sum(total.share(name) for name in total.phases) == pytest.approx(1)
    assert story.compute_share == pytest.approx(sum(total.phases[name] for name in COMPUTE) / total.seconds)


def test_time_that_no_phase_claims_is_shown_as_such(tmp_path: Path) -> None:
    run = write_trace(tmp_path, Plan())

    def halve(line: str) -> str:
        found = json.loads(line)
        found["phases"] = {name: s / 2 for name, s in found.get("phases", {}).items()}
        return json.dumps(found)

    rewrite(run, halve)
    assert story_of(run).total.share("other") == pytest.approx(0.5, rel=0.01)


def test_efficiency_against_one_worker_alone_in_the_same_run(tmp_path: Path) -> None:
    write_trace(tmp_path, Plan(workers=1, steps=60, ended=False))
    write_trace(tmp_path, Plan(workers=4, steps=200, first=61, generation=1, begin_s=8.0, exposed_s=0.08))
    story = story_of(tmp_path)
    assert story.scaling is not None
    assert story.scaling.workers == 4
    assert story.scaling.efficiency == pytest.approx(story.scaling.samples_per_s / 4 / story.scaling.alone_per_s)
    assert 0.1 < story.scaling.efficiency < 0.2  # as fast as one, with the same batch, and slower to agree
    assert plant(tmp_path / "four").scaling is None


def test_a_bucket_is_exposed_as_far_as_it_overlaps_a_wait() -> None:
    spans = (
        TraceSpan("backward 0", "main", 0, 100),
        TraceSpan("wait", "main", 100, 50),
        TraceSpan("bucket 0", "comm", 40, 30),
        TraceSpan("bucket 1", "comm", 70, 50),
        TraceSpan("bucket 1", "comm", 120, 30),
        TraceSpan("bucket x", "comm", 0, 30),
    )
    assert split_buckets(DetailedStep(1, 0.0, spans)) == {0: (0, 30), 1: (50, 30)}


def test_thinning_out_keeps_spikes_gaps_and_ends() -> None:
    chance = random.Random(3)
    points: list[tuple[int, float | None]] = [(step, chance.random()) for step in range(10_000)]
    points[4321], points[777], points[5000] = (4321, 99.0), (777, -99.0), (5000, None)
    thin = thin_out(points, MOST_POINTS)
    assert len(thin) <= MOST_POINTS
    assert {points[0], points[777], points[4321], points[5000], points[-1]} <= set(thin)
    assert thin == sorted(thin, key=lambda point: point[0])


def test_losses_that_are_no_numbers(tmp_path: Path) -> None:
    story = plant(tmp_path, losses={50: math.nan, 60: math.inf, 70: 1e308, 80: 10**400, 90: "x", 200: math.nan})
    loss = next(curve for curve in story.curves if curve.name == "loss")
    assert (loss.not_finite, loss.first_not_finite) == (3, 50)
    values = dict(loss.points)
    assert values[50] is values[60] is values[200] is None
    assert values[70] == 1e308
    assert {80, 90}.isdisjoint(values)
    assert loss.last == values[199]


def test_a_curve_of_nothing() -> None:
    assert draw("loss", "", [(1, None)]).points == ()
    only = draw("loss", "", [(1, math.nan)])
    assert (only.points, only.last, only.not_finite) == (((1, None),), None, 1)


@pytest.mark.parametrize(
    ("scale", "batch", "advice"),
    [
        (27, 64, "which is more: a larger batch no longer pays"),
        (127.9, 256, "which is more: a larger batch no longer pays"),
        (128, 256, "which is about the same: it is near the largest that pays"),
        (256, 256, "which is about the same: it is near the largest that pays"),
        (512, 256, "which is about the same: it is near the largest that pays"),
        (512.1, 256, "which is less: a larger batch pays."),
        (10_000, 256, "which is less: a larger batch pays."),
    ],
)
def test_what_the_noise_scale_says_of_the_batch(scale: float, batch: float, advice: str) -> None:
    said = advise_batch(scale, batch)
    assert f"about {scale:,.0f} samples, the batch has {batch}, {advice}" in said
    assert ("fewer samples" in said) == ("no longer" in said)


def test_what_twice_the_batch_costs() -> None:
    assert "50 % fewer steps, and 0 % more samples" in advise_batch(1e9, 1)
    assert "25 % fewer steps, and 50 % more samples" in advise_batch(256, 256)
    assert "0 % fewer steps, and 100 % more samples" in advise_batch(0.1, 256)
    assert "the batch size is not known" in advise_batch(27, 0)


def test_the_noise_scale_is_compared_with_the_batch_that_was_asked_for(tmp_path: Path) -> None:
    """The last batch of an epoch is smaller, so the mean of them is, too."""
    run = write_trace(tmp_path, Plan())
    rewrite(run, lambda line: line.replace('"batch": 256', '"batch": 251.3'))
    noise = story_of(run).noise
    assert noise is not None
    assert noise.batch == 256
    assert "the batch has 256" in noise.advice
    assert noise.scale == pytest.approx(1500, rel=0.1)
    assert plant(tmp_path / "none", noise=False).noise is None


def test_advice_about_a_network_between_hosts_needs_hosts(tmp_path: Path) -> None:
    (one, *_), (two, *_) = (
        plant(tmp_path / "1", exposed_s=0.06).causes,
        plant(tmp_path / "2", exposed_s=0.06, hosts=2).causes,
    )
    assert one.kind == two.kind == "communication"
    assert "hosts" not in one.advice
    assert "network between the hosts" in two.advice


def test_code_is_marked_on_the_page_and_plain_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_trace(tmp_path, Plan(data_s=0.07))
    assert main(["report", str(run)]) == 0
    page, out = (run / "report.html").read_text(), capsys.readouterr().out
    assert "Give it more processes (num_workers=)" in out
    assert "`" not in out
    assert "Give it more processes (<code>num_workers=</code>)" in page
    assert "`" not in page.split("<body>")[1].split('<script type="application/json"')[0]
    assert mark_code("a `b<c` and ` alone") == "a <code>b&lt;c</code> and ` alone"


def test_the_timeline_begins_with_most_workers(tmp_path: Path) -> None:
    """Also if the last steps that were looked at closely, and the last ones at all, are those of fewer."""
    write_trace(tmp_path, Plan(workers=3, steps=60, ended=False))
    write_trace(tmp_path, Plan(workers=1, steps=60, first=61, generation=1, begin_s=8.0, exposed_s=0.06))
    trace = read_trace(tmp_path, now_s=NOW_S)
    excerpts = find_excerpts(find_generations(trace))
    best = choose_excerpt(excerpts)
    assert (excerpts[best].generation.size, excerpts[-1].generation.size) == (3, 1)
    assert min(excerpts[best].steps) == max(min(excerpt.steps) for excerpt in excerpts if excerpt.generation.size == 3)
    assert [bucket.exposed_s for bucket in summarize(trace).buckets] == pytest.approx([0, 0, 0, 0.004], abs=1e-4)
    assert choose_excerpt([]) == 0
    main(["report", str(tmp_path)])
    data = json.loads(Scripts((tmp_path / "report.html").read_text()).texts[0])
    assert len(data["scenes"][data["best"]]["rows"]) == 3
    assert data["scenes"][data["best"]]["label"].endswith(" on 3 workers")


def test_metrics_of_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noted: dict[int, Any] = {100: {"accuracy": 0.5, "odd": "x"}, 200: {"accuracy": 0.75, "`top 5`": math.nan}}
    run = write_trace(tmp_path, Plan(workers=2, metrics=noted))
    path = min((run / "trace").glob("*.jsonl"))
    path.write_text(path.read_text() + '{"kind": "metrics"}\n')
    story = story_of(run)
    assert [(curve.name, curve.points) for curve in story.metrics] == [
        ("accuracy", ((100, 0.5), (200, 0.75))),
        ("`top 5`", ((200, None),)),
    ]
    assert story.left_out == 1
    assert main(["report", str(run)]) == 0
    assert "metrics     accuracy 0.75 at step 200, top 5 never finite at step 200\n" in capsys.readouterr().out


LAUNCHER = [
    {"time": UNIX_S - 1, "event": "started", "worker": "h0.0", "pid": 5, "slot": 0},
    {"time": UNIX_S - 1, "event": "started", "worker": "h0.1", "pid": 6, "slot": 1},
    {"time": UNIX_S + 4, "event": "lost", "worker": "h0.1", "code": -9},
    {"time": UNIX_S + 4.1, "event": "started", "worker": "h0.2", "pid": 7, "slot": 1},
    {"time": "x", "event": "lost", "worker": "h0.7"},
    {"time": UNIX_S + 20, "event": "ended", "worker": "h0.0", "code": 0},
]


def test_what_the_launcher_knows_is_among_the_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, logs = tmp_path / "run", tmp_path / "logs"
    write_trace(run, Plan(workers=2, steps=50, ended=False, names=("h0.0", "h0.1")))
    write_trace(run, Plan(workers=2, steps=50, first=51, generation=2, begin_s=4.2, names=("h0.0", "h0.2")))
    logs.mkdir()
    (logs / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LAUNCHER) + '{"cut o')
    (run / "launch.json").write_text(json.dumps({"logs": str(logs)}))
    (logs / "run.json").write_text(json.dumps({"directory": str(run)}))
    for place in (run, logs, run / "trace"):
        found = [(one.what, one.text) for one in story_of(place).happenings if "worker" in one.what]
        assert found == [
            ("worker lost", "worker 1 was killed by SIGKILL"),
            ("worker started", "worker 2 was started in place of worker 1"),
        ]
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    assert "after 4 s: worker 1 was killed by SIGKILL\n" in out
    (logs / "events.jsonl").unlink()  # the trace alone knows that it was lost, and not how
    assert [one.text for one in story_of(run).happenings if one.what == "worker lost"] == ["worker 1 was lost"]


def test_events_of_earlier_launches_are_found_too(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "run", Plan())
    for number, code in enumerate((-9, 3)):
        logs = tmp_path / f"logs{number}"
        logs.mkdir()
        line = {"time": UNIX_S + number, "event": "lost", "worker": f"node-{'ab12cd'}.{number}", "code": code}
        (logs / "events.jsonl").write_text(json.dumps(line) + "\n")
        write_pointers(run, logs)
        write_pointers(run, logs)  # by the next generation of workers
    assert [one.text for one in story_of(run).happenings if one.what == "worker lost"] == [
        "worker 0 on node was killed by SIGKILL",
        "worker 1 on node failed with exit status 3",
    ]


@pytest.mark.parametrize(
    ("worker", "host", "name"),
    [
        ("h0.12", "", "worker 12"),
        ("h0.12", "vm", "worker 12"),
        ("rank3", "", "rank 3"),
        ("rank3", "vm", "rank 3 on vm"),
        ("gpu-1-0a1b2c.4", "gpu-1.cluster", "worker 4 on gpu-1"),
        ("my own", "", "my own"),
    ],
)
def test_one_name_per_worker(worker: str, host: str, name: str) -> None:
    assert worker_name(worker, host) == name


def test_memory_adds_up(tmp_path: Path) -> None:
    for memory in plant(tmp_path).memory:
        assert sum(memory.parts.values()) == memory.total_bytes == 700 * 2**20
        assert memory.where == "process"


def test_an_event_of_all_workers_is_told_once(tmp_path: Path) -> None:
    happenings = plant(tmp_path).happenings
    assert [(one.what, one.step) for one in happenings] == [
        ("training", None),
        ("checkpoint", 100),
        ("checkpoint", 200),
    ]
    assert happenings[1].workers == ("rank 0", "rank 1", "rank 2", "rank 3")


# ---- launches, generations, hosts


def test_clocks_of_hosts_are_aligned(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path, Plan(hosts=4)), now_s=NOW_S)
    begins = [process.records[0].windows[0].begin_s for process in trace.processes]
    assert begins == pytest.approx([UNIX_S + 0.2] * 4, abs=1e-3)
    assert summarize(trace).hosts == 4


def test_the_timeline_does_not_depend_on_wall_clocks_that_differ(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path, Plan(hosts=2, skew_s=0.3, slow={1: 1.5})), now_s=NOW_S)
    for excerpt in find_excerpts(find_generations(trace)):
        for by_rank in excerpt.steps.values():
            begins = [detailed.begin_s for detailed in by_rank.values()]
            assert begins == pytest.approx([begins[0]] * 4, abs=1e-4)


def test_a_wall_clock_that_was_set_moves_no_worker_of_the_same_host(tmp_path: Path) -> None:
    plan, offsets = Plan(workers=2), []
    run = write_trace(tmp_path, plan)
    path = max((run / "trace").glob("*.jsonl"))
    head, *rest = path.read_text().splitlines()
    changed = json.loads(head)
    changed["unix_s"] += 0.4
    path.write_text("\n".join([json.dumps(changed), *rest]) + "\n")
    for process in read_trace(run, now_s=NOW_S).processes:
        offsets.append(process.records[0].windows[0].begin_s)
    assert offsets[0] == offsets[1]


def test_workers_that_come_and_go(tmp_path: Path) -> None:
    """Three workers; one is lost, two go on; a rank means another worker in the next generation."""
    first = make_trace(Plan(workers=3, steps=100, names=("h0.0", "h0.1", "h0.2"), ended=False, slow={1: 1.5}))
    second = make_trace(
        Plan(workers=2, steps=100, first=101, generation=1, names=("h0.0", "h0.2"), begin_s=20.0, slow={1: 1.5})
    )
    first[0] += second[0][1:]
    first[2] += second[1][1:]
    (tmp_path / "trace").mkdir()
    for number, lines in enumerate(first):
        (tmp_path / "trace" / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    story = story_of(tmp_path)
    assert [usage.worker for usage in story.usages] == ["worker 0", "worker 1", "worker 2"]
    assert {late.worker for late in story.late} == {"worker 1", "worker 2"}
    assert (story.steps_done, story.workers, story.status) == (200, 2, Status.ENDED)
    assert [one.text for one in story.happenings if one.what in ("training", "worker lost")] == [
        "begins on 3 workers",
        "worker 1 was lost",
        "continues on 2 workers: without worker 1",
    ]


def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    write_trace(tmp_path, Plan(steps=100, ended=False))
    write_trace(tmp_path, Plan(steps=100, first=51, begin_s=500.0))
    story = story_of(tmp_path)
    steps = [step for step, _ in story.curves[0].points]
    assert steps == sorted(set(steps))
    assert story.steps_done == 150


def test_how_it_stands(tmp_path: Path) -> None:
    run = write_trace(tmp_path, Plan(steps=20, ended=False))
    assert story_of(run).status is Status.INTERRUPTED
    now = {"t": 5.0, "unix_s": NOW_S - 1, "worker": "rank0", "state": "training"}
    (run / "trace" / "rank0.now").write_text(json.dumps(now))
    assert story_of(run).status is Status.RUNNING
    (run / "trace" / "rank0.now").write_text(json.dumps(now | {"unix_s": NOW_S - 100}))
    assert story_of(run).status is Status.INTERRUPTED
    (run / "trace" / "rank0.now").write_text('{"t": 5')
    assert story_of(run).status is Status.INTERRUPTED


def test_where_the_trace_is_looked_for(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "run", Plan(steps=5))
    (run / "ledger.jsonl").write_text('{"other": 1}\n')
    logs, hosts = tmp_path / "logs", tmp_path / "hosts"
    logs.mkdir()
    (logs / "run.json").write_text(json.dumps({"directory": str(run)}))
    write_trace(hosts / "node0", Plan(steps=5))
    for place in (run, run / "trace", logs, hosts):
        assert story_of(place).steps_done == 5
    (run / "trace").rename(tmp_path / "moved")
    assert story_of(tmp_path / "moved").steps_done == 5


# ---- damage


def test_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LockstepError, match="does not exist; `lockstep report` takes the directory"):
        read_trace(tmp_path / "nowhere", now_s=NOW_S)
    with pytest.raises(LockstepError, match=r"holds no trace.*Run\(trace=False\)"):
        read_trace(tmp_path, now_s=NOW_S)
    (tmp_path / "trace").mkdir()
    with pytest.raises(LockstepError, match="holds no trace"):
        read_trace(tmp_path, now_s=NOW_S)
    (tmp_path / "trace" / "a.jsonl").write_text("")
    with pytest.raises(LockstepError, match="is empty: 1 files"):
        read_trace(tmp_path, now_s=NOW_S)
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path / "file")]) == 1
    assert "is a file" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["report"])


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_a_run_that_has_only_begun(tmp_path: Path, lines: int) -> None:
    run = write_trace(tmp_path, Plan(steps=1))
    for path in (run / "trace").glob("*.jsonl"):
        path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:lines]))
    assert main(["report", str(run)]) == 0
    assert "No step was measured yet" in (run / "report.html").read_text()


@pytest.mark.slow
def test_any_cut_and_any_garbage_is_survived(tmp_path: Path) -> None:
    run, chance = write_trace(tmp_path, Plan(workers=2, steps=12)), random.Random(5)
    files = sorted((run / "trace").glob("*.jsonl"))
    whole = [path.read_bytes() for path in files]
    for _ in range(50):
        for path, data in zip(files, whole, strict=True):
            broken = bytearray(data[: chance.randrange(len(data) // 4, len(data))])
            for _ in range(chance.randrange(8)):
                broken[chance.randrange(300, len(broken))] = chance.randrange(256)
            path.write_bytes(bytes(broken))
        assert main(["report", str(run)]) == 0
        json.loads((run / "trace.json").read_text())


@pytest.mark.slow
def test_fields_of_every_wrong_kind_are_survived(tmp_path: Path) -> None:
    plan, chance = Plan(workers=2, steps=6), random.Random(6)
    wrong: list[Any] = [None, True, "text", -1, 0, 1e308, -1e308, 10**500, math.nan, math.inf, [], {}, [[]], {"a": []}]
    for _ in range(50):
        run = write_trace(tmp_path, plan)

        def spoil(line: str) -> str:
            found = json.loads(line)
            if found["kind"] != "head" and chance.random() < 0.3:
                found[chance.choice(sorted(found))] = chance.choice(wrong)
            return json.dumps(found)

        rewrite(run, spoil)
        assert main(["report", str(run)]) == 0
        json.loads((run / "trace.json").read_text(), parse_constant=pytest.fail)


def test_lines_that_cannot_be_read_are_counted_and_unknown_ones_are_not(tmp_path: Path) -> None:
    run = write_trace(tmp_path, Plan(workers=1, steps=20))
    path = next((run / "trace").glob("*.jsonl"))
    path.write_text(path.read_text() + '{"kind": "weather", "t": 1}\n{"kind": "steps", "t0": 3\n')
    assert story_of(run).left_out == 1


# ---- the files


class Scripts(HTMLParser):
    """What a browser would take for scripts, and for attributes that run or fetch something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.kinds: list[str] = []
        self.texts: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "action") or name[:2] == "on"]
        if tag == "script":
            self.kinds.append(dict(attrs).get("type") or "")
            self.texts.append("")
        self._inside = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data


def test_a_long_run_makes_a_small_page_and_a_trace_for_perfetto(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "digits", Plan(steps=10_000, slow={1: 1.5}))
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert len(page.encode()) < 1_000_000
    assert "<title>digits: Lockstep report</title>" in page
    assert "all workers" in page.split("<noscript>")[1].split("</noscript>")[0]
    found = Scripts(page)
    assert found.kinds == ["application/json", "text/plain", ""]
    assert set(found.fetched) == {"data:,", "#timeline"}
    data = json.loads(found.texts[0])
    assert data["story"]["causes"][0]["kind"] == "worker"
    packed = json.loads(gzip.decompress(b64decode(found.texts[1])))
    assert packed == json.loads((run / "trace.json").read_text())
    assert sorted(path.name for path in run.iterdir()) == ["report.html", "trace", "trace.json"]


@pytest.mark.slow
def test_a_page_of_very_many_workers_stays_small(tmp_path: Path) -> None:
    run = write_trace(tmp_path, Plan(workers=96, steps=100, slow={17: 1.3}))
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").stat().st_size < 1_000_000


def test_chrome_trace_events(tmp_path: Path) -> None:
    run = write_trace(tmp_path, Plan(workers=2, steps=30, hosts=2))
    assert main(["report", str(run)]) == 0
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(names.values()) == {"main", "comm"}
    assert {"rank 0 on node0", "rank 1 on node1"} < {e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans = [event for event in events if event["ph"] == "X"]
    trace = read_trace(run, now_s=NOW_S)
    expected = sum(len(one.spans) for process in trace.processes for one in process.records[0].detailed_steps)
    assert len(spans) == expected
    for span in spans:
        assert span["dur"] >= 0
        assert 0 <= span["ts"] < 1e7
        assert (names[span["pid"], span["tid"]] == "comm") == span["name"].startswith("bucket")
    assert {event["name"] for event in events if event["ph"] == "C"} == {"loss", "samples/s"}
    assert all(event["ph"] in "MXCi" for event in events)


def test_text_of_the_trace_does_no_harm(tmp_path: Path) -> None:
    names = (EVIL, "\x1b[31m&amp;@@DATA@@")
    run = write_trace(tmp_path / "<b>run", Plan(workers=2, steps=30, names=names, slow={0: 2.0}))
    rewrite(run, lambda line: line.replace("checkpoint", "<script>").replace("2.13.0", "<!--<script>@@JS@@"))
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    found = Scripts(page)
    assert found.kinds == ["application/json", "text/plain", ""]
    assert "img" not in found.tags
    data = json.loads(found.texts[0])
    assert data["story"]["usages"][0]["worker"] == EVIL
    assert not re.search(r"[<>&]", found.texts[0])


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_trace(tmp_path, Plan(slow={1: 1.6}, names=("a", "\x1b[31mb", "c", "d")))
    assert main(["report", str(run), "--out", str(tmp_path / "p.html"), "--trace", str(tmp_path / "t.json")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "The other workers waited 35 % of the time for ?[31mb, which computes slower" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["worker", "steps", "per", "step", *PHASES] in rows
    assert str(tmp_path / "p.html") in out
    assert not (run / "report.html").exists()
    json.loads((tmp_path / "t.json").read_text())


def test_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_trace(tmp_path, Plan(losses={200: math.nan}))
    assert main(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["steps_done"] == 200
    assert found["status"] == "ended"
    assert set(found["total"]["phases"]) == {*PHASES, "other"}
    assert not (run / "report.html").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_trace(tmp_path, Plan(steps=5))
    assert main(["report", str(run), "--out", str(tmp_path / "no" / "p.html")]) == 1
    assert "choose other files with --out" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace"]


def test_a_usage_of_nothing() -> None:
    nothing = TimeUsage("w", 0, "", "", 0, 0.0, dict.fromkeys(PHASES, 0.0))
    assert nothing.share("data") == nothing.per_step_s() == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (999.4e-6, "999 µs"),
        (999.6e-6, "1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (999.4, "999 s"),
        (999.6, "1,000 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_times_have_three_digits_and_no_exponent(seconds: float, text: str) -> None:
    assert ms(seconds) == text
