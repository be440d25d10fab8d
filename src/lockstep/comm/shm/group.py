"""The torch process group of the backend `shm`, for the workers of one host.

This file has torch's method names and checks what torch allows: lists, options, one or several devices. An option
`opts` of None stands for torch's defaults. The collectives on these tensors are in tensor_collectives.py, on flat
memory in collectives.py, their queue and thread in executor.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from lockstep import _torch
from lockstep._torch import BarrierOptions, Store
from lockstep.comm.flatten_tensors import single_tensor
from lockstep.comm.shm import tensor_collectives as on_tensors
from lockstep.comm.shm.collectives import Collectives, heap_start, reserve_slots
from lockstep.comm.shm.cuda_collectives import CoalescedTensors, CudaCollectives, event_behind_queued, finish_queued
from lockstep.comm.shm.executor import CollectiveExecutor, CombinedWork, ShmWork
from lockstep.comm.shm.memory import Heap, create_segment
from lockstep.comm.shm.mixed_backend import DeviceBackends, dispatch_by_device
from lockstep.comm.shm.phases import GroupSync, State
from lockstep.comm.shm.point_to_point import PointToPoint
from lockstep.comm.shm.reduce_ops import RedOpType, Reduction, parse_reduction
from lockstep.comm.shm.rendezvous import exchange_segments
from lockstep.comm.shm.stream_flags import Caller
from lockstep.comm.shm.tensor_collectives import Splits, Tensors, as_bytes, flatten
from lockstep.errors import PeerLostError
from lockstep.world.rendezvous import JoinRegistry

CLOSE_TIMEOUT_S: Final = 5.0
MAX_KEPT_NUMEL: Final = 64

# Torch's stub files describe different overloads in every version, so the type checker sees this class as Any.
_ProcessGroup: Any = dist.ProcessGroup


class ShmGroup(_ProcessGroup):  # type: ignore[misc]
    """Process group of workers on one host that communicate through shared memory."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        global_ranks: Sequence[int] = (),
        registry: JoinRegistry | None = None,
    ) -> None:
        """`global_ranks`: the members' global ranks, in order, if this is a subgroup. Error messages use them.

        `registry`: the registry in which this worker is registered already, if so.
        """
        super().__init__(rank, size)
        registry = registry or JoinRegistry(store, rank, tuple(global_ranks) or range(size))
        self._store, self._name, self._pid = store, "", os.getpid()
        self._rank, self._size = rank, size
        wait_s = timeout.total_seconds()
        segment = create_segment()
        try:
            self._sync = GroupSync(rank, segment, wait_s, registry.names)
            section = reserve_slots(self._sync)
            peers = exchange_segments(registry, segment, section_bytes=section, deadline=time.monotonic() + wait_s)
        except BaseException as error:
            if isinstance(error, PeerLostError):
                self._sync.fail(error)  # for workers that have mapped this segment already
            os.close(segment.fd)
            raise
        try:
            self._sync.join(peers)
        except BaseException as error:
            self._sync.close()
            if isinstance(error, PeerLostError):
                raise registry.liveness.publish_loss(error) from None  # for workers that have not
            raise
        self.processes = {registry.names[r]: process for r, process in registry.processes.items()}
        section = min([section, *(peer.section_bytes for peer in peers.values())])
        self._executor = CollectiveExecutor(f"shm-{rank}", self._sync.told)
        self._host = Collectives(self._sync, section)
        self._devices: dict[torch.device, CudaCollectives] = {}
        self._heap = Heap(segment, heap_start(self._sync, section))
        self._point_to_point = PointToPoint(self._sync, self._heap)
        self._device_backends = DeviceBackends(self, store, timeout)
        self._sequence, self._closed = 0, False
        self._coalescing: list[Work] | None = None
        self._kept_works: deque[Work] = deque(maxlen=16)

    # ---- properties that torch reads --------------------------------------------------------------------------------

    supports_splitting, supports_coalescing = False, True

    def getBackendName(self) -> str:
        return "shm"

    name = _get_backend_name = getBackendName

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])]

    def _get_backend(self, device: torch.device) -> Any:
        delegate = self._device_backends.for_device(torch.device(device))
        return self if delegate is None else delegate._get_backend(device)

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: all workers count from their first call."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._sync.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self._executor.drain()

    # ---- memory -----------------------------------------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor in group memory, on which collectives need no copies. Freed like any other tensor."""
        if torch.device(device).type != "cpu":
            raise ValueError(f"device={str(device)!r}: shm gives memory on cpu only")
        self._check_open()
        return self._heap.tensor(size, dtype)

    def share(self, mine: Tensor) -> list[Tensor]:
        """Return the bytes of all ranks, in group memory, when all have written theirs; none if one is elsewhere."""
        self._submit(mine, on_tensors.WAITS, [], Collectives.share, mine, found := list[Tensor]()).wait()
        return found

    # ---- reductions -------------------------------------------------------------------------------------------------

    @dispatch_by_device
    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None) -> Work:
        tensor = single_tensor(tensors)
        run = on_tensors.all_reduce_sparse if tensor.is_sparse else on_tensors.all_reduce
        return self._submit(tensor, opts, [tensor], run, tensor, self._reduction(opts, tensor.dtype))

    def all_reduce_scaled(self, tensor: Tensor, scale: Callable[[], float]) -> Work:
        """All-reduce the sum, multiplied by `scale()` while it is in the cache. Host memory only.

        `scale` is called when this collective runs, so it may depend on results of collectives started before it.
        """
        op = replace(self._reduction(None, tensor.dtype), scale=scale)
        return self._submit(tensor, None, [tensor], on_tensors.all_reduce, tensor, op)

    @dispatch_by_device
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        ops = [self._reduction(opts, tensor.dtype) for tensor in tensors]
        return self._submit(tensors[0], opts, tensors, on_tensors.all_reduce_coalesced, tensors, ops)

    @dispatch_by_device
    def reduce(self, tensors: Tensors | Tensor, opts: Any = None) -> Work:
        tensor, root = single_tensor(tensors), self._root("reduce", opts)
        op = self._reduction(opts, tensor.dtype)
        return self._submit(tensor, opts, [tensor], on_tensors.all_reduce, tensor, op, root)

    @dispatch_by_device
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        out, sections = single_tensor(outputs), inputs[0]
        on_tensors.check_list("reduce_scatter", sections, self._size)
        on_tensors.check_alike("reduce_scatter", out, sections[self._rank])
        op = self._reduction(opts, out.dtype)
        return self._submit(out, opts, [out], on_tensors.reduce_scatter, out, sections, op)

    @dispatch_by_device
    def reduce_scatter_single(self, out: Tensor, data: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([out], [data], opts)

    @dispatch_by_device
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for out, data in zip(outputs, inputs, strict=True):
            on_tensors.check_whole("reduce_scatter", "input", data, "output", out, self._size)
        ops = [self._reduction(opts, out.dtype) for out in outputs]
        run, each = on_tensors.for_each, on_tensors.reduce_scatter_single
        return self._submit(outputs[0], opts, outputs, run, each, outputs, inputs, ops)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- broadcast, gather, scatter, all-to-all, barrier ------------------------------------------------------------

    @dispatch_by_device
    def broadcast(self, tensors: Tensors | Tensor, opts: Any = None) -> Work:
        tensor, root = single_tensor(tensors), self._root("broadcast", opts)
        return self._submit(tensor, opts, [tensor], on_tensors.broadcast, tensor, root)

    def prepare_broadcasts(self, tensors: Tensors, roots: Sequence[int]) -> Callable[..., Work]:
        """Return a function that broadcasts these tensors, each from its root; on a GPU all at once. They are
        contiguous, of one dtype, on a device that shm serves in this group, and kept. With `queues=True`, on a GPU,
        only the current stream waits for that; if a worker is lost, PeerLostError comes later (stream_flags.py)."""
        lists = CoalescedTensors.lists([tensor.data.view(-1) for tensor in tensors], roots)
        return partial(self._submit, tensors[0], None, tensors[:1], on_tensors.broadcast_coalesced, lists)

    @dispatch_by_device
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        for targets, data in zip(outputs, inputs, strict=True):
            on_tensors.check_list("all_gather", targets, self._size, like=data)
        return self._gather_all([list(targets) for targets in outputs], inputs, opts)

    @dispatch_by_device
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        # Torch lists the outputs by rank here, and by tensor in allgather.
        by_tensor = [[targets[i] for targets in outputs] for i in range(len(inputs))]
        return self._gather_all(by_tensor, inputs, opts)

    def _gather_all(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        targets = [target for targets in outputs for target in targets]
        return self._submit(inputs[0], opts, targets, on_tensors.for_each, on_tensors.all_gather, outputs, inputs)

    @dispatch_by_device
    def all_gather_single(self, out: Tensor, data: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([out], [data], opts)

    @dispatch_by_device
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for out, data in zip(outputs, inputs, strict=True):
            on_tensors.check_whole("all_gather", "output", out, "input", data, self._size)
        run = on_tensors.all_gather_single
        return self._submit(outputs[0], opts, outputs, on_tensors.for_each, run, outputs, inputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @dispatch_by_device
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        data, root = single_tensor(inputs), self._root("gather", opts)
        targets = list(outputs[0]) if self._rank == root else []
        if self._rank == root:
            on_tensors.check_list("gather", targets, self._size, like=data)
        return self._submit(data, opts, targets or [data], on_tensors.gather, targets, data, root)

    @dispatch_by_device
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        out, root = single_tensor(outputs), self._root("scatter", opts)
        sources = list(inputs[0]) if self._rank == root else []
        if self._rank == root:
            on_tensors.check_list("scatter", sources, self._size, like=out)
        return self._submit(out, opts, [out], on_tensors.scatter, out, sources, root)

    @dispatch_by_device
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        on_tensors.check_list("all_to_all", outputs, self._size)
        on_tensors.check_list("all_to_all", inputs, self._size)
        return self._submit(outputs[0], opts, outputs, on_tensors.all_to_all, outputs, inputs)

    @dispatch_by_device
    def all_to_all_single(
        self, out: Tensor, data: Tensor, out_splits: Splits = None, splits: Splits = None, opts: Any = None
    ) -> Work:
        out_sizes = on_tensors.split_sizes("output", out, out_splits, self._size)
        sizes = on_tensors.split_sizes("input", data, splits, self._size)
        to_self, from_self = sizes[self._rank], out_sizes[self._rank]
        if to_self != from_self:
            text = f"all_to_all: rank {self._rank} sends {to_self} elements to itself and expects {from_self}"
            raise ValueError(f"{text}; make the splits agree")
        return self._submit(out, opts, [out], on_tensors.all_to_all_single, out, out_sizes, data, sizes)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        if (device := getattr(opts, "device", None)) is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return self._submit(torch.empty(0), opts, [], Collectives.barrier)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names a missing rank, or all of them if `wait_all_ranks`. Worded like Gloo's errors."""
        opts = BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
            if opts.timeout <= timedelta(0):
                raise RuntimeError(f"Rank {self._rank} timed out in monitoredBarrier: the timeout is {opts.timeout}")
        wait_s = self._sync.timeout_s if timeout is None else opts.timeout.total_seconds()
        try:
            self._submit(torch.empty(0), opts, [], Collectives.barrier, "monitored_barrier").wait()
        except PeerLostError as error:
            raise self._sync.monitored_barrier_error(error, wait_s, all_missing=wait_all_ranks) from error

    # ---- point to point ---------------------------------------------------------------------------------------------

    @dispatch_by_device
    def send(self, tensors: Tensors | Tensor, dst: int, tag: int = 0) -> Work:
        self._check_peer("send", dst)
        self._sequence += 1
        return self._collect(self._point_to_point.send(as_bytes(flatten(single_tensor(tensors)).cpu()), dst, tag))

    @dispatch_by_device
    def recv(self, tensors: Tensors | Tensor, src: int, tag: int = 0) -> Work:
        self._check_peer("recv", src)
        return self._receive(single_tensor(tensors), src, tag)

    @dispatch_by_device
    def recv_anysource(self, tensors: Tensors | Tensor, tag: int = 0) -> Work:
        return self._receive(single_tensor(tensors), None, tag)

    def _receive(self, tensor: Tensor, src: int | None, tag: int) -> Work:
        self._check_open()
        self._sequence += 1
        in_place = (bare := tensor.data).is_contiguous() and bare.device.type == "cpu"
        flat = bare.view(-1) if in_place else torch.empty(bare.numel(), dtype=bare.dtype)
        work = self._point_to_point.receive(as_bytes(flat), src, tag, wait_s=self._sync.timeout_s)
        if not in_place:
            work.on_received = lambda: bare.copy_(flat.view(bare.shape))
        return self._collect(work)

    # ---- closing ----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End every wait in this group with an error, in this worker and in its peers."""
        self._close(State.ABORTED)

    def shutdown(self) -> None:
        try:
            finish_queued(self._devices.values() if os.getpid() == self._pid else ())
        finally:
            self._close(State.LEFT)

    def _close(self, state: State) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._sync.leave(state)
        self._executor.close(CLOSE_TIMEOUT_S)
        self._device_backends.close(state is State.ABORTED)
        for device in self._devices.values():
            device.close()
        self._devices = {}
        self._sync.close()
        self._kept_works.clear()
        del self._host, self._heap, self._point_to_point

    def fail_if_dead(self, error: PeerLostError) -> PeerLostError:
        """Fail this group if the rank that was lost while a subgroup was formed is dead: else its members would take
        this worker for the cause. Returns the error to raise: that loss, or the one because of which the rank died."""
        sync, process = self._sync, self.processes.get(-1 if error.rank is None else error.rank)
        if self._closed or sync.failure is not None or process is None:
            return error
        if not process.is_dead(seen_from=self.processes[sync.global_ranks[self._rank]]):
            return error
        cause = sync.members.peer_lost_by(sync.global_ranks.index(error.rank))
        return cast(PeerLostError, sync.fail(error if cause is None else cause))

    # ---- execution --------------------------------------------------------------------------------------------------

    def _submit(
        self, tensor: Tensor, opts: Any, results: Tensors, run: Callable[..., None], *args: Any, queues: bool = False
    ) -> Work:
        """Queue `run(collectives, *args)` with the collectives for the device of `tensor`. If `queues`, only the stream
        of the caller waits for the tensors and the result: `run` gets a Caller as well."""
        self._sequence += 1
        self._check_open()
        wait_s = None if opts is None or opts.timeout <= timedelta(0) else opts.timeout.total_seconds()
        wait = queues or (not getattr(opts, "asyncOp", True) and self._coalescing is None)
        device = tensor.device if tensor.is_cuda else None
        ready = None if device is None or queues else event_behind_queued(device)
        if queues and device is not None:
            args = (*args, Caller(_torch.cuda_current_raw_stream(tensor.device.index), threading.get_ident()))

        def execute(work: ShmWork, spin: bool) -> None:
            with self._sync.begin(wait_s=wait_s, spin=spin):
                if device is None:
                    run(self._host, *args)
                    return
                collectives = self._cuda_collectives(device)
                with collectives.stream_context(ready):
                    run(collectives, *args)
                work.sync_stream = collectives.make_waiter()

        return self._collect(self._executor.submit(execute, results, wait=wait), results if device is None else ())

    def _cuda_collectives(self, device: torch.device) -> CudaCollectives:
        if device not in self._devices:
            with torch.cuda.device(device):
                self._devices[device] = CudaCollectives(self._sync, device)
        return self._devices[device]

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = CombinedWork(self._coalescing or []), None
        return works

    def _collect(self, work: Work, tensors: Tensors = ()) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        if work.is_completed():
            return work
        # When a caller passes a work to torch's C++ and drops it (torch's DDP does, in join), only the C++ half would
        # remain, and that cannot wait. Works with large tensors are not worth keeping for this.
        if sum(tensor.numel() for tensor in tensors) <= MAX_KEPT_NUMEL:
            self._kept_works.append(work)
        return work

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("this shm group belongs to the parent process; a forked child cannot use it")
        self._sync.check_failed()

    def _root(self, name: str, opts: Any) -> int:
        root = 0 if opts is None else int(opts.rootRank)
        if not 0 <= root < self._size:
            raise ValueError(f"{name}: root {root} is not in this group of {self._size} workers")
        return root

    def _check_peer(self, name: str, rank: int) -> None:
        self._check_open()
        if not 0 <= rank < self._size or rank == self._rank:
            raise ValueError(f"{name}: rank {rank} is not another worker of this group of {self._size}")

    def _reduction(self, opts: Any, dtype: torch.dtype) -> Reduction:
        return parse_reduction(RedOpType.SUM if opts is None else opts.reduceOp, self._size, dtype)
