"""The torch process group of the backend `shm`, for the workers of one host.

This file has torch's method names and accepts what torch allows: tensors of any layout, lists, options, one or several
devices. The collectives on flat memory are in collectives.py, their queue and thread in executor.py.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import Work, distributed_c10d

from lockstep._torch import Store
from lockstep.comm.flatten_tensors import first_tensor, single_tensor
from lockstep.comm.join_registry import JoinRegistry
from lockstep.comm.shm import sparse
from lockstep.comm.shm.collectives import Collectives
from lockstep.comm.shm.cuda_collectives import CudaCollectives, event_behind_queued
from lockstep.comm.shm.executor import CollectiveExecutor, CombinedWork, ShmWork
from lockstep.comm.shm.flat_tensors import (
    AnyCollectives,
    all_reduce,
    as_bytes,
    check_alike,
    cut,
    flatten,
    reduce_scatter,
    write_into,
)
from lockstep.comm.shm.host_memory import HostMemory, heap_start, reserve_slots
from lockstep.comm.shm.memory import Heap, create_segment
from lockstep.comm.shm.mixed_backend import DeviceBackends
from lockstep.comm.shm.phases import GroupSync, State
from lockstep.comm.shm.point_to_point import PointToPoint
from lockstep.comm.shm.reduce_ops import Reduction, parse_reduction
from lockstep.comm.shm.rendezvous import exchange_segments
from lockstep.errors import PeerLostError

CLOSE_TIMEOUT_S: Final = 5.0
COALESCE_BYTES: Final = 1 << 20
MAX_KEPT_NUMEL: Final = 64

Method = TypeVar("Method", bound=Callable[..., Any])


def _dispatch_by_device(method: Method) -> Method:
    """Pass a call to the backend that "cpu:shm,cuda:nccl" names for its tensors' device, if that is not shm."""

    @functools.wraps(method)
    def call(self: ShmGroup, *args: Any, **options: Any) -> Any:
        if self._device_backends.may_exist:
            delegate = self._device_backends.for_device(first_tensor((*args, *options.values())).device)
            if delegate is not None:
                return getattr(delegate, method.__name__)(*args, **options)
        return method(self, *args, **options)

    return call  # type: ignore[return-value]


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
            self._sync = GroupSync(rank, size, segment, wait_s, registry.names)
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
                raise registry.publish_loss(error) from None  # for workers that have not
            raise
        self.processes = {registry.names[r]: process for r, process in registry.processes.items()}
        section = min([section, *(peer.section_bytes for peer in peers.values())])
        self._executor = CollectiveExecutor(f"shm-{rank}")
        self._host = Collectives(self._sync, HostMemory(self._sync, section))
        self._devices: dict[torch.device, CudaCollectives] = {}
        self._heap = Heap(segment, heap_start(self._sync, section))
        self._point_to_point = PointToPoint(self._sync, self._heap)
        self._device_backends = DeviceBackends(self, store, timeout)
        self._sequence = 0
        self._closed = False
        self._coalescing: list[Work] | None = None
        self._kept_works: deque[Work] = deque(maxlen=16)

    # ---- properties that torch reads --------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "shm"

    def name(self) -> str:
        return "shm"

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
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> Any:
        delegate = self._device_backends.for_device(torch.device(device))
        return self if delegate is None else delegate._get_backend(device)

    def _get_backend_name(self) -> str:
        return "shm"

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: all workers count from their first call."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._sync.timeout_s = timeout.total_seconds()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self._executor.drain()

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return True

    # ---- memory -----------------------------------------------------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor in group memory, on which collectives need no copies. Freed like any other tensor."""
        if torch.device(device).type != "cpu":
            raise ValueError(f"device={str(device)!r}: shm gives memory on cpu only")
        self._check_open()
        return self._heap.tensor(size, dtype)

    # ---- reductions -------------------------------------------------------------------------------------------------

    @_dispatch_by_device
    def allreduce(self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = None) -> Work:
        opts = _options("AllreduceOptions", opts)
        tensor = single_tensor(tensors)
        op = self._reduction(opts, tensor.dtype)
        if tensor.is_sparse:
            return self._submit(tensor, opts, [tensor], lambda collectives: sparse.all_reduce(collectives, tensor, op))
        return self._submit(tensor, opts, [tensor], lambda collectives: all_reduce(collectives, tensor, op))

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: Callable[[], float]) -> Work:
        """All-reduce the sum, multiplied by `scale()` while it is in the cache. Host memory only.

        `scale` is called when this collective runs, so it may depend on results of collectives started before it.
        """
        opts = _options("AllreduceOptions", None)
        op = replace(self._reduction(opts, tensor.dtype), scale=scale)
        return self._submit(tensor, opts, [tensor], lambda collectives: all_reduce(collectives, tensor, op))

    @_dispatch_by_device
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        opts = _options("AllreduceCoalescedOptions", opts)
        ops = [self._reduction(opts, tensor.dtype) for tensor in tensors]

        def run(collectives: AnyCollectives) -> None:
            alike = len({tensor.dtype for tensor in tensors}) == 1
            if alike and sum(tensor.nbytes for tensor in tensors) <= COALESCE_BYTES:
                together = torch.cat([flatten(tensor) for tensor in tensors])
                collectives.all_reduce(together, ops[0])
                pieces = torch.split(together, [tensor.numel() for tensor in tensors])
                for tensor, piece in zip(tensors, pieces, strict=True):
                    tensor.data.copy_(piece.view(tensor.shape))
                return
            for tensor, op in zip(tensors, ops, strict=True):
                all_reduce(collectives, tensor, op)

        return self._submit(tensors[0], opts, tensors, run)

    @_dispatch_by_device
    def reduce(self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = None) -> Work:
        opts = _options("ReduceOptions", opts)
        tensor, root = single_tensor(tensors), self._root("reduce", opts)
        op = self._reduction(opts, tensor.dtype)
        return self._submit(tensor, opts, [tensor], lambda collectives: all_reduce(collectives, tensor, op, root=root))

    @_dispatch_by_device
    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Work:
        opts = _options("ReduceScatterOptions", opts)
        out, sections = single_tensor(outputs), inputs[0]
        self._check_list("reduce_scatter", sections)
        check_alike("reduce_scatter", out, sections[self._rank])
        op = self._reduction(opts, out.dtype)

        def run(collectives: AnyCollectives) -> None:
            flat = [flatten(section) for section in sections]
            write_into(collectives, [out], functools.partial(reduce_scatter, collectives, flat, op))

        return self._submit(out, opts, [out], run)

    @_dispatch_by_device
    def reduce_scatter_single(self, out: torch.Tensor, data: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([out], [data], opts)

    @_dispatch_by_device
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        opts = _options("ReduceScatterOptions", opts)
        for out, data in zip(outputs, inputs, strict=True):
            if data.dtype is not out.dtype:
                raise TypeError(f"reduce_scatter: the input is {data.dtype}, the output {out.dtype}; make them alike")
            if data.numel() != out.numel() * self._size:
                raise ValueError(
                    f"reduce_scatter: the input has {data.numel()} elements, the output {out.numel()}; "
                    f"the input must be {self._size} times as large"
                )
        ops = [self._reduction(opts, out.dtype) for out in outputs]

        def run(collectives: AnyCollectives) -> None:
            for out, data, op in zip(outputs, inputs, ops, strict=True):
                flat = flatten(data)
                sections = list(torch.split(flat, out.numel())) if out.numel() else [flat] * self._size
                write_into(collectives, [out], functools.partial(reduce_scatter, collectives, sections, op))

        return self._submit(outputs[0], opts, outputs, run)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- broadcast, gather, scatter, all-to-all, barrier ------------------------------------------------------------

    @_dispatch_by_device
    def broadcast(self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = None) -> Work:
        opts = _options("BroadcastOptions", opts)
        tensor, root = single_tensor(tensors), self._root("broadcast", opts)

        def run(collectives: AnyCollectives) -> None:
            def move(flat: Sequence[torch.Tensor]) -> None:
                data = as_bytes(flat[0])
                into: list[torch.Tensor | None] = [None] * self._size
                if self._rank != root:
                    into[root] = data
                collectives.move("broadcast", same=(root,), to_all=data if self._rank == root else None, into=into)

            write_into(collectives, [tensor], move, read=True)

        return self._submit(tensor, opts, [tensor], run)

    @_dispatch_by_device
    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        for targets, data in zip(outputs, inputs, strict=True):
            self._check_list("all_gather", targets)
            for target in targets:
                check_alike("all_gather", target, data)
        return self._gather_all([list(targets) for targets in outputs], inputs, opts)

    @_dispatch_by_device
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        # Torch lists the outputs by rank here, and by tensor in allgather.
        by_tensor = [[targets[i] for targets in outputs] for i in range(len(inputs))]
        return self._gather_all(by_tensor, inputs, opts)

    @_dispatch_by_device
    def all_gather_single(self, out: torch.Tensor, data: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([out], [data], opts)

    @_dispatch_by_device
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        for out, data in zip(outputs, inputs, strict=True):
            if out.dtype is not data.dtype:
                raise TypeError(f"all_gather: the output is {out.dtype}, the input {data.dtype}; make them the same")
            if out.numel() != data.numel() * self._size:
                raise ValueError(
                    f"all_gather: the output has {out.numel()} elements, the input {data.numel()}; "
                    f"the output must be {self._size} times as large"
                )
        opts = _options("AllgatherOptions", opts)

        def run(collectives: AnyCollectives) -> None:
            for out, data in zip(outputs, inputs, strict=True):

                def move(flat: Sequence[torch.Tensor], data: torch.Tensor = data) -> None:
                    whole, part = as_bytes(flat[0]), as_bytes(flatten(data))
                    length = part.numel()
                    into = [whole[r * length : (r + 1) * length] for r in range(self._size)]
                    collectives.move("all_gather", same=(length,), to_all=part, into=into)

                write_into(collectives, [out], move)

        return self._submit(outputs[0], opts, outputs, run)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_dispatch_by_device
    def gather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        opts = _options("GatherOptions", opts)
        data, root = single_tensor(inputs), self._root("gather", opts)
        targets = list(outputs[0]) if self._rank == root else []
        if self._rank == root:
            self._check_list("gather", targets)
            for target in targets:
                check_alike("gather", target, data)

        def run(collectives: AnyCollectives) -> None:
            def move(flat: Sequence[torch.Tensor]) -> None:
                into = [as_bytes(t) for t in flat] if flat else [None] * self._size
                collectives.move("gather", same=(root,), to_all=as_bytes(flatten(data)), into=into)

            write_into(collectives, targets, move)

        return self._submit(data, opts, targets or [data], run)

    @_dispatch_by_device
    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Work:
        opts = _options("ScatterOptions", opts)
        out, root = single_tensor(outputs), self._root("scatter", opts)
        sources = list(inputs[0]) if self._rank == root else []
        if self._rank == root:
            self._check_list("scatter", sources)
            for source in sources:
                check_alike("scatter", source, out)

        def run(collectives: AnyCollectives) -> None:
            def move(flat: Sequence[torch.Tensor]) -> None:
                into: list[torch.Tensor | None] = [None] * self._size
                into[root] = as_bytes(flat[0])
                collectives.move("scatter", same=(root,), to_each=[as_bytes(flatten(s)) for s in sources], into=into)

            write_into(collectives, [out], move)

        return self._submit(out, opts, [out], run)

    @_dispatch_by_device
    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Work:
        opts = _options("AllToAllOptions", opts)
        self._check_list("all_to_all", outputs)
        self._check_list("all_to_all", inputs)

        def run(collectives: AnyCollectives) -> None:
            def move(flat: Sequence[torch.Tensor]) -> None:
                to_each = [as_bytes(flatten(data)) for data in inputs]
                collectives.move("all_to_all", to_each=to_each, into=[as_bytes(t) for t in flat])

            write_into(collectives, outputs, move)

        return self._submit(outputs[0], opts, outputs, run)

    @_dispatch_by_device
    def all_to_all_single(
        self,
        out: torch.Tensor,
        data: torch.Tensor,
        out_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        opts = _options("AllToAllOptions", opts)
        out_sizes = cut("output", out, out_splits, self._size)
        sizes = cut("input", data, splits, self._size)
        if sizes[self._rank] != out_sizes[self._rank]:
            raise ValueError(
                f"all_to_all: rank {self._rank} sends {sizes[self._rank]} elements to itself and expects "
                f"{out_sizes[self._rank]}; make the splits agree"
            )

        def run(collectives: AnyCollectives) -> None:
            def move(flat: Sequence[torch.Tensor]) -> None:
                to_each = [as_bytes(piece) for piece in torch.split(flatten(data), sizes)]
                into = [as_bytes(piece) for piece in torch.split(flat[0], out_sizes)]
                collectives.move("all_to_all", to_each=to_each, into=into)

            write_into(collectives, [out], move)

        return self._submit(out, opts, [out], run)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        opts = _options("BarrierOptions", opts)
        device = getattr(opts, "device", None)
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return self._submit(torch.empty(0), opts, [], lambda collectives: collectives.barrier())

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names a missing rank, or all of them if `wait_all_ranks`. Worded like Gloo's errors."""
        opts = _options("BarrierOptions", None)
        if timeout is not None:
            opts.timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
            if opts.timeout <= timedelta(0):
                raise RuntimeError(f"Rank {self._rank} timed out in monitoredBarrier: the timeout is {opts.timeout}")
        opts.asyncOp = False
        sync = self._sync
        try:
            self._submit(torch.empty(0), opts, [], lambda collectives: collectives.barrier("monitored_barrier")).wait()
        except PeerLostError as error:
            missing = [sync.global_ranks[rank] for rank in sync.missing()]
            if self._rank != 0:
                text = f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting "
                text += "for send/recv from rank 0"
            elif wait_all_ranks:
                text = f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier"
            else:
                wait_ms = 1000 * (opts.timeout.total_seconds() if timeout is not None else sync.timeout_s)
                text = f"Rank {error.rank} failed to pass monitoredBarrier in {wait_ms:.0f} ms"
            raise PeerLostError(f"{text}: {error}", rank=error.rank, pid=error.pid) from error

    # ---- point to point ---------------------------------------------------------------------------------------------

    @_dispatch_by_device
    def send(self, tensors: Sequence[torch.Tensor] | torch.Tensor, dst: int, tag: int = 0) -> Work:
        tensor = single_tensor(tensors)
        self._check_peer("send", dst)
        self._sequence += 1
        return self._collect(self._point_to_point.send(as_bytes(flatten(tensor).cpu()), dst, tag))

    @_dispatch_by_device
    def recv(self, tensors: Sequence[torch.Tensor] | torch.Tensor, src: int, tag: int = 0) -> Work:
        self._check_peer("recv", src)
        return self._receive(single_tensor(tensors), src, tag)

    @_dispatch_by_device
    def recv_anysource(self, tensors: Sequence[torch.Tensor] | torch.Tensor, tag: int = 0) -> Work:
        return self._receive(single_tensor(tensors), None, tag)

    def _receive(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        self._check_open()
        self._sequence += 1
        bare = tensor.data
        if bare.is_contiguous() and bare.device.type == "cpu":
            return self._collect(
                self._point_to_point.receive(as_bytes(bare.view(-1)), src, tag, wait_s=self._sync.timeout_s)
            )
        flat = torch.empty(bare.numel(), dtype=bare.dtype)
        work = self._point_to_point.receive(as_bytes(flat), src, tag, wait_s=self._sync.timeout_s)
        work.on_received = lambda: bare.copy_(flat.view(bare.shape))
        return self._collect(work)

    # ---- closing ----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End every wait in this group with an error, in this worker and in its peers."""
        self._close(State.ABORTED)

    def shutdown(self) -> None:
        self._close(State.LEFT)

    def _close(self, state: State) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._sync.leave(state)
        self._executor.close(CLOSE_TIMEOUT_S)
        self._device_backends.close(state is State.ABORTED)
        self._sync.close()
        self._kept_works.clear()
        del self._host, self._heap, self._point_to_point
        for device in self._devices.values():
            device.close()
        self._devices = {}

    def fail_if_dead(self, error: PeerLostError) -> PeerLostError:
        """Fail this group if the rank that was lost while a subgroup was formed is dead. Returns the error to raise.

        A dead member is lost to this group too. Its members are notified; otherwise they would take this worker for the
        cause if it now exits because of the loss. If the rank died because of another loss, that one is returned.
        """
        sync, process = self._sync, self.processes.get(-1 if error.rank is None else error.rank)
        if self._closed or sync.failure is not None or process is None:
            return error
        if not process.is_dead(seen_from=self.processes[sync.global_ranks[self._rank]]):
            return error
        cause = sync.peer_lost_by(sync.global_ranks.index(error.rank))
        return cast(PeerLostError, sync.fail(error if cause is None else cause))

    # ---- execution --------------------------------------------------------------------------------------------------

    def _submit(
        self, tensor: torch.Tensor, opts: Any, tensors: Sequence[torch.Tensor], run: Callable[[AnyCollectives], None]
    ) -> Work:
        self._sequence += 1
        self._check_open()
        seconds = opts.timeout.total_seconds()
        wait_s = seconds if seconds > 0 else None
        wait = not getattr(opts, "asyncOp", True) and self._coalescing is None
        if not tensor.is_cuda:

            def execute(work: ShmWork, spin: bool) -> None:
                with self._sync.begin(wait_s=wait_s, spin=spin):
                    run(self._host)

            return self._collect(self._executor.submit(execute, tensors, wait=wait), tensors)
        device, ready = tensor.device, event_behind_queued(tensor.device)

        def execute_on_device(work: ShmWork, spin: bool) -> None:
            with self._sync.begin(wait_s=wait_s, spin=spin):
                collectives = self._cuda_collectives(device)
                with collectives.stream_context(ready):
                    run(collectives)
                work.sync_stream = collectives.make_waiter()

        return self._collect(self._executor.submit(execute_on_device, tensors, wait=wait))

    def _cuda_collectives(self, device: torch.device) -> CudaCollectives:
        if device not in self._devices:
            with torch.cuda.device(device):
                self._devices[device] = CudaCollectives(self._sync, device)
        return self._devices[device]

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return CombinedWork(works)

    def _collect(self, work: Work, tensors: Sequence[torch.Tensor] = ()) -> Work:
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
        if self._sync.failure is not None:
            raise self._sync.failure

    def _root(self, name: str, opts: Any) -> int:
        root = int(opts.rootRank)
        if not 0 <= root < self._size:
            raise ValueError(f"{name}: root {root} is not in this group of {self._size} workers")
        return root

    def _check_list(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"{name}: {len(tensors)} tensors for {self._size} workers; give one for each")

    def _check_peer(self, name: str, rank: int) -> None:
        self._check_open()
        if not 0 <= rank < self._size or rank == self._rank:
            raise ValueError(f"{name}: rank {rank} is not another worker of this group of {self._size}")

    def _reduction(self, opts: Any, dtype: torch.dtype) -> Reduction:
        return parse_reduction(opts.reduceOp, self._size, dtype)

    def _gather_all(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any) -> Work:
        opts = _options("AllgatherOptions", opts)
        flat_outputs = [target for targets in outputs for target in targets]

        def run(collectives: AnyCollectives) -> None:
            for targets, data in zip(outputs, inputs, strict=True):

                def move(flat: Sequence[torch.Tensor], data: torch.Tensor = data) -> None:
                    collectives.move("all_gather", to_all=as_bytes(flatten(data)), into=[as_bytes(t) for t in flat])

                write_into(collectives, targets, move)

        return self._submit(inputs[0], opts, flat_outputs, run)


def _options(kind: str, given: Any) -> Any:
    return given if given is not None else getattr(distributed_c10d, kind)()
