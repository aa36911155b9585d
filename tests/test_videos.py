"""A run of Wan, tiny, with random weights: its videos as files, scores, samples and in the card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

import gesso
from gesso import build, cli, run, video_files
from gesso.track.trackers.base import samples_of
from gesso.types import UserError
from gesso.use import pairs
from gesso.video_files import read_clip
from tests import pipelines, video_cards
from tests.conftest import small_recipe

ROWS: list[dict[str, Any]] = [
    {"prompt": "a red sign", "direction": "left", "frames": 5, "fps": 8},
    {"prompt": "a dog", "direction": "up", "frames": None, "fps": None},
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
    rewards = ["--reward", "motion", "--reward", "sign-motion"]
    assert cli.main([*command, str(out), *rewards]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{out}  motion ") and ", no score: sign-motion: expected a" in line
    for wrong, message in {
        "x.png": "x.png: expected a file that ends in .mp4",
        "x.avi": "x.avi: expected a file that ends in .mp4",
        "x --sheet x.mp4": "--sheet x.mp4: expected the name of an image file, such as sheet.png",
        "x.mp4 --n 2": "is a file for one sample; give one prompt, or a folder",
    }.items():
        assert cli.main([*command, *wrong.split()]) == 2
        assert message in capsys.readouterr().err
    (clip,) = gesso.load(folder / "run").sample("a dog")
    with pytest.raises(UserError, match=r"expected a name that ends in \.mp4, got a\.png"):
        clip.save("a.png")
    clip.save(folder / "same.mp4")
    assert (folder / "same.mp4").read_bytes() == out.read_bytes() and clip.frames.shape[0] == 5


def test_the_code_of_the_card_makes_the_same_video(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = gesso.load(folder / "run")
    export = tmp_path / "export"
    code = video_cards.check(loaded, "text-to-video", "a red sign", export, monkeypatch)
    assert 'export_to_video(video, "video.mp4", fps=8)' in code


@pytest.mark.parametrize(
    "row, message",
    [
        ({"frames": 81}, "rows.jsonl:1: frames is 81, but all .* model.frames = 5; change"),
        ({"fps": 24}, "rows.jsonl:1: fps is 24, but all samples .* model.fps = 8; change"),
        ({"frames": "lots"}, "rows.jsonl:1: frames is 'lots', not a number; expected 5, or no"),
    ],
)
def test_rows_of_other_lengths(
    folder: Path, tmp_path: Path, row: dict, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = recipe(folder, [{"prompt": "a", **row}])
    with pytest.raises(UserError, match=message):
        run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)
    for command in ("sample", "eval"):
        assert cli.main([command, str(folder / "run"), "--prompts", data["data"]["train"]]) == 2
        error = capsys.readouterr().err
        assert re.search(message.replace("model.frames", "eval.frames"), error)


def test_evaluations_of_lengths_that_the_model_does_not_support(folder: Path) -> None:
    data = recipe(folder, ROWS)
    data["eval"] |= {"frames": 8}
    with pytest.raises(UserError, match=r"^eval.frames = 8: .* videos of 8 frames: .*; use 9"):
        run.assemble(build.recipe_from(data))


def given(folder: Path, train: Path, algorithm: dict[str, Any], **model: Any) -> dict[str, Any]:
    """The recipe on samples of the data."""
    data = recipe(folder, ROWS, **model)
    data["data"] |= {"train": str(train)}
    return data | {"algorithm": algorithm, "sampler": {"batch": 4, "engine": "data"}}


def test_training_on_pairs_of_a_run(folder: Path, tmp_path: Path) -> None:
    """The best and the worst video of each group, in offline DPO; evaluations have more frames."""
    result = pairs.write(folder / "run", tmp_path / "pairs.jsonl", 0.0)
    rows = [json.loads(line) for line in result.file.read_text().splitlines()]
    assert result.pairs == len(rows) == 2 and all(r["chosen"].endswith(".mp4") for r in rows)
    data = given(folder, result.file, {"name": "flow-dpo", "group": 2, "guidance": 1.0})
    data["data"] |= {"eval": [{"path": data["data"]["eval"], "drop": ["frames"]}]}
    data["eval"] |= {"frames": 9, "prompts": 1}
    run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["update/grad_norm"] > 0 and row["eval/jpeg-compressibility"] < 0
    (shown,) = samples_of(tmp_path / "run", 1)
    assert len(read_clip(str(tmp_path / "run" / "samples" / shown.video)).frames) == 9
    kept = json.loads((tmp_path / "run" / "groups" / "000001.jsonl").read_text().splitlines()[0])
    (chosen,) = [r["chosen"] for r in rows if r["prompt"] == kept["prompt"]]
    trained = read_clip(str(tmp_path / "run" / "groups" / kept["samples"][0]["video"])).frames
    assert np.abs(trained - read_clip(str(tmp_path / chosen)).frames.astype(int)).mean() < 4


def test_a_check_reports_clips(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torn.mp4").write_bytes(b"torn")
    frames: np.ndarray = np.zeros((3, 32, 32, 3), np.uint8)
    video_files.Clip(frames, 4).save(tmp_path / "slow.mp4")
    (clip, *_) = sorted((folder / "run" / "groups").glob("*/*.mp4"))  # 5 frames at 8 a second
    rows = [{"prompt": "a", "video": str(name)} for name in (clip, "torn.mp4", "slow.mp4")]
    (tmp_path / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    broken = "clips.jsonl:2: clip 1 of 1: "
    repeated = ["1 of 2 clips", "than model.fps = 8 and their frames are", "slow.mp4 with 4; set"]
    for model, code, messages in (
        ({"height": 32}, 0, [broken, "as a video", "clips of", "enlarged", *repeated]),
        ({"frames": 9}, 2, ["lasts 0.625 seconds, shorter than model.frames = 9 at model.fps = 8"]),
    ):
        data = given(folder, tmp_path / "clips.jsonl", {"name": "flow-sft"}, **model)
        (tmp_path / "recipe.toml").write_text(tomli_w.dumps(data))
        assert cli.main(["check", str(tmp_path / "recipe.toml")]) == code
        shown = capsys.readouterr()
        assert all(message in shown.out + shown.err for message in messages)


def test_a_machine_without_an_encoder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video_files, "ENCODERS", ("libnothing",))
    with pytest.raises(UserError, match="has no encoder for MP4"):
        run.train(build.recipe_from(recipe(folder, ROWS)), folder=tmp_path / "run", quiet=True)
