"""The plan of a training: checked once when it begins; and the shards of each worker, assigned when workers change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.shard_sum import ShardSum
from lockstep.data.batches import Batch, Batches, Position, Shard
from lockstep.ddp import replica
from lockstep.ddp.replica import Leaf
from lockstep.recovery.run_directory import STOPPED
from lockstep.seed import derive_seed
from lockstep.step import determinism
from lockstep.step.audit import AuditSchedule, ShardAudit
from lockstep.step.buffer_exchange import BufferExchange
from lockstep.step.grad_comm_tuner import GradCommTuner
from lockstep.step.learning_rate import LargeBatch, LRScaling, cover_groups
from lockstep.step.precision import LossScale
from lockstep.step.residuals import Residuals
from lockstep.step.run_options import GradComm, RunOptions
from lockstep.step.scattered_gradients import ScatteredGradients
from lockstep.step.shard_balance import ShardBalance, SpeedMeter
from lockstep.step.shard_bucket import Compression, Rounding
from lockstep.step.shard_gradients import ShardGradients
from lockstep.step.step_types import LastUpdate, Result, StepContext, TrainingPlan
from lockstep.trace.step_observer import ObserverConfig, StepObserver
from lockstep.train.loss_comparison import why_impossible
from lockstep.train.optimizer_set import NO_NEW_GROUPS, OptimizerSet, class_names, parts_of
from lockstep.world.world import World

_NOT_SETTINGS: Final = ("last_epoch", "params", "initial_lr")
_ORDER_OPTIONS: Final = ("seed", "sampler", "order_seed", "order_size")  # which `Batches.order_name` contains
FEW_SHARDS: Final = 8  # with fewer, the first line says how to allow more workers
_PLAIN: Final = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class RunConfig:
    """Arguments of the Run."""

    options: RunOptions
    seed: int
    exact: bool


def make_plan(
    model: nn.Module,
    optimizer: Any,
    batches: Batches,
    config: RunConfig,
    *,
    scaling: LRScaling | None,
) -> TrainingPlan:
    """Return the plan of a training. Changes nothing; raises ValueError for arguments that do not fit together.

    optimizer  a torch optimiser, or an `OptimizerSet`
    """
    leaves = replica.trained_leaves(model, set())
    _check_optimizer_parameters(optimizer, leaves)
    audit_every, is_stream = config.options.audit_every, batches.state()["samples"] < 0
    if audit_every and (not config.exact or is_stream):
        raise ValueError("audit_every= needs exact=True and a map-style dataset: another worker loads the shard")
    synced = determinism.synced_layers(model)
    if audit_every and synced:
        raise ValueError(
            f"audit_every={audit_every} with {synced[0]}, a SyncBatchNorm: one worker alone cannot compute a "
            "shard again; use BatchNorm, or audit_every=0"
        )
    comm = config.options.grad_comm
    if comm.has_residuals and not config.exact:
        raise ValueError(
            f'grad_comm="{comm.value}" with exact=False: what is not sent of a gradient is kept for its shard, and '
            'there are no shards; leave out exact=False, or use grad_comm="int8"'
        )
    _check_ratio(config.options, batches.settings.shards)
    return TrainingPlan(
        model=model,
        leaves=leaves,
        optimizer=optimizer,
        batches=batches,
        loss_scale=LossScale.for_precision(config.options.precision),
        synced=synced,
        large_batch=LargeBatch(optimizer, scaling, batches.settings.global_batch_size) if scaling is not None else None,
        audits=AuditSchedule(audit_every),
        tuner=GradCommTuner(
            config.options.grad_comm,
            compares=config.options.compare_loss,
            why_not_compared=why_impossible(batches, optimizer, config.options),
            method=config.options.error_feedback,
        ),
        residuals=_make_residuals(model, batches, config),
    )


def _check_ratio(options: RunOptions, shards: int) -> None:
    """Raise ValueError if top-k would send more bytes than are sent without compression.

    Every worker receives an element of four bytes and a position of four for each entry of each shard; an all-reduce
    sends each element, of four bytes, about twice.
    """
    if options.grad_comm is GradComm.TOPK and options.topk_ratio * shards >= 1.0:
        raise ValueError(
            f"topk_ratio={options.topk_ratio:g} with {shards} shards sends as much as no compression, or more, since "
            f"those of all shards are sent to all workers: use a ratio far below {1 / shards:.3g}, or fewer shards"
        )


def _make_residuals(model: nn.Module, batches: Batches, config: RunConfig) -> Residuals | None:
    method, shards = config.options.error_feedback, batches.settings.shards
    return None if method is None else Residuals(method, shards, dict(model.named_parameters()), config.seed)


def _check_optimizer_parameters(optimizer: torch.optim.Optimizer | OptimizerSet, leaves: Sequence[Leaf]) -> None:
    """Raise ValueError if the optimiser has parameters that are not in the model."""
    known = {leaf.parameter for leaf in leaves}
    unknown = sum(p not in known for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    if unknown:
        raise ValueError(
            f"the optimiser has {unknown} parameters that the replicated model has not: "
            "make it from `run.replicate(model).parameters()`"
        )


def settings_of(
    plan: TrainingPlan, config: RunConfig, *, scaling: LRScaling | None, steps: int | None
) -> dict[str, Any]:
    """The settings of the program, which a later start compares with its own (checkpoint/differences.py).

    Call it before anything is restored.
    """
    options, batches, scheduler = config.options, plan.batches, plan.schedule
    return {
        "options": {
            **{name: value for name, value in batches.facts().items() if name not in _ORDER_OPTIONS},
            "order": batches.order_name,
            "epochs": batches.settings.epochs,
            "steps": steps,
            "precision": options.precision.value,
            "grad_comm": options.grad_comm.value,
            **({"powersgd_rank": options.powersgd_rank} if options.grad_comm is GradComm.POWERSGD else {}),
            **({"topk_ratio": options.topk_ratio} if options.grad_comm is GradComm.TOPK else {}),
            "master_weights": options.master_weights,
            "max_grad_norm": options.max_grad_norm,
            "on_nonfinite": options.on_nonfinite.value,
            "threads": options.threads,
            "compile": str(options.compile),
            "scheduler": None if scheduler is None else class_names(scheduler),
            "interval": plan.interval,
            "scaling": None if scaling is None else str(scaling),
        },
        "optimizer": [_plain(group) for group in plan.optimizer.param_groups],
        "scheduler": {} if scheduler is None else _plain(scheduler.state_dict()),
    }


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are numbers, strings or tuples of numbers, and do not count steps."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        value = list(value) if isinstance(value, tuple) else value
        numbers = value if isinstance(value, list) else [value]
        if not name.startswith("_") and name not in _NOT_SETTINGS and all(isinstance(x, _PLAIN) for x in numbers):
            found[name] = value
    return found


def update_trainable(plan: TrainingPlan) -> dict[str, Any]:
    """Train the parameters that require a gradient now, with the groups that the optimiser has now.

    Returns what all workers must have in common. Raises ValueError, and changes nothing, if no parameter is left, or if
    the program has given the optimiser a group that cannot be trained.
    """
    leaves = replica.trained_leaves(plan.model, set())
    if not leaves:
        raise ValueError("the program has frozen all parameters: none requires a gradient any more")
    _check_optimizer_parameters(plan.optimizer, leaves)
    is_set = isinstance(plan.optimizer, OptimizerSet)
    if is_set and len(plan.optimizer.param_groups) != len(plan.settings["optimizer"]):
        raise ValueError(NO_NEW_GROUPS)
    held = {p for group in plan.optimizer.param_groups for p in group["params"]}
    if any(parameter not in held for parameter in plan.optimizer.state):
        raise ValueError(
            "the program has taken parameters out of optimizer.param_groups, and optimizer.state still has what it "
            "remembers of them, which cannot be saved; freeze them with requires_grad_(False), or delete that, too"
        )
    cover_groups(plan.optimizer, plan.schedule)
    plan.leaves = leaves
    if plan.residuals is not None:
        plan.residuals.follow(dict(plan.model.named_parameters()))
    return {
        "parameters that require a gradient": [leaf.name for leaf in leaves],
        "parameter groups of the optimizer": group_names(plan),
        "memory layout of parameters": [list(leaf.parameter.stride()) for leaf in leaves],
    }


def group_names(plan: TrainingPlan) -> list[list[str]]:
    """The names of the parameters of each group of the optimiser; "" for one that the model has not."""
    names = {id(parameter): name for name, parameter in plan.model.named_parameters()}
    return [[names.get(id(p), "") for p in group["params"]] for group in plan.optimizer.param_groups]


def add_missing_groups(plan: TrainingPlan, state: Mapping[str, Any]) -> None:
    """Add the parameter groups that the optimiser lacks compared with `state` (see `Checkpoints.state`).

    The program may have added groups by `add_param_group` in its loop. Call it before the state is restored.
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


