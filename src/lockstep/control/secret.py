"""The secret of a job: 32 random bytes that only its host agents have.

It is given as 64 hexadecimal digits in LOCKSTEP_JOB_SECRET, or in a file that only its owner may read.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

VARIABLE: Final = "LOCKSTEP_JOB_SECRET"
SECRET_BYTES: Final = 32
_LONGEST_FILE_BYTES = 1024
_MAKE = 'make one with `python -c "import secrets; print(secrets.token_hex(32))"`'


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def read_secret(env: Mapping[str, str], file: Path | None = None) -> bytes:
    """Read the secret from the file if there is one, else from the environment.

    Raises ValueError, which says what is wrong, but does not contain the secret.
    """
    if file is not None:
        return parse_secret(_read_private(file), f"the file {file}")
    if VARIABLE not in env:
        raise ValueError(f"{VARIABLE} is not set, and all hosts of a job need the same; {_MAKE}")
    return parse_secret(env[VARIABLE], VARIABLE)


def write_secret(file: Path, secret: bytes) -> None:
    """Write a new file with mode 0600. Raises FileExistsError if it exists."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as out:
        out.write(secret.hex() + "\n")


def parse_secret(text: str, where: str) -> bytes:
    digits = text.strip()
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digits):
        raise ValueError(f"{where} has {len(digits)} characters; a secret is 64 hexadecimal digits: {_MAKE}")
    return bytes.fromhex(digits)


def _read_private(file: Path) -> str:
    with file.open("rb") as handle:
        facts = os.fstat(handle.fileno())
        mode = stat.S_IMODE(facts.st_mode)
        if mode & 0o077:
            raise ValueError(f"others may use the secret in {file} (mode {mode:04o}); `chmod 600 {file}`, and if they "
                             "could read it until now, make a new one")  # fmt: skip
        if facts.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"the secret in {file} belongs to user {facts.st_uid}, and we are {os.geteuid()}")
        return handle.read(_LONGEST_FILE_BYTES).decode("ascii", errors="replace")
