"""Whole runs of an editing model: outputs in the ratio of their input images, every algorithm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gesso
from gesso import build, cli, run
from gesso.algorithms.reward_gradient import RewardGradient
from gesso.check import check
from gesso.config import DataSource, Model
from gesso.data import readers
from gesso.data.prompts import WeightedPrompts
from gesso.data.ratios import RATIOS, Ratio, RatioStream, nearest, ratio_of
from gesso.families import input_images
from gesso.learner.learner import Learner
from gesso.models.flow import compiled
from gesso.models.flow.compiled import compile_blocks
from gesso.rollout import Rollout
from gesso.samplers.denoise import DenoisingSampler
from gesso.traces.flow import FlowTrace
from gesso.types import SampleSpec, Score, UserError
from tests.cut_run import cut_after
from tests.editors import build as build_editor
from tests.rollouts import parts_of
from tests.test_loop import final_state
from tests.typed import drawing, sure

SIZES = {"wide": (20, 40), "tall": (42, 20), "square": (24, 24)}  # height, width
OUTPUTS = {"wide": (12, 24), "tall": (24, 12), "square": (16, 16)}  # at 16², in multiples of 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ratios")
    build_editor("kontext", root / "model", num_layers=1, num_single_layers=1)
    for name, size in SIZES.items():
        noise = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(noise).save(root / f"{name}.png")
    names = ["wide", "tall", "wide", "square", "wide", "tall"]
    rows = [{"prompt": f"make it {i}", "image": f"{name}.png"} for i, name in enumerate(names)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:4]))
    return root


@pytest.fixture
def data(folder: Path) -> dict[str, Any]:
    size = {"height": 16, "width": 16, "text_length": 16, "match_input": True, "device": "cpu"}
    lora = {"rank": 2, "alpha": 4}
    return {
        "steps": 2,
        "model": {"name": "kontext", "path": str(folder / "model"), "lora": lora, **size},
        "data": {
            "train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "groups": 2
        },
        "reward": [{"name": "unchanged"}, {"name": "jpeg-compressibility"}],
        "algorithm": {"name": "flow-grpo", "group": 2, "steps": 3, "updates": 1, "guidance": 2.5},
        "eval": {"every": 2, "prompts": 3, "steps": 2},
        "save": {"every": 1, "keep": 9},
    }  # fmt: skip


def test_sizes() -> None:
    assert len(RATIOS) == 13
    assert nearest(1080, 1920) == Ratio(16, 9) and nearest(4000, 3000) == Ratio(3, 4)
    assert nearest(10, 900) == Ratio(3, 1)
    for ratio in RATIOS:
        height, width = ratio.size(512**2, 16)
        assert height % 16 == width % 16 == 0 and 0.95 < height * width / 512**2 < 1.05
        assert nearest(height, width) == ratio


def test_batches_have_one_ratio_and_ratios_their_share(folder: Path) -> None:
    prompts = readers.read(DataSource(path=str(folder / "train.jsonl"))).prompts
    stream = RatioStream([WeightedPrompts(prompts)], seed=1)
    batches = [stream.batch(i, 2) for i in range(12)]
    ratios = [{ratio_of(prompt) for prompt in batch} for batch in batches]
    assert all(len(found) == 1 for found in ratios)
    counts = [sum(found == {ratio} for found in ratios) for ratio in (Ratio(2, 1), Ratio(1, 2))]
    assert counts == [6, 4]  # of 12, as 3 and 2 of 6 prompts
    assert {prompt.text for batch in batches for prompt in batch} == {p.text for p in prompts}
    other = stream.other(2)  # refills: other prompts of the same ratio
    assert [{ratio_of(p) for p in other.batch(i, 2)} for i in range(12)] == ratios
    assert [stream.batch(i, 2) for i in range(12)] == batches


def test_a_run_in_the_ratios_of_its_images(data: dict[str, Any], tmp_path: Path) -> None:
    """A full fine-tune. Evaluations have all sizes; a resumed run ends with the same weights."""
    del data["model"]["lora"]
    done = run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)
    assert [row["step"] for row in done.rows() if "time/update" in row] == [1, 2]
    shown = [OUTPUTS[name] for name in ("tall", "wide", "square")]  # rows of the evaluation
    for step in (0, 2):
        files = sorted((done.path / "samples" / f"{step:06d}").glob("*.png"))
        assert [Image.open(file).size[::-1] for file in files] == shown
    again = run.resume(cut_after(done, 1, tmp_path / "again"), quiet=True)
    expected, found = final_state(done.path), final_state(again.path)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    trained = gesso.load(done.path)
    source = Path(data["data"]["train"]).with_name("tall.png")
    with pytest.raises(UserError, match=r"images: expected a list, as in \['.*tall\.png'\]"):
        trained.sample("make it red", images=str(source))
    (image,) = trained.sample("make it red", images=[source])
    assert (image.height, image.width) == OUTPUTS["tall"]
    out = tmp_path / "out"
    for name in ("tall", "wide"):  # the same text: the first sample is not overwritten
        image = str(source.with_name(f"{name}.png"))
        sample = ["sample", str(done.path), "make it red", "--image", image, "--out", str(out)]
        assert cli.main([*sample, "--quiet"]) == 0
    assert len(list(out.iterdir())) == 2


def notes(data: dict[str, Any]) -> list[str]:
    """About ratios, as `gesso check` shows them."""
    job = run.assemble(build.recipe_from(data))
    job.close()
    return [note for note in job.notes if "aspect ratio" in note or "wider than" in note]


def test_what_a_check_says(data: dict[str, Any]) -> None:
    """Ratios that are rare, or lost; options and models that do not fit."""
    (note,) = notes(data)
    assert "(1 of 1:1): batches of these ratios repeat their prompts" in note
    data["model"]["match_input"] = False
    (note,) = notes(data)
    assert note.startswith("5 of 6 prompts of ") and "the first is train.jsonl:1, 2:1;" in note
    train = Path(data["data"]["train"])
    Image.new("RGB", (2000, 3)).save(train.with_name("thin.png"))
    thin = json.dumps({"prompt": "make it thin", "image": "thin.png"})
    data["data"]["train"] = str(train.with_name("thin.jsonl"))
    Path(data["data"]["train"]).write_text(train.read_text() + thin)
    note, _ = notes(data)
    assert note.startswith("1 of 7 prompts of ") and note.endswith(
        "do not fit the model and are skipped; the first is thin.jsonl:7: image 1 of 1 has 2000×3 "
        "pixels; expected an aspect ratio of at most 16:1: make it thin"
    )
    Image.new("RGB", (70, 20)).save(train.with_name("thin.png"))
    data["model"]["match_input"] = True
    assert notes(data)[1].endswith(
        "have an input image wider than 3:1 or taller than 1:3, which their outputs get; the first "
        "is thin.jsonl:7; crop its image"
    )
    with pytest.raises(UserError, match=r"does not support data\.curriculum; remove one of them"):
        build.recipe_from(data | {"data": data["data"] | {"curriculum": {"floor": 0.2}}})


def test_a_check_assumes_the_input_images_of_the_data(data: dict[str, Any]) -> None:
    findings = check(build.recipe_from(data))
    paths = f"{data['data']['train']} and {data['data']['eval']}"
    assert ("", f"assuming at most 1 input image per prompt, as in {paths}") in findings.facts


def test_a_model_without_input_images_has_no_ratio_to_match(recipe_data: dict[str, Any]) -> None:
    recipe_data["model"]["match_input"] = True
    with pytest.raises(UserError, match='but model "sd3" takes none; remove it'):
        run.assemble(build.recipe_from(recipe_data))


def test_compiled_blocks_have_a_graph_per_number_of_tokens(
    data: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three ratios, wide and tall images have the same number. Replay gives the log-probs of
    sampling to the bit; more numbers than can be compiled are refused before the run."""
    data |= {"sampler": {"batch": 4}, "learner": {"micro_batch": 4}}
    data["model"]["fold"] = True  # as on a GPU
    data["algorithm"]["steps"] = 2
    recipe = build.recipe_from(data)
    model, algorithm, learner = parts_of(recipe)
    prompts = readers.read(DataSource(path=str(folder / "train.jsonl"))).prompts
    spec = sure(SampleSpec, algorithm.spec(0, 0, sure(Model, recipe.model)))
    torch._dynamo.reset()
    compile_blocks(model.transformer, model.blocks[1:], backend="eager")  # one of both kinds
    model.compiled = True
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    found = []
    for step, (first, second) in enumerate([(0, 2), (1, 5), (3, 3)]):
        rollout = drawn(model, [prompts[first], prompts[second]], spec)
        metrics = learner.update(replace(rollout, version=step), step).metrics
        assert metrics["update/first_abs_dlogp_max"] == 0.0
        found.append(graphs["unique_graphs"])
    assert found == [1, 1, 2]
    shown = input_images.notes(recipe, model, prompts, "train.jsonl")
    assert not any("compiled" in note for note in shown)
    monkeypatch.setattr(input_images, "FEW", 1)
    *_, note = input_images.notes(recipe, model, prompts, "train.jsonl")
    assert "2 different numbers of tokens" in note and "up to 8 graphs" in note
    monkeypatch.setattr(compiled, "GRAPHS", 7)
    with pytest.raises(UserError, match=r"but at most 7; crop .* or set model\.compile = false"):
        input_images.notes(recipe, model, prompts, "train.jsonl")


