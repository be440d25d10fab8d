"""New weights that arrive while the next forward pass runs.

Note [Deferred weights]
A sharded optimiser sends the new weights after each step. `run.step` does not wait for them: the next forward pass uses
them one layer after the other. While the weights of a parameter are on their way, its class is a subclass of its own
class with a `__torch_function__`. So the first operation that gets the parameter as an argument, or reads an attribute
that depends on its values, waits for them; then the parameter has its own class again. Each operation waits for its own
weights only, and what a program reads between two steps is never old.

Torch does not tell of every use: an extension in C++, transforms of torch.func and functions such as `torch.tensor` do
not ask the class. So meanwhile the parameter has no elements either: such a use is an error, or finds nothing. It never
finds old weights. What else there is:
- Compiled and scripted code, and modules that compute otherwise if an argument has a `__torch_function__`: where there
  are some, nothing is deferred.
- A tensor that shares memory with a parameter (a view, or what `detach()` returned) may be kept by the program. The
  storage then has more references than ours, and run.step waits for all weights.
- A thread of the program may be inside an operation on a parameter, without the interpreter's lock, when its elements
  are taken away: torch reads freed memory then, or waits for ever. So nothing is deferred while there are such threads.
- A process that is forked has no thread in which weights arrive: all are waited for before.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, cast, final

import torch
from torch import Tensor, nn

from lockstep import _torch
from lockstep.comm.collective_thread import PendingResult
from lockstep.comm.shard_sum import ShardSum
from lockstep.ddp.weight_exchange import WHERE, WeightExchange

T = TypeVar("T")

# What can be asked of a parameter that has no elements yet: of itself, and of the tensor that has them later.
_OF_TENSORS: Final = cast(Any, Tensor)
_OF_PARAMETER: Final = frozenset[Any](
    {
        *(getattr(_OF_TENSORS, name).__get__ for name in ("requires_grad", "grad", "grad_fn", "is_leaf")),
        *(_OF_TENSORS.grad.__delete__, Tensor.requires_grad_),
    }
)
_SET_GRADIENT: Final = _OF_TENSORS.grad.__set__  # a gradient must have the shape of the parameter; None has none
_OF_DATA: Final = frozenset[Any](
    {
        *(getattr(_OF_TENSORS, name).__get__ for name in ("shape", "ndim", "nbytes", "itemsize", "dtype", "device")),
        *(getattr(_OF_TENSORS, name).__get__ for name in ("layout", "is_cuda", "is_sparse", "is_meta")),
        *(Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.storage_offset),
    }
)
# Threads that use no weights: ours, those of multiprocessing's queues, and those of progress displays.
HARMLESS_NAMES: Final = ("lockstep", "hierarchy", "QueueFeederThread")
HARMLESS_MODULES: Final = ("rich", "tqdm")
# These compute otherwise, with other bits, if an argument has a `__torch_function__`.
_ASK_FOR_FUNCTIONS: Final = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class PendingWeight:
    """Mixed into the class of a parameter while its new weights are on their way."""

    weights: ClassVar[DeferredWeights]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_PARAMETER or (func == _SET_GRADIENT and args[1] is None):
            with _torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _OF_DATA:
            return func(cls.weights.data_of(args[0]), *args[1:], **(kwargs or {}))
        found = [one for one in _torch.tree_leaves((args, kwargs)) if isinstance(one, PendingWeight)]
        for one in found:
            _wait_for(one)
        if not found:  # it is in a collection that is not searched
            cls.weights.finish()
        return func(*args, **(kwargs or {}))

    # Copies are made by methods of the class, which torch does not tell of.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own: Any = self
        _wait_for(own)
        return own.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        own: Any = self
        _wait_for(own)
        return own.__reduce_ex__(protocol)


def _wait_for(parameter: Any) -> None:
    weights = getattr(type(parameter), "weights", None)
    if weights is not None:  # None: another thread has waited for it meanwhile
        weights.wait_for(parameter)


class _Waiting(NamedTuple):
    """What a parameter is when its weights are here."""

    own_class: type
    data: Tensor


@final
class DeferredWeights:
    """The exchange of weights that is in progress, if one is, and the parameters that wait for it."""

    def __init__(self, model: nn.Module, announce: Callable[[str], None]) -> None:
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._announce, self._has_announced = announce, False
        self._classes: dict[type, type] = {}  # of parameters, and what they are while their weights are on their way
        self._waiting: dict[Tensor, _Waiting] = {}
        self._own_references: tuple[WeightExchange, Counter[int]] | None = None  # by storage
        self._changed = threading.Condition()
        self._lock = threading.RLock()  # of what follows: threads of the program may read weights, too
        self._arrived = 0  # buckets of the exchange that are here
        self._has_ended = True  # the exchange, with success or not
        self._exchange: WeightExchange | None = None
        self._pending: PendingResult | None = None
        self.sum: ShardSum | None = None  # in whose thread exchanges run
        self.waited_s = 0.0  # in all, the thread that trains
        self._training_thread: threading.Thread | None = None
        self._storage_references = _storage_references(torch.ones(1))
        _finish_before_fork(self)

    def in_order(self, pieces: Mapping[Tensor, T]) -> dict[Tensor, T]:
        """Return the same, in the order in which weights are sent: that of the modules, as forward passes use them."""
        order = {parameter: number for number, parameter in enumerate(self._names)}
        return dict(sorted(pieces.items(), key=lambda item: order.get(item[0], -1)))

    def start(self, exchange: WeightExchange, parts: Iterable[Tensor]) -> None:
        """Run an exchange in the collective thread, after everything before it.

        parts  this worker's parts of the optimiser, which are views of parameters
        """
        self.finish()
        assert self.sum is not None
        self._exchange = None  # one that is out of date has views of parameters
        self._training_thread = threading.current_thread()
        why = self._why_not_deferred(exchange, parts)
        with self._lock:
            self._exchange, self._arrived, self._has_ended = exchange, 0, False
            self._pending = self.sum.submit(self._run)
            for parameter in exchange.parameters if why is None else ():
                self._hide(parameter)
        if why is not None:
            if not self._has_announced:
                self._has_announced = True
                self._announce(f"run.step waits for all new weights: {why}")
            self.finish()

    def _hide(self, parameter: Tensor) -> None:
        """Let operations wait for the weights of a parameter, and leave no elements for those that do not."""
        own = type(parameter)
        if own not in self._classes:
            self._classes[own] = type(f"Pending{own.__name__}", (PendingWeight, own), {"weights": self})
        self._waiting[parameter] = _Waiting(own, parameter.data)
        parameter.__class__ = self._classes[own]  # first, and last below, for threads that read meanwhile
        with _torch.DisableTorchFunctionSubclass():
            parameter.data = parameter.data.new_empty(0)

    def _show(self, parameter: Tensor) -> None:
        """Undo `_hide`."""
        waiting = self._waiting.pop(parameter, None)
        if waiting is not None:
            with _torch.DisableTorchFunctionSubclass():
                parameter.data = waiting.data
            parameter.__class__ = waiting.own_class

    def _why_not_deferred(self, exchange: WeightExchange, parts: Iterable[Tensor]) -> str | None:
        """Return why the program could read old weights without notice; None if it cannot."""
        if any(map(_is_of_program, threading.enumerate())):
            return "the program has other threads, which may be reading weights at this moment"
        if _torch.has_compiled_code():
            return "torch.compile has compiled code of this program, which reads weights without notice"
        if self._own_references is None or self._own_references[0] is not exchange:
            views = [*exchange.views(), *parts]
            tensors = {id(one): one for view in views for one in (view, view._base) if one is not None}
            self._own_references = exchange, Counter(one.untyped_storage()._cdata for one in tensors.values())
        ours = self._own_references[1]
        for parameter in exchange.parameters:
            storage = parameter.untyped_storage()
            count = _torch.storage_use_count(storage._cdata) - 2  # two: the parameter and `storage`
            if count > ours[storage._cdata] or _storage_references(parameter) > self._storage_references + 1:
                name = self._names.get(parameter, "a parameter")
                return (
                    f"a tensor of the program shares memory with {name} (a view, or what detach() returned), and would "
                    "have old ones"
                )
        return None

    def _run(self) -> Tensor:
        assert self._exchange is not None
        assert self.sum is not None
        try:
            with self.sum.watch.explain_errors(WHERE):
                self._exchange.run(lambda: self._note_arrival(has_ended=False))
        finally:
            self._note_arrival(has_ended=True)
        return torch.empty(0)

    def _note_arrival(self, *, has_ended: bool) -> None:
        with self._changed:
            self._arrived, self._has_ended = self._arrived + 1, has_ended
            self._changed.notify_all()

    def data_of(self, parameter: Tensor) -> Tensor:
        """Return the tensor that has the shape of a parameter, whose elements may be old."""
        with self._lock:
            return self._waiting[parameter].data if parameter in self._waiting else parameter

    def wait_for(self, parameter: Any) -> None:
        """Wait until the weights of a parameter are here. Raises PeerLostError if a worker was lost meanwhile."""
        with self._lock:
            if self._pending is not None and parameter in self._waiting:
                assert self._exchange is not None
                self._wait_until(self._exchange.buckets_until(parameter))
            self._show(parameter)

    def _wait_until(self, count: int) -> None:
        """Wait until so many buckets have arrived."""
        assert self.sum is not None

        def done_within(seconds: float) -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: self._has_ended or self._arrived >= count, seconds)

        began_s = time.perf_counter()
        self.sum.watch.wait_for(done_within, WHERE)
        if self._has_ended:
            self._end_exchange()
        self._add_wait(began_s)

    def _add_wait(self, began_s: float) -> None:
        if threading.current_thread() is self._training_thread:  # that of another thread is no time of the step
            self.waited_s += time.perf_counter() - began_s

    def finish(self) -> None:
        """Wait until all weights are here. Raises PeerLostError, each time, if a worker was lost meanwhile."""
        with self._lock:
            began_s = time.perf_counter()
            self._end_exchange()
            for parameter in list(self._waiting):
                self._show(parameter)
            self._add_wait(began_s)

    def _end_exchange(self) -> None:
        if self._pending is not None:
            assert self.sum is not None
            self.sum.wait(self._pending, WHERE)
            self._pending = None  # not if it has failed: then all that read a weight fail

    def describe_hidden(self) -> str:
        """Return what to tell with an error of the forward pass: names of parameters that had no elements, if any."""
        hidden = [self._names.get(parameter, "a parameter") for parameter in list(self._waiting)]
        if not hidden:
            return ""
        more = f" and {len(hidden) - 3} more" if len(hidden) > 3 else ""
        return (
            f"The new weights of {', '.join(hidden[:3])}{more} were still to arrive, and no operation had been seen to "
            "use them. If this program uses them in an extension in C++ or in torch.func, set Run(defer_weights=False)"
        )


def _is_of_program(thread: threading.Thread) -> bool:
    """Whether this thread may use weights: another one than this, and than those of which it is known what they do."""
    is_known = thread.name.startswith(HARMLESS_NAMES) or type(thread).__module__.partition(".")[0] in HARMLESS_MODULES
    return thread is not threading.current_thread() and not is_known


def _storage_references(tensor: Tensor) -> int:
    """Return how many references Python has to the storage of a tensor, a few of its own and of ours among them."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def why_not_deferrable(model: nn.Module) -> str | None:
    """Return why the weights of a model can never be deferred; None if they can. See Note [Deferred weights]."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return "a part of the model is scripted"
        if isinstance(module, _ASK_FOR_FUNCTIONS):
            return f"a {type(module).__name__} computes otherwise if weights are deferred"
    for parameter in model.parameters():
        own = type(parameter)
        try:
            parameter.__class__ = type("Pending", (PendingWeight, own), {})
        except TypeError:
            return f"the class of a parameter, {own.__name__}, cannot be extended"
        parameter.__class__ = own
    return None


def _finish_before_fork(weights: DeferredWeights) -> None:
    reference = weakref.ref(weights)

    def finish() -> None:
        if (alive := reference()) is not None:
            alive.finish()

    os.register_at_fork(before=finish)
