"""Images and messages of a prompt reach the rewards: in worker processes and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from gesso.config import RemoteEntry
from gesso.rewards.base import Scorer
from gesso.rewards.transport import protocol, wire
from gesso.rewards.transport.cache import CachedScorer
from gesso.rewards.transport.remote import RemoteScorer
from gesso.rewards.transport.workers import WorkerScorer
from gesso.types import Prompt, PromptImage, Sample, Score, UserError
from tests.rewards.servers import grey, served
from tests.rewards.test_http import bomb

HERE = "tests.rewards.served_rewards"


def encoded(value: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 2), (value,) * 3).save(buffer, kind)
    return buffer.getvalue()


DARK, BRIGHT = encoded(10), encoded(200, "BMP")
MESSAGES = (
    {"role": "system", "content": [{"type": "text", "text": "雪"}]},
    {"role": "user", "content": [{"type": "image"}, {"type": "image"}]},
)


@pytest.fixture
def prompt(tmp_path: Path) -> Prompt:
    """One image as bytes, one as a file."""
    (tmp_path / "dark.png").write_bytes(DARK)
    images = (PromptImage(data=BRIGHT), PromptImage(path=str(tmp_path / "dark.png")))
    return Prompt("which?", columns={"answer": 1}, where="a:1", images=images, messages=MESSAGES)


def scores_of(scorer: Scorer, samples: list[Sample]) -> list[Score]:
    async def go() -> list[Score]:
        try:
            return await scorer.score(samples)
        finally:
            await scorer.close()

    return asyncio.run(go())


def check_shown(scores: Sequence[Score]) -> None:
    shown, plain = scores
    assert shown.value == 200.0 and plain.value == -1.0
    assert json.loads(shown.text) == [[BRIGHT.hex(), DARK.hex()], list(MESSAGES), "the left"]
    assert json.loads(plain.text) == [[], [], ""]


# The wire to worker processes


def round_trip(samples: Sequence[Sample]) -> list[Sample]:
    frame = io.BytesIO(wire.pack_samples(samples))
    got = wire.read_samples(frame.readline(), frame.read)
    assert frame.read() == b""
    return got


def test_prompt_images_over_the_wire_with_pixels_and_texts(prompt: Prompt) -> None:
    drawn: np.ndarray = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    other = Prompt("o", images=(PromptImage(data=encoded(7)),))
    samples = [
        Sample(prompt, None, 1, "the left"),
        Sample(Prompt("p"), drawn, 2),
        Sample(replace(prompt, messages=()), drawn[:1], 3),
        Sample(other, None, 4, ""),
    ]
    a, b, c, d = round_trip(samples)
    assert [p.data for p in a.prompt.images] == [BRIGHT, DARK]
    assert [p.path for p in a.prompt.images] == ["", prompt.images[1].path]
    assert a.prompt.messages == MESSAGES and (a.prompt.columns, a.prompt.where) == (
        {"answer": 1},
        "a:1",
    )
    assert b.prompt == Prompt("p") and (b.pixels == drawn).all()
    assert c.prompt.images == a.prompt.images and c.prompt.messages == ()
    assert (c.pixels == drawn[:1]).all() and d.prompt == other and d.text == ""


def test_an_image_of_a_group_is_read_and_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[PromptImage] = []

    def read(self: PromptImage) -> bytes:
        reads.append(self)
        return self.data

    monkeypatch.setattr(PromptImage, "read", read)
    big = Prompt("x", images=(PromptImage(data=BRIGHT * 1000), PromptImage(data=DARK)))
    one = len(wire.pack_samples([Sample(big, None, 0, "")]))
    assert len(wire.pack_samples([Sample(big, None, i, "") for i in range(8)])) < one + 2000
    assert len(reads) == 4  # two, each time


def test_videos_over_the_wire_and_over_http() -> None:
    frames: np.ndarray = np.arange(72, dtype=np.uint8).reshape(3, 2, 4, 3)
    samples = [Sample(Prompt("p"), frames, 1, fps=12.5), Sample(Prompt("q"), frames[0], 2)]
    request = protocol.pack_score_request(samples)
    for video, image in (round_trip(samples), protocol.read_score_request(request).samples):
        assert video.is_video and video.fps == 12.5 and (video.frames == frames).all()
        assert not image.is_video and image.fps is None and (image.pixels == frames[0]).all()
        assert image.frames.shape == (1, 2, 4, 3)
        with pytest.raises(UserError, match=r"is a video; expected an image: set frames ="):
            video.pixels  # noqa: B018
    with pytest.raises(UserError, match='protocol = "openrlhf" has no videos'):
        protocol.pack_get_reward(samples)
    (row, _) = json.loads(request)["samples"]
    faults: list[dict[str, object]] = [{"fps": None}, {"image": row["frames"][0]}, {"frames": []}]
    for wrong in faults:
        with pytest.raises(UserError, match='a video has "frames" and "fps"'):
            protocol.read_score_request(json.dumps({"samples": [row | wrong]}).encode())
    other = protocol.base64_png(np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(UserError, match="frames of a video differ in size"):
        mixed = {"samples": [row | {"frames": [*row["frames"], other]}]}
        protocol.read_score_request(json.dumps(mixed).encode())


def test_a_prompt_without_images_has_no_overhead() -> None:
    sample = Sample(Prompt("a", "b", {"c": 1}, "d:1"), np.zeros((1, 2, 3), np.uint8), 5)
    frame = wire.pack_samples([sample])
    header, pixels = frame.split(b"\n", 1)
    assert pixels == bytes(6) and json.loads(header) == {"samples": [
        {"text": "a", "negative": "b", "columns": {"c": 1}, "where": "d:1", "seed": 5,
         "response": None, "tokens": None, "shape": [1, 2, 3]},
    ]}  # fmt: skip
    (row,) = json.loads(protocol.pack_score_request([sample]))["samples"]
    assert row.keys() == {"prompt", "negative", "columns", "where", "seed", "image", "text"}


def test_in_a_worker_process(prompt: Prompt) -> None:
    samples = [Sample(prompt, None, 0, "the left"), Sample(Prompt("p"), None, 0, "")]
    check_shown(scores_of(WorkerScorer(f"{HERE}:shown", {}, 1), samples))


def test_mask_and_target_in_a_worker_process_and_over_http(prompt: Prompt) -> None:
    """A file that is both an input image and a column is sent once."""
    edit = replace(prompt, image_columns={"mask": PromptImage(data=DARK), "b": prompt.images[1]})
    assert [p.data for p in round_trip([Sample(edit, None, 0, "")])[0].prompt.for_rewards] == [
        BRIGHT, DARK, DARK, DARK,
    ]  # fmt: skip
    samples = [Sample(edit, None, 0, ""), Sample(prompt, None, 0, "")]
    expected = [json.dumps({"mask": DARK.hex(), "b": DARK.hex()}), "{}"]
    local = scores_of(WorkerScorer(f"{HERE}:image_columns", {}, 1), samples)
    with served(f"{HERE}:image_columns") as one:
        remote = scores_of(RemoteScorer(RemoteEntry(urls=[one.url])), samples)
    assert [score.text for score in local] == [score.text for score in remote] == expected


def test_a_missing_file_fails_only_rewards_that_open_it(prompt: Prompt) -> None:
    Path(prompt.images[1].path).unlink()
    first = replace(prompt, images=prompt.images[::-1])
    samples = [Sample(first, None, 0, ""), Sample(Prompt("p"), None, 0, "")]
    assert [p.data for p in round_trip(samples)[0].prompt.images] == [b"", BRIGHT]
    scores = scores_of(WorkerScorer(f"{HERE}:shown", {}, 1, batch=1), samples)
    assert (
        "dark.png cannot be read: No such file" in (scores[0].error or "")
        and scores[1].value == -1.0
    )
    assert [s.value for s in scores_of(WorkerScorer(f"{HERE}:blind", {}, 1), samples)] == [2.0, 0.0]


# HTTP


def test_over_http_and_by_multipart(prompt: Prompt) -> None:
    samples = [Sample(prompt, None, 0, "the left"), Sample(Prompt("p"), None, 0, "")]
    with served(f"{HERE}:shown") as one:
        check_shown(scores_of(RemoteScorer(RemoteEntry(urls=[one.url])), samples))
        sent = json.loads(protocol.pack_score_request(samples))["samples"]
        files = {"none": b""}  # httpx sends multipart only with a file
        data = {"samples": json.dumps(sent)}
        answer = httpx.post(f"{one.url}/score", data=data, files=files).json()
        check_shown(protocol.read_scores(answer, 2))


def test_a_request_contains_files_and_no_paths(prompt: Prompt) -> None:
    body = protocol.pack_score_request([Sample(prompt, None, 0, "x")])
    (row,) = json.loads(body)["samples"]
    assert [base64.b64decode(image) for image in row["images"]] == [BRIGHT, DARK]
    assert row["messages"] == list(MESSAGES) and b"dark.png" not in body
    (got,) = protocol.read_score_request(body).samples
    assert got.prompt.images == (PromptImage(data=BRIGHT), PromptImage(data=DARK))
    assert got.prompt.messages == MESSAGES


def test_openrlhf_does_not_send_prompt_images(prompt: Prompt) -> None:
    request = json.loads(protocol.pack_get_reward([Sample(prompt, None, 0, "x")]))
    assert request == {"query": ["which?x"], "prompts": ["which?"], "labels": [1]}


@pytest.mark.parametrize(
    "image, sentence",
    [
        ("/etc/passwd", "not base64"),
        ("aGVsbG8=", "prompt image: the image of 5 bytes is not an image"),
        ("", "prompt image: expected a file, got 0 bytes"),
        (bomb(), "prompt image: .* has 9000×9000 pixels"),
    ],
)
def test_a_server_rejects_paths_and_image_bombs(image: str, sentence: str) -> None:
    body = json.dumps({"samples": [{"prompt": "a", "text": "b", "images": [image]}]}).encode()
    with pytest.raises(UserError, match=sentence):
        protocol.read_score_request(body)


def test_a_missing_file_fails_its_request(prompt: Prompt) -> None:
    Path(prompt.images[1].path).unlink()
    remote = RemoteScorer(RemoteEntry(urls=["http://127.0.0.1:9"], retries=0))
    (score,) = scores_of(remote, [Sample(prompt, None, 0, "")])
    assert score.error == f"image {prompt.images[1].path} cannot be read: No such file or directory"


def test_payload_bytes_include_images() -> None:
    """Large payloads are packed in a thread."""
    light, heavy = PromptImage(data=b"x" * 9), PromptImage(data=b"x" * protocol.OFFLOAD_BYTES)
    for images, offloaded in (
        ((light,), False),
        ((heavy,), True),
        ((PromptImage(path="x"),), True),
    ):
        size = protocol.payload_bytes([Sample(Prompt("", images=images), None, 0, "")])
        assert (size >= protocol.OFFLOAD_BYTES) == offloaded
    assert protocol.payload_bytes([grey(1)]) == 8 * 12 * 3


# The cache


def test_the_key_includes_images_and_messages(prompt: Prompt) -> None:
    cached = CachedScorer(WorkerScorer(f"{HERE}:blind", {}, 1), "x")
    bright, dark = prompt.images
    prompts = [
        prompt,
        replace(prompt, images=(dark, bright)),
        replace(prompt, images=(bright,)),
        replace(prompt, images=(bright, PromptImage(path=f"{dark.path}.png"))),
        replace(prompt, images=(PromptImage(data=encoded(201, "BMP")), dark)),
        replace(prompt, images=()),
        replace(prompt, messages=()),
        replace(prompt, messages=MESSAGES[1:]),
        replace(prompt, messages=(), images=()),
        replace(prompt, image_columns={"mask": dark}),
        replace(prompt, image_columns={"target_image": dark}),
        replace(prompt, image_columns={"mask": bright}),
    ]
    keys = [cached.key(Sample(prompt, None, 0, "x")) for prompt in prompts]
    assert len(set(keys)) == len(prompts)
    again = replace(prompt, where="b:2", images=(PromptImage(data=bytes(bytearray(BRIGHT))), dark))
    assert cached.key(Sample(again, None, 1, "x")) == keys[0]
