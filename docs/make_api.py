"""Writes docs/api.md from the docstrings: `python docs/make_api.py`. `--check` only says whether it is up to date.

What is public is what `lockstep` hands on (`lockstep.__all__`), with the public methods of its classes; and beside them
the results and settings that a program meets through `Run`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import lockstep
from lockstep.data.batches import Batch, Batches, BatchSettings, Shard
from lockstep.data.sample_order import Order
from lockstep.step.run_options import RunOptions
from lockstep.step.step_types import Result
from lockstep.trace.metrics import Mean

PAGE = Path(__file__).parent / "api.md"
HEAD = """\
# API

<!-- made by docs/make_api.py: change the docstrings, and run it again -->

Made from the docstrings by `docs/make_api.py`. What `Run` does, in words: [run.md](run.md). All of these are names of
`lockstep`, but for those under [What `Run` hands out](#what-run-hands-out), which you meet and never make.
"""
ROOMS = {
    "Train": ["Run", "LRScaling", "LARS", "LAMB", "SyncBatchNorm"],
    "Order of samples": ["Shuffled", "Sequential", "ByLength"],
    "Start": ["launch"],
    "Your own loop": ["init", "World", "DistributedDataParallel", "ShardedOptimizer", "install_ddp"],
    "Errors": [
        *[
            "LockstepError",
            "WorldError",
            "ReplicaMismatchError",
            "DesyncError",
            "PeerLostError",
            "NonFiniteError",
            "DivergenceError",
        ],
        *["UnevenDataError", "DataError", "CheckpointError", "DirectoryInUseError"],
        *["SharedMemoryFullError", "WorkerFailedError"],
    ],
}
HANDED_OUT = [Result, Mean, Batches, Batch, Shard, Order]
# The keywords of `Run` and of `run.batches`, which their signatures show as **options and **loading.
KEYWORDS = {"Run": ("Options of `Run`", RunOptions), "batches": ("Options of `run.batches`", BatchSettings)}
# What belongs to the house and not to its guests, though Python would let them in.
INNER = {
    "Result": {"norm", "stop", "move", "samples", "to_json", "from_json"},
    "Shard": {"samples"},
    "Batch": {"content", "stream_state", "seen", "shard_counts"},
    "Batches": {"seek", "set_rank", "state", "restore", "facts", "fetch"},
}
# Torch's own methods on classes that stand in for torch's: documented there.
OWN_ONLY = {
    "DistributedDataParallel": set(),
    "ShardedOptimizer": {"step", "state_bytes", "consolidate_state_dict", "state_dict", "load_state_dict"},
    "SyncBatchNorm": {"convert_sync_batchnorm"},
    "LARS": set(),
    "LAMB": set(),
}


def make() -> str:
    listed = {name for names in ROOMS.values() for name in names}
    if listed != set(lockstep.__all__):
        raise SystemExit(f"docs/make_api.py: {sorted(listed ^ set(lockstep.__all__))} must be in ROOMS and in lockstep")
    parts = [HEAD]
    for room, names in ROOMS.items():
        parts.append(f"## {room}\n")
        parts += [describe(name, getattr(lockstep, name), f"lockstep.{name}") for name in names]
    parts.append("## What `Run` hands out\n")
    parts += [describe(kind.__name__, kind, kind.__name__) for kind in HANDED_OUT]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def describe(name: str, thing: Any, title: str) -> str:
    if not inspect.isclass(thing):
        return f"### `{title}`\n\n{code(signature(name, thing))}\n{words(thing)}\n"
    if issubclass(thing, Exception):
        return f"- **`{title}`** ({thing.__bases__[0].__name__}): {' '.join((thing.__doc__ or '').split())}\n"
    text = f"### `{title}`\n\n"
    is_made = thing not in HANDED_OUT and thing is not lockstep.World
    if is_made:
        text += code(signature(name, thing))
    text += f"\n{words(thing)}\n"
    if not is_made and dataclasses.is_dataclass(thing):
        text += f"\n{fields_of(thing)}"
    own_init = thing.__dict__.get("__init__")
    if is_made and own_init is not None and own_init.__doc__ and not dataclasses.is_dataclass(thing):
        text += f"\n{words(own_init)}\n"
    text += keywords(name) + members(name, thing)
    return text


def members(name: str, kind: Any) -> str:
    text = ""
    for called, member in vars(kind).items():
        left_out = called.startswith("_") or called in INNER.get(name, ()) or called not in OWN_ONLY.get(name, {called})
        if left_out:
            continue
        if isinstance(member, property):
            if not inspect.getdoc(member.fget):
                continue
            text += f"\n#### `{name}.{called}`\n\n{words(member.fget)}\n"
            continue
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if inspect.isfunction(function) and function.__doc__:
            shown = signature(called, function)
            text += f"\n#### `{name}.{called}`\n\n{code(shown)}\n{words(function)}\n{keywords(called)}"
    return text


def keywords(name: str) -> str:
    if name not in KEYWORDS:
        return ""
    title, kind = KEYWORDS[name]
    if kind is BatchSettings:
        return f"\n{title}:\n\n{fields_of(kind)}\n"
    shown = {one.name: repr(getattr(one.default, "value", one.default)) for one in dataclasses.fields(kind)}
    rows = [f"| `{option}` | `{default}` |" for option, default in shown.items()]
    return f"\n{title}:\n\n{words(kind)}\n\n| option | default |\n|---|---|\n" + "\n".join(rows) + "\n"


def signature(name: str, thing: Any) -> str:
    """Without `self`, cut into lines where it is long."""
    found = inspect.signature(thing)
    given = [p for p in found.parameters.values() if p.name not in ("self", "cls") and not p.name.startswith("_")]
    texts: list[str] = []
    for one in given:
        if one.kind is one.KEYWORD_ONLY and not any(text.startswith("*") for text in texts):
            texts.append("*")
        texts.append(parameter(one))
    answer = "" if inspect.isclass(thing) else kind_of(found.return_annotation)
    returns = f" -> {answer}" if answer not in ("", "None") else ""
    short = f"{name}({', '.join(texts)}){returns}"
    return short if len(short) <= 110 else f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){returns}"


def parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = kind_of(one.annotation)
    text = f"{stars}{one.name}" + (f": {kind}" if kind and not stars else "")
    return text if one.default is one.empty else f"{text} = {getattr(one.default, 'value', one.default)!r}"


def kind_of(annotation: Any) -> str:
    """An annotation as it is written, without the names of modules."""
    if annotation is inspect.Signature.empty:
        return ""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = str(annotation) if "|" in str(annotation) else text
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=\w)", "", text)


def fields_of(kind: Any) -> str:
    """The fields of a dataclass as they stand in the source, with what is said about each."""
    lines = inspect.getsource(kind).splitlines()
    found = [line.strip() for line in lines if re.match(r"    [a-z]\w*: ", line)]
    return code("\n".join(line for line in found if line.partition(":")[0] not in INNER.get(kind.__name__, ())))


def words(thing: Any) -> str:
    """The docstring. What is laid out in columns stays so: an indented part, or a list of names, is a block of text."""
    text = inspect.getdoc(thing) or ""
    if text.startswith(f"{getattr(thing, '__name__', '')}("):  # dataclasses makes this one itself
        return ""
    parts = []
    for part in re.split(r"\n\s*\n", text):
        has_columns = re.search(r"^\w+  +\S", part, re.MULTILINE) or re.search(r"^\S.* = .*\n\S.* -?= ", part)
        parts.append(f"```text\n{part}\n```" if has_columns else part)
    return "\n\n".join(parts)


def code(text: str) -> str:
    return f"<!-- not run: a signature -->\n```python\n{text}\n```\n"


if __name__ == "__main__":
    made = make()
    if "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text() != made:
            sys.exit("docs/api.md is not what the docstrings say: run `python docs/make_api.py`")
    else:
        PAGE.write_text(made)
