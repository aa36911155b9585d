"""`gesso serve-reward` as a separate process, and the client that runs use."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from gesso import build, cli, config, serving
from gesso.config import RemoteEntry
from gesso.rewards import assembly
from gesso.rewards.transport import protocol, serve
from gesso.rewards.transport.remote import RemoteScorer
from gesso.types import Prompt, PromptImage, Sample, Score, UserError
from tests.rewards.servers import ROOT, Misbehaving, Served, grey, served
from tests.rewards.test_faults import workers_of
from tests.typed import sure
from tests.waiting import LIMIT

HERE = "tests.rewards.served_rewards"
TOKEN = {"Authorization": "Bearer s3cret"}


def ask(url: str, samples: list[Sample], **settings: Any) -> list[Score]:
    async def go() -> list[Score]:
        remote = RemoteScorer(RemoteEntry(urls=[url], **settings))
        try:
            return await remote.score(samples)
        finally:
            await remote.close()

    return asyncio.run(go())


@pytest.fixture(scope="module")
def echo() -> Iterator[Served]:
    arguments = (f"{HERE}:echo", "--token-env", "TOKEN", "--max-mb", "1")
    with served(*arguments, TOKEN="s3cret") as one:
        yield one


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")


def test_a_reward_receives_everything_over_http(echo: Served) -> None:
    columns = {"target": "KITE", "n": 3, "list": [1, {"a": None}], "Å": "雪"}
    noise = np.random.default_rng(0).integers(0, 256, (31, 17, 3), dtype=np.uint8)
    with_image = Sample(Prompt('says "ÅÖ" 雪', "blurry", columns, "train.txt:3"), noise, 2**62 + 1)
    with_text = Sample(Prompt("2+2?"), None, 0, text="")
    image, text = ask(echo.url, [with_image, with_text], token_env="TOKEN")
    assert image.value == float(noise.mean())  # exact: PNG is lossless
    assert image.parts == {"seed": float((2**62 + 1) % 1000)}
    assert json.loads(image.text) == ['says "ÅÖ" 雪', "blurry", columns, "train.txt:3", None]
    assert text.value == 1.0 and json.loads(text.text)[-1] == ""


def test_openrlhf_requests_of_their_clients(echo: Served) -> None:
    request = {"query": ["2+2?4", "x"], "prompts": ["2+2?", "y"], "labels": ["4", None]}
    response = httpx.post(f"{echo.url}/get_reward", json=request, headers=TOKEN)
    assert response.json() == {"rewards": [1.0, 1.0]}
    got = protocol.read_get_reward(json.dumps(request).encode())
    assert [s.text for s in got] == ["4", "x"]
    assert [s.prompt.text for s in got] == ["2+2?", "y"]
    assert got[0].prompt.columns["answer"] == "4" and got[1].prompt.columns == {}
    older = protocol.read_get_reward(b'{"query": ["all of it"]}')
    assert older[0].text == "all of it" and older[0].prompt.text == ""


def test_openrlhf_requests_to_their_servers() -> None:
    samples = [
        Sample(Prompt("2+2?", columns={"answer": "4"}), None, 0, text="it is 4"),
        Sample(
            Prompt("5?", images=(PromptImage(path="5.png"),)), None, 0, text=""
        ),  # no field for it
    ]
    assert json.loads(protocol.pack_get_reward(samples)) == {
        "query": ["2+2?it is 4", "5?"], "prompts": ["2+2?", "5?"], "labels": ["4", None],
    }  # fmt: skip
    with Misbehaving() as server:  # brightness, by /get_reward; their URLs end in it
        for url in (server.url, f"{server.url}/get_reward", f"{server.url}/get_reward/"):
            (score,) = ask(url, [grey(51)], protocol="openrlhf")
            assert score.value == 0.2


def test_openrlhf_cannot_express_a_failure() -> None:
    with served(f"{HERE}:fails_when_dark") as one:
        good, bad = ask(one.url, [grey(255), grey(0)], batch=1, protocol="openrlhf")
        assert good.value == 1.0
        assert bad.value is None
        assert "1 of 1 samples failed; the last: too dark" in sure(str, bad.error)
        good, bad = ask(one.url, [grey(255), grey(0)])
        assert good.value == 1.0 and bad.error == "too dark"


def png_of(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def test_multipart(echo: Served) -> None:
    def post(samples: list[dict], *values: int) -> httpx.Response:
        files = [("image", ("x.png", png_of(grey(v).pixels))) for v in values]
        data = {"samples": json.dumps(samples)}
        url = f"{echo.url}/score"
        return httpx.post(url, data=data, files=files or {"none": b""}, headers=TOKEN)

    scores = post([{"prompt": "a"}, {"prompt": "b", "columns": {"n": 1}}], 7, 200).json()["scores"]
    assert [s["value"] for s in scores] == [7.0, 200.0]
    assert json.loads(scores[1]["text"]) == ["b", "", {"n": 1}, "", None]
    assert (
        post([{"prompt": "a"}], 7, 8).json()["detail"] == 'request: 2 parts "image" for 1 samples'
    )
    assert '"samples.0.prompt" is missing' in post([{"promt": "a"}], 7).json()["detail"]
    assert post([{"prompt": "a", "text": "b"}]).json()["scores"][0]["value"] == 1.0
    broken = httpx.post(
        f"{echo.url}/score",
        content=b"--x\r\n",
        headers=TOKEN | {"Content-Type": "multipart/form-data"},
    )
    assert broken.status_code == 422 and "not multipart" in broken.json()["detail"]


def bomb() -> str:
    """A PNG of a few hundred bytes that claims to be 9,000 × 9,000."""
    data = bytearray(png_of(np.zeros((1, 1, 3), dtype=np.uint8)))
    data[16:24] = (9_000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return base64.b64encode(bytes(data)).decode()


@pytest.mark.parametrize(
    "body, sentence",
    [
        (b"\x80\x04pickle", "request: not JSON"),
        (b"[]", "expected an object, got a list"),
        (b"{}", '"samples" is missing'),
        (b'{"samples": []}', '"samples" = [] is not valid'),
        (b'{"samples": [{"prompt": 3}]}', '"samples.0.prompt" = 3 is not valid'),
        (b'{"samples": [{"prompt": "a", "imge": ""}]}', 'unknown key "samples.0.imge"'),
        (b'{"samples": [{"prompt": "a", "image": "!"}]}', "not base64"),
        (b'{"samples": [{"prompt": "a", "image": "aGVsbG8="}]}', "cannot decode an image"),
        (json.dumps({"samples": [{"prompt": "a", "image": bomb()}]}).encode(), "9000×9000"),
    ],
)  # fmt: skip
def test_an_invalid_request(echo: Served, body: bytes, sentence: str) -> None:
    response = httpx.post(f"{echo.url}/score", content=body, headers=TOKEN)
    assert response.status_code == 422 and sentence in response.json()["detail"]


def test_lengths_of_openrlhf_must_agree(echo: Served) -> None:
    request = {"query": ["a", "b"], "prompts": ["a"]}
    response = httpx.post(f"{echo.url}/get_reward", json=request, headers=TOKEN)
    assert response.json()["detail"] == 'request: expected 2 "prompts", one per "query", got 1'


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer s3cre"}, {"Authorization": "é"}])
@pytest.mark.parametrize("path", ["score", "get_reward"])
def test_no_token_no_score(echo: Served, path: str, headers: dict) -> None:
    encoded = {key: value.encode() for key, value in headers.items()}
    response = httpx.post(f"{echo.url}/{path}", content=b"{}", headers=encoded)
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    (score,) = ask(echo.url, [grey(1)])
    assert "returned 401" in str(score.error)


def test_the_size_of_a_request_is_limited(echo: Served) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    (score,) = ask(echo.url, [Sample(Prompt(""), noise, 0)], token_env="TOKEN")
    assert "returned 413" in str(score.error) and "1,048,576 bytes" in str(score.error)

    def endless() -> Iterator[bytes]:  # without Content-Length
        for _ in range(64):
            yield b" " * 2**16

    response = httpx.post(f"{echo.url}/score", content=endless(), headers=TOKEN)
    assert response.status_code == 413


def test_health_needs_no_token(echo: Served) -> None:
    ask(echo.url, [grey(3), grey(4)], token_env="TOKEN")
    health = httpx.get(f"{echo.url}/health").json()
    assert health["reward"] == f"{HERE}:echo" and health["scored"] >= 2 and health["failed"] == 0
    assert httpx.get(f"{echo.url}/docs").status_code == 404


def test_only_loopback_is_served(echo: Served) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; getsockname returns our address
        except OSError:
            pytest.skip("this machine has only a loopback address")
        address = probe.getsockname()[0]
    with pytest.raises(OSError), socket.create_connection((address, echo.port), timeout=3):
        pass


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            ("ocr", "--port", "0", "--host", "0.0.0.0"),
            "--host 0.0.0.0 accepts connections",
        ),
        (
            ("ocr", "--port", "0", "--host", "::"),
            "--host :: accepts connections",
        ),
        (("ocr", "--port", "0", "--host", "my-machine"), "accepts connections"),
        (("ocr", "--port", "0", "--token-env", "NOPE"), "environment variable is not set"),
        (("ocrr", "--port", "0"), 'unknown reward "ocrr"; did you mean "ocr"?'),
        (("ocr", "detekt=false", "--port", "0"), 'unknown key "detekt"; did you mean "detect"?'),
        (("ocr", "--port", "0", "--workers", "0"), "expects --workers of at least 1, got 0"),
        (("unified-reward", "--port", "0"), "environment variable UNIFIED_REWARD_VLLM_URL"),
        (("deqa", "--port", "0"), 'reward "deqa" runs only on a server'),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command changes it
    monkeypatch.setattr(serving, "_serve", None)  # it must not come so far
    assert cli.main(["serve-reward", *arguments]) == 2
    message = capsys.readouterr().err
    assert sentence in message and "Traceback" not in message


def test_a_port_that_is_taken(
    echo: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(serving, "_serve", None)
    assert cli.main(["serve-reward", "ocr", "--port", str(echo.port)]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize("one", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_cleanly_with_its_workers(one: signal.Signals) -> None:
    server = Served(f"{HERE}:echo", "--workers", "2", "--batch", "1", forks=False)
    try:
        ask(server.url, [grey(i) for i in range(8)])
        processes = workers_of(server.process.pid)
        assert len(processes) == 2
        server.process.send_signal(one)
        assert server.process.wait(LIMIT) == 0
        assert not any(Path(f"/proc/{p}").exists() for p in processes)
    finally:
        server.end()


def test_samples_of_many_clients_share_batches() -> None:
    async def many(url: str) -> list[float]:
        remotes = [RemoteScorer(RemoteEntry(urls=[url])) for _ in range(12)]
        scores = await asyncio.gather(*(r.score([grey(i)]) for i, r in enumerate(remotes)))
        await asyncio.gather(*(r.close() for r in remotes))
        return [score.value for (score,) in scores]  # type: ignore[misc]

    with served(f"{HERE}:batch_size", "cache=false", "--batch", "8") as one:
        asyncio.run(many(one.url))  # also starts the process
        sizes = asyncio.run(many(one.url))
        assert max(sizes) > 1 and max(sizes) <= 8
        assert sum(1 / size for size in sizes) <= 6  # batches


def test_a_repeated_request_is_computed_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with served(f"{HERE}:counted", f"log={log}", "seconds=1.5") as one:
        samples = [grey(v) for v in (10, 20, 30)]
        scores = ask(one.url, samples, timeout=0.6, retries=99)
        assert [s.value for s in scores] == [v / 255 for v in (10, 20, 30)]
        health = httpx.get(f"{one.url}/health").json()
        assert health["requests"] > 1  # it was sent again
    assert sorted(log.read_text().split()) == ["10", "20", "30"]


def test_a_killed_worker_of_a_server(tmp_path: Path) -> None:
    with served(f"{HERE}:echo") as one:
        assert ask(one.url, [grey(1)])[0].ok
        (process,) = workers_of(one.process.pid)
        os.kill(process, signal.SIGKILL)
        assert [s.value for s in ask(one.url, [grey(2), grey(3)])] == [2.0, 3.0]


class Slow:
    """A scorer whose batches wait for `go`."""

    groupwise = False
    processes = hits = 0
    random = False

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.sizes: list[int] = []

    async def score(self, samples: Any) -> list[Score]:
        self.sizes.append(len(samples))
        await self.go.wait()
        if any(s.seed == 13 for s in samples):
            raise RuntimeError("no")
        return [Score(float(s.seed)) for s in samples]

    async def close(self) -> None:
        pass


def test_the_queue_fills_while_the_lanes_are_busy_and_is_limited() -> None:
    async def go() -> None:
        slow = Slow()
        batcher = serve.BatchingScorer(slow, size=4, lanes=1, limit=10)
        first = asyncio.ensure_future(batcher.score([grey(0)]))
        while not slow.sizes:
            await asyncio.sleep(0.001)
        others = [asyncio.ensure_future(batcher.score([grey(i)])) for i in range(1, 11)]
        while batcher.waiting < 10:
            await asyncio.sleep(0.001)
        assert slow.sizes == [1]
        with pytest.raises(serve.QueueFull, match="10 samples are queued, the limit is 10"):
            await batcher.score([grey(99)])
        slow.go.set()
        assert (await first)[0].value == 0
        assert [(await other)[0].value for other in others] == list(range(1, 11))
        assert slow.sizes == [1, 4, 4, 2]
        (failed,) = await batcher.score([grey(13)])
        assert failed.error == "raised RuntimeError: no"
        assert (await batcher.score([grey(5)]))[0].value == 5  # the lane is free again
        await batcher.close()

    asyncio.run(go())


def test_a_batch_waits_a_little_for_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "BATCH_WAIT", 1.0)

    async def go() -> None:
        slow = Slow()
        slow.go.set()
        batcher = serve.BatchingScorer(slow, size=3, lanes=1)
        first = asyncio.ensure_future(batcher.score([grey(1)]))
        await asyncio.sleep(0)
        await batcher.score([grey(2)])
        await first
        assert slow.sizes == [2]
        monkeypatch.setattr(serve, "BATCH_WAIT", 10 * LIMIT)
        await asyncio.wait_for(batcher.score([grey(i) for i in range(3)]), LIMIT)  # a full one
        await batcher.close()

    asyncio.run(go())


def test_a_full_queue_returns_503() -> None:
    class Full:
        groupwise = False
        processes = hits = 0
        random = False

        async def score(self, samples: Any) -> list[Score]:
            raise serve.QueueFull("full")

        async def close(self) -> None:
            pass

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(serve.app("x", Full(), None, 1000))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post("/score", json={"samples": [{"prompt": "a"}]})

    response = asyncio.run(go())
    assert response.status_code == 503 and response.headers["retry-after"] == "1"


def test_a_slow_upload_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "UPLOAD_TIMEOUT", 0.2)

    async def drip() -> Any:
        while True:
            yield b" "
            await asyncio.sleep(0.05)

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(serve.app("x", Slow(), None, 1000))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post("/score", content=drip())

    assert asyncio.run(go()).status_code == 408


# In a recipe


@pytest.mark.parametrize(
    "entry, sentence",
    [
        ({"name": "ocr", "remote": {"urls": []}}, '"reward.0.remote.urls" = [] is not valid'),
        ({"name": "ocr", "remote": {"urls": ["127.0.0.1:1"]}}, '"127.0.0.1:1" is not a URL'),
        ({"name": "ocr", "remote": {"urls": ["ftp://x"]}}, '"ftp://x" is not a URL'),
        ({"name": "ocr", "remote": {"url": "http://x"}}, '"reward.0.remote.urls" is missing'),
        ({"name": "ocr", "detect": True, "remote": {"urls": ["http://x"]}}, "options detect to"),
        ({"name": "deqa"}, "set reward.remote.urls"),
        ({"name": "ocr", "remote": {"urls": ["http://x"], "protocol": "x"}}, "one of 'gesso', 'op"),
    ],
)
def test_an_invalid_remote(recipe_data: dict, entry: dict, sentence: str) -> None:
    recipe_data["reward"] = [entry]
    with pytest.raises(UserError, match=re.escape(sentence)):
        build.recipe_from(recipe_data)


def test_a_missing_token_is_reported_before_the_run(recipe_data: dict) -> None:
    remote = {"urls": ["http://127.0.0.1:9"], "token_env": "NO_SUCH_TOKEN"}
    recipe_data["reward"] = [{"name": "deqa", "remote": remote}]
    recipe = build.recipe_from(recipe_data)  # a recipe can be parsed without it
    with pytest.raises(UserError, match='token_env = "NO_SUCH_TOKEN"'):
        assembly.rewards(recipe)


def test_a_remote_survives_the_recipe_without_the_token(recipe_data: dict) -> None:
    remote: dict[str, Any] = {"urls": ["http://127.0.0.1:9"], "token_env": "TOKEN"}
    remote |= {"timeout": 3.5, "retries": 1}
    recipe_data["reward"] = [{"name": "ocr", "remote": remote, "cache": False}]
    recipe = build.recipe_from(recipe_data)
    again = build.recipe_from(recipe.model_dump())
    assert again == recipe and again.reward[0].options == {}
    assert again.reward[0].remote == config.RemoteEntry(**remote)
    assert not again.reward[0].cache and "s3cret" not in str(recipe.model_dump())
    rewards = assembly.rewards(recipe)
    try:
        reason = rewards.train.unfit(Prompt("a sign"))  # the built-in reward checks prompts
        assert reason is not None and reason.startswith("ocr: expected a double-quoted text")
        (weighted,) = rewards.service.rewards
        assert isinstance(weighted.scorer, RemoteScorer)
        pool = weighted.scorer.pool
        assert (pool.timeout, pool.retries, pool.in_flight) == (3.5, 1, 16)
    finally:
        rewards.service.close()


def test_a_run_scored_by_a_served_deqa(recipe_data: dict, tmp_path: Path) -> None:
    """Any server with the protocol; the reward's name is used in the metrics."""
    from gesso import run

    server = Served("tests.rewards.served_rewards:quality")
    try:
        remote = {"urls": [server.url]}
        recipe_data |= {"steps": 1, "reward": [{"name": "deqa", "remote": remote}]}
        recipe = build.recipe_from(recipe_data)
        rows = run.train(recipe, folder=tmp_path / "run", quiet=True).rows()
    finally:
        server.end()
    assert 0.2 <= rows[1]["reward/deqa"] <= 1
    assert rows[1]["reward/deqa/raw"] == pytest.approx(5 * rows[1]["reward/deqa"])


def test_no_pickle_anywhere() -> None:
    for file in (ROOT / "gesso").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(
            r"^\s*(import|from) (pickle|dill|cloudpickle|marshal|shelve)", text, re.M
        )


def test_requests_do_not_block_the_loop(echo: Served) -> None:
    """While one request waits, another completes."""

    async def go() -> None:
        with Misbehaving(["hang"]) as slow:
            one = RemoteScorer(RemoteEntry(urls=[slow.url], timeout=LIMIT, retries=0))
            two = RemoteScorer(RemoteEntry(urls=[echo.url], token_env="TOKEN"))
            waiting = asyncio.ensure_future(one.score([grey(1)]))
            while not slow.requests:
                await asyncio.sleep(0.01)
            await two.score([grey(2)])
            assert not waiting.done()
            waiting.cancel()
            await one.close()
            await two.close()

    asyncio.run(go())
