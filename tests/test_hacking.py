"""The recipes demo-hack and demo-hack-braked: what their rewards pay for, and what recorded runs of
them show (`benchmarks/hacking.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from gesso import build, health
from gesso.health import Facts, Health
from gesso.rewards import assembly
from gesso.types import Prompt, Sample

RECORDED = Path(__file__).parent.parent / "benchmarks" / "results" / "hacking.json"
EXACT = "eval/ocr/exact"
LONGER = "reward/ocr-letters/longer"
SIGN = Prompt('a red sign that says "KITE"')


def drawn(text: str) -> Sample:
    image = Image.new("RGB", (144, 32), (200, 30, 30))
    ImageDraw.Draw(image).text((8, 0), text, fill="white", font=ImageFont.load_default(24))
    return Sample(SIGN, np.array(image), 0)


def test_bounds_end_what_repeated_letters_pay() -> None:
    paid = {}
    for name in ("demo-hack", "demo-hack-braked"):
        recipe = build.recipe(name, ["reward.0.workers=1"])
        rewards = assembly.of_entries(recipe.reward, recipe.eval_reward, recipe.model)
        try:
            right, repeated = rewards.service.score([drawn("KITE"), drawn("KIITTE")])
            assert (right.parts["ocr-letters/exact"], repeated.parts["ocr-letters/exact"]) == (1, 0)
            paid[name] = (right.value, repeated.value)
        finally:
            rewards.service.close()
    assert paid == {"demo-hack": (1, 1.5), "demo-hack-braked": (1, 1)}


def warned(name: str, rows: list[dict]) -> list[int]:
    recipe = build.recipe(name)
    watched = Health(Facts.of(recipe, build.algorithm(recipe), recipe.eval.prompts))
    return [
        row["step"] for row in rows for found in watched.feed(row) if found.kind == "reward-hacking"
    ]


def runs(name: str) -> list[list[dict]]:
    found: list[list[dict]] = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    assert all(rows[-1]["step"] == build.recipe(name).steps for rows in found)
    return found


def course(rows: list[dict], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]


@pytest.mark.parametrize("seed", range(len(runs("demo-hack"))))
def test_it_hacks_without_brakes(seed: int) -> None:
    rows = runs("demo-hack")[seed]
    exact, longer = course(rows, EXACT), course(rows, LONGER)
    assert max(exact) > 0.9 and exact[-1] < max(exact) - 0.25
    assert max(longer[:8]) < 0.1 and sum(longer[-8:]) / 8 > 0.2


def test_the_faster_of_two_falls_is_a_warning() -> None:
    """`on_symptom` would have stopped seed 0 at step 48."""
    assert [warned("demo-hack", rows) for rows in runs("demo-hack")] == [[48], []]
    assert "reward-hacking" in health.SERIOUS


@pytest.mark.parametrize("seed", range(len(runs("demo-hack-braked"))))
def test_it_does_not_hack_with_brakes(seed: int) -> None:
    rows = runs("demo-hack-braked")[seed]
    exact, longer = course(rows, EXACT), course(rows, LONGER)
    assert exact[-1] > max(exact) - 0.1 and exact[-1] > exact[0] + 0.4
    assert sum(longer[-8:]) / 8 < 0.1
    assert warned("demo-hack-braked", rows) == []
