"""The LOCKSTEP_* variables: what a process reads, and what docs/settings.md says of them."""

from __future__ import annotations

import logging
import re
from dataclasses import fields
from pathlib import Path

import pytest

from lockstep.settings import Settings, variable_name

ROOT = Path(__file__).parent.parent
NAMES = [variable_name(one.name) for one in fields(Settings)]


def test_the_page_lists_the_variables_that_are_read() -> None:
    rows = re.findall(
        r"^\| `(LOCKSTEP_\w+)` \| (.*) \| (.*) \|$", (ROOT / "docs/settings.md").read_text(), re.MULTILINE
    )
    assert rows == [
        (variable_name(one.name), one.metadata["meaning"], one.metadata["default"]) for one in fields(Settings)
    ]


def test_the_package_knows_no_other_variable() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src/lockstep").rglob("*.py"))
    assert set(re.findall(r"LOCKSTEP_[A-Z_]*[A-Z]", source)) <= set(NAMES)


def test_without_variables_everything_has_its_default() -> None:
    assert Settings.from_env({}) == Settings() == Settings.from_env(dict.fromkeys(NAMES, " "))


def test_values() -> None:
    env = {"STALL_S": "0.5", "BACKEND": " shm ", "FRESH": "1", "EXACT": "0", "RUN_DIR": "/logs", "LAUNCHER": "7"}
    settings = Settings.from_env({f"LOCKSTEP_{name}": value for name, value in env.items()})
    assert settings == Settings(stall_s=0.5, backend="shm", fresh=True, run_dir="/logs", launcher=7)


def test_the_secret_itself_is_not_kept() -> None:
    assert Settings.from_env({"LOCKSTEP_JOB_SECRET": "ab" * 32}) == Settings(job_secret=True)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *[("LOCKSTEP_STALL_S", value, "a positive number of seconds") for value in ("soon", "0", "-1", "inf", "nan")],
        ("LOCKSTEP_JOIN_TIMEOUT_S", "5m", "a positive number of seconds"),
        ("LOCKSTEP_STATE_LOG_STEPS", "1.5", "a whole number"),
    ],
)
def test_what_is_not_allowed(name: str, value: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not {allowed}; correct or unset it")):
        Settings.from_env({name: value})


def test_messages_go_through_one_logger_to_the_current_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("lockstep.world.world")
    log.warning("%s of 100 %%", "50")
    log.info("100 %")
    assert capsys.readouterr() == ("", "lockstep: 50 of 100 %\nlockstep: 100 %\n")
