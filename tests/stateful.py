"""Models whose forward passes change, make or grow buffers, and optimisers whose state torch casts when it loads it.

Each is a part of one model, so that one run tries them all. Used by test_stateful.py and its programs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.ddp.replica import named_state, sha256_of

WIDTH, CLASSES, SAMPLES, BATCH = 16, 10, 100, 32  # the last batch of an epoch has 4 samples for 8 shards
FAR = 2**53  # whole numbers from here on are not all float64


def lengths_of(x: Tensor) -> int:
    """Another one for every shard: it depends on the samples."""
    return 2 + int(x.abs().sum() * 7) % 14


# ---- buffers that training changes -----------------------------------------------------------------------------------


class Rotary(nn.Module):
    """A table that grows with the sequences, with its length in a number beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 2
        self.register_buffer("table", torch.ones(2, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = lengths_of(x)
        if length > self.length:
            self.length = length
            rows = torch.arange(length, device=x.device)[:, None] / (1 + torch.arange(WIDTH, device=x.device))
            self.register_buffer("table", torch.cos(rows) + x.detach().mean(), persistent=False)
        return x * self.table[length - 1]


class Observer(nn.Module):
    """Smallest values of each channel, as quantisation has them: empty, until it is resized in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))

    def forward(self, x: Tensor) -> Tensor:
        low = x.detach().amin(0)
        if self.low.numel() == 0:
            self.low.resize_(low.shape)
            self.low.copy_(low)
        else:
            self.low.copy_(torch.minimum(self.low, low))
        return x - self.low


class Bank(nn.Module):
    """A memory of past samples: None at first, then another shape in each step until it is full."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", None)

    def forward(self, x: Tensor) -> Tensor:
        new = x.detach()[: 1 + lengths_of(x) % 3]
        self.rows = new.clone() if self.rows is None else torch.cat([new, self.rows])[:9]
        return x + self.rows.mean(0)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        self.phase = self.phase * torch.polar(torch.ones_like(x[0, :3]), x.detach()[0, :3])
        return x + self.phase.imag.sum()


class Counters(nn.Module):
    """Whole numbers that float64 does not hold, flags and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("many", torch.tensor([FAR, -FAR]))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("small", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("brief", torch.zeros(3, dtype=torch.bfloat16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.many += 1
        self.flags[lengths_of(x) % 5] = True
        self.small += 100
        self.brief.add_(x.detach()[0, :3].bfloat16())
        return x * (1 + self.flags.float().mean())


class LazyMask(nn.Module):
    """Buffers that come into being in the first forward pass, one of them in the state dict."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.arange(WIDTH, device=x.device) + x.detach()[0], persistent=True)
            self.register_buffer("shadow", x.detach().mean(0), persistent=False)
        self.shadow.lerp_(x.detach().mean(0), 0.1)
        return x * self.mask.tanh() + self.shadow


class Silent(nn.Module):
    """Written through `.data`, which torch does not count; and not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            self.center.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.center


class OwnNorm(nn.Module):
    """A batch norm that torch's kernels write to, in a class of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("running_var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        F.batch_norm(torch.cat([x, x + 1]).detach(), self.running_mean, self.running_var, training=self.training)
        return x - self.running_mean


class Zoo(nn.Module):
    """All of them, in a row, with weights in three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.rotary, self.observer, self.bank, self.complex = Rotary(), Observer(), Bank(), Complex()
        self.counters, self.lazy, self.silent, self.own = Counters(), LazyMask(), Silent(), OwnNorm()
        self.wide = nn.Linear(WIDTH, WIDTH).double()
        self.narrow = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) if len(x) > 1 else x
        for part in (self.rotary, self.observer, self.bank, self.complex, self.counters, self.lazy, self.silent):
            x = part(x).tanh()
        x = self.wide(self.own(x).double()).float()
        return self.out(self.narrow(x.bfloat16()).float())


# ---- optimisers whose state has another dtype than the parameter -----------------------------------------------------


class Masters(torch.optim.Optimizer):
    """Keeps a float64 copy of every weight, which is what is trained."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    copies = self.state[p].setdefault(
                        "copies", [p.to(torch.float64, copy=True), torch.ones((), dtype=torch.float16)]
                    )
                    copies[0].sub_(p.grad.double(), alpha=group["lr"])
                    copies[1].mul_(0.9)
                    p.copy_(copies[0] * copies[1].double())


class Tracker(nn.Module):
    """Registered by the program, which changes it in the loop: a buffer that no state dict has, and an optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.register_buffer("mean", None, persistent=False)
        self.offset = nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))
        self.optimizer = torch.optim.NAdam([self.offset], lr=0.01)

    @torch.no_grad()
    def follow(self, bias: Tensor) -> None:
        self.steps += 1
        self.mean = bias.clone() if self.mean is None else self.mean.lerp(bias, 0.1) * self.steps
        self.offset.grad = bias.double() - self.offset
        self.optimizer.step()


OPTIMIZERS = {
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=3e-3),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.02, t0=2),
    "masters": lambda parameters: Masters(parameters, lr=0.02),
}


def loss_of(model: Any, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def train(
    name: str,
    *,
    directory: Path | None = None,
    steps: int | None = None,
    device: str = "cpu",
    before_step: Any = lambda run: None,
) -> dict[str, Any]:
    """Digests of the parts of the model, of the optimiser and of all; the loss; and a figure of an evaluation."""
    with lockstep.Run(directory, seed=3, progress=False, check_every=1, trace=False, device=device) as run:
        model = run.replicate(Zoo())
        optimizer = OPTIMIZERS[name](model.parameters())
        tracker = Tracker().to(run.device)
        run.register_state(tracker=tracker, tracked=tracker.optimizer)
        ends, loss = False, float("nan")
        for batch in run.train(
            run.batches(data(), global_batch_size=BATCH, shards=8, epochs=2), optimizer, steps=steps
        ):
            before_step(run)
            loss = run.step(loss_of, batch).loss
            tracker.follow(model.out.bias)
            ends = batch.ends_epoch
        state = named_state(model, optimizer)
        found = {part: _part(state, part) for part, _ in model.named_children()}
        found |= {"optimizer": sha256_of({k: v for k, v in state.items() if " of " in k}), "all": run.digest()}
        found["tracker"] = sha256_of(named_state(tracker, tracker.optimizer))
        figure = run.evaluate(loss_of, data(), batch_size=7)
        assert run.digest() == found["all"], "an evaluation has changed the state"
        return found | {"loss": loss, "figure": float(figure), "many": model.counters.many.tolist(), "ends": ends}


def _part(state: dict[str, Tensor], part: str) -> str:
    return sha256_of({name: tensor for name, tensor in state.items() if name.startswith(f"{part}.")})


if __name__ == "__main__":
    import time

    def wait_until_whole(run: Any) -> None:
        """The worker that was lost is replaced before the next step, so that it takes part in the rest."""
        end_s = time.monotonic() + 30
        while str(run.world.size) != os.environ["WHOLE"] and time.monotonic() < end_s:
            if run._session.calls.wants_to_move:
                return
            time.sleep(0.005)

    result = train(os.environ["OPTIMIZER"], before_step=wait_until_whole)
    print("digest", " ".join(f"{name}={value}".replace(" ", "") for name, value in result.items()), flush=True)
