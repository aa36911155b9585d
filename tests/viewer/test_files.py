"""What may be found and read under a folder of runs, and what is sent of it; without a browser."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gesso.viewer import files
from gesso.viewer.files import NotShown, Thumbnails, encode, find_runs, image_file
from gesso.viewer.reading import RunReader
from tests.viewer import folders


def test_folders_that_hold_no_runs_are_not_searched(tmp_path: Path) -> None:
    for name in ("one", "a/b/c", ".trash/two", "one/copy", "a/b/d/e"):
        folders.make(tmp_path / name, 0)
    assert list(find_runs(tmp_path)) == ["a/b/c", "one"]


def test_a_name_that_only_begins_like_an_image_is_none(tmp_path: Path) -> None:
    beside = tmp_path / "samples/000004/000.png.key"
    beside.parent.mkdir(parents=True)
    beside.write_text("secret")
    with pytest.raises(NotShown, match="is not the name of an image"):
        image_file(tmp_path, "samples/000004/000.png.key")


def test_a_folder_of_samples_behind_a_link_is_not_read(tmp_path: Path) -> None:
    elsewhere = folders.make(tmp_path / "elsewhere", 2)
    folders.evaluate(elsewhere, 2, ["secret"])
    folders.batch(elsewhere, 2, [0.5, -0.5])
    run = folders.make(tmp_path / "run", 2)
    for name in ("samples", "groups"):
        (run.path / name).symlink_to(elsewhere.path / name)
    assert RunReader(elsewhere.path).groups(2) != []
    assert RunReader(run.path).evolution()["prompts"] == [] and RunReader(run.path).groups(2) == []


def test_small_images_are_sent_exactly_and_bombs_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (8, 24, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    sent = Image.open(io.BytesIO(encode(tmp_path / "a.png", 96))).convert("RGB")
    assert np.array_equal(np.asarray(sent), noise)
    monkeypatch.setattr(files, "MAX_PIXELS", 8 * 24 - 1)
    with pytest.raises(NotShown, match="24 × 8 pixels, which is too many"):
        encode(tmp_path / "a.png", 96)


def test_the_small_version_least_recently_used_is_forgotten(tmp_path: Path) -> None:
    made = {}
    for name in "abc":
        made[name] = tmp_path / f"{name}.png"
        Image.fromarray(folders.picture(90)).save(made[name])
    small = Thumbnails(limit=2 * len(encode(made["a"], 96)))
    for name in "abac":
        small.get(made[name], 96)
    assert [path.stem for path, *_ in small._made] == ["a", "c"]
