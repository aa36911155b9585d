"""The settings of the large recipes, held against numbers copied from their sources by hand.

Nothing here reads a default of Gesso: a default that changes must break this test or be written
into the recipe. docs/explanation/published-settings.md has the source of each number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gesso import build, families
from gesso.config import PACKAGE, Recipe, tables
from gesso.families import classes
from gesso.types import SampleSpec
from tests.typed import sure

Settings = dict[str, Any]

# Flow-GRPO's for SD3.5-M as a model: weights, optimizer, pictures.
SD35: Settings = {
    "model.name": "sd3",
    "model.path": "stabilityai/stable-diffusion-3.5-medium",
    "model.dtype": "bfloat16",
    "model.height": 512,
    "model.width": 512,
    "model.text_length": 128,
    "model.gradient_checkpointing": False,
    "model.lora.rank": 32,
    "model.lora.alpha": 64,
    "model.lora.targets": None,
    "optimizer.lr": 3e-4,
    "optimizer.betas": (0.9, 0.999),
    "optimizer.weight_decay": 1e-4,
    "optimizer.eps": 1e-8,
    "optimizer.max_norm": 1.0,
    "optimizer.warmup": 0,
    "learner.ema.decay": 0.9,
    "learner.ema.every": 8,
    "eval.every": 60,
    "eval.steps": 40,
    "eval.guidance": 4.5,
    "lag": 0,
    "steps": 2500,
}
OCR: Settings = {
    "data.train": "data/ocr/train.txt",
    "data.eval": "data/ocr/test.txt",
    "eval.prompts": 1018,
    "reward": {"ocr": 1.0},
}
GENEVAL: Settings = {
    "data.train": "dataset/geneval/train_metadata.jsonl",
    "data.eval": "dataset/geneval/test_metadata.jsonl",
    "eval.prompts": 2212,
    "reward": {"geneval": 1.0},
}
PICKSCORE: Settings = {
    "data.train": "dataset/pickscore/train.txt",
    "data.eval": "dataset/pickscore/test.txt",
    "eval.prompts": 2048,
    "reward": {"pickscore": 1.0},
}


def algorithm(name: str, **options: Any) -> Settings:
    """Options of an algorithm: nested ones as window__size."""
    keys = {
        "name": name,
        "advantage__combine": "sum",
        "advantage__clip": 5.0,
        "advantage__drop_flat": False,
        **options,
    }
    if "guidance" in options:
        keys |= {"guidance_gradient": "both", "one_pass": False}
    return {f"algorithm.{key.replace('__', '.')}": value for key, value in keys.items()}


def window(size: int, low: int, high: int, every: int | None = None) -> Settings:
    return {
        "window__size": size,
        "window__low": low,
        "window__high": high,
        "window__every": every,
    }


FLOW_GRPO: Settings = {"data.groups": 48} | algorithm(
    "flow-grpo",
    advantage__drop_flat=True,
    group=24,
    updates=2,
    steps=10,
    rule="flow-sde",
    noise=0.7,
    guidance=4.5,
    timestep_fraction=0.99,
    window=None,
    same_noise=False,
    clip=1e-4,
    beta=0.04,
    advantage__std="global",
)
FAST: Settings = {"eval.guidance": 1.0, "data.groups": 48} | algorithm(
    "flow-grpo-fast",
    advantage__drop_flat=True,
    group=24,
    updates=2,
    steps=10,
    rule="cps",
    noise=0.8,
    guidance=1.0,
    same_noise=False,
    clip=1e-5,
    beta=0.0,
    advantage__std="global",
    **window(3, 0, 5),
)
GUARD: Settings = {"optimizer.lr": 1e-4, "eval.every": 30, "data.groups": 48} | algorithm(
    "grpo-guard",
    advantage__drop_flat=True,
    group=24,
    updates=2,
    steps=10,
    rule="flow-sde",
    noise=0.7,
    guidance=4.5,
    timestep_fraction=0.99,
    window=None,
    same_noise=False,
    clip=2e-6,
    beta=0.0,
    advantage__std="group",
)
MIX: Settings = {"steps": 300, "data.groups": 32} | algorithm(
    "mix-grpo",
    group=12,
    updates=4,
    steps=25,
    rule="flow-sde",
    noise=0.7,
    guidance=4.5,
    same_noise=True,
    clip=1e-4,
    beta=0.0,
    advantage__std="group",
    **window(4, 0, 23, every=25),
)
DANCE: Settings = {"steps": 300, "data.groups": 16} | algorithm(
    "dance-grpo",
    group=12,
    updates=1,
    steps=16,
    rule="dance",
    noise=0.3,
    guidance=4.5,
    timestep_fraction=0.6,
    window=None,
    same_noise=True,
    clip=1e-4,
    beta=0.0,
    advantage__std="group",
)
DPPO: Settings = {
    "data.groups": 48,
    "eval.guidance": 1.0,
    "optimizer.weight_decay": 0.0,
} | algorithm(
    "flow-dppo",
    group=16,
    updates=2,
    steps=10,
    rule="flow-sde",
    noise=0.7,
    guidance=1.0,
    same_noise=False,
    clip=1e-5,
    beta=0.0,
    advantage__std="global",
    **window(3, 0, 5),
)
NFT: Settings = {
    "steps": 1000,
    "data.groups": 48,
    "eval.every": 10,
    "eval.guidance": 1.0,
    "learner.ema.every": 1,
} | algorithm(
    "diffusion-nft",
    group=24,
    updates=1,
    steps=10,
    times=9,
    beta=1.0,
    kl=1e-4,
    decay=1,
    solver="dpm2",
    advantage__std="global",
)
FLUX: Settings = {
    "model.name": "flux",
    "model.path": "black-forest-labs/FLUX.1-dev",
    "model.text_length": 128,
    "model.lora.rank": 64,
    "model.lora.alpha": 128,
    "eval.every": 30,
    "eval.steps": 28,
    "eval.guidance": 3.5,
    "steps": 1000,
    "algorithm.steps": 6,
    "algorithm.noise": 0.9,
    "algorithm.guidance": 3.5,
    "algorithm.beta": 0.0,
    "algorithm.advantage.drop_flat": False,
}
FLUX_720: Settings = {
    "model.height": 720,
    "model.width": 720,
    "model.text_length": 512,
    "model.gradient_checkpointing": True,
    "model.lora.rank": 128,
    "model.lora.alpha": 256,
    "model.lora.targets": ["to_q", "to_k", "to_v", "to_out.0"],
    "eval.steps": 50,
}
QWEN: Settings = {
    "model.name": "qwen-image",
    "model.path": "Qwen/Qwen-Image",
    "model.text_length": 256,
    "model.gradient_checkpointing": True,
    "model.lora.rank": 64,
    "model.lora.alpha": 128,
    "learner.ema": None,
    "eval.every": 30,
    "eval.steps": 50,
    "eval.guidance": 4.0,
    "steps": 300,
    "data.groups": 32,
    "algorithm.advantage.drop_flat": False,
}

EXPECTED: dict[str, Settings] = {
    "sd35-ocr": SD35 | OCR | FLOW_GRPO,
    "sd35-geneval": SD35 | GENEVAL | FLOW_GRPO,
    "sd35-pickscore": SD35 | PICKSCORE | FLOW_GRPO | {"algorithm.beta": 0.01},
    "sd35-ocr-fast": SD35 | OCR | FAST,
    "sd35-geneval-fast": SD35 | GENEVAL | FAST,
    "sd35-pickscore-fast": SD35 | PICKSCORE | FAST | {"algorithm.group": 18, "data.groups": 64},
    "sd35-ocr-guard": SD35 | OCR | GUARD,
    "sd35-geneval-guard": SD35 | GENEVAL | GUARD,
    "sd35-pickscore-guard": SD35 | PICKSCORE | GUARD | {"algorithm.clip": 4e-6},
    "sd35-ocr-mix": SD35 | OCR | MIX,
    "sd35-pickscore-mix": SD35 | PICKSCORE | MIX,
    "sd35-ocr-dance": SD35 | OCR | DANCE,
    "sd35-pickscore-dance": SD35 | PICKSCORE | DANCE,
    "sd35-ocr-dppo": SD35 | OCR | DPPO,
    "sd35-geneval-dppo": SD35 | GENEVAL | DPPO,
    "sd35-pickscore-dppo": SD35 | PICKSCORE | DPPO,
    "sd35-ocr-nft": SD35
    | OCR
    | NFT
    | {"algorithm.beta": 0.1, "algorithm.decay": 2, "algorithm.updates": 2},
    "sd35-geneval-nft": SD35 | GENEVAL | NFT,
    "sd35-pickscore-nft": SD35 | PICKSCORE | NFT,
    "flux-pickscore": SD35 | PICKSCORE | FLOW_GRPO | FLUX,
    "flux-pickscore-fast": SD35
    | PICKSCORE
    | FAST
    | FLUX
    | {"algorithm.noise": 0.8, "algorithm.window.high": 3, "algorithm.advantage.std": "group"},
    "flux-mix": SD35
    | PICKSCORE
    | FLUX
    | FLUX_720
    | MIX
    | {"algorithm.guidance": 3.5, "eval.guidance": 3.5},
    "flux-dance": SD35
    | PICKSCORE
    | FLUX
    | FLUX_720
    | DANCE
    | {
        "algorithm.guidance": 3.5,
        "algorithm.steps": 12,
        "algorithm.timestep_fraction": 0.5,
        "algorithm.updates": 2,
    },
    "qwen-image-ocr": {k: v for k, v in SD35.items() if not k.startswith("learner.")}
    | OCR
    | FAST
    | QWEN
    | {
        "algorithm.group": 16,
        "algorithm.rule": "flow-sde",
        "algorithm.noise": 1.2,
        "algorithm.guidance": 4.0,
        "algorithm.window.size": 2,
    },
}
# Samples an optimizer step, steps trained of each: what the references call an effective batch.
BATCHES = {
    "sd35-ocr": (576, 9),
    "sd35-geneval": (576, 9),
    "sd35-pickscore": (576, 9),
    "sd35-ocr-fast": (576, 3),
    "sd35-geneval-fast": (576, 3),
    "sd35-pickscore-fast": (576, 3),
    "sd35-ocr-guard": (576, 9),
    "sd35-geneval-guard": (576, 9),
    "sd35-pickscore-guard": (576, 9),
    "sd35-ocr-mix": (96, 4),
    "sd35-pickscore-mix": (96, 4),
    "sd35-ocr-dance": (192, 9),
    "sd35-pickscore-dance": (192, 9),
    "sd35-ocr-dppo": (384, 3),
    "sd35-geneval-dppo": (384, 3),
    "sd35-pickscore-dppo": (384, 3),
    "sd35-ocr-nft": (576, 9),
    "sd35-geneval-nft": (1152, 9),
    "sd35-pickscore-nft": (1152, 9),
    "flux-pickscore": (576, 5),
    "flux-pickscore-fast": (576, 3),
    "flux-mix": (96, 4),
    "flux-dance": (96, 6),
    "qwen-image-ocr": (256, 2),
}
LARGE = [
    name
    for name in tables.bundled_recipes()
    if name.startswith(("sd35-", "flux-", "qwen-image-")) and not name.endswith("gb")
]

# EasyR1's examples/config.yaml, which its scripts for geometry3k and CLEVR stand on.
EASYR1: Settings = {
    "model.name": "vision-language",
    "model.path": "Qwen/Qwen2.5-VL-3B-Instruct",
    "model.dtype": "bfloat16",
    "model.gradient_checkpointing": True,
    "model.quantize": None,
    "model.lora.rank": None,
    "model.lora.alpha": None,
    "model.lora.targets": None,
    "model.max_prompt": 2048,
    "model.min_pixels": 262144,
    "model.max_pixels": 4194304,
    "model.train_vision": True,
    "data.groups": 512,
    "optimizer.lr": 1e-6,
    "optimizer.betas": (0.9, 0.999),
    "optimizer.weight_decay": 0.01,
    "optimizer.eps": 1e-8,
    "optimizer.max_norm": 1.0,
    "optimizer.warmup": 0,
    "learner.ema": None,
    "eval.every": 5,
    "eval.temperature": 0.6,
    "lag": 0,
    "algorithm.name": "grpo",
    "algorithm.group": 5,
    "algorithm.updates": 4,
    "algorithm.epochs": 1,
    "algorithm.max_tokens": 2048,
    "algorithm.temperature": 1.0,
    "algorithm.surrogate.kind": "clip",
    "algorithm.surrogate.low": 0.2,
    "algorithm.surrogate.high": 0.3,
    "algorithm.surrogate.dual": 3.0,
    "algorithm.aggregation": "token-mean",
    "algorithm.kl.place": "loss",
    "algorithm.kl.beta": 0.01,
    "algorithm.kl.estimator": "k3",
    "algorithm.advantage.baseline": "mean",
    "algorithm.advantage.std": "group",
    "algorithm.advantage.combine": "sum",
    "algorithm.advantage.clip": None,
    "algorithm.advantage.per": "response",
    "algorithm.advantage.gamma": 1.0,
    "algorithm.advantage.whiten": False,
    "algorithm.advantage.drop_flat": False,
    "algorithm.refills": 0,
}
GEO3K: Settings = {
    "steps": 60,
    "data.train": "hub:hiyouga/geometry3k@train",
    "data.eval": "hub:hiyouga/geometry3k@test",
    "eval.prompts": 601,
    "reward": {"math": 0.9, "format": 0.1},
}
CLEVR: Settings = {
    "steps": 136,
    "data.train": "hub:BUAADreamer/clevr_count_70k@train",
    "data.eval": "hub:BUAADreamer/clevr_count_70k@test",
    "eval.prompts": 512,
    "reward": {"count": 0.5, "format": 0.5},
}
EASYR1_LORA: Settings = {
    "model.lora.rank": 64,
    "model.lora.alpha": 64,
    "model.lora.targets": None,
    "optimizer.lr": 1e-5,
}
NO_KL = {"algorithm.kl.place": None, "algorithm.kl.beta": None, "algorithm.kl.estimator": None}
LMM_R1: Settings = {
    "steps": 990,
    "model.max_prompt": 1024,
    "model.min_pixels": None,
    "model.max_pixels": None,
    "model.train_vision": False,
    "data.train": "hub:hiyouga/math12k@train",
    "data.eval": "hub:hiyouga/math12k@test",
    "data.groups": 256,
    "eval.every": 10,
    "eval.prompts": 500,
    "eval.temperature": 0.0,
    "reward": {"math": 1.0, "format": 0.5},
    "optimizer.betas": (0.9, 0.95),
    "optimizer.weight_decay": 0.0,
    "optimizer.warmup": 960,
    "algorithm.name": "rloo-tokens",
    "algorithm.group": 16,
    "algorithm.updates": 32,
    "algorithm.max_tokens": 3000,
    "algorithm.surrogate.high": 0.2,
    "algorithm.surrogate.dual": None,
    "algorithm.aggregation": "seq-mean-token-mean",
    "algorithm.advantage.baseline": "others",
    "algorithm.advantage.std": "one",
    "algorithm.advantage.clip": 10.0,
    "algorithm.advantage.per": "token",
    "algorithm.advantage.whiten": True,
}
DAPO: Settings = {
    "steps": 200,
    "model.name": "causal",
    "model.path": "Qwen/Qwen2.5-Math-7B",
    "model.train_vision": False,
    "model.min_pixels": None,
    "model.max_pixels": None,
    "data.train": "hub:Saigyouji-Yuyuko1000/dapo17k@train",
    "data.eval": "hub:Saigyouji-Yuyuko1000/dapo17k@test",
    "eval.every": 10,
    "eval.prompts": 64,
    "eval.temperature": 1.0,
    "reward": {"math": 2.0, "overlong": 1.0},
    "optimizer.weight_decay": 0.1,
    "optimizer.warmup": 10,
    "algorithm.name": "dapo",
    "algorithm.group": 16,
    "algorithm.updates": 16,
    "algorithm.surrogate.high": 0.28,
    "algorithm.surrogate.dual": 10.0,
    "algorithm.advantage.drop_flat": True,
    "algorithm.advantage.flat_by": "math",
    "algorithm.refills": 29,
}
WRITERS: dict[str, Settings] = {
    "qwen25-vl-3b-geo3k": EASYR1 | GEO3K,
    "qwen25-vl-7b-geo3k": EASYR1
    | GEO3K
    | EASYR1_LORA
    | {"model.path": "Qwen/Qwen2.5-VL-7B-Instruct", "model.train_vision": False},
    "qwen25-vl-3b-clevr": EASYR1 | CLEVR,
    "qwen25-vl-3b-math": EASYR1 | LMM_R1 | NO_KL,
    "qwen25-math-7b-dapo": EASYR1 | DAPO | EASYR1_LORA | NO_KL,
}
# Responses an optimizer step.
REPLIES = {
    "qwen25-vl-3b-geo3k": 640,
    "qwen25-vl-7b-geo3k": 640,
    "qwen25-vl-3b-clevr": 640,
    "qwen25-vl-3b-math": 128,
    "qwen25-math-7b-dapo": 512,
}
PRESETS = [name for name in tables.bundled_recipes() if name.endswith("gb")]


LEFT_OUT = ("window", "every", "targets", "kl", "clip", "dual")  # where they are None


def found(recipe: Recipe, key: str) -> Any:
    """The value at a dotted key of a resolved recipe; None where it has none."""
    if key == "reward":
        return {entry.name: entry.weight for entry in recipe.reward}
    if key in ("data.train", "data.eval"):
        (source,) = recipe.data.train if key == "data.train" else recipe.data.eval
        return source.path
    node: Any = recipe.model_dump()
    for part in key.split("."):
        if node is None:
            return None
        if part not in node and part in LEFT_OUT:
            return None
        node = node[part]
    return node


def keys_of(table: Mapping[str, Any], above: str) -> set[str]:
    """Dotted keys of every value in nested tables."""
    keys = set()
    for key, value in table.items():
        path = f"{above}.{key}"
        keys |= keys_of(value, path) if isinstance(value, dict) else {path}
    return keys


def test_the_tables_name_every_large_recipe() -> None:
    assert set(EXPECTED) == set(LARGE) == set(BATCHES)


def test_the_tables_name_every_large_writer() -> None:
    large = {n for n in tables.bundled_recipes() if n.startswith("qwen25-")} - set(PRESETS)
    assert set(WRITERS) == large == set(REPLIES)


@pytest.mark.parametrize("name", [*LARGE, *WRITERS])
def test_the_tables_name_every_option(name: str) -> None:
    """An option that is in no table could change its default unseen."""
    recipe = build.recipe(name).model_dump()
    keys = keys_of(recipe["algorithm"], "algorithm") | keys_of(recipe["optimizer"], "optimizer")
    unused = {"algorithm.timestep_fraction"} if "window" in recipe["algorithm"] else set()
    assert keys - unused <= set((EXPECTED | WRITERS)[name])


@pytest.mark.parametrize("name", [*LARGE, *WRITERS])
def test_settings_are_those_of_the_source(name: str) -> None:
    recipe = build.recipe(name)
    wrong = {
        key: (value, expected)
        for key, expected in (EXPECTED | WRITERS)[name].items()
        if (value := found(recipe, key)) != expected
    }
    assert not wrong, f"{name}: got, expected: {wrong}"


@pytest.mark.parametrize("name", LARGE)
def test_batches_are_whole(name: str) -> None:
    """The reference's effective batch, cut into updates and micro-batches without a rest."""
    recipe = build.recipe(name)
    chosen = build.algorithm(recipe)
    samples, trained = BATCHES[name]
    spec = sure(SampleSpec, chosen.spec(0, 0, recipe.model))
    steps = recipe.algorithm.options.get("times") or len(spec.trained)
    assert steps == trained
    assert recipe.data.groups * chosen.group == samples * chosen.updates
    assert samples * trained % recipe.learner.micro_batch == 0
    assert samples * chosen.updates % recipe.sampler.batch == 0
    # Rounding depends on the shape of a batch: with one shape the ratio starts nearest to 1.
    assert recipe.sampler.batch == recipe.learner.micro_batch


