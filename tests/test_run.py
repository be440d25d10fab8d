"""`lockstep.Run` on real workers: figures, things done once, stopping and going on, precision, what it leaves behind.

Starting workers is what takes time. So every world plays all scenes one after the other, and each test looks at one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import lockstep
from lockstep.data.ledger import prove
from lockstep.launcher.exit_policy import PREEMPTED
from lockstep.launcher.job import reserve_port
from lockstep.recovery import run_on_one
from lockstep.seed import seed_all
from lockstep.step import determinism
from on_workers import Failure, on_workers, run_program, try_on_workers
from runs import PROGRAMS, Program, adamw, classify, data, mlp, sgd, train, use
from test_launch import wait_for

WORLDS = [1, 2, 3, 4]
SAMPLES = 1797


def quiet(directory: Path | None = None, **options: Any) -> lockstep.Run:
    return lockstep.Run(directory, **({"seed": 7, "progress": False, "device": "cpu"} | options))


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[n] for n in range(len(self.dataset)))


def form(backend: str, store: Path, rank: int, size: int) -> None:
    """Another process group, from now on."""
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.FileStore(str(store), size), rank=rank, world_size=size)


# ---- the scenes: (rank, size, folder) -> what the tests want to see ----------------------------------------------


def correct(model: Any, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return (model(x).argmax(1) == y).sum(), len(y)


def many_figures(model: Any, batch: Any) -> dict[str, Any]:
    x, y = batch
    assert not model.training
    loss = F.cross_entropy(model(x), y, reduction="none")
    return {"loss": (loss.sum(), len(y)), "worst": (float(loss.max()), 1), "accuracy": correct(model, batch)}


def noisy(model: Any, batch: Tensor) -> tuple[float, int]:
    """Draws random numbers, as when text is sampled."""
    return float(batch.sum()) + random.random() + float(torch.rand(())), len(batch)


class Augmented(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(()) * index


def evaluate(rank: int, size: int, folder: Path) -> Any:
    found: dict[str, Any] = {}
    with quiet() as run:
        model = run.replicate(nn.Sequential(mlp(), nn.Dropout(0.5), nn.BatchNorm1d(10)))
        model[2].eval()
        for batch in (64, 100, SAMPLES, 5000):
            found[f"accuracy in {batch}"] = run.evaluate(correct, data(SAMPLES), batch_size=batch)
        found |= {f"many: {k}": v for k, v in run.evaluate(many_figures, data(SAMPLES), batch_size=100).items()}
        found["stream"] = run.evaluate(correct, Stream(data(SAMPLES)), batch_size=100)
        found["list"] = run.evaluate(correct, [data(SAMPLES)[n] for n in range(30)], batch_size=4)
        found["three samples"] = run.evaluate(many_figures, data(3), batch_size=1)["accuracy"]
        found["noisy"] = run.evaluate(noisy, Augmented(), batch_size=100)
        found["noisy stream"] = run.evaluate(noisy, Stream(Augmented()), batch_size=100)
        found["one stream sample"] = run.evaluate(correct, Stream(data(1)), batch_size=1)
        found["bf16"] = 0.0
        assert [module.training for module in model] == [True, True, False]
    with quiet(precision="bf16") as run:
        run.replicate(mlp())
        found["bf16"] = run.evaluate(many_figures, data(SAMPLES), batch_size=100)["loss"]
    return {name: (float(mean), mean.sum, mean.weight) for name, mean in found.items()}


def log(rank: int, size: int, folder: Path) -> Any:
    tenth = 0.1 + rank * 0
    with quiet(folder, device="cpu" if rank % 2 else torch.device("cpu")) as run:  # each may have its own
        first = run.log(same=tenth, third=1 / 3, many=(2.0**53 + 2, 1), tensor=torch.tensor(0.1), whole=3)
        parts = run.log(accuracy=(float(rank + 1), 10.0 * (rank + 1)), mine=rank, tiny=(1e-300, 1), nothing=(0, 0))
        model = run.replicate(mlp())
        for batch in run.train(
            run.batches(data(64), global_batch_size=32, shards=8, epochs=1), sgd(model.parameters())
        ):
            run.log(loss=run.step(classify, batch).loss)
    return first, repr(parts), (folder / "metrics.jsonl").read_text()


def do_once(rank: int, size: int, folder: Path) -> Any:
    last, done = size - 1, folder / "done"
    found: dict[str, Any] = {}

    def note() -> dict[str, Any]:
        time.sleep(0.2)
        with done.open("a") as file:
            file.write("x")
        return {"a": (1, 2.5), "b": None}

    with quiet() as run:
        found["value"] = run.on_main(note)
        found["times"] = done.read_text()
        found["on the last"] = run.on_main(lambda: rank, rank=last)
        for name, call in {
            "error": lambda: [][3],
            "no json": lambda: torch.ones(2),
            "json inside": lambda: json.dumps(object()),
        }.items():
            found[name] = error_of(lambda call=call: run.on_main(call, rank=last))
        found["no such rank"] = error_of(lambda: run.on_main(note, rank=size))
    # Another run must not find the answers of this one.
    with quiet() as run:
        found["another run"] = run.on_main(lambda: (time.sleep(0.1), "new")[1])
    return found


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def stop(rank: int, size: int, folder: Path) -> Any:
    """One worker asks; all end after the same step, and a checkpoint is there."""
    seen: list[int] = []
    with quiet(folder) as run:  # what the program itself asks for does not end it with a status
        model = run.replicate(mlp())
        for batch in run.train(
            run.batches(data(100), global_batch_size=32, shards=8, epochs=2), adamw(model.parameters())
        ):
            assert not run.should_stop
            if batch.number == 2 and rank == size - 1:
                run.stop()
            result = run.step(classify, batch)
            seen.append(batch.number)
        by, should_stop = result.stop_asked_by, run.should_stop
        saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    digest, _ = train(Program(mlp, adamw), directory=folder)  # goes on
    return {"seen": seen, "by": by, "should_stop": should_stop, "saved": saved, "digest": digest}


def saving(rank: int, size: int, folder: Path) -> Any:
    """When checkpoints are written, and what is in the state dict of a replicated model."""

    def saved(below: str) -> list[int]:
        """A name of something half written would be an error here."""
        return sorted(int(path.name.removeprefix("step-")) for path in folder.glob(f"{below}/checkpoints/*"))

    found = {}
    for name, every in {"steps": 3, "no time": "0.001s", "long": "9h"}.items():
        with quiet(folder / name, save_every=every) as run:
            model = run.replicate(mlp())
            batches = run.batches(data(100), global_batch_size=32, shards=8, epochs=2)
            steps = []
            for batch in run.train(batches, sgd(model.parameters())):
                run.on_main(run._session.checkpoints.saver.drain)  # they are written in the background
                steps.append(saved(name))
                run.step(classify, batch)
            after_track = saved(name)  # nothing has waited here but `train`
        found[name] = {"before each step": steps, "in the end": after_track}
        assert saved(name) == after_track
    return found | {"keys": list(model.state_dict()) == list(mlp().state_dict())}


def with_schedule(folder: Path | None, *, stop_at: int | None = None, **options: Any) -> tuple[str, float]:
    """What a checkpoint has to hold: momentum, running averages, the loss scale, and the place in the schedule."""
    with quiet(folder, precision="fp16", **options) as run:
        model = run.replicate(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Linear(32, 10)))
        optimizer = adamw(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=8)
        batches = run.batches(data(128), global_batch_size=32, shards=8, epochs=2)
        scaling = lockstep.LRScaling(base_batch=16, warmup_steps=4)
        for batch in run.train(batches, optimizer, scheduler=schedule, scaling=scaling):
            if batch.number + 1 == stop_at:
                run.stop()
            run.step(classify, batch)
        return run.digest(), float(schedule.get_last_lr()[0])


def resume(rank: int, size: int, folder: Path) -> Any:
    undisturbed = with_schedule(None)
    for stop_at in (3, 4, 7):  # inside an epoch, at its end, inside the next
        with_schedule(folder, stop_at=stop_at)
    return undisturbed, with_schedule(folder), with_schedule(folder)  # the last finds it done


def skipped_epoch_end(rank: int, size: int, folder: Path) -> Any:
    """A schedule that counts epochs counts those whose last batch was skipped, too."""
    rates = []
    with quiet(on_nonfinite="skip") as run:
        model = run.replicate(mlp())
        optimizer = sgd(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        batches = run.batches(data(64), global_batch_size=32, shards=8, epochs=3)
        for batch in run.train(batches, optimizer, scheduler=schedule, interval="epoch"):
            bad = math.nan if batch.number in (1, 2) else 1.0
            run.step(lambda model, data, bad=bad: (classify(model, data)[0] * bad, len(data[1])), batch)
            rates.append(optimizer.param_groups[0]["lr"])
    return rates


def overflow(rank: int, size: int, folder: Path) -> Any:
    """The loss is finite, and its gradient too large for float16 at first: all skip, and the scale halves."""
    results, scales = [], []
    with quiet(precision="fp16") as run:
        model = run.replicate(nn.Linear(16, 10))
        batches = run.batches(data(96), global_batch_size=32, shards=8, epochs=4)

        def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
            x, y = batch
            out = model(x)
            assert out.dtype is torch.float16
            return F.cross_entropy(out.float(), y, reduction="sum"), len(y)

        for batch in run.train(batches, sgd(model.parameters())):
            result = run.step(loss, batch)
            results.append((result.skipped, result.loss))
            scales.append(run._loop.state.context.loss_scale.value)
        return {"results": results, "scales": scales, "digest": run.digest()}


def precision(rank: int, size: int, folder: Path) -> Any:
    wide = train(PROGRAMS["mlp, momentum, uneven last batch"])
    found = {"fp32": wide}
    for options in (
        {"grad_comm_dtype": "bf16"},
        {"grad_comm_dtype": "fp16"},
        {"precision": "bf16", "grad_comm_dtype": "bf16", "max_grad_norm": 1.0},
        {"precision": "fp16", "grad_comm_dtype": "fp16"},
    ):
        found[str(options)] = train(PROGRAMS["mlp, momentum, uneven last batch"], **options)
    return found


class Rare(nn.Module):
    """Which weights a worker uses depends on its samples, and what comes out does not depend on how these are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rare, self.never = (nn.Linear(16, 10) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out, chosen = self.often(x), x[:, 0] > 1.5
        return out + torch.zeros_like(out).index_put((chosen,), self.rare(x[chosen])) if chosen.any() else out


FAST = {
    "mlp": PROGRAMS["mlp, momentum, uneven last batch"],
    "batch norm": PROGRAMS["cnn with batch norm"],  # which sees the samples of a worker instead of those of a shard
    "sparse": PROGRAMS["embedding bag, sparse"],
    "unused": Program(Rare, sgd),
    "bf16, wire": Program(mlp, sgd, options={"precision": "bf16", "grad_comm_dtype": "bf16", "max_grad_norm": 1.0}),
}


def fast(rank: int, size: int, folder: Path) -> Any:
    """exact=False: which bits come out may depend on the workers, but little more than bits."""
    found = {}
    for backend in ("gloo", "shm"):
        form(backend, folder / backend, rank, size)
        found |= {f"{name}, {backend}": (train(p, exact=False)[1], train(p)[1]) for name, p in FAST.items()}
    return found


class MaybeNormed(nn.Module):
    """A batch norm that only some shards go through."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x) if x[0, 0] > 0 else x)


def maybe_normed(rank: int, size: int, folder: Path) -> Any:
    return train(Program(MaybeNormed, sgd, samples=96))


def unused_sparse(rank: int, size: int, folder: Path) -> Any:
    """Steps in which no shard at all looks anything up."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.out, self.steps = nn.EmbeddingBag(50, 10, sparse=True), nn.Linear(16, 10), 0

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x) + (self.bag((x.abs() * 30).long() % 50) if self.training and use_bag else 0)

    use_bag = False
    with quiet() as run:
        model = run.replicate(Sometimes())
        used = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in run.train(run.batches(data(96), global_batch_size=32, shards=8), optimizer):
            use_bag = batch.number == 1
            run.step(classify, batch)
            used.append(model.bag.weight.grad is not None)
        return used, run.digest()


