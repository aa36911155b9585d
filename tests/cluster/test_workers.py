"""Worker processes: the same run on any number of them, and how they end."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from PIL import Image

from gesso import build, run
from gesso.check import _shares, check
from gesso.cluster import workers
from gesso.cluster.placement import Placement, place
from gesso.cluster.processes import Child, Processes, WorkerFailed
from gesso.cluster.ray_nodes import Node, most_threads
from gesso.config import Recipe
from gesso.data.prompts import LargestPrompt
from gesso.plan.measure import measure
from gesso.track import checkpoints
from gesso.track.checkpoints import Checkpoints
from gesso.track.progress import SILENT, Progress
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, Sample, Scales, StopRun, UserError
from gesso.use.export import Form, export
from gesso.use.loaded import LoadedModel, SamplingOptions
from gesso.use.opening import open_to_sample
from gesso.use.source import find
from gesso.viewer.playground import PlaygroundRequest
from gesso.viewer.studio import Studio
from tests import editors, forked
from tests.cluster.pools import MOST, Forked
from tests.cluster.runs import (
    alive,
    assert_equal,
    children_of,
    go,
    language_recipe,
    listening,
    offline,
)
from tests.conftest import small_recipe
from tests.test_loop import final_state
from tests.typed import sure
from tests.waiting import until

LOOPBACK = "0100007F"  # 127.0.0.1 in /proc/net/tcp
LIMIT = 20  # seconds to end, on a machine that runs other tests; 5 on an idle one


def children(processes: Processes) -> list[Child]:
    return [worker for worker in processes.workers if isinstance(worker, Child)]


DGPO = {"name": "dgpo", "last": 1, "old_samples_after": 1}
BRAKES = {"gate": {}, "renew": {"after": 2}, "advantage": {"std": "one", "diverse": True}}
JUDGED = [{"name": "jpeg-incompressibility"}, {"name": "jpeg-compressibility", "weight": 0.0}]
TEMPFLOW = {
    "name": "tempflow-grpo", "group": 3, "steps": 3, "guidance": 1.0, "updates": 1,
    "window": {"size": 1, "low": 0, "high": 3, "per": "prompt"},
}  # fmt: skip


OFFLINE_FLOW = {"name": "flow-dpo", "group": 2, "guidance": 1.0, "times": 2}
OFFLINE_LANGUAGE = {"name": "dpo", "group": 2, "max_tokens": 12}
OPD = {"name": "flow-opd", "group": 4, "steps": 2, "guidance": 1.0, "timestep_fraction": 1.0}


def teachers(pipeline_folder: Path) -> dict[str, dict[str, Any]]:
    """The base model, with guidance that the student does not have."""
    path = str(pipeline_folder)
    return {"a": {"path": path, "guidance": 4.0}, "b": {"path": path, "guidance": 2.0}}


def taught_prompts(prompt_file: Path) -> Path:
    """The first two have one teacher, the third the other."""
    rows = zip(prompt_file.read_text().splitlines(), "aab", strict=True)
    path = prompt_file.with_name("taught.jsonl")
    text = "".join(json.dumps({"prompt": p, "teacher": t}) + "\n" for p, t in rows)
    path.write_text(text)
    return path


def recipes(pipeline_folder: Path, prompt_file: Path, language: Path) -> dict[str, dict[str, Any]]:
    flow = small_recipe(pipeline_folder, prompt_file)
    flow["eval"]["steps"] = 2
    flow["algorithm"] |= {"group": 5, "updates": 2, "beta": 0.01}
    flow["sampler"] = {"batch": 2}  # 10 samples in 5 parts
    flow["learner"] = {"micro_batch": 3}  # 15 terms
    nft = small_recipe(pipeline_folder, prompt_file) | {"eval": flow["eval"]}
    nft["algorithm"] = {"name": "diffusion-nft", "group": 3, "steps": 2, "times": 2, "updates": 2}
    nft["learner"] = {"micro_batch": 2, "ema": {"every": 1, "decay": 0.5}}
    nft["sampler"] = {"batch": 1}
    taught = flow | {"algorithm": OPD | {"teachers": teachers(pipeline_folder)}}
    taught["data"] = flow["data"] | {"train": str(taught_prompts(prompt_file))}
    return {
        "flow-grpo": flow,
        "flow-opd": taught,
        "diffusion-nft": nft,
        "dgpo": nft | {"steps": 3, "algorithm": nft["algorithm"] | DGPO},
        "tempflow-grpo": flow | {"algorithm": TEMPFLOW},
        "brakes": flow | {"steps": 3, "algorithm": flow["algorithm"] | BRAKES, "reward": JUDGED},
        "grpo with kl": language_recipe(language, {"name": "grpo", "kl": {"beta": 0.1}}),
        "ppo": language_recipe(language, {"name": "ppo"}),
        "failed scores": language_recipe(language, {"name": "grpo"})
        | {"reward": [{"name": "tests.token_rewards:some_fail"}], "max_failed": 0.9},
        "refills": language_recipe(
            language,
            {"name": "dapo", "updates": 1, "refills": 2},
        )
        | {"reward": [{"name": "tests.token_rewards:length"}]},
        "offline flow-dpo": offline(nft, language, OFFLINE_FLOW),
        "offline dpo": offline(language_recipe(language, {}), language, OFFLINE_LANGUAGE),
    }


COUNTS = {
    "flow-grpo": (1, MOST),
    "diffusion-nft": (MOST,),
    "dgpo": (2,),
    "flow-opd": (2,),
    "tempflow-grpo": (2,),
    "brakes": (2,),
    "grpo with kl": (MOST,),
    "ppo": (MOST,),
    "failed scores": (2,),
    "refills": (2,),
    "offline flow-dpo": (2,),
    "offline dpo": (2,),
}


@pytest.mark.usefixtures("borrowing")
@pytest.mark.parametrize("name", COUNTS)
def test_the_number_of_workers_does_not_change_a_bit(
    pipeline_folder: Path, prompt_file: Path, language: Path, tmp_path: Path, name: str
) -> None:
    """Rows, weights and optimizer state after two or three steps, also without worker processes.
    Five and six parts are not divisible by four workers."""
    data = recipes(pipeline_folder, prompt_file, language)[name]
    alone = go(data, tmp_path / "alone")
    assert len(alone.rows()) == 1 + data["steps"]
    for count in COUNTS[name]:
        together = go(data, tmp_path / str(count), count)
        assert_equal(alone, together)
        row = together.rows()[-1]
        idle = [row[f"cluster/idle/{rank}"] for rank in range(count)]
        assert row["cluster/idle"] == pytest.approx(sum(idle) / count) and max(idle) < 1
        assert (row["cluster/sent_gb"] > 0) == (count > 1)
        steps = together.timeline.read()
        assert [step.step for step in steps] == [*range(1 + data["steps"])]
        for step in steps[1:]:
            workers = [step.busy[f"worker {rank}"] for rank in range(count)]
            assert all(busy["update"] > 0 and busy["publish"] > 0 for busy in workers)
            assert any("sample" in busy for busy in workers)
            assert name.startswith("offline") or "score" in step.busy["rewards"]
            assert max(sum(busy.values()) for busy in workers) <= step.seconds


@pytest.mark.usefixtures("borrowing")
def test_a_run_goes_on_with_another_number_of_workers(
    pipeline_folder: Path, prompt_file: Path, language: Path, tmp_path: Path
) -> None:
    """2 → none → 4 workers, as `gesso train --resume RUN cluster.workers=4` changes it."""
    data = recipes(pipeline_folder, prompt_file, language)["ppo"]
    data["eval"]["every"] = 1  # as after the last step of each part
    undisturbed = go(data, tmp_path / "undisturbed")
    folder = go(data | {"steps": 1}, tmp_path / "changed", 2).path
    run.resume(folder, quiet=True, steps=2, overrides=["cluster.workers=none"])
    resumed = run.resume(folder, quiet=True, steps=3, overrides=[f"cluster.workers={MOST}"])
    assert_equal(undisturbed, resumed)
    assert run.recipe_of(resumed).cluster.workers == MOST
    steps = resumed.timeline.read()
    assert [len(step.busy) for step in steps] == [4, 4, 2, 2 + MOST]  # with driver and rewards
    assert [step.at for step in steps] == sorted(step.at for step in steps)


@pytest.mark.usefixtures("pids")
def test_the_rates_of_a_plan_are_those_of_real_workers(language: Path) -> None:
    """One worker and two others take turns, so they are not borrowed."""
    recipe = build.recipe_from(language_recipe(language, {"name": "grpo"}))
    measured = measure(recipe)
    rates = measured.rates
    assert rates.sample.each + rates.sample.fixed > 0 and rates.update.each + rates.optimizer > 0
    assert min(rates.encode, rates.share, rates.reduce, rates.publish) > 0
    assert measured.longest > 1 and 1 <= rates.cores < math.inf


@pytest.mark.usefixtures("borrowing")
def test_sharding_the_frozen_weights_does_not_change_a_bit(
    pipeline_folder: Path, prompt_file: Path, language: Path, tmp_path: Path
) -> None:
    """Two workers; then none; then two groups of two, which keep the weights in host memory; then
    these and a sampler, which has all weights."""
    data = recipes(pipeline_folder, prompt_file, language)["flow-grpo"] | {"steps": 4}
    data["model"] |= {"lora": {"rank": 4, "alpha": 8}, "gradient_checkpointing": True}
    data["eval"]["every"] = 1
    undisturbed = go(data, tmp_path / "undisturbed")
    folder = go(data | {"steps": 1}, tmp_path / "changed", 2, sharding="base").path
    alone = ["cluster.workers=none", "cluster.sharding=none"]
    run.resume(folder, quiet=True, steps=2, overrides=alone)
    groups = [f"cluster.workers={MOST}", "cluster.sharding=base", "cluster.shard_within=2"]
    run.resume(folder, quiet=True, steps=3, overrides=[*groups, "cluster.offload=true"])
    resumed = run.resume(folder, quiet=True, steps=4, overrides=["cluster.samplers=1"])
    assert_equal(undisturbed, resumed)


@pytest.mark.usefixtures("borrowing")
@pytest.mark.parametrize("name, count", [("diffusion-nft", MOST), ("flow-opd", 2), ("ppo", 2)])
def test_sharding_all_weights_gives_the_same_update(
    pipeline_folder: Path, prompt_file: Path, language: Path, tmp_path: Path, name: str, count: int
) -> None:
    """Gradients of ranks are summed in float32, in another order. Four ranks have to run passes
    whose results are dropped: six parts, and three micro-batches."""
    data = recipes(pipeline_folder, prompt_file, language)[name] | {"steps": 1}
    alone = go(data, tmp_path / "alone")
    sharded = go(data, tmp_path / "sharded", count, sharding="all")
    row, expected = sharded.rows()[-1], alone.rows()[-1]
    compared = {key for key in expected if key.startswith(("reward", "update/"))}
    assert {k: row[k] for k in compared} == pytest.approx(
        {k: expected[k] for k in compared}, rel=1e-4, abs=1e-6
    )
    assert_close(alone, sharded)


@pytest.mark.usefixtures("borrowing")
def test_a_sharded_checkpoint_is_read_by_any_number_of_workers(
    pipeline_folder: Path, prompt_file: Path, language: Path, tmp_path: Path
) -> None:
    data = recipes(pipeline_folder, prompt_file, language)["diffusion-nft"] | {"steps": 1}
    sharded = go(data, tmp_path / "sharded", 2, sharding="all")
    files = sorted(sharded.checkpoint(1).glob("*.safetensors"))
    assert len(files) == 2
    other = RunFolder(shutil.copytree(sharded.path, tmp_path / "other"))
    overrides = ["cluster.workers=none", "cluster.sharding=none"]
    run.resume(sharded.path, quiet=True, steps=2, overrides=overrides)
    run.resume(other.path, quiet=True, steps=2, overrides=["cluster.workers=3"])
    assert_close(sharded, other)
    damaged = other.checkpoint(1) / files[-1].name
    *content, last = damaged.read_bytes()
    damaged.write_bytes(bytes([*content, last ^ 1]))
    shutil.rmtree(other.checkpoint(2))
    for more in (overrides, []):
        with pytest.raises(UserError, match=f"{files[-1].name} is damaged: the table"):
            run.resume(other.path, quiet=True, overrides=more)


@pytest.mark.usefixtures("borrowing")
def test_a_sharded_run_is_checked_in_its_workers(
    pipeline_folder: Path, prompt_file: Path, language: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_in_this_process", None)  # a single device may be too small
    data = recipes(pipeline_folder, prompt_file, language)["flow-grpo"]
    recipe = build.recipe_from(data | {"cluster": {"workers": 2, "sharding": "all"}})
    findings = check(recipe)
    facts = dict(findings.facts)
    assert facts["workers"].startswith("2 worker processes (CPU, ")
    assert "2 of them divide the weights" in facts["workers"]
    assert facts["rewards"].startswith("no failures; example: ")
    assert facts["ratio"] == "log-probs of sampling and replay differ by at most 0.0e+00"
    assert facts["memory"].endswith(" at the peak in each worker")
    assert re.match(r"about [\d.]+ s per step and [\d.]+ (s|min) in total", facts["time"])
    assert facts["workers"] not in findings.warnings


@pytest.mark.usefixtures("borrowing")
def test_the_largest_prompt_is_known_to_the_driver(language: Path, tmp_path: Path) -> None:
    """In tokens, or by its input images."""
    editors.build("kontext", tmp_path / "m", num_layers=1, num_single_layers=1)
    Image.new("RGB", (20, 24)).save(tmp_path / "a.png")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "image": "a.png"}))
    editing = small_recipe(tmp_path / "m", tmp_path / "a.jsonl")
    editing["model"] |= {"name": "kontext", "text_length": 16, "device": "cpu"}
    language_data = language_recipe(language, {"name": "grpo"})
    found = []
    for data in (editing, language_data):
        job = run.assemble(build.recipe_from(data | {"cluster": {"workers": 1}}))
        job.close()
        found.append(sure(LargestPrompt, job.largest))
    images, text = found
    assert images.tokens is text.images is None
    assert [tuple(size) for size in images.images or ()] == [(24, 20)]
    assert (text.tokens or 0) > 1


@pytest.mark.usefixtures("borrowing")
@pytest.mark.parametrize("background", [True, False])
def test_a_folder_that_cannot_be_written_is_one_sentence(
    language: Path, tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: workers fail, the earlier checkpoint stays. Here the folder of the second
    one is a file."""
    data = language_recipe(language, {"name": "grpo"})
    data["save"] |= {"background": background}
    honest = workers.Workers.save

    def save(self: workers.Workers, folder: Path) -> Any:
        if folder.name.endswith("2"):
            folder.rmdir()
            folder.touch()
        return honest(self, folder)

    monkeypatch.setattr(workers.Workers, "save", save)
    with pytest.raises(StopRun) as raised:
        go(data, tmp_path / "run", 2, sharding="all")
    assert re.fullmatch(
        r"could not save the checkpoint of step 2 in .*: worker \d: .*Error.*; the last complete "
        r"checkpoint is step 1; free disk space and run `gesso train --resume .*`",
        str(raised.value),
    )
    assert RunFolder.open(tmp_path / "run").steps == [1]


