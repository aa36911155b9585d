"""The layers of the package: imports point downward only, and light imports stay light."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Container, Mapping
from pathlib import Path

import pytest

from gesso.config import tables

PACKAGE = Path(__file__).parent.parent / "gesso"
TESTS = re.compile(r"\btests/[a-z0-9_/]+\.py")
# From top to bottom; a layer may import the layers after it and its own files.
LAYERS = [
    "__main__",
    "cli", "arguments", "options", "commands",
    "plan", "fitting", "check", "estimate", "run", "worker", "loop",
    "viewer", "use", "health", "build", "consistency",
    "families", "memory", "cluster", "learner", "samplers", "algorithms", "models", "weights",
    "ranks", "rewards", "data", "track", "zoo", "formulas", "config", "serving", "imports", "quiet",
    "rollout", "traces", "devices", "video_files", "types", "image_files", "timeline", "clock",
]  # fmt: skip

PACKAGES = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def imports_of(file: Path) -> set[str]:
    """Layers that a file imports, anywhere in the file; imports for type checkers count too."""
    layers = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            layers |= {a.name.split(".")[1] for a in node.names if a.name.startswith("gesso.")}
        elif isinstance(node, ast.ImportFrom) and node.module == "gesso":
            layers |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gesso."):
            layers.add(node.module.split(".")[1])
    return layers


def test_imports_point_downward() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        layer = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if layer == "__init__":
            continue
        assert layer in LAYERS, f"{file} is in no layer; add it to LAYERS"
        for other in imports_of(file) - {layer}:
            assert LAYERS.index(other) > LAYERS.index(layer), f"{file} imports gesso.{other}"


def test_the_package_does_not_import_what_is_not_installed() -> None:
    """The wheel holds `gesso` alone; the other folders stay in the repository."""
    folders = {"tools", "tests", "benchmarks", "docs", "examples"}
    assert all((PACKAGE.parent / folder).is_dir() for folder in folders)
    for file in sorted(PACKAGE.rglob("*.py")):
        modules: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module)
        outside = {name for name in modules if name.partition(".")[0] in folders}
        assert not outside, f"{file} imports {outside}"


def test_the_wheel_holds_the_package_alone() -> None:
    project = tables.read_toml(PACKAGE.parent / "pyproject.toml")
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["gesso"]}


def test_the_import_test_can_see() -> None:
    assert imports_of(PACKAGE / "loop.py") >= {"cluster", "health", "track", "types"}


def imported_modules(file: Path, modules: Container[str]) -> set[str]:
    """Which of these modules a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in modules else node.module for name in inside}
    return {name for name in names if name in modules}


def cycle_of(graph: Mapping[str, set[str]]) -> list[str] | None:
    """A cycle of a directed graph, as the nodes on it, or None."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return None
        found = (visit(other, [*path, node]) for other in sorted(graph[node]))
        cycle = next((nodes for nodes in found if nodes), None)
        done.add(node)
        return cycle

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), None)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_files_of_a_package_import_each_other(package: str) -> None:
    """Imports inside functions and for type checkers count, too."""
    modules = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file
        for file in (PACKAGE / package).rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): file for name, file in modules.items()}
    graph = {name: imported_modules(file, modules) - {name} for name, file in modules.items()}
    assert cycle_of(graph) is None


def test_the_cycle_test_can_see() -> None:
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert cycle_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
    joined = "gesso.models.flow.joined"  # imported inside a function
    assert imported_modules(PACKAGE / "models" / "flow" / "compiled.py", {joined}) == {joined}


def test_importing_gesso_and_asking_for_help_load_nothing_heavy() -> None:
    code = (
        "import sys, gesso.rewards.transport.worker\n"
        "heavy = {'pydantic', 'numpy', 'asyncio', 'gesso.config'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import gesso, gesso.cli, gesso.build\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'peft', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torchvision_stays_out() -> None:
    """The package index's build breaks transformers and diffusers on CPU installs."""
    import torch

    if torch.version.cuda is not None:
        pytest.skip("a CUDA build of torch: torchvision is harmless there")
    assert importlib.util.find_spec("torchvision") is None


def test_the_docs_name_tests_that_are_there() -> None:
    root = PACKAGE.parent
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("benchmarks/*.md")]
    named = {name for page in pages for name in TESTS.findall(page.read_text(encoding="utf-8"))}
    assert named and not [name for name in sorted(named) if not (root / name).exists()]
