"""HPS v2: predicted human preference for the image, given its prompt.

value = cos(text, image) of a CLIP ViT-H/14 fine-tuned on human preferences (Wu et al. 2023, "Human
Preference Score v2"), not scaled, as its authors and Flow-GRPO report it; range [−1, 1], in
practice .2 to .35. The longer side of the image is resized to 224 and the rest padded with black:
nothing is cropped. The prompt is truncated to 77 tokens. Requires the weights, 2 to 4 GB: the
published file, with open_clip's tensor names, or with `file` = "" any CLIPModel of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gesso.config import pick_device
from gesso.rewards.image import checkpoints, networks
from gesso.rewards.image.clip import ClipEncoder, load_clip
from gesso.rewards.image.preprocessing import padded_to_square
from gesso.types import Prompt, Sample, Score, UserError

if TYPE_CHECKING:
    from torch import Tensor


class Hps(networks.NetworkReward):
    """cos(prompt, image) of HPS v2.1 (Wu et al. 2023), typically 0.2 to 0.35. Uses the whole image;
    the other CLIP rewards use its centre square."""

    path: str = "xswu/HPSv2"
    """Folder or hub name."""
    file: str = "HPS_v2.1_compressed.pt"
    """Weight file in `path`; "" if `path` is a transformers model."""
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Processor folder or hub name."""

    differentiable: ClassVar[bool] = True

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return networks.in_batches(self._values, samples, self.batch)

    def values(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        clip = self._clip()
        squares = padded_to_square(images, clip.model.config.vision_config.image_size)
        return clip.differentiable_cosines([p.text for p in prompts], squares)

    def _values(self, samples: Sequence[Sample]) -> list[float]:
        clip = self._clip()
        side = clip.model.config.vision_config.image_size
        images = [pad_to_square(s.pixels, side) for s in samples]
        return clip.cosines([s.prompt.text for s in samples], images).tolist()

    def _clip(self) -> ClipEncoder:
        if self.file:
            return _load_published(self.path, self.file, self.processor, self.device)
        return load_clip(self.path, self.processor, self.device)


def pad_to_square(image: np.ndarray, side: int) -> np.ndarray:
    """The whole image, resized, in the centre of a black square."""
    from PIL import Image

    height, width = image.shape[:2]
    scale = side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    square = Image.new("RGB", (side, side))
    small = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    square.paste(small, ((side - size[0]) // 2, (side - size[1]) // 2))
    return np.asarray(square)


@networks.once
def _load_published(path: str, file: str, processor: str, device: str) -> ClipEncoder:
    from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessorPil, CLIPModel

    model = CLIPModel(networks.load_pretrained(CLIPConfig, processor))
    checkpoints.fill(model, rename_open_clip(checkpoints.read(path, file)), f'"{path}" ({file})')
    target = pick_device(device)
    return ClipEncoder(
        model.to(target).eval().requires_grad_(False),
        networks.load_pretrained(AutoTokenizer, processor),
        networks.load_pretrained(CLIPImageProcessorPil, processor),
        target,
    )


_NAMES = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "visual.proj": "visual_projection.weight",
}
_BLOCK_NAMES = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+?)[._](weight|bias)")


def rename_open_clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames open_clip's tensors to those of transformers' CLIPModel. Projections are transposed;
    query, key and value are split from one tensor."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in _NAMES:
            transposed = name in ("text_projection", "visual.proj")
            result[_NAMES[name]] = tensor.T if transposed else tensor
            continue
        block = _BLOCK.fullmatch(name)
        if not block:
            raise UserError(f'"{name}" is not an open_clip ViT tensor; expected HPS v2 weights')
        visual, number, part, kind = block.groups()
        start = f"{'vision' if visual else 'text'}_model.encoder.layers.{number}"
        if part == "attn.in_proj":
            for projection, piece in zip("qkv", tensor.chunk(3), strict=True):
                result[f"{start}.self_attn.{projection}_proj.{kind}"] = piece
        else:
            result[f"{start}.{_BLOCK_NAMES.get(part, part)}.{kind}"] = tensor
    return result