class Killed(BaseException):
    """As if the driver was killed: nothing is finished or cleaned up."""


MOMENTS = {
    "training": (workers.Workers, "train"),
    "before a save": (workers.Workers, "save"),
    "writing": (checkpoints, "_take_digests"),
    "before state.json": (checkpoints, "write_atomic"),
    "before the folder is renamed": (Checkpoints, "_rename"),
    "before older ones are deleted": (Checkpoints, "steps"),
}


@pytest.mark.usefixtures("borrowing")
def test_killed_at_any_moment_a_sharded_run_ends_the_same(
    pipeline_folder: Path, prompt_file: Path, language: Path, tmp_path: Path
) -> None:
    """One moment after the other, with checkpoints that are written in the background."""
    data = recipes(pipeline_folder, prompt_file, language)["grpo with kl"]
    data["save"] = {"every": 1, "keep": 1, "background": True}
    undisturbed = go(data, tmp_path / "undisturbed", 2, sharding="all")
    folder = tmp_path / "killed"
    for owner, method in MOMENTS.values():
        with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
            _kill_in(patched, owner, method, folder)
            if folder.exists():
                run.resume(folder, quiet=True)
            else:
                go(data, folder, 2, sharding="all")
    resumed = run.resume(folder, quiet=True)
    assert_equal(undisturbed, resumed)


