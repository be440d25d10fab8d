"""The state of one worker to all others, over their process group: for a newcomer, or one that missed a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import faults
from lockstep.checkpoint import tree
from lockstep.checkpoint.format import flatten
from lockstep.comm.broadcast import Broadcast

MESSAGE_BYTES = 32 << 20


def hand_over(
    group: dist.ProcessGroup, device: torch.device, source: int, state: dict[str, Any] | None
) -> dict[str, Any]:
    """All workers together. `state`: on the worker that has rank `source`. Returns it, on every worker."""
    tensors: list[Tensor] = []
    header = b""
    if state is not None:
        flat = flatten(state)
        kinds = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in flat.tensors.items()]
        header = json.dumps([flat.structure, kinds]).encode()
        tensors = [t.detach().to(device).contiguous() for t in flat.tensors.values()]
    length = torch.tensor([len(header)], dtype=torch.int64, device=device)
    Broadcast(keep=False)(group, [length], source=source)
    text = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if header:
        text.copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    Broadcast(keep=False)(group, [text], source=source)
    faults.at("receiving-state" if state is None else "sending-state")
    structure, kinds = json.loads(bytes(text.cpu().numpy()))
    if state is None:
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for _, dtype, shape in kinds]
    Broadcast(keep=False)(group, [t for t in tensors if t.numel()], source=source, message_bytes=MESSAGE_BYTES)
    by_name = {name: tensor for (name, _, _), tensor in zip(kinds, tensors, strict=True)}
    return tree.restore(structure, by_name, Path("the state of another worker"))
