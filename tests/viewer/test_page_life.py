"""The page in a real browser: damaged, empty, growing folders; small screens, keys, the report."""

from __future__ import annotations

import re
import time
from pathlib import Path

from gesso.viewer import report
from tests.viewer import folders
from tests.viewer.browser import Browser, Tab
from tests.viewer.site import Site, Studio, drawing, evaluate


def squeezed(tab: Tab) -> int:
    """Pixels that the page is wider than its window."""
    return tab.js("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_a_run_of_another_version_and_damage(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/#/runs")
    assert "another version" in tab.text("tr[data-run=odd]")
    tab.go("#/notes?tick=odd")
    tab.wait("document.querySelector('.damaged')")
    assert "a damaged line after step 4" in tab.text(".damaged")
    assert "unheard-of.key" in tab.text(".config")
    tab.go("#/evolution?run=odd")
    tab.wait("document.querySelector('.card .unreadable')?.innerText === 'cannot be read'")
    tab.wait("document.querySelectorAll('.card img').length === 2")
    tab.click(".filters input[value=film]")
    tab.wait(
        "document.querySelector('.frame:last-child .unreadable')?.innerText.includes('cannot')"
    )
    tab.go("#/curves?tick=odd")
    tab.wait("document.querySelector('.panel .line')")
    assert all("/image?" in told for told in tab.complaints), tab.complaints
    tab.complaints.clear()  # a browser says itself that a picture could not be had


def test_an_empty_folder_says_what_to_do_and_waits(
    tab: Tab, browser: Browser, tmp_path: Path, artist: Studio
) -> None:
    site = Site(tmp_path, artist)
    tab.open(site.url)
    assert "gesso train demo" in tab.text("main")
    tab.go("#/curves")
    tab.settle()
    assert "gesso train demo" in tab.text("main")
    tab.go("#/runs")
    folders.make(tmp_path / "new", 1)
    tab.wait("document.querySelectorAll('tr[data-run]').length === 1")
    tab.js("location.href = 'about:blank'")
    site.stop()


def test_a_live_run_grows_under_it(tab: Tab, tmp_path: Path, artist: Studio) -> None:
    run = drawing(tmp_path / "live")
    site = Site(tmp_path, artist)
    tab.open(f"{site.url}/#/evolution?run=live")
    tab.wait("document.querySelectorAll('.card img').length === 3")
    run.append(folders.row(5))
    run.append(folders.row(6, **{"eval/reward": 0.9}))
    evaluate(run, 6, [1, 1, 1])
    tab.wait("document.querySelector('.readout').innerText.includes('step 6')")  # by itself
    tab.wait("document.querySelector('.card img').src.includes('000006')")
    tab.key("Home")
    run.append(folders.row(7))
    evaluate(run, 8, [1, 1, 1])
    tab.js("scrollTo(0, 50)")
    high = tab.js("scrollY")
    tab.js("pollRuns()")
    tab.wait("evo.data.steps.length === 5")
    assert "step 0" in tab.text(".readout"), "elsewhere it stays where it was"
    assert tab.js("scrollY") == high
    tab.go("#/curves?tick=live")
    tab.wait("document.querySelector('.panel .line')")
    run.append(folders.row(8, **{"eval/reward": 0.95}))
    tab.js("pollRuns()")
    tab.wait("lines.sections[0].charts[0].chart.lines.some((l) => l.x.at(-1) === 8)")
    tab.go("#/runs")
    tab.wait("document.querySelector('tr[data-run=live]')?.innerText.includes('8 / 10')")
    run.append(folders.row(9))
    drawing(tmp_path / "later")
    tab.js("location.hash = '#/runs'")  # no run is asked for, and a newer one comes
    tab.js("pollRuns()")
    tab.wait("document.querySelectorAll('tr[data-run]').length === 2")
    assert tab.text("h1") == "live", "the one that was shown stays"
    tab.wait("document.querySelector('tr[data-run=live]').innerText.includes('9 / 10')")
    site.stop()
    tab.js("pollRuns()")
    tab.wait("!document.getElementById('banner').hidden")
    assert "does not respond" in tab.text("#banner") and tab.count("tr[data-run]") == 2
    site.start()
    tab.wait("document.getElementById('banner').hidden")
    tab.js("location.href = 'about:blank'")
    site.stop()
    assert all("ERR_CONNECTION" in told for told in tab.complaints), tab.complaints
    tab.complaints.clear()


