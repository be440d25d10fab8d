"""Every name of torch that torch does not document, each with the reason why it is needed.

The rest of the package takes such names from here, so that one file shows what a new version of torch may break.
`tests/test_torch_names.py` checks that each of them is there and does what is expected of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
import torch.utils.data
from torch import _C

# Stores, and the options of collectives that a process group is called with: torch.distributed hands on most of them.
from torch._C._distributed_c10d import (
    AllgatherOptions as AllgatherOptions,
    AllreduceCoalescedOptions as AllreduceCoalescedOptions,
    AllreduceOptions as AllreduceOptions,
    BarrierOptions as BarrierOptions,
    BroadcastOptions as BroadcastOptions,
    BuiltinCommHookType as BuiltinCommHookType,
    GradBucket as GradBucket,
    HashStore as HashStore,
    PrefixStore as PrefixStore,
    ProcessGroupGloo as ProcessGroupGloo,
    ReduceOp as ReduceOp,
    ReduceOptions as ReduceOptions,
    ReduceScatterOptions as ReduceScatterOptions,
    Store as Store,
    TCPStore as TCPStore,
)
from torch._utils import _get_device_index
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import distributed_c10d

# The backend of a group for each kind of device ("cpu:shm,cuda:nccl").
from torch.distributed.distributed_c10d import (
    Backend as Backend,
    BackendConfig as BackendConfig,
    _get_default_group,
    _get_default_store,
    _set_pg_timeout,
)
from torch.distributed.utils import _alloc_storage, _cast_forward_inputs, _free_storage, _to_kwargs
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

# Tensors inside nested batches, found as torch's own FSDP finds them.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils.data._utils import worker as _worker

# The group and the store of a program that called init_process_group itself.
get_default_group: Final = _get_default_group


def has_step_hooks(optimizer: Any) -> bool:
    """Whether functions are registered that are called before or after a step of this optimiser."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # a subclass may not have called __init__
    return any(getattr(optimizer, name, None) for name in names)


@contextmanager
def running_wrapper(wrapper: Any) -> Iterator[None]:
    """Tell TorchDynamo which wrapper is running; it then splits its graphs at the ends of buckets."""
    before = TorchDDP._active_ddp_module
    TorchDDP._active_ddp_module = wrapper
    try:
        yield
    finally:
        TorchDDP._active_ddp_module = before


def wrap_sync_batchnorm_check(wrap: Callable[[Any], Any]) -> None:
    """Replace what torch's DDP does with the SyncBatchNorm layers of a module by `wrap` of it.

    It refuses every subclass on a CPU, also one that works there.
    """
    TorchDDP._passing_sync_batchnorm_handle = wrap(  # type: ignore[method-assign]
        TorchDDP._passing_sync_batchnorm_handle
    )


get_default_store: Final = _get_default_store
# A group that was formed with a short timeout trains with a long one.
set_group_timeout: Final = _set_pg_timeout
# What DistributedDataParallel does with its arguments and inputs; ours must do the same.
get_device_index: Final = _get_device_index
move_to_device: Final = _to_kwargs
cast_forward_inputs: Final = _cast_forward_inputs
alloc_storage: Final = _alloc_storage
free_storage: Final = _free_storage
BufferCommHook = _BufferCommHook
BufferCommHookLocation = _BufferCommHookLocation
# Buffers that are broadcast between forward and backward must not look changed to autograd.
preserve_version_counter: Final = _unsafe_preserve_version_counter
# Whether a profiler is on: only then are ranges recorded.
profiler_enabled: Final[Callable[[], bool]] = _profiler_enabled
# All batch norms; and all norms with running averages, instance norm among them.
BatchNormBase = _BatchNorm
NormBase = _NormBase
# `torch.utils.data.get_worker_info()` inside a loader process reads a global of this module.
loader_worker: Final[Any] = _worker
# What torch.futures.Future wraps: a work's get_future() returns it.
FutureBase: Final = _C.Future
# Which accumulators the running backward pass will execute; None of the public calls tells.
will_execute_node: Final[Callable[[Any], bool]] = _C._will_engine_execute_node
# How many tensors share a storage: a bucket whose memory is shared by gradients cannot be used again.
storage_use_count: Final[Callable[[int], int]] = _C._storage_Use_Count
# Attributes of a parameter that do not depend on its values can be read while those are still to arrive.
DisableTorchFunctionSubclass: Final = _C.DisableTorchFunctionSubclass
# One call for all pieces of a flat buffer.
unflatten: Final[Callable[..., Any]] = _C._nn.unflatten_dense_tensors
# A loader process that dies raises an error in this one, through SIGCHLD.
set_worker_pids: Final[Callable[..., None]] = _C._set_worker_pids
remove_worker_pids: Final[Callable[..., None]] = _C._remove_worker_pids
raise_if_worker_failed: Final[Callable[[], None]] = _C._error_if_any_worker_fails
# CUDA streams in a thread of our own, without the cost of context managers. None in a build without CUDA.
cuda_exchange_device: Final[Any] = getattr(_C, "_cuda_exchangeDevice", None)
cuda_current_stream: Final[Any] = getattr(_C, "_cuda_getCurrentStream", None)
cuda_current_raw_stream: Final[Any] = getattr(_C, "_cuda_getCurrentRawStream", None)
cuda_set_stream: Final[Any] = getattr(_C, "_cuda_setStream", None)

