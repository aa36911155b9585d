"""On-policy distillation for language models: from another model, and from other adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso import build, run
from gesso.algorithms.opd import NAME
from gesso.estimate import estimate
from gesso.formulas.aggregation import token_weights
from gesso.formulas.objectives import cispo, teacher_gap
from gesso.types import UserError
from gesso.use import teachers
from tests import tokens
from tests.cluster.runs import language_recipe
from tests.cut_run import cut_after
from tests.responses import (
    TEMPERATURE,
    Parts,
    assert_close,
    loss_and_gradient,
    moved,
    parts_of,
    plain_like,
    plain_logp,
    rollout_of,
)
from tests.tokens import Tiny
from tests.typed import sure

LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, and a wider teacher with the same vocabulary."""
    root = tmp_path_factory.mktemp("distilled")
    tokens.build("qwen2", root / "qwen2")
    tokens.build("qwen2", root / "wider", head=16)
    (root / "prompts.txt").write_text("a red cat\nwhy?\ntwo words\n")
    return root


@pytest.fixture
def student(folders: Path) -> Tiny:
    return Tiny("qwen2", folders / "qwen2")


def taught(tiny: Tiny, teacher: dict[str, Any], **sections: Any) -> Parts:
    options = sections.pop("algorithm", {})
    parts = parts_of(tiny, {"name": "opd", "teacher": teacher, **options}, **sections)
    if "path" in teacher:
        teachers.teach(parts.recipe, parts.algorithm, parts.learner)
    parts.algorithm = parts.learner.algorithm
    return parts


def test_golden_values() -> None:
    """The gap is neither standardised nor read where there is no token."""
    logp = torch.tensor([[-1.0, -2.0, -0.5, -0.1]]).requires_grad_()
    theirs = logp.detach() + torch.tensor([[0.2, -1.0, 1.0, 0.0]])
    mask = torch.tensor([[True, True, False, True]])
    gap = teacher_gap(theirs, logp, mask)
    assert gap.tolist()[0] == pytest.approx([0.2, -1.0, 0, 0], abs=1e-6) and not gap.requires_grad
    loss = cispo(logp, logp.detach(), gap.float(), 0.0, 5.0).loss
    (token_weights(mask, "token-mean", None) * loss).sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist()[0] == pytest.approx([-0.066667, 0.333333, 0, 0], abs=1e-6)
    assert not teacher_gap(logp, logp, mask).any()


def test_the_gradient_equals_a_plain_computation(student: Tiny, folders: Path) -> None:
    """A wider teacher; tokens of several lengths in packed micro-batches."""
    parts = taught(student, {"path": str(folders / "wider")}, learner={"micro_tokens": 40})
    moved(parts.model.policy.trainable)
    rollout = rollout_of(parts.model, student.prompts, spread=0.0)
    loss, found = loss_and_gradient(parts, rollout)
    plain, trace = plain_like(student, parts.model), rollout.token_trace
    logp = plain_logp(plain, trace, parts.model.suppressed)
    wider = Tiny("qwen2", folders / "wider").plain().double()
    with torch.no_grad():
        theirs = plain_logp(wider, trace, parts.model.suppressed)
    gaps = [
        [float(t - p.detach()) for t, p in zip(a, b, strict=True)]
        for a, b in zip(theirs, logp, strict=True)
    ]
    count = sum(map(len, gaps))
    expected = -sum(
        g * p for row, own in zip(gaps, logp, strict=True) for g, p in zip(row, own, strict=True)
    )
    (sure(torch.Tensor, expected) / count).backward()
    assert loss == pytest.approx(float(expected.detach()) / count, rel=1e-4)
    reported = parts.learner.update(rollout, 0).metrics["update/distance"]
    assert reported == pytest.approx(-sum(map(sum, gaps)) / count, rel=1e-4)
    owners = {n: p.grad for n, p in plain.named_parameters() if n in parts.model.policy.trainable}
    assert_close(found, {n: g for n, g in owners.items() if g is not None})


def test_a_student_that_equals_its_teacher_has_no_gradient(student: Tiny) -> None:
    """Exactly, if its log-probs are computed by the learner."""
    exact = {"importance": {"kind": "token-truncate"}}
    for options, most in ((exact, 0.0), ({}, 1e-6)):
        parts = taught(student, {"path": str(student.folder)}, algorithm=options)
        rollout = rollout_of(parts.model, student.prompts, spread=0.0)
        _, found = loss_and_gradient(parts, rollout)
        assert max(float(g.abs().max()) for g in found.values()) <= most


def test_a_teacher_may_be_another_adapter(student: Tiny) -> None:
    """It needs no second network: the gap is that of the copy's log-probs."""
    parts = taught(student, {"adapter": "x"}, model={"lora": LORA})
    policy = parts.model.policy
    moved(policy.trainable, 0.2, seed=1)
    weights = {name: tensor.clone() for name, tensor in policy.tensors().items()}
    parts.learner.teach(NAME, weights)
    moved(policy.trainable, 0.2, seed=2)
    rollout = rollout_of(parts.model, student.prompts, spread=0.0)
    gap = parts.algorithm.prepare(parts.model, rollout, parts.recipe.learner).advantages
    own = parts.model.logp(rollout.token_trace, TEMPERATURE).logp
    policy.load(weights)
    theirs = parts.model.logp(rollout.token_trace, TEMPERATURE).logp
    torch.testing.assert_close(gap.float(), (theirs - own).detach())
    assert gap.abs().max() > 0.01


