"""Training with state that is distributed over the workers: that of the optimiser, with `Run(shard_optimizer=True)`,
and the residuals of gradients, with `Run(grad_comm="powersgd")` or `"topk"`.

Without any, these functions do what every worker can do alone. The state itself is in ddp/sharded_state.py and in
step/residuals.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from lockstep import faults
from lockstep.comm import agreement
from lockstep.data.batches import Batch, Position
from lockstep.ddp.deferred_weights import DeferredWeights, why_not_deferrable
from lockstep.ddp.optimizer_cells import flat_view
from lockstep.ddp.optimizer_state import WholeState
from lockstep.ddp.replica import cheap_digests, named_state, sha256_of
from lockstep.ddp.sharded_optimizer import needs_whole_tensors
from lockstep.ddp.sharded_state import ShardedState
from lockstep.errors import LockstepError, LostStateError
from lockstep.step.compiled_model import is_compiled
from lockstep.step.step_types import TrainingPlan
from lockstep.train.optimizer_set import parts_of
from lockstep.train.run_state import WholeParts
from lockstep.train.session import Session
from lockstep.train.training_plan import group_names

FINISH_WRITING_S: Final = 60.0


def shard_optimizer(session: Session, plan: TrainingPlan) -> None:
    """Distribute the state of the optimiser over the workers from now on, if the program wants it.

    Raises TypeError or ValueError for an optimiser with which that cannot be done.
    """
    options, optimizers = session.options, parts_of(plan.optimizer)
    if not options.shard_optimizer:
        return
    for leaf in plan.leaves:
        if leaf.sparse:
            raise ValueError(
                f"shard_optimizer=True: the gradient of {leaf.name} is sparse, and such gradients are not "
                "distributed; make the embedding with sparse=False, or leave shard_optimizer out"
            )
    for one in optimizers:
        for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
            if parameter.numel() and flat_view(parameter) is None:
                raise ValueError(
                    f"shard_optimizer=True: a parameter of shape {tuple(parameter.shape)} is a view with gaps "
                    f"(strides {parameter.stride()}), which cannot be divided; make it from a copy, tensor.clone()"
                )
        if one._optimizer_step_pre_hooks or one._optimizer_step_post_hooks:
            raise ValueError(
                f"shard_optimizer=True: this {type(one).__name__} has step hooks, which would see a part of its "
                "parameters only; remove them, or do what they do in the loop, around run.step"
            )
    redundancy = options.redundancy
    if redundancy is None:
        redundancy = int(session.calls.is_elastic or bool(options.audit_every))
    if options.audit_every and not redundancy:
        raise ValueError(
            "audit_every= with shard_optimizer=True needs redundancy=1: a part of the optimiser's state that only one "
            "worker has cannot be compared with anything"
        )
    whole_tensors = [needs_whole_tensors(type(one), None) for one in optimizers]
    # A lost worker is replaced with the gradients and weights of a step, and audits compare gradients: of all workers.
    is_fixed = session.device.type == "cpu" and not session.calls.is_elastic and not options.audit_every
    plan.sharded_state = ShardedState(optimizers, whole_tensors=whole_tensors, redundancy=redundancy, scatters=is_fixed)
    # Synchronised batch norms would exchange values meanwhile.
    may_defer = options.defer_weights and not plan.synced and not is_compiled(plan.model)
    if is_fixed and may_defer and why_not_deferrable(plan.model) is None:
        plan.weights = DeferredWeights(plan.model, session.announce)
        session.calls.finish_weights = plan.weights.finish


def assign_optimizer(session: Session, plan: TrainingPlan) -> None:
    """Divide the state of the optimiser between the current workers, if it is distributed; a collective call.

    If a part of it is lost, end this process: others start in its place, from the newest checkpoint.
    """
    sharded = plan.sharded_state
    if sharded is None:
        return
    faults.at("moving-state")
    try:
        sharded.assign(session.group, session.device)
    except LostStateError as error:
        if not session.calls.is_elastic:
            raise
        name = [name for names in group_names(plan) for name in names][error.parameter]
        _go_back(session, f"no worker has the optimiser's state of {name} any more: those that kept it are lost")


def assign_residuals(session: Session, plan: TrainingPlan, shares: Sequence[range]) -> None:
    """Give every worker the residuals of its shards, if gradients have residuals; a collective call.

    If some are lost, end this process: others start in its place, from the newest checkpoint.
    """
    if plan.residuals is None:
        return
    faults.at("moving-state")
    try:
        plan.residuals.assign(session.group, session.device, shares)
    except LostStateError as error:
        if not session.calls.is_elastic:
            raise
        _go_back(session, str(error))


def _go_back(session: Session, why: str) -> None:
    """End this process: others start in its place, from the newest checkpoint. Called by all workers."""
    # All workers are here. One may be writing a checkpoint, which counts only while none of the others has ended.
    session.calls.restart(why, lambda: session.on_one.run(partial(_finish_writing, session)), is_wrong=None)


def _finish_writing(session: Session) -> None:
    """Wait, for some time, until a checkpoint is written that this worker is writing."""
    end_s = time.monotonic() + FINISH_WRITING_S

    def check_deadline() -> None:
        if time.monotonic() > end_s:
            raise TimeoutError("the checkpoint that was being written is not complete")

    session.checkpoints.drain(check_deadline)


def assign_first(session: Session, plan: TrainingPlan) -> None:
    """Divide the state of the optimiser before the first step of this start, unless it is; a collective call."""
    if plan.sharded_state is not None and not plan.sharded_state.has_parts:
        assign_optimizer(session, plan)


def exchange_weights(session: Session, plan: TrainingPlan, part: int) -> None:
    """Send the weights that this worker's part of optimiser `part` has updated to all others; a collective call."""
    sharded = plan.sharded_state
    if sharded is None:
        return

    def exchange() -> None:
        faults.at("weights")
        with session.step_stream.active(), session.call_check.explain_errors("run.step"):
            sharded.exchange_weights(
                part,
                session.group,
                session.device,
                confirms=session.calls.is_elastic,
                deferred=plan.weights if sharded.sends_between_hosts else None,
            )

    session.calls.make("the exchange of weights", exchange, reads_weights=False)


