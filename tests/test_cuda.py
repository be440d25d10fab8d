"""On a GPU: one worker over NCCL, and two workers that share the GPU over Gloo. Skipped where there is none."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep import DistributedDataParallel as OurDDP
from lockstep.ddp.autograd_graph import HookMode
from on_workers import on_workers
from programs import CASES, Mlp

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]


def bits(tensors: Any) -> list[Any]:
    return [t.detach().coalesce().to_dense().tolist() if t.is_sparse else t.detach().tolist() for t in tensors]


def train(
    wrapper: Any, case: str, rank: int, *, group: Any = None, stream: bool = False, few: bool = False
) -> list[Any]:
    build, options, loss = CASES[case]
    options = {k: v for k, v in options.items() if k in inspect.signature(TorchDDP.__init__).parameters}
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    module = build().cuda()
    if few:
        options = options | {"bucket_cap_mb": 0.002}
    model = module if wrapper is None else wrapper(module, device_ids=[0], process_group=group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    side = torch.cuda.Stream() if stream else torch.cuda.current_stream()
    side.wait_stream(torch.cuda.current_stream())
    seen = []
    with torch.cuda.stream(side):
        for step in range(10):
            x = torch.randn(6, 16, generator=torch.Generator().manual_seed(100 * rank + step))
            x = x.to("cuda", next(module.parameters()).dtype)
            optimizer.zero_grad()
            loss(model, x).backward()
            seen.append(bits(p.grad for p in module.parameters() if p.grad is not None))
            optimizer.step()
            seen.append(bits(module.parameters()))
    if few:
        assert model.reducer.core.hooks.mode is HookMode.LAST_OF_BUCKET
    return seen


def compare(rank: int, size: int, case: str, stream: bool) -> None:
    ours = train(OurDDP, case, rank, stream=stream)
    theirs = train(TorchDDP, case, rank, stream=stream)
    assert ours == theirs


@pytest.mark.parametrize("case", CASES)
def test_two_workers_on_one_gpu_give_torchs_bits(case: str) -> None:
    on_workers(compare, 2, case, False)


def test_on_a_stream_of_the_users_own() -> None:
    on_workers(compare, 2, "mlp in many buckets", True)


def few_hooks(rank: int, size: int) -> None:
    assert train(OurDDP, "mlp", rank, few=True) == train(TorchDDP, "mlp", rank)


def test_few_hooks_give_the_same_bits() -> None:
    on_workers(few_hooks, 2)


def alone(rank: int, size: int, case: str) -> None:
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert train(OurDDP, case, 0) == train(None, case, 0)
    if "views" not in case:
        assert train(OurDDP, case, 0) == train(TorchDDP, case, 0)


@pytest.mark.parametrize("case", ["mlp", "mlp, gradients are views", "cnn with batch norm", "frozen part", "lstm"])
def test_one_worker_over_nccl_gives_the_bits_of_the_bare_module(case: str) -> None:
    on_workers(alone, 1, case)


def scaled(rank: int, size: int) -> tuple[list[Any], list[Any]]:
    """fp16 autocast with a gradient scaler, and bf16, with overflow on one worker only."""
    results = []
    for wrapper in (OurDDP, TorchDDP):
        torch.manual_seed(1)
        ddp = wrapper(Mlp().cuda(), device_ids=[0])
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        scales = []
        for step in range(8):
            x = torch.randn(4, 16, device="cuda", generator=torch.Generator("cuda").manual_seed(10 * rank + step))
            if step == 3 and rank == 1:
                x *= 1e5
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16 if step % 2 else torch.bfloat16):
                loss = ddp(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append([scales, bits(ddp.parameters())])
    return results[0], results[1]


def test_autocast_and_gradient_scaler() -> None:
    (ours, theirs), (other, _) = on_workers(scaled, 2)
    assert ours == theirs
    assert ours == other
    assert min(ours[0]) < 2.0**10, "the overflow on one worker must be seen by both"


class Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def peak(rank: int, size: int, wrapped: bool) -> int:
    torch.manual_seed(1)
    model: Any = Big().cuda()
    if wrapped:
        model = OurDDP(model, device_ids=[0], bucket_cap_mb=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        model(torch.randn(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_gradients_are_handed_over_not_doubled() -> None:
    bare = on_workers(peak, 2, False)[0]
    wrapped = on_workers(peak, 2, True)[0]
    bucket = 8 * 2**20
    assert wrapped - bare <= 2 * bucket, f"{(wrapped - bare) / 2**20:.1f} MiB more than the bare module"
