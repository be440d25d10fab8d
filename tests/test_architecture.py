"""Which package may import which, and what the core may import at all (docs/design.md, "Packages")."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "lockstep"

# package -> the packages that it may import; a file at the top of lockstep/ counts as a package
ALLOWED = {
    "_torch": set(),  # for all packages that may import torch
    "settings": set(),  # for all packages
    "terminal_log": set(),
    "errors": set(),
    "faults": set(),
    "process_identity": set(),
    "seed": set(),
    "strict_json": set(),
    "version": set(),
    "run_files": {"errors"},
    "failures": set(),
    "world": {"errors", "failures", "process_identity"},
    "comm": {"errors", "faults", "process_identity", "world"},
    "data": {"errors", "run_files", "seed", "world"},
    "ddp": {"errors", "faults", "process_identity", "world", "comm"},
    "checkpoint": {"errors", "run_files", "faults", "process_identity", "strict_json", "version"},
    "control": {"errors", "strict_json"},
    "launcher": {"errors", "failures", "control", "process_identity", "world"},
    "elastic": {"errors", "failures", "control", "launcher", "process_identity"},
    "trace": {"errors", "run_files", "comm", "checkpoint"},
    "step": {"errors", "faults", "seed", "world", "comm", "data", "ddp", "trace"},
    "recovery": {
        *{"errors", "faults", "run_files", "process_identity", "failures", "world", "comm"},
        *{"ddp", "checkpoint", "launcher", "elastic", "step"},
    },
    "train": {
        *{"errors", "faults", "run_files", "seed", "failures", "world", "comm", "data", "ddp", "checkpoint"},
        *{"launcher", "elastic", "trace", "step", "recovery"},
    },
    "report": {"errors", "version"},
    "bench": {
        *{"errors", "process_identity", "seed", "world", "comm", "data", "ddp", "trace", "step", "train", "report"},
        "hooks",
    },
    "doctor": {"errors", "launcher", "world", "version"},
    "plan": {"errors", "bench", "checkpoint", "comm", "doctor", "launcher", "report", "version"},
    "submit": {"control", "launcher"},
    "notebook": {"errors", "world", "launcher", "train"},
    "demo": {"errors", "launcher", "report"},
    "cli": {"errors", "checkpoint", "control", "data", "failures", "launcher", "report", "version"},
    "__main__": {"cli"},
    "hooks": {"comm", "seed"},
}
# The package hands names on; a worker that was asked for the drop-in puts it in place.
HAND_ON = {"__init__.py", "launcher/worker_main.py"}
# Files that may do more than their package: recovery forms process groups inside a worker; the fork server is a process
# of its own, which becomes a worker; one function decides between the two kinds of runs; a postmortem is printed.
MORE = {
    "elastic/generation_groups.py": {"_torch", "comm", "world", "torch"},
    "launcher/fork_server.py": {"_torch", "train", "torch"},
    "launcher/run_job.py": {"elastic"},
    "failures/postmortem.py": {"launcher"},
}
OUTSIDE = {  # optional: they say what to install, or something else is used
    "demo/digits.py": {"sklearn"},
    "report/live_view.py": {"rich"},
    "comm/codec_triton.py": {"triton"},
}
NO_TORCH = ("control", "launcher", "elastic", "failures")  # the launcher must start at once, and cannot hang in torch
STANDARD = set(sys.stdlib_module_names) | {"lockstep"}
FILES = sorted(SOURCE.rglob("*.py"))


@functools.cache
def nodes_of(path: Path, *, for_type_checking: bool = True) -> list[ast.AST]:
    """The syntax tree of a file; without `for_type_checking`, no imports that are for type checking only."""
    tree = ast.parse(path.read_text())
    for node in [] if for_type_checking else ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    return list(ast.walk(tree))


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Dotted names of everything imported, also inside functions, but not for type checking only."""
    found = set()
    for node in nodes_of(path, for_type_checking=False):
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


def forbidden_imports(path: Path) -> list[str]:
    """Imports of our own packages that the table does not allow."""
    if name_of(path) in HAND_ON:
        return []
    package = package_of(path)
    allowed = ALLOWED[package] | MORE.get(name_of(path), set()) | {"settings", package}
    allowed |= set() if package in NO_TORCH else {"_torch"}
    found = []
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "lockstep" and len(parts) > 1 and not parts[1].startswith("__version"):
            through_the_package = parts[1] not in ALLOWED and package in ("demo", "cli")
            found += [name] * (parts[1] not in allowed and not through_the_package)
    return found


