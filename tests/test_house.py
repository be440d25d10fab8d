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
    "card": set(),
    "files": {"errors"},
    "faults": set(),
    "plain_json": set(),
    "arrival": {"comm"},  # which it imports once torch is there, not before
    "place": {"errors"},
    "process": {"place"},
    "vigil": {"errors", "process"},
    "meeting": {"errors", "process", "vigil"},
    "world": {"errors", "card", "place", "vigil", "meeting"},
    "comm": {"errors", "faults", "place", "process", "vigil", "world"},
    "seed": set(),
    "data": {"errors", "files", "seed", "world"},
    "replicate": {"errors", "faults", "world", "comm"},
    "checkpoint": {"errors", "files", "faults", "plain_json"},
    "trace": {"files"},
    "train": {
        *{"errors", "files", "faults", "seed", "trace", "world"},
        *{"comm", "data", "replicate", "checkpoint", "elastic"},
    },
    "elastic": {"errors", "card", "plain_json", "process"},
    "measure": {"errors", "world", "comm", "data", "replicate", "train"},
    "doctor": {"errors", "place"},
    "demo": {"errors", "elastic", "measure"},
    "submit": {"elastic"},
    "notebook": {"errors", "place", "elastic", "train"},
    "cli": {"errors", "data", "doctor", "elastic", "measure", "submit", "cli_checkpoint"},
    "cli_checkpoint": {"errors", "checkpoint"},
    "__main__": {"cli"},
}
# The door hands names on; a worker that was asked for the drop-in puts it in place.
DOORS = {"__init__.py", "elastic/worker.py"}
# Files that may do more than their room, because they are not of the supervisor: recovery forms process groups inside a
# worker, and the template is a process of its own, which becomes one.
MORE = {"elastic/recovery.py": {"comm", "place", "world", "torch"}, "elastic/template.py": {"train", "torch"}}
OUTSIDE = {"demo/digits.py": {"sklearn"}, "measure/live.py": {"rich"}}  # which they do without, or say what to install
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
            found |= inside if node.module.split(".")[0] == "lockstep" else {node.module}
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_rooms_import_only_from_rooms_below(path: Path) -> None:
    if name_of(path) in DOORS:
        return
    room = room_of(path)
    allowed = ALLOWED[room] | MORE.get(name_of(path), set())
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "lockstep" and len(parts) > 1 and not parts[1].startswith("__version"):
            target = parts[1]
            through_the_door = target not in ALLOWED and room in ("demo", "cli")
            assert target == room or target in allowed or through_the_door, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_core_imports_torch_and_the_standard_library_only(path: Path) -> None:
    allowed = STANDARD | {"torch"}
    if room_of(path) == "elastic":
        allowed = STANDARD | MORE.get(name_of(path), set())  # a supervisor starts at once
    allowed = allowed | OUTSIDE.get(name_of(path), set())
    outside = {name.split(".")[0] for name in imports_of(path)} - allowed
    assert not outside


def test_the_rules_cover_every_room() -> None:
    assert {room_of(p) for p in FILES} - {"__init__"} == set(ALLOWED)


def test_importing_the_package_and_the_command_line_leaves_torch_alone() -> None:
    code = "import lockstep, lockstep.cli, sys; assert 'torch' not in sys.modules; print(lockstep.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_supervisor_never_loads_torch() -> None:
    """Not when it starts, and not later: what it imports when it is needed is imported here, too."""
    rooms = {name_of(path).removesuffix(".py") for path in FILES if room_of(path) == "elastic"} - {"elastic/recovery"}
    names = [name.replace("/", ".").removesuffix(".__init__") for name in sorted(rooms)]
    known = ("supervisor", "crew", "neighbours", "roster", "records", "membership")
    assert {f"elastic.{name}" for name in known} <= set(names)
    code = "".join(f"import lockstep.{name}\n" for name in names)
    code += "import sys; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_only_a_worker_imports_recovery() -> None:
    users = [name_of(p) for p in FILES if any("elastic.recovery" in name for name in imports_of(p))]
    assert users == ["train/elastic_calls.py"]
