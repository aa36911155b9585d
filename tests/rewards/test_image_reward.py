"""ImageReward with tiny random weights under the published names, against a plain BLIP written here
from the equations, without transformers."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from gesso.rewards import assembly, base
from gesso.rewards.image import image_reward
from gesso.types import Prompt, Sample
from tests.rewards.test_pickscore import MEAN, STD, noise
from tests.typed import sure

SIDE, PATCH = 64, 16
WIDE, HIDDEN = 128, 192  # widths of image tokens (2 heads of 64) and text tokens (3 heads)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
VOCAB = [*WORDS, *(f"##{letter}" for letter in string.ascii_lowercase)]
Tensors = dict[str, torch.Tensor]


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of such a checkpoint."""
    eye, read = "blip.visual_encoder", "blip.text_encoder"
    yield f"{eye}.cls_token", (1, 1, WIDE)
    yield f"{eye}.pos_embed", (1, (SIDE // PATCH) ** 2 + 1, WIDE)
    yield f"{eye}.patch_embed.proj.weight", (WIDE, 3, PATCH, PATCH)
    yield f"{eye}.patch_embed.proj.bias", (WIDE,)
    for i in range(3):
        block = f"{eye}.blocks.{i}"
        for name, out, into in (
            ("attn.qkv", 3 * WIDE, WIDE),
            ("attn.proj", WIDE, WIDE),
            ("mlp.fc1", 4 * WIDE, WIDE),
            ("mlp.fc2", WIDE, 4 * WIDE),
        ):
            yield f"{block}.{name}.weight", (out, into)
            yield f"{block}.{name}.bias", (out,)
        for name in ("norm1", "norm2"):
            yield f"{block}.{name}.weight", (WIDE,)
            yield f"{block}.{name}.bias", (WIDE,)
    yield f"{eye}.norm.weight", (WIDE,)
    yield f"{eye}.norm.bias", (WIDE,)
    yield f"{read}.embeddings.word_embeddings.weight", (len(VOCAB) + 2, HIDDEN)  # [DEC] and [ENC]
    yield f"{read}.embeddings.position_embeddings.weight", (40, HIDDEN)
    yield f"{read}.embeddings.LayerNorm.weight", (HIDDEN,)
    yield f"{read}.embeddings.LayerNorm.bias", (HIDDEN,)
    for i in range(2):
        layer = f"{read}.encoder.layer.{i}"
        linears = [("intermediate.dense", 4 * HIDDEN, HIDDEN), ("output.dense", HIDDEN, 4 * HIDDEN)]
        for where, source in (("attention", HIDDEN), ("crossattention", WIDE)):
            linears += [(f"{where}.self.query", HIDDEN, HIDDEN)]
            linears += [(f"{where}.self.key", HIDDEN, source)]
            linears += [(f"{where}.self.value", HIDDEN, source)]
            linears += [(f"{where}.output.dense", HIDDEN, HIDDEN)]
        for name, out, into in linears:
            yield f"{layer}.{name}.weight", (out, into)
            yield f"{layer}.{name}.bias", (out,)
        for name in ("attention.output", "crossattention.output", "output"):
            yield f"{layer}.{name}.LayerNorm.weight", (HIDDEN,)
            yield f"{layer}.{name}.LayerNorm.bias", (HIDDEN,)
    for name, width in (("vision_proj", WIDE), ("text_proj", HIDDEN)):  # unused
        yield f"blip.{name}.weight", (256, width)
        yield f"blip.{name}.bias", (256,)
    widths = [HIDDEN, 1024, 128, 64, 16, 1]
    for number, into, out in zip((0, 2, 4, 6, 7), widths[:-1], widths[1:], strict=True):
        yield f"mlp.layers.{number}.weight", (out, into)
        yield f"mlp.layers.{number}.bias", (out,)


def published() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes():
        spread = 2 / np.sqrt(np.prod(shape[1:])) if len(shape) in (2, 4) else 0.5
        if "_embed" in name or "cls_token" in name:
            spread /= 200  # so small that the epsilon of the first norm matters
        tensors[name] = spread * torch.randn(shape, generator=generator)
    tensors["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    return tensors


class Plain:
    """ImageReward by its equations, in float64."""

    def __init__(self, tensors: Tensors) -> None:
        self.t = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.t[f"{name}.weight"].T + self.t[f"{name}.bias"]

    def norm(self, x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt()
        return x * self.t[f"{name}.weight"] + self.t[f"{name}.bias"]

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Heads of 64, without a mask."""
        heads = []
        for first in range(0, q.shape[-1], 64):
            part = slice(first, first + 64)
            heads.append(torch.softmax(q[:, part] @ k[:, part].T / 8, -1) @ v[:, part])
        return torch.cat(heads, -1)

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        eye = "blip.visual_encoder"
        weight, bias = (self.t[f"{eye}.patch_embed.proj.{kind}"] for kind in ("weight", "bias"))
        patches = F.conv2d(pixels[None].double(), weight, bias, stride=PATCH)[0]
        x = torch.cat([self.t[f"{eye}.cls_token"][0], patches.flatten(1).T])
        x = x + self.t[f"{eye}.pos_embed"][0]
        for i in range(3):
            block = f"{eye}.blocks.{i}"
            qkv = self.linear(self.norm(x, f"{block}.norm1", 1e-6), f"{block}.attn.qkv")
            x = x + self.linear(self.attention(*qkv.chunk(3, -1)), f"{block}.attn.proj")
            inner = self.linear(self.norm(x, f"{block}.norm2", 1e-6), f"{block}.mlp.fc1")
            x = x + self.linear(F.gelu(inner), f"{block}.mlp.fc2")
        return self.norm(x, f"{eye}.norm", 1e-6)

    def read(self, ids: list[int], seen: torch.Tensor) -> torch.Tensor:
        """Without padding, so nothing is masked."""
        start = "blip.text_encoder.embeddings"
        x = self.t[f"{start}.word_embeddings.weight"][ids]
        x = x + self.t[f"{start}.position_embeddings.weight"][: len(ids)]
        x = self.norm(x, f"{start}.LayerNorm", 1e-12)
        for i in range(2):
            layer = f"blip.text_encoder.encoder.layer.{i}"
            for where, source in (("attention", None), ("crossattention", seen)):
                kv = x if source is None else source
                q = self.linear(x, f"{layer}.{where}.self.query")
                k = self.linear(kv, f"{layer}.{where}.self.key")
                v = self.linear(kv, f"{layer}.{where}.self.value")
                y = self.linear(self.attention(q, k, v), f"{layer}.{where}.output.dense")
                x = self.norm(x + y, f"{layer}.{where}.output.LayerNorm", 1e-12)
            y = F.gelu(self.linear(x, f"{layer}.intermediate.dense"))
            y = self.linear(y, f"{layer}.output.dense")
            x = self.norm(x + y, f"{layer}.output.LayerNorm", 1e-12)
        return x[0]

    def score(self, ids: list[int], pixels: torch.Tensor) -> float:
        x = self.read(ids, self.see(pixels))
        for number in (0, 2, 4, 6, 7):
            x = self.linear(x, f"mlp.layers.{number}")
        return (x.item() - 0.16717362830052426) / 1.0333394966054072


def ids_by_hand(text: str) -> list[int]:
    """Letters, those inside a word marked, between [CLS] and [SEP], cut to 35."""
    letters = [
        VOCAB.index(c if i == 0 else f"##{c}") for w in text.split() for i, c in enumerate(w)
    ]
    return [2, *letters[:33], 3]


def pixels_by_hand(image: np.ndarray) -> torch.Tensor:
    """(3, SIDE, SIDE): shortest side to SIDE by bicubic, centre crop, CLIP's mean and std."""
    height, width = image.shape[:2]
    size = int(width * SIDE / min(height, width)), int(height * SIDE / min(height, width))
    resized = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    left, top = (size[0] - SIDE) // 2, (size[1] - SIDE) // 2
    pixels = np.asarray(resized.crop((left, top, left + SIDE, top + SIDE)), dtype=np.float64)
    return torch.tensor(((pixels / 255 - MEAN) / STD).transpose(2, 0, 1))


def samples() -> list[Sample]:
    texts = ["a red kite", "a red kite", "two dogs", "word " * 20, "a red kite"]
    sizes = [(64, 96), (96, 64), (64, 64), (80, 80), (128, 70)]
    return [
        Sample(Prompt(text), noise(*size, seed=i), i)
        for i, (text, size) in enumerate(zip(texts, sizes, strict=True))
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertTokenizer

    folder = tmp_path_factory.mktemp("image-reward")
    torch.save(published(), folder / "ImageReward.pt")
    BertTokenizer(vocab={token: i for i, token in enumerate(VOCAB)}).save_pretrained(folder)
    return folder


def options(folder: Path) -> dict:
    return {"path": str(folder), "tokenizer": str(folder), "device": "cpu"}


def by_equations() -> list[float]:
    plain = Plain(published())
    return [plain.score(ids_by_hand(s.prompt.text), pixels_by_hand(s.pixels)) for s in samples()]


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_values_follow_the_equations(folder: Path, batch: int) -> None:
    reward = base.load(assembly.REWARDS["image-reward"], {**options(folder), "batch": batch})
    scores = base.checked(reward, samples())
    assert [s.error for s in scores] == [None] * 5
    assert [s.value for s in scores] == pytest.approx(by_equations(), abs=2e-4)
    assert np.std([s.value for s in scores]) > 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same(folder: Path) -> None:
    """Up to TF32."""
    reward = base.load(assembly.REWARDS["image-reward"], {**options(folder), "device": "auto"})
    got = [score.value for score in base.checked(reward, samples())]
    assert got == pytest.approx(by_equations(), abs=0.05)


def test_every_published_name_is_mapped_at_the_real_size() -> None:
    """On the meta device: BLIP ViT-L and BERT-base, 24 and 12 layers, as ImageReward-v1.0."""
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    with torch.device("meta"):
        vision = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=1024,
                intermediate_size=4096,
                num_hidden_layers=24,
                num_attention_heads=16,
                image_size=224,
            )
        )
        text = BlipTextModel(
            BlipTextConfig(encoder_hidden_size=1024, num_attention_heads=12),
            add_pooling_layer=False,
        )
    expected = {f"vision.{name}": tensor.shape for name, tensor in vision.state_dict().items()}
    expected |= {f"text.{name}": tensor.shape for name, tensor in text.state_dict().items()}
    tiny = {name: shape for name, shape in shapes() if name.startswith("blip.")}
    grown = {
        name.replace(".blocks.2.", f".blocks.{i}.").replace(".layer.1.", f".layer.{i}."): shape
        for name, shape in tiny.items()
        for i in (range(24) if ".blocks.2." in name else range(12) if ".layer.1." in name else [0])
    }
    real = {WIDE: 1024, 3 * WIDE: 3072, 4 * WIDE: 4096, HIDDEN: 768, 4 * HIDDEN: 3072}
    renamed = image_reward.rename_blip({name: torch.zeros(0) for name in grown})
    assert renamed.keys() == expected.keys()
    for name, shape in grown.items():
        candidates = (expected[new] for new in image_reward.rename_blip({name: torch.zeros(0)}))
        for candidate in candidates:
            assert [real.get(n, 0) for n in shape if n in real] == [
                n for n in candidate if n in real.values()
            ], name


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda t: t.pop("mlp.layers.7.bias"), "1 missing, the first is head.7.bias"),
        (
            lambda t: t.pop("blip.text_encoder.encoder.layer.1.crossattention.self.key.weight"),
            "1 missing, the first is text.encoder.layer.1.crossattention.self.key.weight",
        ),
        (
            lambda t: t.update({"blip.text_encoder.pooler.dense.bias": torch.zeros(HIDDEN)}),
            "1 unexpected, the first is text.pooler.dense.bias",
        ),
        (lambda t: t.update(extra=torch.zeros(1)), '"extra" is not a tensor of ImageReward'),
        (
            lambda t: t.pop("blip.visual_encoder.pos_embed"),
            "lacks 'vision.embeddings.position_embedding'; it is a different kind of model",
        ),
        (
            lambda t: t.update({"mlp.layers.6.weight": torch.zeros(16, 63)}),
            "head.6.weight has shape (16, 63), expected (16, 64)",
        ),
    ],
)
def test_other_weights_are_rejected(folder: Path, tmp_path: Path, change, sentence: str) -> None:
    tensors = published()
    change(tensors)
    torch.save(tensors, tmp_path / "ImageReward.pt")
    reward = base.load(assembly.REWARDS["image-reward"], {**options(folder), "path": str(tmp_path)})
    error = sure(str, base.checked(reward, samples())[0].error)
    assert sentence in error and "\n" not in error


def test_unused_tensors_are_optional(folder: Path, tmp_path: Path) -> None:
    tensors = {name: t for name, t in published().items() if name not in image_reward._UNUSED}
    file = tmp_path / "slim.pt"
    torch.save(tensors, file)
    reward = base.load(assembly.REWARDS["image-reward"], {**options(folder), "path": str(file)})
    assert base.checked(reward, samples()[:1])[0].value == pytest.approx(
        by_equations()[0], abs=2e-4
    )
