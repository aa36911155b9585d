"""On-policy distillation for flow models, through the real model, learner and run folders."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gesso import build, run
from gesso.algorithms.flow_opd import FlowOPD, TaughtTerms
from gesso.algorithms.teachers import teacher_of
from gesso.config import Learner as Settings
from gesso.config import Lora
from gesso.ranks import ALONE
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, UserError, teacher_name
from gesso.use import teachers
from tests.cut_run import cut_after
from tests.rollouts import parts_of, rollout_of
from tests.typed import sure

LORA = {"rank": 4, "alpha": 8}
TWO = {"a": {"path": "a"}, "b": {"path": "b", "guidance": 3.0}}


def opd(**options: Any) -> dict[str, Any]:
    taught = {"teachers": TWO, "steps": 3, "guidance": 1.0, "group": 3} | options
    return {"name": "flow-opd", **taught}


def moved(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {n: t + 0.02 * torch.randn(t.shape, generator=noise) for n, t in weights.items()}


class Case:
    """A student, two teachers with other weights, and a rollout whose prompts have one each."""

    def __init__(self, data: dict, micro_batch: int = 4, **options: Any) -> None:
        data |= {"algorithm": opd(**options), "learner": {"micro_batch": micro_batch}}
        self.model, built, self.learner = parts_of(build.recipe_from(data))
        self.algorithm = sure(FlowOPD, built)
        self.policy = self.learner.policy
        self.start = {n: t.clone() for n, t in self.policy.tensors().items()}
        plain = rollout_of(self.model, built)
        taught = [Prompt(s.prompt.text, columns={"teacher": "ab"[i // 3]})
                  for i, s in enumerate(plain.samples)]  # fmt: skip
        samples = [replace(s, prompt=p) for s, p in zip(plain.samples, taught, strict=True)]
        self.rollout = replace(plain, samples=samples)

    def terms(self) -> TaughtTerms:
        prepared = self.algorithm.prepare(self.model, self.rollout, Settings())
        return self.algorithm.terms(self.rollout, prepared)

    def gradient(self) -> tuple[dict[str, Tensor], float]:
        """The gradient of the first update, and the mean distance."""
        stats: dict[str, list[Tensor]] = defaultdict(list)
        self.learner.schedule = self.learner.schedule.model_copy(update={"max_norm": 1e9})
        self.learner._accumulate(self.terms(), stats)
        distance = float(torch.cat(stats["distance"]).mean())
        return {n: p.grad.clone() for n, p in self.policy.trainable.items()}, distance


@pytest.mark.parametrize("distance", ["square", "kl", "kl-without-dt"])
def test_the_gradient_equals_a_plain_computation(recipe_data: dict, distance: str) -> None:
    """Student without guidance, one teacher without and one with; 18 terms in micro-batches of 4,
    of which none may mix teachers."""
    noise = 0.0 if distance == "square" else 0.7
    case = Case(recipe_data, distance=distance, noise=noise, timestep_fraction=1.0)
    weights = {"a": moved(case.start, 1), "b": moved(case.start, 2)}
    for name, tensors in weights.items():
        case.learner.teach(teacher_name(name), tensors)
    got, mean = case.gradient()
    trace, sigmas = case.rollout.flow_trace, case.rollout.flow_trace.context.sigmas
    negative = trace.context.negative
    assert negative is not None

    def velocity(n: int, j: int, scale: float) -> Tensor:
        x, sigma = trace.latents[n : n + 1, j], sigmas[j : j + 1]
        row = trace.row[n : n + 1]
        v = case.model.velocity(x, sigma, trace.context.cond.rows(row))
        if scale == 1:
            return v
        u = case.model.velocity(x, sigma, negative.rows(row))
        return u + scale * (v - u)

    total = torch.zeros(())
    for n in range(6):
        for j in range(3):
            with torch.no_grad():
                case.policy.load(weights["ab"[n // 3]])
                theirs = velocity(n, j, [1.0, 3.0][n // 3])
            case.policy.load(case.start)
            sigma, dt = sigmas[j], sigmas[j + 1] - sigmas[j]
            s2 = noise**2 * sigma / (1 - (sigmas[1] if sigma == 1 else sigma))
            factor = (1 + s2 * (1 - sigma) / (2 * sigma)) * dt  # of v in the mean
            gap = factor * (velocity(n, j, 1.0) - theirs)
            divisor = {"square": 1.0, "kl": s2 * -dt, "kl-without-dt": s2}[distance]
            total = total + gap.square().mean() / (2 * divisor)
    assert mean == pytest.approx(total.item() / 18, rel=1e-4)
    expected = torch.autograd.grad(total / 18, list(case.policy.trainable.values()))
    scale = max(float(g.abs().max()) for g in expected)
    assert scale > 0
    for name, g in zip(case.policy.trainable, expected, strict=True):
        assert (got[name] - g).abs().max() <= 1e-3 * scale, name


@pytest.mark.parametrize("fold", [True, False])
def test_a_student_that_equals_its_teacher_has_no_gradient(folding_data: dict, fold: bool) -> None:
    """Exactly: the passes of student and teacher are the same."""
    folding_data["model"] |= {"fold": fold}
    case = Case(folding_data, guidance=3.0)
    for name in "ab":
        case.learner.teach(teacher_name(name), case.start)
    gradient, distance = case.gradient()
    assert distance == 0 and all(not g.any() for g in gradient.values())
    case.learner.teach(teacher_name("b"), moved(case.start, 1))
    gradient, distance = case.gradient()
    assert distance > 0 and any(g.any() for g in gradient.values())


def test_micro_batches_have_one_teacher(recipe_data: dict) -> None:
    terms = Case(recipe_data).terms()
    parts = terms.micro_batches(Settings(micro_batch=4))
    assert [len(part) for part in parts] == [4, 2, 4, 2]
    assert [terms.teacher[part].unique().tolist() for part in parts] == [[0], [0], [1], [1]]
    assert sorted(torch.cat(parts).tolist()) == list(range(12))


def test_the_states_have_no_gradient(recipe_data: dict) -> None:
    case = Case(recipe_data)
    done = case.algorithm.complete(case.model, case.terms(), Settings(), ALONE)
    assert not done.x.requires_grad and not done.target.requires_grad
    assert done.target.dtype == torch.float32


@pytest.mark.parametrize("columns, sentence", [
    ({}, r'^x.jsonl:3: expected a column "teacher" with the name .*, one of a, b; add it'),
    ({"teacher": "c"}, r'^x.jsonl:3: column "teacher" has "c", which is not one of .*: a, b$'),
])  # fmt: skip
def test_every_prompt_has_a_teacher(columns: dict, sentence: str) -> None:
    prompt = Prompt("a", columns=columns, where="x.jsonl:3")
    with pytest.raises(UserError, match=sentence):
        teacher_of(prompt, "teacher", TWO)


def test_one_teacher_is_for_all_prompts_without_the_column() -> None:
    assert teacher_of(Prompt("a"), "teacher", {"a": 1}) == "a"
    assert teacher_of(Prompt("a", columns={"style": "b"}), "style", TWO) == "b"
    with pytest.raises(UserError, match='has "b"'):
        teacher_of(Prompt("a", columns={"teacher": "b"}), "teacher", {"a": 1})


BAD = [
    ({"teachers": {}}, "at least 1"),
    ({"teachers": {"a": {}}}, r'"teachers.a.path" is missing; expected a string'),
    ({"teachers": {"a": {"path": "a", "scale": 2.0}}}, 'unknown key "teachers.a.scale"'),
    ({"distance": "kl"}, "divides by the noise of a step; set noise above 0"),
    ({"distance": "l2"}, "expected one of 'square', 'kl', 'kl-without-dt'"),
    ({"advantage": {"std": "group"}}, 'unknown key "advantage"'),
    ({"rule": "cps", "noise": 0.7, "timestep_fraction": 1.0}, "the last CPS step has no noise"),
]  # fmt: skip


@pytest.mark.parametrize("options, sentence", BAD)
def test_mistakes_are_one_sentence(recipe_data: dict, options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        build.recipe_from(recipe_data | {"algorithm": opd(**options)})
    assert "\n" not in str(caught.value)


def test_a_lora_of_another_rank_and_alpha_is_converted_exactly() -> None:
    """W + α/r·BA stays the same; a module without an adapter gets none."""
    random = torch.Generator().manual_seed(0)
    shapes = {"lora_A.default.weight": (4, 5), "lora_B.default.weight": (3, 4)}
    like = {f"{m}.{name}": torch.zeros(size) for m in "xy" for name, size in shapes.items()}
    first, second = list(like)[:2]
    own = {
        first: torch.randn(2, 5, generator=random),
        second: torch.randn(3, 2, generator=random),
    }
    for alpha, scale in ((3, 3 / 2), (None, 1.0)):  # None: as in diffusers, the rank
        a, b, *other = teachers.fitted(own, alpha, like, Lora(rank=4, alpha=8), "it").values()
        effect = scale * own[second] @ own[first]
        torch.testing.assert_close(8 / 4 * b @ a, effect)
        assert not any(tensor.any() for tensor in other)


def trained(data: dict, folder: Path, **model: Any) -> RunFolder:
    """A teacher: one step from the base model, far enough to be another."""
    changed = data | {"model": data["model"] | model, "steps": 1, "optimizer": {"lr": 1e-2}}
    changed["eval"] = {"every": 0, "prompts": 1, "steps": 1}
    return run.train(build.recipe_from(changed), folder=folder, quiet=True)


@pytest.fixture(scope="module")
def folders(
    pipeline_folder: Path, prompt_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A LoRA run and a full one, and their exports."""
    from tests.conftest import small_recipe

    root = tmp_path_factory.mktemp("teachers")
    data = small_recipe(pipeline_folder, prompt_file)
    lora = trained(data, root / "lora", lora={"rank": 2, "alpha": 3})
    whole = trained(data, root / "full")
    loaded = run.load(lora.path)
    return {
        "lora": lora.path,
        "adapter": loaded.export(root / "adapter"),
        "merged": loaded.export(root / "merged", merged=True),
        "full": whole.path,
        "pipeline": run.load(whole.path).export(root / "pipeline"),
    }