def normalised() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)).double()


def whole_batch(model: Any, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x.double()), y, reduction="sum"), len(y)


def sync_batch_norm(rank: int, size: int, folder: Path) -> Any:
    """With as many shards as workers it is the batch norm of one process that has the whole batch."""

    def learn(model: nn.Module, shards: int, *, exact: bool = True) -> dict[str, list[float]]:
        with quiet(exact=exact) as run:
            run.replicate(model)
            batches = run.batches(data(96), global_batch_size=32, shards=shards, epochs=2)
            for batch in run.train(batches, sgd(model.parameters())):
                run.step(whole_batch, batch)
        return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}

    def synced() -> nn.Module:
        return lockstep.SyncBatchNorm.convert_sync_batchnorm(normalised())

    found: dict[str, Any] = {"exact": learn(synced(), size), "fast": learn(synced(), 8, exact=False)}
    if size > 1:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            learn(synced(), 2 * size)
        found["several shards"] = [str(w.message) for w in told if "SyncBatchNorm" in str(w.message)]
        found["unequal"] = error_of(lambda: learn(synced(), size + 1))
        with quiet(audit_every=1) as run:
            model = run.replicate(synced())
            batches = run.batches(data(100), global_batch_size=32, shards=size)
            found["audited"] = error_of(lambda: next(iter(run.train(batches, sgd(model.parameters())))))
        # 33 samples: the last batch has one.
        small = TensorDataset(*(column[:33] for column in data(100).tensors))
        with quiet() as run:
            model = run.replicate(synced())
            batches = run.batches(small, global_batch_size=32, shards=size)

            def go() -> None:
                for batch in run.train(batches, sgd(model.parameters())):
                    run.step(whole_batch, batch)

            found["empty shard"] = error_of(go)
    return found