def _kill_in(patched: pytest.MonkeyPatch, owner: Any, name: str, folder: Path) -> None:
    """In the second step, when that function is called to train or to save."""
    honest = getattr(owner, name)

    def killed(*arguments: Any) -> Any:
        caller = sys._getframe(1).f_code.co_name
        if caller in ("update", "begin", "_complete") and (folder / "checkpoints/000001").exists():
            raise Killed
        return honest(*arguments)

    patched.setattr(owner, name, killed)


@pytest.mark.usefixtures("borrowing")
@pytest.mark.parametrize("name", ["diffusion-nft", "grpo with kl"])
def test_a_run_is_sampled_from_in_its_workers(
    pipeline_folder: Path, prompt_file: Path, language: Path, tmp_path: Path, name: str
) -> None:
    """By `gesso sample` and `gesso eval`: all weights are sharded, and the trained ones are
    averages where the recipe has them. More samples than sampler.batch, so that one process cuts
    them into the same parts."""
    data = recipes(pipeline_folder, prompt_file, language)[name] | {"steps": 1}
    trained = go(data, tmp_path / "run", 2, sharding="all").path
    row, seeds, prompts = [0, 0, 0, 1, 1], [5, 6, 7, 8, 9], [Prompt("a red cat"), Prompt("why?")]
    found: dict[Any, list[Any]] = {}
    for overrides in ([], [f"cluster.workers={MOST}"], ["cluster.workers=none"]):
        alone = overrides == ["cluster.workers=none"]
        more = ["cluster.sharding=none"] if alone else []
        opened = open_to_sample(find(trained, overrides=[*overrides, *more]), base=True)
        assert isinstance(opened, LoadedModel) == alone
        assert opened.unfit(prompts) == [None, None]
        for which in ("reference", "current"):
            drawn = opened.draw(prompts, row, seeds, SamplingOptions(weights=which))
            found.setdefault(which, []).append([_content(sample) for sample in drawn])
        opened.close()
    for drawn_by in found.values():
        assert drawn_by[0] == drawn_by[1] == drawn_by[2]
    assert found["reference"][0] != found["current"][0]
    exported = tmp_path / "exported"  # a folder of weights that are not divided
    whole = find(trained, overrides=["cluster.workers=none", "cluster.sharding=none"])
    export(sure(LoadedModel, open_to_sample(whole)), exported, Form())
    opened = open_to_sample(find(exported))
    assert opened.unfit(prompts) == [None, None]
    opened.close()


