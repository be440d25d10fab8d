"""Predicts a grid of configurations: time, memory, money, and what failures cost. Pure; other modules only show it.

The keys of `Plan.to_json` are those of `lockstep plan --json`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

from lockstep.errors import LockstepError
from lockstep.plan.batch_size import BatchForecast, advise, samples_at, steps_at
from lockstep.plan.configuration import FP32, Configuration
from lockstep.plan.failures import FailureModel, best_interval_s, goodput_in_place, goodput_with_restart
from lockstep.plan.links import PRESETS, Link
from lockstep.plan.memory import MemoryForecast, fit_memory
from lockstep.plan.profile import MIB, ProgramProfile
from lockstep.plan.step_time import StepForecast, StepModel
from lockstep.version import __version__

LEAST_EFFICIENCY: Final = 0.5  # share of linear scaling that a recommended configuration has, if one has
MOST_CONFIGURATIONS: Final = 20_000
RECOVERY_S: Final = 0.3  # of a lost worker in place; measured by `make chaos` (docs/benchmarks.md)
RESTART_S: Final = 60.0  # from a loss until all workers train again from a checkpoint, if nothing else is said
REPLACEMENT_S: Final = 60.0
CHECKPOINT_BYTES_PER_S: Final = 500e6  # if no checkpoint was measured


@dataclass(frozen=True)
class Question:
    """The grid, and what is known of the machines.

    layouts         numbers of hosts, and of workers on each
    slots           workers of a host that compute at full speed at once; None: as many as there are
    shards          0: those of the run, but one for each worker at least
    memory_bytes    of a worker; None: not known
    price_per_hour  of one worker
    target_steps    of the whole training, with the batch size of the program; None: not known
    mtbf_s          of one worker
    """

    layouts: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (1, 4), (1, 8))
    slots: int | None = None
    links: tuple[Link, ...] = (PRESETS["25gbe"],)
    inside: Link | None = None
    backends: tuple[str, ...] = ()
    global_batch_sizes: tuple[int, ...] = ()
    shards: tuple[int, ...] = (0,)
    grad_comms: tuple[str, ...] = (FP32,)
    shard_optimizer: tuple[bool, ...] = (False,)
    redundancy: int = 0
    bucket_mib: tuple[float | None, ...] = (None,)
    memory_bytes: float | None = None
    price_per_hour: float | None = None
    currency: str = "$"
    target_steps: float | None = None
    mtbf_s: float | None = None
    text: str = ""

    def configurations(self, profile: ProgramProfile) -> list[Configuration]:
        """All combinations that are possible. Raises LockstepError if there is none, or if there are too many."""
        batches = self.global_batch_sizes or (profile.base.global_batch_size,)
        grid = product(self.layouts, batches, self.shards, self.grad_comms, self.shard_optimizer)
        rest = list(product(self.links, self.bucket_mib, self.backends or ("",)))
        sizes = (self.layouts, batches, self.shards, self.grad_comms, self.shard_optimizer, rest)
        count = math.prod(map(len, sizes))
        if count > MOST_CONFIGURATIONS:
            raise LockstepError(
                f"the grid has {count:,} configurations, and {MOST_CONFIGURATIONS:,} are the most; ask for fewer values"
            )
        found, refused = set[Configuration](), list[str]()
        for (hosts, per_host), batch, shards, comm, sharded in grid:
            workers = hosts * per_host
            shards = shards or min(max(workers, profile.base.shards), batch)
            if not workers <= shards <= batch:
                refused.append(f"{workers} workers need {workers} shards or more, and a batch of as many samples")
                continue
            for link, bucket, backend in rest:
                found.add(
                    Configuration(
                        hosts=hosts,
                        workers_per_host=per_host,
                        slots=self.slots or per_host,
                        global_batch_size=batch,
                        shards=shards,
                        backend=backend or self._backend(hosts),
                        link=link if hosts > 1 else None,
                        inside=self.inside,
                        grad_comm=comm,
                        shard_optimizer=sharded and workers > 1,
                        redundancy=self.redundancy if sharded and workers > 1 else 0,
                        bucket_mib=bucket,
                    )
                )
        if not found:
            raise LockstepError(f"no configuration of the grid is possible: {refused[0]}; see --batch and --shards")
        key = ("workers", "hosts", "global_batch_size", "shards", "grad_comm", "shard_optimizer")
        return sorted(found, key=lambda one: (*(getattr(one, name) for name in key), one.name()))

    def _backend(self, hosts: int) -> str:
        return "nccl" if self.inside is not None else "hierarchy" if hosts > 1 else "shm"

    @property
    def most_hosts(self) -> int:
        return max(hosts for hosts, _ in self.layouts)


@dataclass(frozen=True)
class ConfigurationForecast:
    """What is predicted for one configuration."""

    config: Configuration
    step: StepForecast
    memory: MemoryForecast
    efficiency: float
    memory_limit: float | None
    hours: float | None = None
    cost: float | None = None
    goodput: Mapping[str, float] | None = None
    checkpoint_every_s: float | None = None
    is_best: bool = False
    is_pareto: bool = False

    @property
    def samples_per_s(self) -> float:
        return self.config.global_batch_size / self.step.mid_s

    @property
    def fits(self) -> bool | None:
        """None if no limit was given. CUDA graphs need not fit: `Run` goes on without them, and is slower."""
        return None if self.memory_limit is None else self.memory.needed_bytes <= self.memory_limit

    @property
    def fits_without_graphs(self) -> bool:
        """Whether it fits only because `Run` would make no CUDA graphs; its step is predicted with them."""
        return bool(self.fits) and self.memory.total_bytes > (self.memory_limit or 0.0)

    def to_json(self) -> dict[str, Any]:
        config, step = self.config, self.step
        return {
            "name": config.name(),
            "workers": config.workers,
            "hosts": config.hosts,
            "workers_per_host": config.workers_per_host,
            "link": config.link.name if config.link is not None else "",
            "backend": config.backend,
            "grad_comm": config.grad_comm,
            "shard_optimizer": config.shard_optimizer,
            "redundancy": config.redundancy,
            "global_batch_size": config.global_batch_size,
            "shards": config.shards,
            "bucket_mib": config.bucket_mib or 25,
            "step_ms": {"low": 1e3 * step.low_s, "mid": 1e3 * step.mid_s, "high": 1e3 * step.high_s},
            "samples_per_s": self.samples_per_s,
            "efficiency": self.efficiency,
            "parts_ms": {name: 1e3 * seconds for name, seconds in step.parts_s.items()},
            "memory_mib": {kind: size / MIB for kind, size in self.memory.by_kind.items()},
            "memory_total_mib": self.memory.total_bytes / MIB,
            "memory_limit_mib": None if self.memory_limit is None else self.memory_limit / MIB,
            "fits": self.fits,
            "fits_without_graphs": self.fits_without_graphs,
            "does_not_fit_by": self.memory.largest_kind if self.fits is False else "",
            "hours": self.hours,
            "cost": self.cost,
            "goodput": None if self.goodput is None else dict(self.goodput),
            "checkpoint_every_s": self.checkpoint_every_s,
            "is_best": self.is_best,
            "is_pareto": self.is_pareto,
            "is_extrapolated": bool(step.computed or self.memory.computed),
            "computed": [*step.computed, *self.memory.computed],
        }


@dataclass(frozen=True)
class Plan:
    profile: ProgramProfile
    question: Question
    forecasts: list[ConfigurationForecast]
    notes: list[str]
    branches: BatchForecast | None = None
    checked: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def best(self) -> ConfigurationForecast:
        return next(one for one in self.forecasts if one.is_best)

    def to_json(self) -> dict[str, Any]:
        base, question = self.profile.base, self.question
        where = base.environment
        target: dict[str, Any] | None = None
        if self.branches is not None:
            target = {"loss": self.branches.target_loss, "steps": self.branches.predict(base.global_batch_size).steps}
        elif question.target_steps is not None:
            target = {"loss": None, "steps": question.target_steps}
        return {
            "program": self.profile.program,
            "measured_on": f"{where.get('GPU') or where.get('machine', '')}, torch {where.get('torch', '?')}",
            "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "version": __version__,
            "question": question.text,
            "currency": question.currency,
            "headline": headline(self),
            "notes": self.notes,
            "links": [
                {
                    "name": link.name,
                    "gbit_per_s": link.bytes_per_s * 8e-9,
                    "latency_us": link.latency_s * 1e6,
                    "source": link.source,
                }
                for link in (question.links if question.most_hosts > 1 else ())
            ],
            "target": target,
            "forecasts": [one.to_json() for one in self.forecasts],
            "failures": self.failures(),
            "batch": self.batch_sizes(),
            "checked": list(self.checked),
        }

    def batch_sizes(self) -> dict[str, Any] | None:
        """Steps and samples for several batch sizes: as branches measured them, or from the noise scale."""
        noise, base = self.profile.noise_scale, self.profile.base.global_batch_size
        if self.branches is not None:
            found = self.branches
            return {"noise_scale": noise, "curve": found.curve, "advice": found.advice}
        if noise is None:
            return None
        steps = self.question.target_steps or 1000
        sizes = sorted({max(1, round(base * 2.0**power)) for power in range(-2, 5)})
        curve = [
            {
                "global_batch_size": size,
                "steps": steps_at(size, steps=steps, at_batch=base, noise_scale=noise),
                "samples": samples_at(size, steps=steps, at_batch=base, noise_scale=noise),
            }
            for size in sizes
        ]
        return {"noise_scale": noise, "curve": curve, "advice": advise(noise, batch=base)}

    def failures(self) -> dict[str, Any] | None:
        if self.question.mtbf_s is None:
            return None
        best, rows = self.best, []
        seen = set[int]()
        for one in self.forecasts:
            same = replace(one.config, hosts=1, workers_per_host=1, shards=1, link=None, slots=1, backend="")
            other = replace(best.config, hosts=1, workers_per_host=1, shards=1, link=None, slots=1, backend="")
            if same == other and one.config.workers not in seen and one.goodput is not None:
                seen.add(one.config.workers)
                row = {"workers": one.config.workers, **one.goodput, "checkpoint_every_s": one.checkpoint_every_s}
                rows.append(row)
        notes = [
            f"extrapolated: recovery in place takes {RECOVERY_S:g} s as measured in our campaigns, a restart "
            f"{RESTART_S:g} s, and a lost worker is replaced after {REPLACEMENT_S:g} s"
        ]
        return {"mtbf_hours": self.question.mtbf_s / 3600, "curve": rows, "notes": notes}


def make_plan(profile: ProgramProfile, question: Question, *, branches: BatchForecast | None = None) -> Plan:
    """Predict all configurations of the grid, and choose one.

    branches  say how many steps each batch size needs; without them the noise scale does
    """
    model, memory = StepModel(profile), fit_memory(profile.probes)
    forecasts = []
    alone: dict[int, float] = {}
    for config in question.configurations(profile):
        step = model.predict(config)
        key = config.global_batch_size
        if key not in alone:
            single = replace(
                config, hosts=1, workers_per_host=1, shards=1, link=None, grad_comm=FP32, shard_optimizer=False, slots=1
            )
            alone[key] = model.predict(single).mid_s
        one = ConfigurationForecast(
            config,
            step,
            memory.predict(config),
            efficiency=alone[key] / (config.workers * step.mid_s),
            memory_limit=question.memory_bytes,
        )
        forecasts.append(_with_money(_with_failures(one, profile, question), profile, question, branches))
    chosen = _mark(forecasts)
    return Plan(profile, question, chosen, _notes(profile, question, chosen), branches)


def _with_failures(one: ConfigurationForecast, profile: ProgramProfile, question: Question) -> ConfigurationForecast:
    if question.mtbf_s is None:
        return one
    memory = profile.base.memory_bytes
    size = profile.checkpoint_bytes or memory["weights"] + memory["optimizer"]
    model = FailureModel(
        mtbf_worker_s=question.mtbf_s,
        workers=one.config.workers,
        hosts=one.config.hosts,
        step_s=one.step.mid_s,
        checkpoint_s=profile.checkpoint_s or size / CHECKPOINT_BYTES_PER_S,
        checkpoint_is_async=False,
        restart_s=RESTART_S,
        recovery_s=RECOVERY_S,
        replacement_s=REPLACEMENT_S,
        redundancy=bool(one.config.redundancy),
        shard_optimizer=one.config.shard_optimizer,
    )
    interval_s = best_interval_s(model)
    goodput = {
        "recovery_in_place": goodput_in_place(model, interval_s=interval_s),
        "restart": goodput_with_restart(model, interval_s),
    }
    return replace(one, goodput=goodput, checkpoint_every_s=interval_s)


def _with_money(
    one: ConfigurationForecast, profile: ProgramProfile, question: Question, branches: BatchForecast | None
) -> ConfigurationForecast:
    steps = count_steps(one.config.global_batch_size, profile, question, branches)
    if steps is None:
        return one
    goodput = one.goodput["recovery_in_place"] if one.goodput is not None else 1.0
    hours = steps * one.step.mid_s / 3600 / goodput
    price = question.price_per_hour
    return replace(one, hours=hours, cost=None if price is None else hours * price * one.config.workers)


def count_steps(
    batch: int, profile: ProgramProfile, question: Question, branches: BatchForecast | None = None
) -> float | None:
    """The steps to the target with this global batch size; None if there is no target.

    Without a measurement the noise scale says how much fewer steps a larger batch needs; without that, as many samples.
    """
    if branches is not None:
        return branches.predict(batch).steps
    if question.target_steps is None:
        return None
    given, noise = profile.base.global_batch_size, profile.noise_scale
    if noise is None:
        return question.target_steps * given / batch
    return steps_at(batch, steps=question.target_steps, at_batch=given, noise_scale=noise)


def _mark(forecasts: list[ConfigurationForecast]) -> list[ConfigurationForecast]:
    """Mark the recommended configuration, and the Pareto front of time and money."""
    fitting = [one for one in forecasts if one.fits is not False] or forecasts
    usable = [one for one in fitting if not one.fits_without_graphs] or fitting  # the others are slower than predicted
    has_hours = all(one.hours is not None for one in usable)

    def time_of(one: ConfigurationForecast) -> float:
        return one.hours if has_hours and one.hours is not None else 1 / one.samples_per_s

    def cost_of(one: ConfigurationForecast) -> float:
        return one.cost if one.cost is not None else time_of(one) * one.config.workers

    # The fastest of those that scale well enough, unless another one is nearly as fast with fewer workers.
    scaling = [one for one in usable if one.efficiency >= LEAST_EFFICIENCY] or usable
    fastest = min(map(time_of, scaling))
    best = min(
        (one for one in scaling if time_of(one) <= 1.02 * fastest), key=lambda one: (one.config.workers, time_of(one))
    )
    front, cheapest = set[int](), math.inf
    for one in sorted(usable, key=lambda one: (time_of(one), cost_of(one))):
        if cost_of(one) < cheapest:
            cheapest = cost_of(one)
            front.add(id(one))
    return [replace(one, is_best=one is best, is_pareto=id(one) in front) for one in forecasts]


def headline(plan: Plan) -> str:
    """One or two sentences: the recommended configuration and why."""
    best, question = plan.best, plan.question
    text = f"{best.config.name()}: {_ms(best.step.mid_s)} a step ({_ms(best.step.low_s)} to {_ms(best.step.high_s)}), "
    text += f"{best.samples_per_s:,.0f} samples/s, {best.efficiency:.0%} of linear scaling"
    if best.hours is not None:
        money = "" if best.cost is None else f" and {best.cost:,.3g} {question.currency}"
        text += f"; {best.hours:,.3g} hours{money} to the target"
    misfits = [one for one in plan.forecasts if one.fits is False]
    if best.fits is False:
        return f"Nothing of the grid fits into memory; the least: {text}."
    if misfits:
        text += f". {len(misfits)} of {len(plan.forecasts)} do not fit into memory, mostly because of "
        kinds = [one.memory.largest_kind for one in misfits]
        text += max(kinds, key=kinds.count)
    return text + "."


def _notes(profile: ProgramProfile, question: Question, forecasts: Sequence[ConfigurationForecast]) -> list[str]:
    sizes = sorted({one.workers for one in profile.probes})
    notes = [
        f"Steps were measured on {' and '.join(map(str, sizes))} worker{'s' * (sizes != [1])} in {len(profile.probes)} "
        f"run{'s' * (len(profile.probes) > 1)}; intervals are meant to hold in 90 % of cases.",
    ]
    if not any(one.workers > 1 for one in profile.probes):
        notes.append("No run on two workers was measured: what workers of a host cost each other is not known.")
    if not profile.sums:
        notes.append("No sums were measured: `lockstep doctor --links` does, and makes the predictions better.")
    if question.most_hosts > 1 and any(link.source == "preset" for link in question.links):
        notes.append("Links with the source `preset` are typical values, not measured ones.")
    asked = {hosts * workers for hosts, workers in question.layouts}
    if missing := sorted(asked - {one.config.workers for one in forecasts}):
        notes.append(f"Left out, since a batch or its shards are too few: {', '.join(map(str, missing))} workers.")
    if count := sum(one.fits_without_graphs for one in forecasts):
        notes.append(f"{count} of {len(forecasts)} fit only without CUDA graphs, and are slower than predicted here.")
    computed = sorted({what for one in forecasts for what in (*one.step.computed, *one.memory.computed)})
    if computed:
        notes.append(f"Computed, not measured, for some configurations: {', '.join(computed)}.")
    if profile.noise_scale is None and question.target_steps is not None:
        notes.append("The gradient noise scale is not known: a larger batch is assumed to need as many samples.")
    return notes


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
