"""A run's folder: the one place that resume, the report and every later tool read.

config.toml              the recipe, resolved: every value that was in force
metrics.jsonl            one row a step; row 0 is the evaluation before training
samples/000010.jsonl     one row a sample of the evaluation after step 10, same prompts and
samples/000010/007.png   seeds every time; its picture, of a model that draws
samples/prompts/007-1.png    what a model that sees is shown with prompt 7
groups/000010.jsonl      the groups of a training step (groups.py), with some of their samples
checkpoints/000010/      learner.safetensors, or a file of each rank (shards.py), and state.json;
                         written aside, then renamed
log.txt                  warnings and notes, with the step
trackers/wandb.json      of each tracker its id of the run and the last step that it has
report.html
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso.types import Prompt, Sample, Score, StopRun, UserError

if TYPE_CHECKING:
    from torch import Tensor


NAMED = "# recipe "  # the first line of config.toml, and behind it the recipe's name


def recipe_name(config: str) -> str:
    """The name a run was started by, from the text of its config.toml; "" where it has none."""
    first = config.partition("\n")[0]
    return first.removeprefix(NAMED) if first.startswith(NAMED) else ""


def must_be_possible(folder: Path, what: str) -> None:
    """Raises for a folder that would lie within a file: told before minutes are spent."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise UserError(f"{what} {folder} cannot be made: {nearest.name} is a file")


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"

    @staticmethod
    def must_be_new(path: Path) -> None:
        try:
            taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        except OSError as error:  # a name that is too long, a folder one may not look into
            raise UserError(f"run folder {path} cannot be made: {error.strerror}") from error
        if taken:
            raise UserError(
                f"run folder {path} exists already; go on with it by "
                f"`gesso train --resume {path}`, or choose another with --run"
            )
        must_be_possible(path, "run folder")

    @staticmethod
    def create(path: Path, config: Mapping[str, Any], recipe: str = "") -> RunFolder:
        """`recipe`: the name it was started by."""
        RunFolder.must_be_new(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run folder {path} cannot be made: {error}") from error
        run = RunFolder(path)
        run.write_config(config, recipe)
        return run

    @staticmethod
    def open(path: Path) -> RunFolder:
        if not (path / "config.toml").is_file():
            raise UserError(f"{path} is not a run folder: it has no config.toml")
        return RunFolder(path)

    def write_config(self, config: Mapping[str, Any], recipe: str | None = None) -> None:
        """None: the recipe's name is the one that was written before."""
        import tomli_w

        file = self.path / "config.toml"
        if recipe is None:
            recipe = recipe_name(file.read_text("utf-8", "replace")) if file.is_file() else ""
        head = f"{NAMED}{' '.join(recipe.split())}\n" if recipe else ""
        write_whole(file, (head + tomli_w.dumps(_without_none(config))).encode())

    def rows(self) -> list[dict[str, Any]]:
        """All complete rows; a half-written last line (a killed run) is left out."""
        if not self.metrics_file.exists():
            return []
        rows = []
        for line in self.metrics_file.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                rows.append(json.loads(line))
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        with self.metrics_file.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")

    def rewind(self, step: int | None) -> None:
        """Drop the rows after `step` (None: all): a resumed run writes them again."""
        kept = [row for row in self.rows() if step is not None and row["step"] <= step]
        write_whole(self.metrics_file, b"".join(json.dumps(row).encode() + b"\n" for row in kept))

    def note(self, text: str) -> None:
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def noted(self, text: str) -> bool:
        """Whether log.txt has exactly this note, of any time."""
        file = self.path / "log.txt"
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        return any(line.split(" ", 2)[2:] == [text] for line in lines)

    def save_samples(self, step: int, samples: Sequence[Sample], scores: Sequence[Score]) -> None:
        from PIL import Image

        folder = self.path / "samples" / f"{step:06d}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for i, (sample, score) in enumerate(zip(samples, scores, strict=True)):
            image = ""
            if sample.image is not None:
                folder.mkdir(exist_ok=True)
                image = f"{folder.name}/{i:03d}.png"
                Image.fromarray(sample.image).save(folder.parent / image)
            lines.append(
                {
                    "index": i,
                    "prompt": sample.prompt.text,
                    "seed": sample.seed,
                    "image": image,
                    "shown": self._save_shown(i, sample.prompt),
                    "reply": sample.text or "",
                    "answer": sample.prompt.columns.get("answer"),
                    "reward": score.value,
                    "parts": dict(score.parts),
                    "text": score.text,
                    "error": score.error,
                }
            )
        body = "".join(json.dumps(line) + "\n" for line in lines)
        write_whole(folder.with_suffix(".jsonl"), body.encode())

    def _save_shown(self, index: int, prompt: Prompt) -> list[str]:
        """A prompt's own pictures, written once: they are the same at every evaluation."""
        folder = self.path / "samples" / "prompts"
        names = []
        for k, picture in enumerate(prompt.images, 1):
            folder.mkdir(exist_ok=True)
            names.append(f"{folder.name}/{index:03d}-{k}.png")
            if not (folder.parent / names[-1]).exists():
                picture.open().save(folder.parent / names[-1])
        return names

    def save(
        self, step: int, state: Mapping[str, Tensor], meta: Mapping[str, Any], keep: int
    ) -> None:
        """A checkpoint, whole or not at all: written aside, flushed to disk, renamed. The oldest
        beyond `keep` go only after the new one is there."""
        from safetensors.torch import save_file

        aside = self.checkpoints / f".saving-{step:06d}"
        final = self.checkpoints / f"{step:06d}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            save_file(
                {k: v.detach().cpu().contiguous() for k, v in state.items()},
                aside / "learner.safetensors",
            )
            write_whole(aside / "state.json", json.dumps({"step": step, **meta}).encode())
            _flush(aside / "learner.safetensors")
            if final.exists():  # saved again: a name is never a half-deleted folder
                os.replace(final, self.checkpoints / f".old-{step:06d}")
            os.replace(aside, final)
            shutil.rmtree(self.checkpoints / f".old-{step:06d}", ignore_errors=True)
            _flush(self.checkpoints)
        except Exception as error:  # safetensors wraps a full disk in its own error type
            shutil.rmtree(aside, ignore_errors=True)
            last = self.latest()
            raise StopRun(
                f"could not save the checkpoint of step {step} in {self.checkpoints}: {error}; "
                f"the last complete one is {f'step {last}' if last is not None else 'none'}; "
                f"make room and run `gesso train --resume {self.path}`"
            ) from error
        for old in self._complete()[:-keep]:
            shutil.rmtree(self.checkpoints / f"{old:06d}")

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        complete = self._complete()
        return complete[-1] if complete else None

    @property
    def steps(self) -> list[int]:
        """Of the complete checkpoints, the oldest first."""
        return self._complete()

    def load(self, step: int, table: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A checkpoint, whether one process wrote it or several ranks; of its tensors those whose
        names begin with `table`."""
        from gesso.track import shards

        folder = self.checkpoints / f"{step:06d}"
        try:
            meta = json.loads((folder / "state.json").read_text())
            return shards.read(folder, meta.get("ranks", 1), table), meta
        except Exception as error:  # safetensors has an error type of its own
            raise UserError(
                f"checkpoint {folder} cannot be read: {error}; remove that folder to go on from "
                "the one before it"
            ) from error

    def _complete(self) -> list[int]:
        if not self.checkpoints.is_dir():
            return []
        return sorted(int(p.name) for p in self.checkpoints.iterdir() if p.name.isdigit())


def write_whole(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(v) for v in value]
    return value
