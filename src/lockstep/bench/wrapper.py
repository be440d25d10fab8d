"""`lockstep bench wrapper`: cost of the wrapper itself, in time and memory, on one device.

With one process there is nothing to communicate, so every microsecond and every byte over the plain module is a cost of
the wrapper.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep._torch import HashStore
from lockstep.bench.models import GPT2_124M, GptModel, GptShape, Workload, count_parameters, draw_tokens
from lockstep.bench.rounds import Estimate, RoundPlan, RoundSync, estimate, paired_ratio, show, time_rounds
from lockstep.bench.step import NONE, WrapperArm
from lockstep.bench.workers import device_name, finish_of, use_device
from lockstep.report.table import columns, megabytes, render

TINY = GptShape(layers=2, heads=2, width=32, vocabulary=128, context=32)


@dataclass(frozen=True)
class BatchSize:
    rows: int
    length: int
    steps: int  # steps in a round
    repeats: int = 1  # rounds for each requested round: short steps are noisy

    def __str__(self) -> str:
        return f"{self.rows}x{self.length}"


SIZES = {
    "cuda": (BatchSize(1, 128, steps=5, repeats=8), BatchSize(8, 1024, steps=8), BatchSize(32, 1024, steps=4)),
    "cpu": (BatchSize(1, 8, steps=10), BatchSize(2, 32, steps=10)),
}


@dataclass(frozen=True)
class WrapperSettings:
    arms: tuple[str, ...]
    device: str
    rounds: int
    steps: int | None  # None: that of each size
    batches: tuple[str, ...] = ()  # empty: all

    def sizes(self, device: str) -> list[BatchSize]:
        return [size for size in SIZES[device] if not self.batches or str(size) in self.batches]


@dataclass(frozen=True)
class WrapperResult:
    step_ms: Estimate
    over_none: Estimate | None
    peak_bytes: int | None
    peak_over_none_bytes: int | None
    bucket_bytes: tuple[int, ...]
    rounds_ms: list[float]


def workload_of(size: BatchSize, device: torch.device) -> Workload:
    shape = GPT2_124M if device.type == "cuda" else TINY
    return Workload(
        build=lambda: GptModel(shape),
        batch=lambda generator: draw_tokens(generator, rows=size.rows, length=size.length, vocabulary=shape.vocabulary),
        optimizer="AdamW, fused" if device.type == "cuda" else "AdamW",
        about=f"GPT with {shape.layers} layers, {shape.heads} heads, {shape.width} wide, vocabulary {shape.vocabulary}",
    )


def _peak_bytes(arm_name: str, size: BatchSize, device: torch.device) -> int:
    """Peak memory of an arm."""
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    workload = workload_of(size, device)
    batch = workload.batch(torch.Generator().manual_seed(0)).to(device)
    arm = WrapperArm(arm_name, workload, device, autocast=True)
    for _ in range(8):  # the first step creates the optimizer's state, the second the final buckets
        arm.step(batch)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return torch.cuda.max_memory_allocated()


def measure_size(size: BatchSize, settings: WrapperSettings, device: torch.device) -> dict[str, WrapperResult]:
    def report(text: str) -> None:
        print(f"{size}: {text}", file=sys.stderr, flush=True)

    peaks: dict[str, int] = {}
    if device.type == "cuda":
        for name in settings.arms:
            report(f"memory of {name}")
            # In a process of its own, because some arms leave memory allocated.
            with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
                peaks[name] = process.submit(_peak_bytes, name, size, device).result(timeout=300)
    workload = workload_of(size, device)
    batch = workload.batch(torch.Generator().manual_seed(0)).to(device)
    plan = RoundPlan(warmup=8, rounds=settings.rounds * size.repeats, steps=settings.steps or size.steps)
    report("warming up")
    arms = [WrapperArm(name, workload, device, autocast=True) for name in settings.arms]
    for arm in arms:
        for _ in range(plan.warmup):
            arm.step(batch)
    steps = {arm.name: partial(arm.step, batch) for arm in arms}
    times = time_rounds(list(steps), steps, plan, RoundSync(finish=finish_of(device), report=report))
    return {
        arm.name: WrapperResult(
            step_ms=estimate(times[arm.name]),
            over_none=paired_ratio(times[arm.name], times[NONE]) if NONE in times else None,
            peak_bytes=peaks.get(arm.name),
            peak_over_none_bytes=peaks[arm.name] - peaks[NONE] if NONE in peaks else None,
            bucket_bytes=arm.bucket_bytes(),
            rounds_ms=times[arm.name],
        )
        for arm in arms
    }


COLUMNS = columns("batch", "arm", ">step ms", "over none", ">peak MiB", ">over none MiB", ">largest bucket MiB")


def rows_of(size: BatchSize, results: dict[str, WrapperResult]) -> Iterator[tuple[str, ...]]:
    for number, (arm, result) in enumerate(results.items()):
        ratio, peak, more = result.over_none, result.peak_bytes, result.peak_over_none_bytes
        yield (
            "" if number else str(size),
            arm,
            f"{result.step_ms.median:.3f}",
            ratio.text(digits=4) if ratio and arm != NONE else "",
            megabytes(peak) if peak is not None else "",
            megabytes(more) if more is not None and arm != NONE else "",
            megabytes(max(result.bucket_bytes)) if result.bucket_bytes else "",
        )


def run(settings: WrapperSettings, json_path: Path | None) -> int:
    device, name = use_device(settings.device), device_name(settings.device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    record: dict[str, Any] = {"torch": torch.__version__, "device": name, "settings": asdict(settings), "batches": {}}
    rows: list[tuple[str, ...]] = []
    try:
        for size in settings.sizes(device.type):
            results = measure_size(size, settings, device)
            rows += rows_of(size, results)
            record["batches"][str(size)] = {arm: asdict(result) for arm, result in results.items()}
    finally:
        dist.destroy_process_group()
    workload = workload_of(SIZES[device.type][0], device)
    head = (
        f"cost of the wrapper on {name}, torch {torch.__version__}, world size 1: {workload.about},\n"
        f"{count_parameters(workload.build()) / 1e6:.2f} M parameters, bf16 autocast, {workload.optimizer}; "
        f"{settings.rounds} interleaved rounds"
    )
    legend = "over none: median of the ratios within each round, and its 95 % interval; peak: from construction on"
    show(head, render(COLUMNS, rows), [legend], record, json_path)
    return 0
