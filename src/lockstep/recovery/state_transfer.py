"""What one worker sends to all others over their process group: its state, for a new worker, or the last step, for a
worker that has missed it."""

from __future__ import annotations

import base64
import json
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import faults
from lockstep.checkpoint import state_files
from lockstep.checkpoint.format import bytes_of, flatten
from lockstep.comm import agreement
from lockstep.comm.agreement import Broadcast
from lockstep.comm.low_rank_sum import Factors
from lockstep.comm.shard_sum import coalesced
from lockstep.ddp.replica import cheap_digests
from lockstep.errors import DivergenceError
from lockstep.recovery.collective_calls import print_message
from lockstep.step.step import apply
from lockstep.step.step_types import StepContext, Update

MESSAGE_BYTES = 32 << 20


def broadcast_state(
    group: dist.ProcessGroup, device: torch.device, source: int, state: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the state of rank `source` on every worker; a collective call. `state` is None on all other ranks."""
    tensors: list[Tensor] = []
    header = b""
    if state is not None:
        flat = flatten(state)
        here = {name: one for name, one in flat.tensors.items() if isinstance(one, Tensor)}  # all of them
        kinds = [
            [name, str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type == "cpu"]
            for name, t in here.items()
        ]
        header = json.dumps([flat.structure, kinds]).encode()
        tensors = [t.to(device).contiguous() for t in here.values()]
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
    # The counters of an optimiser are on the CPU and stay there: reading one from a GPU would wait for it.
    by_name = {name: t.cpu() if on_host else t for (name, *_, on_host), t in zip(kinds, tensors, strict=True)}
    return state_files.restore(structure, by_name, Path("the state of another worker"))


def refuse_other_state(
    group: dist.ProcessGroup, device: torch.device, source: int, state: Mapping[str, Tensor] | None, step: int
) -> None:
    """Raise DivergenceError, on all workers, if one did not get the state that rank `source` sent; a collective call.

    `state` is that of the source and of the workers that got it; None on all others.
    """
    digests = None if state is None else dict(zip(state, cheap_digests(state.values()), strict=True))
    told = agreement.gather_values(group, None if digests is None else agreement.fingerprint(digests), device=device)
    wrong = [rank for rank, one in enumerate(told) if one not in (None, told[source])]
    if wrong:
        theirs = agreement.gather_values(group, digests, device=device)
        names = [
            name
            for name in {**theirs[source], **theirs[wrong[0]]}
            if theirs[source].get(name) != theirs[wrong[0]].get(name)
        ]
        raise DivergenceError(
            f"rank {wrong[0]} has not got the state of step {step} as rank {source} sent it: {', '.join(names[:4])}; "
            "look for state that depends on the worker, or a faulty machine"
        )


def encode_update(index: int, training: StepContext) -> dict[str, Any]:
    """Encode the step with this index for `broadcast_state`. `is_intact`: False if another worker cannot apply it."""
    update = training.last.update
    is_written = training.gradient_writes.were_found
    if update is None or update.index != index or is_written or not update.is_intact:
        return {"index": index, "part": training.part, "is_intact": False}
    gradients = [None if g is None else _encode_sparse(g) if g.is_sparse else g for g in update.gradients]
    return {
        "index": update.index,
        "part": update.part,
        "number": update.number,
        "ends_epoch": update.ends_epoch,
        "finite": update.finite,
        "bad_loss": update.bad_loss,
        "buffers": training.buffers.encode(update.buffers),
        "gradients": gradients,
        "compressed_gradients": {
            name: None if one is None else list(one) for name, one in update.compressed_gradients.items()
        },
        "is_intact": True,
    }


def apply_sent_step(training: StepContext, sent: dict[str, Any]) -> Update:
    """Apply a step that this worker has missed. If it cannot be applied, kill this process, which is then replaced."""
    if not sent["is_intact"]:
        print_message(
            f"this worker has missed step {sent['index']}, and cannot get it from another one, because the optimizer "
            "or the program has written to the gradients since; it ends and is replaced"
        )
        os.kill(os.getpid(), signal.SIGKILL)
    update = _decode_update(sent, training)
    for leaf, gradient in zip(training.leaves, update.gradients, strict=True):
        leaf.parameter.grad = gradient
    apply(training, update)
    return update


def _decode_update(sent: dict[str, Any], training: StepContext) -> Update:
    """The inverse of `encode_update`, for a step that is intact. Gradients get the strides of their parameters."""
    gradients = [_decode(g, leaf.parameter) for g, leaf in zip(sent["gradients"], training.leaves, strict=True)]
    versions = [0 if g is None else g._version for g in gradients]
    return Update(
        sent["number"],
        part=sent["part"],
        index=sent["index"],
        ends_epoch=sent["ends_epoch"],
        finite=sent["finite"],
        bad_loss=sent["bad_loss"],
        buffers=training.buffers.decode(sent["buffers"]),
        gradients=gradients,
        versions=versions,
        compressed_gradients={
            name: None if pair is None else Factors(*pair) for name, pair in sent["compressed_gradients"].items()
        },
    )


def _encode_sparse(gradient: Tensor) -> dict[str, Any]:
    gradient = gradient.coalesce()
    return {"indices": gradient.indices(), "values": gradient.values(), "shape": list(gradient.shape)}


def _decode(gradient: Any, parameter: Tensor) -> Tensor | None:
    if isinstance(gradient, dict):
        return coalesced(gradient["indices"], gradient["values"], torch.Size(gradient["shape"]))
    # A sum over the elements, such as a norm, depends on their order in memory.
    return None if gradient is None else torch.empty_like(parameter).copy_(gradient)


def tensors_to_text(tensors: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Encode tensors as JSON: the result of a call, which another worker may read instead of making the call."""
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