def restore_trainable(plan: TrainingPlan, state: Mapping[str, Any]) -> None:
    """Train the parameters that were trained when `state` was saved (see `Checkpoints.state`).

    What the program has changed since the step before it does again for the next one, in which all workers agree on it.
    """
    names, plan.group_sizes = set(state.get("trainable") or ()), state.get("group_sizes")
    trained = set(state.get("trained") or names)
    for chosen in (trained, names) if names else ():
        for name, parameter in plan.model.named_parameters():
            parameter.requires_grad_(name in chosen)
        if chosen is trained:
            plan.leaves = replica.trained_leaves(plan.model, set())


def modules_in_eval_mode(model: nn.Module) -> list[str]:
    """The names of modules in eval mode, such as batch norm with frozen averages."""
    return [name for name, module in model.named_modules() if not module.training]


def restore_eval_mode(model: nn.Module, names: Sequence[str] | None) -> None:
    """Put the modules with these names into eval mode and all others into training mode; None: change nothing."""
    if names is not None:
        for name, module in model.named_modules():
            module.training = name not in names


def make_shard_balance(plan: TrainingPlan, config: RunConfig, size: int) -> ShardBalance:
    """Return the assignment of shards to `size` workers, at first in equal shares.

    It changes with the speed of the workers only if the bits do not depend on it (`exact`), if no SyncBatchNorm needs
    as many passes on all workers, if the next batch can be read anywhere: not from a stream; and if no shard has state.
    """
    may_change = config.exact and config.options.balance_shards and not plan.synced and not plan.batches.is_stream
    has_residuals = plan.residuals is not None  # which would have to move with the shards
    return ShardBalance(plan.batches.settings.shards, size, enabled=may_change and not has_residuals)


