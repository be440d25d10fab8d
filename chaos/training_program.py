"""What the workers of a training campaign run: a small program such as a user writes, with an ear for the driver.

In its folder it finds `control`, what the driver wants now, and leaves: `lives/PID`, that it is there; `names/PID`,
which worker it is; `traces/PID`, a line for every place it came by; `claims/N`, that it is the one to be hit by order
N; `ends/PID`, what it has computed.

    python chaos/training_program.py --reference mlp:0:fp32 gpt:1:int8       what an undisturbed world of one computes
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep import faults
from lockstep.comm.abortable_group import share_gpu_over_nccl
from lockstep.elastic import agent_client
from lockstep.step import grad_comm_tuner, shard_balance
from lockstep.trace.metrics import Mean
from lockstep.train import loss_comparison
from training_life import is_alive
from training_plan import ALL, EPOCHS, STACKS, Who

SHARDS, BATCH, STEPS_PER_EPOCH = 8, 24, 12
THREADS = 1
CAPTURED = ("mlp", "cnn", "gpt", "tiny", "target", "rate", "plateau")  # as CUDA graphs, on a GPU


# ------------------------------------------------------------------------------------------------------------ programs


@dataclass(frozen=True)
class Variant:
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    inputs: Callable[[int, torch.Generator], Tensor]
    last_batch: int  # samples in the last batch of an epoch
    body: type[Body] | None = None  # what the program does itself around each step
    second: Callable[[nn.Module], torch.optim.Optimizer] | None = None  # takes steps, too, with some of the batches


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.relu(self.norm(self.first(x))).mean((2, 3)))
        return out


class Gpt(nn.Module):
    """One block: dropout in it, and a table of embeddings."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, width), nn.Embedding(10, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.2, batch_first=True, norm_first=True)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(10, device=x.device)
        out: Tensor = self.last(self.block(hidden, src_mask=mask)[:, -1])
        return out


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


class Body:
    """What a program does itself in the body of its loop, around `run.step`: this one does nothing."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.scale = model, optimizer, 1.0  # of the inputs

    def registered(self) -> dict[str, Any]:
        """What belongs to the state of the run, and is neither in the model nor in the optimiser."""
        return {}

    def before(self, step: int) -> None:
        pass

    def after(self, step: int, loss: float) -> None:
        pass

    def state(self) -> str:
        return ""


class Average(Body):
    """Keeps an average of the weights over the steps."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def registered(self) -> dict[str, Any]:
        return {"average": self}

    @torch.no_grad()
    def after(self, step: int, loss: float) -> None:
        for name, parameter in self.model.named_parameters():
            self.values[name].lerp_(parameter, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.values[name].copy_(value)

    def state(self) -> str:
        return hashlib.sha256(b"".join(v.cpu().numpy().tobytes() for v in self.values.values())).hexdigest()


class Twin(nn.Module):
    """A network that is trained, and its target, which the program moves after it."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = _mlp(), _mlp()
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.online(x) + 0.1 * self.target(x)
        return out


class MovesTarget(Body):
    """Moves the target after each step, and copies the network to it before every seventh."""

    def _move(self, share: float) -> None:
        assert isinstance(self.model, Twin)
        with torch.no_grad():
            for mine, its in zip(self.model.target.parameters(), self.model.online.parameters(), strict=True):
                mine.lerp_(its, share)

    def before(self, step: int) -> None:
        if step % 7 == 0:
            self._move(1.0)

    def after(self, step: int, loss: float) -> None:
        self._move(0.05)


class SetsRate(Body):
    """Changes the learning rate by hand: before some steps, and after each."""

    def before(self, step: int) -> None:
        if step % 5 == 0:
            self._multiply(0.9)

    def after(self, step: int, loss: float) -> None:
        self._multiply(1.02)

    def _multiply(self, by: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= by


class Plateau(Body):
    """Steps a scheduler that follows the loss."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.95, patience=1)

    def registered(self) -> dict[str, Any]:
        return {"plateau": self.plateau}

    def after(self, step: int, loss: float) -> None:
        self.plateau.step(loss)

    def state(self) -> str:
        return f"{self.plateau.best} {self.plateau.num_bad_epochs}"


class Draws(Body):
    """Draws random numbers between the steps, as mixup does."""

    def before(self, step: int) -> None:
        self.scale = 0.5 + random.random() / 2 + float(torch.rand(())) / 4

    def after(self, step: int, loss: float) -> None:
        random.random()


class Pair(nn.Module):
    """Two networks, each of which has its own optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = _mlp(), nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(x) - self.other(x)
        return out


class Half(nn.Module):
    """Weights in bfloat16; the optimiser has float32 copies of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _mlp().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.bfloat16()).float()
        return out


