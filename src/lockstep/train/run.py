"""`Run`: what a training program holds.

    with lockstep.Run("runs/digits", seed=7) as run:
        model = run.replicate(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        batches = run.batches(train_set, global_batch=256, epochs=15)
        for batch in run.track(batches, optimizer):
            run.step(loss, batch)
        accuracy = run.evaluate(correct, test_set)

The same program runs on one worker or many, and computes the same bits.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from lockstep.checkpoint.store import Store
from lockstep.comm import agree
from lockstep.comm.exact import ShardSum
from lockstep.comm.peers import Watch
from lockstep.data.batches import Batch, Batches, Position, Settings, Shard
from lockstep.data.order import Order, share
from lockstep.errors import CheckpointError, LockstepError, ReplicaMismatch
from lockstep.replicate import replica
from lockstep.replicate.digest import named_state, sha256_of
from lockstep.replicate.gradients import Gradients
from lockstep.replicate.replica import Leaf
from lockstep.replicate.running import RunningState
from lockstep.seed import kept_random_state, mix, sow
from lockstep.train import evaluation, setting, verdict
from lockstep.train.audit import Audit
from lockstep.train.check import ReplicaCheck
from lockstep.train.metrics import Mean, Pairs, as_pairs, gather_pieces, mean_of
from lockstep.train.once import Once
from lockstep.train.options import OptionNames, Options
from lockstep.train.precision import LossScale
from lockstep.train.progress import Progress
from lockstep.train.schedule import LargeBatch, Scaling
from lockstep.train.step import Loss, Result, Training, take_step
from lockstep.train.tally import Tally
from lockstep.world import World, init

Model = TypeVar("Model", bound=nn.Module)


class Run:
    """One training run. All its methods are called by all workers, in the same order."""

    def __init__(
        self, directory: str | Path | None = None, *, seed: int = 0, exact: bool = True, **options: Unpack[OptionNames]
    ) -> None:
        """
        directory  where checkpoints and metrics go, and where a run that was interrupted goes on; None: nowhere
        seed       of everything random: initial weights, order of samples, augmentation, dropout
        exact      the same bits on any number of workers; False: whatever is fastest here
        options    see `lockstep.train.options.Options`
        """
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed={seed!r} must be a whole number")
        self.directory = Path(directory) if directory is not None else None
        self.seed, self.exact, self.options = seed, exact, Options.of(options)
        self._stack = ExitStack()
        self._model: nn.Module | None = None
        self._training: Training | None = None
        self._stop_asked = False  # on this worker
        self._stop_agreed = False

    # -- begin and end -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.world: World = init(backend=self.options.backend, device=self.options.device)
        self.device = self.world.device
        assert dist.group.WORLD is not None
        self._group = setting.private_group(self.world)
        self._watch = Watch(self._group, polls=self.device.type == "cpu")
        self._once = Once(_get_default_store(), self._group)
        chosen = replace(self.options, device=None)  # that may be another one on every worker
        self._agree("Run", {"seed": self.seed, "exact": self.exact, "options": repr(chosen)})
        self._stack.enter_context(kept_random_state(self.device))
        self._stack.enter_context(setting.arithmetic(self.device, exact=self.exact, threads=self.options.threads))
        self._stack.enter_context(self._signals())
        sow(mix(self.seed, "start"), self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self._training is not None:
            self._training.sum.close()
        if error is None and self._group is not dist.group.WORLD:
            with self._watch.explains("the end of the run"):
                self._group.barrier(dist.BarrierOptions()).wait()  # nobody leaves while another still talks
            dist.destroy_process_group(self._group)

    def _signals(self) -> ExitStack:
        """SIGTERM: end after the step that is running, all workers together."""
        undo = ExitStack()
        if threading.current_thread() is threading.main_thread():

            def ask(number: int, _frame: FrameType | None) -> None:
                self._stop_asked = True

            before = signal.signal(signal.SIGTERM, ask)
            undo.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL if before is None else before)
        return undo

    def _agree(self, what: str, facts: Mapping[str, Any]) -> None:
        """All workers together: the same arguments everywhere, or an error everywhere."""
        facts = {name: str(value) for name, value in facts.items()}
        with self._watch.explains(what):
            if agree.is_same(self._group, agree.fingerprint(facts), device=self.device):
                return
            told = agree.tell_all(self._group, facts, device=self.device)
        for rank, theirs in enumerate(told):
            for name, value in theirs.items():
                if value != told[0].get(name):
                    raise ReplicaMismatch(
                        f"{what}: {name} is {told[0].get(name)} on rank 0 and {value} on rank {rank}; "
                        "it must be the same on all workers"
                    )

    # -- what is trained ---------------------------------------------------------------------------------------------

    def replicate(self, model: Model) -> Model:
        """The model, on this worker's device, with the weights and buffers of rank 0. Its names stay as they are."""
        if self._model is not None:
            raise LockstepError("a Run trains one model: put both into one nn.Module, or make another Run after this")
        if not isinstance(model, nn.Module):
            raise TypeError(f"run.replicate takes a torch.nn.Module, not {type(model).__name__}")
        model = model.to(self.device)
        leaves = replica.trained_leaves(model, set())
        state: dict[str, Any] = replica.state_of(model, set())
        rest = [Leaf(name, tensor, sparse=False) for name, tensor in state.items()]  # buffers, and what is frozen
        with self._watch.explains("run.replicate"):
            replica.check_same_shapes(self._group, leaves, self.device)
            replica.check_same_shapes(self._group, rest, self.device)
        if not leaves:
            raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to train")
        replica.copy_state(self._group, model, set(), source=0, buffers=True)
        advice = "They did not take over what rank 0 sent; is a parameter shared or computed?"
        replica.check_same_values(self._group, model, set(), self.device, buffers=True, advice=advice)
        self._model = model
        return model

    def batches(
        self,
        dataset: Any,
        *,
        global_batch: int,
        shards: int = 8,
        epochs: int | None = 1,
        order: Order | None = None,
        drop_last: bool = False,
        **loading: Any,
    ) -> Batches:
        """Global batches, cut into `shards`: as many workers as there can be, and a part of what is computed.

        loading: loaders (processes), ahead (batches), collate, pin, timeout_s; see `lockstep.data.batches.Settings`.
        """
        facts = {"global_batch": global_batch, "shards": shards, "epochs": epochs, "drop_last": drop_last}
        samples = None if evaluation.is_stream(dataset) else len(dataset)
        self._agree("run.batches", {**facts, "len(dataset)": samples, "order": order and type(order).__name__})
        settings = Settings(
            global_batch=global_batch, shards=shards, epochs=epochs, drop_last=drop_last, **loading
        )
        rank, size = self.world.rank, self.world.size
        return Batches(
            dataset,
            settings,
            seed=self.seed,
            rank=rank,
            size=size,
            device=self.device,
            order=order,
            joined=not self.exact,
        )

    def track(
        self,
        batches: Batches,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Any = None,
        per: str = "step",
        scaling: Scaling | None = None,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """Hand out the batches: from where the last run in this directory ended, with progress and checkpoints.

        schedule  a torch learning-rate scheduler; its step() is called after every `per`: "step" or "epoch"
        scaling   the learning rate follows the batch size: see `lockstep.Scaling`
        steps     end after so many steps, counted from the very first; None: when the batches do
        """
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise ValueError(f"steps={steps!r} must be a whole number, 1 or more, or None")
        if per not in ("step", "epoch"):
            raise ValueError(f'per={per!r} is not known; choose "step" or "epoch"')
        if self._training is not None:
            raise LockstepError("a Run has one loop: run.track goes over all epochs, see run.batches(epochs=...)")
        training = self._prepare(batches, optimizer, scaling)
        self._batches, self._schedule, self._per = batches, schedule, per
        self._resume()
        self._introduce(batches, training)
        is_main = self.world.rank == 0
        self._progress = Progress(steps=steps or batches.steps_in_all, shown=is_main and self.options.progress)
        self._saved_at = batches.position.number
        with closing(iter(batches)) as coming:  # or its loaders would end whenever it is collected
            while not self._stop_agreed and (steps is None or batches.position.number < steps):
                batch = next(coming, None)
                if batch is None:
                    self._agree_on_end(training, batches)
                    break
                yield batch
                if self._is_save_due(batch) and not self._stop_agreed:
                    self.save()
        self._progress.end(batches.position.number)
        if batches.position.number != self._saved_at:
            self.save()

    def step(self, loss: Loss, batch: Batch) -> Result:
        """Forward, backward, the mean gradient over all workers, and the optimiser's step.

        `loss(model, batch)` returns (sum, weight): the sum of the losses of its samples, and their number (or that of
        tokens, or any other weight). The gradient is that of the mean over the global batch.
        """
        training = self._training
        if training is None:
            raise LockstepError("run.step belongs into `for batch in run.track(batches, optimizer)`: call track first")
        if not isinstance(batch, Batch):
            raise TypeError(f"run.step takes a batch from run.track, not a {type(batch).__name__}")
        if self._synced and self.world.size > 1:
            setting.refuse_empty_shards(self._synced[0], batch, training.sum.shares, exact=self.exact)
        result = take_step(training, loss, batch, stop=self._stop_asked)
        if result.stop_asked_by:
            self._stop_agreed = True
        if self._schedule is not None and (batch.ends_epoch if self._per == "epoch" else not result.skipped):
            self._schedule.step()
        with self._watch.explains("the comparison of replicas"):
            self._check.after_step(
                batch.number, lambda: named_state(training.model, training.optimizer) | training.running.past()
            )
        self._progress.step(
            result, epoch=batch.epoch, samples=batch.count, waited_for_data_s=self._batches.wait_s
        )
        return result

    def _prepare(self, batches: Batches, optimizer: torch.optim.Optimizer, scaling: Scaling | None) -> Training:
        model = self._replicated("run.track")
        leaves = replica.trained_leaves(model, set())
        known = {leaf.parameter for leaf in leaves}
        strangers = sum(p not in known for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        if strangers:
            raise ValueError(
                f"the optimiser has {strangers} parameters that the replicated model has not: "
                "make it from `run.replicate(model).parameters()`"
            )
        shards, size = batches.settings.shards, self.world.size
        shares = [share(shards, size, rank) for rank in range(size)]
        setting.check_sync_batch_norm(model, shares, exact=self.exact, is_main=self.world.rank == 0)
        sum_ = ShardSum(self._group, shares, device=self.device, exact=self.exact)

        def fetch(batch: Batch, number: int) -> Shard:
            return batches.fetch(Position(batch.epoch, batch.step, batch.number), [number]).shards[0]

        audit_every, is_stream = self.options.audit_every, batches.state()["samples"] < 0
        if audit_every and (not self.exact or is_stream):
            raise ValueError("audit_every= needs exact=True and a map-style dataset: another worker loads the shard")
        self._synced = setting.synced_layers(model)
        if audit_every and self._synced:
            raise ValueError(
                f"audit_every={audit_every} with {self._synced[0]}, a SyncBatchNorm: one worker alone cannot compute a "
                "shard again; use BatchNorm, or audit_every=0"
            )
        self._check = ReplicaCheck(self._group, self.device, every=self.options.check_every)
        self._training = Training(
            model=model,
            leaves=leaves,
            optimizer=optimizer,
            sum=sum_,
            gradients=Gradients(leaves, sum_, wire=self.options.wire),
            running=RunningState(model, shards),
            loss_scale=LossScale.for_precision(self.options.precision),
            audit=Audit(model, leaves, every=audit_every, fetch=fetch),
            options=self.options,
            seed=self.seed,
            large_batch=LargeBatch(optimizer, scaling, batches.settings.global_batch) if scaling is not None else None,
        )
        return self._training

    def _introduce(self, batches: Batches, training: Training) -> None:
        """Once, from one worker: what is about to be done."""
        if self.world.rank != 0 or not self.options.progress:
            return
        settings, size = batches.settings, self.world.size
        cut = f"{settings.shards} shards on {size} worker{'s' if size > 1 else ''} ({self.world.backend})"
        rates = sorted({float(group["lr"]) for group in training.optimizer.param_groups})
        what = f"global batch {settings.global_batch}, learning rate {', '.join(f'{rate:g}' for rate in rates)}"
        what = training.large_batch.describe() if training.large_batch is not None else what
        how = "exact" if self.exact else "fast: bits depend on the workers"
        if self.exact and self.device.type == "cpu":
            threads = self.options.threads
            how += f", {threads} thread{'s' if threads > 1 else ''} each"
        at = f", from step {batches.position.number}" if batches.position.number else ""
        print(f"lockstep: {what}; {cut}; seed {self.seed}; {how}{at}", file=sys.stderr, flush=True)

    def _agree_on_end(self, training: Training, batches: Batches) -> None:
        """A stream may end at any time, but for all workers at the same."""
        if batches.steps_in_all is not None:
            return
        tally = Tally(training.sum, buffers=len(training.running))
        tally.send(None)
        verdict.refuse_bad_data(tally.outcome(), batches.position.number)

    # -- figures -----------------------------------------------------------------------------------------------------

    def evaluate(
        self, figures: Callable[[Any, Any], Any], dataset: Any, *, batch: int = 256, **loading: Any
    ) -> Mean | dict[str, Mean]:
        """Every sample of `dataset` exactly once, over all workers; the same figure on any number of them.

        `figures(model, batch)` returns (sum, weight), or a dict of such pairs: of correct answers and all answers, say.
        loading: loaders (processes), collate.
        """
        model = self._replicated("run.evaluate")
        samples = None if evaluation.is_stream(dataset) else len(dataset)
        self._agree("run.evaluate", {"batch": batch, "len(dataset)": samples})
        cut = evaluation.Pieces(dataset, batch, **loading)
        with self.options.precision.autocast(self.device):
            mine = evaluation.run(figures, model, cut, world=self.world, seed=self.seed)
        if samples is None:
            self._agree("run.evaluate", {"samples in the dataset": mine.samples})
        if mine.samples == 0:
            raise ValueError("run.evaluate: the dataset has no samples, so there is no mean")
        pieces = self._gather(mine.pieces, "run.evaluate")
        means = {name: mean_of(pairs) for name, pairs in pieces.items()}
        return means[""] if list(means) == [""] else means

    def log(self, **figures: Any) -> dict[str, float]:
        """Figures of this moment, over all workers, into metrics.jsonl. A figure is a number, or (sum, weight).

        Numbers that are equal everywhere stay as they are; others become their mean.
        """
        pairs = {name: value if isinstance(value, tuple) else (value, 1.0) for name, value in figures.items()}
        pieces = self._gather({self.world.rank: as_pairs(pairs, "run.log")}, "run.log")
        reduced = {
            name: values[0][0] / values[0][1] if len(set(values)) == 1 and values[0][1] else float(mean_of(values))
            for name, values in pieces.items()
        }
        if self.world.rank == 0 and self.directory is not None:
            step = self._batches.position.number if self._training is not None else 0
            self.directory.mkdir(parents=True, exist_ok=True)
            with (self.directory / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "time": time.time(), **reduced}) + "\n")
        return reduced

    def _gather(self, mine: Mapping[int, Pairs], what: str) -> dict[str, list[tuple[float, float]]]:
        with self._watch.explains(what):
            return gather_pieces(self._group, self.device, mine, what=what)

    # -- together ----------------------------------------------------------------------------------------------------

    def once(self, call: Callable[[], Any], *, on: int = 0) -> Any:
        """Run something on one worker, while the others wait as long as it takes; all get what it returned."""
        if not 0 <= on < self.world.size:
            raise ValueError(f"on={on}: there are ranks 0 to {self.world.size - 1}")
        return self._once.run(call, on=on)

    @property
    def should_stop(self) -> bool:
        """Some worker was asked to end (SIGTERM, or `run.stop()`), and all have agreed to: `track` ends here."""
        return self._stop_agreed

    def stop(self) -> None:
        """Ask all workers to end after the next step. One of them is enough."""
        self._stop_asked = True

    def digest(self) -> str:
        """SHA-256 of weights, buffers and what the optimiser remembers."""
        optimizer = self._training.optimizer if self._training is not None else None
        return sha256_of(named_state(self._replicated("run.digest"), optimizer))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint: by one worker, atomically, with a digest of every byte."""
        training = self._training
        if training is None:
            raise LockstepError("run.save has nothing to save before `run.track(batches, optimizer)`")
        training.last_norm.check(training.leaves)
        self._saved_at = self._batches.position.number
        if self.directory is None:
            return
        store, state = Store(self.directory), self._state(training)

        def save_checkpoint() -> None:
            store.save(self._saved_at, state)

        self._once.run(save_checkpoint)

    def _state(self, training: Training) -> dict[str, Any]:
        return {
            "model": dict(training.model.state_dict()),
            "optimizer": training.optimizer.state_dict(),
            "schedule": self._schedule.state_dict() if self._schedule is not None else None,
            "loss_scale": training.loss_scale.state(),
            "batches": self._batches.state(),
            "run": self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        """What must not change between the parts of a run, or it would be another run."""
        assert self._training is not None
        return {"seed": self.seed, "exact": self.exact, "shards": self._training.sum.shards}

    def _resume(self) -> None:
        state = Store(self.directory).latest() if self.directory is not None else None
        self._agree("resuming", {"step": state["batches"]["number"] if state is not None else None})
        if state is None:
            return
        training = self._training
        assert training is not None
        for name, now in self._identity().items():
            if state["run"][name] != now:
                raise CheckpointError(
                    f"{self.directory} holds a run with {name}={state['run'][name]}, and this one has {name}={now}; "
                    "use the same, or another directory"
                )
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        if self._schedule is not None and state["schedule"] is not None:
            self._schedule.load_state_dict(state["schedule"])
        training.loss_scale.restore(state["loss_scale"])
        self._batches.restore(state["batches"])

    def _is_save_due(self, batch: Batch) -> bool:
        every = self.options.save_every
        return batch.ends_epoch if every is None else (batch.number + 1) % every == 0

    def _replicated(self, who: str) -> nn.Module:
        if self._model is None:
            raise LockstepError(f"{who} needs a model: call run.replicate(model) first")
        return self._model
