"""What can be taken away: films, sheets and the report."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from gesso import cli
from gesso.use import sheets
from gesso.viewer import files, film, report
from gesso.viewer.files import NotShown, Thumbnails
from gesso.viewer.reading import RunReader
from tests.viewer import folders, site


@pytest.fixture
def reader(tmp_path: Path) -> RunReader:
    run = folders.make(tmp_path / "one", 4)
    for step, shade in ((0, 40), (2, 120), (4, 200)):
        folders.evaluate(run, step, ["a <b>sign</b>", "another"], shade)
    folders.batch(run, 4, [0.5, -0.5])
    return RunReader(run.path)


def shade(picture: Image.Image) -> int:
    return int(np.asarray(picture.convert("RGB"))[10, 10, 0])


def test_a_gif_shows_every_evaluation_in_order(reader: RunReader) -> None:
    made = Image.open(io.BytesIO(film.gif(film.frames(reader, 1))))
    seen, times = [], []
    for i in range(made.n_frames):  # type: ignore[attr-defined]
        made.seek(i)
        seen.append(shade(made))
        times.append(made.info["duration"])
    assert np.abs(np.array(seen) - [41, 121, 201]).max() < 6
    assert times[0] == times[1] and times[2] == pytest.approx(4 * times[0], abs=10)


def test_an_mp4_shows_every_evaluation_and_rests_at_the_end(reader: RunReader) -> None:
    av = pytest.importorskip("av", reason='a film as MP4 needs PyAV: pip install "gesso[viewer]"')
    data = film.mp4(film.frames(reader, 0))
    with av.open(io.BytesIO(data)) as opened:
        stream = opened.streams.video[0]
        assert stream.codec_context.name == "h264" and stream.width % 2 == 0
        seen = [shade(frame.to_image()) for frame in opened.decode(stream)]
    assert len(seen) == 6 and np.abs(np.array(seen[:3]) - [40, 120, 200]).max() < 10
    assert max(seen[3:]) - min(seen[2:]) < 6


def test_small_images_are_magnified_and_captioned(reader: RunReader) -> None:
    (first, *_) = film.frames(reader, 0)
    assert first.width == 384 and first.height == 128 + film.CAPTION
    below = np.asarray(first)[130:]
    assert below.min() < 160 < below.max()  # ink on paper


def test_a_damaged_image_is_grey_and_the_others_are_there(reader: RunReader) -> None:
    (reader.path / "samples/000002/000.png").write_bytes(b"no picture")
    assert [shade(frame) for frame in film.frames(reader, 0)] == [40, 200, 200]


def test_a_sheet_has_a_row_for_each_prompt(reader: RunReader) -> None:
    made = Image.open(io.BytesIO(film.sheet(reader)))
    image = np.asarray(made.convert("RGB"))
    high, wide = 80 + 2 * sheets.LINE + sheets.GAP, 240 + sheets.GAP  # 24 × 8, ten times
    top = sheets.GAP + sheets.LINE
    assert image.shape[:2] == (top + 2 * high, sheets.GAP + 3 * wide)
    seen = [
        [image[top + sheets.LINE + 5 + i * high, 20 + place * wide, 0] for place in range(3)]
        for i in range(2)
    ]
    assert seen == [[40, 120, 200], [41, 121, 201]]


def test_a_run_that_writes_has_no_film(tmp_path: Path) -> None:
    reader = RunReader(folders.make(tmp_path / "w", 1).path)
    with pytest.raises(NotShown, match="no samples of prompt 0"):
        film.frames(reader, 0)


def inside(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="inside">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found.group(1))


def test_the_report_has_all_answers_and_images_inside(reader: RunReader) -> None:
    page = report.page({"one": reader})
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched
    data = inside(page)
    answers, pictures = data["answers"], data["images"]["one"]
    assert [row["id"] for row in answers["/api/runs"]] == ["one"]
    assert answers["/api/curves?run=one"]["series"]["reward"]["y"] == [0.1, 0.2, 0.3, 0.4]
    evolution = answers["/api/evolution?run=one"]
    named = [c["image"] for p in evolution["prompts"] for c in p["cells"]]
    groups = answers["/api/groups?run=one&step=4"]
    named += [s["image"] for g in groups for s in g["samples"]]
    assert len(named) == 8 and set(named) == set(pictures)
    assert all(uri.startswith("data:image/webp;base64,") for uri in pictures.values())
    assert "config" in answers["/api/run?run=one"]


def test_the_report_of_a_long_run_is_of_bounded_size(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "long", 40)
    for step in range(40):
        folders.evaluate(run, step, [f"prompt {i}" for i in range(30)])
    data = inside(report.page({"long": RunReader(run.path)}))
    evolution = data["answers"]["/api/evolution?run=long"]
    assert len(evolution["steps"]) == 12 and evolution["steps"][0::11] == [0, 39]
    assert len(evolution["prompts"]) == 24 and len(data["images"]["long"]) == 24 * 12


def test_a_prompt_cannot_end_the_script_that_contains_it(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "one", 1, about="</script><script>alert(1)</script>")
    folders.evaluate(run, 0, ["</script><img src=x onerror=alert(1)>"])
    page = report.page({"</title><script>": RunReader(run.path)})
    assert "<img src=x" not in page and "<script>alert" not in page
    assert "</title><script>" not in page
    assert "<title>gesso · &lt;b&gt;</title>" in report.page({"<b>": RunReader(run.path)})
    data = inside(page)
    prompt = data["answers"]["/api/evolution?run=%3C%2Ftitle%3E%3Cscript%3E"]["prompts"][0]
    assert prompt["prompt"] == "</script><img src=x onerror=alert(1)>"


def test_the_command_writes_the_report(
    reader: RunReader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out" / "r.html"
    assert cli.main(["view", str(reader.path), "--report", str(target)]) == 0
    assert str(target) in capsys.readouterr().out
    assert inside(target.read_text())["answers"]["/api/runs"][0]["id"] == "one"
    assert cli.main(["view", str(tmp_path / "gone"), "--report", str(target)]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_report_of_nothing_or_over_a_folder_is_a_sentence(
    reader: RunReader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert cli.main(["view", str(tmp_path / "empty"), "--report", str(tmp_path / "r.html")]) == 2
    assert "no run under" in capsys.readouterr().err
    assert cli.main(["view", str(reader.path), "--report", str(tmp_path / "empty")]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*.new"))
    (tmp_path / "file").touch()
    assert cli.main(["view", str(reader.path), "--report", str(tmp_path / "file" / "r.html")]) == 2
    assert "cannot be created: file is a file" in capsys.readouterr().err


def test_captions_have_step_and_reward_in_order(
    reader: RunReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    plain = film._captioned

    def captioned(image: Image.Image, text: str) -> Image.Image:
        told.append(text)
        return plain(image, text)

    monkeypatch.setattr(film, "_captioned", captioned)
    film.frames(reader, 0)
    assert told == ["step 0   0.000", "step 2   0.200", "step 4   0.400"]


def test_a_magnified_image_keeps_its_pixels(reader: RunReader) -> None:
    run = reader.path
    stripes: Any = np.zeros((8, 24, 3), np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(run / "samples/000000/000.png")
    seen = np.asarray(film.frames(reader, 0)[0])[:128, :, 0]
    assert set(np.unique(seen)) == {0, 255} and (seen[:, :16] == 255).all()


def test_a_sheet_of_a_long_run_includes_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folders.make(tmp_path / "long", 14)
    for step in range(14):
        folders.evaluate(run, 2 * step, [f"p{i}" for i in range(25 if step == 13 else 2)])
    asked: list[tuple] = []

    def sheet(*given: Any) -> Image.Image:
        asked.append(given)
        return Image.new("RGB", (1, 1))

    monkeypatch.setattr(sheets, "sheet", sheet)
    film.sheet(RunReader(run.path))
    ((rows, titles, sources),) = asked
    assert len(rows) == 24 and len(titles) == 12 and sources == [[]] * 24
    assert (titles[0], titles[-1]) == ("step 0", "step 26")
    assert [rows[0].cells[i].caption for i in (0, -1)] == ["0.000", "2.600"]
    assert (rows[2].cells[0].caption, rows[2].cells[-1].caption) == ("no image", "2.600")


def test_the_report_has_the_images_that_were_shown(tmp_path: Path) -> None:
    run = site.writing(tmp_path / "count")
    (run.path / "groups" / "000002").mkdir(parents=True)
    name = "000002/000-shown-1.webp"
    Image.new("RGB", (1000, 500), "red").save(run.path / "groups" / name)
    group = {"group": 0, "prompt": "How many?", "shown": [name], "samples": [], "share": 0.0}
    (run.path / "groups" / "000002.jsonl").write_text(json.dumps(group) + "\n")
    found = inside(report.page({"count": RunReader(run.path)}))["images"]["count"]
    assert set(found) == {"samples/prompts/000-1.png", f"groups/{name}"}
    data = base64.b64decode(found[f"groups/{name}"].partition(",")[2])
    assert Image.open(io.BytesIO(data)).size == (384, 192), "small, to be sent"


def test_the_next_report_makes_only_images_that_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, made, encode = site.writing(tmp_path / "count"), Thumbnails(), Mock(wraps=files.encode)
    monkeypatch.setattr(files, "encode", encode)
    one, same = (report.page({"count": RunReader(run.path)}, made) for _ in range(2))
    assert one == same and encode.call_count == 1
    file = run.path / "samples/prompts/000-1.png"
    Image.new("RGB", (40, 20), "red").save(file)
    os.utime(file, (0, 0))
    assert report.page({"count": RunReader(run.path)}, made) != one and encode.call_count == 2


def test_the_report_runs_its_own_script_and_no_other(reader: RunReader) -> None:
    page = report.page({"one": reader})
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    parts = dict(part.strip().split(" ", 1) for part in policy[1].split(";"))
    assert parts["script-src"] == f"'sha256-{digest}'" and parts["default-src"] == "'none'"
    assert page.count("<script") == 2, "the other one is data"
