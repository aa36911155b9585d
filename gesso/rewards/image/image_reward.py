"""ImageReward v1: predicted human preference for the image, given its prompt.

value = (head(h) − .1672)/1.0333 with h the first token's hidden state of BLIP's text encoder with
cross-attention to the image (ViT-L/16 at 224 pixels, BERT), and the head five linear layers (Xu et
al. 2023); mean and standard deviation are the authors'. In practice −2.3 to 2. The prompt is
truncated to 35 tokens. Requires ImageReward.pt, 1.8 GB, and BERT's tokenizer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gesso.config import pick_device
from gesso.rewards.image import checkpoints, networks
from gesso.rewards.image.preprocessing import clip_inputs
from gesso.types import Prompt, Sample, Score, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FILE = "ImageReward.pt"
MEAN, DEVIATION = 0.16717362830052426, 1.0333394966054072
MAX_TOKENS = 35
HEAD_DIM = 64  # channels of an attention head, in both ViT-L and BERT


class ImageReward(networks.NetworkReward):
    """(head(BLIP(prompt, image)) − 0.1672) / 1.0333 (Xu et al. 2023), typically −2.3 to 2. Prompts
    are truncated at 35 tokens."""

    path: str = "THUDM/ImageReward"
    """Hub name or file of the weights."""
    tokenizer: str = "google-bert/bert-base-uncased"
    """Tokenizer folder or hub name."""

    differentiable: ClassVar[bool] = True

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return networks.in_batches(self._values, samples, self.batch)

    def values(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        model = self._model()
        return model.values([p.text for p in prompts], clip_inputs(images, model.processor))

    def _values(self, samples: Sequence[Sample]) -> list[float]:
        import torch

        model = self._model()
        images = networks.to_pil([s.pixels for s in samples])
        pixels = model.processor(images=images, return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            return model.values([s.prompt.text for s in samples], pixels).tolist()

    def _model(self) -> BlipPreferenceModel:
        return _load_model(self.path, self.tokenizer, self.device)


@dataclass(frozen=True)
class BlipPreferenceModel:
    parts: nn.ModuleDict  # vision: BlipVisionModel · text: BlipTextModel · head
    tokenizer: Any
    processor: Any
    device: torch.device

    def values(self, texts: Sequence[str], pixels: Tensor) -> Tensor:
        """(N,) for prepared pixels, (N, 3, side, side)."""
        tokens = self.tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        ).to(self.device)
        vision = self.parts["vision"](pixels.to(self.device))
        text = self.parts["text"](
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=vision.last_hidden_state,
        )
        raw = self.parts["head"](text.last_hidden_state[:, 0])[:, 0]  # (N,)
        return (raw - MEAN) / DEVIATION


@networks.once
def _load_model(path: str, tokenizer: str, device: str) -> BlipPreferenceModel:
    from torch import nn
    from transformers import AutoTokenizer, BlipTextModel, BlipVisionModel, CLIPImageProcessorPil

    tensors = rename_blip(checkpoints.read(path, FILE))
    vision, text = _configs(tensors, path)
    parts = nn.ModuleDict(
        {
            "vision": BlipVisionModel(vision),
            "text": BlipTextModel(text, add_pooling_layer=False),
            "head": checkpoints.preference_head(text.hidden_size),
        }
    )
    checkpoints.fill(parts, tensors, f'"{path}"')
    target = pick_device(device)
    side = vision.image_size  # as CLIP: bicubic, centre crop, CLIP's mean and std
    processor = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=side)
    text_tokenizer = networks.load_pretrained(AutoTokenizer, tokenizer)
    return BlipPreferenceModel(
        parts.to(target).eval().requires_grad_(False), text_tokenizer, processor, target
    )


def _configs(tensors: Mapping[str, Tensor], path: str) -> tuple[Any, Any]:
    """Infers the sizes from the tensors: the file has no config."""
    from transformers import BlipTextConfig, BlipVisionConfig

    try:
        _, positions, width = tensors["vision.embeddings.position_embedding"].shape
        patch = tensors["vision.embeddings.patch_embedding.weight"].shape[-1]
        vocabulary, hidden = tensors["text.embeddings.word_embeddings.weight"].shape
        vision = BlipVisionConfig(
            hidden_size=width,
            intermediate_size=tensors["vision.encoder.layers.0.mlp.fc1.weight"].shape[0],
            num_hidden_layers=_layers(tensors, "vision.encoder.layers."),
            num_attention_heads=width // HEAD_DIM,
            image_size=math.isqrt(positions - 1) * patch,
            patch_size=patch,
            layer_norm_eps=1e-6,  # BLIP's training value; transformers' default differs
        )
        text = BlipTextConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            encoder_hidden_size=width,
            intermediate_size=tensors["text.encoder.layer.0.intermediate.dense.weight"].shape[0],
            num_hidden_layers=_layers(tensors, "text.encoder.layer."),
            num_attention_heads=hidden // HEAD_DIM,
            max_position_embeddings=tensors["text.embeddings.position_embeddings.weight"].shape[0],
        )
    except KeyError as error:
        raise UserError(f'"{path}" lacks {error}; it is a different kind of model') from error
    return vision, text


def _layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    numbers = (
        name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)
    )
    return len(set(numbers))


_BLOCK = re.compile(r"blip\.visual_encoder\.blocks\.(\d+)\.(norm1|norm2|attn|mlp)\.(.+)")
_PARTS = {"norm1": "layer_norm1", "norm2": "layer_norm2", "attn": "self_attn", "mlp": "mlp"}
_NAMES = {
    "blip.visual_encoder.cls_token": "vision.embeddings.class_embedding",
    "blip.visual_encoder.pos_embed": "vision.embeddings.position_embedding",
    "blip.visual_encoder.patch_embed.proj.weight": "vision.embeddings.patch_embedding.weight",
    "blip.visual_encoder.patch_embed.proj.bias": "vision.embeddings.patch_embedding.bias",
    "blip.visual_encoder.norm.weight": "vision.post_layernorm.weight",
    "blip.visual_encoder.norm.bias": "vision.post_layernorm.bias",
}
_UNUSED = {  # left over from BLIP's training
    "blip.text_encoder.embeddings.position_ids",
    "blip.vision_proj.weight",
    "blip.vision_proj.bias",
    "blip.text_proj.weight",
    "blip.text_proj.bias",
}


def rename_blip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames ImageReward's tensors (BLIP's names) to those of transformers' Blip classes."""
    return {_name(name): tensor for name, tensor in tensors.items() if name not in _UNUSED}


def _name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    if block := _BLOCK.fullmatch(name):
        number, part, rest = block.groups()
        rest = rest.replace("proj.", "projection.") if part == "attn" else rest
        return f"vision.encoder.layers.{number}.{_PARTS[part]}.{rest}"
    if name.startswith("blip.text_encoder."):
        return "text." + name.removeprefix("blip.text_encoder.")
    if name.startswith("mlp.layers."):
        return "head." + name.removeprefix("mlp.layers.")
    raise UserError(f'"{name}" is not a tensor of ImageReward; expected ImageReward weights')
