"""LARS and LAMB: optimisers for very large batches, with a learning rate for each layer.

Note [Trust ratio]
The update of a layer is scaled to the norm of its weights: multiplied by |weights| / |update|. Norms and ratios stay on
the device as tensors, so a step never waits for a GPU. Where either norm is zero the ratio is 1. On a CPU norms are
computed in blocks, whose sums do not depend on the number of threads.

The group option `adapt` selects the parameters that are adapted in this way. None: those with more than one dimension;
biases and the weights of normalisation layers, which have one, are neither adapted nor decayed. True or False: all or
none of the group are adapted, and all of them are decayed by the group's `weight_decay`.

Note [Wide]
Weights of float16 and bfloat16 are updated in float32 and rounded at the end, and their state is kept in float32:
squared gradients would vanish in float16, and a bfloat16 cannot change by a thousandth.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep import _torch

BLOCK_NUMEL: Final = 4096


@dataclass(frozen=True)
class _ParameterList:
    """Parameters that are updated together: one group, one device, one dtype; all are adapted and decayed or none."""

    weights: list[Tensor]  # at least float32, like gradients and state: see Note [Wide]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    adapt: bool
    decay: float

    def state(self, name: str) -> list[Tensor]:
        """One tensor of state per parameter; zeros at the first step."""
        for weight, state in zip(self.weights, self.states, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return [state[name] for state in self.states]


class _LayerWise(Optimizer):
    """What both optimisers have in common: checks, lists of parameters, the closure."""

    is_layer_wise: Final = True  # a step looks at the norms of whole tensors (ddp/sharded_optimizer.py)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check(self.defaults | param_group)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # Torch has cast the state to the dtype of its parameters: replace it by what was saved.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for key, weight in zip(keys, weights, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if weight.dtype != _wide(weight.dtype) and name != "step":
                    self.state[weight][name] = value.to(weight.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        for group in self.param_groups:
            for weights in self._group_by_kind(group):
                params = self._prepare(weights, group)
                self._step_parameters(params, group)
                if params.weights is not weights:
                    _torch.foreach_copy_(weights, params.weights)
        return loss

    @abstractmethod
    def _check(self, options: dict[str, Any]) -> None: ...

    @abstractmethod
    def _step_parameters(self, params: _ParameterList, group: dict[str, Any]) -> None: ...

    def _check_gradients(self) -> None:
        """Raise RuntimeError for gradients that are not supported, before any weight is changed."""
        for index, group in enumerate(self.param_groups):
            for place, weight in enumerate(group["params"]):
                if weight.grad is None:
                    continue
                where = f"parameter {place} of group {index}, of shape {tuple(weight.shape)}"
                if weight.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__} does not support sparse gradients, and {where}, has one: make the "
                        "embedding with sparse=False, or give it an optimiser of its own such as SparseAdam"
                    )
                if not weight.is_floating_point():
                    raise RuntimeError(f"{type(self).__name__} steps real numbers only: {where}, is {weight.dtype}")

    def _group_by_kind(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """Parameters with a gradient, grouped by device, dtype and whether they are adapted; in their first order."""
        together: dict[Any, list[Tensor]] = {}
        for weight in group["params"]:
            if weight.grad is not None:
                together.setdefault((weight.device, weight.dtype, _is_adapted(weight, group)), []).append(weight)
        return list(together.values())

    def _prepare(self, weights: list[Tensor], group: dict[str, Any]) -> _ParameterList:
        grads = [weight.grad for weight in weights if weight.grad is not None]
        adapt, dtype = _is_adapted(weights[0], group), _wide(weights[0].dtype)
        return _ParameterList(
            weights=weights if weights[0].dtype == dtype else [weight.to(dtype) for weight in weights],
            grads=[(-grad if group["maximize"] else grad).to(dtype) for grad in grads],
            states=[self.state[weight] for weight in weights],
            adapt=adapt,
            decay=group["weight_decay"] if adapt or group["adapt"] is not None else 0.0,
        )


class LARS(_LayerWise):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017), for convolutional networks.

    velocity = momentum velocity + lr ratio (grad + decay weight)
    weight  -= velocity, with ratio = trust |weight| / (|grad| + decay |weight|)

    As in the paper, and unlike torch's SGD, the velocity includes the learning rate.
    """

    # More than six arguments, like torch's optimisers: each is an option that a parameter group may set as well.
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        nesterov: bool = False,
        adapt: bool | None = None,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, options | {"nesterov": nesterov, "adapt": adapt, "maximize": maximize})

    def _check(self, options: dict[str, Any]) -> None:
        _check_common(options)
        if not 0 <= options["momentum"] < 1:
            _refuse("momentum", options["momentum"], "must be at least 0 and less than 1")
        if not (options["trust"] > 0 and math.isfinite(options["trust"])):
            _refuse("trust", options["trust"], "must be a positive number, such as 0.001")
        if options["nesterov"] and options["momentum"] == 0:
            _refuse("nesterov", True, "needs a momentum above 0")

    def _step_parameters(self, params: _ParameterList, group: dict[str, Any]) -> None:
        momentum, changes = group["momentum"], params.grads
        if params.decay:
            changes = _foreach(_torch.foreach_add, changes, params.weights, alpha=params.decay)
        rates = _rate(group["lr"])
        if params.adapt:
            weight_norms, grad_norms = _norms(params.weights), _norms(params.grads)
            ratios = group["trust"] * weight_norms / (grad_norms + params.decay * weight_norms)
            rates = _one_where_undefined((weight_norms > 0) & (grad_norms > 0), ratios) * rates
        changes = _scale(changes, rates)
        if momentum:
            velocities = params.state("momentum_buffer")
            _torch.foreach_mul_(velocities, momentum)
            _torch.foreach_add_(velocities, changes)
            if group["nesterov"]:
                _torch.foreach_add_(changes, velocities, alpha=momentum)
            else:
                changes = velocities
        _torch.foreach_sub_(params.weights, changes)


