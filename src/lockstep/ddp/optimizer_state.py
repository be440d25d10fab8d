"""The state of a sharded optimiser: cut into the parts of workers, gathered on one of them, and joined again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import agreement
from lockstep.comm.abortable_wait import wait_without_limit
from lockstep.ddp.optimizer_cells import OwnedPart, Piece, flat_view

TRANSFER_BYTES: Final = 64 * 1024 * 1024

States = list[list[dict[str, Any]]]  # of the parts of one worker, by group


def _is_elementwise(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape


def join_states(parameter: Tensor, pieces: list[tuple[Piece, dict[str, Any]]]) -> dict[str, Any]:
    """Return the state of a parameter, from those of its pieces."""
    first_piece, first = pieces[0]
    found: dict[str, Any] = {}
    for name, value in first.items():
        if not _is_elementwise(value, torch.Size([first_piece.numel])):
            found[name] = value
            continue
        whole = torch.empty_like(parameter, dtype=value.dtype, device="cpu")
        flat = flat_view(whole)
        assert flat is not None
        for piece, state in pieces:
            flat[piece.start : piece.stop] = state[name]
        found[name] = whole
    return found


def cut_state(part: OwnedPart, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the state of a parameter, as far as it belongs to this part."""
    found: dict[str, Any] = {}
    for name, value in saved.items():
        is_cut = _is_elementwise(value, part.parameter.shape)
        found[name] = part.cut(value) if is_cut else value.clone() if isinstance(value, Tensor) else value
    return found


# -- from all workers to one -------------------------------------------------------------------------------------------


def gather_states(group: dist.ProcessGroup, mine: States, *, to: int, device: torch.device) -> list[States] | None:
    """Return the states of all workers, by rank, on worker `to`; None on the others. All workers call it together.

    device  through which tensors are sent, in chunks; they are in the memory of the CPU before and after
    """
    layouts = agreement.gather_values(group, [[_layout(one) for one in part] for part in mine], device=device)
    by_rank: list[States] = [mine] * group.size()
    for source in range(group.size()):
        if source == to or group.rank() not in (source, to):
            continue
        if group.rank() == to:
            by_rank[source] = [[_allocate(layout) for layout in part] for part in layouts[source]]
        for tensor in _tensors(by_rank[source]):
            _transfer(group, tensor, source=source, target=to, device=device)
    return by_rank if group.rank() == to else None


def copy_to_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy, which later steps do not change."""
    return {name: value.to("cpu", copy=True) if isinstance(value, Tensor) else value for name, value in state.items()}


def _layout(state: dict[str, Any]) -> dict[str, Any]:
    """Return what `_allocate` needs to know: numbers as they are, shapes and dtypes of tensors."""
    return {
        name: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }


def _allocate(layout: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.empty(value["shape"], dtype=getattr(torch, value["dtype"])) if isinstance(value, dict) else value
        for name, value in layout.items()
    }


def _tensors(states: list[list[dict[str, Any]]]) -> Iterator[Tensor]:
    for group in states:
        for state in group:
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.numel())


def _transfer(group: dist.ProcessGroup, tensor: Tensor, *, source: int, target: int, device: torch.device) -> None:
    """Send a CPU tensor from one worker to another, in chunks that pass through `device`. Both call it."""
    memory = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for chunk in torch.split(memory, TRANSFER_BYTES):
        if group.rank() == source:
            wait_without_limit(group.send([chunk.to(device)], target, 0))
        else:
            received = torch.empty_like(chunk, device=device)
            wait_without_limit(group.recv([received], source, 0))
            chunk.copy_(received)
