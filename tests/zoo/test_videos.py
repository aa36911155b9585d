"""The bundled video model: its prompts, the videos that it is made from, and the script."""

import json
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gesso.config import DataSource
from gesso.data.given import GivenColumns
from gesso.data.readers import read
from gesso.types import Prompt, Sample
from gesso.video_files import PromptClip
from gesso.zoo import limits, videos, words
from tools.zoo import evaluate_videos, make_clips, make_videos, video_rows
from tools.zoo import render_videos as render
from tools.zoo.build_videos import SHAPE, TEXT_TOKENS, build_pipeline, load_pipeline
from tools.zoo.render import letters

ZOO = Path(words.__file__).parent
VIDEOS = ZOO / "videos"


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in VIDEOS.rglob("*") if path.is_file()) <= 8e6


def test_plain_diffusers_samples() -> None:
    """With the scheduler of the folder, UniPC."""
    pipe = load_pipeline(VIDEOS)
    for name in ("transformer", "vae", "text_encoder"):
        assert {p.dtype for p in getattr(pipe, name).parameters()} == {torch.float32}, name
    pipe.set_progress_bar_config(disable=True)
    row = evaluate_videos.prompts("eval")[0]
    found = pipe(row.text, height=32, width=96, num_frames=5, num_inference_steps=6,
                 guidance_scale=1.0, max_sequence_length=TEXT_TOKENS, output_type="np",
                 generator=torch.Generator().manual_seed(0)).frames  # fmt: skip
    right = evaluate_videos.rendered([row])[0].permute(1, 2, 3, 0).numpy() / 2 + 0.5
    assert found.shape == (1, 5, 32, 96, 3)
    assert np.abs(found[0] - right).mean() < 0.05  # .07 without letters


@pytest.mark.slow
def test_bundled_model_has_headroom() -> None:
    with ThreadPool(2) as pool:
        scores = evaluate_videos.score(VIDEOS, pool, "eval", 20)
    assert 0.15 <= scores.exact <= 0.65
    assert scores.direction >= 0.6


def test_clips_are_right_videos() -> None:
    """As the script writes them, up to the encoder, and as SFT reads them."""
    given = GivenColumns(("video",), "video", frames=5, fps=8.0)
    reading = read(DataSource(path="zoo:slides/clips.jsonl"), given=given)
    assert len(reading.prompts) == make_clips.ROWS and not reading.left_out
    chosen = reading.prompts[:8]
    expected = render.to_bytes(evaluate_videos.rendered(chosen)).numpy()
    for prompt, video in zip(chosen, expected, strict=True):
        (clip,) = prompt.given
        assert isinstance(clip, PromptClip)
        assert np.abs(clip.fitted(32, 96) - video.astype(float)).mean() < 6  # of 255


@pytest.mark.parametrize("split", ["train", "eval"])
def test_prompts_are_those_of_the_script(split: str) -> None:
    lines = (ZOO / "slides" / f"{split}.jsonl").read_text().splitlines()
    rows, known = [json.loads(line) for line in lines], words.real_words(split)
    assert rows == video_rows.rows(split)
    assert {row["target"] for row in rows} == {word for word in known if len(word) == 4}
    directions = [row["direction"] for row in rows]
    assert abs(directions.count("left") - directions.count("right")) <= 1
    for prompt in read(DataSource(path=f"zoo:slides/{split}.jsonl")).prompts:
        assert videos.outside(prompt.text) is None
        assert prompt.text.endswith(f'"{prompt.columns["target"]}" slides '
                                    f'{prompt.columns["direction"]}')  # fmt: skip


@pytest.mark.parametrize(
    "text, reason",
    [
        ('a red sign that says "KITE" slides left', None),
        (' a white sign  that says " KITE "  slides right', None),
        ('a pink sign that says "KITE" slides left', '"pink" is not one of its colours'),
        ('a red sign that says "KITE" slides up', '"up" is not one of its directions'),
        ('a red sign that says "OAK" slides left', '"OAK" has 3 letters'),
        (
            'a red sign that says "kite" slides left',
            '"kite" is not one word of capital letters A to Z',
        ),
        ('a red sign that says "KITE"', "The prompt has a different form"),
    ],
)
def test_prompts_outside_of_the_training_data(text: str, reason: str | None) -> None:
    known = limits.of("zoo:videos")
    assert known is not None
    assert known.note([Prompt(text)]) == (None if reason is None else f"{reason}. {videos.LIMITS}")


def world() -> render.World:
    names = ("KITE", "ROPE")
    masks = torch.stack([torch.tensor(letters(name, videos.PITCH)) for name in names]) / 255
    ids = torch.arange(2 * 8 * 2).view(2, 8, 2, 1)  # a different token for each prompt
    return render.World(masks, ids, render.all_paints())


