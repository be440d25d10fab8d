"""An optimiser whose state is distributed over the workers (ZeRO, stage 1), for programs with a loop of their own.

Every worker has all weights and, after the backward pass, all averaged gradients, but keeps the optimiser's state for
its own part of them only. In a step each worker updates its part with an ordinary torch optimiser, and the new weights
are exchanged in buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from lockstep import _torch
from lockstep.comm import agreement
from lockstep.comm.abortable_wait import wait_without_limit
from lockstep.comm.agreement import Broadcast
from lockstep.ddp.optimizer_cells import (
    OwnedPart,
    Piece,
    assign_cells,
    assign_tensors,
    cut_state,
    flat_view,
    join_states,
)
from lockstep.errors import ReplicaMismatchError

BUCKET_MB: Final = 25.0
ELEMENTWISE: Final = frozenset(
    {"Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
WHOLE_TENSORS: Final = frozenset({"Adafactor", "Muon"})
REFUSED: Final = {
    "LBFGS": "it treats all parameters as one vector, so no worker can update a part of them",
    "SparseAdam": "gradients that are sparse are not distributed; use it for the embeddings, without sharding",
}


class _Bucket:
    """Weights of one dtype that are exchanged at once: of every worker so many elements, as views of parameters.

    memory  what is sent and what is received go through it; the next bucket but one may use it, too
    """

    def __init__(self, by_rank: list[list[Tensor]], rank: int, memory: Tensor) -> None:
        width = max(sum(view.numel() for view in views) for views in by_rank)
        self._rank, self._views = rank, by_rank
        self._sent, self._received = memory[:width], memory[width : (1 + len(by_rank)) * width]
        rows = torch.split(self._received, width)
        self._slices = [_slices(views, row) for views, row in zip(by_rank, rows, strict=True)]
        self._own = _slices(by_rank[rank], self._sent)

    def start(self, group: dist.ProcessGroup) -> Any:
        if self._own:
            _torch.foreach_copy_(self._own, self._views[self._rank])
        return group._allgather_base(self._received, self._sent)

    def finish(self, work: Any) -> None:
        wait_without_limit(work)
        to = [view for rank, views in enumerate(self._views) if rank != self._rank for view in views]
        of = [part for rank, parts in enumerate(self._slices) if rank != self._rank for part in parts]
        if to:
            _torch.foreach_copy_(to, of)


def _slices(views: list[Tensor], memory: Tensor) -> list[Tensor]:
    """Return consecutive slices of `memory`, one for each view, with its size."""
    ends = list(itertools.accumulate((view.numel() for view in views), initial=0))
    return [memory[start:stop] for start, stop in itertools.pairwise(ends)]


class _ShardedJoinHook(JoinHook):
    """A worker that has no more inputs continues to take part in the steps of the others."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer._stepjoin_states()


