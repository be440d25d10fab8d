"""The batches of one worker: loaded ahead, resumable from a few integers, the same whatever the number of workers.

    order, walk, cut  ->  jobs  ->  Reader in loader processes  ->  parcels  ->  on the device  ->  Batch
    (order.py)            (jobs.py) (reader.py, stream.py)          (loader.py)  (ahead.py)

There is one endless line of batches over all epochs, and a position in it. Loading runs ahead of the position; the
position itself moves when a batch is handed out.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any, Final

import torch
from torch.utils.data import Sampler

from lockstep.data.iterable import Source, StreamReader
from lockstep.data.load_plan import ask, choose_order, make_job, make_jobs
from lockstep.data.loader import LoaderLost, Loading, load
from lockstep.data.packed_batch import over
from lockstep.data.prefetch import arrive, put_on
from lockstep.data.reader import Batch, Collate, DataError, Failure, Mark, Reader, Recipe, Shard, draws_random_numbers
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
    name_order,
    share,
)
from lockstep.data.split_streams import Assembler, Exchange, count_parts
from lockstep.errors import refuse_unknown_options

TRIES: Final = 3  # to load a batch, if its loader process is lost

# Names that people bring along from torch's DataLoader and elsewhere, and what they become here.
LOADER_NAMES: Final = {
    "loaders": "num_workers",
    "workers": "num_workers",
    "ahead": "prefetch_factor",
    "prefetch": "prefetch_factor",
    "collate": "collate_fn",
    "timeout": "timeout_s",
    "worker_init_fn": "random numbers of loader processes follow from Run(seed=...); leave it out, and open files or "
    "connections in the dataset's first __getitem__ or in its __iter__",
    "persistent_workers": "loader processes live over all epochs anyway; leave it out",
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

__all__ = ["Batch", "Batches", "DataError", "Position", "Settings", "Shard"]


@dataclass(frozen=True)
class Settings:
    """What the batches are. The first four decide what is computed, the others how fast it comes."""

    global_batch_size: int  # samples, over all workers
    shards: int = 8
    epochs: int | None = 1  # None: endless
    drop_last: bool = False
    num_workers: int = 0  # loader processes; 0: samples are loaded by this process, while it waits
    prefetch_factor: int = 2  # batches loaded ahead, by loader processes (one each at least)
    collate_fn: Collate | None = None  # a list of samples -> data; None: torch's default
    pin_memory: bool | None = None  # page-locked memory, for copying to a GPU; None: if the device is one
    timeout_s: float = 1800.0  # for one batch from the loader processes
    split: str | None = None  # "worker": a stream gives each worker its own samples; None: all give the same

    def __post_init__(self) -> None:
        for name, least in (
            ("global_batch_size", 1),
            ("shards", 1),
            ("epochs", 1),
            ("num_workers", 0),
            ("prefetch_factor", 1),
        ):
            value = getattr(self, name)
            if name == "epochs" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                more = {
                    "epochs": ", or None for no end",
                    "global_batch_size": ": the samples of a step, over all workers",
                }
                raise ValueError(
                    f"{name}={value!r}, which must be a whole number of {least} or more{more.get(name, '')}"
                )
        if self.shards > self.global_batch_size:
            raise ValueError(
                f"shards={self.shards} of a batch of {self.global_batch_size} samples: some would always be empty; "
                f"set shards={self.global_batch_size} or less, or a larger global_batch_size"
            )
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise ValueError(
                f"collate_fn={self.collate_fn!r} cannot be called; give a function: list of samples -> data"
            )
        if self.split not in (None, "worker"):
            raise ValueError(
                f'split={self.split!r} is not known; "worker" is for streams that give each worker its own samples'
            )
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s!r}, which must be more than 0 seconds")


def check_options(given: Iterable[str]) -> None:
    """Raise TypeError for keywords that `run.batches` does not have."""
    known = [field.name for field in fields(Settings)]
    refuse_unknown_options("run.batches", given, [*known, "order"], BATCH_NAMES)


class Batches:
    """Iterate to get this worker's part of every batch, from the position on.

    One iterator at a time: a new one takes over, and goes on where the last one was. `seek` and `restore` may be called
    while iterating; the batch that comes next is then the one at the new position.
    """

    def __init__(
        self,
        dataset: Any,
        settings: Settings,
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
        joined    this worker's shards come as one, collated together and numbered as the first of them
        exchange  for split="worker": called by all workers together, it returns what each of them gave
        """
        check_seed(seed)
        self.wait_s = 0.0  # spent waiting for batches, in all
        self._dataset, self._settings, self._device = dataset, settings, device
        self._division = Division(settings.shards, share(settings.shards, size, rank), joined)
        self._order = choose_order(dataset, settings.global_batch_size, settings.drop_last, seed=seed, order=order)
        self._recipe = Recipe(seed, rank, settings.collate_fn, draws_random_numbers(dataset), device)
        self._is_compared = order is not None
        self._parts: list[int] = []  # samples of each worker, with split="worker"
        self._assembler: Assembler | None = None
        if settings.split is not None:
            if self._order is not None:
                raise ValueError(
                    f'split="worker" for a {type(dataset).__name__}: a map-style dataset is not split; leave it out: '
                    "Lockstep deals the samples out"
                )
            drop_last = settings.drop_last
            self._parts = count_parts(settings.global_batch_size, settings.shards, size)
            self._assembler = Assembler(self._division, self._parts, drop_last=drop_last, exchange=exchange)
        self._position = Position()
        self._marks: dict[Position, Mark] = {}  # where the stream is before the batch in hand, and before the next
        self._arriving: Generator[Any, None, None] | None = None  # loading from the position on, if it has begun
        self._turn: object = None  # whose turn it is, of all iterators that were ever made

    # ---- where we are ------------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Of the batch that is handed out next."""
        return self._position

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def dataset(self) -> Any:
        return self._dataset

    @property
    def ended(self) -> bool:
        """No batch is left."""
        return self._settings.epochs is not None and self._position.epoch >= self._settings.epochs

    @property
    def steps_in_all(self) -> int | None:
        """Batches of all epochs; None if that has no end, or cannot be known."""
        if self._order is None or self._settings.epochs is None:
            return None
        return count_all_steps(self._order, self._settings.epochs)

    def seek(self, position: Position) -> None:
        """The batch at `position` is handed out next."""
        if self._order is not None and position.step > 0:
            steps = count_steps(self._order, position.epoch)
            if position.step > steps:
                raise ValueError(f"{position}: epoch {position.epoch} has only {steps} steps with these batches")
            if position.step == steps:
                position = Position(position.epoch + 1, 0, position.number)
        self._stop_loading()
        self._position = position
        self._marks = {place: mark for place, mark in self._marks.items() if place == position}

    def share_out(self, rank: int, size: int) -> None:
        """We are another worker now, or among others: the batch that comes next has our shards of then."""
        if self._assembler is not None and (rank, size) != (self._recipe.rank, len(self._parts)):
            raise ValueError(
                f'split="worker": these batches are of {len(self._parts)} workers, and cannot be of {size}'
            )
        mine = share(self._settings.shards, size, rank)
        if (rank, mine) == (self._recipe.rank, self._division.mine):
            return
        self._stop_loading()
        self._division = replace(self._division, mine=mine)
        self._recipe = replace(self._recipe, rank=rank)

    def state(self, at: Position | None = None) -> dict[str, Any]:
        """All that is needed to go on from the position, or from that of the batch in hand, in a world of any size."""
        here = at or self._position
        state: dict[str, Any] = {"epoch": here.epoch, "step": here.step, "number": here.number, **self._identity()}
        state["order"] = self.order_name
        sampled = self._fingerprint(here)
        if sampled is not None:
            state["sampled"] = sampled
        if here in self._marks:
            mark = self._marks[here]
            state["stream"] = {"state": pickle.loads(mark.state), "coming": mark.coming}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises ValueError, and changes nothing, as `check` does."""
        position = self.check(state)
        self.seek(position)
        stream = state.get("stream")
        if stream is not None and self._order is None:
            here = over(stream["state"], lambda leaf: leaf.to("cpu"))  # it may come from another worker's GPU
            self._marks[position] = Mark(pickle.dumps(here), stream["coming"])

    def check(self, state: Mapping[str, Any]) -> Position:
        """The position of a state. Raises ValueError if other samples would come there than where it was saved."""
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
                    f'cannot go on {here}: with split="worker" the samples '
                    f"of a step depend on the number of workers, which must stay the same inside an epoch: {why}. "
                    "Start as many workers as before"
                )
            raise ValueError(
                f"cannot go on {here}, which is another place now: "
                f"{why}. Use the same again, or seek(Position(epoch={position.epoch}, "
                f"number={position.number})) to begin that epoch anew"
            )
        was = state.get("order", self.order_name)  # an older state does not say
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
        """The order of the samples, in words that are the same for equal orders."""
        if self._order is None:
            return "a stream"
        return name_order(self._order, samples=len(self._dataset), seed=self._recipe.seed)

    def _fingerprint(self, position: Position) -> int | None:
        """Of the samples around this position, inside of an epoch; None: the name of the order tells all."""
        if self._order is None or position.step == 0:
            return None
        return fingerprint_of(self._order, position.epoch, position.step)

    def facts(self) -> dict[str, Any]:
        """For the ledger: which samples there are, and in which order they come."""
        order = "a stream" if self._order is None else type(self._order).__name__
        drop_last = bool(getattr(self._order, "drop_last", self._settings.drop_last))
        facts = {**self._identity(), "order": order, "drop_last": drop_last}
        if isinstance(self._order, Shuffled) and self._order.seed != self._recipe.seed:
            facts["order_seed"] = self._order.seed
        if isinstance(self._order, Shuffled | Sequential | ByLength) and self._order.size != facts["samples"]:
            facts["order_size"] = self._order.size
        if self._settings.split is not None:
            facts["split"] = self._settings.split
        if isinstance(self._order, SamplerOrder):
            once = self._order.uses_each_once(len(self._dataset))
            facts |= {"sampler": self._order.name, "each_once": once}
            facts["epoch_steps"] = count_all_steps(self._order, 1)
        return facts

    def _identity(self) -> dict[str, int]:
        """What decides which samples come at a position."""
        samples = -1 if self._order is None else len(self._dataset)
        found = {"global_batch_size": self._settings.global_batch_size, "samples": samples, "seed": self._recipe.seed}
        return found | ({"workers": len(self._parts)} if self._assembler is not None else {})

    # ---- batches -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Batch, None, None]:
        turn = self._turn = object()
        try:
            while not self.ended:
                began = time.perf_counter()
                batch = self._receive() if self._assembler is None else self._assemble(self._assembler)
                self.wait_s += time.perf_counter() - began
                if batch is None:
                    return
                here, self._position = batch.position, batch.position.after(ends_epoch=batch.ends_epoch)
                known = {here: self._marks.get(here), self._position: batch.mark}
                self._marks = {place: mark for place, mark in known.items() if mark is not None}
                yield batch
                if self._turn is not turn:
                    raise RuntimeError(
                        f"rank {self._recipe.rank}: another loop over these batches has begun since; "
                        "they have one position, so make a second Batches for a loop inside a loop"
                    )
        finally:
            if self._turn is turn:
                self._stop_loading()

    def fetch(self, position: Position, shards: Sequence[int]) -> Batch:
        """These shards of the batch at `position`, anybody's, loaded here and now: the same bytes as their owner gets.

        For map-style datasets. Nothing that is under way is disturbed, and the position stays.
        """
        if self._order is None:
            raise TypeError(
                f"rank {self._recipe.rank}: {type(self._dataset).__name__} is a stream, "
                "and of that no single batch can be fetched; iterate, or use a map-style dataset"
            )
        numbers, steps = list(shards), count_steps(self._order, position.epoch)
        if not all(0 <= number < self._settings.shards for number in numbers):
            raise ValueError(f"shards={numbers}: this batch has shards 0 to {self._settings.shards - 1}")
        if position.step >= steps:
            raise ValueError(f"{position}: epoch {position.epoch} has only {steps} steps")
        division = Division(self._settings.shards, numbers)
        samples = ask(self._order, position, len(self._dataset))
        job = make_job(samples, position, division, ends_epoch=position.step == steps - 1)
        batch: Batch = put_on(self._device, batch_of(Reader(self._dataset, self._recipe)[job]))
        return batch

    def _assemble(self, assembler: Assembler) -> Batch:
        return assembler.assemble(self._position, self._receive)

    def _receive(self) -> Batch | None:
        for tries_left in reversed(range(TRIES)):
            if self._arriving is None:
                self._arriving = self._start_loading()
            try:
                return batch_of(next(self._arriving, None))
            except LoaderLost as error:
                self._stop_loading()
                if not tries_left:
                    raise
                print(f"lockstep: {error}; another one is started", file=sys.stderr, flush=True)
        raise AssertionError("unreachable")

    def _start_loading(self) -> Generator[Any, None, None]:
        settings, order, start = self._settings, self._order, self._position
        how = Loading(
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            pin_memory=self._device.type == "cuda" if settings.pin_memory is None else settings.pin_memory,
            timeout_s=settings.timeout_s,
            rank=self._recipe.rank,
            device=self._device,
            hide_worker_info=order is None,
        )
        recipe = replace(self._recipe, device=None) if settings.num_workers > 0 else self._recipe
        if order is None:
            is_part = self._assembler is not None
            samples = self._parts[self._recipe.rank] if is_part else settings.global_batch_size
            source = Source(self._dataset, samples, settings.drop_last, settings.epochs, is_part)
            parcels = load(StreamReader(source, recipe, self._division, start, self._marks.get(start)), count(), how)
        else:
            jobs = make_jobs(
                order, start, settings.epochs, self._division, size=len(self._dataset), is_compared=self._is_compared
            )
            parcels = load(Reader(self._dataset, recipe), jobs, how)
        return arrive(parcels, self._device)

    def _stop_loading(self) -> None:
        if self._arriving is not None:
            self._arriving.close()
            self._arriving = None
        if self._assembler is not None:
            self._assembler.forget()


def batch_of(arrived: Any) -> Batch | None:
    """What a reader gave, if it is a batch; raises what it gave in place of one."""
    if isinstance(arrived, Failure):
        raise arrived.error from arrived.cause
    assert arrived is None or isinstance(arrived, Batch)
    return arrived