PLACES = [
    "runs", "evolution?run=signs", "evolution?run=signs&prompt=0", "evolution?run=count",
    "evolution?run=count&prompt=0", "curves?tick=signs&tick=count", "groups?run=signs",
    "playground?run=signs", "notes?tick=signs&tick=count",
]  # fmt: skip


def test_nothing_is_wider_than_a_telephone(browser: Browser, site: Site) -> None:
    tab = browser.tab(400, 800)
    tab.open(site.url)
    for place in PLACES:
        tab.go(f"#/{place}")
        tab.wait(f"place.view === '{place.split('?')[0]}' && app.innerText.length > 40")
        tab.settle()
        assert squeezed(tab) <= 0, place
        over = tab.js(
            "[...document.querySelectorAll('main *')]"
            ".filter((e) => e.getBoundingClientRect().right > innerWidth + 1)"
            ".filter((e) => !e.closest('.strip, .pairs, svg, .visually-hidden, .choice input'))"
            ".map((e) => e.className || e.tagName).slice(0, 5)"
        )
        assert over == [], place
    for mode in ("wipe", "film"):
        tab.go("#/evolution?run=signs")
        tab.click(f".filters input[value={mode}]")
        tab.settle()
        assert squeezed(tab) <= 0, mode
    tab.close()


SEEN = """window.seen = [...document.querySelectorAll('main *')]
    .filter((e) => e.getClientRects().length && !e.closest('.plot, .grow, th.tick, th.c-spark'))"""
GONE = "seen.filter((e) => e.isConnected && !e.getClientRects().length).map((e) => e.outerHTML)"


def test_a_telephone_leaves_nothing_out(tab: Tab, site: Site) -> None:
    tab.open(site.url)
    for place in PLACES:
        tab.size(1440, 900)
        tab.go(f"#/{place}")
        tab.wait(f"place.view === '{place.split('?')[0]}' && app.innerText.length > 40")
        tab.settle()
        assert tab.js(f"({SEEN}).length") > 20, place
        for width in (1000, 400):
            tab.size(width, 800)
            tab.settle(0)
            assert tab.js(GONE) == [], (place, width)


def test_a_run_on_a_telephone_is_a_card_of_labelled_values(browser: Browser, site: Site) -> None:
    tab = browser.tab(400, 800)
    tab.open(site.url)
    cells = "[...document.querySelectorAll('tr[data-run=signs] td[data-title]')]"
    named = (
        f"Object.fromEntries({cells}.map((e) => [getComputedStyle(e, '::before').content"
        ".replaceAll('\"', ''), e.innerText]))"
    )
    told = tab.js(named)
    assert (told["Algorithm"], told["Model"], told["Samples/s"]) == (
        "flow-grpo", "zoo:signs", "12.0",
    )  # fmt: skip
    assert told["Reward"].split() == ["0.400", "best", "0.400"]
    assert "0.300→0.500" in told["Held-out"] and told["Step"] == "4 / 10"
    assert re.fullmatch(r"0:12 left|took 0:10", told["Time"]) and "healthy" in told["Health"]
    boxes = f"{cells}.map((e) => e.getBoundingClientRect()).map((b) => [b.x, b.y, b.width])"
    xs, ys, widths = zip(*tab.js(boxes), strict=True)
    assert len(set(ys)) >= 5 and min(widths) > 100 and max(xs) > 200, "two beside one another"
    cut = f"{cells}.flatMap((e) => [e, ...e.querySelectorAll('*')])"
    assert tab.js(f"{cut}.filter((e) => e.scrollWidth > e.clientWidth + 1).length") == 0
    tab.js("document.querySelector('[data-keep=\"sort reward\"]').focus()")
    tab.key("Enter")
    assert tab.js("document.querySelector('.c-reward').ariaSort") == "descending"
    assert tab.js("document.activeElement.dataset.keep") == "sort reward"
    tab.js("go('runs', {tick: ['signs'], run: 'signs'})")
    tab.wait("ticked().join() === 'signs'")
    tab.click("[data-keep='tick count']")
    tab.wait("ticked().join() === 'signs,count'")
    tab.js("document.querySelector('[data-keep=\"health signs\"]').focus()")
    tab.key("Enter")
    tab.wait("document.querySelector('.more')?.innerText.includes('No active warnings')")
    tab.close()


