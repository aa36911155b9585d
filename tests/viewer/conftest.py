"""One browser and one site for all tests of the page. Without a browser these are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.viewer.browser import Browser, Tab, find
from tests.viewer.site import Site, Studio, drawing, odd, writing


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    pytest.importorskip("websockets", reason="a browser is driven by websockets: pip install it")
    pytest.importorskip("fastapi", reason='the page needs FastAPI: pip install "gesso[viewer]"')
    if find() is None:
        pytest.skip("no Chromium on the path: apt-get install chromium to run these tests")
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    writing(root / "count")
    odd(root / "odd")
    drawing(root / "signs")
    return root


@pytest.fixture(scope="session")
def artist() -> Studio:
    return Studio()


@pytest.fixture(scope="session")
def site(pages: Path, artist: Studio) -> Iterator[Site]:
    made = Site(pages, artist)
    yield made
    made.stop()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A page that must not complain in its console."""
    made = browser.tab()
    yield made
    complaints = made.complaints
    made.close()
    assert complaints == []
