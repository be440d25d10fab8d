"""Every sample of a dataset exactly once, in pieces of a fixed size that are dealt out to the workers.

The pieces do not depend on the number of workers, so neither does what the model makes of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial
from itertools import count, islice
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset

from lockstep import faults
from lockstep.comm import agreement
from lockstep.data.batches import LOADER_NAMES, TRIES, Batches, batch_of
from lockstep.data.iterable import COMPARE_EVERY, COMPARED_AT_START
from lockstep.data.load_plan import refuse_loader
from lockstep.data.loader import LoaderLost, Loading, load
from lockstep.data.prefetch import put_on
from lockstep.data.reader import Collate, Job, Reader, Recipe, draws_random_numbers
from lockstep.data.sample_digest import hash_of_samples
from lockstep.data.sample_order import Position
from lockstep.ddp import replica
from lockstep.ddp.state_digest import cheap_digests, named_state
from lockstep.errors import ReplicaMismatchError, UnevenDataError, refuse_unknown_options
from lockstep.seed import kept_random_state, mix, sow
from lockstep.train.buffer_snapshot import BufferSnapshot
from lockstep.train.loop_check import refuse_model
from lockstep.train.metrics import Mean, Pairs, as_pairs, gather_pieces, mean_of
from lockstep.train.session import Session
from lockstep.train.state_log import Witness
from lockstep.train.state_transfer import hand_over, tensors_from_text, tensors_to_text
from lockstep.train.step_check import SEED_IT
from lockstep.world.world import World

PREFETCH: Final = 2  # pieces that each loader process has ready
TIMEOUT_S: Final = 600.0  # of one piece
WITNESSED_PIECES: Final = 12  # that `lockstep certify` evaluates: some for each of four workers
_IN_ORDER: Final = "every sample is evaluated exactly once, in the order of the dataset; leave it out"
EVALUATE_NAMES: Final = LOADER_NAMES | {
    "batch": "batch_size",
    "global_batch_size": "batch_size",
    "shuffle": _IN_ORDER,
    "sampler": f"{_IN_ORDER}, or give a torch.utils.data.Subset",
    "batch_sampler": f"{_IN_ORDER}, or give a torch.utils.data.Subset",
    "order": _IN_ORDER,
    "drop_last": "no sample is left out; leave it out",
}


@dataclass(frozen=True)
class Pieces:
    """How a dataset is cut up, and loaded."""

    dataset: Any
    batch_size: int  # samples of a piece
    num_workers: int = 0  # processes
    collate_fn: Collate | None = None  # None: torch's default

    def __post_init__(self) -> None:
        refuse_loader(self.dataset)
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size!r} must be a whole number, 1 or more")
        if not isinstance(self.num_workers, int) or self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers!r} must be a whole number, 0 or more")


def check_options(what: str, given: Iterable[str]) -> None:
    """Raise TypeError for keywords that `what`, run.evaluate or run.predict, does not have."""
    known = [field.name for field in fields(Pieces) if field.name != "dataset"]
    refuse_unknown_options(what, given, known, EVALUATE_NAMES)


@dataclass
class Figures:
    """Of this worker's pieces, by number; and how many samples the dataset has.

    `content` is a hash of pieces of a stream, of this worker's and of others'; it must be equal on all workers.
    """

    pieces: dict[int, Any]
    samples: int = 0
    content: int = 0


def run(
    figures: Callable[[Any, Any], Any],
    model: nn.Module,
    pieces: Pieces,
    *,
    world: World,
    seed: int,
    go_on: Callable[[], None],
    read: Callable[[Any], Any],
) -> Figures:
    """The model is in eval mode meanwhile. Every piece has random numbers of its own, from loading it on, and finds the
    buffers as they were before: what a forward pass makes of them counts neither for the next piece nor afterwards.

    go_on   asked before each piece; raises if the figures are of no use any more
    read    what is kept of what `figures` returned for a piece; raises TypeError if that is not what it must be
    """
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    found, buffers = Figures({}), BufferSnapshot(model)
    buffers.look()
    try:
        with torch.no_grad(), kept_random_state(world.device):
            for n, (number, data) in enumerate(_load(pieces, world, seed, found)):
                go_on()
                found.pieces[number] = read(figures(model, put_on(world.device, data)))
                if n == 0:
                    buffers.compare_less()
                buffers.go_back()
    finally:
        buffers.go_back(always=True)
        for module in was_training:
            module.training = True
    return found


def read_figures(returned: Any) -> Pairs:
    """The figures of a piece: (sum, weight), or several by name. What a loss function returns with metrics is these and
    the loss itself, as "loss"."""
    if isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[2], Mapping):
        returned = {"loss": returned[:2], **returned[2]}
    return as_pairs(returned, "the function given to evaluate")


def read_rows(returned: Any) -> dict[str, Tensor]:
    """The predictions for a piece, on the CPU: a tensor, or several by name, each with a row per sample."""
    named = returned if isinstance(returned, Mapping) else {"": returned}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            what = "a scalar" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(
                f"the function given to predict returned {what}{f' for {name!r}' if name else ''}; it must return a "
                "tensor with a row for each sample, such as `model(batch[0])`, or a dict of such tensors"
            )
    return {str(name): value.detach().cpu() for name, value in named.items()}


def join_rows(pieces: Mapping[int, Mapping[str, Tensor]], samples: int) -> dict[str, Tensor]:
    """The predictions for all samples, in the order of the dataset. Raises ValueError if there is not one for each."""
    names = next((list(piece) for piece in pieces.values()), [])
    joined = {name: torch.cat([pieces[number][name] for number in sorted(pieces)]) for name in names}
    for name, rows in joined.items():
        if len(rows) != samples:
            raise ValueError(
                f"run.predict: the function returned {len(rows)} rows{f' of {name!r}' if name else ''} for "
                f"{samples} samples; it must return one for each"
            )
    return joined


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")


def count_samples(dataset: Any) -> int | None:
    """How many samples it has; None for a stream. Raises ValueError for a DataLoader, which is no dataset."""
    refuse_loader(dataset)
    return None if is_stream(dataset) else len(dataset)


def _load(pieces: Pieces, world: World, seed: int, seen: Figures) -> Iterator[tuple[int, Any]]:
    if is_stream(pieces.dataset):
        yield from _read_stream(pieces, world, seed, seen)
        return
    seen.samples = len(pieces.dataset)
    in_all = -(-seen.samples // pieces.batch_size)
    mine = range(world.rank * in_all // world.size, (world.rank + 1) * in_all // world.size)
    here = None if pieces.num_workers else world.device
    recipe = Recipe(mix(seed, "evaluate"), world.rank, pieces.collate_fn, draws_random_numbers(pieces.dataset), here)
    how = Loading(
        num_workers=min(pieces.num_workers, len(mine)),
        prefetch_factor=PREFETCH,
        pin_memory=False,
        timeout_s=TIMEOUT_S,
        rank=world.rank,
        device=world.device,
        hide_worker_info=False,
    )
    jobs = [_cut_out(number, pieces.batch_size, seen.samples) for number in mine]
    done = lost = 0
    while done < len(jobs):
        try:
            with closing(load(Reader(pieces.dataset, recipe), jobs[done:], how)) as parcels:
                for parcel in parcels:
                    batch = batch_of(parcel.open())
                    assert batch is not None
                    sow(mix(seed, "evaluate", mine[done]), world.device)
                    done += 1
                    yield mine[done - 1], batch.shards[0].data
        except LoaderLost as error:
            lost += 1
            if lost == TRIES:
                raise
            print(f"lockstep: {error}; another one is started", file=sys.stderr, flush=True)


def _read_stream(pieces: Pieces, world: World, seed: int, seen: Figures) -> Iterator[tuple[int, Any]]:
    recipe = Recipe(mix(seed, "evaluate"), world.rank, pieces.collate_fn, is_random=True, device=world.device)
    sow(mix(seed, "evaluate"), world.device)  # a stream that shuffles itself may draw random numbers when it is begun
    samples = iter(pieces.dataset)
    for number in count():
        sow(mix(seed, "evaluate", number), world.device)
        piece = list(islice(samples, pieces.batch_size))
        if not piece:
            return
        if number < COMPARED_AT_START or number % COMPARE_EVERY == 0:
            seen.content = mix(seen.content, hash_of_samples(piece))
        if number % world.size == world.rank:
            names = range(seen.samples, seen.samples + len(piece))
            yield number, recipe.put_together(piece, names, Position(0, number, number), shard=0)
        seen.samples += len(piece)


def refuse_uneven_stream(found: Figures, compare: Callable[[str, dict[str, str]], None]) -> None:
    """Raise, on all workers, if they have not read the same samples. `compare` is that of Accord."""
    compare("run.evaluate", {"samples in the dataset": str(found.samples)})
    try:
        compare("run.evaluate", {"content": str(found.content)})
    except ReplicaMismatchError:
        raise UnevenDataError(
            "run.evaluate: the workers have read different samples. A stream must give every worker the same samples; "
            "Lockstep deals them out. If it splits itself (by rank, split_dataset_by_node, get_worker_info), remove "
            f"that. {SEED_IT}"
        ) from None


def _cut_out(number: int, batch: int, samples: int) -> Job:
    span = range(number * batch, min((number + 1) * batch, samples))
    return Job(Position(0, number, number), ends_epoch=False, count=len(span), of_shards=1, shards=((0, span),))


# ---- all workers together --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A call of `run.evaluate` or `run.predict`."""

    what: str  # the call
    model: nn.Module
    other: nn.Module | None  # what is evaluated in place of the model
    dataset: Any
    batch_size: int
    loading: dict[str, Any]


