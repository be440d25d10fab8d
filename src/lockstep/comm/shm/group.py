"""`shm` as torch.distributed sees it: a process group for the workers of one host.

Torch's names are here, and what torch allows its callers: tensors of any layout, lists, options, one or several
devices. What is done with flat memory is in `collectives`, when and by whom in `engine`.
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
from torch.distributed.distributed_c10d import Store

from lockstep.comm.flatten_tensors import first_of, only
from lockstep.comm.join_roll import Roll
from lockstep.comm.shm import sparse
from lockstep.comm.shm.collectives import Collectives
from lockstep.comm.shm.cuda_collectives import DeviceCollectives, event_behind_queued
from lockstep.comm.shm.executor import AllOf, Engine, ShmWork
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
from lockstep.comm.shm.mixed_backend import OtherBackends
from lockstep.comm.shm.phases import State, Team
from lockstep.comm.shm.point_to_point import Mail
from lockstep.comm.shm.reduce_ops import Reduction, reduction
from lockstep.comm.shm.rendezvous import meet
from lockstep.errors import PeerLostError

CLOSE_S: Final = 5.0
COALESCE_BYTES: Final = 1 << 20
KEPT_NUMEL: Final = 64

Method = TypeVar("Method", bound=Callable[..., Any])


def _on_its_device(method: Method) -> Method:
    """Hand a call over to the backend that "cpu:shm,cuda:nccl" names for its tensors' device, if that is not shm."""

    @functools.wraps(method)
    def call(self: ShmGroup, *args: Any, **options: Any) -> Any:
        if self._others.may_exist:
            other = self._others.for_device(first_of((*args, *options.values())).device)
            if other is not None:
                return getattr(other, method.__name__)(*args, **options)
        return method(self, *args, **options)

    return call  # type: ignore[return-value]


# Torch's stub files describe other overloads in every version, so to the type checker this is just any class.
_ProcessGroup: Any = dist.ProcessGroup


