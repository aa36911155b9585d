"""The `[model]` section of a recipe, for each family of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from gesso.config.base import MAX_FRAMES, MAX_SIDE, Dtype, Strict
from gesso.config.bundled import FAMILIES, MODELS, FamilyName


class Lora(Strict):
    rank: int = Field(32, ge=1)
    """Rank of the adapter matrices."""
    alpha: int = Field(64, ge=1)
    """The adapter is scaled by alpha / rank."""
    targets: list[str] | None = None
    """Names of the modules to adapt. None: the model's default list (attention; for FLUX.1 and
    Qwen-Image also the feed-forward layers; for language models all linear layers)."""
    path: str | None = None
    """Start from this adapter: a folder or .safetensors file in diffusers' format, with the
    modules, rank and alpha given here. The KL reference stays the base model. Resuming, sampling
    and exporting need the file too."""


class AnyModel(Strict):
    """Keys that the sections of both families share."""

    family_name: ClassVar[FamilyName]
    output: ClassVar[Literal["image", "text"]]  # what a sample is

    name: str
    """Model class."""
    path: str
    """A diffusers or transformers folder, a Hugging Face hub name, or "zoo:NAME" for a bundled
    model."""
    dtype: Dtype = "float32"
    """Compute dtype: "float32", "bfloat16" or "float16". Trained weights stay in float32. With
    `lora` the frozen weights are stored in this dtype; full fine-tuning uses autocast. There is no
    loss scaling, so prefer bfloat16 to float16."""
    device: str = "auto"
    """A torch device, or "auto": CUDA when available, otherwise the CPU."""
    quantize: Literal["nf4"] | None = None
    """With "nf4" the large frozen weights are stored in 4 bits (QLoRA). Requires CUDA, `lora` and
    the extra gesso[quantize]."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: same gradient, less
    memory, one extra forward pass."""
    lora: Lora | None = None
    """LoRA settings. None: full fine-tuning."""
    compile: bool | None = None
    """Compile the transformer block by block; the first step takes about a minute longer. None: on
    CUDA for 500 M parameters or more (language models: in half precision). Not available with
    `quantize`."""
    fold: bool | None = None
    """Merge the LoRA into the weights while they are constant (sampling, and between optimizer
    steps). Costs one more copy of the adapted weights. None: on CUDA (language models: in half
    precision)."""
    family: FamilyName | None = None
    """Family of a custom model class: "flow" or "language". None: inferred from the class."""

    @model_validator(mode="after")
    def _possible(self) -> AnyModel:
        if self.family not in (None, self.family_name):
            raise ValueError(
                f'family = "{self.family}", but name = "{self.name}" is a {self.family_name} '
                "model; remove family"
            )
        if self.quantize is not None and self.lora is None:
            raise ValueError(
                f'quantize = "{self.quantize}" freezes the weights, so only a LoRA can be trained; '
                "set model.lora.rank"
            )
        if self.fold and (self.lora is None or self.quantize is not None):
            raise ValueError(
                "fold = true needs a LoRA and weights that are not quantized; set model.lora.rank "
                "and remove quantize, or remove fold"
            )
        if self.compile and self.quantize is not None:
            raise ValueError(
                f'compile = true does not support quantize = "{self.quantize}"; remove one of them'
            )
        return self


class Model(AnyModel):
    """A flow model."""

    family_name: ClassVar[FamilyName] = "flow"
    output: ClassVar[Literal["image", "text"]] = "image"

    name: str = "sd3"
    """Model class: "sd3" (Stable Diffusion 3 and 3.5), "flux" (FLUX.1 dev and schnell),
    "qwen-image", "z-image", "sana" (SANA and SANA 1.5); for editing "kontext" (FLUX.1 Kontext) and
    "qwen-edit" (Qwen-Image-Edit 2509 and 2511), whose prompts have input images; "flux2" (FLUX.2
    dev) and "flux2-klein", whose prompts may have some; for videos "wan" (Wan 2.1 and 2.2, from
    text) and "wan-i2v" (from an image); or "module:Class" for a custom model."""
    height: int = Field(512, ge=8, le=MAX_SIDE)
    """Image height in pixels. Input images are resized to the area height × width."""
    width: int = Field(512, ge=8, le=MAX_SIDE)
    """Image width in pixels."""
    match_input: bool = False
    """Give each image the aspect ratio of its prompt's first input image, at the area height ×
    width. The ratio is the nearest of 13 between 1:3 and 3:1; a batch has prompts of one ratio. Not
    available with `data.curriculum`."""
    frames: int = Field(1, ge=1, le=MAX_FRAMES)
    """Frames of a video; 1 is an image. Image models generate 1."""
    fps: float = Field(16.0, ge=0.1, le=1_000)
    """Frames per second of videos: Wan 2.1 and 2.2 A14B 16, Wan 2.2 TI2V 24."""
    guidance_2: float | None = Field(None, ge=0)
    """Wan 2.2 A14B: guidance scale of the second expert (low noise), wherever guidance is above 1.
    None: the same scale."""
    vae_tiling: bool = False
    """Decode and encode in overlapping tiles, which are blended: less memory, slightly different
    pixels. Samples of one tile are not affected."""
    text_length: int | None = Field(None, ge=0)
    """Maximum number of prompt tokens. None: the pipeline's default (SD3 128, FLUX.1 dev 512,
    FLUX.1 schnell 256, Qwen-Image and Wan 512). Use 0 for SD3 checkpoints without T5, such as the
    bundled model."""


class TokenModel(AnyModel):
    """A language or vision-language model."""

    family_name: ClassVar[FamilyName] = "language"
    output: ClassVar[Literal["image", "text"]] = "text"

    name: str = "vision-language"
    """Model class: "vision-language" (Qwen2-VL, Qwen2.5-VL, Qwen3-VL), "causal" (Llama 3, Qwen2,
    Qwen2.5, Qwen3), or "module:Class" for a custom model. Must be set: the default of `model.name`
    is an image model."""
    max_prompt: int = Field(2048, ge=1)
    """Maximum prompt length in tokens, image tokens included. Longer prompts are dropped and
    counted before the run. The longest prompt plus `algorithm.max_tokens` must fit the model's
    positions."""
    min_pixels: int | None = Field(None, ge=1)
    """Smaller prompt images are enlarged. None: the image processor's setting."""
    max_pixels: int | None = Field(None, ge=1)
    """Larger prompt images are reduced. None: the image processor's setting."""
    train_vision: bool = False
    """Also train the vision tower. When frozen, it encodes each image once for sampling, reference
    and update."""

    @model_validator(mode="after")
    def _bounded(self) -> TokenModel:
        low, high = self.min_pixels, self.max_pixels
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_pixels = {low} must be at most max_pixels = {high}")
        return self


def family(section: Any) -> FamilyName:
    """The family of a `[model]` section, parsed or not. For a bundled model the name decides; a
    user's model whose section has no `family` counts as a flow model, as in run folders written
    before the key existed."""
    if isinstance(section, AnyModel):
        return section.family_name
    if not isinstance(section, Mapping):
        return "flow"
    name, stated = section.get("name"), section.get("family")
    if isinstance(name, str) and name in MODELS:
        return MODELS[name].family
    return stated if stated in FAMILIES else "flow"


Flow = Annotated[Model, Tag("flow")]
Language = Annotated[TokenModel, Tag("language")]
ModelSection = Annotated[Flow | Language, Discriminator(family)]
