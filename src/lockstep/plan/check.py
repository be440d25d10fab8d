"""`lockstep plan --check`: measures configurations on this machine, and compares them with what was predicted.

The speed of a machine changes from minute to minute. So before and after each configuration a run is measured again
from which the prediction was made, on one worker or, for several workers, on two. The prediction is multiplied by what
that takes now over what it took then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.plan.configuration import Configuration
from lockstep.plan.forecast import Plan
from lockstep.plan.measure import GPU_STEPS, PLAIN, Say, probe
from lockstep.plan.profile import ProbeResult
from lockstep.plan.program_runs import ProgramRun
from lockstep.plan.step_time import StepForecast, StepModel
from lockstep.report.table import columns, render

MOST_CHECKED: Final = 6  # configurations that are measured
STEPS: Final = 30


@dataclass(frozen=True)
class CheckedForecast:
    """A prediction beside its measurement. `slowdown`: by how much the machine was slower than when it was profiled."""

    name: str
    predicted: StepForecast
    measured_s: float
    slowdown: float

    @property
    def error(self) -> float:
        return self.predicted.mid_s * self.slowdown / self.measured_s - 1

    @property
    def inside(self) -> bool:
        return self.predicted.low_s * self.slowdown <= self.measured_s <= self.predicted.high_s * self.slowdown

    def to_json(self) -> dict[str, Any]:
        step = self.predicted
        bounds = {"low": step.low_s, "mid": step.mid_s, "high": step.high_s}
        return {
            "name": self.name,
            "predicted_ms": {name: 1e3 * self.slowdown * value for name, value in bounds.items()},
            "measured_ms": 1e3 * self.measured_s,
            "slowdown": self.slowdown,
            "error": self.error,
            "inside": self.inside,
        }


def check_plan(
    plan: Plan, program: Sequence[str], folder: Path, *, timeout_s: float, say: Say
) -> list[CheckedForecast]:
    """Measure configurations that this machine can run: on one host, with at most twice as many workers as cores."""
    base = plan.profile.base
    most = 2 * base.slots if base.device == "cpu" else 4
    able = [one for one in plan.forecasts if one.config.hosts == 1 and one.config.workers <= most]
    if not able:
        raise LockstepError(
            f"--check: this machine can run none of the grid, which needs one host and {most} workers or fewer"
        )
    here = [
        replace(one.config, slots=base.slots, inside=None, backend="shm" if one.config.inside else one.config.backend)
        for one in sorted(able, key=lambda one: not one.is_best)
    ]
    model = StepModel(plan.profile)
    found = []
    for number, config in enumerate(list(dict.fromkeys(here))[:MOST_CHECKED]):
        say(f"checking {config.name()}")
        how = program_run(config, max(STEPS, GPU_STEPS) if base.device == "cuda" else STEPS)
        reference = reference_run(model, config)
        before = slowdown(program, reference, folder / f"before{number}", timeout_s)
        measured = probe(how, program, folder / str(number), timeout_s)
        slower = geometric_mean([before, slowdown(program, reference, folder / f"after{number}", timeout_s)])
        found.append(CheckedForecast(config.name(), model.predict(config), measured.step_s, slower))
    return found


def reference_run(model: StepModel, config: Configuration) -> ProbeResult:
    """The measured run of one worker, or, for several workers, that of two, which keeps more cores busy."""
    return model.profile.base if config.workers == 1 or model.pair is None else model.pair


def slowdown(program: Sequence[str], reference: ProbeResult, folder: Path, timeout_s: float) -> float:
    """Make a measured run again. Returns its step now over its step then."""
    steps = max(len(reference.losses), GPU_STEPS if reference.device == "cuda" else STEPS)  # the first ones are slower
    how = ProgramRun(
        steps,
        workers=reference.workers,
        global_batch_size=reference.global_batch_size,
        shards=reference.shards,
        options=PLAIN,
    )
    return probe(how, program, folder, timeout_s).step_s / reference.step_s


def program_run(config: Configuration, steps: int, mbit: int = 0) -> ProgramRun:
    """How to start the program as in a configuration."""
    options: dict[str, Any] = {"grad_comm": config.grad_comm, "shard_optimizer": config.shard_optimizer}
    options |= {"redundancy": config.redundancy} if config.shard_optimizer else {}
    return ProgramRun(
        steps,
        workers=config.workers_per_host,
        hosts=config.hosts,
        mbit=mbit,
        backend=config.backend if config.workers > 1 else "",
        global_batch_size=config.global_batch_size,
        shards=config.shards,
        options=options,
    )


def holds(checked: Sequence[CheckedForecast]) -> bool:
    """Whether most measurements are inside their intervals."""
    return sum(one.inside for one in checked) * 2 >= len(checked)


def as_table(checked: Sequence[Mapping[str, Any]]) -> str:
    titles = columns("checked", ">predicted ms", "90 %", ">measured ms", ">error", "inside")
    rows = [
        (
            one["name"],
            f"{one['predicted_ms']['mid']:.1f}",
            f"{one['predicted_ms']['low']:.1f} to {one['predicted_ms']['high']:.1f}",
            f"{one['measured_ms']:.1f}",
            f"{one['error']:+.1%}",
            "yes" if one["inside"] else "no",
        )
        for one in checked
    ]
    return render(titles, rows)
