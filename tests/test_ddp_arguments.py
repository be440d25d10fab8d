"""Arguments and corners of the drop-in that a program rarely touches, and that would rot unnoticed."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep import DistributedDataParallel as OurDDP
from on_workers import on_workers
from programs import Mlp
from test_ddp import Counter, Recorder, Written, mean_over_workers, seeded

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


# -- settings survive saving -------------------------------------------------------------------------------------


def saved_settings(rank: int, size: int) -> list[Any]:
    ddp = OurDDP(seeded(Mlp), bucket_cap_mb=0.002, gradient_as_bucket_view=True, forward_sync_buffers=False)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for _ in range(3):
        loaded(torch.ones(2, 16)).sum().backward()
    sizes = [bucket.numel for bucket in loaded.reducer.core.queue.buckets]
    return [sizes, loaded.bucket_bytes_cap, loaded.reducer.core.queue.ownership.name, loaded.forward_sync_buffers]


def test_a_saved_wrapper_keeps_its_settings() -> None:
    assert on_workers(saved_settings, 2) == [[[650, 4160, 1088], 2097, "BUCKET_VIEW", False]] * 2


# -- complex buckets travel as reals -----------------------------------------------------------------------------


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.z * x).abs().sum()


def complex_on_the_wire(rank: int, size: int) -> list[Any]:
    group = Recorder(dist.group.WORLD)
    ddp = OurDDP(Complex(), process_group=group)
    group.events.clear()
    ddp(torch.ones(1)).backward()
    return group.events


def test_complex_gradients_are_sent_as_pairs_of_reals() -> None:
    """NCCL and others cannot add complex numbers; Gloo can, so only the size on the wire tells."""
    assert on_workers(complex_on_the_wire, 2) == [[("allreduce", 6)]] * 2


# -- install, in modules that are loaded already -----------------------------------------------------------------


def install_late(rank: int, size: int) -> list[str]:
    import lockstep

    user: Any = types.ModuleType("a_users_module")
    exec("from torch.nn.parallel import DistributedDataParallel as DDP", vars(user))
    sys.modules["a_users_module"] = user
    assert user.DDP is TorchDDP
    lockstep.install_ddp()
    return [user.DDP.__module__, type(user.DDP(seeded(Mlp))).__module__]


def test_install_reaches_names_that_were_imported_before() -> None:
    assert on_workers(install_late, 2) == [["lockstep.ddp.wrapper"] * 2] * 2


# -- compile -----------------------------------------------------------------------------------------------------


def compiled_graphs(rank: int, size: int, wrapper: type, where: str) -> tuple[int, list[str], list[float]]:
    from torch._dynamo.convert_frame import register_bytecode_hook

    graphs, ours = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def on_compiled(code: Any, _new: Any) -> None:
        if "/lockstep/" in code.co_filename:
            ours.append(code.co_name)

    register_bytecode_hook(on_compiled)
    ddp = wrapper(seeded(Written), bucket_cap_mb=1)
    if where == "around":
        model: Any = torch.compile(ddp, backend=backend)
    else:
        ddp.module.compile(backend=backend)
        model = ddp
    for _ in range(3):
        model(torch.full((3, 16), rank + 1.0)).sum().backward()
    return len(graphs), ours, torch.cat([parameter.grad.flatten() for parameter in ddp.parameters()]).tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["around", "inside"])
def test_compiled_graphs_are_cut_at_bucket_borders_and_the_wrapper_is_not_compiled(where: str) -> None:
    found, wanted = (on_workers(compiled_graphs, 2, wrapper, where) for wrapper in (OurDDP, TorchDDP))
    assert found[0][0] > 1, "one graph: Dynamo did not see the wrapper that was running"
    assert found == wanted
    assert found[0][2] == found[1][2]  # gradients are averaged


# -- delay_all_reduce_named_params -------------------------------------------------------------------------------


def delayed(rank: int, size: int, wrapper: type, names: list[str]) -> None:
    module, local = seeded(Mlp), seeded(Mlp)
    if rank:
        with torch.no_grad():
            module[4].weight.add_(1)  # made equal at the start, delayed or not
    later = [(n, p) for n, p in module.named_parameters() if n in names]
    ddp = wrapper(module, delay_all_reduce_named_params=later, param_to_hook_all_reduce=module[0].weight)
    for step in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * rank + step))
        ddp.zero_grad()
        local.zero_grad()
        ddp(x).sum().backward()
        local(x).sum().backward()
        expected = {n: mean_over_workers(p.grad) for n, p in local.named_parameters()}
        for name, p in ddp.module.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], msg=lambda m, n=name, s=step: f"{n}, step {s}: {m}")


def test_delayed_parameters_are_averaged_when_backward_returns() -> None:
    """Torch's class does not wait for them."""
    on_workers(delayed, 2, OurDDP, ["4.weight", "4.bias"])