def left_behind(rank: int, size: int, folder: Path) -> Any:
    """What was there before a run is there after it, also after one that failed."""

    def surroundings() -> list[Any]:
        numpy_state = np.random.get_state()
        return [
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            signal.getsignal(signal.SIGTERM),
            torch.get_rng_state().tolist(),
            random.getstate(),
            (numpy_state[1].tolist(), numpy_state[2]),
            torch.is_grad_enabled(),
        ]

    signal.signal(signal.SIGTERM, _own_handler)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    seed_all(rank)
    found = {}
    before = surroundings()
    inside: list[Any] = []
    for name in ("well", "badly"):
        with contextlib.suppress(ZeroDivisionError), quiet(threads=1) as run:
            model = run.replicate(mlp())
            for batch in run.train(run.batches(data(64), global_batch_size=32, shards=8), sgd(model.parameters())):
                run.step(classify, batch)
                inside = [torch.get_num_threads(), signal.getsignal(signal.SIGTERM) is _own_handler]
                if name == "badly":
                    raise ZeroDivisionError
        found[name] = [a == b for a, b in zip(before, surroundings(), strict=True)]
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    wait_for(
        lambda: all(t.name != "lockstep-collectives" for t in threading.enumerate()), "the threads of the runs to end"
    )
    return found | {"inside": inside}


