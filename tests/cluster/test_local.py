"""The cluster behind its protocol: order, what travels, and what the loop sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso import build, run
from gesso.cluster.local import Local
from gesso.cluster.protocol import Batch
from gesso.config import Recipe
from gesso.learner.learner import Update
from gesso.samplers.denoise import DenoisingSampler
from gesso.track.displays import display
from gesso.track.run_folder import RunFolder
from gesso.types import StopRun
from gesso.weights.policy import Policy
from gesso.weights.publish import Publication
from tests.conftest import small_recipe
from tests.cut_run import cut_after
from tests.test_loop import comparable, final_state
from tests.typed import drawing, sure

NFT = {"name": "diffusion-nft", "group": 3, "steps": 2, "times": 2, "updates": 2}


def nft_recipe(pipeline_folder: Path, prompt_file: Path) -> dict:
    """Draws with "old", evaluates with "ema": neither is the current policy."""
    data = small_recipe(pipeline_folder, prompt_file) | {"steps": 3}
    data["algorithm"] = NFT
    data["optimizer"] = {"lr": 1e-2}
    data["learner"] |= {"ema": {"every": 1, "decay": 0.5}}
    data["eval"] |= {"prompts": 2, "steps": 2}
    return data


@pytest.fixture
def nft_data(pipeline_folder: Path, prompt_file: Path) -> dict:
    return nft_recipe(pipeline_folder, prompt_file)


@pytest.fixture(scope="module")
def run_apart(
    pipeline_folder: Path, prompt_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunFolder:
    """Of `nft_data` as it is, with a sampler apart; only read."""
    return train_apart(
        nft_recipe(pipeline_folder, prompt_file), tmp_path_factory.mktemp("apart") / "run"
    )


@pytest.fixture
def job(recipe_data: dict) -> Iterator[Any]:
    assembled = run.assemble(build.recipe_from(recipe_data))
    yield assembled
    assembled.close()


class Apart(DenoisingSampler):
    """A sampler with a model of its own, as one in another process has: weights must travel."""

    def __init__(self, recipe: Any) -> None:
        super().__init__(drawing(build.model(recipe)), recipe.sampler.batch)


def apart(recipe: Recipe, sampler: type[Apart] = Apart) -> run.Assembled:
    job = run.assemble(recipe)
    cluster = job.cluster
    parts = (recipe, job.learner, sampler(recipe), cluster.rewards, cluster.stream)
    return dataclasses.replace(job, cluster=Local(*parts))


def train_apart(data: dict, folder: Path, sampler: type[Apart] = Apart) -> RunFolder:
    recipe = build.recipe_from(data)
    folder_of_run = RunFolder.create(folder, recipe.model_dump())
    return run._run(apart(recipe, sampler), folder_of_run, display(quiet=True))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_separate_sampler_trains_the_same_run(
    nft_data: dict, run_apart: RunFolder, tmp_path: Path, lag: int
) -> None:
    """DiffusionNFT's "old" and the evaluation's "ema" reach it, in time, to the bit."""
    nft_data["lag"] = lag
    together = run.train(build.recipe_from(nft_data), folder=tmp_path / "shared", quiet=True)
    apart = train_apart(nft_data, tmp_path / "apart") if lag else run_apart
    assert comparable(apart.rows()) == comparable(together.rows())
    expected, state = final_state(together.path), final_state(apart.path)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_a_resumed_run_publishes_what_it_restored(
    nft_data: dict, run_apart: RunFolder, tmp_path: Path
) -> None:
    cut = RunFolder.open(cut_after(run_apart, 2, tmp_path / "run"))
    again = run._run(apart(build.recipe_from(nft_data)), cut, display(quiet=True))
    assert comparable(again.rows())[-1] == comparable(run_apart.rows())[-1]
    expected, state = final_state(run_apart.path), final_state(again.path)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_weights_that_change_after_they_were_published_stop_the_run(nft_data: dict) -> None:
    job = apart(build.recipe_from(nft_data))
    try:
        job.cluster.collect(0).result()
        pending = job.cluster.collect(1)
        copies = sure(Policy, job.local.sampler.model.policy).copies
        next(iter(copies["old"].values())).mul_(1.01)
        with pytest.raises(StopRun, match="weights differ from version 0"):
            pending.result()
    finally:
        job.close()


def test_nothing_is_sampled_between_an_update_and_its_publication(job: Any) -> None:
    job.cluster.update(job.cluster.collect(0).result(), 0)
    with pytest.raises(StopRun, match="have changed since they were last published"):
        job.cluster.collect(1).result()
    with pytest.raises(StopRun, match="have changed since they were last published"):
        job.cluster.evaluate(job.eval_prompts, "current")
    job.cluster.publish(1)
    assert job.cluster.collect(2).result().version == 1


def test_samples_come_in_the_order_of_the_request_whichever_piece_is_finished_first(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = job.cluster.sample_step(0).result()
    sample = job.local.sampler.sample
    monkeypatch.setattr(job.local.sampler, "sample", lambda *request: reversed([*sample(*request)]))
    rollout, _ = job.cluster.sample_step(0).result()
    assert [s.seed for s in rollout.samples] == [s.seed for s in expected.samples]
    assert rollout.group.tolist() == expected.group.tolist()
    assert rollout.scores == expected.scores
    assert torch.equal(rollout.logp, expected.logp)
    assert torch.equal(rollout.flow_trace.clean, expected.flow_trace.clean)


class Stale(Apart):
    """Takes the first versions, then goes on with what it has."""

    def accept(self, publication: Publication) -> None:
        if publication.version < 2:
            super().accept(publication)


class CurrentOnly(Apart):
    """Takes the current weights alone, as samplers did before."""

    def accept(self, publication: Publication) -> None:
        current = {"current": publication.copies["old"]}
        super().accept(Publication(publication.version, current))  # type: ignore[arg-type]
        policy = sure(Policy, self.model.policy)
        policy.snapshot("old")
        policy.snapshot("ema")


@pytest.mark.parametrize("faulty", [Stale, CurrentOnly])
def test_a_sampler_with_other_weights_stops_the_run(
    nft_data: dict, tmp_path: Path, faulty: type[Apart]
) -> None:
    with pytest.raises(StopRun, match="the sampler"):
        train_apart(nft_data, tmp_path / "run", faulty)
    rows = RunFolder.open(tmp_path / "run").rows()
    assert len(rows) <= 2  # nothing was learned from its samples


def test_weights_that_were_not_published_are_not_sampled_with(job: Any) -> None:
    with pytest.raises(StopRun, match='"old" were not published'):
        job.cluster.evaluate(job.eval_prompts, "old")


def test_collect_returns_at_once_and_batches_are_sampled_in_order_before_the_update(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    draw, update = Local.sample_step, job.learner.update

    def drawing_step(self: Local, step: int) -> Any:
        events.append(step)
        return draw(self, step)

    def updating(rollout: Any, step: int, scales: Any) -> Any:
        events.append(f"update {step}")
        return update(rollout, step, scales)

    monkeypatch.setattr(Local, "sample_step", drawing_step)
    monkeypatch.setattr(job.learner, "update", updating)
    first, second = job.cluster.collect(0), job.cluster.collect(1)
    assert events == []
    batch = first.result()
    assert events == [0, 1]  # the second is scored while the first is learned from
    third = job.cluster.collect(2)
    job.cluster.update(batch, 0)
    assert events == [0, 1, 2, "update 0"]  # with the weights that it was collected for
    job.cluster.publish(1)
    assert [b.result().version for b in (second, third)] == [0, 0]
    assert job.cluster.collect(3).result().version == 1


def test_a_batch_that_cannot_be_sampled_does_not_lose_the_previous_one(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Local.sample_step

    def failing(self: Local, step: int) -> Any:
        if step == 1:
            raise StopRun("gone")
        return draw(self, step)

    monkeypatch.setattr(Local, "sample_step", failing)
    first, second = job.cluster.collect(0), job.cluster.collect(1)
    job.cluster.update(first.result(), 0)
    with pytest.raises(StopRun, match="gone"):
        second.result()


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_in(item)]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in tensors_in(getattr(value, f.name))]
    return []


def test_no_tensor_passes_through_the_loop(
    nft_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def watched(name: str) -> Any:
        method = getattr(Local, name)

        def call(self: Local, *arguments: Any) -> Any:
            result = method(self, *arguments)
            seen.extend([*arguments, result])
            return result

        return call

    for name in ("finish", "update", "publish", "evaluate", "save", "restore"):
        monkeypatch.setattr(Local, name, watched(name))
    run.train(build.recipe_from(nft_data), folder=tmp_path / "run", quiet=True)
    assert {Batch, Update} <= {type(value) for value in seen}
    assert tensors_in(Update({}, [torch.ones(1)])) and not tensors_in(
        [value for value in seen if type(value).__name__ != "DriverBatch"]
    )