def _content(sample: Sample) -> Any:
    return sample.tokens if sample.image is None else sample.image.tolist()


@pytest.mark.usefixtures("borrowing")
def test_the_playground_uses_the_workers(
    pipeline_folder: Path, prompt_file: Path, language: Path, tmp_path: Path, pool: Processes
) -> None:
    """Samples of one batch, which are cut for several workers. After a worker was lost, the next
    request starts anew."""
    data = recipes(pipeline_folder, prompt_file, language)["flow-grpo"] | {"steps": 1}
    data["sampler"]["batch"] = 8
    data["algorithm"]["group"] = 16
    trained = go(data, tmp_path / "run", 2)
    studio = Studio()
    request = PlaygroundRequest(run="run", prompt="a red cat", n=3)
    sampled: set[int] = set()
    honest = Processes.send

    def send(self: Processes, rank: int, task: str, content: Any, *more: bytes) -> None:
        if task == "sample":
            sampled.add(rank)
        honest(self, rank, task, content, *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Processes, "send", send)
        first = studio.generate(trained.path, request, SILENT)
    assert sampled == {0, 1} and len(first["base"]) == len(first["trained"]) == 3
    trained.write_config(build.recipe_from(data | {"cluster": {"workers": MOST}}).model_dump())
    studio.close()
    assert studio.generate(trained.path, request, SILENT) == first
    with pytest.MonkeyPatch.context() as patched, pytest.raises(StopRun, match="worker 1 ended"):
        patched.setattr(Processes, "receive", lambda self: self._raise_ended(1))
        studio.generate(trained.path, request, SILENT)
    assert studio.generate(trained.path, request, SILENT) == first
    studio.close()