class LAMB(_LayerWise):
    """Layer-wise adaptive moments (You et al. 2020), for transformers.

    update  = Adam's update with bias correction + decay weight
    weight -= lr ratio update, with ratio = phi(|weight|) / |update|

    phi clamps to `norm_range`; None leaves the norm as it is.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        norm_range: tuple[float, float] | None = (0.0, 10.0),
        adapt: bool | None = None,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "norm_range": norm_range}
        super().__init__(params, options | {"adapt": adapt, "maximize": maximize})

    def _check(self, options: dict[str, Any]) -> None:
        _check_common(options)
        betas, norm_range = options["betas"], options["norm_range"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            _refuse("betas", betas, "must be two numbers, each at least 0 and less than 1")
        if not (options["eps"] >= 0 and math.isfinite(options["eps"])):
            _refuse("eps", options["eps"], "must be at least 0")
        if norm_range is not None and not (len(norm_range) == 2 and 0 <= norm_range[0] < norm_range[1]):
            _refuse("norm_range", norm_range, "must be two numbers, 0 <= low < high, or None")

    def _step_parameters(self, params: _ParameterList, group: dict[str, Any]) -> None:
        beta_first, beta_second = group["betas"]
        steps = [_next_step(state) for state in params.states]
        first, second = params.state("exp_avg"), params.state("exp_avg_sq")
        _torch.foreach_lerp_(first, params.grads, 1 - beta_first)
        _torch.foreach_mul_(second, beta_second)
        _torch.foreach_addcmul_(second, params.grads, params.grads, 1 - beta_second)

        roots = _foreach(_torch.foreach_sqrt, second)
        _torch.foreach_div_(roots, [math.sqrt(1 - beta_second**step) for step in steps])
        _torch.foreach_add_(roots, group["eps"])
        updates = _foreach(_torch.foreach_div, first, [1 - beta_first**step for step in steps])
        _torch.foreach_div_(updates, roots)
        if params.decay:
            _torch.foreach_add_(updates, params.weights, alpha=params.decay)

        rates = _rate(group["lr"])
        if params.adapt:
            weight_norms, update_norms = _norms(params.weights), _norms(updates)
            if group["norm_range"] is not None:
                weight_norms = weight_norms.clamp(*group["norm_range"])
            rates = _one_where_undefined((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms) * rates
        _torch.foreach_sub_(params.weights, _scale(updates, rates))


def _is_adapted(weight: Tensor, group: dict[str, Any]) -> bool:
    return weight.ndim > 1 if group["adapt"] is None else bool(group["adapt"])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _next_step(state: dict[str, Any]) -> float:
    """Count the steps of one parameter, on the host, where the count can be read without waiting for a GPU."""
    step: Tensor = state.setdefault("step", torch.zeros((), dtype=torch.float32))
    step += 1
    return float(step.item())


def _rate(lr: float | Tensor) -> float | Tensor:
    """The learning rate as a float, or as a tensor if it is on a GPU: reading it would wait."""
    return float(lr.item()) if isinstance(lr, Tensor) and lr.device.type == "cpu" else lr


def _scale(tensors: list[Tensor], rates: float | Tensor) -> list[Tensor]:
    """Return new tensors: all multiplied by one rate, or each by its own if `rates` has a dimension."""
    if isinstance(rates, Tensor) and rates.ndim == 1:
        return _foreach(_torch.foreach_mul, tensors, list(rates.unbind()))
    return _foreach(_torch.foreach_mul, tensors, rates)


def _foreach(operation: Any, *args: Any, **options: Any) -> list[Tensor]:
    """Return the result as a list: torch returns either a list or a tuple."""
    return list(operation(*args, **options))


def _one_where_undefined(is_defined: Tensor, ratios: Tensor) -> Tensor:
    return torch.where(is_defined, ratios, torch.ones_like(ratios))


def _norms(tensors: list[Tensor]) -> Tensor:
    """The norm of each tensor: [len(tensors)]."""
    if tensors[0].device.type != "cpu":
        return torch.stack(_foreach(_torch.foreach_norm, tensors))
    return torch.stack([_norm_in_blocks(tensor.reshape(-1)) for tensor in tensors])


def _norm_in_blocks(flat: Tensor) -> Tensor:
    """The norm, computed in blocks, which is also more accurate.

    Torch splits one long sum among its threads, so that its bits depend on their number.
    """
    while flat.numel() > BLOCK_NUMEL:
        even = flat.numel() // BLOCK_NUMEL * BLOCK_NUMEL
        norms = torch.linalg.vector_norm(flat[:even].view(-1, BLOCK_NUMEL), dim=1)
        rest = torch.linalg.vector_norm(flat[even:]).view(1)
        flat = torch.cat([norms, rest])
    norm: Tensor = torch.linalg.vector_norm(flat)
    return norm


def _check_common(options: dict[str, Any]) -> None:
    lr = options["lr"]
    if isinstance(lr, Tensor):
        if lr.ndim != 0:
            _refuse("lr", lr, "as a tensor must have no dimensions; use torch.tensor(0.1)")
    elif not (lr >= 0 and math.isfinite(lr)):
        _refuse("lr", lr, "must be a number of at least 0")
    if not (options["weight_decay"] >= 0 and math.isfinite(options["weight_decay"])):
        _refuse("weight_decay", options["weight_decay"], "must be at least 0")
    if options["adapt"] not in (None, True, False):
        _refuse("adapt", options["adapt"], "must be True, False or None (parameters with more than one dimension)")


def _refuse(name: str, value: object, rule: str) -> NoReturn:
    raise ValueError(f"{name}={value!r}: {rule}")
