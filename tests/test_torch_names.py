"""Names of torch that torch does not document are used in `lockstep/_torch.py` only, and do what we expect of them.

A test here that fails after an update of torch says which of them is gone, or has changed.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep import _torch
from on_workers import on_workers

SOURCE = Path(__file__).parent.parent / "src" / "lockstep"
EXCEPTIONS = {"_torch.py"}
# Imported under other names in some files.
TORCH = ("torch", "dist", "c10d", "TorchDDP")
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if str(path.relative_to(SOURCE)) not in EXCEPTIONS]


def private_names(path: Path) -> list[str]:
    """Dotted names under torch with a part that begins with one underscore, imported or written out."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            of, name = node.args[0], node.args[1]
            if ast.unparse(of).split(".")[0] in TORCH and isinstance(name, ast.Constant):
                found.append(f"{ast.unparse(of)}.{name.value}")
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.split(".")[0] in TORCH and name.replace(".", "").replace("_", "").isalnum():
                found.append(name)
    parts = {name: name.split(".") for name in found}
    return [name for name in found if any(p.startswith("_") and not p.startswith("__") for p in parts[name])]


def test_private_names_of_torch_are_in_one_file() -> None:
    assert {str(path.relative_to(SOURCE)): names for path in FILES if (names := private_names(path))} == {}


def test_the_search_finds_them(tmp_path: Path) -> None:
    imports = "import torch._dynamo\nfrom torch._C import x\nfrom torch.utils import _pytree\n"
    text = imports + "torch._foreach_add_(a)\ntorch.add(a)\nTorchDDP._x = 1\ngetattr(dist, '_y', None)\n"
    (tmp_path / "one.py").write_text(text)
    assert len(private_names(tmp_path / "one.py")) == 6


