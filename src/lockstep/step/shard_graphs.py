"""Decides which shards run as CUDA graphs (captured_shard.py), captures them, and checks that they give the same bits.

Note [When a shard is captured]
A pass is captured for each loss function and each set of shapes, after `WARM_UP_STEPS` eager steps with it; up to
`MAX_GRAPHS` of them are kept, and other shapes run eagerly. Before a graph is used, one shard is computed both ways,
and the bits are compared. A pass that cannot be captured (it waits for the GPU, reads a value on the host, draws random
numbers on the host, changes an attribute of a module) runs eagerly, and the reason is printed once.

Note [What a replay cannot see]
A replay repeats kernels; the Python code of the model and the loss function is not run. What that code read when it
was captured is therefore checked in every step (python_inputs.py): if it has changed, the pass runs
eagerly and is captured again. As a second check, steps 1, 2, 4, 8, ... after the capture, and then one of
`COMPARED_EVERY`, compute a shard both ways again, and stop the run if the bits differ.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep import _torch
from lockstep.ddp.replica import cheap_digests
from lockstep.errors import DivergenceError, LockstepError
from lockstep.seed import cuda_generator, host_random_state, seed_all
from lockstep.step.captured_shard import CannotCaptureError, CapturedShard, Lane, ShardPass
from lockstep.step.loss_check import is_compiled
from lockstep.step.python_inputs import PythonInputs, code_of

WARM_UP_STEPS: Final = 3
LANES, LANE_SHARE = 2, 16  # Note [Two lanes] in captured_shard.py
MAX_GRAPHS: Final = 8
MAX_KEYS: Final = 1000  # sets of shapes of which it is known how often they were seen
MAX_CHANGES: Final = 3  # a program whose Python values change more often than this is run eagerly
COMPARED_EVERY: Final = 256  # steps; Note [What a replay cannot see]
_LIBRARIES: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


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
    scale: float = 1.0  # the loss scale, which is a constant of the graphs
    changes: int = 0  # how often `inputs` have changed
    captured_at: int = 0  # step number
    checked_at: int = -1  # step in which `inputs` were checked last
    compared_at: int = -1  # step in which a replay was compared last

    def drop_graphs(self) -> None:
        if self.graphs:
            torch.cuda.synchronize()  # a replay may still be running in their memory
        self.inputs, self.graphs = None, {}

    def is_comparison_due(self, step: int) -> bool:
        """See Note [What a replay cannot see]."""
        since = step - self.captured_at
        is_due = since % COMPARED_EVERY == 0 if since >= COMPARED_EVERY else since & (since - 1) == 0
        return since > 0 and is_due and self.compared_at != step


@final
class ShardGraphs:
    """The captured passes of a training. They do not depend on the workers, and stay valid when one is lost."""

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
        self._step, self._is_announced = -1, False
        self._refused: str | None = None  # why nothing is captured any more
        self.memory_bytes = 0

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
        """Number of captured passes; one in two lanes counts once."""
        return sum(len(known.graphs) for known in self._by_loss.values())

    @property
    def is_enabled(self) -> bool:
        return self._capture is not Capture.OFF and self._refused is None

    def find(self, loss: Any, one: ShardPass, step: int) -> CapturedShard | None:
        """Return the captured pass for this shard, which is captured first if it is time; None: run it eagerly.

        Raises LockstepError if the program asked for capture and the pass cannot be captured, and DivergenceError if a
        replay does not give the bits of the eager pass any more.
        """
        if self._step != step:
            self._begin_step(step)
        known = self._by_loss.setdefault(code_of(loss), LossGraphs())
        if known.inputs is not None and known.checked_at != step:
            known.checked_at = step
            self._check_inputs(known, known.inputs.changed(loss))
        try:
            key = one.key()
        except CannotCaptureError as error:
            self.refuse(str(error))
            return None
        graphs, use = known.graphs.get(key, []), known.uses.get(key, 0)
        known.uses[key] = use + 1
        if known.scale != one.scale:
            known.scale, graphs = one.scale, []
            known.drop_graphs()
        if graphs and self._exact and known.is_comparison_due(step):
            known.compared_at = step
            self._compare_again(known, graphs[0], one, step)
        steps = known.eager_steps.setdefault(key, set())
        if not graphs and (len(steps) < WARM_UP_STEPS or self.count >= MAX_GRAPHS or not self.is_enabled):
            steps.add(step)
            if len(known.eager_steps) > MAX_KEYS:
                known.eager_steps = {}
            return None
        if not graphs or (use == len(graphs) < LANES and graphs[0].may_overlap):
            try:
                graphs = known.graphs[key] = [*graphs, self._capture_pass(known, loss, one, lane=len(graphs))]
            except CannotCaptureError as error:
                self.refuse(str(error))
                return None
            known.captured_at = step
        return graphs[use % len(graphs)]

    def _begin_step(self, step: int) -> None:
        """Let all lanes wait for what is queued: the weights of the last step, the gradients that were read."""
        self._step = step
        if self.count and not self._is_announced:
            self._is_announced, size = True, f"{self.memory_bytes / 2**30:.2f} GiB"
            self._announce(f"shards run as CUDA graphs from here on ({size}); Run(capture=False) runs them eagerly")
        ready = torch.cuda.current_stream().record_event() if self._lanes else None
        for lane in self._lanes:
            lane.may_run = ready
        for known in self._by_loss.values():
            known.uses = {}

    def _check_inputs(self, known: LossGraphs, changed: str | None) -> None:
        if changed is None:
            return
        known.drop_graphs()
        known.eager_steps, known.changes = {}, known.changes + 1
        if known.changes > MAX_CHANGES:
            self.refuse(f"{changed} changes from step to step, and a CUDA graph would not see it")

    def refuse(self, reason: str) -> None:
        """Run all shards eagerly from here on. Raises LockstepError if the program has asked for graphs."""
        if self._capture is Capture.ON:
            raise LockstepError(f"capture=True, but the program cannot be captured as a CUDA graph: {reason}")
        for known in self._by_loss.values():
            known.drop_graphs()
        self._refused, self._by_loss, self._lanes = reason, {}, []
        self._announce(f"shards run eagerly, not as CUDA graphs: {reason}")

    # -- capturing ---------------------------------------------------------------------------------------------------

    def _capture_pass(self, known: LossGraphs, loss: Any, one: ShardPass, *, lane: int) -> CapturedShard:
        """Check that the pass can be captured, capture it, and compare a replay with the eager pass.

        Raises CannotCaptureError.
        """
        sparse = next((leaf.name for leaf in one.leaves if leaf.sparse), None)
        if sparse is not None:
            raise CannotCaptureError(f"the gradient of {sparse} is sparse")
        inputs, device = PythonInputs(loss, self._model), one.leaves[0].parameter.device
        before = torch.cuda.memory_reserved()
        written, draws = self._try_eagerly(one, known, inputs, loss)
        if lane == len(self._lanes):
            self._lanes.append(Lane(device))
        _clear_gradients(one)
        torch.cuda.synchronize()
        try:
            with _allow_other_streams(), nullcontext() if draws else _without_random_state():
                graph = CapturedShard(one, written, self._lanes[lane])
        except Exception as error:
            raise CannotCaptureError(_describe(error)) from error
        finally:
            _clear_gradients(one)
            one.buffers.rewind()
        if self._exact and self._digests(one) != self._digests(one, graph):
            raise CannotCaptureError("a replayed pass gives other bits than an eager one")
        known.inputs = inputs
        taken = max(torch.cuda.memory_reserved() - before, 0)
        graph.may_overlap = not written and taken * LANE_SHARE < torch.cuda.get_device_properties(device).total_memory
        self.memory_bytes += taken
        return graph

    def _try_eagerly(
        self, one: ShardPass, known: LossGraphs, inputs: PythonInputs, loss: Any
    ) -> tuple[list[Tensor], bool]:
        """Run the pass eagerly and look for what cannot be captured.

        Returns the buffers that the forward pass writes to, and whether the pass draws random numbers on the GPU.
        """
        generator = cuda_generator(one.leaves[0].parameter.device)
        buffers = dict(self._model.named_buffers())
        versions = {name: buffer._version for name, buffer in buffers.items()}
        seed_all(one.seed, generator.device)
        on_host, on_gpu = host_random_state(), generator.get_state()
        refuses_host_tensors = nullcontext() if is_compiled(self._model) else _torch.refuse_host_tensors(_explain)
        try:
            with _refuse_synchronisation(), refuses_host_tensors:
                ran = one.run(one.data)
                now = dict(self._model.named_buffers())
                one.scaled(ran.total).backward()  # type: ignore[no-untyped-call]
            written = [name for name, buffer in now.items() if buffer._version != versions.get(name)]
            replaced = [name for name, buffer in buffers.items() if now.get(name) is not buffer]
            changed = inputs.changed(loss) if not replaced else None
        finally:
            _clear_gradients(one)
            one.buffers.rewind()
            inputs.restore()
        if host_random_state() != on_host:
            raise CannotCaptureError("the pass draws random numbers on the host (torch's CPU generator, random, numpy)")
        if replaced or len(now) != len(buffers):
            raise CannotCaptureError(f"the forward pass replaces the buffer {(replaced or list(now))[-1]}")
        on_cpu = [name for name in written if not now[name].is_cuda]
        if on_cpu:
            raise CannotCaptureError(f"the forward pass writes to {on_cpu[0]}, which is on the CPU")
        if changed is not None:
            raise CannotCaptureError(f"the pass changes {changed}, and a replay would not")
        return [now[name] for name in written], not torch.equal(on_gpu, generator.get_state())

    def _digests(self, one: ShardPass, graph: CapturedShard | None = None) -> list[int]:
        """Run the pass, eagerly or by replay. Returns digests of losses, buffers and gradients; changes nothing."""
        if graph is None:
            seed_all(one.seed, one.leaves[0].parameter.device)
            ran = one.run(one.data)
        else:
            ran = graph.forward(one.data, one.seed)
        returned = [ran.total.detach(), ran.weight, *(value for pair in ran.metrics.values() for value in pair)]
        results = [value.to(torch.float64) for value in returned if isinstance(value, Tensor)]
        results += [buffer.clone() for buffer in self._model.buffers() if buffer.is_cuda]
        if graph is None:
            one.scaled(ran.total).backward()  # type: ignore[no-untyped-call]
            gradients = [leaf.parameter.grad for leaf in one.leaves]
        else:
            graph.backward()
            gradients = graph.gradients
        digests = cheap_digests([*results, *(gradient for gradient in gradients if gradient is not None)])
        _clear_gradients(one)
        one.buffers.rewind()
        return [*digests, *(gradient is None for gradient in gradients)]

    def _compare_again(self, known: LossGraphs, graph: CapturedShard, one: ShardPass, step: int) -> None:
        if self._digests(one) != self._digests(one, graph):
            raise DivergenceError(
                f"step {step}: a shard that is replayed as a CUDA graph, captured in step {known.captured_at}, gives "
                "other bits than the same shard run eagerly. The model or the loss function depends on something that "
                "changes and that a graph cannot see. Start again with Run(capture=False), from a checkpoint before "
                f"step {known.captured_at}, or resume=False"
            )


def _clear_gradients(one: ShardPass) -> None:
    for leaf in one.leaves:
        leaf.parameter.grad = None


@contextmanager
def _refuse_synchronisation() -> Iterator[None]:
    """Raise CannotCaptureError at the end of the context if something in it has waited for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found = next((one for one in caught if "synchronizing CUDA operation" in str(one.message)), None)
    if found is not None:
        raise CannotCaptureError(f"the host waits for the GPU in {found.filename}:{found.lineno}")


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


def _explain(reason: str) -> Exception:
    return CannotCaptureError(reason + _line_of_program(traceback.extract_stack()))


def _describe(error: BaseException) -> str:
    """The first line of an error, and the line of the program that it comes from."""
    if isinstance(error, CannotCaptureError):
        return str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}{_line_of_program(traceback.extract_tb(error.__traceback__))}"


def _line_of_program(frames: traceback.StackSummary) -> str:
    """Return ", in FILE:LINE" for the innermost frame that is neither torch's nor ours."""
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return f", in {own[-1].filename}:{own[-1].lineno}" if own else ""
