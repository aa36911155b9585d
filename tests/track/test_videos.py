"""Videos as files: MP4s, strips, and the rows of a run folder that name them."""

from __future__ import annotations

import io
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gesso import video_files
from gesso.image_files import ImageFault
from gesso.track import groups
from gesso.track.trackers import tensorboard
from gesso.track.trackers.base import samples_of
from gesso.track.trackers.mlflow import MLflow
from gesso.track.trackers.swanlab import SwanLab
from gesso.track.trackers.wandb import Wandb
from gesso.types import Prompt, Sample, Score, UserError
from gesso.use import sampling
from gesso.video_files import PromptClip, encode_mp4, read_clip, spread, strip
from tests.viewer import folders


def moving_bar(frames: int = 9, height: int = 33, width: int = 97) -> np.ndarray:
    """A bright bar that moves to the right, on a grey that becomes brighter."""
    video: np.ndarray = np.zeros((frames, height, width, 3), np.uint8)
    for i in range(frames):
        video[i] = 20 * i
        video[i, :, 8 * i : 8 * i + 8] = (250, 30, 60)
    return video


def sample(frames: np.ndarray, fps: float = 12.5) -> Sample:
    return Sample(Prompt("a bar moves"), frames, 3, fps=fps)


def test_an_mp4_has_all_frames_at_their_rate() -> None:
    video = moving_bar()
    clip = read_clip(encode_mp4(video, 12.5))
    assert clip.fps == 12.5 and clip.frames.shape == (9, 34, 98, 3)  # sizes become even
    difference = np.abs(clip.frames[:, :33, :97].astype(float) - video).mean((1, 2, 3))
    assert difference.max() < 3, "every frame at its place"


@pytest.mark.parametrize("name", ["libvpx-vp9", "mpeg4"])
def test_other_encoders(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(video_files, "ENCODERS", ("libnothing", name))
    clip = read_clip(encode_mp4(moving_bar(), 16))
    assert clip.fps == 16 and np.abs(clip.frames[4, :33, :97] - 80.0).mean() < 25


def test_no_encoder_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_files, "ENCODERS", ("libnothing",))
    with pytest.raises(UserError, match=r"no encoder for MP4 \(one of libnothing\); install it"):
        encode_mp4(moving_bar(), 16)
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(UserError, match=r'videos require PyAV: pip install "gesso\[video\]"'):
        encode_mp4(moving_bar(), 16)


def test_an_unreadable_clip_is_one_sentence(tmp_path: Path) -> None:
    whole = encode_mp4(moving_bar(), 16)
    for bad in (b"", b"not a video", whole[:200], str(tmp_path / "none.mp4")):
        with pytest.raises(ImageFault, match=r"^cannot be decoded as a video: [A-Z][^\n]+$"):
            read_clip(bad)


@pytest.mark.parametrize(
    "count, fps, shown",
    [
        (9, 12.5, range(9)),
        (5, 12.5, range(5)),  # its start
        (5, 6.25, [0, 2, 4, 6, 8]),
        (8, 10, [0, 1, 2, 3, 5, 6, 7, 8]),
        (6, 25, [0, 0, 1, 1, 2, 2]),
    ],
)
def test_a_clip_of_a_row_at_the_rate_of_the_model(count: int, fps: float, shown: Any) -> None:
    clip = PromptClip(data=encode_mp4(moving_bar(9, 32, 96), 12.5), count=count, fps=fps)
    assert clip.fault() is None and clip.size == (32, 96)
    frames = clip.fitted(32, 96)
    assert frames.shape == (count, 32, 96, 3)
    grey = np.median(frames[:, :, 80:], (1, 2, 3)) / 20  # the bar is elsewhere, or narrow
    assert grey.round().tolist() == [*shown]
    assert clip.fitted(16, 16).shape == (count, 16, 16, 3)
    assert clip.open().size == (96, 32)


