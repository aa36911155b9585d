"""Rewards under odd conditions: broken details, dying workers, failed evaluations, limits."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from gesso import build, cli, run
from gesso.config import RemoteEntry, RewardEntry
from gesso.formulas import advantages as adv
from gesso.rewards import assembly, base
from gesso.rewards.compose import WeightedReward
from gesso.rewards.image import ocr
from gesso.rewards.judges import deqa
from gesso.rewards.labels import label_of
from gesso.rewards.transport import protocol
from gesso.rewards.transport.cache import CachedScorer
from gesso.rewards.transport.service import RewardService
from gesso.rewards.transport.workers import WorkerScorer
from gesso.track.progress import SILENT
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, Sample, Score, StopRun, UserError
from tests.rewards import user_rewards

USER = "tests.rewards.user_rewards"
IMAGE: np.ndarray = np.zeros((8, 8, 3), np.uint8)


def scored(scorer: base.Scorer, samples: list[Sample]) -> list[Score]:
    service = RewardService([WeightedReward("mine", 1.0, scorer)])
    try:
        return service.score(samples)
    finally:
        service.close()


def some(n: int) -> list[Sample]:
    return [Sample(Prompt("a"), IMAGE, seed) for seed in range(10, 10 + n)]


def test_invalid_details_and_numbers() -> None:
    found = [base.plain(answer) for answer in user_rewards.odd_details([])]
    assert found[0].error == 'returned nan as detail "x"'
    assert found[1].error and found[2].error and "not a number" in found[2].error
    assert found[3].ok and found[3].text == "?"
    (huge,) = protocol.read_rewards({"rewards": [10**400]}, 1)
    assert huge.error and "not a number" in huge.error


def test_a_class_is_instantiated_once_per_process(recipe_data: dict, tmp_path: Path) -> None:
    log = tmp_path / "made.txt"
    recipe_data["reward"] = [{"name": f"{USER}:Heavy", "log": str(log), "workers": 2}]
    recipe_data["steps"] = 1
    run.train(build.recipe_from(recipe_data), folder=tmp_path / "run", quiet=True)
    pids = log.read_text().split()
    assert pids.count(str(os.getpid())) == 1 and len(pids) == len(set(pids)) <= 3


def test_a_worker_reports_why_a_reward_cannot_be_created() -> None:
    scores = scored(WorkerScorer(f"{USER}:CannotBeMade", {"parent": os.getpid()}, 1), some(2))
    assert all(s.error and "no room on the card" in s.error for s in scores)


def test_a_sample_that_kills_the_worker_fails_alone() -> None:
    scores = scored(WorkerScorer(f"{USER}:poisoned", {}, 1), some(4))  # seeds 10 to 13
    assert [s.ok for s in scores] == [True, True, True, False]
    assert scores[3].error == "mine: the worker died (exit status 7), 3 times"


def test_patience_and_threads_of_a_worker() -> None:
    scorer = assembly.scorer(RewardEntry(name="ocr", detect=False, patience=7.5, cache=False))
    assert isinstance(scorer, WorkerScorer) and scorer.timeout == 7.5
    scorer = assembly.scorer(RewardEntry(name="ocr", detect=False, cache=False))
    assert isinstance(scorer, WorkerScorer) and scorer.timeout == 300.0


def test_a_worker_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    (score,) = scored(WorkerScorer(f"{USER}:threads", {}, 1), some(1))
    assert score.value == 1.0


GENEVAL = '{"prompt": "a dog", "tag": "single_object", "include": [{"class": "dog", "count": 1}]}'


def test_rewards_for_different_prompts_in_one_mixture(recipe_data: dict, tmp_path: Path) -> None:
    file = tmp_path / "mix.jsonl"
    file.write_text('{"prompt": "says \\"KITE\\""}\n' + GENEVAL + '\n{"prompt": "a cat"}\n')
    recipe_data["data"] |= {"train": str(file), "eval": str(file)}
    recipe_data["reward"] = [
        {"name": "ocr", "detect": False, "optional": True},
        {"name": "geneval", "optional": True},
    ]
    rewards = assembly.rewards(build.recipe_from(recipe_data))
    try:
        text, thing = Prompt('says "KITE"'), Prompt("a dog", columns=json.loads(GENEVAL))
        assert rewards.train.unfit(text) is None and rewards.train.unfit(thing) is None
        reason = rewards.train.unfit(Prompt("a cat"))
        assert reason and "ocr: expected a double-quoted" in reason and "geneval:" in reason
        (score,) = rewards.service.score([Sample(text, IMAGE, 0)])
        assert score.ok and set(score.parts) >= {"ocr"} and "geneval" not in score.parts
    finally:
        rewards.service.close()
    recipe_data["reward"][1]["optional"] = False
    strict = assembly.rewards(build.recipe_from(recipe_data))
    assert "geneval" in str(strict.train.unfit(text))
    strict.service.close()


@pytest.mark.parametrize(("share", "stops"), [(0.15, False), (0.4, True)])
def test_the_share_that_may_fail(
    recipe_data: dict, tmp_path: Path, share: float, stops: bool
) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    entry = {"name": f"{USER}:fails_later", "flag": str(flag), "share": share}
    recipe_data["reward"] = [entry]
    recipe_data["eval_reward"] = [{"name": "jpeg-compressibility"}]
    recipe_data["data"]["groups"] = 12
    recipe_data |= {"steps": 1, "max_failed": 0.25}
    recipe = build.recipe_from(recipe_data)
    if stops:
        with pytest.raises(StopRun, match="max_failed allows 25%"):
            run.train(recipe, folder=tmp_path / "run", quiet=True)
    else:
        rows = run.train(recipe, folder=tmp_path / "run", quiet=True).rows()
        assert 0 < rows[1]["failed"] <= 0.25 * 36


def test_an_evaluation_that_fails_loses_nothing(recipe_data: dict, tmp_path: Path) -> None:
    flag, folder = tmp_path / "flag", tmp_path / "run"
    recipe_data["reward"] = [{"name": "jpeg-compressibility"}]
    entry = {"name": f"{USER}:fails_later", "flag": str(flag), "cache": False}
    recipe_data["eval_reward"] = [entry]
    recipe_data["eval"] |= {"every": 1}
    recipe_data["save"] = {"every": 100}
    recipe_data["steps"] = 2
    recipe = build.recipe_from(recipe_data)
    job = run.assemble(recipe)
    draw = job.cluster.collect

    def and_break(step: int) -> object:
        flag.touch()
        return draw(step)

    job.cluster.collect = and_break  # type: ignore[method-assign, assignment]
    with pytest.raises(StopRun, match=r"evaluation failed.* --resume .*, or start a new run"):
        run._run(job, RunFolder.create(folder, recipe.model_dump()), SILENT)
    assert RunFolder.open(folder).latest() == 1
    assert [row["step"] for row in RunFolder.open(folder).rows()] == [0, 1]
    flag.unlink()
    assert [row["step"] for row in run.resume(folder, quiet=True).rows()] == [0, 1, 2]


def test_pixels_of_a_request_are_limited_together() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (5000, 5000)).save(buffer, "PNG")
    protocol.check_pixels([buffer.getvalue(), None, b"garbage"])
    with pytest.raises(UserError, match="75,000,000 pixels, more than"):
        protocol.check_pixels([buffer.getvalue()] * 3)


def test_a_port_out_of_range(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["serve-reward", "jpeg-compressibility", "--port", "99999"]) == 2
    assert "0 to 65535" in capsys.readouterr().err


def test_a_server_may_disable_caching() -> None:
    class Dice:
        groupwise, processes, hits, random, calls = False, 0, 0, True, 0

        async def score(self, samples: Sequence[Sample]) -> list[Score]:
            self.calls += 1
            return [Score(float(self.calls))] * len(samples)

        async def close(self) -> None: ...

    async def go() -> list[float | None]:
        cached = CachedScorer(Dice(), "dice")
        return [(await cached.score(some(1)))[0].value for _ in range(3)]

    assert asyncio.run(go()) == [1.0, 2.0, 3.0]
    assert protocol.pack_scores([], True)["random"] is True


def test_deqa_scale_is_1_to_5() -> None:
    class Server:
        groupwise = False
        processes = hits = 0
        random = False

        async def score(self, samples: Sequence[Sample]) -> list[Score]:
            return [Score(4.0, {"x": 1.0}), Score(5.5), Score.failed("down")]

        async def close(self) -> None: ...

    one, two, three = scored(deqa.ScaledScorer(Server(), deqa.SCALE), some(3))
    assert one.value == 0.8 and one.parts == {"mine": 0.8, "mine/x": 1.0, "mine/raw": 4.0}
    assert two.error == "mine: returned 5.5, expected 1 to 5" and three.error == "mine: down"
    remote = RemoteEntry(urls=["http://127.0.0.1:9"])
    scorer = assembly.scorer(RewardEntry(name="deqa", remote=remote, cache=False))
    assert isinstance(scorer, deqa.ScaledScorer)


def test_gdpo_group_statistics_ignore_rewards_that_do_not_apply() -> None:
    nan = float("nan")
    rewards = torch.tensor([[1.0, 2.0], [3.0, 1.0], [nan, 4.0], [2.0, 3.0]], dtype=torch.float64)
    group = torch.zeros(4, dtype=torch.long)
    advantages = adv.gdpo(rewards, torch.tensor([1.0, 0.0]), group)
    alone = adv.group_relative(
        torch.tensor([1.0, 3.0, 2.0]), torch.zeros(3, dtype=torch.long), "group"
    )
    total = torch.tensor([alone[0], alone[1], 0.0, alone[2]], dtype=torch.float64)
    expected = (total - total.mean()) / (total.std(correction=0) + adv.EPSILON)
    torch.testing.assert_close(advantages, expected)


def test_the_first_quoted_span_is_the_target() -> None:
    assert ocr.target_of(Prompt('says "KITE", not "WIND"')) == "KITE"


def test_ocr_receives_bgr(monkeypatch: pytest.MonkeyPatch) -> None:
    """RapidOCR expects OpenCV's channel order."""
    reward = ocr.Ocr(detect=False)
    seen = []

    def engine(image: np.ndarray) -> SimpleNamespace:
        seen.append(image)
        return SimpleNamespace(txts=["KITE"])

    monkeypatch.setattr(ocr, "_engine", lambda *_: engine)
    red: np.ndarray = np.zeros((32, 96, 3), np.uint8)
    red[..., 0] = 255
    assert reward.read(red) == "KITE" and seen[0][0, 0].tolist() == [0, 0, 255]


def test_the_answer_column_precedes_the_target_column() -> None:
    prompt = Prompt("q", columns={"target": "no", "answer": "yes"})
    assert label_of(prompt) == "yes"