def _own_handler(number: int, frame: Any) -> None:
    pass


SCENES = {
    scene.__name__: scene
    for scene in (
        evaluate, log, do_once, stop, saving, resume, skipped_epoch_end, overflow, precision, fast, maybe_normed,
        unused_sparse, sync_batch_norm, left_behind,
    )
}  # fmt: skip


def play(rank: int, size: int, backend: str, folder: Path) -> dict[str, Any]:
    use(backend, str(folder / "store"), rank, size)
    found = {}
    for name, scene in SCENES.items():
        print(f"{size} workers: rank {rank} plays {name}", flush=True)
        (folder / name).mkdir(exist_ok=True)
        began = time.monotonic()
        found[name] = scene(rank, size, folder / name)
        found[f"{name} took"] = time.monotonic() - began
    return found


@functools.cache
def outcomes(size: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return try_on_workers(play, size, "shm" if size % 2 == 0 else "gloo", Path(folder))


def world(size: int) -> list[dict[str, Any]]:
    found = outcomes(size)
    assert not any(isinstance(one, Failure) for one in found), "\n".join(map(str, found))
    return found


def seen(size: int, scene: str) -> Any:
    """What all workers of a world have seen, if that is the same."""
    found = [by_rank[scene] for by_rank in world(size)]
    assert all(one == found[0] for one in found), found
    return found[0]


every_world = pytest.mark.parametrize("size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])

# ---- figures ------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@every_world
def test_every_sample_counts_once_and_figures_are_those_of_one_process(size: int) -> None:
    found = seen(size, "evaluate")
    assert found == seen(1, "evaluate")
    for name, (_, _, weight) in found.items():
        small = {"list": 30, "three samples": 3, "one stream sample": 1, "many: worst": 18}
        assert weight == small.get(name, SAMPLES), name
    assert len({found[name] for name in found if name.startswith("accuracy") or name == "stream"}) == 1
    assert found["many: accuracy"] == found["stream"]


class DiesOnce(Augmented):
    def __init__(self, died: Path) -> None:
        self.died = died

    def __getitem__(self, index: int) -> Tensor:
        if index == 60 and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_loader_that_is_lost_while_evaluating_is_replaced(tmp_path: Path) -> None:
    with quiet() as run:
        run.replicate(mlp())
        lost = run.evaluate(noisy, DiesOnce(tmp_path / "died"), batch_size=50, num_workers=1)
        assert lost == run.evaluate(noisy, Augmented(), batch_size=50)
    assert (tmp_path / "died").exists()


def test_it_does_not_matter_who_loads_what_is_evaluated() -> None:
    with quiet() as run:
        run.replicate(mlp())
        figures = {
            loaders: run.evaluate(noisy, Augmented(), batch_size=50, num_workers=loaders) for loaders in (0, 1, 2)
        }
        with pytest.raises(ValueError, match="num_workers=-1 must be a whole number, 0 or more"):
            run.evaluate(noisy, Augmented(), num_workers=-1)
    assert figures[0] == figures[1] == figures[2]


def test_an_evaluation_finds_what_a_plain_loop_finds() -> None:
    torch.manual_seed(0)
    with quiet() as run:
        model = run.replicate(mlp())
        accuracy = run.evaluate(correct, data(SAMPLES), batch_size=100)
        loss = run.evaluate(many_figures, data(SAMPLES), batch_size=100)["loss"]
    model.eval()
    x, y = data(SAMPLES).tensors
    assert (accuracy.sum, accuracy.weight) == (int((model(x).argmax(1) == y).sum()), SAMPLES)
    assert float(accuracy) == accuracy.sum / SAMPLES
    assert loss == pytest.approx(F.cross_entropy(model(x).double(), y).item(), rel=1e-6)


@every_world
def test_figures_are_logged_once_and_weighted_in_double_precision(size: int) -> None:
    first, parts, text = seen(size, "log")
    assert first == {"same": 0.1, "third": 1 / 3, "many": 2.0**53 + 2, "tensor": float(torch.tensor(0.1)), "whole": 3.0}
    ranks = range(size)
    expected = {"accuracy": 0.1, "mine": math.fsum(ranks) / size, "nothing": math.nan, "tiny": 1e-300}
    if size > 1:
        expected["accuracy"] = math.fsum(r + 1.0 for r in ranks) / math.fsum(10.0 * (r + 1) for r in ranks)
    assert eval(parts, {"nan": math.nan}) == pytest.approx(expected, rel=1e-15, nan_ok=True)
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [0, 0, 1, 2]
    assert {name: lines[0][name] for name in first} == first
    assert all(abs(line["time"] - time.time()) < 1000 for line in lines)
    assert [line["loss"] for line in lines[2:]] == [
        json.loads(line)["loss"] for line in seen(1, "log")[2].splitlines()[2:]
    ]


# ---- once ---------------------------------------------------------------------------------------------------------


@every_world
def test_what_is_done_once_is_known_to_all(size: int) -> None:
    for rank, by_rank in enumerate(world(size)):
        found, last = by_rank["do_once"], size - 1
        assert found["value"] == {"a": [1, 2.5], "b": None}
        assert found["times"] == "x"
        assert found["on the last"] == last
        there = "" if rank == last else f"LockstepError: on_main(<lambda>) failed on rank {last}: "
        assert found["error"] == f"{there}IndexError: list index out of range"
        assert found["no json"].startswith(
            f"{there}TypeError: on_main(<lambda>) ran, but returned a Tensor, which cannot"
        )
        assert found["json inside"] == f"{there}TypeError: Object of type object is not JSON serializable"
        assert found["no such rank"] == f"ValueError: rank={size}: there are ranks 0 to {last}"
        assert found["another run"] == "new"


def wait_long(rank: int, size: int, port: int) -> Any:
    """Longer than the group's collectives may wait, and than the others keep quiet. The world is as torchrun tells."""
    dist.destroy_process_group()
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    run_on_one.PRINT_AFTER_S = 1.0
    found = {}
    for backend in ("shm", "gloo"):
        lockstep.init(backend=backend, timeout_s=3.0)
        seconds = 4.0 if backend == "gloo" else 0.1
        with contextlib.redirect_stderr(io.StringIO()) as said, quiet() as run:
            found[backend] = [
                run.on_main(lambda seconds=seconds: time.sleep(seconds) or "done", rank=1),
                determinism._timeout_of(run._session.group, run.device).total_seconds(),
                train(PROGRAMS["mlp, momentum, uneven last batch"]),
            ]
        dist.destroy_process_group()
    lockstep.init(backend="gloo")  # the helper expects some group
    return found, said.getvalue()


@pytest.mark.slow
def test_others_wait_as_long_as_it_takes_and_say_for_whom() -> None:
    with reserve_port() as port:
        by_rank = on_workers(wait_long, 2, port)
    for rank, (found, said) in enumerate(by_rank):
        assert found["gloo"] == found["shm"] == ["done", 3.0, seen(1, "precision")["fp32"]]
        assert said == ("lockstep: rank 0 waits for rank 1 in on_main(<lambda>), 1 s\n" if rank == 0 else "")


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


def slow_backward(rank: int, size: int, backend: str, store: str) -> str:
    """One worker takes longer than the others keep quiet: they look around, and wait on."""
    use(backend, store, rank, size)
    os.environ["LOCKSTEP_STALL_S"] = "0.3"
    with quiet() as run:
        model = run.replicate(mlp())
        for batch in run.train(run.batches(data(96), global_batch_size=32, shards=8), adamw(model.parameters())):
            seconds = 0.4 if batch.number == 1 and rank == 1 else 0.0

            def loss(model: Any, batch: Any, seconds: float = seconds) -> tuple[Tensor, int]:
                total, weight = classify(model, batch)
                return Slow.apply(total, seconds), weight

            run.step(loss, batch)
        return run.digest()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("shm", 3),
        ("gloo", 2),
        pytest.param("gloo", 3, marks=pytest.mark.slow),
    ],
)
def test_a_slow_backward_pass_is_waited_for(backend: str, size: int, tmp_path: Path) -> None:
    digests = on_workers(slow_backward, size, backend, str(tmp_path / "store"))
    assert digests == [train(Program(mlp, adamw, samples=96), epochs=1)[0]] * size


