"""Maps GPU memory of other processes, with the few functions of the CUDA driver that this needs.

Torch can share CUDA tensors too, but counts references to them in named files, which a killed process leaves behind.
"""

from __future__ import annotations

import ctypes
import struct
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.comm.shm.phases import MAX_COALESCED, REGION_BYTES
from lockstep.errors import LockstepError

MAX_MAPPINGS: Final = MAX_COALESCED  # or more, so that none is closed that the current collective uses
MAX_TENSORS: Final = 1024
BLOCK_BYTES: Final = 2 << 20

_IPC_CAPABLE, _BUFFER_ID, _RANGE_START = 10, 7, 11
_LAZY_PEER_ACCESS: Final = 1
_HANDLE_BYTES: Final = 64
# A range of a process' GPU memory: number of the allocation (never reused there, unlike an address), offset in it,
# length, handle.
_REGION = struct.Struct(f"<QQQ{_HANDLE_BYTES}s")
assert _REGION.size == REGION_BYTES
NO_REGION: Final = bytes(REGION_BYTES)


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * _HANDLE_BYTES)]


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuPointerGetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    driver.cuIpcGetMemHandle.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
    driver.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
    driver.cuStreamQuery.argtypes = [ctypes.c_void_p]
    driver.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    driver.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    driver.cuMemHostRegister_v2.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint]
    driver.cuMemHostUnregister.argtypes = [ctypes.c_uint64]
    driver.cuMemHostGetDevicePointer_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint]
    driver.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
    with suppress(AttributeError):  # drivers before CUDA 11.7 do not have them
        for function in (driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return driver


def call_driver(name: str, *args: Any) -> None:
    """Call a function of the CUDA driver. Raises LockstepError if it returns an error."""
    code = getattr(_driver(), name)(*args)
    if code != 0:
        raise LockstepError(f"{name} failed with CUDA error {code}; see CUresult in cuda.h")


def _attribute(which: int, address: int) -> int:
    value = ctypes.c_uint64(0)
    call_driver("cuPointerGetAttribute", ctypes.byref(value), which, address)
    return value.value


def is_idle(stream: int) -> bool:
    """Whether all work queued in this stream (its address) is done. Causes no process switch on the GPU."""
    return bool(_driver().cuStreamQuery(stream) == 0)


class IpcExporter:
    """Describes this process' tensors to its peers."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()  # (allocation, address, length)

    def region(self, flat: Tensor) -> bytes | None:
        """The packed region of `flat`; None if its memory cannot be shared (expandable segments, cudaMallocAsync)."""
        address, length = flat.data_ptr(), flat.nbytes
        # The number of the allocation shows whether the address still refers to the same memory.
        key = (_attribute(_BUFFER_ID, address), address, length)
        packed = self._known.get(key)
        if packed is None:
            if not _attribute(_IPC_CAPABLE, address) & 0xFF:
                return None
            start, handle = _attribute(_RANGE_START, address), _Handle()
            if _driver().cuIpcGetMemHandle(ctypes.byref(handle), start) != 0:
                return None
            raw = ctypes.string_at(ctypes.addressof(handle), _HANDLE_BYTES)
            packed = self._known[key] = _REGION.pack(key[0], address - start, length, raw)
            if len(self._known) > MAX_TENSORS:
                self._known.popitem(last=False)
        return packed


class IpcImporter:
    """Maps the tensors of one peer. Mappings are cached; the least recently used are closed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.closed = 0  # how many mappings were closed: tensors on them must not be used again
        self._mapped: OrderedDict[int, int] = OrderedDict()  # allocation -> address in this process
        self._tensors: dict[tuple[bytes, torch.dtype], Tensor] = {}

    def tensor(self, packed: bytes, dtype: torch.dtype) -> Tensor:
        """A tensor on the peer's memory that `packed` describes. This object owns the mapping."""
        tensor = self._tensors.get((packed, dtype))
        allocation, offset, length, handle = _REGION.unpack(packed)
        if tensor is not None:
            self._mapped.move_to_end(allocation)  # used now, so that it is not the next that is closed
        else:
            address = self._map(allocation, handle) + offset
            if len(self._tensors) >= MAX_TENSORS:
                self._tensors.clear()
            with torch.inference_mode(False):  # the tensor is used by later calls, too
                tensor = as_tensor(address, length, self._device).view(dtype)
            self._tensors[packed, dtype] = tensor
        return tensor

    def _map(self, allocation: int, packed_handle: bytes) -> int:
        if allocation not in self._mapped:
            if len(self._mapped) >= MAX_MAPPINGS:
                self._tensors.clear()
                # No queued kernel may use the mapping that is closed now.
                torch.cuda.current_stream(self._device).synchronize()
                self.closed += 1
                call_driver("cuIpcCloseMemHandle", self._mapped.popitem(last=False)[1])
            address, handle = ctypes.c_uint64(0), _Handle()
            ctypes.memmove(ctypes.addressof(handle), packed_handle, _HANDLE_BYTES)
            call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
            self._mapped[allocation] = address.value
        self._mapped.move_to_end(allocation)
        return self._mapped[allocation]

    def close(self) -> None:
        self._tensors.clear()
        while self._mapped:
            _driver().cuIpcCloseMemHandle(self._mapped.popitem()[1])


class _CudaArray:
    """Memory at an address, as torch.as_tensor accepts it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def as_tensor(address: int, size: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_CudaArray(address, size), device=device)


class StagingBuffer:
    """Shareable memory for copies of tensors whose own memory cannot be shared. Grows to the largest of them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._address, self._size = device, 0, 0

    def tensor(self, size: int, wait: Callable[[], None]) -> Tensor:
        if size > self._size:
            self.close(wait)
            # Smaller allocations share a block of the driver, and a peer can map a block only once.
            capacity = max(BLOCK_BYTES, 1 << (size - 1).bit_length())
            address = ctypes.c_uint64(0)
            call_driver("cuMemAlloc_v2", ctypes.byref(address), capacity)
            self._address, self._size = address.value, capacity
        return as_tensor(self._address, size, self._device)

    def close(self, wait: Callable[[], None]) -> None:
        if self._address:
            wait()
            _driver().cuMemFree_v2(self._address)
            self._address, self._size = 0, 0
