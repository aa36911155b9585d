"""Runs of tiny Wan models that continue an image: samples, rewards, page, playground, card."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import gesso
from gesso import build, cli, run
from gesso.track.progress import SILENT
from gesso.track.trackers.base import samples_of
from gesso.types import UserError
from gesso.video_files import read_clip
from gesso.viewer import report
from gesso.viewer.playground import PlaygroundRequest
from gesso.viewer.reading import RunReader
from gesso.viewer.studio import Studio
from tests import pipelines, video_cards
from tests.conftest import small_recipe

SIZES = {"wan-i2v": (16, 32), "wan-ti2v": (32, 64)}
FRAMES = 5


@pytest.fixture(scope="module", params=SIZES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step over two images, which are not of the size of the videos. The samples of
    TI2V have the same first frame, and so the same score."""
    made = tmp_path_factory.mktemp(request.param)
    pipelines.build(request.param, made / "model", num_layers=1)
    rows = []
    for i in range(2):
        noise = np.random.default_rng(i).integers(0, 256, (40, 70, 3), np.uint8)
        Image.fromarray(noise).save(made / f"{i}.png")
        rows.append({"prompt": f"it moves {'up' * i}", "image": f"{i}.png"})
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.train(build.recipe_from(recipe(made)), folder=made / "run", quiet=True)
    return made


def recipe(made: Path) -> dict[str, Any]:
    data = small_recipe(made / "model", made / "rows.jsonl")
    pinned = "ti2v" in made.name
    height, width = SIZES["wan-ti2v" if pinned else "wan-i2v"]
    data["model"] = {
        "name": "wan-i2v", "path": str(made / "model"), "lora": {"rank": 2, "alpha": 4},
        "height": height, "width": width, "frames": FRAMES, "fps": 8.0, "device": "cpu",
    }  # fmt: skip
    data["reward"] = [{"name": "first-frame"}, {"name": "temporal-consistency"}]
    data |= {"steps": 1, "eval": {"every": 1, "prompts": 2, "steps": 2}}
    data["algorithm"] |= {"group": 2, "steps": 2}
    return data


def test_the_run_and_its_page(folder: Path) -> None:
    done = RunReader(folder / "run")
    (row,) = [row for row in done.rows() if "time/update" in row]
    assert row["update/grad_norm"] > 0
    for step in (0, 1):
        for shown in samples_of(folder / "run", step):
            clip = read_clip(str(folder / "run" / "samples" / shown.video))
            assert clip.frames.shape[0] == FRAMES and 0 < shown.parts["first-frame"] <= 1
    page = report.page({"run": done})
    assert page.count("data:video/mp4") == 4


def test_samples_of_an_image(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line, the playground and the card's code."""
    image, out = folder / "0.png", folder / "clip.mp4"
    command = ["sample", str(folder / "run"), "it moves", "--out", str(out)]
    assert cli.main(command) == 2
    assert "expected 1 input image, got 0" in capsys.readouterr().err
    assert cli.main([*command, "--image", str(image)]) == 0
    upload = base64.b64encode(image.read_bytes()).decode()
    studio = Studio()
    request = PlaygroundRequest(run="run", prompt="it moves", images=[upload])
    (cell,) = studio.generate(folder / "run", request, SILENT)["trained"]
    studio.close()
    shown = read_clip(base64.b64decode(cell["video"].partition(",")[2])).frames
    assert np.abs(shown.astype(int) - read_clip(str(out)).frames).mean() < 1
    assert 0 < cell["parts"]["first-frame"] <= 1


def test_the_code_of_the_card_makes_the_same_video(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = gesso.load(folder / "run")
    export = tmp_path / "export"
    video_cards.check(loaded, "image-to-video", "it moves ", export, monkeypatch)


def test_training_on_clips(folder: Path, tmp_path: Path) -> None:
    """A row without an image continues the first frame of its clip."""
    clip = next((folder / "run" / "samples").glob("*/*.mp4"))
    row = {"prompt": "it moves", "video": str(clip)}
    (tmp_path / "clips.jsonl").write_text(json.dumps(row) + "\n")
    data = recipe(folder) | {
        "algorithm": {"name": "flow-sft"}, "sampler": {"batch": 2, "engine": "data"},
    }  # fmt: skip
    data["data"] |= {"train": str(tmp_path / "clips.jsonl"), "groups": 1}
    data["eval"] |= {"prompts": 1, "steps": 1}
    run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)
    (done,) = [row for row in RunReader(tmp_path / "run").rows() if "time/update" in row]
    assert done["update/grad_norm"] > 0
    (kept,) = map(json.loads, (tmp_path / "run" / "groups" / "000001.jsonl").open())
    assert len(kept["shown"]) == 1


def test_a_row_without_an_image(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"prompt": "it moves"}\n')
    data = recipe(folder) | {"reward": [{"name": "temporal-consistency"}]}
    data["data"] |= {"train": str(tmp_path / "text.jsonl")}
    with pytest.raises(UserError, match=r'text.jsonl:1: .* a column "image", .*name = "wan"$'):
        run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)