# ---- stopping and going on ----------------------------------------------------------------------------------------


@every_world
def test_one_worker_asks_and_all_stop_after_the_same_step(size: int) -> None:
    found = seen(size, "stop")
    assert found["seen"] == [0, 1, 2]
    assert found["by"] == (size - 1,)
    assert found["should_stop"]
    assert found["saved"] == ["step-000000003"]
    assert found["digest"] == train(Program(mlp, adamw))[0]


@every_world
def test_going_on_gives_the_digest_of_an_undisturbed_run(size: int) -> None:
    undisturbed, resumed, done = seen(size, "resume")
    assert undisturbed == resumed == done == seen(1, "resume")[0]


@every_world
def test_checkpoints_come_when_they_are_due_and_have_plain_names(size: int) -> None:
    found = seen(size, "saving")
    assert found["steps"]["before each step"] == [[], [], [], [3], [3], [3], [3, 6], [3, 6]]
    assert found["steps"]["in the end"] == [6, 8]
    assert found["no time"]["before each step"] == [[], [1], *([n - 1, n] for n in range(2, 8))]
    assert found["no time"]["in the end"] == [7, 8]
    assert found["long"] == {"before each step": [[]] * 8, "in the end": [8]}
    assert found["keys"]


STOPPABLE = """
import os, sys
import lockstep
sys.path.insert(0, {tests!r})
from runs import adamw, classify, data, mlp

with lockstep.Run("run", seed=7, progress=False, exit_on_interrupt=False) as run:
    model = run.replicate(mlp())
    steps = []
    for batch in run.train(run.batches(data(100), global_batch_size=32, shards=8, epochs=2), adamw(model.parameters())):
        run.step(classify, batch)
        steps.append(batch.number)
        if batch.number == 2 and run.world.rank == 1:
            os.kill(os.getpid(), {number})
    print("steps", steps, run.should_stop, run.digest(), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_signal_to_one_worker_ends_all_after_the_same_step(tmp_path: Path, number: int) -> None:
    (tmp_path / "script.py").write_text(STOPPABLE.format(tests=str(Path(__file__).parent), number=int(number)))
    status, said = run_program(tmp_path / "script.py", workers=2)
    assert status == PREEMPTED, said
    lines = [line.partition("steps ")[2] for line in said.splitlines() if "steps " in line]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert lines[0].startswith("[0, 1, 2, 3] True")  # the step after the signal is the last
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000004"]
    # One worker goes on.
    with quiet(tmp_path / "run") as run:
        model = run.replicate(mlp())
        for batch in run.train(
            run.batches(data(100), global_batch_size=32, shards=8, epochs=2), adamw(model.parameters())
        ):
            assert batch.number >= 4
            run.step(classify, batch)
        assert run.digest() == train(Program(mlp, adamw))[0]


def test_how_often_to_save_may_be_said_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `lockstep run --checkpoint-every`. What the program says itself counts more."""
    monkeypatch.setenv("LOCKSTEP_CHECKPOINT_EVERY", "3")
    saved = {}
    for name, options in {"outside": {}, "inside": {"save_every": 5}}.items():
        with quiet(tmp_path / name, **options) as run:
            model = run.replicate(mlp())
            for batch in run.train(
                run.batches(data(100), global_batch_size=32, shards=8, epochs=2), sgd(model.parameters())
            ):
                run.step(classify, batch)
                run._session.checkpoints.saver.drain()
        saved[name] = sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())
    assert saved["outside"] == ["step-000000006", "step-000000008"]
    assert saved["inside"] == ["step-000000005", "step-000000008"]
    monkeypatch.setenv("LOCKSTEP_CHECKPOINT_EVERY", "often")
    with pytest.raises(ValueError, match="'often' is not how often to save"), quiet():
        pass


