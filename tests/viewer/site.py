"""A site to test the page on: the server in a thread, a studio that draws nothing, run folders."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

from gesso.timeline.recorder import Span
from gesso.timeline.steps import Step
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, Sample, Score
from gesso.viewer import server
from gesso.viewer.playground import PlaygroundRequest
from tests.viewer import folders
from tests.waiting import until

NASTY = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1"> sign'
PROMPTS = ['a red sign that says "OAK"', 'a blue sign that says "ELM"', NASTY]
RIGHT = {0: [0, 1, 0], 2: [1, 1, 0], 4: [1, 0, 0]}  # step → of each prompt
PICTURE = "data:image/gif;base64,R0lGODlhAQABAIAAAAUEBAAAACwAAAAAAQABAAACAkQBADs="


class Studio:
    """Draws at once, or when it may go on; or fails."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None
        self.note = ""
        self.asked: list[PlaygroundRequest] = []

    def generate(self, run: Path, request: PlaygroundRequest, progress: Any) -> dict[str, Any]:
        self.asked.append(request)
        progress.phase("drawing", 4)
        progress.advance(1)
        if self.note:
            progress.note(self.note)
        self.go.wait(60)
        if self.error:
            raise self.error
        cells = [
            [{"image": PICTURE, "reward": r, "parts": {"ocr": r}, "text": "OAK", "error": ""}]
            for r in (0.25, 0.75)
        ]
        return {"step": 4, "base": cells[0] * request.n, "trained": cells[1] * request.n}

    def close(self) -> None: ...


class Site:
    """The server in a thread; it can be stopped and started again at the same address."""

    def __init__(self, root: Path, studio: Studio) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.app = server.app(root, studio, None)
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        import uvicorn

        settings = uvicorn.Config(
            self.app, port=self.port, log_level="critical", lifespan="off",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(5)


def evaluate(run: RunFolder, step: int, right: list[int]) -> None:
    samples = [Sample(Prompt(p), folders.picture(40 * i + step), i) for i, p in enumerate(PROMPTS)]
    scores = [
        Score(value=0.4 + r / 2, parts={"ocr": 0.4 + r / 2, "ocr/exact": float(r)}, text=f"READ{r}")
        for r in right
    ]
    run.save_samples(step, samples, scores)


def drawing(path: Path) -> RunFolder:
    run = folders.make(path, 4, about="writes words")
    for step, right in RIGHT.items():
        evaluate(run, step, right)
    folders.batch(run, 2, [0.5, -0.5, 0.1, -0.1], keep=1)
    folders.batch(run, 4, [-0.5, 0.5, 0.0, 0.0], keep=1)
    run.note("self-test: fine")
    spans = [Span("worker 0", "sample", 0.0, 3.0), Span("worker 1", "sample", 0.0, 1.0)]
    for step in (3, 4):
        run.timeline.append(Step.of(step, 4.0 * step, 0.0, 4.0, spans))
    return run


INSTRUCTION = "make it a blue sign"


def editing(path: Path) -> RunFolder:
    """The second prompt has two input images, one of another size."""
    run = folders.make(path, 2, about="edits signs")
    prompts = [
        Prompt(INSTRUCTION, images=(folders.source(200),)),
        Prompt("join them", images=(folders.source(90, 16, 16), folders.source(30))),
    ]
    for step in (0, 2):
        samples = [Sample(p, folders.picture(40 + 30 * step), i) for i, p in enumerate(prompts)]
        run.save_samples(step, samples, [Score(value=step / 4, parts={"unchanged": 0.5})] * 2)
    folders.batch(run, 2, [0.5, -0.5], images=(folders.source(200),))
    return run


def filming(path: Path) -> RunFolder:
    """Two prompts with videos of 8 frames at 8 a second."""
    model = {"name": "wan", "path": "wan", "frames": 8}
    run = folders.make(path, 2, about="videos of signs", model=model)
    for step in (0, 2):
        samples = [
            Sample(Prompt(f"sign {i} slides"), folders.video(20 * step + 10 * i), i, fps=8.0)
            for i in range(2)
        ]
        run.save_samples(step, samples, [Score(value=step / 4, parts={"motion": 0.5})] * 2)
    drawn = folders.Batch(1, 0, samples, [Score(1.0), Score(0.0)], [0, 0], metrics={}, notes=[])
    folders.groups.save(run.path, 2, drawn, [1.0, -1.0], keep=1)
    return run


def writing(path: Path) -> RunFolder:
    run = folders.make(path, 2, model={"name": "vision-language", "path": "zoo:shapes"})
    (path / "samples" / "prompts").mkdir(parents=True)
    folders.Image.fromarray(folders.picture(90, 16, 16)).save(path / "samples/prompts/000-1.png")
    said = {
        0: ["<think>about 4</think> <answer>4</answer>", 0, "5", "<b>six</b>"],
        2: ["<think>about 5</think> <answer>5</answer>", 1, "5", "<b>six</b>"],
    }
    for step, (response, right, answer, other) in said.items():
        both = [
            ("How many?", ["prompts/000-1.png"], response, answer, right),
            ("And now?", [], other, "6", 1),
        ]
        rows = [
            {"index": i, "prompt": prompt, "seed": i, "image": "", "shown": shown, "response": text,
             "answer": wanted, "reward": ok, "parts": {"count": ok, "count/exact": ok}, "text": ""}
            for i, (prompt, shown, text, wanted, ok) in enumerate(both)
        ]  # fmt: skip
        file = path / "samples" / f"{step:06d}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def odd(path: Path) -> RunFolder:
    """Of another version, half-written, with a damaged picture."""
    run = drawing(path)
    (path / "config.toml").write_text('future = "yes"\n[unheard-of]\nkey = 1\n')
    (path / "samples/000004/000.png").write_bytes(b"\x89PNG no more")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": 9, "rewa')
    return run
