"""Reading back what a run wrote, damaged and older files too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gesso.track import figures
from gesso.track.samples import Shown

ROW: dict[str, Any] = {
    "index": 0, "prompt": "How many?", "seed": 7, "image": "", "shown": ["prompts/000-1.png"],
    "response": "3", "answer": "3", "reward": 1.0, "parts": {"count": 1.0}, "text": "3",
    "error": None,
}  # fmt: skip


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
    assert figures.ticks(low, high, 4) == pytest.approx(expected)


def test_a_series_has_finite_numbers_only() -> None:
    values = [0.5, None, float("nan"), float("inf"), "x", 1]
    rows = [{"step": i, "reward": value} for i, value in enumerate(values)] + [{"step": 9}]
    assert figures.series(rows, "reward") == [(0, 0.5), (5, 1)]


def test_whole_lines_are_read_and_others_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n[2]\n{"a": 3}\n{"a": 4')
    damaged: list[str] = []
    assert figures.lines(file, lambda row: row.get("a"), damaged) == [1, 3]
    assert damaged == [f"a.jsonl, line {n}: incomplete or damaged, skipped" for n in (2, 4)]
    assert figures.lines(tmp_path / "none.jsonl", dict, damaged) == [] and len(damaged) == 2


def test_a_whole_row() -> None:
    shown = Shown.of(ROW)
    assert shown is not None and (shown.response, shown.answer, shown.reward) == ("3", "3", 1.0)
    assert shown.shown == ("prompts/000-1.png",) and shown.error == ""


@pytest.mark.parametrize(
    "damage",
    [{"shown": "a.png"}, {"shown": [3]}, {"response": 7}, {"response": None},
     {"parts": {"count": "x"}},
     {"index": "0"}, {"prompt": None}, {"parts": None}],
)  # fmt: skip
def test_a_damaged_row_is_none(damage: dict) -> None:
    assert Shown.of(ROW | damage) is None


def test_rows_of_older_folders() -> None:
    """They have neither `shown` nor `response` nor `answer`."""
    old = {k: v for k, v in ROW.items() if k not in ("shown", "response", "answer")}
    shown = Shown.of(old | {"image": "000000/000.png"})
    assert shown is not None and (shown.shown, shown.response, shown.answer) == ((), "", "")


def test_a_score_that_is_none_and_an_answer_that_is_no_text() -> None:
    shown = Shown.of(ROW | {"reward": None, "error": "dead", "answer": [1, 2]})
    assert shown is not None and shown.reward is None and shown.error == "dead"
    assert json.loads(shown.answer) == [1, 2]


@pytest.mark.parametrize(
    ("parts", "right"),
    [
        ({"ocr": 0.5}, None),
        ({"ocr": 0.9, "ocr/exact": 0.0}, False),
        ({"count": 1.0, "count/exact": 1.0}, True),
        ({"choice": 1.0, "choice/answered": 1.0}, True),
        ({"math": 0.0, "math/answered": 1.0, "format": 1.0}, False),
    ],
)
def test_right_or_wrong_where_a_reward_says_so(parts: dict, right: bool | None) -> None:
    shown = Shown.of(ROW | {"parts": parts})
    assert shown is not None and shown.right is right
