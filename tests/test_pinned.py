"""What is computed has not changed: three steps of four demos against what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pinned import runs


@pytest.mark.parametrize("name", runs.NAMES)
def test_rows_and_checkpoints_are_as_recorded(name: str, tmp_path: Path) -> None:
    recorded = json.loads(runs.file_of(name).read_text())
    got = runs.record(name, tmp_path)
    if recorded.pop("machine") == runs.machine():
        assert got["rows"] == recorded["rows"]
        assert got["tensors"] == recorded["tensors"]
    else:
        for row, expected in zip(got["rows"][:2], recorded["rows"][:2], strict=True):
            assert _loose(row) == pytest.approx(_loose(expected), rel=0.1, abs=0.05)
        assert got["tensors"].keys() == recorded["tensors"].keys()


def _loose(row: dict[str, Any]) -> dict[str, float]:
    """Without what hangs on the last bits of a single sample."""
    return {key: value for key, value in row.items() if key != "health" and "max" not in key}
