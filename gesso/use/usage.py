"""The usage code of a model card, for diffusers, transformers and PEFT. It generates the same
samples as `gesso sample`; a test runs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso.config import ZOO, Model, TokenModel
from gesso.types import Prompt, PromptImage, ResponseSpec, SampleSpec, Size, UserError
from gesso.use import usage_inputs
from gesso.use.loaded import AS_EVALUATED, LoadedModel, sample_seeds
from gesso.use.usage_inputs import EXAMPLE, KONTEXT, QWEN_EDIT

TEMPLATED = "add_generation_prompt=True, tokenize=False"


@dataclass(frozen=True)
class Example:
    """A prompt of the run's evaluations, and its image."""

    prompt: str
    image: Path | None = None


def prompt_of(loaded: LoadedModel, example: Example) -> tuple[Prompt, bool]:
    """The example formatted with the recipe's template, and True; or unformatted, and False, if the
    template file is missing or needs columns that the example does not have."""
    images = [example.image] if example.image else []
    try:
        return loaded.ask(example.prompt, images), True
    except UserError:
        return Prompt(example.prompt, images=tuple(PromptImage(str(p)) for p in images)), False


def code(loaded: LoadedModel, example: Example, whole: bool) -> str:
    """`whole`: the folder contains all weights, not an adapter."""
    section = loaded.recipe.model
    if isinstance(section, Model):
        return _image_code(loaded, section, example, whole)
    return _text_code(loaded, section, example, whole)


def _image_code(loaded: LoadedModel, section: Model, example: Example, whole: bool) -> str:
    model: Any = loaded.model
    scheduler = model.pipe.scheduler
    spec = loaded.spec(AS_EVALUATED, several=False)
    assert isinstance(spec, SampleSpec)
    parts, optional = model.pipe.components, type(model.pipe)._optional_components
    absent = [name for name, part in parts.items() if part is None and name not in optional]
    half = section.dtype != "float32"
    arguments = [f"{name}=None" for name in absent] + [f"dtype=torch.{section.dtype}"] * half
    options = "".join(f", {argument}" for argument in arguments)
    prompt, _ = prompt_of(loaded, example)
    height, width = model.output_size(prompt, spec.height, spec.width)  # see model.match_input
    call = [f"height={height}, width={width}", f"num_inference_steps={spec.steps}"]
    if example.image is not None:
        call.insert(0, "image=source")
    if model.pipeline == KONTEXT:
        call += [f"max_area={height * width}", "_auto_resize=False"]  # or both would be of 1024²
    if model.pipeline in ("QwenImagePipeline", QWEN_EDIT):
        call += ['negative_prompt=""']  # without one there is no guidance
    if model.pipeline == "SanaPipeline":
        call += ["use_resolution_binning=False"]  # or only sizes near 1024² would be kept
    size, base = Size(height, width, spec.frames), "folder" if whole else "base"
    is_video = spec.frames > 1
    if is_video:
        call += [f"num_frames={spec.frames}"]
    if model.guidance != "none":
        call += [f"{model.scale_argument}={spec.guidance - model.scale_offset:g}"]
    if model.guidance_2 is not None:
        call += [f"guidance_scale_2={model.guidance_2:g}"]
    call += [f"max_sequence_length={model.text_length}"]
    (seed,) = sample_seeds(0, 1)
    lines = [
        *(["import importlib.resources", ""] if section.path.startswith(ZOO) and not whole else []),
        "import torch",
        f"from diffusers import {model.pipeline}{usage_inputs.needs(model)}",
        *(["from diffusers.utils import export_to_video"] if is_video else []),
        *(usage_inputs.imports(model) if example.image is not None else []),
        "",
        'folder = "."  # this folder, or its name on the Hub',
        *([] if whole else [f"base = {_base(section.path)}"]),
        f"pipe = {model.pipeline}.from_pretrained({base}{options})",
        *([] if whole else _lora(model)),
        *(['pipe.to("cuda")'] if half else []),
        *(usage_inputs.image(model, prompt, size, base) if example.image is not None else []),
        *(_euler(scheduler, spec.steps) if "solver_order" in scheduler.config else []),
        f"{'video' if is_video else 'image'} = pipe(",
        f"    prompt={example.prompt!r},",
        *(f"    {argument}," for argument in call),
        f"    generator=torch.Generator().manual_seed({seed}),  # seed 0 of gesso sample",
        *_saved(spec, model.pipeline),
    ]
    return "\n".join(lines)


def _lora(model: Any) -> list[str]:
    """Wan 2.2 A14B has a file for each expert."""
    if getattr(model.pipe, "transformer_2", None) is None:
        return ["pipe.load_lora_weights(folder)"]
    from gesso.models.flow.wan import ADAPTERS

    first, second = ADAPTERS.values()
    more = f'weight_name="{second}", load_into_transformer_2=True'
    return [
        f'pipe.load_lora_weights(folder, weight_name="{first}")',
        f'pipe.load_lora_weights(folder, {more}, adapter_name="second")',
    ]


