"""What can be drawn from, and what is said of what cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import gesso
from gesso import build, cli
from gesso.config import Lora, Model, Recipe
from gesso.types import UserError
from gesso.use import export
from gesso.use.loaded import open_model
from gesso.use.sampling import SampleRequest, sample_all
from gesso.use.source import find
from gesso.use.trained import load
from gesso.weights.policy import Policy
from gesso.zoo.words import LIMITS, prompt_for
from tests import pipelines, tokens
from tests.conftest import small_recipe
from tests.typed import sure
from tests.use import runs


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage takes longer than sampling from these models."""
    for module in ("sampling", "evaluate"):
        monkeypatch.setattr(f"gesso.use.{module}.free", lambda: None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    pipelines.build("sd3", root / "sd3")
    pipelines.build("flux-schnell", root / "flux")
    tokens.build("qwen2", root / "qwen2")
    return root


@pytest.fixture(scope="module")
def run(folders: Path) -> Path:
    return runs.make(runs.draws("sd3", folders / "sd3", lora=True), folders / "run").path


@pytest.fixture(scope="module")
def written(folders: Path) -> Path:
    model = tokens.Tiny("qwen2", folders / "qwen2")
    return runs.make(runs.writes(model, True, {"name": "grpo"}), folders / "written").path


def out(capsys: pytest.CaptureFixture, *arguments: Any) -> str:
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture, *arguments: Any) -> str:
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# A folder of diffusers or transformers


def test_a_pipeline_samples_as_diffusers_would(folders: Path) -> None:
    recipe = find(folders / "sd3").recipe
    assert (recipe.model.name, sure(Model, recipe.model).height) == (
        "sd3",
        32,
    )  # 16 cells of 2 pixels
    assert (recipe.eval.steps, recipe.eval.guidance) == (28, 7.0)
    schnell = find(folders / "flux", overrides=["eval.steps=4", "model.text_length=16"]).recipe
    assert (schnell.model.name, schnell.eval.steps, schnell.eval.guidance) == ("flux", 4, 1.0)
    asked = ["eval.steps=3", "model.height=24", "model.width=16", "model.text_length=16"]
    ours = load(folders / "sd3", overrides=[*asked, "eval.guidance=2.5"])
    (picture,) = ours.sample("a red cat")
    assert picture.size == (16, 24)
    assert picture.tobytes() != ours.sample("a red cat", guidance=1.0)[0].tobytes()
    told = {p.dtype for p in sure(Policy, ours.model.policy).module.parameters()}
    assert told == {torch.float32}  # half precision where there is a GPU


def test_a_model_of_transformers(folders: Path, written: Path) -> None:
    short = ["algorithm.max_tokens=6"]
    plain, named = load(folders / "qwen2", overrides=short), tokens.Tiny("qwen2", folders / "qwen2")
    base = open_model(find(written).base)
    assert plain.recipe.model.name == "causal"
    (response,) = plain.sample("how many?")
    assert base.sample("how many?")[0].startswith(response)
    assert len(response) <= 6 and named.sees is False


