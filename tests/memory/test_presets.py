"""Models of real size by their configs alone: presets fit their cards, parts have their sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gesso import build
from gesso.check import size_of
from gesso.config import PACKAGE, Lora, TokenModel, tables
from gesso.estimate import estimate
from gesso.models.tokens.causal import Causal
from gesso.models.tokens.vision_language import VisionLanguage
from tests.shapes import WRITERS, write_configs, write_writer

GIB = 2**30
GUIDE = PACKAGE.parent / "docs/reference/settings.md"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    for name in ("sd35", "flux", "qwen-image"):
        write_configs(name, folder / name)
    for name in WRITERS:
        write_writer(name, folder / name)
    return folder


LARGE = ("sd35", "flux", "qwen-image", *WRITERS)
PRESETS = [name for name in tables.bundled_recipes() if name.endswith("gb")]


def model_of(recipe: str) -> str:
    return next(name for name in LARGE if recipe.startswith(name))


def test_there_are_presets_for_every_model_and_card() -> None:
    cards = {(model_of(name), name.rsplit("-", 1)[1]) for name in PRESETS}
    drawing = {(m, c) for m in LARGE[:3] for c in ("24gb", "48gb", "80gb")}
    assert cards == drawing | {(m, c) for m in WRITERS for c in ("24gb", "80gb")}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_fit_their_cards(preset: str, shapes: Path) -> None:
    """With a tenth of the card to spare for CUDA's context and the allocator's gaps; the guide
    says how much each takes."""
    found = estimate(build.recipe(preset, [f"model.path={shapes / model_of(preset)}"]))
    card = int(preset.rsplit("-", 1)[1].removesuffix("gb")) * GIB
    assert 0.4 * card < found.peak < 0.9 * card, {k: v / 1e9 for k, v in found.lasting.items()}
    assert f"| `{preset}` | {size_of(found.peak)} |" in GUIDE.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen25-vl-3b-geo3k", "qwen25-vl-7b-geo3k"])
def test_the_guide_says_what_the_recipes_themselves_take(name: str, shapes: Path) -> None:
    found = estimate(build.recipe(name, [f"model.path={shapes / model_of(name)}"]))
    assert f"| `{name}` | {size_of(found.peak)} |" in GUIDE.read_text(encoding="utf-8")


def test_sizes_of_writers_are_the_published_ones(shapes: Path) -> None:
    """In bfloat16; the adapters are counted apart, in float32."""
    published = {
        "qwen25-vl-3b": 3_754_622_976,
        "qwen25-vl-7b": 8_292_166_656,
        "qwen25-math-7b": 7_615_616_512,
    }
    for name, size in published.items():
        kind = "causal" if "math" in name else "vision-language"
        section = TokenModel(
            name=kind, path=str(shapes / name), device="meta", dtype="bfloat16", lora=Lora(rank=1)
        )
        model = (Causal if kind == "causal" else VisionLanguage)(section)
        assert sum(p.numel() for p in model.module.parameters()) - model.policy.size == size


def test_writers_in_four_bits_keep_head_and_tower(shapes: Path) -> None:
    path = f"model.path={shapes / 'qwen25-vl-7b'}"
    small_run = ["model.max_prompt=64", "algorithm.max_tokens=64", "learner.micro_tokens=128"]
    small_run += ["sampler.batch=2", "eval.prompts=1", path]
    whole = estimate(build.recipe("qwen25-vl-7b-geo3k", small_run))
    small = estimate(build.recipe("qwen25-vl-7b-geo3k", [*small_run, "model.quantize=nf4"]))
    # 28 layers of linear weights: q and o, k and v, three of the feed-forward
    linear = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    saved = whole.lasting["language model"] - small.lasting["language model"]
    assert saved == pytest.approx(linear * (2 - 0.5625), rel=1e-6)
    assert small.lasting["vision tower"] == whole.lasting["vision tower"]
    # 512 prompts of 7 × 8 places, each four patches of 2 × 3 × 14 × 14 values in float32
    pixels = 512 * 7 * 8 * 4 * (2 * 3 * 14 * 14) * 4
    assert small.host == {
        "image features, up to": 4 * GIB,
        "image pixels, up to": pixels,
    }


def test_sizes_are_the_published_ones(shapes: Path) -> None:
    found = {
        name: estimate(build.recipe(recipe, [f"model.path={shapes / name}", "model.lora.rank=1"]))
        for name, recipe in (("sd35", "sd35-ocr"), ("flux", "flux-pickscore"))
    }
    # 2,243,171,520 and 11,901,408,320 parameters in bfloat16, positions apart and rank 1 on top
    assert found["sd35"].lasting["transformer"] / 2 == pytest.approx(2_243_171_520, rel=0.11)
    assert found["flux"].lasting["transformer"] / 2 == pytest.approx(11_901_408_320, rel=0.01)


def test_quantized_parts_count_as_four_bits(shapes: Path) -> None:
    path = f"model.path={shapes / 'flux'}"
    whole = estimate(build.recipe("flux-pickscore", [path])).lasting
    small = estimate(build.recipe("flux-pickscore", [path, "model.quantize=nf4"])).lasting
    assert small["transformer"] < 0.33 * whole["transformer"]
    assert small["text encoders"] < 0.33 * whole["text encoders"]
    assert small["optimizer"] == whole["optimizer"]