@every_world
def test_a_schedule_of_epochs_counts_one_whose_last_batch_was_skipped(size: int) -> None:
    assert seen(size, "skipped_epoch_end") == [0.05, 0.025, 0.025, 0.0125, 0.0125, 0.00625]


# ---- precision, and other ways to compute ---------------------------------------------------------------------------


@every_world
def test_an_overflow_is_skipped_by_all_and_halves_the_scale(size: int) -> None:
    found = seen(size, "overflow")
    skipped = [was_skipped for was_skipped, _ in found["results"]]
    count = sum(skipped)
    assert skipped == [True] * count + [False] * (12 - count)
    assert 1 <= count < 8
    assert found["scales"] == [2.0 ** (16 - min(n + 1, count)) for n in range(12)]
    assert found["results"][-1][1] < found["results"][0][1]
    assert found == seen(1, "overflow")


@every_world
def test_half_precision_gives_the_same_bits_on_any_number_of_workers(size: int) -> None:
    found = seen(size, "precision")
    assert found == seen(1, "precision")
    assert len({digest for digest, _ in found.values()}) == len(found)
    assert all(loss == pytest.approx(found["fp32"][1], abs=0.05) for _, loss in found.values())


@every_world
def test_without_exactness_the_loss_is_nearly_the_same(size: int) -> None:
    for name, (fast_loss, exact_loss) in seen(size, "fast").items():
        near = 5e-3 if "batch norm" in name else 2e-4 if "bf16" in name else 1e-6
        assert fast_loss == pytest.approx(exact_loss, rel=near), name


