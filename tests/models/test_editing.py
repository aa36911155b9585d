"""Models with input images against diffusers' own pipelines: tiny random weights of the real
classes, on disk."""

from __future__ import annotations

import functools
import io
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gesso import build, imports
from gesso.algorithms.base import Prepared
from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.config import Learner, Lora, Model
from gesso.families import classes
from gesso.models.flow.base import PromptCache, check_images
from gesso.rollout import Rollout
from gesso.samplers.denoise import DenoisingSampler
from gesso.traces.flow import FlowTrace
from gesso.types import Prompt, PromptImage, SampleSpec, Score, Size, UserError
from tests.editors import EDITORS
from tests.editors import build as build_editor
from tests.rollouts import parts_of
from tests.typed import sure

SIZE, STEPS = (24, 16), 3
SIDE = 48  # of outputs according to the recipe: references have this area
ROWS, SEEDS = [0, 1, 1, 2], [11, 12, 13, 14]
LAYERS = {"kontext": {"num_layers": 1, "num_single_layers": 1}}
LORA = Lora(rank=4, alpha=12)
FAMILY: dict[str, dict[str, Any]] = {
    "flow-grpo": {"clip": 0.2, "guidance": 3.5},
    "flow-grpo-fast": {"window": {"size": 2, "low": 0, "high": 3}, "same_noise": True},
    "diffusion-nft": {"times": 2},
    "dgpo": {"times": 2, "last": 2},
}


def picture(seed: int, height: int = 20, width: int = 30) -> PromptImage:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(noise).resize((width, height)).save(data, "png")
    return PromptImage(data=data.getvalue())


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max())


@dataclass(frozen=True)
class Editor:
    """A pipeline folder, and how it is called."""

    name: str
    folder: Path

    @property
    def kind(self) -> str:
        return self.name.removesuffix("-2511")

    @property
    def scale(self) -> float:
        return 3.5

    @property
    def prompts(self) -> list[Prompt]:
        """Images of two sizes. Qwen-Image-Edit has negative prompts and several images."""
        red = Prompt("make it red", images=(picture(1),))
        blue = Prompt("a blue one", images=(picture(2, 30, 20),))
        oak = Prompt("oak", images=(picture(3),))
        if self.kind == "kontext":
            return [red, blue, oak]
        both = (picture(2, 30, 20), picture(4))
        return [replace(red, negative="dull"), replace(blue, images=both), oak]

    def model(self, **settings: Any) -> Any:
        size = {"height": SIDE, "width": SIDE}
        text = {"text_length": 16} if self.kind == "kontext" else {}
        kind = imports.load(classes.REFERENCES[self.kind], "model")
        chosen = {"name": self.kind, "path": str(self.folder)} | size | text | settings
        return kind(Model.model_validate(chosen), seed=1)

    @functools.cache  # noqa: B019
    def plain_model(self) -> Any:
        """Shared: tests do not change it."""
        return self.model()

    def pipe(self, folder: Path | None = None) -> Any:
        """Plain diffusers; the processor would need torchvision."""
        import diffusers

        kind = imports.load(classes.REFERENCES[self.kind], "model")
        absent = dict.fromkeys(kind.replaced)
        pipe = getattr(diffusers, kind.pipeline).from_pretrained(folder or self.folder, **absent)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def call(self, pipe: Any, prompt: Prompt, seed: int, output: str = "latent") -> Any:
        """The pipeline with a model's own resized images: its rule is for outputs of 1024²."""
        model, generator = self.plain_model(), torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {
            "num_inference_steps": STEPS, "height": SIZE[0], "width": SIZE[1],
            "generator": generator, "output_type": output,
        }  # fmt: skip
        images = [image.open() for image in prompt.images]
        if self.kind == "kontext":
            (image,) = images
            size = model.reference_size(image.height, image.width)
            return pipe(
                image=pipe.image_processor.resize(image, *size), prompt=prompt.text,
                guidance_scale=self.scale, max_sequence_length=16, max_area=SIZE[0] * SIZE[1],
                _auto_resize=False, **options,
            ).images  # fmt: skip
        both = (prompt, replace(prompt, text=prompt.negative))
        embeds = [model.encode([p], Size(*SIZE)).embeds for p in both]
        return pipe(
            image=images, prompt_embeds=embeds[0], negative_prompt_embeds=embeds[1],
            true_cfg_scale=self.scale, **options,
        ).images  # fmt: skip

    def latents(self, pipe: Any) -> torch.Tensor:
        """(N, C, H, W) for ROWS and SEEDS."""
        found = [
            self.call(pipe, self.prompts[r], seed) for r, seed in zip(ROWS, SEEDS, strict=True)
        ]
        unpacked = pipe._unpack_latents(torch.cat(found), *SIZE, pipe.vae_scale_factor)
        return unpacked.squeeze(2) if self.kind == "qwen-edit" else unpacked


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("editors")
    for name in EDITORS:
        build_editor(name, root / name, **LAYERS.get(name, {}))
    return root


