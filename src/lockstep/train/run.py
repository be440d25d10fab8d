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
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import Sampler

from lockstep import faults, files
from lockstep.comm import agree, patience
from lockstep.data.batches import Batch, Batches, Position, Settings, check_options
from lockstep.data.order import Order
from lockstep.data.reader import DataError
from lockstep.elastic import seat as seats
from lockstep.errors import CheckpointError, DivergenceError, LockstepError
from lockstep.replicate import replica
from lockstep.replicate.digest import named_state, sha256_of
from lockstep.replicate.replica import Leaf
from lockstep.seed import kept_random_state, mix, sow
from lockstep.train import evaluation, setting, verdict
from lockstep.train.accord import Accord
from lockstep.train.board import Board
from lockstep.train.calls import Calls, ElasticCalls, say
from lockstep.train.check import ReplicaCheck
from lockstep.train.checkpoints import Checkpoints, plan_of
from lockstep.train.chronicle import Chronicle
from lockstep.train.claim import FILE as RUN_LOCK
from lockstep.train.claim import Claim
from lockstep.train.farewell import Farewell
from lockstep.train.loop_check import LoopCheck, describe_untrained, refuse_optimizer
from lockstep.train.metrics import Mean, MetricsFile, Pairs, as_pairs, gather_pieces, mean_of
from lockstep.train.observer import Blind, Observer
from lockstep.train.once import Once
from lockstep.train.options import OptionNames, Options
from lockstep.train.plan import (
    Basis,
    describe,
    describe_nothing_to_train,
    facts_of,
    follow_trainable,
    introduce,
    make_plan,
    settings_of,
    share_out,
    sight_of,
)
from lockstep.train.progress import Progress
from lockstep.train.run_directory import pending_stops, start_over, starts_over, write_stop
from lockstep.train.saving import describe_misfit, read_weights
from lockstep.train.schedule import LRScaling
from lockstep.train.signals import StopRequests
from lockstep.train.step import Loss, Plan, Result, Stop, Training, Wishes, refuse_mean_loss, take_step
from lockstep.train.tally import Tally, agree_on_metrics
from lockstep.train.transfer import hand_over, tensors_from_text, tensors_to_text
from lockstep.train.witness import Witness
from lockstep.world import World, choose_device, init

Model = TypeVar("Model", bound=nn.Module)

SAVE_AFTER_ERROR_S = 120.0


class Loop(Enum):
    """Where the program is: before, in or behind the loop over `run.train`."""

    BEFORE = "before"
    RUNNING = "running"
    ENDED = "ended"  # all that was trained is saved


