"""Sheets and curves: what is on them, and what they are made of when something is missing."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from gesso.use.sheets import COLOURS, FAINT, Cell, Row, curve, plain, sheet


def colours(picture: Image.Image) -> set[tuple[int, ...]]:
    return {tuple(c) for c in np.asarray(picture).reshape(-1, 3)}


def rgb(name: str) -> tuple[int, ...]:
    return tuple(int(name[i : i + 2], 16) for i in (1, 3, 5))


def test_a_sheet_holds_every_image_magnified_by_a_whole_factor() -> None:
    dots = [Image.new("RGB", (48, 24), colour) for colour in ("#ff0000", "#00ff00", "#0000ff")]
    made = sheet([Row("one", [Cell(d, "HHHH") for d in dots[:2]]), Row("two", [Cell(dots[2])])])
    pixels = np.asarray(made)
    for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255)):
        found = np.argwhere((pixels == colour).all(-1))
        height, width = found.max(0) - found.min(0) + 1
        assert (width, height) == (240, 120)  # 5 times
    assert rgb(FAINT) in colours(made)  # a caption
    tall = sheet([Row("one", [Cell(dots[0].rotate(90, expand=True))]), Row("two", [Cell(dots[2])])])
    assert tall.height == made.height + 120  # rows are as high as their images


def test_a_large_image_is_shrunk_and_a_missing_one_reported() -> None:
    made = sheet(
        [Row("a" * 500, [Cell(Image.new("RGB", (1024, 512), "#ff0000")), Cell(None, "gone")])]
    )
    assert made.width < 2 * 410 and (255, 0, 0) in colours(made)
    assert sheet([Row("none", [Cell(None, "gone")])]).width > 100


def test_sources_come_before_the_results_of_their_row() -> None:
    red, green, blue = (Image.new("RGB", (48, 24), c) for c in ("#ff0000", "#00ff00", "#0000ff"))
    rows = [Row("one", [Cell(green)]), Row("two", [Cell(green)])]
    pixels = np.asarray(sheet(rows, ["step 1"], [[red], [red, blue]]))

    def columns(colour: tuple[int, ...]) -> set[int]:
        return {int(x) for x in np.argwhere((pixels == colour).all(-1))[:, 1] // 252}

    assert columns((255, 0, 0)) == {0} and columns((0, 0, 255)) == {1}
    assert columns((0, 255, 0)) == {2}, "also where a row has one source less"
    assert sheet(rows, ["step 1"], [[], []]).size == sheet(rows, ["step 1"]).size


def test_letters_that_the_font_does_not_have() -> None:
    assert plain("café → 日本 “x”\n…") == 'cafe -> ?? "x" ...'


@pytest.mark.parametrize("points", [[(0, 0.5)], [(0, 1.0), (5, 1.0)], [(0, -3.0), (4, 2e3)]])
def test_a_curve_of_anything(points: list[tuple[int, float]]) -> None:
    made = curve("reward", {"held-out": points, "training": []})
    assert made.size == (640, 320) and rgb(COLOURS[0]) in colours(made)
    assert rgb(COLOURS[1]) not in colours(made)


def test_figures_at_the_ends_do_not_lie_on_each_other() -> None:
    """Two lines that end at the same place: each figure is still there, in its colour."""
    made = np.asarray(curve("r", {"a": [(0, 0.0), (4, 1.0)], "b": [(0, 0.5), (4, 1.0)]}))
    ends = made[:, 590:]  # right of the last point
    rows = [np.argwhere((abs(ends.astype(int) - rgb(c)).sum(-1) < 90).any(1)) for c in COLOURS[:2]]
    assert all(len(r) for r in rows) and abs(rows[0].mean() - rows[1].mean()) > 8
