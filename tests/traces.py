"""Traces of runs that never were: workers with planted troubles, written as docs/trace.md says."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

UNIX_S = 1_790_000_000.0
MIB = 1 << 20
BUCKETS = (4 * MIB, 25 * MIB, 25 * MIB, 18 * MIB)


@dataclass(frozen=True)
class Plan:
    """Seconds per step. `compute_s` and `data_s` of a rank in `slow` and `hungry` are that many times as long."""

    workers: int = 4
    steps: int = 200
    data_s: float = 0.002
    compute_s: float = 0.08
    exposed_s: float = 0.004
    between_s: float = 0.001
    jitter: float = 0.03
    slow: dict[int, float] = field(default_factory=dict)
    hungry: dict[int, float] = field(default_factory=dict)
    hosts: int = 1
    generation: int = 0
    first: int = 1
    names: tuple[str, ...] = ()
    spans: bool = True
    noise: bool = True
    ended: bool = True
    begin_s: float = 0.0
    losses: dict[int, Any] = field(default_factory=dict)  # step -> what the trace has instead
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # step -> what `run.log` was given then
    global_batch_size: int = 256
    skew_s: float = 0.0  # how far the wall clock of each host is ahead of that of the one before


@dataclass
class _Worker:
    """What a window adds up."""

    name: str
    lines: list[dict[str, Any]]
    phases: dict[str, float] = field(default_factory=dict)
    waited_for: dict[str, float] = field(default_factory=dict)


def write_trace(run: Path, plan: Plan) -> Path:
    """Into run/trace; returns run."""
    folder = run / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    for number, lines in enumerate(make_trace(plan)):
        name = f"20260901-{int(1e3 * plan.begin_s):08d}-{number}-{1000 + number}.jsonl"
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def make_trace(plan: Plan) -> list[list[dict[str, Any]]]:
    """One list of lines per worker."""
    chance = random.Random(7)
    workers = [_Worker(name, list(_opening(plan, rank, name))) for rank, name in enumerate(_names(plan))]
    at = plan.begin_s + 0.2
    window, window_at, window_first = max(1, plan.steps // 1000), at, plan.first
    closely = set(looked_at(plan.steps))
    for step in range(plan.first, plan.first + plan.steps):
        own = [_own(plan, rank, chance) for rank in range(plan.workers)]
        arrivals = [sum(one.values()) for one in own]
        last = arrivals.index(max(arrivals))
        for rank, worker in enumerate(workers):
            waiting = max(arrivals) - arrivals[rank]
            phases = own[rank] | {"exposed": plan.exposed_s, "waiting": waiting, "update": 0.05 * plan.compute_s}
            phases["between"] = plan.between_s
            for name, seconds in phases.items():
                worker.phases[name] = worker.phases.get(name, 0.0) + seconds
            if waiting:
                worker.waited_for[str(last)] = worker.waited_for.get(str(last), 0.0) + waiting
            if plan.spans and step - plan.first + 1 in closely:
                worker.lines.append(_closeup(plan, rank, step, at, phases))
        at += max(arrivals) + plan.exposed_s + 0.05 * plan.compute_s + plan.between_s
        if step - window_first + 1 == window or step == plan.first + plan.steps - 1:
            for rank, worker in enumerate(workers):
                worker.lines.append(_window(plan, worker, (window_at, at), (window_first, step)))
                worker.lines[-1]["t0"] += _shift(plan, rank)
                worker.lines[-1]["t1"] += _shift(plan, rank)
                if plan.noise and rank == 0 and step % 10 == 0:
                    worker.lines.append(_noise(plan, step, at))
            window_at, window_first = at, step + 1
        if step in plan.metrics:
            line = {"kind": "metrics", "t": at + _shift(plan, 0), "step": step, "metrics": plan.metrics[step]}
            workers[0].lines.append(line)
        if step % 100 == 0:
            for rank, worker in enumerate(workers):
                event = {"kind": "event", "t": at + _shift(plan, rank), "step": step, "what": "checkpoint"}
                worker.lines.append(event | {"took_s": 0.04, "bytes": 3 * 72 * MIB})
    for rank, worker in enumerate(workers):
        if plan.ended:
            end = {"kind": "end", "t": at + _shift(plan, rank), "step": plan.first + plan.steps - 1}
            worker.lines.append(end)
    return [worker.lines for worker in workers]


def looked_at(steps: int) -> Iterator[int]:
    yield from range(1, 7)
    power = 10
    while power <= steps:
        for begin in (power, 2 * power, 5 * power):
            yield from range(begin, begin + 3)
        power *= 10
    yield from range(steps - 2, steps + 1)


def _names(plan: Plan) -> tuple[str, ...]:
    return plan.names or tuple(f"rank{rank}" for rank in range(plan.workers))


def _shift(plan: Plan, rank: int) -> float:
    """Every host has a clock of its own."""
    return 5000.0 * (rank * plan.hosts // plan.workers)


def _opening(plan: Plan, rank: int, name: str) -> Iterator[dict[str, Any]]:
    t = plan.begin_s + _shift(plan, rank) + 0.001 * rank
    host = rank * plan.hosts // plan.workers
    yield {
        "kind": "head",
        "version": 1,
        "worker": name,
        "pid": 1000 + rank,
        "host": f"node{host}",
        "t": t,
        "unix_s": UNIX_S + t - _shift(plan, rank) + plan.skew_s * host,
        "device": "cpu",
        "environment": {"torch": "2.13.0", "python": "3.11.7", "cores": "8", "threads": str(8 // plan.workers or 1)},
    }
    yield {
        "kind": "world",
        "t": t + 0.1,
        "generation": plan.generation,
        "rank": rank,
        "size": plan.workers,
        "backend": "shm" if plan.hosts == 1 else "gloo",
        "shards": 8,
        "global_batch_size": plan.global_batch_size,
        "steps": plan.first + plan.steps - 1,
        "buckets": list(BUCKETS),
        "bucket_names": [[f"layers.{3 - i}.weight", f"layers.{3 - i}.bias", 4] for i in range(len(BUCKETS))],
        "memory": {"weights": 72 * MIB, "gradients": 72 * MIB, "optimizer": 144 * MIB},
    }


def _own(plan: Plan, rank: int, chance: random.Random) -> dict[str, float]:
    compute_s = plan.compute_s * plan.slow.get(rank, 1.0) * (1 + plan.jitter * chance.random())
    data_s = plan.data_s * plan.hungry.get(rank, 1.0)
    return {"data": data_s, "forward": compute_s / 3, "backward": compute_s * 2 / 3}


def _window(plan: Plan, worker: _Worker, times: tuple[float, float], steps: tuple[int, int]) -> dict[str, Any]:
    first, last = steps
    loss: Any = 2.3 * math.exp(-last / (0.4 * plan.steps)) + 0.1 + 0.05 * math.sin(last)
    line = {
        "kind": "steps",
        "t0": times[0],
        "t1": times[1],
        "first": first - 1,  # a trace counts from 0
        "count": last - first + 1,
        "samples": plan.global_batch_size * (last - first + 1),
        "phases": worker.phases,
        "waited_for": worker.waited_for,
        "loss": plan.losses.get(last, loss),
        "lr": 1e-3 * (1 + math.cos(math.pi * last / plan.steps)) / 2,
        "grad_norm": 1.5 + math.sin(last / 7) / (1 + last / 50),
        "rss": 700 * MIB,
        "peak": None,
        "epoch": last // 100,
    }
    worker.phases, worker.waited_for = {}, {}
    return line


def _closeup(plan: Plan, rank: int, step: int, at: float, phases: dict[str, float]) -> dict[str, Any]:
    """Two shards; a bucket begins to travel as its part of the last backward pass is done, the last one after it."""
    names = ["data", "forward 0", "backward 0", "forward 1", "backward 1", "wait", "update", "between"]
    half = {name: phases[name] / 2 for name in ("forward", "backward")}
    wait_s = phases["waiting"] + phases["exposed"]
    seconds = [phases["data"], half["forward"], half["backward"], half["forward"], half["backward"]]
    seconds += [wait_s, phases["update"], phases["between"]]
    spans: list[list[Any]] = []
    now_s, arrived_s = 0.0, sum(seconds[:5])
    for name, took_s in zip(names, seconds, strict=True):
        spans.append([name, "main", round(1e6 * now_s), round(1e6 * took_s)])
        now_s += took_s
    backward_s, done_s = half["backward"], arrived_s + wait_s
    for number in range(len(BUCKETS)):
        begin_s = arrived_s - backward_s * (3 - number) / 4
        end_s = done_s if number == 3 else begin_s + backward_s / 5
        spans.append([f"bucket {number}", "comm", round(1e6 * begin_s), round(1e6 * (end_s - begin_s))])
    return {"kind": "spans", "step": step - 1, "t": at + _shift(plan, rank), "spans": spans}


def _noise(plan: Plan, step: int, at: float) -> dict[str, Any]:
    scale = None if step < 30 else 800 + 4 * step
    line = {"kind": "noise", "t": at, "step": step - 1, "batch": plan.global_batch_size}
    return line | {"noise": 900.0, "signal": 1.2, "scale": scale}
