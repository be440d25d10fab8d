"""Collectives on GPU tensors, for the workers of one host; several workers may share a GPU.

Note [One leader per GPU]
The GPU time-slices between processes that share it, and a switch costs 0.15 ms: five times what it takes to add 25 MiB.
So the first worker on each GPU, its *leader*, does the copying and adding for all workers on it. The other workers only
publish where their tensors are; the leader maps them (cuda_ipc.py) and works on them in place, without staging copies
and without switches.

Note [Streams]
A tensor may be written by kernels that are still queued when the collective is called. Then its owner's executor waits
for an event recorded behind them; an empty stream needs no event. The leader's event behind its own kernels is shared
with all workers: a caller's stream waits for it, or, if that stream is idle, the caller polls the event for a moment,
because even an event in an idle stream would cost a switch. No worker ever waits for a whole device, and no stream
waits for a process that may have died; except for weights that are queued (stream_flags.py), where the host can end it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lockstep import _torch
from lockstep.comm.shm.collectives import Parts, describe_move, reduction_key
from lockstep.comm.shm.cuda_ipc import NO_REGION, IpcExporter, IpcImporter, StagingBuffer, call_driver, is_idle
from lockstep.comm.shm.device_info import EVENTS, DeviceInfoBlock
from lockstep.comm.shm.phases import MAX_AHEAD, MAX_COALESCED, Call, GroupSync, PeerCall
from lockstep.comm.shm.reduce_ops import Reduction
from lockstep.comm.shm.stream_flags import Caller, StreamFlags
from lockstep.errors import LockstepError

# Torch's annotations of these are not complete.
Event: Any = torch.cuda.Event
Stream: Any = torch.cuda.Stream

ON_DEVICE: Final = 1  # part of a published call, so that a worker whose tensor is in host memory is detected
SPIN_S: Final = 300e-6


class CoalescedTensors:
    """Tensors that are broadcast together, many times: flat ones of one dtype, MAX_COALESCED at most.

    They are kept here, so their memory is the same each time, and is described and mapped once.
    """

    def __init__(self, tensors: Sequence[Tensor], roots: Sequence[int]) -> None:
        assert len(tensors) <= MAX_COALESCED
        self.tensors, self.roots, self.dtype = list(tensors), list(roots), tensors[0].dtype
        self.same = (*roots, *(tensor.numel() for tensor in tensors), self.dtype.itemsize)
        self.regions: bytes | None = None  # describe this worker's tensors; empty: they cannot be shared; None: unknown
        self.is_shared = False  # whether all workers can reach those of all others
        # The leader copies `sources` to `targets`. They are valid until another worker has other regions, or a mapping
        # is closed: `described` has both.
        self.targets: list[Tensor] = []
        self.sources: list[Tensor] = []
        self.described: tuple[list[bytes], list[int]] | None = None

    def copy(self) -> None:
        if self.targets:
            _torch.foreach_copy_(self.targets, self.sources)

    @staticmethod
    def lists(tensors: Sequence[Tensor], roots: Sequence[int]) -> list[CoalescedTensors]:
        """Return so many of these objects that all tensors are in one of them."""
        starts = range(0, len(tensors), MAX_COALESCED)
        return [CoalescedTensors(tensors[i : i + MAX_COALESCED], roots[i : i + MAX_COALESCED]) for i in starts]


class CudaCollectives:
    """The collectives of one group on GPU memory. Same methods as Collectives, and also called by the executor only."""

    def __init__(self, sync: GroupSync, device: torch.device) -> None:
        """Collective: all workers construct it in the same call."""
        self.sync, self.device, self._device_info = sync, device, DeviceInfoBlock(sync)
        device_info = self._device_info
        self.stream = Stream(device, priority=-1)
        self._stream_data = (self.stream.stream_id, self.stream.device_index, self.stream.device_type)
        self._events = [Event(interprocess=True) for _ in range(EVENTS)]
        for event in self._events:
            event.record(self.stream)
        self._own_event = Event()
        self._thread_state = threading.local()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._flags: StreamFlags | None = None
        with contextlib.suppress(LockstepError, AttributeError):
            self._flags = StreamFlags(sync, self.stream.cuda_stream)
        handles = [event.ipc_handle() for event in self._events]
        device_info.write_device(uuid, handles, has_flags=self._flags is not None)
        sync.await_phase(sync.arrive())
        uuids = [device_info.uuid(rank) for rank in range(sync.size)]
        self._can_queue = all(device_info.has_flags(rank) for rank in range(sync.size))
        leader = [uuids.index(uuid) for uuid in uuids]  # leader[rank]: the first rank on the same GPU
        self._leaders = sorted(set(leader))
        # Ranks that this worker works for; empty unless it is a leader.
        self._served = [rank for rank in range(sync.size) if leader[rank] == sync.rank]
        self._check_peer_access(uuids)
        self._leader_events = {
            rank: self._events
            if rank == sync.rank
            else [Event.from_ipc_handle(device, device_info.event(rank, i)) for i in range(EVENTS)]
            for rank in self._leaders
        }
        self._exporter = IpcExporter()
        self._importers = {rank: IpcImporter(device) for rank in sync.members.peers}
        self._staging_buffers: list[StagingBuffer] = []
        self._phase = 0  # of the current collective: its calls are published
        self._issued = 0
        self._is_awaited = False  # the stream of the caller waits for the current collective already
        self._in_use: deque[tuple[int, list[Tensor]]] = deque()  # (number, tensors) that a collective may still use
        self._copy_back: list[tuple[Tensor, Tensor]] = []  # (tensor, staging copy with its result)
        self._own_stream_used = False  # own stream has work queued behind the current collective

    def _check_peer_access(self, uuids: Sequence[str]) -> None:
        visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        for rank, uuid in enumerate(uuids):
            index = visible.get(uuid)
            if index == self.device.index:
                continue
            if index is None or not torch.cuda.can_device_access_peer(self.device, index):
                me, other = self.sync.members.describe(self.sync.rank), self.sync.members.describe(rank)
                text = f"{me} on {self.device} cannot reach the GPU {uuid} of {other}"
                raise self.sync.fail(
                    LockstepError(f"{text}; use backend='nccl' when every worker has a GPU of its own")
                )

    # ---- collectives ------------------------------------------------------------------------------------------------

    def move(
        self, name: str, *, into: Parts, same: tuple[int, ...] = (), to_all: Tensor | None = None, to_each: Parts = ()
    ) -> None:
        """As Collectives.move."""
        size = self.sync.size
        call = describe_move(name, (ON_DEVICE, *same), to_all, to_each, into)
        own = self._publish_tensors(call, list(to_each) if to_each else [to_all] * size, into)
        self.sync.check_lengths(call)
        for dst in self._served:
            for src in range(size):
                target, source = self._tensor(own, dst, size + src), self._tensor(own, src, dst)
                if target is not None and source is not None and source.data_ptr() != target.data_ptr():
                    target.copy_(source)
        self._finish(own)

    def broadcast_coalesced(self, coalesced: CoalescedTensors, caller: Caller | None = None) -> bool:
        """Overwrite each tensor with that of its root.

        caller  Its stream is to wait for the result; the tensors will be ready where that is now. None: they are ready,
                and `make_waiter` waits for the result

        Returns False, on all workers, without an effect, if the memory of a tensor cannot be shared. Then they are
        ready.
        """
        if caller is not None and self._can_queue:
            return self._queue_coalesced(coalesced, caller)
        if caller is not None:
            call_driver("cuStreamSynchronize", caller.stream)
        if not self._publish_coalesced(coalesced):
            return False
        if self._served:
            self._prepare_copies(coalesced)
            coalesced.copy()
        self._finish(coalesced.tensors)
        return True

    def _queue_coalesced(self, coalesced: CoalescedTensors, caller: Caller) -> bool:
        """As broadcast_coalesced; no host waits for a GPU, and from the second time on only leaders for other hosts."""
        number, flags = self.sync.calls + 1, self._flags
        assert flags is not None
        flags.begin(number, caller.stream)
        is_ahead = coalesced.is_shared and not self._served and number - self.sync.awaited_calls < MAX_AHEAD
        if not self._publish_coalesced(coalesced, waits=not is_ahead):
            call_driver("cuStreamSynchronize", caller.stream)
            return False
        if self._served:
            self._prepare_copies(coalesced)  # which may wait for this object's stream
        self._issued, self._is_awaited = self._issued + 1, True
        # Not released in the next collective: a step that allocates its gradients before that needs the memory.
        flags.watch(number, self._leaders, caller, kept=[*self._in_use, coalesced])
        self._in_use.clear()
        if self._served:
            flags.wait(number, self.stream.cuda_stream)
            coalesced.copy()
            flags.write_done(number, self.stream.cuda_stream)
            self._events[self._issued % EVENTS].record(self.stream)
        flags.wait(number, caller.stream, self._leaders)
        return True

    def _publish_coalesced(self, coalesced: CoalescedTensors, *, waits: bool = True) -> bool:
        """Publish where this worker's tensors are, and wait until all workers have. Returns whether all are shared.

        waits  False: return True at once, since that is known already
        """
        self._release_finished()
        if coalesced.regions is None:
            regions = [self._exporter.region(tensor) if tensor.numel() else NO_REGION for tensor in coalesced.tensors]
            coalesced.regions = b"" if None in regions else b"".join(region or NO_REGION for region in regions)
        call = Call("broadcast", (ON_DEVICE, *coalesced.same), offset=0 if coalesced.regions else -1)
        self._publish(call, coalesced.regions)
        if waits:
            coalesced.is_shared = all(call.offset >= 0 for call in self._await_published())
        return coalesced.is_shared

    def _prepare_copies(self, coalesced: CoalescedTensors) -> None:
        """Map the tensors, and list what this leader copies to the workers on its GPU."""
        tables = [self._device_info.read_table(rank, len(coalesced.tensors)) for rank in self._importers]
        described = tables, [importer.closed for importer in self._importers.values()]
        if coalesced.described != described:  # the first time, or a tensor has moved, or a mapping was closed
            coalesced.targets, coalesced.sources = [], []
            for dst, (i, root) in itertools.product(self._served, enumerate(coalesced.roots)):
                target, source = (self._tensor(coalesced.tensors, rank, i, coalesced.dtype) for rank in (dst, root))
                if root != dst and target is not None and source is not None:
                    coalesced.targets.append(target)
                    coalesced.sources.append(source)
            coalesced.described = tables, [importer.closed for importer in self._importers.values()]

    def all_reduce(self, tensor: Tensor, op: Reduction, *, root: int | None = None) -> None:
        """As Collectives.all_reduce."""
        name, size = ("all_reduce" if root is None else "reduce"), self.sync.size
        same = (ON_DEVICE, *reduction_key(op, tensor.dtype, tensor.numel(), -1 if root is None else root))
        tensor = op.prepare(tensor, copy=root not in (None, self.sync.rank))
        own = self._publish_tensors(Call(name, same), [], [tensor])
        if self._served and tensor.numel():
            rows = [self._tensor(own, rank, size, tensor.dtype) for rank in range(size)]
            self._reduce_rows([row for row in rows if row is not None], op, root)
        self._finish(own)

    def _reduce_rows(self, rows: Sequence[Tensor], op: Reduction, root: int | None) -> None:
        """Reduce this leader's part of the elements."""
        if len(self._leaders) > 1:
            part = self._leaders.index(self.sync.rank)
            per = -(-rows[0].numel() // len(self._leaders))
            rows = [row[part * per : (part + 1) * per] for row in rows]
        if root is not None:
            op.run(rows, rows[root], free=[rank == root for rank in range(len(rows))])
            return
        op.run(rows, rows[0], free=[True] * len(rows))
        if len(rows) == 2:
            rows[1].copy_(rows[0])
        elif len(rows) > 2:
            _torch.foreach_copy_(list(rows[1:]), [rows[0]] * (len(rows) - 1))  # one kernel

    def reduce_scatter(self, sections: Sequence[Tensor], out: Tensor, op: Reduction) -> None:
        """As Collectives.reduce_scatter."""
        size = self.sync.size
        same = (ON_DEVICE, *reduction_key(op, out.dtype, *(section.numel() for section in sections)))
        sections = [op.prepare(section, copy=True) for section in sections]
        own = self._publish_tensors(Call("reduce_scatter", same), sections, [out])
        for dst in self._served:
            target = self._tensor(own, dst, size, out.dtype)
            if target is not None:
                rows = [self._tensor(own, src, dst, out.dtype) for src in range(size)]
                op.run([row for row in rows if row is not None], target, free=[False] * size)
        self._finish(own)

    # ---- publishing tensors, and streams ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def stream_context(self, ready: Any) -> Iterator[None]:
        """Run one call on this object's stream, after `ready`, an event behind the kernels that write its tensors."""
        index = self.device.index
        if not hasattr(self._thread_state, "has_context"):
            torch.cuda.mem_get_info(index)  # gives a new thread the context that driver calls need
            self._thread_state.has_context = True
        if ready is not None:
            ready.synchronize()
        self._own_stream_used = False
        device_before = _torch.cuda_exchange_device(index)
        stream_before = _torch.cuda_current_stream(index)
        _set_stream(self._stream_data)
        try:
            yield
            if self._own_stream_used:
                self._own_event.record(self.stream)
        finally:
            _set_stream(stream_before)
            _torch.cuda_exchange_device(device_before)

    def _publish_tensors(self, call: Call, sources: Parts, targets: Parts) -> list[Tensor | None]:
        """Publish where this worker's tensors are, and wait until all workers have. Returns those tensors."""
        size = self.sync.size
        self._release_finished()
        regions, shareable = [], []
        for i, tensor in enumerate([*sources, *([None] * (size - len(sources))), *targets]):
            region, shared = (NO_REGION, None) if tensor is None or not tensor.numel() else self._shareable(i, tensor)
            regions.append(region)
            shareable.append(shared)
        if not (self._served and len(self._leaders) == 1) and not is_idle(self.stream.cuda_stream):
            self.stream.synchronize()  # staging copies; a lone leader's kernels are queued behind them anyway
        self._publish(call, b"".join(regions))
        self._await_published()
        return shareable

    def _publish(self, call: Call, regions: bytes) -> None:
        """Publish this worker's call and regions."""
        self.sync.publish_call(call)
        self._device_info.write(regions)
        self._phase = self.sync.arrive()

    def _await_published(self) -> list[PeerCall]:
        """Wait until all workers have published their calls, and return them."""
        self.sync.await_phase(self._phase)
        calls = self.sync.read_calls()
        if self._served and len(self._leaders) > 1:
            for event in self._last_events():
                self.stream.wait_event(event)
        return calls

    def _finish(self, own: Parts) -> None:
        """Signal that the kernels of this collective are queued, and wait until those of all leaders are."""
        sync = self.sync
        self._issued, self._is_awaited = self._issued + 1, False
        if self._served:
            self._events[self._issued % EVENTS].record(self.stream)
        sync.await_phase(sync.arrive())
        self._in_use.append((self._issued, [tensor for tensor in own if tensor is not None]))
        if self._copy_back:
            self.wait_for_result()
            for original, staged in self._copy_back:
                original.copy_(staged)
            self._copy_back = []

    def _tensor(self, own: Parts, rank: int, i: int, dtype: torch.dtype = torch.uint8) -> Tensor | None:
        """Tensor `i` that a rank published for this collective: its source `i`, or its target `i - size`."""
        if rank == self.sync.rank:
            return own[i] if i < len(own) else None
        packed = self._device_info.read(rank, i)
        return None if packed == NO_REGION else self._importers[rank].tensor(packed, dtype)

    def wait_for_result(self) -> None:
        """Make this object's stream wait for the result."""
        self._own_stream_used = True
        if self._is_awaited and self._flags is not None:  # the leader may not have recorded its event yet
            self._flags.wait_for_last(self.stream.cuda_stream)
            return
        for event in self._last_events():
            self.stream.wait_event(event)

    def _release_finished(self) -> None:
        while self._in_use:
            # An event that was recorded again since completes later still, so this never releases too early.
            if not all(self._leader_events[rank][self._in_use[0][0] % EVENTS].query() for rank in self._leaders):
                return
            self._in_use.popleft()

    def _shareable(self, i: int, tensor: Tensor) -> tuple[bytes, Tensor]:
        """Region by which peers reach tensor `i` of this call, and the tensor there: itself, or a staging copy."""
        region = self._exporter.region(tensor)
        if region is not None:
            return region, tensor
        while len(self._staging_buffers) <= i:
            self._staging_buffers.append(StagingBuffer(self.device))
        staged = self._staging_buffers[i].tensor(tensor.nbytes, self._synchronize).view(tensor.dtype)
        self.wait_for_result()  # the previous collective may still use the buffer
        staged.copy_(tensor)
        if i >= self.sync.size:
            self._copy_back.append((tensor, staged))
        region = self._exporter.region(staged)
        assert region is not None
        return region, staged

    def _synchronize(self) -> None:
        self.wait_for_result()
        self.stream.synchronize()

    def _last_events(self) -> list[Any]:
        return [self._leader_events[rank][self._issued % EVENTS] for rank in self._leaders]

    def make_waiter(self) -> Callable[[], None]:
        """Return the function that a caller runs in its own thread to wait for the collective that was just issued."""
        events, device = [] if self._is_awaited else self._last_events(), self.device
        if self._own_stream_used:
            events = [*events, self._own_event]

        def wait() -> None:
            end = time.perf_counter() + SPIN_S
            for event in events:
                # Polling pays off for an idle stream only; a busy one has the GPU's time slice anyway.
                while not event.query():
                    if time.perf_counter() > end or not is_idle(_torch.cuda_current_raw_stream(device.index)):
                        torch.cuda.current_stream(device).wait_event(event)
                        break

        return wait

    def finish_queued(self) -> None:
        """Wait until all that is queued behind other workers is done. Raises the error of the group if it fails."""
        if self._flags is not None:
            self._flags.finish()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.stream.synchronize()
        if self._flags is not None:
            self._flags.close()
        for importer in self._importers.values():
            importer.close()
        for staged in self._staging_buffers:
            staged.close(lambda: None)


def finish_queued(devices: Iterable[CudaCollectives]) -> None:
    for device in devices:
        device.finish_queued()


def event_behind_queued(device: torch.device) -> Any:
    """An event behind the work queued in the current stream; None if the stream is idle."""
    if is_idle(_torch.cuda_current_raw_stream(device.index)):
        return None
    event = Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _set_stream(data: Sequence[int]) -> None:
    """Like `torch.cuda.stream`, in a twentieth of its time."""
    _torch.cuda_set_stream(stream_id=data[0], device_index=data[1], device_type=data[2])
