"""What the parts of a run share: the current workers, the collective calls, and the files of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, final

import torch
import torch.distributed as dist

from lockstep import faults, run_files
from lockstep._torch import get_default_store
from lockstep.checkpoint.store import CheckpointStore
from lockstep.comm import abortable_wait
from lockstep.data.sample_order import is_int
from lockstep.elastic import agent_client
from lockstep.errors import CheckpointError
from lockstep.recovery.call_check import CallCheck
from lockstep.recovery.certify_log import StateLog
from lockstep.recovery.collective_calls import CollectiveCalls, print_message
from lockstep.recovery.elastic_calls import ElasticCalls, GenerationListener
from lockstep.recovery.run_directory import is_restart, read_shards, start_over
from lockstep.recovery.run_lock import FILE as RUN_LOCK, RunLock
from lockstep.recovery.run_on_one import RunOnOne
from lockstep.seed import derive_seed, preserve_random_state, seed_all
from lockstep.settings import Settings
from lockstep.step import determinism
from lockstep.step.captured_shard import StepStream
from lockstep.step.run_options import RunOptions
from lockstep.step.step_types import TrainingPlan
from lockstep.trace.metrics import MetricsFile, TensorBoardWriter
from lockstep.trace.step_observer import NullObserver, StepObserver
from lockstep.trace.trace_writer import TraceWriter
from lockstep.train.probe import Probe
from lockstep.train.run_state import BEST, Checkpoints
from lockstep.train.signals import StopRequests
from lockstep.world.freed_memory import keep_freed_memory
from lockstep.world.world import World, choose_device, init, wanted_backend


class RunningLoop(Protocol):
    """What a session knows of the training loop."""

    @property
    def is_running(self) -> bool:
        """The program is inside the loop."""

    @property
    def has_begun(self) -> bool:
        """The program has reached the loop."""


@final
class Session:
    """A run from `begin` to `end`. In an elastic run the workers change meanwhile, and with them the group."""

    world: World
    device: torch.device
    group: dist.ProcessGroup
    call_check: CallCheck  # compares the calls of all workers
    on_one: RunOnOne  # runs a function on one worker for all

    def __init__(
        self, directory: str | Path | None, options: RunOptions, *, seed: int, exact: bool, starts_over: bool
    ) -> None:
        self.settings = settings = Settings.from_env(os.environ)
        starts_over = (starts_over or settings.fresh) and not is_restart(os.environ)
        self.state_log, self.probe = StateLog.from_settings(settings), Probe.from_settings(settings)
        if self.state_log is not None:
            directory, starts_over = self.state_log.directory, False
        if self.probe is not None:
            directory, starts_over, options = None, False, self.probe.change_options(options)
        if directory is not None and not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"Run({directory!r}): the directory must be a path, or None: nothing is saved")
        # Absolute, because the program may change its working directory.
        self.directory = Path(directory).absolute() if directory is not None else None
        self.options, self.seed, self.exact = options, seed, exact
        self._starts_over = starts_over
        self.calls = CollectiveCalls()
        self.stops = StopRequests(settings.run_dir)
        self._lock = RunLock(self.directory, settings.run_id) if self.directory is not None else None
        # Until `_open_files` these observe, write and save nothing.
        self.observer: StepObserver = NullObserver(torch.device("cpu"))
        self.tensorboard = TensorBoardWriter(None, enabled=False)
        self.checkpoints = Checkpoints()
        self.metrics: MetricsFile | None = None
        self._stack = ExitStack()

    @cached_property
    def step_stream(self) -> StepStream:
        return StepStream(self.device)

    @property
    def is_main(self) -> bool:
        """Whether this worker writes files and prints for all: rank 0."""
        return self.world.rank == 0

    def announce(self, text: str) -> None:
        """Print a message, on one worker."""
        if self.is_main and self.options.progress:
            print_message(text)

    @property
    def trace_writer(self) -> TraceWriter:
        return self.observer.trace_writer

    @property
    def trace_folder(self) -> Path | None:
        """The folder of the trace (docs/trace.md); None if there is none."""
        logs = self.settings.run_dir
        place = self.directory or (Path(logs) if logs else None)
        return place / "trace" if place is not None and self.state_log is None else None

    # -- begin and end -----------------------------------------------------------------------------------------------

    def begin(self, loop: RunningLoop, listener: GenerationListener) -> None:
        """Join the other workers, open the files, and set what the arithmetic depends on."""
        if self._lock is not None:
            self._lock.reserve()
        options, agent = self.options, agent_client.current()
        signals = self.stops.handle_signals(is_training=lambda: loop.is_running, has_begun=lambda: loop.has_begun)
        if agent is None:
            self.form_group(init(backend=options.backend, device=options.device))
            faults.context["rank"] = self.world.rank
        else:
            identity = agent.start()
            faults.context["worker"] = identity.id
            agent.on_stop, self.stops.tell_agent = self.stops.order_stop, agent.note_signal
            self.calls = ElasticCalls(agent, identity, listener, backend=options.backend, device=options.device)
            self.world = self._expected_world(identity)
            self.device = self.world.device
            self._stack.enter_context(signals)  # a worker that is asked to leave while it joins is not lost
        chosen = replace(options, device=None)  # which may differ between workers
        self.agree("Run", {"seed": self.seed, "exact": self.exact, "options": repr(chosen)})
        self._open_files()  # not before: from here on this run has the lock of the directory
        self._stack.enter_context(preserve_random_state(self.device))
        if self.device.type == "cpu":
            keep_freed_memory(os.environ)
        self._stack.enter_context(determinism.arithmetic(self.device, exact=self.exact, threads=options.threads))
        if agent is None:
            self._stack.enter_context(signals)
        seed_all(derive_seed(self.seed, "start"), self.device)

    def _open_files(self) -> None:
        options = self.options
        if self.directory is not None:
            self.metrics = MetricsFile(self.directory)
        if options.trace:
            name = str(faults.context["worker"]) if self.calls.is_elastic else f"rank{self.world.rank}"
            trace_writer = TraceWriter(self.trace_folder, name, self.device)
            self.observer = StepObserver(trace_writer, self.device, details_all=self.probe is not None)
        tensorboard = self.tensorboard = TensorBoardWriter(
            self.directory, enabled=options.tensorboard and self.state_log is None
        )
        self.trace_writer.on_window = lambda step, figures: tensorboard.write(step, figures, writes=self.is_main)
        registered = self.checkpoints.registered
        self.checkpoints = Checkpoints(
            self.directory,
            identity={"seed": self.seed, "exact": self.exact},
            every=options.save_every or self.settings.checkpoint_every,
            fence=self.calls.may_commit,
            on_written=self.trace_writer.checkpoint_written,
        )
        self.checkpoints.registered = registered

    def _expected_world(self, identity: agent_client.WorkerIdentity) -> World:
        """Return what is known of the world before this worker has joined it."""
        requested = None if self.options.device is None else torch.device(self.options.device)
        backend = wanted_backend(self.options.backend, self.settings)
        device = choose_device(
            requested=requested, backend=backend, gpus=torch.cuda.device_count(), local_rank=identity.slot
        )
        return World(identity.slot, identity.wanted, identity.slot, identity.wanted, "", device, "", "lockstep run")

    def end(self) -> None:
        """Wait for the last checkpoint, and for all workers; a collective call."""
        self._stack.close()
        self.checkpoints.close()
        if self.group is not dist.group.WORLD:
            self.calls.make("the end of the run", self._wait_for_all)
        self.calls.end()

    def end_program(self, *, is_interrupted: bool) -> None:
        """Raise what ends the program after the run: SystemExit for a stop that was asked for, or CheckpointError, on
        all workers, if the last checkpoint could not be written."""
        if is_interrupted:
            raise self.stops.exit()
        if (step := self.checkpoints.unsaved_step) is not None:
            raise CheckpointError(
                f"step {step}, the last one, is not saved in {self.directory}: its checkpoint could not be written, "
                "and rank 0 has printed why. Mend that, and start the same command again: it continues from the "
                "checkpoint before it"
            )

    def _wait_for_all(self) -> None:
        """Barrier: no worker leaves while another still communicates."""
        faults.at("ending")
        self.call_check.wait_for_all("the end of the run")
        if self.metrics is not None and self.is_main:
            self.metrics.write()
        with self.call_check.explain_errors("the end of the run"):
            abortable_wait.wait(
                self.group, self.group.barrier(dist.BarrierOptions()), self.device, "the end of the run"
            )

    def close(self, error: BaseException | None) -> None:
        """Release the resources of this worker, each even if releasing another fails. Other workers may have ended."""
        with ExitStack() as last_first:
            if self._lock is not None:
                last_first.callback(self._lock.unreserve)
            if self._lock is not None and self.checkpoints.saver.is_idle:  # if not, a checkpoint is still being written
                last_first.callback(self._lock.release)
            last_first.callback(self.tensorboard.close)
            last_first.callback(self.observer.close, succeeded=error is None)
            if error is not None:
                text = f"{type(error).__name__}: {error}"[:2000]
                last_first.callback(self.trace_writer.event, "error", text=text)
            last_first.callback(self._stack.close)

    def choose_batch(self, global_batch_size: int, shards: int | None) -> tuple[int, int]:
        """Return the global batch size and the number of shards of a program that has set these, or not (None)."""
        if self.probe is not None:
            global_batch_size = self.probe.global_batch_size or global_batch_size
            shards = self.probe.shards or shards
        if shards is None:
            shards = self.choose_shards(global_batch_size) if is_int(global_batch_size) else 1
        return global_batch_size, shards

    @property
    def is_trial(self) -> bool:
        """Whether the program is only tried, by another command: it makes some steps, and saves nothing."""
        return self.state_log is not None or self.probe is not None

    def prepare(self, plan: TrainingPlan, steps: int | None) -> int | None:
        """Return after how many steps the program ends: `steps`, or fewer if it is only tried."""
        if self.state_log is not None:
            self.state_log.shards = plan.batches.settings.shards
        if self.probe is not None:
            self.probe.prepare(plan)
        limits = [one.steps for one in (self.state_log, self.probe) if one is not None]
        return min([*limits, *([steps] if steps else [])], default=None)

    def choose_shards(self, global_batch_size: int) -> int:
        """Return the number of shards for a program that does not set it: that of the run which is resumed here, or as
        many as workers can take part. Raises ValueError if there are more workers than the resumed run has shards.
        """
        stored, size = self._stored_shards(), self.world.size
        if stored is None:
            return max(1, min(self.settings.shards or size, global_batch_size))
        if size > stored:
            raise ValueError(
                f"{size} workers for {stored} shard{'s' * (stored > 1)}: the run in {self.directory} was begun with "
                f"{stored}, and what it computes depends on that number. Start at most {stored} worker"
                f"{'s' * (stored > 1)}, or start over (--fresh), then with run.batches(shards={size}) or more"
            )
        return stored

    def _stored_shards(self) -> int | None:
        """The number of shards of the run that is resumed here; None if there is no checkpoint."""
        if self.directory is None or (store := CheckpointStore(self.directory)).last() is None:
            return None
        stored = read_shards(self.directory)
        if stored is None and (found := store.newest()) is not None:  # the file is lost or damaged
            stored = (found.state.get("run") or {}).get("shards")
        return stored

    # -- collective calls ----------------------------------------------------------------------------------------------

    def form_group(self, world: World) -> dist.ProcessGroup:
        """Form the private process group of a new generation of workers."""
        self.world, self.device = world, world.device
        if self._lock is not None and world.rank == 0:
            self._lock.acquire(leads=True)
            job = self.settings.run_id or os.environ.get("SLURM_JOB_ID", "")
            moved = start_over(self._lock.directory, job, lock=RUN_LOCK) if self._starts_over else None
            for folder in (self._lock.directory, self._lock.directory / BEST):
                CheckpointStore(folder).finish_setting_aside()
            if moved is not None:
                print_message(f"starts over; what was in {self.directory} is in {moved} now")
        self.group = determinism.private_group(world)
        if self._lock is not None and world.rank != 0:  # rank 0 has joined, so this run has the directory
            self._lock.acquire(leads=False)
        self.on_one = RunOnOne(get_default_store(), self.group)
        self.call_check = CallCheck(self.group, self.device, self.on_one.store, self.calls)
        logs = self.settings.run_dir
        if self.directory is not None and world.rank == 0 and logs:
            run_files.write_pointers(self.directory, Path(logs))
        return self.group

    def agree(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raise ReplicaMismatchError, on all workers, if their `facts` differ; a collective call."""

        def compare() -> None:
            self.call_check.wait_for_all(what)
            self.call_check.compare(what, {name: str(value) for name, value in facts.items()})

        self.calls.make(what, compare)