def test_every_name_is_there() -> None:
    """Importing the module is the check; a missing name is an ImportError or AttributeError that says which."""
    done = subprocess.run([sys.executable, "-c", "import lockstep._torch"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"torch {torch.__version__} lacks a name that lockstep needs:\n{done.stderr}"


def test_a_storage_is_counted_by_its_tensors() -> None:
    flat = torch.zeros(4)
    storage = flat.untyped_storage()
    before = _torch.storage_use_count(storage._cdata)
    piece = flat[:2]
    assert _torch.storage_use_count(storage._cdata) == before + 1
    del piece
    assert _torch.storage_use_count(storage._cdata) == before


def test_a_flat_buffer_is_cut_into_views() -> None:
    flat = torch.arange(5.0)
    first, second = _torch.unflatten(flat, [torch.zeros(2, 1), torch.zeros(3)])
    assert first.shape == (2, 1)
    assert second.data_ptr() == flat[2:].data_ptr()


def test_the_engine_tells_which_accumulators_it_will_run_and_when_it_ends() -> None:
    used, unused = (torch.ones(1, requires_grad=True) for _ in range(2))
    nodes = {name: p.view_as(p).grad_fn.next_functions[0][0] for name, p in (("used", used), ("unused", unused))}  # type: ignore[union-attr]
    seen: dict[str, bool] = {}
    order = []
    used.register_hook(lambda _: seen.update({name: _torch.will_execute_node(node) for name, node in nodes.items()}))
    product = used * 2
    product.register_hook(lambda _: _torch.call_when_backward_ends(lambda: order.append("ended")))  # type: ignore[no-untyped-call]
    used.register_post_accumulate_grad_hook(lambda _: order.append("accumulated"))
    product.backward()
    assert seen == {"used": True, "unused": False}
    assert order == ["accumulated", "ended"]


def test_writes_under_the_guard_are_not_counted() -> None:
    buffer = torch.zeros(1)
    with _torch.preserve_version_counter((buffer,)):
        buffer.add_(1)
    assert buffer._version == 0


def test_operations_on_lists_have_the_bits_of_those_on_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = ([torch.randn(7, generator=generator) for _ in range(3)] for _ in range(2))
    assert all(map(torch.equal, _torch.foreach_add(left, right), [a + b for a, b in zip(left, right, strict=True)]))
    assert all(map(torch.equal, _torch.foreach_mul(left, 0.3), [a * 0.3 for a in left]))
    assert all(map(torch.equal, _torch.foreach_div(left, right), [a / b for a, b in zip(left, right, strict=True)]))
    copies = [torch.zeros(7) for _ in left]
    _torch.foreach_copy_(copies, left)
    assert all(map(torch.equal, copies, left))


def test_norms_with_running_averages_have_one_base_class() -> None:
    for layer in (nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)):
        assert isinstance(layer, _torch.BatchNormBase)
    assert isinstance(nn.InstanceNorm1d(2, track_running_stats=True), _torch.NormBase)


def test_nested_batches_have_leaves() -> None:
    assert _torch.tree_leaves({"a": [1, (2, 3)]}) == [1, 2, 3]


def test_attributes_are_read_without_the_subclass() -> None:
    class Counted(nn.Parameter):
        calls: list[object] = []

        @classmethod
        def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            cls.calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[arg-type]

    one = Counted(torch.ones(2))
    one + 1
    assert len(Counted.calls) == 1
    with _torch.DisableTorchFunctionSubclass():
        one + 1
    assert len(Counted.calls) == 1


def compile_something(rank: int, size: int) -> tuple[bool, bool]:
    before = _torch.has_compiled_code()  # torch._dynamo is imported in this process already
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    return before, _torch.has_compiled_code()


def test_it_is_known_whether_code_was_compiled() -> None:
    assert on_workers(compile_something, 1) == [(False, True)]


def test_loader_processes_are_watched_by_number() -> None:
    _torch.set_worker_pids(7, ())
    _torch.raise_if_worker_failed()
    _torch.remove_worker_pids(7)


def test_shared_storage_has_the_size_that_was_asked_for() -> None:
    assert _torch.new_shared_storage(64).nbytes() == 64
    assert _torch.new_shared_storage(64).is_shared()


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that would have it
        return False


def test_the_compiler_has_the_modules_that_are_imported_ahead() -> None:
    missing = [name for name in _torch.COMPILER_MODULES if not has_module(name)]
    assert not missing or torch.__version__ < "2.13"  # which lacks some, and imports less
    for module, function in (*_torch.COMPILER_CALLS, *_torch.COMPILER_CALLS_ON_CPU):
        if not module.startswith("triton"):  # which is not installed without a GPU
            spec = importlib.util.find_spec(module)
            assert f"def {function}(" in Path(str(spec and spec.origin)).read_text(), (module, function)


PREPARES = """
import os, sys
import lockstep.train.run
from lockstep import _torch
_torch.dynamo()
os.environ.update(PATH=sys.argv[1], CXX="", PYTORCH_NVML_BASED_CUDA_CHECK="1")
_torch.prepare_compiler()
assert "torch._inductor.codegen.cpp_wrapper_gpu" in sys.modules
tested = sys.modules["torch._inductor.cpu_vec_isa"]
print(tested.valid_vec_isa_list.cache_info().currsize)
_torch.forget_vector_instructions()
print(tested.valid_vec_isa_list.cache_info().currsize)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="vector instructions are tested on machines without a GPU")
@pytest.mark.parametrize(("path", "kept"), [(os.environ["PATH"], 1), ("/nonexistent", 0)])
def test_the_compiler_is_prepared_even_if_there_is_no_c_compiler(path: str, kept: int) -> None:
    """What was found out without one is not kept, since code for other processes would be other code."""
    command = [sys.executable, "-c", PREPARES, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(kept), "0"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_of_a_gpu() -> None:
    before = _torch.cuda_exchange_device(0)
    assert _torch.cuda_current_raw_stream(0) == torch.cuda.current_stream(0).cuda_stream
    assert len(_torch.cuda_current_stream(0)) == 3
    _torch.cuda_exchange_device(before)


def test_a_cast_can_be_replaced_and_autograd_takes_the_copy() -> None:
    weight, x = nn.Parameter(torch.tensor([[1.0, 2.0]])), torch.ones(1, 2)
    copy, noted = torch.tensor([[8.0, 16.0]], dtype=torch.bfloat16), list[tuple[torch.Tensor, torch.Tensor]]()
    with (
        _torch.replace_casts(
            [torch.bfloat16],
            lambda given, dtype: copy.detach() if given is weight else None,
            lambda given, result: noted.append((given, result)),
        ),
        torch.autocast("cpu", torch.bfloat16),
    ):
        y = nn.functional.linear(x, weight)
    assert y.item() == 24.0
    ((given, result),) = [pair for pair in noted if pair[0] is weight]
    (gradient,) = torch.autograd.grad(y.float().sum(), [result])
    assert gradient.dtype == torch.bfloat16
    assert given is weight
