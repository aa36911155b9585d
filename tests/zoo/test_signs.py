"""The bundled model: its files, its words, its pictures and, marked slow, how well it spells."""

import multiprocessing
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gesso.zoo import words
from tools.zoo import render
from tools.zoo.reading import edit_distance, read, reward

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
    picture = pipe(prompt, height=32, width=96, num_inference_steps=2).images[0]
    assert picture.size == (96, 32)


def test_prompts_are_one_token_per_letter(pipe) -> None:
    ids = pipe.tokenizer('a green sign that says "THATCH"').input_ids
    tokens = [token.removesuffix("</w>") for token in pipe.tokenizer.convert_ids_to_tokens(ids)]
    assert tokens[1:-1] == ["a", "green", "sign", "that", "says", '"', *"thatch", '"']
    assert len(ids) == pipe.tokenizer.model_max_length


def test_word_sets_are_disjoint_and_alike() -> None:
    train, evaluation = words.real_words("train"), words.real_words("eval")
    assert min(len(train), len(evaluation)) >= 400
    assert len({*train, *evaluation}) == len(train) + len(evaluation)
    assert Counter(map(len, train)) == Counter(map(len, evaluation))
    made_up = words.pseudo_words(1, 20_000)
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


def test_rendering_follows_the_seed() -> None:
    jobs = [render.Job(["KITE", "BRIDGE", "QUILT"], True, seed) for seed in (3, 3, 4)]
    first, again, other = (render.draw_job(job) for job in jobs)
    assert first.pictures.shape == (3, 32, 96, 3)
    assert first.prompts == again.prompts
    assert np.array_equal(first.pictures, again.pictures)
    assert not np.array_equal(first.pictures, other.pictures)


def test_ocr_reads_clean_words_on_every_colour() -> None:
    rng = random.Random(0)
    for colour, word in zip(words.COLOURS, words.real_words("eval"), strict=False):
        assert read(render.draw(word, colour, rng), word).exact, (colour, word)


def test_unknown_spoiling_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown spoiling 'smudged'"):
        render.draw("KITE", "red", random.Random(0), "smudged")


def test_reward() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert reward("thekite", "kite") == 1
    assert reward("kits", "kite") == 0.75
    assert reward("", "kite") == 0
    assert reward("somethingelse", "kite") == 0


@pytest.mark.slow
def test_bundled_model_has_headroom(pipe) -> None:
    from tools.zoo.evaluate import score

    prompts = (ZOO / "prompts" / "eval.txt").read_text().splitlines()[:96]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        scores = score(pipe, prompts, samples=1, pool=pool, batch=32)
    assert 0.28 <= scores.exact <= 0.50