def assert_close(one: RunFolder, other: RunFolder) -> None:
    expected, state = final_state(one.path), final_state(other.path)
    assert state.keys() == expected.keys()
    for key, tensor in state.items():
        double = expected[key].double()
        assert (tensor.double() - double).norm() <= 3e-6 * double.norm(), key


def test_a_worker_that_is_killed_stops_the_run_and_the_other_workers(
    language: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started as users do it, the other one is forked."""
    data = language_recipe(language, {"name": "grpo"})
    started: list[int] = []
    honest = workers.Workers.train

    class Mixed(Forked):
        def _start(self, rank: int, environment: Mapping[str, str]) -> Any:
            return (Processes if rank else Forked)._start(self, rank, environment)

    def start(recipe: Recipe, placement: Placement, progress: Progress) -> Processes:
        pool = Mixed(placement.workers, lambda rank: {}, 300.0, progress)
        workers.begin(pool, recipe, placement.samplers)
        started[:] = [*pool.pids, *(child.process.pid for child in children(pool))]
        return pool

    def train(self: workers.Workers, rollout: Any, step: int, scales: Scales) -> Any:
        if step == 1:
            children(self.processes)[0].process.kill()
        return honest(self, rollout, step, scales)

    with monkeypatch.context() as patched, pytest.raises(StopRun) as raised:
        patched.setattr(workers, "start", start)
        patched.setattr(workers.Workers, "train", train)
        go(data, tmp_path / "run", 2)
    assert "worker 1 ended while" in str(raised.value)
    assert "killed by SIGKILL" in str(raised.value)
    assert f"run `gesso train --resume {tmp_path / 'run'}`" in str(raised.value)
    assert len(started) == 2
    until(lambda: not any(alive(pid) for pid in started), limit=LIMIT)
    assert "worker 1 ended" in (tmp_path / "run" / "log.txt").read_text()
    overrides = ["cluster.workers=none"]
    resumed = run.resume(tmp_path / "run", quiet=True, overrides=overrides)
    assert_equal(go(data, tmp_path / "alone"), resumed)


def test_more_workers_than_cores_are_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    sampled = [_shares(Placement(n, (), 1, 8))[0] for n in (1, 2, 8)]
    assert sampled == [1.0, 0.5, 0.5]


LOST_WHILE = ["sample", "update 0", "publish", "save", "update 1"]


def test_a_run_that_loses_workers_ends_as_if_it_had_not(
    language: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed at each of these moments, at first before the snapshot of step 1, and once
    while new ones start. There is no other checkpoint."""
    data = language_recipe(language, {"name": "grpo"}) | {"steps": 2, "save": {"every": 2}}
    data["data"]["curriculum"] = {}
    alone = go(data, tmp_path / "alone")
    left, pools = list(LOST_WHILE), []

    class Mortal(Forked):
        def send(self, rank: int, task: str, content: Any, *more: bytes) -> None:
            super().send(rank, task, content, *more)
            moment = f"update {content['step']}" if task == "update" else task
            if rank == 1 and [moment] == left[:1]:
                left.pop(0)
                os.kill(self.pids[1], SIGKILL)

    def start(recipe: Recipe, placement: Placement, progress: Progress) -> Processes:
        pools.append(Mortal(placement.workers, lambda rank: {}, 300.0, progress))
        workers.begin(pools[-1], recipe, placement.samplers)
        return pools[-1]

    monkeypatch.setattr(workers, "start", start)
    disturbed = go(data, tmp_path / "disturbed", 2, restarts=len(LOST_WHILE))
    assert not left and len(pools) == len(LOST_WHILE) + 1
    assert_equal(alone, disturbed)
    log = (disturbed.path / "log.txt").read_text()
    lost = re.findall(r"which continue after step (\d) and repeat (\d) steps?", log)
    assert lost == [("0", "0"), ("0", "0"), ("0", "0"), ("0", "1"), ("1", "0")]
    assert "(restarts left: 0)" in log
    assert log.count("new workers started in") == 4, "one was killed while they started"
    assert disturbed.steps == [2]
    until(lambda: not any(alive(pid) for pool in pools for pid in pool.pids), limit=LIMIT)


def endless(language: Path, tmp_path: Path) -> list[str | Path]:
    """Arguments of a run with one worker that goes on until it is stopped."""
    data = language_recipe(language, {"name": "grpo"}) | {"steps": 1000, "cluster": {"workers": 1}}
    recipe = tmp_path / "recipe.toml"
    recipe.write_bytes(tomli_w.dumps(data).encode())
    return ["train", recipe, "--run", tmp_path / "run"]


@pytest.mark.parametrize("signals", [[SIGTERM], [SIGINT, SIGINT], [SIGKILL]])
def test_workers_end_with_the_driver(language: Path, tmp_path: Path, signals: list[int]) -> None:
    command = endless(language, tmp_path)
    with forked.gesso(*command, output=tmp_path / "output.txt", forks=True) as driver:
        assert driver.pid is not None
        until(lambda: (tmp_path / "run" / "checkpoints" / "000001").exists(), limit=60)
        (server,) = [pid for pid in children_of(driver.pid) if children_of(pid)]
        (worker,) = children_of(server)
        for number in signals:
            os.kill(driver.pid, number)
            time.sleep(0.1)
        driver.join(LIMIT)
        assert driver.exitcode is not None
        # A step that ends before the second signal ends the run as the first one asks for.
        assert driver.exitcode != 0 or len(signals) > 1
        until(lambda: not alive(worker), limit=LIMIT)
    assert RunFolder.open(tmp_path / "run").latest()


def test_a_busy_worker_ends_with_the_driver(language: Path, tmp_path: Path) -> None:
    """Here it reads a file that never ends, and does not look at its messages."""
    os.mkfifo(tmp_path / "config.json")
    recipe = build.recipe_from(language_recipe(language, {"name": "grpo"})).model_dump(mode="json")
    recipe["model"]["path"] = str(tmp_path)
    processes = Processes(1, lambda rank: {}, 60.0, SILENT)
    try:
        (worker,) = children(processes)
        store = {"folder": str(tmp_path)}
        task = {"recipe": recipe, "rank": 0, "count": 1, "samplers": 0}
        processes.send(0, "start", task | {"store": store, "address": "127.0.0.1"})
        until(lambda: worker.doing == "loading the model", limit=60)
        assert worker.process.poll() is None
        worker.life.close()  # as when the driver is gone
        until(lambda: worker.process.poll() is not None, limit=LIMIT)
    finally:
        processes.close()


def test_a_worker_that_does_not_answer_is_named() -> None:
    processes = Processes(1, lambda rank: {}, 1.0, SILENT)
    try:
        children(processes)[0].process.send_signal(SIGSTOP)
        processes.send(0, "forget", {"step": 0})
        message = r"worker 0 has not answered for cluster\.patience = 1 s while beginning to forget"
        with pytest.raises(StopRun, match=message):
            processes.receive()
    finally:
        processes.close()


def test_messages_about_a_task_that_failed_are_dropped(pool: Processes) -> None:
    """The first worker raises while others still answer; the next task gets its own answers."""
    whole = pool.part(0, MOST)
    with pytest.raises(WorkerFailed, match="KeyError: 'nonsense'"):
        whole.all("nonsense", {})
    assert whole.all("forget", {"step": 7}) == [{}] * MOST


@pytest.mark.usefixtures("borrowing")
def test_an_error_of_a_worker_is_the_drivers(language: Path, tmp_path: Path) -> None:
    data = language_recipe(language, {"name": "grpo"})
    data["model"]["path"] = str(language / "missing")
    with pytest.raises(UserError) as alone:
        go(data, tmp_path / "alone")
    with pytest.raises(UserError) as raised:
        go(data, tmp_path / "two", 2)
    assert str(raised.value) == str(alone.value)
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cluster": {"workers": 7}},
            "a step has work for only",
        ),
        ({"cluster": {"workers": 2}, "model": {"device": "cuda:1"}}, 'but model.device = "cuda:1"'),
        (
            {"cluster": {"workers": 13}},
            "6 workers, or start a run with sampler.batch = 1 for up to 12",
        ),
        (
            {"cluster": {"workers": 5}, "sampler": {"batch": 4}},
            "or start a run with sampler.batch = 2",
        ),
        ({"cluster": {"workers": True}}, "got true"),
        ({"cluster": {"samplers": 2}}, "cluster.samplers = 2 requires cluster.workers"),
        ({"cluster": {"workers": 1, "samplers": 7}}, "use at most 6 samplers"),
        (
            {"cluster": {"workers": "auto", "samplers": 1}},
            "leaves none of the 1 devices for training",
        ),
        (
            {"cluster": {"workers": 1, "samplers": 1}, "sampler": {"engine": "data"}},
            'samplers = 1 does not support sampler.engine = "data"',
        ),
        (
            {"cluster": {"workers": 3, "samplers": 1, "sharding": "all", "shard_within": 2}},
            "cluster.shard_within = 2 must divide the 3 workers",
        ),
        ({"cluster": {"workers": 0}}, "of at least 1"),
        ({"cluster": {"workers": "all"}}, 'got "all"'),
    ],
)
def test_impossible_placements(language: Path, changes: dict[str, Any], message: str) -> None:
    data = language_recipe(language, {"name": "grpo"})
    for section, values in changes.items():
        data[section] = data.get(section, {}) | values
    with pytest.raises(UserError, match=re.escape(message)):
        recipe = build.recipe_from(data)
        place(recipe, build.algorithm(recipe))


