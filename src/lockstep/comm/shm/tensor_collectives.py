"""Collectives on tensors of any layout, made of those on flat contiguous memory, the only form that those accept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from lockstep import _torch
from lockstep.comm.shm.collectives import Collectives
from lockstep.comm.shm.cuda_collectives import CoalescedTensors, CudaCollectives
from lockstep.comm.shm.reduce_ops import RedOpType, Reduction
from lockstep.comm.shm.stream_flags import Caller

COALESCE_BYTES: Final = 1 << 20
PACKED_BYTES: Final = 32 << 20
WAITS: Final = _torch.BarrierOptions()  # of a caller that waits at once
WAITS.asyncOp = False

AnyCollectives = Collectives | CudaCollectives
Tensors = Sequence[Tensor]
Splits = Sequence[int] | None  # rows for each rank; None: equal parts


def flatten(tensor: Tensor) -> Tensor:
    """The elements in order: the tensor's own memory if it is contiguous, else a copy. Keeps the dtype, complex too."""
    # `.data`, not `.detach()`: writes of a collective are no part of the autograd graph, nor of its version counters.
    # Not reshape(-1), which returns a one-dimensional tensor with gaps unchanged.
    return tensor.data.contiguous().view(-1)


def as_bytes(flat: Tensor) -> Tensor:
    if flat.stride(0) != 1:  # at most one element; torch calls it contiguous with any stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def _write_into(
    collectives: AnyCollectives, targets: Tensors, write: Callable[[list[Tensor]], None], *, read: bool = False
) -> None:
    """Call `write` with each target's flat memory; one that is not contiguous gets a buffer that is copied back.

    `read`: `write` also reads the targets' contents.
    """
    flats, back = [], []
    for target in targets:
        bare = target.data
        if bare.is_contiguous():
            flats.append(bare.view(-1))
            continue
        flat = flatten(bare) if read else torch.empty(bare.numel(), dtype=bare.dtype, device=bare.device)
        flats.append(flat)
        back.append((bare, flat))
    write(flats)
    if back:
        collectives.wait_for_result()
    for bare, flat in back:
        bare.copy_(flat.view(bare.shape))


def for_each(collectives: AnyCollectives, run: Callable[..., None], *lists: Sequence[object]) -> None:
    """Run a collective on the first elements of the lists, then on the second ones, and so on."""
    for args in zip(*lists, strict=True):
        run(collectives, *args)


# ---- reductions -----------------------------------------------------------------------------------------------------


def all_reduce(collectives: AnyCollectives, tensor: Tensor, op: Reduction, root: int | None = None) -> None:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.data)
    if tensor.is_contiguous():
        collectives.all_reduce(tensor.data.view(-1), op, root=root)
        return
    _write_into(collectives, [tensor], lambda flat: collectives.all_reduce(flat[0], op, root=root), read=True)


def all_reduce_coalesced(collectives: AnyCollectives, tensors: Tensors, ops: Sequence[Reduction]) -> None:
    alike = len({tensor.dtype for tensor in tensors}) == 1
    if alike and sum(tensor.nbytes for tensor in tensors) <= COALESCE_BYTES:
        together = torch.cat([flatten(tensor) for tensor in tensors])
        collectives.all_reduce(together, ops[0])
        pieces = torch.split(together, [tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.data.copy_(piece.view(tensor.shape))
        return
    for_each(collectives, all_reduce, tensors, ops)


def all_reduce_sparse(collectives: AnyCollectives, tensor: Tensor, op: Reduction) -> None:
    """Replace `tensor` (COO) by the sum over all workers: each gathers those of all workers and adds them up.

    Raises RuntimeError for other reductions.
    """
    if op.kind != RedOpType.SUM:
        raise RuntimeError(f"a sparse tensor can be summed, not reduced by {op.kind.name}")
    size = collectives.sync.size
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    counts = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(size)]
    all_gather(collectives, counts, torch.tensor([values.shape[0]], device=tensor.device))
    collectives.wait_for_result()
    all_indices = [indices.new_empty(indices.shape[0], int(count)) for count in counts]
    all_values = [values.new_empty(int(count), *values.shape[1:]) for count in counts]
    all_gather(collectives, all_indices, indices)
    all_gather(collectives, all_values, values)
    collectives.wait_for_result()
    # Concatenated in rank order, and coalesce() adds in that order too: the same bits on every worker.
    indices, values = torch.cat(all_indices, 1), torch.cat(all_values)
    total = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False).coalesce()
    # The tensor gets new indices and values, which must be inference tensors iff it is one. `.data` would be another
    # tensor.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(total)