def test_a_larger_padded_vocabulary_does_not_matter(student: Tiny, tmp_path: Path) -> None:
    """Rows without a token take no probability: both models choose among the same tokens."""
    import transformers

    padded = tmp_path / "padded"
    shutil.copytree(student.folder, padded)
    model = transformers.AutoModelForCausalLM.from_pretrained(padded)
    rows = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(rows + 8, mean_resizing=False)
    model.save_pretrained(padded)
    parts = taught(student, {"path": str(padded)})
    rollout = rollout_of(parts.model, student.prompts, spread=0.0)
    gap = parts.algorithm.prepare(parts.model, rollout, parts.recipe.learner).advantages
    assert gap.abs().max() < 1e-5


def test_another_vocabulary_is_refused(student: Tiny, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(student.folder, other)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[3:5]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="has another vocabulary than the student: ") as caught:
        taught(student, {"path": str(other)})
    assert f"{first!r} is {vocabulary[first]}, expected {vocabulary[second]}" in str(caught.value)


def test_a_missing_teacher_is_refused_before_the_student_is_loaded(
    folders: Path, tmp_path: Path
) -> None:
    data = language_recipe(folders, {"name": "opd", "teacher": {"path": str(tmp_path / "x")}})
    recipe = build.recipe_from(data)
    with pytest.raises(UserError, match=r'^algorithm\.teacher\.path = ".*/x"') as caught:
        teachers.check(recipe, build.algorithm(recipe))
    assert "model.path" not in str(caught.value)


def test_other_image_settings_are_refused(tmp_path: Path) -> None:
    tokens.build("qwen2.5-vl", tmp_path / "vlm")
    shutil.copytree(tmp_path / "vlm", tmp_path / "other")
    file = tmp_path / "other" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.1, 0.1, 0.1]}))
    tiny = Tiny("qwen2.5-vl", tmp_path / "vlm")
    with pytest.raises(UserError, match="prepares images differently: image_mean = "):
        taught(tiny, {"path": str(tmp_path / "other")})
    parts = taught(tiny, {"path": str(tmp_path / "vlm")})
    rollout = rollout_of(parts.model, tiny.prompts, spread=0.0)
    gap = parts.algorithm.prepare(parts.model, rollout, parts.recipe.learner).advantages
    assert gap.abs().max() < 1e-5


BAD = [
    ({"teacher": {}}, "expected one of path .another model. and adapter"),
    ({"teacher": {"path": "a", "adapter": "b"}}, "expected one of path"),
    ({"teacher": {"path": "a", "step": 1}}, "select a checkpoint of an adapter; remove them"),
    ({}, '"teacher" is missing'),
    ({"teacher": {"path": "a"}, "advantage": {"whiten": True}}, "rewards; remove advantage"),
    ({"teacher": {"path": "a"}, "kl": {"place": "reward"}}, 'use kl.place = "loss"'),
    ({"teacher": {"path": "a"}, "refills": 1}, "refills replace dropped groups"),
]  # fmt: skip


@pytest.mark.parametrize("options, sentence", BAD)
def test_mistakes_are_one_sentence(student: Tiny, options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        parts_of(student, {"name": "opd"} | options)
    assert "\n" not in str(caught.value)


def test_the_estimate_counts_the_teacher(student: Tiny, folders: Path) -> None:
    def lasting(teacher: dict, **model: Any) -> dict[str, int]:
        algorithm = {"name": "opd", "teacher": teacher, "max_tokens": 8}
        data = language_recipe(folders, algorithm)
        data["model"] |= model
        return estimate(build.recipe_from(data)).lasting

    path = {"path": str(folders / "wider")}
    one, wider = lasting(path), Tiny("qwen2", folders / "wider").plain()
    expected = sum(p.nbytes for p in wider.parameters())
    assert expected <= one["teacher"] <= 1.1 * expected  # and an adapter without effect
    other = lasting({"adapter": "x"}, lora=LORA)
    assert "teacher" not in other and other["copies of the trained weights"] > 0


def test_a_run_resumes_exactly(folders: Path, tmp_path: Path) -> None:
    """From another model; then its adapter's run is a teacher."""
    data = language_recipe(folders, {"name": "opd", "teacher": {"path": str(folders / "wider")}})
    data |= {"steps": 2}
    data["model"] |= {"lora": LORA}
    whole = run.train(build.recipe_from(data), folder=tmp_path / "whole", quiet=True)
    resumed = run.resume(cut_after(whole, 1, tmp_path / "cut"), quiet=True).load(2)[0]
    state = whole.load(2)[0]
    assert all(tensor.equal(resumed[key]) for key, tensor in state.items())
    pupil = data | {"algorithm": data["algorithm"] | {"teacher": {"adapter": str(whole.path)}}}
    recipe = build.recipe_from(pupil | {"steps": 1})
    second = run.train(recipe, folder=tmp_path / "second", quiet=True)
    assert any(key.startswith("teachers/") for key in second.load(1)[0])
    assert second.rows()[-1]["advantage/abs_mean"] > 0
