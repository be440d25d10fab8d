"""`lockstep checkpoint`: lists, verifies, shows and exports checkpoints. Only `export` to .pt imports torch."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import manifest, state_files
from lockstep.checkpoint.export import export_safetensors, export_torch
from lockstep.checkpoint.manifest import Contents, verify
from lockstep.checkpoint.state_files import TensorEntry
from lockstep.errors import CheckpointError
from lockstep.report.table import columns, render

LARGEST = 8

_ABOUT = """\
DIR is the directory of a run, its folder `checkpoints`, or one checkpoint. Everything is verified, byte for byte.

examples:
  lockstep checkpoint ls runs/digits
  lockstep checkpoint verify runs/digits && echo all whole
  lockstep checkpoint show runs/digits --step 200 --tensors
  lockstep checkpoint export runs/digits model.safetensors
  lockstep checkpoint export runs/digits ema.safetensors --what ema      what run.register_state(ema=...) was given
  lockstep checkpoint export runs/digits model.pt        then: model.load_state_dict(torch.load("model.pt"))

exit status: 0; 1 if a checkpoint is damaged; 2 if the command line makes no sense, or a file cannot be written
"""


class UsageError(Exception):
    """The command line names something that does not exist."""


@dataclass(frozen=True)
class CheckpointRow:
    """One line of `ls`. None for what cannot be read from a damaged checkpoint."""

    step: int | None
    path: str
    saved_at: float | None
    bytes: int | None
    state_sha256: str | None
    verified: bool | None  # None: not read
    reason: str


def main(argv: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may contain characters that the terminal cannot show
    try:
        status: int = chosen.call(chosen)
        return status
    except BrokenPipeError:  # which is an OSError, too
        raise
    except CheckpointError as error:
        return _refuse(str(error), 1)
    except UsageError as error:
        return _refuse(str(error), 2)
    except OSError as error:
        return _refuse(f"{error.filename or chosen.directory}: {error.strerror or error}", 2)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    about = "Look at checkpoints, verify them, and take weights out."
    parser = argparse.ArgumentParser("lockstep checkpoint", description=about, epilog=_ABOUT, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    def add(name: str, call: Any, about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about, epilog=_ABOUT, formatter_class=raw)
        command.add_argument("directory", metavar="DIR", type=Path, help="of a run, or one checkpoint")
        command.set_defaults(call=call)
        return command

    listing = add("ls", _ls, "a table of all checkpoints")
    listing.add_argument("--quick", action="store_true", help="look at manifests and sizes only")
    listing.add_argument("--json", action="store_true", help="for programs")
    add("verify", _verify, "read every byte; status 1 if any checkpoint is damaged")
    show = add("show", _show, "what is in a checkpoint")
    show.add_argument("--tensors", action="store_true", help="all of them")
    show.add_argument("--json", action="store_true", help="for programs")
    export = add("export", _export, "weights into one file")
    export.add_argument("out", metavar="OUT", type=Path, help="model.safetensors, or model.pt")
    what = "of the state, or a name that run.register_state was given (default: model)"
    export.add_argument("--what", default="model", metavar="PART", help=what)
    export.add_argument("--force", action="store_true", help="write over OUT")
    for command in (show, export):
        command.add_argument("--step", type=int, metavar="N", help="which (default: the newest that is whole)")
    return parser


# ---- commands --------------------------------------------------------------------------------------------------------


def _ls(chosen: argparse.Namespace) -> int:
    rows = _check_all(chosen.directory, quick=chosen.quick)
    if chosen.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    lines = []
    for row in rows:
        valid = {True: "yes", False: f"NO: {row.reason}", None: "not read"}[row.verified]
        digest = row.state_sha256[:12] if row.state_sha256 else "-"
        step = "-" if row.step is None else str(row.step)
        lines.append((step, _time(row.saved_at), _size(row.bytes), digest, valid))
    print(render(columns("step", "saved", "size", "state", "verified"), lines))
    return 0


def _verify(chosen: argparse.Namespace) -> int:
    rows = _check_all(chosen.directory)
    for row in rows:
        print(f"{row.path}: whole" if row.verified else f"DAMAGED: {row.reason}")
    return 0 if all(row.verified for row in rows) else 1


def _show(chosen: argparse.Namespace) -> int:
    path, contents = _choose(chosen.directory, chosen.step)
    state = contents.outline(path)
    parts = {
        _shown(name): [e for _, e in state_files.walk(value) if isinstance(e, TensorEntry)]
        for name, value in state.items()
    }
    facts = {name: state[name] for name in ("run", "batches", "loss_scale") if isinstance(state.get(name), Mapping)}
    if chosen.json:
        report = {
            **asdict(contents.manifest),
            "path": str(path),
            **facts,
            "parts": {part: {"tensors": len(all_), "bytes": _sum(all_)} for part, all_ in parts.items()},
        }
        if chosen.tensors:
            report["tensors"] = {
                name: {**asdict(e.spec), "bytes": e.spec.bytes, "sha256": e.sha256, "file": e.file}
                for name, e in contents.tensors.items()
            }
        print(json.dumps(report, indent=1, default=str))
        return 0
    listed = contents.manifest
    print(f"{path}\n  step       {listed.step}, saved {_time(listed.saved_at)}, {_size(listed.bytes)}")
    print(f"  state      {listed.state_sha256}")
    print(f"  versions   {_pairs(listed.versions)}")
    for name, about in facts.items():
        print(f"  {name:<10} {_pairs(about)}")
    lines = [
        (p, str(len(e)), _size(_sum(e)), " ".join(sorted({x.spec.dtype for x in e}))) for p, e in parts.items() if e
    ]
    print(render(columns("part", "tensors", "size", "dtypes"), lines))
    entries = sorted(contents.tensors.items(), key=lambda item: -item[1].spec.bytes)
    some = entries if chosen.tensors else entries[:LARGEST]
    lines = [(_shown(n), e.spec.dtype, str(list(e.spec.shape)), str(e.spec.bytes)) for n, e in some]
    print(render(columns("tensor", "dtype", "shape", "bytes"), lines))
    if len(some) < len(entries):
        print(f"and {len(entries) - len(some)} smaller ones: --tensors shows all")
    return 0


def _export(chosen: argparse.Namespace) -> int:
    out: Path = chosen.out
    exporters = {".safetensors": export_safetensors, ".pt": export_torch}
    if out.suffix not in exporters:
        raise UsageError(f"{out} must end in .safetensors or .pt: that decides what it becomes")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {out.absolute().parent}")
    if out.exists() and not chosen.force:
        raise UsageError(f"{out} is there already; --force writes over it")
    path, contents = _choose(chosen.directory, chosen.step)
    count = exporters[out.suffix](path, contents, chosen.what, out)
    print(f"{out}: {count} tensors of {chosen.what}, {_size(out.stat().st_size)}, from {path}")
    return 0


# ---- which checkpoint ------------------------------------------------------------------------------------------------


def _checkpoints(directory: Path) -> list[Path]:
    """Returns the checkpoints in a directory, oldest first. Raises UsageError if there are none."""
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}")
    directory = directory.resolve()
    if manifest.step_of(directory.name) is not None or (directory / manifest.MANIFEST).exists():
        return [directory]
    for folder in (directory / "checkpoints", directory):
        steps = manifest.steps_in(folder)
        if steps:
            return [folder / manifest.directory_name(step) for step in steps]
    raise UsageError(f"{directory} has no checkpoints: neither step-000000001 and so on, nor a folder `checkpoints`")


def _choose(directory: Path, step: int | None) -> tuple[Path, Contents]:
    paths = _checkpoints(directory)
    if step is not None:
        fitting = [path for path in paths if manifest.step_of(path.name) == step]
        if not fitting:
            there = ", ".join(str(manifest.step_of(path.name)) for path in paths)
            raise UsageError(f"{directory} has no checkpoint of step {step}; there are {there}")
        return fitting[0], verify(fitting[0])
    for path in reversed(paths):
        try:
            return path, verify(path)
        except CheckpointError as error:
            print(f"lockstep: skipped: {error}", file=sys.stderr)
    raise CheckpointError(f"none of the {len(paths)} checkpoints in {directory} is whole")


def _check_all(directory: Path, *, quick: bool = False) -> list[CheckpointRow]:
    """Returns a row per checkpoint, except for those that a run removes meanwhile."""
    rows = [_check(path, quick=quick) for path in _checkpoints(directory)]
    return [row for row in rows if os.path.lexists(row.path)]


def _check(path: Path, *, quick: bool) -> CheckpointRow:
    listed = None
    try:
        listed = manifest.read(path)
        manifest.check_files(path, listed)
        if not quick:
            verify(path)
        reason, verified = "", None if quick else True
    except CheckpointError as error:
        reason, verified = str(error), False
    if listed is None:
        return CheckpointRow(manifest.step_of(path.name), str(path), None, None, None, verified, reason)
    return CheckpointRow(listed.step, str(path), listed.saved_at, listed.bytes, listed.state_sha256, verified, reason)


# ---- output ----------------------------------------------------------------------------------------------------------


def _refuse(text: str, status: int) -> int:
    print(f"lockstep: {text}", file=sys.stderr)
    return status


def _sum(entries: Sequence[TensorEntry]) -> int:
    return sum(entry.spec.bytes for entry in entries)


def _pairs(values: Mapping[Any, Any]) -> str:
    return ", ".join(f"{_shown(name)} {_shown(value)}" for name, value in values.items())


def _shown(value: object) -> str:
    """Returns a printable form: control characters in a name must not reach the terminal."""
    text = str(value)
    return text if text.isprintable() else ascii(text)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