def prepare_for_move(session: Session, plan: TrainingPlan) -> None:
    """Give every worker a copy of what is distributed, if some of them leave now; a collective call.

    Which ones leave is decided when they have. The copies are kept until the parts are assigned anew.
    """
    if not plan.is_distributed or not session.calls.is_elastic:
        return

    def copy() -> None:
        if not session.calls.is_moving:  # asked here, since the generation may have changed in an earlier call
            return
        rows = agreement.gather_rows(session.group, [int(session.calls.is_shrinking)], device=session.device)
        if any(shrinks for (shrinks,) in rows):
            for state in (plan.sharded_state, plan.residuals):
                if state is not None:
                    state.copy_to_all(session.group, session.device)

    session.calls.make("copies of what is distributed", copy)


def collect_optimizer(session: Session, plan: TrainingPlan) -> WholeState | None:
    """Return the state of the optimiser on rank 0, if it is distributed, else None. Part of a collective call then."""
    if plan.sharded_state is None:
        return None
    session.call_check.wait_for_all(session.calls.current_call)
    return plan.sharded_state.collect(session.group, session.device)


def collect_parts(session: Session, plan: TrainingPlan) -> WholeParts | None:
    """Return all that is distributed on rank 0; else None. Part of a collective call, if anything is distributed."""
    if not plan.is_distributed:
        return None
    optimizer, residuals = collect_optimizer(session, plan), None
    if plan.residuals is not None:
        session.call_check.wait_for_all(session.calls.current_call)
        residuals = plan.residuals.collect(session.group, session.device)
    return WholeParts(optimizer, residuals) if session.is_main else None


def compute_digest(session: Session, plan: TrainingPlan) -> None:
    """Compute what `find_digest` returns, if the state is distributed; a collective call.

    It is made at the end of the loop, so that afterwards one worker alone can ask for the digest.
    """
    if plan.sharded_state is None:
        return

    def compute() -> str:
        whole = collect_optimizer(session, plan)
        mine = "" if whole is None else sha256_of(named_state(plan.model, whole))
        return str(agreement.gather_values(session.group, mine, device=session.device)[0])

    weights = cheap_digests(named_state(plan.model).values())
    plan.known_digest = weights, session.calls.make("run.digest", compute)


def find_digest(session: Session, plan: TrainingPlan) -> str:
    """Return the digest of a run whose state is distributed. A collective call, unless it is known already."""
    known = plan.known_digest
    if known is None or known[0] != cheap_digests(named_state(plan.model).values()):
        if session.calls.current_call == "run.on_main":
            raise LockstepError(
                "run.digest in run.on_main: with shard_optimizer=True the workers compute it together: call it on all "
                "of them, before that"
            )
        compute_digest(session, plan)
        known = plan.known_digest
    assert known is not None
    return known[1]


def log_state(session: Session, plan: TrainingPlan, write: Callable[..., None]) -> None:
    """Log the state for `lockstep certify` by a method of `StateLog`. A collective call, if it is distributed."""
    if plan.sharded_state is None:
        write(named_state(plan.model, plan.optimizer), writes=session.is_main)
        return

    def log() -> None:
        whole = collect_optimizer(session, plan)
        write(None if whole is None else named_state(plan.model, whole), writes=session.is_main)

    session.calls.make("the state log", log)


def save(session: Session, plan: TrainingPlan, here: Position, write: Callable[..., None]) -> None:
    """Save the state at this position by a method of `Checkpoints`. A collective call, if it is distributed."""
    if not plan.is_distributed or session.directory is None:
        write(plan, here, writes=session.is_main)
        return

    def collect_and_save() -> None:
        write(plan, here, writes=session.is_main, whole=collect_parts(session, plan))

    session.calls.make("run.save", collect_and_save)


def is_save_due(session: Session, plan: TrainingPlan, batch: Batch, *, asked: bool) -> bool:
    """Whether to save after this batch. Saving a distributed state is a collective call, so all workers agree on it.

    asked  whether rank 0 has asked for it in a step of this batch (`StepRequests`)
    """
    saver = session.checkpoints.saver
    if plan.is_distributed and saver.is_by_time:
        return asked
    return saver.is_due(batch.number, ends_epoch=batch.ends_epoch)
