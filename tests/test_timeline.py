"""Phases, the timeline of a run, what to change, and traces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gesso import cli, clock
from gesso.timeline import advice, chrome, recorder, steps
from gesso.timeline.recorder import Span
from gesso.timeline.steps import Step
from gesso.track import timeline_file
from gesso.track.timeline_file import TimelineFile
from tests.viewer import folders


class Time:
    def __init__(self) -> None:
        self.now = 0.0


@pytest.fixture
def time() -> Iterator[Time]:
    made = Time()
    recorder.take()
    with clock.reading(lambda: made.now):
        yield made


def test_a_phase_inside_another_interrupts_it(time: Time) -> None:
    with recorder.phase("update"):
        time.now = 1.0
        with recorder.phase("wait"):
            time.now = 3.0
        time.now = 4.0
    with recorder.phase("evaluate", whole=True), recorder.phase("sample"):
        time.now = 6.0
    assert recorder.take() == [
        Span("driver", "update", 0.0, 1.0),
        Span("driver", "wait", 1.0, 3.0),
        Span("driver", "update", 3.0, 4.0),
        Span("driver", "evaluate", 4.0, 6.0),
    ]


def test_only_the_making_of_items_is_recorded(time: Time) -> None:
    def items() -> Iterator[int]:
        for item in range(2):
            time.now += 1.0
            yield item

    for _ in recorder.each("sample", items()):
        time.now += 5.0
    found = [(span.start, span.end) for span in recorder.take()]
    assert found == [(0.0, 1.0), (6.0, 7.0)]


def test_an_error_ends_the_phase(time: Time) -> None:
    with pytest.raises(ValueError), recorder.phase("sample"):
        time.now = 1.0
        raise ValueError
    with recorder.phase("update"):
        time.now = 2.0
    assert [span.phase for span in recorder.take()] == ["sample", "update"]


def test_spans_of_a_worker_come_by_the_clock_of_the_driver(time: Time) -> None:
    time.now = 100.0
    with recorder.phase("sample"):
        time.now = 102.0
    time.now = 103.0
    sent = json.loads(json.dumps(recorder.to_send()))
    time.now = 7.0  # the driver's clock
    recorder.received(recorder.worker(1), sent)
    assert recorder.take() == [Span("worker 1", "sample", 4.0, 6.0)]


def test_calls_that_overlap_count_once() -> None:
    found = Step.of(
        2,
        5.0,
        10.0,
        20.0,
        [Span("rewards", "score", 11.0, 14.0), Span("rewards", "score", 12.0, 15.0)],
    )
    assert found.busy == {"rewards": {"score": 4.0}} and found.seconds == 10.0
    assert found.spans == {"rewards": [("score", 1.0, 5.0)]}
    assert Step.read(json.loads(json.dumps(found.line))) == found


def test_many_spans_are_joined_and_their_sum_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "DRAWN", 30)
    many = [
        Span("worker 0", ("update", "wait")[i % 2], 0.01 * i, 0.01 * i + 0.01) for i in range(1000)
    ]
    found = Step.of(1, 0.0, 0.0, 10.0, many)
    assert found.busy["worker 0"] == {"update": pytest.approx(5.0), "wait": pytest.approx(5.0)}
    assert len(found.spans["worker 0"]) <= 30
    assert found.spans["worker 0"][-1][2] == pytest.approx(10.0)


def step(number: int, **rows: dict[str, float]) -> Step:
    busy = {name.replace("_", " "): phases for name, phases in rows.items()}
    return Step(number, 10.0 * number, 10.0, busy, {row: [] for row in busy})


WORKING = {"sample": 3.0, "update": 6.0}


@pytest.mark.parametrize(
    "rows, sentence",
    [
        ({"driver": {"wait": 4.0}, "worker_0": {"sample": 3.0, "update": 3.0}}, "40% .* scores"),
        ({"worker_0": WORKING, "worker_1": {"update": 2.0, "wait": 5.0}}, "45% .* each other"),
        ({"driver": {"evaluate": 4.0}, "worker_0": {"evaluate": 4.0, "update": 6.0}}, "eval.every"),
        ({"driver": {"save": 3.0}, "worker_0": {"save": 3.0, "update": 6.0}}, "save.every"),
        ({"worker_0": {"publish": 2.0, "update": 7.5}}, "publishing weights takes 20%"),
        ({"worker_0": {"exchange": 2.0, "update": 7.5}}, "20% .* sending samples"),
        ({"worker_0": {"encode": 2.0, "update": 7.5}}, "encoding prompts takes 20%"),
        ({"driver": WORKING}, r"the run is busy 90% .* mostly in the phase update \(60%\)"),
        ({"worker_0": {"sample": 3.0, "update": 6.5}}, "workers are busy 95%"),
        (
            {"worker_0": {"update": 6.0}, "sampler_1": {"sample": 4.0}},
            "samplers wait 60% of the time, learners 40%: set a larger lag",
        ),
        (
            {"worker_0": {"update": 10.0}} | {f"sampler_{i}": {"sample": 4.0} for i in range(1, 6)},
            "samplers wait 60% .* learners 0%: of 6 devices use cluster.samplers=4",
        ),
        (
            {"worker_0": {"update": 9.5}, "sampler_1": {"sample": 6.0}},
            "no other split of 2 devices would be better",
        ),
    ],
)
def test_one_sentence_says_what_to_change(rows: dict[str, dict[str, float]], sentence: str) -> None:
    found = advice.summary([step(1, driver={"save": 10.0}), step(2, **rows)])
    assert found.steps == 1  # the first step compiles
    assert re.search(sentence, found.sentence), found.sentence


def test_idle_includes_waiting() -> None:
    (row,) = advice.summary([step(2, worker_0={"update": 6.0, "wait": 3.0})]).rows
    assert row.idle == pytest.approx(0.4)


def test_the_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_file, "KEPT", 3)
    file = TimelineFile(tmp_path / "timeline.jsonl")
    for number in range(8):
        file.append(step(number, driver=WORKING))
    assert [s.step for s in file.read()] == [3, 4, 5, 6, 7]  # one more would drop three
    assert file.end == 80.0
    file.rewind(5)
    assert [s.step for s in TimelineFile(file.path).read()] == [3, 4, 5]
    monkeypatch.setattr(timeline_file, "BYTES", 250)
    file.append(step(6, driver=WORKING))
    assert [s.step for s in file.read()] == [6]
    file.rewind(None)
    assert file.read() == [] and file.end == 0.0


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"{}", b'{"step":1,"at":0,"seconds":1,"busy":[],"spans":{"a":[[1]]}}']
)
def test_damaged_lines_are_skipped(tmp_path: Path, line: bytes) -> None:
    file = TimelineFile(tmp_path / "timeline.jsonl")
    file.append(step(1, driver=WORKING))
    with file.path.open("ab") as opened:
        opened.write(line + b"\n" + b'{"step": 2')  # and one that is being written
    assert [s.step for s in file.read()] == [1]


def test_a_trace_has_a_row_for_everybody() -> None:
    two = [Step.of(n, 10.0 * n, 0.0, 10.0, [Span("worker 0", "sample", 1.0, 3.0)]) for n in (1, 2)]
    events = chrome.trace(two)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "steps", 1: "worker 0"}
    sampling = [(e["ts"], e["dur"], e["tid"]) for e in events if e["name"] == "sample"]
    assert sampling == [(11e6, 2e6, 1), (21e6, 2e6, 1)]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folders.make(tmp_path / "run", 2)
    assert cli.main(["timeline", str(run.path)]) == 2
    assert "has no timeline" in capsys.readouterr().err
    for number in (1, 2):
        run.timeline.append(step(number, worker_0=WORKING, driver={"wait": 1.0}))
    out = tmp_path / "new" / "trace.json"
    assert cli.main(["timeline", str(run.path), "--out", str(out), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "worker 0        10" in printed and "wait 10% of the time for scores" in printed
    assert json.loads(out.read_text())["traceEvents"]
    assert cli.main(["timeline", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["rows"][0]["idle"] == pytest.approx(0.1)
    assert cli.main(["timeline", str(run.path), "--step", "7"]) == 2
    assert "--step 7: the timeline has steps 1 to 2" in capsys.readouterr().err
