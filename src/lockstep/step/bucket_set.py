"""The buckets of one model: which gradients are sent together, in which order, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from lockstep.comm.integer_codec import BLOCK
from lockstep.comm.shard_sum import ShardSum
from lockstep.ddp.bucket import DEFAULT_CAP_BYTES, FIRST_CAP_BYTES, pack
from lockstep.ddp.replica import Leaf
from lockstep.step.feedback_bucket import CompressedGradients, FeedbackBucket, make_feedback_bucket
from lockstep.step.residuals import Residuals
from lockstep.step.scattered_gradients import ScatteredGradients
from lockstep.step.shard_bucket import (
    CompressedBucket,
    Compression,
    RoundedBucket,
    ShardBucket,
)

SCATTERED_CAP_BYTES = 4 * 1024 * 1024  # small: a slow link shall begin early and end soon after the backward pass

RunBucket = ShardBucket | CompressedBucket


class BucketSet:
    """All buckets of a model, in the order in which they are sent. It is empty until `pack` is called."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        sum_: ShardSum,
        *,
        comm_dtype: torch.dtype | None = None,
        compression: Compression | None = None,
        scattered: ScatteredGradients | None = None,
    ) -> None:
        """The options are those of ShardGradients."""
        self._leaves, self._sum, self._comm_dtype = list(leaves), sum_, comm_dtype
        self._compression, self._scattered = compression, scattered
        self._buckets: list[RunBucket] = []
        self._places: dict[int, tuple[RunBucket, int]] = {}

    def __iter__(self) -> Iterator[RunBucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def __getitem__(self, number: int) -> RunBucket:
        return self._buckets[number]

    def pack(self, order: Sequence[int] | None = None) -> None:
        """Pack dense parameters into buckets; `order`: in which their gradients arrive, None: not known yet."""
        parameters, sparse = [leaf.parameter for leaf in self._leaves], [leaf.sparse for leaf in self._leaves]
        cap_bytes = DEFAULT_CAP_BYTES if self._scattered is None else SCATTERED_CAP_BYTES
        plan = pack(parameters, (FIRST_CAP_BYTES, cap_bytes), sparse=sparse, order=order)
        self._buckets, self._places = [], {}  # frees their memory before the new ones are allocated
        self._buckets = [self._make(p.indices) for p in plan if not sparse[p.indices[0]]]
        self._places = {i: (bucket, slot) for bucket in self._buckets for slot, i in enumerate(bucket.indices)}

    def _make(self, indices: Sequence[int]) -> RunBucket:
        if self._compression is None or not self._leaves[indices[0]].parameter.is_floating_point():
            return ShardBucket(indices, self._leaves, self._sum, self._comm_dtype, self._scattered)
        if isinstance(self._compression, Residuals):
            return make_feedback_bucket(indices, self._leaves, self._sum, self._compression)
        blocks = [-(-leaf.parameter.numel() // BLOCK) for leaf in self._leaves]
        first = list(accumulate(blocks, initial=0))
        return RoundedBucket(indices, self._leaves, self._sum, self._compression, first)

    def place_of(self, index: int) -> tuple[RunBucket, int]:
        """Return the bucket of a parameter, and the number of the parameter in it."""
        return self._places[index]

    # -- facts about them ----------------------------------------------------------------------------------------------

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes that each bucket sends, in the order of sending."""
        return tuple(bucket.sent_bytes for bucket in self._buckets)

    @property
    def buffer_bytes(self) -> int:
        """Memory of the buckets on this device, without the part in which the gradients of parameters are."""
        return sum(bucket.buffer_bytes for bucket in self._buckets)

    @property
    def names(self) -> list[tuple[str, str, int]]:
        """(first parameter, last parameter, number of parameters) of each bucket."""
        named = [[self._leaves[i].name for i in bucket.indices] for bucket in self._buckets]
        return [(names[0], names[-1], len(names)) for names in named]

    def times(self) -> list[tuple[float, float]]:
        """For each bucket of the last finished step: when it was sent, and when its sum arrived, in seconds."""
        return [bucket.times for bucket in self._buckets]

    # -- what compression has lost -------------------------------------------------------------------------------------

    @property
    def _with_residuals(self) -> list[FeedbackBucket]:
        return [bucket for bucket in self._buckets if isinstance(bucket, FeedbackBucket)]

    def compressed_gradients(self) -> CompressedGradients:
        """Return which gradients were compressed in this step, by the names of parameters."""
        return {name: one for bucket in self._with_residuals for name, one in bucket.compressed_gradients().items()}

    @torch.no_grad()
    def keep_residuals(self, compressed_gradients: CompressedGradients) -> None:
        """Keep what was not sent of these gradients, in the shards of this worker (step/residuals.py)."""
        for bucket in self._with_residuals:
            bucket.keep_residuals(compressed_gradients)
