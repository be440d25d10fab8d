"""Forward and backward pass of a shard as two CUDA graphs, which are replayed instead of run operation by operation.

A small shard takes longer to launch than to compute. A graph is launched as a whole, so eight shards cost little more
than one batch. A replay gives the bits of the eager pass: the same kernels on the same shapes, with the random numbers
of (seed, step, shard), which are set before each replay.

Note [Stream of the step]
A pass cannot be captured on the default stream, and autograd runs the accumulation of a gradient on the stream on which
the parameter was first used. So on a GPU every step is taken on a stream of its own, from the first one on. It waits
for the stream of the program before the step, and the stream of the program waits for it after the step.

Note [Gradients of a graph]
A graph leaves its gradients in the same memory every time. They are added to the sums of earlier shards, or copied,
before the next replay; no parameter refers to them except in the last shard of a step. Some are narrower than their
parameters (weight_casts.py), and are widened when they are read. Events that are recorded inside the backward graph let
buckets be sent while it still runs.

Note [Lanes]
The kernels of a small shard do not fill a GPU. A worker with several shards captures their pass up to MAX_LANES times
(shard_graphs.py), with memory, a stream and a random state of its own each, and replays shards in these lanes in turn,
so that they overlap. The stream of the step adds up their gradients. There is one lane if the forward pass writes to
buffers. All lanes but the first together take at most 1 / LANE_SHARE of the memory of the GPU.
"""

from __future__ import annotations

import copy
import gc
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lockstep import _torch
from lockstep.ddp.bucket import DEFAULT_CAP_BYTES, FIRST_CAP_BYTES
from lockstep.ddp.replica import Leaf
from lockstep.seed import cuda_generator
from lockstep.step.buffer_exchange import BufferExchange
from lockstep.step.loss_check import ShardLoss
from lockstep.step.shard_bucket import GradientMark
from lockstep.step.weight_casts import WeightCasts, only_uses


class CannotCaptureError(Exception):
    """This pass cannot be captured; the message says why."""


@dataclass(frozen=True)
class ShardPass:
    """What a forward and backward pass of a shard consists of."""

    run: Callable[[Any], ShardLoss]  # runs the loss function on the data of a shard
    data: Any
    seed: int  # of its random numbers
    leaves: Sequence[Leaf]
    buffers: BufferExchange
    scaled: Callable[[Tensor], Tensor]  # multiplies the loss by the loss scale
    scale: float  # the loss scale
    is_sent: bool  # whether buckets of gradients are sent while the backward pass runs

    def key(self) -> Hashable:
        """Passes with equal keys launch the same kernels, as long as the program reads the same Python values.

        Raises CannotCaptureError if the data is not made of tensors, plain values and containers of them.
        """
        found: list[Any] = []
        map_tensors(self.data, lambda tensor: found.append(_kind_of(tensor)), found.append)
        return tuple(found)


def _kind_of(tensor: Tensor) -> Hashable:
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        raise CannotCaptureError(f"a batch holds a tensor that is not plain and dense: {type(tensor)}, {tensor.layout}")
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device, tensor.requires_grad


