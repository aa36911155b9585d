"""The page in a real browser: what every view shows and does."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from gesso.types import UserError
from gesso.zoo import scenes, words
from tests.viewer.browser import Tab
from tests.viewer.site import NASTY, PROMPTS, Site, Studio


def test_runs_are_a_table_that_sorts_filters_and_compares(tab: Tab, site: Site) -> None:
    tab.open(site.url)
    assert tab.count("tr[data-run]") == 3
    row = "tr[data-run=signs]"
    told = tab.text(row)
    for part in ("signs", "writes words", "flow-grpo", "zoo:signs", "0.400", "4 / 10", "healthy"):
        assert part in told, f"{part} is not in {told}"
    tab.click("[data-keep='sort reward']")
    tab.click("[data-keep='sort reward']")
    names = "[...document.querySelectorAll('tr[data-run]')].map((r) => r.dataset.run).join()"
    assert tab.js(names) == "count,signs,odd" or tab.js(names) == "count,odd,signs"
    tab.js("document.querySelector('[aria-label=\"filter runs\"]').focus()")
    tab.type("flow zoo:signs")
    tab.wait("document.querySelectorAll('tr[data-run]').length === 1")
    tab.js("runsView.filter = ''; drawTable()")
    for name in ("signs", "count"):
        if not tab.js(f"ticked().includes('{name}')"):
            tab.click(f"[data-keep='tick {name}']")
    tab.wait("ticked().length >= 2")
    before = tab.js("colour('signs')")
    tab.key("3")
    tab.wait("place.view === 'curves' && document.querySelector('.curve-tools')")
    assert tab.js("colour('signs')") == before != tab.js("colour('count')")
    assert "signs" in tab.text(".curve-tools") and "count" in tab.text(".curve-tools")
    tab.js("history.back()")
    tab.wait("place.view === 'runs' && document.querySelectorAll('tr[data-run]').length === 3")
    tab.click("[data-keep='health signs']")
    assert "No active warnings" in tab.text(".more")


def test_the_slider_moves_all_images_and_the_address(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/#/evolution?run=signs")
    tab.wait("document.querySelectorAll('.card img').length === 3")
    assert "step 4" in tab.text(".readout") and "READ1" in tab.text(".card")
    assert "0.900" in tab.text(".card .under")
    tab.js("document.querySelector('.step-slider').focus()")
    tab.key("Home")
    tab.wait("document.querySelector('.card img').src.includes('000000')")
    assert "step=0" in tab.js("location.hash")
    assert "READ0" in tab.text(".card") and "0.400" in tab.text(".card .under")
    assert tab.count(".card.is-wrong") == 2
    tab.js("document.activeElement.blur()")
    tab.key("ArrowRight")
    shown = "[...document.querySelectorAll('.card img')].every((i) => i.src.includes('000002'))"
    tab.wait(shown)
    assert "step 2" in tab.text(".readout")
    for alt in tab.js("[...document.querySelectorAll('.card img')].map((i) => i.alt)"):
        assert "step 2, reward" in alt


def test_it_plays_to_the_end_and_stops(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/#/evolution?run=signs")
    tab.wait("document.querySelectorAll('.card img').length === 3")
    tab.js("evo.speed = '4'")
    tab.key(" ")
    assert tab.js("document.querySelector('.play').getAttribute('aria-label')") == "pause"
    tab.wait("evo.at === 0 || evo.at === 1")
    tab.wait("evo.at === 2 && !evo.playing")
    assert tab.js("document.querySelector('.play').getAttribute('aria-label')") == "play"
    tab.wait("document.querySelector('.card img').src.includes('000004')")


def test_an_image_that_comes_too_late_is_not_shown(tab: Tab, site: Site) -> None:
    tab.open(site.url)
    shown = tab.js("""(async () => {
        const plain = decoded, cell = (step) => ({image: `samples/${step}/000.png`});
        decoded = async (url) => {  // the first to be asked for comes last
            if (url.includes("000000")) await new Promise((done) => setTimeout(done, 200));
            return plain(url);
        };
        const slot = new Slot("signs", null, 384);
        await Promise.all([slot.show(cell("000000"), "late"), slot.show(cell("000002"), "now")]);
        return slot.node.querySelector("img").alt;
    })()""")
    assert shown == "now"


def test_before_and_after_are_wiped_by_mouse_and_keys(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/#/evolution?run=signs")
    tab.click(".filters input[value=wipe]")
    tab.wait("document.querySelectorAll('.wipe img').length === 6")
    assert "000000" in tab.js("document.querySelector('.wipe img').src")
    assert "000004" in tab.js("document.querySelector('.wipe .after img').src")
    assert tab.text(".card .under").split() == ["0.400", "→", "0.900", "▲", "0.500"]
    box = tab.box(".wipe")
    middle = box["y"] + box["height"] / 2
    cut = "document.querySelector('.images').style.getPropertyValue('--cut')"
    tab.drag(
        (box["x"] + box["width"] / 2, middle),
        (box["x"] + box["width"] * 0.3, middle),
        (box["x"] + box["width"] * 0.2, middle),
    )
    assert tab.js(cut) == "20%"
    clip = "getComputedStyle(document.querySelector('.wipe .after')).clipPath"
    assert tab.js(clip) == "inset(0px 0px 0px 20%)"
    left = tab.js("document.querySelector('.handle').getBoundingClientRect().x")
    assert abs(left - (box["x"] + box["width"] * 0.2)) < 3
    tab.js("document.querySelector('.wipe input').focus()")
    tab.key("ArrowRight")
    assert tab.js(cut) == "21%"
    assert tab.js("evo.at") == 2, "the wipe's keys are not the slider's"
    tab.js("document.querySelector('[data-keep=find]').focus(); buildEvolution(evo.data)")
    assert tab.js(cut) == "21%" and tab.js("document.activeElement.dataset.keep") == "find"


def test_film_strips_and_one_prompt_large(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/#/evolution?run=signs")
    tab.click(".filters input[value=film]")
    tab.wait("document.querySelectorAll('.strip').length === 3")
    assert tab.count(".film-row:first-child .frame") == 3
    assert "0.400" in tab.texts(".film-row:first-child .frame")[0]
    tab.click(".film-row:first-child .frame:nth-child(2)")
    tab.wait("document.querySelectorAll('.frame:nth-child(2).here').length === 3")
    tab.click(".filters input[value=now]")
    tab.click("a.card[data-prompt='1']")
    tab.wait("document.querySelectorAll('.stage img').length === 2")
    assert "prompt=1" in tab.js("location.hash") and tab.text("h1") == PROMPTS[1]
    assert "step 2" in tab.text(".tags") and "READ1" in tab.text(".large-facts")
    films = tab.js("[...document.querySelectorAll('a[download]')].map((a) => a.href)")
    for address in films:
        kind = tab.js(f"fetch('{address}').then((r) => r.headers.get('content-type'))")
        assert kind in ("image/gif", "video/mp4"), address
    tab.key("ArrowDown")
    tab.wait("place.params.get('prompt') === '2' && document.querySelector('h1')")
    tab.key("Escape")
    tab.wait("document.querySelectorAll('.card').length === 3")


def test_prompts_are_filtered_by_what_became_of_them(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/#/evolution?run=signs")
    tab.wait("document.querySelectorAll('.card').length === 3")
    for course, prompt in [("learned", 0), ("lost", 1), ("wrong", 2)]:
        tab.click(f".filters input[value={course}]")
        tab.wait("document.querySelectorAll('.card').length === 1")
        assert PROMPTS[prompt] in tab.text(".card")
    tab.click(".filters input[value=all]")
    tab.js("document.querySelector('[aria-label=\"search prompts\"]').focus()")
    tab.type("elm")
    tab.wait("document.querySelectorAll('.card').length === 1")


def test_html_in_prompts_and_responses_is_text(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/#/evolution?run=signs&prompt=2")
    tab.wait("document.querySelector('h1')")
    assert tab.text("h1") == NASTY
    for place in ("groups?run=signs", "evolution?run=count", "notes?tick=signs", "runs"):
        tab.go(f"#/{place}")
        tab.settle()
    assert tab.js("window.hacked") is None
    assert tab.count("main script, main [onerror]") == 0
    tab.go("#/evolution?run=count")
    tab.wait("document.querySelectorAll('.response-card').length === 2")
    assert "<b>six</b>" in tab.text(".responses") and tab.count(".response-text b") == 0


def test_answers_over_steps_with_what_changed(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/#/evolution?run=count")
    tab.wait("document.querySelector('.turn.now mark')")
    card = ".response-card:first-child"
    assert tab.texts(f"{card} mark") == ["5", "5"], "only the words that are new"
    assert "expected 5" in tab.text(card) and tab.count(f"{card} .prompt-images img") == 1
    assert tab.count(f"{card} .square.wrong") == 1 and tab.count(f"{card} .square.right") == 1
    tab.click(f"{card} .square:first-child")
    tab.wait("document.querySelectorAll('.turn.now mark').length === 0")
    tab.click(f"{card} .question a")
    tab.wait("document.querySelectorAll('.turns li').length === 2")
    tab.go("#/evolution?run=count&prompt=1")
    tab.wait("document.querySelectorAll('.turns li').length === 1")
    assert "steps 0 to 2" in tab.text(".turns")


def test_curves_of_several_runs(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/#/curves?tick=signs&tick=count")
    first = "[data-key=reward]"
    tab.wait(f"document.querySelectorAll('{first} .line').length === 4")
    ends = f"document.querySelector('{first} .line .mean').getAttribute('d')"
    raw = tab.js(ends)
    tab.js(
        "(() => { const r = document.querySelector('[aria-label=smoothing]'); r.value = .9;"
        "r.dispatchEvent(new Event('input')); })()"
    )
    assert tab.js(ends) != raw and tab.count(f"{first} .train .raw") == 2
    assert tab.count(f"{first} .held .raw") == 0, "evaluations are means already"
    for axis, last in [("samples", 96), ("seconds", 10)]:  # 4 × 4 × 6; five rows of 2 s
        tab.click(f".curve-tools input[value={axis}]")
        assert (
            tab.js("Math.max(...lines.sections[0].charts[0].chart.lines.flatMap((l) => l.x))")
            == last
        )
    tab.click(".curve-tools input[value=step]")
    box = tab.box(f"{first} .chart")
    tab.hover(box["x"] + box["width"] - 20, box["y"] + 80)
    tab.wait(f"!document.querySelector('{first} .tip').hidden")
    tip = tab.text(f"{first} .tip")
    assert "step 4" in tip and "signs, held-out" in tip and "count, training" in tip
    tab.js(f"document.querySelector('{first} .chart').focus()")
    tab.key("ArrowLeft")
    assert "step 3" in tab.text("#announcer") or "step 4" in tab.text("#announcer")
    tab.click(".check:last-child input")
    tab.wait("document.querySelector('.values table')")
    assert "0.500" in tab.text(f"{first} .values"), "the held-out reward at step 4"


def test_smoothing_is_an_unbiased_exponential_mean(tab: Tab, site: Site) -> None:
    tab.open(site.url)
    got = tab.js("smoothed([1, 0, 2], .5)")
    assert got == pytest.approx([1, (0.5 * 1 + 0) / 1.5, (0.25 * 1 + 0 + 1 * 2) / 1.75])
    assert (
        tab.js("ticksOf(0, 1, 5).values.map((v) => v.toFixed(1)).join()")
        == "0.0,0.2,0.4,0.6,0.8,1.0"
    )
    small = "ticksOf(9.2e-8, 1.24e-7, 5)"
    told = tab.js(f"{small}.values.map((v) => tickText(v, {small}.unit)).join()")
    assert told == "1.0e-7,1.1e-7,1.2e-7", "no two ticks read the same"
    assert (
        tab.js("[.5, 0, 1234, 2e-5, -.25, null].map(figure).join(' ')")
        == "0.500 0 1,234 2.0e−5 −0.250 –"
    )


def test_groups_show_where_the_gradient_came_from(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/#/groups?run=signs")
    tab.wait("document.querySelectorAll('.group').length === 2")
    assert "step 4" in tab.text(".groups-transport")
    first, second = tab.texts(".group summary")
    assert first.startswith("100%") and "prompt 0" in first and second.startswith("0.0%")
    tab.wait("document.querySelectorAll('.group[open] .sample').length === 2")
    assert tab.texts(".diverging") == ["+0.500", "−0.500"], "sorted by advantage"
    assert tab.count(".group[open] .sample img") == 2
    tab.wait("[...document.images].every((i) => i.complete)")  # nothing moves under the mouse
    tab.click(".group:nth-child(2) summary")
    tab.wait("document.querySelector('.group:nth-child(2) .sample')")
    assert "Only the values of this group were saved" in tab.text(".group:nth-child(2)")
    tab.js("document.activeElement.blur()")
    tab.key("ArrowLeft")
    tab.wait("document.querySelector('.groups-transport').innerText.includes('step 2')")
    assert "83%" in tab.text(".group summary")
    assert tab.count(".group[open]") == 2, "a prompt that was opened stays open"
    assert tab.texts(".stats .stat b")[1:] == ["2", "0", "1 group"], "none is without gradient"


def test_the_timeline_has_a_row_for_every_worker(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/#/timeline?run=signs")
    tab.wait("document.querySelectorAll('.lane rect').length === 2")
    assert tab.texts(".lane .idle") == ["idle 25%", "idle 75%"]
    assert tab.text(".lead").startswith("Workers wait 50% of the time for each other")
    tab.click("[aria-label='previous step']")
    tab.wait("document.querySelector('.big').textContent === 'step 3'")


def test_the_playground_samples_both_and_reports_what_goes_wrong(
    tab: Tab, site: Site, artist: Studio
) -> None:
    tab.open(f"{site.url}/#/playground?run=signs")
    tab.wait(f"document.getElementById('play-prompt').value === {json.dumps(PROMPTS[0])}")
    artist.go.clear()
    tab.click("button[type=submit]")
    tab.wait("document.querySelector('.working')?.innerText.includes('drawing')")
    assert tab.js("document.querySelector('.working [role=progressbar]').ariaValueNow") == "25"
    artist.go.set()
    tab.wait("document.querySelectorAll('.play-pair').length === 4")
    assert "step 4" in tab.text(".play-out") and "0.250" in tab.text(".play-pair")
    assert tab.count(".play-pair:first-child .side img") == 2
    tab.click(".play-out input[value=wipe]")
    tab.wait("document.querySelectorAll('.play-pair:first-child .wipe img').length === 2")
    asked = artist.asked[-1]
    assert (asked.prompt, asked.seed, asked.n, asked.score) == (PROMPTS[0], 0, 4, True)
    artist.error = UserError("no checkpoint <yet>")
    tab.click("button[type=submit]")
    tab.wait("document.querySelector('.error')?.innerText === 'no checkpoint <yet>'")
    artist.error = None


def test_the_playground_says_what_a_bundled_model_can_do(
    tab: Tab, site: Site, artist: Studio
) -> None:
    """Beside the field before anything is typed, and beside the result of a prompt that differs."""
    for run, limits in (("signs", words.LIMITS), ("count", scenes.LIMITS)):
        tab.open(f"{site.url}/#/playground?run={run}")
        tab.wait("document.getElementById('play-prompt')")
        assert tab.text("#play-limits") == limits
        described = "document.getElementById('play-prompt').getAttribute('aria-describedby')"
        assert tab.js(described) == "play-limits"
        field, hint = tab.box("#play-prompt"), tab.box("#play-limits")
        assert 0 <= hint["y"] - field["y"] - field["height"] < 20, "right below the field"
    artist.note = f'"OAK" has 3 letters. {words.LIMITS}'
    try:
        tab.open(f"{site.url}/#/playground?run=signs")
        tab.wait("document.getElementById('play-prompt')?.value")
        tab.click("button[type=submit]")
        tab.wait("document.querySelectorAll('.play-pair').length === 4")
    finally:
        told, artist.note = artist.note, ""
    assert tab.texts(".play-out .note") == [told]
    tab.open(f"{site.url}/#/playground?run=odd")  # of a model that nobody knows
    tab.wait("document.getElementById('play-prompt')")
    assert tab.count("#play-limits") == 0
    assert (
        tab.js("document.getElementById('play-prompt').hasAttribute('aria-describedby')") is False
    )


def test_the_playground_of_a_vision_language_model(
    tab: Tab, site: Site, artist: Studio, pages: Path
) -> None:
    tab.open(f"{site.url}/#/playground?run=count")
    tab.wait("document.querySelector('.preview img')")
    assert tab.js("document.getElementById('play-answer').value") == "5"
    tab.click("button[type=submit]")
    tab.wait("document.querySelector('.play-pair')")
    asked = artist.asked[-1]
    picture = pages / "count" / "samples" / "prompts" / "000-1.png"
    assert (asked.run, asked.prompt, asked.answer) == ("count", "How many?", "5")
    assert [base64.b64decode(image) for image in asked.images] == [picture.read_bytes()]


def test_notes_compare_configs_and_link_the_report(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/#/notes?tick=signs&tick=count")
    tab.wait("document.querySelectorAll('.note-card').length === 2")
    assert "self-test: fine" in tab.text(".note-card")
    rows = tab.texts(".config tbody tr")
    assert any("model.path" in r and '"zoo:signs"' in r and '"zoo:shapes"' in r for r in rows)
    assert not any("algorithm.group" in r for r in rows), "only what differs"
    link = tab.js("document.querySelector('a[download]').href")
    assert link.endswith("report?run=signs&run=count")
