"""Checks that the program uses the training loop as intended: what would silently train wrongly is refused."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep._torch import tree_leaves
from lockstep.data.batches import Batch
from lockstep.ddp.optimizer_state import DistributedState
from lockstep.ddp.replica import Leaf
from lockstep.errors import LockstepError
from lockstep.recovery.collective_calls import print_message
from lockstep.step.buffer_snapshot import is_expanded

WATCHED: Final = 3  # parameters whose gradients are watched: the first, the middle and the last
NAMED: Final = 4  # parameters in a message
SEVERAL: Final = (
    "give them one by one, `run.train(batches, opt_a, opt_b)`, and say in each step which one takes it: "
    "`run.step(loss_a, batch, optimizer=opt_a)`"
)
ONE_STEP: Final = "`for batch in run.train(batches, optimizer): run.step(loss, batch)` takes one step for each batch"


def check_train_arguments(steps: Any, interval: Any) -> None:
    """Raise ValueError for arguments of `run.train` that are not allowed."""
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps={steps!r} must be a whole number, 1 or more, or None")
    if interval not in ("step", "epoch"):
        raise ValueError(f'interval={interval!r} is not known; choose "step" or "epoch"')


def refuse_optimizer(optimizer: Any) -> None:
    """Raise TypeError or ValueError for an optimiser that `run.train` cannot drive."""
    if isinstance(optimizer, (list, tuple, dict)):
        raise TypeError(
            f"run.train takes an optimizer, not a {type(optimizer).__name__} of {len(optimizer)}. For several losses "
            f"{SEVERAL}. For several learning rates make groups of one optimizer: "
            "torch.optim.AdamW([{'params': ..., 'lr': ...}, ...])"
        )
    if not (hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")):
        raise TypeError(f"run.train takes an optimizer such as torch.optim.AdamW, not a {type(optimizer).__name__}")
    if isinstance(getattr(optimizer, "state", None), DistributedState):
        raise ValueError(
            f"this {type(optimizer).__name__} was used by a Run with shard_optimizer=True, which distributed its state "
            "over the workers; make another optimizer (the checkpoint has the state)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "run.train cannot use LBFGS, which evaluates the loss several times in one step with other weights each "
            "time; use an optimizer of one evaluation, such as torch.optim.AdamW"
        )


def refuse_scheduler(scheduler: Any) -> None:
    """Raise TypeError for a scheduler that `run.train` cannot drive."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "run.train(scheduler=ReduceLROnPlateau) does not know the value to follow. Step it in the loop, where all "
            "workers have the same value: `plateau.step(run.evaluate(...))`, and name it before the loop with "
            "`run.register_state(plateau=plateau)`, so that it is saved and resumed"
        )
    if not hasattr(scheduler, "step"):
        raise TypeError(f"scheduler= takes one of torch.optim.lr_scheduler, not a {type(scheduler).__name__}")