# Operations on lists of tensors in few kernels, as torch's own optimisers use them.
foreach_add: Final = torch._foreach_add
foreach_add_: Final = torch._foreach_add_
foreach_addcmul_: Final = torch._foreach_addcmul_
foreach_copy_: Final = torch._foreach_copy_
foreach_div: Final = torch._foreach_div
foreach_div_: Final = torch._foreach_div_
foreach_lerp_: Final = torch._foreach_lerp_
foreach_mul: Final = torch._foreach_mul
foreach_mul_: Final = torch._foreach_mul_
foreach_norm: Final = torch._foreach_norm
foreach_sqrt: Final = torch._foreach_sqrt
foreach_sub_: Final = torch._foreach_sub_


def distributed_state() -> Any:
    """Return torch's registry of groups: the store and the backends of each, and their number."""
    return distributed_c10d._world


def has_compiled_code() -> bool:
    """Return whether torch.compile has compiled a function of this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def call_when_backward_ends(call: Callable[[], None]) -> None:
    """Call `call` at the end of the running backward pass, as torch's own reducer does."""
    engine: Any = torch.autograd.Variable
    engine._execution_engine.queue_callback(call)


def new_shared_storage(size_bytes: int) -> torch.UntypedStorage:
    """Return a storage that other processes can map."""
    storage: Any = torch.UntypedStorage
    made: torch.UntypedStorage = storage._new_shared(size_bytes)
    return made


def is_in_bad_fork() -> bool:
    """Return whether CUDA was used before this process was forked, so that it cannot be used here."""
    return bool(torch.cuda._is_in_bad_fork())


def dynamo() -> Any:
    """Return torch._dynamo, which takes as long to import as torch itself; the first optimiser imports it anyway."""
    import torch._dynamo

    return torch._dynamo


COMPILER_MODULES: Final = (  # which torch.compile imports when it loads compiled code, with what they import
    "torch._inductor.compile_fx",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo",
    "torch.distributed.tensor.experimental",
    "torch._dynamo.dce_extra_outputs",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.compiler_bisector",
    "torch._inductor.fx_passes.apply_gumbel_max_trick",
    "torch._inductor.fx_passes.efficient_conv_bn_eval",
    "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.quantization",
    "torch._inductor.hooks",
    "torch._subclasses.schema_check_mode",
    "torch.export._trace",
    "torch.fx.experimental.validator",
)
COMPILER_CALLS: Final = (  # (module, function): they keep what they compute, or import more
    ("torch._dynamo.backends.registry", "_lazy_import"),
    ("torch._inductor.codegen.common", "init_backend_registration"),
    ("torch._inductor.codecache", "torch_key"),
    ("triton.runtime.cache", "triton_key"),
)
COMPILER_CALLS_ON_CPU: Final = (  # seconds: a trial compilation, and a process that loads it
    ("torch._inductor.cpu_vec_isa", "pick_vec_isa"),
)


def prepare_compiler() -> None:
    """Import the modules that torch.compile imports when it compiles for the first time, compute the keys of its
    caches, and on a machine without a GPU test which vector instructions there are.

    That takes seconds, and is the same in every process. A part that fails, or that this version of torch does not
    have, is left out. Set PYTORCH_NVML_BASED_CUDA_CHECK=1 before, or CUDA is used to find out whether there is a GPU.
    """
    for name in COMPILER_MODULES:
        with suppress(Exception):
            importlib.import_module(name)
    is_on_cpu = not torch.cuda.is_available()
    for module, function in (*COMPILER_CALLS, *(COMPILER_CALLS_ON_CPU if is_on_cpu else ())):
        with suppress(Exception):
            if hasattr(sys.modules.get(module), function):
                getattr(sys.modules[module], function)()
    if is_on_cpu and not _are_all_found():
        forget_vector_instructions()