@pytest.fixture(params=EDITORS)
def editor(request: pytest.FixtureRequest, folders: Path) -> Editor:
    return Editor(request.param, folders / request.param)


@pytest.fixture(params=["kontext", "qwen-edit"])
def one_each(request: pytest.FixtureRequest, folders: Path) -> Editor:
    return Editor(request.param, folders / request.param)


@pytest.fixture(autouse=True)
def area(monkeypatch: pytest.MonkeyPatch) -> None:
    """References have this area in the pipeline for Qwen, too."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit

    monkeypatch.setattr(edit, "VAE_IMAGE_SIZE", SIDE**2)


def drawn(model: Any, editor: Editor, spec: SampleSpec, batch: int = 3) -> Rollout:
    sampler = DenoisingSampler(model, batch)
    pieces = list(sampler.sample(editor.prompts, ROWS, SEEDS, spec))
    return Rollout(
        [s for p in pieces for s in p.samples],
        torch.tensor(ROWS),
        FlowTrace.concat([p.trace for p in pieces]),
        torch.cat([p.logp for p in pieces]),
        0,
        [Score(1.0)] * len(ROWS),
        {"none": 1.0},
    )


def without_noise(model: Any, editor: Editor) -> torch.Tensor:
    spec = SampleSpec(steps=STEPS, height=SIZE[0], width=SIZE[1], guidance=editor.scale)
    return drawn(model, editor, spec).flow_trace.clean


def test_without_noise_it_is_diffusers_own_pipeline(editor: Editor) -> None:
    """Images of different sizes and numbers; batches of ours, one by one there."""
    pipe, model = editor.pipe(), editor.plain_model()
    expected = editor.latents(pipe)
    assert gap(without_noise(model, editor), expected) < 2e-5
    assert gap(expected[1], expected[2]) > 0.1  # seeds matter


def test_references_matter_in_both_branches(editor: Editor) -> None:
    """In tokens and, for Qwen, in the embeddings, also of the negative prompt. The target's tokens
    alone are returned."""
    model, prompt = editor.plain_model(), editor.prompts[0]
    others = [prompt, replace(prompt, images=(picture(9),))]
    cond, negative = PromptCache(model).conditions(others, Size(*SIZE), editor.scale)
    x = torch.randn(1, *model.latent_shape(*SIZE), generator=torch.Generator().manual_seed(0))
    for branch in [cond] if negative is None else [cond, negative]:
        assert branch.source is not None and gap(branch.source[0], branch.source[1]) > 0.1
        assert (gap(branch.embeds[0], branch.embeds[1]) > 0.1) == (editor.kind == "qwen-edit")
        one = replace(branch, embeds=branch.embeds[:1].expand_as(branch.embeds))
        with torch.no_grad():
            v = model.velocity(x.expand(2, -1, -1, -1), torch.full((2,), 0.6), one)
        assert v.shape == (2, *x.shape[1:]) and gap(v[0], v[1]) > 5e-4
    assert (negative is None) == (editor.kind == "kontext")


def test_prompts_are_cached_by_text_and_content_of_the_images(
    one_each: Editor, tmp_path: Path
) -> None:
    prompt, file = one_each.prompts[0], tmp_path / "in.png"
    file.write_bytes(prompt.images[0].data)
    cache = PromptCache(one_each.plain_model())
    first = cache([prompt, replace(prompt, images=(PromptImage(str(file)),))], Size(*SIZE))
    assert cache.encoded == 1
    file.write_bytes(picture(9).data)
    again = cache([prompt, replace(prompt, images=(PromptImage(str(file)),))], Size(*SIZE))
    assert cache.encoded == 2 and first.source is not None and again.source is not None
    assert gap(first.source[1], again.source[0]) == 0 < gap(again.source[0], again.source[1])


def test_qwen_reads_an_image_at_positions_of_an_image(folders: Path) -> None:
    """diffusers 0.42 does not pass mm_token_type_ids to transformers 5, which then gives the
    features of an image the positions of a text: its embeddings are wrong. With them, the
    pipeline's own code gives ours."""
    editor = Editor("qwen-edit", folders / "qwen-edit")
    model, pipe, prompt = editor.plain_model(), editor.pipe(), editor.prompts[1]
    pipe.processor = functools.partial(processed, model)
    sizes = [(320, 480), (480, 320)][::-1]  # of a ratio of 3:2 at 384², in multiples of 32
    images = [
        pipe.image_processor.resize(image.open(), *size)
        for image, size in zip(prompt.images, sizes, strict=True)
    ]
    ours = model.encode([prompt], Size(*SIZE)).embeds
    wrong, _ = pipe.encode_prompt([prompt.text], images)
    assert wrong.shape == ours.shape and gap(wrong, ours) > 0.1

    def add_kinds(_: Any, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kinds = (inputs["input_ids"] == pipe.text_encoder.config.image_token_id).int()
        return args, inputs | {"mm_token_type_ids": kinds}

    pipe.text_encoder.register_forward_pre_hook(add_kinds, with_kwargs=True)
    right, _ = pipe.encode_prompt([prompt.text], images)
    assert gap(right, ours) < 1e-5


def processed(model: Any, text: list[str], images: list[Any], **_: Any) -> Any:
    """What transformers' Qwen2VLProcessor does for images; it needs torchvision."""
    found = model.images_for_text(images, return_tensors="pt")
    for grid in found["image_grid_thw"]:
        pads = "<|image|>" * int(grid.prod() // 4)
        text = [t.replace("<|image_pad|>", pads, 1) for t in text]
    written = [t.replace("<|image|>", "<|image_pad|>") for t in text]
    found.update(model.pipe.tokenizer(written, return_tensors="pt"))
    return found


RATIOS = [(480, 640), (1000, 1000), (720, 1280), (1280, 720), (100, 1000), (3000, 2000)]
RATIOS += [(512, 2048), (4096, 256)]  # of the area of the outputs


def test_at_1024_references_have_the_sizes_of_the_pipelines(
    one_each: Editor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.pipelines.flux.pipeline_flux_kontext import (
        PREFERRED_KONTEXT_RESOLUTIONS as PREFERRED,
    )
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    model = one_each.model()
    model.area = 1024**2
    for height, width in RATIOS:
        if one_each.kind == "kontext":
            nearest = min((abs(width / height - w / h), w, h) for w, h in PREFERRED)
            expected = nearest[:0:-1]
        else:
            expected = calculate_dimensions(1024**2, width / height)[::-1]
        assert model.reference_size(height, width) == expected
    model.area = 512**2
    for height, width in RATIOS:
        tall, wide = model.reference_size(height, width)
        assert tall % 4 == wide % 4 == 0 and 0.85 < tall * wide / 512**2 < 1.2
    model.area = 32 * 96
    assert model.reference_size(32, 96) == (32, 96)  # no ratio of Kontext's is near 3


def test_replay_gives_the_log_probs_of_sampling(editor: Editor) -> None:
    """In micro-batches of one layout of references each; then the weights move."""
    model = editor.model(lora=LORA)
    algorithm = FlowGRPO(steps=STEPS, guidance=editor.scale, beta=0.0)
    spec = algorithm.spec(0, 0, Model(path="", height=SIZE[0], width=SIZE[1]))
    rollout = drawn(model, editor, spec)
    terms = algorithm.terms(rollout, Prepared(torch.ones(len(ROWS))))

    def replayed() -> float:
        parts = terms.micro_batches(Learner(micro_batch=3))
        assert [len(part) for part in parts] == [3, 1, 3, 1]
        with torch.no_grad():
            stats = [algorithm.loss(model, terms.rows(part)).stats for part in parts]
        return float(torch.cat([s["abs_dlogp"] for s in stats]).max())

    assert replayed() < 1e-6
    for tensor in model.policy.tensors().values():
        tensor.add_(0.02)
    assert replayed() > 1e-6


def stirred(model: Any) -> Any:
    noise = torch.Generator().manual_seed(3)
    for name, tensor in model.policy.tensors().items():
        if "lora_B" in name:
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=noise))
    return model


def test_exports_in_plain_diffusers(one_each: Editor, tmp_path: Path) -> None:
    """The LoRA, and the whole pipeline with all of its components."""
    model = stirred(one_each.model(lora=LORA))
    ours = without_noise(model, one_each)
    model.save(tmp_path / "lora")
    model.save(tmp_path / "whole", merged=True)
    pipe = one_each.pipe()
    assert gap(one_each.latents(pipe), ours) > 0.05
    pipe.load_lora_weights(tmp_path / "lora")
    assert gap(one_each.latents(pipe), ours) < 1e-4
    assert gap(one_each.latents(one_each.pipe(tmp_path / "whole")), ours) < 1e-4
    kept, saved = (
        json.loads((folder / "model_index.json").read_text())
        for folder in (one_each.folder, tmp_path / "whole")
    )
    assert kept.items() <= saved.items()
    for name in model.replaced:
        files = {f.name: f.read_bytes() for f in (one_each.folder / name).iterdir()}
        assert files == {f.name: f.read_bytes() for f in (tmp_path / "whole" / name).iterdir()}


@pytest.mark.parametrize("name", ["flow-grpo", "flow-grpo-fast", "diffusion-nft", "dgpo"])
def test_gradients_do_not_depend_on_micro_batches(folders: Path, name: str) -> None:
    """References of two sizes in one rollout, through both kinds of terms."""
    editor = Editor("kontext", folders / "kontext")
    options = {"group": 2, "steps": 4, "updates": 1} | FAMILY[name]
    model = {"name": "kontext", "path": str(editor.folder), "height": SIDE, "width": SIDE}
    model |= {"text_length": 16, "lora": {"rank": 4, "alpha": 12}}
    recipe = build.recipe_from(
        {
            "model": model,
            "algorithm": {"name": name, **options},
            "data": {"train": "none.jsonl", "eval": "none.jsonl", "groups": 2},
            "reward": [{"name": "jpeg-compressibility"}],
        }
    )
    made, algorithm, learner = parts_of(recipe)
    stirred(made)
    small = Model(path="", height=SIZE[0], width=SIZE[1])
    spec = sure(SampleSpec, algorithm.spec(0, 0, small))
    rollout = replace(
        drawn(made, editor, spec),
        scores=[Score(r, {"none": r}) for r in (0.1, 0.9, 0.2, 0.5)],
        group=torch.tensor([0, 0, 1, 1]),
    )
    terms = algorithm.terms(rollout, algorithm.prepare(made, rollout, recipe.learner))
    found = []
    for size in (1, 64):
        learner.settings = learner.settings.model_copy(update={"micro_batch": size})
        learner._accumulate(terms, defaultdict(list))
        found.append(torch.cat([p.grad.flatten() for p in learner.policy.trainable.values()]))
    assert found[0].norm() > 0 and (found[1] - found[0]).norm() <= 1e-4 * found[0].norm()


def test_compiled_prompts_are_padded_to_a_multiple_of_the_text_length(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several input images make prompts longer than it, each by another number."""
    editor = Editor("qwen-edit", folders / "qwen-edit")
    model = editor.model()
    cond = model.encode([editor.prompts[0], editor.prompts[2]], Size(*SIZE))
    lengths = sure(torch.Tensor, cond.mask).sum(1).tolist()
    model.text_length = min(lengths) - 1
    assert lengths[0] != lengths[1]
    x = torch.randn(2, *model.latent_shape(*SIZE), generator=torch.Generator().manual_seed(0))
    sigma = torch.full((2,), 0.6)
    seen, run = [], model.run

    def noted(*weights: Any, **inputs: Any) -> torch.Tensor:
        seen.append(inputs["encoder_hidden_states"].shape[1])
        return run(*weights, **inputs)

    monkeypatch.setattr(model, "run", noted)
    with torch.no_grad():
        plain = model.velocity(x, sigma, cond)
        model.compiled = True
        assert gap(model.velocity(x, sigma, cond), plain) < 1e-5
    assert seen == [max(lengths), 2 * model.text_length]


def test_blank_conditioning_has_the_input_images_that_are_set(editor: Editor) -> None:
    model = editor.model()
    (least,) = model.blank(1, Size(*SIZE)).layouts
    assert least == (model.grid(*model.reference_size(SIDE, SIDE)),)
    for prompt in editor.prompts:
        model.blank_images = [image.size for image in prompt.images]
        blank, cond = model.blank(2, Size(*SIZE)), model.encode([prompt] * 2, Size(*SIZE))
        assert blank.layouts == cond.layouts and blank.source.shape == cond.source.shape


@pytest.mark.parametrize("compiled", [False, True])
def test_blank_texts_are_padded_to_a_multiple_of_the_text_length(
    folders: Path, compiled: bool
) -> None:
    editor = Editor("qwen-edit", folders / "qwen-edit")
    model = editor.model()
    model.text_length, model.compiled = 300, compiled
    for prompt, length in zip(editor.prompts[:2], (300, 600), strict=True):  # one and two images
        assert length - 300 < model.encode([prompt], Size(*SIZE)).embeds.shape[1] <= length
        model.blank_images = [image.size for image in prompt.images]
        blank = model.blank(1, Size(*SIZE))
        assert blank.embeds.shape[1] == length
        assert blank.mask.shape == (1, length) if compiled else blank.mask is None


def test_numbers_of_input_images(folders: Path) -> None:
    kontext, edit = (Editor(n, folders / n).plain_model() for n in ("kontext", "qwen-edit"))
    text, one = Prompt("a", where="train.jsonl:7"), picture(1)
    two, four = (replace(text, images=(one,) * n) for n in (2, 4))
    check_images(kontext, [replace(text, images=(one,))])
    check_images(edit, [two])
    thin = picture(1, 3, 49)
    check_images(edit, [replace(text, images=(one, picture(1, 3, 48)))])
    for model, prompt, sentence in (
        (kontext, text, 'expected 1 input image, got 0; rows have .* as "image" or "images"'),
        (
            kontext,
            replace(text, images=(thin,)),
            "image 1 of 1 has 49×3 pixels; expected an aspect ratio of at most 16:1",
        ),
        (edit, replace(text, images=(one, thin)), "image 2 of 2 has 49×3 pixels"),
        (kontext, two, "expected 1 input image, got 2"),
        (edit, text, "expected 1 to 3 input images, got 0"),
        (edit, four, "expected 1 to 3 input images, got 4"),
    ):
        with pytest.raises(UserError, match=f"train.jsonl:7: {sentence}"):
            check_images(model, [prompt])
    with pytest.raises(UserError, match=r"train.jsonl:7: expected a prompt without <\|image_pad"):
        edit.encode([replace(text, text="a <|image_pad|>", images=(one,))], Size(*SIZE))
