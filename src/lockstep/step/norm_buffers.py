"""The buffers of all ordinary batch norm layers of a model, which are saved and restored together.

A model has some hundred of these buffers, of a few numbers each. Handled one by one, after every shard, they would take
a large part of a small step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_, ne
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep import _torch
from lockstep._torch import BatchNormBase

COUNTER: Final = "num_batches_tracked"
_GET: Final[Any] = dict.get


@dataclass(frozen=True)
class NormValues:
    """Copies of the values of these buffers."""

    averages: Tensor  # [element], of all running averages
    counters: Tensor  # [layer]
    sizes: Sequence[int]  # number of elements of each running average

    def split(self) -> list[Tensor]:
        """Return views of the values, one for each buffer."""
        return [*self.averages.split(self.sizes), *self.counters.unbind()]  # type: ignore[no-untyped-call]


def is_ordinary(module: nn.Module, like: Tensor) -> bool:
    """Whether this is a batch norm layer with three plain buffers, on the device and with averages in the dtype of
    `like`."""
    if not isinstance(module, BatchNormBase):
        return False
    kinds = {"running_mean": (like.dtype, 1), "running_var": (like.dtype, 1), COUNTER: (torch.int64, 0)}
    found = {key: module._buffers.get(key) for key in kinds}
    return all(
        type(one) is Tensor
        and (one.dtype, one.dim()) == kinds[key]
        and one.device == like.device
        and one.is_contiguous()
        for key, one in found.items()
    )


@final
class NormBuffers:
    """Buffers of batch norm layers, and what they were when they were captured last.

    Valid while `is_intact()` returns True. In all lists the running averages come first, and then the counters.
    """

    def __init__(self, averages: Sequence[tuple[nn.Module, str]], counters: Sequence[nn.Module]) -> None:
        """Capture these buffers: `averages` are (layer, key), `counters` the layers that have them."""
        entries = [*averages, *((layer, COUNTER) for layer in counters)]
        self._buffers: list[dict[str, Tensor | None]] = [layer._buffers for layer, _ in entries]
        self._keys = [key for _, key in entries]
        self.tensors: list[Tensor] = [layer._buffers[key] for layer, key in entries]  # type: ignore[misc]
        numbers = {id(layer): n for n, layer in enumerate(counters, len(averages))}
        self._counter_of = [numbers[id(layer)] for layer, _ in entries]
        self._averages, self._counters = self.tensors[: len(averages)], self.tensors[len(averages) :]
        self._sizes = [tensor.numel() for tensor in self._averages]
        self._shapes = self._shapes_now()
        self.all_written, self._none_written = [True] * len(entries), [False] * len(entries)
        self._saved = self.values()
        self.saved = self._saved.split()
        self._set_versions()

    def _set_versions(self) -> None:
        self.versions = self._versions_now()  # when the buffers were captured or restored last
        self._are_all_written = False  # since then

    def counter_version(self, n: int) -> int:
        """Return the version of the counter of the layer of buffer `n`, when that was captured or restored last."""
        return self.versions[self._counter_of[n]]

    def _versions_now(self) -> list[int]:
        return [tensor._version for tensor in self.tensors]

    def _shapes_now(self) -> list[torch.Size]:
        return [tensor.shape for tensor in self.tensors]

    def is_intact(self) -> bool:
        """Whether the layers still have these tensors."""
        return all(map(is_, map(_GET, self._buffers, self._keys), self.tensors))

    def values(self, counters: Tensor | None = None) -> NormValues:
        """Return copies of the values; `counters` in the place of those of the counters, if they are not needed."""
        counters = torch.stack(self._counters) if counters is None else counters
        return NormValues(torch.cat(self._averages), counters, self._sizes)

    def are_written(self) -> list[bool]:
        """Return for each buffer whether it was written since it was captured or restored; or `all_written`.

        The kernels of batch norm do not count their writes to the running averages, but the layer counts its batches.
        """
        if self._are_all_written:
            return self.all_written
        now = self._versions_now()
        if now == self.versions:
            return self._none_written
        differ = list(map(ne, now, self.versions))
        self._are_all_written = all(differ[len(self._averages) :])
        if self._are_all_written:
            return self.all_written
        return [own or differ[n] for own, n in zip(differ, self._counter_of, strict=True)]

    def capture(self) -> bool:
        """Keep the values as they are now. Returns False, and does nothing, if shapes, dtype or device are others."""
        if self._versions_now() == self.versions:
            return True
        if self._shapes_now() != self._shapes:
            return False
        now, saved = self.values(), self._saved
        if (now.averages.dtype, now.averages.device) != (saved.averages.dtype, saved.averages.device):
            return False
        saved.averages.copy_(now.averages)
        saved.counters.copy_(now.counters)
        self._set_versions()
        return True

    def restore(self, which: Sequence[bool]) -> None:
        """Write the captured values into some of the buffers."""
        tensors, saved = self.tensors, self.saved
        if which is not self.all_written:
            chosen = [n for n, is_chosen in enumerate(which) if is_chosen]
            tensors, saved = [tensors[n] for n in chosen], [saved[n] for n in chosen]
        if tensors:
            _torch.foreach_copy_(tensors, saved)
            self._set_versions()
