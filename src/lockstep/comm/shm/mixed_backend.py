"""Backends for devices that shm does not serve in a mixed group: "cpu:shm,cuda:nccl".

Torch uses a group written in Python as the whole group and ignores the backends configured for other devices. So the
shm group creates them itself, at the first call with a tensor on such a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from lockstep._torch import Backend, BackendConfig, PrefixStore, Store, distributed_state
from lockstep.comm.flatten_tensors import first_tensor

Method = TypeVar("Method", bound=Callable[..., Any])


def dispatch_by_device(method: Method) -> Method:
    """Pass a call to the backend that "cpu:shm,cuda:nccl" names for its tensors' device, if that is not shm."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        backends: DeviceBackends = self._device_backends
        if backends.may_exist:
            delegate = backends.for_device(first_tensor((*args, *options.values())).device)
            if delegate is not None:
                return getattr(delegate, method.__name__)(*args, **options)
        return method(self, *args, **options)

    return call  # type: ignore[return-value]


class DeviceBackends:
    """A process group for each device type that the configuration assigns to another backend than shm."""

    def __init__(self, group: dist.ProcessGroup, store: Store, timeout: timedelta) -> None:
        self._group, self._store, self._timeout = group, store, timeout
        self._groups: dict[str, dist.ProcessGroup | None] = {"cpu": None}
        self._configured = False
        self.may_exist = True  # False once it is known that shm serves all devices

    def for_device(self, device: torch.device) -> dist.ProcessGroup | None:
        """The group for tensors on this device, or None if shm serves it."""
        if not self._configured:
            config = distributed_state().pg_backend_config.get(self._group)
            if config is None:
                return None  # torch is still forming the group, or did not form it
            self._configured = True
            for kind, name in BackendConfig(Backend(config)).get_device_backend_map().items():
                self._groups[kind] = None if name == "shm" else self._form(kind, str(name))
            self.may_exist = any(group is not None for group in self._groups.values())
        return self._groups.get(device.type)

    def _form(self, kind: str, name: str) -> dist.ProcessGroup | None:
        if kind == "cuda" and not torch.cuda.is_available():
            return None
        store = PrefixStore(f"{kind}-{name}/", self._store)
        rank, size = self._group.rank(), self._group.size()
        group: Any = dist.ProcessGroup(store, rank, size)
        backend: Any
        if name == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
            backend_type = dist.ProcessGroup.BackendType.NCCL
        elif name == "gloo":
            backend = dist.ProcessGroupGloo(store, rank, size, timeout=self._timeout)
            backend_type = dist.ProcessGroup.BackendType.GLOO
        else:
            raise ValueError(f"{kind}:{name} beside shm is not supported; use gloo or nccl there")
        group._set_default_backend(backend_type)
        group._register_backend(torch.device(kind), backend_type, backend)
        group._set_group_name(f"{self._group.group_name}/{kind}")
        return cast(dist.ProcessGroup, group)

    def close(self, abort: bool) -> None:
        for group in self._groups.values():
            if group is not None:
                group.abort() if abort else group.shutdown()
        self._groups.clear()
