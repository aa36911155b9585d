"""The playground's hands on real runs: base and trained weights of one model, side by side."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gesso import build, run
from gesso.types import UserError
from gesso.viewer import server
from gesso.viewer.playground import PlaygroundRequest
from gesso.viewer.studio import Studio
from gesso.zoo.words import LIMITS, prompt_for
from tests import tokens
from tests.use import runs
from tests.waiting import until

PROMPT = 'a red sign that says "KITE"'


class Heard:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.phases: dict[str, int] = {}  # and how much of each was done
        self.notes: list[str] = []

    def phase(self, text: str, total: int = 0) -> None:
        self.phases[text] = 0

    def advance(self, done: int = 1) -> None:
        self.phases[list(self.phases)[-1]] += done

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def studio() -> Iterator[Studio]:
    made = Studio()
    yield made
    made.close()


def pixels(cell: dict[str, Any]) -> np.ndarray:
    head, _, data = cell["image"].partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


def drawn_by(source: Any, n: int, seed: int) -> list[np.ndarray]:
    import gesso

    return [np.asarray(picture) for picture in gesso.load(source).sample(PROMPT, n, seed)]


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
def test_both_sides_are_what_each_would_draw_alone(
    recipe_data: dict, tmp_path: Path, studio: Studio, lora: dict | None
) -> None:
    recipe_data["model"]["lora"] = lora
    recipe_data |= {"optimizer": {"lr": 3e-2}, "steps": 2}
    recipe_data["eval_reward"] = [{"name": "jpeg-incompressibility"}]  # the playground scores by it
    found = run.train(build.recipe_from(recipe_data), folder=tmp_path / "run", quiet=True)
    heard = Heard()
    ask = PlaygroundRequest(run="run", prompt=PROMPT, seed=4, n=2)
    result = studio.generate(found.path, ask, heard)
    assert result["step"] == 2 and "scoring" in heard.phases
    assert any("loading" in phase for phase in heard.phases)
    assert [done for phase, done in heard.phases.items() if "generating images" in phase] == [2]
    trained = [pixels(cell) for cell in result["trained"]]
    assert all(
        np.array_equal(a, b) for a, b in zip(trained, drawn_by(found.path, 2, 4), strict=True)
    )
    recipe = tmp_path / "base.toml"
    recipe.write_bytes((found.path / "config.toml").read_bytes())
    base = [pixels(cell) for cell in result["base"]]
    assert all(np.array_equal(a, b) for a, b in zip(base, drawn_by(recipe, 2, 4), strict=True))
    assert not np.array_equal(base[0], trained[0]) and not np.array_equal(base[0], base[1])
    for cell in result["base"]:
        assert cell["parts"] == {"jpeg-incompressibility": cell["reward"]}

    heard = Heard()  # the second time everything is loaded
    again = studio.generate(found.path, ask.model_copy(update={"score": False}), heard)
    assert not any("loading" in phase for phase in heard.phases)
    assert np.array_equal(pixels(again["trained"][0]), trained[0])
    assert "reward" not in again["trained"][0]
    run.resume(found.path, quiet=True, steps=3)  # it goes on: the playground follows
    later = studio.generate(found.path, ask, Heard())
    assert later["step"] == 3
    assert not np.array_equal(pixels(later["trained"][0]), trained[0])
    assert np.array_equal(pixels(later["base"][0]), base[0])
    uploaded = result["base"][0]["image"].split(",")[1]
    with pytest.raises(UserError, match="expected no input images, got 1"):
        studio.generate(found.path, ask.model_copy(update={"images": [uploaded]}), heard)


def test_a_vision_language_model_answers_about_an_image(tmp_path: Path, studio: Studio) -> None:
    tokens.build("qwen2.5-vl", tmp_path / "model")
    picture = tokens.picture(16, 24)
    (tmp_path / "0.png").write_bytes(picture.read())
    row = {"prompt": "how many?", "images": ["0.png"], "answer": "3"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    recipe = build.recipe_from(
        {
            "steps": 1,
            "model": {"name": "vision-language", "path": str(tmp_path / "model"), "device": "cpu"},
            "data": {
                "train": str(tmp_path / "a.jsonl"),
                "eval": str(tmp_path / "a.jsonl"),
                "groups": 1,
            },
            "algorithm": {"name": "grpo", "group": 2, "max_tokens": 6},
            "reward": [{"name": "count"}],
            "eval": {"prompts": 1},
        }
    )
    found = run.train(recipe, folder=tmp_path / "run", quiet=True)
    image = base64.b64encode(picture.read()).decode()
    heard = Heard()
    result = studio.generate(
        found.path, PlaygroundRequest(run="run", prompt="how many?", images=[image]), heard
    )
    assert isinstance(result["base"][0]["response"], str) and len(result["trained"]) == 1
    # There is no right answer to a question of one's own: it is told, and nothing is made up.
    assert "reward" not in result["base"][0]
    assert heard.notes == [
        'not scored: count: expected a column "answer" such as 4, got no columns'
    ]
    ask = PlaygroundRequest(run="run", prompt="how many?", images=[image], answer="3")
    assert "count" in studio.generate(found.path, ask, Heard())["base"][0]["parts"]
    with pytest.raises(UserError, match="not valid base64"):
        studio.generate(found.path, PlaygroundRequest(run="run", prompt="?", images=["no!"]), heard)


def test_the_playground_says_what_the_bundled_model_was_not_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason='the page needs FastAPI: pip install "gesso[viewer]"')
    from starlette.testclient import TestClient

    runs.signs(tmp_path / "signs")
    app = server.app(tmp_path, Studio(), None)
    asked = {"run": "signs", "n": 1, "score": False}
    with TestClient(app, base_url="http://127.0.0.1") as client:
        (row,) = client.get("/api/runs").json()
        assert row["limits"] == LIMITS

        def noted(word: str) -> list[str]:
            body = asked | {"prompt": prompt_for(word, "red")}
            assert client.post("/api/play", json=body).json()["state"] == "busy"
            until(lambda: client.get("/api/play").json()["state"] != "busy")
            seen = client.get("/api/play").json()
            assert seen["state"] == "done" and len(seen["result"]["trained"]) == 1, seen
            return seen["result"].get("notes", [])

        assert noted("OAK") == [f'"OAK" has 3 letters. {LIMITS}'], "of both sides once"
        assert noted("KITE") == []


def test_a_run_without_a_checkpoint(recipe_data: dict, tmp_path: Path, studio: Studio) -> None:
    from gesso.track.run_folder import RunFolder

    recipe = build.recipe_from(recipe_data)
    found = RunFolder.create(tmp_path / "run", recipe.model_dump())
    with pytest.raises(UserError, match="has no checkpoint yet"):
        studio.generate(found.path, PlaygroundRequest(run="run", prompt=PROMPT), Heard())
