"""Imports within gesso.rewards: no cycles, and rewards and transport do not import each other."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "gesso" / "rewards"
ROOT = "gesso.rewards"


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join((ROOT, *parts)).removesuffix(".__init__")


MODULES = {module_name(file): file for file in PACKAGE.rglob("*.py")}


def imports_of(module: str) -> set[str]:
    """Modules of the package that it imports, including in functions and for type checkers."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            targets = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in targets}
    return names & MODULES.keys()


GRAPH = {module: imports_of(module) for module in MODULES}


def reachable(module: str) -> set[str]:
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        new = GRAPH[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def subpackage(module: str) -> str:
    """ "" for the modules at the top."""
    return module.split(".")[2] if MODULES[module].parent != PACKAGE else ""


def test_no_module_imports_itself() -> None:
    assert not [module for module in GRAPH if module in reachable(module)]


def test_subpackages_import_only_allowed_ones() -> None:
    allowed = {
        "image": {"", "image"},
        "text": {"", "text"},
        "judges": {"", "judges", "transport", "image"},  # HTTP pool; OCR's spelling score
        "transport": {"", "transport"},
        "video": {"", "video", "image"},  # patch features
    }
    for module in GRAPH:
        if subpackage(module):
            reached = {subpackage(other) for other in reachable(module)}
            assert reached <= allowed[subpackage(module)], module


def test_only_assembly_imports_all() -> None:
    for module in GRAPH:
        if not subpackage(module) and module not in (ROOT, f"{ROOT}.assembly"):
            assert {subpackage(other) for other in reachable(module)} <= {""}, module


def test_the_graph_includes_local_imports() -> None:
    assert f"{ROOT}.transport.serve" in GRAPH[f"{ROOT}.assembly"]  # imported in a function
