"""The recipes demo-hack and demo-hack-braked: what their rewards pay for, and what recorded runs of
them show (`benchmarks/hacking.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from gesso import build, health
from gesso.health import Facts, Health
from gesso.rewards import assembly
from gesso.types import Prompt, Sample

RECORDED = Path(__file__).parent.parent / "benchmarks" / "results" / "hacking.json"
EXACT = "eval/ocr/exact"
SIGN = Prompt('a red sign that says "SCOOP"')


def drawn(blur: float) -> Sample:
    image = Image.new("RGB", (96, 32), (200, 30, 30))
    font = ImageFont.load_default(24)
    ImageDraw.Draw(image).text((8, 0), "SCOOP", fill="white", font=font)
    return Sample(SIGN, np.array(image.filter(ImageFilter.GaussianBlur(blur))), 0)


def test_bounds_turn_what_the_reward_prefers() -> None:
    """Without them a blurred word is worth more than a legible one."""
    prefers = {}
    for name in ("demo-hack", "demo-hack-braked"):
        recipe = build.recipe(name, ["reward.0.workers=1"])
        rewards = assembly.of_entries(recipe.reward, recipe.eval_reward, recipe.model)
        try:
            legible, blurred = rewards.service.score([drawn(0.0), drawn(9.0)])
            assert (legible.parts["ocr"], blurred.parts["ocr/exact"]) == (1, 0)
            assert legible.value is not None and blurred.value is not None
            prefers[name] = "legible" if legible.value > blurred.value else "blurred"
        finally:
            rewards.service.close()
    assert prefers == {"demo-hack": "blurred", "demo-hack-braked": "legible"}


def first_warning(name: str, rows: list[dict]) -> int | None:
    recipe = build.recipe(name)
    watched = Health(Facts.of(recipe, build.algorithm(recipe), recipe.eval.prompts))
    for row in rows:
        if "reward-hacking" in [symptom.kind for symptom in watched.feed(row)]:
            return row["step"]
    return None


def runs(name: str) -> list[list[dict]]:
    found: list[list[dict]] = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    assert all(rows[-1]["step"] == build.recipe(name).steps for rows in found)
    return found


@pytest.mark.parametrize("seed", range(len(runs("demo-hack"))))
def test_it_hacks_without_brakes(seed: int) -> None:
    rows = runs("demo-hack")[seed]
    before, *_, after = [row[EXACT] for row in rows if EXACT in row]
    trained = [row["reward"] for row in rows if "reward" in row]
    assert after < before / 2
    assert sum(trained[-4:]) / 4 > sum(trained[:4]) / 4 + 1
    step = first_warning("demo-hack", rows)
    assert step is not None and step < rows[-1]["step"], "on_symptom would have stopped it"
    assert "reward-hacking" in health.SERIOUS


@pytest.mark.parametrize("seed", range(len(runs("demo-hack-braked"))))
def test_it_does_not_hack_with_brakes(seed: int) -> None:
    rows = runs("demo-hack-braked")[seed]
    before, *_, after = [row[EXACT] for row in rows if EXACT in row]
    assert after > before + 0.1
    assert first_warning("demo-hack-braked", rows) is None
