"""Training with state that is distributed over the workers: that of the optimiser, with `Run(shard_optimizer=True)`,
and the residuals of gradients, with `Run(grad_comm="powersgd")` or `"topk"`.

Without any, these functions do what every worker can do alone. The state itself is in ddp/sharded_state.py and in
step/residuals.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch.distributed as dist

from lockstep import faults
from lockstep.checkpoint.tensor_stream import TensorStream
from lockstep.comm import abortable_wait, agreement
from lockstep.data.batches import Batch, Position
from lockstep.ddp.deferred_weights import DeferredWeights, why_not_deferrable
from lockstep.ddp.optimizer_cells import flat_view, needs_master_weights, refuse_float16
from lockstep.ddp.optimizer_state import WholeState
from lockstep.ddp.replica import cheap_digests, named_state, sha256_in_order
from lockstep.ddp.sharded_optimizer import needs_whole_tensors
from lockstep.ddp.sharded_state import ShardedState
from lockstep.ddp.state_holders import StateOutline
from lockstep.errors import LockstepError, LostStateError
from lockstep.recovery.collective_calls import print_message
from lockstep.step.compiled_model import is_compiled
from lockstep.step.run_options import OnNonFinite
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
    if options.master_weights:
        refuse_float16(plan.model.parameters())
    if options.master_weights and not any(map(needs_master_weights, plan.model.parameters())):
        raise ValueError(
            "master_weights=True: no parameter of the model is in bfloat16; convert it with "
            "model.to(torch.bfloat16) before run.replicate, or leave master_weights out"
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
    # Audits compare the gradients of all workers.
    may_scatter = session.device.type == "cpu" and not options.audit_every
    if session.calls.is_elastic:  # a step must be checked: Note [A step that a worker has missed]
        may_scatter = may_scatter and options.on_nonfinite is not OnNonFinite.IGNORE
    plan.sharded_state = ShardedState(
        optimizers,
        whole_tensors=whole_tensors,
        redundancy=redundancy,
        scatters=may_scatter,
        queues=options.defer_weights and not session.calls.is_elastic,
        master_weights=options.master_weights,
    )
    # Synchronised batch norms would exchange values meanwhile; of a lost worker, weights must not be on their way.
    may_defer = options.defer_weights and not plan.synced and not is_compiled(plan.model)
    may_defer = may_defer and may_scatter and not session.calls.is_elastic
    if may_defer and why_not_deferrable(plan.model) is None:
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
    if plan.sharded_state is not None:
        exchange = partial(exchange_within_call, session, plan, part, confirms=session.calls.is_elastic)
        session.calls.make("the exchange of weights", exchange, reads_weights=False)


def exchange_within_call(session: Session, plan: TrainingPlan, part: int, *, confirms: bool) -> None:
    """Do what `exchange_weights` does as a part of another collective call; nothing if no state is distributed.

    confirms  see ShardedState.exchange_weights
    """
    sharded = plan.sharded_state
    if sharded is None:
        return
    faults.at("weights")
    with session.step_stream.active(), session.call_check.explain_errors("run.step"):
        deferred = plan.weights if sharded.sends_between_hosts else None
        sharded.exchange_weights(part, session.group, session.device, confirms=confirms, deferred=deferred)


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


def _outline_optimizer(session: Session, plan: TrainingPlan) -> StateOutline:
    """Return the state of the distributed optimiser, without its large tensors. Part of a collective call."""
    assert plan.sharded_state is not None
    session.call_check.wait_for_all(session.calls.current_call)
    return plan.sharded_state.outline(session.group, session.device)


def _write_distributed(session: Session, plan: TrainingPlan, write: Callable[[WholeParts], None]) -> None:
    """Call `write` with the state that is distributed, and send the large tensors of it to rank 0 while it is written.

    Part of a collective call. Rank 0 never has all of them (checkpoint/tensor_stream.py). If `write` raises an error on
    one worker, the others are sent what they expect before it is raised.
    """
    stream, whole, outlines = TensorStream(), WholeParts(), list[StateOutline]()

    def fill(outline: StateOutline) -> dict[Any, Any]:
        outlines.append(outline)
        return outline.fill(stream.add(one.dtype, tuple(one.shape)) for one in outline.placeholders)

    if plan.sharded_state is not None:
        filled = fill(_outline_optimizer(session, plan))
        whole = replace(whole, optimizer=WholeState(plan.sharded_state.param_groups, filled))
    if plan.residuals is not None:
        session.call_check.wait_for_all(session.calls.current_call)
        whole = replace(whole, residuals=fill(plan.residuals.outline(session.group, session.device)))
    error: Exception | None = None
    try:
        try:
            write(whole)
        except Exception as raised:
            error = raised
            stream.abandon()
        for outline in outlines:
            for tensor in outline.send(outline.placeholders):
                if tensor is not None:
                    stream.put(tensor, check=session.calls.check_left, report=print_message)
        # Not before rank 0 has it all is the call over on other workers: they make it again if rank 0 is lost.
        work = session.group.barrier(dist.BarrierOptions())
        abortable_wait.wait(session.group, work, session.device, "handing over the state")
    finally:
        stream.end()
    session.checkpoints.saver.restart_interval()
    if error is not None:
        raise error


def compute_digest(session: Session, plan: TrainingPlan) -> None:
    """Compute what `find_digest` returns, if the state is distributed; a collective call.

    It is made at the end of the loop, so that afterwards one worker alone can ask for the digest.
    """
    if plan.sharded_state is None:
        return

    def compute() -> str:
        assert plan.sharded_state is not None
        outline = _outline_optimizer(session, plan)
        named = sorted(named_state(plan.model, WholeState(plan.sharded_state.param_groups, outline.state)).items())
        arriving = outline.send([tensor for _, tensor in named if tensor.is_meta])
        in_order = ((name, next(arriving) if tensor.is_meta else tensor) for name, tensor in named)
        mine = sha256_in_order((name, one) for name, one in in_order if one is not None and session.is_main)
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
        assert plan.sharded_state is not None
        found = _outline_optimizer(session, plan).collect()
        whole = None if found is None else WholeState(plan.sharded_state.param_groups, found)
        write(None if whole is None else named_state(plan.model, whole), writes=session.is_main)

    session.calls.make("the state log", log)


def save(session: Session, plan: TrainingPlan, here: Position, write: Callable[..., None]) -> None:
    """Save the state at this position by a method of `Checkpoints`. A collective call, if it is distributed."""
    if not plan.is_distributed or session.directory is None:
        write(plan, here, writes=session.is_main)
        return

    def collect_and_save() -> None:
        _write_distributed(session, plan, lambda whole: write(plan, here, writes=session.is_main, whole=whole))

    session.calls.make("run.save", collect_and_save)


def save_last(session: Session, plan: TrainingPlan, here: Position, note_end: Callable[[], None]) -> None:
    """Write the last checkpoint if it is missing, wait until everything is written, and call `note_end` on rank 0. If
    it could not be written, that is noted in `Checkpoints.unsaved_step` instead.

    Part of a collective call.
    """
    checkpoints, check = session.checkpoints, session.calls.check_left

    def is_last_missing() -> bool:
        return checkpoints.is_last_missing(plan, here, check)

    if plan.is_distributed and session.on_one.run(is_last_missing):
        _write_distributed(
            session, plan, lambda whole: checkpoints.save(plan, here, writes=session.is_main, whole=whole)
        )

    def finish_checkpoints() -> bool:
        if plan.is_distributed:
            checkpoints.drain(check)
        else:
            checkpoints.save_last(plan, here, check)
        if is_saved := checkpoints.is_on_disk(plan, here):
            note_end()
        return is_saved

    checkpoints.unsaved_step = None if session.on_one.run(finish_checkpoints) else here.number


def is_save_due(session: Session, plan: TrainingPlan, batch: Batch, *, asked: bool) -> bool:
    """Whether to save after this batch. Saving a distributed state is a collective call, so all workers agree on it.

    asked  whether rank 0 has asked for it in a step of this batch (`StepRequests`)
    """
    saver = session.checkpoints.saver
    if plan.is_distributed and saver.is_by_time:
        return asked
    return saver.is_due(batch.number, ends_epoch=batch.ends_epoch)
