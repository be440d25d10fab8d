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

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Sampler

from lockstep import faults
from lockstep.comm import agreement
from lockstep.data.batches import Batch, Batches, Settings, check_options
from lockstep.data.sample_order import Order
from lockstep.ddp import replica
from lockstep.ddp.replica import Leaf
from lockstep.ddp.state_digest import named_state, sha256_of
from lockstep.errors import CheckpointError, LockstepError
from lockstep.train import determinism, evaluation
from lockstep.train.checkpointing import describe_misfit, read_weights
from lockstep.train.crash_context import Farewell
from lockstep.train.loop import TrainLoop
from lockstep.train.loop_check import refuse_model, refuse_optimizer
from lockstep.train.metrics import Mean, as_pairs, gather_pieces, mean_of
from lockstep.train.module_state import GeneratorState, load_module
from lockstep.train.options import OptionNames, Options
from lockstep.train.run_directory import pending_stops, starts_over
from lockstep.train.run_state import plan_of
from lockstep.train.schedule import LRScaling
from lockstep.train.session import Session
from lockstep.train.state_transfer import hand_over
from lockstep.train.step import Loss, Result, Stop
from lockstep.train.trained_parameters import Basis, make_plan, settings_of
from lockstep.world.world import World

Model = TypeVar("Model", bound=nn.Module)


