"""What is behind methods of `Run`: `replicate`, `batches`, `log` and `load`, which all workers call, and `memory`; and
the position of a worker, for the failure report."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep import faults
from lockstep.comm import agreement
from lockstep.ddp import replica
from lockstep.ddp.replica import Leaf
from lockstep.errors import CheckpointError, LockstepError
from lockstep.recovery.checkpointing import describe_misfit, read_weights
from lockstep.recovery.module_state import load_module
from lockstep.recovery.state_transfer import broadcast_state
from lockstep.trace.metrics import as_pairs, gather_pieces, mean_of
from lockstep.train import sharded_training
from lockstep.train.loop import TrainLoop
from lockstep.train.session import Session
from lockstep.train.training_plan import memory_of


def copy_from_rank_0(session: Session, model: nn.Module) -> None:
    """Copy weights and buffers of rank 0 to all workers. Compares names, shapes and dtypes before, values after.

    Raises ReplicaMismatchError, on all workers, if the models differ; ValueError if there is nothing to train.
    """
    leaves = replica.trained_leaves(model, set())
    state: dict[str, Any] = replica.state_of(model, set())
    rest = [Leaf(name, tensor, sparse=False) for name, tensor in state.items()]  # buffers and frozen parameters

    def copy() -> None:
        session.call_check.wait_for_all("run.replicate")
        with session.call_check.explain_errors("run.replicate"):
            replica.check_same_shapes(session.group, leaves, session.device)
            replica.check_same_shapes(session.group, rest, session.device)
        if not leaves:
            raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to train")
        replica.copy_state(session.group, model, set(), source=0, buffers=True)
        advice = "They did not take over what rank 0 sent; is a parameter shared or computed?"
        replica.check_same_values(session.group, model, set(), session.device, buffers=True, advice=advice)

    session.calls.make("run.replicate", copy)


def gather_rows(session: Session, row: list[int]) -> list[list[int]]:
    """Gather the rows of all workers about the next batch of a stream that splits itself."""
    with session.call_check.explain_errors("the next batch"):
        return agreement.gather_rows(session.group, row, device=session.device)


def forget_unwritten_best(session: Session) -> None:
    """Forget the best metric, on all workers, if its checkpoint could not be written; a collective call."""
    rows = list[list[int]]()

    def ask() -> None:
        is_missing = session.is_main and session.checkpoints.is_best_missing()
        rows[:] = agreement.gather_rows(session.group, [int(is_missing)], device=session.device)

    session.calls.make("run.save_best", ask)
    if any(is_missing for (is_missing,) in rows):
        session.checkpoints.forget_best()


def reduce_metrics(session: Session, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean of each metric over all workers. A metric that is equal on all of them is returned unchanged."""
    pairs = {name: value if isinstance(value, tuple) else (value, 1.0) for name, value in metrics.items()}

    def run() -> dict[str, float]:
        faults.at("logging")
        session.call_check.wait_for_all("run.log")
        with session.call_check.explain_errors("run.log"):
            mine = {session.world.rank: as_pairs(pairs, "run.log")}
            pieces = gather_pieces(session.group, session.device, mine, what="run.log")
        return {
            name: values[0][0] / values[0][1] if len(set(values)) == 1 and values[0][1] else float(mean_of(values))
            for name, values in pieces.items()
        }

    return session.calls.make("run.log", run)


def load_weights(session: Session, model: nn.Module, path: str | Path, what: str) -> None:
    """Read weights of a checkpoint into the model, on all workers; rank 0 alone reads the disk.

    Raises CheckpointError, and changes nothing, if the weights do not fit the model.
    """

    def load() -> None:
        session.call_check.wait_for_all("run.load")

        def compare() -> list[str]:
            session.checkpoints.drain(session.calls.check_left)  # what is read may be what this run is still writing
            return describe_misfit(read_weights(path, what), model)

        found = session.on_one.run(compare)
        if found:
            raise CheckpointError(f"{path} does not fit the model:\n  " + "\n  ".join(found))
        mine = read_weights(path, what) if session.is_main else None
        read = broadcast_state(session.group, session.device, 0, mine)
        load_module(model, read["weights"], read["raw"])

    session.calls.make("run.load", load)


def memory_by_kind(session: Session, loop: TrainLoop) -> dict[str, int]:
    """See `Run.memory`."""
    found = {} if loop.plan is None else memory_of(loop.plan, loop.state.contexts)
    if session.device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(session.device)
    else:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    known = sum(found.values())
    return found | {"rest": max(peak - known, 0), "peak": max(peak, known)}


def digest(session: Session, loop: TrainLoop, model: nn.Module) -> str:
    """See `Run.digest`."""
    plan = loop.plan
    if plan is not None and plan.sharded_state is not None:
        return sharded_training.find_digest(session, plan)
    return replica.sha256_of(replica.named_state(model, None if plan is None else plan.optimizer))


def require_model(model: nn.Module | None, who: str) -> nn.Module:
    """Return the replicated model; raise LockstepError if there is none yet."""
    if model is None:
        raise LockstepError(f"{who} needs a model: call run.replicate(model) first")
    return model


def whereabouts(session: Session, loop: TrainLoop) -> dict[str, Any]:
    """Position of this worker and what its memory is used for, for the failure report."""
    found: dict[str, Any] = {"call": session.calls.current_call}
    if hasattr(session, "world"):
        found |= {"rank": session.world.rank, "size": session.world.size}
        with suppress(Exception):  # or the rest would be lost
            found |= {"device": session.device.type, "memory": memory_by_kind(session, loop)}
    return found | loop.whereabouts()
