"""`lockstep bench wrapper`: what the wrapper itself costs, on one device with nobody to talk to.

In a world of one there is nothing to communicate, so every microsecond and every byte over the plain module is the
wrapper's own.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from lockstep.bench.models import GPT2_124M, Gpt, GptShape, Workload, count_parameters, draw_tokens
from lockstep.bench.rounds import Conduct, Estimate, Plan, estimate, paired_ratio, time_rounds
from lockstep.bench.wrappers import NONE, Arm
from lockstep.report.table import Column, megabytes, render

TINY = GptShape(layers=2, heads=2, width=32, vocabulary=128, context=32)


@dataclass(frozen=True)
class Size:
    rows: int
    length: int
    steps: int  # in a round
    repeats: int = 1  # rounds for each that is asked for: short steps are noisy

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}"


SIZES = {
    "cuda": (Size(1, 128, steps=5, repeats=8), Size(8, 1024, steps=8), Size(32, 1024, steps=4)),
    "cpu": (Size(1, 8, steps=10), Size(2, 32, steps=10)),
}


@dataclass(frozen=True)
class Settings:
    arms: tuple[str, ...]
    device: str
    rounds: int
    steps: int | None  # None: each size has its own
    batches: tuple[str, ...] = ()  # none named: all

    def sizes(self, device: str) -> list[Size]:
        return [size for size in SIZES[device] if not self.batches or str(size) in self.batches]


@dataclass(frozen=True)
class ArmFigures:
    step_ms: Estimate
    over_none: Estimate | None
    peak_bytes: int | None
    peak_over_none_bytes: int | None
    bucket_bytes: tuple[int, ...]
    rounds_ms: list[float]


def workload_of(size: Size, device: torch.device) -> Workload:
    shape = GPT2_124M if device.type == "cuda" else TINY
    return Workload(
        build=lambda: Gpt(shape),
        batch=lambda generator: draw_tokens(generator, rows=size.rows, length=size.length, vocabulary=shape.vocabulary),
        optimizer="AdamW, fused" if device.type == "cuda" else "AdamW",
        about=f"GPT with {shape.layers} layers, {shape.heads} heads, {shape.width} wide, vocabulary {shape.vocabulary}",
    )


def measure_peak(arm_name: str, size: Size, device: torch.device) -> int:
    """The most memory an arm ever needs, in a process of its own: some arms leave memory behind."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_peak_bytes, arm_name, size, device).result(timeout=300)


def _peak_bytes(arm_name: str, size: Size, device: torch.device) -> int:
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    workload = workload_of(size, device)
    batch = workload.batch(torch.Generator().manual_seed(0)).to(device)
    arm = Arm(arm_name, workload, device, autocast=True)
    for _ in range(8):  # the optimizer's state is there since the first, the buckets are final since the second
        arm.step(batch)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return torch.cuda.max_memory_allocated()


def measure_size(size: Size, settings: Settings, device: torch.device) -> dict[str, ArmFigures]:
    def report(text: str) -> None:
        print(f"{size}: {text}", file=sys.stderr, flush=True)

    peaks: dict[str, int] = {}
    if device.type == "cuda":
        for name in settings.arms:
            report(f"memory of {name}")
            peaks[name] = measure_peak(name, size, device)
    workload = workload_of(size, device)
    batch = workload.batch(torch.Generator().manual_seed(0)).to(device)
    plan = Plan(warmup=8, rounds=settings.rounds * size.repeats, steps=settings.steps or size.steps)
    report("warming up")
    arms = [Arm(name, workload, device, autocast=True) for name in settings.arms]
    for arm in arms:
        for _ in range(plan.warmup):
            arm.step(batch)
    steps: dict[str, Callable[[], None]] = {arm.name: partial(arm.step, batch) for arm in arms}
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = time_rounds(list(steps), steps, plan, Conduct(finish=finish, report=report))
    return {
        arm.name: ArmFigures(
            step_ms=estimate(times[arm.name]),
            over_none=paired_ratio(times[arm.name], times[NONE]) if NONE in times else None,
            peak_bytes=peaks.get(arm.name),
            peak_over_none_bytes=peaks[arm.name] - peaks[NONE] if NONE in peaks else None,
            bucket_bytes=arm.bucket_bytes(),
            rounds_ms=times[arm.name],
        )
        for arm in arms
    }


COLUMNS = (
    Column("batch"),
    Column("arm"),
    Column("step ms", right=True),
    Column("over none"),
    Column("peak MiB", right=True),
    Column("over none MiB", right=True),
    Column("largest bucket MiB", right=True),
)


def rows_of(size: Size, found: dict[str, ArmFigures]) -> Iterator[tuple[str, ...]]:
    for number, (arm, figure) in enumerate(found.items()):
        ratio, peak, more = figure.over_none, figure.peak_bytes, figure.peak_over_none_bytes
        yield (
            "" if number else str(size),
            arm,
            f"{figure.step_ms.median:.3f}",
            f"{ratio.median:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]" if ratio and arm != NONE else "",
            megabytes(peak) if peak is not None else "",
            megabytes(more) if more is not None and arm != NONE else "",
            megabytes(max(figure.bucket_bytes)) if figure.bucket_bytes else "",
        )


def run(settings: Settings, json_path: Path | None) -> int:
    device = torch.device(settings.device, 0) if settings.device == "cuda" else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    record: dict[str, Any] = {"torch": torch.__version__, "device": name, "settings": asdict(settings), "batches": {}}
    rows: list[tuple[str, ...]] = []
    try:
        for size in settings.sizes(device.type):
            found = measure_size(size, settings, device)
            rows += rows_of(size, found)
            record["batches"][str(size)] = {arm: asdict(figure) for arm, figure in found.items()}
    finally:
        dist.destroy_process_group()
    workload = workload_of(SIZES[device.type][0], device)
    print(
        f"cost of the wrapper on {name}, torch {torch.__version__}, world size 1: {workload.about},\n"
        f"{count_parameters(workload.build()) / 1e6:.2f} M parameters, bf16 autocast, {workload.optimizer}; "
        f"{settings.rounds} interleaved rounds\n"
    )
    print(render(COLUMNS, rows))
    print("\nover none: median of the ratios within each round, and its 95 % interval; peak: from construction on")
    if json_path:
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    return 0
