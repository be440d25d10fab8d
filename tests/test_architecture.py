"""Which package may import which, and what the core may import at all (docs/design.md, "Packages")."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "lockstep"

# package -> the packages that it may import; a file at the top of lockstep/ counts as a package
ALLOWED = {
    "errors": set(),
    "faults": set(),
    "seed": set(),
    "strict_json": set(),
    "run_files": {"errors"},
    "failures": set(),
    "world": {"errors", "failures"},
    "comm": {"errors", "faults", "world"},
    "data": {"errors", "run_files", "seed", "world"},
    "ddp": {"errors", "faults", "world", "comm"},
    "checkpoint": {"errors", "run_files", "faults", "strict_json"},
    "control": {"errors", "strict_json"},
    "launcher": {"errors", "failures", "control", "world"},
    "elastic": {"errors", "failures", "control", "launcher"},
    "train": {
        *{"errors", "faults", "run_files", "seed", "failures", "world"},
        *{"comm", "data", "ddp", "checkpoint", "launcher", "elastic"},
    },
    "report": {"errors"},
    "bench": {"errors", "world", "comm", "data", "ddp", "train", "report"},
    "doctor": {"errors", "world"},
    "submit": {"control", "launcher"},
    "notebook": {"errors", "world", "launcher", "train"},
    "demo": {"errors", "launcher", "report"},
    "cli": {"errors", "checkpoint", "control", "data", "failures", "launcher", "report"},
    "__main__": {"cli"},
}
# The package hands names on; a worker that was asked for the drop-in puts it in place.
HAND_ON = {"__init__.py", "launcher/worker_main.py"}
# Files that may do more than their package: recovery forms process groups inside a worker; the fork server is a process
# of its own, which becomes a worker; one function decides between the two kinds of runs; a postmortem is printed.
MORE = {
    "elastic/recovery.py": {"comm", "world", "torch"},
    "launcher/fork_server.py": {"train", "torch"},
    "launcher/run_job.py": {"elastic"},
    "failures/postmortem.py": {"launcher"},
}
OUTSIDE = {"demo/digits.py": {"sklearn"}, "report/live_view.py": {"rich"}}  # optional: they say what to install
NO_TORCH = ("control", "launcher", "elastic", "failures")  # the launcher must start at once, and cannot hang in torch
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


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_packages_import_only_what_the_table_allows(path: Path) -> None:
    if name_of(path) in HAND_ON:
        return
    package = package_of(path)
    allowed = ALLOWED[package] | MORE.get(name_of(path), set())
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "lockstep" and len(parts) > 1 and not parts[1].startswith("__version"):
            target = parts[1]
            through_the_package = target not in ALLOWED and package in ("demo", "cli")
            assert target == package or target in allowed or through_the_package, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_core_imports_torch_and_the_standard_library_only(path: Path) -> None:
    allowed = STANDARD | {"torch"}
    if package_of(path) in NO_TORCH:
        allowed = STANDARD | MORE.get(name_of(path), set())  # the launcher starts at once
    allowed = allowed | OUTSIDE.get(name_of(path), set())
    outside = {name.split(".")[0] for name in imports_of(path)} - allowed
    assert not outside


def test_the_table_covers_every_package() -> None:
    assert {package_of(p) for p in FILES} - {"__init__"} == set(ALLOWED)


def test_importing_the_package_and_the_command_line_leaves_torch_alone() -> None:
    code = "import lockstep, lockstep.cli.main, sys; assert 'torch' not in sys.modules; print(lockstep.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_supervisor_never_loads_torch() -> None:
    """Not when it starts, and not later: what it imports when it is needed is imported here, too."""
    torch_files = {"elastic/recovery", "launcher/fork_server"}
    files = {name_of(path).removesuffix(".py") for path in FILES if package_of(path) in NO_TORCH} - torch_files
    names = [name.replace("/", ".").removesuffix(".__init__") for name in sorted(files)]
    known = ("launcher.supervisor", "elastic.host_agent", "elastic.membership", "control.store", "failures.postmortem")
    assert set(known) <= set(names)
    code = "".join(f"import lockstep.{name}\n" for name in names)
    code += "import sys; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_only_a_worker_imports_recovery() -> None:
    users = [name_of(p) for p in FILES if any("elastic.recovery" in name for name in imports_of(p))]
    assert users == ["train/elastic_calls.py"]