def assign_shards(
    plan: TrainingPlan,
    config: RunConfig,
    world: World,
    group: dist.ProcessGroup,
    observer: StepObserver,
    balance: ShardBalance,
    last: LastUpdate,
) -> dict[int, StepContext]:
    """Assign the shards to the workers, and prepare steps with them. Called by all workers.

    last  the last step that was applied, which a worker that has missed it may need

    Returns the context of each optimiser, by its number. One without a parameter that requires a gradient has none.
    """
    batches, options, shares = plan.batches, config.options, balance.shares
    shards = batches.settings.shards
    determinism.check_sync_batch_norm(plan.model, shares, exact=config.exact, is_main=world.rank == 0)
    batches.set_rank(world.rank, world.size, shares[world.rank])
    comm, key = plan.tuner.current, (config.seed, "codec")
    codec, residuals = comm.codec, plan.residuals if comm.has_residuals else None
    compresses = codec is not None or residuals is not None
    sharded = plan.sharded_state
    scatters = sharded is not None and sharded.scatters and not compresses and options.max_grad_norm is None
    weights = plan.weights if sharded is not None and sharded.sends_between_hosts else None
    in_thread = scatters or weights is not None
    sum_ = ShardSum(group, shares, device=world.device, exact=config.exact, compresses=compresses, in_thread=in_thread)
    if weights is not None:
        weights.sum = sum_

    def scattered(leaves: Sequence[Leaf]) -> ScatteredGradients | None:
        """Where gradients are kept if each worker gets those that it needs; None: all workers get all of them."""
        is_alike = len({leaf.parameter.dtype for leaf in leaves}) == 1 and leaves[0].parameter.is_floating_point()
        return ScatteredGradients(sharded, leaves, sum_) if sharded is not None and scatters and is_alike else None

    def compression(part: int) -> Compression | None:
        if codec is None:
            return residuals
        return Rounding(codec, partial(derive_seed, *key, part), plan.tuner.measures)

    def fetch(batch: Batch, number: int) -> Shard:
        return batches.fetch(Position(batch.epoch, batch.step, batch.number), [number]).shards[0]

    modules = {} if options.compile else dict(plan.model.named_modules())
    buffers = BufferExchange(plan.model, shards, checks_weights=batches.position.number == 0)
    contexts = dict[int, StepContext]()
    for part, optimizer in enumerate(parts_of(plan.optimizer)):
        leaves = _leaves_of(plan, optimizer)
        own = {leaf.name for leaf in leaves}
        if leaves:
            contexts[part] = StepContext(
                model=plan.model,
                leaves=leaves,
                optimizer=optimizer,
                sum=sum_,
                gradients=ShardGradients(
                    leaves,
                    sum_,
                    comm_dtype=comm.dtype,
                    compression=compression(part),
                    scattered=scattered(leaves),
                ),
                buffers=buffers,
                loss_scale=plan.loss_scale,
                audit=ShardAudit(modules, leaves, schedule=plan.audits, fetch=fetch),
                observer=observer,
                options=options,
                seed=config.seed,
                part=part,
                frozen=[leaf.parameter for leaf in plan.leaves if leaf.name not in own],
                large_batch=plan.large_batch,
                sharded_state=plan.sharded_state,
                weights=weights,
                norm_check=plan.norm_check,
                gradient_writes=plan.gradient_writes,
                graphs=plan.graphs,
                balance=balance,
                meter=SpeedMeter(world.device),
                last=last,
            )
    return contexts


