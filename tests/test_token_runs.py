"""Runs of language models: rows that do not fit, limits of length, metrics, rewards."""

from __future__ import annotations

import binascii
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso import build, run
from gesso.algorithms.credit import Credit
from gesso.algorithms.grpo import GRPO
from gesso.check import check
from gesso.config import Data, DataSource, Eval, TokenModel, TrainDataSource
from gesso.data.prompts import LoadedData, WeightedPrompts, without
from gesso.data.readers import read
from gesso.models.tokens import loading
from gesso.rewards import assembly, base
from gesso.rewards.transport import protocol, wire
from gesso.rollout import Rollout
from gesso.samplers import decode
from gesso.samplers import responses as responses
from gesso.traces.tokens import TokenTrace
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, Sample, Scales, Score, StopRun, UserError
from tests import tokens
from tests.typed import sure, writing

REWARD = "tests.token_rewards:early"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    tokens.build("qwen2.5-vl", folder / "model")
    (folder / "eval.txt").write_text("hello?\nhow many?\n")
    return folder


def chunk(kind: bytes, data: bytes) -> bytes:
    return (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", binascii.crc32(kind + data))
    )


def broken_png() -> bytes:
    """Every checksum is right; the pixels are none."""
    head = struct.pack(">IIBBBBB", 24, 16, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", b"notzlib at all") + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def rows(folder: Path, count: int) -> list[dict[str, Any]]:
    table = []
    for i in range(count):
        (folder / f"{i}.png").write_bytes(tokens.picture(16, 24, i).read())
        table.append({"prompt": f"how many {i}?", "images": [f"{i}.png"]})
    return table


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def recipe(root: Path, train: str, **more: Any) -> Any:
    data: dict[str, Any] = {
        "steps": 3,
        "model": {"name": "vision-language", "path": str(root / "model"), "device": "cpu"},
        "data": {"train": train, "eval": str(root / "eval.txt"), "groups": 2},
        "algorithm": {"name": "grpo", "group": 2, "max_tokens": 4},
        "reward": [{"name": REWARD}],
        "eval": {"every": 0, "prompts": 2},
        "save": {"every": 100},
    }
    for key, value in more.items():
        data[key] = data[key] | value if isinstance(value, dict) and key in data else value
    return build.recipe_from(data)


def test_a_png_whose_pixels_are_broken_is_found_before_the_run(tmp_path: Path) -> None:
    table = rows(tmp_path, 2)
    (tmp_path / "1.png").write_bytes(broken_png())
    reading = read(DataSource(path=write(tmp_path / "a.jsonl", table)))
    assert [p.text for p in reading.prompts] == ["how many 0?"]
    assert "a.jsonl:2: image 1 of 1: " in reading.left_out[0]


def test_an_image_that_vanishes_ends_the_run_and_loses_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gesso.learner.learner import Learner, Update

    table = rows(tmp_path, 8)
    chosen = recipe(root, write(tmp_path / "a.jsonl", table))
    honest, done = Learner.update, []

    def update(self: Learner, rollout: Rollout, step: int, scales: Scales) -> Update:
        done.append(step)
        if len(done) == 2:
            for i in range(8):
                (tmp_path / f"{i}.png").unlink()
        return honest(self, rollout, step, scales)

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(
        StopRun, match=r"a\.jsonl:\d.*No such file.*gesso train --resume"
    ) as stopped:
        run.train(chosen, folder=tmp_path / "run", quiet=True)
    folder = RunFolder.open(tmp_path / "run")
    assert folder.latest() == 2 and len(folder.rows()) == 3
    assert f"stopped: {stopped.value}" in (folder.path / "log.txt").read_text()
    rows(tmp_path, 8)
    monkeypatch.setattr(Learner, "update", honest)
    assert run.resume(folder.path, quiet=True).latest() == 3


def test_rows_that_the_model_does_not_take_are_left_out_and_all_listed(
    root: Path, tmp_path: Path
) -> None:
    table = rows(tmp_path, 4)
    (tmp_path / "1.png").write_bytes(tokens.picture(1, 8000).read())
    table[2]["prompt"] = "what is <|image_pad|>?"
    table.append({"prompt": None})
    chosen = recipe(root, write(tmp_path / "a.jsonl", table), steps=0)
    folder = run.train(chosen, folder=tmp_path / "run", quiet=True)
    listed = (folder.path / "left-out.txt").read_text().splitlines()
    assert [line.split(": ")[0].rpartition("/")[2] for line in listed] == [
        "a.jsonl:5",
        "a.jsonl:2",
        "a.jsonl:3",
    ]
    log = (folder.path / "log.txt").read_text()
    assert "1 of 5 prompts" in log and "2 of 4 prompts" in log and "do not fit the model" in log
    assert "all 3 skipped rows are listed in " in log


def test_held_out_prompts_that_do_not_fit_are_left_out_too() -> None:
    data = Data(train=[TrainDataSource(path="t.txt")], eval=[DataSource(path="e.txt")], groups=1)
    prompts = [Prompt("short"), Prompt("a long one")]
    loaded = LoadedData([WeightedPrompts(prompts)], prompts, [])
    kept = without(loaded, lambda p: "long" if "long" in p.text else None, data, "are long")
    assert [p.text for p in kept.held_out] == ["short"]
    assert [p.text for p in kept.train[0].prompts] == ["short"]
    assert len(kept.notes) == 2 and len(kept.left_out) == 2


def test_a_prompt_of_exactly_max_prompt_tokens_is_taken(root: Path, tmp_path: Path) -> None:
    table = rows(tmp_path, 2)
    train = write(tmp_path / "a.jsonl", table)
    job = run.assemble(recipe(root, train))
    length = writing(job.model).length(job.cluster.stream.prompts[0])
    job.close()
    for limit, count in ((length, 2), (length - 1, 0)):
        chosen = recipe(root, train, model={"max_prompt": limit}, data={"eval": train})
        if not count:
            with pytest.raises(UserError, match=f"{length} tokens, more than model.max_prompt"):
                run.assemble(chosen)
            continue
        job = run.assemble(chosen)
        assert len(job.cluster.stream.prompts) == count
        job.close()


def test_responses_beyond_the_models_positions_are_refused(root: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", rows(tmp_path, 2))
    job = run.assemble(recipe(root, train))
    model = writing(job.model)
    made_for = sure(int, model.max_positions)
    asked = [*job.cluster.stream.prompts, *job.eval_prompts]
    longest = max(model.length(prompt) for prompt in asked)
    job.close()
    fits = made_for - longest
    run.assemble(recipe(root, train, algorithm={"max_tokens": fits})).close()
    sentence = (
        f"the longest prompt has {longest} tokens and a response may have algorithm.max_tokens = "
        f"{fits + 1}, in total {made_for + 1}, but .* supports only {made_for} .*; lower "
        f"algorithm.max_tokens to {fits}, or model.max_prompt"
    )
    for start in (run.assemble, check):
        with pytest.raises(UserError, match=sentence):
            start(recipe(root, train, algorithm={"max_tokens": fits + 1}))


@pytest.mark.parametrize(
    ("scaling", "most"),
    [
        (None, 64),
        ({"rope_type": "default"}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        # As Qwen2.5 is told to go beyond its 32,768: the length in the config is the one before.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        # As DeepSeek and Llama 3.1 have it: the length in the config is the one after.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 4,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 64),
    ],
)  # fmt: skip
def test_how_long_positions_are_is_read_as_transformers_reads_it(
    scaling: dict[str, Any] | None, most: int
) -> None:
    from transformers import LlamaConfig

    own = LlamaConfig(max_position_embeddings=64, rope_scaling=scaling)
    assert loading.max_positions(own) == most


def test_evaluations_use_the_averaged_weights() -> None:
    algorithm = GRPO(name="grpo")
    spec = algorithm.eval_spec(Eval(), TokenModel(path="x"), "ema")
    assert spec.weights == "ema" and spec.temperature == 0.0


def trace_of(lengths: list[int], cut: list[bool]) -> TokenTrace:
    longest = max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    zeros = torch.zeros(len(lengths), longest, dtype=torch.long)
    return TokenTrace(
        [], torch.zeros(len(lengths), dtype=torch.long), zeros, mask, torch.tensor(cut)
    )


def rollout_of(
    trace: TokenTrace, values: list[dict[str, float]], weights: dict[str, float]
) -> Rollout:
    samples = [Sample(Prompt("?"), None, i, f"response {i}") for i in range(len(values))]
    scores = [Score(sum(weights[n] * v for n, v in parts.items()), parts) for parts in values]
    group = torch.arange(len(values)) // 2
    logp = torch.where(trace.mask, -2.0, 0.0)
    return Rollout(samples, group, trace, logp, 0, scores, weights)


def test_figures_of_responses_by_hand() -> None:
    trace = trace_of([1, 3, 4, 4], [False, False, False, True])
    told = responses.describe(rollout_of(trace, [{"a": 1.0}] * 4, {"a": 1.0}))
    assert told["response/length"] == 3.0 and told["response/max_length"] == 4.0
    assert told["response/truncated"] == 0.25
    assert told["response/logp"] == pytest.approx(-2.0)  # a token's, not a place's


def test_flat_groups_may_be_judged_by_one_reward() -> None:
    """DAPO: a group that is all wrong teaches nothing, however different its lengths."""
    weights = {"math": 2.0, "overlong": 1.0}
    values = [
        {"math": 0.0, "overlong": -0.5},
        {"math": 0.0, "overlong": 0.0},
        {"math": 1.0, "overlong": 0.0},
        {"math": 0.0, "overlong": 0.0},
    ]
    rollout = rollout_of(trace_of([1] * 4, [False] * 4), values, weights)
    assert Credit(drop_flat=True).kept(rollout, 1).tolist() == [0, 1, 2, 3]
    assert Credit(drop_flat=True, flat_by="math").kept(rollout, 1).tolist() == [2, 3]
    with pytest.raises(ValueError, match="set drop_flat = true"):
        Credit(flat_by="math")


def test_the_reward_that_judges_flat_groups_must_be_there(root: Path) -> None:
    algorithm = {"name": "dapo", "group": 2, "advantage": {"flat_by": "maths"}}
    with pytest.raises(UserError, match='flat_by = "maths" is not one of the rewards'):
        recipe(root, "a.jsonl", algorithm=algorithm)


def test_the_learner_takes_as_many_samples_as_its_updates_can_share(
    monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path
) -> None:
    from gesso.algorithms import credit

    multiples: list[int] = []
    honest = credit.Credit.kept

    def kept(self: Credit, rollout: Rollout, multiple: int) -> torch.Tensor:
        multiples.append(multiple)
        return honest(self, rollout, multiple)

    monkeypatch.setattr(credit.Credit, "kept", kept)
    train = write(tmp_path / "a.jsonl", rows(tmp_path, 4))
    run.train(
        recipe(root, train, steps=1, algorithm={"updates": 2}), folder=tmp_path / "r", quiet=True
    )
    assert multiples == [2]


def test_prompts_are_read_in_passes_of_bounded_length(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = write(tmp_path / "a.jsonl", rows(tmp_path, 4))
    job = run.assemble(recipe(root, train, sampler={"batch": 8}, data={"groups": 4}))
    passes: list[list[int]] = []
    model = writing(job.model)
    original = type(model).prefill

    def watched(self: Any, prompts: Any) -> Any:
        passes.append([len(prompt) for prompt in prompts])
        return original(self, prompts)

    monkeypatch.setattr(type(model), "prefill", watched)
    for bound in (10_000, 2 * max(map(model.length, job.cluster.stream.prompts))):
        monkeypatch.setattr(decode, "PREFILL_TOKENS", bound)
        passes.clear()
        job.cluster.sample_step(0).result()
        assert sum(map(len, passes)) == 4
        assert all(sum(lengths) <= bound for lengths in passes)
        assert (len(passes) > 1) == (bound < 10_000)
    job.close()


def test_with_importance_weights_the_distance_to_the_sampler_is_reported(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gesso.learner.learner import Learner, Update

    honest = Learner.update

    def update(self: Learner, rollout: Rollout, step: int, scales: Scales) -> Update:
        off = torch.zeros_like(rollout.logp)
        off[0, 0] = 0.03  # another engine, which is wrong about one token
        return honest(self, replace(rollout, logp=rollout.logp - off), step, scales)

    monkeypatch.setattr(Learner, "update", update)
    train = write(tmp_path / "a.jsonl", rows(tmp_path, 4))
    section = {"kind": "token-mask", "cap": 1.02}
    chosen = recipe(root, train, steps=1, algorithm={"importance": section})
    row = run.train(chosen, folder=tmp_path / "run", quiet=True).rows()[-1]
    assert row["update/sampler_gap_max"] == pytest.approx(0.03, abs=1e-4)
    tokens_in_all = round(0.03 / row["update/sampler_gap"])
    assert 4 <= tokens_in_all <= 16 and row["update/abs_dlogp_max"] < 1e-4
    assert row["update/importance_bounded"] == pytest.approx(1 / tokens_in_all)
    assert row["update/importance"] == pytest.approx(1 - 1 / tokens_in_all, abs=1e-4)


def test_pixel_bounds_that_cross() -> None:
    with pytest.raises(ValueError, match="min_pixels = 100 must be at most max_pixels = 10"):
        TokenModel(path="x", min_pixels=100, max_pixels=10)


def test_a_name_of_the_hub_without_its_mark_gets_a_hint() -> None:
    with pytest.raises(UserError, match='hub dataset use "hub:hiyouga/geometry3k@train"'):
        read(DataSource(path="hiyouga/geometry3k@train"))
    with pytest.raises(UserError, match=r"no such file$"):
        read(DataSource(path="./here/no.jsonl"))


# Rewards


def scored(name: str, sample: Sample, **options: Any) -> Score:
    (score,) = base.checked(base.load(assembly.REWARDS[name], options), [sample])
    return score


@pytest.mark.parametrize(
    ("name", "right"), [("math", r"\boxed{4}"), ("count", "4"), ("choice", "B")]
)
def test_the_answer_may_stand_in_another_column(name: str, right: str) -> None:
    want = "B" if name == "choice" else "4"
    response = f"<think></think><answer>{right}</answer>"
    sample = Sample(Prompt("?", columns={"solution": want}), None, 0, response)
    assert scored(name, sample, column="solution").value == 1
    reward = base.load(assembly.REWARDS[name], {})
    reason = reward.unfit(sample.prompt)
    assert reason is not None and reason.endswith(", got only solution")
    empty = reward.unfit(Prompt("?", columns={"answer": None}))
    assert empty is not None and "got None" in empty


def test_a_template_that_opens_the_thought() -> None:
    """DeepSeek-R1's distills: the prompt ends in <think>, the response begins within it."""
    response = "so it is 3\n</think>\n<answer>3</answer>"
    sample = Sample(Prompt("?"), None, 0, response)
    assert scored("format", sample).value == 0
    assert scored("format", sample, opened=True).value == 1
    for wrong in (f"<think>{response}", f"a</think>{response}", "<answer>3</answer>"):
        assert scored("format", Sample(Prompt("?"), None, 0, wrong), opened=True).value == 0


def test_overlong_counts_the_tokens_of_the_model(root: Path, tmp_path: Path) -> None:
    sample = Sample(Prompt("?"), None, 0, "a b c", tokens=16)
    assert scored("overlong", sample, limit=20, buffer=8).value == pytest.approx(-0.5)
    untold = scored("overlong", Sample(Prompt("?"), None, 0, "a b c"), limit=20, buffer=8)
    assert untold.value is None and "number of tokens is unknown" in (untold.error or "")
    body = wire.pack_samples([sample])
    header, _, rest = body.partition(b"\n")
    assert wire.read_samples(header, lambda n: rest[:n])[0].tokens == 16
    received = protocol.read_score_request(protocol.pack_score_request([sample]))
    assert received.samples[0].tokens == 16
    train = write(tmp_path / "a.jsonl", rows(tmp_path, 2))
    job = run.assemble(recipe(root, train))
    rollout, _ = job.cluster.sample_step(0).result()
    job.close()
    assert [s.tokens for s in rollout.samples] == rollout.mask.sum(1).tolist()


def test_right_means_whole() -> None:
    from gesso.track.samples import Shown

    row = {"index": 0, "prompt": "?", "seed": 0, "image": "", "text": "", "response": "x"}
    for value, right in ((1.0, True), (0.9, False), (0.0, False)):
        shown = Shown.of(row | {"parts": {"count": value, "count/exact": value}})
        assert shown is not None and shown.right is right


def test_a_missing_image_is_missing_whatever_its_name(tmp_path: Path) -> None:
    """`abcd` is base64 of three bytes, and of no picture."""
    file = write(tmp_path / "a.jsonl", [{"prompt": "?", "images": ["abcd"]}, *rows(tmp_path, 1)])
    assert "no such file 'abcd'" in read(DataSource(path=file)).left_out[0]


def test_a_distill_whose_template_opens_the_thought_is_trained(tmp_path: Path) -> None:
    """DeepSeek-R1's distills are Qwen2 and Llama with a chat template that ends in <think>."""
    from transformers import AutoTokenizer

    tokens.build("qwen2", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    end = "{% endif -%}"
    assert tokenizer.chat_template.endswith(end)
    tokenizer.chat_template = tokenizer.chat_template.removesuffix(end) + "<think>\n" + end
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "eval.txt").write_text("hello?\nhow many?\n")
    train = write(tmp_path / "a.jsonl", [{"prompt": "how many?"}, {"prompt": "why?"}])
    reward = [{"name": "format", "opened": True}, {"name": REWARD}]
    chosen = recipe(tmp_path, train, steps=1, model={"name": "causal"}, reward=reward)
    job = run.assemble(chosen)
    ids = writing(job.model).encode(job.cluster.stream.prompts[0]).ids.tolist()
    job.close()
    assert tokenizer.decode(ids).endswith("assistant\nthink\n")  # its letters have no < and >
    row = run.train(chosen, folder=tmp_path / "run", quiet=True).rows()[-1]
    assert row["reward/format"] == 0.0 and row["step"] == 1
