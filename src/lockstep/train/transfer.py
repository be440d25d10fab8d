"""The state of one worker to all others, over their process group: for a newcomer, or one that missed a step."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import faults
from lockstep.checkpoint import tree
from lockstep.checkpoint.format import bytes_of, flatten
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
        kinds = [
            [name, str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type == "cpu"]
            for name, t in flat.tensors.items()
        ]
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
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for _, dtype, shape, _ in kinds]
    Broadcast(keep=False)(group, [t for t in tensors if t.numel()], source=source, message_bytes=MESSAGE_BYTES)
    # The counters of an optimiser are on the CPU, and stay there: on a GPU each look at one would wait for it.
    by_name = {name: t.cpu() if on_host else t for (name, *_, on_host), t in zip(kinds, tensors, strict=True)}
    return tree.restore(structure, by_name, Path("the state of another worker"))


def tensors_to_text(tensors: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Tensors as JSON: the result of a call that a worker may have to read instead of making it."""
    found = {}
    for name, tensor in tensors.items():
        data = base64.b64encode(bytes_of(tensor)).decode()
        found[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data]
    return found


def tensors_from_text(text: dict[str, list[Any]]) -> dict[str, Tensor]:
    """The inverse of `tensors_to_text`."""
    found = {}
    for name, (dtype, shape, data) in text.items():
        raw = torch.frombuffer(bytearray(base64.b64decode(data)) or bytearray(1), dtype=torch.uint8)
        count = math.prod(shape)
        kind = getattr(torch, dtype)
        found[name] = raw.view(kind).view(shape).clone() if count else torch.empty(shape, dtype=kind)
    return found
