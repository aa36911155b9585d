"""The report of a run folder: complete, self-contained, and whole whatever state the run is in."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gesso.track import report
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, Sample, Score, UserError

PROMPTS = ['a sign that says "OPEN"', "<script>alert(1)</script>", 'a" onerror="alert(2)']
STEPS = (0, 2, 4)
CONFIG = {
    "about": "signs & <b>words</b>",
    "seed": 7,
    "steps": 6,
    "model": {"path": "zoo:signs"},
    "algorithm": {"name": "flow-grpo"},
}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "first", CONFIG)
    for step in range(5):
        row: dict[str, float] = {"step": step}
        if step:
            row |= {"reward": 0.2 * step, "update/ratio": 1.0001, "time/step": 3.0}
            row |= {"time/total": 61.0 * step, "samples_per_s": 9.5}
        if step in STEPS:
            row |= {"eval/reward": 0.1 + 0.1 * step, "eval/ocr/exact": 0.125 * step}
            run.save_samples(step, *evaluation(step))
        run.append(row)
    run.note("step 3: <i>slow</i> worker")
    return run


def evaluation(step: int) -> tuple[list[Sample], list[Score]]:
    samples, scores = [], []
    for i, text in enumerate(PROMPTS):
        image = np.full((32, 96, 3), 40 * step + 10 * i, np.uint8)
        samples.append(Sample(Prompt(text), image, seed=100 + i))
        exact = float(step == 4 and i == 0)
        scores.append(Score(0.25 * i + exact, {"ocr/exact": exact}, text=f"<{step}{i}>"))
    scores[2] = Score.failed("worker died: <x>")
    return samples, scores


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {key: value or "" for key, value in attrs}))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.found if name == tag]


def built(run: RunFolder) -> str:
    path = report.write(run.path)
    assert path == run.path / "report.html"
    assert not list(run.path.glob(".report*"))
    return path.read_text("utf-8")


def test_all_figures_steps_and_pictures(run: RunFolder) -> None:
    page = built(run)
    assert "0.000 <i>→</i> 0.500" in page and "held-out eval/ocr/exact, step 0 → step 4" in page
    for fact in ("flow-grpo", "zoo:signs", "4 of 6", "7", "4:04", "9.5"):
        assert f"<dd>{fact}</dd>" in page
    for name in ("eval/ocr/exact", "eval/reward", "update/ratio", "time/step", "samples_per_s"):
        assert f"<figcaption>{name} " in page
    assert "<figcaption>update/kl" not in page  # NFT and others: what is absent is left out
    assert "<title>step 2: held-out 0.300</title>" in page
    for step in STEPS:
        assert f">step {step} <small>{0.125 * step:.3f}</small></th>" in page
    pictures = Tags(page).all("img")
    assert len(pictures) == len(STEPS) * len(PROMPTS)
    drawn = [base64.b64decode(p["src"].removeprefix("data:image/png;base64,")) for p in pictures]
    levels = [Image.open(io.BytesIO(data)).getpixel((0, 0)) for data in drawn]
    expected = [40 * step + 10 * i for i in range(len(PROMPTS)) for step in STEPS]
    assert levels == [(level,) * 3 for level in expected]  # a row a prompt, in the order of steps
    assert all((p["width"], p["height"]) == ("192", "64") for p in pictures)
    assert pictures[0]["alt"] == f"step 0: {PROMPTS[0]} (read: <00>)"


def test_exact_answers_are_marked(run: RunFolder) -> None:
    assert [cell["class"] for cell in Tags(built(run)).all("td")].count(" ok") == 1


def test_text_from_outside_is_escaped(run: RunFolder) -> None:
    page = built(run)
    tags = Tags(page)
    assert not tags.all("script") and not tags.all("x")
    assert not [attrs for _, attrs in tags.found if any(key.startswith("on") for key in attrs)]
    for text in ("&lt;script&gt;alert(1)", "worker died: &lt;x&gt;", "&lt;i&gt;slow", "&lt;40&gt;"):
        assert text in page
    assert "<h1>signs &amp; &lt;b&gt;words&lt;/b&gt;</h1>" in page


def test_nothing_is_fetched(run: RunFolder) -> None:
    page = built(run)
    assert "default-src 'none'" in page
    for _, attrs in Tags(page).found:
        assert "href" not in attrs
        assert attrs.get("src", "data:").startswith("data:")
    assert not re.search(r"url\(|@import|https?://", page)


def test_half_written_lines_are_named(run: RunFolder) -> None:
    with run.metrics_file.open("ab") as file:
        file.write(b'{"step": 5, "rew')
    with (run.path / "samples/000004.jsonl").open("ab") as file:
        file.write(b'{"index": 3}\n')
    page = built(run)
    assert "metrics.jsonl, line 6: half-written or damaged, left out" in page
    assert "000004.jsonl, line 4: half-written or damaged, left out" in page
    assert "4 of 6" in page


def test_damaged_and_missing_pictures_are_named(run: RunFolder) -> None:
    whole = (run.path / "samples/000002/000.png").read_bytes()
    (run.path / "samples/000000/000.png").write_bytes(b"no picture")
    (run.path / "samples/000002/000.png").write_bytes(whole[: len(whole) // 2])
    (run.path / "samples/000004/001.png").unlink()
    page = built(run)
    assert "000000/000.png cannot be read" in page
    assert "000002/000.png cannot be read" in page
    assert "000004/001.png is missing" in page
    assert len(Tags(page).all("img")) == 6


def test_only_pictures_of_the_run_come_in(run: RunFolder) -> None:
    Image.new("RGB", (8, 8)).save(run.path / "secret.png")
    file = run.path / "samples/000000.jsonl"
    file.write_text(file.read_text().replace("000000/000.png", "../secret.png"))
    assert "../secret.png is missing" in built(run)


def test_resumed_run(run: RunFolder) -> None:
    """After `rewind` the pictures of step 4 lie beyond the metrics; time/total goes on."""
    run.rewind(3)
    assert ">step 4 <small>not in metrics.jsonl</small>" in built(run)
    run.append({"step": 4, "reward": 0.9, "time/total": 193.0})
    assert "<dd>3:13</dd>" in built(run)


def test_not_a_number_is_named(run: RunFolder) -> None:
    run.append({"step": 5, "reward": float("nan"), "update/grad_norm": float("inf")})
    page = built(run)
    assert "reward is nan at step 5" in page and "update/grad_norm is inf at step 5" in page


def test_empty_and_barely_begun_runs(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "second", {"steps": 6})
    page = built(run)
    assert "no evaluation yet" in page and "No evaluation has saved pictures yet" in page
    assert "<h1>second</h1>" in page
    run.append({"step": 0, "eval/reward": 0.25})
    assert '<p class="head">0.250</p><i>held-out eval/reward, step 0</i>' in built(run)
    (tmp_path / "bare").mkdir()
    assert "no evaluation yet" in report.write(tmp_path / "bare").read_text()
    (run.path / "config.toml").write_text("steps = ")
    assert "config.toml cannot be read" in built(run)


def test_large_pictures_are_made_smaller(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "large", {})
    noise = np.random.default_rng(0).integers(0, 255, (512, 1024, 3), np.uint8)
    run.save_samples(0, [Sample(Prompt("noise"), noise, 0)], [Score(0.5)])
    (picture,) = Tags(built(run)).all("img")
    assert picture["src"].startswith("data:image/jpeg;base64,")
    assert (picture["width"], picture["height"]) == ("320", "160")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder at"):
        report.write(tmp_path / "absent")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.05, 0.66, [0.0, 0.2, 0.4, 0.6, 0.8]),
        (0.9996, 1.0004, [0.9996, 0.9998, 1.0, 1.0002, 1.0004]),
        (0.0, 0.0, [0.0, 0.5, 1.0]),
        (-3.0, 5.0, [-4.0, -2.0, 0.0, 2.0, 4.0, 6.0]),
    ],
)
def test_ticks_are_round_and_enclose(low: float, high: float, expected: list[float]) -> None:
    assert report.ticks(low, high, 4) == pytest.approx(expected)
