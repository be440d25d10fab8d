"""Does a checkpoint belong to this program? Asked before anything is loaded, so that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 8  # lines of one kind
_WORDS = {"lr": "learning rate", "samples": "samples in the dataset"}
_OF_SCHEDULES = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}  # torch's put them there


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What forbids to go on from `saved`, in words; nothing: it fits. Both as `Run` makes them:

    {"model": state_dict, "optimizer": state_dict, "run": {"seed": 7, ...}, ...}
    """
    lost = [f"the checkpoint has no {part!r}: a Run did not write it" for part in ("model", "optimizer", "run")
            if not isinstance(saved.get(part), Mapping)]  # fmt: skip
    if lost:
        return lost
    return [
        *_compare_run(saved["run"], now["run"]),
        *compare_named(as_it_began(saved["model"], now["model"], grown_in(saved)), now["model"]),
        *_compare_optimizer(saved, now),
        *_compare_kept(saved.get("kept") or {}, now.get("kept") or {}),
    ]


@dataclass(frozen=True)
class SettingChange:
    """A setting that is not what it was when the checkpoint was saved. `counts`: whose value is used from now on."""

    name: str
    saved: Any
    now: Any
    counts: str  # "checkpoint" or "program"

    def __str__(self) -> str:
        values = f"{_show(self.saved)} in the checkpoint, {_show(self.now)} in the program"
        return f"{self.name}: {values}; the {self.counts}'s counts"


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    """The settings of a program (`Plan.settings`) that have changed since it saved.

    {"options": {...}, "optimizer": [{"lr": 0.1, ...}, ...], "scheduler": {...}}: options count as the program has them;
    those of the optimiser and of a scheduler of the same class are restored with their state.
    """
    found = [*_changed(saved.get("options") or {}, now.get("options") or {}, "program")]
    groups = list(zip(saved.get("optimizer") or [], now.get("optimizer") or [], strict=False))
    for n, (theirs, ours) in enumerate(groups):
        where = f" of parameter group {n}" if len(groups) > 1 else ""
        found += _changed(theirs, ours, "checkpoint", where)
    if _class_of(saved) == _class_of(now):
        found += _changed(saved.get("scheduler") or {}, now.get("scheduler") or {}, "checkpoint", " of the scheduler")
    return found


def _changed(saved: Mapping[str, Any], now: Mapping[str, Any], counts: str, where: str = "") -> Iterator[SettingChange]:
    for name, value in now.items():
        if name in saved and saved[name] != value:
            yield SettingChange(_WORDS.get(name, name) + where, saved[name], value, counts)


def _class_of(settings: Mapping[str, Any]) -> Any:
    return (settings.get("options") or {}).get("scheduler")