def reduce_scatter(collectives: AnyCollectives, out: Tensor, sections: Tensors, op: Reduction) -> None:
    """Reduce all workers' `sections[r]`, where r is this worker's rank, into `out`."""
    _reduce_scatter_flat(collectives, out, [flatten(section) for section in sections], op)


def reduce_scatter_single(collectives: AnyCollectives, out: Tensor, data: Tensor, op: Reduction) -> None:
    """As reduce_scatter, with equal parts of `data` as sections."""
    flat = flatten(data)
    sections = torch.split(flat, out.numel()) if out.numel() else [flat] * collectives.sync.size
    _reduce_scatter_flat(collectives, out, sections, op)


def _reduce_scatter_flat(collectives: AnyCollectives, out: Tensor, sections: Tensors, op: Reduction) -> None:
    _write_into(collectives, [out], lambda flat: collectives.reduce_scatter(sections, flat[0], op))


# ---- copies ---------------------------------------------------------------------------------------------------------


def broadcast(collectives: AnyCollectives, tensor: Tensor, root: int) -> None:
    me, size = collectives.sync.rank, collectives.sync.size

    def move(flat: Tensors) -> None:
        data = as_bytes(flat[0])
        into = [data if rank == root != me else None for rank in range(size)]
        collectives.move("broadcast", same=(root,), to_all=data if me == root else None, into=into)

    _write_into(collectives, [tensor], move, read=True)


def broadcast_coalesced(
    collectives: AnyCollectives, lists: Sequence[CoalescedTensors], caller: Caller | None = None
) -> None:
    """Broadcast the tensors of each list at once, or where memory cannot be shared, copied together.

    caller  None if the tensors are ready: see CudaCollectives.broadcast_coalesced
    """
    for coalesced in lists:
        if not (isinstance(collectives, CudaCollectives) and collectives.broadcast_coalesced(coalesced, caller)):
            for root in range(collectives.sync.size):
                own = [
                    tensor for tensor, owner in zip(coalesced.tensors, coalesced.roots, strict=True) if owner == root
                ]
                for some in _in_lists(own, PACKED_BYTES):
                    packed = torch.cat(some)
                    broadcast(collectives, packed, root)
                    collectives.wait_for_result()
                    _torch.foreach_copy_(some, torch.split(packed, [tensor.numel() for tensor in some]))


def _in_lists(tensors: Tensors, size_bytes: int) -> Iterator[list[Tensor]]:
    """Yield consecutive tensors together: at most `size_bytes` in all, or one larger tensor alone."""
    found: list[Tensor] = []
    for tensor in tensors:
        if found and sum(one.nbytes for one in found) + tensor.nbytes > size_bytes:
            yield found
            found = []
        found.append(tensor)
    if found:
        yield found


def all_gather(collectives: AnyCollectives, targets: Tensors, data: Tensor) -> None:
    def move(flat: Tensors) -> None:
        collectives.move("all_gather", to_all=as_bytes(flatten(data)), into=[as_bytes(t) for t in flat])

    _write_into(collectives, targets, move)


def all_gather_single(collectives: AnyCollectives, out: Tensor, data: Tensor) -> None:
    """As all_gather, with equal parts of `out` as targets."""

    def move(flat: Tensors) -> None:
        whole, part = as_bytes(flat[0]), as_bytes(flatten(data))
        length = part.numel()
        into = [whole[r * length : (r + 1) * length] for r in range(collectives.sync.size)]
        collectives.move("all_gather", same=(length,), to_all=part, into=into)

    _write_into(collectives, [out], move)


