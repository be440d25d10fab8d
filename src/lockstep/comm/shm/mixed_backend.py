"""The other backends of a mixed group: "cpu:shm,cuda:nccl".

Torch takes a group written in Python for the whole group and forgets the backends of the other devices. So the shm
group makes them itself, when a tensor on such a device comes first.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig, PrefixStore, Store, _world


class OtherBackends:
    """For each kind of device that the configuration gives to another backend, a group of that backend."""

    def __init__(self, group: dist.ProcessGroup, store: Store, timeout: timedelta) -> None:
        self._group, self._store, self._timeout = group, store, timeout
        self._groups: dict[str, dist.ProcessGroup | None] = {"cpu": None}
        self._known = False
        self.may_exist = True  # False once it is known that shm has all devices

    def for_device(self, device: torch.device) -> dist.ProcessGroup | None:
        """The group that has tensors on this device, or None: shm has them."""
        if not self._known:
            config = _world.pg_backend_config.get(self._group)
            if config is None:
                return None  # torch is still forming the group, or did not form it
            self._known = True
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
            sort = dist.ProcessGroup.BackendType.NCCL
        elif name == "gloo":
            backend = dist.ProcessGroupGloo(store, rank, size, timeout=self._timeout)
            sort = dist.ProcessGroup.BackendType.GLOO
        else:
            raise ValueError(f"{kind}:{name} beside shm is not supported; use gloo or nccl there")
        group._set_default_backend(sort)
        group._register_backend(torch.device(kind), sort, backend)
        group._set_group_name(f"{self._group.group_name}/{kind}")
        made: dist.ProcessGroup = group
        return made

    def close(self, abort: bool) -> None:
        for group in self._groups.values():
            if group is not None:
                group.abort() if abort else group.shutdown()
        self._groups.clear()