def test_an_adapter_of_others(
    run: Path, written: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exports without the recipe are as anybody would have saved them."""
    asked = ["eval.steps=3", "eval.guidance=2.5", "model.height=24", "model.width=16"]
    asked += ["model.text_length=16"]
    drawn = load(run).export(tmp_path / "drawn")
    said = load(written).export(tmp_path / "said")
    for folder in (drawn, said):
        (folder / "recipe.toml").unlink()
    base = f"model.path={folders / 'sd3'}"
    with pytest.raises(UserError, match=r"without a known base model.*--set model\.path=DIR"):
        find(drawn)
    found = load(drawn, overrides=[*asked, base])
    expected = load(run).sample("a red cat")[0]
    assert found.sample("a red cat")[0].tobytes() == expected.tobytes()
    assert sure(Lora, found.source.base.recipe.model.lora).path is None
    card = (drawn / "README.md").read_text()
    (drawn / "README.md").write_text(card.replace("---\n", "---\nbase_model: owner/sd3\n", 1))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r'"owner/sd3" of .* is neither a local folder nor could it be'
    ):
        find(drawn)
    assert find(drawn, overrides=[base]).recipe.model.path == str(folders / "sd3")
    config = json.loads((said / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folders / "qwen2")
    again = load(said, overrides=["algorithm.max_tokens=12"])  # which no adapter says
    assert again.sample("how many?") == load(written).sample("how many?")


def test_folders_that_are_nothing_to_draw_from(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def said(*what: Any) -> str:
        return refused(capsys, "sample", *what, "a cat", "--quiet")

    assert "contains no model: expected a run (config.toml), a diffusers pipeline" in said(tmp_path)
    assert "no such folder; expected a run, a recipe" in said(tmp_path / "nowhere")
    assert 'unknown recipe "demoo"; did you mean "demo"?' in said("demoo")
    assert "select a checkpoint of a run, but demo is not a run" in said("demo", "--step", "4")
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableVideoPipeline"}')
    told = said(tmp_path)
    assert "is a StableVideoPipeline; expected one of StableDiffusion3Pipeline, FluxPip" in told
    (tmp_path / "model_index.json").write_text("{")
    assert "is not valid JSON" in said(tmp_path)
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert "is a mamba; expected one of" in said(tmp_path)
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(b"nonsense")
    assert "pytorch_lora_weights.safetensors cannot be read" in said(tmp_path)
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    config = (moved / "config.toml").read_text().replace("rank = 4", "rank = 8")
    (moved / "config.toml").write_text(config)
    told = said(moved)
    assert "config.toml does not match the checkpoint of step 4: " in told
    assert (
        "tensors are of a different shape, first " in told and ": expected (8, 16), got (4," in told
    )


# gesso sample


def test_images_have_honest_names(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from PIL import Image
    from PIL.PngImagePlugin import PngImageFile

    asked = ["sample", run, "a red cat", "Oak!", "--n", "2", "--seed", "5", "--quiet"]
    lines = out(capsys, *asked, "--out", tmp_path / "p", "--base").splitlines()
    names = [Path(line).name for line in lines]
    assert names[0] == "001-a-red-cat_seed5-0_base-sd3.png"
    assert names[4:6] == [
        "001-a-red-cat_seed5-0_run-step4.png",
        "001-a-red-cat_seed5-1_run-step4.png",
    ]
    assert names[7] == "002-oak_seed5-1_run-step4.png" and len(set(names)) == 8
    pictures = [sure(PngImageFile, Image.open(line)) for line in lines]
    assert pictures[4].text["prompt"] == "a red cat" and "step 4" in pictures[4].text["model"]
    trained = gesso.load(run)
    for j in range(2):  # alone or among others: the same picture
        assert pictures[4 + j].tobytes() == trained.sample("a red cat", 2, 5)[j].tobytes()
    assert (
        pictures[0].tobytes() == open_model(find(run).base).sample("a red cat", 1, 5)[0].tobytes()
    )
    assert pictures[0].tobytes() != pictures[4].tobytes()
    one = out(capsys, "sample", run, "a red cat", "--quiet", "--out", tmp_path / "q", "--step", "2",
              "--weights", "current", "--steps", "2", "--guidance", "1")  # fmt: skip
    assert Path(one.strip()).name == "a-red-cat_seed0-0_run-step2-current.png"
    short = load(run, 2, "current").sample("a red cat", steps=2, guidance=1.0)[0]
    assert Image.open(one.strip()).tobytes() == short.tobytes()


def test_scores_a_file_of_prompts_and_a_sheet(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from PIL import Image

    shown = tmp_path / "sheets" / "all.png"
    raises = "tests.rewards.user_rewards:raises"
    lines = out(
        capsys, "sample", run, "--prompts", runs.PROMPTS, "--quiet", "--out", tmp_path,
        "--reward", "jpeg-compressibility", "--sheet", shown, "--base",
    ).splitlines()  # fmt: skip
    assert len(lines) == 6 and all("  jpeg-compressibility -" in line for line in lines)
    assert Image.open(shown).width > 300  # base and trained side by side
    (line,) = out(
        capsys, "sample", run, "oak", "--quiet", "--out", tmp_path, "--reward", raises
    ).splitlines()
    assert "no score: " in line and "no such model" in line
    events = out(capsys, "sample", run, "oak", "--json", "--out", tmp_path, "--reward", raises)
    result = json.loads(events.splitlines()[-1])
    (sample,) = result["samples"]
    assert result["event"] == "result" and sample["reward"] is None and sample["error"]


def test_responses(written: Path, capsys: pytest.CaptureFixture) -> None:
    greedy = load(written).sample("how many?")[0]
    assert out(capsys, "sample", written, "how many?", "--quiet") == greedy + "\n"
    warm = out(capsys, "sample", written, "how many?", "--temperature", "2", "--quiet")
    assert warm != greedy + "\n"
    many = out(capsys, "sample", written, "how many?", "oak", "--quiet", "--reward", "format")
    assert f"# {written} step 4: how many?\n{greedy}\n" in many and "format 0.000" in many


def test_prompts_that_the_bundled_model_was_not_trained_on(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """One note on stderr, or one event; the pictures are drawn all the same."""
    oak, lantern, kite = (prompt_for(word, "red") for word in ("OAK", "LANTERN", "KITE"))
    signs = runs.signs(tmp_path / "signs").path
    exported = tmp_path / "exported"
    load(signs).export(exported, merged=True)
    told = f'"OAK" has 3 letters. {LIMITS}'
    for asked in ([signs, oak, "--base"], [exported, oak], ["demo", oak, "--steps", "1"]):
        assert cli.main([str(a) for a in ["sample", *asked, "--out", tmp_path]]) == 0
        shown = capsys.readouterr()
        assert shown.err.count(told) == 1 and LIMITS not in shown.out
        assert all(Path(line).is_file() for line in shown.out.splitlines())
    events = out(capsys, "sample", signs, kite, lantern, "--json", "--out", tmp_path).splitlines()
    told_of = [event for event in map(json.loads, events) if event["event"] in ("note", "result")]
    assert [event["event"] for event in told_of] == ["note", "result"], "not of tokens, too"
    assert (
        told_of[0]["text"].startswith("1 of 2 prompts differ from")
        and LIMITS in (told_of[0]["text"])
    )
    assert len(told_of[1]["samples"]) == 2
    (tmp_path / "mine.txt").write_text(f"{kite}\n{oak}\n")
    assert cli.main(["eval", str(signs), "--base", "--prompts", str(tmp_path / "mine.txt")]) == 0
    assert capsys.readouterr().err.count("1 of 2 prompts differ from the model's") == 1
    for inside in ([signs, kite], [run, oak]):
        assert cli.main([str(a) for a in ["sample", *inside, "--out", tmp_path]]) == 0
        assert "bundled signs model" not in capsys.readouterr().err


def test_questions_that_the_bundled_model_was_not_trained_on(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "board.png").write_bytes(tokens.picture(64, 64).read())
    right = "How many red stars are there?"
    for question, count in ((right, 0), (right.lower(), 1)):
        asked = ["sample", "demo-vlm", question, "--image", tmp_path / "board.png"]
        assert cli.main([str(a) for a in asked]) == 0
        assert capsys.readouterr().err.count("The bundled shapes model answers") == count


def test_options_of_the_other_family(
    run: Path, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from PIL import Image

    def said(*what: Any) -> str:
        return refused(capsys, "sample", *what, "--quiet")

    assert "temperature is for language models, but this is a flow model" in (
        said(run, "oak", "--temperature", "1")
    )
    assert "steps is for flow models, but this is" in said(written, "a", "--steps", "2")
    assert "--sheet is for image models, but this is a language model" in (
        said(written, "a", "--sheet", tmp_path / "s.png")
    )
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    assert "the prompt: expected no input images, got 1: this model generates from text alone" in (
        said(run, "oak", "--image", tmp_path / "x.png")
    )
    for image, why in (
        ("https://x.org/a.png", "'https://x.org/a.png' is a URL, which a run does not download"),
        ("", "expected a path, bytes or base64, got ''"),
        (tmp_path, f"'{tmp_path}' is a folder; expected a file"),
    ):
        assert f"the prompt: image 1 of 1: {why}" in said("demo-edit", "make it", "--image", image)
    assert "expects a prompt, or --prompts FILE" in said(run)
    assert "--n from 1 to 1,000,000, got 0" in said(run, "oak", "--n", "0")
    assert '"steps" = 0 is not valid' in said(run, "oak", "--steps", "0")
    (tmp_path / "taken").touch()
    assert "expects a folder as --out" in said(run, "oak", "--out", tmp_path / "taken")
    within = tmp_path / "taken" / "more"
    assert f"folder {within} cannot be created: taken is a file" in said(
        run, "oak", "--out", within
    )
    assert "the base model of demo is unknown" in said("demo", "oak", "--base")
    long = "word " * 300
    assert "more than model.max_prompt = 256" in said(written, long)


def test_an_image_depends_on_its_prompt_and_seed_and_nothing_else(run: Path) -> None:
    alone = sample_all([find(run)], SampleRequest(prompts=("two",), n=2, seed=5))[0].samples
    both = sample_all([find(run)], SampleRequest(prompts=("one", "two"), n=2, seed=5))[0].samples
    assert [s.seed for s in both[:2]] == [s.seed for s in both[2:]] == [s.seed for s in alone]
    for one, other in zip(both[2:], alone, strict=True):  # a batch of another size rounds otherwise
        assert abs(one.pixels.astype(int) - other.pixels).max() <= 1


def test_the_terms_of_the_base_go_with_it(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    out.mkdir()
    (base / "LICENSE.md").write_text("theirs")
    (base / "LICENSE").write_text("theirs, too")
    (out / "LICENSE").write_text("kept")
    export._copy_license(base, out)
    assert (out / "LICENSE.md").read_text() == "theirs" and (out / "LICENSE").read_text() == "kept"


def test_small_batches_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a large model would be, and the first picture come after a minute."""
    asked: list[bool | None] = []

    class Enough(Exception): ...

    def model(recipe: Recipe) -> None:
        asked.append(recipe.model.compile)
        raise Enough

    monkeypatch.setattr(build, "model", model)
    for overrides in ([], ["model.compile=true"]):
        with pytest.raises(Enough):
            gesso.load("demo", overrides=overrides)
    assert asked == [False, True]


def test_settings_of_a_cluster_that_contradict_each_other(
    pipeline_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    """As for training: sharded weights need workers that divide them."""
    data = small_recipe(pipeline_folder, prompt_file)
    data["model"]["name"] = "sd3"
    made = runs.make(data, tmp_path / "run")
    overrides = ["cluster.sharding=all", "cluster.workers=none"]
    with pytest.raises(UserError, match=r'cluster.sharding = "all" requires cluster.workers; set'):
        find(made.path, overrides=overrides)
