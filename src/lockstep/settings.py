"""All LOCKSTEP_* environment variables: name, type, default, meaning. Standard library only.

A process reads them once where it begins (a command, `worker_main`, `lockstep.init`, `Run`; the creation of a process
group, which torch calls), and hands them on. Nothing is read at import. docs/settings.md lists the same variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Kind:
    """How the text of a variable is read. `parse` raises ValueError unless it is `allowed`."""

    parse: Callable[[str], Any]
    allowed: str = ""


def _positive(text: str) -> float:
    if not (0 < (number := float(text)) < math.inf):
        raise ValueError
    return number


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _factor(text: str) -> float:
    if not (1 < (number := float(text.strip().removesuffix("x"))) < math.inf):
        raise ValueError
    return number


_SECONDS = _Kind(_positive, "a positive number of seconds")
_NUMBER = _Kind(int, "a whole number")
_FACTOR = _Kind(_factor, "a number above 1, such as 3x")
_COUNT = _Kind(_count, "a whole number of 1 or more")
_FLAG = _Kind(lambda text: text.strip() != "0")
_WORD = _Kind(str.strip)
_TEXT = _Kind(str)


def _variable(default: T, kind: _Kind, meaning: str, unset: str = "") -> T:
    """One variable. `unset` describes its default."""
    shown = unset or ("none" if default in (None, "") else f"{default:g}")
    value: T = field(default=default, metadata={"kind": kind, "meaning": meaning, "default": shown})
    return value


def variable_name(setting: str) -> str:
    """stall_s -> LOCKSTEP_STALL_S"""
    return f"LOCKSTEP_{setting.upper()}"


@dataclass(frozen=True)
class Settings:
    """The values of the variables. One that is unset or blank has its default."""

    # Of the user.
    stall_s: float = _variable(
        10.0, _SECONDS, "seconds in a collective after which a worker checks which workers are missing"
    )
    join_timeout_s: float = _variable(300.0, _SECONDS, "seconds to wait for all workers at the start")
    backend: str | None = _variable(
        None,
        _WORD,
        "backend that `lockstep.init()` uses if the program does not set one: shm, gloo, nccl, hierarchy",
        "chosen automatically",
    )
    shm_dir: str | None = _variable(None, _TEXT, "a folder in a tmpfs for shared memory, used instead of memfds")
    host: str | None = _variable(
        None, _WORD, "the name of this host for `hierarchy`; workers with the same name share memory", "detected"
    )
    checkpoint_every: str | None = _variable(
        None,
        _TEXT,
        "steps (`200`) or time (`5m`) between checkpoints of a `Run` without `save_every=`; "
        "set by `--checkpoint-every`",
        "every epoch",
    )
    drop_slower_than: float | None = _variable(
        None,
        _FACTOR,
        "how many times as long as the others a worker may take for a sample before it leaves an elastic run; "
        "set by `--drop-slower-than`",
        "no limit",
    )
    fresh: bool = _variable(False, _FLAG, "1: a `Run` starts over instead of resuming; set by `--fresh`")
    shards: int | None = _variable(
        None,
        _COUNT,
        "shards of a global batch in a new `Run` whose program does not set `shards=`; "
        "an elastic `lockstep run` sets it to `--max`",
        "the number of workers",
    )
    traceback: str | None = _variable(
        None, _WORD, "`full`: tracebacks with all frames of lockstep and torch", "frames of your own code"
    )
    faults: str | None = _variable(
        None, _WORD, "named places at which workers are killed, for tests (`docs/elastic.md`)"
    )
    exact: bool = _variable(
        False, _FLAG, "1: `hierarchy` adds along one tree over all hosts, so that the bits are the same as on one host"
    )
    job_secret: bool = _variable(  # whether it is set; control/wire.py reads it
        False, _FLAG, "the secret that the hosts of a job share, 64 hexadecimal digits (`docs/elastic.md`)", "none"
    )

    # Of the launcher, for its workers.
    run_dir: str | None = _variable(None, _TEXT, "folder of the launcher's logs")
    run_id: str = _variable("", _TEXT, "text that is equal for all workers that a run ever has")
    launcher: int | None = _variable(
        None, _NUMBER, "process id of the launcher, which tells a worker from the processes that it starts"
    )
    agent: int | None = _variable(  # elastic/agent_client.py takes it out of the environment
        None, _NUMBER, "file descriptor of the worker's connection to its host agent"
    )
    view: bool = _variable(False, _FLAG, "1: the launcher shows the progress of a run itself")

    # Of `lockstep certify`, for the program that it examines.
    state_log: str | None = _variable(None, _TEXT, "file for digests of the state after every step", "no log")
    state_log_steps: int = _variable(8, _NUMBER, "number of steps after which the program is ended")
    state_log_directory: str | None = _variable(
        None, _TEXT, "run directory, which replaces the one that the program sets"
    )
    state_log_part: bool = _variable(False, _FLAG, "1: another start will resume this run")

    # Of `lockstep plan`, for the program that it measures.
    probe: str | None = _variable(None, _TEXT, "settings of a short run, as JSON (`train/probe.py`)", "no probe")

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Raises ValueError if a value is not allowed."""
        values = {}
        for one in fields(cls):
            name, kind = variable_name(one.name), one.metadata["kind"]
            text = env.get(name, "")
            if not text.strip():
                continue
            try:
                values[one.name] = kind.parse(text)
            except ValueError:
                raise ValueError(f"{name}={text!r} is not {kind.allowed}; correct or unset it") from None
        return cls(**values)
