"""Reward functions written for EasyR1, OpenRLHF and TRL: their arguments, and how their results are
converted. Functions that violate a style are in test_user_code.py."""

from __future__ import annotations

import asyncio
import json
import sys
import typing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gesso import build, cli, run
from gesso.config import Recipe, RewardEntry
from gesso.config.parsing import parse
from gesso.health import Facts
from gesso.rewards import assembly, base
from gesso.rewards.styles import STYLES
from gesso.rewards.transport.cache import CachedScorer
from gesso.rewards.transport.workers import WorkerScorer
from gesso.types import Prompt, Sample, Score, UserError
from gesso.use.evaluate import reward_entry
from tests import tokens
from tests.rewards.servers import served

EASYR1 = """\
REWARD_NAME = "lengths"
REWARD_TYPE = "batch"

def compute_score(reward_inputs, most=10):
    assert isinstance(reward_inputs, list)
    return [
        {"overall": x["response_length"] / most, "right": x["response"] == x["ground_truth"]}
        for x in reward_inputs
    ]
"""
SEQUENTIAL = """\
REWARD_TYPE = "sequential"

def compute_score(reward_input, most=10):
    if reward_input["response"] == "worst":
        raise RuntimeError("no")
    return {"overall": reward_input["response_length"] / most}
"""
SEEN = """\
seen = []

def f({}):
    seen.append({})
    return {}
"""