WINDOW = {"window": {"size": 1, "low": 0, "high": 2}}
OPTIONS: dict[str, dict[str, Any]] = {
    "flow-grpo": {"beta": 0.1}, "flow-grpo-fast": WINDOW, "mix-grpo": WINDOW, "dance-grpo": {},
    "grpo-guard": {}, "flow-dppo": WINDOW, "flash-grpo": {"window": {"high": 2}},
    "tempflow-grpo": {"window": {"high": 2}}, "diffusion-nft": {"times": 1},
    "awm": {"times": 1, "first": 0, "last": 1}, "dgpo": {"times": 1, "last": 1},
    "flow-dpo": {"guidance": 1.0}, "flow-rft": {}, "flow-sft": {}, "draft": {}, "refl": {"low": 1},
    "leap-align": {},
}  # fmt: skip


def test_every_algorithm_trains_an_editing_model(data: dict[str, Any], folder: Path) -> None:
    """One update; images of one ratio and two sizes. Not flow-opd, whose teachers are files."""
    named = {n for n in build.ALGORITHMS if build.algorithm_class(n).family == "flow"}
    assert set(OPTIONS) == named - {"flow-opd"}
    noise = np.random.default_rng(1).integers(0, 256, (30, 62, 3), np.uint8)
    Image.fromarray(noise).save(folder / "wider.png")
    rows = [{"prompt": "a", "image": "wide.png"}, {"prompt": "b", "image": "wider.png"}]
    (folder / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = readers.read(DataSource(path=str(folder / "two.jsonl"))).prompts
    data |= {"learner": {"micro_batch": 3}, "reward": [{"name": "aesthetic"}]}
    model = drawing(build.model(build.recipe_from(data)))
    for name, options in OPTIONS.items():
        group = {"group": 2} if name not in ("draft", "refl", "leap-align", "flow-sft") else {}
        given = {"engine": "data"} if name == "flow-sft" else {}
        algorithm = {"name": name, "steps": 3, "updates": 1, **group, **options}
        recipe = build.recipe_from(data | {"algorithm": algorithm, "sampler": given})
        chosen = build.algorithm(recipe)
        if isinstance(chosen, RewardGradient):
            chosen = chosen.with_reward(lambda images, _: images.mean((1, 2, 3)))
        learner = Learner(model, chosen, recipe.optimizer, recipe.learner, recipe.seed)
        spec = sure(SampleSpec, chosen.spec(0, 0, sure(Model, recipe.model)))
        rollout = drawn(model, prompts, spec)
        assert rollout.flow_trace.clean.shape[2:] == (6, 12), name
        before = {k: v.clone() for k, v in model.policy.tensors().items()}
        learner.update(rollout, 0)
        moved = [not torch.equal(before[k], v) for k, v in model.policy.tensors().items()]
        assert any(moved), name


def drawn(model: Any, prompts: Any, spec: SampleSpec) -> Rollout:
    row = [0, 0, 1, 1]
    pieces = list(DenoisingSampler(model, 4).sample(prompts, row, [1, 2, 3, 4], spec))
    scores = [Score(r, {"aesthetic": r}) for r in (0.1, 0.9, 0.2, 0.5)]
    return Rollout(
        [s for p in pieces for s in p.samples],
        torch.tensor(row),
        FlowTrace.concat([p.trace for p in pieces]),
        torch.cat([p.logp for p in pieces]),
        0,
        scores,
        {"aesthetic": 1.0},
    )