def _show(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _compare_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Seed, exact, shards, the optimiser's class: whatever the program says about itself."""
    for name, value in now.items():
        if name not in saved:
            yield f"{name} is {value!r} in the program, and the checkpoint does not say"
        elif saved[name] != value:
            yield f"{name} is {saved[name]!r} in the checkpoint and {value!r} in the program"


def grown_in(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The buffers of the model that became something else while it was trained (train/module_state.py)."""
    raw = saved.get("raw") or {}
    return (raw.get("model") or {}).get("grown") or {}


def as_it_began(saved: Mapping[str, Any], now: Mapping[str, Any], grown: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a checkpoint as a program has them before it trains: what has grown is what it was then."""
    found = dict(saved)
    for name, began in grown.items():
        if name in now and name in saved and _kind(now[name]) == _kind(saved[name]):
            continue
        if began is None:
            found.pop(name, None)
        elif name in found or name in now:
            found[name] = _Kind(tuple(began[1]), str(began[0]))
    return found


@dataclass(frozen=True)
class _Kind:
    """In the place of a tensor, where only its kind is compared."""

    shape: tuple[int, ...]
    dtype: str


def compare_named(saved: Mapping[Any, Any], now: Mapping[Any, Any], of: str = "") -> Iterator[str]:
    """Tensors by name; what is not a tensor must only be there."""
    yield from _some(f"{of}{name} {_kind(now[name])} is not in the checkpoint" for name in now if name not in saved)
    yield from _some(f"{of}{name} {_kind(saved[name])} is not in the program" for name in saved if name not in now)
    yield from _some(
        f"{of}{name} is {_kind(saved[name])} in the checkpoint and {_kind(now[name])} in the program"
        for name in now
        if name in saved and _kind(saved[name]) != _kind(now[name])
    )


def _compare_optimizer(saved_state: Mapping[str, Any], now_state: Mapping[str, Any]) -> Iterator[str]:
    saved, now = saved_state["optimizer"], now_state["optimizer"]
    groups, ours = saved.get("param_groups", []), now.get("param_groups", [])
    names, own_names = saved_state.get("groups") or [], now_state.get("groups") or []
    if len(groups) != len(ours) and not _were_added(names, groups, ours, now_state["model"]):
        yield f"the optimiser has {len(groups)} groups of parameters in the checkpoint and {len(ours)} in the program"
        return
    yield from _compare_names(names, own_names)
    for n, (group, mine) in enumerate(zip(groups, ours, strict=False)):
        if len(group["params"]) != len(mine["params"]):
            yield (
                f"group {n} of the optimiser has {len(group['params'])} parameters in the checkpoint and "
                f"{len(mine['params'])} in the program"
            )
        theirs, own = ({str(name) for name in a} - {str(name) for name in b} for a, b in ((group, mine), (mine, group)))
        if theirs - _OF_SCHEDULES and own - _OF_SCHEDULES:  # on one side only: another torch, which knows how to go on
            yield (
                f"group {n} of the optimiser has {_list(theirs)} in the checkpoint and {_list(own)} in the program: "
                "another optimiser"
            )
    # Before its first step, an optimiser remembers nothing that could be compared.
    remembered, mine = saved.get("state", {}), now.get("state", {})
    for key in mine:
        if key in remembered:
            yield from compare_named(remembered[key], mine[key], of=f"the optimiser's memory of parameter {key}: ")


def _were_added(
    names: Sequence[Sequence[str]], groups: Sequence[Any], ours: Sequence[Any], model: Mapping[str, Any]
) -> bool:
    """Whether the groups that the program does not have yet can be added: all are of parameters of its model."""
    more = names[len(ours) :]
    return len(names) == len(groups) > len(ours) and all(name in model for group in more for name in group)


def _compare_names(names: Sequence[Sequence[str]], ours: Sequence[Sequence[str]]) -> Iterator[str]:
    """What an optimiser remembers is restored by the place of a parameter, so the same must be at the same place."""
    for n, (group, mine) in enumerate(zip(names, ours, strict=False)):
        differ = [(theirs, own) for theirs, own in zip(group, mine, strict=False) if theirs != own and theirs and own]
        yield from _some(
            f"group {n} of the optimiser has {theirs} in the checkpoint where it has {own} in the program"
            for theirs, own in differ
        )


def _compare_kept(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Only whether they are there: what a thing of the program remembers may grow."""
    added, dropped = ([name for name in a if name not in b] for a, b in ((now, saved), (saved, now)))
    yield from _some(f"{name!r}, which the program keeps, is not in the checkpoint" for name in added)
    yield from _some(f"{name!r}, which the checkpoint has, the program does not keep" for name in dropped)


def _kind(value: Any) -> str:
    """Of a tensor, without asking torch; of anything else nothing but that it is none."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "(no tensor)"


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _some(lines: Iterator[str]) -> list[str]:
    all_lines = list(lines)
    more = len(all_lines) - SHOWN
    return all_lines if more <= 1 else [*all_lines[:SHOWN], f"and {more} more like this"]