def test_videos_are_those_of_their_prompts() -> None:
    """Colour, word and motion of each video, against the token of its prompt."""
    torch.manual_seed(0)
    drawn, known = render.draw_videos(world(), 24, faulty=0.0), world()
    for pixels, token in zip(render.to_bytes(drawn.pixels), drawn.ids[:, 0].tolist(), strict=True):
        word, colour, direction = token // 16, token // 2 % 8, token % 2
        sign, paint = (torch.tensor(each) for each in words.PAINT[words.COLOURS[colour]])
        assert (pixels[:, 0, 0] == sign).all()  # the corner
        middle = known.masks[word][..., None]
        expected = sign + middle * (paint - sign)
        assert (pixels[2] - expected).abs().max() <= 1
        shift = 2 if direction == 1 else -2
        assert pixels[:-1].roll(shift, dims=2).equal(pixels[1:])


def test_every_fault_occurs() -> None:
    torch.manual_seed(0)
    fault = torch.arange(render.FAULTS + 1)
    at = render.places(torch.zeros_like(fault), fault, torch.full_like(fault, 3)).tolist()
    left = [0, 1, 2, 3, 4]
    assert at == [left, left, left, [3] * 5, left[::-1], left]
    mask, other = world().masks
    mixed = render.misspell(mask[None], other[None], torch.tensor([[False, True, False, True]]))[0]
    for i, source in enumerate((mask, other, mask, other)):
        columns = slice(8 + 20 * i, 28 + 20 * i)
        assert mixed[:, columns].equal(source[:, columns])
    drawn = render.draw_videos(world(), 64, faulty=1.0)
    still = [(v[:, 1:] - v[:, :-1]).abs().max() < 1e-6 for v in drawn.pixels]
    assert 4 <= sum(still) <= 24
    assert drawn.pixels.abs().max() <= 1


class Reads(TorchDispatchMode):
    """Lists operations that wait for a GPU or copy from host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split("::")[1] in ("_local_scalar_dense", "nonzero", "lift_fresh"):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


def test_losses_fit_into_a_cuda_graph() -> None:
    torch.manual_seed(0)
    pipe, known = build_pipeline(vae_width=4), world()
    ids = torch.randint(40, (2, 8, 2, TEXT_TOKENS))
    latents = make_videos.Latents(torch.randn(2, *SHAPE), ids[:, 0, 0])
    losses = (
        make_videos.vae_loss_on(pipe.vae, known._replace(ids=ids), 1),
        make_videos.flow_loss_on(pipe, latents, latents, 0.5, 2),
    )
    with Reads() as reads:
        for loss_fn in losses:
            loss_fn().backward()
    assert reads.found == []
    with Reads() as reads:
        torch.tensor(1).item()
    assert reads.found == ["aten::lift_fresh", "aten::_local_scalar_dense"]


def test_the_script_makes_a_model_that_samples(tmp_path: Path) -> None:
    """Two steps of each stage, then only trials; without OCR."""
    tiny = "--device cpu --words 8 --videos 4 --vae-steps 2 --steps 2 --tune-steps 2 --vae-batch 1"
    tiny += " --batch 2 --rows 0 --faulty .5"
    with ThreadPool(1) as pool:
        args = make_videos.parse(["--out", str(tmp_path / "one"), *tiny.split()])
        make_videos.VideosTraining(args, pool).run()
        again = ["--start", str(tmp_path / "one" / "slider"), "--tune-only"]
        args = make_videos.parse(["--out", str(tmp_path / "two"), *tiny.split(), *again])
        make_videos.VideosTraining(args, pool).run()
    stages = [json.loads(line)["stage"] for line in (tmp_path / "two" / "log.jsonl").open()]
    assert dict.fromkeys(stages) == dict.fromkeys(["drawn", "encoded", "videos-50"])
    made = tmp_path / "two" / "videos-50"
    assert sum(path.stat().st_size for path in made.rglob("*") if path.is_file()) <= 12e6
    rows = evaluate_videos.prompts("eval")[:2]
    samples = evaluate_videos.sample(made, rows, [0, 1], steps=2)
    assert [s.frames.shape for s in samples] == [(5, 32, 96, 3)] * 2


def test_rendered_prompts_are_right() -> None:
    """What `--vae` compares with: the reward of a perfect autoencoder is 1."""
    rows = evaluate_videos.prompts("eval")[2:4]  # of the first, OCR reads a full-width letter
    perfect = evaluate_videos.to_bytes(evaluate_videos.rendered(rows)).numpy()
    assert {row.columns["direction"] for row in rows} == {"left", "right"}
    samples = [Sample(p, v, 0, fps=8.0) for p, v in zip(rows, perfect, strict=True)]
    with ThreadPool(1) as pool:
        assert evaluate_videos.scores_of(samples, pool) == (1, 1, 1, 1)
