"""Batch normalisation over the global batch, on CPUs and GPUs, through any process group.

Note [Statistics of many parts]
Every worker computes count, mean and M2 (the sum of squared distances from its own mean) of its rows, and all workers
gather them. The mean of the global batch is the mean of the means, weighted by counts, and its M2 is the sum of
M2_i + n_i (mean_i - mean)^2 (Chan et al. 1979). No sum of squares is formed, so a mean that is large compared with the
deviation costs no precision. The sums run over workers in the order of comm/tree_order.py, and all workers do the same
arithmetic on the same table: they get the same bits with any backend. The gradient of the rows needs two more sums per
channel, which are computed in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep import _torch
from lockstep._torch import BatchNormBase
from lockstep.comm.tree_order import tree_rounds

CACHED_NUMEL: Final = 1 << 16  # elements of a piece of work that fits in the cache of one core

# The name changed in torch 2.13, and the old one warns.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SyncBatchNorm(nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` that also works on CPUs: same arguments, same buffers, same results.

    While training, the statistics are those of all rows on all workers of `process_group` (None: the default group at
    the time of the forward). Workers may have different numbers of rows, or none. Every worker of the group must take
    part in every forward, and in every backward if the input needs a gradient. Gradients of weight and bias are those
    of this worker's rows, which DistributedDataParallel averages like all others.
    """

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group = self._sync_group()
        if group is None:
            return BatchNormBase.forward(self, input)
        self._check_channels(input)
        rows = input if _is_dense(input) else input.contiguous()
        with torch.no_grad():
            whole = _gather_statistics(rows, self.eps, group)
            self._track(whole, enough=_check_enough(rows, whole, group))
        normalise: Any = _Normalise.apply
        normalised: Tensor = normalise(rows, self.weight, self.bias, whole, group)
        return normalised

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> Any:
        """`module` with every batch norm inside it replaced by ours, or its replacement if it is one itself.

        Parameters and buffers stay the same tensors; hooks are not copied, as in torch. A layer that is used in several
        places stays one layer.
        """
        return cls._convert(module, process_group, {})

    @classmethod
    def _convert(cls, module: nn.Module, group: Any, done: dict[nn.Module, nn.Module]) -> nn.Module:
        if module in done:
            return done[module]
        converted = cls._like(module, group) if isinstance(module, BatchNormBase) else module
        done[module] = converted
        for name, child in list(module._modules.items()):
            if child is not None:
                converted.add_module(name, cls._convert(child, group, done))
        return converted

    @classmethod
    def _like(cls, layer: BatchNormBase, group: Any) -> SyncBatchNorm:
        if any(nn.parameter.is_lazy(t) for t in (layer.weight, layer.running_mean) if t is not None):
            raise ValueError(
                f"{type(layer).__name__} does not know its number of channels yet: run one forward, then convert"
            )
        # Constructed without tensors, because the layer's own are used.
        new = cls(layer.num_features, layer.eps, layer.momentum, False, False, group)
        new.affine, new.track_running_stats = layer.affine, layer.track_running_stats
        new.weight, new.bias = layer.weight, layer.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            new._buffers[name] = getattr(layer, name)
        new._non_persistent_buffers_set = set(layer._non_persistent_buffers_set)
        new.training = layer.training
        if hasattr(layer, "qconfig"):
            new.qconfig = layer.qconfig
        return new

    def _sync_group(self) -> Any:
        """The group to synchronise with. None in eval mode, without a process group, and in a group of one worker."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if self.process_group is None else self.process_group
        return group if dist.get_world_size(group) > 1 else None

    def _check_channels(self, input: Tensor) -> None:
        """Called before the all-gather, which would otherwise get tensors of different sizes."""
        known = self.weight if self.weight is not None else self.running_mean
        if known is not None and input.size(1) != known.numel():
            raise ValueError(
                f"expected {known.numel()} channels in dimension 1, got an input of shape {tuple(input.shape)}"
            )

    def _track(self, whole: _Statistics, *, enough: bool) -> None:
        """Update the running statistics. Called after every check, so that an error changes nothing."""
        if not self.track_running_stats or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        if not enough or self.running_mean is None or self.running_var is None:
            return
        share = 1.0 / int(self.num_batches_tracked.item()) if self.momentum is None else self.momentum
        unbiased = whole.m2 / (whole.count - 1).clamp(min=1)
        for running, new in ((self.running_mean, whole.mean), (self.running_var, unbiased)):
            running.lerp_(new.to(running.dtype), share)


@dataclass(frozen=True)
class _Statistics:
    """Statistics of the global batch, with the same bits on every worker. Counts are tensors to avoid a GPU sync."""

    counts: Tensor  # [workers]: values per channel on each worker
    count: Tensor  # [1]: their sum, or 1 if it is 0
    mean: Tensor  # [channels]
    m2: Tensor  # [channels]
    eps: float

    @cached_property
    def var(self) -> Tensor:
        return self.m2 / self.count

    @cached_property
    def inverse_std(self) -> Tensor:
        return (self.var + self.eps).rsqrt_()


def _gather_statistics(rows: Tensor, eps: float, group: Any) -> _Statistics:
    channels = rows.size(1)
    table = _gather_table(_own_statistics(rows), group)
    means, m2s, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
    count = _sum_rows(counts.clone()).clamp_(min=1)
    mean = _sum_rows(means * (counts / count))
    m2 = _sum_rows(torch.addcmul(m2s, counts, (means - mean).square_()))
    return _Statistics(counts=counts.flatten(), count=count, mean=mean, m2=m2, eps=eps)


def _own_statistics(rows: Tensor) -> Tensor:
    """[mean of every channel, M2 of every channel, count], all zeros without rows."""
    channels, dtype = rows.size(1), torch.float64 if rows.dtype == torch.float64 else torch.float32
    values = rows.numel() // channels
    if values == 0:
        return torch.zeros(2 * channels + 1, dtype=dtype, device=rows.device)
    running_mean = running_var = None
    if rows.dtype != dtype:  # on a CPU, sums have the dtype of the running statistics, so pass some that are not used
        running_mean, running_var = torch.zeros(2, channels, dtype=dtype, device=rows.device)
    mean, var = torch.batch_norm_update_stats(rows, running_mean, running_var, 0.0)
    return torch.cat([mean, var.mul_(values), var.new_full((1,), values)])


def _is_dense(rows: Tensor) -> bool:
    """Whether the layout is one for which torch has fast loops."""
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    return any(rows.is_contiguous(memory_format=f) for f in formats)


def _gather_table(mine: Tensor, group: Any) -> Tensor:
    """[workers, numel]: the tensor of each worker, in the order of ranks."""
    workers = dist.get_world_size(group)
    table = mine.new_empty(workers * mine.numel())
    _all_gather(table, mine, group=group)
    return table.view(workers, -1)


def _sum_rows(table: Tensor) -> Tensor:
    """Sum over rows in tree order, all pairs of a round at once. Overwrites `table`."""
    size = table.size(0)
    for pairs in tree_rounds(size):
        reach = pairs[0][1]
        table[0 : size - reach : 2 * reach] += table[reach :: 2 * reach]
    return table[0]


def _check_enough(rows: Tensor, whole: _Statistics, group: Any) -> bool:
    """Whether there is any value. Raises on all workers if they have one value per channel in total.

    A worker with two values or more knows the answer; only workers with fewer wait for the GPU.
    """
    if rows.numel() // rows.size(1) >= 2:
        return True
    count = int(whole.counts.sum().item())
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got 1 on all {dist.get_world_size(group)} workers "
            f"together (input size {tuple(rows.shape)} on rank {dist.get_rank()}); use a larger batch or eval mode"
        )
    return count > 0


class _Normalise(torch.autograd.Function):
    """Scale and shift by the statistics of the global batch. The gradient includes their dependence on all rows."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor | None, bias: Tensor | None, whole: _Statistics, group: Any
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.whole, ctx.group = whole, group
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _affine(rows, weight, bias, whole) if rows.numel() else torch.empty_like(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        whole: _Statistics = ctx.whole
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        scale = torch.ones_like(whole.mean) if weight is None else weight.to(whole.mean.dtype)
        if grad.stride() != rows.stride():  # expanded, or in another memory format
            grad = torch.empty_like(rows).copy_(grad)
        if rows.numel():
            _, products, plain = torch.ops.aten.native_batch_norm_backward(
                grad, rows, scale, None, None, whole.mean, whole.inverse_std, True, whole.eps, [False, True, True]
            )
        else:
            products, plain = torch.zeros_like(whole.mean), torch.zeros_like(whole.mean)
        grad_rows = None
        if needs_rows:  # collective: equal on all workers, also on one without rows
            totals = _sum_rows(_gather_table(torch.cat([plain, products]), ctx.group)).view(2, -1)
            grad_rows = _gradient(grad, rows, scale, totals, whole) if rows.numel() else grad
        grad_weight = products.to(weight.dtype) if needs_weight else None
        grad_bias = plain.to(ctx.bias_dtype) if needs_bias else None
        return grad_rows, grad_weight, grad_bias, None, None


def _affine(rows: Tensor, weight: Tensor | None, bias: Tensor | None, whole: _Statistics) -> Tensor:
    """weight x + bias in one pass, where x are the normalised rows, as torch does in eval mode."""
    dtype = whole.mean.dtype  # torch allows two dtypes at most: that of the rows and this one
    scale = None if weight is None else weight.to(dtype)
    shift = None if bias is None else bias.to(dtype)
    output: Tensor
    if rows.is_cuda:
        output = torch.batch_norm_elemt(rows, scale, shift, whole.mean, whole.inverse_std, whole.eps)
    else:
        output = torch.native_batch_norm(rows, scale, shift, whole.mean, whole.var, False, 0.0, whole.eps)[0]
    return output


def _gradient(grad: Tensor, rows: Tensor, scale: Tensor, totals: Tensor, whole: _Statistics) -> Tensor:
    """scale / std (grad - mean(grad) - x mean(grad x)), where x are the normalised rows.

    `totals`: the sums of grad and of grad x over the global batch.
    """
    output: Tensor
    if rows.is_cuda:
        products, counts = totals[1] / whole.inverse_std, whole.counts.to(torch.int32)
        output = torch.batch_norm_backward_elemt(
            grad, rows, whole.mean, whole.inverse_std, scale, totals[0], products, counts
        )
        return output
    slope = scale * whole.inverse_std
    mean_grad, mean_product = totals / whole.count
    weight, bias = -slope * mean_product, -slope * mean_grad
    per_channel = slope.view(-1, *[1] * (rows.dim() - 2))
    if rows.dtype == slope.dtype:
        return _affine(rows, weight, bias, whole).addcmul_(grad, per_channel)
    # Low precision is rounded once, at the end. A few rows at a time, so that the wide copies stay in the cache.
    output = torch.empty_like(rows)
    few = max(1, CACHED_NUMEL * torch.get_num_threads() * rows.size(0) // rows.numel())
    pieces = (torch.split(tensor, few) for tensor in (output, rows, grad))
    for piece, part, part_grad in zip(*pieces, strict=True):
        wide = _affine(part.to(slope.dtype), weight, bias, whole)
        piece.copy_(wide.addcmul_(part_grad.to(slope.dtype), per_channel))
    return output


def needs_gpu(module: nn.Module) -> bool:
    """Whether the module contains torch's own SyncBatchNorm, which works on GPUs only."""
    return any(isinstance(m, nn.SyncBatchNorm) and not isinstance(m, SyncBatchNorm) for m in module.modules())


def _allow_in_torch_ddp() -> None:
    """Make torch's wrapper accept our SyncBatchNorm on a CPU; it rejects every subclass of torch's."""

    def refuse_torch_only(refuse: Any) -> Any:
        return lambda wrapper, module: refuse(wrapper, module) if needs_gpu(module) else None

    _torch.wrap_sync_batchnorm_check(refuse_torch_only)


_allow_in_torch_ddp()
