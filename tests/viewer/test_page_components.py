"""Pieces of the page by themselves, in a real browser: one tab, records made up here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.viewer.browser import Browser, Tab
from tests.viewer.site import Site

OK = {"level": "green", "kinds": [], "sentences": []}


def record(name: str, **more: Any) -> dict[str, Any]:
    """A line of the table of runs."""
    held_out = {"key": "eval/reward", "first": 0.1, "now": 0.9, "best": 0.95}
    return {
        "id": name, "name": name, "about": "", "recipe": "", "algorithm": "grpo", "model": "m",
        "family": "flow", "seed": 0, "steps": 10, "left": None, "state": "finished", "health": OK,
        "changed": 1.0, "step": 4, "reward": 0.25, "best": 0.75, "held_out": held_out,
        "samples_per_s": 1.0, "seconds": 5.0, "spark": [], **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def still(browser: Browser, site: Site) -> Iterator[Tab]:
    """A page that asks for no news, so that what a test puts into it stays."""
    tab = browser.tab()
    tab.open(site.url)
    tab.js("Object.defineProperty(document, 'hidden', {get: () => true})")
    yield tab
    complaints = tab.complaints
    tab.close()
    assert complaints == []


def show(tab: Tab, *rows: dict[str, Any]) -> None:
    """These runs and no others, in the table."""
    tab.js(
        f"runs.clear(); for (const r of {json.dumps(rows)}) runs.set(r.id, r);"
        "runsView.sort = null; runsView.up = true; runsView.filter = ''; runsView.open.clear();"
        "drawTable()"
    )


def names(tab: Tab) -> str:
    return tab.js("[...document.querySelectorAll('tr[data-run]')].map((r) => r.dataset.run).join()")


def test_a_line_reports_now_and_best_time_left_and_health(still: Tab) -> None:
    sad = {"level": "red", "kinds": ["x"], "sentences": ["the loss is <b>gone</b>"]}
    show(still, record("a", state="running", left=3723.0, health=sad))
    cell = {
        name: still.text(f"td.c-{name}") for name in ("reward", "held", "left", "health", "step")
    }
    assert cell["reward"].split() == ["0.250", "best", "0.750"]
    assert cell["held"] == "0.100→0.900" and cell["left"] == "1:02:03 left"
    assert cell["health"].split() == ["problem", "running"] and cell["step"] == "4 / 10"
    assert still.js("document.querySelector('.c-health .health').className") == "health red"
    assert still.js("document.querySelector('.c-step .progress i').style.width") == "40%"
    assert still.js("document.querySelector('td.c-health button').title") == sad["sentences"][0]
    still.js("runsView.open.add('a'); drawTable()")
    assert sad["sentences"][0] in still.text(".more")


def test_a_run_of_another_version_is_well_only_if_nothing_says_otherwise(still: Tab) -> None:
    amber = {"level": "amber", "kinds": ["x"], "sentences": ["x"]}
    show(still, record("a", state="unknown"), record("b", state="unknown", health=amber))
    assert [text.split()[0] for text in still.texts("td.c-health")] == ["unknown", "warning"]


def test_sorting_goes_down_up_and_back_and_the_unknown_comes_last(still: Tab) -> None:
    show(still, record("b", reward=0.2), record("c", reward=None), record("a", reward=0.4))
    press = "document.querySelector('[data-keep=\"sort reward\"]').click()"
    for order in ("a,b,c", "b,a,c", "b,c,a"):
        still.js(press)
        assert names(still) == order
    still.js("document.querySelector('[data-keep=\"sort run\"]').click()")
    assert names(still) == "a,b,c", "names begin at their beginning"


def test_the_filter_requires_all_words_and_ticks_can_be_removed(still: Tab) -> None:
    show(still, record("signs", model="zoo:a"), record("count", algorithm="nft", model="zoo:a"))
    assert "run=count" in still.js("document.querySelector('[data-keep=\"open count\"]').hash")
    still.js("runsView.filter = 'zoo nft'; drawTable()")
    assert names(still) == "count" and still.text(".count") == "1 of 2 runs"
    still.js("go('runs', {tick: ['signs', 'count'], run: 'signs'})")
    still.wait("ticked().join() === 'signs,count'")
    assert still.js("colour('signs') !== colour('count')")
    still.js("setTicked('signs', false)")
    still.wait("ticked().join() === 'count' && mainRun() === 'count'")
    still.js("history.replaceState(null, '', '#/runs'); readPlace()")


def prompts(*rewards: Sequence[float | None], **cell: Any) -> str:
    """Prompts with these rewards at steps 0, 2, …"""
    return json.dumps(
        [
            {
                "index": i, "prompt": f"p{i}", "seed": "1", "answer": "", "shown": [],
                "cells": [None if r is None else {"reward": r, **cell} for r in row],
            }
            for i, row in enumerate(rewards)
        ]
    )  # fmt: skip


def test_the_first_card_has_those_that_rose_most(still: Tab) -> None:
    gains = [0.1, 0.5, -0.2, 0.9, 0.3, 0.0, 0.7, 0.6]
    rows = prompts(*([0.1, 0.1 + gain] for gain in gains), response="x")
    wall = still.js(
        f"firstWall('signs', {{steps: [0, 2], prompts: {rows}, size: null}})"
        ".map((a) => a.querySelector('.pair-prompt').textContent).join()"
    )
    assert wall == "p3,p6,p7,p1,p4,p0"


def test_what_became_of_a_prompt(still: Tab) -> None:
    told = still.js(
        "[[0, 1], [1, 0], [1, 1], [0, 0], [1, 0, 1], [0, 1, 0]].map((rights) =>"
        "trendOf({cells: rights.map((r) => ({reward: 0, right: Boolean(r)}))})).join()"
    )
    assert told == "learned,lost,right,wrong,mixed,mixed"
    told = still.js(f"{prompts([0.1, 0.2], [0.2, 0.1], [0.2, 0.9, 0.2])}.map(trendOf).join()")
    assert told == "better,worse,same"


def test_times_and_figures_as_text(still: Tab) -> None:
    assert still.js("[5, 65, 3723, null].map(clock).join()") == "0:05,1:05,1:02:03,–"
    assert still.js("[0.004, 0.0994, 0.5].map(percent).join()") == "0.4%,9.9%,50%"


def test_images_come_late_small_and_crisp(still: Tab) -> None:
    made = still.js("""[[24, 8], [1024, 512], null].map((size) => {
        const img = imageNode("signs", "samples/000000/000.png", "alt", 192, size);
        const crisp = img.classList.contains("pixels");
        return [img.loading, img.src.includes("width=192"), crisp, img.alt];
    })""")
    assert made == [
        ["lazy", False, True, "alt"], ["lazy", True, False, "alt"], ["lazy", True, False, "alt"],
    ]  # fmt: skip


def test_the_timeline_rises_with_the_reward_and_its_marker_goes_along(still: Tab) -> None:
    hill, marks = still.js("""(() => {
        const line = new Timeline([0, 2, 4], [0.1, 0.5, 0.9], () => {});
        const ends = [0, 1, 2].map((i) => { line.set(i); return line.marker.style.left; });
        return [line.node.querySelector(".top").getAttribute("d"), ends];
    })()""")
    assert hill == "M0.0 92.0L500.0 52.0L1000.0 12.0" and marks == ["0%", "50%", "100%"]


CHART = """(() => {
    const chart = new Chart("t", new Crosshair(), {xText: String});
    chart.width = 400;
    chart.xLabel = "step";
    document.body.append(chart.node);
    chart.set([{label: "a", kind: "train", colour: "red", x: [0, 1, 2, 10], y: [1, 10, 100, 0.5],
        low: LOW, high: LOW && [2, 20, 200, 1]}], SMOOTH, LOG);
    chart.cross.set(8, chart);
    const told = WHAT;
    chart.close();
    chart.node.remove();
    return told;
})()"""


def chart(tab: Tab, what: str, low: str = "null", smooth: float = 0, log: bool = False) -> Any:
    code = CHART.replace("WHAT", what).replace("LOW", low)
    return tab.js(code.replace("SMOOTH", str(smooth)).replace("LOG", str(log).lower()))


def test_a_chart_goes_up_and_reads_the_nearest_point(still: Tab) -> None:
    heights = "[0.5, 1, 10, 100].map((v) => chart.y(v))"
    plain, in_log = chart(still, heights), chart(still, heights, log=True)
    assert plain == sorted(plain, reverse=True), "more is higher"
    assert in_log[1] - in_log[2] == pytest.approx(in_log[2] - in_log[3]), "equal factors"
    assert plain[1] - plain[2] < (plain[2] - plain[3]) / 5
    assert chart(still, heights, "[0, 1, 2, .4]", log=True)[3] == pytest.approx(
        chart(still, heights, "[0, 1, 2, .4]")[3]
    ), "no log scale over figures that reach zero"
    assert chart(still, "chart.tip.innerText", "null").split() == ["step", "10", "a", "0.500"]
    calmer = still.js("smoothed([1, 10, 100, 0.5], 0.5)[3]")
    assert chart(still, "chart.tip.querySelector('b').innerText", smooth=0.5) == f"{calmer:.1f}"
    assert chart(still, "chart.svg.querySelectorAll('.band').length", "[.5, 1, 2, .4]") == 1
    assert "0.400 to 1" in chart(still, "chart.tip.innerText", "[.5, 1, 2, .4]")


def test_lines_of_runs_have_their_kinds_colours_and_axes(still: Tab) -> None:
    made = still.js("""(() => {
        const before = lines.axis;
        const panel = {title: "Reward", note: "", train: "reward", held: "eval/reward"};
        place.params = new URLSearchParams("tick=signs&tick=count");
        for (const id of ["signs", "count"]) if (!runs.has(id)) runs.set(id, {id});
        const section = new Section("Reward", [panel], [{id: "signs"}, {id: "count"}]);
        const series = (y) => ({step: [1, 2], samples: [24, 48], seconds: [60, 90], y});
        for (const [id, by] of [["signs", 0], ["count", 4]]) {
            const held = series([by + 2, by + 3]);
            section.data.set(id, {reward: series([by, by + 1]), "eval/reward": held});
        }
        const told = ["step", "samples", "seconds"].map((axis) => {
            lines.axis = axis;
            section.draw();
            const {chart} = section.charts[0];
            const drawn = chart.lines.map((l) => [l.label, l.kind, l.x[1], l.y[0]]);
            return [chart.xLabel, chart.xText(3600), drawn];
        });
        const colours = new Set(section.charts[0].chart.lines.map((l) => l.colour));
        lines.axis = before;
        section.close();
        return [told, colours.size];
    })()""")
    (told, colours) = made
    assert [(label, text) for label, text, _ in told] == [
        ("step", "3,600"), ("sample", "3,600"), ("time", "1:00:00"),
    ]  # fmt: skip
    assert told[1][2] == [
        ["signs, training", "train", 48, 0], ["signs, held-out", "held", 48, 2],
        ["count, training", "train", 48, 4], ["count, held-out", "held", 48, 6],
    ]  # fmt: skip
    assert [lines[0][2] for _, _, lines in told] == [2, 48, 90] and colours == 2


def test_panels_know_parts_from_spread(still: Tab) -> None:
    keys = ["reward", "eval/reward", "reward/ocr", "eval/ocr", "reward/std", "update/kl", "odd/one"]
    made = still.js(f"panelsOf([{{keys: {json.dumps(keys)}}}])")
    found = {title: [(p["train"], p["held"]) for p in panels] for title, panels in made.items()}
    assert found["Reward"] == [("reward", "eval/reward"), ("reward/ocr", "eval/ocr")]
    assert found["Update"] == [("update/kl", None)]
    assert found["Group statistics"] == [("reward/std", None)]
    assert found["Other metrics"] == [("odd/one", None)]


def test_groups_tell_halves_and_sides(still: Tab) -> None:
    assert still.js("halfOf([.1, .4, .2, .3].map((share) => ({share})))") == 2
    bars = still.js(
        "[1, -0.5].map((a) => advantageBar(a, 1).firstChild)"
        ".map((i) => [i.className, i.style.left, i.style.width])"
    )
    assert bars == [["plus", "50%", "50%"], ["minus", "25%", "25%"]]
    card = still.js("""(() => {
        const group = {prompt: "p", shown: [], share: 0.4, mean: 0.25, std: 0.5, samples: [
            {reward: 0, advantage: -1, share: 0.1, response: "x"},
            {reward: 1, advantage: 1, share: 0.3, response: "y"}]};
        const node = groupCard("signs", group, 0, 0.8, 1);
        const said = (at) => node.querySelector(at).textContent;
        return [node.querySelector(".share-track i").style.width, said(".group-figures"),
            [...node.querySelectorAll(".sample")].map((e) => e.textContent)];
    })()""")
    assert card == ["50%", "0.250 ± 0.500", ["y1.00030%+1.000", "x010%−1.000"]]


def test_the_playground_shows_base_before_trained(still: Tab) -> None:
    told = still.js("""(() => {
        Object.assign(playing, {request: {prompt: "p", seed: 5}, mode: "side"});
        const cells = (response, reward) => [{response, reward, parts: {}, text: ""}];
        const [base, trained] = [cells("before", 0.25), cells("after", 0.75)];
        const made = playResult({step: 4, notes: ["not <scored>"], base, trained});
        return h("div", {}, made).textContent;
    })()""")
    assert "seed 5" in told and "Mean reward 0.250 → 0.750" in told and "not <scored>" in told
    assert told.index("before") < told.index("after") and told.index("base") < told.index("after")


def test_responses_alike_are_reported_once_and_new_words_marked(still: Tab) -> None:
    cells = [{"response": r, "reward": 0} for r in ("one two", "one two", "one three")]
    found = {"cells": cells}
    turns = still.js(
        f"turnsOf({json.dumps(found)}, {{steps: [0, 2, 4]}}).map((t) => [t.from, t.to])"
    )
    assert turns == [[0, 1], [2, 2]]
    marked = still.js(
        "[...responseText('one three', 'one two').querySelectorAll('mark')].map(m => m.textContent)"
    )
    assert marked == ["three"]


def test_the_config_is_read_as_runs_write_it(still: Tab) -> None:
    text = (
        'about = "a [list = 1"\nsteps = 4\n[data]\ntrain = [\n  "a",\n  "b",\n]\n'
        '[[reward]]\nname = "ocr"\n[[reward]]\nname = "clip"\n'
    )
    assert still.js(f"Object.fromEntries(flatten({json.dumps(text)}))") == {
        "about": '"a [list = 1"', "steps": "4", "data.train": '["a", "b"]',
        "reward[1].name": '"ocr"', "reward[2].name": '"clip"',
    }  # fmt: skip
    classes = still.js(
        "['2026-01-01 00:00:00 step 2: warning (x): y', '2026-01-01 00:00:00 self-test: fine']"
        ".map(logLine).map((li) => li.className).join()"
    )
    assert classes == "warn,"


def test_rewards_and_their_marks(still: Tab) -> None:
    cells = [{"reward": 0.9, "right": True}, {"reward": 0.1, "right": False}, {"reward": None}]
    told = still.js(
        f"{json.dumps(cells)}"
        """.map((cell) => {
        const node = rewardOf(cell, {reward: 0.5});
        const [mark, by] = ["[role=img]", ".change"].map((at) => node.querySelector(at));
        return [node.textContent, mark?.className, mark?.ariaLabel, by?.className];
    })"""
    )
    assert told == [
        ["0.900▲ 0.400", "mark-right", "correct", "change up"],
        ["0.100▼ 0.400", "mark-wrong", "incorrect", "change down"],
        ["no score", None, None, None],
    ]
    squares = still.js("""(() => {
        const cells = [{reward: 0, right: false}, {reward: 1, right: true}, null, {reward: 0.5}];
        return rewardSquares({cells}, {steps: [0, 2, 4, 6]}, () => {})
            .map((b) => b.className + b.title);
    })()""")
    assert squares == [
        "square wrongstep 0: incorrect, reward 0", "square rightstep 2: correct, reward 1.000",
        "square nonestep 4: not saved", "square scoredstep 6: reward 0.500",
    ]  # fmt: skip


def test_a_table_of_values_ends_with_the_latest(still: Tab) -> None:
    last = still.js("""(() => {
        const x = Array.from({length: 120}, (_, i) => i), own = [{label: "a", x, y: x}];
        const table = valuesTable("t", own, {xLabel: "step", xText: String});
        const rows = [...table.querySelectorAll("tbody tr")].map((r) => r.textContent);
        return [rows.length, rows.at(-1)];
    })()""")
    assert last == [41, "119119"]


def test_a_reported_curve_lies_behind_the_curves_of_runs(still: Tab) -> None:
    """Once for two runs of a recipe; the points only over steps."""
    expect = {
        "metric": "eval/ocr", "value": 0.92, "source": "a paper", "steps": [0, 9], "values": [0, 1],
    }  # fmt: skip
    runs = [{"id": name, "expect": expect} for name in "ab"] + [{"id": "c", "expect": None}]
    still.js(
        "panel = {title: 'ocr', note: '', train: 'reward/ocr', held: 'eval/ocr'};"
        f"section = new Section('x', [panel], {json.dumps(runs)});"
        "own = [{label: 'a', kind: 'held', colour: 'red', x: [0, 4, 6], y: [0.1, 0.2, 0.3]}]"
    )
    after, during = still.js("section.reported(panel, own)")
    assert (after["x"], after["y"]) == ([0, 6], [0.92, 0.92]) and "a paper" in after["label"]
    assert (during["x"], during["y"]) == ([0, 9], [0, 1])
    assert still.js("section.reported({train: 'reward', held: null}, own)") == []
    assert still.js("section.reported(panel, [])") == [], "no chart without a run"
    still.js("lines.axis = 'seconds'")
    assert len(still.js("section.reported(panel, own)")) == 1
    still.js("lines.axis = 'step'; section.close()")