VARIANTS = {
    "mlp": Variant(_mlp, _momentum, lambda n, dice: torch.randn(n, 12, generator=dice), last_batch=17),
    "cnn": Variant(Cnn, _momentum, lambda n, dice: torch.randn(n, 1, 8, 8, generator=dice), last_batch=19),
    "gpt": Variant(Gpt, _adamw, lambda n, dice: torch.randint(32, (n, 10), generator=dice), last_batch=9, body=Average),
    "target": Variant(
        Twin, _momentum, lambda n, dice: torch.randn(n, 12, generator=dice), last_batch=17, body=MovesTarget
    ),
    "rate": Variant(_mlp, _adamw, lambda n, dice: torch.randn(n, 12, generator=dice), last_batch=17, body=SetsRate),
    "plateau": Variant(
        _mlp, _momentum, lambda n, dice: torch.randn(n, 12, generator=dice), last_batch=17, body=Plateau
    ),
    "draws": Variant(_mlp, _adamw, lambda n, dice: torch.randn(n, 12, generator=dice), last_batch=17, body=Draws),
    "pair": Variant(
        Pair,
        lambda model: torch.optim.AdamW(model.one.parameters(), lr=3e-3),
        lambda n, dice: torch.randn(n, 12, generator=dice),
        last_batch=17,
        body=Average,
        second=lambda model: torch.optim.SGD(model.other.parameters(), lr=0.05, momentum=0.9),
    ),
    "half": Variant(Half, _adamw, lambda n, dice: torch.randn(n, 12, generator=dice), last_batch=17),
    # Fewer samples than shards in the last batch: some shards are empty.
    "tiny": Variant(
        lambda: nn.Linear(5, 4), _momentum, lambda n, dice: torch.randn(n, 5, generator=dice), last_batch=5
    ),
}


class Samples(torch.utils.data.TensorDataset):
    def __getitem__(self, index: int) -> Any:
        # In a loader process torch has put a handler of its own in the place of any other, which tells nothing.
        if torch.utils.data.get_worker_info() is not None and not faulthandler.is_enabled():
            faulthandler.enable()
        return tuple(tensor[index] for tensor in self.tensors)


