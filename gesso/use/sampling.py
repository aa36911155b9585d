"""`gesso sample`: samples the same prompts and seeds from one model or several, scores them if
requested, and saves the images under descriptive names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso.config import MAX_SAMPLES, AnyRecipe, DataSource, Model
from gesso.data import prompts as data
from gesso.data.chat import ChatFormat
from gesso.rewards import assembly
from gesso.track import media
from gesso.track.progress import SILENT, Progress
from gesso.track.run_folder import must_be_possible
from gesso.types import Prompt, Sample, Score, UserError
from gesso.use.evaluate import check_groups, free, reward_entry, sample_and_score
from gesso.use.loaded import AS_EVALUATED, SampledModel, SamplingOptions, sample_seeds
from gesso.use.notes import Once
from gesso.use.opening import open_to_sample
from gesso.use.source import ModelSource
from gesso.video_files import VIDEO_SUFFIXES

PNG = ".png"
FILES = (PNG, ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avi", ".m4v", *VIDEO_SUFFIXES)
"""Suffixes with which `--out` names a file, of which all but PNG and MP4 are refused."""


@dataclass(frozen=True)
class SampleRequest:
    prompts: Sequence[str] = ()
    file: Path | None = None  # with more prompts
    images: Sequence[str] = ()  # files: input images of each of `prompts`
    n: int = 1
    seed: int = 0
    rewards: Sequence[str] = ()
    settings: SamplingOptions = AS_EVALUATED

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_SAMPLES:
            raise UserError(f"sample expects --n from 1 to {MAX_SAMPLES:,}, got {self.n}")
        if not self.prompts and self.file is None:
            raise UserError("sample expects a prompt, or --prompts FILE")
        if self.images and not self.prompts:
            raise UserError(
                "--image is for a prompt of the command line; rows of --prompts have their images "
                'as "image" or "images"'
            )


@dataclass(frozen=True)
class ModelSamples:
    """n samples of each prompt from one model, prompt by prompt."""

    source: ModelSource
    texts: bool  # the samples are texts; else images
    n: int
    seed: int
    samples: Sequence[Sample]
    scores: Sequence[Score]  # empty without rewards

    def __iter__(self) -> Iterator[tuple[int, int, Sample, Score | None]]:
        """(index of the prompt, index among its n samples, sample, score)"""
        for i, sample in enumerate(self.samples):
            yield *divmod(i, self.n), sample, self.scores[i] if self.scores else None


def sample_all(
    sources: Sequence[ModelSource], request: SampleRequest, progress: Progress = SILENT
) -> list[ModelSamples]:
    """Each model is loaded, sampled from and released before the next."""
    progress, first = Once(progress), sources[0]
    entries = [reward_entry(name, first.training) for name in request.rewards]
    shape = first.recipe.model, first.recipe.eval.frames
    rewards = assembly.of_entries([], entries, *shape) if entries else None
    results = []
    try:
        if rewards is not None:
            check_groups(rewards, request.n)
        typed = [_typed(request, source.recipe) for source in sources]  # errors come before loading
        for source, prompts in zip(sources, typed, strict=True):
            loaded = open_to_sample(source, progress, few=request.file is None)
            try:
                prompts += _from_file(loaded, request, progress)
                results.append(_sample(loaded, request, prompts, rewards, progress))
            finally:
                loaded.close()
            del loaded
            free()
    finally:
        if rewards is not None:
            rewards.service.close()
    return results


def _sample(
    loaded: SampledModel,
    request: SampleRequest,
    prompts: Sequence[Prompt],
    rewards: assembly.Rewards | None,
    progress: Progress,
) -> ModelSamples:
    row = [i for i in range(len(prompts)) for _ in range(request.n)]
    seeds = sample_seeds(request.seed, request.n) * len(prompts)
    scores: list[Score] = []
    if rewards is None:
        samples = loaded.draw(prompts, row, seeds, request.settings, progress)
    else:
        samples, scores = sample_and_score(
            loaded, rewards.service, prompts, row, seeds, request.settings, progress
        )
    return ModelSamples(loaded.source, loaded.gives_text, request.n, request.seed, samples, scores)


def _typed(request: SampleRequest, recipe: AnyRecipe) -> list[Prompt]:
    return [data.typed_prompt(text, request.images, recipe.data) for text in request.prompts]


def _from_file(loaded: SampledModel, request: SampleRequest, progress: Progress) -> list[Prompt]:
    if request.file is None:
        return []
    source = DataSource(path=str(request.file))
    form = ChatFormat.of(loaded.recipe.data)
    more, report = data.from_sources([source], form, lambda prompt: None)
    more = loaded.fitting(more, source.path, report)
    for note in report.notes:
        progress.note(note)
    return more


def save(results: Sequence[ModelSamples], out: Path) -> dict[tuple[str, int, int], Path]:
    """Saves images and videos to the folder `out`, or the only one to the file `out`; returns
    (model, prompt, sample) → file. File name and PNG metadata contain prompt, seed and model."""
    try:
        return _save_one(results[0], out) if is_file(out) else _save(results, out)
    except OSError as error:
        raise UserError(f"samples cannot be written to {out}: {error}") from error


def is_file(out: Path) -> bool:
    """Whether `--out` names a file rather than a folder."""
    return out.suffix.lower() in FILES and not out.is_dir()


def check_out(out: Path, request: SampleRequest, models: int, recipe: AnyRecipe) -> None:
    """Raises before sampling if the samples cannot be written there."""
    if not is_file(out):
        if out.exists() and not out.is_dir():
            raise UserError(
                f"sample expects a folder as --out, or the name of a {PNG} or {media.VIDEO} file, "
                f"got the file {out}"
            )
        return must_be_possible(out, "folder")
    count = request.n * len(request.prompts) * models
    if request.file is not None or count != 1:
        raise UserError(f"--out {out} is a file for one sample; give one prompt, or a folder")
    expected = _suffix(recipe)
    if out.suffix.lower() != expected:
        what = f"a file that ends in {expected}" if expected else "a folder: texts are printed"
        raise UserError(f"--out {out}: expected {what}")
    return must_be_possible(out.parent, "folder")


def _suffix(recipe: AnyRecipe) -> str:
    """File suffix of a sample; "" for a text."""
    if not isinstance(recipe.model, Model):
        return ""
    return media.VIDEO if (recipe.eval.frames or recipe.model.frames) > 1 else PNG


def _save_one(result: ModelSamples, file: Path) -> dict[tuple[str, int, int], Path]:
    file.parent.mkdir(parents=True, exist_ok=True)
    (sample,) = result.samples
    media.content(sample).save(file)
    return {(result.source.name, 0, 0): file}


def _save(results: Sequence[ModelSamples], folder: Path) -> dict[tuple[str, int, int], Path]:
    from PIL.PngImagePlugin import PngInfo

    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for result in results:
        several = len(result.samples) > result.n
        for i, j, sample, _ in result:
            number = f"{i + 1:03d}-" if several else ""
            seed = f"seed{result.seed}-{j}"
            name = slug(sample.prompt.text) + _of_images(sample.prompt)
            file = folder / f"{number}{name}_{seed}_{result.source.label}.png"
            info = PngInfo()
            metadata = {"prompt": sample.prompt.text, "seed": seed, "model": result.source.name}
            for key, value in metadata.items():
                info.add_itxt(key, value)
            files[result.source.name, i, j] = media.save(sample, file, pnginfo=info)
    return files


def _of_images(prompt: Prompt) -> str:
    """Distinguishes samples of the same text with other input images."""
    return "".join(f"_{image.digest()[:6]}" for image in prompt.images)


def slug(text: str, most: int = 48) -> str:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return "-".join(words)[:most].strip("-") or "prompt"


def check_sheet(file: Path, recipe: AnyRecipe) -> None:
    """Raises before sampling if the sheet cannot be written there."""
    from PIL import Image

    if not _suffix(recipe):
        raise UserError("--sheet is for image models, but this is a language model; remove it")
    if Image.registered_extensions().get(file.suffix.lower()) not in Image.SAVE:
        raise UserError(f"--sheet {file}: expected the name of an image file, such as sheet{PNG}")
    must_be_possible(file.parent, "folder")


def save_sheet(results: Sequence[ModelSamples], file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _sheet(results).save(file)
    except (OSError, ValueError) as error:
        raise UserError(f"the sheet {file} cannot be written: {error}") from error


def _sheet(results: Sequence[ModelSamples]) -> Any:
    """For one model one row per prompt; for several one row per sample, the models side by side."""
    from gesso.use.sheets import Cell, Row, sheet

    def cell(result: ModelSamples, i: int) -> Cell:
        seed = f"seed {result.seed}-{i % result.n}"
        caption = caption_of(result.scores[i]) if result.scores else seed
        return Cell(media.shown(result.samples[i]), caption)

    def sources(starts: Iterable[int]) -> list[list[Any]]:
        prompts = [first.samples[i].prompt for i in starts]
        return [[image.open() for image in prompt.images] for prompt in prompts]

    first = results[0]
    count = len(first.samples)
    if len(results) > 1:
        rows = [
            Row(first.samples[i].prompt.text, [cell(result, i) for result in results])
            for i in range(count)
        ]
        return sheet(rows, [result.source.name for result in results], sources(range(count)))
    starts = range(0, count, first.n)
    return sheet(
        [
            Row(first.samples[s].prompt.text, [cell(first, i) for i in range(s, s + first.n)])
            for s in starts
        ],
        [first.source.name],
        sources(starts),
    )


def caption_of(score: Score) -> str:
    parts = [f"{name} {value:.3f}" for name, value in score.parts.items() if "/" not in name]
    if not score.ok:
        parts.append(f"no score: {score.error or 'the reward does not apply'}")
    return ", ".join(parts)


def report(
    results: Sequence[ModelSamples], files: dict[tuple[str, int, int], Path]
) -> tuple[str, dict[str, Any]]:
    """The output of the command: lines of text, and the same as data."""
    lines, rows = [], []
    many = len(results) > 1 or len(results[0].samples) > results[0].n
    for result in results:
        for i, j, sample, score in result:
            key = result.source.name, i, j
            scored = "" if score is None else f"  {caption_of(score)}"
            if result.texts:
                head = [f"# {result.source.name}: {sample.prompt.text}"] if many and j == 0 else []
                lines += [*head, sample.response, *([scored.strip()] if scored else [])]
            else:
                lines.append(f"{files[key]}{scored}")
            rows.append(_row(result, j, sample, score) | _where(result, files.get(key), sample))
    return "\n".join(lines), {"samples": rows}


def _row(result: ModelSamples, j: int, sample: Sample, score: Score | None) -> dict[str, Any]:
    row = {
        "model": result.source.name,
        "prompt": sample.prompt.text,
        "seed": result.seed,
        "sample": j,
    }
    if score is None:
        return row
    value = score.value if score.ok else None
    return row | {"reward": value, "parts": dict(score.parts), "error": score.error}


def _where(result: ModelSamples, file: Path | None, sample: Sample) -> dict[str, Any]:
    return {"response": sample.response} if result.texts else {"file": str(file)}