def map_tensors(data: Any, change: Callable[[Tensor], Any], note: Callable[[Hashable], Any] = lambda _: None) -> Any:
    """Return the same structure with `change` applied to its tensors, which it visits in a fixed order.

    `note` is called with the types and keys of containers and with all values that are no tensors, in the same order.
    Raises CannotCaptureError for an object that may hold tensors in a way that is not known.
    """
    if isinstance(data, Tensor):
        return change(data)
    if data is None or isinstance(data, (bool, int, float, complex, str, bytes, Enum)):
        note((type(data), data))
        return data
    if isinstance(data, (dict, UserDict)):
        note((type(data), *data))
        twin = copy.copy(data)
        twin.update({key: map_tensors(value, change, note) for key, value in data.items()})
        return twin
    if isinstance(data, (list, tuple)) and not callable(getattr(data, "to", None)):
        note((type(data), len(data)))
        items = [map_tensors(item, change, note) for item in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if is_dataclass(data):
        note((type(data).__module__, type(data).__qualname__))
        one = copy.copy(data)
        for part in fields(data):
            object.__setattr__(one, part.name, map_tensors(getattr(data, part.name), change, note))
        return one
    raise CannotCaptureError(f"a batch holds a {type(data).__name__}; only tensors, numbers, lists and dicts are known")


def tensors_of(data: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(data, found.append)
    return found


@final
class Lane:
    """A stream on which captured passes are replayed, with the memory pool and the random state of their graphs."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.generator: Any = cuda_generator(device).clone_state()
        self.may_run: Any = None  # event: the gradients of the last replay in this lane were read

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the context, work is queued in this lane, after all that is queued, and draws from its generator."""
        generator: Any = cuda_generator(self.stream.device)
        before, current = generator.graphsafe_get_state(), torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        generator.graphsafe_set_state(self.generator)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            generator.graphsafe_set_state(before)
            current.wait_stream(self.stream)

    @contextmanager
    def replaying(self, *, waits: bool) -> Iterator[None]:
        """Within the context, work is queued in this lane after `may_run`, or if `waits`, after all that is queued.

        The current stream waits for it.
        """
        current = torch.cuda.current_stream(self.stream.device)
        if waits or self.may_run is None:
            self.stream.wait_stream(current)
        else:
            self.stream.wait_event(self.may_run)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)


@final
class CapturedShard:
    """One captured forward and backward pass: the memory of its inputs, results and gradients, and the two graphs."""

    def __init__(self, one: ShardPass, written: Sequence[Tensor], lane: Lane, casts: WeightCasts) -> None:
        """Capture the passes. Nothing is computed yet. `written`: the buffers that the forward pass writes to."""
        self.lane = lane
        self.lanes, self.size_bytes = 1, 0  # both set by ShardGraphs, as are these steps:
        self.captured_at, self.compare_at = 0, 0
        with lane.active():
            self._record(one, written, casts)

    def _record(self, one: ShardPass, written: Sequence[Tensor], casts: WeightCasts) -> None:
        self._parameters = parameters = [leaf.parameter for leaf in one.leaves]
        own = map_tensors(one.data, torch.clone)
        self._inputs = tensors_of(own)
        self._written = list(written)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with recorded_into(self._forward, self.lane.pool), casts.replacing() as casts_made:
            loss = one.run(own)
            self._returned = [loss.weight, *(value for pair in loss.metrics.values() for value in pair)]
            self._metric_names = list(loss.metrics)
            values = [loss.total.detach(), *(value for value in self._returned if isinstance(value, Tensor))]
            self._values = torch.stack([value.to(torch.float64) for value in values])
        if casts.were_written(casts_made):
            raise CannotCaptureError("the pass writes to a weight that it has cast before")
        self.marks, self._gradients = [GradientMark()], list[Tensor | None]()
        narrow = {} if one.is_sent else {id(cast.weight): cast.result for cast in only_uses(loss.total, casts_made)}
        if narrow and not any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters):
            self._record_narrow_backward(one.scaled, loss.total, narrow)
        else:
            self._record_backward(one.scaled, loss.total)

    def _record_backward(self, scaled: Callable[[Tensor], Tensor], total: Tensor) -> None:
        hooked: list[Any] = list(self._parameters)
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._mark(index))
            for index, parameter in enumerate(hooked)
        ]
        try:
            with recorded_into(self._backward, self.lane.pool):
                scaled(total).backward()  # type: ignore[no-untyped-call]
        finally:
            for handle in handles:
                handle.remove()
        self._gradients = [parameter.grad for parameter in self._parameters]

    def _record_narrow_backward(
        self, scaled: Callable[[Tensor], Tensor], total: Tensor, narrow: Mapping[int, Tensor]
    ) -> None:
        """Record the backward pass, and leave gradients of some weights in the dtype to which these were cast.

        narrow  the results of the casts, by the id of the weight
        """
        differentiated = [narrow.get(id(parameter), parameter) for parameter in self._parameters]
        with recorded_into(self._backward, self.lane.pool):
            found = torch.autograd.grad(scaled(total), differentiated, allow_unused=True)
            pairs = zip(found, self._parameters, strict=True)
            self._gradients = [None if gradient is None else like_parameter(gradient, p) for gradient, p in pairs]
        if any(parameter.grad is not None for parameter in self._parameters):
            raise CannotCaptureError("a backward pass inside the backward pass adds to gradients")
        self.marks[0].indices += [n for n, gradient in enumerate(found) if gradient is not None]

    def _mark(self, index: int) -> None:
        """Record an event after the first MiB of gradients that have arrived, and then after every 25."""
        mark = self.marks[-1]
        mark.indices.append(index)
        mark.size_bytes += self._parameters[index].nbytes
        if mark.size_bytes >= (FIRST_CAP_BYTES if len(self.marks) == 1 else DEFAULT_CAP_BYTES):
            mark.event = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
            mark.event.record(torch.cuda.current_stream())
            self.marks.append(GradientMark())

    def forward(self, data: Any, seed: int) -> ShardLoss:
        """Replay the forward pass with this data and this seed. The result stays valid after the next replay."""
        self.lane.generator.manual_seed(seed)
        with self.lane.replaying(waits=bool(self._written)):
            if self._inputs:
                _torch.foreach_copy_(self._inputs, tensors_of(data))
            self._forward.replay()
            results = self._values.clone()
        if self._written:
            increment_version(self._written)  # a replay does not, and BufferExchange looks for it
        values = iter(results.unbind())
        total = next(values)
        weight, *rest = [next(values) if isinstance(value, Tensor) else value for value in self._returned]
        pairs = zip(rest[::2], rest[1::2], strict=True)
        return ShardLoss(total, weight, dict(zip(self._metric_names, pairs, strict=True)))

    def backward(self) -> None:
        """Replay the backward pass that belongs to the last `forward`.

        Call `release` when the gradients have been read.
        """
        with self.lane.replaying(waits=bool(self._written)):
            self._backward.replay()

    @torch.no_grad()
    def read_gradients(self, indices: Sequence[int] | None = None, *, copied: bool = False) -> list[Tensor | None]:
        """Return gradients of the last `backward`, None where there is none; the current stream has waited for it.

        indices  of the parameters; None: all
        copied   return copies of all of them; else only those that had to be widened are copies, and the next replay
                 overwrites the others
        """
        chosen = range(len(self._parameters)) if indices is None else indices
        result = [self._gradients[i] for i in chosen]
        wide, narrow = list[int](), list[int]()  # one kernel copies tensors of the same dtypes
        for n, i in enumerate(chosen):
            if (gradient := result[n]) is not None:
                (wide if gradient.dtype == self._parameters[i].dtype else narrow).append(n)
        for numbers in (narrow, wide) if copied else (narrow,):
            old = [gradient for n in numbers if (gradient := result[n]) is not None]
            new = [
                torch.empty_like(gradient, dtype=self._parameters[chosen[n]].dtype)
                for n, gradient in zip(numbers, old, strict=True)
            ]
            if new:
                _torch.foreach_copy_(new, old)
            for n, tensor in zip(numbers, new, strict=True):
                result[n] = tensor
        return result

    def release(self) -> None:
        """Let the next replay overwrite the gradients, after what is queued on the current stream."""
        self.lane.may_run = torch.cuda.current_stream().record_event()


def like_parameter(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient with the strides of its parameter, as autograd would accumulate it."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


@contextmanager
def recorded_into(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record what is queued on the current stream within the context; nothing of it is executed."""
    collects = gc.isenabled()
    gc.disable()  # a collection would end the capture if it destroyed an older graph (of another run, of a failed step)
    try:
        # Calls of other threads (a watchdog of NCCL, a loader that pins memory) must not end the capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:  # it only says that the capture has failed before
                _torch.end_failed_capture(torch.device("cuda", torch.cuda.current_device()), pool)
            raise
        graph.capture_end()
    finally:
        if collects:
            gc.enable()


@final
class StepStream:
    """The CUDA stream on which steps are taken; on a CPU it does nothing. See Note [Stream of the step]."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the context, queue work on this stream, after and before that of the current stream."""
        if self._stream is None:
            yield
            return
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            before.wait_stream(self._stream)