class ShardedOptimizer(Optimizer, Joinable):
    """A torch optimiser whose state is distributed over the workers.

        optimizer = lockstep.ShardedOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)

    It is used like the optimiser itself, after a backward pass whose gradients were averaged by our or torch's
    `DistributedDataParallel`, and computes the same bits. Each worker keeps 1/N of the state. `step` is a collective
    call: all workers make it together, with gradients for the same parameters.

    optimizer_class  the class: those of torch.optim, `lockstep.LARS` and `lockstep.LAMB`, or another one if
                     `whole_tensors` is given
    params           parameters or groups of them, in the same order on all workers
    group            the process group (default: all workers)
    whole_tensors    True: the class treats each tensor on its own. False: it even treats each element on its own.
                     None (default): known for the classes above
    bucket_cap_mb    how many megabytes of new weights are exchanged at once
    defaults         options of the class, such as lr

    Raises TypeError for a class that cannot be sharded, and ReplicaMismatchError if the workers' parameters differ.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: Iterable[Any],
        *,
        group: dist.ProcessGroup | None = None,
        whole_tensors: bool | None = None,
        bucket_cap_mb: float = BUCKET_MB,
        **defaults: Any,
    ) -> None:
        self._whole_tensors = _needs_whole_tensors(optimizer_class, whole_tensors)
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r} must be positive")
        self._group = group if group is not None or not dist.is_initialized() else dist.group.WORLD
        self._rank = 0 if self._group is None else self._group.rank()
        self._size = 1 if self._group is None else self._group.size()
        self._bucket_bytes = int(bucket_cap_mb * 1024 * 1024)
        self._inner: Optimizer | None = None  # what updates the parts; made when all groups are known
        self._loads = [0] * self._size  # elements that each worker has
        self._pieces: dict[Tensor, list[Piece]] = {}
        self._parts: list[list[OwnedPart]] = []  # of this worker, by group
        self._buckets: list[_Bucket] | None = None
        self._pointers: list[int] = []  # where the parameters were when the buckets were made
        self._consolidated: dict[str, Any] | None = None
        Joinable.__init__(self)
        Optimizer.__init__(self, params, optimizer_class([{"params": []}], **defaults).defaults)
        self._inner = optimizer_class([self._inner_group(n) for n in range(len(self._parts))], **defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            self._check_equal(added)
        except BaseException:
            self.param_groups.pop()
            raise
        parameters = added["params"]
        for is_whole, assign in ((True, assign_tensors), (False, assign_cells)):
            chosen = [parameter for parameter in parameters if self._is_whole(parameter) is is_whole]
            found = assign([parameter.numel() for parameter in chosen], self._loads)
            self._pieces |= dict(zip(chosen, found, strict=True))
        parts = [
            OwnedPart(parameter, piece, is_whole=self._is_whole(parameter))
            for parameter in parameters
            for piece in self._pieces[parameter]
            if piece.owner == self._rank
        ]
        self._parts.append(parts)
        if self._inner is not None:
            self._inner.add_param_group(self._inner_group(-1))
        self._buckets = self._consolidated = None

    def _inner_group(self, number: int) -> dict[str, Any]:
        return _options(self.param_groups[number]) | {"params": [part.tensor for part in self._parts[number]]}

    def _is_whole(self, parameter: Tensor) -> bool:
        """Whether one worker has the whole parameter. One without dimensions has no order of elements to cut."""
        return self._whole_tensors or parameter.numel() == 0 or parameter.dim() == 0

    def _check_equal(self, group: dict[str, Any]) -> None:
        """Raise ReplicaMismatchError, on all workers, if the parameters of the group differ between them; ValueError if
        the elements of one are not dense in memory."""
        for place, parameter in enumerate(group["params"]):
            if parameter.numel() and flat_view(parameter) is None:
                raise ValueError(
                    f"parameter {place} of group {len(self.param_groups) - 1}, of shape {tuple(parameter.shape)}, is a "
                    "view with gaps or overlaps, which ShardedOptimizer does not support: call contiguous() on its data"
                )
        if self._size == 1 or not group["params"]:
            return
        assert self._group is not None
        mine = [[list(one.shape), list(one.stride()), str(one.dtype)] for one in group["params"]]
        device = group["params"][0].device
        if not agreement.all_equal(self._group, agreement.fingerprint(mine), device=device):
            counts = agreement.gather_values(self._group, len(mine), device=device)
            raise ReplicaMismatchError(
                f"the workers' parameters differ: ShardedOptimizer got {counts} tensors on ranks 0 to "
                f"{self._size - 1}, and needs the same shapes, dtypes and strides in the same order on all of them"
            )

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this worker's part, and exchange the new weights. Returns the result of `closure`, if it is given."""
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
    def _stepjoin_states(self) -> None:
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
        parts = [part for group in self._parts for part in group]
        for part in parts:
            part.follow()
            part.set_gradient()
        assert self._inner is not None
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_options(ours))  # a scheduler or the program may have changed them
        self._inner.step()
        for part in parts:
            part.drop_gradient()
        self._exchange_weights()

    def _exchange_weights(self) -> None:
        if self._group is None or self._size == 1:
            return
        pointers = [parameter.data_ptr() for parameter in self._pieces]
        if self._buckets is None or pointers != self._pointers:
            self._buckets, self._pointers = list(self._make_buckets()), pointers
        last: tuple[_Bucket, Any] | None = None
        for bucket in self._buckets:
            work = bucket.start(self._group)
            if last is not None:
                last[0].finish(last[1])
            last = bucket, work
        if last is not None:
            last[0].finish(last[1])

    def _make_buckets(self) -> Iterator[_Bucket]:
        """Buckets of weights; each worker sends as much as any other, as far as it has it."""
        by_kind: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
        for parameter, pieces in self._pieces.items():
            flat = flat_view(parameter)
            kind = by_kind.setdefault((parameter.dtype, parameter.device), [[] for _ in range(self._size)])
            if flat is not None:  # it has elements
                for piece in pieces:
                    kind[piece.owner].append(flat[piece.start : piece.stop])
        for (dtype, device), by_rank in by_kind.items():
            most = max(sum(view.numel() for view in views) for views in by_rank)
            width = min(max(1, self._bucket_bytes // (dtype.itemsize * self._size)), most)
            memory = [torch.zeros((1 + self._size) * width, dtype=dtype, device=device) for _ in range(2)]
            queues = [_in_chunks(views, width) for views in by_rank]
            for n, chunks in enumerate(itertools.zip_longest(*queues, fillvalue=[])):
                yield _Bucket([list(views) for views in chunks], self._rank, memory[n % 2])

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_bytes(self) -> int:
        """Return how many bytes of state this worker keeps."""
        assert self._inner is not None
        tensors = [value for state in self._inner.state.values() for value in state.values()]
        return sum(value.numel() * value.element_size() for value in tensors if isinstance(value, Tensor))

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state in the CPU memory of worker `to`, whose `state_dict` returns it until the next step.

        All workers call it together.
        """
        if not 0 <= to < self._size:
            raise ValueError(f"to={to!r}: there are ranks 0 to {self._size - 1}")
        assert self._inner is not None
        mine = [[_on_cpu(self._inner.state.get(part.tensor, {})) for part in group] for group in self._parts]
        by_rank: list[Any] = [None] * self._size
        if self._group is None or self._size == 1:
            by_rank = [mine]
        else:
            target = by_rank if self._rank == to else None
            dist.gather_object(mine, target, dst=dist.get_global_rank(self._group, to), group=self._group)
        if self._rank == to:
            self._consolidated = {"state": self._merge(by_rank), "param_groups": self._numbered_groups()}

    def _merge(self, by_rank: list[list[list[dict[str, Any]]]]) -> dict[int, dict[str, Any]]:
        """Return the state of whole parameters, by number, as the optimiser class itself would have it."""
        found: dict[int, dict[str, Any]] = {}
        queues = [[iter(group) for group in groups] for groups in by_rank]
        parameters = ((n, parameter) for n, group in enumerate(self.param_groups) for parameter in group["params"])
        for number, (n, parameter) in enumerate(parameters):
            pieces = [(piece, next(queues[piece.owner][n])) for piece in self._pieces[parameter]]
            if any(state for _, state in pieces):
                found[number] = pieces[0][1] if self._is_whole(parameter) else join_states(parameter, pieces)
        return found

    def _numbered_groups(self) -> list[dict[str, Any]]:
        numbers, found = itertools.count(), list[dict[str, Any]]()
        for group in self.param_groups:
            found.append(_options(group) | {"params": [next(numbers) for _ in group["params"]]})
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all workers, in the format of the optimiser class itself.

        Raises RuntimeError unless `consolidate_state_dict` was called, on all workers, since the last step.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self._rank} has only its part of the optimiser's state: call consolidate_state_dict(to=RANK) "
                "on all workers after the last step, then state_dict() on that rank"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this worker's part of a state, of the optimiser class itself or of a ShardedOptimizer on any number of
        workers. Every worker passes the whole state. Raises ValueError if it does not fit the parameters."""
        groups = state_dict["param_groups"]
        mine, theirs = ([len(group["params"]) for group in all_groups] for all_groups in (self.param_groups, groups))
        if mine != theirs:
            raise ValueError(f"the state has groups of {theirs} parameters, this optimiser has groups of {mine}")
        keys = [key for group in groups for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        saved = {
            parameter: state_dict["state"][key]
            for key, parameter in zip(keys, parameters, strict=True)
            if key in state_dict["state"]
        }
        numbers, state, inner_groups = itertools.count(), dict[int, dict[str, Any]](), list[dict[str, Any]]()
        for ours, parts, group in zip(self.param_groups, self._parts, groups, strict=True):
            ours.update(_options(group))
            chosen = [next(numbers) for _ in parts]
            inner_groups.append(_options(group) | {"params": chosen})
            for number, part in zip(chosen, parts, strict=True):
                if part.parameter in saved:
                    state[number] = cut_state(part, saved[part.parameter])
        assert self._inner is not None
        self._inner.load_state_dict({"state": state, "param_groups": inner_groups})
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


def _needs_whole_tensors(optimizer_class: type[Optimizer], given: bool | None) -> bool:
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
        "whole_tensors=False if it even updates each element on its own)"
    )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _in_chunks(views: list[Tensor], numel: int) -> Iterator[list[Tensor]]:
    """Yield lists of views with `numel` elements in all, cutting views where needed; the last list may have fewer."""
    chunk, room = list[Tensor](), numel
    for view in views:
        while view.numel():
            chunk.append(view[:room])
            view, room = view[room:], room - chunk[-1].numel()
            if room == 0:
                yield chunk
                chunk, room = [], numel
    if chunk:
        yield chunk


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
