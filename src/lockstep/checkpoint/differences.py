"""Compares a checkpoint with the program, before anything is loaded, so that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 8  # most lines of one kind
_WORDS = {"lr": "learning rate", "samples": "samples in the dataset"}
_OF_SCHEDULES = {
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "base_momentum",
    "max_momentum",
}  # torch's schedulers add them


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return why the program cannot resume from `saved`, one line per difference; empty if it can.

    Both states are those of `Run`: {"model": state_dict, "optimizer": state_dict, "run": {"seed": 7, ...}, ...}
    """
    missing = [f"the checkpoint has no {part!r}: a Run did not write it" for part in ("model", "optimizer", "run")
            if not isinstance(saved.get(part), Mapping)]  # fmt: skip
    if missing:
        return missing
    return [
        *_compare_run(saved["run"], now["run"]),
        *compare_named(before_training(saved["model"], now["model"], grown_buffers(saved)), now["model"]),
        *_compare_optimizer(saved, now),
        *_compare_kept(saved.get("kept") or {}, now.get("kept") or {}),
    ]


@dataclass(frozen=True)
class SettingChange:
    """A setting that has changed since the checkpoint was saved."""

    name: str
    saved: Any
    now: Any
    counts: str  # whose value is used: "checkpoint" or "program"

    def __str__(self) -> str:
        values = f"{_show(self.saved)} in the checkpoint, {_show(self.now)} in the program"
        return f"{self.name}: {values}; the {self.counts}'s counts"


def setting_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    """Return the settings of a program (`Plan.settings`) that have changed since it saved.

    {"options": {...}, "optimizer": [{"lr": 0.1, ...}, ...], "scheduler": {...}}: the program's options are used; the
    settings of the optimiser, and of a scheduler of the same class, are restored from the checkpoint with their state.
    """
    options, own_options = saved.get("options") or {}, now.get("options") or {}
    found = [*_changed(options, own_options, "program")]
    groups = list(zip(saved.get("optimizer") or [], now.get("optimizer") or [], strict=False))
    for n, (theirs, ours) in enumerate(groups):
        where = f" of parameter group {n}" if len(groups) > 1 else ""
        found += _changed(theirs, ours, "checkpoint", where)
    if options.get("scheduler") == own_options.get("scheduler"):  # their classes
        found += _changed(saved.get("scheduler") or {}, now.get("scheduler") or {}, "checkpoint", " of the scheduler")
    return found


def _changed(saved: Mapping[str, Any], now: Mapping[str, Any], counts: str, where: str = "") -> Iterator[SettingChange]:
    for name, value in now.items():
        if name in saved and saved[name] != value:
            yield SettingChange(_WORDS.get(name, name) + where, saved[name], value, counts)


