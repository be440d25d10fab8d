"""Evaluates every sample of a dataset exactly once, in pieces of a fixed size that are divided among the workers.

The pieces do not depend on the number of workers, so neither do the results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from itertools import count, islice
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset

from lockstep import faults
from lockstep.comm import agreement
from lockstep.data.batches import LOADER_NAMES, TRIES, Batches, batch_or_raise
from lockstep.data.loader import LoaderLostError, LoaderSettings, load, refuse_loader
from lockstep.data.packed_batch import move_to_device
from lockstep.data.reader import Collate, LoadContext, LoadRequest, Reader, draws_random_numbers, hash_of_samples
from lockstep.data.sample_order import Position
from lockstep.data.streams import COMPARE_EVERY, COMPARED_AT_START
from lockstep.ddp import replica
from lockstep.ddp.replica import cheap_digests, named_state
from lockstep.errors import ReplicaMismatchError, UnevenDataError, refuse_unknown_options
from lockstep.recovery.certify_log import StateLog
from lockstep.recovery.state_transfer import broadcast_state, tensors_from_text, tensors_to_text
from lockstep.seed import derive_seed, preserve_random_state, seed_all
from lockstep.step.buffer_snapshot import BufferSnapshot
from lockstep.step.step_check import SEED_IT
from lockstep.trace.metrics import Mean, Pairs, as_pairs, gather_pieces, mean_of
from lockstep.train.loop_check import refuse_model
from lockstep.train.session import Session
from lockstep.world.world import World

PREFETCH: Final = 2  # pieces that each loader process has ready
PIECE_TIMEOUT_S: Final = 600.0  # for loading one piece
STATE_LOG_PIECES: Final = 12  # pieces that `lockstep certify` evaluates: some for each of four workers
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
class PieceOptions:
    """How a dataset is cut into pieces and loaded."""

    dataset: Any
    batch_size: int  # samples per piece
    num_workers: int = 0  # loader processes
    collate_fn: Collate | None = None  # None: torch's default

    def __post_init__(self) -> None:
        refuse_loader(self.dataset)
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size!r} must be a whole number, 1 or more")
        if not isinstance(self.num_workers, int) or self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers!r} must be a whole number, 0 or more")


def check_options(what: str, given: Iterable[str]) -> None:
    """Raise TypeError for keywords that `what`, run.evaluate or run.predict, does not have."""
    known = [field.name for field in fields(PieceOptions) if field.name != "dataset"]
    refuse_unknown_options(what, given, known, EVALUATE_NAMES)


@dataclass
class PieceResults:
    """The results of this worker's pieces, by number; and the number of samples of the dataset.

    `content` is a hash of some pieces of a stream, also of those of other workers; it must be equal on all workers.
    """

    pieces: dict[int, Any]
    samples: int = 0
    content: int = 0


def evaluate_pieces(
    function: Callable[[Any, Any], Any],
    model: nn.Module,
    pieces: PieceOptions,
    *,
    world: World,
    seed: int,
    check_left: Callable[[], None],
    read: Callable[[Any], Any],
) -> PieceResults:
    """Call `function(model, batch)` for each piece of this worker, with the model in eval mode.

    Every piece is loaded and evaluated with its own random numbers, and starts from the buffers as they were before:
    what a forward pass writes to them is discarded.

    check_left  called before each piece; raises if the results are not needed any more
    read        converts what `function` returned for a piece; raises TypeError if it returned something else
    """
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    found, buffers = PieceResults({}), BufferSnapshot(model)
    buffers.capture()
    try:
        with torch.no_grad(), preserve_random_state(world.device):
            for n, (number, data) in enumerate(_load(pieces, world, seed, found)):
                check_left()
                found.pieces[number] = read(function(model, move_to_device(world.device, data)))
                if n == 0:
                    buffers.compare_less()
                buffers.restore()
    finally:
        buffers.restore(always=True)
        for module in was_training:
            module.training = True
    return found


def read_metrics(returned: Any) -> Pairs:
    """The metrics of a piece: (sum, weight), or several by name.

    A loss function that returns metrics, too, gives these and the loss itself as "loss".
    """
    if isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[2], Mapping):
        returned = {"loss": returned[:2], **returned[2]}
    return as_pairs(returned, "the function given to evaluate")


def read_rows(returned: Any) -> dict[str, Tensor]:
    """The predictions for a piece, copied to the CPU: a tensor, or several by name, each with a row per sample."""
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
    """The number of samples; None for a stream. Raises ValueError for a DataLoader, which is no dataset."""
    refuse_loader(dataset)
    return None if is_stream(dataset) else len(dataset)


def _load(pieces: PieceOptions, world: World, seed: int, results: PieceResults) -> Iterator[tuple[int, Any]]:
    if is_stream(pieces.dataset):
        yield from _read_stream(pieces, world, seed, results)
        return
    results.samples = len(pieces.dataset)
    in_all = -(-results.samples // pieces.batch_size)
    mine = range(world.rank * in_all // world.size, (world.rank + 1) * in_all // world.size)
    here = None if pieces.num_workers else world.device
    context = LoadContext(
        derive_seed(seed, "evaluate"), world.rank, pieces.collate_fn, draws_random_numbers(pieces.dataset), here
    )
    how = LoaderSettings(
        num_workers=min(pieces.num_workers, len(mine)),
        prefetch_factor=PREFETCH,
        pin_memory=False,
        timeout_s=PIECE_TIMEOUT_S,
        rank=world.rank,
        device=world.device,
        hide_worker_info=False,
    )
    jobs = [_load_job(number, pieces.batch_size, results.samples) for number in mine]
    done = lost = 0
    while done < len(jobs):
        try:
            with closing(load(Reader(pieces.dataset, context), jobs[done:], how)) as loaded:
                for packed in loaded:
                    batch = batch_or_raise(packed.unpack())
                    assert batch is not None
                    seed_all(derive_seed(seed, "evaluate", mine[done]), world.device)
                    done += 1
                    yield mine[done - 1], batch.shards[0].data
        except LoaderLostError as error:
            lost += 1
            if lost == TRIES:
                raise
            print(f"lockstep: {error}; another one is started", file=sys.stderr, flush=True)


def _read_stream(pieces: PieceOptions, world: World, seed: int, results: PieceResults) -> Iterator[tuple[int, Any]]:
    context = LoadContext(
        derive_seed(seed, "evaluate"), world.rank, pieces.collate_fn, is_random=True, device=world.device
    )
    # A stream that shuffles itself may draw random numbers when its iterator is made.
    seed_all(derive_seed(seed, "evaluate"), world.device)
    samples = iter(pieces.dataset)
    for number in count():
        seed_all(derive_seed(seed, "evaluate", number), world.device)
        piece = list(islice(samples, pieces.batch_size))
        if not piece:
            return
        if number < COMPARED_AT_START or number % COMPARE_EVERY == 0:
            results.content = derive_seed(results.content, hash_of_samples(piece))
        if number % world.size == world.rank:
            names = range(results.samples, results.samples + len(piece))
            yield number, context.collate(piece, names, Position(0, number, number), shard=0)
        results.samples += len(piece)


def check_even_stream(found: PieceResults, compare: Callable[[str, dict[str, str]], None]) -> None:
    """Raise, on all workers, if they have not read the same samples. `compare`: see `CallCheck.compare`."""
    compare("run.evaluate", {"samples in the dataset": str(found.samples)})
    try:
        compare("run.evaluate", {"content": str(found.content)})
    except ReplicaMismatchError:
        raise UnevenDataError(
            "run.evaluate: the workers have read different samples. A stream must give every worker the same samples; "
            "Lockstep deals them out. If it splits itself (by rank, split_dataset_by_node, get_worker_info), remove "
            f"that. {SEED_IT}"
        ) from None


def _load_job(number: int, batch: int, samples: int) -> LoadRequest:
    span = range(number * batch, min((number + 1) * batch, samples))
    return LoadRequest(Position(0, number, number), ends_epoch=False, count=len(span), of_shards=1, shards=((0, span),))


# ---- all workers together --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationCall:
    """The arguments of a call of `run.evaluate` or `run.predict`."""

    what: str  # the name of the call
    model: nn.Module
    other: nn.Module | None  # evaluated instead of the model
    dataset: Any
    batch_size: int
    loading: dict[str, Any]


def evaluate(session: Session, function: Callable[[Any, Any], Any], call: EvaluationCall) -> dict[str, Mean]:
    """The means of all metrics over all samples, equal on all workers."""

    def reduce(mine: PieceResults) -> dict[str, list[float]]:
        with session.call_check.explain_errors(call.what):
            pieces = gather_pieces(session.group, session.device, mine.pieces, what=call.what)
        totals = {name: mean_of(pairs) for name, pairs in pieces.items()}
        return {name: [mean.sum, mean.weight] for name, mean in totals.items()}

    found = _evaluate_on_all(session, function, call, read_metrics, reduce)
    _log_state(session, call, lambda: found)
    return {name: Mean(*pair) for name, pair in found.items()}


def predict(session: Session, function: Callable[[Any, Any], Any], call: EvaluationCall) -> dict[str, Tensor]:
    """What the function returns for all samples, in the order of the dataset; returned on all workers."""

    def reduce(mine: PieceResults) -> dict[str, list[Any]]:
        pieces: dict[int, dict[str, Tensor]] = {}
        for rank in range(session.world.size):
            theirs = {str(n): rows for n, rows in mine.pieces.items()} if rank == session.world.rank else None
            gathered = broadcast_state(session.group, session.device, rank, theirs)
            pieces |= {int(n): {name: rows.cpu() for name, rows in piece.items()} for n, piece in gathered.items()}
        return tensors_to_text(join_rows(pieces, mine.samples))

    rows = tensors_from_text(_evaluate_on_all(session, function, call, read_rows, reduce))
    _log_state(session, call, lambda: {name: cheap_digests([tensor]) for name, tensor in rows.items()})
    return rows


def _log_state(session: Session, call: EvaluationCall, metrics: Callable[[], Mapping[str, Sequence[float]]]) -> None:
    """Log the metrics, and the state after the evaluation, for `lockstep certify`."""
    if session.state_log is not None:
        state = named_state(call.model if call.other is None else call.other)
        session.state_log.log_evaluation(call.what, metrics(), state, writes=session.is_main)


def evaluate_for_state_log(
    session: Session, state_log: StateLog, model: nn.Module, loss: Any, batches: Batches
) -> None:
    """Log the loss of some training samples in eval mode, and the state afterwards, for `lockstep certify`.

    The program is ended before it reaches an evaluation after its loop. Nothing is logged for streams, and for a model
    that cannot compute its loss in eval mode.
    """
    dataset, settings = batches.dataset, batches.settings
    if is_stream(dataset):
        return
    size = -(-settings.global_batch_size // settings.shards)
    some = Subset(dataset, range(min(len(dataset), size * STATE_LOG_PIECES)))
    cut = PieceOptions(some, size, collate_fn=settings.collate_fn)

    def go() -> dict[str, list[float]] | None:
        mine: dict[int, Pairs] | None = None
        check_left, seed = session.calls.check_left, session.seed
        try:
            with session.options.precision.autocast(session.device):
                mine = evaluate_pieces(
                    loss, model, cut, world=session.world, seed=seed, check_left=check_left, read=read_metrics
                ).pieces
        except Exception:  # a model that cannot compute its loss in eval mode
            check_left()
        gathered = agreement.gather_values(session.group, mine, device=session.device)
        if any(one is None for one in gathered):
            return None
        pieces = [{name: tuple(pair) for name, pair in pairs.items()} for one in gathered for pairs in one.values()]
        means = {name: mean_of([piece[name] for piece in pieces]) for name in pieces[0]}
        return {name: [mean.sum, mean.weight] for name, mean in means.items()}

    found = session.calls.make("the evaluation for certify", go)
    if found is not None:
        state_log.log_evaluation("the loss in eval mode", found, named_state(model), writes=session.is_main)


def _evaluate_on_all(
    session: Session,
    function: Callable[[Any, Any], Any],
    call: EvaluationCall,
    read: Callable[[Any], Any],
    reduce: Callable[[PieceResults], Any],
) -> Any:
    """Apply the function to all samples, on all workers together. Returns what `reduce` returns, which must be JSON."""
    what, other = call.what, call.other
    if other is not None and not isinstance(other, nn.Module):
        raise TypeError(f"{what}(model=...) takes a torch.nn.Module, not a {type(other).__name__}")
    if other is not None:
        refuse_model(other, f"{what}(model=...)")
    model = call.model if other is None else other.to(session.device)
    samples = count_samples(call.dataset)
    session.agree(what, {"batch_size": call.batch_size, "len(dataset)": samples})
    cut = PieceOptions(call.dataset, call.batch_size, **call.loading)
    began_s = time.monotonic()

    def go() -> Any:
        faults.at("evaluating")
        if other is not None:
            advice = f"{what}(model=...) takes a model that is the same on all workers"
            replica.check_same_values(session.group, model, set(), session.device, buffers=True, advice=advice)
        with session.options.precision.autocast(session.device):
            check_left, seed = session.calls.check_left, session.seed
            mine = evaluate_pieces(
                function, model, cut, world=session.world, seed=seed, check_left=check_left, read=read
            )
        if samples is None:
            check_even_stream(mine, session.call_check.compare)
        if mine.samples == 0:
            raise ValueError(f"{what}: the dataset has no samples")
        return reduce(mine)

    with session.trace_writer.during("evaluating"):
        found = session.calls.make(f"{what}: figures", go)
    session.trace_writer.event("evaluate", took_s=time.monotonic() - began_s)
    return found
