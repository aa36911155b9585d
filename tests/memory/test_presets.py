"""Models of real size by their configs alone: recipes fit their cards, parts have their sizes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from gesso import build, families
from gesso.check import size_of
from gesso.config import PACKAGE, Lora, Recipe, TokenModel, tables
from gesso.estimate import Memory, estimate, usable
from gesso.models.tokens.causal import Causal
from gesso.models.tokens.vision_language import VisionLanguage
from tests import pages
from tests.shapes import WRITERS, write_configs, write_writer

GIB = 2**30
PAGE = PACKAGE.parent / "docs/how-to/fit-on-a-gpu.md"
IMAGE = (
    "sd35",
    "flux2-klein",
    "flux2-dev",
    "flux",
    "qwen-image",
    "z-image",
    "sana",
    "kontext",
    "qwen-edit",
)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    for name in IMAGE:
        write_configs(name, folder / name)
    for name in WRITERS:
        write_writer(name, folder / name)
    return folder


def model_of(recipe: str) -> str:
    return next(name for name in (*IMAGE, *WRITERS) if recipe.startswith(name))


_estimates: dict[str, Memory] = {}  # by what of a recipe decides it: an estimate takes seconds


def estimated(name: str, card: int | None, shapes: Path, *changes: str) -> Memory:
    recipe = build.recipe(name, [f"model.path={shapes / model_of(name)}", *changes], card)
    key = _deciding(recipe)
    if key not in _estimates:
        _estimates[key] = estimate(recipe)
    return _estimates[key]


def _deciding(recipe: Recipe) -> str:
    """Device memory depends on neither prompts, rewards and schedules nor on the values of a
    learning rate, a clip or noise."""
    sections = recipe.model_dump(include={"model", "algorithm", "learner", "sampler"})
    options = {k: v for k, v in sections["algorithm"].items() if k not in ("clip", "noise")}
    if "beta" in options:  # 0: no reference policy
        options["beta"] = options["beta"] > 0
    at_once = min(recipe.eval.prompts, recipe.sampler.batch)
    return json.dumps([sections | {"algorithm": options}, recipe.data.groups, at_once])


# Many layers of one kind: an estimate is linear in their number, and a few take little time.
# Not all weights trained: with few layers, the update would peak at the language model's head.
LAYERS = {
    "qwen-image-ocr": ("transformer", "num_layers"),
    "qwen-edit-2511-pickscore": ("transformer", "num_layers"),
    "z-image-pickscore": ("transformer", "n_layers"),
    "qwen25-vl-3b-geo3k": ("", "num_hidden_layers"),
    "qwen25-math-7b-dapo": ("", "num_hidden_layers"),
}
FEW = 4


def peak(name: str, card: int | None, shapes: Path, folder: Path) -> int:
    """Of models with LAYERS, extrapolated from two shallow ones."""
    if name not in LAYERS:
        return estimated(name, card, shapes).peak
    part, key = LAYERS[name]
    found = []
    for layers in (FEW, FEW + 1):
        model = shutil.copytree(shapes / model_of(name), folder / str(layers))
        config = json.loads((model / part / "config.json").read_text())
        section = config if key in config else config["text_config"]
        depth, section[key] = section[key], layers
        if "layer_types" in section:
            section["layer_types"] = section["layer_types"][:layers]
        (model / part / "config.json").write_text(json.dumps(config))
        found.append(estimated(name, card, shapes, f"model.path={model}"))
    few, more = found

    def whole(few: dict[str, int], more: dict[str, int]) -> dict[str, int]:
        assert few.keys() == more.keys()
        return {name: size + (depth - FEW) * (more[name] - size) for name, size in few.items()}

    lasting, passing = whole(few.lasting, more.lasting), whole(few.passing, more.passing)
    return replace(few, lasting=lasting, passing=passing).peak


def cards(name: str) -> list[int]:
    """Of a single GPU; test_sharded.py has those of several."""
    return [int(card) for card in tables.read_recipe(name).cards if card.isdigit()]


# The recipes of the page. Others inherit their card tables.
MAIN = [
    "sd35-ocr",
    "flux-pickscore",
    "qwen-image-ocr",
    "flux2-klein-pickscore",
    "z-image-pickscore",
    "kontext-pickscore",
    "qwen-edit-2511-pickscore",
]
VIDEO = ["wan21-1.3b-pickscore", "wan22-5b-hpsv3", "wan22-a14b-pickscore"]
MAIN += ["qwen25-vl-3b-geo3k", "qwen25-vl-7b-geo3k", "qwen25-vl-3b-math", "qwen25-math-7b-dapo"]
ALGORITHMS = ["sd35-ocr-nft", "sd35-ocr-guard"]  # other work than sd35-ocr's; fast has less
# An estimate takes seconds: of the page, one of every kind of work is computed anew. These are the
# image models (compiled, checkpointed, in 4 bits), a VLM and an LM in 4 bits, all weights trained.
CHECKED: list[tuple[str, int | None]] = [("sd35-ocr", 24), ("sd35-ocr", 48)]
CHECKED += [("flux-pickscore", 24), ("qwen-image-ocr", 24)]
CHECKED += [("flux2-klein-pickscore", 48), ("z-image-pickscore", 48)]
CHECKED += [("qwen-edit-2511-pickscore", 24)]  # with an input image
CHECKED += [("qwen25-vl-3b-geo3k", 24), ("qwen25-math-7b-dapo", 24), ("qwen25-vl-3b-math", None)]


class Measured(NamedTuple):
    """A peak on an H200 with random weights (torch 2.11), and how the run differed from the
    recipe."""

    peak: float
    samples: int
    changes: list[str]


MEASURED = {
    "sd35-ocr": Measured(38.3e9, 2 * 24, []),
    "flux-pickscore": Measured(60.7e9, 12, ["model.fold=false"]),
}


def whole(name: str, shapes: Path) -> Memory:
    """Neither quantized nor checkpointed."""
    return estimated(name, None, shapes, *MEASURED[name].changes)


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_of_a_compiled_run_meets_the_measured_peak(name: str, shapes: Path) -> None:
    measured, memory = MEASURED[name], whole(name, shapes)
    share = measured.samples / (48 * 24)  # of the samples that the recipe stores
    peak = memory.peak - (1 - share) * memory.lasting["stored samples"]
    assert peak == pytest.approx(measured.peak, rel=0.1)


def test_there_are_cards_for_every_model() -> None:
    assert {model_of(name) for name in MAIN} | {"qwen25-vl-32b", "flux2-dev", "sana"} == {
        *IMAGE,
        *WRITERS,
    }
    for name in MAIN:
        assert cards(name) == [24, 48, 80]


class Row(NamedTuple):
    """Of the table in docs: | `flux-pickscore` | 24 | 15.8 GB | how |. Without a number in the
    second column: the recipe without --card."""

    recipe: str
    card: int | None
    estimate: str


@cache
def rows() -> list[Row]:
    assert PAGE.is_file(), f"{PAGE} is missing; it has the table | recipe | card | estimate | how |"
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        name = re.fullmatch(r"`([a-z0-9.-]+)`", cells[0])
        if name is not None and len(cells) >= 3 and name[1] in tables.bundled_recipes():
            card = re.search(r"\d+", cells[1])
            found.append(Row(name[1], int(card[0]) if card else None, cells[2].strip("`")))
    return found


def fits(peak: float, card: int) -> bool:
    return 0.4 * card * GIB < peak < usable(card)


def test_the_page_has_a_row_for_every_card_that_fits() -> None:
    found = [(row.recipe, row.card) for row in rows()]
    assert len(set(found)) == len(found), "a row is there twice"
    missing = {(n, card) for n in MAIN + VIDEO for card in cards(n)} - set(found)
    assert not missing, f"{PAGE.name} has no row for {sorted(missing)}"
    for row in rows():
        if row.card is not None:
            assert fits(float(row.estimate.removesuffix(" GB")) * 1e9, row.card), row


@pytest.mark.slow
@pytest.mark.parametrize("name, card", CHECKED)
def test_the_page_has_the_estimate(
    name: str, card: int | None, shapes: Path, tmp_path: Path
) -> None:
    [row] = [row for row in rows() if (row.recipe, row.card) == (name, card)]
    assert size_of(peak(name, card, shapes, tmp_path)) == row.estimate


def test_the_batches_that_the_page_finds_are_those_of_its_table() -> None:
    """The search itself is tested with small models (test_fitting.py)."""
    (block,) = pages.blocks("console", "how-to/fit-on-a-gpu.md")
    _, command, peak = block.code.splitlines()
    recipe = build.recipe("sd35-ocr", shlex.split(command)[4:])
    assert resolved(recipe) == resolved(build.recipe("sd35-ocr", card=48))
    [row] = [row for row in rows() if (row.recipe, row.card) == ("sd35-ocr", 48)]
    assert row.estimate in peak


def resolved(recipe: Recipe) -> dict:
    return recipe.model_dump(exclude={"about"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_other_algorithms_fit_the_smallest_card(name: str, shapes: Path) -> None:
    assert fits(estimated(name, 24, shapes).peak, 24)


def test_sizes_of_language_models_are_the_published_ones(shapes: Path) -> None:
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


def test_language_models_in_four_bits_keep_head_and_tower(shapes: Path) -> None:
    path = f"model.path={shapes / 'qwen25-vl-7b'}"
    small_run = ["model.max_prompt=64", "algorithm.max_tokens=64", "learner.micro_tokens=128"]
    small_run += ["sampler.batch=2", "eval.prompts=1", path]
    recipe = build.recipe("qwen25-vl-7b-geo3k", small_run)
    quantized = build.recipe("qwen25-vl-7b-geo3k", [*small_run, "model.quantize=nf4"])
    section = recipe.model.model_copy(update={"device": "meta"})
    model = build.model(recipe.model_copy(update={"model": section}))
    algorithm = build.algorithm(recipe)
    whole = families.of(recipe).memory_load(recipe, algorithm, model)
    small = families.of(recipe).memory_load(quantized, algorithm, model)
    # 28 layers of linear weights: q and o, k and v, three of the feed-forward
    linear = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    saved = whole.networks["language model"] - small.networks["language model"]
    assert saved == pytest.approx(linear * (2 - 0.5625), rel=1e-6)
    assert small.networks["vision tower"] == whole.networks["vision tower"] > 0
    # 512 prompts of 7 × 8 places, each four patches of 2 × 3 × 14 × 14 values in float32
    pixels = 512 * 7 * 8 * 4 * (2 * 3 * 14 * 14) * 4
    assert small.host == {
        "image features, up to": 4 * GIB,
        "image pixels, up to": pixels,
    }


def test_sizes_are_the_published_ones(shapes: Path) -> None:
    """In bfloat16, without the adapters, which are in float32 as are Adam's two moments of them."""
    published = {"sd35-ocr": 2_243_171_520, "flux-pickscore": 11_901_408_320}
    for name, size in published.items():
        lasting = whole(name, shapes).lasting
        assert (lasting["transformer"] - lasting["optimizer"] / 2) / 2 == pytest.approx(
            size,
            rel=0.11 if name == "sd35-ocr" else 1e-6,  # SD3.5's counts its positions
        )


def test_quantized_parts_count_as_four_bits(shapes: Path) -> None:
    large = whole("flux-pickscore", shapes).lasting
    small = estimated("flux-pickscore", 24, shapes).lasting
    assert small["transformer"] < 0.33 * large["transformer"]
    assert small["text encoders"] < 0.33 * large["text encoders"]
    assert small["optimizer"] == large["optimizer"]
