"""Half precision: autocast, and the loss scale that keeps float16 gradients from underflowing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Precision(Enum):
    """The dtype of the forward pass. Parameters, and the sums of their gradients, keep their own."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.value]

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self is Precision.FP32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)


@dataclass
class LossScale:
    """A loss scale that grows while gradients are finite and halves when they are not; always a power of two.

    It depends on the sums of the gradients over all workers, so it is equal on all of them.
    """

    value: float = 1.0
    grows_after: int | None = None  # steps without overflow; None: it does not change
    good_steps: int = 0

    @staticmethod
    def for_precision(precision: Precision) -> LossScale:
        return LossScale(2.0**16, grows_after=2000) if precision is Precision.FP16 else LossScale()

    @property
    def is_dynamic(self) -> bool:
        return self.grows_after is not None

    @property
    def may_be_too_large(self) -> bool:
        """Whether gradients may be non-finite because of the scale, so that the next step tries a smaller one."""
        return self.is_dynamic and self.value > 1.0

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.value if self.is_dynamic else loss

    def update(self, *, finite: bool) -> None:
        if self.grows_after is None:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps == self.grows_after:
            self.value, self.good_steps = self.value * 2, 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
