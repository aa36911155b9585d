"""Runs the code of a video model's card."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gesso.use.trained import Trained


def check(loaded: Trained, task: str, prompt: str, folder: Path, patch: pytest.MonkeyPatch) -> str:
    """Exports the model to a new folder and runs its card, which must make the video that Gesso
    samples for this prompt. Returns the code."""
    card = (loaded.export(folder) / "README.md").read_text()
    assert f"pipeline_tag: {task}" in card
    code = card.partition("```python\n")[2].partition("\n```")[0]
    runnable = code.replace("from diffusers.utils import export_to_video", "")  # it needs OpenCV
    made: dict[str, Any] = {"export_to_video": lambda *given, **more: None}
    inputs = sorted(folder.glob("example.png"))
    if inputs:
        module = sys.modules["diffusers.pipelines.wan.pipeline_wan_i2v"]
        plain = SimpleNamespace(fix_text=lambda text: text)  # ftfy is not installed
        patch.setattr(module, "ftfy", plain, raising=False)
    patch.chdir(folder)
    exec(runnable, made)
    (clip,) = loaded.sample(prompt, images=inputs)
    assert np.abs(np.asarray(made["video"]) * 255 - clip.frames).max() <= 1
    return code
