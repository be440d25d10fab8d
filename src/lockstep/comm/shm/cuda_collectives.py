"""Collectives on GPU tensors: the workers of one host, several of them on one GPU if they like.

Note [One does it for all]
Processes that share a GPU take turns on it, and a turn costs 0.15 ms: five times what it takes to add 25 MiB. So the
first worker on each GPU, its *leader*, does the copying and adding for all workers on it. The others only tell where
their tensors are; it maps them (cuda_ipc.py) and works on them where they lie. No staging, no turns.

Note [Streams]
A tensor may be written by kernels that are still queued when the collective is called. Then its owner's engine waits
for an event behind them; if the stream is empty it need not even be asked. The leader's event behind its kernels can
be seen by all: a caller's stream waits for it, or, if that stream is idle, the caller looks at the event for a
moment, because even an event in an idle stream would cost a turn. Nobody ever waits for a whole device, and no stream
waits for a process that may have died.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from lockstep.comm.shm.collectives import dtype_code
from lockstep.comm.shm.cuda_ipc import NOTHING, REGION_BYTES, Exporter, Importer, StandIn, is_idle
from lockstep.comm.shm.phases import CARD_BYTES, CARD_BYTES_PER_WORKER, HEADERS, NOTHING_WANTED, Call, Team
from lockstep.comm.shm.reduce_ops import Reduction
from lockstep.errors import LockstepError

# Torch's annotations of these are not complete.
Event: Any = torch.cuda.Event
Stream: Any = torch.cuda.Stream

ON_DEVICE: Final = 1  # in what a call says, so that a worker whose tensor is in host memory is found out
EVENTS: Final = 4
GLANCE_S: Final = 300e-6
UUID_BYTES: Final = 64
EVENT_BYTES: Final = 64


class Cards:
    """Where each worker tells the others about its tensors: a block in its segment."""

    def __init__(self, team: Team) -> None:
        self._team, self._start = team, team.layout.cards()
        assert UUID_BYTES + EVENTS * EVENT_BYTES <= CARD_BYTES
        assert HEADERS * 2 * REGION_BYTES <= CARD_BYTES_PER_WORKER

    def write_self(self, uuid: str, handles: Sequence[bytes]) -> None:
        data = uuid.encode().ljust(UUID_BYTES, b"\0") + b"".join(h.ljust(EVENT_BYTES, b"\0") for h in handles)
        self._team.segment.map[self._start : self._start + len(data)] = data

    def uuid(self, rank: int) -> str:
        return self._read(rank, 0, UUID_BYTES).rstrip(b"\0").decode()

    def event(self, rank: int, i: int) -> bytes:
        return self._read(rank, UUID_BYTES + i * EVENT_BYTES, EVENT_BYTES)

    def write(self, regions: Sequence[bytes]) -> None:
        """What the collective under way reads, then what it writes; `size` of each."""
        data, at = b"".join(regions), self._start + self._regions_at()
        self._team.segment.map[at : at + len(data)] = data

    def read(self, rank: int, i: int) -> bytes:
        return self._read(rank, self._regions_at() + i * REGION_BYTES, REGION_BYTES)

    def _regions_at(self) -> int:
        room = 2 * self._team.size * REGION_BYTES
        return CARD_BYTES + self._team.calls % HEADERS * room

    def _read(self, rank: int, offset: int, size: int) -> bytes:
        at = self._start + offset
        segment = self._team.segment if rank == self._team.rank else self._team.peers[rank].segment
        return segment.map[at : at + size]


class DeviceCollectives:
    """The collectives of one group on GPU memory. The same calls as Collectives, and like it called by the engine."""

    def __init__(self, team: Team, device: torch.device) -> None:
        """Collective: all workers do this at the same call."""
        self.team, self.device, self._cards = team, device, Cards(team)
        cards = self._cards
        self.stream = Stream(device, priority=-1)
        self._stream_data = (self.stream.stream_id, self.stream.device_index, self.stream.device_type)
        self._events = [Event(interprocess=True) for _ in range(EVENTS)]
        for event in self._events:
            event.record(self.stream)
        self._own_event = Event()
        self._threads = threading.local()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        cards.write_self(uuid, [event.ipc_handle() for event in self._events])
        team.await_phase(team.arrive())
        uuids = [cards.uuid(rank) for rank in range(team.size)]
        leader = [uuids.index(uuid) for uuid in uuids]  # of each rank: the first on its GPU
        self._leaders = sorted(set(leader))
        self._led = [rank for rank in range(team.size) if leader[rank] == team.rank]  # we work for these
        self._check_reach(uuids)
        self._seen = {
            rank: self._events
            if rank == team.rank
            else [Event.from_ipc_handle(device, cards.event(rank, i)) for i in range(EVENTS)]
            for rank in self._leaders
        }
        self._exporter = Exporter()
        self._importers = {rank: Importer(device) for rank in team.peers}
        self._stand_ins: list[StandIn] = []
        self._issued = 0
        self._held: deque[tuple[int, list[torch.Tensor]]] = deque()  # what collectives may still work on
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []  # (tensor, its stand-in that holds the result)
        self._settled = False  # our own stream has work behind the collective under way

    def _check_reach(self, uuids: Sequence[str]) -> None:
        here = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        for rank, uuid in enumerate(uuids):
            other = here.get(uuid)
            if other is None or (
                other != self.device.index and not torch.cuda.can_device_access_peer(self.device, other)
            ):
                raise self.team.fail(
                    LockstepError(
                        f"{self.team.who(self.team.rank)} on {self.device} cannot reach the GPU {uuid} of "
                        f"{self.team.who(rank)}; use backend='nccl' when every worker has a GPU of its own"
                    )
                )

    # ---- collectives ------------------------------------------------------------------------------------------------

    def move(
        self,
        name: str,
        *,
        same: tuple[int, ...] = (),
        to_all: torch.Tensor | None = None,
        to_each: Sequence[torch.Tensor | None] = (),
        into: Sequence[torch.Tensor | None],
    ) -> None:
        """As Collectives.move."""
        size = self.team.size
        lengths = tuple(_length(t) for t in to_each) if to_each else (_length(to_all),) * size
        expects = tuple(NOTHING_WANTED if target is None else target.numel() for target in into)
        call = Call(name, (ON_DEVICE, *same), lengths, expects)
        told = self._tell(call, list(to_each) if to_each else [to_all] * size, into)
        self.team.check_lengths(call)
        for dst in self._led:
            for src in range(size):
                target, source = told.tensor(dst, size + src), told.tensor(src, dst)
                if target is not None and source is not None and source.data_ptr() != target.data_ptr():
                    target.copy_(source)
        self._end(told)

    def barrier(self, name: str = "barrier") -> None:
        self.team.say(Call(name))
        self.team.await_phase(self.team.arrive())
        self.team.hear()

    def all_reduce(self, tensor: torch.Tensor, how: Reduction, *, root: int | None = None) -> None:
        """As Collectives.all_reduce."""
        name, size = ("all_reduce" if root is None else "reduce"), self.team.size
        same = (ON_DEVICE, how.code, dtype_code(tensor.dtype), tensor.numel(), -1 if root is None else root)
        if how.factor is not None:
            tensor = tensor if root in (None, self.team.rank) else tensor.clone()
            how.prepare(tensor)
        told = self._tell(Call(name, same), [], [tensor])
        if self._led and tensor.numel():
            rows = [told.tensor(rank, size, tensor.dtype) for rank in range(size)]
            self._reduce_rows([row for row in rows if row is not None], how, root)
        self._end(told)

    def _reduce_rows(self, rows: Sequence[torch.Tensor], how: Reduction, root: int | None) -> None:
        """Every leader does its part of the elements."""
        if len(self._leaders) > 1:
            part = self._leaders.index(self.team.rank)
            per = -(-rows[0].numel() // len(self._leaders))
            rows = [row[part * per : (part + 1) * per] for row in rows]
        if root is not None:
            how.run(rows, rows[root], free=[rank == root for rank in range(len(rows))])
            return
        how.run(rows, rows[0], free=[True] * len(rows))
        if len(rows) == 2:
            rows[1].copy_(rows[0])
        elif len(rows) > 2:
            torch._foreach_copy_(list(rows[1:]), [rows[0]] * (len(rows) - 1))  # one kernel

    def reduce_scatter(self, sections: Sequence[torch.Tensor], out: torch.Tensor, how: Reduction) -> None:
        """As Collectives.reduce_scatter."""
        size = self.team.size
        same = (ON_DEVICE, how.code, dtype_code(out.dtype), *(section.numel() for section in sections))
        if how.factor is not None:
            sections = [section.clone() for section in sections]
            for section in sections:
                how.prepare(section)
        told = self._tell(Call("reduce_scatter", same), sections, [out])
        for dst in self._led:
            target = told.tensor(dst, size, out.dtype)
            if target is not None:
                rows = [told.tensor(src, dst, out.dtype) for src in range(size)]
                how.run([row for row in rows if row is not None], target, free=[False] * size)
        self._end(told)

    # ---- there and back ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def turn(self, ready: Any) -> Iterator[None]:
        """Around everything that is done for one call. `ready`: what its tensors hold is computed behind this event."""
        index = self.device.index
        if not hasattr(self._threads, "is_known"):
            torch.cuda.mem_get_info(index)  # the driver's own calls need a context, which a new thread gets by this
            self._threads.is_known = True
        if ready is not None:
            ready.synchronize()
        self._settled = False
        device_before = torch._C._cuda_exchangeDevice(index)
        stream_before = torch._C._cuda_getCurrentStream(index)
        _set_stream(self._stream_data)
        try:
            yield
            if self._settled:
                self._own_event.record(self.stream)
        finally:
            _set_stream(stream_before)
            torch._C._cuda_exchangeDevice(device_before)

    def _tell(
        self, call: Call, sources: Sequence[torch.Tensor | None], targets: Sequence[torch.Tensor | None]
    ) -> _Told:
        """Say where our tensors are, and wait until all have."""
        team, size = self.team, self.team.size
        self._let_go()
        ours = [*sources, *([None] * (size - len(sources))), *targets]
        regions, lying = [], []
        for i, tensor in enumerate(ours):
            region, here = (NOTHING, None) if tensor is None or not tensor.numel() else self._find(i, tensor)
            regions.append(region)
            lying.append(here)
        if not (self._led and len(self._leaders) == 1) and not is_idle(self.stream.cuda_stream):
            self.stream.synchronize()  # copies that we have made for this; a lone leader's own kernels come behind them
        team.say(call)
        self._cards.write(regions)
        team.await_phase(team.arrive())
        team.hear()
        if self._led and len(self._leaders) > 1:
            for event in self._last_events():
                self.stream.wait_event(event)
        return _Told(self, lying)

    def _end(self, told: _Told) -> None:
        """Let everybody know that it has been queued."""
        team = self.team
        self._issued += 1
        if self._led:
            self._events[self._issued % EVENTS].record(self.stream)
        team.await_phase(team.arrive())
        self._held.append((self._issued, told.ours))
        if self._back:
            self.settle()
            for original, stand_in in self._back:
                original.copy_(stand_in)
            self._back = []

    def tensor_of(self, rank: int, i: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Of what another rank told in the collective under way: source `i`, or target `i - size`."""
        packed = self._cards.read(rank, i)
        return None if packed == NOTHING else self._importers[rank].tensor(packed, dtype)

    def settle(self) -> None:
        """Our own stream goes on when the result is there."""
        self._settled = True
        for event in self._last_events():
            self.stream.wait_event(event)

    def _let_go(self) -> None:
        while self._held:
            # An event that was recorded again since is done later still, so this never lets go too early.
            if not all(self._seen[rank][self._held[0][0] % EVENTS].query() for rank in self._leaders):
                return
            self._held.popleft()

    def _find(self, i: int, tensor: torch.Tensor) -> tuple[bytes, torch.Tensor]:
        """Where tensor `i` of this collective can be reached, and what lies there: itself, or its stand-in."""
        region = self._exporter.region(tensor)
        if region is not None:
            return region, tensor
        while len(self._stand_ins) <= i:
            self._stand_ins.append(StandIn(self.device))
        stand_in = self._stand_ins[i].tensor(tensor.nbytes, self._wait_for_all).view(tensor.dtype)
        self.settle()  # the last collective may still use it
        stand_in.copy_(tensor)
        if i >= self.team.size:
            self._back.append((tensor, stand_in))
        region = self._exporter.region(stand_in)
        assert region is not None
        return region, stand_in

    def _wait_for_all(self) -> None:
        self.settle()
        self.stream.synchronize()

    def _last_events(self) -> list[Any]:
        return [self._seen[rank][self._issued % EVENTS] for rank in self._leaders]

    def after(self) -> Callable[[], None]:
        """What the caller does in its own thread when it waits for the collective that was just issued."""
        events, device = self._last_events(), self.device
        if self._settled:
            events = [*events, self._own_event]

        def wait() -> None:
            end = time.perf_counter() + GLANCE_S
            for event in events:
                # Only an idle stream is worth looking for; a busy one has its turn on the GPU anyway.
                while not event.query():
                    if time.perf_counter() > end or not is_idle(torch._C._cuda_getCurrentRawStream(device.index)):
                        torch.cuda.current_stream(device).wait_event(event)
                        break

        return wait

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.stream.synchronize()
        for importer in self._importers.values():
            importer.close()
        for stand_in in self._stand_ins:
            stand_in.close(lambda: None)


def event_behind_queued(device: torch.device) -> Any:
    """An event behind what is in the current stream now; None if that is all done."""
    if is_idle(torch._C._cuda_getCurrentRawStream(device.index)):
        return None
    event = Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


class _Told:
    """The tensors of one collective: ours, and through the cards everybody's."""

    def __init__(self, on: DeviceCollectives, lying: Sequence[torch.Tensor | None]) -> None:
        self._on, self._lying = on, lying
        self.ours = [tensor for tensor in lying if tensor is not None]

    def tensor(self, rank: int, i: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor | None:
        if rank != self._on.team.rank:
            return self._on.tensor_of(rank, i, dtype)
        return self._lying[i] if i < len(self._lying) else None


def _set_stream(data: Sequence[int]) -> None:
    """What `torch.cuda.stream` does, in a twentieth of its time."""
    torch._C._cuda_setStream(stream_id=data[0], device_index=data[1], device_type=data[2])


def _length(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()
