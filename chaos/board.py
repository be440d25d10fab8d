"""A page of memory on which every worker notes what it is doing; it can be read after the worker's death."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_ROW = struct.Struct("=iiii")  # collective, inside, steps done, child
_ROW_BYTES = 64


@dataclass(frozen=True)
class Note:
    collective: int = -1  # its place in plan.COLLECTIVES; -1: none yet
    inside: int = 0  # 1: in the call, 0: before or after it
    steps: int = 0  # collectives finished
    child: int = 0  # pid of a child that outlives us, if there is one


class Board:
    """One row per worker. The process that calls `create` makes the file and owns it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)

    @staticmethod
    def create(path: Path, rows: int) -> Board:
        path.write_bytes(bytes(rows * _ROW_BYTES))
        return Board(path)

    def write(self, row: int, note: Note) -> None:
        _ROW.pack_into(self._page, row * _ROW_BYTES, note.collective, note.inside, note.steps, note.child)

    def read(self, row: int) -> Note:
        return Note(*_ROW.unpack_from(self._page, row * _ROW_BYTES))

    def close(self) -> None:
        self._page.close()
