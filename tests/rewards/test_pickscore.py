"""PickScore with a tiny random CLIP of the real class, against a plain computation."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gesso.rewards import assembly, base
from gesso.rewards.compose import WeightedReward
from gesso.rewards.image import networks
from gesso.rewards.image.clip import load_clip
from gesso.rewards.transport.service import RewardService
from gesso.rewards.transport.workers import WorkerScorer
from gesso.types import Prompt, Sample
from tests.typed import sure

SIDE = 32
LETTERS = [*string.ascii_lowercase, *string.digits, "-"]
VOCAB = [*LETTERS, *(f"{c}</w>" for c in LETTERS), "<|startoftext|>", "<|endoftext|>"]
START, END = len(VOCAB) - 2, len(VOCAB) - 1
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def tiny_clip(folder: Path, seed: int = 0) -> Path:
    """A CLIPModel with random weights, a tokenizer of single letters and an image processor."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    torch.manual_seed(seed)
    sides = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    text = {"vocab_size": len(VOCAB), "bos_token_id": START, "eos_token_id": END}
    config = CLIPConfig(
        text_config={**sides, **text, "num_hidden_layers": 2, "max_position_embeddings": 77},
        vision_config={**sides, "num_hidden_layers": 2, "image_size": SIDE, "patch_size": 8},
        projection_dim=12,
        initializer_factor=20.0,  # so that texts and images differ
    )
    model = CLIPModel(config)
    model.logit_scale.data.fill_(3.0)
    model.save_pretrained(folder)
    tokenizer = CLIPTokenizer(vocab={token: i for i, token in enumerate(VOCAB)}, merges=[])
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SIDE).save_pretrained(folder)
    return folder


def by_hand(image: np.ndarray) -> torch.Tensor:
    """(3, SIDE, SIDE): shortest side to SIDE by bicubic, the centre, /255, mean and std."""
    height, width = image.shape[:2]
    scale = SIDE / min(height, width)
    size = int(width * scale), int(height * scale)
    resized = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    left, top = (size[0] - SIDE) // 2, (size[1] - SIDE) // 2
    pixels = np.asarray(resized.crop((left, top, left + SIDE, top + SIDE)), dtype=np.float64)
    return torch.tensor(((pixels / 255 - MEAN) / STD).transpose(2, 0, 1), dtype=torch.float32)


def ids_by_hand(text: str) -> torch.Tensor:
    """(1, L): letters, each word's last one marked, cut to 77 with the end token kept."""
    words = re.findall(r"[a-z]+|[0-9]|-", text)
    ids = [VOCAB.index(c) for w in words for c in (*w[:-1], f"{w[-1]}</w>")]
    return torch.tensor([[START, *ids[:75], END]])


def logit_by_hand(folder: Path, text: str, image: np.ndarray) -> float:
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(folder).eval()
    with torch.no_grad():
        output = model(input_ids=ids_by_hand(text), pixel_values=by_hand(image)[None])
    return output.logits_per_image.item()


