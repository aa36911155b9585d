"""The progress display: plain lines without a terminal, a live table with one."""

from __future__ import annotations

import io
import re

import pytest
import rich.console

from gesso.track.console import Console, clock, held_out_key, short, sparkline

BEFORE = {"step": 0, "eval/reward": 0.3, "eval/ocr/exact": 0.125, "time/eval": 4.0}
STEP = {
    "step": 3,
    "reward": 0.62,
    "eval/ocr/exact": 0.41,
    "eval/reward": 0.7,
    "update/ratio": 1.00021,
    "update/clipped": 0.12,
    "samples_per_s": 9.81,
    "time/step": 7.65,
}


def plain(total: int = 20) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    console = Console(rich.console.Console(file=file, width=40))
    console.start(0, total)
    return console, file


def terminal(total: int = 20, width: int = 80) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    out = rich.console.Console(
        file=file, force_terminal=True, width=width, record=True, _environ={"TERM": "xterm"}
    )
    console = Console(out)
    console.start(0, total)
    return console, file


def cursor_is_back(file: io.StringIO) -> bool:
    drawn = file.getvalue()
    return drawn.rfind("\x1b[?25h") > drawn.rfind("\x1b[?25l") >= 0


def test_plain_one_line_a_row() -> None:
    console, file = plain()
    with console:
        console.start(0, 20)
        console.phase("evaluating")
        console.row(BEFORE)
        console.phase("sampling")
        console.row(STEP)
        console.row(
            {"step": 20, "reward": -0.3, "time/step": 8.0, "failed": 2, "update/skipped": 1}
        )
    assert file.getvalue().splitlines() == [
        "step 0/20  held-out .12",
        "step 3/20  reward .62  held-out .41  ratio 1.0002  clipped .12  9.8 samples/s  2:10 left",
        "step 20/20  reward -.30  update skipped  2 failed",
    ]


def test_plain_leaves_absent_and_empty_values_out() -> None:
    console, file = plain()
    console.row({"step": 1, "reward": None, "update/drift": 0.00123})
    assert file.getvalue() == "step 1/20  drift 0.00123\n"


def test_responses_have_a_length_and_may_be_cut() -> None:
    row = {
        "step": 3,
        "reward": 0.5,
        "update/entropy": 0.412,
        "response/length": 120.6,
        "response/truncated": 0.0,
    }
    console, file = plain()
    console.row(row | {"samples_per_s": 4.0})
    console.row(row | {"response/truncated": 0.25})
    assert file.getvalue().splitlines() == [
        "step 3/20  reward .50  entropy .41  length 121  4.0 samples/s",
        "step 3/20  reward .50  entropy .41  length 121  truncated .25",
    ]
    live, _ = terminal(width=60)
    with live:
        live.start(0, 20)
        live.row(row | {"samples_per_s": 4.0, "response/truncated": 0.25})
    drawn = live.out.export_text()
    assert re.search(r"responses +length 121  truncated .25", drawn)
    assert re.search(r"speed +4.0 samples/s  482 tokens/s", drawn)


def test_warnings_that_hold_are_named() -> None:
    console, file = plain()
    console.row({"step": 1, "reward": 0.5, "health": []})
    console.row({"step": 2, "reward": 0.5, "health": ["flat-groups", "diversity"]})
    assert file.getvalue().splitlines() == [
        "step 1/20  reward .50",
        "step 2/20  reward .50  ! flat-groups, diversity",
    ]
    live, _ = terminal(width=50)
    with live:
        live.start(0, 20)
        live.row({"step": 1, "reward": 0.5, "health": []})
        assert "health" not in live.out.export_text()
        live.row({"step": 2, "reward": 0.5, "health": ["flat-groups", "diversity"]})
    assert re.search(r"health +! flat-groups, diversity\n", live.out.export_text())


def test_a_row_that_is_not_a_number_is_shown_as_such() -> None:
    console, file = plain()
    console.row({"step": 1, "reward": float("nan")})
    assert file.getvalue() == "step 1/20  reward nan\n"


def test_notes_are_printed_as_they_are_but_for_control_characters() -> None:
    console, file = plain()
    text = "[red]step 3[/]: reward :smile: \x1b[2J failed " + "long " * 20
    console.note(text)
    assert file.getvalue() == text.replace("\x1b", "�") + "\n"


def test_notes_on_an_ascii_stream() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(rich.console.Console(file=file, force_terminal=True))
    console.phase("sampling")
    assert console.live is None  # no sparkline where its blocks cannot be written
    console.note("σ → 0")
    file.flush()
    assert raw.getvalue() == b"? ? 0\n"


def test_time_left_is_the_mean_of_the_last_ten_rows() -> None:
    console, _ = plain(total=100)
    assert console.left is None
    console.row({**BEFORE, "time/step": 1e6})  # the evaluation before training does not count
    assert console.left is None
    console.row({"step": 1, "time/step": 5000.0})
    for step in range(2, 12):
        console.row({"step": step, "time/step": float(step)})
    assert console.left == pytest.approx(6.5 * 89)
    console.row({"step": 100, "time/step": 1.0})
    assert console.left is None


def test_terminal_shows_the_figures() -> None:
    console, file = terminal()
    console.start(0, 20)
    console.row(BEFORE)
    console.note("careful [now]")
    console.row({**STEP, "step": 2, "reward": 0.5, "eval/ocr/exact": 0.2})
    console.row(STEP)
    console.phase("updating")
    assert console.live is not None
    console.live.refresh()
    drawn = console.out.export_text(clear=False)
    for figure in ("step 3/20", ".62  ▁█", ".12 → .41", "ratio 1.0002", "clipped .12"):
        assert figure in drawn
    for figure in ("9.8 samples/s", "2:10 left", "updating 0:00", "careful [now]"):
        assert figure in drawn
    console.stop()
    assert "stopped after step 3" in console.out.export_text()
    assert cursor_is_back(file)
    end = file.tell()
    console.stop()
    assert file.tell() == end


def test_terminal_resumed_and_narrow() -> None:
    console, _ = terminal(total=5, width=44)
    with console:
        console.start(4, 5)
        console.phase("sampling")
        console.row({"step": 5, "eval/reward": 0.5})
    last = console.out.export_text()
    assert "step 5/5" in last and "done" in last and "held-out  .50\n" in last
    assert "ratio" not in last and "left" not in last and "→" not in last
    assert max(len(line) for line in last.splitlines()) <= 44


def test_an_exception_still_gives_the_terminal_back() -> None:
    console, file = terminal()
    with pytest.raises(KeyError), console:
        console.start(0, 20)
        raise KeyError("x")
    assert console.live is None
    assert cursor_is_back(file)


def test_small_formats() -> None:
    assert [short(v) for v in (0.0, 0.625, -0.3, 0.999, 12.3)] == [
        ".00", ".62", "-.30", "1.00", "12.30",
    ]  # fmt: skip
    assert [clock(s) for s in (0, 9.6, 130, 3730)] == ["0:00", "0:10", "2:10", "1:02:10"]
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert sparkline([0.5, 0.5]) == "▁▁"
    assert held_out_key(["eval/reward", "eval/ocr/exact", "reward/ocr/exact"]) == "eval/ocr/exact"
    assert held_out_key(["reward"]) == "eval/reward"
