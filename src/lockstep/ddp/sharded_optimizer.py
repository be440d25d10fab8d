"""An optimiser whose state is distributed over the workers (ZeRO, stage 1), for programs with a loop of their own.

Every worker has all weights and, after the backward pass, all averaged gradients, but keeps the optimiser's state for
its own part of them only. In a step each worker updates its part with an ordinary torch optimiser, and the new weights
are exchanged (weight_exchange.py).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from lockstep.comm import agreement
from lockstep.comm.agreement import Broadcast
from lockstep.ddp.optimizer_cells import (
    MASTER_WEIGHT,
    OwnedPart,
    Piece,
    assign_group,
    flat_view,
    is_whole,
    needs_master_weights,
    refuse_float16,
)
from lockstep.ddp.optimizer_state import WholeState, cut_state, options_of
from lockstep.ddp.state_holders import Interval, StateHolders, StateOutline, States
from lockstep.ddp.weight_exchange import WeightExchange
from lockstep.errors import ReplicaMismatchError
from lockstep.process_identity import identify_host

BUCKET_MB: Final = 25.0
ELEMENTWISE: Final = frozenset(
    {"Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
WHOLE_TENSORS: Final = frozenset({"Adafactor", "Muon"})
T = TypeVar("T")
REFUSED: Final = {
    "LBFGS": "it treats all parameters as one vector, so no worker can update a part of them",
    "SparseAdam": "gradients that are sparse are not distributed; use it for the embeddings, without sharding",
}


class _ShardedJoinHook(JoinHook):
    """A worker that has no more inputs continues to take part in the steps of the others."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer._step_joined()


