"""What a loss function returns: (sum, weight), or with metrics (sum, weight, {name: (sum, weight)}).

Note [A mean passed off as a sum]
`(mean, number of samples)` is the most likely mistake in a loss function. It trains, with gradients that are smaller by
the size of a shard. A sum over a shard is the sum over its two halves; a mean is their mean. So if the last operations
of a loss divide or average, the first shard of a run is evaluated three more times, in eval mode and without gradients.
Where that is impossible (samples that cannot be cut in two, a model without a loss in eval mode), nothing is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor, nn

from lockstep.step.buffer_snapshot import BufferSnapshot
from lockstep.step.compiled_model import is_compiled

TOLERANCE: Final = 1e-3  # relative; the halves are computed by other kernels
LAST_OPERATIONS: Final = 32
MEAN: Final = 1  # torch's number for reduction="mean"
ELEMENTWISE: Final = (
    *("Add", "Sub", "Mul", "Neg", "Clone", "Alias", "ToCopy", "View", "Reshape", "Unsafe", "Squeeze", "Unsqueeze"),
    *("Select", "Where", "Expand", "Cat", "Stack", "SumBackward"),
)
APART: Final = 0.2  # relative distance of the sum of the halves from the whole; below it, no decision is possible
ADVICE: Final = (
    'return the sum: `F.cross_entropy(model(x), y, reduction="sum"), len(y)`; or, of a mean that a model gives you, '
    "`mean * len(y), len(y)`"
)


@dataclass(frozen=True)
class ShardLoss:
    """What a loss function returned for one shard."""

    total: Tensor
    weight: float | Tensor
    metrics: Mapping[str, tuple[float | Tensor, float | Tensor]]  # (sum, weight) by name


def parse_loss(returned: Any) -> ShardLoss:
    """Check and convert the return value of a loss function. Raises TypeError unless it is (sum, weight[, metrics])."""
    advice = 'a loss function returns (sum, weight), such as `F.cross_entropy(model(x), y, reduction="sum"), len(y)`'
    if isinstance(returned, (tuple, list)) and len(returned) not in (2, 3):
        raise TypeError(f"{advice}; this one returned {_values(returned)}")
    if not isinstance(returned, tuple):
        raise TypeError(f"{advice}; this one returned a {type(returned).__name__}")
    if len(returned) == 3 and not isinstance(returned[2], Mapping):
        raise TypeError(
            f"{advice}; this one returned {_values(returned)}. A third value is a dict of metrics, each (sum, weight): "
            '`{"accuracy": (correct, len(y))}`'
        )
    total, weight = returned[:2]
    metrics = _checked_metrics(returned[2]) if len(returned) == 3 else {}
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise TypeError(f"{advice}; the sum must be a tensor of one element, not {shape}")
    total = total if total.dim() == 0 else total.reshape(())
    if not total.requires_grad and torch.is_grad_enabled():
        raise ValueError("the loss does not depend on any parameter that is trained: it has no gradient")
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return ShardLoss(total, weight.detach().reshape(()), metrics)
    if not isinstance(weight, (int, float, Real)):  # the first two for speed: to ask an abstract class takes longer
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"{advice}; the weight must be a number, or a tensor of one element, not {shape}")
    return ShardLoss(total, float(weight), metrics)


def _checked_metrics(given: Mapping[Any, Any]) -> dict[str, tuple[float | Tensor, float | Tensor]]:
    found: dict[str, tuple[float | Tensor, float | Tensor]] = {}
    for name, pair in given.items():
        parts = list(pair) if isinstance(pair, (tuple, list)) else [pair]
        are_numbers = all(isinstance(x, Real) or (isinstance(x, Tensor) and x.numel() == 1) for x in parts)
        if len(parts) != 2 or not are_numbers or not isinstance(name, str):
            what = _values(pair) if isinstance(pair, (tuple, list)) else f"a {type(pair).__name__}"
            raise TypeError(
                f"the loss function returned {what} as the metric {name!r}; a metric is (sum, weight), such as "
                '`{"accuracy": ((guess == y).sum(), len(y))}`'
            )
        total, weight = (x.detach().reshape(()) if isinstance(x, Tensor) else float(x) for x in parts)
        found[name] = (total, weight)
    return found


def _values(returned: Sequence[Any]) -> str:
    return f"{len(returned)} values: ({', '.join(type(value).__name__ for value in returned)})"


@dataclass(frozen=True)
class Evaluated:
    """Loss and weight of some samples, and the number of samples."""

    loss: float
    weight: float
    samples: int


def may_be_mean(total: Tensor) -> bool:
    """Whether the last operations of a loss, as recorded by autograd, divide or average."""
    nodes, seen = [total.grad_fn], 0
    while nodes and seen < LAST_OPERATIONS:
        node, seen = nodes.pop(0), seen + 1
        if node is None:
            continue
        name = node.name()
        if getattr(node, "_saved_reduction", None) == MEAN or name.startswith(("Mean", "Div")):
            return True
        if name.startswith(ELEMENTWISE):
            nodes += [following for following, _ in node.next_functions]
    return False


def is_mean(whole: Evaluated, first: Evaluated, second: Evaluated) -> bool:
    """Whether the loss is the mean of the losses of the two halves, while its weight is the sum of their weights."""
    values = (whole.loss, first.loss, second.loss)
    if not all(map(math.isfinite, values)) or whole.weight <= 0 or first.weight <= 0 or second.weight <= 0:
        return False
    if not _near(whole.weight, first.weight + second.weight):
        return False
    if abs(first.loss + second.loss - whole.loss) <= APART * abs(whole.loss):
        return False
    by_weight = (first.loss * first.weight + second.loss * second.weight) / (first.weight + second.weight)
    by_count = (first.loss * first.samples + second.loss * second.samples) / (first.samples + second.samples)
    return _near(whole.loss, by_weight) or _near(whole.loss, by_count)


def cut_in_two(data: Any, count: int) -> tuple[Any, Any] | None:
    """Return the first and the second half of nested data; None if some part of it does not have a row per sample."""
    middle = count // 2
    if isinstance(data, Tensor):
        return (data[:middle], data[middle:]) if data.dim() and len(data) == count else None
    if isinstance(data, dict):
        parts = {name: cut_in_two(value, count) for name, value in data.items()}
        if any(part is None for part in parts.values()):
            return None
        return tuple({name: part[n] for name, part in parts.items() if part} for n in (0, 1))  # type: ignore[return-value]
    if isinstance(data, (list, tuple)):
        pieces = [cut_in_two(value, count) for value in data]
        if pieces and all(piece is not None for piece in pieces):
            return tuple(_like(data, [piece[n] for piece in pieces if piece]) for n in (0, 1))
        if len(data) == count and all(isinstance(value, (str, int, float)) for value in data):
            return data[:middle], data[middle:]
    return None


def refuse_mean(evaluate: Callable[[Any], ShardLoss], model: nn.Module, data: Any, count: int) -> None:
    """Raise ValueError if the loss function, called by `evaluate(data)`, returns a mean as a sum."""
    halves = cut_in_two(data, count) if count > 1 and not is_compiled(model) else None
    if halves is None:
        return
    parts = ((data, count), (halves[0], count // 2), (halves[1], count - count // 2))
    try:
        with _eval_mode(model):
            whole, first, second = (_evaluate(evaluate, part, samples) for part, samples in parts)
    except Exception:  # the step itself raises the error
        return
    if is_mean(whole, first, second):
        raise ValueError(
            f"the loss function returns a mean as if it were a sum: for {count} samples it gave {whole.loss:.4g}, and "
            f"for the halves {first.loss:.4g} and {second.loss:.4g}, with weight {whole.weight:g}. A loss function "
            f"returns (sum, weight), so gradients would be too small by a factor of about {whole.weight:g}; {ADVICE}"
        )


def _evaluate(evaluate: Callable[[Any], ShardLoss], data: Any, samples: int) -> Evaluated:
    returned = evaluate(data)
    return Evaluated(float(returned.total), float(returned.weight), samples)


def _eval_mode(model: nn.Module) -> ExitStack:
    """Eval mode without gradients. At the end the buffers and the modes of all modules are restored."""
    stack = ExitStack()
    was_training = [module for module in model.modules() if module.training]
    buffers = BufferSnapshot(model)
    buffers.capture()

    def restore() -> None:
        for module in was_training:
            module.training = True
        buffers.restore(waits=True)

    stack.enter_context(torch.no_grad())
    stack.callback(restore)
    model.eval()
    return stack


def _like(data: Any, values: list[Any]) -> Any:
    if hasattr(data, "_fields"):  # a named tuple
        return type(data)(*values)
    return type(data)(values)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b))