@every_world
def test_a_batch_norm_that_some_shards_skip(size: int) -> None:
    assert seen(size, "maybe_normed") == seen(1, "maybe_normed")


@every_world
def test_an_embedding_that_is_not_used_has_no_gradient(size: int) -> None:
    used, digest = seen(size, "unused_sparse")
    assert used == [False, True, False]
    assert digest == seen(1, "unused_sparse")[1]


@functools.cache
def learned_by_torch() -> dict[str, list[float]]:
    """One process, ordinary batch norm, the whole batch at once."""
    model, order = normalised(), lockstep.Shuffled(96, 32, seed=7)
    optimizer = sgd(model.parameters())
    for epoch in range(2):
        for step in range(order.steps(epoch)):
            total, weight = whole_batch(model, data(96)[order.batch(epoch, step)])
            optimizer.zero_grad()
            (total / weight).backward()
            optimizer.step()
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


@every_world
@pytest.mark.parametrize("way", ["exact", "fast"])
def test_synced_batch_norm_is_that_of_the_whole_batch(size: int, way: str) -> None:
    for by_rank in world(size):
        for name, values in by_rank["sync_batch_norm"][way].items():
            assert values == pytest.approx(learned_by_torch()[name], rel=1e-12, abs=1e-12), name


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_synced_batch_norm_says_what_it_cannot_do(size: int) -> None:
    for rank, by_rank in enumerate(world(size)):
        found = by_rank["sync_batch_norm"]
        assert len(found["several shards"]) == (1 if rank == 0 else 0)
        assert all("runs 2 shards one after the other" in text for text in found["several shards"])
        assert f"{size + 1} shards on {size} workers leave some with 1 and some with 2" in found["unequal"]
        assert "ValueError: audit_every=1 with 1, a SyncBatchNorm" in found["audited"]
        assert f"a batch of 1 samples leaves some of {size} shards without any" in found["empty shard"]


@every_world
def test_a_run_leaves_everything_as_it_was(size: int) -> None:
    found = seen(size, "left_behind")
    assert all(found["well"])
    assert all(found["badly"])
    assert found["inside"] == [1, False]


# ---- what a program may do in the middle -----------------------------------------------------------------------------


def saves_before_its_step(folder: Path, *, steps: int | None, saves: bool) -> str:
    with quiet(folder, save_every=1000) as run:
        model = run.replicate(mlp())
        for batch in run.train(
            run.batches(data(100), global_batch_size=32, shards=8, epochs=2), sgd(model.parameters()), steps=steps
        ):
            if saves and batch.number == 2:
                run.save()
                run._session.checkpoints.saver.drain()
                return ""
            run.step(classify, batch)
        return run.digest()


def test_a_checkpoint_before_a_step_goes_on_with_that_step(tmp_path: Path) -> None:
    expected = saves_before_its_step(tmp_path / "whole", steps=None, saves=False)
    saves_before_its_step(tmp_path / "saved", steps=None, saves=True)
    assert sorted(path.name for path in (tmp_path / "saved" / "checkpoints").iterdir()) == ["step-000000002"]
    (tmp_path / "saved" / "stopped.json").unlink()  # it left the loop by `return`: for good, but for this
    assert saves_before_its_step(tmp_path / "saved", steps=None, saves=False) == expected
    assert prove(tmp_path / "saved").holds