def taught(data: dict, teacher: Path, lora: dict | None = LORA, **options: Any) -> dict:
    changed = data | {"model": data["model"] | {"lora": lora}}
    changed["algorithm"] = opd(teachers={"t": {"path": str(teacher)} | options})
    changed["eval"] = {"every": 0, "prompts": 1, "steps": 1}
    return changed


@pytest.mark.parametrize("name", ["lora", "adapter", "merged", "full", "pipeline"])
def test_a_teacher_is_a_run_or_an_export(
    recipe_data: dict, folders: dict[str, Path], name: str
) -> None:
    """The student with its teacher's copy gives the velocity of the teacher itself."""
    data = taught(recipe_data, folders[name], LORA if name in ("lora", "adapter") else None)
    recipe = build.recipe_from(data)
    model, algorithm, learner = parts_of(recipe)
    teachers.check(recipe, algorithm)
    teachers.teach(recipe, algorithm, learner)
    own = run.load(folders[name]).model
    trace = rollout_of(model, algorithm).flow_trace
    x, cond = trace.clean, trace.context.cond.rows(trace.row)
    with torch.no_grad():
        expected = own.velocity(x, torch.full((6,), 0.5), cond)
        base = model.velocity(x, torch.full((6,), 0.5), cond)
        got = model.velocity(x, torch.full((6,), 0.5), cond, teacher_name("t"))
    assert (expected - base).abs().max() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


