"""Every collective of shm on every kind of tensor, against plain loops over the inputs of all, in every bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm import collectives
from lockstep.comm.shm.collectives import SMALL_BYTES
from on_workers import on_workers
from plain import FACTOR, FLOATS, INTEGERS, KINDS, kinds_of, reduced, same_bits, some

# Torch 2.13 has new names for these two.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SECTION_BYTES = collectives.LEAST_SECTION_BYTES
SMALL = SMALL_BYTES // 4  # float32
MANY = 6 * SECTION_BYTES // 4 + 37  # float32, for one rank: more rounds than there are slots
SIZES = (0, 1, 7, SMALL - 1, SMALL, SMALL + 1, MANY)
# In ordinary memory, with gaps, transposed, in group memory, in the middle of a tensor there, there on some workers.
PLACES = ("plain", "gaps", "columns", "group", "middle", "mixed")
SENT = (*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
three_workers_and_others = pytest.mark.parametrize(
    "workers", [3, *(pytest.param(workers, marks=pytest.mark.slow) for workers in (2, 4))]
)


class Trial:
    """One worker's side of many comparisons. Notes down what is wrong, and goes on."""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.wrong: list[str] = []
        self.seed = 0  # of the last inputs made; the same on all workers
        self._pools: dict[torch.dtype, list[Tensor]] = {}  # making random numbers takes longer than all the rest

    def inputs(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """What every rank has. Others at every call."""
        self.seed += 1
        if dtype not in self._pools or self._pools[dtype][0].numel() < numel + 1000:
            self._pools[dtype] = [some(dtype, numel + 50_000, 100 * self.seed + rank) for rank in range(self.size)]
        start = 13 * self.seed % 1000
        return [pool[start : start + numel] for pool in self._pools[dtype]]

    def put(self, data: Tensor, place: str) -> Tensor:
        """`data` as the caller of a collective may hold it."""
        if place == "group" or (place == "mixed" and self.rank % 2 == 0):
            return self.room(data.numel(), data.dtype).copy_(data)
        if place == "middle":
            return self.room(data.numel() + 4, data.dtype)[3:-1].copy_(data)
        if place == "gaps":
            return torch.stack([data, torch.zeros_like(data)], dim=1).view(-1)[::2]
        if place == "columns" and data.numel() % 2 == 0:
            return data.view(-1, 2).t().contiguous().t()
        return data.clone()

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        made: Tensor = self.group.allocate_tensor(numel, dtype=dtype, device=torch.device("cpu"))
        return made

    def same(self, case: str, got: Tensor, want: Tensor) -> None:
        if not same_bits(got, want):
            flat, wanted = got.reshape(-1), want.reshape(-1)
            at = next((i for i in range(min(len(flat), len(wanted))) if flat[i] != wanted[i]), "the end")
            here = f"{flat[at]} instead of {wanted[at]}" if isinstance(at, int) else f"{got.numel()} elements"
            self.wrong.append(f"{case}: at {at}: {here}"[:300])


def operation(kind: Any) -> Any:
    return dist._make_nccl_premul_sum(FACTOR) if kind == KINDS.PREMUL_SUM else kind


def small_slots(rank: int) -> Any:
    """A group whose slots hold little, so that what is not large takes many rounds. One worker's wish is enough."""
    usual = collectives.SLOT_BYTES
    collectives.SLOT_BYTES = 0 if rank == 0 else usual  # type: ignore[misc]
    group: Any = dist.new_group(backend="shm")
    collectives.SLOT_BYTES = usual  # type: ignore[misc]
    assert group._host.section_bytes == SECTION_BYTES
    return group


# ---------------------------------------------------------------------------------------------------------- reducing


def reductions() -> Iterator[tuple[torch.dtype, Any, int, str]]:
    """(dtype, kind, numel, place): everything at a middling size, then sizes and places."""
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        for kind in kinds_of(dtype):
            yield dtype, kind, 1003, "plain"
    for numel in SIZES:
        for place in PLACES:
            yield torch.float32, KINDS.SUM, numel, place
    for dtype, kind in (
        (torch.bfloat16, KINDS.SUM),
        (torch.float16, KINDS.AVG),
        (torch.float64, KINDS.PREMUL_SUM),
        (torch.uint8, KINDS.BXOR),
        (torch.int64, KINDS.MAX),
        (torch.complex64, KINDS.SUM),
    ):
        for place in ("plain", "gaps", "group"):
            yield dtype, kind, 4 * MANY // dtype.itemsize, place


def compare_reductions(trial: Trial, group: Any) -> None:
    rank, size = trial.rank, trial.size
    for number, (dtype, kind, per_rank, place) in enumerate(reductions()):
        case, op = f"{kind} of {per_rank} x {dtype} ({place})", operation(kind)

        ours = trial.inputs(dtype, per_rank * (size if per_rank == MANY else 1))
        want = reduced(kind, ours)
        for turn in ("first", "again"):
            tensor = trial.put(ours[rank], place)
            dist.all_reduce(tensor, op=op, group=group)
            trial.same(f"all_reduce, {turn}, {case}", tensor, want)

        root = number % size
        tensor = trial.put(ours[rank], place)
        dist.reduce(tensor, group_dst=root, op=op, group=group)
        trial.same(f"reduce to {root}, {case}", tensor, want if rank == root else ours[rank])

        ours = trial.inputs(dtype, per_rank * size)
        want = reduced(kind, [data[rank * per_rank : (rank + 1) * per_rank] for data in ours])
        tensor, out = trial.put(ours[rank], place), trial.put(torch.zeros(per_rank, dtype=dtype), place)
        reduce_scatter_single(out, tensor, op=op, group=group)
        trial.same(f"reduce_scatter_single, {case}", out, want)
        trial.same(f"input of reduce_scatter_single, {case}", tensor, ours[rank])

        if tensor.dim() == 1:  # the output may be a piece of the input
            piece = tensor[rank * per_rank : (rank + 1) * per_rank]
            reduce_scatter_single(piece, tensor, op=op, group=group)
            trial.same(f"reduce_scatter_single in place, {case}", piece, want)

        # A list of sections, each of another size.
        lengths = [per_rank // (1 + r) for r in range(size)]
        cut = [data[: sum(lengths)].split(lengths) for data in ours]
        out = trial.put(torch.zeros(lengths[rank], dtype=dtype), place)
        sections = [trial.put(section, place) for section in cut[rank]]
        dist.reduce_scatter(out, sections, op=op, group=group)
        trial.same(f"reduce_scatter, {case}", out, reduced(kind, [pieces[rank] for pieces in cut]))
        for section, data in zip(sections, cut[rank], strict=True):
            trial.same(f"input of reduce_scatter, {case}", section, data)


def compare_large_reductions(trial: Trial, group: Any) -> None:
    """Several rounds of slots of the usual size."""
    numel = 6 * collectives.SLOT_BYTES // 4 + 333
    ours = trial.inputs(torch.float32, numel)
    want = reduced(KINDS.SUM, ours)
    for place in ("plain", "group", "mixed"):
        tensor = trial.put(ours[trial.rank], place)
        dist.all_reduce(tensor, group=group)
        trial.same(f"all_reduce of {numel} ({place})", tensor, want)


def reducing(rank: int, size: int) -> list[str]:
    trial = Trial(rank, size, small_slots(rank))
    compare_reductions(trial, trial.group)
    usual = Trial(rank, size, dist.new_group(backend="shm"))
    compare_large_reductions(usual, usual.group)
    return trial.wrong + usual.wrong


@pytest.mark.few(1)
@three_workers_and_others
def test_reductions(workers: int) -> None:
    assert on_workers(reducing, workers) == [[]] * workers


# ------------------------------------------------------------------------------------------------------------ moving


def moves() -> Iterator[tuple[torch.dtype, int, str]]:
    for dtype in SENT:
        yield dtype, 1003, "plain"
    for numel in SIZES:
        for place in PLACES:
            yield torch.float32, numel, place
    yield torch.bfloat16, 2 * MANY, "group"
    yield torch.complex64, MANY // 2, "gaps"


def compare_moves(trial: Trial, group: Any) -> None:
    for number, (dtype, numel, place) in enumerate(moves()):
        roots = range(trial.size) if number % 8 == 0 else [number % trial.size]
        for root in roots:
            _from_and_to_one(trial, group, f"{numel} x {dtype} ({place}), root {root}", dtype, numel, place, root)
        _all_gather(trial, group, f"{numel} x {dtype} ({place})", dtype, numel, place)
        _all_to_all(trial, group, f"about {numel} x {dtype} ({place})", dtype, numel, place)


def _from_and_to_one(
    trial: Trial, group: Any, case: str, dtype: torch.dtype, numel: int, place: str, root: int
) -> None:
    rank, size, is_root = trial.rank, trial.size, trial.rank == root
    ours = trial.inputs(dtype, numel)

    tensor = trial.put(ours[rank], place)
    dist.broadcast(tensor, group_src=root, group=group)
    trial.same(f"broadcast, {case}", tensor, ours[root])

    tensor = trial.put(ours[rank], place)
    outs = [trial.put(torch.zeros_like(data), place) for data in ours] if is_root else None
    dist.gather(tensor, outs, group_dst=root, group=group)
    for source, out in enumerate(outs or []):
        trial.same(f"gather from {source}, {case}", out, ours[source])
    trial.same(f"input of gather, {case}", tensor, ours[rank])

    parts = [trial.put(data, place) for data in ours] if is_root else None
    out = trial.put(torch.zeros_like(ours[0]), place)
    dist.scatter(out, parts, group_src=root, group=group)
    trial.same(f"scatter, {case}", out, ours[rank])
    for target in range(size if is_root else 0):
        trial.same(f"input of scatter, {case}", parts[target], ours[target])


def _all_gather(trial: Trial, group: Any, case: str, dtype: torch.dtype, numel: int, place: str) -> None:
    rank, ours = trial.rank, trial.inputs(dtype, numel)
    tensor, outs = trial.put(ours[rank], place), [trial.put(torch.zeros_like(data), place) for data in ours]
    dist.all_gather(outs, tensor, group=group)
    for source, out in enumerate(outs):
        trial.same(f"all_gather from {source}, {case}", out, ours[source])
    whole = trial.put(torch.zeros(numel * trial.size, dtype=dtype), place)
    all_gather_single(whole, tensor, group=group)
    trial.same(f"all_gather_single, {case}", whole, torch.cat(ours))
    trial.same(f"input of all_gather, {case}", tensor, ours[rank])
    if whole.dim() == 1:  # the input may be a piece of the output
        piece = whole.zero_()[rank * numel : (rank + 1) * numel]
        all_gather_single(whole, piece.copy_(tensor.view(-1)), group=group)
        trial.same(f"all_gather_single in place, {case}", whole, torch.cat(ours))


def _all_to_all(trial: Trial, group: Any, case: str, dtype: torch.dtype, numel: int, place: str) -> None:
    rank, size = trial.rank, trial.size
    # [source][target], some of them nothing
    lengths = [[numel * ((3 * source + 5 * target) % 4) // 3 for target in range(size)] for source in range(size)]
    ours = trial.inputs(dtype, max(map(sum, lengths)))
    cut = [data[: sum(row)].split(row) for data, row in zip(ours, lengths, strict=True)]
    want = [cut[source][rank] for source in range(size)]

    parts = [trial.put(part, place) for part in cut[rank]]
    outs = [trial.put(torch.zeros_like(part), place) for part in want]
    dist.all_to_all(outs, parts, group=group)
    for source, out in enumerate(outs):
        trial.same(f"all_to_all from {source}, {case}", out, want[source])

    tensor, whole = trial.put(torch.cat(cut[rank]), "plain"), trial.put(torch.zeros_like(torch.cat(want)), "plain")
    got_lengths = [lengths[source][rank] for source in range(size)]
    dist.all_to_all_single(whole, tensor, got_lengths, lengths[rank], group=group)
    trial.same(f"all_to_all_single with splits, {case}", whole, torch.cat(want))

    ours = trial.inputs(dtype, numel * size)
    tensor, whole = trial.put(ours[rank], place), trial.put(torch.zeros_like(ours[rank]), place)
    if tensor.dim() == 2 and tensor.shape[0] % size:
        return  # rows of two: they cannot be shared out
    dist.all_to_all_single(whole, tensor, group=group)
    pieces = [data[rank * numel : (rank + 1) * numel] for data in ours]
    trial.same(f"all_to_all_single, {case}", whole, torch.cat(pieces))
    trial.same(f"input of all_to_all_single, {case}", tensor, ours[rank])


def compare_broadcasts(trial: Trial, group: Any) -> None:
    """Many tensors at once: those of each root are copied together, in several batches."""
    sizes = [0, 1, 7, MANY, 3 * MANY, 3_000_000, 5] + [i % 9 for i in range(300)]
    inputs = [trial.inputs(torch.int32, numel) for numel in sizes]
    roots = [i * 5 % trial.size for i in range(len(sizes))]
    tensors = [ours[trial.rank].clone() for ours in inputs]
    broadcast = group.prepare_broadcasts(tensors, roots)
    for round_ in range(2):
        broadcast().wait()
        for i, (tensor, ours, root) in enumerate(zip(tensors, inputs, roots, strict=True)):
            trial.same(f"broadcast {i} of many, round {round_}", tensor, ours[root] + round_)
            tensor += 1


def moving(rank: int, size: int) -> list[str]:
    trial = Trial(rank, size, small_slots(rank))
    compare_moves(trial, trial.group)
    compare_broadcasts(trial, trial.group)
    return trial.wrong


@pytest.mark.few(1)
@three_workers_and_others
def test_moves(workers: int) -> None:
    assert on_workers(moving, workers) == [[]] * workers


# ------------------------------------------------------------------------------------------- one after the other, fast


def anything(trial: Trial, group: Any, dice: random.Random) -> tuple[str, Any, Callable[[], None]]:
    """Start a collective that the dice choose: (its name, its work, what to check when it is over)."""
    rank, size = trial.rank, trial.size
    numel = dice.choice([1, 100, SMALL - 1, SMALL + 5, MANY, 2 * MANY])
    place, root = dice.choice(["plain", "gaps", "group", "mixed"]), dice.randrange(size)
    ours = trial.inputs(torch.float32, numel)
    tensor = trial.put(ours[rank], place)
    sort = dice.choice(["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier"])
    case = f"{sort} of {numel} ({place}), number {trial.seed}"
    if sort == "all_reduce":
        work: Any = dist.all_reduce(tensor, group=group, async_op=True)
        return case, work, lambda: trial.same(case, tensor, reduced(KINDS.SUM, ours))
    if sort == "reduce":
        work = dist.reduce(tensor, group_dst=root, group=group, async_op=True)
        want = reduced(KINDS.SUM, ours) if rank == root else ours[rank]
        return case, work, lambda: trial.same(case, tensor, want)
    if sort == "broadcast":
        work = dist.broadcast(tensor, group_src=root, group=group, async_op=True)
        return case, work, lambda: trial.same(case, tensor, ours[root])
    if sort == "all_gather":
        whole = trial.put(torch.zeros(numel * size), place)
        work = all_gather_single(whole, tensor, group=group, async_op=True)
        return case, work, lambda: trial.same(case, whole, torch.cat(ours))
    if sort == "reduce_scatter":
        out = trial.put(torch.zeros(numel), place)
        work = dist.reduce_scatter(out, [tensor] * size, group=group, async_op=True)
        return case, work, lambda: trial.same(case, out, reduced(KINDS.SUM, ours))
    if sort == "all_to_all":
        outs = [trial.put(torch.zeros(numel), place) for _ in range(size)]
        work = dist.all_to_all(outs, [tensor] * size, group=group, async_op=True)
        return case, work, lambda: trial.same(case, torch.cat(outs), torch.cat(ours))
    return case, dist.barrier(group=group, async_op=True), lambda: None


def hurried(rank: int, size: int, seed: int) -> list[str]:
    trial = Trial(rank, size, small_slots(rank))
    dice, own_dice = random.Random(seed), random.Random(f"{seed} {rank}")
    for _ in range(12):
        started = [anything(trial, trial.group, dice) for _ in range(8)]
        own_dice.shuffle(started)
        for _, work, check in started:
            if own_dice.random() < 0.1:
                time.sleep(0.003)  # now this worker is behind, now that
            work.wait()
            check()
    return trial.wrong


@three_workers_and_others
def test_many_collectives_in_flight_waited_for_in_any_order(workers: int) -> None:
    assert on_workers(hurried, workers, workers) == [[]] * workers
