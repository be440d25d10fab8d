"""Gradients that are compressed with error feedback, by PowerSGD and by top-k (`grad_comm`): they have the same bits on
any number of workers, what is lacking is sent later, and residuals are saved, resumed and moved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.comm import top_k_sum
from lockstep.comm.low_rank_sum import Factors, LowRank
from lockstep.comm.top_k_sum import MIN_SAMPLED_NUMEL, TopK, top_k_positions
from lockstep.errors import LostStateError
from lockstep.step import grad_comm_tuner
from lockstep.step.residuals import Residuals
from on_workers import on_workers
from runs import CLASSES, PROGRAMS, Bags, Program, Resnet, adamw, mlp, sgd, train, use
from test_grad_comm import Complex, Wide, plain_sgd

OPTIONS: dict[str, dict[str, Any]] = {
    "powersgd": {"grad_comm": "powersgd", "powersgd_rank": 1, "compare_loss": False},
    "topk": {"grad_comm": "topk", "topk_ratio": 0.05, "compare_loss": False},
}


class Images(nn.Module):
    """Convolutions in channels_last, whose gradients are matrices in the order of memory; and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = Resnet().to(memory_format=torch.channels_last)
        self.last = nn.Parameter(torch.randn(CLASSES, 12).t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        return self.convolutions(x) @ self.last[:, :CLASSES]


COMPRESSED = {
    "mlp, momentum": (Program(mlp, sgd), {}),
    "two buckets": (Program(Wide, plain_sgd), {}),
    "convolutions": (Program(Images, adamw), {}),
    "dropout, tied weights": (PROGRAMS["gpt with dropout and tied weights, AdamW"], {}),
    "unused in some shards": (PROGRAMS["unused branches"], {}),
    "arrives twice": (PROGRAMS["arrives twice"], {}),
    "12 shards, clipped": (Program(mlp, sgd, shards=12), {"max_grad_norm": 0.1}),
    "sparse beside it": (Program(Bags, plain_sgd), {}),
    "bfloat16": (Program(lambda: mlp().bfloat16(), sgd), {}),
    "complex beside it": (Program(lambda: Complex(mixed=True), sgd), {}),
    "sharded optimizer": (Program(mlp, adamw), {"shard_optimizer": True}),
    "audits": (Program(mlp, sgd), {"audit_every": 2}),
}


def train_compressed(
    rank: int, size: int, backend: str, store: str, names: list[str]
) -> dict[tuple[str, str], tuple[str, float]]:
    use(backend, store, rank, size)
    return {
        (kind, name): train(COMPRESSED[name][0], epochs=3, **options | COMPRESSED[name][1])
        for kind, options in OPTIONS.items()
        for name in names
    }


QUICK = ["mlp, momentum", "two buckets", "convolutions", "arrives twice", "12 shards, clipped", "bfloat16"]


@pytest.mark.parametrize(
    ("size", "backend", "names"),
    [
        (3, "shm", QUICK),
        *(
            pytest.param(size, backend, list(COMPRESSED), marks=pytest.mark.slow)
            for backend, sizes in [("shm", (2, 3, 8)), ("gloo", (2, 3)), ("hierarchy", (4,))]
            for size in sizes
        ),
    ],
)
def test_the_same_bits_on_any_number_of_workers(tmp_path: Path, size: int, backend: str, names: list[str]) -> None:
    (tmp_path / "one").mkdir()
    (alone,) = on_workers(train_compressed, 1, "gloo", str(tmp_path / "one" / "store"), names)
    for found in on_workers(train_compressed, size, backend, str(tmp_path / "store"), names):
        assert {key: one for key, one in found.items() if one != alone[key]} == {}
    # Or gradients that are not compressed would be compared.
    plain = train(Program(mlp, sgd), epochs=3)[0]
    assert len({plain, *(alone[kind, "mlp, momentum"][0] for kind in OPTIONS)}) == 3


def gradients_of_fixed_weights(rank: int, size: int, kind: str) -> tuple[float, float]:
    """How far the mean of all gradients is from the gradient, over 40 steps and over 160; weights do not change."""
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(3))
    distances, total, count = [], torch.zeros(30, 40), 0
    with lockstep.Run(seed=1, progress=False, **OPTIONS[kind]) as run:
        model = run.replicate(nn.Linear(40, 30))
        batches = run.batches(TensorDataset(x), global_batch_size=24, shards=4, epochs=168)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.0)):
            run.step(lambda m, b: (m(b[0]).sin().square().sum(), len(b[0])), batch)
            gradient = model.weight.grad
            assert gradient is not None
            if batch.number < grad_comm_tuner.WARM_UP:
                exact = gradient.clone()
                continue
            total, count = total + gradient, count + 1
            if kind == "powersgd":
                assert torch.linalg.matrix_rank(gradient) <= 1
            else:
                assert int((gradient != 0).sum()) <= 4 * 0.1 * gradient.numel()  # of four shards
            if count in (40, 160):
                distances.append(float((total / count - exact).norm() / exact.norm()))
    return distances[0], distances[1]