def test_no_class_has_more_than_25_methods() -> None:
    """Process groups and the wrapper have what torch asks for."""
    as_torch = {"HierarchicalGroup", "ShmGroup", "TorchInterface"}
    found = {}
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and node.name not in as_torch:
                found[node.name] = sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)
    assert {name: count for name, count in found.items() if count > 25} == {}


def test_packages_import_only_what_the_table_allows() -> None:
    assert {name_of(path): names for path in FILES if (names := forbidden_imports(path))} == {}


def outside_imports(path: Path) -> set[str]:
    """Imports of packages other than torch, the standard library and ours."""
    allowed = STANDARD | {"torch"}
    if package_of(path) in NO_TORCH:
        allowed = STANDARD | MORE.get(name_of(path), set())  # the launcher starts at once
    return {name.split(".")[0] for name in imports_of(path)} - allowed - OUTSIDE.get(name_of(path), set())


def test_the_core_imports_torch_and_the_standard_library_only() -> None:
    assert {name_of(path): names for path in FILES if (names := outside_imports(path))} == {}


def test_the_table_covers_every_package() -> None:
    assert {package_of(p) for p in FILES} - {"__init__"} == set(ALLOWED)


def test_importing_the_package_and_the_command_line_leaves_torch_alone() -> None:
    code = "import lockstep, lockstep.cli.main, sys; assert 'torch' not in sys.modules; print(lockstep.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_host_agent_never_loads_torch() -> None:
    """Not when it starts, and not later: what it imports when it is needed is imported here, too."""
    torch_files = {"elastic/generation_groups"}
    files = {name_of(path).removesuffix(".py") for path in FILES if package_of(path) in NO_TORCH} - torch_files
    names = [name.replace("/", ".").removesuffix(".__init__") for name in sorted(files)]
    known = (
        "launcher.worker_group",
        "elastic.host_agent",
        "elastic.membership",
        "control.store",
        "failures.postmortem",
    )
    assert set(known) <= set(names)
    code = "".join(f"import lockstep.{name}\n" for name in names)
    code += "import sys; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[]\n", done.stderr


def test_only_a_worker_imports_generation_groups() -> None:
    users = [name_of(p) for p in FILES if any("elastic.generation_groups" in name for name in imports_of(p))]
    assert users == ["recovery/elastic_calls.py"]


def modules_imported_by(path: Path) -> set[str]:
    """Modules of ours that a file imports, also inside functions and for type checking only."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lockstep":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
    return found & set(MODULES)


def module_of(path: Path) -> str:
    return ("lockstep." + name_of(path).removesuffix(".py").replace("/", ".")).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def test_there_are_no_import_cycles() -> None:
    imports = {module: modules_imported_by(path) - {module} for module, path in MODULES.items()}
    while leaves := {module for module, others in imports.items() if not others & set(imports)}:
        imports = {module: others for module, others in imports.items() if module not in leaves}
    assert not imports, f"these import each other in a circle: {', '.join(sorted(imports))}"


def test_a_class_name_occurs_once() -> None:
    names: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, []).append(name_of(path))
    assert {name: paths for name, paths in names.items() if len(paths) > 1} == {}


def test_no_file_is_too_long() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 450} == {}


OLD_WORDS = re.compile(
    r"\b(nobody|whoever|somebody|everybody|anybody|seat|roster|graveyard|farewell|witness|inquest|mourn\w*|bury|buried|"
    r"arbiter|chronicle|vigil|hatch|parcel|guardian|neighbours?|knock\w*|newborn|unborn|orders of the house)\b",
    re.IGNORECASE,
)


def old_words(path: Path) -> list[str]:
    return OLD_WORDS.findall(re.sub(r"LOCKSTEP_[A-Z_]+", "", path.read_text()).replace("_", " "))


def test_plain_words() -> None:
    """Words of a private language that the code once had; docs/design.md, "Words", has those that it uses."""
    assert {name_of(path): words for path in FILES if (words := old_words(path))} == {}