def evaluate(session: Session, figures: Callable[[Any, Any], Any], asked: Asked) -> dict[str, Mean]:
    """The means of all figures over all samples, the same on all workers."""

    def reduce(mine: Figures) -> dict[str, list[float]]:
        with session.call_check.explains(asked.what):
            pieces = gather_pieces(session.group, session.device, mine.pieces, what=asked.what)
        totals = {name: mean_of(pairs) for name, pairs in pieces.items()}
        return {name: [mean.sum, mean.weight] for name, mean in totals.items()}

    found = _go_through(session, figures, asked, read_figures, reduce)
    _note(session, asked, lambda: found)
    return {name: Mean(*pair) for name, pair in found.items()}


def predict(session: Session, function: Callable[[Any, Any], Any], asked: Asked) -> dict[str, Tensor]:
    """What the function returns for all samples, in the order of the dataset, on all workers."""

    def reduce(mine: Figures) -> dict[str, list[Any]]:
        pieces: dict[int, dict[str, Tensor]] = {}
        for rank in range(session.world.size):
            theirs = {str(n): rows for n, rows in mine.pieces.items()} if rank == session.world.rank else None
            told = hand_over(session.group, session.device, rank, theirs)
            pieces |= {int(n): {name: rows.cpu() for name, rows in piece.items()} for n, piece in told.items()}
        return tensors_to_text(join_rows(pieces, mine.samples))

    rows = tensors_from_text(_go_through(session, function, asked, read_rows, reduce))
    _note(session, asked, lambda: {name: cheap_digests([tensor]) for name, tensor in rows.items()})
    return rows