@pytest.mark.parametrize("kind", OPTIONS)
def test_what_is_lacking_is_sent_later(kind: str) -> None:
    """The error of the mean falls as 1 / steps. Without residuals it would stay as it is, more than 0.5."""
    (after_40, after_160), other = on_workers(gradients_of_fixed_weights, 2, kind)
    assert (after_40, after_160) == other
    assert after_160 < 0.1
    assert after_160 < 0.35 * after_40


def reference_powersgd(gradients: list[Tensor], projection: Tensor) -> list[Tensor]:
    """PowerSGD with error feedback, as published, on the sum of all shards."""
    lacking, found = torch.zeros_like(gradients[0]), []
    for gradient in gradients:
        matrix = gradient + lacking
        columns, _ = torch.linalg.qr(matrix @ torch.linalg.qr(projection)[0])
        projection = matrix.t() @ columns
        found.append(columns @ projection.t())
        lacking = matrix - found[-1]
    return found


def test_it_is_powersgd() -> None:
    x = torch.randn(76, 40, generator=torch.Generator().manual_seed(3))  # the last batch of an epoch has 4 samples
    exact, sent = list[Tensor](), list[Tensor]()
    with lockstep.Run(seed=5, progress=False, grad_comm="powersgd", powersgd_rank=2, compare_loss=False) as run:
        model = run.replicate(nn.Linear(40, 30))
        batches = run.batches(TensorDataset(x), global_batch_size=24, shards=4, epochs=5)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.0)):
            twin = copy.deepcopy(model)
            sum((twin(shard.data[0]).sin().square().sum() for shard in batch.shards), torch.zeros(())).backward()
            run.step(lambda m, b: (m(b[0]).sin().square().sum(), len(b[0])), batch)
            if batch.number >= grad_comm_tuner.WARM_UP:
                assert twin.weight.grad is not None
                assert model.weight.grad is not None
                exact.append(twin.weight.grad / sum(shard.count for shard in batch.shards))
                sent.append(model.weight.grad.clone())
        first = Residuals(LowRank(2), 4, dict(model.named_parameters()), 5).projection("weight", 40, 2)
    for found, wanted in zip(sent, reference_powersgd(exact, first), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def reference_top_k(gradients: list[list[Tensor]], ratio: float) -> list[Tensor]:
    """Top-k with error feedback, of each shard: the mean of what they send in each step."""
    lacking, found = [torch.zeros_like(one) for one in gradients[0]], []
    for of_shards in gradients:
        total = torch.zeros_like(of_shards[0])
        for shard, gradient in enumerate(of_shards):
            corrected = gradient + lacking[shard]
            kept = torch.zeros(corrected.numel(), dtype=torch.bool)
            kept[corrected.flatten().abs().topk(round(ratio * corrected.numel())).indices] = True
            sent = corrected * kept.view(corrected.shape)
            lacking[shard], total = corrected - sent, total + sent
        found.append(total)
    return found


def test_it_is_top_k() -> None:
    x = torch.randn(76, 40, generator=torch.Generator().manual_seed(3))  # the last batch of an epoch has 4 samples
    exact, sent = list[list[Tensor]](), list[Tensor]()
    with lockstep.Run(seed=5, progress=False, grad_comm="topk", topk_ratio=0.05, compare_loss=False) as run:
        model = run.replicate(nn.Linear(40, 30))
        batches = run.batches(TensorDataset(x), global_batch_size=24, shards=4, epochs=5)
        for batch in run.train(batches, torch.optim.SGD(model.parameters(), lr=0.0)):
            of_shards, count = list[Tensor](), sum(shard.count for shard in batch.shards)
            for shard in batch.shards:
                twin = copy.deepcopy(model)
                twin(shard.data[0]).sin().square().sum().backward()
                assert twin.weight.grad is not None
                of_shards.append(twin.weight.grad / count)
            run.step(lambda m, b: (m(b[0]).sin().square().sum(), len(b[0])), batch)
            if batch.number >= grad_comm_tuner.WARM_UP:
                assert model.weight.grad is not None
                exact.append(of_shards)
                sent.append(model.weight.grad.clone())
    for found, wanted in zip(sent, reference_top_k(exact, 0.05), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("numel", [100, MIN_SAMPLED_NUMEL + 3, 4 * MIN_SAMPLED_NUMEL])
def test_of_equal_elements_the_first_count(numel: int) -> None:
    values, one_larger = torch.randn(numel, generator=torch.Generator().manual_seed(numel)), torch.ones(numel)
    one_larger[-2] = -2.0
    few = torch.where(torch.arange(numel) % 97 == 5, values, 0.0)
    for given in (values, values.round(decimals=1), torch.zeros(numel), one_larger, few):
        sizes = given.abs().tolist()
        order = sorted(range(numel), key=lambda n, sizes=sizes: (-sizes[n], n))
        for count in (1, numel // 100, numel // 5):
            assert top_k_positions(given, count).tolist() == sorted(order[:count])


def test_an_element_that_is_not_finite_is_the_largest() -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        values = torch.randn(2 * MIN_SAMPLED_NUMEL)
        values[77] = bad
        assert top_k_positions(values, 1).tolist() == [77]
        assert top_k_positions(values.fill_(bad), 100).tolist() == list(range(100))


def test_residuals_have_the_dtype_of_what_is_sent() -> None:
    residuals = Residuals(TopK(0.1), 1, {"weight": torch.zeros(4, 4)}, seed=0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        residuals.keep("weight", {0: torch.full((4, 4), 1 / 3, dtype=torch.float32)})
    finally:
        torch.set_default_dtype(torch.float32)
    found = residuals.find(0, "weight")
    assert found is not None
    assert torch.equal(found, torch.full((16,), 1 / 3))


def test_top_k_that_would_save_nothing() -> None:
    x = TensorDataset(torch.randn(16, 16))
    with lockstep.Run(progress=False, grad_comm="topk", topk_ratio=0.25) as run:
        model = run.replicate(mlp())
        batches = run.batches(x, global_batch_size=8, shards=4, epochs=1)
        with pytest.raises(ValueError, match="with 4 shards sends as much as no compression, or more"):
            next(iter(run.train(batches, sgd(model.parameters()))))


def test_a_bucket_with_too_many_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k_sum, "MAX_NUMEL", 100)
    x = TensorDataset(torch.randn(16, 16))
    with lockstep.Run(progress=False, **OPTIONS["topk"]) as run:
        model = run.replicate(mlp())
        batches = run.batches(x, global_batch_size=8, shards=1, epochs=1)
        with pytest.raises(ValueError, match="positions as 32-bit integers"):
            for batch in run.train(batches, sgd(model.parameters())):
                run.step(lambda m, b: (m(b[0]).square().sum(), len(b[0])), batch)


def test_which_gradients_are_compressed() -> None:
    assert TopK(0.01).compresses(torch.zeros(10, 100))
    assert not TopK(0.01).compresses(torch.zeros(1000))  # a bias
    assert not TopK(0.25).compresses(torch.zeros(1, 2))  # one of two
    assert LowRank(1).compresses(torch.zeros(10, 100))
    assert not LowRank(5).compresses(torch.zeros(10, 100))


def skip_with_residuals(rank: int, size: int, kind: str) -> tuple[list[int], bool, str]:
    """A step whose gradients are not finite leaves the residuals as they are."""
    x, skipped = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)), list[int]()
    with lockstep.Run(seed=1, progress=False, on_nonfinite="skip", **OPTIONS[kind]) as run:
        model = run.replicate(mlp())
        batches = run.batches(TensorDataset(x), global_batch_size=16, shards=4, epochs=4)
        for batch in run.train(batches, sgd(model.parameters())):
            factor = float("inf") if batch.number in (3, 10) else 1.0
            result = run.step(lambda m, b, f=factor: ((m(b[0]) * f).square().sum(), len(b[0])), batch)
            skipped += [batch.number] * result.skipped
        finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        return skipped, finite, run.digest()


@pytest.mark.parametrize("kind", OPTIONS)
def test_residuals_of_a_skipped_step(kind: str) -> None:
    found = on_workers(skip_with_residuals, 1, kind) + on_workers(skip_with_residuals, 2, kind)
    assert len(set(map(str, found))) == 1
    assert found[0][:2] == ([3, 10], True)


def resume(rank: int, size: int, folder: str, stop: int, kind: str) -> tuple[str, float]:
    use("gloo", "", rank, size)
    options = OPTIONS[kind] | {"save_every": 5}
    found = train(Program(mlp, adamw, options=options), steps=stop, directory=Path(folder), epochs=6)
    Path(folder, "stopped").unlink(missing_ok=True)
    return found


@pytest.mark.parametrize("kind", OPTIONS)
def test_residuals_are_saved_and_resumed_on_another_number_of_workers(tmp_path: Path, kind: str) -> None:
    want = on_workers(resume, 1, str(tmp_path / "whole"), 22, kind)[0]
    for size, stop in [(3, 11), (2, 17), (1, 22)]:
        found = on_workers(resume, size, str(tmp_path / "parts"), stop, kind)
        assert len(set(found)) == 1
    assert found[0] == want


def make_residuals(*shards: int) -> tuple[Residuals, Tensor]:
    """The residuals of these of four shards, each of another size. And the gradient without them."""
    weight, gradient = nn.Parameter(torch.zeros(20, 30)), torch.ones(20, 30)
    residuals = Residuals(LowRank(1), 4, {"weight": weight}, seed=1)
    residuals.keep("weight", {shard: gradient * shard for shard in shards})
    return residuals, gradient


def residual_of(residuals: Residuals, shard: int) -> float:
    """The residual of a shard, of which all elements are equal; 0 if there is none."""
    found = residuals.find(shard, "weight")
    return 0.0 if found is None else float(found.mean())


def move_residuals(rank: int, size: int) -> list[object]:
    found: list[object] = []
    group: Any = dist.group.WORLD
    device = torch.device("cpu")
    residuals, _ = make_residuals(*[(0,), (1, 2), (3,)][rank])
    residuals.assign(group, device, [range(2), range(2, 3), range(3, 4)])
    found.append([residual_of(residuals, shard) for shard in range(4)])
    residuals.copy_to_all(group, device)  # some workers leave
    residuals.assign(group, device, [range(0), range(4), range(0)])
    found.append([residual_of(residuals, shard) for shard in range(4)])
    own = [(0, 1), (2,), (3,)][rank]
    residuals, gradient = make_residuals(*own)
    residuals.copy_to_all(group, device)
    sent = {shard: gradient * 10 * shard for shard in own}  # another step is taken, so that the copies are old
    residuals.keep_low_rank("weight", sent, Factors(torch.zeros(20, 1), torch.zeros(30, 1)))
    saved = residuals.outline(group, device).collect()
    found.append(None if saved is None else [float(saved["shards"][str(n)]["weight"].mean()) for n in range(4)])
    residuals, _ = make_residuals(*[(0, 1), (2,), ()][rank])
    try:
        residuals.assign(group, device, [range(2), range(2, 3), range(3, 4)])
    except LostStateError as error:
        found.append(str(error))
    return found


def test_residuals_move_with_their_shards_and_are_missed_if_they_are_lost() -> None:
    first, second, third = on_workers(move_residuals, 3)
    assert [one[0] for one in (first, second, third)] == [[0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 3]]
    assert [one[1] for one in (first, second, third)] == [[0] * 4, [0, 1, 2, 3], [0] * 4]
    assert [one[2] for one in (first, second, third)] == [[0, 10, 20, 30], None, None]
    assert [one[3] for one in (first, second, third)] == [
        "no worker has the residual of weight in shard 3 any more: its worker is lost"
    ] * 3


def test_residuals_of_another_memory_format() -> None:
    """A convolution that was trained as it is, and goes on in channels_last."""
    before, factors = nn.Conv2d(6, 40, 3).weight, Factors(torch.zeros(40, 1), torch.zeros(54, 1))
    residuals = Residuals(LowRank(1), 1, {"weight": before}, seed=1)
    values = torch.arange(before.numel(), dtype=torch.float32)
    residuals.keep_low_rank("weight", {0: values.view(40, 54)}, factors)
    after = nn.Parameter(before.detach().to(memory_format=torch.channels_last))
    restored = Residuals(LowRank(1), 1, {"weight": after}, seed=1)
    restored.restore(residuals.collect_alone())
    found = restored.find(0, "weight")
    assert found is not None
    assert torch.equal(found.as_strided(after.shape, after.stride()), values.view(before.shape))
    after.requires_grad_(False)
    restored.keep_only(range(1))
    assert restored.find(0, "weight") is None  # it would be added when it is trained again


def test_residuals_of_other_shards_are_dropped_before_a_step() -> None:
    """A checkpoint has all; those that another worker changes from then on must not be taken for its own."""
    saved = make_residuals(0, 1, 2, 3)[0].collect_alone()
    residuals, _ = make_residuals()
    residuals.restore(saved)
    residuals.keep_only(range(1, 3))
    assert [residual_of(residuals, shard) for shard in range(4)] == [0, 1, 2, 0]
    assert residuals.collect_alone() is None
    residuals.restore(None)
    assert residual_of(residuals, 1) == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"powersgd_rank": 2}, "powersgd_rank=2 needs grad_comm=.powersgd."),
        ({"grad_comm": "powersgd", "powersgd_rank": 0}, "powersgd_rank=0 must be a whole number, 1 or more"),
        ({"grad_comm": "powersgd", "powersgd_rank": True}, "powersgd_rank=True must be a whole number, 1 or more"),
        ({"grad_comm": "powersgd", "precision": "fp16"}, "loss scale of earlier steps"),
        ({"grad_comm": "powersgd", "exact": False}, "leave out exact=False"),
        ({"topk_ratio": 0.1}, "topk_ratio=0.1 needs grad_comm=.topk."),
        ({"grad_comm": "topk", "topk_ratio": 0.5}, "must be a float above 0, 0.25 or less"),
        ({"grad_comm": "topk", "topk_ratio": 1}, "must be a float above 0, 0.25 or less"),
        ({"grad_comm": "topk", "precision": "fp16"}, "loss scale of earlier steps"),
        ({"grad_comm": "topk", "exact": False}, "leave out exact=False"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        train(Program(mlp, sgd), **options)
