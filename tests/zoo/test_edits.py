"""The bundled editing model: its instructions, its files, and that it edits and often fails."""

import json
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gesso import build
from gesso.samplers.denoise import DenoisingSampler
from gesso.types import Prompt, PromptImage, SampleSpec
from gesso.zoo import edits, limits, words
from tools.zoo import edit_rows
from tools.zoo.build_edits import TEXT_TOKENS, load_pipeline
from tools.zoo.evaluate_edits import edit, prompts, score

ZOO = Path(words.__file__).parent
EDITS = ZOO / "edits"


@pytest.fixture(scope="module")
def pipe() -> Any:
    return load_pipeline(EDITS)


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in EDITS.rglob("*") if path.is_file()) <= 8e6


def test_samples_are_those_of_plain_diffusers(pipe: Any) -> None:
    """The folder in FluxKontextPipeline and as `demo-edit` loads it: the same images."""
    import torch

    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        assert {p.dtype for p in getattr(pipe, name).parameters()} == {torch.float32}, name
    recipe, rows, seeds = build.recipe("demo-edit"), prompts("eval")[:2], [3, 4]
    spec = SampleSpec(steps=recipe.eval.steps, height=32, width=96)
    sampler = DenoisingSampler(build.model(recipe), 2)
    samples = [s for p in sampler.sample(rows, [0, 1], seeds, spec) for s in p.samples]
    expected: np.ndarray = edit(pipe, rows, seeds).astype(int)
    assert np.abs(np.stack([s.pixels for s in samples]) - expected).max() <= 1
    assert np.abs(expected[0] - expected[1]).max() > 50


def test_instructions_are_one_token_per_letter(pipe: Any) -> None:
    """Also the letters of "the" and "a", which are words of the instructions."""
    for tokenizer, letters in ((pipe.tokenizer, "thea"), (pipe.tokenizer_2, "THEA")):
        ids = tokenizer(edits.reword("THEA")).input_ids
        tokens = [t.strip("▁").removesuffix("</w>") for t in tokenizer.convert_ids_to_tokens(ids)]
        words_of = ["change", "the", "word", "to", '"', *letters, '"']
        assert [t for t in tokens if t and t[0] != "<"] == words_of
        assert len(ids) == tokenizer.model_max_length == TEXT_TOKENS


@pytest.mark.slow
def test_bundled_model_has_headroom(pipe: Any) -> None:
    with ThreadPool(2) as pool:
        scores = score(pipe, pool, "eval", 40)
    assert 0.1 <= scores.exact <= 0.35
    assert min(scores.recoloured, scores.reworded) >= 0.05


@pytest.mark.parametrize("split", ["train", "eval"])
def test_instructions_are_those_of_the_script(split: str) -> None:
    lines = (ZOO / "instructions" / f"{split}.jsonl").read_text().splitlines()
    found, written = [json.loads(line) for line in lines], edit_rows.rows(split)
    images = [row.pop("image") for row in found]
    assert found == [{k: v for k, v in row.items() if k != "image"} for row in written]
    assert len(set(images)) > 0.9 * len(images)


def test_columns_describe_the_edited_sign() -> None:
    """What the instruction changes is in it; a new word leaves the colour of the source."""
    known = words.real_words("eval")
    for prompt in prompts("eval"):
        assert edits.outside(prompt.text, len(prompt.images)) is None
        assert prompt.columns["target"] in known
        if prompt.text.startswith("make"):
            assert prompt.text == edits.recolour(prompt.columns["colour"])
        else:
            assert prompt.text == edits.reword(prompt.columns["target"])
            sign, _ = words.PAINT[prompt.columns["colour"]]
            corner = np.asarray(prompt.images[0].open())[0, 0].astype(int)
            assert np.abs(corner - sign).max() <= 8


@pytest.mark.parametrize(
    "text, reason",
    [
        ("make it a green sign", None),
        (' change the word  to "KITE" ', None),
        ("make it a pink sign", '"pink" is not one of its colours'),
        ('change the word to "BRIDGE"', '"BRIDGE" has 6 letters'),
        ('change the word to "kite"', '"kite" is not one word of capital letters A to Z'),
        ('a red sign that says "KITE"', "The prompt has a different form"),
    ],
)
def test_prompts_outside_of_the_training_data(text: str, reason: str | None) -> None:
    known = limits.of("zoo:edits")
    assert known is not None
    note = known.note([Prompt(text, images=(PromptImage("sign.png"),))])
    assert note == (None if reason is None else f"{reason}. {edits.LIMITS}")
    assert str(known.note([Prompt(text)])).startswith("The prompt has no images. The bundled")