def _are_all_found() -> bool:
    """Whether the test has found all vector instructions that the processor has. A trial may fail, on a busy machine,
    and workers with other instructions than others would compute other bits."""
    tested: Any = sys.modules.get("torch._inductor.cpu_vec_isa")
    try:
        has = tested.x86_isa_checker()  # empty on other processors, where nothing is tried
        expected = [one for one in tested.supported_vec_isa_list if all(name in has for name in str(one).split())]
        found: list[Any] = tested.valid_vec_isa_list()
    except Exception:
        return False
    return len(found) >= max(len(expected), 1)


def forget_vector_instructions() -> None:
    """Let torch.compile test again which vector instructions there are, on which the code for a CPU depends."""
    tested: Any = sys.modules.get("torch._inductor.cpu_vec_isa")
    if tested is not None:
        base = tested.VecISA
        tests = [tested.valid_vec_isa_list, getattr(base, "_VecISA__bool__impl", None)]
        for test in (*tests, *(kind.__bool__ for kind in base.__subclasses__())):
            with suppress(AttributeError):  # it keeps nothing
                test.cache_clear()


def inductor_config() -> Any:
    """Return the settings of the compiler behind torch.compile; `deterministic` is the one that is used."""
    import torch._inductor.config

    return torch._inductor.config


def allow_recompilations(times: int) -> None:
    """Let torch.compile compile the same code so many times as often, where it ends the run otherwise.

    Until the settings are restored that say so.
    """
    config: Any = dynamo().config
    if config.fail_on_recompile_limit_hit:
        config.recompile_limit *= times
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)


def exclude_from_compiler(package: str) -> None:
    """Make torch.compile run the code of `package` as it is, as it does with torch's own distributed code."""
    dynamo().trace_rules.add(package)


def tensor_parallel_transform() -> Callable[..., Any]:
    """Return the function that turns the DTensors of a module into local ones before it is wrapped."""
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    return _pre_dp_module_transform


def optimizer_in_backward_hook() -> Callable[..., Any]:
    """Return the function that makes the hook for optimisers which step inside the backward pass."""
    from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _apply_optim_in_backward_hook

    make: Callable[..., Any] = _apply_optim_in_backward_hook
    return make


def overlapped_optimizer() -> Callable[..., Any]:
    """Return the function that wraps an optimiser for DistributedDataParallel._register_fused_optim."""
    from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

    wrap: Callable[..., Any] = _as_overlapped_optim
    return wrap


def mixed_precision_hook() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return torch's (state class, communication hook) that all-reduces in low precision and upcasts the result."""
    from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
        _AllreduceUpcastHookState,
        _reducer_allreduce_and_upcast_hook,
    )

    return _AllreduceUpcastHookState, _reducer_allreduce_and_upcast_hook


def report_host_tensors(report: Callable[[str], None]) -> Any:
    """Return a context in which `report(reason)` is called for operations that no CUDA graph can contain.

    That is an operation on the GPU that reads a tensor of the host, whose address or value a graph would keep; and a
    collective, which the host takes part in.
    """

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace == "c10d":
                report(f"the pass calls a collective ({func})")
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            # Attention keeps the seed of its dropout on the host, but on the GPU while it is captured.
            is_attention = "attention" in func.__name__
            is_on_gpu = any(one.is_cuda for one in (*given, *made))
            if is_on_gpu and not is_attention and any(one.device.type == "cpu" for one in given):
                report(f"an operation on the GPU ({func}) reads a tensor of the host")
            return result

    return Watch()  # type: ignore[no-untyped-call]


def replace_casts(
    dtypes: Collection[torch.dtype],
    copy_of: Callable[[torch.Tensor, torch.dtype], torch.Tensor | None],
    note: Callable[[torch.Tensor, torch.Tensor], None],
) -> Any:
    """Return a context in which a cast of a tensor to one of these dtypes gives `copy_of(tensor, dtype)`.

    If that is None, the cast is made. `note` is called with the tensor and the result. Autograd records the cast as if
    it had been made. Autocast has no other way to use a copy of a weight that exists.
    """
    cast = torch.ops.aten._to_copy.default

    class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            options = kwargs or {}
            if func is not cast or list(options) != ["dtype"] or options["dtype"] not in dtypes:
                return func(*args, **options)
            copy = copy_of(args[0], options["dtype"])
            result = func(*args, **options) if copy is None else copy
            note(args[0], result)
            return result

    return Casts()  # type: ignore[no-untyped-call]


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Let the allocator leave a capture that has failed: torch does not if the driver reports the failure."""
    end = getattr(_C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with suppress(RuntimeError):  # it has left it already
            end(device.index or 0, pool)
