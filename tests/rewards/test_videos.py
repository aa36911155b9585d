"""Rewards of videos: image rewards over frames, motion, consistency, first frame, VideoAlign and
judges, against values by hand."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from pydantic import ValidationError
from torch import Tensor

from gesso.config import Model, RemoteEntry, RewardEntry, Strict
from gesso.rewards import assembly, base
from gesso.rewards.differentiable import RewardSum, WeightedValues
from gesso.rewards.frames import FrameChoice, FrameScorer
from gesso.rewards.judges.judge import Judge
from gesso.rewards.transport.protocol import base64_png
from gesso.rewards.video.consistency import TemporalConsistency
from gesso.rewards.video.first_frame import FirstFrame
from gesso.rewards.video.motion import Motion
from gesso.types import Prompt, Sample, Score, UserError
from tests.rewards.servers import Misbehaving
from tests.rewards.test_edits import png
from tests.rewards.test_judge import completion
from tests.rewards.test_prompt_images import scores_of

GREYS = (51, 102, 255, 0)  # brightness .2, .4, 1, 0


def video(frames: np.ndarray, prompt: Prompt | None = None) -> Sample:
    return Sample(prompt or Prompt("a video"), frames, 0, fps=8.0)


def greys(*values: int, size: tuple[int, int] = (4, 6)) -> np.ndarray:
    return np.stack([np.full((*size, 3), value, np.uint8) for value in values])


def score(reward: Any, sample: Sample) -> Score:
    (got,) = base.checked(reward, [sample])
    return got


# Image rewards over frames

RULES: dict[tuple[str, int], float] = {
    ("mean", 1): 0.4, ("worst", 1): 0.0, ("best", 1): 1.0, ("first", 1): 0.2, ("last", 1): 0.0,
    ("first-last", 1): 0.1, ("best-2", 1): 0.7, ("worst-3", 1): 0.2, ("worst-9", 1): 0.4,
    ("mean", 2): 0.6, ("worst", 2): 0.2, ("best", 3): 0.2,
}  # fmt: skip


class Brightness:
    """A scorer of images that counts them; black frames have a text, frames of 7 fail."""

    processes, hits, random = 0, 0, False

    def __init__(self, groupwise: bool = False) -> None:
        self.groupwise = groupwise
        self.calls: list[int] = []

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        self.calls.append(len(samples))
        values = [float(s.pixels.mean()) / 255 for s in samples]
        return [
            Score.failed("too dark") if round(v * 255) == 7
            else Score(v, {"half": v / 2}, f"grey {v:.1f}")
            for v in values
        ]  # fmt: skip

    async def close(self) -> None: ...


def over_frames(inner: Any, rule: str, every: int, *samples: Sample) -> list[Score]:
    return asyncio.run(FrameScorer(inner, FrameChoice(rule, every)).score(samples))


@pytest.mark.parametrize("rule, every", list(RULES))
def test_the_frames_that_count(rule: str, every: int) -> None:
    (got,) = over_frames(Brightness(), rule, every, video(greys(*GREYS)))
    expected = pytest.approx(RULES[rule, every])
    assert got.value == expected and 2 * got.parts["half"] == expected
    values = torch.tensor([[0.2, 0.4, 1.0, 0.0]])[:, FrameChoice(rule, every).scored(4)]
    assert FrameChoice(rule, every).value(values).tolist() == [expected]


def test_texts_failures_images_and_groups() -> None:
    inner = Brightness()
    two, bad, image = over_frames(
        inner, "worst-2", 1, video(greys(*GREYS)), video(greys(9, 7)),
        Sample(Prompt("p"), greys(102)[0], 0),
    )  # fmt: skip
    assert two.text == "grey 0.2 / grey 0.0" and inner.calls == [7]  # all frames in one call
    assert bad == Score.failed("frame 1: too dark")
    assert image.value == 0.4  # an image is itself
    whole = Brightness(groupwise=True)
    group = over_frames(whole, "mean", 1, video(greys(0, 255)), video(greys(51, 153)))
    assert [s.value for s in group] == [0.5, pytest.approx(0.4)]
    assert whole.calls == [2, 2]  # a group of two at each frame


def test_any_reward_of_a_recipe_over_frames() -> None:
    entry = RewardEntry(name="tests.rewards.user_rewards:brightness", frames="best-2", scale=2.0)
    (got,) = scores_of(assembly.scorer(entry), [video(greys(*GREYS))])
    assert got.value == pytest.approx(1.4)
    plain = RewardEntry(name="tests.rewards.user_rewards:brightness")
    (failed,) = scores_of(assembly.scorer(plain), [video(greys(*GREYS))])
    assert 'is a video; expected an image: set frames = "mean"' in str(failed.error)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"frames": "median"}, 'frames = "median": expected "mean", "first"'),
        ({"frames": "worst-0"}, "a number of them"),
        ({"every": 2}, 'every = 2 needs frames = "mean", "worst" or "best"; set it, or remove'),
        ({"frames": "first", "every": 2}, "every = 2 needs frames"),
    ],
)
def test_choices_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardEntry(name="ocr", **options)


@pytest.mark.parametrize("name", ["motion", "video-align"])
def test_rewards_of_whole_videos_take_no_frames(name: str) -> None:
    remote = RemoteEntry(urls=["http://127.0.0.1:9"]) if name == "video-align" else None
    entry = RewardEntry(name=name, frames="mean", remote=remote)
    with pytest.raises(UserError, match=f'"{name}" scores whole videos; remove frames = "mean"'):
        assembly.of_entries([entry], [], Model(path="m"))


@pytest.mark.parametrize(
    "entry, frames, eval_frames, message",
    [
        ({"name": "motion"}, 1, None, '"motion": it scores videos, got model.frames = 1; use anot'),
        ({"name": "motion"}, 5, 1, '"motion": it scores videos, got eval.frames = 1'),
        ({"name": "ocr", "frames": "worst"}, 1, None, 'frames = "worst" is for videos, got model'),
        ({"name": "ocr", "frames": "worst-9"}, 5, None, 'only 5 of the 5 .* at most "worst-5"'),
        ({"name": "ocr", "frames": "best-3", "every": 4}, 9, 5, 'only 2 of the 5 .* "best-2"'),
    ],
)
def test_rewards_that_do_not_fit_the_number_of_frames(
    entry: dict[str, Any], frames: int, eval_frames: int | None, message: str
) -> None:
    entries = [RewardEntry(**entry)]
    with pytest.raises(UserError, match=message):
        assembly.of_entries(entries, entries, Model(path="m", frames=frames), eval_frames)


class Light(Strict):
    """A differentiable reward of images."""

    differentiable: ClassVar[bool] = True

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        raise AssertionError("not called")

    def values(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        assert images.shape[1:] == (3, 4, 6) and len(images) == len(prompts)
        return images.mean((1, 2, 3))


def test_gradients_reach_the_frames_that_count() -> None:
    frames = torch.from_numpy(greys(*GREYS)).movedim(-1, 0)[None].float() / 255  # (1, 3, F, h, w)
    frames.requires_grad_()
    light = WeightedValues("light", 2.0, Light(), frames=FrameChoice("best-2"))
    smooth = WeightedValues("smooth", 1.0, TemporalConsistency())
    values = RewardSum([light, smooth])(frames, [Prompt("p")])
    consistency = 1 - (0.2 + 0.6 + 1.0) / 3
    assert values.tolist() == [pytest.approx(2 * 0.7 + consistency)]
    assert score(TemporalConsistency(), video(greys(*GREYS))).value == pytest.approx(consistency)
    (gradient,) = torch.autograd.grad(RewardSum([light])(frames, [Prompt("p")]).sum(), frames)
    assert gradient[0].sum((0, 2, 3)).tolist() == pytest.approx([0, 1, 1, 0])
    with pytest.raises(UserError, match='"light" scores images, not videos; set frames = "mean"'):
        RewardSum([WeightedValues("light", 1.0, Light())])(frames, [Prompt("p")])


# Rewards of whole videos

TEXTURE = np.asarray(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (128, 256, 3), dtype=np.uint8))
    .filter(ImageFilter.GaussianBlur(1.5))
)  # fmt: skip


def shifted(x: int, y: int, frames: int = 4) -> np.ndarray:
    return np.stack([np.roll(TEXTURE, (y * i, x * i), (0, 1)) for i in range(frames)])


def directed(frames: np.ndarray, direction: str | None) -> Sample:
    return video(frames, Prompt("p", columns={"direction": direction} if direction else {}))


def test_motion_measures_shifts() -> None:
    got = score(Motion(), directed(shifted(3, -4), None))
    assert got.parts["dx"] == pytest.approx(3, abs=0.05)
    assert got.parts["dy"] == pytest.approx(-4, abs=0.05)
    assert got.parts["pixels"] == pytest.approx(5, abs=0.05)
    assert got.value == pytest.approx(5 / 256 / 0.02, abs=0.01)
    assert score(Motion(full=0.5), directed(shifted(3, -4), "right")).value == pytest.approx(
        3 / 256 / 0.5, abs=1e-3
    )
    assert score(Motion(), directed(shifted(3, -4), "left")).value == 0
    assert score(Motion(), directed(shifted(3, -4), "up")).value == pytest.approx(
        4 / 5.12, abs=0.02
    )


def test_what_is_no_motion() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    flicker = np.stack([TEXTURE, TEXTURE // 2, TEXTURE])
    for still in (noise, flicker, shifted(0, 0), greys(0, 255, 0)):
        assert score(Motion(), directed(still, None)).value == pytest.approx(0, abs=0.01)
        assert score(Motion(), directed(still, "still")).value == pytest.approx(1, abs=0.01)
    changed = score(Motion(by="difference", full=0.5), video(greys(0, 51, 51)))
    assert changed.value == pytest.approx(0.2) and changed.parts["difference"] == pytest.approx(0.1)
    assert score(Motion(), Sample(Prompt("p"), TEXTURE, 0)).error == (
        "this sample has one frame; expected a video of at least 2"
    )
    up = Prompt("p", columns={"direction": "north"})
    assert "is 'north'; expected one of left, right" in str(Motion().unfit(up))
    assert Motion().unfit(Prompt("p", columns={"direction": "up"})) is None


def test_large_frames_are_measured_in_their_pixels() -> None:
    large = np.kron(shifted(2, 0), np.ones((1, 3, 3, 1), np.uint8))  # 768 wide, 6 px a frame
    assert score(Motion(), video(large)).parts["dx"] == pytest.approx(6, abs=0.1)


def test_the_first_frame_is_the_given_image() -> None:
    given = Prompt("it moves", images=(png(greys(100)[0]),))
    same = score(FirstFrame(), video(greys(100, 0, 0), given))
    other = score(FirstFrame(), video(greys(151, 100, 100), given))
    assert same.value == 1 and other.value == pytest.approx(math.exp(-0.2 / 0.1))
    assert FirstFrame().unfit(Prompt("p")) and FirstFrame().unfit(given) is None


def test_video_align_is_the_sum_of_its_heads() -> None:
    rows = [
        {"value": 9.0, "parts": {"vq": 1.5, "mq": -0.5, "ta": 0.25}},
        {"value": 1.0, "parts": {"vq": 1.0}},
    ]
    with Misbehaving(["body:" + json.dumps({"scores": rows})]) as server:
        entry = RewardEntry(name="video-align", remote=RemoteEntry(urls=[server.url]))
        good, bad = scores_of(assembly.scorer(entry), [video(greys(1, 2)), video(greys(3, 4))])
        (request,) = server.requests
    assert good.value == 1.25
    assert bad.error == 'expected the details "vq", "mq" and "ta", got vq'
    assert [len(s["frames"]) for s in request["samples"]] == [2, 2]
    assert request["samples"][0]["fps"] == 8 and request["samples"][0]["image"] is None


def test_a_judge_sees_frames_in_order() -> None:
    with Misbehaving([completion("Final Score: 4")]) as server:
        judge = Judge(urls=[server.url], model="m", template="edit", max_frames=3)
        assert judge.score([video(greys(*range(9)))])[0].value == 0.8
        content = server.requests[0]["messages"][0]["content"]
    assert [part["type"] for part in content] == ["text", *["image_url"] * 3, "text"]
    assert content[0]["text"] == "Video 1, frames at 0.00, 0.50, 1.00 seconds:"
    shown = [part["image_url"]["url"] for part in content[1:4]]
    expected = [f"data:image/png;base64,{base64_png(greys(i)[0])}" for i in (0, 4, 8)]
    assert shown == expected
