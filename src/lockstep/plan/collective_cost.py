"""Times of collectives in the alpha-beta model, in seconds.

A step of a collective that sends n bytes takes `latency_s + n / bytes_per_s` of its link, and adding what was received
takes `add_s_per_byte` for each byte. Workers send and receive at the same time. `size_bytes` is the whole array: what
each worker has before all-reduce and reduce-scatter, and after all-gather and broadcast. One worker takes no time.

The costs are those of Thakur, Rabenseifner and Gropp (Optimization of Collective Communication Operations in MPICH,
2005), of Patarasuk and Yuan (Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009), and, for the
tree, of Sanders, Speck and Traeff (Two-tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan, 2009).
"""

from __future__ import annotations

import math

from lockstep.plan.links import Link


def ring_all_reduce(size_bytes: float, workers: int, link: Link, *, add_s_per_byte: float = 0.0) -> float:
    """Returns the time of an all-reduce on a ring: a reduce-scatter, then an all-gather."""
    return reduce_scatter(size_bytes, workers, link, add_s_per_byte=add_s_per_byte) + all_gather(
        size_bytes, workers, link
    )


def reduce_scatter(size_bytes: float, workers: int, link: Link, *, add_s_per_byte: float = 0.0) -> float:
    """Returns the time of a reduce-scatter on a ring: `workers - 1` steps, each with one part of the array."""
    _check(size_bytes, add_s_per_byte, workers=workers)
    sent_bytes = (workers - 1) / workers * size_bytes
    return (workers - 1) * link.latency_s + sent_bytes * (1 / link.bytes_per_s + add_s_per_byte)


def all_gather(size_bytes: float, workers: int, link: Link) -> float:
    """Returns the time of an all-gather on a ring: `workers - 1` steps, each with one part of the array."""
    return reduce_scatter(size_bytes, workers, link)


def broadcast(size_bytes: float, workers: int, link: Link) -> float:
    """Returns the time of a broadcast of a large array, which goes down a tree in many small pieces."""
    _check(size_bytes, workers=workers)
    if workers == 1:
        return 0.0
    return _tree_depth(workers) * link.latency_s + size_bytes / link.bytes_per_s


def tree_all_reduce(size_bytes: float, workers: int, link: Link, *, add_s_per_byte: float = 0.0) -> float:
    """Returns the time of an all-reduce on two binary trees, as in NCCL: each sums and distributes half of the array.

    A worker is an inner node of one tree at most. There it receives half of the array from two children, and sends half
    to its parent and to both of them; in the other tree it sends half to its parent. So it sends twice the array, or,
    of two workers, the array once. Pieces of the array follow each other, so that the depth costs latency only.
    """
    _check(size_bytes, add_s_per_byte, workers=workers)
    if workers == 1:
        return 0.0
    arrays = 1 if workers == 2 else 2
    transfer_s = arrays * size_bytes / link.bytes_per_s + arrays / 2 * size_bytes * add_s_per_byte
    return 2 * _tree_depth(workers) * link.latency_s + transfer_s


def halving_doubling_all_reduce(size_bytes: float, workers: int, link: Link, *, add_s_per_byte: float = 0.0) -> float:
    """Returns the time of an all-reduce by recursive halving and doubling.

    It needs a power of two. With another number, the workers beyond the largest power of two send their whole array to
    another worker first, and receive the result at the end.
    """
    _check(size_bytes, add_s_per_byte, workers=workers)
    rounds = workers.bit_length() - 1
    power = 1 << rounds
    sent_bytes = (power - 1) / power * size_bytes
    time_s = 2 * rounds * link.latency_s + sent_bytes * (2 / link.bytes_per_s + add_s_per_byte)
    if workers > power:
        time_s += 2 * (link.latency_s + size_bytes / link.bytes_per_s) + size_bytes * add_s_per_byte
    return time_s


def hierarchical_all_reduce(
    size_bytes: float, hosts: int, workers_per_host: int, inside: Link, between: Link, *, add_s_per_byte: float = 0.0
) -> float:
    """Returns the time of a reduce-scatter inside of each host, an all-reduce between hosts, and an all-gather inside.

    Between hosts each worker reduces its part with the same worker of the other hosts, on a ring. All workers of a host
    do that at the same time and share `between`, the link of the host, so that a host sends as much as a ring of hosts
    with the whole array. The three phases follow each other; an implementation that overlaps them is faster.
    """
    _check(size_bytes, add_s_per_byte, hosts=hosts, workers_per_host=workers_per_host)
    inside_s = ring_all_reduce(size_bytes, workers_per_host, inside, add_s_per_byte=add_s_per_byte)
    # The workers of a host share the link, but each of them adds its own part only.
    return inside_s + ring_all_reduce(size_bytes, hosts, between, add_s_per_byte=add_s_per_byte / workers_per_host)


def flat_ring_all_reduce(
    size_bytes: float, hosts: int, workers_per_host: int, inside: Link, between: Link, *, add_s_per_byte: float = 0.0
) -> float:
    """Returns the time of an all-reduce on one ring through all workers, which enters and leaves each host once.

    The slower of the two links sets the rate. The latency is that of the way of one part of the array: it goes around
    the ring twice, and passes the link of each host twice.
    """
    _check(size_bytes, add_s_per_byte, hosts=hosts, workers_per_host=workers_per_host)
    workers = hosts * workers_per_host
    steps = 2 * (workers - 1)
    steps_between = min(2 * hosts, steps) if hosts > 1 else 0
    used = [link for link, is_used in ((inside, workers_per_host > 1), (between, hosts > 1)) if is_used]
    byte_s = max((1 / link.bytes_per_s for link in used), default=0.0)
    transfer_s = (workers - 1) / workers * size_bytes * (2 * byte_s + add_s_per_byte)
    return (steps - steps_between) * inside.latency_s + steps_between * between.latency_s + transfer_s


def sent_bytes_per_host(size_bytes: float, hosts: int, workers_per_host: int, *, hierarchical: bool) -> float:
    """Returns the bytes that each host sends to other hosts during an all-reduce.

    With `hierarchical` it is that of `hierarchical_all_reduce`, otherwise that of `flat_ring_all_reduce`.
    """
    _check(size_bytes, hosts=hosts, workers_per_host=workers_per_host)
    if hosts == 1:
        return 0.0
    members = hosts if hierarchical else hosts * workers_per_host
    return 2 * (members - 1) / members * size_bytes


def _tree_depth(workers: int) -> int:
    """Returns the steps from the root of a tree of this many workers to its farthest leaf."""
    return (workers - 1).bit_length()


def _check(size_bytes: float, add_s_per_byte: float = 0.0, **counts: int) -> None:
    _check_amount("size_bytes", size_bytes)
    _check_amount("add_s_per_byte", add_s_per_byte)
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count!r} has to be a whole number of 1 or more")


def _check_amount(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value!r} has to be 0 or more, and finite")