class ShmGroup(_ProcessGroup):  # type: ignore[misc]
    """Workers on one host that talk through shared memory."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        global_ranks: Sequence[int] = (),
        roll: Roll | None = None,
    ) -> None:
        """`global_ranks`: of the members, in order, if this is a subgroup. Errors call them by these.

        `roll`: if this worker has signed it already.
        """
        super().__init__(rank, size)
        roll = roll or Roll(store, rank, tuple(global_ranks) or range(size))
        self._store, self._name, self._pid = store, "", os.getpid()
        self._rank, self._size = rank, size
        wait_s = timeout.total_seconds()
        segment = create_segment()
        try:
            self._team = Team(rank, size, segment, wait_s, roll.names)
            section = reserve_slots(self._team)
            peers = meet(roll, segment, offer=section, deadline=time.monotonic() + wait_s)
        except BaseException as error:
            if isinstance(error, PeerLostError):
                self._team.fail(error)  # for those who have met us already
            os.close(segment.fd)
            raise
        try:
            self._team.join(peers)
        except BaseException as error:
            self._team.forget()
            if isinstance(error, PeerLostError):
                raise roll.note(error) from None  # for those who have not
            raise
        self.processes = {roll.names[r]: process for r, process in roll.processes.items()}
        section = min([section, *(peer.offer for peer in peers.values())])
        self._engine = Engine(f"shm-{rank}")
        self._host = Collectives(self._team, HostMemory(self._team, section))
        self._devices: dict[torch.device, DeviceCollectives] = {}
        self._heap = Heap(segment, heap_start(self._team, section))
        self._mail = Mail(self._team, self._heap)
        self._others = OtherBackends(self, store, timeout)
        self._sequence = 0
        self._closed = False
        self._coalescing: list[Work] | None = None
        self._kept: deque[Work] = deque(maxlen=16)

    # ---- what torch asks --------------------------------------------------------------------------------------------

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
        other = self._others.for_device(torch.device(device))
        return self if other is None else other._get_backend(device)

    def _get_backend_name(self) -> str:
        return "shm"

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Counted from the first call on all workers, so there is nothing to agree on."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._team.timeout_s = timeout.total_seconds()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self._engine.drain()

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
        """A flat tensor in group memory: collectives on it need no copies. Freed like any other."""
        if torch.device(device).type != "cpu":
            raise ValueError(f"device={str(device)!r}: shm gives memory on cpu only")
        self._check_open()
        return self._heap.tensor(size, dtype)

    # ---- reductions -------------------------------------------------------------------------------------------------

    @_on_its_device
    def allreduce(self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = None) -> Work:
        opts = _options("AllreduceOptions", opts)
        tensor = only(tensors)
        how = self._reduction(opts, tensor.dtype)
        if tensor.is_sparse:
            return self._submit(tensor, opts, [tensor], lambda on: sparse.all_reduce(on, tensor, how))
        return self._submit(tensor, opts, [tensor], lambda on: all_reduce(on, tensor, how))

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: Callable[[], float]) -> Work:
        """The sum, multiplied by `scale()` while it is in the cache. `scale` is called when its turn has come.

        So it may depend on the results of collectives that were started before this one. Host memory only.
        """
        opts = _options("AllreduceOptions", None)
        how = replace(self._reduction(opts, tensor.dtype), scale=scale)
        return self._submit(tensor, opts, [tensor], lambda on: all_reduce(on, tensor, how))

    @_on_its_device
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        opts = _options("AllreduceCoalescedOptions", opts)
        ways = [self._reduction(opts, tensor.dtype) for tensor in tensors]

        def run(on: AnyCollectives) -> None:
            alike = len({tensor.dtype for tensor in tensors}) == 1
            if alike and sum(tensor.nbytes for tensor in tensors) <= COALESCE_BYTES:
                together = torch.cat([flatten(tensor) for tensor in tensors])
                on.all_reduce(together, ways[0])
                pieces = torch.split(together, [tensor.numel() for tensor in tensors])
                for tensor, piece in zip(tensors, pieces, strict=True):
                    tensor.data.copy_(piece.view(tensor.shape))
                return
            for tensor, how in zip(tensors, ways, strict=True):
                all_reduce(on, tensor, how)

        return self._submit(tensors[0], opts, tensors, run)

    @_on_its_device
    def reduce(self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = None) -> Work:
        opts = _options("ReduceOptions", opts)
        tensor, root = only(tensors), self._root("reduce", opts)
        how = self._reduction(opts, tensor.dtype)
        return self._submit(tensor, opts, [tensor], lambda on: all_reduce(on, tensor, how, root=root))

    @_on_its_device
    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Work:
        opts = _options("ReduceScatterOptions", opts)
        out, sections = only(outputs), inputs[0]
        self._check_list("reduce_scatter", sections)
        check_alike("reduce_scatter", out, sections[self._rank])
        how = self._reduction(opts, out.dtype)

        def run(on: AnyCollectives) -> None:
            flat = [flatten(section) for section in sections]
            write_into(on, [out], functools.partial(reduce_scatter, on, flat, how))

        return self._submit(out, opts, [out], run)

    @_on_its_device
    def reduce_scatter_single(self, out: torch.Tensor, data: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([out], [data], opts)

    @_on_its_device
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
        ways = [self._reduction(opts, out.dtype) for out in outputs]

        def run(on: AnyCollectives) -> None:
            for out, data, how in zip(outputs, inputs, ways, strict=True):
                flat = flatten(data)
                sections = list(torch.split(flat, out.numel())) if out.numel() else [flat] * self._size
                write_into(on, [out], functools.partial(reduce_scatter, on, sections, how))

        return self._submit(outputs[0], opts, outputs, run)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- moving -----------------------------------------------------------------------------------------------------

    @_on_its_device
    def broadcast(self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = None) -> Work:
        opts = _options("BroadcastOptions", opts)
        tensor, root = only(tensors), self._root("broadcast", opts)

        def run(on: AnyCollectives) -> None:
            def move(flat: Sequence[torch.Tensor]) -> None:
                data = as_bytes(flat[0])
                into: list[torch.Tensor | None] = [None] * self._size
                if self._rank != root:
                    into[root] = data
                on.move("broadcast", same=(root,), to_all=data if self._rank == root else None, into=into)

            write_into(on, [tensor], move, read=True)

        return self._submit(tensor, opts, [tensor], run)

    @_on_its_device
    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        for targets, data in zip(outputs, inputs, strict=True):
            self._check_list("all_gather", targets)
            for target in targets:
                check_alike("all_gather", target, data)
        return self._gather_all([list(targets) for targets in outputs], inputs, opts)

    @_on_its_device
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        # Torch lists the outputs by rank here, and by tensor in allgather.
        by_tensor = [[targets[i] for targets in outputs] for i in range(len(inputs))]
        return self._gather_all(by_tensor, inputs, opts)

    @_on_its_device
    def all_gather_single(self, out: torch.Tensor, data: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([out], [data], opts)

    @_on_its_device
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

        def run(on: AnyCollectives) -> None:
            for out, data in zip(outputs, inputs, strict=True):

                def move(flat: Sequence[torch.Tensor], data: torch.Tensor = data) -> None:
                    whole, part = as_bytes(flat[0]), as_bytes(flatten(data))
                    length = part.numel()
                    into = [whole[r * length : (r + 1) * length] for r in range(self._size)]
                    on.move("all_gather", same=(length,), to_all=part, into=into)

                write_into(on, [out], move)

        return self._submit(outputs[0], opts, outputs, run)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_on_its_device
    def gather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        opts = _options("GatherOptions", opts)
        data, root = only(inputs), self._root("gather", opts)
        targets = list(outputs[0]) if self._rank == root else []
        if self._rank == root:
            self._check_list("gather", targets)
            for target in targets:
                check_alike("gather", target, data)

        def run(on: AnyCollectives) -> None:
            def move(flat: Sequence[torch.Tensor]) -> None:
                into = [as_bytes(t) for t in flat] if flat else [None] * self._size
                on.move("gather", same=(root,), to_all=as_bytes(flatten(data)), into=into)

            write_into(on, targets, move)

        return self._submit(data, opts, targets or [data], run)

    @_on_its_device
    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Work:
        opts = _options("ScatterOptions", opts)
        out, root = only(outputs), self._root("scatter", opts)
        sources = list(inputs[0]) if self._rank == root else []
        if self._rank == root:
            self._check_list("scatter", sources)
            for source in sources:
                check_alike("scatter", source, out)

        def run(on: AnyCollectives) -> None:
            def move(flat: Sequence[torch.Tensor]) -> None:
                into: list[torch.Tensor | None] = [None] * self._size
                into[root] = as_bytes(flat[0])
                on.move("scatter", same=(root,), to_each=[as_bytes(flatten(s)) for s in sources], into=into)

            write_into(on, [out], move)

        return self._submit(out, opts, [out], run)

    @_on_its_device
    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Work:
        opts = _options("AllToAllOptions", opts)
        self._check_list("all_to_all", outputs)
        self._check_list("all_to_all", inputs)

        def run(on: AnyCollectives) -> None:
            def move(flat: Sequence[torch.Tensor]) -> None:
                to_each = [as_bytes(flatten(data)) for data in inputs]
                on.move("all_to_all", to_each=to_each, into=[as_bytes(t) for t in flat])

            write_into(on, outputs, move)

        return self._submit(outputs[0], opts, outputs, run)

    @_on_its_device
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

        def run(on: AnyCollectives) -> None:
            def move(flat: Sequence[torch.Tensor]) -> None:
                to_each = [as_bytes(piece) for piece in torch.split(flatten(data), sizes)]
                into = [as_bytes(piece) for piece in torch.split(flat[0], out_sizes)]
                on.move("all_to_all", to_each=to_each, into=into)

            write_into(on, [out], move)

        return self._submit(out, opts, [out], run)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        opts = _options("BarrierOptions", opts)
        device = getattr(opts, "device", None)
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return self._submit(torch.empty(0), opts, [], lambda on: on.barrier())

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names who did not come; all of them, if `wait_all_ranks`. In the words of Gloo."""
        opts = _options("BarrierOptions", None)
        if timeout is not None:
            opts.timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
            if opts.timeout <= timedelta(0):
                raise RuntimeError(f"Rank {self._rank} timed out in monitoredBarrier: the timeout is {opts.timeout}")
        opts.asyncOp = False
        team = self._team
        try:
            self._submit(torch.empty(0), opts, [], lambda on: on.barrier("monitored_barrier")).wait()
        except PeerLostError as error:
            missing = [team.names[rank] for rank in team.missing()]
            if self._rank != 0:
                said = f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting "
                said += "for send/recv from rank 0"
            elif wait_all_ranks:
                said = f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier"
            else:
                wait_ms = 1000 * (opts.timeout.total_seconds() if timeout is not None else team.timeout_s)
                said = f"Rank {error.rank} failed to pass monitoredBarrier in {wait_ms:.0f} ms"
            raise PeerLostError(f"{said}: {error}", rank=error.rank, pid=error.pid) from error

    # ---- point to point ---------------------------------------------------------------------------------------------

    @_on_its_device
    def send(self, tensors: Sequence[torch.Tensor] | torch.Tensor, dst: int, tag: int = 0) -> Work:
        tensor = only(tensors)
        self._check_peer("send", dst)
        self._sequence += 1
        return self._collect(self._mail.send(as_bytes(flatten(tensor).cpu()), dst, tag))

    @_on_its_device
    def recv(self, tensors: Sequence[torch.Tensor] | torch.Tensor, src: int, tag: int = 0) -> Work:
        self._check_peer("recv", src)
        return self._receive(only(tensors), src, tag)

    @_on_its_device
    def recv_anysource(self, tensors: Sequence[torch.Tensor] | torch.Tensor, tag: int = 0) -> Work:
        return self._receive(only(tensors), None, tag)

    def _receive(self, tensor: torch.Tensor, src: int | None, tag: int) -> Work:
        self._check_open()
        self._sequence += 1
        bare = tensor.data
        if bare.is_contiguous() and bare.device.type == "cpu":
            return self._collect(self._mail.receive(as_bytes(bare.view(-1)), src, tag, wait_s=self._team.timeout_s))
        flat = torch.empty(bare.numel(), dtype=bare.dtype)
        work = self._mail.receive(as_bytes(flat), src, tag, wait_s=self._team.timeout_s)
        work.then = lambda: bare.copy_(flat.view(bare.shape))
        return self._collect(work)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Free every waiter, here and in the other workers, with an error."""
        self._end(State.ABORTED)

    def shutdown(self) -> None:
        self._end(State.LEFT)

    def _end(self, state: State) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._team.leave(state)
        self._engine.close(CLOSE_S)
        self._others.close(state is State.ABORTED)
        self._team.forget()
        self._kept.clear()
        del self._host, self._heap, self._mail
        for device in self._devices.values():
            device.close()
        self._devices = {}

    def mourn(self, error: PeerLostError) -> PeerLostError:
        """A part of this group was being formed, and lost one of its members. Returns what to raise.

        If that one is dead, this group has lost it too. The others in it are told; else, if we end now because of it,
        they would take us for the cause. And if it died because of another, then that is the one to name.
        """
        team, process = self._team, self.processes.get(-1 if error.rank is None else error.rank)
        if self._closed or team.failure is not None or process is None:
            return error
        if not process.is_dead(seen_from=self.processes[team.names[self._rank]]):
            return error
        cause = team.lost_by(team.names.index(error.rank))
        return cast(PeerLostError, team.fail(error if cause is None else cause))

    # ---- carrying out -----------------------------------------------------------------------------------------------

    def _submit(
        self, tensor: torch.Tensor, opts: Any, tensors: Sequence[torch.Tensor], run: Callable[[AnyCollectives], None]
    ) -> Work:
        self._sequence += 1
        self._check_open()
        seconds = opts.timeout.total_seconds()
        wait_s = seconds if seconds > 0 else None
        wait = not getattr(opts, "asyncOp", True) and self._coalescing is None
        if not tensor.is_cuda:

            def carry_out(work: ShmWork, spin: bool) -> None:
                with self._team.begin(wait_s=wait_s, spin=spin):
                    run(self._host)

            return self._collect(self._engine.submit(carry_out, tensors, wait=wait), tensors)
        device, ready = tensor.device, event_behind_queued(tensor.device)

        def carry_out_on_device(work: ShmWork, spin: bool) -> None:
            with self._team.begin(wait_s=wait_s, spin=spin):
                on = self._on(device)
                with on.turn(ready):
                    run(on)
                work.after = on.after()

        return self._collect(self._engine.submit(carry_out_on_device, tensors, wait=wait))

    def _on(self, device: torch.device) -> DeviceCollectives:
        if device not in self._devices:
            with torch.cuda.device(device):
                self._devices[device] = DeviceCollectives(self._team, device)
        return self._devices[device]

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return AllOf(works)

    def _collect(self, work: Work, tensors: Sequence[torch.Tensor] = ()) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        if work.is_completed():
            return work
        # When a caller gives a work to torch's C++ and drops it (torch's DDP does, in join), only the C++ half would
        # live on, and that cannot wait. Large tensors are not worth keeping for it.
        if sum(tensor.numel() for tensor in tensors) <= KEPT_NUMEL:
            self._kept.append(work)
        return work

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("this shm group belongs to the parent process; a forked child cannot use it")
        if self._team.failure is not None:
            raise self._team.failure

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
        return reduction(opts.reduceOp, self._size, dtype)

    def _gather_all(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any) -> Work:
        opts = _options("AllgatherOptions", opts)
        flat_outputs = [target for targets in outputs for target in targets]

        def run(on: AnyCollectives) -> None:
            for targets, data in zip(outputs, inputs, strict=True):

                def move(flat: Sequence[torch.Tensor], data: torch.Tensor = data) -> None:
                    on.move("all_gather", to_all=as_bytes(flatten(data)), into=[as_bytes(t) for t in flat])

                write_into(on, targets, move)

        return self._submit(inputs[0], opts, flat_outputs, run)


def _options(kind: str, given: Any) -> Any:
    return given if given is not None else getattr(distributed_c10d, kind)()
