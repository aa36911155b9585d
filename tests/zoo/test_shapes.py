"""The bundled model that sees: its files, its questions, its pictures, and how well it counts."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from gesso.zoo import scenes
from tools.zoo.evaluate_shapes import ask, picture_of, question_of, read_rows, score
from tools.zoo.wording import answer_in, careful, sloppy, style_of

ZOO = Path(scenes.__file__).parent
SHAPES = ZOO / "shapes"


@pytest.fixture(scope="module")
def seer():
    from tools.zoo.build_shapes import load_seer

    return load_seer(SHAPES)


@pytest.fixture
def some_scenes() -> list[scenes.Scene]:
    return [scenes.compose(random.Random(i), unseen=False) for i in range(300)]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_files_are_small() -> None:
    assert size_of(SHAPES) <= 8e6
    assert size_of(ZOO / "questions") <= 2.5e6


def test_plain_transformers_loads_everything() -> None:
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(SHAPES)
    tokenizer = AutoTokenizer.from_pretrained(SHAPES)
    images = AutoImageProcessor.from_pretrained(SHAPES)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    for token, name in {"image_pad": "image_token_id", "video_pad": "video_token_id"}.items():
        assert tokenizer.convert_tokens_to_ids(f"<|{token}|>") == getattr(model.config, name)
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.generation_config.pad_token_id
    assert images.patch_size == model.config.vision_config.patch_size


def test_words_and_tags_are_single_tokens(seer) -> None:
    tokenizer = seer.tokenizer
    for kind in scenes.ALL:
        assert len(tokenizer(scenes.question(kind)).input_ids) == 7
    reply = "<think>look: b1 c4 d2</think><answer>3</answer>"
    ids = tokenizer(reply + tokenizer.eos_token).input_ids
    assert len(ids) == 14
    assert tokenizer.decode(ids, skip_special_tokens=True) == reply
    unheard = "naïve λ 12\n"
    assert tokenizer.decode(tokenizer(unheard).input_ids) == unheard


def test_unseen_kinds_are_not_drawn_for_training(some_scenes) -> None:
    assert sorted(kind.colour for kind in scenes.UNSEEN) == sorted(scenes.COLOURS)
    assert sorted(kind.form for kind in scenes.UNSEEN) == sorted(scenes.FORMS)
    for scene in some_scenes:
        assert not {scene.asked, *scene.things.values()} & {*scenes.UNSEEN}
    unseen = {scenes.question(kind) for kind in scenes.UNSEEN}
    assert {question_of(row) for row in read_rows("eval")} == unseen
    assert not {question_of(row) for row in read_rows("train")} & unseen


def test_scenes_count_right(some_scenes) -> None:
    for scene in some_scenes:
        assert 1 <= scene.how_many() <= scene.of_colour() <= len(scene.things) <= scenes.CROWD
        assert scene.how_many() == Counter(scene.things.values())[scene.asked] <= scenes.MOST
        for square in scene.squares():
            at = "abcd".index(square[0]) + 4 * (int(square[1]) - 1)
            assert scene.things[at] == scene.asked


@pytest.mark.parametrize(("split", "unseen", "seed"), [("train", False, 1), ("eval", True, 2)])
def test_question_files_are_what_the_generator_says(split: str, unseen: bool, seed: int) -> None:
    rows = read_rows(split)
    assert len({row["images"][0] for row in rows}) == len(rows)
    shares = Counter(row["answer"] for row in rows)
    assert max(shares.values()) < 0.25 * len(rows) and sorted(shares) == list("123456")
    for row, again in zip(rows, scenes.rows(5, unseen, seed), strict=False):
        assert row["answer"] == again["answer"] and row["problem"] == again["problem"]
        assert np.abs(np.float32(picture_of(row)) - np.float32(picture_of(again))).mean() < 1


def test_colours_can_be_recounted_from_the_pixels() -> None:
    """Most of the ink in a square has the colour of the thing that the scene puts there."""
    names, palette = list(scenes.COLOURS), np.array(list(scenes.COLOURS.values()), np.float32)
    for i, row in enumerate(scenes.rows(12, unseen=True, seed=5)):
        scene = scenes.compose(random.Random(f"row 5 {i}"), unseen=True)
        pixels = np.float32(picture_of(row)).reshape(4, 16, 4, 16, 3).transpose(0, 2, 1, 3, 4)
        for at, square in enumerate(pixels.reshape(16, 256, 3)):
            near = np.linalg.norm(square[:, None] - palette, axis=-1)  # (pixels, colours)
            inked = (near < 45).sum(axis=0)
            found = names[inked.argmax()] if inked.max() > 12 else None
            assert found == (scene.things[at].colour if at in scene.things else None), (i, at)


def test_replies(some_scenes) -> None:
    rng = random.Random(0)
    seen: Counter[str] = Counter()
    for scene in some_scenes:
        assert answer_in(careful(scene)) == str(scene.how_many())
        seen[style_of(sloppy(scene, rng))] += 1
    assert set(seen) == {"listing", "forgetful", "hasty", "lumping", "bare"}
    assert answer_in("There are 3.") is None
    assert style_of("3") == "other"


def test_fast_forward_is_the_models_own(seer, some_scenes) -> None:
    """The training script's own vision forward, and its loss, against transformers'."""
    from tools.zoo.make_shapes import IGNORED, Patches, reply_loss_on, see, tokenise

    drawn = [scenes.draw(scene, random.Random(0)) for scene in some_scenes[:4]]
    pixels = torch.from_numpy(np.stack(drawn))
    pictures = seer.images(drawn, return_tensors="pt")
    patches = Patches(seer.images, pixels.device)(pixels)
    assert torch.equal(patches.flatten(0, 1), pictures["pixel_values"])
    with torch.no_grad():
        visual = seer.model.model.visual
        theirs = visual(pictures["pixel_values"], grid_thw=pictures["image_grid_thw"])
        ours = see(visual, patches).flatten(0, 1)
        assert torch.allclose(ours, theirs.pooler_output, atol=1e-4)

        one = slice(0, 1)  # of a single row, so that the loss's random rows are known
        texts = tokenise(seer, some_scenes[one], [careful(some_scenes[0])], "cpu")
        loss = reply_loss_on(seer, pixels[one], texts, batch=2)()
        logits = seer.model(
            input_ids=texts.ids,
            pixel_values=patches[0],
            image_grid_thw=pictures["image_grid_thw"][one],
            mm_token_type_ids=(texts.ids == seer.model.config.image_token_id).int(),
        ).logits
        expected = torch.nn.functional.cross_entropy(
            logits[0], texts.targets[0], ignore_index=IGNORED
        )
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_base_has_headroom(seer) -> None:
    rows = read_rows("eval")[:64]
    for temperature in (0.0, 1.0):
        scores = score(rows, ask(seer, rows, temperature))
        assert 0.2 <= scores.accuracy <= 0.5
    assert {"listing", "forgetful", "hasty", "lumping", "bare"} <= set(scores.styles)


def test_where_the_base_lists_it_counts_up_to_three(seer) -> None:
    """The skill is there and need only be chosen; longer lists it breaks off."""
    rows = [row for row in read_rows("eval") if int(row["answer"]) <= 3][:64]
    replies = ask(seer, rows, temperature=0)
    lists = [(row, reply) for row, reply in zip(rows, replies, strict=True) if "look:" in reply]
    assert len(lists) >= 10
    assert sum(answer_in(reply) == row["answer"] for row, reply in lists) >= 0.9 * len(lists)
