"""The scripts of the bundled models can be imported from the repository root."""

from __future__ import annotations

import importlib
import pkgutil
import runpy
import sys

import pytest

import tools.zoo

MODULES = sorted(module.name for module in pkgutil.iter_modules(tools.zoo.__path__))


def test_every_module_can_be_imported() -> None:
    assert {"make_signs", "make_shapes", "evaluate", "evaluate_shapes", "plot"} <= set(MODULES)
    for name in MODULES:
        importlib.import_module(f"tools.zoo.{name}")


@pytest.mark.parametrize("name", ["evaluate", "evaluate_shapes", "plot"])
def test_scripts_have_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.delitem(sys.modules, f"tools.zoo.{name}", raising=False)
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module(f"tools.zoo.{name}", run_name="__main__")
    assert capsys.readouterr().out.startswith(f"usage: {name}.py")
