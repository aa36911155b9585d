"""clip-score, aesthetic and hps with tiny random weights, against plain computations. HPS's file
has open_clip's names, so this file has a plain open_clip ViT to compare with transformers'."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from gesso.config import RewardEntry
from gesso.rewards import assembly, base
from gesso.rewards.image import hps
from gesso.rewards.transport.workers import WorkerScorer
from gesso.types import Prompt, Sample
from tests.rewards.test_pickscore import (
    MEAN,
    SIDE,
    STD,
    VOCAB,
    by_hand,
    ids_by_hand,
    logit_by_hand,
    noise,
    samples,
    tiny_clip,
)
from tests.typed import sure

WIDTHS = [12, 1024, 128, 64, 16, 1]  # of the head behind the tiny CLIP


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_clip(tmp_path_factory.mktemp("clip"), seed=3)


def values(name: str, some: list[Sample], **options: object) -> list[float]:
    reward = base.load(assembly.REWARDS[name], {"device": "cpu", **options})
    scores = base.checked(reward, some)
    assert [s.error for s in scores] == [None] * len(some)
    return [sure(float, s.value) for s in scores]


def error(name: str, **options: object) -> str:
    reward = base.load(assembly.REWARDS[name], {"device": "cpu", **options})
    message = base.checked(reward, samples())[0].error
    assert message is not None and "\n" not in message
    return message


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_clip_score_is_the_logit_over_30(folder: Path, batch: int) -> None:
    got = values("clip-score", samples(), path=str(folder), batch=batch)
    expected = [logit_by_hand(folder, s.prompt.text, s.pixels) / 30 for s in samples()]
    assert got == pytest.approx(expected, abs=2e-5)
    assert np.std(got) > 0.01


def head(seed: int) -> dict[str, torch.Tensor]:
    """As published: five linear layers numbered with the dropouts between them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for number, (into, out) in zip((0, 2, 4, 6, 7), pairwise(WIDTHS), strict=True):
        tensors[f"layers.{number}.weight"] = torch.randn(out, into, generator=generator) / into**0.5
        tensors[f"layers.{number}.bias"] = torch.randn(out, generator=generator)
    return tensors


def beauty_by_hand(folder: Path, tensors: dict[str, torch.Tensor], image: np.ndarray) -> float:
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(folder).eval()
    with torch.no_grad():
        pooled = model.vision_model(pixel_values=by_hand(image)[None]).pooler_output
        x = model.visual_projection(pooled)[0].double()
    x = x / x.square().sum().sqrt()
    for number in (0, 2, 4, 6, 7):
        weight, bias = (tensors[f"layers.{number}.{kind}"].double() for kind in ("weight", "bias"))
        x = weight @ x + bias
    return x.item()


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_aesthetic_is_the_head_on_the_unit_embedding(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    from safetensors.torch import save_file

    file = tmp_path / f"head.{kind}"
    (torch.save if kind == "pth" else save_file)(head(0), file)
    got = values("aesthetic", samples(), path=str(folder), head=str(file), batch=2)
    expected = [beauty_by_hand(folder, head(0), s.pixels) for s in samples()]
    assert got == pytest.approx(expected, abs=1e-4)
    assert np.std(got) > 0.05


def test_aesthetic_takes_its_head_from_a_folder(folder: Path, tmp_path: Path) -> None:
    torch.save(head(1), tmp_path / "sac+logos+ava1-l14-linearMSE.pth")
    got = values("aesthetic", samples()[:1], path=str(folder), head=str(tmp_path))
    assert got == pytest.approx([beauty_by_hand(folder, head(1), samples()[0].pixels)], abs=1e-4)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda t: t.pop("layers.4.bias"), "1 missing, the first is 4.bias"),
        (
            lambda t: t.update({"layers.9.bias": torch.zeros(1)}),
            "1 unexpected, the first is 9.bias",
        ),
        (
            lambda t: t.update({"layers.0.weight": torch.zeros(1024, 768)}),
            "0.weight has shape (1024, 768), expected (1024, 12)",
        ),
    ],
)
def test_an_invalid_head_is_rejected(folder: Path, tmp_path: Path, change, sentence: str) -> None:
    tensors = head(0)
    change(tensors)
    torch.save(tensors, tmp_path / "head.pth")
    message = error("aesthetic", path=str(folder), head=str(tmp_path / "head.pth"))
    assert message.endswith(f'the head "{tmp_path}/head.pth" do not match the model: {sentence}')


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same(folder: Path, tmp_path: Path) -> None:
    """Up to TF32."""
    torch.save(head(0), tmp_path / "head.pth")
    for name, more in (("clip-score", {}), ("aesthetic", {"head": str(tmp_path / "head.pth")})):
        options = {"path": str(folder), **more}
        near = pytest.approx(values(name, samples(), **options), abs=0.02)
        assert values(name, samples(), **options, device="auto") == near


