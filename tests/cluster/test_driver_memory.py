"""The driver's memory does not depend on the size of images, which are dropped when scored, nor of
latents, which it never receives."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from gesso import build
from gesso.cluster.placement import Placement
from gesso.cluster.processes import Message, Processes
from gesso.cluster.workers import Workers
from gesso.config import Recipe
from gesso.data.curriculum import stream_of
from gesso.data.prompts import WeightedPrompts
from gesso.plan.cores import OwnDevices
from gesso.plan.rates import Line, Rates
from gesso.plan.simulate import load
from gesso.plan.virtual import NO_PROMPT, Clock, VirtualProcesses
from gesso.rewards.compose import WeightedReward
from gesso.rewards.transport import service, wire
from gesso.types import Prompt, Sample, Score
from tests.cluster.runs import go
from tests.conftest import small_recipe

SIDE, GROUP, WORKERS, BATCH = 1024, 25, 4, 4
IMAGE = 3 * SIDE**2  # bytes
SETTINGS = [f"algorithm.group={GROUP}", f"sampler.batch={BATCH}", "eval.every=2"]


class Painters(VirtualProcesses):
    """Workers without devices; their images are real."""

    def _post(self, rank: int, content: Mapping[str, Any], *data: bytes) -> None:
        if "piece" in content:
            index = content["index"]
            image: np.ndarray = np.full((SIDE, SIDE, 3), index[0] % 256, np.uint8)
            data = (wire.pack_samples([Sample(NO_PROMPT, image, i) for i in index]),)
        super()._post(rank, content, *data)


class Brightness:
    groupwise, processes, hits, random = False, 0, 0, False

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(float(sample.pixels[0, 0, 0])) for sample in samples]

    async def close(self) -> None:
        """There is no process."""


def workers_of(recipe: Recipe) -> Workers:
    algorithm = build.algorithm(recipe)
    rates = Rates(sample=Line(1.0), update=Line(1.0))
    sizes = load(recipe, algorithm, 0)
    processes: Any = Painters(WORKERS, rates, sizes, Clock(), OwnDevices())
    rewards = service.RewardService([WeightedReward(recipe.reward[0].label, 1.0, Brightness())])
    prompts = [WeightedPrompts([Prompt(f"prompt {i}") for i in range(40)], 1.0)]
    placement = Placement(WORKERS, (), threads=1, parts=0)
    stream = stream_of(prompts, recipe)
    return Workers(recipe, algorithm, cast(Any, processes), rewards, stream, True, placement)


@pytest.mark.parametrize(("step", "samples", "side"), [(1, 100, 256), (2, 1000, None)])
def test_images_are_dropped_when_they_are_scored(
    monkeypatch: pytest.MonkeyPatch, step: int, samples: int, side: int | None
) -> None:
    """Batch 1 is followed by an evaluation: the page shows some of its groups, in small."""
    monkeypatch.setattr(service, "MAX_WAITING", 16 * IMAGE)
    cluster = workers_of(build.recipe("demo", [*SETTINGS, f"data.groups={samples // GROUP}"]))
    tracemalloc.start()
    try:
        batch = cluster.collect(step).result()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        cluster.close()
    assert [score.value for score in batch.scores[:8]] == [0.0] * 4 + [4.0] * 4
    assert len(batch.samples) == samples
    for sample in batch.samples:
        assert (None if sample.image is None else len(sample.image)) == side
    kept = 0 if side is None else samples * 3 * side**2
    in_flight = (16 + 4 * WORKERS * BATCH) * IMAGE  # packed and unpacked, received and at work
    assert peak < kept + in_flight


@pytest.mark.usefixtures("borrowing")
def test_latents_do_not_go_through_the_driver(
    pipeline_folder: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of images of twice the side, the driver receives the pixels, and nothing else that is
    larger."""
    data = small_recipe(pipeline_folder, prompt_file) | {"steps": 1}
    data["eval"]["every"] = 0
    others: list[int] = []  # bytes that are not pixels, by size of the images
    receive = Processes.receive
    for height, width in ((32, 48), (64, 96)):
        received: list[Message] = []

        def receiving(self: Processes, into: list[Message] = received) -> Message:
            into.append(receive(self))
            return into[-1]

        monkeypatch.setattr(Processes, "receive", receiving)
        data["model"] |= {"height": height, "width": width}
        go(data, tmp_path / str(height), 2)
        pieces = [message for message in received if "piece" in message.content]
        images = sum(len(message.content["index"]) for message in pieces)
        assert images > data["data"]["groups"] * data["algorithm"]["group"]
        every = sum(len(part) for message in received for part in message.data)
        others.append(every - images * 3 * height * width)
    assert others[0] > 0 and others[1] < 1.05 * others[0]