def file_of(folder: Path, code: str, name: str = "rewards/mine.py") -> str:
    """The path of a reward file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    return str(path)


def sample(text: str = "4", tokens: int | None = 5, **columns: Any) -> Sample:
    columns = columns or {"answer": "4"}
    return Sample(Prompt("2 + 2?", columns=columns, where="t:1"), None, 0, text, tokens)


def calls(reward: Any) -> list[Any]:
    """The arguments of the calls of a function in SEEN."""
    return reward.function.__globals__["seen"]


def test_the_styles_are_those_of_a_recipe() -> None:
    annotation = RewardEntry.model_fields["style"].annotation
    assert list(typing.get_args(annotation)) == list(STYLES)


# EasyR1


def test_easyr1_receives_a_list_and_overall_is_the_value(tmp_path: Path) -> None:
    file = file_of(tmp_path, EASYR1)
    reward = base.load(f"{file}:compute_score", {"most": 20}, style="easyr1")
    scores = base.checked(reward, [sample("4"), sample("5", 10)])
    assert scores == [Score(0.25, {"right": 1.0}), Score(0.5, {"right": 0.0})]


def test_easyr1_sequential_failures_are_separate(tmp_path: Path) -> None:
    file = file_of(tmp_path, SEQUENTIAL)
    older = file_of(
        tmp_path, SEQUENTIAL.partition("\n")[2], "older.py"
    )  # EasyR1 0.3.2 has no REWARD_TYPE
    for path in (file, older):
        reward = base.load(f"{path}:compute_score", {}, style="easyr1")
        good, bad = base.checked(reward, [sample(), sample("worst")])
        assert good == Score(0.5) and bad.error == "raised RuntimeError: no"


def test_easyr1_reads_the_type_from_the_file_in_the_recipe(tmp_path: Path) -> None:
    """As in EasyR1: from the file, not from the module that defines the function."""
    file_of(tmp_path, "def compute_score(x): return {'overall': 1.0}", "elsewhere.py")
    code = (
        "import importlib.util, pathlib\n"
        "place = pathlib.Path(__file__).parent.parent / 'elsewhere.py'\n"
        "spec = importlib.util.spec_from_file_location('elsewhere', place)\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "compute_score, REWARD_TYPE = module.compute_score, 'sequential'\n"
    )
    reward = base.load(f"{file_of(tmp_path, code)}:compute_score", {}, style="easyr1")
    assert base.checked(reward, [sample(), sample()]) == [Score(1.0)] * 2


@pytest.mark.parametrize(
    ("columns", "truth"),
    [
        ({"answer": "4"}, "4"),
        ({"ground_truth": " 4 "}, " 4 "),
        ({"solution": "no", "answer": "yes"}, "yes"),
        ({"answer": None, "solution": "4"}, "4"),
        ({"answer": 4}, "4"),
        ({"answer": 4.0}, "4"),  # a column of numbers with gaps
        ({"label": [1, 2]}, [1, 2]),
    ],
)
def test_easyr1_ground_truth(columns: dict[str, Any], truth: Any, tmp_path: Path) -> None:
    code = SEEN.format("reward_inputs", "reward_inputs[0]", "[{'overall': 1.0}]")
    reward = base.load(f"{file_of(tmp_path, code)}:f", {}, style="easyr1")
    assert reward.unfit(sample(**columns).prompt) is None
    base.checked(reward, [sample("four", 3, **columns)])
    assert calls(reward) == [{"response": "four", "response_length": 3, "ground_truth": truth}]


def test_easyr1_requires_an_answer_and_a_text(tmp_path: Path) -> None:
    reward = base.load(f"{file_of(tmp_path, EASYR1)}:compute_score", {}, style="easyr1")
    reason = reward.unfit(Prompt("?", columns={"question": "x"}))
    assert reason and reason.startswith("expected a column answer, target, label, ground_truth or")
    assert reason.endswith("or solution, got only question")
    image = Sample(Prompt("a", columns={"answer": "4"}), np.zeros((2, 2, 3), np.uint8), 0)
    scores = base.checked(reward, [sample(), image, sample(question="x")])
    assert scores[0].value == 0.5 and scores[1].error == "the sample is an image; expected text"
    assert scores[2].error == reason  # samples of a server's batch fail separately
    (uncounted,) = base.checked(reward, [sample("4", None)])
    assert uncounted.error == "raised KeyError: 'response_length'"  # unknown in OpenRLHF's protocol


# OpenRLHF


def test_openrlhf_is_called_query_by_query(tmp_path: Path) -> None:
    answer = "{'rewards': torch.tensor([0.5]), 'scores': torch.tensor([1.0]), 'extra_logs': extra}"
    code = SEEN.format(
        "queries, prompts, labels, **more", "[queries, prompts, labels, more]", answer
    )
    code = "import torch\nextra = {'a': torch.tensor(2.0), 'b': 3}\n" + code
    reward = base.load(f"{file_of(tmp_path, code)}:f", {"k": 1}, style="openrlhf")
    scores = base.checked(reward, [sample("four"), sample("five", n="x")])
    assert scores == [Score(0.5, {"a": 2.0, "b": 3.0, "scores": 1.0})] * 2
    assert calls(reward) == [
        [["2 + 2?four"], ["2 + 2?"], ["4"], {"k": 1}],
        [["2 + 2?five"], ["2 + 2?"], [""], {"k": 1}],  # OpenRLHF's label without a label_key
    ]
    assert reward.unfit(Prompt("?")) is None


# TRL

SYSTEM = ({"role": "system", "content": [{"type": "text", "text": "Be brief."}]},)
QUESTION = (
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]},
)


def test_trl_receives_texts_and_every_column(tmp_path: Path) -> None:
    code = SEEN.format("**given", "given", "[0.5, None]")
    reward = base.load(f"{file_of(tmp_path, code)}:f", {"k": 7}, style="trl")
    rows = [sample("four", 3, answer="4", task="sum"), sample("five", 9, answer="5")]
    assert base.checked(reward, rows) == [Score(0.5), Score(None)]
    (seen,) = calls(reward)
    assert seen["prompts"] == ["2 + 2?"] * 2 and seen["completions"] == ["four", "five"]
    assert seen["answer"] == ["4", "5"] and seen["task"] == ["sum", None] and seen["k"] == 7
    assert [len(ids) for ids in seen["completion_ids"]] == [3, 9]
    assert not {"trainer_state", "images", "image", "environments"} & set(seen)


def test_trl_receives_messages_and_images_of_the_prompt(tmp_path: Path) -> None:
    code = SEEN.format("**given", "given", "[1.0]")
    reward = base.load(f"{file_of(tmp_path, code)}:f", {}, style="trl")
    prompt_image = tokens.picture(4, 6)
    messages = SYSTEM + QUESTION
    prompt = Prompt("How many?", "", {"answer": "1"}, images=(prompt_image,), messages=messages)
    assert base.checked(reward, [Sample(prompt, None, 0, "one", 1)]) == [Score(1.0)]
    (seen,) = calls(reward)
    ((image,),) = seen["images"]
    assert image.size == (6, 4) and seen["image"] == [image]
    system, user = seen["prompts"][0]
    assert system == {"role": "system", "content": "Be brief."}
    assert user["content"] == [
        {"type": "image", "image": image},
        {"type": "text", "text": "How many?"},
    ]
    assert seen["completions"] == [[{"role": "assistant", "content": "one"}]]


def test_trl_logs_become_details_and_text(tmp_path: Path) -> None:
    code = (
        "def f(completions, log_extra, log_metric, **kwargs):\n"
        "    log_extra('read', [c.upper() for c in completions])\n"
        "    log_metric('share', 0.25), log_metric('share', 0.75)\n"
        "    return [1.0] * len(completions)\n"
    )
    reward = base.load(f"{file_of(tmp_path, code)}:f", {}, style="trl")
    scores = base.checked(reward, [sample("a"), sample("b")])
    assert [s.text for s in scores] == ["read: A", "read: B"]
    assert all(s.parts == {"share": 0.5} for s in scores)


def test_trl_async_calls_share_a_loop(tmp_path: Path) -> None:
    code = (
        "import asyncio\nloops = set()\n"
        "async def f(completions, **kwargs):\n"
        "    await asyncio.sleep(0)\n"
        "    loops.add(asyncio.get_running_loop())\n"
        "    return [float(len(loops))] * len(completions)\n"
    )
    reward = base.load(f"{file_of(tmp_path, code)}:f", {}, style="trl")
    assert [base.checked(reward, [sample()])[0].value for _ in range(2)] == [1.0, 1.0]


def test_trl_receives_only_its_parameters(tmp_path: Path) -> None:
    code = SEEN.format("completions, solution, image=None", "image", "[1.0]")
    reward = base.load(f"{file_of(tmp_path, code)}:f", {}, style="trl")
    assert base.checked(reward, [sample(solution="4", other=1)]) == [Score(1.0)]
    assert reward.unfit(Prompt("?", columns={"answer": "4"})) == (
        'the function requires the column "solution", got only answer'
    )


# Where they run


def test_the_style_goes_to_worker_processes(tmp_path: Path) -> None:
    workers = WorkerScorer(
        f"{file_of(tmp_path, EASYR1)}:compute_score", {"most": 20}, 1, style="easyr1"
    )

    async def go() -> list[Score]:
        try:
            return await workers.score([sample("4"), sample("5", 10)])
        finally:
            await workers.close()

    assert asyncio.run(go()) == [Score(0.25, {"right": 1.0}), Score(0.5, {"right": 0.0})]


def test_a_served_style(tmp_path: Path) -> None:
    reference = f"{file_of(tmp_path, EASYR1)}:compute_score"
    with served(reference, "style=easyr1", "most=20") as server:
        rows = [{"prompt": "?", "text": "4", "tokens": 5, "columns": {"answer": "4"}}]
        scores = httpx.post(f"{server.url}/score", json={"samples": rows}).json()["scores"]
    assert scores == [{"value": 0.25, "parts": {"right": 1.0}, "text": "", "error": None}]


def entry(name: str, **more: Any) -> RewardEntry:
    return parse(RewardEntry, {"name": name, **more}, "reward")


def test_the_style_and_the_tokens_are_part_of_the_cache_key(tmp_path: Path) -> None:
    """`f(x)` fits two styles, which must not share scores."""
    name = f"{file_of(tmp_path, 'def f(x): return [1.0]')}:f"
    scorers = [assembly.scorer(entry(name, style=style)) for style in ("gesso", "easyr1")]
    keys = [s.key(sample()) for s in scorers if isinstance(s, CachedScorer)]
    assert len(set(keys)) == 2
    one = scorers[0]
    assert isinstance(one, CachedScorer) and one.key(sample("a", 5)) != one.key(sample("a", 6))


def image_recipe(*rewards: dict[str, Any]) -> Recipe:
    """A recipe of an image model that does not exist: nothing may be loaded."""
    data = {
        "model": {"path": "nowhere"},
        "data": {"train": "nowhere.txt", "eval": "nowhere.txt"},
        "algorithm": {"name": "flow-grpo"},
        "reward": list(rewards),
    }
    return build.recipe_from(data)


@pytest.mark.parametrize("style", ["easyr1", "openrlhf", "trl"])
def test_text_styles_are_rejected_for_image_models(style: str, tmp_path: Path) -> None:
    name = f"{file_of(tmp_path, 'def f(*args, prompts=None, **kwargs): pass')}:f"
    with pytest.raises(UserError, match=f'style = "{style}" scores text, but model.name = "sd3" g'):
        assembly.rewards(image_recipe({"name": name, "style": style}))


# Names


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("ocr", "ocr"),
        ("tests.rewards.user_rewards:constant", "tests.rewards.user_rewards:constant"),
        ("math.py:compute_score", "math:compute_score"),
        ("./math.py:compute_score", "math:compute_score"),
        ("a/rewards/math.py:compute_score", "rewards.math:compute_score"),
        ("/home/me/rewards/math.py:compute_score", "rewards.math:compute_score"),
        ("~/../math.py:f", "math:f"),
    ],
)
def test_labels(name: str, label: str) -> None:
    assert entry(name).label == label


def test_two_files_of_one_name(tmp_path: Path) -> None:
    code = "def f(samples): return [1.0] * len(samples)"
    files = [file_of(tmp_path, code, name) for name in ("a/mine.py", "b/mine.py", "c/a/mine.py")]
    one, two, three = ({"name": f"{file}:f"} for file in files)
    rewards = assembly.rewards(image_recipe(one, two))
    rewards.service.close()
    assert [r.name for r in rewards.service.rewards] == ["a.mine:f", "b.mine:f"]
    with pytest.raises(UserError, match=r'would both have the metric name "a\.mine:f"'):
        assembly.rewards(image_recipe(one, three))


@pytest.fixture(scope="module")
def text_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of a tiny language model, with an EasyR1 reward in its folder."""
    folder = tmp_path_factory.mktemp("text")
    tokens.build("qwen2", folder / "qwen2")
    file_of(folder, EASYR1)
    rows = [{"problem": f"{n} + 1?", "answer": str(n + 1)} for n in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(
        'steps = 1\n[model]\nname = "causal"\npath = "qwen2"\ndevice = "cpu"\n'
        '[data]\ntrain = "rows.jsonl"\neval = "rows.jsonl"\ngroups = 2\n'
        '[algorithm]\nname = "grpo"\ngroup = 2\nmax_tokens = 4\n'
        '[sampler]\nbatch = 4\n[eval]\nprompts = 2\n[[reward]]\nname = "choice"\n'
    )
    return folder


def test_check_suggests_the_style(
    text_recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(text_recipe)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the folder
    name = "reward.0.name=rewards/mine.py:compute_score"
    assert cli.main(["check", "recipe.toml", name, "model.path=nowhere"]) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1 and "Traceback" not in stderr
    assert 'takes (reward_inputs, most=10); style = "gesso" calls it with (samples, **' in stderr
    assert 'did you mean style = "easyr1"?' in stderr


def test_rewards_are_identified_by_their_labels(
    text_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the normalisation of each reward, in `flat_by` and in the checks of evaluations."""
    monkeypatch.chdir(text_recipe)
    label = "rewards.mine:compute_score"
    overrides = ["reward.0.name=rewards/mine.py:compute_score", "reward.0.style=easyr1"]
    dropped = ["algorithm.advantage.drop_flat=true", f"algorithm.advantage.flat_by={label}"]
    job = run.assemble(build.recipe("recipe.toml", [*overrides, *dropped]))
    try:
        rollout, _ = job.cluster.sample_step(0).result()
        assert list(rollout.weights) == [label] and not rollout.components.isnan().any()
        assert f"eval/{label}" in Facts.of(job.recipe, job.algorithm, 2).watched
    finally:
        job.close()


def test_a_run_with_a_path_and_a_style(text_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(text_recipe)
    overrides = ["reward.0.name=rewards/mine.py:compute_score", "reward.0.style=easyr1"]
    rows = run.train("recipe.toml", overrides, text_recipe / "run", quiet=True).rows()
    label = "rewards.mine:compute_score"
    assert rows[1]["failed"] == 0 and rows[1]["reward"] == rows[1][f"reward/{label}"]
    assert {f"eval/{label}", f"eval/{label}/right"} <= set(rows[1])
    recipe = run.recipe_of(run.RunFolder.open(text_recipe / "run"))
    assert recipe.reward[0].style == "easyr1"
    entry = reward_entry("rewards/mine.py:compute_score,style=easyr1,most=20", recipe)
    assert entry.style == "easyr1" and entry.options == {"most": 20}
