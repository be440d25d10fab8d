"""The `hierarchy` backend of torch.distributed: one process group over several hosts.

Inside a host it uses shared memory, between hosts the network, where each worker sends its slice of the message
(Note [Columns], pipelined_collectives.py). Hosts may have different numbers of workers: then as many workers of each
host send slices as the smallest host has, and the others contribute to the sum of their host and get the result there.

All-reduce, broadcast, all-gather and reduce-scatter are implemented here, and run in the order in which they are
called. Everything else (sends, gathers, all-to-alls, ...) is left to a flat Gloo group of all workers
(fallback_group.py).

Note [Order of sums]
The order depends on the layout only: along the tree of comm/tree_order.py inside each host, then over the hosts. With
`exact` (or LOCKSTEP_EXACT=1) the hosts are added along a tree too. Where they all have the same power of two of
workers, with consecutive ranks, that is the tree over all workers, and the bits are those of a single host with all
workers. Without it, sums between hosts are in the order of Gloo's ring or of NCCL, and bfloat16 and float16 are rounded
once on each host; with it they are sent as float32.

Note [Aborting]
After a collective has failed on one worker, others still wait for data from it. So a worker that fails aborts its
subgroups, that of its host and that of its column; the workers in them fail and abort theirs, and within milliseconds
all workers have failed. Which worker was lost first they read from the store (`publish_first_loss`).
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

from lockstep import _torch
from lockstep.comm import host_groups
from lockstep.comm.abortable_group import Gloo, Nccl
from lockstep.comm.fallback_group import FallbackGroup
from lockstep.comm.flatten_tensors import check_list, check_sizes, copy_back, first_tensor, flatten, single_tensor
from lockstep.comm.host_groups import ConnectionBroken, MemberInfo, NativeSubgroup, SingleWorker, Subgroup, TreeSubgroup
from lockstep.comm.pipelined_collectives import PipelinedCollectives, StagedCollectives
from lockstep.comm.shm import ShmGroup
from lockstep.comm.shm.executor import CollectiveExecutor, ShmWork
from lockstep.comm.shm.reduce_ops import Reduction, parse_reduction
from lockstep.errors import LockstepError, PeerLostError
from lockstep.process_identity import is_dead_or_stopped
from lockstep.settings import Settings
from lockstep.world.rendezvous import call_with_timeout, publish_first_loss, read_first_loss

CLOSE_S = 5.0


@dataclass(frozen=True)
class HierarchyOptions:
    exact: bool = False  # Note [Order of sums]
    local: host_groups.LocalGroup = ShmGroup
    global_ranks: Sequence[int] = ()  # of the members, if this is a subgroup; used in errors

    @staticmethod
    def from_environment(global_ranks: Sequence[int] = ()) -> HierarchyOptions:
        return HierarchyOptions(exact=Settings.from_env(os.environ).exact, global_ranks=global_ranks)


AnyCollectives = PipelinedCollectives | StagedCollectives

Method = TypeVar("Method", bound=Callable[..., Any])


def _for_own_devices(method: Method) -> Method:
    """Pass the call to another backend if e.g. "cpu:hierarchy,cuda:nccl" assigns the tensors' device to that one."""

    @functools.wraps(method)
    def call(self: HierarchicalGroup, *args: Any, **options: Any) -> Any:
        if self._handles(first_tensor((*args, *options.values())).device.type):
            return method(self, *args, **options)
        return getattr(self.fallback, method.__name__)(*args, **options)

    return call  # type: ignore[return-value]