class ShardedOptimizer(Optimizer, Joinable):
    """A torch optimiser whose state is distributed over the workers.

        optimizer = lockstep.ShardedOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)

    It is used like the optimiser itself, after a backward pass whose gradients were averaged by our or torch's
    `DistributedDataParallel`, and computes the same bits. Each worker keeps 1/N of the state. `step` is a collective
    call: all workers make it together, with gradients for the same parameters.

    optimizer_class  the class: those of torch.optim, `lockstep.LARS` and `lockstep.LAMB`, or another one if
                     `whole_tensors` is given
    params           parameters or groups of them, in the same order on all workers
    process_group    the workers (default: all)
    whole_tensors    True: the class treats each tensor on its own. False: it even treats each element on its own.
                     None (default): known for the classes above
    master_weights   update a float32 copy of each parameter in bfloat16, which is then rounded; the copies are divided
                     over the workers, too, and are in `state_dict()` as "master_weight"
    bucket_cap_mb    how many megabytes of parameters are exchanged at once, where they are copied together: small ones,
                     and between hosts all; two buffers of this size are kept then
    defaults         options of the class, such as lr

    Raises TypeError for a class that cannot be sharded, and ReplicaMismatchError if the workers' parameters differ.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: Iterable[Any],
        *,
        process_group: dist.ProcessGroup | None = None,
        whole_tensors: bool | None = None,
        master_weights: bool = False,
        bucket_cap_mb: float = BUCKET_MB,
        **defaults: Any,
    ) -> None:
        self._whole_tensors = needs_whole_tensors(optimizer_class, whole_tensors)
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r} must be positive")
        world = dist.group.WORLD if dist.is_initialized() else None
        self._group = process_group if process_group is not None else world
        self._rank = 0 if self._group is None else self._group.rank()
        self._size = 1 if self._group is None else self._group.size()
        self._bucket_bytes = int(bucket_cap_mb * 1024 * 1024)
        self._master_weights = master_weights
        self._inner: Optimizer | None = None  # what updates the parts; made when all groups are known
        self._loads = [0] * self._size  # elements that each worker has
        self._pieces: dict[Tensor, list[Piece]] = {}
        self._strides: dict[Tensor, tuple[int, ...]] = {}
        self._parts: list[list[OwnedPart]] = []  # of this worker, by group
        self._exchange: WeightExchange | None = None
        hosts = {identify_host()}
        if self._group is not None and self._size > 1:
            hosts = set(agreement.gather_values(self._group, identify_host(), device=self._control_device()))
        self._spans_hosts = len(hosts) > 1
        self._consolidated: WholeState | None = None  # the state of all workers
        # What must be equal on all workers, beside the parameters.
        self._same = [optimizer_class.__qualname__, self._whole_tensors, master_weights, self._bucket_bytes]
        Joinable.__init__(self)
        Optimizer.__init__(self, params, optimizer_class([{"params": []}], **defaults).defaults)
        self._inner = self._together(
            lambda: optimizer_class([self._inner_group(n) for n in range(len(self._parts))], **defaults)
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer cannot be copied or pickled, since each worker has a part of it: call "
            "consolidate_state_dict() on all workers, then save state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as to any optimiser. All workers call it together."""
        super().add_param_group(param_group)
        added, loads = self.param_groups[-1]["params"], list(self._loads)
        try:
            self._check_group(added)
            trained = {parameter for parameter in added if parameter.requires_grad}
            self._pieces |= assign_group(added, self._loads, trained=trained, whole_tensors=self._whole_tensors)
            self._parts.append(
                [
                    OwnedPart(parameter, piece, is_whole=self._is_whole(parameter))
                    for parameter in added
                    for piece in self._pieces[parameter]
                    if piece.owner == self._rank
                ]
            )
            for part in self._parts[-1] if self._master_weights else ():
                part.make_master()
            inner = self._inner
            if inner is not None:
                self._together(lambda: inner.add_param_group(self._inner_group(-1)))
        except BaseException:
            self.param_groups.pop()
            self._loads = loads
            self._pieces = {
                one: pieces for one, pieces in self._pieces.items() if all(one is not other for other in added)
            }
            self._parts = self._parts[: len(self.param_groups)]
            if self._inner is not None:
                del self._inner.param_groups[len(self.param_groups) :]
            raise
        self._strides |= {parameter: parameter.stride() for parameter in added}
        self._exchange = self._consolidated = None

    def _inner_group(self, number: int) -> dict[str, Any]:
        return options_of(self.param_groups[number]) | {"params": [part.tensor for part in self._parts[number]]}

    def _is_whole(self, parameter: Tensor) -> bool:
        return is_whole(parameter, whole_tensors=self._whole_tensors)

    def _check_group(self, parameters: list[Tensor]) -> None:
        """Raise an error, on all workers, if a parameter cannot be sharded, or if the workers differ."""
        problem = ""
        if self._master_weights:
            refuse_float16(parameters)
        for place, parameter in enumerate(parameters):
            where = f"parameter {place} of group {len(self.param_groups) - 1}, of shape {tuple(parameter.shape)}, is "
            if parameter.numel() and flat_view(parameter) is None:
                problem = f"{where}a view with gaps or overlaps, which is not supported: call contiguous() on its data"
            elif any(parameter is other for other in parameters[:place]):
                problem = f"{where}twice in its group"
        if self._group is not None and self._size > 1:
            kinds = [[list(one.shape), list(one.stride()), str(one.dtype), one.requires_grad] for one in parameters]
            device = self._control_device()
            if not agreement.all_equal(
                self._group, agreement.fingerprint([*self._same, kinds, problem]), device=device
            ):
                counts = agreement.gather_values(self._group, len(kinds), device=device)
                raise ReplicaMismatchError(
                    f"the workers' parameters or options differ: ShardedOptimizer got {counts} tensors on ranks 0 to "
                    f"{self._size - 1}, and needs the same class and options, and the same shapes, dtypes, strides "
                    "and requires_grad in the same order on all of them"
                )
        if problem:
            raise ValueError(problem)

    def _together(self, call: Callable[[], T]) -> T:
        """Call a function that may raise on some workers, since their parts differ; if so, all raise an error."""
        error: Exception | None = None
        try:
            result = call()
        except Exception as raised:
            error = raised
        if self._group is not None and self._size > 1:
            mine = None if error is None else f"{type(error).__name__}: {error}"
            texts = agreement.gather_values(self._group, mine, device=self._control_device())
            if error is None and any(texts):
                rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
                raise RuntimeError(f"rank {rank} failed with its part of the parameters: {text}")
        if error is not None:
            raise error
        return result

    def _control_device(self) -> torch.device:
        """Return the device for small messages: the CPU, if the group can send from it."""
        if self._group is None:
            return torch.device("cpu")
        try:
            self._group._get_backend(torch.device("cpu"))
            return torch.device("cpu")
        except RuntimeError:
            return torch.device("cuda", torch.cuda.current_device())

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this worker's part, and exchange the new weights. Returns the result of `closure`, if it is given."""
        if self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "this ShardedOptimizer was made before the process group, and would not exchange weights: make it "
                "after init_process_group"
            )
        Join.notify_join_context(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._join_config.enable:
            self._share_gradients(has_inputs=True)
        self._update()
        return loss

    @torch.no_grad()
    def _step_joined(self) -> None:
        """The step of a worker that has no more inputs: it updates its part with the gradients of the others."""
        self._share_gradients(has_inputs=False)
        self._update()

    def _share_gradients(self, *, has_inputs: bool) -> None:
        """Send the gradients to workers that have no more inputs, for which no backward pass set them."""
        if self._group is None or self._size == 1:
            return
        parameters = list(self._pieces)
        row = [int(has_inputs), *(int(parameter.grad is not None) for parameter in parameters)]
        rows = agreement.gather_rows(self._group, row, device=self.join_device)
        if all(has for has, *_ in rows):
            return
        source = max(rank for rank, (has, *_) in enumerate(rows) if has)
        gradients = []
        for parameter, is_set in zip(parameters, rows[source][1:], strict=True):
            if not has_inputs:
                parameter.grad = torch.empty_like(parameter) if is_set else None
            if is_set and parameter.grad is not None:
                gradients.append(parameter.grad)
        Broadcast(keep=False)(self._group, gradients, source=source)

    def _update(self) -> None:
        self._consolidated = None
        self._check_parameters()
        parts = [part for group in self._parts for part in group]
        for part in parts:
            part.begin_step()
        assert self._inner is not None
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(options_of(ours))  # a scheduler or the program may have changed them
        self._inner.step()
        for part in parts:
            part.end_step()
        if self._group is not None and self._size > 1:
            changed = {one: self._pieces[one] for one in self._pieces if one.requires_grad or one.grad is not None}
            if self._exchange is None or self._exchange.has_moved(changed):
                self._exchange = WeightExchange(self._group, changed, self._bucket_bytes, spans_hosts=self._spans_hosts)
            self._exchange.run()

    def _check_parameters(self) -> None:
        """Raise RuntimeError for what cannot be updated. Looks at all parameters, so that all workers raise it."""
        for parameter, stride in self._strides.items():
            what = f"a parameter of shape {tuple(parameter.shape)}"
            if parameter.stride() != stride:
                raise RuntimeError(
                    f"the memory format of {what} has changed since the ShardedOptimizer was made, so parts of the "
                    "state would belong to other elements: change it before (model.to(memory_format=...))"
                )
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of {what} is sparse, which ShardedOptimizer does not support: make the embedding "
                    "with sparse=False, or give it an optimiser of its own"
                )

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_bytes(self) -> int:
        """Return how many bytes of state this worker keeps."""
        assert self._inner is not None
        tensors = [value for state in self._states().values() for value in state.values()]
        return sum(value.nbytes for value in tensors if isinstance(value, Tensor))

    def _states(self) -> States:
        """Return the state of each part that this worker has."""
        assert self._inner is not None
        numbers = {parameter: number for number, parameter in enumerate(self._parameters())}
        return {
            Interval(numbers[part.parameter], part.piece.start, part.piece.stop): part.add_master(
                self._inner.state.get(part.tensor, {})
            )
            for group in self._parts
            for part in group
        }

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state in the CPU memory of worker `to`, whose `state_dict` returns it until the next step.

        All workers call it together.
        """
        if not 0 <= to < self._size:
            raise ValueError(f"to={to!r}: there are ranks 0 to {self._size - 1}")
        parameters = self._parameters()
        whole = {parameter for parameter in parameters if self._is_whole(parameter)}
        holders = StateHolders(self._group, self._states(), device=self._control_device())
        states = StateOutline.of_parameters(holders, parameters, whole).collect(to)
        self._consolidated = None if states is None else WholeState(self.param_groups, states)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all workers, in the format of the optimiser class itself.

        Raises RuntimeError unless `consolidate_state_dict` was called, on all workers, since the last step.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self._rank} has only its part of the optimiser's state: call consolidate_state_dict(to=RANK) "
                "on all workers after the last step, then state_dict() on that rank"
            )
        return self._consolidated.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this worker's part of a state, of the optimiser class itself or of a ShardedOptimizer on any number of
        workers. Every worker passes the whole state. Raises ValueError if it does not fit the parameters."""
        groups = state_dict["param_groups"]
        mine, theirs = ([len(group["params"]) for group in all_groups] for all_groups in (self.param_groups, groups))
        if mine != theirs:
            raise ValueError(f"the state has groups of {theirs} parameters, this optimiser has groups of {mine}")
        keys = [key for group in groups for key in group["params"]]
        saved = {
            parameter: state_dict["state"][key]
            for key, parameter in zip(keys, self._parameters(), strict=True)
            if key in state_dict["state"]
        }
        for parameter, state in saved.items():
            for name, value in state.items():
                is_scalar = not isinstance(value, Tensor) or value.dim() == 0 or value.numel() == 1
                if name == MASTER_WEIGHT and not (self._master_weights and needs_master_weights(parameter)):
                    raise ValueError(f"the state has float32 copies of the weights ({name}): use master_weights=True")
                may_differ = name != MASTER_WEIGHT and (is_scalar or self._is_whole(parameter))
                if not (may_differ or value.shape == parameter.shape):
                    shapes = f"{tuple(value.shape)}, and its parameter {tuple(parameter.shape)}"
                    raise ValueError(f"the state does not fit the parameters: {name} has the shape {shapes}")
        numbers, states, inner_groups = itertools.count(), dict[int, dict[str, Any]](), list[dict[str, Any]]()
        cut = dict[OwnedPart, dict[str, Any]]()
        options = [copy.deepcopy(options_of(group)) for group in groups]
        for parts, group in zip(self._parts, options, strict=True):
            chosen = [next(numbers) for _ in parts]
            inner_groups.append(group | {"params": chosen})
            for number, part in zip(chosen, parts, strict=True):
                if part.parameter in saved:
                    cut[part] = cut_state(part, saved[part.parameter])
                    states[number] = part.without_master(cut[part])
        assert self._inner is not None
        self._inner.load_state_dict({"state": states, "param_groups": inner_groups})
        for part, state in cut.items():
            part.take_master(state)
        for ours, group in zip(self.param_groups, options, strict=True):
            ours.update(group)
        self._consolidated = None

    # -- uneven inputs -------------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _ShardedJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return next(iter(self._pieces)).device

    @property
    def join_process_group(self) -> Any:
        return self._group


def needs_whole_tensors(optimizer_class: type[Optimizer], given: bool | None) -> bool:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            "ShardedOptimizer takes the class of an optimiser first, such as torch.optim.AdamW, not "
            f"{optimizer_class!r}"
        )
    name = optimizer_class.__name__
    is_torchs = getattr(torch.optim, name, None) is optimizer_class
    if is_torchs and name in REFUSED:
        raise TypeError(f"{name} cannot be sharded: {REFUSED[name]}")
    if given is not None:
        return given
    if is_torchs and name in ELEMENTWISE:
        return False
    if (is_torchs and name in WHOLE_TENSORS) or getattr(optimizer_class, "is_layer_wise", False):
        return True
    raise TypeError(
        f"it is not known whether {name} updates each tensor on its own; if it does, pass whole_tensors=True (and "
        "whole_tensors=False if it even updates each element on its own), or in a Run give the class the attribute "
        "is_layer_wise = True"
    )
