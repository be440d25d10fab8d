"""Communication hooks: torch's own ones run unchanged and give torch's results; the rules for others are kept.

(No postponed annotations here: torch's class, which runs beside ours, does not understand them.)
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep import DistributedDataParallel as OurDDP
from on_workers import on_workers, try_on_workers
from programs import Mlp, digest

HOOKS = (
    "allreduce",
    "fp16",
    "powerSGD",
    "fp16 around powerSGD",
    "post local SGD",
    "built-in allreduce",
    "built-in fp16",
    "noop",
)


def device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def build(wrapper: type, **options: Any) -> Any:
    torch.manual_seed(1)
    return wrapper(Mlp().to(device()), **{"bucket_cap_mb": 0.002} | options)


def register(ddp: Any, name: str) -> None:
    group = dist.group.WORLD
    match name:
        case "allreduce":
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        case "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "fp16 around powerSGD":
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))
        case "powerSGD":
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        case "post local SGD":
            local = dist.new_subgroups(group_size=1)[0]
            state = post_localSGD_hook.PostLocalSGDState(group, local, start_localSGD_iter=3)
            ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        case "built-in allreduce":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        case "built-in fp16":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        case "noop":
            from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

            ddp.register_comm_hook(None, noop_hook)


def train(rank: int, size: int, wrapper: type, hook: str, view: bool) -> list[str]:
    # PowerSGD sends more from inside its futures, so with several buckets on Gloo the order of its collectives differs
    # between workers, and torch's class hangs as ours does: one bucket.
    cap = 25 if "powerSGD" in hook else 0.002
    ddp = build(wrapper, gradient_as_bucket_view=view, bucket_cap_mb=cap)
    register(ddp, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    digests = []
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * rank + step))
        ddp(x.to(device())).square().mean().backward()
        digests.append(digest({n: p.grad.cpu() for n, p in ddp.named_parameters()}))
        optimizer.step()
    return digests


@pytest.mark.few(3)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_torch_give_the_bits_they_give_with_torchs_class(hook: str, view: bool) -> None:
    assert on_workers(train, 3, OurDDP, hook, view) == on_workers(train, 3, TorchDDP, hook, view)


def chained(rank: int, size: int) -> list[Any]:
    """A hook that sends another buffer, chains futures, and looks at everything a bucket shows."""
    ddp = build(OurDDP)
    seen: list[Any] = []

    def hook(state: list[Any], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        numels = [g.numel() for g in bucket.gradients()]
        assert numels == [p.numel() for p in bucket.parameters()]
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        assert bucket.buffer().numel() == sum(numels)
        state.append((bucket.index(), bucket.is_last()))
        bucket.set_buffer(bucket.buffer().double())
        assert bucket.gradients()[0].dtype == torch.float64
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        doubled = future.then(lambda f: f.value()[0] * 2)
        return doubled.then(lambda f: (f.value() / (2 * size)).float())

    ddp.register_comm_hook(seen, hook)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        seen.clear()
        ddp.zero_grad()
        ddp(x).sum().backward()
    torch.manual_seed(1)
    local = Mlp()
    local(x).sum().backward()
    for p, q in zip(ddp.parameters(), local.parameters(), strict=True):
        dist.all_reduce(q.grad)
        torch.testing.assert_close(p.grad, q.grad / size)
    return seen


def test_a_hook_may_replace_the_buffer_and_chain_futures() -> None:
    for seen in on_workers(chained, 2):
        assert seen == [(0, False), (1, False), (2, True)]


def rules(rank: int, size: int, what: str) -> None:
    ddp = build(OurDDP)

    def good(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def wrong_bucket(state: object, bucket: int) -> torch.futures.Future[Tensor]:
        raise AssertionError

    def wrong_return(state: object, bucket: dist.GradBucket) -> Tensor:
        raise AssertionError

    def no_future(state: object, bucket: dist.GradBucket):
        return 1

    def no_bucket(state: object, data: object):
        raise AssertionError

    if what == "twice":
        ddp.register_comm_hook(None, good)
        ddp.register_comm_hook(None, good)
    elif what == "built-in second":
        ddp.register_comm_hook(None, good)
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif what == "not callable":
        ddp.register_comm_hook(None, 3)
    elif what == "bf16":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    else:
        hook = {"bucket": wrong_bucket, "return": wrong_return, "no future": no_future, "no bucket": no_bucket}[what]
        ddp.register_comm_hook(None, hook)
        ddp(torch.ones(1, 16)).sum().backward()


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("twice", "RuntimeError", "can only be called once"),
        ("built-in second", "RuntimeError", "can only be called once"),
        ("not callable", "TypeError", "must be callable"),
        ("bucket", "ValueError", "bucket annotation should be dist.GradBucket"),
        ("return", "ValueError", "return annotation should be torch.futures.Future"),
        ("no future", "RuntimeError", "callback must return a torch.futures.Future object, but got"),
        ("no bucket", "TypeError", "named 'bucket'"),
        ("bf16", "TypeError", "BF16 all reduce communication hook required CUDA"),
    ],
)
def test_rules_for_hooks(what: str, error: str, words: str) -> None:
    (outcome,) = try_on_workers(rules, 1, what)
    assert f"{error}: " in outcome
    assert words in outcome


def sparse_hook(rank: int, size: int, wrapper: type) -> str:
    torch.manual_seed(1)
    ddp = wrapper(nn.EmbeddingBag(20, 4, sparse=True, mode="sum"))

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        assert bucket.buffer().is_sparse
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda f: f.value()[0] / size)

    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.tensor([[rank, 3, 5 + rank]])).sum().backward()
    return digest({"grad": ddp.module.weight.grad})


def test_a_hook_for_sparse_gradients() -> None:
    assert on_workers(sparse_hook, 2, OurDDP) == on_workers(sparse_hook, 2, TorchDDP)


def fused(rank: int, size: int, wrapper: type, optimizer: type) -> str:
    ddp = build(wrapper)
    ddp._register_fused_optim(optimizer, 0.05)
    for step in range(5):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * rank + step))
        ddp(x).square().mean().backward()
    return digest(dict(ddp.named_parameters()))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_fused_into_the_backward_pass(optimizer: type) -> None:
    ours = on_workers(fused, 2, OurDDP, optimizer)
    assert ours == on_workers(fused, 2, TorchDDP, optimizer)
    assert ours[0] == ours[1]


def train_with_integers(rank: int, size: int, ours: bool, hook: str) -> tuple[float, float, str]:
    import lockstep

    ddp = build(OurDDP if ours else TorchDDP)
    plain = build(OurDDP if ours else TorchDDP)
    if hook:
        ddp.register_comm_hook(None, getattr(lockstep.hooks, hook)(seed=3))
    errors = []
    for step in range(4):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(device())
        for one in (ddp, plain):
            one.zero_grad()
            one(x).square().mean().backward()
        pairs = [(a.grad, b.grad) for a, b in zip(ddp.parameters(), plain.parameters(), strict=True)]
        size_of = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
        errors.append(sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5 / size_of)
    return min(errors), max(errors), digest({n: p.grad.cpu() for n, p in ddp.named_parameters()})


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch"])
@pytest.mark.parametrize(("hook", "least", "most"), [("int8", 1e-4, 0.03), ("int4", 1e-2, 0.5)])
def test_hooks_that_send_integers(ours: bool, hook: str, least: float, most: float) -> None:
    found = on_workers(train_with_integers, 3, ours, hook)
    assert {one[2] for one in found} == {found[0][2]}, "the workers differ"
    assert least < found[0][0] <= found[0][1] < most


def share_a_hook(rank: int, size: int, ours: bool) -> float:
    """Two models of the same shape, whose buckets have the same numbers, in one backward pass."""
    import lockstep

    hook = lockstep.hooks.int8()
    torch.manual_seed(1)
    wrapper = OurDDP if ours else TorchDDP
    models = [wrapper(nn.Linear(300, 300)) for _ in range(2)]
    for model in models:
        model.register_comm_hook(None, hook)
    x = torch.randn(8, 300, generator=torch.Generator().manual_seed(rank))
    (models[0](x).square().mean() + 1000 * models[1](x).square().mean()).backward()
    plain = wrapper(nn.Linear(300, 300))
    plain.module.load_state_dict(models[0].module.state_dict())
    plain(x).square().mean().backward()
    mine, want = models[0].module.weight.grad, plain.module.weight.grad
    return float((mine - want).norm() / want.norm())


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch"])
def test_a_hook_may_be_registered_with_two_models(ours: bool) -> None:
    assert max(on_workers(share_a_hook, 2, ours)) < 0.03


def test_a_hook_needs_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import lockstep

    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # another test may have left a group
    with pytest.raises(ValueError, match=r"init_process_group or lockstep\.init first"):
        lockstep.hooks.int8()
