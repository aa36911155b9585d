"""The report of a run folder: complete, self-contained, and whole whatever state the run is in."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gesso.track import report, samples
from gesso.track.run_folder import RunFolder
from gesso.types import Picture, Prompt, Sample, Score, UserError

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
    drawn, scores = [], []
    for i, text in enumerate(PROMPTS):
        image = np.full((32, 96, 3), 40 * step + 10 * i, np.uint8)
        drawn.append(Sample(Prompt(text), image, seed=100 + i))
        exact = float(step == 4 and i == 0)
        scores.append(Score(0.25 * i + exact, {"ocr/exact": exact}, text=f"<{step}{i}>"))
    scores[2] = Score.failed("worker died: <x>")
    return drawn, scores


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
        assert f'aria-label="{name}"' in page
    assert 'aria-label="update/kl"' not in page  # NFT and others: what is absent is left out
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


QUESTION = "How many <b>stars</b>?"
LONG = "<think>" + "one more star. " * 60 + "</think><answer>61</answer>"
PIXEL = io.BytesIO()
Image.new("RGB", (8, 8), (9, 8, 7)).save(PIXEL, "PNG")


def replies(run: RunFolder, *courses: tuple[Prompt, list[str], list[float | None]]) -> str:
    """The page of a run in which each prompt got these replies and rewards at steps 0, 5, 10 …"""
    for number in range(len(courses[0][1])):
        drawn, scores = [], []
        for prompt, texts, rewards in courses:
            value = rewards[number]
            parts = {} if value is None else {"count": value, "count/answered": 1.0}
            drawn.append(Sample(prompt, None, 1, texts[number]))
            scores.append(Score(value, parts) if value is not None else Score.failed("gone & lost"))
        run.save_samples(5 * number, drawn, scores)
        run.append({"step": 5 * number, "eval/reward": 0.1 * number, "reply/length": 7.5})
    return built(run)


def asked(text: str = QUESTION, answer: object = 4, pictures: int = 1) -> Prompt:
    given = tuple(Picture(data=PIXEL.getvalue()) for _ in range(pictures))
    return Prompt(text, columns={"answer": answer}, images=given)


@pytest.fixture
def empty(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "writes", {"steps": 20})


def parts_of(page: str) -> list[str]:
    """The cards, in order."""
    return [part.split("</article>")[0] for part in page.split("<article>")[1:]]


def test_a_card_has_picture_question_answer_replies_and_rewards(empty: RunFolder) -> None:
    page = replies(empty, (asked(), ["it is 3", "it is 4", "it is 4", "no"], [0, 1, 1, 0]))
    (card,) = parts_of(page)
    (picture,) = Tags(page).all("img")  # once, not once an evaluation
    assert picture["alt"] == f"picture of the prompt: {QUESTION}"
    shown = base64.b64decode(picture["src"].removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(shown)).getpixel((0, 0)) == (9, 8, 7)
    assert (
        "How many &lt;b&gt;stars&lt;/b&gt;?" in card and 'wanted <div class="says">4</div>' in card
    )
    lines = card.split("<li")[1:]
    assert [line.split(">")[0] for line in lines] == [
        ' class=" no"',
        ' class=" ok mid"',
        ' class=" no"',
    ]
    assert "<b>step 0</b>" in lines[0] and "0.000" in lines[0] and "it is 3" in lines[0]
    assert "<b>step 5 – 10<small>the same 2 times</small></b>" in lines[1]
    assert "1.000<em>newly right</em>" in lines[1] and "it is <mark>4</mark>" in lines[1]
    assert "0.000<em>newly wrong</em>" in lines[2] and "<mark>" not in lines[2]  # nothing alike
    assert 'aria-label="reply/length"' in page and 'id="ends"' in page


def test_what_was_lost_comes_first_and_what_was_always_right_is_closed(empty: RunFolder) -> None:
    page = replies(
        empty,
        (asked("right"), ["4", "4", "4"], [1, 1, 1]),
        (asked("wrong"), ["1", "2", "2"], [0, 0, 0]),
        (asked("learnt"), ["1", "4", "4"], [0, 1, 1]),
        (asked("wavered"), ["1", "4", "2"], [0, 1, 0]),
        (asked("lost"), ["4", "4", "1"], [1, 1, 0]),
        (asked("failed"), ["4", "4", "1"], [None, 1, 0]),
    )
    order = ["lost", "learnt", "wavered", "wrong", "failed", "right"]
    assert [next(n for n in order if f">{n}<" in card) for card in parts_of(page)] == order
    heads = re.findall(r"<details (\w*) class='group'><summary>(.*?) <small>(\d)", page)
    assert heads == [
        ("open", "lost: right at step 0, wrong at step 10", "1"),
        ("open", "learnt: wrong at step 0, right at step 10", "1"),
        ("open", "wrong at step 0 and at step 10", "2"),
        ("open", "without a score at the beginning or the end", "1"),
        ("", "right at step 0 and at step 10", "1"),
    ]
    assert "no score: gone &amp; lost" in page


def test_where_nothing_tells_right_from_wrong_the_reward_does(empty: RunFolder) -> None:
    for step, values in ((0, (0.5, 0.2, 0.4)), (5, (0.25, 0.9, 0.4))):
        said = [Sample(asked(f"p{i}", None, 0), None, 1, f"say {step}") for i in range(3)]
        empty.save_samples(step, said, [Score(v, {"judge": v, "neat": 1}) for v in values])
    page = built(empty)
    assert not Tags(page).all("img") and "wanted" not in page
    assert ["<em>▼ 0.250</em>" in parts_of(page)[0], "<em>▲ 0.700</em>" in parts_of(page)[1]] == [
        1,
        1,
    ]
    assert "<em>" not in parts_of(page)[2]
    assert "<small>judge 0.25, neat 1</small>" in page
    assert "lower reward at step 5 than at step 0" in page and ' ok"' not in page


def test_long_replies_are_folded_and_unchanged_ones_dim(empty: RunFolder) -> None:
    page = replies(empty, (asked(answer=[1, 2], pictures=2), [LONG, LONG, ""], [0, 0.5, 0.5]))
    (card,) = parts_of(page)
    assert card.count('<details class="says"><summary><span>&lt;think&gt;one more star.') == 2
    assert (
        "… " in card
        and f"&lt;answer&gt;61&lt;/answer&gt;</span> <small>{len(LONG)} characters" in card
    )
    assert card.count('<div class="same">') == 1 and "<i>empty</i>" in card
    assert 'wanted <div class="says">[1, 2]</div>' in card
    alts = [picture["alt"] for picture in Tags(page).all("img")]
    assert alts == [f"picture {i} of 2 of the prompt: {QUESTION}" for i in (1, 2)]


def test_text_of_replies_is_escaped(empty: RunFolder) -> None:
    bad = "<img src=x onerror=alert(1)>"
    page = replies(empty, (asked(bad, bad, 0), [bad, f"{bad} {bad}", bad * 30], [0, 0, 1]))
    tags = Tags(page)
    assert not tags.all("img") and "<mark> &lt;img src=x" in page
    assert not [attrs for _, attrs in tags.found if any(key.startswith("on") for key in attrs)]


@pytest.mark.parametrize(
    "damage",
    [{"shown": "a.png"}, {"shown": [3]}, {"reply": 7}, {"reply": None}, {"parts": {"count": "x"}}],
)
def test_damaged_rows_of_replies_are_named(empty: RunFolder, damage: dict) -> None:
    replies(empty, (asked(), ["3", "4"], [0, 1]), (asked("other"), ["3", "4"], [0, 1]))
    file = empty.path / "samples/000005.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text(f"{json.dumps(json.loads(first) | damage)}\n{second}\n")
    page = built(empty)
    assert "000005.jsonl, line 1: half-written or damaged, left out" in page
    assert "<b>step 5</b><i>no reply kept</i>" in page and len(parts_of(page)) == 2


def test_missing_pictures_of_prompts_are_named(empty: RunFolder) -> None:
    replies(empty, (asked(), ["3", "4"], [0, 1]))
    (empty.path / "samples/prompts/000-1.png").unlink()
    assert "prompts/000-1.png is missing" in built(empty)


def test_rows_of_older_folders(run: RunFolder) -> None:
    """They have neither `shown` nor `reply` nor `answer`."""
    before = built(run)
    for file in (run.path / "samples").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            del row["shown"], row["reply"], row["answer"]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert built(run) == before


def test_a_model_that_draws_what_it_was_shown(empty: RunFolder) -> None:
    image = np.zeros((8, 8, 3), np.uint8)
    empty.save_samples(0, [Sample(asked(), image, 1)], [Score(0.5)])
    given, drawn = Tags(built(empty)).all("img")
    assert given["alt"].startswith("picture of the prompt") and drawn["alt"].startswith("step 0")


def test_names_of_charts_break_at_the_slash(run: RunFolder) -> None:
    run.append({"step": 5, "advantage/flat_groups": 0.5})
    assert "<span>advantage/<wbr>flat_groups</span>" in built(run)


def test_new_words_are_marked_where_most_are_old() -> None:
    assert samples.marked("a b c", "a b d") == "a b <mark>d</mark>"
    assert samples.marked("a b c", "x & z") == "x &amp; z"
    long = "a " * 400
    assert samples.marked(long, long + "b") == long + "b"  # not looked at: it takes too long


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
    assert "no evaluation yet" in page and "No evaluation has saved samples yet" in page
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
