"""The scripts of the bundled models can be imported from the repository root."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import tools.zoo

MODULES = sorted(module.name for module in pkgutil.iter_modules(tools.zoo.__path__))


def test_every_module_can_be_imported() -> None:
    assert {"make_signs", "make_shapes", "evaluate", "evaluate_shapes", "plot"} <= set(MODULES)
    for name in MODULES:
        importlib.import_module(f"tools.zoo.{name}")


@pytest.mark.parametrize("name", ["evaluate", "evaluate_shapes", "plot"])
def test_scripts_have_help(name: str) -> None:
    command = [sys.executable, "-m", f"tools.zoo.{name}", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.startswith(f"usage: {name}.py")
