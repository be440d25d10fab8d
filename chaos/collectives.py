"""Every collective once, on tensors whose results are known, and checked: a sum that is wrong is found too.

All workers call the same function with dice that fall alike, so sizes and roots agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any

import torch
import torch.distributed as dist

LARGE = 1 << 22  # elements of 4 bytes
IN_FLIGHT = 6


class WrongResult(AssertionError):
    """A collective returned, with something else than it should."""


@dataclass
class GroupMember:
    """Our place in the group."""

    rank: int
    size: int
    timeout: timedelta  # for subgroups; torch does not pass the group's own on
    halves: list[Any] = field(default_factory=list)  # subgroups; every worker is in one of them
    allocated: dict[int, torch.Tensor] = field(default_factory=dict)  # from the group, by number of elements

    @property
    def total(self) -> int:
        """The sum of what `ones` holds over all workers."""
        return self.size * (self.size + 1) // 2

    def ours(self, numel: int) -> torch.Tensor:
        return torch.full((numel,), float(self.rank + 1))

    def half(self) -> range:
        """The ranks of our subgroup."""
        middle = (self.size + 1) // 2
        return range(middle) if self.rank < middle else range(middle, self.size)


def expect(tensor: torch.Tensor, value: float, what: str) -> None:
    if not bool((tensor == value).all()):
        raise WrongResult(f"{what}: {value} expected everywhere, found {tensor.unique()[:8].tolist()}")


def any_size(dice: Random) -> int:
    """Mostly small; some that take a while to copy."""
    return dice.choice([1, 7, 1000, 65_537, LARGE // 8])


def all_reduce_small(member: GroupMember, dice: Random) -> None:
    tensor = member.ours(dice.randint(1, 2000))
    dist.all_reduce(tensor)
    expect(tensor, member.total, "all_reduce")


def all_reduce_large(member: GroupMember, dice: Random) -> None:
    tensor = member.ours(dice.choice([LARGE // 4, LARGE, LARGE + 3]))
    dist.all_reduce(tensor)
    expect(tensor, member.total, "all_reduce")


def all_reduce_allocated(member: GroupMember, dice: Random) -> None:
    numel = dice.choice([1000, LARGE // 4])
    if numel not in member.allocated:
        member.allocated[numel] = _allocate(numel)
    tensor = member.allocated[numel]
    tensor.fill_(float(member.rank + 1))
    dist.all_reduce(tensor)
    expect(tensor, member.total, "all_reduce of allocated memory")


def _allocate(numel: int) -> torch.Tensor:
    group: Any = dist.distributed_c10d._get_default_group()
    cpu = torch.device("cpu")
    if dist.get_backend() == "gloo":  # does not give out memory
        return torch.empty(numel)
    allocated: torch.Tensor = group.allocate_tensor(numel, dtype=torch.float32, device=cpu)
    return allocated


def all_reduce_in_flight(member: GroupMember, dice: Random) -> None:
    tensors = [member.ours(any_size(dice)) for _ in range(dice.randint(2, IN_FLIGHT))]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        assert work is not None
        work.wait()
        expect(tensor, member.total, "all_reduce in flight")


def all_reduce_coalesced(member: GroupMember, dice: Random) -> None:
    tensors = [member.ours(any_size(dice)) for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        expect(tensor, member.total, "all_reduce, coalesced")


def broadcast(member: GroupMember, dice: Random) -> None:
    root, tensor = dice.randrange(member.size), member.ours(any_size(dice))
    dist.broadcast(tensor, root)
    expect(tensor, root + 1, "broadcast")


def reduce(member: GroupMember, dice: Random) -> None:
    root, tensor = dice.randrange(member.size), member.ours(any_size(dice))
    dist.reduce(tensor, root)
    if member.rank == root:
        expect(tensor, member.total, "reduce")


def all_gather(member: GroupMember, dice: Random) -> None:
    tensor = member.ours(any_size(dice))
    pieces = [torch.empty_like(tensor) for _ in range(member.size)]
    dist.all_gather(pieces, tensor)
    for rank, piece in enumerate(pieces):
        expect(piece, rank + 1, "all_gather")


def all_gather_into_tensor(member: GroupMember, dice: Random) -> None:
    tensor = member.ours(any_size(dice))
    whole = torch.empty(member.size, tensor.numel())
    dist.all_gather_into_tensor(whole.view(-1), tensor)
    for rank, piece in enumerate(whole):
        expect(piece, rank + 1, "all_gather_into_tensor")


def all_gather_coalesced(member: GroupMember, dice: Random) -> None:
    tensors = [member.ours(any_size(dice)) for _ in range(3)]
    wholes = [torch.empty(member.size, tensor.numel()) for tensor in tensors]
    with dist.distributed_c10d._coalescing_manager():
        for whole, tensor in zip(wholes, tensors, strict=True):
            dist.all_gather_into_tensor(whole.view(-1), tensor)
    for whole in wholes:
        for rank, piece in enumerate(whole):
            expect(piece, rank + 1, "all_gather_into_tensor, coalesced")


def reduce_scatter(member: GroupMember, dice: Random) -> None:
    numel = any_size(dice)
    piece = torch.empty(numel)
    dist.reduce_scatter(piece, [member.ours(numel) for _ in range(member.size)])
    expect(piece, member.total, "reduce_scatter")


def reduce_scatter_tensor(member: GroupMember, dice: Random) -> None:
    numel = any_size(dice)
    piece = torch.empty(numel)
    dist.reduce_scatter_tensor(piece, member.ours(numel * member.size))
    expect(piece, member.total, "reduce_scatter_tensor")


def reduce_scatter_coalesced(member: GroupMember, dice: Random) -> None:
    pieces = [torch.empty(any_size(dice)) for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager():
        for piece in pieces:
            dist.reduce_scatter_tensor(piece, member.ours(piece.numel() * member.size))
    for piece in pieces:
        expect(piece, member.total, "reduce_scatter_tensor, coalesced")


def all_to_all(member: GroupMember, dice: Random) -> None:
    numel = any_size(dice)
    pieces = [torch.empty(numel) for _ in range(member.size)]
    dist.all_to_all(pieces, [member.ours(numel) for _ in range(member.size)])
    for rank, piece in enumerate(pieces):
        expect(piece, rank + 1, "all_to_all")


def all_to_all_single(member: GroupMember, dice: Random) -> None:
    """Uneven: rank a sends base + b elements to rank b."""
    base = any_size(dice)
    sent = [base + rank for rank in range(member.size)]
    received = [base + member.rank] * member.size
    whole = torch.empty(sum(received))
    dist.all_to_all_single(whole, member.ours(sum(sent)), received, sent)
    for rank, piece in enumerate(whole.split(received)):
        expect(piece, rank + 1, "all_to_all_single")


def gather(member: GroupMember, dice: Random) -> None:
    root, tensor = dice.randrange(member.size), member.ours(any_size(dice))
    pieces = [torch.empty_like(tensor) for _ in range(member.size)] if member.rank == root else None
    dist.gather(tensor, pieces, root)
    for rank, piece in enumerate(pieces or []):
        expect(piece, rank + 1, "gather")


def scatter(member: GroupMember, dice: Random) -> None:
    root, numel = dice.randrange(member.size), any_size(dice)
    piece = torch.empty(numel)
    pieces = [torch.full((numel,), float(rank)) for rank in range(member.size)] if member.rank == root else None
    dist.scatter(piece, pieces, root)
    expect(piece, member.rank, "scatter")


def send_recv(member: GroupMember, dice: Random) -> None:
    """A message goes once around; each worker adds one. Blocking calls."""
    after, before = (member.rank + 1) % member.size, (member.rank - 1) % member.size
    message = torch.zeros(any_size(dice))
    if member.rank == 0:
        dist.send(message, after)
        dist.recv(message, before)
        expect(message, member.size - 1, "send and recv")
    else:
        dist.recv(message, before)
        expect(message, member.rank - 1, "send and recv")
        dist.send(message + 1, after)


def isend_irecv(member: GroupMember, dice: Random) -> None:
    """Each worker sends to the next, at the same time."""
    after, before = (member.rank + 1) % member.size, (member.rank - 1) % member.size
    tensor = member.ours(any_size(dice))
    got = torch.empty_like(tensor)
    works = [dist.isend(tensor, after), dist.irecv(got, before)]
    for work in works:
        assert work is not None
        work.wait()
    expect(got, before + 1, "isend and irecv")


def recv_from_any(member: GroupMember, dice: Random) -> None:
    """One hears from all the others, in any order, and answers each."""
    root, message = dice.randrange(member.size), member.ours(any_size(dice))
    tag = dice.randrange(1 << 20)  # a worker that has its answer may be in the next round already
    if member.rank != root:
        dist.send(message, root, tag=tag)
        dist.recv(message, root, tag=tag)
        expect(message, root + 1, "the answer")
        return
    got = torch.empty_like(message)
    for _ in range(member.size - 1):
        sender = dist.recv(got, tag=tag)
        expect(got, sender + 1, "recv from any rank")
        dist.send(message, sender, tag=tag)


def barrier(member: GroupMember, dice: Random) -> None:
    dist.barrier()


def monitored_barrier(member: GroupMember, dice: Random) -> None:
    """Torch's function is for Gloo only, so the group's own."""
    group: Any = dist.distributed_c10d._get_default_group()
    group.monitored_barrier()


def objects(member: GroupMember, dice: Random) -> None:
    text = "x" * dice.randint(0, 5000)
    gathered: list[Any] = [None] * member.size
    dist.all_gather_object(gathered, (member.rank, text))
    if gathered != [(rank, text) for rank in range(member.size)]:
        raise WrongResult("all_gather_object: not what was sent")
    root = dice.randrange(member.size)
    said = [{"from": member.rank}]
    dist.broadcast_object_list(said, root)
    if said != [{"from": root}]:
        raise WrongResult(f"broadcast_object_list: {said} is not what rank {root} sent")


def subgroup(member: GroupMember, dice: Random) -> None:
    """A sum in our half, then all meet: the other half does not wait for our half's dead by itself."""
    ranks = member.half()
    tensor = member.ours(any_size(dice))
    dist.all_reduce(tensor, group=member.halves[0 if 0 in ranks else 1])
    expect(tensor, sum(rank + 1 for rank in ranks), "all_reduce in a subgroup")
    dist.barrier()


def make_halves(member: GroupMember) -> None:
    """All workers take part in the making of every subgroup: torch requires it."""
    middle = (member.size + 1) // 2
    halves = [list(range(middle)), list(range(middle, member.size))]
    member.halves = [dist.new_group(ranks, timeout=member.timeout) for ranks in halves]


def new_group(member: GroupMember, dice: Random) -> None:
    """A group for one sum."""
    group: Any = dist.new_group(list(range(member.size)), timeout=member.timeout)
    tensor = member.ours(100)
    dist.all_reduce(tensor, group=group)
    expect(tensor, member.total, "all_reduce in a new group")
    dist.destroy_process_group(group)


def by_name(name: str) -> Callable[[GroupMember, Random], None]:
    function: Callable[[GroupMember, Random], None] = globals()[name]
    return function
