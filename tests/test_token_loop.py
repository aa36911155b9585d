"""Models that write through the whole loop: runs, resumes, greedy baselines, refills, exports."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tomli_w
import torch

from gesso import build, run
from gesso.cli import main
from gesso.learner.learner import Learner, Update
from gesso.rollout import Rollout
from gesso.run import assemble
from gesso.samplers.decode import DecodingSampler
from gesso.track.run_folder import RunFolder
from gesso.types import ResponseSpec, Scales, Score, StopRun, UserError
from tests import tokens
from tests.cut_run import cut_after
from tests.token_rewards import early
from tests.tokens import Tiny, padded_logp, trace_of
from tests.typed import writing

REWARDS = "tests.token_rewards"
NOT_REPEATED = ("time/", "memory/", "samples_per_s", "cached")  # a sitting remembers its own scores
LORA = {"rank": 4, "alpha": 12}
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
QUESTIONS = [f"question {word}?" for word in NUMBERS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    for name in ("qwen2", "qwen2.5-vl"):
        tokens.build(name, root / name)
    (root / "text.txt").write_text("\n".join(QUESTIONS) + "\n")
    (root / "eval.txt").write_text("hello?\nhow many?\nwhat is 3 + 4?\n")
    flat = [f"{'flat ' if i % 2 else ''}{q}" for i, q in enumerate(QUESTIONS)]
    (root / "flat.txt").write_text("\n".join(flat) + "\n")
    (root / "all-flat.txt").write_text("\n".join(f"flat {q}" for q in QUESTIONS) + "\n")
    rows = []
    for i, question in enumerate(QUESTIONS):
        (root / f"{i}.png").write_bytes(tokens.picture(16 + 8 * (i % 3), 24, i).read())
        rows.append({"prompt": question, "images": [f"{i}.png"] if i % 4 else []})
    lines = [json.dumps(row) + "\n" for row in rows]
    (root / "seen.jsonl").write_text("".join(lines))
    return root


@pytest.fixture
def text(folders: Path) -> Tiny:
    return Tiny("qwen2", folders / "qwen2")


@pytest.fixture
def seeing(folders: Path) -> Tiny:
    return Tiny("qwen2.5-vl", folders / "qwen2.5-vl")


def data_of(tiny: Tiny, algorithm: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """3 prompts × 4 responses of up to 6 letters."""
    root = tiny.folder.parent
    name = "vision-language" if tiny.sees else "causal"
    train = str(root / ("seen.jsonl" if tiny.sees else "text.txt"))
    data: dict[str, Any] = {
        "steps": 3,
        "model": {"name": name, "path": str(tiny.folder), "device": "cpu"},
        "data": {"train": train, "eval": str(root / "eval.txt"), "groups": 3},
        "algorithm": {"group": 4, "max_tokens": 6} | algorithm,
        "reward": [{"name": f"{REWARDS}:early"}],
        "optimizer": {"lr": 1e-2},
        "learner": {"micro_tokens": 150},
        "sampler": {"batch": 5},
        "eval": {"every": 0, "prompts": 3},
        "save": {"every": 1},
    }
    for key, value in sections.items():
        data[key] = data[key] | value if isinstance(value, dict) and key in data else value
    return data


def go(data: dict[str, Any], folder: Path) -> RunFolder:
    return run.train(build.recipe_from(data), folder=folder, quiet=True)


def comparable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(NOT_REPEATED)} for row in rows]


def state_of(found: RunFolder) -> dict[str, torch.Tensor]:
    latest = found.latest()
    assert latest is not None
    return found.load(latest)[0]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(t, two[n]) for n, t in one.items())


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> list[Rollout]:
    """The rollouts that reach the learner."""
    seen: list[Rollout] = []
    honest = Learner.update

    def update(self: Learner, rollout: Rollout, step: int, scales: Scales) -> Update:
        seen.append(rollout)
        return honest(self, rollout, step, scales)

    monkeypatch.setattr(Learner, "update", update)
    return seen


# Resume to the bit

RESUMED: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "updates": 2, "kl": {"beta": 0.1}}},
    "grpo-lora": {
        "algorithm": {"name": "grpo", "kl": {"beta": 0.1}},
        "model": {"lora": LORA},
        "learner": {"ema": {"every": 1}},
    },
    "ppo": {"algorithm": {"name": "ppo", "epochs": 2, "critic": {"lr": 1e-2}}},
    "ppo-lora": {
        "algorithm": {
            "name": "ppo",
            "critic": {"trunk": "lora"},
            "kl": {"place": "reward", "estimator": "k1"},
        },
        "model": {"lora": LORA},
    },
    "remax": {"algorithm": {"name": "remax"}},
    "dapo": {
        "algorithm": {"name": "dapo", "group": 4, "refills": 2, "probe": 2},
        "reward": [{"name": f"{REWARDS}:some_flat"}],
    },
}


SLOW = ("grpo", "ppo")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in RESUMED]
)
def test_a_resumed_run_ends_as_an_undisturbed_one(folders: Path, name: str, tmp_path: Path) -> None:
    model = "qwen2.5-vl" if name == "grpo-lora" else "qwen2"
    data = data_of(Tiny(model, folders / model), **RESUMED[name])
    data |= {"steps": 2}
    if name == "dapo":
        data["data"]["train"] = str(folders / "flat.txt")
    recipe = build.recipe_from(data)
    whole = run.train(recipe, folder=tmp_path / "whole", quiet=True)
    cut = run.resume(cut_after(whole, 1, tmp_path / "cut"), quiet=True)
    assert comparable(cut.rows()) == comparable(whole.rows())
    state = state_of(whole)
    assert same(state, state_of(cut))
    tables = {key.partition("/")[0] for key in state}
    if name == "grpo-lora":
        assert "ema" in tables and "reference" not in tables
        assert any(not torch.equal(t, state[f"current/{n.removeprefix('ema/')}"])
                   for n, t in state.items() if n.startswith("ema/"))  # fmt: skip
    if name.startswith("ppo"):
        assert "beside" in tables
        first = whole.load(1)[0]
        assert not torch.equal(first["beside/value.weight"], state["beside/value.weight"])
    if name == "dapo":
        assert sum(row["refilled"] for row in whole.rows()[1:]) > 0
        assert sum(row["ended_early"] for row in whole.rows()[1:]) > 0
    moved = whole.load(1)[0]
    assert any(not torch.equal(t, moved[n]) for n, t in state.items() if n.startswith("current/"))


def test_a_run_that_goes_on_with_other_prompts_says_so(seeing: Tiny, tmp_path: Path) -> None:
    first, asked = tmp_path / "run", tmp_path / "asked.jsonl"
    folder = seeing.folder.parent
    rows = [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
    told = "the training prompts have changed since this run started"

    def write(chosen: list[dict[str, Any]]) -> None:
        each = [r | {"images": [str(folder / name) for name in r["images"]]} for r in chosen]
        asked.write_text("".join(json.dumps(r) + "\n" for r in each))

    write(rows)
    go(data_of(seeing, {"name": "grpo"}, steps=1, data={"train": str(asked)}), first)
    assert told not in (run.resume(first, quiet=True).path / "log.txt").read_text()
    other = [rows[0], rows[1] | {"images": rows[2]["images"]}, *rows[2:]]  # another picture
    for changed in (rows[1:], [*rows[1:], rows[0]], other):
        shutil.copytree(first, again := tmp_path / "again", dirs_exist_ok=True)
        write(changed)
        assert told in (run.resume(again, quiet=True).path / "log.txt").read_text()
        shutil.rmtree(again)


def test_a_run_and_what_it_says(seeing: Tiny, tmp_path: Path, trained_on: list[Rollout]) -> None:
    found = go(data_of(seeing, {"name": "grpo"}), tmp_path / "run")
    rows = found.rows()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert not any("refilled" in row for row in rows)
    for row, rollout in zip(rows[1:], trained_on, strict=True):
        assert row["age"] == 0 and row["update/first_abs_dlogp_max"] < 1e-4
        assert len(rollout.samples) == 12 and rollout.group.tolist() == sorted([0, 1, 2] * 4)
        assert row["reward"] == pytest.approx(float(rollout.rewards.mean()))
        assert row["response/length"] == pytest.approx(float(rollout.mask.sum(1).float().mean()))
        values = [float(r) for r in early(rollout.samples)]
        assert rollout.rewards.tolist() == pytest.approx(values)  # each has its own score
        for i, g in enumerate(rollout.group.tolist()):
            assert rollout.samples[i].prompt == rollout.samples[4 * g].prompt
    prompts = [[r.samples[i].prompt.text for i in (0, 4, 8)] for r in trained_on]
    assert len({tuple(p) for p in prompts}) == 3  # other prompts at every step
    shown = (tmp_path / "run" / "samples" / "000003.jsonl").read_text().splitlines()
    assert len(shown) == 3 and "response" in json.loads(shown[0])


def test_lag_one(text: Tiny, tmp_path: Path) -> None:
    data = data_of(text, {"name": "remax"}, lag=1)
    rows = go(data, tmp_path / "run").rows()
    assert [row["age"] for row in rows[1:]] == [0, 1, 1]
    assert rows[1]["update/first_abs_dlogp_max"] < 1e-4 < rows[2]["update/first_abs_dlogp_max"]


# Greedy responses to compare with


def test_each_response_is_compared_with_the_greedy_one(text: Tiny) -> None:
    job = assemble(build.recipe_from(data_of(text, {"name": "remax"})))
    try:
        rollout, _ = job.cluster.sample_step(1).result()
    finally:
        job.close()
    assert len(rollout.samples) == 12 and all(s.seed != 0 for s in rollout.samples)
    sampler = DecodingSampler(writing(job.model), 8)
    asked = [rollout.samples[4 * g].prompt for g in range(3)]
    pieces = list(sampler.sample(asked, [0, 1, 2], [7, 8, 9], ResponseSpec(6, 0.0)))
    greedy = {i: s for p in pieces for i, s in zip(p.index, p.samples, strict=True)}
    values = early([greedy[i] for i in range(3)])
    assert rollout.greedy is not None and len(set(values)) > 1
    assert rollout.greedy.tolist() == pytest.approx([v for v in values for _ in range(4)])
    found = job.algorithm.prepare(job.model, rollout, job.recipe.learner).advantages
    expected = rollout.rewards - rollout.greedy
    assert torch.allclose(found, torch.where(rollout.mask, expected[:, None], 0.0))


def test_only_remax_samples_greedy_responses(text: Tiny) -> None:
    job = assemble(build.recipe_from(data_of(text, {"name": "grpo"})))
    try:
        drawn = job.cluster.sample_step(0)
        assert drawn.greedy is None and drawn.result()[0].greedy is None
    finally:
        job.close()


def test_a_greedy_response_without_a_score_fails_its_group(
    text: Tiny, tmp_path: Path, trained_on: list[Rollout]
) -> None:
    asked = tmp_path / "bad.txt"
    asked.write_text("question one?\nbad question?\nquestion two?\n")
    data = data_of(
        text, {"name": "remax"}, steps=1, max_failed=0.4, data={"train": str(asked)},
        reward=[{"name": f"{REWARDS}:greedy_fails"}],
    )  # fmt: skip
    row = go(data, tmp_path / "run").rows()[1]
    assert row["failed"] == 4
    (rollout,) = trained_on
    assert len(rollout.samples) == 8 and rollout.greedy is not None
    assert not rollout.greedy.isnan().any()
    assert not any("bad" in s.prompt.text for s in rollout.samples)
    told = "4 of 12 scores failed; last error: scoring the greedy baseline of its prompt failed: "
    assert told in (log := (tmp_path / "run" / "log.txt").read_text()) and "no answer" in log
    with pytest.raises(StopRun, match=r"4 of 12 scores failed .*scoring the greedy baseline"):
        go(data | {"max_failed": 0.2}, tmp_path / "stopped")


# Refills


def dapo(tiny: Tiny, file: str, refills: int = 3, **sections: Any) -> dict[str, Any]:
    sections = {"reward": [{"name": f"{REWARDS}:some_flat"}], "steps": 2} | sections
    data = data_of(tiny, {"name": "dapo", "group": 4, "refills": refills}, **sections)
    data["data"]["train"] = str(tiny.folder.parent / file)
    return data


def flat_prompts(rollout: Rollout) -> int:
    return len({int(g) for g, s in zip(rollout.group, rollout.samples, strict=True)
                if "flat" in s.prompt.text})  # fmt: skip


def test_groups_without_spread_are_replaced(
    text: Tiny, tmp_path: Path, trained_on: list[Rollout]
) -> None:
    found = go(dapo(text, "flat.txt", refills=6), tmp_path / "run")
    rows = found.rows()[1:]
    assert sum(row["refilled"] for row in rows) > 3
    for rollout, row in zip(trained_on, rows, strict=True):
        assert flat_prompts(rollout) == 0 and row["advantage/used"] == 1
        groups, sizes = rollout.group.unique(return_counts=True)
        assert len(rollout.samples) == 12 and sizes.tolist() == [4, 4, 4]
        for g in groups:
            own = [s for s, its in zip(rollout.samples, rollout.group, strict=True) if its == g]
            assert len({s.prompt.text for s in own}) == 1  # a group is one prompt's still
        lengths = rollout.mask.sum(1)
        texts = [found_text(rollout, i, int(n)) for i, n in enumerate(lengths)]
        assert texts == [s.response for s in rollout.samples]  # tokens are still their own
        assert row["update/first_abs_dlogp_max"] < 1e-4  # and log-probs, and prompts
        assert len({s.seed for s in rollout.samples}) == 12


def found_text(rollout: Rollout, i: int, length: int) -> str:
    known = tokens.tokenizer()
    return known.decode(rollout.token_trace.tokens[i, :length].tolist(), skip_special_tokens=True)


def test_refills_end(text: Tiny, tmp_path: Path, trained_on: list[Rollout]) -> None:
    """With one attempt some flat groups are left; they are not trained on, nor counted."""
    rows = go(dapo(text, "flat.txt", refills=1), tmp_path / "run").rows()[1:]
    left = [flat_prompts(rollout) for rollout in trained_on]
    assert any(left) and max(row["refilled"] for row in rows) <= 3
    for n, row in zip(left, rows, strict=True):
        assert row["advantage/used"] == pytest.approx(1 - n / 3)


# Groups that end early


def test_a_group_ends_when_its_first_rewards_are_equal(
    text: Tiny, tmp_path: Path, trained_on: list[Rollout]
) -> None:
    """The others have the samples that they have without `probe`."""
    whole = dapo(text, "flat.txt", refills=0, steps=1, seed=2)
    probed = whole | {"algorithm": whole["algorithm"] | {"probe": 2}}
    rows = [go(data, tmp_path / name).rows()[1] for name, data in (("all", whole), ("few", probed))]
    every, few = trained_on
    flat = flat_prompts(every)
    assert 0 < flat < 3 and rows[1]["ended_early"] == flat and "ended_early" not in rows[0]
    expected = [
        (s.prompt.text, s.seed, s.response)
        for i, s in enumerate(every.samples)
        if "flat" not in s.prompt.text or i % 4 < 2
    ]
    assert [(s.prompt.text, s.seed, s.response) for s in few.samples] == expected
    assert few.group.tolist() == sorted(few.group.tolist())
    assert rows[1]["update/first_abs_dlogp_max"] < 1e-4
    assert rows[1]["update/grad_norm"] == pytest.approx(rows[0]["update/grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"algorithm": {"probe": 4}}, "probe = 4 must be less than group = 4"),
        (
            {"algorithm": {"probe": 2, "refills": 0, "advantage": {"drop_flat": False}}},
            "probe ends",
        ),
        ({"algorithm": {"probe": 2, "refills": 0}, "lag": 1}, "requires lag = 0, got lag = 1"),
        (
            {
                "algorithm": {"probe": 2},
                "reward": [{"name": "diversity"}],
                "eval": {"samples": 2, "temperature": 1.0},
            },
            "algorithm.probe divides a group into two parts",
        ),
    ],
)
def test_what_probe_requires(text: Tiny, changes: dict[str, Any], sentence: str) -> None:
    data = dapo(text, "flat.txt", 0)
    for key, section in changes.items():
        data[key] = data[key] | section if isinstance(data.get(key), dict) else section
    with pytest.raises(UserError) as error:
        build.recipe_from(data)
    assert sentence in str(error.value)


def test_nothing_but_flat_groups(text: Tiny, tmp_path: Path) -> None:
    found = go(dapo(text, "all-flat.txt", refills=2), tmp_path / "run")
    for row in found.rows()[1:]:
        assert row["refilled"] == 6 and row["advantage/used"] == 0
        assert row["update/grad_norm"] == 0 and row["update/skipped"] == 0
    one, two = found.load(1)[0], found.load(2)[0]
    assert same(one, two)


def test_a_refill_is_of_its_step_and_attempt_alone(text: Tiny) -> None:
    job = assemble(build.recipe_from(dapo(text, "text.txt")))
    other = assemble(build.recipe_from(dapo(text, "text.txt", seed=1)))

    def drawn(
        step: int, attempt: int, groups: int = 2, of: Any = job
    ) -> list[tuple[str, int, str]]:
        found, _ = of.cluster.sample_refill(step, attempt, groups).result()
        assert found.group.tolist() == [g for g in range(groups) for _ in range(4)]
        return [(s.prompt.text, s.seed, s.response) for s in found.samples]

    try:
        first = drawn(2, 1)
        assert drawn(2, 1) == first and drawn(2, 1, groups=1) == first[:4]
        batch = [
            (s.prompt.text, s.seed, s.response)
            for s in job.cluster.sample_step(2).result()[0].samples
        ]
        seeds = [{seed for _, seed, _ in each} for each in (
            first, drawn(2, 2), drawn(3, 1), batch, drawn(2, 1, of=other))]  # fmt: skip
        assert len(set.union(*seeds)) == sum(map(len, seeds))  # nobody's seed is another's
        asked = [[p for p, _, _ in drawn(s, a, 3)][::4] for s in range(3) for a in (1, 2)]
        assert len({tuple(a) for a in asked}) > 3
    finally:
        job.close()
        other.close()


def test_failed_scores_within_a_refill(
    text: Tiny, tmp_path: Path, trained_on: list[Rollout]
) -> None:
    """They leave the batch, and stop the run only where they would stop it in a whole batch."""
    asked = tmp_path / "some.txt"
    kinds = ["flat ", "", "fails "]
    asked.write_text("\n".join(f"{kinds[i % 3]}{q}" for i, q in enumerate(QUESTIONS)) + "\n")
    data = dapo(text, "flat.txt", 4, max_failed=0.99, reward=[{"name": f"{REWARDS}:some_fail"}])
    data["data"]["train"] = str(asked)
    found = go(data | {"steps": 5}, tmp_path / "run")
    assert sum(row["refilled"] for row in found.rows()[1:]) > 3
    assert (found.path / "log.txt").read_text().count("4 of 4 scores failed") >= 1  # a whole refill
    for rollout in trained_on:
        assert all(score.ok for score in rollout.scores)
        assert not any("fails" in s.prompt.text for s in rollout.samples)
    assert all(row["update/skipped"] == 0 for row in found.rows()[1:])


def test_too_many_failed_scores_in_a_refill_stop_the_run(
    text: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gesso.cluster.local import Local
    from gesso.rewards.transport.service import Scored

    honest = Local.sample_refill

    def failing(self: Local, step: int, attempt: int, groups: int) -> Any:
        drawn = honest(self, step, attempt, groups)
        scores = [Score.failed("gone")] * len(drawn.request.row)
        gone = Mock(pending=0, **{"result.return_value": Scored(scores, 0.0, 1.0)})
        return replace(drawn, scoring=gone)

    monkeypatch.setattr(Local, "sample_refill", failing)
    data = dapo(text, "all-flat.txt", 2)
    with pytest.raises(StopRun, match=r"12 of 12 scores failed .*gesso train --resume"):
        go(data, tmp_path / "run")
    row = go(data | {"max_failed": 1.0, "steps": 1}, tmp_path / "on").rows()[1]
    assert row["refilled"] == 6 and row["advantage/used"] == 0  # the flat groups are all there is


# Ways to go wrong


def test_failed_scores_leave_the_batch(
    text: Tiny, tmp_path: Path, trained_on: list[Rollout]
) -> None:
    reward = [{"name": f"{REWARDS}:some_fail"}]
    for name in ("grpo", "ppo"):
        trained_on.clear()
        data = data_of(text, {"name": name}, reward=reward, max_failed=0.9, steps=2)
        rows = go(data, tmp_path / name).rows()[1:]
        assert sum(row["failed"] for row in rows) > 0
        assert [len(r.samples) for r in trained_on] == [12 - row["failed"] for row in rows]
        assert all(math.isfinite(row["update/grad_norm"]) for row in rows)


def test_prompts_that_are_too_long_are_left_out_and_reported(
    text: Tiny, tmp_path: Path, trained_on: list[Rollout]
) -> None:
    asked = tmp_path / "p.txt"
    asked.write_text("one?\ntwo?\na question that goes on for ever and ever and ever?\nthree?\n")
    data = data_of(text, {"name": "grpo"}, model={"max_prompt": 40}, data={"train": str(asked)})
    go(data, tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"1 of 4 prompts of {asked} do not fit the model and are skipped; the first is" in log
    assert "tokens, more than model.max_prompt = 40" in log
    assert {s.prompt.text for r in trained_on for s in r.samples} == {"one?", "two?", "three?"}
    data["model"]["max_prompt"] = 5
    with pytest.raises(UserError, match=r"no prompt of .* can be used: they do not fit the model"):
        go(data, tmp_path / "none")


def test_sections_of_the_other_family(text: Tiny) -> None:
    drawn = data_of(text, {"name": "flow-grpo"}) | {"model": {"path": "x"}}
    drawn["algorithm"] = {"name": "flow-grpo", "group": 4, "updates": 1}
    with pytest.raises(
        UserError, match=r"is for language models, but model.name = \"sd3\" is a flow"
    ):
        build.recipe_from(drawn | {"algorithm": {"name": "ppo", "lam": 0.9}})
    drawn["data"] |= {"template": "{{ question }}"}
    with pytest.raises(UserError, match=r"data.template and data.system are for language models"):
        build.recipe_from(drawn)
    data = data_of(text, {"name": "grpo", "updates": 5})
    with pytest.raises(UserError, match="12 samples cannot be split into 5 updates"):
        build.recipe_from(data)


# From the outside


@pytest.mark.parametrize(
    "name, more",
    [
        ("grpo", {}),
        ("remax", {}),
        ("dapo", {}),
        ("ppo", {"model": {"lora": LORA}, "algorithm": {"critic": {"trunk": "lora"}}}),
    ],
)
def test_check(seeing: Tiny, name: str, more: dict) -> None:
    from gesso.check import check

    algorithm = {"name": name, "kl": {"beta": 0.1}} | more.get("algorithm", {})
    rest = {key: value for key, value in more.items() if key != "algorithm"}
    found = check(build.recipe_from(data_of(seeing, algorithm, **rest)))
    facts = dict(found.facts)
    assert {"data", "model", "rewards", "ratio", "memory", "time"} <= facts.keys()
    assert float(facts["ratio"].rsplit(" ", 1)[1]) < 1e-4
    assert any(text.startswith("assuming prompts of at most ") for _, text in found.facts)


def ppo_run(tiny: Tiny, lora: dict[str, int] | None, folder: Path) -> RunFolder:
    algorithm = {"name": "ppo", "critic": {"trunk": "copy" if lora is None else "lora"}}
    data = data_of(tiny, algorithm, model={"lora": lora} if lora else {}, steps=1)
    data["learner"] |= {"ema": {"every": 1, "decay": 0.5}}
    return go(data, folder)


@pytest.fixture(scope="module")
def lora_run(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    tiny = Tiny("qwen2.5-vl", folders / "qwen2.5-vl")
    return ppo_run(tiny, LORA, tmp_path_factory.mktemp("lora") / "run")


@pytest.mark.parametrize("kind", ["lora", "merged", "full"])
def test_export_of_a_run(
    folders: Path, kind: str, tmp_path: Path, request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    """PPO's too: of the critic nothing is left."""
    from peft import PeftModel

    name = "qwen2" if kind == "full" else "qwen2.5-vl"
    tiny = Tiny(name, folders / name)
    if kind == "full":
        found = ppo_run(tiny, None, tmp_path / "run")
    else:
        found = request.getfixturevalue("lora_run")
    flags = ["--merged"] if kind == "merged" else []
    assert main(["export", str(found.path), "--to", str(tmp_path / "out"), *flags]) in (0, None)
    assert str(tmp_path / "out") in capsys.readouterr().out
    if kind == "lora":
        plain = PeftModel.from_pretrained(tiny.plain(), str(tmp_path / "out"))
    else:
        plain = tiny.plain(tmp_path / "out")
    trained = writing(run.load(found.path).model)
    trace = trace_of(trained, tiny.prompts, [0, 1, 1, 2])
    with torch.no_grad():
        ours = trained.logp(trace, 1.0).logp
        theirs = padded_logp(plain, trace, 1.0, trained.suppressed)
        base = padded_logp(tiny.plain(), trace, 1.0, trained.suppressed)
    assert (ours - theirs).abs().max() <= 1e-4 < 1e-3 < (ours - base).abs().max()
    state = state_of(found)
    table = {n.removeprefix("ema/"): t for n, t in state.items() if n.startswith("ema/")}
    assert all(torch.equal(t, table[n]) for n, t in trained.policy.tensors().items())


