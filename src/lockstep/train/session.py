"""What the parts of a run have in common: the workers that there are now, the calls that they make together, and the
files of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lockstep import faults, run_files
from lockstep.comm import abortable_wait
from lockstep.elastic import agent_client as seats
from lockstep.seed import kept_random_state, mix, sow
from lockstep.train import determinism
from lockstep.train.call_check import CallCheck
from lockstep.train.collective_calls import Calls, say
from lockstep.train.elastic_calls import ElasticCalls, GenerationListener
from lockstep.train.metrics import MetricsFile
from lockstep.train.options import Options
from lockstep.train.run_directory import start_over
from lockstep.train.run_lock import FILE as RUN_LOCK
from lockstep.train.run_lock import Claim
from lockstep.train.run_on_one import Once
from lockstep.train.run_state import Checkpoints
from lockstep.train.signals import StopRequests
from lockstep.train.state_log import Witness
from lockstep.train.step_observer import Blind, Observer
from lockstep.train.tensorboard import Board
from lockstep.train.trace_writer import Chronicle
from lockstep.world.world import World, choose_device, init, wanted_backend


class RunningLoop(GenerationListener, Protocol):
    """The training loop as a session knows it: what it does when workers change, and whether the program is in it."""

    @property
    def is_running(self) -> bool:
        """The program is inside the loop."""

    @property
    def has_begun(self) -> bool:
        """The program has come to the loop."""


@final
class Session:
    """From `begin` to `end`. In an elastic run the workers change meanwhile, and with them the group."""

    world: World
    device: torch.device
    group: dist.ProcessGroup
    call_check: CallCheck  # do all workers do the same?
    once: Once  # what one worker does for all

    def __init__(
        self, directory: str | Path | None, options: Options, *, seed: int, exact: bool, starts_over: bool
    ) -> None:
        self.witness = Witness.of(os.environ)
        if self.witness is not None:
            directory, starts_over = self.witness.directory, False
        # Absolute: the program may change its directory.
        self.directory = Path(directory).absolute() if directory is not None else None
        self.options, self.seed, self.exact = options, seed, exact
        self._starts_over = starts_over
        self.calls = Calls()
        self.stops = StopRequests(os.environ)
        self._claim = Claim(self.directory, os.environ) if self.directory is not None else None
        # These see, show and save nothing.
        self.observer: Observer = Blind(torch.device("cpu"))
        self.board = Board(None, wanted=False)
        self.checkpoints = Checkpoints()
        self.metrics: MetricsFile | None = None
        self._stack = ExitStack()

    @property
    def is_main(self) -> bool:
        """Whether this worker writes and speaks for all."""
        return self.world.rank == 0

    @property
    def chronicle(self) -> Chronicle:
        return self.observer.chronicle

    @property
    def trace_folder(self) -> Path | None:
        """See docs/trace.md."""
        logs = os.environ.get("LOCKSTEP_RUN_DIR")
        place = self.directory or (Path(logs) if logs else None)
        return place / "trace" if place is not None and self.witness is None else None

    # -- begin and end -----------------------------------------------------------------------------------------------

    def begin(self, loop: RunningLoop) -> None:
        """Join the other workers, open the files, and set what the arithmetic depends on."""
        if self._claim is not None:
            self._claim.reserve()
        options, seat = self.options, seats.take()
        if seat is None:
            self.gather(init(backend=options.backend, device=options.device))
        else:
            welcome = seat.start()
            faults.here["worker"] = welcome.id
            self.calls = ElasticCalls(seat, welcome, loop, backend=options.backend, device=options.device)
            self.world = self._foresee(welcome)
            self.device = self.world.device
        chosen = replace(options, device=None)  # that may be another one on every worker
        self.agree("Run", {"seed": self.seed, "exact": self.exact, "options": repr(chosen)})
        self._open_files()  # not before: by now the directory is ours
        self._stack.enter_context(kept_random_state(self.device))
        self._stack.enter_context(determinism.arithmetic(self.device, exact=self.exact, threads=options.threads))
        self._stack.enter_context(
            self.stops.handle_signals(is_training=lambda: loop.is_running, has_begun=lambda: loop.has_begun)
        )
        sow(mix(self.seed, "start"), self.device)

    def _open_files(self) -> None:
        options = self.options
        if self.directory is not None:
            self.metrics = MetricsFile(self.directory)
        if options.trace:
            name = str(faults.here["worker"]) if self.calls.is_elastic else f"rank{self.world.rank}"
            self.observer = Observer(Chronicle(self.trace_folder, name, self.device), self.device)
        board = self.board = Board(self.directory, wanted=options.tensorboard and self.witness is None)
        self.chronicle.on_window = lambda step, figures: board.show(step, figures, writes=self.is_main)
        registered = self.checkpoints.registered
        self.checkpoints = Checkpoints(
            self.directory,
            identity={"seed": self.seed, "exact": self.exact},
            every=options.save_every,
            fence=self.calls.may_commit,
            on_written=self.chronicle.checkpoint_written,
        )
        self.checkpoints.registered = registered

    def _foresee(self, welcome: seats.Welcome) -> World:
        """What is known of a world that this worker is not yet in."""
        wish = None if self.options.device is None else torch.device(self.options.device)
        backend = wanted_backend(self.options.backend, os.environ)
        device = choose_device(asked=wish, backend=backend, gpus=torch.cuda.device_count(), local_rank=welcome.slot)
        return World(welcome.slot, welcome.wanted, welcome.slot, welcome.wanted, "", device, "", "lockstep run")

    def end(self) -> None:
        """All workers together: wait for the last checkpoint, and for each other."""
        self._stack.close()
        self.checkpoints.close()
        if self.group is not dist.group.WORLD:
            self.calls.make("the end of the run", self._await_all)
        self.calls.end()

    def _await_all(self) -> None:
        """No worker leaves while another still communicates."""
        faults.at("ending")
        self.call_check.come_to("the end of the run")
        if self.metrics is not None and self.is_main:
            self.metrics.write()
        with self.call_check.explains("the end of the run"):
            abortable_wait.wait(
                self.group, self.group.barrier(dist.BarrierOptions()), self.device, "the end of the run"
            )

    def close(self, error: BaseException | None) -> None:
        """Release what is this worker's own, each thing whatever happens with the others; other workers may be gone."""
        with ExitStack() as last_first:
            if self._claim is not None:
                last_first.callback(self._claim.free)
            if self._claim is not None and self.checkpoints.saving.is_idle:  # else the process still writes
                last_first.callback(self._claim.release)
            last_first.callback(self.board.close)
            last_first.callback(self.observer.close, in_peace=error is None)
            if error is not None:
                text = f"{type(error).__name__}: {error}"[:2000]
                last_first.callback(self.chronicle.event, "error", text=text)
            last_first.callback(self._stack.close)

    # -- together ----------------------------------------------------------------------------------------------------

    def gather(self, world: World) -> dist.ProcessGroup:
        """A new generation of workers: form the private group."""
        self.world, self.device = world, world.device
        if self._claim is not None and world.rank == 0:
            self._claim.take(leads=True)
            moved = start_over(self._claim.directory, os.environ, lock=RUN_LOCK) if self._starts_over else None
            if moved is not None:
                say(f"starts over; what was in {self.directory} is in {moved} now")
        self.group = determinism.private_group(world)
        if self._claim is not None and world.rank != 0:  # rank 0 has come by, so the directory is ours
            self._claim.take(leads=False)
        self.once = Once(_get_default_store(), self.group)
        self.call_check = CallCheck(self.group, self.device, self.once.store, self.calls)
        logs = os.environ.get("LOCKSTEP_RUN_DIR")
        if self.directory is not None and world.rank == 0 and logs:
            run_files.point_at_each_other(self.directory, Path(logs))
        return self.group

    def agree(self, what: str, facts: Mapping[str, Any]) -> None:
        """All workers together: the same arguments everywhere, or an error everywhere."""

        def compare() -> None:
            self.call_check.come_to(what)
            self.call_check.compare(what, {name: str(value) for name, value in facts.items()})

        self.calls.make(what, compare)
