"""Rewards in real worker processes, including faulty ones."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from gesso import build
from gesso.rewards import assembly, base
from gesso.rewards.compose import WeightedReward, combine
from gesso.rewards.transport import wire
from gesso.rewards.transport.batches import score_batches
from gesso.rewards.transport.service import RewardService
from gesso.rewards.transport.workers import WorkerScorer
from gesso.types import Prompt, Sample, Score, UserError
from tests.typed import sure

USER = "tests.rewards.user_rewards"


def sample(text: str = 'a sign that says "KITE"', value: int = 100, seed: int = 1) -> Sample:
    image: np.ndarray = np.full((8, 12, 3), value, dtype=np.uint8)
    return Sample(Prompt(text, "blurry", {"bonus": 2.5}, "file:3"), image, seed)


def word_image(word: str) -> np.ndarray:
    import matplotlib

    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans-Bold.ttf", 20)
    image = Image.new("RGB", (96, 32), (180, 30, 30))
    ImageDraw.Draw(image).text((48, 16), word, font=font, anchor="mm", fill="white")
    return np.asarray(image)


@pytest.fixture
def service() -> Iterator:
    services = []

    def start(
        reference: str, weight: float = 1.0, timeout: float = 60.0, count: int = 1, **options
    ):
        reward = WeightedReward(
            "mine", weight, WorkerScorer(reference, options, count, timeout=timeout)
        )
        services.append(RewardService([reward]))
        return services[-1]

    yield start
    for one in services:
        one.close()


def test_wire_round_trip() -> None:
    samples = [sample(value=3), sample('"ÅÖ" 雪', value=250, seed=2**62)]
    frame = io.BytesIO(wire.pack_samples(samples))
    got = wire.read_samples(frame.readline(), frame.read)
    assert [s.prompt for s in got] == [s.prompt for s in samples]
    assert all((a.pixels == b.pixels).all() for a, b in zip(got, samples, strict=True))
    assert got[1].seed == 2**62
    scores = [Score(0.5, {"exact": 1.0}, "KITE"), Score.failed("no")]
    assert wire.read_scores(wire.pack_scores(scores)) == scores


def test_a_custom_function_with_options(service) -> None:
    got = service(f"{USER}:brightness", scale=2.0).score([sample(value=51), sample(value=255)])
    assert [s.value for s in got] == pytest.approx([0.4, 2.0])


def test_a_reward_receives_everything_and_may_print(service) -> None:
    (score,) = service(f"{USER}:sees_everything").score([sample(seed=9)])
    assert score.value == 2.5 and score.parts["mine/seed"] == 9 and score.text == "blurry"


@pytest.mark.parametrize(
    "name, error",
    [
        ("raises", "RuntimeError: no such model"),
        ("wrong_count", "returned 3 scores for 2 samples"),
        ("dies", "worker died .* 3 times"),
    ],
)
def test_a_faulty_reward_is_an_error(service, name: str, error: str) -> None:
    scores = service(f"{USER}:{name}").score([sample(), sample()])
    assert all(s.value is None and not s.ok for s in scores)
    for s in scores:
        with pytest.raises(AssertionError, match=error):
            raise AssertionError(s.error)


def test_nan_fails_only_its_sample(service) -> None:
    scores = service(f"{USER}:not_finite").score([sample(), sample()])
    assert scores[0].error == "mine: returned nan" and scores[1].value == 1.0


def test_a_dead_worker_is_replaced_and_its_samples_retried(service, tmp_path: Path) -> None:
    one = service(f"{USER}:dies_once", flag=str(tmp_path / "died"))
    scores = one.score([sample()] * 6)
    assert [s.value for s in scores] == [1.0] * 6
    assert one.rewards[0].scorer.restarts == 1


def test_a_worker_killed_from_outside(service) -> None:
    one = service(f"{USER}:brightness")
    assert one.score([sample()])[0].ok
    (process,) = one.rewards[0].scorer._alive
    os.kill(process.pid, signal.SIGKILL)
    assert one.score([sample()])[0].ok


def test_a_reward_that_hangs_times_out(service) -> None:
    started = time.monotonic()
    scores = service(f"{USER}:hangs", timeout=1.5).score([sample()])
    assert scores[0].error == "mine: returned no scores within 1.5 s, 2 times"
    assert time.monotonic() - started < 300  # it sleeps 600


def test_scores_keep_the_order_of_their_samples_whichever_batch_is_ready_first() -> None:
    async def go() -> list[Score]:
        last = asyncio.Event()

        async def score(batch: Sequence[Sample]) -> list[Score]:
            if batch[-1].seed == 6:
                last.set()
            await last.wait()
            return [Score(float(each.seed)) for each in batch]

        return await score_batches(score, [sample(seed=i) for i in range(7)], 3)

    assert [score.value for score in asyncio.run(go())] == [0, 1, 2, 3, 4, 5, 6]


def test_scores_of_a_cancelled_request_are_dropped() -> None:
    async def go() -> list[Score]:
        workers = WorkerScorer(f"{USER}:slow_seeds", {}, 1)
        try:
            await workers.score([sample(seed=1)])  # the process is up
            cancelled = asyncio.ensure_future(workers.score([sample(seed=2)]))
            await asyncio.sleep(0.1)
            cancelled.cancel()
            return await workers.score([sample(seed=3)])
        finally:
            await workers.close()

    assert [score.value for score in asyncio.run(go())] == [3.0]


def test_closing_stops_the_worker_processes(service) -> None:
    one = service(f"{USER}:brightness", count=2)
    one.score([sample()] * 16)
    processes = list(one.rewards[0].scorer._alive)
    assert processes
    one.close()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
    one.close()


def test_numpy_numbers_and_plain_classes(service) -> None:
    (score,) = service(f"{USER}:numpy_scores").score([sample(value=7)])
    assert score.value == 7.0 and score.parts["mine/max"] == 7.0
    (score,) = service(f"{USER}:OnlyScores").score([sample()])
    assert score.value == 0.5
    (score,) = service(f"{USER}:not_a_number").score([sample()])
    assert score.error == "mine: returned 'good', not a number"


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("brightness", {"scael": 2}, "unexpected keyword argument 'scael'"),
        ("Stateful", {}, "does not accept these options: missing a required argument: 'word'"),
    ],
)
def test_invalid_options_are_reported_at_load(name: str, options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        base.load(f"{USER}:{name}", options)


def test_a_class_with_state() -> None:
    reward = base.load(f"{USER}:Stateful", {"word": "sign"})
    assert reward.unfit(Prompt("a cat")) == "does not mention sign"
    assert base.checked(reward, [sample()])[0].value == 1.0


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("nope", 'unknown reward "nope"; .* video-align'),
        ("ocrr", 'did you mean "ocr"'),
        ("no_such_module:f", "cannot be imported"),
        (f"{USER}:nothing", 'has no "nothing"'),
    ],
)
def test_a_reward_that_does_not_exist(recipe_data: dict, name: str, sentence: str) -> None:
    recipe_data["reward"] = [{"name": name}]
    with pytest.raises(UserError, match=sentence):
        build.recipe_from(recipe_data)


def test_weighted_sum_and_its_parts() -> None:
    got = combine([("ocr", 0.7, Score(0.5, {"exact": 0.0}, "KIT")), ("jpeg", 2.0, Score(-0.1))])
    assert got.value == pytest.approx(0.7 * 0.5 - 0.2)
    assert got.parts == {"ocr": 0.5, "ocr/exact": 0.0, "jpeg": -0.1} and got.text == "KIT"
    failed = combine([("ocr", 1.0, Score(0.5)), ("jpeg", 1.0, Score.failed("broke"))])
    assert failed.value is None and failed.error == "jpeg: broke"


def test_jpeg_compressibility_is_minus_kilobytes_over_500() -> None:
    noisy = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noisy).save(buffer, "JPEG", quality=95)
    reward: Any = base.load(assembly.REWARDS["jpeg-compressibility"], {})
    flat, loud = reward.score([sample(), Sample(Prompt(""), noisy, 0)])
    assert loud.value == pytest.approx(-len(buffer.getvalue()) / 1000 / 500)
    assert sure(float, flat.value) > sure(float, loud.value)
    other: Any = base.load(assembly.REWARDS["jpeg-incompressibility"], {})
    other_way = other.score([sample(), Sample(Prompt(""), noisy, 0)])
    assert [-sure(float, s.value) for s in other_way] == [
        flat.value,
        loud.value,
    ]


@pytest.mark.parametrize("detect", [True, False])
def test_ocr_reads_real_words(detect: bool) -> None:
    reward = base.load(assembly.REWARDS["ocr"], {"detect": detect})
    words = ["KITE", "BRIDGE", "GARDEN", "SILVER"]
    samples = [Sample(Prompt(f'says "{w}"'), word_image(w), 0) for w in words]
    scores = base.checked(reward, samples)
    assert [s.value for s in scores] == [1.0] * 4
    assert all(s.parts["exact"] == 1.0 and s.parts["longer"] == 0.0 for s in scores)
    wrong = base.checked(reward, [Sample(Prompt('says "KITES"'), word_image("KITE"), 0)])[0]
    assert wrong.value == pytest.approx(0.8) and wrong.parts["exact"] == 0
    blank = base.checked(reward, [sample()])[0]
    assert blank.value == 0.0


def test_ocr_target_is_the_quoted_span_or_the_column() -> None:
    reward = base.load(assembly.REWARDS["ocr"], {})
    assert str(reward.unfit(Prompt("a sign"))).startswith("expected a double-quoted text")
    assert reward.unfit(Prompt('a "sign" that says "KITE"')) is None
    assert reward.unfit(Prompt("a sign", columns={"target": "KITE"})) is None
    assert reward.unfit(Prompt('says ""')) is not None
