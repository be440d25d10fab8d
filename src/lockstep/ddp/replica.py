"""Replicas of a module: what their state consists of, digests of it, checks that they start equal, and synchronisation
of buffers.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm import agreement
from lockstep.comm.agreement import Broadcast
from lockstep.errors import ReplicaMismatchError

ROW_BYTES = 8192  # see `position_digests`


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
    """Weights and buffers that must be equal on all workers, by name."""
    named: dict[str, Tensor] = {n: p.detach() for n, p in module.named_parameters() if n not in ignored}
    if buffers:
        named |= {n: b.detach() for n, b in module.named_buffers() if n not in ignored}
    return named


class HasState(Protocol):
    """An optimiser, or what has the state of one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Mapping[Tensor, Any]: ...


def named_state(module: nn.Module, optimizer: HasState | None = None) -> dict[str, Tensor]:
    """Everything that must be equal on all workers, by name: weights, buffers and the optimiser's state."""
    named = state_of(module, set())
    if optimizer is None:
        return named
    of_parameter = {p: name for name, p in module.named_parameters()}
    for group in optimizer.param_groups:
        for n, parameter in enumerate(group["params"]):
            owner = of_parameter.get(parameter, f"parameter {n}")
            state = optimizer.state.get(parameter, {})
            named |= {f"{key} of {owner}": value for key, value in state.items() if isinstance(value, Tensor)}
    return named


def cheap_digests(tensors: Iterable[Tensor]) -> list[int]:
    """The sum of bit patterns of each tensor, 64 bits. One changed bit always changes it. One transfer per device."""
    sums = [sum_of_bits(tensor.detach()) for tensor in tensors]
    found: dict[int, int] = {}
    for device in {total.device for total in sums}:
        there = [n for n, total in enumerate(sums) if total.device == device]
        found |= zip(there, torch.stack([sums[n] for n in there]).tolist(), strict=True)
    return [int(found[n]) for n in range(len(sums))]


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of the tensor's bit patterns, as a tensor on the same device."""
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return sum_of_bits(tensor.indices()) * 3 + sum_of_bits(tensor.values())
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat.numel() // 8 * 8  # eight bytes at a time is fourteen times as fast as four
    total = flat[:words].view(torch.int64).sum()
    return total + flat[words:].sum(dtype=torch.int64) if words < flat.numel() else total


def position_digests(tensors: Iterable[Tensor]) -> list[int]:
    """A digest of each tensor, 64 bits, in which every position counts differently.

    In `cheap_digests` the same bit that changes in two elements, once to 1 and once to 0, cancels. Here one changed bit
    always changes the digest, and of several the chance to cancel is near 2^-32. It takes a few times as long.
    """
    return [int(_weighted_sum(tensor.detach())) for tensor in tensors]


def _weighted_sum(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return _weighted_sum(tensor.indices()) * 3 + _weighted_sum(tensor.values())
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    words = torch.zeros(-(-flat.numel() // ROW_BYTES) * ROW_BYTES, dtype=torch.uint8, device=flat.device)
    words[: flat.numel()] = flat
    rows = words.view(torch.int64).view(-1, ROW_BYTES // 8)
    first, second = _odd_numbers(2 * ROW_BYTES // 8, tensor.device).view(2, -1)
    of_row = torch.arange(len(rows), device=tensor.device) * 2 * 0x2545F4914F6CDD1 + 1
    rows.mul_(first)  # each of these steps can be undone, so that a changed bit changes the result
    # The higher half changes the lower one. Else the highest bits of two elements would cancel: 2^63 + 2^63 = 0.
    rows.bitwise_xor_((rows >> 32).bitwise_and_(0xFFFFFFFF))
    return (rows.mul_(second).sum(1) * of_row).sum()


@functools.cache
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Fixed pseudo-random odd numbers."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(2**62, (count,), generator=generator) * 2 + 1).to(device)


def sha256_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and values, in the order of names."""
    return sha256_in_order((name, tensors[name]) for name in sorted(tensors))


def sha256_in_order(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The same of tensors that are in order already, of which only one has to be in memory at a time."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        tensor = tensor.detach()
        tensor = tensor.coalesce().to_dense() if tensor.is_sparse else tensor
        tensor = tensor.contiguous().cpu()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            sha.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def differences(states: Sequence[Sequence[int]]) -> list[int]:
    """The positions at which the lists are not all equal."""
    return [n for n, values in enumerate(zip(*states, strict=True)) if len(set(values)) > 1]


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
    mine = dict(zip(state, cheap_digests(map(_local, state.values())), strict=True))
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
