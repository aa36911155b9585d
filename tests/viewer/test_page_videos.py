"""The page of a run that generates videos, in a real browser: they play in step, frame by frame."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gesso.viewer import film, report
from gesso.viewer.reading import RunReader
from tests.viewer.browser import Tab
from tests.viewer.site import Site, Studio, filming

ALL = "[...document.querySelectorAll('video')]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    filming(root / "wan")
    return root


@pytest.fixture(scope="module")
def videos(runs: Path, artist: Studio) -> Iterator[Site]:
    made = Site(runs, artist)
    yield made
    made.stop()


def wait_for_bar(tab: Tab, index: int, column: int) -> None:
    """In the frame that a video shows, which follows the end of a seek. A bar has 8 columns."""
    brightest = f"""(() => {{
      const v = {ALL}[{index}], c = document.createElement("canvas");
      c.width = 96; c.height = 32;
      c.getContext("2d").drawImage(v, 0, 0, 96, 32);
      const pixels = [...c.getContext("2d").getImageData(0, 16, 96, 1).data];
      const row = pixels.filter((_, i) => i % 4 === 0);
      return row.indexOf(Math.max(...row)); }})()"""
    tab.wait(f"Math.abs({brightest} - {column}) <= 8")


def at_rest(tab: Tab, count: int) -> None:
    tab.wait(f"{ALL}.length === {count} && {ALL}.every((v) => v.paused && !v.seeking)")


def test_before_and_after_play_in_step_and_stop_at_a_frame(tab: Tab, videos: Site) -> None:
    tab.open(f"{videos.url}/#/")
    tab.wait("document.querySelectorAll('.pair video').length === 4")
    tab.go("#/playground?run=wan")
    tab.wait("document.querySelector('.play-form [type=submit]').innerText === 'Generate videos'")
    tab.go("#/evolution?run=wan")
    tab.wait(f"{ALL}.length === 2 && {ALL}.every((v) => !v.paused)")
    tab.wait(f"{ALL}.every((v) => v.currentTime > 0)")
    assert tab.texts(".filters label")[0] == "Videos"
    tab.click(".filters input[value=wipe]")
    tab.wait(f"{ALL}.length === 4")
    tab.js("showFrame(5)")
    at_rest(tab, 4)
    assert tab.text(".video-bar .soft") == "frame 6 of 8"
    for i in range(4):
        wait_for_bar(tab, i, 40)
    assert "000000" in tab.js(f"{ALL}[0].src") and "000002" in tab.js(f"{ALL}[1].src")
    tab.click(".video-bar [aria-label='next frame']")
    tab.wait("document.querySelector('.frame-slider').value === '6'")
    tab.js(
        "(() => { const slider = document.querySelector('.frame-slider');"  # one call: a timer
        "slider.value = 1; slider.dispatchEvent(new Event('input')); })()"  # redraws the slider
    )
    at_rest(tab, 4)
    wait_for_bar(tab, 3, 8)
    tab.click(".video-bar button")
    tab.wait(f"{ALL}.every((v) => !v.paused)")
    tab.go("#/evolution?run=wan&prompt=1")
    tab.wait(f"{ALL}.length === 2 && document.querySelector('.stage .wipe video')")
    tab.go("#/groups?run=wan")
    tab.wait("document.querySelectorAll('.group[open] .sample video').length === 2")


def test_nothing_below_the_bar_moves_when_videos_have_loaded(tab: Tab, videos: Site) -> None:
    """A click that met the appearing bar hit another place."""
    tab.open(f"{videos.url}/#/notes?run=wan")
    tab.js(
        "window.tops = new Set(); (function look() {"
        "const node = document.querySelector('.filters');"
        "if (node) tops.add(node.getBoundingClientRect().top); requestAnimationFrame(look); })()"
    )
    tab.go("#/evolution?run=wan")
    tab.wait("document.querySelector('.video-bar .soft').innerText.endsWith(' of 8')")
    tab.settle()
    assert tab.js("tops.size") == 1


def test_the_report_plays(tab: Tab, runs: Path, tmp_path: Path) -> None:
    file = report.write(runs, tmp_path / "report.html")
    tab.open(f"{file.as_uri()}#/evolution?run=wan&prompt=0")
    tab.wait(f"{ALL}.length === 2 && {ALL}.every((v) => v.readyState >= 2)")
    tab.js("showFrame(3)")
    at_rest(tab, 2)
    wait_for_bar(tab, 1, 24)


def test_a_report_with_many_videos_shows_stills(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = {"wan": RunReader(runs / "wan")}
    assert report.page(readers).count("data:video/mp4") == 4
    monkeypatch.setattr(report, "VIDEO_BYTES", 0)
    assert "data:video/mp4" not in report.page(readers)


def test_videos_are_served_in_ranges_and_nothing_else(videos: Site, runs: Path) -> None:
    def get(name: str, **headers: str) -> httpx.Response:
        params = {"run": "wan", "name": name}
        return httpx.get(f"{videos.url}/video", params=params, headers=headers)

    whole = (runs / "wan" / "samples" / "000002" / "001.mp4").read_bytes()
    assert get("samples/000002/001.mp4").content == whole
    part = get("samples/000002/001.mp4", Range="bytes=4-9")
    assert (part.status_code, part.content) == (206, whole[4:10])
    for name in ("config.toml", "samples/000002/../000002/001.mp4", "samples/000002/001.png"):
        assert "is not the name of a video" in get(name).json()["error"]
    assert get("samples/000002/009.mp4").status_code == 404


def test_films_and_sheets_show_the_videos(runs: Path) -> None:
    assert len(film.frames(RunReader(runs / "wan"), 0)) == 2
    assert film.sheet(RunReader(runs / "wan"))[:4] == b"\x89PNG"