class HierarchicalGroup(FallbackGroup):
    """A process group over several hosts."""

    def __init__(
        self, store: _torch.Store, rank: int, size: int, timeout: timedelta, *, options: HierarchyOptions | None = None
    ) -> None:
        super().__init__(store, rank, size)
        options = options or HierarchyOptions.from_environment()
        global_ranks = list(options.global_ranks) or list(range(size))
        self._store, self._rank, self._size, self._exact = store, rank, size, options.exact
        self._rendezvous = host_groups.HostRendezvous(store, rank, size, timeout)
        self._members = self._rendezvous.exchange_members(global_ranks[rank], exact=options.exact)
        hosts, cores = [member.host for member in self._members], [member.cores for member in self._members]
        self.layout = host_groups.group_by_host(hosts, rank, cores)
        self._flat = TreeSubgroup(self._rendezvous.create_flat(Gloo), rank, size)
        local_ranks = [global_ranks[r] for r in self.layout.local_ranks]
        self._local = self._rendezvous.create_local(self.layout, options.local, local_ranks)
        self._subgroups: list[Subgroup] = [self._local, self._flat]  # to shut down
        self._on_host = self._create_collectives(Gloo)
        self._on_gpu: AnyCollectives | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._executor = CollectiveExecutor(f"hierarchy-{rank}")
        self._failure: LockstepError | None = None
        self._calls = 0
        self._handled_devices: dict[str, bool] = {}  # by device type, once it is known
        self.set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        for device_type in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            self.register_fallback(self._flat.transport.group, device_type, dist.ProcessGroup.BackendType.GLOO)

    def _create_collectives(self, network: host_groups.Network) -> PipelinedCollectives:
        across = self._rendezvous.create_column(self.layout, network)
        self._subgroups.append(across)
        return PipelinedCollectives(self.layout, local=self._local, across=across, flat=self._flat, exact=self._exact)

    def _collectives(self, device: torch.device) -> AnyCollectives:
        if device.type == "cpu":
            return self._on_host
        if self._on_gpu is None:
            direct = all(member.nccl for member in self._members) and self._rendezvous.all_share_memory(self.layout)
            self._on_gpu = self._create_collectives(Nccl) if direct else StagedCollectives(self._on_host)
        return self._on_gpu

    def _handles(self, device_type: str) -> bool:
        """Whether this backend handles tensors of this device type. Torch knows only after it has created the group."""
        if device_type not in self._handled_devices:
            config = _torch.distributed_state().pg_backend_config.get(self)
            if config is None:
                return True  # torch did not create this group, or is about to
            name = _torch.BackendConfig(_torch.Backend(config)).get_device_backend_map().get(device_type, "hierarchy")
            self._handled_devices[device_type] = name == "hierarchy"
            if name == "nccl":
                nccl = self._rendezvous.create_flat(Nccl)
                self.register_fallback(nccl.group, device_type, dist.ProcessGroup.BackendType.NCCL)
        return self._handled_devices[device_type]

    # ---- reductions -------------------------------------------------------------------------------------------------

    @_for_own_devices
    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> dist.Work:
        opts, tensor = opts or _torch.AllreduceOptions(), single_tensor(tensors)
        if tensor.is_sparse:
            work: dist.Work = self.fallback.allreduce([tensor], opts)
            return work
        reduction = self._reduction(opts, tensor)
        return self._submit("all_reduce", [tensor], opts, lambda: self._all_reduce(tensor, reduction))

    @_for_own_devices
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or _torch.AllreduceCoalescedOptions()
        reductions = [self._reduction(opts, tensor) for tensor in tensors]

        def job() -> None:
            if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
                for tensor, reduction in zip(tensors, reductions, strict=True):
                    self._all_reduce(tensor, reduction)
                return
            together = torch.cat([flatten(tensor) for tensor in tensors])
            self._all_reduce(together, reductions[0])
            at = 0
            for tensor in tensors:
                copy_back(together[at : (at := at + flatten(tensor).numel())], tensor)

        return self._submit("all_reduce", tensors, opts, job)

    @_for_own_devices
    def reduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> dist.Work:
        """Run an all-reduce, which sends hardly more; only the root keeps the result."""
        opts, tensor = opts or _torch.ReduceOptions(), single_tensor(tensors)
        reduction, root = self._reduction(opts, tensor), opts.rootRank

        def job() -> None:
            copy = flatten(tensor).clone()
            self._all_reduce(copy, reduction)
            if self._rank == root:
                copy_back(copy, tensor)

        return self._submit("reduce", [tensor], opts, job)

    def _write(self, tensor: Tensor, collective: Callable[[AnyCollectives, Tensor], None]) -> None:
        """Run a collective that writes this tensor; it gets the tensor as flat memory."""
        flat = flatten(tensor)
        if flat.numel():
            collective(self._collectives(flat.device), flat)
            copy_back(flat, tensor)

    def _all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        self._write(tensor, lambda collectives, flat: collectives.all_reduce(flat, reduction))

    @_for_own_devices
    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or _torch.ReduceScatterOptions()
        reductions = [self._reduction(opts, tensor) for tensor in inputs]
        for output, data in zip(outputs, inputs, strict=True):
            check_sizes("reduce_scatter", whole=data, part=output, size=self._size)

        def job() -> None:
            for output, data, reduction in zip(outputs, inputs, reductions, strict=True):
                self._reduce_scatter(output, flatten(data), reduction)

        return self._submit("reduce_scatter", outputs, opts, job)

    @_for_own_devices
    def _reduce_scatter_base(self, output: Tensor, data: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [data], opts)

    @_for_own_devices
    def reduce_scatter(
        self, outputs: Sequence[Tensor] | Tensor, inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        opts, output, rows = opts or _torch.ReduceScatterOptions(), single_tensor(outputs), list(inputs[0])
        reduction = self._reduction(opts, output)
        check_list("reduce_scatter", rows, like=output, size=self._size)

        def job() -> None:
            self._reduce_scatter(output, torch.cat([flatten(row) for row in rows]), reduction)

        return self._submit("reduce_scatter", [output], opts, job)

    def _reduce_scatter(self, output: Tensor, whole: Tensor, reduction: Reduction) -> None:
        self._write(output, lambda collectives, flat: collectives.reduce_scatter(flat, whole, reduction))

    def add_by_tree(self) -> bool:
        """Add along the tree over all workers from now on. All workers call it, with no collective in progress.

        Returns False, and changes nothing, where the layout does not allow it (see Note [Order of sums]), or where each
        host has one worker, so that nothing is gained.
        """
        counts = {len(ranks) for ranks in self.layout.hosts}
        in_order = [rank for ranks in self.layout.hosts for rank in ranks] == list(range(self._size))
        if len(counts) > 1 or not in_order or (count := counts.pop()) == 1 or count & (count - 1):
            return False
        self._exact = self._on_host.exact = True
        if isinstance(self._on_gpu, PipelinedCollectives):
            self._on_gpu.exact = True
        return True

    # ---- jobs of several collectives --------------------------------------------------------------------------------

    def subgroups(self, device: torch.device) -> tuple[Subgroup, Subgroup, torch.device, Sequence[Sequence[int]]]:
        """Return how sums of tensors of `device` can be exchanged, for jobs of `run_in_order`.

        Returns the subgroup inside the host, the one between hosts, the device on which they exchange tensors, and the
        ranks on each host. If hosts have different numbers of workers, each worker counts as a host of its own.
        """
        collectives = self._collectives(device)
        if not self.layout.is_even:
            return SingleWorker(), self._flat, torch.device("cpu"), [[rank] for rank in range(self._size)]
        if isinstance(collectives, StagedCollectives):
            collectives, device = self._on_host, torch.device("cpu")
        return collectives.local, collectives.across, device, self.layout.hosts

    def run_in_order(self, name: str, tensors: Sequence[Tensor], job: Callable[[], None]) -> None:
        """Run a job that uses these tensors and the subgroups after everything that was called before; wait for it."""
        opts = _torch.AllreduceOptions()
        opts.asyncOp = False
        work = self._submit(name, tensors, opts, job)
        if work is not None:
            work.wait()

    # ---- broadcast and all-gather -----------------------------------------------------------------------------------

    @_for_own_devices
    def broadcast(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> dist.Work:
        opts, tensor = opts or _torch.BroadcastOptions(), single_tensor(tensors)
        root = opts.rootRank

        def run(collectives: AnyCollectives, flat: Tensor) -> None:
            collectives.broadcast(flat.view(torch.uint8), root)

        return self._submit("broadcast", [tensor], opts, lambda: self._write(tensor, run))

    @_for_own_devices
    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, data in zip(outputs, inputs, strict=True):
            check_sizes("all_gather", whole=output, part=data, size=self._size)

        def job() -> None:
            for output, data in zip(outputs, inputs, strict=True):
                flat = flatten(output)
                if flat.numel():
                    self._collectives(flat.device).all_gather(flat, flatten(data))
                    copy_back(flat, output)

        return self._submit("all_gather", outputs, opts or _torch.AllgatherOptions(), job)

    @_for_own_devices
    def _allgather_base(self, output: Tensor, data: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [data], opts)

    @_for_own_devices
    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor] | Tensor, opts: Any = None
    ) -> dist.Work:
        data, rows = single_tensor(inputs), list(outputs[0])
        check_list("all_gather", rows, like=data, size=self._size)

        def job() -> None:
            flat = flatten(data)
            if flat.numel():
                whole = flat.new_empty(self._size * flat.numel())
                self._collectives(flat.device).all_gather(whole, flat)
                for row, values in zip(rows, whole.view(self._size, -1), strict=True):
                    copy_back(values, row)

        return self._submit("all_gather", rows, opts or _torch.AllgatherOptions(), job)

    # Names of these methods since torch 2.13.
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def barrier(self, opts: Any = None) -> dist.Work:
        """Complete after everything that was called before it."""
        opts = opts or _torch.BarrierOptions()
        return self._submit("barrier", [], opts, lambda: self._flat.barrier(opts)())

    # ---- queries by torch -------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "hierarchy"

    _get_backend_name = getBackendName

    def get_group_store(self) -> _torch.Store:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._calls + int(self._flat.transport.group._get_sequence_number_for_group())

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return isinstance(self._local, NativeSubgroup) and bool(self._local.group.supports_tensor_alloc(device))

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory that the other workers of this host can read without a copy."""
        if not (isinstance(self._local, NativeSubgroup) and self.supports_tensor_alloc(device)):
            raise ValueError(f"device={str(device)!r}: there is no memory there that the workers of this host share")
        tensor: Tensor = self._local.group.allocate_tensor(size, dtype=dtype, device=device)
        return tensor

    # ---- abort and shutdown -----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Make every wait, here and on the other workers, fail."""
        text = f"{self._members[self._rank]} aborted the group; form a new one"
        self._abort_subgroups(LockstepError(text))
        self._publish_loss(self._members[self._rank], text)

    def _publish_loss(self, lost: MemberInfo, text: str) -> PeerLostError:
        return publish_first_loss(self._store, PeerLostError(text, rank=lost.rank, pid=lost.pid))

    def shutdown(self) -> None:
        self._executor.close(CLOSE_S)
        for subgroup in self._subgroups:
            subgroup.shutdown()

    def _abort_subgroups(self, error: LockstepError) -> LockstepError:
        """See Note [Aborting]. Returns the error that the group failed with first."""
        if self._failure is None:
            self._failure = error
            for subgroup in self._subgroups:
                with suppress(Exception):
                    subgroup.abort()
        return self._failure

    # ---- execution --------------------------------------------------------------------------------------------------

    def _submit(self, name: str, tensors: Sequence[Tensor], opts: Any, job: Callable[[], object]) -> dist.Work:
        self._calls += 1
        where = f"{name} #{self._calls}"
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        ready: Any = None if device is None else torch.cuda.current_stream(device).record_event()

        def run(work: ShmWork, spin: bool) -> None:
            if device is None:
                self._run(where, job)
                return
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = self._streams[device]
            for tensor in tensors:
                tensor.record_stream(stream)  # its memory must not be reused before the job is done, or has failed
            with torch.cuda.device(device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                self._run(where, job)
                done = stream.record_event()
            work.sync_stream = lambda: torch.cuda.current_stream(device).wait_event(done)

        return self._executor.submit(run, tensors, wait=not opts.asyncOp)

    def _run(self, where: str, job: Callable[[], object]) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            job()
        except Exception as error:
            reason = self._abort_subgroups(self._failure or self._explain(where, error))
            raise reason from (None if reason is error else error)

    def _explain(self, where: str, error: Exception) -> LockstepError:
        """Return an error that names the cause as far as it is known, and publish it if this worker is the first."""
        mine = self._members[self._rank]
        if not isinstance(error, (PeerLostError, ConnectionBroken)):
            text = f"{mine} failed in {where}, and the group with it: {error}"
            self._publish_loss(mine, text)
            return error if isinstance(error, LockstepError) else LockstepError(text)
        if isinstance(error, PeerLostError):
            if error.rank is not None and error.pid is not None and is_dead_or_stopped(error.pid):
                text = f"{error} (seen by {mine} in {where})"
                return publish_first_loss(self._store, PeerLostError(text, rank=error.rank, pid=error.pid))
            text = f"{error}; who was lost first cannot be told from here ({mine}, in {where})"
            return read_first_loss(self._store) or PeerLostError(text)
        # The disconnected peers may be lost, or may have aborted because of another worker. Check at once which ones
        # have disconnected, before others do so as a consequence.
        disconnected = call_with_timeout(error.subgroup.disconnected_ranks)
        if (first := read_first_loss(self._store)) is not None:
            return first
        if error.subgroup is self._local:
            members: Sequence[int] = self.layout.local_ranks
        else:
            members = range(self._size) if error.subgroup is self._flat else self.layout.column
        suspects = disconnected or [rank for rank in range(len(members)) if rank != error.subgroup.rank]
        lost = [self._members[members[rank]] for rank in suspects]
        text = (
            f"{mine} lost the connection to {' or '.join(map(str, lost))} in {where}: it is gone or hangs, or the "
            f"network is; its own output says why. The connection said: {error}"
        )
        return self._publish_loss(lost[0], text) if len(lost) == 1 else PeerLostError(text)

    def _reduction(self, opts: Any, tensor: Tensor) -> Reduction:
        reduction = parse_reduction(opts.reduceOp, self._size, tensor.dtype)
        reduction.check(tensor.dtype)
        return reduction
