"""Lets `cuda` mean the CPU, so that tests written for GPUs run on a machine that has none; or lets `cuda:1` mean
`cuda:0`, so that tests written for several GPUs run on one.

What most of PyTorch's DDP tests check (hooks, unused parameters, static graphs, join, buffers) has nothing to do with
GPUs; they only say `.cuda(rank)` and skip without one. Whether a test still means something on the stand-in is not
argued about but measured: it counts only if torch's own class passes it there.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def names_gpu(device: object) -> bool:
    """True for everything a test may call a GPU by: 1, "cuda", "cuda:1", torch.device("cuda")."""
    if isinstance(device, str | torch.device):
        return str(device).partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class OtherDevice(TorchFunctionMode):
    """Answers every request for a tensor on any GPU with one on `device`: the CPU, or the only GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        args, kwargs = _on(self._device, args, kwargs, positional=func is torch.Tensor.to)
        return func(*args, **kwargs)


def _on(
    device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any], *, positional: bool
) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments with the GPU replaced; `positional`: args[1] may be the device, as in `x.to(device)`."""
    if names_gpu(kwargs.get("device")):
        kwargs = {**kwargs, "device": device}
    if positional and len(args) > 1 and names_gpu(args[1]):
        args = (args[0], device, *args[2:])
    return args, kwargs


class Stream:
    """A stream, an event and the `with torch.cuda.stream(...)` around it: on a CPU everything is in order already."""

    device, device_index, device_type, stream_id = CPU, 0, 0, 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def _in_order(self, *args: object, **kwargs: object) -> None:
        pass

    wait_stream = wait_event = wait = synchronize = record = _in_order

    def record_event(self, event: Stream | None = None) -> Stream:
        return event or Stream()


def install(devices: int) -> None:
    """For the rest of this process's life, and in every process forked from it. Call it before the tests are imported:
    their decorators decide at import who is skipped."""
    OtherDevice(CPU).__enter__()
    _replace_device_modules(devices)
    _replace_module_moves(CPU)
    _let_tests_through(devices)


_hidden: dict[str, Any] = {}  # functions of torch.accelerator


def hide_gpus() -> None:
    """Lets torch.accelerator find nothing. PyTorch's tests ask it when they are imported; that uses CUDA, which does
    not survive the fork of the ranks."""
    answers = {"is_available": False, "device_count": 0, "current_accelerator": None}
    for name, answer in answers.items():
        _hidden[name] = getattr(torch.accelerator, name)
        setattr(torch.accelerator, name, lambda *args, _answer=answer, **kwargs: _answer)


_count_gpus = torch.cuda.device_count


def show_gpus() -> None:
    """Undoes `hide_gpus` and starts CUDA, in a rank. CUDA then looks at all GPUs: as many as there are."""
    for name, function in _hidden.items():
        setattr(torch.accelerator, name, function)
    with mock.patch.object(torch.cuda, "device_count", _count_gpus):
        torch.cuda.init()


def install_one_gpu(devices: int) -> None:
    """Replace every GPU of the tests by cuda:0, for the rest of this process's life; the tests see `devices` GPUs."""
    OtherDevice(GPU).__enter__()
    # The base class of the tests calls both before the ranks are forked, and they would use CUDA.
    torch.utils._triton.has_triton = lambda: False  # type: ignore[attr-defined]
    from torch.testing._internal import common_utils  # not before `hide_gpus`

    common_utils.remove_device_and_dtype_suffixes = lambda test_name: test_name
    set_device = torch.cuda.set_device
    torch.cuda.device_count = lambda: devices
    torch.cuda.set_device = lambda device: set_device(GPU)
    torch.cuda.device = _device_of_one(torch.cuda.device)  # type: ignore[misc]
    _replace_module_moves(GPU)
    _let_tests_through(devices)


def _device_of_one(real: Any) -> Any:
    class Device(real):  # type: ignore[misc]
        def __init__(self, device: Any) -> None:
            super().__init__(GPU)

    return Device


def _replace_device_modules(devices: int) -> None:
    def answer(value: Callable[[], Any]) -> Callable[..., Any]:
        """A new function each time: Dynamo wants to know every function of torch by one name."""
        return lambda *args, **kwargs: value()

    for module, names in ((torch.cuda, ("set_device", "synchronize", "empty_cache")),
                          (torch.accelerator, ("set_device_index", "synchronize"))):  # fmt: skip
        for name in names:
            setattr(module, name, answer(lambda: None))
    for module in (torch.cuda, torch.accelerator, torch.cpu):
        module.device_count = answer(lambda: devices)
        module.current_stream = answer(Stream)
    torch.cuda.current_device = answer(lambda: 0)
    torch.cuda.device = answer(Stream)  # type: ignore[misc,assignment]
    torch.cuda.stream = lambda stream: stream  # type: ignore[misc,assignment]
    torch.Stream = torch.Event = torch.cuda.Stream = torch.cuda.Event = Stream  # type: ignore[misc,assignment]


def _replace_module_moves(target: torch.device) -> None:
    move = torch.nn.Module.to

    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        (module, *rest), kwargs = _on(target, (module, *args), kwargs, positional=True)
        return move(module, *rest, **kwargs)

    torch.nn.Module.to = to  # type: ignore[method-assign,assignment]

    def cuda(module: torch.nn.Module, device: object = None) -> torch.nn.Module:
        return move(module, target)

    torch.nn.Module.cuda = cuda  # type: ignore[method-assign,assignment]


def _let_tests_through(devices: int) -> None:
    from torch.testing._internal import common_distributed, common_utils  # not before `hide_gpus`

    def needs(gpus: int) -> Callable[..., Any]:
        return (lambda test: test) if gpus <= devices else unittest.skip(f"needs a world size of {gpus}")

    common: Any = common_distributed
    common.skip_if_no_gpu = lambda test: test
    common.skip_if_lt_x_gpu = lambda gpus, **kwargs: needs(gpus)
    common.nccl_skip_if_lt_x_gpu = lambda backend, gpus: needs(gpus)
    # Some tests are switched off on Linux because they were flaky on the GPUs of PyTorch's own CI.
    common_utils.IS_LINUX = False
