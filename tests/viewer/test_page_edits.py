"""The page of a run that edits images, in a real browser: source and result, and an upload."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from gesso.viewer import film, report, server
from gesso.viewer.playground import PlaygroundRequest
from gesso.viewer.reading import RunReader
from tests.viewer.browser import Tab
from tests.viewer.folders import source
from tests.viewer.site import INSTRUCTION, Site, Studio, editing


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("edits")
    editing(root / "edits")
    return root


@pytest.fixture(scope="module")
def edits(runs: Path, artist: Studio) -> Iterator[Site]:
    made = Site(runs, artist)
    yield made
    made.stop()


def test_the_source_is_wiped_to_the_result_of_any_step(tab: Tab, edits: Site) -> None:
    tab.open(f"{edits.url}/#/evolution?run=edits")
    tab.wait("document.querySelectorAll('.wipe img').length === 4")
    heights = "[...document.querySelectorAll('.wipe img')].map((i) => [i, i.closest('.slot')])"
    heights += ".map((pair) => pair.map((node) => Math.round(node.clientHeight)))"
    assert all(image == slot > 0 for image, slot in tab.js(heights)), "a square source is not cut"
    assert "prompts%2F000-1.png" in tab.js("document.querySelector('.wipe img').src")
    assert "000002" in tab.js("document.querySelector('.wipe .after img').src")
    assert tab.js("document.querySelector('.wipe input').ariaLabel").startswith("compare source")
    assert tab.text(".card .under").split() == ["0.500", "▲", "0.500"]
    tab.key("Home")
    tab.wait("document.querySelector('.wipe .after img').src.includes('000000')")
    tab.click(".filters input[value=wipe]")
    tab.wait("document.querySelector('.wipe img')?.src.includes('000000')")
    tab.js("buildEvolution(evo.data)")
    assert tab.js("evo.mode") == "wipe", "a chosen mode is kept"
    tab.click(".filters input[value=film]")
    tab.wait("document.querySelectorAll('.film-row:last-child .frame').length === 4")
    assert tab.texts(".film-row:last-child .cap")[:2] == ["source", "source"]
    assert tab.js("document.querySelectorAll('.film-row .frame.here.source').length") == 0


def test_one_edit_large(tab: Tab, edits: Site) -> None:
    tab.open(f"{edits.url}/#/evolution?run=edits&prompt=0")
    tab.wait("document.querySelector('.stage .wipe img')?.src.includes('prompts')")
    assert tab.text(".tags").split() == ["source", "step", "2", "0.500", "▲", "0.500"]
    tab.click(".stage input[value=first]")
    tab.wait("document.querySelector('.stage .wipe img').src.includes('000000')")
    assert tab.text(".tags").startswith("step 0")


def test_a_group_shows_its_source(tab: Tab, edits: Site) -> None:
    tab.open(f"{edits.url}/#/groups?run=edits")
    tab.wait("document.querySelectorAll('.group[open] .sample img').length === 2")
    assert tab.count(".group[open] .prompt-images img") == 1


def decoded(request: PlaygroundRequest) -> list[bytes]:
    return [base64.b64decode(image) for image in request.images]


def test_the_playground_takes_an_upload(
    tab: Tab, edits: Site, artist: Studio, runs: Path, tmp_path: Path
) -> None:
    """The source of the evaluation first; chosen files replace it, and can be removed."""
    tab.open(f"{edits.url}/#/playground?run=edits")
    tab.wait("document.querySelector('.preview img')")
    assert tab.js("document.getElementById('play-answer')") is None
    tab.click("button[type=submit]")
    tab.wait("document.querySelectorAll('.play-pair').length === 4")
    saved = (runs / "edits" / "samples" / "prompts" / "000-1.png").read_bytes()
    asked = artist.asked[-1]
    assert (asked.prompt, decoded(asked)) == (INSTRUCTION, [saved])
    assert tab.count(".play-pair:first-child .side img") == 3
    assert tab.texts(".play-pair:first-child em") == ["source", "base", "trained"]
    tab.click(".play-out input[value=source]")
    tab.wait("document.querySelectorAll('.play-pair:first-child .wipe img').length === 2")
    own = [tmp_path / "own.png", tmp_path / "second.png"]
    for i, file in enumerate(own):
        file.write_bytes(source(7 + i).data)
    with (tmp_path / "large.png").open("wb") as large:
        large.truncate(server.MAX_UPLOAD + 1)
    root = tab.send("DOM.getDocument")["root"]["nodeId"]
    node = tab.send("DOM.querySelector", nodeId=root, selector=".file input")["nodeId"]
    tab.send("DOM.setFileInputFiles", nodeId=node, files=[str(tmp_path / "large.png")])
    tab.wait("document.querySelector('.play-out .error')")
    assert tab.text(".error") == "large.png is too large; choose an image of at most 23 MiB"
    assert tab.js("playing.images[0].name") == "image 1 of the first prompt"
    tab.send("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in own])
    tab.wait("document.querySelector('.preview img').alt === 'own.png'")
    assert tab.count(".preview img") == 2
    tab.go("#/runs")
    tab.wait("document.querySelector('.runs')")
    tab.go("#/playground?run=edits")
    tab.wait("document.querySelector('.preview img')?.alt === 'own.png'")
    tab.click("button[type=submit]")
    tab.wait("document.querySelectorAll('.play-pair').length === 4")
    assert decoded(artist.asked[-1]) == [file.read_bytes() for file in own]
    tab.click(".image-field button")
    tab.wait("!document.querySelector('.preview img')")
    tab.click("button[type=submit]")
    tab.wait("document.querySelectorAll('.play-pair:first-child .side img').length === 2")
    assert decoded(artist.asked[-1]) == []


def test_the_report_has_the_sources(tab: Tab, runs: Path, tmp_path: Path) -> None:
    file = report.write(runs, tmp_path / "report.html")
    tab.open(f"{file.as_uri()}#/evolution?run=edits")
    tab.wait("document.querySelectorAll('.wipe img').length === 4")
    assert tab.js("document.querySelector('.wipe img').src").startswith("data:image/webp")


def test_the_contact_sheet_has_the_sources(runs: Path) -> None:
    """Two sources and two steps make four columns."""
    import io

    from PIL import Image

    with Image.open(io.BytesIO(film.sheet(RunReader(runs / "edits")))) as sheet:
        assert round(sheet.width / 252) == 4
