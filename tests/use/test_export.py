"""What is exported, loaded with plain diffusers, transformers and PEFT by the lines of its card,
gives what Gesso gives."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gesso
from gesso import build, cli
from gesso.config import Lora, TokenModel
from gesso.models.flow.sd3 import SD3
from gesso.models.tokens.vision_language import VisionLanguage
from gesso.types import Prompt, Sample, SampleSpec, Score, UserError
from gesso.use import card
from gesso.use.loaded import AS_EVALUATED, open_model, sample_seeds
from gesso.use.source import ModelSource
from gesso.use.trained import Trained, load
from tests import editors, pipelines, tokens
from tests.tokens import padded_logp, trace_of
from tests.typed import sure, writing
from tests.use import runs

FORMS = {"lora": (True, []), "merged": (True, ["--merged"]), "full": (False, [])}
PICTURE_GAP = 1e-5  # of values from 0 to 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def pipeline(name: str, folders: Path) -> Path:
    made = folders / name
    return made if made.is_dir() else pipelines.build(name, made)


def tiny(name: str, folders: Path) -> tokens.Tiny:
    made = folders / name
    return tokens.Tiny(name, made if made.is_dir() else tokens.build(name, made))


def export(run: Path, to: Path, *flags: str) -> Path:
    assert cli.main(["export", str(run), "--to", str(to), "--quiet", *flags]) == 0
    return to


def as_the_card_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs the lines of the card in its folder; what they leave."""
    (lines,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with monkeypatch.context() as place:
        place.chdir(folder)
        exec(compile(lines, "README.md", "exec"), names)
    return names


def drawn(trained: Any, prompt: str) -> tuple[np.ndarray, torch.Tensor]:
    """Gesso's picture and latents, from the seed of the card."""
    spec = trained.spec(AS_EVALUATED, several=False)
    assert isinstance(spec, SampleSpec) and spec.guidance in (1.0, 2.5)
    sampler = build.built_in_sampler(trained.recipe, trained.model)
    (piece,) = sampler.sample([trained.ask(prompt)], [0], sample_seeds(0, 1), spec)
    return piece.samples[0].pixels, piece.trace.clean


@dataclass(frozen=True)
class Drawn:
    """A run, and what it draws."""

    run: Path
    text_length: int
    spec: SampleSpec
    pixels: np.ndarray
    latents: torch.Tensor


@pytest.fixture(scope="module")
def drawn_run(
    folders: Path, pipeline_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], Drawn]:
    """Adapters are exported in two forms, from one run."""

    @functools.cache
    def made(name: str, lora: bool) -> Drawn:
        path = pipeline_folder if name == "bundled" else pipeline(name, folders)
        data = runs.draws("sd3" if name == "bundled" else name, path, lora)
        if name == "bundled":
            data["model"] |= {"height": 32, "width": 96, "text_length": 0}
        if name == "sana":  # the only sizes of its pipeline
            data["model"] |= {"height": 32, "width": 32}
        run = runs.make(data, tmp_path_factory.mktemp("drawn") / "run", 0.03 if lora else 0.01).path
        trained = load(run)
        ours, latents = drawn(trained, runs.TOLD)
        untrained, _ = drawn(open_model(trained.source.base), runs.TOLD)
        assert abs(ours.astype(int) - untrained).max() > 8  # training has moved it
        spec = sure(SampleSpec, trained.spec(AS_EVALUATED, several=False))
        return Drawn(run, data["model"]["text_length"], spec, ours, latents)

    return made


# All trained weights are exported the same way for every model.
DRAWN = [("bundled", form) for form in FORMS]
DRAWN += [("flux-dev", form) for form in FORMS if form != "full"]
DRAWN += [(name, "lora") for name in ("qwen-image", "sd35", "flux-schnell", "z-image", "sana")]


