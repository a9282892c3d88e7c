"""Who may import whom, and that the control plane needs nothing but Python."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "anaphora"
ROOT = "root"

MAY_IMPORT = {
    ROOT: {ROOT},
    "core": {ROOT, "core"},
    "engine": {ROOT, "core", "engine"},
    "sim": {ROOT, "core", "engine", "sim"},
    "runtime": {ROOT, "core", "engine", "runtime"},
    "tiers": {ROOT, "core", "engine", "tiers"},
    "server": {ROOT, "core", "engine", "server"},
    "dashboard": {ROOT, "core", "dashboard"},
    "api": {ROOT, "core", "engine", "sim", "runtime", "tiers", "api"},
    "bench": {ROOT, "core", "engine", "runtime", "api", "bench"},
    "cluster": {ROOT, "core", "engine", "api", "server", "cluster"},
}
MAY_IMPORT["cli"] = {*MAY_IMPORT, "cli"}
"""Plane -> the planes that it may import, itself included. ROOT is the modules of `anaphora` itself."""

WITHOUT_OTHER_PACKAGES = {ROOT, "core", "engine"}

CONSTANT_TABLES = {"POLICIES"}
"""Upper-case tables of core that are filled once, where they stand, and only read."""


def plane_of(module: str) -> str:
    """`anaphora.core.plan` -> core; `anaphora` and `anaphora.errors` -> root; `__main__` is a command line."""
    parts = module.split(".")
    if parts[-1] == "__main__":
        return "cli"
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else ROOT


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever it stands; each name of `from a import b` as a.b."""
    package = path.relative_to(PACKAGE.parent).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            before = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (before, node.module)))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_imports_only_the_planes_that_its_own_may(path: Path) -> None:
    plane = plane_of(name_of(path))
    assert plane in MAY_IMPORT, f"{plane} is no plane of design: add it to the table with what it may import"
    allowed = MAY_IMPORT[plane]
    if path == PACKAGE / "__init__.py":
        allowed = {*allowed, "api"}  # fetched when it is first asked for: see the test below
    wrong = [
        f"{path}:{line} imports {module}"
        for line, module in imported(ast.parse(path.read_text(encoding="utf-8")), path)
        if module.split(".")[0] == "anaphora" and plane_of(module) not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if plane_of(name_of(path)) in WITHOUT_OTHER_PACKAGES], ids=name_of
)
def test_the_control_plane_and_the_loop_import_the_standard_library_only(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tops = {module.split(".")[0] for _, module in imported(tree, path)}
    assert tops - sys.stdlib_module_names <= {"anaphora"}


def test_the_package_itself_loads_no_plane() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [module for node in at_once for _, module in imported(node, PACKAGE / "__init__.py")]
    assert {plane_of(module) for module in modules if module.startswith("anaphora")} == {ROOT}


def test_core_works_where_no_other_package_can_be_imported() -> None:
    program = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
for name in ("torch", "transformers", "numpy", "safetensors", "xxhash", "typer", "rich"):
    sys.modules[name] = None  # an import of it raises ImportError
import anaphora, anaphora.core
for module in pkgutil.walk_packages(anaphora.core.__path__, "anaphora.core."):
    importlib.import_module(module.name)
from anaphora import SamplingParams
from anaphora.core import CacheManager, Request, SampledToken, Scheduler, StepResult
scheduler = Scheduler(CacheManager(4, 2))
scheduler.add(Request("a", [1, 2, 3], SamplingParams(max_tokens=1)))
plan = scheduler.schedule()
(update,) = scheduler.update(plan, StepResult({"a": SampledToken(7)}))
assert update.finish_reason == "length"
tops = {name.split(".")[0] for name, module in sys.modules.items() if module is not None}
print(sorted(tops - sys.stdlib_module_names - {"__main__", "anaphora"}))
planes = {name.split(".")[1] for name in sys.modules if name.startswith("anaphora.")}
print(sorted(planes))
"""
    # -I -S: no environment variables and no site-packages.
    command = [sys.executable, "-I", "-S", "-c", program, str(PACKAGE.parent)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    names = ["config", "core", "errors", "pooling_params", "salt_regions", "sampling_params"]
    assert result.stdout.splitlines() == ["[]", str(names)]


# -- no state outside objects ------------------------------------------------------------------------------------------

MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_TYPES = {"list", "dict", "set", "bytearray", "array", "deque", "defaultdict", "OrderedDict", "Counter"}


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in MUTABLE_TYPES
    return isinstance(value, MUTABLE_DISPLAYS)


def shared_state(tree: ast.Module) -> Iterator[str]:
    """Mutable values of modules and classes, and `global` statements."""
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for node in (node for body in bodies for node in body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if is_mutable(getattr(node, "value", None)):
            yield from (name for name in names if name != "__all__" and name not in CONSTANT_TABLES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from (f"global {name}" for name in node.names)


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").rglob("*.py")), ids=name_of)
def test_core_keeps_no_state_outside_objects(path: Path) -> None:
    assert list(shared_state(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_the_check_for_shared_state_finds_it() -> None:
    source = """
__all__ = ["a"]
SIZE = 3
cache = {}
seen: set[int] = set()
class Pool:
    blocks: list[int] = []
    size: int = 3
def add():
    global total
"""
    assert list(shared_state(ast.parse(source))) == ["cache", "seen", "blocks", "global total"]