def test_clips_that_cannot_be_used(tmp_path: Path) -> None:
    whole = encode_mp4(moving_bar(), 12.5)
    (tmp_path / "clip.mp4").write_bytes(whole)
    short = PromptClip(str(tmp_path / "clip.mp4"), count=10, fps=12.5)
    for decode in (True, False):
        assert short.fault(decode) == (
            f"{tmp_path}/clip.mp4 lasts 0.72 seconds, shorter than model.frames = 10 at model.fps "
            "= 12.5; use longer clips or fewer frames"
        )
    torn = PromptClip(data=whole[: len(whole) // 2], count=9, fps=12.5)
    fault = torn.fault() or ""
    assert re.fullmatch(r"the clip of [\d,]+ bytes cannot be decoded as a video: .*", fault)
    noise = np.random.default_rng(0).integers(0, 256, (2, 32, 96, 3), np.uint8)
    damaged = bytearray(encode_mp4(noise, 8))
    start = damaged.index(b"mdat") + 900  # within the first frame
    damaged[start : start + 30] = b"gesso!" * 5
    fault = PromptClip(data=bytes(damaged), count=2, fps=8).fault() or ""
    assert re.fullmatch(r"the clip of [\d,]+ bytes cannot be decoded as a video: .*", fault)
    with pytest.raises(UserError, match=r"none\.mp4 cannot be decoded as a video: No such file"):
        PromptClip(str(tmp_path / "none.mp4"), count=9).fitted(32, 96)


def test_a_clip_of_a_phone_is_turned_upright() -> None:
    """The matrix of the track in an MP4: a quarter turn clockwise."""
    video: np.ndarray = np.zeros((2, 32, 96, 3), np.uint8)
    video[:, :16, :16] = 255  # at the left of the top
    data = bytearray(encode_mp4(video, 8))
    place, one = data.index(b"tkhd") + 44, 1 << 16
    data[place : place + 36] = struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, 1 << 30)
    (frame,) = PromptClip(data=bytes(data), count=1, fps=8).fitted(96, 32)
    assert frame[4:12, 20:28].min() > 200 and frame[:, :12].max() < 50


def test_a_strip_shows_frames_from_the_first_to_the_last() -> None:
    assert [spread(9, 5), spread(3, 5), spread(9, 1), spread(6, 2)] == [
        [0, 2, 4, 6, 8], [0, 1, 2], [4], [0, 5],
    ]  # fmt: skip
    video = moving_bar()
    row = strip(video)
    assert row.shape == (33, 5 * 97 + 4 * 2, 3)
    assert (row[:, 2 * 99 : 2 * 99 + 97] == video[4]).all()


def test_videos_of_a_run_folder(tmp_path: Path) -> None:
    run, video = folders.make(tmp_path, 0), moving_bar(5, 32, 320)
    for _ in range(2):  # a resumed run writes a step again
        run.save_samples(2, [sample(video), Sample(Prompt("x"), video[0], 4)], [Score(1.0)] * 2)
    shown, image = samples_of(run.path, 2)
    assert (shown.image, shown.video, shown.fps) == ("000002/000.png", "000002/000.mp4", 12.5)
    assert (image.video, image.fps, image.strip) == ("", None, "000002/001.png")
    folder = run.path / "samples"
    assert (np.asarray(Image.open(folder / shown.image)) == video[0]).all()
    assert (np.asarray(Image.open(folder / shown.strip)) == strip(video)).all()
    assert len(read_clip(str(folder / shown.video)).frames) == 5
    samples = [sample(video), sample(video[:3])]
    for full, size in ((False, (26, 256)), (True, (32, 320))):
        drawn = folders.Batch(1, 0, samples, [Score(1.0), Score(0.0)], [0, 0], metrics={}, notes=[])
        groups.save(run.path, 2, drawn, [1.0, -1.0], keep=1, full=full)
        (row,) = map(json.loads, (run.path / "groups/000002.jsonl").read_text().splitlines())
        assert row["samples"][1]["video"] == "000002/000-01.mp4"
        clip = read_clip(str(run.path / "groups" / row["samples"][1]["video"]))
        assert clip.frames.shape == (3, *size, 3) and clip.fps == row["samples"][1]["fps"]


def test_samples_to_one_file_or_a_folder(tmp_path: Path) -> None:
    source = type("Source", (), {"label": "base", "name": "wan"})()  # of a real model: test_cli.py
    result = sampling.ModelSamples(source, False, 1, 0, [sample(moving_bar())], [])
    files = sampling.save([result], tmp_path / "new" / "clip.mp4")
    assert files == {("wan", 0, 0): tmp_path / "new" / "clip.mp4"}
    assert len(read_clip(str(tmp_path / "new" / "clip.mp4")).frames) == 9
    (file,) = sampling.save([result], tmp_path / "all").values()
    assert file.name == "a-bar-moves_seed0-0_base.mp4" and len(list(file.parent.iterdir())) == 3
    sampling.save_sheet([result], tmp_path / "sheet.png")


def test_trackers_show_videos(tmp_path: Path) -> None:
    """The media that each of them makes, with its own package."""
    import swanlab
    import wandb

    run = folders.make(tmp_path, 0)
    run.save_samples(2, [sample(moving_bar(5, 32, 96), 8.0)], [Score(1.0)])
    samples = samples_of(run.path, 2)
    for kind, made in ((Wandb, wandb.Video), (SwanLab, swanlab.Video)):
        tracker: Any = kind.__new__(kind)  # without a service
        tracker.dir = run.path
        (shown,) = tracker._media(samples)["samples"]
        assert isinstance(shown, made)
    value = tensorboard._image(run.path, samples[0])
    with Image.open(io.BytesIO(value.image.encoded_image_string)) as gif:
        assert (gif.format, getattr(gif, "n_frames", 0), gif.info["duration"]) == ("GIF", 5, 120)
    client = Recorded()
    mlflow: Any = MLflow.__new__(MLflow)
    mlflow.dir, mlflow.client, mlflow.id = run.path, client, "run"
    mlflow._samples(2, samples)
    assert client.calls["log_artifact"][1:] == (
        str(run.path / "samples/000002/000.mp4"), "samples/000002",
    )  # fmt: skip
    assert client.calls["log_image"][1].width == strip(moving_bar(5, 32, 96)).shape[1]


class Recorded:
    """Of a client: the last call of each method."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **more: self.calls.__setitem__(name, given)


def test_a_damaged_row_is_skipped(tmp_path: Path) -> None:
    run = folders.make(tmp_path, 0)
    run.save_samples(2, [sample(moving_bar())], [Score(1.0)])
    file = run.path / "samples" / "000002.jsonl"
    row = json.loads(file.read_text())
    for wrong in ({"fps": None}, {"video": 3}):
        file.write_text(json.dumps(row | wrong) + "\n")
        assert samples_of(run.path, 2) == []