class Harmful:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("harm-was-done"),))


def test_no_object_is_unpickled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"layers.0.weight": Harmful()}, "head.pth")
    message = error("aesthetic", path=str(folder), head=str(tmp_path / "head.pth"))
    assert f"{tmp_path}/head.pth cannot be read: " in message
    assert not Path("harm-was-done").exists()
    Path("page.pth").write_text("<!DOCTYPE html>")
    assert "page.pth cannot be read: " in error("aesthetic", path=str(folder), head="./page.pth")


def test_a_missing_head(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    missing = error("aesthetic", path=str(folder), head=str(tmp_path))
    assert "or sac+logos+ava1-l14-linearMSE.pth in that folder" in missing
    far = error("aesthetic", path=str(folder))
    assert 'cannot be downloaded from "camenduru/improved-aesthetic-predictor": ' in far


class Block(nn.Module):
    """open_clip's residual attention block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 2 * width))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Tower(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList([Block(width, heads) for _ in range(2)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.positional_embedding = nn.Parameter(torch.randn((SIDE // 8) ** 2 + 1, width))
        self.proj = nn.Parameter(torch.randn(width, out))
        self.conv1 = nn.Conv2d(3, width, 8, 8, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = Tower(width, 2)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(patches), 1, -1), patches], 1)
        x = self.transformer(self.ln_pre(x + self.positional_embedding))
        return self.ln_post(x[:, 0]) @ self.proj


class OpenClip(nn.Module):
    """A minimal open_clip CLIP with the same tensor names."""

    def __init__(self) -> None:
        super().__init__()
        width, out = 16, 12
        self.visual = Visual(24, out)
        self.positional_embedding = nn.Parameter(torch.randn(77, width))
        self.text_projection = nn.Parameter(torch.randn(width, out))
        self.logit_scale = nn.Parameter(torch.tensor(4.6))
        self.token_embedding = nn.Embedding(len(VOCAB), width)
        self.transformer = Tower(width, 4)
        self.ln_final = nn.LayerNorm(width)
        for name, tensor in self.named_parameters():
            if "bias" in name or "ln_" in name:
                nn.init.normal_(tensor, 0.5)  # so that no two tensors can be confused

    def score(self, ids: torch.Tensor, pixels: torch.Tensor) -> float:
        length = ids.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)
        x = self.token_embedding(ids) + self.positional_embedding[:length]
        text = self.ln_final(self.transformer(x, mask))[:, -1] @ self.text_projection
        return nn.functional.cosine_similarity(text, self.visual(pixels)).item()


@pytest.fixture(scope="module")
def open_clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenClip, Path]:
    """The model, and a folder with its weights as published and the files of transformers."""
    folder = tiny_clip(tmp_path_factory.mktemp("hps"))
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    text |= {"num_attention_heads": 4, "hidden_act": "gelu"}
    vision |= {"hidden_size": 24, "intermediate_size": 48, "hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = OpenClip().eval()
    torch.save({"epoch": 3, "state_dict": model.state_dict()}, folder / "HPS_v2.1_compressed.pt")
    return model, folder


def in_a_black_square(image: np.ndarray) -> torch.Tensor:
    """(3, SIDE, SIDE): longest side to SIDE by bicubic, black around it, /255, mean and std."""
    height, width = image.shape[:2]
    high, wide = round(SIDE * height / max(height, width)), round(SIDE * width / max(height, width))
    resized = Image.fromarray(image).resize((wide, high), Image.Resampling.BICUBIC)
    pixels = np.zeros((SIDE, SIDE, 3))
    top, left = (SIDE - high) // 2, (SIDE - wide) // 2
    pixels[top : top + high, left : left + wide] = np.asarray(resized)
    return torch.tensor(((pixels / 255 - MEAN) / STD).transpose(2, 0, 1), dtype=torch.float32)


@torch.no_grad()
def test_hps_is_the_cosine_of_the_published_weights(open_clip: tuple[OpenClip, Path]) -> None:
    model, folder = open_clip
    got = values("hps", samples(), path=str(folder), processor=str(folder), batch=2)
    expected = [
        model.score(ids_by_hand(s.prompt.text), in_a_black_square(s.pixels)[None])
        for s in samples()
    ]
    assert got == pytest.approx(expected, abs=2e-5)
    assert np.std(got) > 0.01


def test_hps_takes_a_model_of_transformers(folder: Path) -> None:
    square = [Sample(Prompt("a red kite"), noise(48, 48, 1), 0)]
    got = values("hps", square, path=str(folder), processor=str(folder), file="")
    assert got == pytest.approx(
        [logit_by_hand(folder, "a red kite", square[0].pixels) / np.exp(3.0)], abs=2e-6
    )


def test_hps_uses_the_whole_image() -> None:
    wide: np.ndarray = np.full((10, 40, 3), 200, dtype=np.uint8)
    wide[:, :2] = 0
    got = hps.pad_to_square(wide, 20)
    assert got.shape == (20, 20, 3)
    lit: np.ndarray = got[..., 0].astype(int)
    assert (lit[:7] == 0).all() and (lit[13:] == 0).all() and (lit[8:12, 5:] > 190).all()
    assert (lit[8:12, 0] < 100).all()  # the left end is still there
    assert hps.pad_to_square(np.full((1, 900, 3), 9, dtype=np.uint8), 20).max() == 9


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda t: t.pop("visual.proj"), "1 missing, the first is visual_projection.weight"),
        (
            lambda t: t.pop("transformer.resblocks.1.attn.in_proj_bias"),
            "3 missing, the first is text_model.encoder.layers.1.self_attn.k_proj.bias",
        ),
        (lambda t: t.update(extra=torch.zeros(1)), '"extra" is not an open_clip ViT tensor'),
        (
            lambda t: t.update({"visual.transformer.resblocks.0.extra.bias": torch.zeros(1)}),
            "1 unexpected, the first is vision_model.encoder.layers.0.extra.bias",
        ),
    ],
)
def test_weights_other_than_hps_are_rejected(
    open_clip: tuple[OpenClip, Path], tmp_path: Path, change, sentence: str
) -> None:
    model, folder = open_clip
    tensors = dict(model.state_dict())
    change(tensors)
    torch.save({"state_dict": tensors}, tmp_path / "mine.pt")
    message = error("hps", path=str(tmp_path), file="mine.pt", processor=str(folder))
    assert sentence in message


@pytest.mark.parametrize("name", ["clip-score", "aesthetic", "hps", "image-reward", "pickscore"])
def test_every_prompt_is_fit_without_loading_weights(name: str) -> None:
    assert base.load(assembly.REWARDS[name], {}).unfit(Prompt("")) is None


def test_text_is_not_an_image(folder: Path) -> None:
    reward = base.load(assembly.REWARDS["clip-score"], {"path": str(folder), "device": "cpu"})
    (score,) = base.checked(reward, [Sample(Prompt("a kite"), None, 0, text="a kite")])
    assert score.value is None
    assert score.error == "raised UserError: this sample is a text; expected an image"


def test_networks_score_in_larger_batches(folder: Path) -> None:
    def at_once(name: str, **options: Any) -> int:
        return sure(
            WorkerScorer, assembly.scorer(RewardEntry(name=name, cache=False, **options))
        ).batch

    assert at_once("clip-score") == 16 and at_once("geneval", batch=40) == 40
    assert at_once("jpeg-compressibility") == 4


@pytest.mark.parametrize("name", ["clip-score", "pickscore", "aesthetic", "hps"])
def test_the_differentiable_value_is_the_score(
    folder: Path, open_clip: tuple[OpenClip, Path], tmp_path: Path, name: str
) -> None:
    """Without the rounding to bytes after resizing, and with a gradient for every image."""
    torch.save(head(0), tmp_path / "head.pth")
    options: dict[str, Any] = {
        "clip-score": {"path": str(folder)},
        "pickscore": {"path": str(folder), "processor": str(folder)},
        "aesthetic": {"path": str(folder), "head": str(tmp_path / "head.pth")},
        "hps": {"path": str(folder), "file": "", "processor": str(folder)},
    }[name]
    reward: Any = base.load(assembly.REWARDS[name], {"device": "cpu", **options})
    for sample in samples():
        pixels = torch.tensor(np.array(sample.pixels)).permute(2, 0, 1)[None] / 255
        value = reward.values(pixels.requires_grad_(), [sample.prompt])
        (expected,) = values(name, [sample], **options)
        assert value.tolist() == pytest.approx([expected], abs=0.01 * max(1, abs(expected)))
        value.sum().backward()
        assert pixels.grad is not None and float(pixels.grad.abs().max()) > 0
