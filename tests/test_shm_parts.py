"""The parts of shm that need no second process: the tree, the heap, reductions, segments."""

from __future__ import annotations

import gc
import os
import random
import stat
from pathlib import Path

import pytest
import torch
from torch.distributed import ReduceOp

from lockstep.comm.shm.memory import KEEP_BYTES, PAGE, Heap, create_segment
from lockstep.comm.shm.reduce_ops import Reduction, parse_reduction
from lockstep.comm.tree_order import tree_pairs, tree_rounds
from lockstep.errors import SharedMemoryFullError
from plain import FACTOR, FLOATS, INTEGERS, KINDS, kinds_of, reduced, same_bits, some

# ---------------------------------------------------------------------------------------------------------- the tree


@pytest.mark.parametrize("size", range(1, 18))
def test_the_tree_adds_every_rank_once_and_in_order(size: int) -> None:
    held = [[rank] for rank in range(size)]
    for pairs in tree_rounds(size):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks)), "the pairs of a round can be added at the same time"
        for dst, src in pairs:
            held[dst] += held[src]
    assert held[0] == list(range(size))
    assert len(tree_rounds(size)) == (size - 1).bit_length()
    assert tree_pairs(size) == tuple(pair for pairs in tree_rounds(size) for pair in pairs)


def test_the_order_is_the_one_that_is_written_down() -> None:
    terms = [str(rank) for rank in range(7)]
    for dst, src in tree_pairs(7):
        terms[dst] = f"({terms[dst]}+{terms[src]})"
    assert terms[0] == "(((0+1)+(2+3))+((4+5)+6))"
    with pytest.raises(ValueError, match="size=0"):
        tree_rounds(0)


# ---------------------------------------------------------------------------------------------------------- the heap


def small_heap(pages: int) -> Heap:
    segment = create_segment()
    os.close(segment.fd)
    return Heap(segment, segment.size - pages * PAGE)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_never_overlap_and_join_again_when_they_are_free(seed: int) -> None:
    dice, pages = random.Random(seed), 200
    heap = small_heap(pages)
    taken: dict[int, int] = {}
    refused = 0
    for _ in range(2000):
        if taken and dice.random() < 0.5:
            offset = dice.choice(list(taken))
            heap.free(offset, taken.pop(offset))
            continue
        size = dice.randrange(1, 12 * PAGE)
        try:
            offset = heap.allocate(size, "a test")
        except SharedMemoryFullError:
            refused += 1
            continue
        assert offset % PAGE == 0
        for other, length in taken.items():
            assert offset + size <= other or other + length <= offset
        taken[offset] = size
    assert refused, "the heap was never full, so this shows little"
    for offset, size in taken.items():
        heap.free(offset, size)
    heap.allocate(pages * PAGE, "everything in one piece")


def test_a_full_heap_says_what_was_wanted_and_what_is_left() -> None:
    heap = small_heap(512)
    heap.allocate(256 * PAGE, "the first")
    with pytest.raises(SharedMemoryFullError, match=r"^the second needs 1\.2 MiB .* 1\.0 MiB are left; free tensors"):
        heap.allocate(300 * PAGE, "the second")
    with pytest.raises(SharedMemoryFullError, match=r"a tensor of 1000000 x float64 needs 7\.6 MiB"):
        heap.tensor(1_000_000, torch.float64)


