"""What is trained, checked once; and how the work of a step is shared out, whenever the workers are others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.exact_sum import ShardSum
from lockstep.data.batches import Batch, Batches, Position, Shard
from lockstep.data.sample_order import share
from lockstep.ddp import replica
from lockstep.ddp.replica import Leaf
from lockstep.train import determinism
from lockstep.train.buffer_exchange import RunningState
from lockstep.train.options import Options
from lockstep.train.precision import LossScale
from lockstep.train.recompute_check import Audit
from lockstep.train.run_directory import STOPPED
from lockstep.train.schedule import LargeBatch, LRScaling, cover_groups
from lockstep.train.shard_gradients import Gradients
from lockstep.train.step import Plan, Result, Training
from lockstep.train.step_observer import Observer, Sight
from lockstep.world.world import World

_COUNTS: Final = ("last_epoch", "params", "initial_lr")
_OF_ORDER: Final = ("seed", "sampler", "order_seed", "order_size")  # which `Batches.order_name` has
_PLAIN: Final = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Basis:
    """What was said to the Run."""

    options: Options
    seed: int
    exact: bool


def make_plan(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, basis: Basis, *, scaling: LRScaling | None
) -> Plan:
    """Raises ValueError for what does not fit together. Nothing is changed."""
    leaves = replica.trained_leaves(model, set())
    _refuse_strangers(optimizer, leaves)
    audit_every, is_stream = basis.options.audit_every, batches.state()["samples"] < 0
    if audit_every and (not basis.exact or is_stream):
        raise ValueError("audit_every= needs exact=True and a map-style dataset: another worker loads the shard")
    synced = determinism.synced_layers(model)
    if audit_every and synced:
        raise ValueError(
            f"audit_every={audit_every} with {synced[0]}, a SyncBatchNorm: one worker alone cannot compute a "
            "shard again; use BatchNorm, or audit_every=0"
        )
    return Plan(
        model=model,
        leaves=leaves,
        optimizer=optimizer,
        batches=batches,
        loss_scale=LossScale.for_precision(basis.options.precision),
        synced=synced,
        large_batch=LargeBatch(optimizer, scaling, batches.settings.global_batch_size) if scaling is not None else None,
    )


def _refuse_strangers(optimizer: torch.optim.Optimizer, leaves: Sequence[Leaf]) -> None:
    """Raise ValueError if the optimiser has parameters that the model has not."""
    known = {leaf.parameter for leaf in leaves}
    strangers = sum(p not in known for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    if strangers:
        raise ValueError(
            f"the optimiser has {strangers} parameters that the replicated model has not: "
            "make it from `run.replicate(model).parameters()`"
        )


def settings_of(plan: Plan, basis: Basis, *, scaling: LRScaling | None, steps: int | None) -> dict[str, Any]:
    """What the program has set, for a later start that may have set something else (checkpoint/differences.py).

    To be asked for before anything is restored.
    """
    options, batches, scheduler = basis.options, plan.batches, plan.schedule
    comm_dtype = options.grad_comm_dtype
    return {
        "options": {
            **{name: value for name, value in batches.facts().items() if name not in _OF_ORDER},
            "order": batches.order_name,
            "epochs": batches.settings.epochs,
            "steps": steps,
            "precision": options.precision.value,
            "grad_comm_dtype": None if comm_dtype is None else str(comm_dtype).removeprefix("torch."),
            "max_grad_norm": options.max_grad_norm,
            "on_nonfinite": options.on_nonfinite.value,
            "threads": options.threads,
            "scheduler": None if scheduler is None else type(scheduler).__name__,
            "interval": plan.interval,
            "scaling": None if scaling is None else str(scaling),
        },
        "optimizer": [_plain(group) for group in plan.optimizer.param_groups],
        "scheduler": {} if scheduler is None else _plain(scheduler.state_dict()),
    }


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are numbers, texts or tuples of numbers, and do not count steps."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        value = list(value) if isinstance(value, tuple) else value
        numbers = value if isinstance(value, list) else [value]
        if not name.startswith("_") and name not in _COUNTS and all(isinstance(x, _PLAIN) for x in numbers):
            found[name] = value
    return found


def follow_trainable(plan: Plan) -> dict[str, Any]:
    """Train the parameters that require a gradient now, with the groups that the optimiser has now.

    Returns what all workers must have in common. Raises ValueError, and changes nothing, if no parameter is left, or if
    the program has given the optimiser a group that cannot be trained.
    """
    leaves = replica.trained_leaves(plan.model, set())
    if not leaves:
        raise ValueError("the program has frozen all parameters: none requires a gradient any more")
    _refuse_strangers(plan.optimizer, leaves)
    held = {p for group in plan.optimizer.param_groups for p in group["params"]}
    if any(parameter not in held for parameter in plan.optimizer.state):
        raise ValueError(
            "the program has taken parameters out of optimizer.param_groups, and optimizer.state still has what it "
            "remembers of them, which cannot be saved; freeze them with requires_grad_(False), or delete that, too"
        )
    cover_groups(plan.optimizer, plan.schedule)
    plan.leaves = leaves
    return {
        "parameters that require a gradient": [leaf.name for leaf in leaves],
        "parameter groups of the optimizer": group_names(plan),
        "memory layout of parameters": [list(leaf.parameter.stride()) for leaf in leaves],
    }


def group_names(plan: Plan) -> list[list[str]]:
    """The names of the parameters of each group of the optimiser; "" for one that the model has not."""
    names = {id(parameter): name for name, parameter in plan.model.named_parameters()}
    return [[names.get(id(p), "") for p in group["params"]] for group in plan.optimizer.param_groups]


def match_groups(plan: Plan, state: Mapping[str, Any]) -> None:
    """Let the optimiser have as many groups as the one of `state`, a state of `Checkpoints`, before that is restored.

    The program may have added some by `add_param_group` in its loop; one that starts with fewer gets them here.
    """
    names, optimizer = state.get("groups") or [], plan.optimizer
    parameters = dict(plan.model.named_parameters())
    for n in range(len(optimizer.param_groups), len(names)):
        saved = state["optimizer"]["param_groups"][n]
        options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
        has_names = "param_names" in saved
        own = zip(saved["param_names"], names[n], strict=True) if has_names else ((name, name) for name in names[n])
        params = [(shown, parameters[name]) if has_names else parameters[name] for shown, name in own]
        optimizer.add_param_group({**options, "params": params})


def take_over_trainable(plan: Plan, state: Mapping[str, Any]) -> None:
    """Train the parameters that were trained where `state`, of `Run._state`, comes from."""
    names = set(state.get("trainable") or ())
    if names:
        for name, parameter in plan.model.named_parameters():
            parameter.requires_grad_(name in names)
        plan.leaves = replica.trained_leaves(plan.model, set())


def modules_in_eval_mode(model: nn.Module) -> list[str]:
    """The names of modules that the program has put into eval mode, batch norm with frozen averages for example."""
    return [name for name, module in model.named_modules() if not module.training]


def take_over_modes(model: nn.Module, names: Sequence[str] | None) -> None:
    """Put the modules with these names into eval mode and all others into training mode; None: leave them."""
    if names is not None:
        for name, module in model.named_modules():
            module.training = name not in names


def share_out(plan: Plan, basis: Basis, world: World, group: dist.ProcessGroup, observer: Observer) -> Training:
    """All workers of `group`: each gets its shards."""
    batches, options, size = plan.batches, basis.options, world.size
    shards = batches.settings.shards
    shares = [share(shards, size, rank) for rank in range(size)]
    determinism.check_sync_batch_norm(plan.model, shares, exact=basis.exact, is_main=world.rank == 0)
    batches.share_out(world.rank, size)
    sum_ = ShardSum(group, shares, device=world.device, exact=basis.exact)

    def fetch(batch: Batch, number: int) -> Shard:
        return batches.fetch(Position(batch.epoch, batch.step, batch.number), [number]).shards[0]

    return Training(
        model=plan.model,
        leaves=plan.leaves,
        optimizer=plan.optimizer,
        sum=sum_,
        gradients=Gradients(plan.leaves, sum_, comm_dtype=options.grad_comm_dtype),
        running=RunningState(plan.model, shards, checks_weights=batches.position.number == 0),
        loss_scale=plan.loss_scale,
        audit=Audit(plan.model, plan.leaves, every=options.audit_every, fetch=fetch),
        observer=observer,
        options=options,
        seed=basis.seed,
        large_batch=plan.large_batch,
        last_norm=plan.last_norm,
        gradient_writes=plan.gradient_writes,
    )


def sight_of(plan: Plan, world: World) -> Sight:
    samples = plan.batches.facts()["samples"]
    dense = not any(leaf.sparse for leaf in plan.leaves)
    return Sight(writes=world.rank == 0, shards=dense, population=samples if samples > 0 else None)


def facts_of(plan: Plan | Training, result: Result) -> dict[str, float | None]:
    """The learning rate of this step, of the first group, and the norm of its gradient; None if only a GPU knows."""
    rate = plan.optimizer.param_groups[0].get("lr")
    times = plan.large_batch.factor(result.number) if plan.large_batch is not None else 1.0
    is_known = isinstance(rate, (int, float)) or (isinstance(rate, Tensor) and not rate.is_cuda)
    norm = None if isinstance(result.norm, Tensor) and result.norm.is_cuda else result.grad_norm
    return {"lr": float(rate or 0.0) * times if is_known else None, "grad_norm": norm}


def describe(plan: Plan, training: Training) -> dict[str, Any]:
    """What the work of a step looks like, for the trace: known when the first step was taken."""
    by_parameter = [state for state in plan.optimizer.state.values() if isinstance(state, dict)]
    states = [value for state in by_parameter for value in state.values() if isinstance(value, Tensor)]
    weights = sum(t.nbytes for t in (*plan.model.parameters(), *plan.model.buffers()))
    return {
        "buckets": list(training.gradients.bucket_bytes),
        "bucket_names": training.gradients.bucket_names,
        "memory": {
            "weights": weights,
            "gradients": sum(leaf.parameter.nbytes for leaf in plan.leaves),
            "optimizer": sum(state.nbytes for state in states),
        },
    }


def describe_nothing_to_train(plan: Plan, steps: int | None, *, was_stopped: bool) -> str | None:
    """Why there is nothing to train in this start; None if there is something.

    steps        after which the program wants to end
    was_stopped  the program itself has ended the training in an earlier start
    """
    step, over = plan.batches.position.number, "--fresh, or Run(resume=False), starts over"
    if was_stopped:
        return f"stopped at step {step} by the program; nothing to train; {over}; without {STOPPED} it trains on"
    if step and (plan.batches.ended or (steps is not None and step >= steps)):
        return f"finished at step {step}; nothing to train; {over}; more epochs= (or steps=) train on"
    return None


def introduce(plan: Plan, basis: Basis, world: World) -> str:
    """In a line: what is about to be done."""
    settings, step, size = plan.batches.settings, plan.batches.position.number, world.size
    cut = f"{settings.shards} shards on {size} worker{'s' if size > 1 else ''} ({world.backend})"
    rates = sorted({float(group["lr"]) for group in plan.optimizer.param_groups})
    what = f"global batch {settings.global_batch_size}, learning rate {', '.join(f'{rate:g}' for rate in rates)}"
    what = plan.large_batch.describe() if plan.large_batch is not None else what
    how = "exact" if basis.exact else "fast: bits depend on the workers"
    if basis.exact and world.device.type == "cpu":
        threads = basis.options.threads
        how += f", {threads} thread{'s' if threads > 1 else ''} each"
    return f"{what}; {cut}; seed {basis.seed}; {how}{f', from step {step}' if step else ''}"