@pytest.mark.parametrize("name", WRITERS)
def test_updates_have_the_responses_of_the_source(name: str) -> None:
    recipe = build.recipe(name)
    chosen = build.algorithm(recipe)
    assert recipe.data.groups * chosen.group == REPLIES[name] * chosen.updates


def test_dapos_penalty_begins_a_quarter_before_the_limit() -> None:
    found = build.recipe("qwen25-math-7b-dapo")
    (penalty,) = (entry.options for entry in found.reward if entry.name == "overlong")
    assert (penalty["limit"], penalty["buffer"]) == (2048, 512)
    assert penalty["limit"] == found.algorithm.options["max_tokens"]


@pytest.mark.parametrize("name", [n for n in WRITERS if n != "qwen25-math-7b-dapo"])
def test_templates_ask_for_what_the_format_reward_pays(name: str) -> None:
    template = build.recipe(name).data.template or ""
    assert "{{ content }}" in template
    assert all(tag in template for tag in ("<think>", "</think>", "<answer>", "</answer>"))


@pytest.mark.parametrize("name", [*LARGE, *WRITERS])
def test_large_recipes_are_short_and_name_their_source(name: str) -> None:
    recipe = build.recipe(name)
    assert recipe.about.endswith(".") and recipe.source.startswith("arXiv 2")
    assert "github" in recipe.source
    assert recipe.model.name in classes.REFERENCES
    text = (tables.RECIPES / f"{name}.toml").read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line.strip()]) < 30
    assert "\nsource = " in text, "a recipe says its own source, not that of its base"
    page = PACKAGE.parent / "docs/explanation/published-settings.md"
    assert f"`{name}`" in page.read_text(encoding="utf-8")


SIZES = {
    ("about",), ("source",), ("data", "groups"), ("learner", "micro_batch"), ("sampler", "batch"),
    ("model", "gradient_checkpointing"), ("model", "quantize"), ("model", "lora"),
    ("model", "fold"),
}  # fmt: skip
LORA = {("model", "train_vision"), ("optimizer", "lr")}  # change with it, where the base has none


@pytest.mark.parametrize("name", PRESETS)
def test_presets_for_a_card_change_sizes_and_nothing_else(name: str) -> None:
    own, base = (build.recipe(n).model_dump() for n in (name, name.rsplit("-", 1)[0]))
    changed: set[tuple[str, ...]] = set()
    for section, values in own.items():
        if not isinstance(values, dict):
            changed |= {(section,)} if values != base[section] else set()
            continue
        changed |= {(section, key) for key in values if values[key] != base[section].get(key)}
    begins_lora = own["model"]["lora"] and not base["model"]["lora"]
    assert changed <= (SIZES | LORA if begins_lora else SIZES) and ("data", "groups") in changed
    chosen = build.algorithm(build.recipe(name))
    assert families.of(build.recipe(name)).notes(build.recipe(name), chosen) == []
