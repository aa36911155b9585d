"""What is computed has not changed: three steps of the demos against what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pinned import runs


@pytest.mark.parametrize("name", runs.NAMES)
def test_rows_and_checkpoints_are_as_recorded(name: str, tmp_path: Path) -> None:
    got, recorded = runs.record(name, tmp_path), runs.recorded(name)
    if (here := runs.machine()) in recorded:
        assert got["rows"] == recorded[here]["rows"]
        assert got["tensors"] == recorded[here]["tensors"]
    for other in recorded.values():
        for row, expected in zip(got["rows"][:2], other["rows"][:2], strict=True):
            assert _loose(row) == pytest.approx(_loose(expected), rel=0.1, abs=0.05)
        assert got["tensors"].keys() == other["tensors"].keys()


def _loose(row: dict[str, Any]) -> dict[str, float]:
    """Without what hangs on the last bits of a single sample."""
    return {key: value for key, value in row.items() if key != "health" and "max" not in key}