def train(chosen: argparse.Namespace, name: str, seed: int, ear: Ear | None) -> dict[str, Any]:
    """What every worker that comes to the end must have found, bit by bit."""
    variant, losses, figures = VARIANTS[name], dict[int, str](), dict[int, str]()
    dice = torch.Generator().manual_seed(seed)
    samples = BATCH * (STEPS_PER_EPOCH - 1) + variant.last_batch
    data = Samples(variant.inputs(samples, dice), torch.randint(4, (samples,), generator=dice))

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x if body.scale == 1.0 else x * body.scale), y, reduction="sum"), len(y)

    def correct(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        return (model(x).argmax(1) == y).sum(), len(y)

    if chosen.backend == "nccl":
        share_gpu_over_nccl(os.getpid())
    directory = chosen.folder / "run" if chosen.folder is not None else None
    if seed % 2:  # shards are assigned anew all the time, by the noise of the times
        shard_balance.WINDOW, shard_balance.LEAST_GAIN, shard_balance.LEAST_GAIN_S = 3, 0.0, 0.0
    options: dict[str, Any] = {"threads": THREADS, "progress": False, "check_every": 4, "backend": chosen.backend}
    options["grad_comm"] = chosen.grad_comm
    grad_comm_tuner.MEASURED_EVERY = 3  # errors by rounding
    small = {"powersgd": {"powersgd_rank": 1}, "topk": {"topk_ratio": 0.05}}  # as the models
    if chosen.grad_comm in small:
        options |= small[chosen.grad_comm]
        grad_comm_tuner.COMPARISON, loss_comparison.STEPS, loss_comparison.COUNTED = 10, 6, 3
        grad_comm_tuner.REPEATED = 2  # before steps 10, 20 and so on
        loss_comparison.LARGEST_HARM, loss_comparison.LEAST_MOVED = math.inf, -math.inf  # it is always used then
    if chosen.sharded:
        options |= {"shard_optimizer": True, "redundancy": 1}
        if chosen.backend == "gloo":  # each worker counts as a host, so gradients are reduce-scattered
            os.environ["LOCKSTEP_HOST"] = f"that of process {os.getpid()}"
    if name == "half":
        options |= {"shard_optimizer": True, "redundancy": 1, "master_weights": True}
    if chosen.device == "cuda":  # the other programs cannot be captured
        options |= {"device": "cuda:0", "capture": True if name in CAPTURED else "auto"}
    with lockstep.Run(directory, seed=seed, save_every=chosen.save_every, **options) as run:
        model = run.replicate(variant.model())
        optimizer = variant.optimizer(model)
        body = (variant.body or Body)(model, optimizer)
        run.register_state(**body.registered())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS_PER_EPOCH * EPOCHS)
        batches = run.batches(
            data, global_batch_size=BATCH, shards=SHARDS, epochs=chosen.epochs or EPOCHS, num_workers=chosen.num_workers
        )
        second = [] if variant.second is None else [variant.second(model)]
        for batch in run.train(batches, optimizer, *second, scheduler=schedule, steps=chosen.steps):
            if ear is not None:
                ear.begins(batch.number, run)
            body.before(batch.number)
            result = run.step(loss, batch, optimizer=optimizer)
            losses[batch.number] = result.loss.hex()
            for one in second if batch.number % 3 else []:
                losses[batch.number] += run.step(loss, batch, optimizer=one).loss.hex()
            body.after(batch.number, result.loss)
            if batch.ends_epoch:
                mean = run.evaluate(correct, data, batch_size=50)
                assert isinstance(mean, Mean)
                figures[batch.number] = run.log(accuracy=float(mean))["accuracy"].hex()
        rates = [float(group["lr"]).hex() for group in optimizer.param_groups]
        found: dict[str, Any] = {"digest": run.digest(), "body": [body.state(), *rates]}
        found |= {"losses": losses, "figures": figures, "steps": batches.position.number}
        if chosen.device == "cuda":
            found["gpu_bytes"] = torch.cuda.memory_reserved()
        if ear is not None:
            if chosen.backend == "nccl":
                found["gpu_process_mib"], found["generations"] = gpu_process_mib(), len(ear.generations)
            ear.ends(found)
    return found


