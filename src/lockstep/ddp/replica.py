"""Replicas of a module: what their state consists of, checks that they start equal, and synchronisation of buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import agreement
from lockstep.comm.broadcast import Broadcast
from lockstep.errors import ReplicaMismatchError


@dataclass(frozen=True)
class Leaf:
    """A parameter that is trained."""

    name: str
    parameter: nn.Parameter
    sparse: bool


def trained_leaves(module: nn.Module, ignored: set[str]) -> list[Leaf]:
    """Trained parameters in the order of definition. One that modules share is listed once, by its first name."""
    leaves: dict[nn.Parameter, Leaf] = {}
    for module_name, child in module.named_modules():
        sparse = isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and bool(child.sparse)
        for name, parameter in child.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            # In torch's list of ignored names, parameters of the root module have a leading dot.
            if parameter.requires_grad and not {full, f"{module_name}.{name}"} & ignored:
                leaves.setdefault(parameter, Leaf(full, parameter, sparse))
    return list(leaves.values())


def state_of(module: nn.Module, ignored: set[str], *, buffers: bool = True) -> dict[str, Tensor]:
    """Everything that must be equal on all workers, by name."""
    named: dict[str, Tensor] = {n: p.detach() for n, p in module.named_parameters() if n not in ignored}
    if buffers:
        named |= {n: b.detach() for n, b in module.named_buffers() if n not in ignored}
    return named


def copy_state(group: dist.ProcessGroup, module: nn.Module, ignored: set[str], *, source: int, buffers: bool) -> None:
    """Copy the weights (and buffers) of rank `source` to every worker. Collective."""
    tensors = [_local(t) for t in state_of(module, ignored, buffers=buffers).values()]
    Broadcast(keep=False)(group, tensors, source=source)


def _local(tensor: Tensor) -> Tensor:
    # With tensor parallelism a parameter is a DTensor; its local part is what data-parallel replicas have in common.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check_same_shapes(group: dist.ProcessGroup, leaves: Sequence[Leaf], device: torch.device) -> None:
    """Check that all workers have the same parameters. Collective; if not, all raise ReplicaMismatchError."""
    mine = [_describe(leaf) for leaf in leaves]
    if agreement.all_equal(group, agreement.fingerprint(mine), device=device):
        return
    raise ReplicaMismatchError(_first_difference(agreement.gather_values(group, mine, device=device)))


def _describe(leaf: Leaf) -> dict[str, Any]:
    p = _local(leaf.parameter)
    return {"name": leaf.name, "size": list(p.size()), "stride": list(p.stride()), "dtype": str(p.dtype)}


def _first_difference(models: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Describe the first difference between a rank and rank 0."""
    advice = "Build the model from the same arguments on every worker."
    for rank, model in enumerate(models):
        for index, (theirs, ours) in enumerate(zip(model, models[0], strict=False)):
            for what in ("name", "size", "dtype", "stride"):
                if theirs[what] != ours[what]:
                    return (
                        f"DDP expects same model across all ranks, but params[{index}] ({theirs['name']}) on rank "
                        f"{rank} with {what}s {theirs[what]} appears not to match {what}s of the same param in "
                        f"process 0 ({ours['name']}: {ours[what]}). {advice}"
                    )
        if len(model) != len(models[0]):
            longer, shorter = sorted((model, models[0]), key=len, reverse=True)
            extra = ", ".join(entry["name"] for entry in longer[len(shorter) :][:5])
            return (
                f"DDP expects same model across all ranks, but Rank {rank} has {len(model)} params, while rank 0 has "
                f"inconsistent {len(models[0])} params. Only one of them has: {extra}. {advice}"
            )
    return f"DDP expects same model across all ranks, but their descriptions differ. {advice}"


def check_same_values(
    group: dist.ProcessGroup, module: nn.Module, ignored: set[str], device: torch.device, *, buffers: bool, advice: str
) -> None:
    """Check that all tensors have the same values on all workers. Collective.

    Raises ReplicaMismatchError on all workers, with the name of the first tensor that differs.
    """
    state = state_of(module, ignored, buffers=buffers)
    mine = {name: _digest(_local(tensor)) for name, tensor in state.items()}
    if agreement.all_equal(group, agreement.fingerprint(mine), device=device):
        return
    of_all_ranks = agreement.gather_values(group, mine, device=device)
    for name, digest in of_all_ranks[0].items():
        others = [rank for rank, digests in enumerate(of_all_ranks) if digests.get(name) != digest]
        if others:
            ranks = ", ".join(map(str, others))
            raise ReplicaMismatchError(
                f"the replicas hold different values: {name} differs between rank 0 and rank {ranks}. {advice}"
            )


def _digest(tensor: Tensor) -> int:
    """A sum over the bit patterns: equal tensors have equal sums on any device."""
    if tensor.numel() == 0:
        return 0
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    width = next(w for w in (4, 2, 1) if flat.numel() % w == 0)
    as_integers = flat.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
    return int(as_integers.sum(dtype=torch.int64).item())


class ReplicaBuffers:
    """The module's buffers, which one worker broadcasts to all."""

    def __init__(self, module: nn.Module, ignored: Iterable[str]) -> None:
        self._module = module
        self._ignored = set(ignored)
        self._broadcast = Broadcast()
        self.named: dict[str, Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look the buffers up again, before each use: a module may have replaced a buffer by another tensor."""
        self.named = {n: b for n, b in self._module.named_buffers() if n not in self._ignored}

    def broadcast(self, group: dist.ProcessGroup, source: int, tensors: Sequence[Tensor] | None = None) -> None:
        self._broadcast(group, list(self.named.values()) if tensors is None else tensors, source=source)