def _leaves_of(plan: TrainingPlan, optimizer: torch.optim.Optimizer) -> list[Leaf]:
    """The parameters that get gradients in a step: with several optimisers those of the one that takes the step."""
    if not isinstance(plan.optimizer, OptimizerSet):
        return plan.leaves
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [leaf for leaf in plan.leaves if id(leaf.parameter) in own]


def observer_config(plan: TrainingPlan, world: World) -> ObserverConfig:
    samples = plan.batches.facts()["samples"]
    dense = not any(leaf.sparse for leaf in plan.leaves)
    return ObserverConfig(writes=world.rank == 0, shards=dense, population=samples if samples > 0 else None)


def lr_and_grad_norm(plan: TrainingPlan | StepContext, result: Result) -> dict[str, float | None]:
    """The learning rate of the first group and the gradient norm of this step; None if the value is on a GPU."""
    rate = plan.optimizer.param_groups[0].get("lr")
    times = plan.large_batch.factor(result.number) if plan.large_batch is not None else 1.0
    is_known = isinstance(rate, (int, float)) or (isinstance(rate, Tensor) and not rate.is_cuda)
    norm = None if isinstance(result.norm, Tensor) and result.norm.is_cuda else result.grad_norm
    return {"lr": float(rate or 0.0) * times if is_known else None, "grad_norm": norm}


def last_facts(plan: TrainingPlan, result: Result) -> dict[str, float | None]:
    """What the trace tells of the last step of a window. Graphs are captured after the first steps."""
    more = {"graphs": plan.graphs.memory_bytes, "rounding_error": plan.tuner.last_error}
    return lr_and_grad_norm(plan, result) | more


def describe(plan: TrainingPlan, contexts: Mapping[int, StepContext]) -> dict[str, Any]:
    """Buckets and memory of a step, for the trace. They are known after the first step.

    `saved` is what this worker does not keep of the optimiser's state, if that is distributed.
    """
    gradients, memory, sharded = next(iter(contexts.values())).gradients, memory_of(plan, contexts), plan.sharded_state
    if sharded is not None:
        memory["saved"] = max(0, sharded.whole_state_bytes() - memory["optimizer"])
    return {
        "buckets": list(gradients.buckets.sent_bytes),
        "bucket_names": gradients.buckets.names,
        "memory": memory,
    }


