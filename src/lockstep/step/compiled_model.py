"""Models that torch.compile compiles: the option `Run(compile=)`.

The bits of compiled code are the same on any number of workers because the code follows from the shapes alone
(`determinism.py`). Torch keeps it in a folder of the host, where a replacement finds it.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from lockstep import _torch

CompileOptions = bool | Mapping[str, Any]
REGIONAL: Final = "regional"  # also one of the options
_CONTAINERS: Final = (nn.ModuleList, nn.Sequential)


def is_compiled(model: nn.Module) -> bool:
    """Whether a part is compiled: other shapes would be compiled too, and could change what later steps run."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules())


def check_compile_option(given: object) -> CompileOptions:
    """Return the value of `Run(compile=)`. Raises ValueError or TypeError if it is not allowed."""
    if isinstance(given, bool):
        return given
    if given == REGIONAL:
        return {REGIONAL: True}
    if not isinstance(given, Mapping):
        raise TypeError(f'compile={given!r} must be True, False, "{REGIONAL}", or a dict of options of torch.compile')
    known = ("fullgraph", "dynamic", "backend", "mode", "options", "disable")
    unknown = [str(name) for name in given if name not in (*known, REGIONAL)]
    if unknown:
        raise ValueError(
            f"compile={{{unknown[0]!r}: ...}} is not an option of torch.compile; it has {', '.join(known)}, "
            f'and "{REGIONAL}": True compiles repeated blocks only'
        )
    if not isinstance(given.get(REGIONAL, True), bool):
        raise TypeError(f"compile={{{REGIONAL!r}: {given[REGIONAL]!r}}} must be True or False")
    return dict(given)


def compile_model(model: nn.Module, options: CompileOptions, device: torch.device) -> None:
    """Let torch compile the forward pass of the model, or of its blocks, when it is called. All names stay as they are.

    Raises ValueError if there is no C++ compiler, which torch needs on a CPU; or no block to compile.
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
    if _torch.inductor_config().cpp.vec_isa_ok is not None or "cpp.vec_isa_ok" in (chosen.get("options") or {}):
        _torch.forget_vector_instructions()  # which the process that this one was forked from has tested without it
    regions = [model]
    if chosen.pop(REGIONAL, False):
        regions = list(repeated_blocks(model))
        if not regions:
            raise ValueError(
                f'Run(compile="{REGIONAL}"): the model has no nn.ModuleList and no nn.Sequential with several modules '
                "of one class that have modules of their own, such as the layers of a transformer (lists and sequences "
                "do not count); use compile=True"
            )
        _torch.allow_recompilations(len(regions))  # of their code, if each keeps another number (its index, say)
    for region in regions:
        try:
            region.compile(**chosen)
        except Exception as error:
            raise ValueError(f"Run(compile={options!r}): {str(error).strip() or type(error).__name__}") from error


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that stand beside others of their class, such as the layers of a transformer.

    They are in a list or a sequence, and have modules of their own. Torch compiles the code of such a class once.
    """
    children = list(model.children())
    counts = Counter(type(child) for child in children if isinstance(model, _CONTAINERS))
    for child in children:
        has_modules = next(child.children(), None) is not None
        if counts[type(child)] > 1 and has_modules and type(child) not in _CONTAINERS:
            yield child
        else:
            yield from repeated_blocks(child)