def test_sample_from_the_command_line(
    seeing: Tiny, lora_run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    shown = seeing.folder.parent / "1.png"
    capsys.readouterr()

    def said(*more: str) -> list[str]:
        main(["sample", str(lora_run.path), "how many?", *more])
        return capsys.readouterr().out.splitlines()

    greedy = said("--image", str(shown))
    assert len(greedy) >= 1 and greedy == said("--image", str(shown), "--seed", "5")
    model = run.load(lora_run.path)
    several = model.sample("how many?", 8, images=[shown])
    assert len(several) == 8 and len(set(several)) > 1 and all(isinstance(s, str) for s in several)
    assert several == model.sample("how many?", 8, images=[shown])
    other = seeing.folder.parent / "6.png"
    assert several != model.sample("how many?", 8, images=[other])  # it looks
    with pytest.raises(UserError, match=r"no\.png"):
        model.sample("how many?", images=[tmp_path / "no.png"])


def test_rows_that_the_model_does_not_take_are_left_out_of_samples_and_evaluations(
    seeing: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe, asked = tmp_path / "recipe.toml", tmp_path / "asked.jsonl"
    recipe.write_text(tomli_w.dumps(data_of(seeing, {"name": "grpo"})))
    (tmp_path / "wide.png").write_bytes(tokens.picture(900, 3, 0).read())
    rows = [{"prompt": "how many?"}, {"prompt": "how wide?", "images": ["wide.png"]}]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for action in ("sample", "eval"):
        assert main([action, str(recipe), "--prompts", str(asked)]) == 0
        said = capsys.readouterr().err
        assert f"1 of 2 prompts of {asked} do not fit the model and are skipped" in said
        assert "asked.jsonl:2: an image cannot be used: absolute aspect ratio" in said


# Learning


@pytest.mark.slow
def test_the_bundled_model_learns_to_count(tmp_path: Path) -> None:
    """In four steps with a higher learning rate; the control's weights do not move."""
    short = ["steps=4", "optimizer.lr=5e-5", "eval.every=0", "eval.shown=0", "eval.prompts=64"]
    rows = run.train("demo-vlm", short, tmp_path / "run", quiet=True).rows()
    still = [*short, "optimizer.lr=0.0", "steps=1", "data.groups=2"]
    control = run.train("demo-vlm", still, tmp_path / "control", quiet=True).rows()
    untrained = control[-1]["eval/reward"]
    assert control[0]["eval/reward"] == untrained == rows[0]["eval/reward"]
    assert rows[-1]["eval/reward"] >= untrained + 0.25
    assert all(row["update/first_abs_dlogp_max"] < 1e-3 for row in rows[1:])