@pytest.mark.parametrize("name, form", DRAWN)
def test_images_of_plain_diffusers(
    name: str,
    form: str,
    drawn_run: Callable[[str, bool], Drawn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora, flags = FORMS[form]
    made = drawn_run(name, lora)
    folder = export(made.run, tmp_path / "out", *flags)
    left = as_the_card_says(folder, monkeypatch)
    assert abs(np.asarray(left["image"]).astype(int) - made.pixels).max() <= 1
    spec = made.spec
    scales: dict[str, dict[str, Any]] = {
        "qwen-image": {"true_cfg_scale": 2.5, "negative_prompt": ""},
        "z-image": {"guidance_scale": 1.5},  # c + s·(c − u)
        "sana": {"guidance_scale": 2.5, "use_resolution_binning": False},
    }
    scale = scales.get(name, {"guidance_scale": spec.guidance})
    exact = left["pipe"](
        runs.TOLD, height=spec.height, width=spec.width, num_inference_steps=spec.steps,
        max_sequence_length=made.text_length, output_type="np",
        **scale,
        generator=torch.Generator().manual_seed(sample_seeds(0, 1)[0]),
    ).images[0]  # fmt: skip
    assert abs(exact * 255 - made.pixels).max() <= 0.5 + 255 * PICTURE_GAP  # ours is this, rounded
    again = drawn(load(folder), runs.TOLD)[1]
    assert abs(again - made.latents).max() <= 1e-5 * made.latents.abs().max()


LOGP_GAP = 1e-5


@pytest.fixture(scope="module")
def written_run(
    folders: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], Path]:
    @functools.cache
    def made(name: str, lora: bool) -> Path:
        data = runs.writes(tiny(name, folders), lora, {"name": "grpo"})
        return runs.make(data, tmp_path_factory.mktemp("written") / "run").path

    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["qwen2", "qwen2.5-vl"])
