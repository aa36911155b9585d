"""Judges over OpenAI's chat protocol: a misbehaving server, and `transformers serve` and vLLM with
tiny real models, as separate processes."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gesso import build, run
from gesso.config import RewardEntry
from gesso.config.parsing import parse
from gesso.rewards import assembly, base
from gesso.rewards.judges import chat
from gesso.rewards.judges.judge import Judge, parse_rating
from gesso.rewards.judges.qwen_vl import QwenVlOcr, QwenVlScore
from gesso.rewards.judges.templates import TEMPLATES
from gesso.rewards.judges.unified_reward import UnifiedReward
from gesso.rewards.judges.win_rate import Comparison, WinRate
from gesso.rewards.transport import pool, protocol
from gesso.types import Prompt, Sample, UserError
from tests.rewards import tiny_judge
from tests.rewards.servers import Misbehaving, free_port, grey, served
from tests.waiting import Started


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FIRST_BACKOFF", 0.05)
    for kind in (UnifiedReward, QwenVlOcr, QwenVlScore):
        monkeypatch.delenv(kind.URL_ENV, raising=False)
        monkeypatch.delenv(kind.MODEL_ENV, raising=False)


def completion(content: Any, reason: str = "stop") -> str:
    """A fault: this response instead of the correct one."""
    message = {"role": "assistant", "content": content}
    return "body:" + json.dumps({"choices": [{"message": message, "finish_reason": reason}]})


@pytest.mark.parametrize(
    "response, value",
    [
        ("Final Score: 4", 0.8),
        ("cat (object): 1\nFinal Score:3.5\n", 0.7),
        ("Final Score: 5.", 1.0),
        ("Final Score: 4/5", 0.8),
        ("Final Score: 2. I say again: Final Score: 2", 0.4),
        ("", None),
        ("It is fine, 4 of 5.", None),
        ("final score: 4", None),
        ("Final Score: 45", None),
        ("Final Score: 0.5", None),
        ("Final Score: 5.5", None),
        ("Final Score: 3.5.1", None),
        ("Final Score: four", None),
        ("Final Score: NaN", None),
        ("Final Score: 2, no, Final Score: 3", None),
    ],
)
def test_scores_are_parsed_strictly(response: str, value: float | None) -> None:
    got = UnifiedReward().read(response, grey(1))
    assert got.value == value and (got.error is None) == (value is not None)
    if value is not None:
        assert got.text == response


def test_the_score_tag() -> None:
    read = QwenVlScore().read
    assert read("<Thought>fine</Thought> <Score> 3 </Score>", grey(1)).value == 0.6
    for wrong in ("<Score>6</Score>", "<Score>3", "3", "<Score>3/5</Score>", "<Score></Score>"):
        assert not read(wrong, grey(1)).ok


def test_a_pattern_that_matches_no_number_or_one_off_the_scale() -> None:
    assert "is not a number" in str(parse_rating("grade: B", r"grade: (\w)", 0, 10).error)
    assert parse_rating("-3", r"(-?\d+)", 0, 10).error == "the score -3 is not in [0, 10]"
    assert parse_rating("7", r"(-?\d+)", 0, 10).value == 0.7


def test_ocr_by_a_judge_is_the_ocr_formula() -> None:
    reward = QwenVlOcr()
    kite = Sample(Prompt('a sign that says "KITE"'), grey(1).image, 0)
    exact, near, more = (reward.read(text, kite) for text in ("Kite", "KIT", "KITE KITE"))
    assert (exact.value, exact.parts) == (1.0, {"exact": 1.0, "longer": 0.0})
    assert near.value == 0.75 and near.text == "KIT"
    assert more.value == 1.0 and more.parts == {"exact": 0.0, "longer": 1.0}
    assert str(reward.unfit(Prompt("a sign"))).startswith("expected a double-quoted text")


def test_the_request() -> None:
    with Misbehaving() as server:
        sample = Sample(Prompt("a sign, {prompt} 100%"), grey(51).image, 0)
        (score,) = UnifiedReward(urls=[f"{server.url}/v1/"]).score([sample])
        assert (
            score.value == pytest.approx((1 + 4 * 0.2) / 5) and score.text == "Final Score: 1.8000"
        )
        models, request = server.requests
    assert models == {"path": "/v1/models"} and request["model"] == "tiny"  # its only model
    assert request["temperature"] == 0 and request["stream"] is False
    assert request["max_tokens"] == 512
    image, text = request["messages"][0]["content"]
    assert text["text"].startswith("Caption: [a sign, {prompt} 100%]")
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    sent = protocol.decode_image(protocol.from_base64(image["image_url"]["url"]))
    assert (sent == sample.pixels).all()


def test_a_text_is_judged_without_an_image(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("Is {text} the answer to {prompt}, {answer}?")
    judge = Judge(urls=["http://x"], prompt=str(tmp_path / "q.txt"))
    sample = Sample(Prompt("2+2?", columns={"answer": 4}), None, 0, text="four")
    request = json.loads(chat.ChatScorer(judge)._request(judge.question(sample), [sample], "m"))
    (part,) = request["messages"][0]["content"]
    assert part == {"type": "text", "text": "Is four the answer to 2+2?, 4?"}


def test_concurrent_requests_get_their_own_responses() -> None:
    samples = [grey(v) for v in range(0, 256, 8)]
    with Misbehaving(delay=0.1) as server:
        scores = UnifiedReward(urls=[server.url], model="tiny", in_flight=8).score(samples)
        assert server.most == 8 and len(server.requests) == len(samples)
    expected = [(1 + 4 * s.seed / 255) / 5 for s in samples]
    assert [s.value for s in scores] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("fault", ["500 Oh", "429 Slow", "close", "half", "hang"])
def test_transient_faults_are_retried(fault: str) -> None:
    timeout = 1.0 if fault == "hang" else 60.0  # only a hang reaches the timeout
    with Misbehaving([fault, fault]) as server:
        (score,) = UnifiedReward(urls=[server.url], model="m", timeout=timeout).score([grey(255)])
        assert score.value == 1.0 and len(server.requests) == 3


WRONG = {
    "400 Bad": "returned 400",
    "garbage": "more than 4,194,304 bytes",
    "truncated": "invalid JSON",
    "body:{}": "expected a chat completion",
    "body:[1]": "expected a chat completion",
    'body:{"choices": []}': "expected a chat completion",
    'body:{"choices": [{"message": null}]}': "expected a chat completion",
    completion(None): "returned 'None'; expected text",
    completion(["Final Score: 4"]): "expected text",
    completion("I would rather not."): "contains no score: …'I would rather not.'",
    completion("Final Score: 4", "length"): "truncated at max_tokens",
}


@pytest.mark.parametrize("fault", WRONG, ids=lambda fault: fault[:40])
def test_an_invalid_response_is_an_error(fault: str) -> None:
    with Misbehaving([fault]) as server:
        (score,) = UnifiedReward(urls=[server.url], model="m").score([grey(255)])
        assert len(server.requests) == 1
    assert score.value is None and WRONG[fault] in str(score.error)


def test_addresses_and_models_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "unified-reward": ("UNIFIED_REWARD_VLLM_URL", "UNIFIED_REWARD_PATH"),
        "unified-reward-vllm": ("UNIFIED_REWARD_VLLM_URL", "UNIFIED_REWARD_PATH"),
        "qwenvl-ocr": ("QWEN_VL_OCR_VLLM_URL", "QWEN_VL_OCR_PATH"),
        "qwenvl-ocr-vllm": ("QWEN_VL_OCR_VLLM_URL", "QWEN_VL_OCR_PATH"),
        "qwenvl-score": ("QWEN_VL_VLLM_URL", "QWEN_VL_PATH"),
    }
    for name, (url, model) in names.items():
        entry = parse(RewardEntry, {"name": name, "cache": False}, "reward")
        with pytest.raises(UserError, match=f"requires a served model: .* variable {url}"):
            assembly.scorer(entry)
        monkeypatch.setenv(url, "http://a:1/v1, http://b:2")
        monkeypatch.setenv(model, "/models/x")
        scorer = assembly.scorer(entry)
        assert isinstance(scorer, chat.ChatScorer)
        assert [s.url for s in scorer.pool.servers] == ["http://a:1", "http://b:2"]
        assert scorer._model == "/models/x"
        monkeypatch.delenv(url)
        monkeypatch.delenv(model)


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_REWARD_VLLM_URL", "http://a:1/v1")
    monkeypatch.setenv("UNIFIED_REWARD_PATH", "other")
    scorer = chat.ChatScorer(UnifiedReward(urls=["http://b:2/v1"], model="mine"))
    assert scorer.pool.servers[0].url == "http://b:2" and scorer._model == "mine"


@pytest.mark.parametrize("models", [[], [{"id": "a"}, {"id": "b"}]])
def test_a_server_with_no_or_several_models_requires_a_name(models: list) -> None:
    with Misbehaving(["body:" + json.dumps({"data": models})] * 2) as server:
        (score,) = UnifiedReward(urls=[server.url]).score([grey(1)])
    assert f"the server has {len(models)} models" in str(score.error)


def test_the_model_is_looked_up_once() -> None:
    with Misbehaving(["500 Oh"]) as server:
        scores = UnifiedReward(urls=[server.url]).score([grey(v) for v in range(5)])
        assert all(s.ok for s in scores)
        assert sum(r == {"path": "/v1/models"} for r in server.requests) == 2  # one failed


def test_a_token_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match='token_env = "JUDGE_KEY"'):
        chat.ChatScorer(UnifiedReward(urls=["http://x"], token_env="JUDGE_KEY"))
    monkeypatch.setenv("JUDGE_KEY", "k")
    scorer = chat.ChatScorer(UnifiedReward(urls=["http://x"], token_env="JUDGE_KEY"))
    assert scorer.pool._headers["Authorization"] == "Bearer k"


def test_a_custom_question(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text('How {colour} is "{prompt}"? Response {"score": n}')
    options = {"prompt": str(tmp_path / "q.txt"), "pattern": r'"score": (\d+)', "highest": 10.0}
    reward = base.load(assembly.REWARDS["judge"], options | {"urls": ["http://x"], "lowest": 0.0})
    assert isinstance(reward, Judge)
    reason = reward.unfit(Prompt("a sign"))
    assert reason == 'the question template requires a column "colour"'
    prompt = Prompt("a sign", columns={"colour": "red"})
    assert reward.unfit(prompt) is None
    question = reward.question(Sample(prompt, grey(1).image, 0))
    assert question == 'How red is "a sign"? Response {"score": n}'
    assert reward.read('{"score": 7}', grey(1)).value == 0.7


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({}, '"prompt" is missing; expected a file with the question, or template = one of alig'),
        ({"template": "beauty"}, '"beauty" is unknown; use one of alignment, aesthetics, text'),
        ({"template": "text", "prompt": "README.md"}, 'template = "text" fixes prompt'),
        ({"template": "text", "highest": 10.0}, 'template = "text" fixes highest'),
        ({"prompt": "/no/such/file"}, "prompt = '/no/such/file' cannot be read"),
        ({"prompt": "README.md", "pattern": "("}, "is not a regular expression"),
        ({"prompt": "README.md", "pattern": "score"}, "has 0 groups; expected 1"),
        ({"prompt": "README.md", "lowest": 5.0}, "lowest must be less than highest"),
        ({"prompt": "README.md", "urls": ["x"]}, '"x" is not a URL'),
        ({"prompt": "README.md", "temperature": 1}, 'unknown key "temperature"'),
    ],
)
def test_an_invalid_judge(options: dict, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    with pytest.raises(UserError, match=re.escape(sentence)):
        base.load(assembly.REWARDS["judge"], options)


def test_training_by_a_judge(recipe_data: dict, tmp_path: Path) -> None:
    with Misbehaving(["500 Oh", "ok", "close"]) as server:
        entry = {"name": "unified-reward", "urls": [server.url], "model": "tiny"}
        recipe = build.recipe_from(recipe_data | {"steps": 2, "reward": [entry]})
        rows = run.train(recipe, folder=tmp_path / "run", quiet=True).rows()
    assert all(0.2 < row["reward/unified-reward"] < 1 and row["failed"] == 0 for row in rows[1:])


def test_a_judge_may_be_served(tmp_path: Path) -> None:
    from tests.rewards.test_http import ask

    with (
        Misbehaving() as model,
        served("unified-reward", f'urls=["{model.url}"]', "model=tiny") as one,
    ):
        scores = ask(one.url, [grey(0), grey(255)])
    assert [s.value for s in scores] == [0.2, 1.0]


def images_of(request: dict[str, Any]) -> list[int]:
    """The brightness of the images of a request, in order."""
    urls = [p["image_url"]["url"] for p in request["messages"][0]["content"] if len(p) == 2
            and p["type"] == "image_url"]  # fmt: skip
    return [int(protocol.decode_image(protocol.from_base64(url)).mean()) for url in urls]


def test_win_rates_by_a_judge_of_pairs() -> None:
    with Misbehaving() as server:
        judge = WinRate(urls=[server.url], model="tiny")
        scores = judge.score_group([grey(v, "a {prompt}") for v in (90, 20, 90, 40)])
        pairs = [images_of(request) for request in server.requests]
        text = server.requests[0]["messages"][0]["content"][-1]["text"]
    assert [s.value for s in scores] == pytest.approx([2.5 / 3, 0, 2.5 / 3, 1 / 3])
    values = (90, 20, 90, 40)
    assert sorted(pairs) == sorted(
        [a, b] for i, a in enumerate(values) for j, b in enumerate(values) if i != j
    )
    assert "for this prompt: a {prompt}\n" in text and "Better: 1, Better: 2" in text
    assert scores[1].parts == {"unreadable": 0.0, "first": 0.5}
    assert scores[0].text.startswith("1 is this sample, 2 is sample 2: I looked. Better: 1\n")


@pytest.mark.parametrize(
    "response, rate",
    [
        ("Better: 1", 1.0),
        ("Better:2\n", 0.0),
        ("Better: 0.", 0.5),
        ("Better: 1, I said. Better: 1", 1.0),
        ("Better: 1? No. Better: 2", None),
        ("The first.", None),
        ("Better: 12", None),
        ("Better: 1.5", None),
        ("better: 1", None),
    ],
)
def test_verdicts_are_parsed_strictly(response: str, rate: float | None) -> None:
    """A verdict that cannot be read counts ½ and is reported."""
    found = Comparison(0, 1, response)
    assert found.points == (0.5 if rate is None else rate)
    assert (found.verdict is None) == (rate is None)


def test_faults_of_comparisons() -> None:
    """An unreadable answer counts ½; a failed request fails the two samples that it compares; the
    order of requests is (0, 1), (0, 2), (1, 0), …"""
    samples = [grey(v) for v in (90, 20, 40)]
    settings: dict[str, Any] = {"model": "m", "retries": 0, "in_flight": 1}
    with Misbehaving([completion("Hm."), "ok", "ok", "ok", "ok", "400 Bad"]) as server:
        one, two, three = WinRate(urls=[server.url], **settings).score_group(samples)
    assert one.value == pytest.approx((0.75 + 1) / 2) and one.parts["unreadable"] == 0.25
    for score, other in ((two, 3), (three, 2)):
        assert f"comparison with sample {other} of the prompt: http" in str(score.error)
        assert "returned 400" in str(score.error)
    with Misbehaving(["400 Bad"] * 6) as server:
        scores = WinRate(urls=[server.url], **settings).score_group(samples)
    assert all("returned 400" in str(s.error) for s in scores)
    with Misbehaving([completion("Better: 1")] * 6) as server:  # prefers the first position
        scores = WinRate(urls=[server.url], **settings).score_group(samples)
    assert [(s.value, s.parts["first"]) for s in scores] == [(0.5, 1.0)] * 3


def test_texts_are_compared_without_images(tmp_path: Path) -> None:
    judge = WinRate(urls=["http://x"])
    one, other = (Sample(Prompt("2+2?"), None, 0, text=t) for t in ("four", "five"))
    question = judge.question(one, other)
    assert "prompt: 2+2?\n" in question and "Answer 1:\nfour\n\nAnswer 2:\nfive\n" in question
    (tmp_path / "q.txt").write_text("{first} or {second}, {key}? Better: n")
    own = WinRate(urls=["http://x"], prompt=str(tmp_path / "q.txt"))
    assert own.question(one, other) == "four or five, {key}? Better: n"
    assert own.unfit(one.prompt) == 'the question template requires a column "key"'


def test_a_judge_of_pairs_may_be_served() -> None:
    from tests.rewards.test_groupwise import ask

    with (
        Misbehaving() as model,
        served("win-rate", f'urls=["{model.url}"]', "model=tiny") as one,
    ):
        scores = ask(one.url, [grey(0), grey(255)], groupwise=True)
    assert [s.value for s in scores] == [0.0, 1.0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_bundled_questions(name: str) -> None:
    with Misbehaving() as server:
        (score,) = Judge(urls=[server.url], model="tiny", template=name).score([grey(255)])
        text = server.requests[0]["messages"][0]["content"][-1]["text"]
    assert score.value == 1.0 and "Final Score: n" in text
    assert ("a grey sign" in text) == (name != "aesthetics")
    assert len(text.split()) < 120


@contextmanager
def openai_server(*command: str | Path) -> Iterator[str]:
    """A third-party server process on loopback, from its first response until the end of the
    test."""
    port = free_port()
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    address = ("--host", "127.0.0.1", "--port", str(port))
    server = Started([*command, *address], env=os.environ | offline)
    url = f"http://127.0.0.1:{port}"

    def answers(client: httpx.Client) -> bool:
        try:
            return client.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    with httpx.Client() as client:  # a new one for every attempt would keep a core busy
        server.until(lambda: answers(client))
    try:
        yield f"{url}/v1"
    finally:
        server.end()


@pytest.fixture(scope="module")
def transformers_serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and model of `transformers serve`."""
    pytest.importorskip("openai", reason="transformers serve needs it")
    folder = tiny_judge.save(tmp_path_factory.mktemp("judge"))
    program = Path(sys.executable).parent / "transformers"
    with openai_server(program, "serve", folder, "--device", "cpu") as url:
        yield url, str(folder)