def _euler(scheduler: Any, steps: int) -> list[str]:
    plain: dict[str, object] = {"solver_order": 1}
    corrects = "disable_corrector" in scheduler.config  # UniPC
    without = " without corrector" if corrects else ""
    plain |= {"disable_corrector": [*range(steps)]} if corrects else {}
    return [
        f"# The Euler steps that Gesso samples with: a solver of order 1{without}.",
        f"plain = {plain}",
        "pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **plain)",
    ]


def _saved(spec: SampleSpec, pipeline: str) -> list[str]:
    if spec.frames > 1:
        return [").frames[0]", f'export_to_video(video, "video.mp4", fps={spec.fps:g})']
    first = ").frames[0][0]" if pipeline.startswith("Wan") else ").images[0]"
    return [first, 'image.save("image.png")']


def _base(path: str) -> str:
    if path.startswith(ZOO):
        inside = f"zoo/{path.removeprefix(ZOO)}"
        return f'str(importlib.resources.files("gesso") / "{inside}")  # bundled with Gesso'
    return repr(path)


def _text_code(loaded: LoadedModel, section: TokenModel, example: Example, whole: bool) -> str:
    model: Any = loaded.model
    spec = loaded.spec(AS_EVALUATED, several=False)
    assert isinstance(spec, ResponseSpec)
    prompt, _ = prompt_of(loaded, example)
    half = section.dtype != "float32"
    dtype = f", dtype=torch.{section.dtype}" if half else ""
    loads = f"{model.auto}.from_pretrained({'folder' if whole else 'base'}{dtype})"
    has_image = example.image is not None
    names = ["AutoTokenizer", model.auto, *(["AutoImageProcessor"] if has_image else [])]
    zoo = section.path.startswith(ZOO) and not whole
    lines = [
        *(["import importlib.resources", ""] if zoo else []),
        *(["import torch"] if half else []),
        *([] if whole else ["from peft import PeftModel"]),
        *(["from PIL import Image"] if has_image else []),
        f"from transformers import {', '.join(sorted(names))}",
        "",
        'folder = "."  # this folder, or its name on the Hub',
        *([] if whole else [f"base = {_base(section.path)}"]),
        f"model = {loads if whole else f'PeftModel.from_pretrained({loads}, folder)'}",
        *(['model.to("cuda")'] if half else []),
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        f"messages = {json.dumps(_messages(prompt), ensure_ascii=False)}",
        f"text = tokenizer.apply_chat_template(messages, {TEMPLATED})",
        *(_image_inputs(section) if has_image else _text_inputs()),
        "inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}",
        *_suppressed(loaded),
        "response = model.generate(",
        f"    **inputs, max_new_tokens={spec.max_tokens}, do_sample=False,",
        "    suppress_tokens=suppressed,",
        ")",
        'response = response[0, inputs["input_ids"].shape[1] :]',
        "print(tokenizer.decode(response, skip_special_tokens=True))",
    ]
    return "\n".join(lines)


def _suppressed(loaded: LoadedModel) -> list[str]:
    """Tokens that Gesso never generates, to be suppressed in `generate` as well."""
    lines = [
        "# As in Gesso, do not generate padding ids of the vocabulary or image tokens.",
        "vocabulary = model.get_input_embeddings().weight.shape[0]",
        "suppressed = [*range(len(tokenizer), vocabulary)]",
    ]
    if loaded.family.sees(loaded.model):
        kinds = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        lines.append(f"suppressed += [getattr(model.config, kind) for kind in {kinds}]")
    return lines


def _messages(prompt: Prompt) -> list[Any]:
    """Messages for chat templates; those of text-only models expect plain strings."""
    parts = [*({"type": "image"} for _ in prompt.images), {"type": "text", "text": prompt.text}]
    messages = prompt.messages or ({"role": "user", "content": parts},)
    if prompt.images:
        return [dict(message) for message in messages]
    return [{**message, "content": _text(message["content"])} for message in messages]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _text_inputs() -> list[str]:
    return ['inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")']


def _image_inputs(section: TokenModel) -> list[str]:
    """The same as AutoProcessor, which needs torchvision for videos."""
    bounds = {"min_pixels": section.min_pixels, "max_pixels": section.max_pixels}
    limits = "".join(f", {name}={value}" for name, value in bounds.items() if value is not None)
    return [
        "# The same as AutoProcessor, which needs torchvision.",
        f'processor = AutoImageProcessor.from_pretrained(folder, backend="pil"{limits})',
        f'pixels = processor([Image.open("{EXAMPLE}").convert("RGB")], return_tensors="pt")',
        'n_tokens = int(pixels["image_grid_thw"].prod()) // processor.merge_size**2',
        "image_token = tokenizer.convert_ids_to_tokens(model.config.image_token_id)",
        "text = text.replace(image_token, image_token * n_tokens)",
        'inputs = {**tokenizer(text, add_special_tokens=False, return_tensors="pt"), **pixels}',
        'inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()',
    ]