def test_a_tensor_of_the_heap_is_freed_with_its_last_view() -> None:
    heap = small_heap(3)
    first, second = heap.tensor(PAGE // 4, torch.float32), heap.tensor(2 * PAGE, torch.uint8)
    first.fill_(1)
    second.fill_(2)
    assert first.eq(1).all()
    assert second.eq(2).all()
    view = second[5:9].view(2, 2)
    del second
    with pytest.raises(SharedMemoryFullError):
        heap.tensor(2 * PAGE, torch.uint8)
    assert view.eq(2).all()
    del view
    gc.collect()
    assert heap.tensor(2 * PAGE, torch.uint8).numel() == 2 * PAGE
    assert heap.tensor(0, torch.int16).shape == (0,)


def test_pages_of_free_blocks_go_back_to_the_system_when_they_are_many() -> None:
    segment = create_segment()
    heap = Heap(segment, 0)
    size = KEEP_BYTES + (64 << 20)
    tensor = heap.tensor(size, torch.uint8)
    tensor[:: 16 * PAGE] = 1
    used = os.fstat(segment.fd).st_blocks
    assert used > 0
    del tensor
    gc.collect()
    assert os.fstat(segment.fd).st_blocks < used
    os.close(segment.fd)


# -------------------------------------------------------------------------------------------------------- reductions


def test_reductions_follow_the_tree_and_leave_what_is_not_theirs() -> None:
    dice = random.Random(1)
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for kind in kinds_of(dtype):
            for size in (1, 2, 3, 4, 5, 8):
                operands = [some(dtype, 37, seed) for seed in range(size)]
                before = [operand.clone() for operand in operands]
                how = Reduction(kind, size)  # each worker multiplies by the factor of PREMUL_SUM before
                want = reduced(KINDS.SUM if kind == KINDS.PREMUL_SUM else kind, operands)
                free = [dice.random() < 0.5 for _ in range(size)]
                at = dice.randrange(size + 1)  # in the place of an operand, or beside them
                out = operands[at] if at < size else torch.empty_like(want)
                how.run(operands, out, free=free)
                case = f"{kind} of {size} x {dtype}, free={free}, out at {at}"
                assert same_bits(out, want), case
                for i, operand in enumerate(operands):
                    assert free[i] or i == at or same_bits(operand, before[i]), f"{case}: operand {i} changed"


def test_narrow_floats_are_added_in_float32() -> None:
    operands = [torch.tensor([value]).bfloat16() for value in (256.0, 1.0, 1.0)]
    assert operands[0] + operands[1] + operands[2] == 256, "in bfloat16 the ones are lost"
    for size, want in ((3, 258.0), (2, 256.0)):
        out = torch.empty(1, dtype=torch.bfloat16)
        Reduction(KINDS.SUM, size).run(operands[:size], out, free=[False] * size)
        assert out.item() == want
    # Two that overflow float16 on the way have a mean all the same.
    large = [torch.tensor([60000.0]).half() for _ in range(2)]
    out = torch.empty(1, dtype=torch.float16)
    Reduction(KINDS.AVG, 2).run(large, out, free=[True, True])
    assert out.item() == torch.tensor(60000.0).half().item()


def test_what_cannot_be_reduced_is_refused_by_name() -> None:
    premultiplied = torch.distributed._make_nccl_premul_sum(FACTOR)
    for op, dtype, says in (
        (KINDS.BAND, torch.float32, "BAND with torch.float32"),
        (KINDS.BXOR, torch.complex64, "BXOR with torch.complex64"),
        (KINDS.MAX, torch.complex64, "no order"),
        (KINDS.SUM, torch.float8_e5m2, "can be sent but not reduced"),
        (KINDS.AVG, torch.bool, "AVG"),
        (premultiplied, torch.bool, "PREMUL_SUM"),
        (premultiplied, torch.int32, "PREMUL_SUM"),
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=says):
            parse_reduction(ReduceOp(op) if op is not premultiplied else op, 2, dtype)


# ---------------------------------------------------------------------------------------------------------- segments


def mappings(address: int) -> list[str]:
    """What /proc says is mapped there."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if line.startswith(f"{address:x}-")]


def test_a_segment_has_no_name_and_is_for_its_owner_only() -> None:
    segment = create_segment()
    about = os.fstat(segment.fd)
    assert about.st_nlink == 0
    assert stat.S_IMODE(about.st_mode) == 0o600
    assert not os.get_inheritable(segment.fd)
    assert mappings(segment.address) == ["/memfd:lockstep (deleted)"]
    assert about.st_ino not in [entry.inode() for entry in os.scandir("/dev/shm")]
    assert about.st_blocks == 0, "only what is used counts"
    os.close(segment.fd)


def test_a_segment_in_a_folder_has_no_name_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_SHM_DIR", "/dev/shm")
    segment = create_segment()
    about = os.fstat(segment.fd)
    assert about.st_nlink == 0
    assert stat.S_IMODE(about.st_mode) == 0o600
    assert mappings(segment.address)[0].endswith("(deleted)")
    assert about.st_ino not in [entry.inode() for entry in os.scandir("/dev/shm")]
    os.close(segment.fd)
    monkeypatch.setenv("LOCKSTEP_SHM_DIR", str(tmp_path / "missing"))
    with pytest.raises(SharedMemoryFullError, match=r"missing: No such file .* LOCKSTEP_SHM_DIR must name a folder"):
        create_segment()