def memory_of(plan: TrainingPlan, contexts: Mapping[int, StepContext]) -> dict[str, int]:
    """The bytes that this worker needs for each kind of tensor, except activations. See `Run.memory`."""
    by_parameter = [state for state in plan.optimizer.state.values() if isinstance(state, dict)]
    states = [value for state in by_parameter for value in state.values() if isinstance(value, Tensor)]
    return {
        "weights": sum(t.nbytes for t in (*plan.model.parameters(), *plan.model.buffers())),
        "gradients": sum(leaf.parameter.nbytes for leaf in plan.leaves),
        "buckets": sum(one.gradients.buckets.buffer_bytes for one in contexts.values())
        + (0 if plan.residuals is None else plan.residuals.size_bytes),
        "optimizer": sum(s.nbytes for s in states) if plan.sharded_state is None else plan.sharded_state.parts.nbytes,
        "graphs": plan.graphs.memory_bytes,
    }


def describe_nothing_to_train(plan: TrainingPlan, steps: int | None, *, was_stopped: bool) -> str | None:
    """Why there is nothing to train in this start; None if there is something to train.

    steps        the last step that the program wants; None: no limit
    was_stopped  the program itself has ended the training in an earlier start
    """
    step, over = plan.batches.position.number, "--fresh, or Run(resume=False), starts over"
    if was_stopped:
        return f"stopped at step {step} by the program; nothing to train; {over}; without {STOPPED} it trains on"
    if step and (plan.batches.ended or (steps is not None and step >= steps)):
        return f"finished at step {step}; nothing to train; {over}; more epochs= (or steps=) train on"
    return None


def describe_start(plan: TrainingPlan, config: RunConfig, world: World) -> str:
    """A line that describes what is about to be trained."""
    settings, step, size = plan.batches.settings, plan.batches.position.number, world.size
    shards = settings.shards
    cut = f"{shards} shard{'s' * (shards > 1)} on {size} worker{'s' * (size > 1)} ({world.backend})"
    if config.exact:
        numbers = "1" if shards == 1 else "1 or 2" if shards == 2 else f"1 to {shards}"
        cut += f", the same bits on {numbers} worker{'s' * (shards > 1)}"
        cut += "" if shards >= FEW_SHARDS else f" (shards={FEW_SHARDS} allows up to {FEW_SHARDS})"
    rates = sorted({float(group["lr"]) for group in plan.optimizer.param_groups})
    what = f"global batch {settings.global_batch_size}, learning rate {', '.join(f'{rate:g}' for rate in rates)}"
    what = plan.large_batch.describe() if plan.large_batch is not None else what
    how = "exact" if config.exact else "fast: bits depend on the workers"
    if plan.sharded_state is not None and size > 1:
        copies = ", and a copy of another one's" if plan.sharded_state.redundancy else ""
        how += f", each worker keeps 1/{size} of the optimiser's state{copies}"
    if plan.residuals is not None:
        method = plan.residuals.method
        count = sum(not leaf.sparse and method.compresses(leaf.parameter) for leaf in plan.leaves)
        how += f", {method.describe()} for {count} of {len(plan.leaves)} parameters (the others are sent whole)"
        how += f" {plan.tuner.describe_start()}"
    how += plan.tuner.describe_change()
    if plan.tuner.is_auto:
        how += ', grad_comm="auto": how gradients are sent follows from times, and the bits from that'
    if plan.tuner.why_not_compared is not None:
        how += f", losses with and without compression are not compared: {plan.tuner.why_not_compared}"
    if config.exact and world.device.type == "cpu":
        threads = config.options.threads
        how += f", {threads} thread{'s' if threads > 1 else ''} each"
    return f"{what}; {cut}; seed {config.seed}; {how}{f', from step {step}' if step else ''}"
