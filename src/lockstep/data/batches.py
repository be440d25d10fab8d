"""The batches of one worker: prefetched, resumable from a few integers, and independent of the number of workers.

    sample order      ->  LoadRequest  ->  Reader in loader processes  ->  PackedBatch, on the device  ->  Batch
    (sample_order.py)     (loader.py)      (reader.py, streams.py)         (packed_batch.py)

The batches of all epochs form one sequence, and `Batches` has a position in it. Batches are loaded before the position
reaches them; the position moves when a batch is returned to the training loop.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from typing import Any, Final

import torch
from torch.utils.data import Sampler

from lockstep.data.loader import (
    LoaderLostError,
    LoaderSettings,
    batch_samples,
    choose_order,
    load,
    make_request,
    plan_requests,
)
from lockstep.data.packed_batch import map_leaves, move_to_device, prefetch_to_device
from lockstep.data.reader import (
    Batch,
    Collate,
    DataError,
    LoadContext,
    LoadFailure,
    Reader,
    Shard,
    StreamState,
    draws_random_numbers,
)
from lockstep.data.sample_order import (
    ByLength,
    Division,
    Order,
    Position,
    SamplerOrder,
    Sequential,
    Shuffled,
    check_seed,
    count_all_steps,
    count_steps,
    fingerprint_of,
    is_int,
    name_order,
    shards_of_rank,
)
from lockstep.data.streams import Assembler, Exchange, Source, StreamReader, count_parts
from lockstep.errors import refuse_unknown_options

_log = logging.getLogger(__name__)

TRIES: Final = 3  # attempts to load a batch whose loader process is lost

# Option names of torch's DataLoader and of older versions, and the option or the advice that replaces each.
LOADER_NAMES: Final = {
    "loaders": "num_workers",
    "workers": "num_workers",
    "ahead": "prefetch_factor",
    "prefetch": "prefetch_factor",
    "collate": "collate_fn",
    "timeout": "timeout_s",
    "worker_init_fn": "random numbers of loader processes follow from Run(seed=...); leave it out, and open files or "
    "connections in the dataset's first __getitem__ or in its __iter__",
    "persistent_workers": "loader processes are kept over all epochs anyway; leave it out",
    "generator": "random numbers follow from Run(seed=...); leave it out",
    "multiprocessing_context": "call torch.multiprocessing.set_start_method() instead",
}
BATCH_NAMES: Final = LOADER_NAMES | {
    "global_batch": "global_batch_size",
    "batch": "global_batch_size",
    "batch_size": "give global_batch_size=, the samples of one step over all workers together",
    "pin": "pin_memory",
    "sampler": "order",
    "batch_sampler": "order",
    "shuffle": "samples are shuffled by default, in another order in each epoch; "
    "order=lockstep.Sequential(len(dataset), global_batch_size) keeps them as they are",
    "rank": "Lockstep knows the ranks and deals the samples out; leave it out",
    "num_replicas": "Lockstep knows the number of workers and deals the samples out; leave it out",
    "seed": "random numbers follow from Run(seed=...); leave it out",
}

__all__ = ["Batch", "BatchSettings", "Batches", "DataError", "Position", "Shard"]


@dataclass(frozen=True)
class BatchSettings:
    """Options of `run.batches`. The first four and `split` decide what is computed, the others how fast."""

    global_batch_size: int  # samples per step, summed over all workers
    shards: int  # parts of a batch, and the largest possible number of workers
    epochs: int | None = 1  # None: endless
    drop_last: bool = False
    num_workers: int = 0  # loader processes; 0: the training process loads the samples itself
    prefetch_factor: int = 2  # batches that each loader process loads in advance
    collate_fn: Collate | None = None  # a list of samples -> data; None: torch's default
    pin_memory: bool | None = None  # page-locked memory, for copying to a GPU; None: True if the device is a GPU
    timeout_s: float = 1800.0  # longest wait for one batch from the loader processes
    split: str | None = None  # "worker": the stream yields different samples on each worker; None: the same on all

    def __post_init__(self) -> None:
        for name, least, more in (
            ("global_batch_size", 1, ": the samples of a step, over all workers"),
            ("shards", 1, ""),
            ("epochs", 1, ", or None for no end"),
            ("num_workers", 0, ""),
            ("prefetch_factor", 1, ""),
        ):
            value = getattr(self, name)
            if not (is_int(value) and value >= least) and not (name == "epochs" and value is None):
                raise ValueError(f"{name}={value!r}, which must be a whole number of {least} or more{more}")
        if self.shards > self.global_batch_size:
            raise ValueError(
                f"shards={self.shards} of a batch of {self.global_batch_size} samples: some would always be empty; "
                f"set shards={self.global_batch_size} or less, or a larger global_batch_size"
            )
        collate, split = self.collate_fn, self.split
        if collate is not None and not callable(collate):
            raise ValueError(f"collate_fn={collate!r} cannot be called; give a function: list of samples -> data")
        if split not in (None, "worker"):
            raise ValueError(
                f'split={split!r} is not known; "worker" is for streams that give each worker its own samples'
            )
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s!r}, which must be more than 0 seconds")


def check_options(given: Iterable[str]) -> None:
    """Raise TypeError if `run.batches` does not have one of these keywords."""
    known = [field.name for field in fields(BatchSettings)]
    refuse_unknown_options("run.batches", given, [*known, "order"], BATCH_NAMES)


class Batches:
    """Iterating yields this worker's part of every batch, from the current position on.

    Only one iterator is active at a time: a new one replaces the previous one and continues at its position. `seek` and
    `restore` may be called while iterating; the next batch is then the one at the new position.
    """

    def __init__(
        self,
        dataset: Any,
        settings: BatchSettings,
        *,
        seed: int,
        rank: int,
        size: int,
        device: torch.device,
        order: Order | Sampler[Any] | None = None,
        joined: bool = False,
        exchange: Exchange = lambda row: [row],
    ) -> None:
        """
        joined    this worker's shards are collated together into one, which has the number of the first
        exchange  for split="worker": an all-gather; called by all workers together, it returns each worker's argument
        """
        check_seed(seed)
        self.wait_s = 0.0  # total time spent waiting for batches
        self.dataset, self.settings, self._device = dataset, settings, device
        self._division = Division(settings.shards, shards_of_rank(settings.shards, size, rank), joined)
        self._order = choose_order(dataset, settings.global_batch_size, settings.drop_last, seed=seed, order=order)
        self._context = LoadContext(seed, rank, settings.collate_fn, draws_random_numbers(dataset), device)
        self._is_compared = order is not None
        self._parts: list[int] = []  # with split="worker": samples of each worker in a full batch, by rank
        self._assembler: Assembler | None = None
        if settings.split is not None:
            if self._order is not None:
                raise ValueError(
                    f'split="worker" for a {type(dataset).__name__}: a map-style dataset is not split; leave it out: '
                    "Lockstep deals the samples out"
                )
            self._parts = count_parts(settings.global_batch_size, settings.shards, size)
            self._assembler = Assembler(self._division, self._parts, settings.drop_last, exchange)
        self._position = Position()
        self._stream_states: dict[Position, StreamState] = {}  # before the current batch, and before the next one
        self._loading: Generator[Any, None, None] | None = None  # yields batches from the position on, once started
        self._active_iterator: object = None  # token of the newest iterator; older ones raise

    # ---- position and state ------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Position of the next batch."""
        return self._position

    @property
    def ended(self) -> bool:
        """No batch is left."""
        return self.settings.epochs is not None and self._position.epoch >= self.settings.epochs

    @property
    def steps_in_all(self) -> int | None:
        """Number of batches in all epochs; None if there is no end or the number cannot be known."""
        if self._order is None or self.settings.epochs is None:
            return None
        return count_all_steps(self._order, self.settings.epochs)

    def seek(self, position: Position) -> None:
        """Make the batch at `position` the next one. Raises ValueError if its epoch has fewer steps."""
        if self._order is not None and position.step > 0:
            steps = count_steps(self._order, position.epoch)
            if position.step > steps:
                raise ValueError(f"{position}: epoch {position.epoch} has only {steps} steps with these batches")
            if position.step == steps:
                position = Position(position.epoch + 1, 0, position.number)
        self._stop_loading()
        self._position = position
        self._stream_states = {place: state for place, state in self._stream_states.items() if place == position}

    @property
    def is_stream(self) -> bool:
        """The dataset is iterable only: a batch can be read only after those before it."""
        return self._order is None

    def set_rank(self, rank: int, size: int, mine: range | None = None) -> None:
        """Continue as rank `rank` of `size` workers: from the next batch on, its shards `mine` are loaded.

        None: as many as every other worker has.
        """
        if self._assembler is not None and (rank, size) != (self._context.rank, len(self._parts)):
            raise ValueError(
                f'split="worker": these batches are of {len(self._parts)} workers, and cannot be of {size}'
            )
        mine = shards_of_rank(self.settings.shards, size, rank) if mine is None else mine
        if (rank, mine) == (self._context.rank, self._division.mine):
            return
        self._stop_loading()
        self._division = replace(self._division, mine=mine)
        self._context = replace(self._context, rank=rank)

    def state(self, at: Position | None = None) -> dict[str, Any]:
        """State from which any number of workers can resume at `at`: the position (default) or the current batch's."""
        here = at or self._position
        state: dict[str, Any] = {**asdict(here), **self._identity(), "order": self.order_name}
        if (sampled := self._fingerprint(here)) is not None:
            state["sampled"] = sampled
        if (stream := self._stream_states.get(here)) is not None:
            state["stream"] = {"state": pickle.loads(stream.state), "coming": stream.coming}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises ValueError as `check` does, and then changes nothing."""
        position = self.check(state)
        self.seek(position)
        stream = state.get("stream")
        if stream is not None and self._order is None:
            here = map_leaves(stream["state"], lambda leaf: leaf.to("cpu"))  # may be on the GPU of another worker
            self._stream_states[position] = StreamState(pickle.dumps(here), stream["coming"])

    def check(self, state: Mapping[str, Any]) -> Position:
        """Return the position of a saved state. Raises ValueError if the samples there are no longer the same."""
        identity = self._identity()
        missing = [name for name in ("epoch", "step", "number", *identity) if name not in state]
        if missing:
            raise ValueError(f"this state of batches lacks {', '.join(missing)}; it has {dict(state)}")
        position = Position(state["epoch"], state["step"], state["number"])
        if position.step == 0:
            return position
        here = f"at step {position.step} of epoch {position.epoch}"
        differ = [f"{name} was {state[name]} and is {now}" for name, now in identity.items() if state[name] != now]
        if differ:
            why = "; ".join(differ)
            if state.get("workers", 0) != identity.get("workers", 0):
                raise ValueError(
                    f'cannot resume {here}: with split="worker" the samples of a step depend on the number of workers, '
                    f"which must stay the same inside an epoch: {why}. Start as many workers as before"
                )
            raise ValueError(
                f"cannot resume {here}, which now has other samples: {why}. Use the same again, or "
                f"seek(Position(epoch={position.epoch}, number={position.number})) to begin that epoch anew"
            )
        was = state.get("order", self.order_name)  # older states do not have it
        if was != self.order_name:
            raise ValueError(
                f"cannot resume {here} with another order of the samples: {was} in the checkpoint, {self.order_name} "
                "in the program. In the rest of the epoch some samples would come again, and others not at all. Use "
                f"{was} until the epoch ends (between two epochs the order may change), or start over (--fresh)"
            )
        if self._fingerprint(position) not in (None, state.get("sampled")) and "sampled" in state:
            raise ValueError(
                f"cannot resume {here}: {self.order_name}, as order of the samples, gives another order there than "
                "when this was saved. Its settings or its data have changed; or its random numbers do not come from "
                "torch, random, numpy.random, a torch.Generator that it holds, or set_epoch(epoch). Use the same again "
                "until the epoch ends, or start over (--fresh)"
            )
        return position

    @property
    def order_name(self) -> str:
        """Description of the sample order; equal orders have equal descriptions."""
        if self._order is None:
            return "a stream"
        return name_order(self._order, samples=len(self.dataset), seed=self._context.seed)

    def _fingerprint(self, position: Position) -> int | None:
        """Fingerprint of the samples around a position; None at an epoch's start, or if the order's name suffices."""
        if self._order is None or position.step == 0:
            return None
        return fingerprint_of(self._order, position.epoch, position.step)

    def facts(self) -> dict[str, Any]:
        """What the ledger records about the samples and their order."""
        order = "a stream" if self._order is None else type(self._order).__name__
        drop_last = bool(getattr(self._order, "drop_last", self.settings.drop_last))
        facts = {**self._identity(), "order": order, "drop_last": drop_last}
        if isinstance(self._order, Shuffled) and self._order.seed != self._context.seed:
            facts["order_seed"] = self._order.seed
        if isinstance(self._order, Shuffled | Sequential | ByLength) and self._order.size != facts["samples"]:
            facts["order_size"] = self._order.size
        if self.settings.split is not None:
            facts["split"] = self.settings.split
        if isinstance(self._order, SamplerOrder):
            once = self._order.uses_each_once(len(self.dataset))
            facts |= {"sampler": self._order.name, "each_once": once, "epoch_steps": count_all_steps(self._order, 1)}
        return facts

    def _identity(self) -> dict[str, int]:
        """The settings that decide which samples are at a position."""
        samples = -1 if self._order is None else len(self.dataset)
        found = {"global_batch_size": self.settings.global_batch_size, "samples": samples, "seed": self._context.seed}
        return found | ({"workers": len(self._parts)} if self._assembler is not None else {})

    # ---- batches -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Batch, None, None]:
        token = self._active_iterator = object()
        try:
            while not self.ended:
                began = time.perf_counter()
                if self._assembler is None:
                    batch = self._receive()
                else:
                    batch = self._assembler.assemble(self._position, self._receive)
                self.wait_s += time.perf_counter() - began
                if batch is None:
                    return
                here, self._position = batch.position, batch.position.after(ends_epoch=batch.ends_epoch)
                known = {here: self._stream_states.get(here), self._position: batch.stream_state}
                self._stream_states = {place: state for place, state in known.items() if state is not None}
                yield batch
                if self._active_iterator is not token:
                    raise RuntimeError(
                        f"rank {self._context.rank}: another loop over these batches has begun since; they have one "
                        "position, so make a second Batches for a loop inside a loop"
                    )
        finally:
            if self._active_iterator is token:
                self._stop_loading()

    def fetch(self, position: Position, shards: Sequence[int]) -> Batch:
        """Load these shards of the batch at `position` now, in this process: the same bytes as their own worker gets.

        The shards may belong to any worker. Neither the position nor batches that are being prefetched change. Raises
        TypeError for a stream: only map-style datasets can do this.
        """
        if self._order is None:
            raise TypeError(
                f"rank {self._context.rank}: {type(self.dataset).__name__} is a stream, and of that no single batch "
                "can be fetched; iterate, or use a map-style dataset"
            )
        numbers, steps = list(shards), count_steps(self._order, position.epoch)
        if not all(0 <= number < self.settings.shards for number in numbers):
            raise ValueError(f"shards={numbers}: this batch has shards 0 to {self.settings.shards - 1}")
        if position.step >= steps:
            raise ValueError(f"{position}: epoch {position.epoch} has only {steps} steps")
        samples = batch_samples(self._order, position, len(self.dataset))
        division, is_last = Division(self.settings.shards, numbers), position.step == steps - 1
        request = make_request(samples, position, division, ends_epoch=is_last)
        batch: Batch = move_to_device(self._device, batch_or_raise(Reader(self.dataset, self._context)[request]))
        return batch

    def read_again(self, position: Position) -> Iterator[Batch]:
        """Yield this worker's batches from `position` on, without end, as `fetch` loads them."""
        assert self._order is not None
        requests = plan_requests(
            self._order, position, None, self._division, size=len(self.dataset), is_compared=self._is_compared
        )
        reader = Reader(self.dataset, self._context)
        for request in requests:
            batch = batch_or_raise(request if isinstance(request, LoadFailure) else reader[request])
            assert batch is not None
            yield move_to_device(self._device, batch)

    def _receive(self) -> Batch | None:
        for tries_left in reversed(range(TRIES)):
            if self._loading is None:
                self._loading = self._start_loading()
            try:
                return batch_or_raise(next(self._loading, None))
            except LoaderLostError as error:
                self._stop_loading()
                if not tries_left:
                    raise
                _log.warning("%s; another one is started", error)
        raise AssertionError("unreachable")

    def _start_loading(self) -> Generator[Any, None, None]:
        settings, order, start = self.settings, self._order, self._position
        how = LoaderSettings(
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            pin_memory=self._device.type == "cuda" if settings.pin_memory is None else settings.pin_memory,
            timeout_s=settings.timeout_s,
            rank=self._context.rank,
            device=self._device,
            hide_worker_info=order is None,
        )
        context = replace(self._context, device=None) if settings.num_workers > 0 else self._context
        if order is None:
            is_part = self._assembler is not None
            samples = self._parts[self._context.rank] if is_part else settings.global_batch_size
            source = Source(self.dataset, samples, settings.drop_last, settings.epochs, is_part)
            stream = StreamReader(source, context, self._division, start, self._stream_states.get(start))
            batches = load(stream, count(), how)
        else:
            requests = plan_requests(
                order, start, settings.epochs, self._division, size=len(self.dataset), is_compared=self._is_compared
            )
            batches = load(Reader(self.dataset, context), requests, how)
        return prefetch_to_device(batches, self._device)

    def _stop_loading(self) -> None:
        if self._loading is not None:
            self._loading.close()
            self._loading = None
        if self._assembler is not None:
            self._assembler.reset()


def batch_or_raise(loaded: Any) -> Batch | None:
    """Return what a reader returned; raise the error if it is a LoadFailure. None: a stream has ended."""
    if isinstance(loaded, LoadFailure):
        raise loaded.error from loaded.cause
    assert loaded is None or isinstance(loaded, Batch)
    return loaded
