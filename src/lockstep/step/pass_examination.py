"""What an eager pass of a shard does that a CUDA graph could not repeat."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep import _torch
from lockstep.ddp.replica import cheap_digests
from lockstep.seed import cuda_generator, host_random_state
from lockstep.step.captured_shard import ShardPass
from lockstep.step.compiled_model import is_compiled
from lockstep.step.python_inputs import PythonInputs
from lockstep.step.weight_casts import Cast, WeightCasts

_LIBRARIES: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


@final
class Examination:
    """Watches one ordinary eager pass for what cannot be captured, and for casts of weights (weight_casts.py)."""

    def __init__(self, model: nn.Module, loss: Any, shard_pass: ShardPass, casts: WeightCasts) -> None:
        """Call it before the random numbers of the pass are seeded."""
        self._model, self._loss, self._casts = model, loss, casts
        self._made: list[Cast] = []
        self._inputs = PythonInputs(loss, model)
        self._versions = self._inputs.versions()
        self._buffers = {name: b for name, b in model.named_buffers() if b.layout == torch.strided}
        self._digests = self._digests_of_buffers()
        self._generator = cuda_generator(shard_pass.leaves[0].parameter.device)
        self._states: tuple[Any, Any] | None = None
        self._problems: list[str] = []
        self.written: list[Tensor] = []  # buffers that the forward pass writes to
        self.draws = False  # random numbers on the GPU

    def _digests_of_buffers(self) -> list[int]:
        return cheap_digests(self._buffers.values())

    @contextmanager
    def watch_forward(self) -> Iterator[None]:
        """Watch the forward pass; the random numbers have been seeded."""
        self._states = host_random_state(), self._generator.get_state()
        with ExitStack() as stack:
            stack.enter_context(report_synchronisation(self._problems))
            if not is_compiled(self._model):  # which would be compiled again
                stack.enter_context(_torch.report_host_tensors(self._report))
            if not _torch.has_compiled_code():  # likewise
                self._made = stack.enter_context(self._casts.noting())
            yield
        now = {name: b for name, b in self._model.named_buffers() if b.layout == torch.strided}
        replaced = [name for name, buffer in self._buffers.items() if now.get(name) is not buffer]
        if replaced or len(now) != len(self._buffers):
            self._problems.append(f"the forward pass replaces the buffer {(replaced or list(now))[-1]}")
        after = self._digests_of_buffers()
        versions = {id(tensor): version for _, tensor, version in self._versions}
        for n, (name, buffer) in enumerate(self._buffers.items()):
            if after[n] != self._digests[n] or buffer._version != versions.get(id(buffer), buffer._version):
                self.written.append(buffer)
                if not buffer.is_cuda:
                    self._problems.append(f"the forward pass writes to {name}, which is on the CPU")

    def _report(self, reason: str) -> None:
        self._problems.append(reason + line_of_program(traceback.extract_stack()))

    def end(self) -> str | None:
        """Call it after the backward pass, before buffers are restored. Returns why the pass cannot be captured."""
        assert self._states is not None
        on_host, on_gpu = self._states
        self.draws = not torch.equal(on_gpu, self._generator.get_state())
        if host_random_state() != on_host:
            self._problems.append("the pass draws random numbers on the host (torch's CPU generator, random, numpy)")
        own = {id(tensor) for tensor in (*self._buffers.values(), *self._model.parameters())}
        for name, tensor, version in self._versions:
            if id(tensor) not in own and tensor._version != version:
                self._problems.append(f"the pass writes to {name}, which is no buffer of the model")
        if not self._problems and (changed := self._inputs.changed(self._loss)) is not None:
            self._problems.append(f"the pass changes {changed}, and a replay would not")
        if not self._inputs.is_complete:
            self._problems.append("the model and the loss function refer to too many objects to watch them all")
        return self._problems[0] if self._problems else None

    def copy_casts(self) -> bool:
        """Make copies of the weights that the pass has cast. Returns the result of `WeightCasts.copy`."""
        made, self._made = self._made, []
        return self._casts.copy(made)


@contextmanager
def report_synchronisation(problems: list[str]) -> Iterator[None]:
    """Append a problem at the end of the context if something in it has waited for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            problems.insert(0, f"the host waits for the GPU in {warning.filename}:{warning.lineno}")
            return
        if "Synchronization debug mode" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def line_of_program(frames: traceback.StackSummary) -> str:
    """Return ", in FILE:LINE" for the innermost frame that is neither torch's nor ours."""
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return f", in {own[-1].filename}:{own[-1].lineno}" if own else ""