def test_a_program_that_changes_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with quiet(Path("run"), save_every=1) as run:
        model = run.replicate(mlp())
        for batch in run.train(run.batches(data(100), global_batch_size=32, shards=8), sgd(model.parameters())):
            os.chdir(tmp_path / "elsewhere")
            run.step(classify, batch)
    assert not (tmp_path / "elsewhere" / "run").exists()
    assert "step-000000004" in os.listdir(tmp_path / "run" / "checkpoints")


CHILD = """
import multiprocessing, time, torch, lockstep
with lockstep.Run(seed=1, progress=False, device="cpu") as run:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    time.sleep(0.5)
    child.terminate()
    child.join(20)
    print(child.exitcode)
"""


@pytest.mark.slow
def test_children_of_the_program_can_be_ended() -> None:
    """They inherit the handler of SIGTERM, which asks the run to stop, and no run is there."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == str(-signal.SIGTERM), done.stderr


# ---- memory ----------------------------------------------------------------------------------------------------------


def use_memory(rank: int, size: int, backend: str, store: str) -> list[dict[str, int]]:
    """What `run.memory` returns before training, in a loss function of the second step, and after training."""
    use(backend, store, rank, size)
    with quiet() as run:
        net = run.replicate(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4)))
        found = [run.memory()]

        def loss(net: nn.Module, rows: Any) -> tuple[Tensor, int]:
            found.append(run.memory())
            return F.cross_entropy(net(rows[0]), rows[1], reduction="sum"), len(rows[0])

        optimizer = torch.optim.AdamW(net.parameters())
        dataset = TensorDataset(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4)
        for batch in run.train(run.batches(dataset, global_batch_size=16, shards=8, epochs=1), optimizer):
            run.step(loss, batch)
        return [found[0], found[-1], run.memory()]


# In models: a row for each subtree of a worker (1, 2, 2), and a third of all rows, which it receives.
@pytest.mark.parametrize(
    ("size", "backend", "models"), [(1, "gloo", [0.0]), (2, "shm", [0.0, 0.0]), (3, "gloo", [2.67, 3.67, 3.67])]
)
def test_what_memory_is_used_for(size: int, backend: str, models: list[float], tmp_path: Path) -> None:
    weights = 4 * (64 * 512 + 512 + 512 * 4 + 4)
    outcomes = on_workers(use_memory, size, backend, str(tmp_path / "store"))
    for (before, inside, after), expected in zip(outcomes, models, strict=True):
        assert set(before) == {"rest", "peak"}
        assert sum(part for kind, part in after.items() if kind != "peak") == after["peak"] >= before["peak"]
        assert after["weights"] == after["gradients"] == weights
        assert after["optimizer"] == 2 * weights + 4 * 4  # two moments, and a counter of each parameter
        assert after["graphs"] == 0
        assert after["buckets"] == inside["buckets"] == pytest.approx(expected * weights, rel=0.02)


# ---- memory ----------------------------------------------------------------------------------------------------------


def page_faults(rank: int, size: int) -> list[int]:
    """Page faults of five steps that allocate and free 64 MiB in each shard."""
    found = list[int]()

    def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return classify(model, batch)

    with quiet() as run:
        model = run.replicate(mlp())
        for batch in run.train(run.batches(data(40), global_batch_size=8, shards=2), sgd(model.parameters())):
            run.step(loss, batch)
    return found


def test_memory_that_a_step_frees_is_used_by_the_next() -> None:
    (found,) = on_workers(page_faults, 1)
    assert len(found) == 10
    # The heap grows in the first step, and again whenever something else lies in the gap; if nothing is kept, always.
    assert sorted(found)[2] < 2**24 * 4 // 4096 // 10


class KeptGradient(torch.autograd.Function):
    """The gradient of its input is a view of a tensor that the program keeps."""

    kept = torch.full((4, 16), 0.5)

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return KeptGradient.kept.view(16, 4).view(4, 16)


def train_with_kept_gradients(rank: int, size: int) -> tuple[str, list[float]]:
    def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
        return KeptGradient.apply(model.weight) * 1.0, len(batch[0])  # type: ignore[no-untyped-call]

    with quiet() as run:
        model = run.replicate(nn.Linear(16, 4, bias=False))
        for batch in run.train(run.batches(data(40), global_batch_size=8, shards=8), sgd(model.parameters())):
            run.step(loss, batch)
        return run.digest(), KeptGradient.kept.unique().tolist()


def test_sums_are_not_written_into_tensors_that_the_program_keeps() -> None:
    (alone,), both = on_workers(train_with_kept_gradients, 1), on_workers(train_with_kept_gradients, 2)
    assert alone[1] == [0.5]
    assert both == [alone, alone]
