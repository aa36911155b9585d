"""Vision-language models: Qwen2-VL, Qwen2.5-VL and Qwen3-VL, through transformers'
AutoModelForImageTextToText.

The features of the vision tower replace the embeddings of the image tokens, and Qwen3-VL's decoder
also adds features of earlier layers of the tower to the outputs of its first layers (DeepStack).
Tokens have positions in time, height and width (M-RoPE), computed by transformers'
`get_rope_index`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gesso import config
from gesso.devices import to_device
from gesso.models.tokens import loading
from gesso.models.tokens.attention import WINDOWS
from gesso.models.tokens.feature_cache import FeatureCache, images_of
from gesso.models.tokens.packing import pack
from gesso.models.tokens.sequences import Sequences, distinct
from gesso.models.tokens.transformer import PROJECTIONS, TransformerModel
from gesso.quiet import quiet
from gesso.traces.tokens import TokenPrompt
from gesso.types import Prompt, UserError

PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
}
TOWER = "model.visual"
PATCHES_PER_PASS = 32768
"""Maximum number of image patches in one pass of the tower on a GPU."""
TEMPLATE_TOKENS = 8
"""Minimum number of tokens of a prompt that are not image tokens: those of the chat template."""


class VisionLanguage(TransformerModel):
    kinds: ClassVar[Mapping[str, str]] = {
        "qwen2_vl": "Qwen2-VL (qwen2_vl)",
        "qwen2_5_vl": "Qwen2.5-VL (qwen2_5_vl)",
        "qwen3_vl": "Qwen3-VL (qwen3_vl)",
    }
    auto = "AutoModelForImageTextToText"
    other = "causal"

    def __init__(self, settings: config.TokenModel, seed: int = 0, sharded: bool = False) -> None:
        self.feature_cache: FeatureCache | None = None if settings.train_vision else FeatureCache()
        self.encoded_images = 0  # number of images encoded by the vision tower
        self._known_positions = WeakTensorKeyDictionary()  # a prompt's ids → its positions
        super().__init__(settings, seed, sharded)
        tower = self.module.get_submodule(TOWER)
        if self.feature_cache is not None:
            for parameter in tower.parameters():
                parameter.data = parameter.data.to(self.dtype)  # a frozen tower needs no float32

    @property
    def decoder(self) -> Any:
        return self.module.model.language_model

    @property
    def deep(self) -> bool:
        """Whether the decoder uses features of several layers of the tower (DeepStack)."""
        return self.module.config.model_type == "qwen3_vl"

    @property
    def tower(self) -> nn.Module:
        return self.module.get_submodule(TOWER)

    @property
    def feature_cache_limit(self) -> int:
        return 0 if self.feature_cache is None else self.feature_cache.limit

    def blank(self, length: int) -> TokenPrompt:
        """One image of the maximum size that the processor allows and that fits, then text."""
        text_only = super().blank(length)
        images, config = self.images, self.module.config
        pixels_per_token = (images.patch_size * images.merge_size) ** 2
        max_pixels = images.size["longest_edge"]
        image_tokens = min(max_pixels // pixels_per_token, length - TEMPLATE_TOKENS)
        if image_tokens < 1:
            return text_only
        height = math.isqrt(image_tokens)
        width = image_tokens // height
        ids = text_only.ids
        ids[0] = config.vision_start_token_id
        ids[1 : 1 + height * width] = config.image_token_id
        grid = torch.tensor([[1, height * images.merge_size, width * images.merge_size]])
        values = self.module.get_submodule(TOWER).patch_embed.proj.weight[0].numel()
        patches = torch.empty(int(grid.prod()), values, device=self.device)
        return TokenPrompt(ids, (ids == config.image_token_id).long(), patches, grid)

    def _template(self, settings: config.TokenModel) -> str:
        """The processor's chat template, which supports images, otherwise the tokenizer's. This
        also creates the image processor. The combined processors of transformers require
        torchvision for videos, so this class combines text and images itself."""
        import transformers

        kind = getattr(transformers, PROCESSORS[self.module.config.model_type])
        pixels = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
        given = {name: value for name, value in pixels.items() if value is not None}
        with loading.readable(settings.path, "its image processor cannot be read"), quiet():
            self.images = transformers.AutoImageProcessor.from_pretrained(
                self.source, backend="pil", trust_remote_code=False, **given
            )
            template = kind.get_processor_dict(self.source)[0].get("chat_template")
        return loading.chat_template(template or self.tokenizer.chat_template, settings.path)

    def _trained(self, settings: config.TokenModel) -> tuple[list[str], str]:
        if not settings.train_vision:
            return list(PROJECTIONS), TOWER
        tower = self.module.get_submodule(TOWER)
        linear = [name for name, part in tower.named_modules() if isinstance(part, nn.Linear)]
        return [*PROJECTIONS, *(f"{TOWER}.{name}" for name in linear)], ""

    def suppressed_ids(self) -> set[int]:
        config = self.module.config
        return super().suppressed_ids() | {
            config.image_token_id,
            config.video_token_id,
            config.vision_start_token_id,
            config.vision_end_token_id,
        }

    def encode(self, prompt: Prompt) -> TokenPrompt:
        texts = self._texts_between_images(prompt)
        pixels, grid = self._patches(prompt)
        ids = self._ids(texts, [] if grid is None else grid.prod(-1).tolist())
        return TokenPrompt(ids, (ids == self.module.config.image_token_id).long(), pixels, grid)

    def length(self, prompt: Prompt) -> int:
        """Reads only the sizes of images."""
        texts = self._texts_between_images(prompt)
        with _usable(prompt):
            sizes = [image.size for image in prompt.images]
            patches = [self.images.get_number_of_image_patches(*size, {}) for size in sizes]
        return len(self._ids(texts, patches))

    def _messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        parts = [*({"type": "image"} for _ in prompt.images), {"type": "text", "text": prompt.text}]
        messages = prompt.messages or ({"role": "user", "content": parts},)
        return [dict(message) for message in messages]

    def _texts_between_images(self, prompt: Prompt) -> list[str]:
        """The conversation, split at its images."""
        texts = self._chat(self._messages(prompt), prompt.where).split(self._image_token)
        if len(texts) - 1 != len(prompt.images):
            raise UserError(
                f"{prompt.where}: got {len(prompt.images)} images, but {len(texts) - 1} image "
                'placeholders; use one {"type": "image"} part per image, and no '
                f"{self._image_token} in text"
            )
        return texts

    @property
    def _image_token(self) -> str:
        return self.tokenizer.convert_ids_to_tokens(self.module.config.image_token_id)

    def _ids(self, texts: list[str], patches: list[int]) -> Tensor:
        """As in transformers' processors, the image token is repeated for every feature of its
        image before the text is tokenized."""
        images = [self._image_token * (n // self.images.merge_size**2) for n in patches]
        text = "".join(part for pair in zip_longest(texts, images, fillvalue="") for part in pair)
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]

    def _patches(self, prompt: Prompt) -> tuple[Tensor | None, Tensor | None]:
        if not prompt.images:
            return None, None
        with _usable(prompt):
            opened = [image.open() for image in prompt.images]
            inputs = self.images(images=opened, return_tensors="pt")
        return inputs["pixel_values"], inputs["image_grid_thw"]

    def _positions(self, prompt: TokenPrompt) -> Tensor:
        """Positions in time, height and width, computed once per prompt: in every micro-batch they
        would delay the device. The fourth row, from which transformers' attention detects packed
        sequences, is not needed: our attention receives their lengths."""
        if prompt.ids not in self._known_positions:
            positions, _ = self.module.model.get_rope_index(
                prompt.ids[None], mm_token_type_ids=prompt.kinds[None], image_grid_thw=prompt.grid
            )
            self._known_positions[prompt.ids] = positions[:, 0]
        return self._known_positions[prompt.ids]

    def _rows(self, positions: Tensor) -> Tensor:
        return positions.expand(3, -1, -1)

    def _embed(self, sequences: Sequences) -> dict[str, Any]:
        embeds = self.module.get_input_embeddings()(sequences.ids)[None]  # (1, T, D)
        self._encode_new_images(distinct(sequences.prompts).values())
        encoded = {
            key: self._features_of_images(prompt)
            for key, prompt in distinct(sequences.prompts).items()
            if prompt.grid is not None
        }
        if not encoded:
            return {"inputs_embeds": embeds}
        per_prompt = [encoded[id(p)] for p in sequences.prompts if id(p) in encoded]
        # One by one: to join them on the CPU takes longer than to copy them.
        moved = [to_device(image, self.device) for images in per_prompt for image in images]
        features = torch.cat(moved, 1).to(embeds.dtype)  # (1 + deep, tokens, D)
        kinds = []
        for prompt, (_, *after) in zip(sequences.prompts, sequences.lengths, strict=True):
            kinds += [prompt.kinds, torch.zeros(sum(after), dtype=torch.long)]
        is_image = to_device((torch.cat(kinds) == 1)[None], self.device)  # (1, T)
        embeds = embeds.masked_scatter(is_image[..., None], features[0])
        deep = {"visual_pos_masks": is_image, "deepstack_visual_embeds": list(features[1:])}
        return {"inputs_embeds": embeds, **(deep if len(features) > 1 else {})}

    def features(self, prompt: TokenPrompt) -> Tensor:
        """Features of the prompt's images, (1 + deep, tokens, D): embeddings and DeepStack layers.
        On a CPU images are encoded one by one: in a batch their last bits would depend on each
        other, and a resumed run would differ from an uninterrupted one."""
        return torch.cat(self._features_of_images(prompt), 1)

    def _features_of_images(self, prompt: TokenPrompt) -> list[Tensor]:
        assert prompt.grid is not None
        return [self._image_features(prompt, i) for i in range(len(prompt.grid))]

    def tower_features(self, prompt: TokenPrompt) -> list[Tensor]:
        """Features of each image of the prompt, in one pass of the tower and without the cache."""
        assert prompt.pixels is not None and prompt.grid is not None
        return self._run_tower(prompt.pixels, prompt.grid)

    def _image_features(self, prompt: TokenPrompt, i: int) -> Tensor:
        if self.feature_cache is not None and self.device.type == "meta":
            assert prompt.grid is not None
            return self._cached_shape(prompt.grid[i])
        pixels, grid = images_of(prompt)[i]
        if self.feature_cache is None:
            return self._run_tower(pixels, grid[None])[0]
        key = self.feature_cache.keys(prompt)[i]
        with torch.no_grad():
            return self.feature_cache.features(key, lambda: self._run_tower(pixels, grid[None])[0])

    def _cached_shape(self, grid: Tensor) -> Tensor:
        """An empty tensor with the shape of an image's features: on the meta device an image has no
        content to look up in the cache."""
        deep = self.module.config.vision_config.to_dict().get("deepstack_visual_indexes", ())
        tokens = int(grid.prod()) // self.images.merge_size**2
        size = 1 + len(deep), tokens, self.decoder.config.hidden_size
        return torch.empty(size, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def _encode_new_images(self, prompts: Iterable[TokenPrompt]) -> None:
        """On a GPU a single image is too little work, so images that are not cached are encoded
        together. Other images in a batch change at most the last bit."""
        if self.feature_cache is None or not self._pays(None, True):
            return
        with_images = [prompt for prompt in prompts if prompt.grid is not None]
        self.feature_cache.hash_new(with_images)
        new = {
            key: image
            for prompt in with_images
            for key, image in zip(self.feature_cache.keys(prompt), images_of(prompt), strict=True)
            if key not in self.feature_cache
        }
        for part in pack([len(pixels) for pixels, _ in new.values()], PATCHES_PER_PASS):
            some = [list(new)[i] for i in part]
            pixels, grids = zip(*(new[key] for key in some), strict=True)
            encoded = self._run_tower(torch.cat(pixels), torch.stack(grids))
            for key, features in zip(some, encoded, strict=True):
                self.feature_cache.add(key, features)

    def _run_tower(self, pixels: Tensor, grids: Tensor) -> list[Tensor]:
        """Features of every image, (1 + deep, tokens, D)."""
        self.encoded_images += len(grids)
        # transformers computes with the values of the grid, which do not exist on the meta device.
        sizes = grids if self.device.type == "meta" else grids.to(self.device)
        with self._all_windows_at_once():
            output = self.module.model.get_image_features(
                pixels.to(self.device), sizes, return_dict=True
            )
        deep = output.get("deepstack_features") or []
        layers = (output.pooler_output, *deep)  # per image or concatenated, depending on version
        joined = torch.stack([x if isinstance(x, Tensor) else torch.cat(x) for x in layers])
        tokens = grids.prod(-1) // self.images.merge_size**2
        return list(joined.split(tokens.tolist(), dim=1))

    @contextmanager
    def _all_windows_at_once(self) -> Iterator[None]:
        """Set only within a pass of the tower: when a model is constructed, transformers would look
        up this name on the hub."""
        config = self.module.get_submodule(TOWER).config
        before = config._attn_implementation
        try:
            if self._pays(None, True):
                config._attn_implementation = WINDOWS
            yield
        finally:
            config._attn_implementation = before


@contextmanager
def _usable(prompt: Prompt) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"{prompt.where}: an image cannot be used: {error}") from error
