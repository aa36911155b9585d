"""A tiny language model, for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tokens


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    tokens.build("qwen2", root / "qwen2")
    (root / "prompts.txt").write_text("what is 2 + 3?\nhow many?\nhello there\nwhy?\n")
    return root
