"""Models that see and write: Qwen2-VL, Qwen2.5-VL and Qwen3-VL, through transformers'
AutoModelForImageTextToText.

Pictures take part as embeddings: the vision tower's features are put in the place of the picture
tokens, and Qwen3-VL's decoder also adds features of the tower's earlier layers to its own first
ones (DeepStack). Tokens have a place in time, height and width (mrope); transformers' own
`get_rope_index` counts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gesso import config
from gesso.models.tokens import loading
from gesso.models.tokens.attention import WINDOWS
from gesso.models.tokens.feature_cache import FeatureCache, images_of
from gesso.models.tokens.packing import pack
from gesso.models.tokens.transformer import PROJECTIONS, Sequences, TransformerModel, distinct
from gesso.quiet import quiet
from gesso.rollout import TokenPrompt
from gesso.types import Prompt, UserError

PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
}
TOWER = "model.visual"
PATCHES_PER_PASS = 32768
"""Patches of pictures that go through the tower together on a GPU."""
TEMPLATE_TOKENS = 8
"""Least number of a prompt's tokens that are not image tokens: the chat template's."""


class VisionLanguage(TransformerModel):
    kinds: ClassVar[Mapping[str, str]] = {
        "qwen2_vl": "Qwen2-VL (qwen2_vl)",
        "qwen2_5_vl": "Qwen2.5-VL (qwen2_5_vl)",
        "qwen3_vl": "Qwen3-VL (qwen3_vl)",
    }
    auto = "AutoModelForImageTextToText"
    other = "causal"

    def __init__(self, settings: config.TokenModel, seed: int = 0) -> None:
        self.feature_cache: FeatureCache | None = None if settings.train_vision else FeatureCache()
        self.encoded_images = 0  # pictures that went through the vision tower
        super().__init__(settings, seed)
        tower = self.module.get_submodule(TOWER)
        if self.feature_cache is not None:
            for parameter in tower.parameters():
                parameter.data = parameter.data.to(self.dtype)  # a frozen part needs no float32

    @property
    def decoder(self) -> Any:
        return self.module.model.language_model

    @property
    def deep(self) -> bool:
        """Whether its decoder takes features of several layers of the tower (DeepStack)."""
        return self.module.config.model_type == "qwen3_vl"

    @property
    def tower(self) -> nn.Module:
        return self.module.get_submodule(TOWER)

    @property
    def feature_cache_limit(self) -> int:
        return 0 if self.feature_cache is None else self.feature_cache.limit

    def blank(self, length: int) -> TokenPrompt:
        """One image, as large as the image processor lets it be and as fits, then text."""
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
        """The processor's, which knows of pictures, before the tokenizer's. The image processor is
        made here as well; transformers' processors of both want torchvision for videos, so text
        and pictures are put together here."""
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

    def _suppressed_ids(self) -> set[int]:
        config = self.module.config
        return super()._suppressed_ids() | {
            config.image_token_id,
            config.video_token_id,
            config.vision_start_token_id,
            config.vision_end_token_id,
        }

    def encode(self, prompt: Prompt) -> TokenPrompt:
        between = self._between_pictures(prompt)
        pixels, grid = self._patches(prompt)
        ids = self._ids(between, [] if grid is None else grid.prod(-1).tolist())
        return TokenPrompt(ids, (ids == self.module.config.image_token_id).long(), pixels, grid)

    def length(self, prompt: Prompt) -> int:
        """Of pictures only the sizes are read."""
        between = self._between_pictures(prompt)
        with _usable(prompt):
            sizes = [picture.size for picture in prompt.images]
            patches = [self.images.get_number_of_image_patches(*size, {}) for size in sizes]
        return len(self._ids(between, patches))

    def _between_pictures(self, prompt: Prompt) -> list[str]:
        """The conversation, cut where its pictures are."""
        parts = [*({"type": "image"} for _ in prompt.images), {"type": "text", "text": prompt.text}]
        messages = prompt.messages or ({"role": "user", "content": parts},)
        between = self._chat(messages, prompt.where).split(self._place)
        if len(between) - 1 != len(prompt.images):
            raise UserError(
                f"{prompt.where}: {len(prompt.images)} pictures, but {len(between) - 1} places for "
                f'them; give one {{"type": "image"}} part for each, and no {self._place} in a text'
            )
        return between

    @property
    def _place(self) -> str:
        return self.tokenizer.convert_ids_to_tokens(self.module.config.image_token_id)

    def _ids(self, between: list[str], patches: list[int]) -> Tensor:
        """As transformers' processors do: each picture's token is repeated for every place of its
        features, before the text is cut into tokens."""
        places = [self._place * (n // self.images.merge_size**2) for n in patches]
        text = "".join(part for pair in zip_longest(between, places, fillvalue="") for part in pair)
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]

    def _patches(self, prompt: Prompt) -> tuple[Tensor | None, Tensor | None]:
        if not prompt.images:
            return None, None
        with _usable(prompt):
            opened = [picture.open() for picture in prompt.images]
            inputs = self.images(images=opened, return_tensors="pt")
        return inputs["pixel_values"], inputs["image_grid_thw"]

    def _positions(self, prompt: TokenPrompt) -> Tensor:
        """In time, height and width. A fourth row, which transformers' own attention needs to tell
        packed sequences apart, is not needed: ours gets their lengths."""
        places, _ = self.module.model.get_rope_index(
            prompt.ids[None], mm_token_type_ids=prompt.kinds[None], image_grid_thw=prompt.grid
        )
        return places[:, 0]

    def _rows(self, positions: Tensor) -> Tensor:
        return positions.expand(3, -1, -1)

    def _embed(self, sequences: Sequences) -> dict[str, Any]:
        embeds = self.module.get_input_embeddings()(sequences.ids)[None]  # (1, T, D)
        self._encode_new_images(distinct(sequences.prompts).values())
        encoded = {
            key: self.features(prompt)
            for key, prompt in distinct(sequences.prompts).items()
            if prompt.grid is not None
        }
        if not encoded:
            return {"inputs_embeds": embeds}
        per_prompt = [encoded[id(p)] for p in sequences.prompts if id(p) in encoded]
        features = torch.cat(per_prompt, 1).to(self.device, embeds.dtype)  # (1 + deep, places, D)
        kinds = []
        for prompt, (_, *after) in zip(sequences.prompts, sequences.lengths, strict=True):
            kinds += [prompt.kinds, torch.zeros(sum(after), dtype=torch.long)]
        places = (torch.cat(kinds) == 1)[None].to(self.device)  # (1, T)
        embeds = embeds.masked_scatter(places[..., None], features[0])
        deep = {"visual_pos_masks": places, "deepstack_visual_embeds": list(features[1:])}
        return {"inputs_embeds": embeds, **(deep if len(features) > 1 else {})}

    def features(self, prompt: TokenPrompt) -> Tensor:
        """Of its images, (1 + deep, tokens, D): their embeddings, and DeepStack's layers.
        On a CPU images go through the tower one by one: in a batch their last bits would depend on
        each other, and a resumed run would differ from an uninterrupted one."""
        assert prompt.grid is not None
        return torch.cat([self._image_features(prompt, i) for i in range(len(prompt.grid))], 1)

    def tower_features(self, prompt: TokenPrompt) -> list[Tensor]:
        """Of each of its images, in one pass of the tower and without the cache."""
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
        """What the cache would hold of an image: on the meta device it has no content to be found
        by."""
        deep = self.module.config.vision_config.to_dict().get("deepstack_visual_indexes", ())
        tokens = int(grid.prod()) // self.images.merge_size**2
        size = 1 + len(deep), tokens, self.decoder.config.hidden_size
        return torch.empty(size, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def _encode_new_images(self, prompts: Iterable[TokenPrompt]) -> None:
        """On a GPU one image is too little work: those that are not cached go through the tower
        together. Their neighbours change no more than the last bit."""
        if self.feature_cache is None or not self._pays(None, True):
            return
        with_images = [prompt for prompt in prompts if prompt.grid is not None]
        with ThreadPoolExecutor() as pool:
            keys = pool.map(self.feature_cache.keys, with_images)
        new = {
            key: image
            for prompt, image_keys in zip(with_images, keys, strict=True)
            for key, image in zip(image_keys, images_of(prompt), strict=True)
            if key not in self.feature_cache
        }
        for part in pack([len(pixels) for pixels, _ in new.values()], PATCHES_PER_PASS):
            some = [list(new)[i] for i in part]
            pixels, grids = zip(*(new[key] for key in some), strict=True)
            encoded = self._run_tower(torch.cat(pixels), torch.stack(grids))
            for key, features in zip(some, encoded, strict=True):
                self.feature_cache.add(key, features)

    def _run_tower(self, pixels: Tensor, grids: Tensor) -> list[Tensor]:
        """Of every image, (1 + deep, tokens, D)."""
        self.encoded_images += len(grids)
        # transformers computes with the numbers in a grid, and the meta device has none.
        sizes = grids if self.device.type == "meta" else grids.to(self.device)
        with self._all_windows_at_once():
            seen = self.module.model.get_image_features(
                pixels.to(self.device), sizes, return_dict=True
            )
        deep = seen.get("deepstack_features") or []
        layers = (seen.pooler_output, *deep)  # of each picture, or all together: it has varied
        joined = torch.stack([x if isinstance(x, Tensor) else torch.cat(x) for x in layers])
        places = grids.prod(-1) // self.images.merge_size**2
        return list(joined.split(places.tolist(), dim=1))

    @contextmanager
    def _all_windows_at_once(self) -> Iterator[None]:
        """Within a pass of the tower only: when a model is constructed, transformers would search
        this name on the hub."""
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
        raise UserError(f"{prompt.where}: a picture cannot be used: {error}") from error
