"""Checks of the arguments of DistributedDataParallel, with torch's messages."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from lockstep import _torch
from lockstep._torch import get_device_index

_HAS_FORWARD_SYNC = "forward_sync_buffers" in inspect.signature(TorchDDP.__init__).parameters


@dataclass(frozen=True)
class Devices:
    """Where the module is, and where its inputs are moved to."""

    type: str
    is_multi_device: bool
    ids: list[int] | None = None
    output: int | None = None


@dataclass(frozen=True)
class BufferSync:
    """When buffers are synchronised."""

    at_start: bool
    before_forward: bool


def choose_group(module: nn.Module, process_group: dist.ProcessGroup | None, mesh: Any) -> dist.ProcessGroup:
    """The group over which gradients are averaged. Prepares the module if the mesh is one dimension of a larger one."""
    if process_group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh is None:
        return process_group or _torch.get_default_group()
    if mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
    group: dist.ProcessGroup = mesh.get_group(mesh_dim=0)
    if mesh._get_root_mesh() != mesh:  # one dimension of several: tensor parallelism inside this wrapper
        _torch.tensor_parallel_transform()(module)
    return group


def check_parameters(parameters: Sequence[nn.Parameter], *, has_delayed: bool) -> None:
    if not any(p.requires_grad for p in parameters) and not has_delayed:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    for parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
                "Run a dummy forward pass to correctly initialize the modules"
            )


def choose_devices(parameters: Sequence[nn.Parameter], device_ids: Sequence[Any] | None, output_device: Any) -> Devices:
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {p.device for p in parameters}
    types = {d.type for d in devices}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {types}."
        )
    device_type, is_multi_device = next(iter(types)), len(devices) > 1
    if not device_ids or device_type == "cpu" or is_multi_device:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got "
                f"device_ids {device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return Devices(device_type, is_multi_device)
    ids = [get_device_index(x, True) for x in device_ids]
    output = get_device_index(device_ids[0] if output_device is None else output_device, True)
    (at,) = devices
    if at.index is not None and at.index != ids[0]:
        raise ValueError(
            f"device_ids={list(device_ids)}, but the module's parameters are on {at}: move the module there first, "
            f"or pass device_ids=[{at.index}]."
        )
    return Devices(device_type, is_multi_device, ids, output)


def choose_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> BufferSync:
    if broadcast_buffers is not None and _HAS_FORWARD_SYNC:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated "
            "and its value is ignored when `forward_sync_buffers` is provided."
            if forward_sync_buffers is not None
            else "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. Note that "
            "`forward_sync_buffers=False` still syncs buffers at the start, `broadcast_buffers=False` does not.",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return BufferSync(at_start=True, before_forward=forward_sync_buffers)
    syncs = True if broadcast_buffers is None else bool(broadcast_buffers)
    return BufferSync(at_start=syncs, before_forward=syncs)