REFUSED = [
    ("lora", None, {}, r"is a LoRA, but the student trains all weights; .*--merged` writes$"),
    ("full", LORA, {}, r"has all weights of a model, but the student trains a LoRA; remove model"),
    ("pipeline", LORA, {}, r"has all weights of a model, but the student trains a LoRA"),
    ("adapter", LORA, {"step": 1}, "is not a run; remove step and weights"),
    ("full", None, {"step": 7}, "has no checkpoint of step 7; expected one of 1"),
    ("nothing", None, {}, r"expected a run .*, got no such folder; train the teacher first"),
    (".", None, {}, r"expected a run .*, got neither; train"),
]  # fmt: skip


@pytest.mark.parametrize("name, lora, options, sentence", REFUSED)
def test_teachers_that_do_not_fit_are_refused(
    recipe_data: dict, folders: dict, name: str, lora: dict | None, options: dict, sentence: str
) -> None:
    """Before the model is loaded."""
    path = folders.get(name, folders["lora"].parent / name)
    recipe = build.recipe_from(taught(recipe_data, path, lora, **options))
    with pytest.raises(UserError, match=sentence) as caught:
        teachers.check(recipe, build.algorithm(recipe))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["lora", "adapter"])
def test_a_larger_rank_and_more_modules_are_refused(
    recipe_data: dict, folders: dict, name: str
) -> None:
    for lora, sentence in (
        ({"rank": 1, "alpha": 1}, "has rank 2, but the student has model.lora.rank = 1; set model"),
        (
            LORA | {"targets": ["attn.to_q"]},
            "which the student does not train .*; set model.lora.t",
        ),
    ):
        recipe = build.recipe_from(taught(recipe_data, folders[name], lora))
        _, algorithm, learner = parts_of(recipe)
        with pytest.raises(UserError, match=sentence):
            teachers.teach(recipe, algorithm, learner)


