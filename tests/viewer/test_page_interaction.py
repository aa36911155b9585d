"""Ways through the page, in one tab: sliders, playing, links, keys, and what is asked of the
server when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.viewer.browser import Browser, Tab
from tests.viewer.site import Site, Studio


@pytest.fixture(scope="module")
def walker(browser: Browser) -> Iterator[Tab]:
    tab = browser.tab()
    yield tab
    complaints = tab.complaints
    tab.close()
    assert complaints == []


def to(tab: Tab, site: Site, place: str, ready: str) -> None:
    """A new page there, which asks for no news."""
    tab.open(f"{site.url}/#/{place}")
    tab.wait(ready)
    tab.js("Object.defineProperty(document, 'hidden', {get: () => true})")


def test_the_slider_ends_where_the_run_does(walker: Tab, site: Site) -> None:
    to(walker, site, "evolution?run=signs", "document.querySelectorAll('.card img').length === 3")
    assert walker.js("[-1, 99].map((i) => { moveTo(i); return evo.at; })") == [0, 2]
    walker.js("moveTo(1)")
    told = walker.text(".readout").split()
    assert told == ["step", "2", "mean", "reward", "0.733", "▲", "0.167"], "against step 0"
    sheet = walker.js("document.querySelector('a[download]').href")
    assert sheet.endswith("film?run=signs&kind=sheet")


def test_playing_waits_for_images_goes_at_its_speed_and_can_be_stopped(
    walker: Tab, site: Site
) -> None:
    to(walker, site, "evolution?run=signs", "document.querySelectorAll('.card img').length === 3")
    walker.js("""(() => {
        window.rests = [];
        window.asked = [];
        const plain = setTimeout;
        setTimeout = (f, ms) => { rests.push(ms); return plain(f, Math.min(ms, 30)); };
        evo.content.ready = (at) => { asked.push(at); };
        evo.speed = "4";
        setPlaying(true);
    })()""")
    walker.wait("evo.at === 2 && !evo.playing")
    assert walker.js("asked") == [1, 2] and 175 in walker.js("rests"), "700 ms over 4"
    walker.js("setPlaying(true); setPlaying(false)")
    walker.settle(0.15)
    assert walker.js("[evo.at, evo.playing]") == [0, False]


def test_one_prompt_has_its_own_films_and_keeps_the_step(walker: Tab, site: Site) -> None:
    ready = "document.querySelectorAll('.stage img').length === 2"
    to(walker, site, "evolution?run=signs&prompt=1&step=2", ready)
    films = walker.js("[...document.querySelectorAll('a[download]')].map((a) => a.search)")
    assert films == ["?run=signs&kind=gif&prompt=1", "?run=signs&kind=mp4&prompt=1"]
    before, after = walker.js("[...document.querySelectorAll('.stage img')].map((i) => i.src)")
    assert "000000" in before and "000002" in after
    assert walker.js("document.querySelector('.stage .after img').src") == after
    walker.key("ArrowDown")
    walker.wait("place.params.get('prompt') === '2' && place.params.get('step') === '2'")
    walker.js("go('evolution', {prompt: 0, step: 2})")
    walker.wait("document.querySelector('h1').innerText.includes('OAK')")
    assert "READ1" in walker.text(".large-facts"), (
        "of the slider's step; at first it read otherwise"
    )
    walker.js("go('evolution', {run: 'count', prompt: 0})")
    walker.wait("document.querySelectorAll('.turns li').length === 2")
    assert [text.split()[:2] for text in walker.texts(".turns li.here")] == [["step", "2"]]


def test_what_is_far_down_is_not_made_yet(walker: Tab, site: Site) -> None:
    to(walker, site, "runs", "document.querySelector('table.runs')")
    cell = {"reward": 0.5, "parts": {}, "text": ""}  # no pictures: nothing is asked of the server
    rows: list[dict[str, Any]] = [
        {"index": i, "prompt": f"p{i}", "seed": "1", "answer": "", "shown": [], "cells": [cell]}
        for i in range(150)
    ]
    found = json.dumps({"steps": [0], "prompts": rows, "size": None})
    walker.js(f"window.made = new FilmStrips('signs', {found}, {json.dumps(rows)})")
    walker.js("app.replaceChildren(made.node)")
    walker.wait("document.querySelector('.strip')")
    walker.settle()
    assert 0 < walker.count(".strip") < 60
    walker.js("""(() => {
        window.asked = 0;
        loadOnce = async () => { asked += 1; return {series: {}, step: 1}; };
        const panel = {title: "KL", note: "", train: "update/kl", held: null};
        window.far = new Section("Update", [panel], [{id: "signs"}]);
        app.replaceChildren(h("div", {vars: {height: "4000px"}}), far.node);
        far.watch();
    })()""")
    walker.settle()
    assert walker.js("asked") == 0
    walker.js("far.node.scrollIntoView()")
    walker.wait("asked === 1")
    walker.js("far.close()")


def test_where_the_time_goes_is_by_the_step(walker: Tab, site: Site) -> None:
    """An evaluation of 10 s every tenth step costs a second a step."""
    to(walker, site, "runs", "document.querySelector('table.runs')")
    walker.js("""(async () => {
        const series = {"time/eval": {y: [10, 10], count: 2}, "time/sample": {y: [3], count: 20}};
        loadOnce = async () => ({series, step: 20});
        window.shares = new TimeShares([{id: "signs"}]);
        await shares.reload();
    })()""")
    told = walker.js("[...shares.node.querySelectorAll('.share-bar i')].map((i) => i.title)")
    assert told == ["sampling: 3.000 s", "evaluating: 1.000 s"]


def test_an_answer_is_kept_until_its_run_has_changed(walker: Tab, site: Site) -> None:
    to(walker, site, "runs", "document.querySelector('table.runs')")
    told = walker.js("""(() => {
        const ask = () => loadOnce("/api/run", {run: "signs"}), first = ask();
        const again = ask() === first;
        runs.set("signs", {...runs.get("signs"), changed: 0});
        return [again, ask() === first];
    })()""")
    assert told == [True, False]


def test_rows_do_not_jump_and_new_ones_come_first(walker: Tab, site: Site) -> None:
    to(walker, site, "runs", "document.querySelectorAll('tr[data-run]').length === 3")
    order = "[...runs.keys()].join()"
    was = walker.js(order)
    walker.js("""(async () => {
        const rows = [...runs.values()].reverse();
        load = async () => [...rows, {...rows[0], id: "new"}];
        await pollRuns();
    })()""")
    assert walker.js(order) == f"new,{was}"
    for error, told in (
        ("new RequestError('no')", "The server rejected the request: no."),
        ("0", "does not respond"),
    ):
        failing = f"load = async () => {{ throw {error}; }}"
        walker.js(f"(async () => {{ {failing}; await pollRuns(); }})()")
        assert told in walker.text("#banner")
        walker.js("banner.hidden = true")
    walker.js("document.querySelector('[aria-label=\"filter runs\"]').focus()")
    walker.key("3")
    walker.settle()
    assert walker.js("place.view") == "runs", "who types does not go anywhere"


def test_the_playground_asks_what_the_form_says(walker: Tab, site: Site, artist: Studio) -> None:
    ready = "document.getElementById('play-prompt')?.value"
    to(walker, site, "playground?run=signs", ready)
    walker.js("""(() => {
        const [seed, n] = document.querySelectorAll("input[type=number]");
        for (const [field, value] of [[seed, 7], [n, 2]]) {
            field.value = value;
            field.dispatchEvent(new Event("input"));
        }
        document.querySelector(".play-form input[type=checkbox]").click();
        document.querySelector(".play-form").requestSubmit();
    })()""")
    walker.wait("document.querySelectorAll('.play-pair').length === 2")
    asked = artist.asked[-1]
    assert (asked.seed, asked.n, asked.score) == (7, 2, False)
    assert walker.texts(".play-pair:first-child figcaption > span")[0].startswith("base")
    assert "0.250" in walker.texts(".play-pair:first-child figcaption > span")[0]
    walker.click(".play-form .row button[type=button]")
    walker.wait("playing.request.seed !== 7 && playing.result")
    assert artist.asked[-1].seed == walker.js("playing.seed") != 7
