"""`Run`: what a training program holds.

    with lockstep.Run("runs/digits", seed=7) as run:
        model = run.replicate(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        batches = run.batches(train_set, global_batch_size=256, epochs=15)
        for batch in run.train(batches, optimizer):
            run.step(loss, batch)
        accuracy = run.evaluate(correct, test_set)

The same program runs on one worker or many, and computes the same bits.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import Sampler

from lockstep import faults, files
from lockstep.comm import agree, patience
from lockstep.data.batches import Batch, Batches, Position, Settings, check_options
from lockstep.data.ledger import Ledger
from lockstep.data.order import Order
from lockstep.elastic import seat as seats
from lockstep.errors import DivergenceError, LockstepError
from lockstep.replicate import replica
from lockstep.replicate.digest import named_state, sha256_of
from lockstep.replicate.replica import Leaf
from lockstep.seed import kept_random_state, mix, sow
from lockstep.train import evaluation, setting, verdict
from lockstep.train.accord import Accord
from lockstep.train.board import Board
from lockstep.train.calls import Calls, ElasticCalls
from lockstep.train.check import ReplicaCheck
from lockstep.train.chronicle import Chronicle
from lockstep.train.claim import Claim
from lockstep.train.farewell import Farewell
from lockstep.train.metrics import Mean, MetricsFile, Pairs, as_pairs, gather_pieces, mean_of
from lockstep.train.observer import Blind, Observer
from lockstep.train.once import Once
from lockstep.train.options import OptionNames, Options
from lockstep.train.plan import Basis, describe, facts_of, introduce, make_plan, share_out, sight_of
from lockstep.train.progress import Progress
from lockstep.train.saving import Saving, named, restore
from lockstep.train.schedule import LRScaling
from lockstep.train.signals import told_to_end
from lockstep.train.step import Loss, Plan, Result, Stop, Training, Wishes, take_step
from lockstep.train.tally import Tally
from lockstep.train.transfer import hand_over
from lockstep.train.witness import Witness
from lockstep.world import World, choose_device, init

Model = TypeVar("Model", bound=nn.Module)

PREEMPTED = 75  # exit status of a run that was asked to end by a signal, and has saved: "try again later"


class Run:
    """One training run. All its methods are called by all workers, in the same order."""

    def __init__(
        self, directory: str | Path | None = None, *, seed: int = 0, exact: bool = True, **options: Unpack[OptionNames]
    ) -> None:
        """
        directory  where checkpoints and metrics go, and where a run that was interrupted goes on; None: nowhere
        seed       of everything random: initial weights, order of samples, augmentation, dropout
        exact      the same bits on any number of workers; False: whatever is fastest here
        options    precision, clipping, checks, checkpoints: see `lockstep.train.options.Options`

        Used in a `with` statement, which joins the other workers, and at its end waits for them and for the last
        checkpoint. Inside it, random numbers follow from the seed; afterwards they go on where they were before.
        """
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed={seed!r} must be a whole number")
        self._witness = Witness.of(os.environ)
        # Absolute: the program may change its directory.
        self.directory = Path(directory).absolute() if directory is not None and self._witness is None else None
        self.seed, self.exact, self.options = seed, exact, Options.of(options)
        self._stack = ExitStack()
        self._model: nn.Module | None = None
        self._plan: Plan | None = None
        self._training: Training | None = None
        self._registered: dict[str, Any] = {}
        self._calls = Calls()
        self._generation = 0  # how often the work was shared out
        self._parted_s: float | None = None  # since when we have no generation
        self._steps: int | None = None  # after which to end
        self._applied = -1  # steps in our state
        self._here = Position()  # of the batch that was handed out last
        self._in_hand = False  # the program has that batch, and may yet take it
        self._stop_asked = Stop.NO  # on this worker
        self._stop_agreed = Stop.NO
        self._farewell = Farewell(os.environ, self._whereabouts)
        self._claim = Claim(self.directory, os.environ) if self.directory is not None else None
        self._observer: Observer = Blind(torch.device("cpu"))  # these see, show and save nothing
        self._board = Board(None, wanted=False)
        self._saving = Saving(None, None)

    # -- begin and end -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException as error:
            self._put_away(error)
            raise
        return self

    def _begin(self) -> None:
        faults.arm(os.environ)
        faults.at("start")
        self._farewell.begin()
        seat, options = seats.take(), self.options
        if seat is None:
            self.gather(init(backend=options.backend, device=options.device))
        else:
            welcome = seat.start()
            faults.here["worker"] = welcome.id
            self._calls = ElasticCalls(seat, welcome, self, backend=options.backend, device=options.device)
            self.world = self._foresee(welcome)
            self.device = self.world.device
        chosen = replace(options, device=None)  # that may be another one on every worker
        self._agree("Run", {"seed": self.seed, "exact": self.exact, "options": repr(chosen)})
        self._open_files()  # not before: by now the directory is ours
        self._stack.enter_context(kept_random_state(self.device))
        self._stack.enter_context(setting.arithmetic(self.device, exact=self.exact, threads=options.threads))
        self._stack.enter_context(told_to_end(self._end_soon))
        sow(mix(self.seed, "start"), self.device)

    def _open_files(self) -> None:
        options = self.options
        self._ledger = Ledger(self.directory)
        if self.directory is not None:
            self._metrics = MetricsFile(self.directory)
        if options.trace:
            self._observer = Observer(Chronicle(self._trace_folder(), self._name(), self.device), self.device)
        board = self._board = Board(self.directory, wanted=options.tensorboard and self._witness is None)
        self._chronicle.on_window = lambda step, figures: board.show(step, figures, writes=self.world.rank == 0)
        every = options.save_every or os.environ.get("LOCKSTEP_CHECKPOINT_EVERY")
        self._saving = Saving(
            self.directory, every, fence=self._calls.may_commit, on_written=self._chronicle.checkpoint_written
        )

    def _foresee(self, welcome: seats.Welcome) -> World:
        """What we know of a world that we are not yet in."""
        wish = None if self.options.device is None else torch.device(self.options.device)
        device = choose_device(
            asked=wish, backend=self.options.backend, gpus=torch.cuda.device_count(), local_rank=welcome.slot
        )
        return World(welcome.slot, welcome.wanted, welcome.slot, welcome.wanted, "", device, "", "lockstep run")

    def _trace_folder(self) -> Path | None:
        """See docs/trace.md."""
        logs = os.environ.get("LOCKSTEP_RUN_DIR")
        place = self.directory or (Path(logs) if logs else None)
        return place / "trace" if place is not None and self._witness is None else None

    def _name(self) -> str:
        """Of this worker, as people and programs know it."""
        return str(faults.here["worker"]) if self._calls.is_elastic else f"rank{self.world.rank}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._end_together()
            except BaseException as late:
                self._put_away(late)
                raise
        self._put_away(error)
        if error is None and self._group is not dist.group.WORLD:
            dist.destroy_process_group(self._group)
        if error is None and self._stop_agreed is Stop.SIGNAL:
            raise SystemExit(PREEMPTED)

    def _end_together(self) -> None:
        self._stack.close()
        self._saving.close()
        if self._group is not dist.group.WORLD:
            self._calls.make("the end of the run", self._part_in_peace)
        self._calls.end()
        self._farewell.end()

    def _put_away(self, error: BaseException | None) -> None:
        """What is ours alone: the others may be gone. Each of it, whatever happens with the rest."""
        with ExitStack() as last_first:
            if self._training is not None:
                last_first.callback(self._training.sum.close)
            if self._claim is not None and self._saving.is_idle:  # else it ends with the process, which still writes
                last_first.callback(self._claim.release)
            last_first.callback(self._board.close)
            last_first.callback(self._observer.close, in_peace=error is None)
            if error is not None:
                text = f"{type(error).__name__}: {error}"[:2000]
                last_first.callback(self._chronicle.event, "error", text=text)
            last_first.callback(self._stack.close)

    @property
    def _chronicle(self) -> Chronicle:
        return self._observer.chronicle

    def _whereabouts(self) -> dict[str, Any]:
        """For the card of a run that failed."""
        found: dict[str, Any] = {"call": self._calls.doing}
        if hasattr(self, "world"):
            found |= {"rank": self.world.rank, "size": self.world.size}
        if self._plan is not None:
            found |= {"step": self._here.number, "epoch": self._here.epoch}
        return found

    def _part_in_peace(self) -> None:
        """Nobody leaves while another still talks."""
        faults.at("ending")
        self._accord.come_to("the end of the run")
        if self.directory is not None and self.world.rank == 0:
            self._metrics.write()
        with self._accord.explains("the end of the run"):
            patience.wait(self._group, self._group.barrier(dist.BarrierOptions()), self.device, "the end of the run")

    # -- another generation of workers (train/calls.py) --------------------------------------------------------------

    def gather(self, world: World) -> dist.ProcessGroup:
        self.world, self.device = world, world.device
        if self._claim is not None and world.rank == 0:
            self._claim.take(leads=True)
        self._group = setting.private_group(world)
        if self._claim is not None and world.rank != 0:  # rank 0 has come by, so the directory is ours
            self._claim.take(leads=False)
        self._once = Once(_get_default_store(), self._group)
        self._accord = Accord(self._group, self.device, self._once.store, self._calls)
        logs = os.environ.get("LOCKSTEP_RUN_DIR")
        if self.directory is not None and world.rank == 0 and logs:
            files.point_at_each_other(self.directory, Path(logs))
        return self._group

    def part(self) -> None:
        self._parted_s, self._chronicle.state = time.monotonic(), "recovering"
        if self._training is not None:
            self._training.running.abandon()
            self._training.gradients.begin()  # it must not listen any more, should a traceback still hold it
            self._training.sum.close()

    def settle(self) -> None:
        if self._plan is not None:
            self._share_out(self._plan)
        if self._parted_s is not None:
            self._chronicle.event("recovery", took_s=time.monotonic() - self._parted_s)
            self._parted_s, self._chronicle.state = None, "training"

    @property
    def applied(self) -> int:
        return self._applied

    def hand_over(self, source: int, then: Callable[[], None]) -> None:
        plan, is_source = self._plan, self.world.rank == source
        assert plan is not None
        mine = self._state(plan) if is_source else None
        if is_source:
            self._ledger.write()  # whoever gets our state does not know what came before it
        if mine is not None and plan.batches.position.number != self._applied:
            mine["batches"] = plan.batches.state(
                self._here
            )  # we have the batch of this step, and have not taken the step
        state = hand_over(self._group, self.device, source, mine)
        if state["batches"]["number"] != self._applied and not is_source:
            things = self._named(plan)
            if self._applied >= 0:
                things["kept"] = {}  # the program changes these itself, and ours is behind that of the source
            restore(things, state)
            self._applied = state["batches"]["number"]
        then()
        faults.at("restored")
        check = ReplicaCheck(self._group, self.device, every=1)
        check.compare(self._applied, named_state(plan.model, plan.optimizer))

    def _end_soon(self) -> None:
        """Save, and end after the step that is running, all workers together."""
        self._stop_asked = Stop.SIGNAL

    def _agree(self, what: str, facts: Mapping[str, Any]) -> None:
        """All workers together: the same arguments everywhere, or an error everywhere."""

        def compare() -> None:
            self._accord.come_to(what)
            self._accord.compare(what, {name: str(value) for name, value in facts.items()})

        self._calls.make(what, compare)

    # -- what is trained ---------------------------------------------------------------------------------------------

    def replicate(self, model: Model) -> Model:
        """The model itself, on this worker's device, with the weights and buffers of rank 0: no wrapper, no prefix.

        Names, shapes and dtypes are compared over workers before, and values after. Once per Run.
        """
        if self._model is not None:
            raise LockstepError("a Run trains one model: put both into one nn.Module, or make another Run after this")
        if not isinstance(model, nn.Module):
            raise TypeError(f"run.replicate takes a torch.nn.Module, not {type(model).__name__}")
        model = model.to(self.device)
        leaves = replica.trained_leaves(model, set())
        state: dict[str, Any] = replica.state_of(model, set())
        rest = [Leaf(name, tensor, sparse=False) for name, tensor in state.items()]  # buffers, and what is frozen

        def copy() -> None:
            self._accord.come_to("run.replicate")
            with self._accord.explains("run.replicate"):
                replica.check_same_shapes(self._group, leaves, self.device)
                replica.check_same_shapes(self._group, rest, self.device)
            if not leaves:
                raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to train")
            replica.copy_state(self._group, model, set(), source=0, buffers=True)
            advice = "They did not take over what rank 0 sent; is a parameter shared or computed?"
            replica.check_same_values(self._group, model, set(), self.device, buffers=True, advice=advice)

        self._calls.make("run.replicate", copy)
        self._model = model
        return model

    def register_state(self, **objects: Any) -> None:
        """Things with `state_dict` and `load_state_dict` that belong to the state of the run: an average of weights,
        say. Before `train`. They may hold tensors, numbers, strings, None, lists, tuples and dicts."""
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TypeError(
                    f"run.register_state({name}=...): a {type(thing).__name__} has no state_dict/load_state_dict"
                )
        if self._plan is not None:
            raise LockstepError("run.register_state comes before run.train: what is resumed there must be known")
        self._registered |= objects

    def batches(
        self,
        dataset: Any,
        *,
        global_batch_size: int = 0,  # must be given
        shards: int = 8,
        epochs: int | None = 1,
        order: Order | Sampler[Any] | None = None,
        drop_last: bool = False,
        **loading: Any,
    ) -> Batches:
        """Global batches, cut into `shards`: as many workers as there can be, and a part of what is computed.

        global_batch_size must be given: the samples of one step, over all workers.
        order: an `Order`, or a torch `Sampler` or `BatchSampler` as for one worker; None: shuffled anew in each epoch.
        loading: num_workers (processes), prefetch_factor (batches of each), collate_fn, pin_memory, timeout_s, and
        split="worker" for a stream that gives each worker its own samples; see `lockstep.data.batches.Settings`.
        """
        check_options(loading)
        facts = {"global_batch_size": global_batch_size, "shards": shards, "epochs": epochs, "drop_last": drop_last}
        samples = evaluation.count_samples(dataset)
        self._agree(
            "run.batches",
            {**facts, "len(dataset)": samples, "order": order and type(order).__name__, "split": loading.get("split")},
        )
        settings = Settings(
            global_batch_size=global_batch_size, shards=shards, epochs=epochs, drop_last=drop_last, **loading
        )
        is_main = self.world.rank == 0
        setting.check_split(settings.split, exact=self.exact, is_elastic=self._calls.is_elastic, is_main=is_main)
        # A newcomer does not know yet among how many it will be; it is told when it is taken in.
        rank, size = (self.world.rank, self.world.size) if self._calls.is_member else (0, 1)
        return Batches(
            dataset,
            settings,
            seed=self.seed,
            rank=rank,
            size=size,
            device=self.device,
            order=order,
            joined=not self.exact,
            exchange=self._exchange,
        )

    def _exchange(self, row: list[int]) -> list[list[int]]:
        """What all workers say of the next batch of a stream that splits itself."""
        with self._accord.explains("the next batch"):
            return agree.gather_rows(self._group, row, device=self.device)

    def train(
        self,
        batches: Batches,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        interval: str = "step",
        scaling: LRScaling | None = None,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """Hand out the batches: from where the last run in this directory ended, with progress and checkpoints.

        scheduler  a torch learning-rate scheduler; its step() is called after every `interval`: "step" or "epoch"
        scaling   the learning rate follows the batch size: see `lockstep.LRScaling`
        steps     end after so many steps, counted from the very first; None: when the batches do
        """
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise ValueError(f"steps={steps!r} must be a whole number, 1 or more, or None")
        if interval not in ("step", "epoch"):
            raise ValueError(f'interval={interval!r} is not known; choose "step" or "epoch"')
        if self._plan is not None:
            raise LockstepError("a Run has one loop: run.train goes over all epochs, see run.batches(epochs=...)")
        if self._witness is not None:
            steps = min(steps or self._witness.steps, self._witness.steps)
        model, basis = self._replicated("run.train"), Basis(self.options, self.seed, self.exact)
        plan = self._plan = make_plan(model, optimizer, batches, basis, scaling=scaling)
        plan.schedule, plan.interval = scheduler, interval
        self._steps = steps
        self._calls.limit(batches.settings.shards)
        if plan.synced and self.exact and self._calls.is_elastic:
            raise LockstepError(setting.describe_synced(plan.synced[0]))
        self._resume(plan)
        if self._training is None:
            self._share_out(plan)
        if self.world.rank == 0 and self.options.progress:
            print(f"lockstep: {introduce(plan, basis, self.world)}", file=sys.stderr, flush=True)
        is_shown = "LOCKSTEP_VIEW" in os.environ and self.options.trace  # in the launcher's picture (measure/live.py)
        self._progress = Progress(
            steps=steps or batches.steps_in_all, shown=self.world.rank == 0 and self.options.progress and not is_shown
        )
        with closing(iter(batches)) as self._coming:  # or its loaders would end whenever it is collected
            while not self._stop_agreed and (steps is None or batches.position.number < steps):
                self._calls.begin_step(batches.position.number)
                self._handed_out, self._here = self._generation, batches.position
                self._observer.top(batches.position.number)
                batch = next(self._coming, None)
                self._observer.data_came()
                if batch is None:
                    self._calls.make("the end of the data", lambda: self._agree_on_end(batches))
                    break
                self._in_hand = True
                yield batch
                self._in_hand = False
                if self._saving.is_due(batch.number, ends_epoch=batch.ends_epoch) and not self._stop_agreed:
                    self.save()
        self._observer.end_loop()
        self._progress.end(batches.position.number)
        if self._witness is not None:
            raise SystemExit(0)  # the rest of the program is not asked for
        if not self._saving.has(batches.position.number):
            self.save()
        if self.directory is not None:
            self._calls.make("the last checkpoint", lambda: self._once.run(self._keep_last))

    def step(self, loss: Loss, batch: Batch) -> Result:
        """Forward, backward, the mean gradient over all workers, and the optimiser's step.

        `loss(model, batch)` returns (sum, weight): the sum of the losses of its samples, and their number (or that of
        tokens, or any other weight). The gradient is that of the mean over the global batch.
        """
        plan = self._plan
        if plan is None or self._training is None:
            raise LockstepError("run.step belongs into `for batch in run.train(batches, optimizer)`: call track first")
        if not isinstance(batch, Batch):
            raise TypeError(f"run.step takes a batch from run.train, not a {type(batch).__name__}")
        result = self._calls.make("run.step", lambda: self._take(loss, batch), encode=Result.plain, decode=Result.of)
        self._stop_agreed = max(self._stop_agreed, result.stop)
        if result.move:
            self._calls.move_at_next_step(result.move)
        self._ledger.note(
            batch.number,
            epoch=batch.epoch,
            samples=batch.count,
            fingerprint=result.samples,
            seen=batch.seen,
            writes=self.world.rank == 0,
        )
        self._calls.make("the comparison of replicas", lambda: self._compare_replicas(batch.number))
        if self._witness is not None and self.world.rank == 0:
            self._witness.note(batch.number, result.loss, named_state(plan.model, plan.optimizer))
        self._progress.step(result, epoch=batch.epoch, samples=batch.count, waited_for_data_s=plan.batches.wait_s)
        facts = partial(facts_of, plan, result)
        self._observer.stepped(batch.number, result.loss, samples=batch.count, epoch=batch.epoch, facts=facts)
        return result

    def _take(self, loss: Loss, batch: Batch) -> Result:
        plan, training = self._plan, self._training
        assert plan is not None
        assert training is not None
        if self._handed_out != self._generation:  # the workers are others by now, and so are our shards
            plan.batches.seek(Position(batch.epoch, batch.step, batch.number))
            self._handed_out, again = self._generation, next(self._coming, None)
            assert again is not None
            batch = again
        if plan.synced and self.world.size > 1:
            setting.refuse_empty_shards(plan.synced[0], batch, training.sum.shares, exact=self.exact)
        if batch.number < self._applied and self._calls.is_elastic:
            raise DivergenceError(
                f"step {batch.number} would be applied twice, after step {self._applied - 1}; report this"
            )
        wishes = Wishes(self._stop_asked, self._calls.wants_to_move, self._calls.check_commit, self._calls.check_left)
        result = take_step(training, loss, batch, wishes)
        if plan.schedule is not None and (batch.ends_epoch if plan.interval == "epoch" else not result.skipped):
            plan.schedule.step()
        self._applied = batch.number + 1
        faults.at("applied")
        return result

    def _compare_replicas(self, number: int) -> None:
        training = self._training
        assert training is not None
        faults.at("compared")
        with self._accord.explains("the comparison of replicas"):
            self._check.after_step(
                number, lambda: named_state(training.model, training.optimizer) | training.running.past()
            )

    def _share_out(self, plan: Plan) -> None:
        """The work of a step, among the workers that there are now."""
        basis = Basis(self.options, self.seed, self.exact)
        training = self._training = share_out(plan, basis, self.world, self._group, self._observer)
        settings, world = plan.batches.settings, self.world
        self._observer.share_out(
            lambda: describe(plan, training),
            sees=sight_of(plan, world),
            generation=self._calls.generation,
            first=plan.batches.position.number,
            rank=world.rank,
            size=world.size,
            backend=world.backend,
            shards=settings.shards,
            global_batch_size=settings.global_batch_size,
            steps=self._steps or plan.batches.steps_in_all,
        )
        self._check = ReplicaCheck(self._group, self.device, every=self.options.check_every)
        self._ledger.share_out(self.world.size)
        self._generation += 1

    def _agree_on_end(self, batches: Batches) -> None:
        """A stream may end at any time, but for all workers at the same."""
        training = self._training
        if batches.steps_in_all is not None or training is None:
            return
        tally = Tally(training.sum, buffers=len(training.running))
        tally.send(None)
        verdict.refuse_bad_data(tally.outcome(), batches.position.number)

    # -- figures -----------------------------------------------------------------------------------------------------

    def evaluate(
        self, figures: Callable[[Any, Any], Any], dataset: Any, *, batch_size: int = 256, **loading: Any
    ) -> Mean | dict[str, Mean]:
        """Every sample of `dataset` exactly once, over all workers; the same figure on any number of them.

        `figures(model, batch)` returns (sum, weight), or a dict of such pairs: of correct answers and all answers, say.
        loading: num_workers (processes), collate_fn.
        """
        evaluation.check_options(loading)
        model = self._replicated("run.evaluate")
        samples = evaluation.count_samples(dataset)
        self._agree("run.evaluate", {"batch_size": batch_size, "len(dataset)": samples})
        cut = evaluation.Pieces(dataset, batch_size, **loading)

        began_s = time.monotonic()

        def run() -> dict[str, list[float]]:
            faults.at("evaluating")
            with self.options.precision.autocast(self.device):
                go_on = self._calls.check_left
                mine = evaluation.run(figures, model, cut, world=self.world, seed=self.seed, go_on=go_on)
            if samples is None:
                evaluation.refuse_uneven_stream(mine, self._accord.compare)
            if mine.samples == 0:
                raise ValueError("run.evaluate: the dataset has no samples, so there is no mean")
            pieces = self._gather(mine.pieces, "run.evaluate")
            totals = {name: mean_of(pairs) for name, pairs in pieces.items()}
            return {name: [mean.sum, mean.weight] for name, mean in totals.items()}

        with self._chronicle.during("evaluating"):
            found = self._calls.make("run.evaluate: figures", run)
        self._chronicle.event("evaluate", took_s=time.monotonic() - began_s)
        means = {name: Mean(*pair) for name, pair in found.items()}
        return means[""] if list(means) == [""] else means

    def log(self, **figures: Any) -> dict[str, float]:
        """Figures of this moment, over all workers, into metrics.jsonl. A figure is a number, or (sum, weight).

        Numbers that are equal everywhere stay as they are; others become their mean.
        """
        pairs = {name: value if isinstance(value, tuple) else (value, 1.0) for name, value in figures.items()}

        def run() -> dict[str, float]:
            faults.at("logging")
            self._accord.come_to("run.log")
            pieces = self._gather({self.world.rank: as_pairs(pairs, "run.log")}, "run.log")
            return {
                name: values[0][0] / values[0][1] if len(set(values)) == 1 and values[0][1] else float(mean_of(values))
                for name, values in pieces.items()
            }

        reduced = self._calls.make("run.log", run)
        self._chronicle.figures(reduced)
        if self.directory is not None and self._calls.is_member:
            step = self._plan.batches.position.number if self._plan is not None else 0
            self._metrics.note(step, reduced, writes=self.world.rank == 0)
            self._board.show(step, reduced, writes=self.world.rank == 0)
        return reduced

    def _gather(self, mine: Mapping[int, Pairs], what: str) -> dict[str, list[tuple[float, float]]]:
        with self._accord.explains(what):
            return gather_pieces(self._group, self.device, mine, what=what)

    # -- together ----------------------------------------------------------------------------------------------------

    def on_main(self, call: Callable[[], Any], *, rank: int = 0) -> Any:
        """Run something on one worker, while the others wait as long as it takes; all get what it returned, as JSON.

        An error there is an error on all workers.
        """
        may_shrink = self._calls.is_elastic  # then another one does it
        if rank < 0 or (rank >= self.world.size and not may_shrink):
            raise ValueError(f"rank={rank}: there are ranks 0 to {self.world.size - 1}")
        return self._calls.make("run.on_main", lambda: self._once.run(call, on=rank % self.world.size))

    @property
    def should_stop(self) -> bool:
        """Some worker was asked to end (SIGTERM, or `run.stop()`), and all have agreed to: `train` ends here."""
        return self._stop_agreed is not Stop.NO

    def stop(self) -> None:
        """Ask all workers to end after the next step. One of them is enough."""
        self._stop_asked = max(self._stop_asked, Stop.ASKED)

    @property
    def noise_scale(self) -> float | None:
        """In samples: the batch size beyond which a larger one pays less and less (train/noise.py). None: not known.

        It is what this worker has seen, so not for control flow: others may know another value.
        """
        return self._observer.noise_scale

    def digest(self) -> str:
        """SHA-256 of weights, buffers and what the optimiser remembers. Of this worker: nobody is asked."""
        optimizer = self._plan.optimizer if self._plan is not None else None
        return sha256_of(named_state(self._replicated("run.digest"), optimizer))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Have a checkpoint written, by one worker, in the background: this waits only for a copy of the tensors."""
        plan = self._plan
        if plan is None:
            raise LockstepError("run.save has nothing to save before `run.train(batches, optimizer)`")
        plan.last_norm.check(plan.leaves)
        if self.world.rank == 0:
            self._ledger.write()
        here = self._here if self._in_hand and self._applied <= self._here.number else plan.batches.position

        def state() -> dict[str, Any]:
            return self._state(plan) | {"batches": plan.batches.state(here)}

        self._saving.save(here.number, state, writes=self.world.rank == 0)

    def _keep_last(self) -> None:
        """By rank 0, at the end: whoever was it before may have been lost with what it had not written yet."""
        plan = self._plan
        assert plan is not None
        self._ledger.write()
        self._saving.drain(self._calls.check_left)
        if not self._saving.has_written(plan.batches.position.number):
            self._saving.save(plan.batches.position.number, lambda: self._state(plan), writes=True)
            self._saving.drain(self._calls.check_left)

    def _named(self, plan: Plan) -> dict[str, Any]:
        """All that has a state, by name."""
        return {
            "model": plan.model,
            "optimizer": plan.optimizer,
            "schedule": plan.schedule,
            "loss_scale": plan.loss_scale,
            "batches": plan.batches,
            "kept": self._registered,
        }

    def _state(self, plan: Plan) -> dict[str, Any]:
        """`run`: what must not change between the parts of a run, or it would be another run."""
        optimizer = type(plan.optimizer).__name__
        shards = plan.batches.settings.shards
        run = {"seed": self.seed, "exact": self.exact, "shards": shards, "optimizer": optimizer}
        return named(self._named(plan)) | {"run": run}

    def _resume(self, plan: Plan) -> None:
        """From where the last run in this directory ended; or where the others are, if they are in the loop."""

        def resume() -> None:
            if self.directory is not None and self.world.rank == 0:
                files.prepare(self.directory)
            found = self._saving.find(self._state(plan), tells=self.world.rank == 0)
            step = found["batches"]["number"] if found is not None else None
            self._accord.compare("resuming", {"step": str(step)})
            if found is not None:
                restore(self._named(plan), found)
                self._chronicle.event("resumed", text=f"from the checkpoint of step {step}")
            self._applied = plan.batches.position.number
            self._ledger.begin(self._applied, plan.batches.facts(), writes=self.world.rank == 0)

        self._calls.make("resuming", resume, begins_loop=True)
        self._saving.begin(plan.batches.position.number)

    def _replicated(self, who: str) -> nn.Module:
        if self._model is None:
            raise LockstepError(f"{who} needs a model: call run.replicate(model) first")
        return self._model
