"""`Run`: the object that a training program works with.

    with lockstep.Run("runs/digits", seed=7) as run:
        model = run.replicate(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        batches = run.batches(train_set, global_batch_size=256, shards=8, epochs=15)
        for batch in run.train(batches, optimizer):
            run.step(loss, batch)
        accuracy = run.evaluate(correct, test_set)

The same program runs on one worker or on many, and computes the same bits.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Sampler

from lockstep import faults
from lockstep.data.batches import Batch, Batches, BatchSettings, check_options
from lockstep.data.sample_order import Order
from lockstep.errors import LockstepError
from lockstep.recovery.module_state import GeneratorState
from lockstep.recovery.run_directory import pending_stops
from lockstep.step import determinism
from lockstep.step.compiled_model import compile_model
from lockstep.step.learning_rate import LRScaling
from lockstep.step.run_options import OptionNames, RunOptions
from lockstep.step.step_types import Loss, Result, Stop
from lockstep.trace.metrics import Mean
from lockstep.train import evaluation, run_methods
from lockstep.train.crash_context import CrashContext
from lockstep.train.loop import TrainLoop
from lockstep.train.loop_check import check_train_arguments, refuse_model
from lockstep.train.optimizer_set import join_optimizers, join_schedulers, number_of
from lockstep.train.run_state import plan_of
from lockstep.train.session import Session
from lockstep.train.training_plan import RunConfig, make_plan, settings_of
from lockstep.world.world import World

Model = TypeVar("Model", bound=nn.Module)


class Run:
    """One training run. All workers call its methods in the same order."""

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
        directory  for checkpoints and metrics; an interrupted run resumes from there. None: nothing is saved
        seed       of all random numbers: initial weights, order of samples, augmentation, dropout
        exact      True: the same bits on any number of workers; False: faster, and the bits depend on the workers
        resume     False: start over; what an earlier run left in the directory is moved to `previous-1` there. The
                   same as `lockstep run --fresh`
        options    precision, clipping, checks, checkpoints: see `lockstep.step.run_options.RunOptions`

        Use it in a `with` statement. Entering it joins the other workers; leaving it waits for them and for the last
        checkpoint. Inside, random numbers follow from the seed; afterwards the earlier random state is restored.
        """
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed={seed!r} must be a whole number")
        if not isinstance(resume, bool):
            raise TypeError(f"resume={resume!r} must be True or False; run.load(path) reads weights from elsewhere")
        chosen = RunOptions.from_keywords(options)
        self._session = Session(directory, chosen, seed=seed, exact=exact, starts_over=not resume)
        self.directory, self.options = self._session.directory, self._session.options
        self.seed, self.exact = seed, exact
        self._loop = TrainLoop(self._session)
        self._model: nn.Module | None = None
        self._crash_context = CrashContext(
            self._session.settings, partial(run_methods.whereabouts, self._session, self._loop)
        )

    @property
    def world(self) -> World:
        """The current workers. In an elastic run they change; what a program computes must not depend on them."""
        return self._session.world

    @property
    def device(self) -> torch.device:
        """The device of this worker; the model and the batches are on it."""
        return self._session.device

    # -- begin and end -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            pending_stops.write()
            faults.arm(self._session.settings)
            faults.at("start")
            self._crash_context.begin()
            atexit.register(self._leave, None)
            self._session.begin(self._loop, self._loop.state)
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
                    self._loop.end(is_stopped=True)  # the program left the loop by `break` or `return`
                session.end()
                self._crash_context.end()
                atexit.unregister(self._leave)
            except BaseException as late:
                self._leave(late)
                self._close(late)
                raise
        else:
            assert error is not None
            # Before anything that takes time: the launcher checks whether the other workers leave, too.
            self._leave(error)
            self._loop.save_after(error)
        self._close(None if is_planned else error)
        if is_planned:
            self._loop.progress.print_report_command(session.trace_folder if self.options.trace else None)
        if is_planned and session.group is not dist.group.WORLD:
            dist.destroy_process_group(session.group)
        if error is None:
            session.end_program(is_interrupted=self.interrupted)

    def _leave(self, error: BaseException | None) -> None:
        """Inform the launcher and the other workers that the program leaves the Run by an exception, before its end."""
        self._session.calls.leave()
        self._crash_context.leave(error)
        if isinstance(error, SystemExit) and hasattr(self._session, "on_one"):
            self._session.on_one.note_leaving()
        atexit.unregister(self._leave)

    def _close(self, error: BaseException | None) -> None:
        with ExitStack() as last_first:
            last_first.callback(self._loop.close)
            last_first.callback(self._session.close, error)

    # -- what is trained ---------------------------------------------------------------------------------------------

    def replicate(self, model: Model) -> Model:
        """Move the model to this worker's device, copy the weights and buffers of rank 0 into it, and return it.

        The model is not wrapped, and its parameters keep their names. All workers compare names, shapes and dtypes
        before the copy, and values after it. Call it once per Run.
        """
        if self._model is not None:
            raise LockstepError("a Run trains one model: put both into one nn.Module, or make another Run after this")
        if not isinstance(model, nn.Module):
            raise TypeError(f"run.replicate takes a torch.nn.Module, not {type(model).__name__}")
        refuse_model(model, "run.replicate")
        model = model.to(self.device)
        run_methods.copy_from_rank_0(self._session, model)
        compile_model(model, self.options.compile, self.device)
        self._model = model
        return model

    def register_state(self, **objects: Any) -> None:
        """Add objects to the state that is saved and resumed, such as averaged weights. Call it before `train`.

        objects  objects with `state_dict` and `load_state_dict`, whose states may hold tensors, numbers, strings, None,
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
        shards: int | None = None,
        epochs: int | None = 1,
        order: Order | Sampler[Any] | None = None,
        drop_last: bool = False,
        **loading: Any,
    ) -> Batches:
        """Return the global batches of a dataset, each cut into shards.

        global_batch_size  number of samples of one step, over all workers; must be given
        shards     parts of a batch, and the largest possible number of workers. The bits of a result depend on it, and
                   not on the workers. None: as many as workers can take part in a new run (`lockstep run --max`, else
                   those that are there), or as the run that is resumed has
        epochs     number of passes over the dataset; None: no limit
        order      an `Order`, or a torch `Sampler` or `BatchSampler` as for one worker; None: a new shuffle every epoch
        drop_last  leave out the last batch of an epoch if it is not full
        loading    num_workers (processes), prefetch_factor (batches of each), collate_fn, pin_memory, timeout_s, and
                   split="worker" for a stream that gives each worker its own samples; see
                   `lockstep.data.batches.BatchSettings`
        """
        check_options(loading)
        global_batch_size, shards = self._session.choose_batch(global_batch_size, shards)
        facts = {"global_batch_size": global_batch_size, "shards": shards, "epochs": epochs, "drop_last": drop_last}
        samples = evaluation.count_samples(dataset)
        self._session.agree(
            "run.batches",
            {**facts, "len(dataset)": samples, "order": order and type(order).__name__, "split": loading.get("split")},
        )
        settings = BatchSettings(
            global_batch_size=global_batch_size, shards=shards, epochs=epochs, drop_last=drop_last, **loading
        )
        is_elastic, is_main = self._session.calls.is_elastic, self._session.is_main
        determinism.check_split(settings.split, exact=self.exact, is_elastic=is_elastic, is_main=is_main)
        # A new worker does not know its rank and the number of workers yet; they are set when it joins.
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
            exchange=partial(run_methods.gather_rows, self._session),
        )

    def train(
        self,
        batches: Batches,
        optimizer: torch.optim.Optimizer,
        *more_optimizers: torch.optim.Optimizer,
        scheduler: Any = None,
        interval: str = "step",
        scaling: LRScaling | None = None,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """Iterate over the batches, from where the last run in this directory ended, with progress and checkpoints.

        more_optimizers  of other parts of the model, as in a GAN; `step` then says which one takes the step
        scheduler  a torch learning-rate scheduler, or a list of them; its step() is called after every `interval`:
                   "step" (of its own optimizer) or "epoch"
        scaling    scales the learning rate with the batch size: see `lockstep.LRScaling`
        steps      end after so many steps, counted from the first step of the training; None: at the end of the batches

        Leaving the loop by `break` or `return` ends the training: it is saved at the end of the `with` block, and a
        later start does not continue it. After SIGTERM, SIGUSR1 or Ctrl-C the current step is finished and saved, and
        the program exits here with status 75 (130 after Ctrl-C), unless `Run(exit_on_interrupt=False)`.
        """
        check_train_arguments(steps, interval)
        optimizers = (optimizer, *more_optimizers)
        schedule = join_schedulers(scheduler, optimizers)
        if not isinstance(batches, Batches):
            raise TypeError(f"run.train takes run.batches(dataset, ...) first, not a {type(batches).__name__}")
        if self._loop.plan is not None:
            raise LockstepError("a Run has one loop: run.train goes over all epochs, see run.batches(epochs=...)")
        model = run_methods.require_model(self._model, "run.train")
        config = RunConfig(self.options, self.seed, self.exact)
        plan = make_plan(model, join_optimizers(optimizers, model), batches, config, scaling=scaling)
        plan.schedule, plan.interval = schedule, interval
        steps = self._session.prepare(plan, steps)
        plan.settings = settings_of(plan, config, scaling=scaling, steps=steps)
        yield from self._loop.run(plan, steps)

    def step(self, loss: Loss, batch: Batch, *, optimizer: torch.optim.Optimizer | None = None) -> Result:
        """Run forward and backward, average the gradient over all workers, and take the optimiser's step.

        `loss(model, batch)` returns (sum, weight): the sum of the losses of its samples, and the number of samples (or
        of tokens, or any other weight). The gradient is that of the mean over the global batch. With metrics it returns
        `(sum, weight, {"accuracy": (correct, count)})`: their means over the global batch are `result.metrics`.

        optimizer  the one that takes the step, if `train` was given several: only its parameters get gradients, and
                   each takes one step with a batch at most
        """
        plan = self._loop.plan
        if plan is None:
            raise LockstepError("run.step belongs into `for batch in run.train(batches, optimizer)`: call train first")
        if not isinstance(batch, Batch):
            raise TypeError(f"run.step takes a batch from run.train, not a {type(batch).__name__}")
        return self._loop.step(plan, loss, batch, number_of(optimizer, plan.optimizer))

    # -- metrics -----------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        figures: Callable[[Any, Any], Any],
        dataset: Any,
        *,
        batch_size: int = 256,
        model: nn.Module | None = None,
        **loading: Any,
    ) -> Mean | dict[str, Mean]:
        """Evaluate every sample of `dataset` exactly once, over all workers. Any number of them gives the same means.

        `figures(model, batch)` returns (sum, weight), or a dict of such pairs, for example (correct answers, answers).
        A loss function that returns metrics gives a dict of these and "loss". Buffers of the model are restored.
        model    the model to evaluate, in eval mode, if not the replicated one; for example an average of its weights
        loading  num_workers (processes), collate_fn
        """
        evaluation.check_options("run.evaluate", loading)
        asked = evaluation.EvaluationCall(
            "run.evaluate", run_methods.require_model(self._model, "run.evaluate"), model, dataset, batch_size, loading
        )
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
        """Return the predictions for all samples, in the order of the dataset, on all workers, on the CPU.

        `function(model, batch)` returns a tensor with a row for each sample, or a dict of such tensors. The other
        arguments are those of `evaluate`.
        """
        evaluation.check_options("run.predict", loading)
        asked = evaluation.EvaluationCall(
            "run.predict", run_methods.require_model(self._model, "run.predict"), model, dataset, batch_size, loading
        )
        found = evaluation.predict(self._session, function, asked)
        return found[""] if list(found) == [""] else found

    def log(self, **figures: Any) -> dict[str, float]:
        """Reduce metrics over all workers, write them to metrics.jsonl, and return them.

        A metric is a number or (sum, weight). Numbers that are equal on all workers are not changed; others become
        their mean.
        """
        reduced = run_methods.reduce_metrics(self._session, figures)
        step = self._loop.plan.batches.position.number if self._loop.plan is not None else 0
        writes = self._session.is_main
        self._session.trace_writer.log(step, reduced, writes=writes and self._session.calls.is_member)
        self._loop.progress.log(step, reduced)
        if self._session.metrics is not None and self._session.calls.is_member:
            self._session.metrics.add(step, reduced, writes=writes)
            self._session.tensorboard.write(step, reduced, writes=writes)
        return reduced

    # -- collective calls --------------------------------------------------------------------------------------------

    def on_main(self, call: Callable[[], Any], *, rank: int = 0) -> Any:
        """Run `call` on one worker, while the others wait without a time limit. All return its result, as JSON.

        An error in it is raised on all workers.
        """
        may_shrink = self._session.calls.is_elastic  # then another worker does it
        if rank < 0 or (rank >= self.world.size and not may_shrink):
            raise ValueError(f"rank={rank}: there are ranks 0 to {self.world.size - 1}")
        return self._session.calls.make(
            "run.on_main", lambda: self._session.on_one.run(call, on=rank % self.world.size)
        )

    @property
    def should_stop(self) -> bool:
        """Whether all workers have agreed to end the loop, because one was asked to (SIGTERM, `run.stop()`)."""
        return self._session.stops.agreed is not Stop.NO

    @property
    def interrupted(self) -> bool:
        """Whether the training was ended by a signal (SIGTERM, SIGUSR1, Ctrl-C) before it was complete."""
        return self._session.stops.agreed is Stop.SIGNAL

    def stop(self) -> None:
        """Ask all workers to leave the loop after the next step; it suffices if one worker calls it. A later start
        continues the training; to end it for good, `break` out of the loop on all workers."""
        self._session.stops.asked = max(self._session.stops.asked, Stop.ASKED)

    @property
    def noise_scale(self) -> float | None:
        """The batch size, in samples, beyond which a larger one gains less and less. None if it is not known yet.

        Do not use it for control flow: it is what this worker has measured, and others may have another value.
        """
        return self._session.observer.noise_scale

    def digest(self) -> str:
        """SHA-256 of weights, buffers and optimiser state. A collective call only in a loop with `shard_optimizer`."""
        return run_methods.digest(self._session, self._loop, run_methods.require_model(self._model, "run.digest"))

    def memory(self) -> dict[str, int]:
        """Return what this worker has used memory for, in bytes. Not a collective call.

        weights    parameters and buffers
        gradients  one for each parameter that is trained
        buckets    in which gradients are exchanged, beside the gradients themselves
        optimizer  the state of the optimiser
        graphs     CUDA graphs of captured shards
        rest       activations, sums of the gradients of some shards; on a CPU everything else in the process, too
        peak       the most that was used at any time: of the GPU, with what torch keeps for reuse; else of the process

        Before `run.train` there are only `rest` and `peak`.
        """
        return run_methods.memory_by_kind(self._session, self._loop)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Start writing a checkpoint, by one worker, in the background; this waits only for a copy of the tensors.
        In the body of the loop that begins when the body has ended, since a resumed run begins with the next one.
        With `shard_optimizer=True` a collective call, which waits until all but 256 MiB of the state are written.
        """
        self._loop.save(plan_of(self._loop.plan, "run.save"))

    def save_best(self, metric: float, *, mode: str = "max") -> bool:
        """Save a checkpoint in the folder `best` of the run directory if `metric` is better than all before it.

        All workers call it with the same value, for example that of `run.evaluate`. Returns whether it was better.
        Metrics whose checkpoint could not be written do not count.
        `run.load(directory / "best")` and `lockstep checkpoint export DIR/best model.pt` read the weights.
        mode  "max": larger is better; "min": smaller is better
        """
        if mode not in ("max", "min"):
            raise ValueError(f'mode={mode!r} is not known; choose "max" or "min"')
        plan, value = plan_of(self._loop.plan, "run.save_best"), float(metric)
        self._session.agree("run.save_best", {"the metric": value, "mode": mode})
        run_methods.forget_unwritten_best(self._session)
        return self._loop.save_best(plan, value, mode)

    def load(self, path: str | Path, what: str = "model") -> None:
        """Read weights of a checkpoint into the replicated model, on all workers; rank 0 alone reads the disk.

        path  a run directory (its newest checkpoint is read), its folder `best`, or one checkpoint
        what  "model", or a name that was passed to `run.register_state`, if its state has the weights of the model

        Raises CheckpointError, and changes nothing, if the weights do not fit the model.
        """
        run_methods.load_weights(self._session, run_methods.require_model(self._model, "run.load"), path, what)
