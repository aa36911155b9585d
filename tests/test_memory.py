"""What `gesso check` says of memory, held against what torch's allocator hands out."""

from __future__ import annotations

import gc
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gesso import build, cli, tables
from gesso.check import memory, size_of
from gesso.config import PACKAGE, Lora, Recipe, TokenModel
from gesso.memory import estimate, flow
from gesso.models.tokens.causal import Causal
from gesso.models.tokens.vision_language import VisionLanguage
from gesso.run import assemble
from gesso.types import Picture, Prompt, Score, UserError
from tests import tokens as writers
from tests.shapes import WRITERS, write_configs, write_writer
from tests.typed import drawing, writing

GIB = 2**30
GUIDE = PACKAGE.parent / "docs/guide.md"


def measured_peak(recipe: Recipe) -> int:
    """Most bytes that torch has handed out at once, from loading to the batch after two updates."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        job = assemble(recipe)
        try:
            rollout, _ = job.cluster.collect(0).result()
            name = recipe.reward[0].name
            scores = [Score(i % 5, {name: i % 5}) for i in range(len(rollout.samples))]
            for step in range(2):  # only from the second on Adam has its state
                job.learner.update(replace(rollout, scores=scores), step)
            job.cluster.collect(1).result()
        finally:
            job.close()
    # As torch recorded them; its own tables of events, or a trace in a file, take far longer.
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(changes))


# Half of the demo's sizes: still several full micro-batches, the second of which meets gradients.
# The reward has no say: scores are made up, and rewards live in processes of their own.
HALF = [
    "data.groups=4", "learner.micro_batch=48", "sampler.batch=16", "eval.prompts=1",
    'reward=[{name="jpeg-compressibility"}]',
]  # fmt: skip
VARIANTS = {
    "demo": [],
    "checkpointed": ["model.gradient_checkpointing=true"],
    "lora": ["model.lora.rank=16", "algorithm.beta=0.1", "learner.ema.every=1"],
    "reference": ["algorithm.beta=0.1", "learner.ema.every=1"],
    "guided": ["algorithm.guidance=3.0", "learner.micro_batch=24"],
    "nft": [
        'algorithm={name="diffusion-nft", group=12, steps=6, times=2}',
        "data.groups=8",  # two times a sample, not three steps: a micro-batch of 96 twice
        "learner.micro_batch=96",
    ],
    "guard": ['algorithm={name="grpo-guard", group=12, steps=6, guidance=1.0}'],
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_estimate_meets_the_measured_peak(variant: str) -> None:
    recipe = build.recipe("demo", [*HALF, *VARIANTS[variant]])
    told, seen = estimate(recipe).peak, measured_peak(recipe)
    assert told == pytest.approx(seen, rel=0.05), f"{told / 1e6:.0f} MB for {seen / 1e6:.0f} MB"


# Models that write: `small` is wide enough for its activations to count, the others see.
WRITING = {
    "full": ("small", []),
    "checkpointed": ("small", ["model.gradient_checkpointing=true"]),
    "lora": ("small", ["model.lora.rank=8"]),
    "lora, checkpointed": ("small", ["model.lora.rank=8", "model.gradient_checkpointing=true"]),
    "reference": ("small", ["algorithm.kl.beta=0.1", "learner.ema.every=1"]),
    "critic": ("small", ['algorithm={name="ppo", group=2, max_tokens=16}']),
    "critic of adapters": (
        "small",
        [
            'algorithm={name="ppo", group=2, max_tokens=16, critic={trunk="lora"}}',
            "model.lora.rank=8",
        ],
    ),
    "writing": ("small", ["sampler.batch=96", "learner.micro_tokens=64"]),
    "seeing": ("qwen2.5-vl", []),
    "seeing, trained too": (
        "qwen2.5-vl",
        [
            "model.train_vision=true",
            "learner.micro_tokens=512",
        ],
    ),
    "seeing, with deepstack": ("qwen3-vl", ["model.lora.rank=4"]),
}


def small_writer(folder: Path) -> Path:
    import transformers

    tokens = writers.tokenizer()
    config = transformers.Qwen2Config(
        vocab_size=2000, hidden_size=192, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        eos_token_id=tokens.eos_token_id, bos_token_id=None, pad_token_id=tokens.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what it writes decides when slots become free
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def questions(folder: Path, seeing: bool) -> Path:
    """A hundred of one length, with pictures of one size."""
    rows = [{"problem": f"what is {i:02d} + 1?", "answer": i + 1} for i in range(100)]
    if seeing:
        for i, row in enumerate(rows):
            (folder / f"{i}.png").write_bytes(writers.picture(32, 48, i).data or b"")
            row |= {"problem": "<image>" + str(row["problem"]), "images": [f"{i}.png"]}
    file = folder / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def writing_recipe(variant: str, folder: Path) -> Recipe:
    name, changes = WRITING[variant]
    model = small_writer(folder / "m") if name == "small" else writers.build(name, folder / "m")
    asked = questions(folder, name != "small")
    kind = "causal" if name == "small" else "vision-language"
    common = [
        f"model={{name={kind!r}, path={str(model)!r}, max_prompt=1000, max_pixels=1536}}",
        "eval.prompts=1",
        f"data={{train={str(asked)!r}, eval={str(asked)!r}, groups=48}}", "sampler.batch=24",
        'algorithm={name="grpo", group=2, max_tokens=16}', "learner.micro_tokens=1024",
    ]  # fmt: skip
    recipe = build.recipe("demo-vlm", [*common, *changes])
    made = writing(build.model(recipe))
    row = json.loads(asked.read_text().splitlines()[0])
    pictures = tuple(Picture(path=folder / p) for p in row.get("images", []))
    prompt = Prompt(row["problem"].removeprefix("<image>"), images=pictures)
    return build.recipe("demo-vlm", [*common, *changes, f"model.max_prompt={made.length(prompt)}"])


@pytest.mark.slow
@pytest.mark.parametrize("variant", WRITING)
def test_the_estimate_for_writers_meets_the_measured_peak(variant: str, tmp_path: Path) -> None:
    recipe = writing_recipe(variant, tmp_path)
    told, seen = estimate(recipe).peak, measured_peak(recipe)
    assert told == pytest.approx(seen, rel=0.2), f"{told / 1e6:.1f} MB for {seen / 1e6:.1f} MB"


def test_copies_cost_a_full_fine_tune_and_no_lora() -> None:
    full = estimate(build.recipe("demo", ["algorithm.beta=0.1"])).lasting
    lora = estimate(build.recipe("demo", ["algorithm.beta=0.1", "model.lora.rank=4"])).lasting
    assert full["copies of the trained weights"] == 3_479_840 * 4
    assert "copies of the trained weights" not in lora  # its reference is the adapter switched off
    assert lora["optimizer"] < full["optimizer"] / 50


def test_folding_takes_the_adapted_weights_once_more() -> None:
    """In half precision, as a GPU has it by default; again for an old policy. It is what a run
    really holds."""

    def told(*changes: str) -> int:
        recipe = build.recipe("demo", ["model.lora.rank=4", *changes])
        section = recipe.model.model_copy(update={"device": "meta", "quantize": None})
        model = build.model(recipe.model_copy(update={"model": section}))
        found = flow.load(drawing(model), build.algorithm(recipe), recipe)
        return found.networks["weights with the LoRA in them"]

    half = "model.dtype=bfloat16"
    whole = build.recipe("demo", ["model.lora.rank=4", half, "model.fold=true", "model.device=cpu"])
    model = build.model(whole)
    with model.policy.standing():
        held = sum(layer.folded.nbytes for layer in model.policy._layers)
    assert told(half) == held > 100_000
    assert told(half, "learner.ema.every=1") == held  # one after the other
    assert told(half, 'algorithm={name="diffusion-nft"}') == 2 * held  # both in an update
    assert told(half, "model.fold=false") == told(half, "model.quantize=nf4") == 0
    assert told() == 0  # float32: of a CPU, unless it is asked for
    assert told("model.fold=true") == 2 * held


def test_check_says_what_it_takes(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["check", "demo", "--memory"]) == 0
    out = capsys.readouterr().out
    assert "memory   about 462 MB at the peak" in out
    assert "a reference, old or averaged policy is a copy of 14 MB each" in out


def test_memory_of_a_model_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"expected a diffusers pipeline folder"):
        estimate(build.recipe("demo", ["model.path=./nowhere"]))


def test_memory_of_sizes_that_do_not_fit() -> None:
    for change, sentence in (
        ("model.height=33", "pictures of 33×96 do not fit zoo:signs: height and width must be"),
        ("model.text_length=9999", "model.text_length = 9999, but zoo:signs takes 0 to 512"),
    ):
        with pytest.raises(UserError, match=sentence):
            estimate(build.recipe("demo", [change]))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    for name in ("sd35", "flux", "qwen-image"):
        write_configs(name, folder / name)
    for name in WRITERS:
        write_writer(name, folder / name)
    return folder


LARGE = ("sd35", "flux", "qwen-image", *WRITERS)
PRESETS = [name for name in tables.bundled_recipes() if name.endswith("gb")]


def model_of(recipe: str) -> str:
    return next(name for name in LARGE if recipe.startswith(name))


def test_there_are_presets_for_every_model_and_card() -> None:
    cards = {(model_of(name), name.rsplit("-", 1)[1]) for name in PRESETS}
    drawing = {(m, c) for m in LARGE[:3] for c in ("24gb", "48gb", "80gb")}
    assert cards == drawing | {(m, c) for m in WRITERS for c in ("24gb", "80gb")}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_fit_their_cards(preset: str, shapes: Path) -> None:
    """With a tenth of the card to spare for CUDA's context and the allocator's gaps; the guide
    says how much each takes."""
    found = estimate(build.recipe(preset, [f"model.path={shapes / model_of(preset)}"]))
    card = int(preset.rsplit("-", 1)[1].removesuffix("gb")) * GIB
    assert 0.4 * card < found.peak < 0.9 * card, {k: v / 1e9 for k, v in found.lasting.items()}
    assert f"| `{preset}` | {size_of(found.peak)} |" in GUIDE.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen25-vl-3b-geo3k", "qwen25-vl-7b-geo3k"])
def test_the_guide_says_what_the_recipes_themselves_take(name: str, shapes: Path) -> None:
    found = estimate(build.recipe(name, [f"model.path={shapes / model_of(name)}"]))
    assert f"| `{name}` | {size_of(found.peak)} |" in GUIDE.read_text(encoding="utf-8")


def test_sizes_of_writers_are_the_published_ones(shapes: Path) -> None:
    """In bfloat16; the adapters are counted apart, in float32."""
    published = {
        "qwen25-vl-3b": 3_754_622_976,
        "qwen25-vl-7b": 8_292_166_656,
        "qwen25-math-7b": 7_615_616_512,
    }
    for name, size in published.items():
        kind = "causal" if "math" in name else "vision-language"
        section = TokenModel(
            name=kind, path=str(shapes / name), device="meta", dtype="bfloat16", lora=Lora(rank=1)
        )
        model = (Causal if kind == "causal" else VisionLanguage)(section)
        assert sum(p.numel() for p in model.module.parameters()) - model.policy.size == size


def test_writers_in_four_bits_keep_head_and_tower(shapes: Path) -> None:
    path = f"model.path={shapes / 'qwen25-vl-7b'}"
    small_run = ["model.max_prompt=64", "algorithm.max_tokens=64", "learner.micro_tokens=128"]
    small_run += ["sampler.batch=2", "eval.prompts=1", path]
    whole = estimate(build.recipe("qwen25-vl-7b-geo3k", small_run))
    small = estimate(build.recipe("qwen25-vl-7b-geo3k", [*small_run, "model.quantize=nf4"]))
    # 28 layers of linear weights: q and o, k and v, three of the feed-forward
    linear = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    saved = whole.lasting["language model"] - small.lasting["language model"]
    assert saved == pytest.approx(linear * (2 - 0.5625), rel=1e-6)
    assert small.lasting["vision tower"] == whole.lasting["vision tower"]
    # 512 prompts of 7 × 8 places, each four patches of 2 × 3 × 14 × 14 values in float32
    pixels = 512 * 7 * 8 * 4 * (2 * 3 * 14 * 14) * 4
    assert small.host == {
        "features of pictures, up to": 4 * GIB,
        "pixels of pictures, up to": pixels,
    }


def test_a_critic_of_its_own_sees_for_itself_and_is_no_copy_of_the_policy() -> None:
    """A reference copies the policy, not what is trained beside it."""
    small = ["model.max_prompt=32", "algorithm.max_tokens=8", "learner.micro_tokens=64"]
    small += ["sampler.batch=2", "eval.prompts=1"]
    without = estimate(build.recipe("demo-vlm", small))
    beside = estimate(build.recipe("demo-vlm-ppo", small))
    assert beside.copy == without.copy == without.lasting["optimizer"] // 2
    assert beside.copy < beside.lasting["optimizer"] // 2
    assert beside.host["features of pictures, up to"] == 8 * GIB


def test_prompts_too_short_for_a_picture(tmp_path: Path) -> None:
    folder = writers.build("qwen2.5-vl", tmp_path / "m")
    found = estimate(
        build.recipe("demo-vlm", [f"model.path={folder}", "model.max_prompt=4", "sampler.batch=2"])
    )
    assert set(found.passing) == {"update with gradients", "writing"}


def test_another_engine_has_memory_of_its_own(tmp_path: Path) -> None:
    folder = writers.build("qwen2", tmp_path / "m")
    common = [f"model.path={folder}", "model.name=causal", "model.max_prompt=32"]
    recipe = build.recipe("demo-vlm", [*common, "sampler.engine=vllm"])
    assert set(estimate(recipe).passing) == {"update with gradients"}
    told = [text for _, text in memory(recipe)]
    assert "while it samples, vLLM has 40% of the device for itself" in told


def test_a_full_fine_tune_of_a_writer_keeps_a_copy_and_a_lora_none(tmp_path: Path) -> None:
    folder = writers.build("qwen2", tmp_path / "m")
    common = [f"model.path={folder}", "model.name=causal", "algorithm.kl.beta=0.1"]
    common += ["model.max_prompt=32", "learner.micro_tokens=64", "sampler.batch=2"]
    full = estimate(build.recipe("demo-vlm", common)).lasting
    lora = estimate(build.recipe("demo-vlm", [*common, "model.lora.rank=4"])).lasting
    assert full["copies of the trained weights"] == full["optimizer"] / 2
    assert "copies of the trained weights" not in lora


def test_sizes_are_the_published_ones(shapes: Path) -> None:
    found = {
        name: estimate(build.recipe(recipe, [f"model.path={shapes / name}", "model.lora.rank=1"]))
        for name, recipe in (("sd35", "sd35-ocr"), ("flux", "flux-pickscore"))
    }
    # 2,243,171,520 and 11,901,408,320 parameters in bfloat16, positions apart and rank 1 on top
    assert found["sd35"].lasting["transformer"] / 2 == pytest.approx(2_243_171_520, rel=0.11)
    assert found["flux"].lasting["transformer"] / 2 == pytest.approx(11_901_408_320, rel=0.01)


def test_quantized_parts_count_as_four_bits(shapes: Path) -> None:
    path = f"model.path={shapes / 'flux'}"
    whole = estimate(build.recipe("flux-pickscore", [path])).lasting
    small = estimate(build.recipe("flux-pickscore", [path, "model.quantize=nf4"])).lasting
    assert small["transformer"] < 0.33 * whole["transformer"]
    assert small["text encoders"] < 0.33 * whole["text encoders"]
    assert small["optimizer"] == whole["optimizer"]


def test_quantizing_needs_lora_and_a_cuda_device() -> None:
    with pytest.raises(UserError, match="freezes the weights, so it trains LoRA only"):
        build.recipe("demo", ["model.quantize=nf4"])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="needs a CUDA device, found cpu"):
            build.model(build.recipe("demo", ["model.quantize=nf4", "model.lora.rank=4"]))