def _show(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _compare_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Compare the seed, exact, shards, the optimiser's class, and everything else in the program's "run" part."""
    for name, value in now.items():
        if name not in saved:
            yield f"{name} is {value!r} in the program, and the checkpoint does not say"
        elif saved[name] != value:
            yield f"{name} is {saved[name]!r} in the checkpoint and {value!r} in the program"


def grown_buffers(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the buffers of the model whose dtype or shape changed in training (recovery/module_state.py)."""
    raw = saved.get("raw") or {}
    return (raw.get("model") or {}).get("grown") or {}


def before_training(saved: Mapping[str, Any], now: Mapping[str, Any], grown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a checkpoint as they were before training: buffers in `grown` have their original shape."""
    found = dict(saved)
    for name, original in grown.items():
        if name in now and name in saved and _describe(now[name]) == _describe(saved[name]):
            continue
        if original is None:
            found.pop(name, None)
        elif name in found or name in now:
            found[name] = _TensorStub(tuple(original[1]), str(original[0]))
    return found


@dataclass(frozen=True)
class _TensorStub:
    """Takes the place of a tensor where only shape and dtype are compared."""

    shape: tuple[int, ...]
    dtype: str


def compare_named(saved: Mapping[Any, Any], now: Mapping[Any, Any], of: str = "") -> Iterator[str]:
    """Compare tensors by name, shape and dtype; of other values only whether they exist."""
    yield from _some(f"{of}{name} {_describe(now[name])} is not in the checkpoint" for name in now if name not in saved)
    yield from _some(f"{of}{name} {_describe(saved[name])} is not in the program" for name in saved if name not in now)
    yield from _some(
        f"{of}{name} is {_describe(saved[name])} in the checkpoint and {_describe(now[name])} in the program"
        for name in now
        if name in saved and _describe(saved[name]) != _describe(now[name])
    )


def _compare_optimizer(saved_state: Mapping[str, Any], now_state: Mapping[str, Any]) -> Iterator[str]:
    saved, now = saved_state["optimizer"], now_state["optimizer"]
    groups, ours = saved.get("param_groups", []), now.get("param_groups", [])
    names, own_names = saved_state.get("groups") or [], now_state.get("groups") or []
    if len(groups) != len(ours) and not _were_added(names, groups, ours, now_state["model"]):
        yield f"the optimiser has {len(groups)} groups of parameters in the checkpoint and {len(ours)} in the program"
        return
    # The state of an optimiser is restored by position, so the same parameters must be at the same positions.
    for n, (group, mine) in enumerate(zip(names, own_names, strict=False)):
        yield from _some(
            f"group {n} of the optimiser has {theirs} in the checkpoint where it has {own} in the program"
            for theirs, own in zip(group, mine, strict=False)
            if theirs != own and theirs and own
        )
    for n, (group, mine) in enumerate(zip(groups, ours, strict=False)):
        count, own_count = len(group["params"]), len(mine["params"])
        if count != own_count:
            yield f"group {n} of the optimiser has {count} parameters in the checkpoint and {own_count} in the program"
        theirs, own = ({str(name) for name in a} - {str(name) for name in b} for a, b in ((group, mine), (mine, group)))
        # If only one side has more: another version of torch, which converts it.
        if theirs - _OF_SCHEDULES and own - _OF_SCHEDULES:
            what = f"{', '.join(sorted(theirs))} in the checkpoint and {', '.join(sorted(own))} in the program"
            yield f"group {n} of the optimiser has {what}: another optimiser"
    # Before its first step, an optimiser has no state that could be compared.
    saved_memory = saved.get("state", {})
    # The name is MASTER_WEIGHT of ddp/optimizer_cells.py, which needs torch.
    has_copies = any("master_weight" in memory for memory in saved_memory.values())
    if has_copies and not (now_state.get("settings") or {}).get("options", {}).get("master_weights"):
        yield (
            "the checkpoint has float32 copies of the weights, which would be lost without "
            "Run(shard_optimizer=True, master_weights=True)"
        )
    for key, memory in now.get("state", {}).items():
        if key in saved_memory:
            yield from compare_named(saved_memory[key], memory, of=f"the optimiser's memory of parameter {key}: ")


def _were_added(
    names: Sequence[Sequence[str]], groups: Sequence[Any], ours: Sequence[Any], model: Mapping[str, Any]
) -> bool:
    """Whether the groups that the program lacks can be added: all their parameters are in its model."""
    more = names[len(ours) :]
    return len(names) == len(groups) > len(ours) and all(name in model for group in more for name in group)


def _compare_kept(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Compare only the names of registered objects: the state of an object may change its shape."""
    added, dropped = (name for name in now if name not in saved), (name for name in saved if name not in now)
    yield from _some(f"{name!r}, which the program keeps, is not in the checkpoint" for name in added)
    yield from _some(f"{name!r}, which the checkpoint has, the program does not keep" for name in dropped)


def _describe(value: Any) -> str:
    """Describe shape and dtype of a tensor, without importing torch; other values are all described alike."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "(no tensor)"


def _some(lines: Iterator[str]) -> list[str]:
    all_lines = list(lines)
    more = len(all_lines) - SHOWN
    return all_lines if more <= 1 else [*all_lines[:SHOWN], f"and {more} more like this"]