def refuse_model(model: nn.Module, who: str) -> None:
    """Raise ValueError for a model whose forward pass writes to its weights, or whose state cannot be exchanged."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{who}: {name or 'the model'} is an {type(module).__name__} with max_norm={module.max_norm:g}, whose "
                "forward pass writes to its weights: each worker would write to other rows. Leave max_norm out, and "
                "limit the rows in the loop behind run.step(loss, batch): `with torch.no_grad(): "
                f"{'model.' + name if name else 'model'}.weight.renorm_({module.norm_type:g}, 0, {module.max_norm:g})`"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout == torch.strided and is_expanded(tensor):
            raise ValueError(
                f"{who}: {name} is an expanded tensor (shape {tuple(tensor.shape)}, strides {tensor.stride()}), whose "
                "elements share their memory, so that it cannot be written to; register a copy, tensor.clone()"
            )
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{who}: {name} is a sparse tensor ({tensor.layout}), which workers cannot exchange and no checkpoint "
                "can hold; keep its indices and values as two buffers, or make it dense"
            )


def warn_untrained(leaves: Sequence[Leaf], optimizer: Any) -> None:
    """Print a line about parameters that require a gradient and are not in the optimiser, if there are any."""
    covered = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [leaf.name for leaf in leaves if id(leaf.parameter) not in covered]
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        print_message(
            f"the optimizer has {len(leaves) - len(missing)} of the {len(leaves)} parameters that require a gradient; "
            f"not trained: {', '.join(missing[:NAMED])}{more}. Add them, or freeze them with requires_grad_(False)"
        )


@final
class LoopCheck:
    """Follows one training loop: each batch gets one `run.step` of an optimiser, and nothing else trains."""

    def __init__(self, model: nn.Module, optimizer: Any, leaves: Sequence[Leaf], group_sizes: list[int] | None) -> None:
        """
        optimizer    a torch optimiser, or an `OptimizerSet`
        leaves       what was trained in the last step; if the state was restored, the program may have changed it since
        group_sizes  of the optimiser in that step; None: those that it has now
        """
        self._parameters, self._optimizer = list(model.parameters()), optimizer
        self._number: int | None = None  # of the batch that the program got last
        self._stepped: set[int] = set()  # the optimisers that have taken a step with it, by number
        self._failures: dict[int, str] = {}  # the error of the step with that batch, by the number of the optimiser
        self.is_stepping = False  # run.step is running, and may call optimizer.step
        self._has_warned = False
        self._grads: list[tuple[Leaf, weakref.ref[Tensor] | None, int]] = []
        self._groups: list[int] = []
        self.follow(leaves)
        if group_sizes is not None:
            self._groups = group_sizes
        register = getattr(optimizer, "register_step_pre_hook", None)
        self._hook = register(self._refuse_own_step) if register is not None else None

    def follow(self, leaves: Sequence[Leaf]) -> None:
        """Set the parameters that are trained from now on, with the groups that the optimiser has now."""
        trained = {id(leaf.parameter) for leaf in leaves}
        self._leaves = [leaves[n] for n in sorted({0, len(leaves) // 2, len(leaves) - 1})][:WATCHED]
        self._kinds = [(id(p) in trained, p.stride()) for p in self._parameters]
        self._groups = self.group_sizes()
        self._note_gradients()

    @property
    def has_other_parameters(self) -> bool:
        """Whether the program froze or unfroze a parameter, changed its strides, or changed the optimiser's groups."""
        if self._groups != self.group_sizes():
            return True
        return any((p.requires_grad, p.stride()) != was for p, was in zip(self._parameters, self._kinds, strict=True))

    def group_sizes(self) -> list[int]:
        """Return how many parameters each group of the optimiser has."""
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def hand_out(self, number: int) -> None:
        """Note that the program gets batch `number`."""
        self._number, self._stepped, self._failures = number, set(), {}

    def end_iteration(self) -> None:
        """Raise LockstepError if the program took no step with the batch that it got."""
        for failure in self._failures.values():
            raise LockstepError(
                f"run.step failed for batch {self._number} on this worker ({failure}), and the program caught "
                "the exception and asks for the next batch: the other workers cannot leave this one out. Take the step "
                "with the same batch again, which gives the same bits, or let the exception end the program"
            )
        if not self._stepped:
            raise LockstepError(
                f"batch {self._number} was handed out, and the next one asked for without run.step(loss, batch): its "
                f"samples would be left out without a word. {ONE_STEP}. To leave samples out, leave them out of the "
                "dataset; to end early, `break`"
            )

    def begin_step(self, batch: Batch, part: int, *, warns: bool) -> None:
        """Raise LockstepError if this batch has had its step. Warn once of gradients that the program computed.

        part  the number of the optimiser
        """
        if batch.number != self._number or part in self._stepped:
            why = "has had its step" if batch.number == self._number else f"is not the current one, {self._number}"
            raise LockstepError(
                f"run.step: batch {batch.number} {why}. {ONE_STEP}: a second one would draw the same random numbers "
                "and count its samples twice. For several passes over the data, set run.batches(epochs=...); for "
                "several losses, return their sum from one loss function, or give run.train several optimizers"
            )
        changed = self._find_own_gradient()
        if changed is not None and warns and not self._has_warned:
            self._has_warned = True
            print(
                f"lockstep: the gradient of {changed} was made or changed by the program before step {batch.number}, "
                "and is dropped: run.step(loss, batch) runs forward, backward and optimizer.step itself; leave out "
                "your own backward() (max_grad_norm= of Run clips)",
                file=sys.stderr,
                flush=True,
            )

    def note_failure(self, part: int, error: BaseException) -> None:
        """Note that the step of this optimiser has failed with this batch."""
        self._failures[part] = f"{type(error).__name__}: {error}"[:200]

    def end_step(self, part: int) -> None:
        self._stepped.add(part)
        self._failures.pop(part, None)
        self._note_gradients()

    def _note_gradients(self) -> None:
        grads = [(leaf, leaf.parameter.grad) for leaf in self._leaves]
        self._grads = [(leaf, weakref.ref(g), g._version) if g is not None else (leaf, None, 0) for leaf, g in grads]

    def _find_own_gradient(self) -> str | None:
        for leaf, known, version in self._grads:
            grad = leaf.parameter.grad
            if grad is not None and (known is None or known() is not grad or grad._version != version):
                return leaf.name
        return None

    def _refuse_own_step(self, *_: Any) -> None:
        if not self.is_stepping:
            raise LockstepError(
                "optimizer.step() was called inside the training loop: run.step(loss, batch) does that itself, with "
                "the gradients of all workers; one more on each worker would make their weights differ. Leave it out"
            )


def versions_of(batch: Batch) -> list[int]:
    """Return the version counters of the tensors of a batch, in order: how often each was written."""
    return [leaf._version for shard in batch.shards for leaf in tree_leaves(shard.data) if isinstance(leaf, Tensor)]
