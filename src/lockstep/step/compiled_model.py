"""Models that torch.compile compiles: the option `Run(compile=)`.

The bits of compiled code are the same on any number of workers because the code follows from the shapes alone
(`determinism.py`). Torch keeps it in a folder of the host, where a replacement finds it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

CompileOptions = bool | Mapping[str, Any]


def is_compiled(model: nn.Module) -> bool:
    """Whether a part is compiled: other shapes would be compiled too, and could change what later steps run."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules())


def check_compile_option(given: object) -> CompileOptions:
    """Return the value of `Run(compile=)`. Raises ValueError or TypeError if it is not allowed."""
    if isinstance(given, bool):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"compile={given!r} must be True, False, or a dict of options of torch.compile")
    known = ("fullgraph", "dynamic", "backend", "mode", "options", "disable")
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        raise ValueError(
            f"compile={{{unknown[0]!r}: ...}} is not an option of torch.compile; it has {', '.join(known)}"
        )
    return dict(given)


def compile_model(model: nn.Module, options: CompileOptions, device: torch.device) -> None:
    """Let torch compile the forward pass of the model when it is called. The model and its names stay as they are.

    Raises ValueError if there is no C++ compiler, which torch needs on a CPU.
    """
    if options is False:
        return
    chosen = {} if options is True else dict(options)
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    is_inductor = chosen.get("backend", "inductor") == "inductor" and not chosen.get("disable")
    if device.type == "cpu" and is_inductor and not any(name and shutil.which(name) for name in compilers):
        raise ValueError(
            "Run(compile=...): torch.compile needs a C++ compiler on a CPU, and there is neither $CXX nor g++, clang++ "
            'or c++. Install one; or use compile={"backend": "aot_eager"}, which is not faster; or leave compile= out'
        )
    model.compile(**chosen)