@pytest.mark.parametrize(
    ("address", "installed", "message"),
    [
        ("ray://10.0.0.1:10001", True, 'expected "auto" or "HOST:PORT" of a Ray cluster, got "ray'),
        ("127.0.0.1:9", False, "requires Ray, which is not installed; run `pip install 'gesso[ray"),
        ("127.0.0.1:9", True, 'no Ray cluster at cluster.address = "127.0.0.1:9" ([Errno 111]'),
    ],
)
def test_a_ray_cluster_that_cannot_be_used(
    language: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    installed: bool,
    message: str,
) -> None:
    """Ray itself is in tests/cluster/test_ray.py; here it is not installed."""
    ray = SimpleNamespace(is_initialized=lambda: False) if installed else None
    monkeypatch.setitem(sys.modules, "ray", ray)
    data = language_recipe(language, {"name": "grpo"}) | {"cluster": {"address": address}}
    with pytest.raises(UserError, match=re.escape(message)):
        recipe = build.recipe_from(data)
        assert recipe.cluster.workers == "auto"
        place(recipe, build.algorithm(recipe))


def test_threads_of_workers_on_nodes_of_different_sizes() -> None:
    nodes = [Node("10.0.0.1", 1, 8, 0), Node("10.0.0.2", 1, 4, 0)]
    assert [most_threads(nodes, n) for n in (1, 2, 3, 4, 12, 99)] == [8, 4, 4, 2, 1, 1]