def delayed_after_loading(rank: int, size: int) -> None:
    module = seeded(Mlp)
    later = [(n, p) for n, p in module.named_parameters() if n.startswith("4.")]
    ddp = OurDDP(module, delay_all_reduce_named_params=later, param_to_hook_all_reduce=module[0].weight)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert list(loaded.state_dict()) == [f"module.{n}" for n in Mlp().state_dict()]
    for _ in range(3):
        loaded.zero_grad()
        loaded(torch.randn(2, 16, generator=torch.Generator().manual_seed(rank))).sum().backward()
        for p in loaded.parameters():
            assert torch.equal(p.grad, mean_over_workers(p.grad))


def test_delayed_parameters_are_still_averaged_after_loading() -> None:
    on_workers(delayed_after_loading, 2)


# -- mixed_precision ---------------------------------------------------------------------------------------------


def mixed(rank: int, size: int) -> list[str]:
    from torch.nn.parallel.distributed import _MixedPrecision

    low = torch.bfloat16
    precision = _MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low)
    ddp = OurDDP(Counter(1.0), mixed_precision=precision)
    (x,), kwargs = ddp._pre_forward(torch.ones(1, 2), y=torch.ones(1))
    weight = ddp.module.linear.weight
    dtypes = [weight.dtype, weight._mp_param.dtype, ddp.module.seen.dtype, x.dtype, kwargs["y"].dtype]
    dtypes += [bucket.dtype for bucket in ddp.reducer.core.queue.buckets]
    with pytest.raises(RuntimeError, match="can only be called once"):  # its own hook is there
        ddp.register_comm_hook(None, lambda state, bucket: None)
    return [str(dtype) for dtype in dtypes]


def test_mixed_precision_is_prepared() -> None:
    """All of it that runs without an accelerator: copies, buffers, inputs and buckets in low precision."""
    assert on_workers(mixed, 1) == [["torch.float32"] + ["torch.bfloat16"] * 5]


# -- hooks for buffers -------------------------------------------------------------------------------------------


def buffer_hook(rank: int, size: int, wrapper: type, place: str) -> list[Any]:
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    ddp = wrapper(seeded(lambda: Counter(5.0)))
    calls = []

    def add_up(state: list[Any], buffers: dict[str, Tensor]) -> Any:
        state.append(sorted(buffers))
        works = [dist.all_reduce(b, async_op=True) for b in buffers.values()]
        if place == "POST_FORWARD":
            return [work.get_future() for work in works]  # waited for at the end of the backward pass
        for work in works:
            work.wait()
        return None

    ddp._register_buffer_comm_hook(calls, add_up, _BufferCommHookLocation[place])
    seen = []
    for _ in range(3):
        ddp(torch.full((1, 2), 1.0 + rank)).sum().backward()
        seen += [ddp.module.at_forward, float(ddp.module.seen)]
    return [calls, seen]


@pytest.mark.parametrize("place", ["PRE_FORWARD", "POST_FORWARD"])
def test_a_hook_for_buffers_takes_the_place_of_the_broadcast(place: str) -> None:
    ours = on_workers(buffer_hook, 2, OurDDP, place)
    assert ours == on_workers(buffer_hook, 2, TorchDDP, place)
    assert ours[0][0] == [["seen"]] * 3


# -- logging data ------------------------------------------------------------------------------------------------


def logged(rank: int, size: int, wrapper: type) -> dict[str, Any]:
    ddp = wrapper(seeded(Mlp), bucket_cap_mb=0.002, gradient_as_bucket_view=True)
    for _ in range(4):
        ddp(torch.ones(1, 16)).sum().backward()
    data = ddp._get_ddp_logging_data()
    keys = """world_size rank module_name iteration num_parameter_tensors total_parameter_size_bytes dtypes
        bucket_sizes bucket_cap_bytes find_unused_parameters gradient_as_bucket_view backend_name broadcast_buffers
        has_rebuilt_buckets rebuilt_bucket_sizes rebuilt_per_bucket_param_indices num_buckets_reduced
        prev_iteration_grad_ready_order_indices unused_parameter_size is_multi_device_module"""
    assert data["avg_backward_compute_time"] > 0
    return {key: data.get(key) for key in keys.split()}


def test_logging_data_is_torchs() -> None:
    assert on_workers(logged, 2, OurDDP) == on_workers(logged, 2, TorchDDP)


# -- device_mesh -------------------------------------------------------------------------------------------------


def over_mesh(rank: int, size: int) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ddp = OurDDP(seeded(Mlp), device_mesh=mesh["dp"])  # ranks 0 and 2, ranks 1 and 3
    ddp(torch.full((1, 16), float(rank))).sum().backward()
    local = seeded(Mlp)
    gradient = torch.zeros_like(local[0].weight)
    for other in (rank % 2, rank % 2 + 2):
        local.zero_grad()
        local(torch.full((1, 16), float(other))).sum().backward()
        gradient += local[0].weight.grad / 2
    torch.testing.assert_close(ddp.module[0].weight.grad, gradient)
    with pytest.raises(RuntimeError, match="Only 1D device mesh"):
        OurDDP(Mlp(), device_mesh=mesh)
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        OurDDP(Mlp(), device_mesh=mesh["dp"], process_group=dist.group.WORLD)
    return dist.get_process_group_ranks(ddp.process_group)


def test_gradients_are_averaged_over_a_device_mesh() -> None:
    assert on_workers(over_mesh, 4) == [[0, 2], [1, 3], [0, 2], [1, 3]]