def gpu_process_mib() -> int:
    """Returns the memory of the GPU that this process holds, with that of NCCL's communicators; 0 if unknown."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError):
        told = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        by_pid = dict(line.split(", ") for line in told.splitlines() if line.count(", ") == 1)
        return int(by_pid.get(str(os.getpid()), 0))
    return 0


# ------------------------------------------------------------------------------------------------------------- the ear


class Ear:
    """Hears what the driver wants, does it to itself, and writes down where this worker has been."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pid = folder, os.getpid()
        self._step, self._computing, self._first = -1, (-1, -1), -1
        self._order_seen, self._hits = -1, 0
        self.generations: set[int] = set()  # those in which this worker got a batch
        (folder / "lives" / str(self._pid)).write_text(os.environ.get("MASTER_PORT", ""))
        self._trace = os.open(folder / "traces" / str(self._pid), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._agent = agent_client.current()
        faults.hook = self.comes_by

    @property
    def _generation(self) -> int:
        return self._agent.generation if self._agent is not None else 0

    def _mark(self, place: str, step: int) -> None:
        line = f"{time.monotonic_ns()} {self._generation} {faults.context.get('rank', -1)} {step} {place}\n"
        os.write(self._trace, line.encode())

    def begins(self, step: int, run: lockstep.Run) -> None:
        """A batch was handed out."""
        self._step = step
        self._mark("batch", step)
        self.generations.add(self._generation)
        control = self._control()
        if control.get("stop"):
            run.stop()
        time.sleep(control["pace_s"])

    def _computes(self) -> None:
        """Once for every time that a step is computed, by this worker in this generation."""
        if self._computing != (self._generation, self._step):
            self._computing = (self._generation, self._step)
            self._mark("loss", self._step)

    def ends(self, found: dict[str, Any]) -> None:
        path = self._folder / "ends" / str(self._pid)
        path.with_suffix(".part").write_text(json.dumps(found))
        path.with_suffix(".part").rename(path)

    def comes_by(self, place: str) -> None:
        """Called by the library at every named place, also by the thread that writes checkpoints."""
        if self._first < 0 < self._generation:
            self._first = self._generation
            (self._folder / "names" / str(self._pid)).write_text(str(faults.context["worker"]))
        self._mark(place, faults.context.get("step", -1))
        if place == "forward":
            self._computes()
        order = self._control().get("order")
        if order is None or order["place"] != place or not self._is_meant(Who(order["who"])):
            return
        if self._order_seen != order["id"]:
            self._order_seen, self._hits = order["id"], 0
        self._hits += 1
        if self._hits == order["nth"]:
            self._obey(order)

    def _control(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._folder / "control").read_bytes())
        return found

    def _is_meant(self, who: Who) -> bool:
        rank = faults.context.get("rank")
        match who:
            case Who.FIRST:
                return rank == 0
            case Who.OTHER:
                return rank != 0
            case Who.NEWCOMER:
                return self._generation == self._first  # the first generation that it is in, or none yet
        return True

    def _obey(self, order: dict[str, Any]) -> None:
        victims = [*self._others(order["also"]), self._pid]
        claim = {"at_s": time.monotonic(), "pids": victims, "place": order["place"], "step": faults.context.get("step")}
        path = self._folder / "claims" / str(order["id"])
        draft = path.with_name(f"{order['id']}.{self._pid}")
        draft.write_text(json.dumps(claim))
        try:
            os.link(draft, path)  # one worker gets it, and it is whole from the first moment on
        except FileExistsError:
            draft.unlink()
            return
        draft.unlink()
        for pid in victims:
            assert pid > 1  # 0 would be a whole group
            with suppress(ProcessLookupError):
                os.kill(pid, order["signal"])
        time.sleep(0.2)  # it reaches us somewhere in here; one that was stopped wakes up here

    def _others(self, count: int) -> list[int]:
        alive = [int(path.name) for path in (self._folder / "lives").iterdir() if is_alive(path.name)]
        others = sorted(pid for pid in alive if pid != self._pid)
        return others if count == ALL else others[:count]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--variant", default="mlp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--grad-comm", default="fp32")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--reference", nargs="*", metavar="VARIANT:SEED:GRAD_COMM")
    chosen = parser.parse_args()
    if chosen.reference is not None:
        for one in chosen.reference:
            name, seed, chosen.grad_comm = one.split(":")
            print(json.dumps([one, train(chosen, name, int(seed), None)]), flush=True)
        return 0
    with (chosen.folder / "stacks" / str(os.getpid())).open("w") as stacks:
        faulthandler.register(STACKS, file=stacks, all_threads=True)
        torch._C._set_print_stack_traces_on_fatal_signal(True)  # those of NCCL and CUDA, too
        train(chosen, chosen.variant, chosen.seed, Ear(chosen.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