def test_a_lora_of_another_base_model_is_refused(
    recipe_data: dict, folders: dict, tmp_path: Path, pipeline_folder: Path
) -> None:
    shutil.copytree(pipeline_folder, tmp_path / "other")
    recipe_data["model"] |= {"path": str(tmp_path / "other")}
    for name in ("lora", "adapter"):
        recipe = build.recipe_from(taught(recipe_data, folders[name]))
        with pytest.raises(UserError, match="student and teachers must share their base model"):
            teachers.check(recipe, build.algorithm(recipe))
    recipe = build.recipe_from(taught(recipe_data, folders["pipeline"], None))
    teachers.check(recipe, build.algorithm(recipe))  # its own weights are all it has


def test_a_run_resumes_exactly_and_only_with_the_same_teachers(
    recipe_data: dict, folders: dict, tmp_path: Path
) -> None:
    """Two teachers, one for each prompt; checkpoints have their digests, not their weights."""
    rows = [{"prompt": f'a sign that says "{t}"', "teacher": t} for t in "ab"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    second = tmp_path / "second"
    shutil.copytree(folders["adapter"], second)
    data = taught(recipe_data, folders["lora"])
    data["data"] |= {"train": str(prompts)}
    pair = {"a": {"path": str(folders["lora"])}, "b": {"path": str(second), "guidance": 2.0}}
    data |= {"algorithm": opd(teachers=pair), "steps": 2, "optimizer": {"lr": 1e-2}}
    whole = run.train(build.recipe_from(data), folder=tmp_path / "whole", quiet=True)
    last = whole.rows()[-1]
    assert last["update/distance"] == pytest.approx(
        (last["update/distance/a"] + last["update/distance/b"]) / 2
    )
    assert last["update/distance"] < whole.rows()[1]["update/distance"]
    state = whole.load(2)[0]
    assert {key for key in state if "teacher" in key} == {
        "teachers/teacher:a", "teachers/teacher:b",
    }  # fmt: skip
    cut = cut_after(whole, 1, tmp_path / "cut")
    changed = cut_after(whole, 1, tmp_path / "changed")
    resumed = run.resume(cut, quiet=True).load(2)[0]
    assert all(tensor.equal(resumed[key]) for key, tensor in state.items())
    shutil.rmtree(second)
    run.load(folders["lora"], overrides=["model.lora.alpha=5"]).export(second)
    before = sorted((changed / "checkpoints").iterdir())
    with pytest.raises(UserError, match="weights of teacher:b have changed since this run started"):
        run.resume(changed, quiet=True)
    assert sorted((changed / "checkpoints").iterdir()) == before


def test_a_missing_teacher_of_a_prompt_is_refused_before_the_run(
    recipe_data: dict, folders: dict, tmp_path: Path
) -> None:
    data = taught(recipe_data, folders["full"], None)
    data["algorithm"] |= {"teachers": {name: {"path": str(folders["full"])} for name in "ab"}}
    with pytest.raises(UserError, match=r'prompts.txt:1: expected a column "teacher"'):
        run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