class Run:
    """One training run. All its methods are called by all workers, in the same order.

    Inside the `with` block:
    world   the workers there are now: `run.world.rank`, `.size`, `.backend`. In an elastic run they change; what a
            program computes must not depend on them
    device  the device of this worker, on which model and batches are
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        seed: int = 0,
        exact: bool = True,
        resume: bool = True,
        **options: Unpack[OptionNames],
    ) -> None:
        """
        directory  where checkpoints and metrics go, and where a run that was interrupted goes on; None: nowhere
        seed       of everything random: initial weights, order of samples, augmentation, dropout
        exact      the same bits on any number of workers; False: whatever is fastest here
        resume     False: start over; what an earlier run left in the directory is moved to `previous-1` there. So does
                   `lockstep run --fresh`
        options    precision, clipping, checks, checkpoints: see `lockstep.train.options.Options`

        Used in a `with` statement, which joins the other workers, and at its end waits for them and for the last
        checkpoint. Inside it, random numbers follow from the seed; afterwards they go on where they were before.
        """
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed={seed!r} must be a whole number")
        self._witness = Witness.of(os.environ)
        # Absolute: the program may change its directory.
        self.directory = Path(directory).absolute() if directory is not None and self._witness is None else None
        if not isinstance(resume, bool):
            raise TypeError(f"resume={resume!r} must be True or False; run.load(path) reads weights from elsewhere")
        self.seed, self.exact, self.options = seed, exact, Options.of(options)
        self._is_fresh = starts_over(resume, os.environ)
        self._stack = ExitStack()
        self._model: nn.Module | None = None
        self._plan: Plan | None = None
        self._training: Training | None = None
        self._calls = Calls()
        self._generation = 0  # how often the work was shared out
        self._parted_s: float | None = None  # since when we have no generation
        self._steps: int | None = None  # after which to end
        self._applied = -1  # steps in our state
        self._here = Position()  # of the batch that was handed out last
        self._in_hand = False  # the program has that batch, and may yet take it
        self._loop, self._loop_check = Loop.BEFORE, None  # type: tuple[Loop, LoopCheck | None]
        self._is_applying = False  # a step that is half done cannot be saved
        self._stops = StopRequests(os.environ)
        self._farewell = Farewell(os.environ, self._whereabouts)
        self._claim = Claim(self.directory, os.environ) if self.directory is not None else None
        self._observer: Observer = Blind(torch.device("cpu"))  # these see, show and save nothing
        self._board = Board(None, wanted=False)
        self._checkpoints = Checkpoints()
        self._progress = Progress()

    # -- begin and end -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException as error:
            self._put_away(error)
            raise
        return self

    def _begin(self) -> None:
        pending_stops.write()
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
        self._stack.enter_context(self._stops.handle_signals(is_training=lambda: self._loop is Loop.RUNNING))
        sow(mix(self.seed, "start"), self.device)

    def _open_files(self) -> None:
        options = self.options
        if self.directory is not None:
            self._metrics = MetricsFile(self.directory)
        if options.trace:
            self._observer = Observer(Chronicle(self._trace_folder(), self._name(), self.device), self.device)
        board = self._board = Board(self.directory, wanted=options.tensorboard and self._witness is None)
        self._chronicle.on_window = lambda step, figures: board.show(step, figures, writes=self.world.rank == 0)
        registered = self._checkpoints.registered
        self._checkpoints = Checkpoints(
            self.directory,
            identity={"seed": self.seed, "exact": self.exact},
            every=options.save_every,
            fence=self._calls.may_commit,
            on_written=self._chronicle.checkpoint_written,
        )
        self._checkpoints.registered = registered

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
        is_planned = error is None or error is self._stops.ending
        if is_planned:
            try:
                self._end_together()
            except BaseException as late:
                self._put_away(late)
                raise
        else:
            assert error is not None
            self._save_after(error)
        self._put_away(None if is_planned else error)
        if is_planned:
            self._progress.point_at_report(self._trace_folder() if self.options.trace else None)
        if is_planned and self._group is not dist.group.WORLD:
            dist.destroy_process_group(self._group)
        if error is None and self.interrupted:
            raise self._stops.exit()

    def _end_together(self) -> None:
        if self._loop is Loop.RUNNING:
            self._end_loop(is_stopped=True)  # the program has left it, by `break` or `return`
        self._stack.close()
        self._checkpoints.close()
        if self._group is not dist.group.WORLD:
            self._calls.make("the end of the run", self._part_in_peace)
        self._calls.end()
        self._farewell.end()

    def _put_away(self, error: BaseException | None) -> None:
        """What is ours alone: the others may be gone. Each of it, whatever happens with the rest."""
        with ExitStack() as last_first:
            if self._loop_check is not None:
                last_first.callback(self._loop_check.close)
            if self._training is not None:
                last_first.callback(self._training.sum.close)
            if (
                self._claim is not None and self._checkpoints.saving.is_idle
            ):  # else it ends with the process, which still writes
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
            moved = start_over(self._claim.directory, os.environ, lock=RUN_LOCK) if self._is_fresh else None
            if moved is not None:
                say(f"starts over; what was in {self.directory} is in {moved} now")
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
        self._drop_training()

    def _drop_training(self) -> None:
        """What depends on the workers and on the parameters that are trained is built anew after this."""
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
        mine = None
        if is_source:
            self._checkpoints.ledger.write()  # a worker that gets our state does not know what came before it
            # Where we have the batch of this step, and have not taken the step, the state is the one before it.
            here = self._here if plan.batches.position.number != self._applied else None
            mine = self._checkpoints.state(plan, here)
        state = hand_over(self._group, self.device, source, mine)
        if state["batches"]["number"] != self._applied and not is_source:
            # What is registered the program changes itself; a worker that is behind does so once more.
            self._checkpoints.restore(plan, state, registered=self._applied < 0)
            self._applied = state["batches"]["number"]
        then()
        faults.at("restored")
        check = ReplicaCheck(self._group, self.device, every=1)
        check.compare(self._applied, named_state(plan.model, plan.optimizer))

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
        self._checkpoints.registered |= objects

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
        scaling    the learning rate follows the batch size: see `lockstep.LRScaling`
        steps      end after so many steps, counted from the very first; None: when the batches do

        Leaving the loop by `break` or `return` ends the training: it is saved at the end of the `with` block, and a
        later start does not train on. After SIGTERM, SIGUSR1 or Ctrl-C the step is finished and saved, and the program
        ends here with status 75 (130 after Ctrl-C), unless `Run(exit_on_interrupt=False)`.
        """
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise ValueError(f"steps={steps!r} must be a whole number, 1 or more, or None")
        if interval not in ("step", "epoch"):
            raise ValueError(f'interval={interval!r} is not known; choose "step" or "epoch"')
        refuse_optimizer(optimizer, scheduler)
        if not isinstance(batches, Batches):
            raise TypeError(f"run.train takes run.batches(dataset, ...) first, not a {type(batches).__name__}")
        if self._plan is not None:
            raise LockstepError("a Run has one loop: run.train goes over all epochs, see run.batches(epochs=...)")
        if self._witness is not None:
            steps = min(steps or self._witness.steps, self._witness.steps)
        model, basis = self._replicated("run.train"), Basis(self.options, self.seed, self.exact)
        plan = self._plan = make_plan(model, optimizer, batches, basis, scaling=scaling)
        plan.schedule, plan.interval = scheduler, interval
        plan.settings = settings_of(plan, basis, scaling=scaling, steps=steps)
        self._steps = steps
        self._calls.limit(batches.settings.shards)
        if plan.synced and self.exact and self._calls.is_elastic:
            raise LockstepError(setting.describe_synced(plan.synced[0]))
        self._resume(plan)
        if self._training is None:
            self._share_out(plan)
        self._loop_check = LoopCheck(model, optimizer, plan.leaves)
        self._introduce(plan, basis)
        if self._checkpoints.was_stopped:
            self._loop = Loop.ENDED
            return
        yield from self._hand_out(plan, steps)
        if self._witness is not None:
            raise SystemExit(0)  # the rest of the program is not asked for
        self._end_loop()
        if self.interrupted and self.options.exit_on_interrupt:
            raise self._stops.exit()

    def _hand_out(self, plan: Plan, steps: int | None) -> Iterator[Batch]:
        batches, check = plan.batches, self._loop_check
        assert check is not None
        self._loop = Loop.RUNNING
        with closing(iter(batches)) as self._coming:  # or its loaders would end whenever it is collected
            while not self.should_stop and (steps is None or batches.position.number < steps):
                self._calls.begin_step(batches.position.number)
                self._handed_out, self._here = self._generation, batches.position
                self._observer.top(batches.position.number)
                batch = next(self._coming, None)
                self._observer.data_came()
                if batch is None:
                    self._calls.make("the end of the data", lambda: self._agree_on_end(batches))
                    break
                self._in_hand = True
                check.hand_out(batch.number)
                yield batch
                check.end_iteration()
                self._in_hand = False
                is_due = self._checkpoints.saving.is_due(batch.number, ends_epoch=batch.ends_epoch)
                if is_due and not self.should_stop:
                    self.save()

    def _introduce(self, plan: Plan, basis: Basis) -> None:
        """Say what is trained, from where on; or why nothing is."""
        ends = self._steps or plan.batches.steps_in_all
        is_shown = "LOCKSTEP_VIEW" in os.environ and self.options.trace  # in the launcher's picture (measure/live.py)
        speaks = lambda: self.world.rank == 0 and self.options.progress  # noqa: E731  (another worker may become rank 0)
        self._progress = Progress(steps=ends, speaks=speaks, is_shown=is_shown)
        if self.world.rank == 0:
            nothing = describe_nothing_to_train(plan, self._steps, was_stopped=self._checkpoints.was_stopped)
            if nothing is not None:
                say(nothing)
            elif self.options.progress:
                say(introduce(plan, basis, self.world))
        self._tell_untrained(plan)

    def _end_loop(self, *, is_stopped: bool = False) -> None:
        """Save what was trained, all workers together. `is_stopped`: the program has left the loop for good."""
        plan = self._plan
        assert plan is not None
        self._loop, here = Loop.ENDED, self._saved_position(plan)
        self._observer.end_loop()
        self._progress.end(here.number)
        if not self._checkpoints.saving.has(here.number):
            self.save()
        directory, tells = self.directory, self.should_stop and self.world.rank == 0
        if directory is None:
            if tells:
                say(f"interrupted at step {here.number}; nothing is saved, since this Run has no directory")
            return

        def keep() -> None:
            self._checkpoints.keep_last(plan, here, self._calls.check_left)
            if is_stopped:
                write_stop(directory, here.number)

        self._calls.make("the last checkpoint", lambda: self._once.run(keep))
        if tells and not is_stopped:
            say(f"saved at step {here.number}; the same command continues")

    def _save_after(self, error: BaseException) -> None:
        """Keep what was trained when an exception leaves the loop: rank 0 writes a checkpoint, without the others.

        Not after errors of ours, which may mean that the state is wrong or that others are ahead; nor in the middle of
        the optimiser's step.
        """
        plan, is_ours = self._plan, isinstance(error, LockstepError) and not isinstance(error, DataError)
        if plan is None or self._loop is not Loop.RUNNING or is_ours or self._is_applying:
            return
        if self.directory is None or self.world.rank != 0 or self._applied < 0 or not self._calls.may_commit():
            return
        end_s = time.monotonic() + SAVE_AFTER_ERROR_S

        def go_on() -> None:
            if time.monotonic() > end_s:
                raise TimeoutError(f"it was not written within {SAVE_AFTER_ERROR_S:.0f} s")

        here = self._saved_position(plan)
        try:
            if self._training is not None:
                self._training.running.abandon()
            self._checkpoints.keep_last(plan, here, go_on)
            if isinstance(error, SystemExit) and not error.code:
                write_stop(self.directory, here.number)
            elif isinstance(error, Exception):
                pending_stops.add(self.directory, here.number, error)
            say(f"saved at step {here.number}, where the program left the loop ({type(error).__name__})")
        except Exception as problem:
            say(f"what was trained up to step {here.number} could not be saved: {type(problem).__name__}: {problem}")

    def step(self, loss: Loss, batch: Batch) -> Result:
        """Forward, backward, the mean gradient over all workers, and the optimiser's step.

        `loss(model, batch)` returns (sum, weight): the sum of the losses of its samples, and their number (or that of
        tokens, or any other weight). The gradient is that of the mean over the global batch. It may return metrics as
        well, `(sum, weight, {"accuracy": (correct, count)})`: their means over the global batch are `result.metrics`.
        """
        plan = self._plan
        if plan is None or self._training is None:
            raise LockstepError("run.step belongs into `for batch in run.train(batches, optimizer)`: call track first")
        if not isinstance(batch, Batch):
            raise TypeError(f"run.step takes a batch from run.train, not a {type(batch).__name__}")
        check = self._loop_check
        assert check is not None
        check.begin_step(batch, tells=self.world.rank == 0)
        if check.has_other_parameters:
            self._follow_trainable(plan, check)
        check.is_stepping = True
        try:
            result = self._calls.make(
                "run.step", lambda: self._take(loss, batch), encode=Result.plain, decode=Result.of
            )
        finally:
            check.is_stepping = False
        check.end_step()
        self._stops.agreed = max(self._stops.agreed, result.stop)
        if result.move:
            self._calls.move_at_next_step(result.move)
        self._checkpoints.ledger.note(
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
        if batch.number == 0:
            refuse_mean_loss(training, loss, batch)
        wishes = Wishes(self._stops.asked, self._calls.wants_to_move, self._commit, self._calls.check_left)
        result = take_step(training, loss, batch, wishes)
        if plan.schedule is not None and (batch.ends_epoch if plan.interval == "epoch" else not result.skipped):
            plan.schedule.step()
        self._applied, self._is_applying = batch.number + 1, False
        faults.at("applied")
        return result

    def _commit(self) -> None:
        self._calls.check_commit()
        self._is_applying = True

    def _follow_trainable(self, plan: Plan, check: LoopCheck) -> None:
        """The program has frozen or unfrozen parameters: this step trains those that require a gradient now."""
        follow_trainable(plan)
        self._agree(
            "run.step: what is trained", {"parameters that require a gradient": [leaf.name for leaf in plan.leaves]}
        )
        self._drop_training()
        self._share_out(plan)
        self._handed_out = self._generation  # the workers are the same, and so are the shards of the batch in hand
        check.follow(plan.leaves)
        self._tell_untrained(plan)

    def _tell_untrained(self, plan: Plan) -> None:
        untrained = describe_untrained(plan.leaves, plan.optimizer)
        if untrained is not None and self.world.rank == 0:
            say(untrained)

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
        self._checkpoints.ledger.share_out(self.world.size)
        self._generation += 1

    def _agree_on_end(self, batches: Batches) -> None:
        """A stream may end at any time, but for all workers at the same."""
        training = self._training
        if batches.steps_in_all is not None or training is None:
            return
        if training.metric_names is None:
            training.metric_names = agree_on_metrics(training.sum, None)
        tally = Tally(training.sum, buffers=len(training.running))
        tally.send(None, names=training.metric_names)
        verdict.refuse_bad_data(tally.outcome(), batches.position.number)

    # -- figures -----------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        figures: Callable[[Any, Any], Any],
        dataset: Any,
        *,
        batch_size: int = 256,
        model: nn.Module | None = None,
        **loading: Any,
    ) -> Mean | dict[str, Mean]:
        """Every sample of `dataset` exactly once, over all workers; the same figure on any number of them.

        `figures(model, batch)` returns (sum, weight), or a dict of such pairs: of correct answers and all answers, say.
        model    what is evaluated, in eval mode, if not the replicated model: an average of its weights, say
        loading  num_workers (processes), collate_fn
        """

        def reduce(mine: evaluation.Figures) -> dict[str, list[float]]:
            pieces = self._gather(mine.pieces, "run.evaluate")
            totals = {name: mean_of(pairs) for name, pairs in pieces.items()}
            return {name: [mean.sum, mean.weight] for name, mean in totals.items()}

        read = partial(as_pairs, what="the function given to evaluate")
        found = self._go_through("run.evaluate", figures, dataset, (batch_size, model, loading), read, reduce)
        means = {name: Mean(*pair) for name, pair in found.items()}
        return means[""] if list(means) == [""] else means

    def predict(
        self,
        function: Callable[[Any, Any], Any],
        dataset: Any,
        *,
        batch_size: int = 256,
        model: nn.Module | None = None,
        **loading: Any,
    ) -> Tensor | dict[str, Tensor]:
        """What the model predicts for every sample, in the order of the dataset, on all workers, on the CPU.

        `function(model, batch)` returns a tensor with a row for each sample, or a dict of such tensors. The other
        arguments are those of `evaluate`.
        """

        def reduce(mine: evaluation.Figures) -> dict[str, Tensor]:
            pieces: dict[int, dict[str, Tensor]] = {}
            for rank in range(self.world.size):
                theirs = {str(n): rows for n, rows in mine.pieces.items()} if rank == self.world.rank else None
                told = hand_over(self._group, self.device, rank, theirs)
                pieces |= {int(n): {name: rows.cpu() for name, rows in piece.items()} for n, piece in told.items()}
            return evaluation.join_rows(pieces, mine.samples)

        codec = (tensors_to_text, tensors_from_text)
        asked = (batch_size, model, loading)
        found = self._go_through("run.predict", function, dataset, asked, evaluation.read_rows, reduce, codec)
        predictions: dict[str, Tensor] = found
        return predictions[""] if list(predictions) == [""] else predictions

    def _go_through(
        self,
        what: str,
        function: Callable[[Any, Any], Any],
        dataset: Any,
        asked: tuple[int, nn.Module | None, dict[str, Any]],
        read: Callable[[Any], Any],
        reduce: Callable[[evaluation.Figures], Any],
        codec: tuple[Callable[[Any], Any], Callable[[Any], Any]] = (lambda found: found, lambda found: found),
    ) -> Any:
        """All samples of `dataset` through `function`, over all workers; what `reduce` makes of all its pieces."""
        batch_size, other, loading = asked
        evaluation.check_options(loading)
        if other is not None and not isinstance(other, nn.Module):
            raise TypeError(f"{what}(model=...) takes a torch.nn.Module, not a {type(other).__name__}")
        model = self._replicated(what) if other is None else other.to(self.device)
        samples = evaluation.count_samples(dataset)
        self._agree(what, {"batch_size": batch_size, "len(dataset)": samples})
        cut = evaluation.Pieces(dataset, batch_size, **loading)
        began_s = time.monotonic()

        def run() -> Any:
            faults.at("evaluating")
            if other is not None:
                advice = f"{what}(model=...) takes a model that is the same on all workers"
                replica.check_same_values(self._group, model, set(), self.device, buffers=True, advice=advice)
            with self.options.precision.autocast(self.device):
                go_on = self._calls.check_left
                mine = evaluation.run(function, model, cut, world=self.world, seed=self.seed, go_on=go_on, read=read)
            if samples is None:
                evaluation.refuse_uneven_stream(mine, self._accord.compare)
            if mine.samples == 0:
                raise ValueError(f"{what}: the dataset has no samples")
            return reduce(mine)

        with self._chronicle.during("evaluating"):
            found = self._calls.make(f"{what}: figures", run, encode=codec[0], decode=codec[1])
        self._chronicle.event("evaluate", took_s=time.monotonic() - began_s)
        return found

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
        step, writes = self._plan.batches.position.number if self._plan is not None else 0, self.world.rank == 0
        self._chronicle.log(step, reduced, writes=writes and self._calls.is_member)
        self._progress.log(step, reduced)
        if self.directory is not None and self._calls.is_member:
            self._metrics.note(step, reduced, writes=writes)
            self._board.show(step, reduced, writes=writes)
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
        return self._stops.agreed is not Stop.NO

    @property
    def interrupted(self) -> bool:
        """Whether the training was ended by a signal (SIGTERM, SIGUSR1, Ctrl-C) before it was through."""
        return self._stops.agreed is Stop.SIGNAL

    def stop(self) -> None:
        """Ask all workers to leave the loop after the next step; one of them is enough. A later start trains on; to end
        the training for good, `break` out of the loop on all workers."""
        self._stops.asked = max(self._stops.asked, Stop.ASKED)

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
        plan = plan_of(self._plan, "run.save")
        self._checkpoints.save(plan, self._saved_position(plan), writes=self.world.rank == 0)

    def save_best(self, metric: float, *, mode: str = "max") -> bool:
        """Save a checkpoint in the folder `best` of the run directory if `metric` is better than all before it.

        All workers call it with the same value, for example that of `run.evaluate`. Returns whether it was better.
        `run.load(directory / "best")` reads the weights back, and `lockstep checkpoint export DIR/best model.pt`.
        mode  "max": larger is better; "min": smaller is
        """
        if mode not in ("max", "min"):
            raise ValueError(f'mode={mode!r} is not known; choose "max" or "min"')
        plan, value = plan_of(self._plan, "run.save_best"), float(metric)
        self._agree("run.save_best", {"the metric": value, "mode": mode})
        here, writes = self._saved_position(plan), self.world.rank == 0
        return self._checkpoints.save_best(plan, here, value, mode=mode, writes=writes)

    def load(self, path: str | Path, what: str = "model") -> None:
        """Read weights of a checkpoint into the replicated model, on all workers; rank 0 alone reads the disk.

        path  a run directory (its newest checkpoint counts), its folder `best`, or one checkpoint
        what  "model", or a name that `run.register_state` was given, if that has the weights of the model

        Raises CheckpointError, and changes nothing, if the weights do not fit the model.
        """
        model = self._replicated("run.load")

        def load() -> None:
            self._accord.come_to("run.load")
            found = self._once.run(lambda: describe_misfit(read_weights(path, what), model))
            if found:
                raise CheckpointError(f"{path} does not fit the model:\n  " + "\n  ".join(found))
            mine = read_weights(path, what) if self.world.rank == 0 else None
            model.load_state_dict(hand_over(self._group, self.device, 0, mine))

        self._calls.make("run.load", load)

    def _saved_position(self, plan: Plan) -> Position:
        """Of the next step that is to be taken: that of the batch in hand, unless it has been."""
        return self._here if self._in_hand and self._applied <= self._here.number else plan.batches.position

    def _resume(self, plan: Plan) -> None:
        """From where the last run in this directory ended; or where the others are, if they are in the loop."""

        def resume() -> None:
            compare = partial(self._accord.compare, "resuming")
            is_main = self.world.rank == 0
            step = self._checkpoints.resume(plan, compare, writes=is_main, tells=self.options.progress)
            if step is not None:
                self._chronicle.event("resumed", text=f"from the checkpoint of step {step}")
            self._applied = plan.batches.position.number

        self._calls.make("resuming", resume, begins_loop=True)
        self._checkpoints.saving.begin(plan.batches.position.number)

    def _replicated(self, who: str) -> nn.Module:
        if self._model is None:
            raise LockstepError(f"{who} needs a model: call run.replicate(model) first")
        return self._model
