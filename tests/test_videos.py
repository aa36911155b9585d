"""A run of Wan, tiny, with random weights: its videos as files, scores, samples and in the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gesso
from gesso import build, cli, run, video_files
from gesso.track.trackers.base import samples_of
from gesso.types import UserError
from gesso.use import pairs
from gesso.video_files import read_clip
from tests import pipelines
from tests.conftest import small_recipe

ROWS: list[dict[str, Any]] = [
    {"prompt": "a red sign", "direction": "left", "frames": 5, "fps": 8},
    {"prompt": "a dog", "direction": "up"},
]


def recipe(folder: Path, rows: list[dict[str, Any]], **model: Any) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = small_recipe(folder / "wan", file)
    size = {"height": 16, "width": 32, "frames": 5, "fps": 8.0, "text_length": 16}
    data["model"] = {"name": "wan", "path": str(folder / "wan"), "lora": {"rank": 2, "alpha": 4}}
    data["model"] |= size | model
    data["reward"] = [
        {"name": "jpeg-compressibility", "frames": "worst", "every": 2},
        {"name": "jpeg-incompressibility"},  # the mean over all frames
    ]
    data |= {"steps": 1, "eval": {"every": 1, "prompts": 2, "steps": 2}}
    data["algorithm"] |= {"group": 2, "steps": 2}
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("videos")
    pipelines.build("wan", made / "wan", num_layers=1)
    run.train(build.recipe_from(recipe(made, ROWS)), folder=made / "run", quiet=True)
    return made


def test_a_run_keeps_and_scores_its_videos(folder: Path) -> None:
    for step in (0, 1):
        for shown in samples_of(folder / "run", step):
            clip = read_clip(str(folder / "run" / "samples" / shown.video))
            assert clip.frames.shape == (5, 16, 32, 3) and clip.fps == shown.fps == 8
            worst = shown.parts["jpeg-compressibility"]
            mean = shown.parts["jpeg-incompressibility"]
            assert worst <= -mean < 0
    assert len(list((folder / "run" / "groups").glob("*/*.mp4"))) == 4


def test_samples_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out" / "clip.mp4"
    command = ["sample", str(folder / "run"), "a dog", "--out"]
    assert cli.main([*command, str(out), "--reward", "motion"]) == 0
    assert f"{out}  motion " in capsys.readouterr().out
    for wrong, message in {
        "x.png": "x.png: expected a file that ends in .mp4",
        "x.mp4 --n 2": "is a file for one sample; give one prompt, or a folder",
    }.items():
        assert cli.main([*command, *wrong.split()]) == 2
        assert message in capsys.readouterr().err
    (clip,) = gesso.load(folder / "run").sample("a dog")
    clip.save(folder / "same.mp4")
    assert (folder / "same.mp4").read_bytes() == out.read_bytes() and clip.frames.shape[0] == 5


def test_the_code_of_the_card_makes_the_same_video(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = gesso.load(folder / "run")
    card = (loaded.export(tmp_path / "export") / "README.md").read_text()
    assert "pipeline_tag: text-to-video" in card
    code = card.partition("```python\n")[2].partition("\n```")[0]
    assert 'export_to_video(video, "video.mp4", fps=8)' in code
    code = code.replace("from diffusers.utils import export_to_video", "")  # it needs OpenCV
    made: dict[str, Any] = {"export_to_video": lambda *given, **more: None}
    monkeypatch.chdir(tmp_path / "export")
    exec(code, made)
    (clip,) = loaded.sample("a red sign")
    assert np.abs(np.asarray(made["video"]) * 255 - clip.frames).max() <= 1


@pytest.mark.parametrize(
    "row, message",
    [
        ({"frames": 81}, "rows.jsonl:1: frames is 81, but all samples .* model.frames = 5; change"),
        ({"fps": 24}, "rows.jsonl:1: fps is 24, but all samples .* model.fps = 8; change"),
    ],
)
def test_rows_of_other_lengths(folder: Path, tmp_path: Path, row: dict, message: str) -> None:
    data = recipe(folder, [{"prompt": "a", **row}])
    with pytest.raises(UserError, match=message):
        run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)


def test_what_takes_images_only(folder: Path) -> None:
    with pytest.raises(UserError, match="generated videos; data pairs makes pairs of images"):
        pairs.write(folder / "run", None, 0.0)
    data = recipe(folder, ROWS) | {
        "algorithm": {"name": "flow-sft"}, "sampler": {"batch": 4, "engine": "data"},
    }  # fmt: skip
    with pytest.raises(UserError, match=r'"data" trains on images, but model.frames = 5; set it'):
        build.recipe_from(data)


def test_a_machine_without_an_encoder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video_files, "ENCODERS", ("libnothing",))
    with pytest.raises(UserError, match="has no encoder for MP4"):
        run.train(build.recipe_from(recipe(folder, ROWS)), folder=tmp_path / "run", quiet=True)
