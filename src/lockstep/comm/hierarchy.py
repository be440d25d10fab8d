"""`hierarchy` as torch.distributed sees it: one process group over several hosts.

Inside a host it uses shared memory, between hosts the network, where each worker carries its slice of the message
(Note [Columns], columns.py). Hosts may have different numbers of workers: then as many workers of each host carry
slices as the smallest host has, and the others add to the sum of their host and get the result there.

All-reduce, broadcast, all-gather and reduce-scatter go this way, in the order in which they are called. Everything else
(sends, gathers, all-to-alls, ...) is left to torch, which finds a flat Gloo group of all workers registered here.

Note [Order of sums]
It is a function of the layout: along the tree of comm/tree_order.py inside each host, then over the hosts. With
`exact` (or LOCKSTEP_EXACT=1) the hosts are added along a tree too. Where they all have the same power of two of
workers, with consecutive ranks, that is the tree over all workers, and the bits are those of one host that has them
all. Without it, what goes between hosts is added in the order of Gloo's ring or of NCCL, and bfloat16 and float16 are
rounded once on each host; with it they are sent as float32.

Note [Breaking]
A collective that fails leaves others waiting for what we shall not send. So whoever fails breaks its connections, to
its host and to its column; that frees those workers, they fail and break theirs, and in an instant everybody knows.
Who was the first to go, they read at the store (blame.py).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
    Store,
)
from torch.distributed.distributed_c10d import Backend, BackendConfig, _world

from lockstep.comm.abortable_group import Gloo, Link, Nccl
from lockstep.comm.flatten_tensors import check_list, check_sizes, elements, first_of, only, put
from lockstep.comm.host_groups import LinkBroken, Native, Part, Tree
from lockstep.comm.host_layout import lay_out
from lockstep.comm.host_rendezvous import Formation, LocalGroup, Network, make_card
from lockstep.comm.loss_board import Board, Note, is_gone, soon
from lockstep.comm.pipeline import Columns, Staged
from lockstep.comm.shm import ShmGroup
from lockstep.comm.shm.executor import Engine, ShmWork
from lockstep.comm.shm.reduce_ops import Reduction, reduction
from lockstep.errors import LockstepError, PeerLostError

CLOSE_S = 5.0


@dataclass(frozen=True)
class Options:
    exact: bool = False  # Note [Order of sums]
    local: LocalGroup = ShmGroup
    global_ranks: Sequence[int] = ()  # of the members, if this is a subgroup: errors call them by these

    @staticmethod
    def from_environment(global_ranks: Sequence[int] = ()) -> Options:
        return Options(exact=os.environ.get("LOCKSTEP_EXACT", "").strip() not in ("", "0"), global_ranks=global_ranks)


# Torch's stub files describe other overloads in every version, so to the type checker this is just any class.
_ProcessGroup: Any = dist.ProcessGroup


Method = TypeVar("Method", bound=Callable[..., Any])


def _unless_others(method: Method) -> Method:
    """If "cpu:hierarchy,cuda:nccl" gives the device of the tensors to another backend, hand the call over to it."""

    @functools.wraps(method)
    def call(self: HierarchicalGroup, *args: Any, **options: Any) -> Any:
        if self._has(first_of((*args, *options.values())).device.type):
            return method(self, *args, **options)
        return getattr(self._plain, method.__name__)(*args, **options)

    return call  # type: ignore[return-value]


class HierarchicalGroup(_ProcessGroup):  # type: ignore[misc]
    """Workers on several hosts."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, *, options: Options | None = None
    ) -> None:
        super().__init__(rank, size)
        options = options or Options.from_environment()
        names = list(options.global_ranks) or list(range(size))
        self._store, self._rank, self._size = store, rank, size
        self._exact = options.exact
        self._formation = Formation(store, rank, size, timeout)
        self._cards = self._formation.swap_cards(make_card(names[rank], exact=options.exact))
        self.layout = lay_out([card.host for card in self._cards], rank)
        self._flat = Tree(self._formation.flat(Gloo), rank, size)
        self._local = self._formation.local(self.layout, options.local, [names[r] for r in self.layout.neighbours])
        self._parts: list[Part] = [self._local, self._flat]  # to be released
        self._on_host = self._make_columns(Gloo)
        self._on_gpu: Columns | Staged | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._engine = Engine(f"hierarchy-{rank}")
        self._board = Board(store)
        self._failure: LockstepError | None = None
        self._calls = 0
        self._has_kind: dict[str, bool] = {}  # of device, once it is known
        # What we do not carry out ourselves, torch does: it finds these backends in us. `_plain` has them too, and has
        # the methods that we replace.
        self._plain: Any = dist.ProcessGroup(store, rank, size)
        for group in (self, self._plain):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            self._leave_to(self._flat.link, kind, dist.ProcessGroup.BackendType.GLOO)

    def _make_columns(self, network: Network) -> Columns:
        across = self._formation.across(self.layout, network)
        self._parts.append(across)
        return Columns(self.layout, local=self._local, across=across, flat=self._flat, exact=self._exact)

    def _columns(self, device: torch.device) -> Columns | Staged:
        if device.type == "cpu":
            return self._on_host
        if self._on_gpu is None:
            direct = all(card.nccl for card in self._cards) and self._formation.share_memory(self.layout)
            self._on_gpu = self._make_columns(Nccl) if direct else Staged(self._on_host)
        return self._on_gpu

    def _has(self, kind: str) -> bool:
        """Whether tensors on this kind of device are ours. Torch says so only after it has formed the group."""
        if kind not in self._has_kind:
            config = _world.pg_backend_config.get(self)
            if config is None:
                return True  # it did not form this group, or is about to
            name = BackendConfig(Backend(config)).get_device_backend_map().get(kind, "hierarchy")
            self._has_kind[kind] = name == "hierarchy"
            if name == "nccl":
                self._leave_to(self._formation.flat(Nccl), kind, dist.ProcessGroup.BackendType.NCCL)
        return self._has_kind[kind]

    def _leave_to(self, link: Link, kind: str, sort: Any) -> None:
        for group in (self, self._plain):
            group._register_backend(torch.device(kind), sort, link.group)

    # ---- reductions -------------------------------------------------------------------------------------------------

    @_unless_others
    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> dist.Work:
        opts, tensor = opts or AllreduceOptions(), only(tensors)
        if tensor.is_sparse:
            work: dist.Work = self._plain.allreduce([tensor], opts)
            return work
        how = self._reduction(opts, tensor)
        return self._submit("all_reduce", [tensor], opts, lambda: self._all_reduce(tensor, how))

    @_unless_others
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or AllreduceCoalescedOptions()
        ways = [self._reduction(opts, tensor) for tensor in tensors]

        def job() -> None:
            if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
                for tensor, how in zip(tensors, ways, strict=True):
                    self._all_reduce(tensor, how)
                return
            together = torch.cat([elements(tensor) for tensor in tensors])
            self._all_reduce(together, ways[0])
            at = 0
            for tensor in tensors:
                put(together[at : (at := at + elements(tensor).numel())], tensor)

        return self._submit("all_reduce", tensors, opts, job)

    @_unless_others
    def reduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> dist.Work:
        """Sent to everybody, as most of it has to be anyway; only the root keeps it."""
        opts, tensor = opts or ReduceOptions(), only(tensors)
        how, root = self._reduction(opts, tensor), opts.rootRank

        def job() -> None:
            copy = elements(tensor).clone()
            self._all_reduce(copy, how)
            if self._rank == root:
                put(copy, tensor)

        return self._submit("reduce", [tensor], opts, job)

    def _all_reduce(self, tensor: Tensor, how: Reduction) -> None:
        flat = elements(tensor)
        if flat.numel():
            self._columns(flat.device).all_reduce(flat, how)
            put(flat, tensor)

    @_unless_others
    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or ReduceScatterOptions()
        ways = [self._reduction(opts, tensor) for tensor in inputs]
        for output, data in zip(outputs, inputs, strict=True):
            check_sizes("reduce_scatter", whole=data, part=output, size=self._size)

        def job() -> None:
            for output, data, how in zip(outputs, inputs, ways, strict=True):
                self._reduce_scatter(output, elements(data), how)

        return self._submit("reduce_scatter", outputs, opts, job)

    @_unless_others
    def _reduce_scatter_base(self, output: Tensor, data: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [data], opts)

    @_unless_others
    def reduce_scatter(
        self, outputs: Sequence[Tensor] | Tensor, inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        opts, output, rows = opts or ReduceScatterOptions(), only(outputs), list(inputs[0])
        how = self._reduction(opts, output)
        check_list("reduce_scatter", rows, like=output, size=self._size)

        def job() -> None:
            self._reduce_scatter(output, torch.cat([elements(row) for row in rows]), how)

        return self._submit("reduce_scatter", [output], opts, job)

    def _reduce_scatter(self, output: Tensor, whole: Tensor, how: Reduction) -> None:
        flat = elements(output)
        if flat.numel():
            self._columns(flat.device).reduce_scatter(flat, whole, how)
            put(flat, output)

    # ---- moving -----------------------------------------------------------------------------------------------------

    @_unless_others
    def broadcast(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> dist.Work:
        opts, tensor = opts or BroadcastOptions(), only(tensors)
        root = opts.rootRank

        def job() -> None:
            flat = elements(tensor)
            if flat.numel():
                self._columns(flat.device).broadcast(flat.view(torch.uint8), root)
                put(flat, tensor)

        return self._submit("broadcast", [tensor], opts, job)

    @_unless_others
    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, data in zip(outputs, inputs, strict=True):
            check_sizes("all_gather", whole=output, part=data, size=self._size)

        def job() -> None:
            for output, data in zip(outputs, inputs, strict=True):
                flat = elements(output)
                if flat.numel():
                    self._columns(flat.device).all_gather(flat, elements(data))
                    put(flat, output)

        return self._submit("all_gather", outputs, opts or AllgatherOptions(), job)

    @_unless_others
    def _allgather_base(self, output: Tensor, data: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [data], opts)

    @_unless_others
    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor] | Tensor, opts: Any = None
    ) -> dist.Work:
        data, rows = only(inputs), list(outputs[0])
        check_list("all_gather", rows, like=data, size=self._size)

        def job() -> None:
            flat = elements(data)
            if flat.numel():
                whole = flat.new_empty(self._size * flat.numel())
                self._columns(flat.device).all_gather(whole, flat)
                for row, values in zip(rows, whole.view(self._size, -1), strict=True):
                    put(values, row)

        return self._submit("all_gather", rows, opts or AllgatherOptions(), job)

    # Torch has called them by other names since 2.13.
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def barrier(self, opts: Any = None) -> dist.Work:
        """After everything that was called before it."""
        opts = opts or BarrierOptions()
        return self._submit("barrier", [], opts, lambda: self._flat.barrier(opts)())

    # ---- what torch asks --------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "hierarchy"

    def _get_backend_name(self) -> str:
        return "hierarchy"

    def get_group_store(self) -> Store:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._calls + int(self._flat.link.group._get_sequence_number_for_group())

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return isinstance(self._local, Native) and bool(self._local.group.supports_tensor_alloc(device))

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that the other workers of this host can read where it is."""
        if not (isinstance(self._local, Native) and self.supports_tensor_alloc(device)):
            raise ValueError(f"device={str(device)!r}: there is no memory there that the workers of this host share")
        tensor: Tensor = self._local.group.allocate_tensor(size, dtype=dtype, device=device)
        return tensor

    # ---- ends -------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Free every waiter, here and in the other workers, with an error."""
        mine = self._cards[self._rank]
        text = f"{mine} aborted the group; form a new one"
        self._break(LockstepError(text))
        self._board.leave(Note(mine.rank, mine.pid, text))

    def shutdown(self) -> None:
        self._engine.close(CLOSE_S)
        for part in self._parts:
            part.shutdown()

    def _break(self, error: LockstepError) -> LockstepError:
        """Note [Breaking]. Returns why the group broke in the first place."""
        if self._failure is None:
            self._failure = error
            for part in self._parts:
                with suppress(Exception):
                    part.abort()
        return self._failure

    # ---- carrying out -----------------------------------------------------------------------------------------------

    def _submit(self, name: str, tensors: Sequence[Tensor], opts: Any, job: Callable[[], object]) -> dist.Work:
        self._calls += 1
        where = f"{name} #{self._calls}"
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is None:

            def run(work: ShmWork, spin: bool) -> None:
                self._run(where, job)

            return self._engine.submit(run, tensors, wait=not opts.asyncOp)
        ready = torch.cuda.current_stream(device).record_event()

        def run_on_gpu(work: ShmWork, spin: bool) -> None:
            stream = self._stream(device)
            with torch.cuda.device(device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                self._run(where, job)
                done = stream.record_event()
            for tensor in tensors:
                tensor.record_stream(stream)  # its memory is not to be used again before we are done with it
            work.after = lambda: torch.cuda.current_stream(device).wait_event(done)

        return self._engine.submit(run_on_gpu, tensors, wait=not opts.asyncOp)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _run(self, where: str, job: Callable[[], object]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            job()
        except Exception as error:
            reason = self._break(self._failure or self._explain(where, error))
            raise reason from (None if reason is error else error)

    def _explain(self, where: str, error: Exception) -> LockstepError:
        """What happened, as far as anybody knows; those who know more than others leave a note for them."""
        mine = self._cards[self._rank]
        if not isinstance(error, (PeerLostError, LinkBroken)):
            text = f"{mine} failed in {where}, and the group with it: {error}"
            self._board.leave(Note(mine.rank, mine.pid, text))
            return error if isinstance(error, LockstepError) else LockstepError(text)
        if isinstance(error, PeerLostError) and error.rank is not None and error.pid is not None and is_gone(error.pid):
            return self._board.leave(Note(error.rank, error.pid, f"{error} (seen by {mine} in {where})")).error()
        # Those we were connected to may be gone, or may have given up because of somebody else. Who has hung up must be
        # seen at once, before others who have lost the same one do so too.
        hung_up = soon(error.part.hung_up) if isinstance(error, LinkBroken) else None
        note = self._board.read()
        if note is not None:
            return note.error()
        if isinstance(error, PeerLostError):
            return PeerLostError(f"{error}; who was lost first cannot be told from here ({mine}, in {where})")
        members = self._members(error.part)
        suspects = hung_up or [rank for rank in range(len(members)) if rank != error.part.rank]
        lost = [self._cards[members[rank]] for rank in suspects]
        text = (
            f"{mine} lost the connection to {' or '.join(map(str, lost))} in {where}: it is gone or hangs, or the "
            f"network is; its own output says why. The connection said: {error}"
        )
        return (
            self._board.leave(Note(lost[0].rank, lost[0].pid, text)).error() if len(lost) == 1 else PeerLostError(text)
        )

    def _members(self, part: Part) -> Sequence[int]:
        if part is self._local:
            return self.layout.neighbours
        return range(self._size) if part is self._flat else self.layout.column

    def _reduction(self, opts: Any, tensor: Tensor) -> Reduction:
        how = reduction(opts.reduceOp, self._size, tensor.dtype)
        how.check(tensor.dtype)
        return how


def create(made: Any, options: Any) -> dist.ProcessGroup:
    """For torch's `Backend.register_backend(..., extended_api=True)`."""
    wishes = Options.from_environment(made.global_ranks_in_group)
    group: dist.ProcessGroup = HierarchicalGroup(
        made.store, made.group_rank, made.group_size, made.timeout, options=wishes
    )
    return group
