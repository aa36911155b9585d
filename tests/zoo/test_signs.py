"""The bundled image model: files, words, images and, marked slow, how well it spells."""

import random
from collections import Counter
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import pytest

from gesso.zoo import words
from tools.zoo import render
from tools.zoo.reading import read
from tools.zoo.sign_prompts import prompts, pseudo_words

ZOO = Path(words.__file__).parent
SIGNS = ZOO / "signs"


@pytest.fixture(scope="module")
def pipe():
    from diffusers import StableDiffusion3Pipeline

    return StableDiffusion3Pipeline.from_pretrained(SIGNS, text_encoder_3=None, tokenizer_3=None)


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in SIGNS.rglob("*") if path.is_file()) <= 12e6


def test_plain_diffusers_loads_float32_and_samples(pipe) -> None:
    import torch

    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        dtypes = {p.dtype for p in getattr(pipe, name).parameters()}
        assert dtypes == {torch.float32}, name
    pipe.set_progress_bar_config(disable=True)
    prompt = 'a red sign that says "KITE"'
    image = pipe(prompt, height=32, width=96, num_inference_steps=2).images[0]
    assert image.size == (96, 32)


def test_prompts_are_one_token_per_letter(pipe) -> None:
    ids = pipe.tokenizer('a green sign that says "THATCH"').input_ids
    tokens = [token.removesuffix("</w>") for token in pipe.tokenizer.convert_ids_to_tokens(ids)]
    assert tokens[1:-1] == ["a", "green", "sign", "that", "says", '"', *"thatch", '"']
    assert len(ids) == pipe.tokenizer.model_max_length


def test_word_sets_are_disjoint_and_similar() -> None:
    train, evaluation = words.real_words("train"), words.real_words("eval")
    assert min(len(train), len(evaluation)) >= 400
    assert len({*train, *evaluation}) == len(train) + len(evaluation)
    assert Counter(map(len, train)) == Counter(map(len, evaluation))
    made_up = pseudo_words(1, 20_000)
    assert not {*made_up} & {*train, *evaluation}
    assert {len(word) for word in (*train, *evaluation, *made_up)} == set(words.LENGTHS)
    assert min(Counter("".join(made_up))[letter] for letter in "QXZJV") > 500


@pytest.mark.parametrize(("split", "colours"), [("train", 2), ("eval", 1)])
def test_prompt_files_match_word_files(split: str, colours: int) -> None:
    lines = (ZOO / "prompts" / f"{split}.txt").read_text().splitlines()
    assert Counter(line.split('"')[1] for line in lines) == Counter(
        words.real_words(split) * colours
    )
    for line in lines:
        _, colour, *_ = line.split()
        assert line == words.prompt_for(line.split('"')[1], colour)
        assert colour in words.COLOURS
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize(("split", "colours", "seed"), [("train", 2, 1), ("eval", 1, 2)])
def test_prompt_files_match_the_generator(split: str, colours: int, seed: int) -> None:
    lines = (ZOO / "prompts" / f"{split}.txt").read_text().splitlines()
    assert lines == prompts(split, colours, seed)


def test_rendering_follows_the_seed() -> None:
    jobs = [render.RenderJob(["KITE", "BRIDGE", "QUILT"], True, seed) for seed in (3, 3, 4)]
    first, again, other = (render.draw_job(job) for job in jobs)
    assert first.images.shape == (3, 32, 96, 3)
    assert first.prompts == again.prompts
    assert np.array_equal(first.images, again.images)
    assert not np.array_equal(first.images, other.images)


def test_ocr_reads_clean_words_on_every_colour() -> None:
    rng = random.Random(0)
    for colour, word in zip(words.COLOURS, words.real_words("eval"), strict=False):
        assert read(render.draw(word, colour, rng), word).exact, (colour, word)


def test_unknown_spoiling_is_rejected() -> None:
    with pytest.raises(ValueError, match="unknown spoiling 'smudged'"):
        render.draw("KITE", "red", random.Random(0), "smudged")


def test_a_misread_word_gets_part_of_the_reward() -> None:
    reading = read(render.draw("KITE", "red", random.Random(0)), "KITS")
    assert reading.reward == 0.75 and not reading.exact


@pytest.mark.slow
def test_bundled_model_has_headroom(pipe) -> None:
    from tools.zoo.evaluate import score

    with ThreadPool(2) as pool:
        scores = score(pipe, prompts("eval", 1, 2)[:48], samples=1, pool=pool, batch=32)
    assert 0.28 <= scores.exact <= 0.50