def gather(collectives: AnyCollectives, targets: Tensors, data: Tensor, root: int) -> None:
    """Gather `data` into `targets`, which are given on the root only."""

    def move(flat: Tensors) -> None:
        into = [as_bytes(t) for t in flat] if flat else [None] * collectives.sync.size
        collectives.move("gather", same=(root,), to_all=as_bytes(flatten(data)), into=into)

    _write_into(collectives, targets, move)


def scatter(collectives: AnyCollectives, out: Tensor, sources: Tensors, root: int) -> None:
    """Scatter `sources`, which are given on the root only."""

    def move(flat: Tensors) -> None:
        into = [as_bytes(flat[0]) if rank == root else None for rank in range(collectives.sync.size)]
        collectives.move("scatter", same=(root,), to_each=[as_bytes(flatten(s)) for s in sources], into=into)

    _write_into(collectives, [out], move)


def all_to_all(collectives: AnyCollectives, outputs: Tensors, inputs: Tensors) -> None:
    def move(flat: Tensors) -> None:
        to_each = [as_bytes(flatten(data)) for data in inputs]
        collectives.move("all_to_all", to_each=to_each, into=[as_bytes(t) for t in flat])

    _write_into(collectives, outputs, move)


def all_to_all_single(
    collectives: AnyCollectives, out: Tensor, out_sizes: list[int], data: Tensor, sizes: list[int]
) -> None:
    """As all_to_all, with the parts of `out` and `data` that have these numbers of elements."""

    def move(flat: Tensors) -> None:
        to_each = [as_bytes(piece) for piece in torch.split(flatten(data), sizes)]
        into = [as_bytes(piece) for piece in torch.split(flat[0], out_sizes)]
        collectives.move("all_to_all", to_each=to_each, into=into)

    _write_into(collectives, [out], move)


# ---- checks of arguments ---------------------------------------------------------------------------------------------


def check_list(name: str, tensors: Tensors, size: int, *, like: Tensor | None = None) -> None:
    if len(tensors) != size:
        raise ValueError(f"{name}: {len(tensors)} tensors for {size} workers; give one for each")
    if like is not None:
        for tensor in tensors:
            check_alike(name, tensor, like)


def check_whole(name: str, whole_name: str, whole: Tensor, part_name: str, part: Tensor, size: int) -> None:
    if whole.dtype is not part.dtype:
        raise TypeError(f"{name}: the {whole_name} is {whole.dtype}, the {part_name} {part.dtype}; make them the same")
    if whole.numel() != part.numel() * size:
        raise ValueError(
            f"{name}: the {whole_name} has {whole.numel()} elements, the {part_name} {part.numel()}; "
            f"the {whole_name} must be {size} times as large"
        )


def check_alike(name: str, target: Tensor, data: Tensor) -> None:
    if target.dtype is not data.dtype or target.numel() != data.numel():
        raise ValueError(
            f"{name}: a tensor of {target.numel()} x {target.dtype} for data of {data.numel()} x {data.dtype}; "
            "make them the same"
        )


def split_sizes(which: str, tensor: Tensor, splits: Splits, size: int) -> list[int]:
    """Number of elements for each rank: `splits[rank]` rows of dimension 0, or equal parts. Raises ValueError."""
    if not splits:
        if tensor.numel() and tensor.shape[0] % size:
            raise ValueError(f"all_to_all: the {which} has {tensor.shape[0]} rows, not a multiple of {size} workers")
        return [tensor.numel() // size] * size
    rows = tensor.shape[0] if tensor.dim() else 0
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"all_to_all: {which} splits {list(splits)} for {size} workers and {rows} rows; they must add up"
        )
    row = tensor.numel() // rows if rows else 0
    return [split * row for split in splits]
