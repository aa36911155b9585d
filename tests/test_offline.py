"""SFT and offline DPO through the whole loop: runs, resumes, pairs from a run, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from gesso import build, run
from gesso.check import check
from gesso.cli import main
from gesso.config.tables import over, tomllib
from gesso.track.run_folder import RunFolder
from gesso.types import StopRun, UserError
from tests import pages, tokens
from tests.cut_run import cut_after
from tests.test_loop import final_state
from tests.test_token_loop import comparable
from tests.tokens import picture

DATA = {"engine": "data", "batch": 3}
FLOW: dict[str, dict[str, Any]] = {
    "flow-sft": {"name": "flow-sft", "times": 2},
    "flow-dpo": {"name": "flow-dpo", "group": 2, "guidance": 1.0},
}
LANGUAGE: dict[str, dict[str, Any]] = {
    "sft": {"name": "sft", "max_tokens": 8},
    "dpo": {"name": "dpo", "group": 2, "max_tokens": 8},
}
NO_REWARD = {"reward", "reward/std", "diversity", "response/length", "update/entropy"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("offline")
    tokens.build("qwen2.5-vl", root / "model")
    lines, texts = [], []
    for i in range(4):
        for k, name in enumerate(("good", "bad")):
            (root / f"{name}{i}.png").write_bytes(picture(32 + 8 * k, 48, 2 * i + k).read())
        pair = {"chosen": f"good{i}.png", "rejected": f"bad{i}.png"}
        lines.append({"prompt": f"a sign of number {i}", **pair})
        asked = {"prompt": f"how many? {i}", "images": [f"good{i}.png"] if i % 2 else []}
        texts.append(asked | {"chosen": "a b c"[: i + 2], "rejected": "no"})
    for name, rows in (("images", lines), ("texts", texts)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def flow(recipe_data: dict[str, Any], folder: Path) -> dict[str, Any]:
    recipe_data["data"] |= {"train": str(folder / "images.jsonl"), "groups": 3}
    recipe_data["learner"] = {"micro_batch": 2}
    return recipe_data | {"sampler": DATA}


@pytest.fixture
def language(folder: Path) -> dict[str, Any]:
    return {
        "steps": 2,
        "model": {"name": "vision-language", "path": str(folder / "model"), "device": "cpu"},
        "data": {
            "train": str(folder / "texts.jsonl"), "eval": str(folder / "texts.jsonl"), "groups": 3
        },
        "eval_reward": [{"name": "tests.token_rewards:early"}],
        "optimizer": {"lr": 1e-3},
        "learner": {"micro_tokens": 60},
        "sampler": DATA,
        "eval": {"every": 1, "prompts": 3},
        "save": {"every": 1},
    }  # fmt: skip


def go(data: dict[str, Any], folder: Path) -> RunFolder:
    return run.train(build.recipe_from(data), folder=folder, quiet=True)


@pytest.mark.parametrize("name", [*FLOW, *LANGUAGE])
def test_a_run_is_evaluated_and_resumes_to_the_bit(
    name: str, flow: dict[str, Any], language: dict[str, Any], tmp_path: Path
) -> None:
    """Without a reward in training: no metric of it, and no warning."""
    data = flow | {"algorithm": FLOW[name]} if name in FLOW else language
    data |= {"algorithm": (FLOW | LANGUAGE)[name], "steps": 2}
    data["eval"] |= {"every": 1}
    whole = go(data, tmp_path / "whole")
    for row in whole.rows():
        assert row["eval/reward"] is not None and not NO_REWARD & row.keys()
        assert row["health"] == []
    loss = "update/matching" if name in FLOW else "update/nll"
    assert all(row[loss] > 0 and row["update/grad_norm"] > 0 for row in whole.rows()[1:])
    if name == "dpo":
        assert whole.rows()[1]["update/preference"] == pytest.approx(0.6931, abs=1e-4)
    cut = run.resume(cut_after(whole, 1, tmp_path / "cut"), quiet=True)
    assert comparable(cut.rows()) == comparable(whole.rows())
    state, other = final_state(whole.path), final_state(cut.path)
    assert state.keys() == other.keys() and all(t.equal(other[n]) for n, t in state.items())
    kept = [json.loads(line) for line in (whole.path / "groups/000002.jsonl").open()]
    rewards = [sorted(sample["reward"] for sample in group["samples"]) for group in kept]
    assert rewards == [[0, 1] if "dpo" in name else [1]] * 3


def test_pairs_of_a_run_are_trained_on(
    recipe_data: dict[str, Any], flow: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    """A run → pairs → offline DPO, as documented, and SFT; the images are those of the run."""
    recipe_data |= {"sampler": {"batch": 4}, "steps": 1, "save": {"group_images": "full"}}
    made = go(
        recipe_data | {"data": flow["data"] | {"train": flow["data"]["eval"]}}, tmp_path / "run"
    )
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["gesso", "data", "pairs", str(made.path)])
        assert main() == 0
    said, file = capsys.readouterr().out, made.path / "pairs.jsonl"
    assert "3 pairs" in said and "from 3 groups: a run keeps the samples of save.groups = 4" in said
    assert "compressed" not in said and f'data.train = "{file}"' in said
    groups = [json.loads(line) for line in (made.path / "groups/000001.jsonl").open()]
    for row, group in zip(map(json.loads, file.open()), groups, strict=True):
        rewards = [sample["reward"] for sample in group["samples"]]
        assert row["prompt"] == group["prompt"] and row["step"] == 1
        assert (row["chosen_score"], row["rejected_score"]) == (max(rewards), min(rewards))
        best = group["samples"][rewards.index(max(rewards))]
        assert row["chosen"] == f"groups/{best['image']}"
        assert Image.open(made.path / row["chosen"]).size == (48, 32)
    (block,) = pages.blocks("toml", "how-to/sft-and-dpo.md")
    shown = tomllib.loads(block.code)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.path)  # where pairs.jsonl is
        for algorithm in (shown["algorithm"], FLOW["flow-sft"]):
            data = over(flow | {"algorithm": {}, "steps": 1}, shown) | {"algorithm": algorithm}
            trained = go(
                data | {"data": data["data"] | {"groups": 3}}, tmp_path / algorithm["name"]
            )
            assert trained.rows()[-1]["update/grad_norm"] > 0


def test_pairs_of_responses(folder: Path, language: dict[str, Any], tmp_path: Path) -> None:
    """With messages and prompt images; ties and small differences are left out."""
    from gesso.use import pairs

    online = {"name": "dpo", "group": 4, "max_tokens": 4}
    language |= {"algorithm": online, "sampler": {"batch": 4}, "steps": 1}
    made = go(language | {"reward": [{"name": "tests.token_rewards:early"}]}, tmp_path / "run")
    out = tmp_path / "other" / "pairs.jsonl"
    result = pairs.write(made.path, out, 0.0)
    rows = [json.loads(line) for line in out.open()]
    assert len(rows) == result.pairs > 0
    assert any("compressed" in note for note in result.notes) == any("images" in r for r in rows)
    data = language | {"algorithm": LANGUAGE["dpo"], "sampler": DATA}
    data["data"] = language["data"] | {"train": str(out), "groups": len(rows)}
    trained = go(data, tmp_path / "trained")
    assert trained.rows()[-1]["update/grad_norm"] > 0
    gaps = sorted(row["chosen_score"] - row["rejected_score"] for row in rows)
    largest = pairs.write(made.path, tmp_path / "largest.jsonl", gaps[-1])
    assert 1 <= largest.pairs == gaps.count(gaps[-1])
    with pytest.raises(UserError, match="in none of its 3 kept groups do the rewards differ by"):
        pairs.write(made.path, tmp_path / "none.jsonl", gaps[-1] + 1)


def test_mistakes_of_pairs(tmp_path: Path, recipe_data: dict[str, Any]) -> None:
    from gesso.use import pairs

    bare = RunFolder.create(tmp_path / "run", build.recipe_from(recipe_data).model_dump())
    offline = RunFolder.create(tmp_path / "offline", build.recipe("demo-sft").model_dump())
    for arguments, sentence in (
        ((offline.path, None, 0.0), "trained on samples of its data, which have no scores"),
        ((tmp_path, None, 0.0), "is not a run folder"),
        ((bare.path, None, 0.0), "has kept no samples of its training groups; train with save.gr"),
        ((bare.path, tmp_path / "pairs.txt", 0.0), "a name that ends in .jsonl"),
        ((bare.path, bare.path / "config.toml" / "a.jsonl", 0.0), "config.toml is a file"),
        ((bare.path, None, -1.0), "expects --min-gap of at least 0, got -1"),
    ):
        with pytest.raises(UserError) as caught:
            pairs.write(*arguments)
        assert sentence in str(caught.value)
    (bare.path / "pairs.jsonl").touch()
    with pytest.raises(UserError, match="already exists; choose another file"):
        pairs.write(bare.path, None, 0.0)
    (bare.path / "groups").mkdir()
    (bare.path / "groups" / "000001.jsonl").write_text('{"samples": [{"image": "x"}]}\n')
    with pytest.raises(UserError, match=r"000001\.jsonl, line 1 is damaged"):
        pairs.write(bare.path, tmp_path / "new.jsonl", 0.0)


MISTAKES = [
    ({"algorithm": {"name": "flow-sft"}, "sampler": {}},
     'algorithm "flow-sft" trains on samples of the data, column "image"; set sampler.engine'),
    ({"algorithm": {"name": "flow-grpo"}}, "trains on its own; use one of flow-dpo, flow-sft"),
    ({"algorithm": {"name": "flow-dpo", "group": 3}}, "got algorithm.group = 3; set it to 2"),
    ({"algorithm": {"name": "flow-sft", "group": 2}}, '"group" = 2 is not valid'),
    ({"algorithm": {"name": "flow-dpo", "group": 2, "advantage": {"combine": "gdpo"}}},
     'advantage.combine = "gdpo" uses the rewards of training samples, but sampler.engine'),
    ({"algorithm": {"name": "flow-sft", "kl": 0.1, "gate": {}}}, "algorithm.gate uses the rewards"),
    ({"algorithm": {"name": "flow-sft", "first": 1}}, "trains at all noise levels"),
    ({"algorithm": {"name": "flow-sft"}, "reward": []}, "expected at least 1 item in reward"),
    ({"algorithm": {"name": "flow-sft", "advantage": {"clip": 1.0}}}, 'unknown key "advantage'),
]  # fmt: skip


@pytest.mark.parametrize("changes, sentence", MISTAKES)
def test_mistakes_in_recipes(flow: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        build.recipe_from(flow | changes)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_check(flow: dict[str, Any], language: dict[str, Any]) -> None:
    """Rewards are tried on generated samples; small images are reported before the run."""
    flow["model"] |= {"height": 64}
    findings = check(build.recipe_from(flow | {"algorithm": FLOW["flow-sft"]}))
    facts = dict(findings.facts)
    assert "jpeg-compressibility" in facts["rewards"] and "encoding" in str(findings.facts)
    (note,) = [w for w in findings.warnings if "images" in w]
    assert "4 of 4 images" in note and "64 × 48 and are enlarged; the first is" in note
    facts = dict(check(build.recipe_from(language | {"algorithm": LANGUAGE["dpo"]})).facts)
    assert "early" in facts["rewards"] and facts["ratio"] == "not used by this algorithm"


def test_responses_that_are_too_long_are_skipped(language: dict[str, Any]) -> None:
    short = LANGUAGE["sft"] | {"max_tokens": 4}
    job = run.assemble(build.recipe_from(language | {"algorithm": short}))
    job.close()
    assert len(job.left_out) == 2  # "a b " and "a b c" with the token that ends them
    assert "a response of 5 tokens, more than algorithm.max_tokens = 4" in job.left_out[0]


def test_an_image_that_disappears_stops_the_run_and_saves_it(
    flow: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    (tmp_path / "a.png").write_bytes(picture(32, 48).read())
    file.write_text('{"prompt": "a sign", "image": "a.png"}\n')
    flow["data"] |= {"train": str(file), "groups": 1}
    recipe = build.recipe_from(flow | {"algorithm": FLOW["flow-sft"] | {"times": 1}})
    honest = torch.optim.AdamW.step

    def step(self: Any, *arguments: Any) -> Any:
        (tmp_path / "a.png").unlink()
        return honest(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        with pytest.raises(StopRun, match=r"rows\.jsonl:1: .*a\.png cannot be read"):
            run.train(recipe, folder=tmp_path / "run", quiet=True)
    assert RunFolder.open(tmp_path / "run").latest() == 1
