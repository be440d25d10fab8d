"""Decides which shards run as CUDA graphs (captured_shard.py), captures them, and checks that they give the same bits.

Note [When a shard is captured]
A pass is captured for each loss function and each set of shapes, after `WARM_UP_STEPS` eager steps with it; up to
`MAX_GRAPHS` of them are kept, and other shapes run eagerly. The last of these eager passes is examined (`Examination`):
a pass that waits for the GPU, reads a value on the host, draws random numbers on the host, or changes anything but the
buffers of the model cannot be captured. Then all shards run eagerly, and the reason is printed once. Before a graph
is used, one shard is computed both ways, and the bits are compared.

Note [What a replay cannot see]
A replay repeats kernels; the Python code of the model and the loss function is not run. What that code could read when
it was captured is therefore checked in every step (python_inputs.py): if it has changed, the pass runs eagerly and is
captured again. As a second check, 1, 2, 4, 8, ... steps after the capture, and then every `COMPARED_EVERY` steps, a
shard is computed both ways again, and the run stops if the bits differ.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep.ddp.replica import cheap_digests
from lockstep.errors import DivergenceError, LockstepError
from lockstep.seed import seed_all
from lockstep.step.captured_shard import CannotCaptureError, CapturedShard, Lane, ShardPass, map_tensors
from lockstep.step.pass_examination import Examination, line_of_program
from lockstep.step.python_inputs import PythonInputs, code_of
from lockstep.step.weight_casts import WeightCasts

logger = logging.getLogger(__name__)

WARM_UP_STEPS: Final = 3
MAX_LANES, LANE_SHARE = 4, 16  # Note [Lanes] in captured_shard.py
MAX_GRAPHS: Final = 8
MAX_KEYS: Final = 1000  # sets of shapes of which it is known how often they were seen
MAX_LOSSES: Final = 64
MAX_CHANGES: Final = 3  # a program whose Python values change more often than this is run eagerly
COMPARED_EVERY: Final = 256  # steps; Note [What a replay cannot see]
TOLD_AFTER: Final = 50  # steps without a graph


class Capture(Enum):
    """Whether forward and backward passes are captured as CUDA graphs."""

    AUTO = "auto"  # on a GPU, where the program allows it
    ON = True  # a program that cannot be captured is an error
    OFF = False


@dataclass
class LossGraphs:
    """The graphs of one loss function."""

    inputs: PythonInputs | None = None  # what its Python code reads; None: nothing is captured
    graphs: dict[Hashable, list[CapturedShard]] = field(default_factory=dict)  # one in each lane
    uses: dict[Hashable, int] = field(default_factory=dict)  # in this step, by key
    eager_steps: dict[Hashable, set[int]] = field(default_factory=dict)  # steps in which such a shard ran eagerly
    examined: dict[Hashable, Examination] = field(default_factory=dict)
    scale: float = 1.0  # the loss scale, which is a constant of the graphs
    changes: int = 0  # how often `inputs` have changed
    is_checked: bool = False  # `inputs` were checked in this step

    def drop_graphs(self) -> None:
        if self.graphs:
            torch.cuda.synchronize()  # a replay may still be running in their memory
        self.inputs, self.graphs = None, {}


@final
class ShardGraphs:
    """The captured passes of a training. They do not depend on the workers, and stay valid when one is lost.

    In each step: `begin_step`; for each shard `find`, and if that returns None, an eager pass with `watching` around
    its forward pass and `end_eager_pass` after its backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        capture: Capture,
        *,
        exact: bool = True,
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`exact`: passes repeat bit for bit, and are compared. `announce` prints a message, on one worker."""
        self._model, self._capture, self._exact, self._announce = model, capture, exact, announce
        self._by_loss: dict[Hashable, LossGraphs] = {}
        self._lanes: list[Lane] = []
        self._casts = WeightCasts(model.parameters() if exact else ())
        self._examination: tuple[LossGraphs, Hashable, Examination] | None = None  # of the pass that runs
        self._is_announced = False
        self._steps = 0  # in which shards could have been captured
        self._torch_settings: tuple[Any, ...] = ()
        self._refused: str | None = None  # why nothing is captured any more

    @staticmethod
    def disabled() -> ShardGraphs:
        return ShardGraphs(nn.Module(), Capture.OFF)

    @staticmethod
    def on_device(
        device: torch.device, model: nn.Module, capture: Capture, *, exact: bool, announce: Callable[[str], None]
    ) -> ShardGraphs:
        """Return the graphs of a model on this device. Raises ValueError if the program asks for graphs on a CPU."""
        if device.type == "cuda":
            return ShardGraphs(model, capture, exact=exact, announce=announce)
        if capture is Capture.ON:
            raise ValueError('Run(capture=True) needs a GPU, and this run is on the CPU; "auto" captures where it can')
        return ShardGraphs.disabled()

    @property
    def count(self) -> int:
        """Number of captured passes; one in several lanes counts once."""
        return sum(len(known.graphs) for known in self._by_loss.values())

    @property
    def is_enabled(self) -> bool:
        return self._capture is not Capture.OFF and self._refused is None

    @property
    def memory_bytes(self) -> int:
        return sum(graph.size_bytes for graph in self._all_graphs()) + self._casts.nbytes

    def _all_graphs(self) -> Iterator[CapturedShard]:
        for known in self._by_loss.values():
            for graphs in known.graphs.values():
                yield from graphs

    def begin_step(self) -> None:
        """Begin a step, or begin it again. Lanes wait for what is queued: new weights, gradients that were read."""
        if not self.is_enabled:
            return
        self._examination, self._steps = None, self._steps + 1
        if self.count and not self._is_announced:
            self._is_announced, size = True, f"{self.memory_bytes / 2**30:.2f} GiB"
            self._announce(f"shards run as CUDA graphs from here on ({size}); Run(capture=False) runs them eagerly")
        elif self._steps == TOLD_AFTER and not self.count:
            self._announce(
                f"shards run eagerly so far, not as CUDA graphs: in {TOLD_AFTER} steps no shapes and values of a batch "
                f"came {WARM_UP_STEPS + 1} times"
            )
        if self.count and not self._casts.refresh():
            self._do_without_copies()
        ready = torch.cuda.current_stream().record_event() if self._lanes else None
        for lane in self._lanes:
            lane.may_run = ready
        settings = _torch_settings()
        for known in self._by_loss.values():
            known.uses, known.is_checked = {}, False
            if settings != self._torch_settings:
                known.drop_graphs()
        self._torch_settings = settings

    def find(self, loss: Any, shard_pass: ShardPass, step: int) -> CapturedShard | None:
        """Return the captured pass for this shard, which is captured first if it is time; None: run it eagerly.

        Raises LockstepError if the program asked for capture and the pass cannot be captured, and DivergenceError if a
        replay does not give the bits of the eager pass any more.
        """
        try:
            return self._find(loss, shard_pass, step)
        except LockstepError:
            raise
        except Exception as error:  # if it is one of the program, the eager pass raises it again
            self.refuse(_describe(error))
            return None

    def _find(self, loss: Any, shard_pass: ShardPass, step: int) -> CapturedShard | None:
        known = self._by_loss.setdefault(code_of(loss), LossGraphs())
        if len(self._by_loss) > MAX_LOSSES:
            raise CannotCaptureError("the loss function is another object in every step")
        if torch.is_autocast_enabled("cuda"):
            raise CannotCaptureError("run.step is called inside of torch.autocast; write Run(precision=...) instead")
        if known.inputs is not None and not known.is_checked:
            self._check_inputs(known, known.inputs.changed(loss))
        known.is_checked = True
        key = shard_pass.key()
        if known.scale != shard_pass.scale:
            known.scale = shard_pass.scale
            known.drop_graphs()
        graphs, use = known.graphs.get(key, []), known.uses.get(key, 0)
        known.uses[key] = use + 1
        if not graphs and not self._is_warm(known, key, step, loss, shard_pass):
            return None
        if not graphs or (use == len(graphs) < graphs[0].lanes):
            graph = self._capture_pass(known, loss, shard_pass, lane=len(graphs), examined=known.examined[key])
            graph.captured_at, graph.compare_at = step, step + 1
            graphs = known.graphs[key] = [*graphs, graph]
        graph = graphs[use % len(graphs)]
        if self._exact and step >= graph.compare_at:
            graph.compare_at = step + min(step - graph.captured_at, COMPARED_EVERY)
            self._compare_again(graph, shard_pass, step)
        return graph

    def _is_warm(self, known: LossGraphs, key: Hashable, step: int, loss: Any, shard_pass: ShardPass) -> bool:
        """Whether such a pass has run eagerly often enough; the last of these passes is examined."""
        if self.count >= MAX_GRAPHS or not self.is_enabled:
            return False
        steps = known.eager_steps.setdefault(key, set())
        if len(steps) >= WARM_UP_STEPS and key in known.examined and step not in steps:
            return True
        if len(steps) < WARM_UP_STEPS:
            steps.add(step)
        if len(known.eager_steps) > MAX_KEYS:
            known.eager_steps, known.examined = {}, {}
        elif len(steps) == WARM_UP_STEPS and key not in known.examined and self._examination is None:
            self._examination = known, key, Examination(self._model, loss, shard_pass, self._casts)
        return False

    def _check_inputs(self, known: LossGraphs, changed: str | None) -> None:
        if changed is None:
            return
        known.drop_graphs()
        known.eager_steps, known.examined, known.changes = {}, {}, known.changes + 1
        if known.changes > MAX_CHANGES:
            self.refuse(f"{changed} changes from step to step, and a CUDA graph would not see it")

    def refuse(self, reason: str) -> None:
        """Run all shards eagerly from here on. Raises LockstepError if the program has asked for graphs."""
        if self._capture is Capture.ON:
            raise LockstepError(f"capture=True, but the program cannot be captured as a CUDA graph: {reason}")
        for known in self._by_loss.values():
            known.drop_graphs()
        self._refused, self._by_loss, self._lanes, self._examination = reason, {}, [], None
        self._casts.drop()
        self._announce(f"shards run eagerly, not as CUDA graphs: {reason}")

    # -- an eager pass -----------------------------------------------------------------------------------------------

    def watching(self) -> AbstractContextManager[None]:
        """Return a context for the forward pass of an eager shard."""
        return nullcontext() if self._examination is None else self._examination[2].watch_forward()

    def end_eager_pass(self) -> None:
        """Call it after the backward pass of an eager shard, before its buffers are restored."""
        if self._examination is None:
            return
        (known, key, examination), self._examination = self._examination, None
        problem = examination.end()
        if problem is not None:
            self.refuse(problem)
            return
        known.examined[key] = examination
        if not examination.copy_casts():
            self._do_without_copies()

    def _do_without_copies(self) -> None:
        """Let passes be captured again, with their own casts of weights."""
        for known in self._by_loss.values():
            known.drop_graphs()
        self._casts.drop()

    # -- capturing ---------------------------------------------------------------------------------------------------

    def _capture_pass(
        self, known: LossGraphs, loss: Any, shard_pass: ShardPass, *, lane: int, examined: Examination
    ) -> CapturedShard:
        """Capture the pass, and compare a replay with the eager pass. Raises CannotCaptureError."""
        if self._casts.has_copies and not self.count:
            try:
                if self._casts.refresh():
                    return self._capture_and_compare(known, loss, shard_pass, lane=lane, examined=examined)
            except Exception as error:  # if copies were not the cause, it comes again
                logger.info("a shard is captured with its own casts of weights: %s", error)
            self._casts.drop()
        return self._capture_and_compare(known, loss, shard_pass, lane=lane, examined=examined)

    def _capture_and_compare(
        self, known: LossGraphs, loss: Any, shard_pass: ShardPass, *, lane: int, examined: Examination
    ) -> CapturedShard:
        sparse = next((leaf.name for leaf in shard_pass.leaves if leaf.sparse), None)
        if sparse is not None:
            raise CannotCaptureError(f"the gradient of {sparse} is sparse")
        inputs, device = PythonInputs(loss, self._model), shard_pass.leaves[0].parameter.device
        before = torch.cuda.memory_reserved()
        if lane == len(self._lanes):
            self._lanes.append(Lane(device))
        elif not any(graph.lane is self._lanes[lane] for graph in self._all_graphs()):
            self._lanes[lane] = Lane(device)  # the memory pool of graphs that are gone cannot be used again
        _clear_gradients(shard_pass)
        torch.cuda.synchronize()
        try:
            with _allow_other_streams(), nullcontext() if examined.draws else _without_random_state():
                graph = CapturedShard(shard_pass, examined.written, self._lanes[lane], self._casts)
        finally:
            _clear_gradients(shard_pass)
            shard_pass.buffers.rewind()
        if self._exact and self._digests(shard_pass) != self._digests(shard_pass, graph):
            raise CannotCaptureError("a replayed pass gives other bits than an eager one")
        known.inputs = inputs
        graph.size_bytes = max(torch.cuda.memory_reserved() - before, 0)
        total = torch.cuda.get_device_properties(device).total_memory
        if not examined.written:
            graph.lanes = min(MAX_LANES, 1 + total // (LANE_SHARE * max(graph.size_bytes, 1)))
        return graph

    def _digests(self, shard_pass: ShardPass, graph: CapturedShard | None = None) -> list[int]:
        """Run the pass, eagerly or by replay. Returns digests of losses, buffers and gradients; changes nothing."""
        if graph is None:
            seed_all(shard_pass.seed, shard_pass.leaves[0].parameter.device)
            ran = shard_pass.run(map_tensors(shard_pass.data, torch.clone))  # which the pass may change
        else:
            ran = graph.forward(shard_pass.data, shard_pass.seed)
        returned = [ran.total.detach(), ran.weight, *(value for pair in ran.metrics.values() for value in pair)]
        results = [value.to(torch.float64) for value in returned if isinstance(value, Tensor)]
        results += [buffer.clone() for buffer in self._model.buffers() if buffer.is_cuda]
        if graph is None:
            shard_pass.scaled(ran.total).backward()  # type: ignore[no-untyped-call]
            gradients = [leaf.parameter.grad for leaf in shard_pass.leaves]
        else:
            graph.backward()
            gradients = graph.read_gradients()
        digests = cheap_digests([*results, *(gradient for gradient in gradients if gradient is not None)])
        _clear_gradients(shard_pass)
        shard_pass.buffers.rewind()
        return [*digests, *(gradient is None for gradient in gradients)]

    def _compare_again(self, graph: CapturedShard, shard_pass: ShardPass, step: int) -> None:
        if self._digests(shard_pass) != self._digests(shard_pass, graph):
            raise DivergenceError(
                f"step {step}: a shard that is replayed as a CUDA graph, captured in step {graph.captured_at}, gives "
                "other bits than the same shard run eagerly. The model or the loss function depends on something that "
                "changes and that a graph cannot see. Start again with Run(capture=False), from a checkpoint before "
                f"step {graph.captured_at}, or resume=False"
            )


def _torch_settings() -> tuple[Any, ...]:
    """Settings of torch that decide which kernels a pass launches."""
    cuda: Any = torch.backends.cuda
    attention = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    precision = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.get_default_dtype())
    return *attention, cuda.cudnn_sdp_enabled(), *precision, torch.are_deterministic_algorithms_enabled()


def _clear_gradients(shard_pass: ShardPass) -> None:
    for leaf in shard_pass.leaves:
        leaf.parameter.grad = None


@contextmanager
def _allow_other_streams() -> Iterator[None]:
    """Do not warn that gradients are accumulated on the stream of the step, where hooks were registered.

    While a lane is captured, that stream takes part in the capture.
    """
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    try:
        yield
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


@contextmanager
def _without_random_state() -> Iterator[None]:
    """Let code that saves and restores the random state of the GPU do nothing, which is right if it draws nothing.

    Gradient checkpoints do so, and reading the state is not allowed while a graph is captured.
    """
    cuda: Any = torch.cuda
    saved = cuda.get_rng_state, cuda.set_rng_state
    cuda.get_rng_state, cuda.set_rng_state = (lambda *_, **__: torch.empty(0)), (lambda *_, **__: None)
    try:
        yield
    finally:
        cuda.get_rng_state, cuda.set_rng_state = saved


def _describe(error: BaseException) -> str:
    """The first line of an error, and the line of the program that it comes from."""
    if isinstance(error, CannotCaptureError):
        return str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}{line_of_program(traceback.extract_tb(error.__traceback__))}"
