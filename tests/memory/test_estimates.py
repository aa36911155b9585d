"""What an estimate counts, and what `gesso check --memory` says."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from gesso import build, cli, fitting
from gesso.check import memory
from gesso.config import Recipe
from gesso.estimate import built_on_meta, estimate, with_data
from gesso.memory import meta
from gesso.models.flow.kontext import Kontext
from gesso.types import Prompt, Size, UserError
from gesso.weights import folded_linear
from tests import pipelines
from tests import tokens as writers
from tests.memory.test_peaks import shallow  # noqa: F401 a pipeline
from tests.typed import sure

GIB = 2**30
VLLM = ["sampler.engine=vllm"]


def test_copies_cost_a_full_fine_tune_and_no_lora() -> None:
    full = estimate(build.recipe("demo", ["algorithm.beta=0.1"])).lasting
    lora = estimate(build.recipe("demo", ["algorithm.beta=0.1", "model.lora.rank=4"])).lasting
    assert full["copies of the trained weights"] == 3_479_840 * 4
    assert "copies of the trained weights" not in lora  # its reference is the adapter switched off
    assert lora["optimizer"] < full["optimizer"] / 50


DOUBTED = 'reward=[{name="ocr"}, {name="sign-colour", weight=0.0}]'
WITH_MORE_PASSES = {
    "demo-dgpo": ([], 2),
    "demo-awm": (["algorithm.updates=2"], 2),
    "demo-distil": (["algorithm.teachers.other.path=x"], 2),
    "demo": (["algorithm.beta=0.1", "algorithm.gate.share=0.1", DOUBTED], 1),
}


@pytest.mark.parametrize("name", WITH_MORE_PASSES)
def test_an_update_has_what_its_algorithm_prepares(name: str, shallow: Path) -> None:  # noqa: F811
    """Old losses, preferences of groups, steps of two teachers, doubts of a gate; and copies of the
    weights."""
    more, copies = WITH_MORE_PASSES[name]
    changes = [f"model.path={shallow}", "learner.micro_batch=4", *more]
    found = estimate(build.recipe(name, changes))
    assert found.lasting["copies of the trained weights"] == copies * found.copy


def test_folding_takes_the_adapted_weights_once_more(shallow: Path) -> None:  # noqa: F811
    """In half precision, as a GPU has it by default."""

    common = [f"model.path={shallow}", "model.lora.rank=4"]

    def decoding(*changes: str) -> int:
        recipe = build.recipe("demo", [*common, "sampler.batch=32", *changes])
        return estimate(recipe).passing["decoding"]

    half = "model.dtype=bfloat16"
    whole = build.recipe("demo", [*common, half, "model.fold=true", "model.device=cpu"])
    model = build.model(whole)
    with model.policy.folded(), model.policy.using("current"):
        matrices = sum(matrix.nbytes for matrix in model.policy.folding.matrices["current"])
    assert matrices > 100_000
    separate = decoding(half, "model.fold=false")
    assert decoding(half, "model.quantize=nf4") == separate
    assert decoding(half) == separate + matrices
    in_float32 = decoding()  # on a CPU, unless folding is requested
    assert decoding("model.fold=true") == in_float32 + 2 * matrices


def test_an_update_folds_an_old_policy_too(shallow: Path) -> None:  # noqa: F811
    common = [
        f"model.path={shallow}",
        "model.lora.rank=4",
        "model.fold=true",
        'algorithm={name="diffusion-nft"}',
    ]
    with patch.object(folded_linear, "fold", wraps=folded_linear.fold) as fold:
        estimate(build.recipe("demo", [*common, "learner.micro_batch=1", "sampler.batch=1"]))
    assert fold.call_count == 2 + 1 + 1  # for an update, a denoising step and decoding


def test_compiled_blocks_are_estimated_to_save_less(shallow: Path) -> None:  # noqa: F811
    """The outputs of matmuls and attention, not those of norms, modulations and activations."""
    common = ["model.lora.rank=4", "model.dtype=bfloat16", "sampler.batch=8"]
    common += [f"model.path={shallow}"]
    plain, compiled = (
        estimate(build.recipe("demo", [*common, f"model.compile={said}"]))
        for said in ("false", "true")
    )
    update = "update with gradients"
    assert compiled.passing[update] < plain.passing[update]
    assert compiled.lasting == plain.lasting
    assert compiled.passing["denoising"] == pytest.approx(plain.passing["denoising"], rel=0.02)


@pytest.mark.parametrize("branches", [1, 2])
def test_per_sample_gradients_are_stored_and_sampling_saves_what_an_update_would(
    branches: int,
    shallow: Path,  # noqa: F811
) -> None:
    both = ["both", "conditional"][branches == 1]
    common = [f"model.path={shallow}"]
    common += ["model.lora.rank=16", "model.dtype=bfloat16", "algorithm.guidance=3.0"]
    common += [f"algorithm.guidance_gradient={both}", "sampler.batch=8", "learner.micro_batch=8"]
    two, one = (
        estimate(build.recipe("demo", [*common, f"algorithm.one_pass={said}"]))
        for said in ("false", "true")
    )
    size = two.copy  # of the adapter, in float32
    assert one.lasting["stored samples"] - two.lasting["stored samples"] == 96 * size
    drawing = one.passing["denoising"]  # a batch gathers where its gradients will be stored
    updating = two.passing["update with gradients"] - size
    assert drawing == pytest.approx(updating, rel=0.1) and drawing > two.passing["denoising"]
    told = one.passing["update with gradients"]  # weighed, twice as a vector, and the gradient
    assert told == pytest.approx(4 * size, rel=0.01)


def test_sampling_in_one_pass_counts_backward(shallow: Path) -> None:  # noqa: F811
    """Which is what takes most where activations are computed again."""
    common = [f"model.path={shallow}"]
    common += ["model.lora.rank=16", "model.dtype=bfloat16", "algorithm.guidance=3.0"]
    common += ["sampler.batch=8", "learner.micro_batch=8", "model.gradient_checkpointing=true"]
    two, one = (
        estimate(build.recipe("demo", [*common, f"algorithm.one_pass={said}"]))
        for said in ("false", "true")
    )
    updating = two.passing["update with gradients"] - two.copy
    assert one.passing["denoising"] == pytest.approx(updating, rel=0.1)


def test_check_says_what_it_takes(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["check", "demo", "--memory"]) == 0
    out = capsys.readouterr().out
    assert "memory   about 503 MB at the peak" in out
    assert "each reference, old or averaged policy is a copy of 14 MB" in out


def test_memory_of_a_model_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"expected a diffusers pipeline folder"):
        estimate(build.recipe("demo", ["model.path=./nowhere"]))


def test_memory_of_sizes_that_do_not_fit() -> None:
    for change, sentence in (
        ("model.height=33", "zoo:signs does not support 33×96 pixels: height and width must be"),
        ("model.text_length=9999", "model.text_length = 9999, but zoo:signs supports 0 to 512"),
    ):
        with pytest.raises(UserError, match=sentence):
            estimate(build.recipe("demo", [change]))


def test_a_separate_critic_has_its_own_vision_tower() -> None:
    """A reference copies the policy, not what is trained beside it."""
    small = ["model.max_prompt=32", "algorithm.max_tokens=8", "learner.micro_tokens=64"]
    small += ["sampler.batch=2", "eval.prompts=1"]
    without = estimate(build.recipe("demo-vlm", small))
    beside = estimate(build.recipe("demo-vlm-ppo", small))
    assert beside.copy == without.copy == without.lasting["optimizer"] // 2
    assert beside.copy < beside.lasting["optimizer"] // 2
    assert beside.host["image features, up to"] == 8 * GIB


def test_prompts_too_short_for_an_image(tmp_path: Path) -> None:
    folder = writers.build("qwen2.5-vl", tmp_path / "m")
    found = estimate(
        build.recipe("demo-vlm", [f"model.path={folder}", "model.max_prompt=4", "sampler.batch=2"])
    )
    assert set(found.passing) == {"update with gradients", "decoding"}


def test_another_engine_has_separate_memory(tmp_path: Path) -> None:
    folder = writers.build("qwen2", tmp_path / "m")
    common = [f"model.path={folder}", "model.name=causal", "model.max_prompt=32"]
    common += on("hub:a/b@train", "hub:a/b@test")  # the demo's questions have images
    recipe = build.recipe("demo-vlm", [*common, *VLLM])
    assert set(estimate(recipe).passing) == {"update with gradients"}
    told = [text for _, text in memory(recipe)]
    assert "vLLM reserves 40% of the device memory while sampling" in told
    apart = ["cluster.workers=1", "cluster.samplers=1"]
    told = [text for _, text in memory(build.recipe("demo-vlm", [*common, *apart, *VLLM]))]
    learner, sampler = (i for i, text in enumerate(told) if " at the peak in each " in text)
    assert told[learner:sampler][2].startswith("temporary, one at a time: update with gradients")
    assert "optimizer" in told[learner + 1] and "optimizer" not in told[sampler + 1]
    assert not any(text.startswith("temporary") for text in told[sampler:])
    assert told.index("vLLM reserves 40% of the device memory") > sampler


def test_a_full_fine_tune_of_a_language_model_keeps_a_copy_and_a_lora_none(tmp_path: Path) -> None:
    folder = writers.build("qwen2", tmp_path / "m")
    common = [f"model.path={folder}", "model.name=causal", "algorithm.kl.beta=0.1"]
    common += ["model.max_prompt=32", "learner.micro_tokens=64", "sampler.batch=2"]
    full = estimate(build.recipe("demo-vlm", common)).lasting
    lora = estimate(build.recipe("demo-vlm", [*common, "model.lora.rank=4"])).lasting
    assert full["copies of the trained weights"] == full["optimizer"] / 2
    assert "copies of the trained weights" not in lora


def test_memory_of_decoding_besides_the_weights(tmp_path: Path) -> None:
    """With a LoRA that is folded, the adapted weights once more; with one that lies beside them,
    nothing; trained whole, what is joined."""
    folder = writers.build("qwen2", tmp_path / "m")
    common = [f"model.path={folder}", "model.name=causal"]
    common += ["model.max_prompt=32", "learner.micro_tokens=64", "sampler.batch=2"]
    layers = {n: t.numel() for n, t in load_file(folder / "model.safetensors").items()}
    adapted = sum(size for name, size in layers.items() if name.endswith("_proj.weight"))
    apart = ("o_proj.weight", "down_proj.weight")
    joined = adapted - sum(size for name, size in layers.items() if name.endswith(apart))

    def told(*more: str) -> int:
        return estimate(build.recipe("demo-vlm", [*common, *more])).passing["decoding"]

    lora = "model.lora.rank=4"
    for dtype, size, own in (("bfloat16", 2, "true"), ("float32", 4, "false")):
        some = [lora, f"model.dtype={dtype}"]
        beside = told(*some, "model.fold=false")
        assert told(*some, "model.fold=true") == beside + size * adapted
        assert told(*some) == told(*some, f"model.fold={own}")
    with patch("gesso.memory.tokens._joined", return_value=[]):
        without = told()
    assert told() == without + 4 * joined


def test_an_operator_is_remembered_with_all_that_its_result_depends_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meta._Live, "results", {})
    x = torch.empty(4, dtype=torch.int32, device="meta")
    with meta._Live(set()):
        for _ in range(2):
            assert (x + 1).dtype == torch.int32 and (x + 1.0).dtype == torch.float32
            for dtype in (torch.int64, torch.float64):
                assert x.sum(dtype=dtype).dtype == dtype
            view = torch.ops.aten._unsafe_view(x, [2, 2])  # though it says that it is none
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert len(meta._Live.results) == 4


@pytest.fixture(scope="module")
def small_writer(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = writers.build("qwen2", tmp_path_factory.mktemp("writer") / "m")
    changes = [f"model.path={folder}", "model.name=causal", "model.max_prompt=256"]
    return [*changes, "learner.micro_tokens=64", "sampler.batch=2", "algorithm.max_tokens=8"]


def on(*paths: Path | str) -> list[str]:
    """Trains on one file and evaluates on the other."""
    return [f"data.{part}={path}" for part, path in zip(("train", "eval"), paths, strict=True)]


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_prompts_are_as_long_as_the_longest_of_the_data(
    small_writer: list[str], tmp_path: Path
) -> None:
    short = written(tmp_path, "short.txt", "how many\n")
    long = written(tmp_path, "long.txt", f"how many\n{'a' * 100}\n{'b' * 999}\n")
    recipe = build.recipe("demo-vlm", [*small_writer, *on(short, long)])
    assumed = with_data(recipe)
    model = build.model(recipe)
    tokens = model.length(Prompt("a" * 100))
    assert 100 < tokens < 256 < model.length(Prompt("b" * 999))  # which is skipped
    assert assumed.prompts == f"prompts of at most {tokens} tokens, as in {short} and {long}"
    stated = build.recipe("demo-vlm", [*small_writer, f"model.max_prompt={tokens}"])
    assert estimate(assumed.recipe) == estimate(stated)
    assert estimate(stated).peak < estimate(recipe).peak
    assert any(assumed.prompts in text for _, text in memory(recipe))
    assert with_data(build.recipe("demo")).prompts == ""  # pads all prompts to one length


def test_data_that_is_not_here_is_not_read(small_writer: list[str], tmp_path: Path) -> None:
    here = written(tmp_path, "here.txt", "how many\n")
    for path, why in (("hub:a/b@train", "is not read"), ("./no.txt", "does not exist")):
        recipe = build.recipe("demo-vlm", [*small_writer, *on(here, path)])
        told = f"prompts of model.max_prompt = 256 tokens: {path} {why}"
        assert with_data(recipe) == (recipe, told, None)


@pytest.fixture(scope="module")
def small_editor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FLUX.2, whose prompts may have any number of input images, and files of such prompts. Images
    above the area of an output are shrunk to it."""
    root = tmp_path_factory.mktemp("editor")
    pipelines.build("flux2-klein", root / "m", num_layers=1, num_single_layers=1)
    for name, size in (("wide", (96, 64)), ("small", (64, 64)), ("large", (512, 256))):
        Image.new("RGB", size).save(root / f"{name}.png")
    files: dict[str, list[list[str]]] = {
        "none": [[]],
        "one": [[], ["wide"]],
        "two": [["small", "small"], ["wide"], []],
        "large": [["small"], ["large"]],
    }
    for name, prompts in files.items():
        rows = [{"prompt": "a", "images": [f"{i}.png" for i in images]} for images in prompts]
        written(root, f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return root


def editing(folder: Path, train: str, held_out: str = "none", *changes: str) -> Recipe:
    """Trains on one file and evaluates on the other."""
    words = [f"model.path={folder / 'm'}", "model.height=96", "model.width=128", "data.groups=1"]
    words += ["model.text_length=16", "sampler.batch=2", "learner.micro_batch=2"]
    words += ["eval.prompts=1", "algorithm.group=2", "algorithm.updates=1", "model.lora.rank=2"]
    paths = [p if p.startswith("hub:") else f"{folder / p}.jsonl" for p in (train, held_out)]
    return build.recipe("flux2-klein-pickscore", [*words, *on(*paths), *changes])


IMAGES = {"none": (0, 0), "one": (1, 384), "two": (2, 512), "large": (1, 741)}
"""Of the largest prompt of a file, and their tokens."""


def test_prompts_have_the_input_images_of_the_largest_of_the_data(small_editor: Path) -> None:
    before = 0
    for name, (count, tokens) in IMAGES.items():
        recipe = editing(small_editor, name)
        assumed = with_data(recipe)
        text = f"at most {count} input image{'s' if count > 1 else ''} per prompt"
        paths = " and ".join(dict.fromkeys(f"{small_editor / n}.jsonl" for n in (name, "none")))
        said = f"{text if count else 'prompts without input images'}, as in {paths}"
        assert assumed.prompts == said and assumed.recipe == recipe
        model = built_on_meta(recipe, assumed.images)[2]
        source = sure(torch.Tensor, model.blank(1, Size(96, 128)).source)
        assert source.shape[1] == tokens
        assert memory(recipe)[3] == ("", f"assuming {said}")
        found = estimate(recipe, images=assumed.images)
        assert (found == estimate(recipe)) == (count == 0)
        assert min(before, found.passing["denoising"]) == before < found.peak
        before = found.passing["denoising"]
    held_out = with_data(editing(small_editor, "none", "two"))
    assert held_out.images == [(64, 64)] * 2


def test_input_images_of_data_that_is_not_here(small_editor: Path) -> None:
    """As few as a prompt may have."""
    recipe = editing(small_editor, "two", "hub:a/b@test")
    assumed = with_data(recipe)
    said = "prompts without input images: hub:a/b@test is not read"
    assert assumed == (recipe, said, None)
    assert any(text == f"assuming {said}" for _, text in memory(recipe))
    kontext = with_data(build.recipe("kontext-pickscore", on("./no.jsonl", "./no.jsonl")))
    assert kontext.prompts == "1 input image per prompt: ./no.jsonl does not exist"


class Late(Kontext):
    """A user's model whose number of input images depends on the instance."""

    @property
    def input_images(self) -> range:  # type: ignore[override]
        return range(1, 3)


def test_input_images_of_a_users_model() -> None:
    name = "tests.memory.test_estimates:Late"
    late = with_data(build.recipe("kontext-pickscore", [*on("./no", "./no"), f"model.name={name}"]))
    assert late.prompts.startswith("prompts without input images: ./no")


def test_input_images_leave_less_memory_for_batches(
    small_editor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = [editing(small_editor, n, "none", "algorithm.group=64") for n in ("none", "large")]
    monkeypatch.setattr(fitting, "usable", lambda card: 50e6)
    few, many = (fitting.fit(recipe, 1) for recipe in recipes)
    assert many.settings["sampler.batch"] < few.settings["sampler.batch"]
    assert many.prompts.startswith("at most 1 input image per prompt, as in ")


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("a.jsonl", "{", "a.jsonl"),
        ("a.txt", "", "a.txt is empty; expected one row per prompt"),
        ("a.txt", "a" * 999, "more than model.max_prompt = 256"),
        ("a.csv", "a", "expected .txt, .jsonl, .json or .parquet, got .csv"),
    ],
)
def test_broken_data_is_one_sentence(
    name: str, text: str, sentence: str, small_writer: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    path = written(tmp_path, name, text)
    words = ["check", "demo-vlm", "--memory", "--quiet", *small_writer, *on(path, path)]
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and sentence in told and told.count("\n") == 1


def test_quantizing_needs_lora_and_a_cuda_device() -> None:
    with pytest.raises(UserError, match="freezes the weights, so only a LoRA can be trained"):
        build.recipe("demo", ["model.quantize=nf4"])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="requires a CUDA device, got cpu"):
            build.model(build.recipe("demo", ["model.quantize=nf4", "model.lora.rank=4"]))
