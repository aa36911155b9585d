"""The bundled vision-language model: files, questions, images, and how well it counts."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from gesso.zoo import scenes
from tools.zoo import render_shapes
from tools.zoo.evaluate_shapes import ask, image_of, question_of, read_rows, score
from tools.zoo.wording import answer_in, careful, sloppy, style_of

ZOO = Path(scenes.__file__).parent
SHAPES = ZOO / "shapes"


@pytest.fixture(scope="module")
def vlm():
    from tools.zoo.build_shapes import load_vlm

    return load_vlm(SHAPES)


@pytest.fixture
def some_scenes() -> list[render_shapes.Scene]:
    return [render_shapes.compose(random.Random(i), unseen=False) for i in range(300)]


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


def test_words_and_tags_are_single_tokens(vlm) -> None:
    tokenizer = vlm.tokenizer
    for kind in render_shapes.ALL:
        assert len(tokenizer(scenes.question(kind)).input_ids) == 7
    response = "<think>look: b1 c4 d2</think><answer>3</answer>"
    ids = tokenizer(response + tokenizer.eos_token).input_ids
    assert len(ids) == 14
    assert tokenizer.decode(ids, skip_special_tokens=True) == response
    other = "naïve λ 12\n"
    assert tokenizer.decode(tokenizer(other).input_ids) == other


def test_training_scenes_have_no_unseen_kinds(some_scenes) -> None:
    assert sorted(kind.colour for kind in render_shapes.UNSEEN) == sorted(scenes.COLOURS)
    assert sorted(kind.form for kind in render_shapes.UNSEEN) == sorted(scenes.FORMS)
    for scene in some_scenes:
        assert not {scene.target, *scene.things.values()} & {*render_shapes.UNSEEN}
    unseen = {scenes.question(kind) for kind in render_shapes.UNSEEN}
    assert {question_of(row) for row in read_rows("eval")} == unseen
    assert not {question_of(row) for row in read_rows("train")} & unseen


def test_counts_of_scenes(some_scenes) -> None:
    for scene in some_scenes:
        assert (
            1 <= scene.how_many() <= scene.of_colour() <= len(scene.things) <= render_shapes.CROWD
        )
        assert scene.how_many() == Counter(scene.things.values())[scene.target] <= scenes.MAX_COUNT
        for square in scene.squares():
            at = "abcd".index(square[0]) + 4 * (int(square[1]) - 1)
            assert scene.things[at] == scene.target


@pytest.mark.parametrize(("split", "unseen", "seed"), [("train", False, 1), ("eval", True, 2)])
def test_question_files_match_the_generator(split: str, unseen: bool, seed: int) -> None:
    rows = read_rows(split)
    assert len({row["images"][0] for row in rows}) == len(rows)
    shares = Counter(row["answer"] for row in rows)
    assert max(shares.values()) < 0.25 * len(rows) and sorted(shares) == list("123456")
    for row, again in zip(rows, render_shapes.rows(5, unseen, seed), strict=False):
        assert row["answer"] == again["answer"] and row["problem"] == again["problem"]
        assert np.abs(np.float32(image_of(row)) - np.float32(image_of(again))).mean() < 1


def test_colours_can_be_recounted_from_the_pixels() -> None:
    """Most of the ink in a square has the colour of the shape in the scene."""
    names = list(render_shapes.RGB)
    palette = np.array(list(render_shapes.RGB.values()), np.float32)
    for i, row in enumerate(render_shapes.rows(12, unseen=True, seed=5)):
        scene = render_shapes.compose(random.Random(f"row 5 {i}"), unseen=True)
        pixels = np.float32(image_of(row)).reshape(4, 16, 4, 16, 3).transpose(0, 2, 1, 3, 4)
        for at, square in enumerate(pixels.reshape(16, 256, 3)):
            near = np.linalg.norm(square[:, None] - palette, axis=-1)  # (pixels, colours)
            inked = (near < 45).sum(axis=0)
            colour = names[inked.argmax()] if inked.max() > 12 else None
            assert colour == (scene.things[at].colour if at in scene.things else None), (i, at)


def test_responses(some_scenes) -> None:
    rng = random.Random(0)
    styles: Counter[str] = Counter()
    for scene in some_scenes:
        assert answer_in(careful(scene)) == str(scene.how_many())
        styles[style_of(sloppy(scene, rng))] += 1
    assert set(styles) == {"listing", "forgetful", "hasty", "lumping", "bare"}
    assert answer_in("There are 3.") is None
    assert style_of("3") == "other"


def test_fast_forward_equals_the_model(vlm, some_scenes) -> None:
    """The training script's vision forward and loss equal those of transformers."""
    from tools.zoo.make_shapes import IGNORED, Patches, response_loss_on, tokenise, vision_forward

    drawn = [render_shapes.draw(scene, random.Random(0)) for scene in some_scenes[:4]]
    pixels = torch.from_numpy(np.stack(drawn))
    images = vlm.image_processor(drawn, return_tensors="pt")
    patches = Patches(vlm.image_processor, pixels.device)(pixels)
    assert torch.equal(patches.flatten(0, 1), images["pixel_values"])
    with torch.no_grad():
        visual = vlm.model.model.visual
        theirs = visual(images["pixel_values"], grid_thw=images["image_grid_thw"])
        ours = vision_forward(visual, patches).flatten(0, 1)
        assert torch.allclose(ours, theirs.pooler_output, atol=1e-4)

        one = slice(0, 1)  # of a single row, so that the loss's random rows are known
        texts = tokenise(vlm, some_scenes[one], [careful(some_scenes[0])], "cpu")
        loss = response_loss_on(vlm, pixels[one], texts, batch=2)()
        logits = vlm.model(
            input_ids=texts.ids,
            pixel_values=patches[0],
            image_grid_thw=images["image_grid_thw"][one],
            mm_token_type_ids=(texts.ids == vlm.model.config.image_token_id).int(),
        ).logits
        expected = torch.nn.functional.cross_entropy(
            logits[0], texts.targets[0], ignore_index=IGNORED
        )
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_base_has_headroom(vlm) -> None:
    rows = read_rows("eval")[:64]
    for temperature in (0.0, 1.0):
        scores = score(rows, ask(vlm, rows, temperature))
        assert 0.2 <= scores.accuracy <= 0.5
    assert {"listing", "forgetful", "hasty", "lumping", "bare"} <= set(scores.styles)


def test_the_base_counts_up_to_three_when_it_lists(vlm) -> None:
    """The base model can count but does not always choose to; it truncates longer lists."""
    rows = [row for row in read_rows("eval") if int(row["answer"]) <= 3][:64]
    responses = ask(vlm, rows, temperature=0)
    lists = [(row, text) for row, text in zip(rows, responses, strict=True) if "look:" in text]
    assert len(lists) >= 10
    assert sum(answer_in(text) == row["answer"] for row, text in lists) >= 0.9 * len(lists)
