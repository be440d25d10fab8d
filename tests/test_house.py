"""Who may import whom, and what the core may import at all (docs/design.md, "The house")."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "lockstep"

# room -> the rooms it may import from; a file at the top of the package is a room of its own
ALLOWED = {
    "errors": set(),
    "arrival": {"comm"},  # which it imports once torch is there, not before
    "place": {"errors"},
    "vigil": {"errors", "place"},
    "meeting": {"errors", "vigil"},
    "world": {"errors", "place", "vigil", "meeting"},
    "comm": {"errors", "place", "vigil", "world"},
    "seed": set(),
    "data": {"errors", "seed", "world"},
    "replicate": {"errors", "world", "comm"},
    "checkpoint": {"errors"},
    "train": {"errors", "seed", "world", "comm", "data", "replicate", "checkpoint"},
    "elastic": {"errors"},
    "measure": {"errors", "world", "comm", "data", "replicate", "train"},
    "demo": {"errors", "world", "comm", "replicate"},
    "cli": {"errors", "elastic", "measure"},
    "__main__": {"cli"},
}
# The door hands names on; a worker that was asked for the drop-in puts it in place.
DOORS = {"__init__.py", "elastic/worker.py"}
STANDARD = set(sys.stdlib_module_names) | {"lockstep"}
FILES = sorted(SOURCE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Dotted names of everything imported, also inside functions, but not for type checking only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside if node.module == "lockstep" else {node.module}
    return found


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_rooms_import_only_from_rooms_below(path: Path) -> None:
    if str(path.relative_to(SOURCE)) in DOORS:
        return
    room = room_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "lockstep" and len(parts) > 1 and not parts[1].startswith("__version"):
            target = parts[1]
            through_the_door = target not in ALLOWED and room in ("demo", "cli")
            assert target == room or target in ALLOWED[room] or through_the_door, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_core_imports_torch_and_the_standard_library_only(path: Path) -> None:
    allowed = STANDARD | {"torch"}
    if room_of(path) == "elastic":
        allowed = STANDARD  # a supervisor starts at once
    if room_of(path) == "demo":
        allowed = allowed | {"sklearn"}
    outside = {name.split(".")[0] for name in imports_of(path)} - allowed
    assert not outside


def test_the_rules_cover_every_room() -> None:
    assert {room_of(p) for p in FILES} - {"__init__"} == set(ALLOWED)


def test_importing_the_package_and_the_command_line_leaves_torch_alone() -> None:
    code = "import lockstep, lockstep.cli, sys; assert 'torch' not in sys.modules; print(lockstep.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