@pytest.mark.usefixtures("borrowing")
def test_samples_are_dropped_after_their_update(language: Path, pool: Forked) -> None:
    """And workers listen on loopback only, for each other."""
    data = language_recipe(language, {"name": "grpo"}) | {"cluster": {"workers": 2}}
    job = run.assemble(build.recipe_from(data))
    try:
        cluster = job.cluster
        assert isinstance(cluster, workers.Workers)
        first, second = cluster.collect(0), cluster.collect(1)
        batch, later = first.result(), second.result()
        cluster.evaluate(job.eval_prompts, "current")
        cluster.update(batch, 0)
        held = set(cluster._owners)
        assert held and held == cluster._shared and all(name.startswith("1.") for name in held)
        cluster.publish(1)
        cluster.update(later, 1)
        assert not cluster._owners and not cluster._shared
        assert set().union(*(listening(pid) for pid in pool.pids)) == {LOOPBACK}
    finally:
        job.close()


def test_workers_with_different_weights_stop_the_run(
    pool: Processes, language: Path, monkeypatch: pytest.MonkeyPatch, borrowing: None
) -> None:
    """As after an error of the network, a GPU or a library."""
    recipe = build.recipe_from(
        language_recipe(language, {"name": "grpo"}) | {"cluster": {"workers": 2}}
    )
    job = run.assemble(recipe)
    try:
        honest = Processes.answers

        def answers(self: Processes) -> list[dict[str, Any]]:
            found = honest(self)
            return [f | {"digest": f["digest"] + str(i)} for i, f in enumerate(found)]

        monkeypatch.setattr(Processes, "answers", answers)
        with pytest.raises(StopRun, match="weights of worker 1 differ from those of worker 0"):
            job.cluster.publish(1)
    finally:
        job.close()