def _note(session: Session, asked: Asked, figures: Callable[[], Mapping[str, Sequence[float]]]) -> None:
    """For `lockstep certify`: the figures, and the state after the evaluation."""
    if session.witness is not None:
        state = partial(named_state, asked.model if asked.other is None else asked.other)
        session.witness.note_evaluation(asked.what, figures(), state, writes=session.is_main)


def evaluate_for_witness(session: Session, witness: Witness, model: nn.Module, loss: Any, batches: Batches) -> None:
    """For `lockstep certify`: the loss of some training samples in eval mode, and the state afterwards.

    The program is ended before it comes to an evaluation behind its loop. Nothing is noted of a model that has no loss
    in eval mode, and of streams.
    """
    dataset, settings = batches.dataset, batches.settings
    if is_stream(dataset):
        return
    size = -(-settings.global_batch_size // settings.shards)
    some = Subset(dataset, range(min(len(dataset), size * WITNESSED_PIECES)))
    cut = Pieces(some, size, collate_fn=settings.collate_fn)

    def go() -> dict[str, list[float]] | None:
        mine: dict[int, Pairs] | None = None
        go_on, seed = session.calls.check_left, session.seed
        try:
            with session.options.precision.autocast(session.device):
                mine = run(loss, model, cut, world=session.world, seed=seed, go_on=go_on, read=read_figures).pieces
        except Exception:  # a model that is not made for it
            go_on()
        told = agreement.tell_all(session.group, mine, device=session.device)
        if any(one is None for one in told):
            return None
        pieces = [{name: tuple(pair) for name, pair in pairs.items()} for one in told for pairs in one.values()]
        means = {name: mean_of([piece[name] for piece in pieces]) for name in pieces[0]}
        return {name: [mean.sum, mean.weight] for name, mean in means.items()}

    found = session.calls.make("the evaluation for certify", go)
    if found is not None:
        witness.note_evaluation("the loss in eval mode", found, partial(named_state, model), writes=session.is_main)


def _go_through(
    session: Session,
    function: Callable[[Any, Any], Any],
    asked: Asked,
    read: Callable[[Any], Any],
    reduce: Callable[[Figures], Any],
) -> Any:
    """All samples through the function, over all workers; what `reduce` makes of all pieces, as JSON."""
    what, other = asked.what, asked.other
    if other is not None and not isinstance(other, nn.Module):
        raise TypeError(f"{what}(model=...) takes a torch.nn.Module, not a {type(other).__name__}")
    if other is not None:
        refuse_model(other, f"{what}(model=...)")
    model = asked.model if other is None else other.to(session.device)
    samples = count_samples(asked.dataset)
    session.agree(what, {"batch_size": asked.batch_size, "len(dataset)": samples})
    cut = Pieces(asked.dataset, asked.batch_size, **asked.loading)
    began_s = time.monotonic()

    def go() -> Any:
        faults.at("evaluating")
        if other is not None:
            advice = f"{what}(model=...) takes a model that is the same on all workers"
            replica.check_same_values(session.group, model, set(), session.device, buffers=True, advice=advice)
        with session.options.precision.autocast(session.device):
            go_on, seed = session.calls.check_left, session.seed
            mine = run(function, model, cut, world=session.world, seed=seed, go_on=go_on, read=read)
        if samples is None:
            refuse_uneven_stream(mine, session.call_check.compare)
        if mine.samples == 0:
            raise ValueError(f"{what}: the dataset has no samples")
        return reduce(mine)

    with session.chronicle.during("evaluating"):
        found = session.calls.make(f"{what}: figures", go)
    session.chronicle.event("evaluate", took_s=time.monotonic() - began_s)
    return found
