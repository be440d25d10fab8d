"""A way to train a program: workers, hosts, links, batch, and options of `Run`."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.plan.links import Link
from lockstep.plan.profile import ProbeResult

FP32, HALF, INT8, INT4 = "fp32", ("bf16", "fp16"), "int8", "int4"  # how gradients are sent


@dataclass(frozen=True)
class Configuration:
    """A way to train the program.

    slots        how many workers of a host compute at full speed at the same time: its cores or GPUs
    link         between hosts; inside: between the workers of a host; None: shared memory as it was measured
    bucket_mib   None: as `Run` does
    hosts_are_virtual  they are parts of one machine, whose memory they share (for campaigns)
    """

    hosts: int
    workers_per_host: int
    slots: int
    global_batch_size: int
    shards: int
    backend: str = "shm"
    link: Link | None = None
    inside: Link | None = None
    grad_comm: str = FP32
    shard_optimizer: bool = False
    redundancy: int = 0
    bucket_mib: float | None = None
    hosts_are_virtual: bool = False

    @property
    def workers(self) -> int:
        return self.hosts * self.workers_per_host

    @property
    def samples_per_shard(self) -> float:
        return self.global_batch_size / self.shards

    @property
    def shards_per_worker(self) -> int:
        """The most of a worker."""
        return -(-self.shards // self.workers)

    @property
    def sums_by_host(self) -> bool:
        """Whether gradients are added inside each host first, so that only the sum of a host leaves it.

        `Run` does so on `hierarchy` with a power of two of workers on each host; otherwise all workers exchange
        sections with all others (comm/shard_sum.py, Note [Canonical all-reduce]).
        """
        return self.backend == "hierarchy" and self.workers_per_host.bit_count() == 1

    @property
    def sharing(self) -> float:
        """How many workers share a slot; 1 if each has its own."""
        return max(1.0, self.workers_per_host / self.slots)

    def name(self) -> str:
        count = f"{self.workers} worker{'s' * (self.workers > 1)}"
        parts = [count if self.hosts == 1 else f"{self.hosts} hosts x {self.workers_per_host}", self.backend]
        parts += [self.link.name] if self.link is not None and self.hosts > 1 else []
        parts += [f"batch {self.global_batch_size}", f"{self.shards} shard{'s' * (self.shards > 1)}"]
        parts += [self.grad_comm] if self.grad_comm != FP32 else []
        parts += ["sharded optimiser"] if self.shard_optimizer else []
        return ", ".join(parts)


def configuration_of(probe: ProbeResult) -> Configuration:
    """The configuration in which a run was measured."""
    per_host = probe.workers // probe.hosts
    slots = max(1, probe.slots // probe.hosts) if probe.device == "cpu" else probe.slots
    return Configuration(
        hosts=probe.hosts,
        workers_per_host=per_host,
        slots=slots,
        global_batch_size=probe.global_batch_size,
        shards=probe.shards,
        backend=probe.backend,
        grad_comm=probe.grad_comm,
        shard_optimizer=probe.shard_optimizer,
    )