def test_log_probs_and_responses_of_plain_transformers(
    name: str, form: str, folders: Path, written_run: Callable[[str, bool], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    lora, flags = FORMS[form]
    model = tiny(name, folders)
    run = written_run(name, lora)
    folder = export(run, tmp_path / "out", *flags)
    trained, exported = load(run), load(folder)
    capsys.readouterr()
    left = as_the_card_says(folder, monkeypatch)
    printed = capsys.readouterr().out.removesuffix("\n")
    seen = [folder / "example.png"] if model.sees else []
    asked = "how many dots?" if model.sees else "what is 3 + 4?"
    assert [printed] == trained.sample(asked, images=seen) == exported.sample(asked, images=seen)
    writer = writing(trained.model)
    trace = trace_of(writer, model.prompts, [0, 1, 1, 2])
    with torch.no_grad():
        ours = writer.logp(trace, 1.0).logp
        theirs = padded_logp(left["model"], trace, 1.0, writer.suppressed)
        base = padded_logp(model.plain(), trace, 1.0, writer.suppressed)
        again = writing(exported.model).logp(trace, 1.0).logp
    assert (ours - base).abs().max() > 0.1  # training has moved it
    assert (ours - theirs).abs().max() <= LOGP_GAP  # measured: 4.3e-6
    assert (ours - again).abs().max() <= LOGP_GAP
    names = {file.name for file in folder.iterdir()}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert ("preprocessor_config.json" in names) == model.sees
    assert ("adapter_config.json" in names) == (form == "lora") != ("config.json" in names)


@pytest.mark.parametrize("trunk, lora", [("copy", False), ("lora", True)])
@pytest.mark.parametrize("flags", [[], ["--merged"]], ids=["plain", "merged"])
def test_a_critic_stays_behind(
    trunk: str, lora: bool, flags: list[str], folders: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open

    model = tiny("qwen2", folders)
    algorithm = {"name": "ppo", "critic": {"trunk": trunk}}
    run = runs.make(runs.writes(model, lora, algorithm), tmp_path / "run")
    assert any(name.startswith("beside/") for name in run.load(4)[0])
    folder = export(run.path, tmp_path / "out", *flags)
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        names = list(opened.keys())
    assert names and not any("critic" in name or "value" in name for name in names)
    if not lora or flags:
        with safe_open(model.folder / "model.safetensors", "pt") as opened:
            assert set(names) == set(opened.keys())


# Which weights


@pytest.fixture(scope="module")
def run(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full fine-tune with averaged weights and two checkpoints."""
    data = runs.draws("sd3", pipeline("sd3", folders), lora=False)
    return runs.make(data, tmp_path_factory.mktemp("chosen") / "run", 0.01).path


@pytest.fixture(scope="module")
def lora_run(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = runs.draws("sd3", pipeline("sd3", folders), lora=True)
    data["learner"] = {}
    return runs.make(data, tmp_path_factory.mktemp("chosen") / "run").path


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = (folder / "transformer").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "flags, step, table",
    [([], 4, "ema"), (["--weights", "current"], 4, "current"), (["--step", "2"], 2, "ema")],
)
def test_the_weights_requested(
    run: Path, flags: list[str], step: int, table: str, tmp_path: Path
) -> None:
    from gesso.track.run_folder import RunFolder

    found = weights_in(export(run, tmp_path / "out", *flags))
    state, _ = RunFolder(run).load(step, f"{table}/")
    assert len(found) - len(state) == 1  # a table of positions, which is not trained
    assert all(torch.equal(found[n.removeprefix(f"{table}/")], t) for n, t in state.items())
    told = (tmp_path / "out" / "README.md").read_text()
    assert ("These are the averaged" in told) == (table == "ema")
    assert f"for {step} of 100 steps" in told
    assert ("These results are for the averaged weights" in told) == (table == "current")


def test_shards_with_an_index(run: Path, tmp_path: Path) -> None:
    one = export(run, tmp_path / "one")
    several = export(run, tmp_path / "several", "--shard-size", "20KB")
    files = sorted(file.name for file in (several / "transformer").glob("*.safetensors"))
    assert len(files) > 2 and all("-of-" in name for name in files)
    index = json.loads((several / "transformer" / INDEX).read_text())
    assert sorted(set(index["weight_map"].values())) == files
    first, second = weights_in(one), weights_in(several)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


INDEX = "diffusion_pytorch_model.safetensors.index.json"


def test_another_precision(run: Path, lora_run: Path, folders: Path, tmp_path: Path) -> None:
    half = ["--dtype", "bfloat16"]
    folder = export(run, tmp_path / "whole", *half, "--shard-size", "20KB")
    found = weights_in(folder)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    index = json.loads((folder / "transformer" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert json.loads((folder / "text_encoder" / "config.json").read_text())["dtype"] == "bfloat16"
    adapter = export(lora_run, tmp_path / "lora", *half)
    from diffusers import StableDiffusion3Pipeline
    from safetensors import safe_open

    with safe_open(adapter / "pytorch_lora_weights.safetensors", "pt") as file:
        assert file.get_tensor(next(iter(file.keys()))).dtype == torch.bfloat16
    absent = {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(folders / "sd3", **absent)
    pipe.load_lora_weights(adapter)  # alpha is in the header, which rounding must not lose
    assert pipe.transformer.peft_config["default_0"].lora_alpha == 12


# The card


def test_the_card_is_one_that_the_hub_reads(run: Path, lora_run: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard
    from PIL import Image

    folder = export(lora_run, tmp_path / "signs-rl")
    told = ModelCard.load(folder / "README.md")
    assert told.data.library_name == "diffusers" and told.data.pipeline_tag == "text-to-image"
    assert told.data.tags == ["gesso", "reinforcement-learning", "flow-grpo", "lora"]
    assert told.data.base_model is None  # a folder of this machine is nothing to the hub
    text = told.text
    assert text.strip().startswith("# signs-rl\n\nA tiny one, for tests.")
    assert "| reward | 0.250 | 0.750 |" in text.replace("jpeg-compressibility", "reward")
    assert "rank 4 and alpha 12" in text and "jpeg-compressibility" in text
    for library in ("gesso", "torch", "diffusers", "transformers", "peft"):
        assert re.search(rf"{library} \d", text), library
    for name, digest in re.findall(r"^\| (\S+\.safetensors) \| [\d,]+ \| `(\w+)` \|$", text, re.M):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        break
    else:
        raise AssertionError("no hash")
    for file in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert Image.open(folder / file).width > 100
    assert "2. oak" in text and (folder / "recipe.toml").is_file()
    whole = ModelCard.load(export(run, tmp_path / "whole") / "README.md")
    assert "lora" not in whole.data.tags and "All weights of" in whole.text


def test_the_front_matter_names_a_base_of_the_hub(tmp_path: Path) -> None:
    import yaml

    recipe = build.recipe("sd35-ocr")
    trained = Trained(ModelSource("run", recipe), SD3)  # the class: without weights
    facts = card.CardFacts(trained, tmp_path, False, [], {}, {})
    told = yaml.safe_load(card._front(facts).strip("-"))
    assert told["base_model"] == recipe.model.path == "stabilityai/stable-diffusion-3.5-medium"
    assert told["base_model_relation"] == "adapter" and "license" not in told
    assert "](https://huggingface.co/stabilityai/" in card._base(recipe)


def test_an_adapter_of_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its card finds the base wherever Gesso is installed, and names no path of this machine."""
    data = runs.draws("sd3", Path("zoo:signs"), lora=True, height=32, width=96, text_length=0)
    run = runs.make(data, tmp_path / "run").path
    folder = export(run, tmp_path / "out")
    assert str(Path(gesso.__file__).parent) not in (folder / "README.md").read_text()
    left = as_the_card_says(folder, monkeypatch)
    ours = load(run).sample(runs.TOLD)[0]
    assert abs(np.asarray(left["image"]).astype(int) - np.asarray(ours)).max() <= 1


def test_damaged_samples_cost_the_card_nothing_else(run: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(run, torn)
    (torn / "samples" / "000004" / "000.png").write_bytes(b"\x89PNG\r\n\x1a\nnonsense")
    (torn / "samples" / "000000" / "001.png").unlink()
    with (torn / "samples" / "000004.jsonl").open("a") as file:
        file.write('{"half":')
    text = (export(torn, tmp_path / "out") / "README.md").read_text()
    assert "2. oak" in text and (tmp_path / "out" / "samples.png").is_file()
    shutil.rmtree(torn / "samples")
    text = (export(torn, tmp_path / "none") / "README.md").read_text()
    assert "## Samples" not in text and "a photo of a cat" in text


def test_what_a_model_said_cannot_break_the_card(
    written_run: Callable[[str, bool], Path], tmp_path: Path
) -> None:
    text = (export(written_run("qwen2.5-vl", True), tmp_path / "out") / "README.md").read_text()
    assert "````\n<b>two</b> | `dots` ```\n````" in text  # a fence longer than any inside
    assert card.md("a|b <script> *x* `y`") == r"a\|b \<script\> \*x\* \`y\`"
    assert "![image 1 of the prompt](prompt-1-1.png)" in text
    assert (tmp_path / "out" / "prompt-1-1.png").is_file()


def test_a_template_that_needs_more_than_a_prompt(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card's lines still run, and say what is missing from them."""
    data = runs.writes(tiny("qwen2", folders), True, {"name": "grpo"})
    data["data"]["template"] = "{{ content }} about {{ topic }}"
    folder = export(runs.make(data, tmp_path / "run").path, tmp_path / "out")
    text = (folder / "README.md").read_text()
    assert "were formatted with `data.template` of the recipe" in text
    assert "gesso sample" not in text and '"content": "what is 3 + 4?"' in text
    assert as_the_card_says(folder, monkeypatch)["response"] is not None


def test_base_and_license_of_the_card(tmp_path: Path) -> None:
    assert card.license_of("zoo:signs") == "apache-2.0"
    assert card.license_of(str(tmp_path)) is None
    (tmp_path / "README.md").write_text("---\nlicense: openrail++\n---\n\n# Base\n")
    assert card.license_of(str(tmp_path)) == "openrail++"
    assert card._is_hub_name("stabilityai/stable-diffusion-3.5-medium")
    assert not any(
        card._is_hub_name(p) for p in ("zoo:signs", "/data/x", "./a/b", "~/a", str(tmp_path))
    )


def test_an_export_goes_on_training(lora_run: Path, run: Path, tmp_path: Path) -> None:
    """By the overrides that the card names."""
    cases = {"model.lora.path": export(lora_run, tmp_path / "l")}
    cases["model.path"] = export(run, tmp_path / "w")
    for key, folder in cases.items():
        assert f"DIR/recipe.toml {key}=DIR" in (folder / "README.md").read_text()
        recipe = build.recipe(str(folder / "recipe.toml"), [f"{key}={folder}"])
        source = lora_run if "lora" in key else run
        begun, trained = build.model(recipe).policy.tensors(), load(source).model.policy.tensors()
        assert all(torch.equal(begun[name], trained[name]) for name in trained)


# Whole or not at all


def sentence(capsys: pytest.CaptureFixture, *arguments: str | Path) -> str:
    capsys.readouterr()
    assert cli.main([str(a) for a in arguments]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("error: ") and "\n" not in told.splitlines()[-1]
    return told.splitlines()[-1]


def test_what_cannot_be_exported(
    run: Path, lora_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def said(source: Path, *flags: str, to: Path = tmp_path / "out") -> str:
        found = sentence(capsys, "export", source, "--to", to, "--quiet", *flags)
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
        return found

    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    file.touch()
    (full / "kept.txt").write_text("mine")
    for taken in (full, file):
        assert f"export folder {taken} already exists; choose" in said(run, to=taken)
    assert (full / "kept.txt").read_text() == "mine"
    assert "has no checkpoint of step 3; expected one of 2, 4" in said(run, "--step", "3")
    assert "has no averaged weights" in said(lora_run, "--weights", "ema")
    assert 'an integer with KB, MB or GB), got "5 gigs"' in said(run, "--shard-size", "5 gigs")
    assert 'expected dtype float32, bfloat16 or float16, got "int3"' in said(run, "--dtype", "int3")
    assert "is not a run folder" in said(tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(run / "config.toml", bare / "config.toml")
    assert "has no checkpoint yet" in said(bare)
    with pytest.raises(UserError, match="demo is not a run"):
        load("demo").export(tmp_path / "out")


def test_a_checkpoint_that_cannot_be_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(run, torn)
    file = torn / "checkpoints" / "000004" / "learner.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    told = sentence(capsys, "export", torn, "--to", tmp_path / "out", "--quiet")
    assert "checkpoints/000004/learner.safetensors cannot be read: " in told
    assert "choose another step: 2 (--step 2)" in told and not (tmp_path / "out").exists()
    export(torn, tmp_path / "out", "--step", "2")  # the one before it still can
    config = (torn / "config.toml").read_text()
    (torn / "config.toml").write_text(config.replace(str(run.parent), "elsewhere"))


def test_a_full_disk_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(card, "write", full)  # the last thing that is written
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"could not export to .*out: .*No space left.*free disk"):
        load(run).export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"] and not list((tmp_path / "out").iterdir())
    monkeypatch.undo()
    (tmp_path / ".out.writing").mkdir()  # of an export that was killed
    (tmp_path / ".out.writing" / "old").touch()
    assert load(run).export(tmp_path / "out") == tmp_path / "out"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "old").exists()


def test_four_bits_are_merged_into_the_full_weights_only(
    lora_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    quantized = tmp_path / "run"
    shutil.copytree(lora_run, quantized)
    config = quantized / "config.toml"
    config.write_text(config.read_text().replace("[model]\n", '[model]\nquantize = "nf4"\n'))
    merging: list[str | Path] = [
        "export",
        quantized,
        "--to",
        tmp_path / "out",
        "--merged",
        "--quiet",
    ]
    told = sentence(capsys, *merging)
    assert "is in 4 bits" in told and "--set model.quantize=none" in told
    assert cli.main([*map(str, merging), "--set", "model.quantize=none"]) == 0
    plain = weights_in(export(lora_run, tmp_path / "plain", "--merged"))
    found = weights_in(tmp_path / "out")
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    again = load(tmp_path / "out")  # its recipe says 4 bits, its weights are whole
    assert again.recipe.model.quantize is None


@pytest.mark.slow
def test_a_model_of_the_hub_keeps_its_processor(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no folder to copy from, only what the hub's cache holds."""
    cache = tmp_path / "hub" / "models--owner--tiny"
    shutil.copytree(tiny("qwen2.5-vl", folders).folder, cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    section = TokenModel(path="owner/tiny", lora=Lora(rank=2, alpha=2))
    VisionLanguage(section, 0).save(tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names >= {"preprocessor_config.json", "tokenizer.json", "generation_config.json"}


def edits(data: dict[str, Any], source: tuple[int, int], folder: Path) -> Path:
    """A run whose evaluation edits one image of this height and width."""
    run = runs.make(data, folder)
    prompt = Prompt("make it red", images=(tokens.picture(*source),))
    grey: np.ndarray = np.full((32, 32, 3), 90, dtype=np.uint8)
    for step in (0, *runs.STEPS):
        run.save_samples(step, [Sample(prompt, grey, 7)], [Score(0.5)])
    return run.path


def as_gesso(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Asserts that the card's code gives Gesso's image, and returns its shape."""
    found = np.asarray(as_the_card_says(folder, monkeypatch)["image"]).astype(int)
    (expected,) = load(run).sample("make it red", images=[folder / "example.png"])
    assert abs(found - np.asarray(expected)).max() <= 1
    text = (folder / "README.md").read_text()
    assert "Gesso generates the same sample" in text and "--image example.png" in text
    return found.shape


def test_the_card_of_a_model_that_edits(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLUX.2's pipeline shrinks only images above 1024². The sheet has the sources."""
    data = runs.draws("flux2-klein", pipeline("flux2-klein", folders), True, height=80, width=80)
    data["model"] |= {"text_length": 64}
    run = edits(data, (96, 100), tmp_path / "run")
    folder = export(run, tmp_path / "out")
    assert as_gesso(run, folder, monkeypatch) == (80, 80, 3)
    with Image.open(folder / "samples.png") as sheet:
        assert round(sheet.width / 252) == 3  # source, first and last step


@pytest.mark.parametrize("name", ["kontext", "qwen-edit"])
def test_an_edit_of_plain_diffusers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pipelines resize to 1024² unless told not to. The output has the source's ratio."""
    layers = {"num_layers": 1, "num_single_layers": 1} if name == "kontext" else {}
    model = editors.build(name, tmp_path / name, **layers)
    data = runs.draws(name, model, True, height=32, width=32, match_input=True)
    run = edits(data, (20, 42), tmp_path / "run")
    assert as_gesso(run, export(run, tmp_path / "out"), monkeypatch) == (24, 44, 3)
