"""Lines of a card's usage code: the input image, at the size at which Gesso encodes it. Pipelines
resize input images for outputs of 1024², whatever their height and width."""

from __future__ import annotations

from typing import Any

from gesso.types import Prompt, Size

EXAMPLE = "example.png"
KONTEXT, QWEN_EDIT = "FluxKontextPipeline", "QwenImageEditPlusPipeline"
QWEN_LINES = """\
edit_plus.VAE_IMAGE_SIZE = {area}  # pixels at which Gesso encodes an image
image_processor = AutoImageProcessor.from_pretrained({base}, subfolder="processor", backend="pil")


def process(text, images, **options):
    \"\"\"The same as Qwen2VLProcessor, which needs torchvision.\"\"\"
    inputs = image_processor(images, return_tensors="pt")
    n_tokens = int(inputs["image_grid_thw"].prod()) // image_processor.merge_size**2
    text = [line.replace("<|image_pad|>", n_tokens * "<|image_pad|>") for line in text]
    inputs.update(pipe.tokenizer(text, return_tensors="pt"))
    return inputs


def mark_images(encoder, args, inputs):
    \"\"\"Adds token types, which transformers 5 needs and diffusers 0.42 does not pass.\"\"\"
    images = inputs["input_ids"] == encoder.config.image_token_id
    return args, {{**inputs, "mm_token_type_ids": images.int()}}


pipe.processor = process
pipe.text_encoder.register_forward_pre_hook(mark_images, with_kwargs=True)"""


def needs(model: Any) -> str:
    """A comment on a package that diffusers does not install with the pipeline."""
    return "  # needs ftfy" if model.pipeline == "WanImageToVideoPipeline" else ""


def imports(model: Any) -> list[str]:
    if model.pipeline == QWEN_EDIT:
        return [
            "from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus",
            "from PIL import Image",
            "from transformers import AutoImageProcessor",
        ]
    return [f"from PIL import Image{', ImageOps' if model.pipeline.startswith('Wan') else ''}"]


def image(model: Any, prompt: Prompt, size: Size, base: str) -> list[str]:
    """`source`, for a sample of this size; `base` is the variable with the pipeline's folder."""
    lines = [f'source = Image.open("{EXAMPLE}").convert("RGB")']
    if model.match_input:
        lines.append("# Height and width below follow its aspect ratio.")
    if model.pipeline == QWEN_EDIT:
        return lines + QWEN_LINES.format(area=model.area, base=base).splitlines()
    if model.pipeline.startswith("Wan"):
        fitted = f"({size.width}, {size.height}), Image.Resampling.LANCZOS"
        return [*lines, f"source = ImageOps.fit(source, {fitted})"]
    height, width = _encoded_size(model, prompt)
    return [
        *lines,
        "# The size at which Gesso encodes this image.",
        f"source = source.resize(({width}, {height}), Image.Resampling.LANCZOS)",
    ]


def _encoded_size(model: Any, prompt: Prompt) -> tuple[int, int]:
    if model.pipeline == KONTEXT:
        return model.reference_size(*prompt.images[0].size)
    smaller = model.pipe.image_processor._resize_if_exceeds_area  # of FLUX.2
    found = smaller(prompt.images[0].open(), model.area)
    return found.height, found.width