class Run:
    """One training run. All its methods are called by all workers, in the same order."""

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
        if not isinstance(resume, bool):
            raise TypeError(f"resume={resume!r} must be True or False; run.load(path) reads weights from elsewhere")
        is_fresh = starts_over(resume, os.environ)
        self._session = Session(directory, Options.of(options), seed=seed, exact=exact, starts_over=is_fresh)
        self.directory, self.options = self._session.directory, self._session.options
        self.seed, self.exact = seed, exact
        self._loop = TrainLoop(self._session)
        self._model: nn.Module | None = None
        self._farewell = Farewell(os.environ, self._whereabouts)

    @property
    def world(self) -> World:
        """The workers there are now. In an elastic run they change; what a program computes must not depend on them."""
        return self._session.world

    @property
    def device(self) -> torch.device:
        """The device of this worker, on which the model and the batches are."""
        return self._session.device

    # -- begin and end -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            pending_stops.write()
            faults.arm(os.environ)
            faults.at("start")
            self._farewell.begin()
            atexit.register(self._leave, None)
            self._session.begin(self._loop)
        except BaseException as error:
            self._leave(error)
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, is_planned = self._session, error is None or error is self._session.stops.ending
        if is_planned:
            try:
                if session.calls.failed is not None:
                    self._loop.save_after(session.calls.failed)
                if self._loop.is_running:
                    self._loop.end(is_stopped=True)  # the program has left it, by `break` or `return`
                session.end()
                self._farewell.end()
                atexit.unregister(self._leave)
            except BaseException as late:
                self._leave(late)
                self._close(late)
                raise
        else:
            assert error is not None
            self._leave(error)  # before anything that takes time: the launcher looks whether the others leave, too
            self._loop.save_after(error)
        self._close(None if is_planned else error)
        if is_planned:
            self._loop.progress.point_at_report(session.trace_folder if self.options.trace else None)
        if is_planned and session.group is not dist.group.WORLD:
            dist.destroy_process_group(session.group)
        if error is None and self.interrupted:
            raise session.stops.exit()

    def _leave(self, error: BaseException | None) -> None:
        """Tell the launcher that the program leaves its Run without its end, by an exception."""
        self._session.calls.leave()
        self._farewell.leave(error)
        if isinstance(error, SystemExit) and hasattr(self._session, "once"):
            self._session.once.note_leaving()
        atexit.unregister(self._leave)

    def _close(self, error: BaseException | None) -> None:
        with ExitStack() as last_first:
            last_first.callback(self._loop.close)
            last_first.callback(self._session.close, error)

    def _whereabouts(self) -> dict[str, Any]:
        """For the card of a run that failed."""
        found: dict[str, Any] = {"call": self._session.calls.doing}
        if hasattr(self._session, "world"):
            found |= {"rank": self.world.rank, "size": self.world.size}
        return found | self._loop.whereabouts()

    # -- what is trained ---------------------------------------------------------------------------------------------

    def replicate(self, model: Model) -> Model:
        """The model itself, on this worker's device, with the weights and buffers of rank 0: no wrapper, no prefix.

        Names, shapes and dtypes are compared over workers before, and values after. Once per Run.
        """
        if self._model is not None:
            raise LockstepError("a Run trains one model: put both into one nn.Module, or make another Run after this")
        if not isinstance(model, nn.Module):
            raise TypeError(f"run.replicate takes a torch.nn.Module, not {type(model).__name__}")
        refuse_model(model, "run.replicate")
        model = model.to(self.device)
        leaves = replica.trained_leaves(model, set())
        state: dict[str, Any] = replica.state_of(model, set())
        rest = [Leaf(name, tensor, sparse=False) for name, tensor in state.items()]  # buffers, and what is frozen

        def copy() -> None:
            self._session.call_check.come_to("run.replicate")
            with self._session.call_check.explains("run.replicate"):
                replica.check_same_shapes(self._session.group, leaves, self.device)
                replica.check_same_shapes(self._session.group, rest, self.device)
            if not leaves:
                raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to train")
            replica.copy_state(self._session.group, model, set(), source=0, buffers=True)
            advice = "They did not take over what rank 0 sent; is a parameter shared or computed?"
            replica.check_same_values(self._session.group, model, set(), self.device, buffers=True, advice=advice)

        self._session.calls.make("run.replicate", copy)
        self._model = model
        return model

    def register_state(self, **objects: Any) -> None:
        """Name what else belongs to the state of the run, such as an average of the weights, before `train`.

        objects  things with `state_dict` and `load_state_dict`, whose states may hold tensors, numbers, strings, None,
                 lists, tuples and dicts; and generators: torch.Generator, random.Random, numpy.random.Generator
        """
        objects = {name: GeneratorState(one) if GeneratorState.fits(one) else one for name, one in objects.items()}
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TypeError(
                    f"run.register_state({name}=...): a {type(thing).__name__} has no state_dict/load_state_dict"
                )
        if self._loop.plan is not None:
            raise LockstepError("run.register_state comes before run.train: what is resumed there must be known")
        self._session.checkpoints.registered |= objects

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
        self._session.agree(
            "run.batches",
            {**facts, "len(dataset)": samples, "order": order and type(order).__name__, "split": loading.get("split")},
        )
        settings = Settings(
            global_batch_size=global_batch_size, shards=shards, epochs=epochs, drop_last=drop_last, **loading
        )
        is_main = self._session.is_main
        determinism.check_split(
            settings.split, exact=self.exact, is_elastic=self._session.calls.is_elastic, is_main=is_main
        )
        # A newcomer does not know yet among how many it will be; it is told when it is taken in.
        rank, size = (self.world.rank, self.world.size) if self._session.calls.is_member else (0, 1)
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
        with self._session.call_check.explains("the next batch"):
            return agreement.gather_rows(self._session.group, row, device=self.device)

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
        if self._loop.plan is not None:
            raise LockstepError("a Run has one loop: run.train goes over all epochs, see run.batches(epochs=...)")
        witness = self._session.witness
        if witness is not None:
            steps = min(steps or witness.steps, witness.steps)
        model, basis = self._replicated("run.train"), Basis(self.options, self.seed, self.exact)
        plan = make_plan(model, optimizer, batches, basis, scaling=scaling)
        plan.schedule, plan.interval = scheduler, interval
        plan.settings = settings_of(plan, basis, scaling=scaling, steps=steps)
        yield from self._loop.run(plan, steps)

    def step(self, loss: Loss, batch: Batch) -> Result:
        """Forward, backward, the mean gradient over all workers, and the optimiser's step.

        `loss(model, batch)` returns (sum, weight): the sum of the losses of its samples, and their number (or that of
        tokens, or any other weight). The gradient is that of the mean over the global batch. It may return metrics as
        well, `(sum, weight, {"accuracy": (correct, count)})`: their means over the global batch are `result.metrics`.
        """
        plan = self._loop.plan
        if plan is None:
            raise LockstepError("run.step belongs into `for batch in run.train(batches, optimizer)`: call train first")
        if not isinstance(batch, Batch):
            raise TypeError(f"run.step takes a batch from run.train, not a {type(batch).__name__}")
        return self._loop.step(plan, loss, batch)

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
        A loss function that returns metrics gives a dict of these and "loss". Buffers are afterwards what they were.
        model    what is evaluated, in eval mode, if not the replicated model: an average of its weights, say
        loading  num_workers (processes), collate_fn
        """
        evaluation.check_options("run.evaluate", loading)
        asked = evaluation.Asked("run.evaluate", self._replicated("run.evaluate"), model, dataset, batch_size, loading)
        means = evaluation.evaluate(self._session, figures, asked)
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
        evaluation.check_options("run.predict", loading)
        asked = evaluation.Asked("run.predict", self._replicated("run.predict"), model, dataset, batch_size, loading)
        found = evaluation.predict(self._session, function, asked)
        return found[""] if list(found) == [""] else found

    def log(self, **figures: Any) -> dict[str, float]:
        """Figures of this moment, over all workers, into metrics.jsonl. A figure is a number, or (sum, weight).

        Numbers that are equal everywhere stay as they are; others become their mean.
        """
        pairs = {name: value if isinstance(value, tuple) else (value, 1.0) for name, value in figures.items()}

        def run() -> dict[str, float]:
            faults.at("logging")
            self._session.call_check.come_to("run.log")
            with self._session.call_check.explains("run.log"):
                mine = {self.world.rank: as_pairs(pairs, "run.log")}
                pieces = gather_pieces(self._session.group, self.device, mine, what="run.log")
            return {
                name: values[0][0] / values[0][1] if len(set(values)) == 1 and values[0][1] else float(mean_of(values))
                for name, values in pieces.items()
            }

        reduced = self._session.calls.make("run.log", run)
        step, writes = (
            self._loop.plan.batches.position.number if self._loop.plan is not None else 0,
            self._session.is_main,
        )
        self._session.chronicle.log(step, reduced, writes=writes and self._session.calls.is_member)
        self._loop.progress.log(step, reduced)
        if self._session.metrics is not None and self._session.calls.is_member:
            self._session.metrics.note(step, reduced, writes=writes)
            self._session.board.show(step, reduced, writes=writes)
        return reduced

    # -- together ----------------------------------------------------------------------------------------------------

    def on_main(self, call: Callable[[], Any], *, rank: int = 0) -> Any:
        """Run something on one worker, while the others wait as long as it takes; all get what it returned, as JSON.

        An error there is an error on all workers.
        """
        may_shrink = self._session.calls.is_elastic  # then another one does it
        if rank < 0 or (rank >= self.world.size and not may_shrink):
            raise ValueError(f"rank={rank}: there are ranks 0 to {self.world.size - 1}")
        return self._session.calls.make("run.on_main", lambda: self._session.once.run(call, on=rank % self.world.size))

    @property
    def should_stop(self) -> bool:
        """Some worker was asked to end (SIGTERM, or `run.stop()`), and all have agreed to: `train` ends here."""
        return self._session.stops.agreed is not Stop.NO

    @property
    def interrupted(self) -> bool:
        """Whether the training was ended by a signal (SIGTERM, SIGUSR1, Ctrl-C) before it was through."""
        return self._session.stops.agreed is Stop.SIGNAL

    def stop(self) -> None:
        """Ask all workers to leave the loop after the next step; one of them is enough. A later start trains on; to end
        the training for good, `break` out of the loop on all workers."""
        self._session.stops.asked = max(self._session.stops.asked, Stop.ASKED)

    @property
    def noise_scale(self) -> float | None:
        """In samples: the batch size beyond which a larger one pays less and less. None: not known yet.

        It is what this worker has seen, so not for control flow: others may know another value.
        """
        return self._session.observer.noise_scale

    def digest(self) -> str:
        """SHA-256 of weights, buffers and what the optimiser remembers. Of this worker: nobody is asked."""
        optimizer = self._loop.plan.optimizer if self._loop.plan is not None else None
        return sha256_of(named_state(self._replicated("run.digest"), optimizer))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Have a checkpoint written, by one worker, in the background: this waits only for a copy of the tensors."""
        self._loop.save(plan_of(self._loop.plan, "run.save"))

    def save_best(self, metric: float, *, mode: str = "max") -> bool:
        """Save a checkpoint in the folder `best` of the run directory if `metric` is better than all before it.

        All workers call it with the same value, for example that of `run.evaluate`. Returns whether it was better.
        `run.load(directory / "best")` reads the weights back, and `lockstep checkpoint export DIR/best model.pt`.
        mode  "max": larger is better; "min": smaller is
        """
        if mode not in ("max", "min"):
            raise ValueError(f'mode={mode!r} is not known; choose "max" or "min"')
        plan, value = plan_of(self._loop.plan, "run.save_best"), float(metric)
        self._session.agree("run.save_best", {"the metric": value, "mode": mode})
        here, writes = self._loop.position(plan), self._session.is_main
        return self._session.checkpoints.save_best(plan, here, value, mode=mode, writes=writes)

    def load(self, path: str | Path, what: str = "model") -> None:
        """Read weights of a checkpoint into the replicated model, on all workers; rank 0 alone reads the disk.

        path  a run directory (its newest checkpoint counts), its folder `best`, or one checkpoint
        what  "model", or a name that `run.register_state` was given, if that has the weights of the model

        Raises CheckpointError, and changes nothing, if the weights do not fit the model.
        """
        model = self._replicated("run.load")

        def load() -> None:
            self._session.call_check.come_to("run.load")
            found = self._session.once.run(lambda: describe_misfit(read_weights(path, what), model))
            if found:
                raise CheckpointError(f"{path} does not fit the model:\n  " + "\n  ".join(found))
            mine = read_weights(path, what) if self._session.is_main else None
            read = hand_over(self._session.group, self.device, 0, mine)
            load_module(model, read["weights"], read["raw"])

        self._session.calls.make("run.load", load)

    def _replicated(self, who: str) -> nn.Module:
        if self._model is None:
            raise LockstepError(f"{who} needs a model: call run.replicate(model) first")
        return self._model
