"""Rewards of edits: unchanged, edit-score, edit-reward and judges, against values by hand."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gesso.config import RemoteEntry, RewardEntry
from gesso.rewards import assembly, base, edits
from gesso.rewards.image import unchanged
from gesso.rewards.image.unchanged import Unchanged
from gesso.rewards.judges.edit_score import EditScore, edit_score
from gesso.rewards.judges.judge import Judge
from gesso.rewards.transport import protocol
from gesso.rewards.video.consistency import TemporalConsistency
from gesso.types import Prompt, PromptImage, Sample, Score
from tests.rewards.servers import Misbehaving
from tests.rewards.test_judge import completion
from tests.rewards.test_pickscore import tiny_clip
from tests.rewards.test_prompt_images import scores_of

SOURCE = np.random.default_rng(0).integers(0, 256, (8, 16, 3), dtype=np.uint8)


def png(image: np.ndarray) -> PromptImage:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return PromptImage(data=buffer.getvalue())


def mask(columns: int) -> PromptImage:
    """White, so that it may change, in the first columns."""
    return png(np.where(np.arange(16) < columns, 255, 0).astype(np.uint8)[None].repeat(8, 0))


def edit(result: np.ndarray, masked: PromptImage | None = None) -> Sample:
    columns = {} if masked is None else {"mask": masked}
    prompt = Prompt("make it blue", images=(png(SOURCE),), image_columns=columns)
    return Sample(prompt, result, 0)


def painted(columns: int, by: int) -> np.ndarray:
    """The source with other values in the first columns; `by` is the mean difference."""
    result = SOURCE.copy()
    part = result[:, :columns].astype(int)
    result[:, :columns] = np.where(part < 128, part + by, part - by)
    return result


def score(sample: Sample, **options: Any) -> Score:
    (got,) = base.checked(Unchanged(**options), [sample])
    return got


# unchanged


def test_a_change_inside_the_mask_is_free() -> None:
    assert score(edit(painted(4, 100), mask(4))).value == 1.0
    assert score(edit(SOURCE, mask(4))).value == 1.0


def test_a_change_outside_the_mask_counts_by_its_mean() -> None:
    """4 of the 12 columns outside differ by 51/255 = .2: mean .0667, exp(−.667)."""
    got = score(edit(painted(8, 51), mask(4)))
    assert got.value == got.parts["pixels"] == pytest.approx(math.exp(-0.2 * 4 / 12 / 0.1))
    assert score(edit(painted(8, 51), mask(4)), scale=0.5).value == pytest.approx(
        math.exp(-0.2 * 4 / 12 / 0.5)
    )


def test_grey_parts_of_a_mask_count_in_part() -> None:
    half = png(np.full((8, 16), 51, np.uint8))  # weight .8 everywhere
    assert score(edit(painted(16, 51), half)).value == pytest.approx(math.exp(-0.2 / 0.1))


@pytest.mark.parametrize("columns, changed", [(4, 0), (8, 0), (12, 4), (16, 8)])
def test_without_a_mask_half_of_the_image_may_change(columns: int, changed: int) -> None:
    """The 8 of 16 columns that changed least are averaged."""
    got = score(edit(painted(columns, 51)))
    assert got.value == pytest.approx(math.exp(-0.2 * changed / 8 / 0.1))


def test_what_the_edit_shows_does_not_matter() -> None:
    values = {score(edit(painted(8, by))).value for by in (1, 20, 100)}
    assert values == {1.0}


def test_a_source_of_another_size_is_cropped_and_resized() -> None:
    wide = SOURCE.repeat(4, 0).repeat(4, 1)  # 32 × 64
    wide = np.pad(wide, ((0, 0), (8, 8), (0, 0)))  # its middle has the aspect ratio of the result
    sample = edit(SOURCE)
    sample = replace(sample, prompt=replace(sample.prompt, images=(png(wide),)))
    assert edits.source(sample).shape == SOURCE.shape
    assert np.abs(edits.source(sample).astype(int) - SOURCE).mean() < 30


def test_faults_are_sentences() -> None:
    no_image = Prompt("a cat")
    expected = "the prompt has no input image to compare with"
    for reward in (Unchanged(), EditScore(urls=["http://x"]), Judge(template="edit")):
        assert reward.unfit(no_image) == expected
        assert reward.unfit(edit(SOURCE).prompt) is None
    assert score(Sample(no_image, SOURCE, 0)).error == expected
    assert "white everywhere" in str(score(edit(SOURCE, mask(16))).error)
    damaged = replace(edit(SOURCE).prompt, images=(PromptImage(data=b"x"),))
    assert "is not an image" in str(score(Sample(damaged, SOURCE, 0)).error)


def test_a_mask_that_does_not_fit_is_found_by_the_check() -> None:
    def why(shape: tuple[int, int]) -> str:
        grey = png(np.full(shape, 128, np.uint8))
        return str(Unchanged().unfit(edit(SOURCE, grey).prompt))

    assert why((8, 16)) == why((16, 32)) == why((11, 21)) == "None"  # 21 : 11 is 2 : 1, rounded
    assert why((16, 16)) == (
        "the mask of 16×16 pixels has another aspect ratio than its image of 16×8; crop or draw it "
        "for that image"
    )
    for columns, shade in ((16, "white"), (0, "black")):
        unfit = str(Unchanged().unfit(edit(SOURCE, mask(columns)).prompt))
        assert unfit.startswith(f"the mask is {shade} everywhere; expected ")
    assert Unchanged().unfit(edit(SOURCE, mask(1)).prompt) is None
    damaged = replace(edit(SOURCE).prompt, image_columns={"mask": PromptImage(data=b"x")})
    assert "is not an image" in str(Unchanged().unfit(damaged))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPImageProcessorPil, Dinov2Config, Dinov2Model

    folder = tmp_path_factory.mktemp("dino")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    Dinov2Model(Dinov2Config(**sizes, image_size=32, patch_size=8)).save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 36}, crop_size=32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("network", ["clip", "dino"])
def test_features(network: str, request: pytest.FixtureRequest) -> None:
    """The cosine of each patch, by the network itself, averaged by hand."""
    folder = request.getfixturevalue(network)
    options = {"path": str(folder), "device": "cpu"}
    same = score(edit(SOURCE), **options)
    assert same.value == same.parts["features"] == pytest.approx(1.0)
    result = painted(8, 100)
    got = score(edit(result, mask(4)), **options)
    patches = unchanged.load_patches(str(folder), "cpu")
    side = patches.model.config.image_size
    inputs = [np.asarray(Image.fromarray(i).resize((side, side), 3)) for i in (SOURCE, result)]
    mean, std = (np.array(getattr(patches.processor, f"image_{k}")) for k in ("mean", "std"))
    pixels = (torch.tensor(np.stack(inputs) / 255) - torch.tensor(mean)) / torch.tensor(std)
    with torch.no_grad():
        states = patches.model(pixel_values=pixels.permute(0, 3, 1, 2).float()).last_hidden_state
    a, b = states[:, 1:].double()
    rows = side // 8
    cosines = ((a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)).reshape(rows, rows)
    outside = cosines[:, rows // 4 :]  # the first quarter of the columns is masked
    assert got.parts["features"] == pytest.approx(max(0.0, float(outside.mean())), abs=1e-4)
    assert got.parts["pixels"] == score(edit(result, mask(4))).value != got.value


def test_neighbouring_frames_by_features(clip: Path) -> None:
    frames = np.stack([SOURCE, SOURCE, painted(8, 100)])
    reward = TemporalConsistency(path=str(clip), device="cpu")
    (got,) = base.checked(reward, [Sample(Prompt("p"), frames, 0, fps=8)])
    cosines = unchanged.load_patches(str(clip), "cpu").similarity(frames[1], frames[2])
    assert got.value == got.parts["features"] == pytest.approx((1 + cosines.mean()) / 2)


def test_another_kind_of_network(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    message = str(score(edit(SOURCE), path=str(tmp_path)).error)
    assert "is a llama network; expected CLIP or DINOv2" in message


# edit-score


def ratings(a: float, b: float) -> str:
    return completion(f'```json\n{{"reasoning": "fine", "score": [{a}, {b}]}}\n```')


def test_edit_score_is_the_geometric_mean_of_the_minima() -> None:
    assert edit_score(0.8, 0.5, 0.9, 0.72) == pytest.approx(0.6)  # √(.5 · .72)
    assert edit_score(0.0, 1.0, 1.0, 1.0) == 0.0
    with Misbehaving([ratings(20, 12.5), ratings(22.5, 18)]) as server:
        judge = EditScore(urls=[server.url], model="m", in_flight=1)
        (got,) = judge.score([edit(painted(8, 50))])
        first, second = server.requests
    assert got.value == pytest.approx(0.6) and '"score": [22.5, 18]' in got.text
    assert got.parts == pytest.approx(
        {"following": 0.8, "consistency": 0.5, "naturalness": 0.9, "artifacts": 0.72}
    )
    shown = [
        [
            protocol.decode_image(protocol.from_base64(part["image_url"]["url"]))
            for part in request["messages"][0]["content"][:-1]
        ]
        for request in (first, second)
    ]
    assert [len(images) for images in shown] == [2, 1]  # quality: the result alone
    assert (shown[0][0] == SOURCE).all() and (shown[0][1] == painted(8, 50)).all()
    assert (shown[1][0] == painted(8, 50)).all()
    assert "make it blue" in first["messages"][0]["content"][-1]["text"]


@pytest.mark.parametrize(
    "answer, sentence",
    [
        (completion("looks good"), 'contains no "score": [a, b]'),
        (ratings(26, 3), "the scores [26.0, 3.0] are not in [0, 25]"),
        (ratings(-1, 3), "the scores [-1.0, 3.0] are not in [0, 25]"),
        (completion('"score": [1, 2], no, "score": [2, 2]'), "contains 2 pairs of scores"),
        ("400 Bad", "returned 400"),
    ],
)
def test_an_unreadable_edit_score_fails(answer: str, sentence: str) -> None:
    with Misbehaving([ratings(20, 20), answer]) as server:
        judge = EditScore(urls=[server.url], model="m", in_flight=1)
        (got,) = judge.score([edit(SOURCE)])
    assert got.value is None and sentence in str(got.error)


# edit-reward


@pytest.mark.parametrize(
    "row, value, error",
    [
        ({"value": 9.0, "parts": {"following": 1.5, "quality": -0.5}}, 0.5, None),
        ({"value": 1.0, "parts": {"following": 1.5}}, None, 'and "quality", got following'),
        ({"value": 1.0}, None, "got none"),
        ({"value": None, "error": "no memory"}, None, "no memory"),
    ],
)
def test_edit_reward_is_the_mean_of_its_heads(
    row: dict, value: float | None, error: str | None
) -> None:
    with Misbehaving(["body:" + json.dumps({"scores": [row]})]) as server:
        remote = RemoteEntry(urls=[server.url])
        entry = RewardEntry(name="edit-reward", remote=remote, optional=True)
        samples = [edit(SOURCE), Sample(Prompt("a cat"), SOURCE, 0)]
        got, none = scores_of(assembly.scorer(entry), samples)
        (request,) = server.requests
    assert got.value == value and (error or "") in (got.error or "")
    (sent,) = request["samples"]
    assert sent["prompt"] == "make it blue" and len(sent["images"]) == 1 and sent["image"]
    assert none == Score(None)  # without an input image it does not apply, and is not sent


# Judges of edits


def test_templates_of_edits_show_source_and_result() -> None:
    with Misbehaving([completion("Good. Final Score: 4")] * 2) as server:
        for template in ("edit", "rest"):
            judge = Judge(urls=[server.url], model="m", template=template)
            assert judge.score([edit(SOURCE)])[0].value == 0.8
        kinds = [[p["type"] for p in r["messages"][0]["content"]] for r in server.requests]
    assert kinds == [["image_url", "image_url", "text"]] * 2


def logits(**probabilities: float) -> dict[str, Any]:
    top = [{"token": t, "logprob": math.log(p)} for t, p in probabilities.items()]
    return {"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}


def test_the_expected_rating() -> None:
    """(2 · .2 + 5 · .6) / .8 = 4.25, over 5; 7 is off the scale, " 5" is a 5."""
    body = logits(**{"5": 0.4, " 5": 0.2, "2": 0.2, "7": 0.1, "The": 0.1})
    with Misbehaving(["body:" + json.dumps(body)]) as server:
        judge = Judge(urls=[server.url], model="m", template="edit", logits=True)
        (got,) = judge.score([edit(SOURCE)])
        (request,) = server.requests
    assert got.value == pytest.approx(0.85) and got.parts == pytest.approx({"digits": 0.8})
    assert (request["max_tokens"], request["logprobs"], request["top_logprobs"]) == (1, True, 20)
    assert request["messages"][0]["content"][-1]["text"].endswith("and nothing else.")
    assert "Final Score" not in request["messages"][0]["content"][-1]["text"]


@pytest.mark.parametrize(
    "answer, sentence",
    [
        (logits(**{"The": 0.9, "5": 0.1}), "with probability 0.10, .* one is 'The'"),
        (logits(), "with probability 0.00"),
        ({"choices": [{"message": {"content": "5"}}]}, "expected the log-probs of the first token"),
        ([], "expected the log-probs"),
    ],
)
def test_no_probability_is_no_score(answer: Any, sentence: str) -> None:
    with Misbehaving(["body:" + json.dumps(answer)]) as server:
        judge = Judge(urls=[server.url], model="m", template="edit", logits=True)
        (got,) = judge.score([edit(SOURCE)])
    assert got.value is None and re.search(sentence, str(got.error))


def test_logits_need_a_scale_of_digits(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("Rate.")
    with pytest.raises(ValueError, match="logits requires a scale of single digits"):
        Judge(prompt=str(tmp_path / "q.txt"), logits=True, highest=10)