def test_light_and_dark(tab: Tab, site: Site) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    tab.prefer(prefers_color_scheme="light")
    tab.open(site.url)
    light = tab.js(ground)
    tab.prefer(prefers_color_scheme="dark")
    tab.wait(f"{ground} !== '{light}'")
    dark = tab.js(ground)
    tab.wait("document.querySelector('#theme').getAttribute('aria-label') === 'light theme'")
    tab.click("#theme")
    tab.wait(f"{ground} === '{light}'")
    tab.open(site.url)
    assert tab.js(ground) == light, "it is remembered"
    tab.click("#theme")
    tab.wait(f"{ground} === '{dark}'")
    tab.js("localStorage.clear()")


def test_by_keyboard_alone(tab: Tab, site: Site) -> None:
    tab.open(site.url)
    for number, view in enumerate(
        ["runs", "evolution", "curves", "groups", "timeline", "playground", "notes"], 1
    ):
        tab.key(str(number))
        tab.wait(f"place.view === '{view}' && app.innerText.length > 40")
        assert (
            tab.js("document.querySelector('#tabs [aria-current=page]').innerText.toLowerCase()")
            == view
        )
    tab.key("Tab")
    assert tab.js("document.activeElement.id") == "skip"
    tab.key("Enter")
    assert tab.js("document.activeElement.id") == "app"
    tab.key("Tab")
    focused = "getComputedStyle(document.activeElement).outlineStyle"
    assert tab.js(focused) != "none", "what has the focus is seen"
    tab.js("document.querySelector('#tabs a').focus()")
    tab.key("Enter")
    tab.wait("place.view === 'runs'")
    assert tab.js("document.activeElement.innerText") == "Runs", "a tab keeps the focus"
    unnamed = (
        "[...document.querySelectorAll('button, a, input, textarea')].filter((e) => "
        "!(e.innerText.trim() || e.ariaLabel || e.title || e.closest('label') || e.labels?.length))"
        ".map((e) => e.outerHTML)"
    )
    for place in PLACES:
        tab.go(f"#/{place}")
        tab.settle()
        assert tab.js(unnamed) == [], place
        assert tab.js("[...document.images].filter((i) => !i.alt).length") == 0, place


def test_the_report_works_from_the_disk(tab: Tab, pages: Path, tmp_path: Path) -> None:
    file = report.write(pages, tmp_path / "report.html")
    tab.open(file.as_uri())
    assert tab.count("tr[data-run]") == 3
    assert "Playground" not in tab.texts("#tabs a") and tab.count("a[download]") == 0
    tab.go("#/evolution?run=signs")
    tab.wait("document.querySelectorAll('.card img').length === 3")
    assert tab.js("document.querySelector('.card img').src").startswith("data:image/webp")
    tab.key("Home")
    tab.wait("location.hash.includes('step=0')")
    assert "READ0" in tab.text(".card") and tab.count("a[download]") == 0
    tab.go("#/curves?tick=signs&tick=count")
    tab.wait("document.querySelectorAll('[data-key=reward] .line').length === 4")
    tab.go("#/groups?run=signs")
    tab.wait("document.querySelectorAll('.group[open] .sample img').length === 2")
    tab.go("#/notes?tick=signs")
    tab.wait("document.querySelector('.note-card')")
    asked = tab.js(
        "performance.getEntriesByType('resource').filter((r) => !r.name.startsWith('data:')).length"
    )
    assert asked == 0, "nothing is fetched"
    assert tab.js("window.hacked") is None


def test_hidden_pages_ask_for_nothing(tab: Tab, site: Site) -> None:
    tab.open(site.url)
    asked = (
        "performance.getEntriesByType('resource')"
        ".filter((r) => r.name.endsWith('/api/runs')).length"
    )
    tab.js("Object.defineProperty(document, 'hidden', {get: () => true})")
    time.sleep(0.5)  # a request that was under way
    before = tab.js(asked)
    time.sleep(2.5)
    assert tab.js(asked) == before, "none while it is hidden"