def noise(height: int, width: int, seed: int) -> np.ndarray:
    """An image with structure at several scales."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_clip(tmp_path_factory.mktemp("clip"))


def samples() -> list[Sample]:
    texts = ["a red kite", "a red kite", "two dogs", "word " * 40, "a red kite"]
    sizes = [(48, 64), (64, 48), (32, 32), (40, 40), (96, 40)]
    return [
        Sample(Prompt(text), noise(*size, seed=i), i)
        for i, (text, size) in enumerate(zip(texts, sizes, strict=True))
    ]


def through_workers(reference: str, options: dict, some: Sequence[Sample]) -> list:
    service = RewardService([WeightedReward("mine", 1.0, WorkerScorer(reference, options, 1))])
    try:
        return service.score(some)
    finally:
        service.close()


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_it_is_the_scaled_cosine_over_26(folder: Path, batch: int) -> None:
    options = {"path": str(folder), "processor": str(folder), "batch": batch, "device": "cpu"}
    reward = base.load(assembly.REWARDS["pickscore"], options)
    got = [score.value for score in base.checked(reward, samples())]
    expected = [logit_by_hand(folder, s.prompt.text, s.pixels) / 26 for s in samples()]
    assert got == pytest.approx(expected, abs=2e-5)
    assert np.std(got) > 0.01
    assert max(abs(sure(float, value)) for value in got) <= np.exp(3.0) / 26


def test_a_prompt_is_cut_at_77_tokens(folder: Path) -> None:
    clip = load_clip(str(folder), str(folder), "cpu")
    cut, longer, shorter = clip.texts(["a" * 75, "a" * 75 + "bcd", "a" * 60])
    assert not torch.allclose(cut, shorter, atol=1e-3)
    # the 75th letter ends a word in one and not in the other: compare two that are cut alike
    torch.testing.assert_close(longer, clip.texts(["a" * 75 + "xyz" * 50])[0])


def test_images_are_processed_without_torchvision(folder: Path) -> None:
    clip = load_clip(str(folder), str(folder), "cpu")
    for image in (noise(48, 64, 1), noise(33, 200, 2), noise(20, 20, 3)):
        pixels = clip.processor(images=[Image.fromarray(image)], return_tensors="pt")
        torch.testing.assert_close(pixels["pixel_values"][0], by_hand(image), atol=1e-5, rtol=1e-5)


def test_in_a_worker_process(folder: Path) -> None:
    options = {"path": str(folder), "processor": str(folder), "device": "cpu"}
    scores = through_workers(assembly.REWARDS["pickscore"], options, samples())
    assert [s.value for s in scores] == pytest.approx(
        [logit_by_hand(folder, s.prompt.text, s.pixels) / 26 for s in samples()], abs=2e-5
    )
    assert scores[0].parts == {"mine": scores[0].value}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same(folder: Path) -> None:
    """Up to TF32 convolutions."""
    reward = base.load(
        assembly.REWARDS["pickscore"], {"path": str(folder), "processor": str(folder)}
    )
    got = [score.value for score in base.checked(reward, samples())]
    expected = [logit_by_hand(folder, s.prompt.text, s.pixels) / 26 for s in samples()]
    assert got == pytest.approx(expected, abs=0.01)


def test_a_missing_model_is_reported_and_looked_up_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (score,) = base.checked(base.load(assembly.REWARDS["pickscore"], {}), samples()[:1])
    start = 'raised UserError: CLIPModel cannot be loaded from "yuvalkirstain/PickScore_v1": '
    error = sure(str, score.error)
    assert score.value is None and error.startswith(start) and "\n" not in error
    assert error.endswith("cached or reachable)")

    reward = base.load(
        assembly.REWARDS["pickscore"], {"path": "/no/such", "processor": str(folder)}
    )
    first = base.checked(reward, samples())[0].error
    assert first == 'raised UserError: CLIPModel cannot be loaded from "/no/such": no such folder'
    monkeypatch.setattr(networks, "load_pretrained", None)  # a second search would fail otherwise
    assert base.checked(reward, samples())[0].error == first


def test_another_kind_of_model_is_rejected(folder: Path, tmp_path: Path) -> None:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    CLIPTextModel(config).save_pretrained(tmp_path)
    reward = base.load(
        assembly.REWARDS["pickscore"], {"path": str(tmp_path), "processor": str(folder)}
    )
    error = sure(str, base.checked(reward, samples())[0].error)
    assert error.startswith("raised UserError: ") and "\n" not in error
    assert "weights of CLIPModel, the first is logit_scale; it is a different kind of m" in error


def test_a_missing_device(folder: Path) -> None:
    options = {"path": str(folder), "processor": str(folder), "device": "cuda:77"}
    reward = base.load(assembly.REWARDS["pickscore"], options)
    error = sure(str, base.checked(reward, samples())[0].error)
    assert 'device = "cuda:77" is not available' in error


def test_it_accepts_every_prompt_without_loading_weights() -> None:
    reward = base.load(assembly.REWARDS["pickscore"], {})
    assert reward.unfit(Prompt("")) is None
