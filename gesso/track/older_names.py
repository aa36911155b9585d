"""Keys in run folders of earlier versions, and their current names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METRICS = {
    "reply/length": "response/length",
    "reply/longest": "response/max_length",
    "reply/cut": "response/truncated",
    "reply/logp": "response/logp",
}
SAMPLES = {"reply": "response"}


def renamed(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in row.items()}