@pytest.mark.slow
def test_a_real_server(transformers_serve: tuple[str, str]) -> None:
    url, model = transformers_serve
    samples = [grey(v, size=(32, 96)) for v in range(0, 250, 50)]
    scores = UnifiedReward(urls=[url], model=model).score(samples)
    assert [(s.value, s.text) for s in scores] == [(0.8, "Final Score: 4")] * 5
    (cut,) = UnifiedReward(urls=[url], model=model, max_tokens=2).score(samples[:1])
    assert cut.value is None and "truncated at max_tokens: …'Final Score:'" in str(cut.error)
    (unread,) = QwenVlScore(urls=[url], model=model).score(samples[:1])
    assert "contains no score: …'Final Score: 4'" in str(unread.error)
    four = Sample(Prompt('a sign that says "FinalScore:4"'), samples[0].image, 0)
    (read,) = QwenVlOcr(urls=[url], model=model).score([four])
    assert read.value == 1.0 and read.parts["exact"] == 1.0


@pytest.mark.slow
def test_training_by_a_real_server(
    transformers_serve: tuple[str, str], recipe_data: dict, tmp_path: Path
) -> None:
    url, model = transformers_serve
    entry = {"name": "unified-reward", "urls": [url], "model": model}
    recipe = build.recipe_from(recipe_data | {"steps": 1, "reward": [entry]})
    row = run.train(recipe, folder=tmp_path / "run", quiet=True).rows()[1]
    assert row["reward"] == pytest.approx(0.8) and row["failed"] == 0


@pytest.mark.vllm
def test_vllm(tmp_path: Path) -> None:
    """vLLM's server, in a separate environment: `make test-vllm`. It judges a text: its
    vision-language models would require torchvision here."""
    python = os.environ.get("GESSO_VLLM_PYTHON")
    if not python:
        pytest.skip("needs an environment with vLLM: make test-vllm")
    folder = tiny_judge.save_blind(tmp_path)
    (tmp_path / "q.txt").write_text("Is {text} the answer to {prompt}?")
    module = ("-m", "vllm.entrypoints.openai.api_server", "--model", folder)
    settings = ("--enforce-eager", "--max-model-len", "1024", "--dtype", "float32")
    samples = [Sample(Prompt("2+2?"), None, i, text=str(i)) for i in range(24)]
    with openai_server(python, *module, *settings) as url:
        scores = UnifiedReward(urls=[url], prompt=str(tmp_path / "q.txt")).score(samples)
        assert [s.value for s in scores] == [0.8] * 24, scores[0]
        (cut,) = UnifiedReward(urls=[url], max_tokens=2).score(samples[:1])
        assert cut.value is None and "truncated at max_tokens" in str(cut.error)
