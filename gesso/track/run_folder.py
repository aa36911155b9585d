"""The folder of a run, which resume, the report and all other tools read.

config.toml              the resolved recipe: every effective value
metrics.jsonl            one row per step; row 0 is the evaluation before training
samples/000010.jsonl     one row per sample of the evaluation after step 10, with the same
                         prompts and seeds at every evaluation
samples/000010/007.png   its image, for image models; of a video its first frame, next to
                         007.mp4 and 007-strip.png, some frames side by side
samples/prompts/007-1.png    image of prompt 7, for vision-language models
groups/000010.jsonl      the groups of a training step (groups.py), with some of their samples
checkpoints/000010/      tensors and state.json, written to a temporary folder, then renamed
                         (checkpoints.py)
timeline.jsonl           who did what when, of the newest steps (timeline_file.py)
log.txt                  warnings and notes, with the step
trackers/wandb.json      per tracker: its id of the run and the last logged step
report.html
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso.track import media, older_names
from gesso.track.atomic import flush, write_atomic
from gesso.track.checkpoints import Checkpoints
from gesso.track.figures import parsed, short
from gesso.track.older_names import renamed
from gesso.track.timeline_file import TimelineFile
from gesso.track.writing import Unfinished, Write
from gesso.types import Prompt, Sample, Score, UserError, bad_text

if TYPE_CHECKING:
    from torch import Tensor


MAX_SHOWN = 1280  # px: larger input images are downscaled in the run folder
NAMED = "# recipe "  # start of the first line of config.toml, before the name of the recipe


def recipe_name(config: str) -> str:
    """The recipe name of a run, from the text of its config.toml; "" if there is none."""
    first = config.partition("\n")[0]
    return first.removeprefix(NAMED) if first.startswith(NAMED) else ""


def must_be_possible(folder: Path, what: str) -> None:
    """Raises early if a parent of the folder is a file."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UserError(f"{what} {folder} cannot be created: {nearest.name} is a file")


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.timeline = TimelineFile(path / "timeline.jsonl")
        self._saved = Checkpoints(self.checkpoints)

    @staticmethod
    def must_be_new(path: Path) -> None:
        if fault := bad_text(str(path)):
            raise UserError(f"run folder {str(path)!r} {fault}")
        try:
            taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        except OSError as error:  # a name that is too long, or a folder without permission
            raise UserError(f"run folder {path} cannot be created: {error.strerror}") from error
        if taken and not (path / "config.toml").is_file():
            raise UserError(f"{path} exists and is not a run; choose another folder with --run")
        if taken:
            raise UserError(
                f"run folder {path} already exists; resume it with "
                f"`gesso train --resume {path}`, or choose another folder with --run"
            )
        must_be_possible(path, "run folder")

    @staticmethod
    def create(path: Path, config: Mapping[str, Any], recipe: str = "") -> RunFolder:
        """`recipe`: the name of its recipe."""
        RunFolder.must_be_new(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run folder {path} cannot be created: {error}") from error
        run = RunFolder(path)
        run.write_config(config, recipe)
        return run

    @staticmethod
    def open(path: Path) -> RunFolder:
        if not os.path.isfile(path / "config.toml"):  # never raises, as Path.is_file may
            raise UserError(f"{path} is not a run folder: it has no config.toml")
        return RunFolder(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Raises if another process trains this run. A file system without locks has none."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            with suppress(OSError):
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(
                        f"{self.path} is being trained by another process; wait until it has "
                        "ended, or stop it"
                    ) from None
            yield
        finally:
            os.close(folder)

    def write_config(self, config: Mapping[str, Any], recipe: str | None = None) -> None:
        """recipe None: the recipe name of the existing config.toml is kept."""
        import tomli_w

        file = self.path / "config.toml"
        if recipe is None:
            recipe = recipe_name(file.read_text("utf-8", "replace")) if file.is_file() else ""
        head = f"{NAMED}{' '.join(recipe.split())}\n" if recipe else ""
        write_atomic(file, (head + tomli_w.dumps(_without_none(config))).encode())

    def rows(self) -> list[dict[str, Any]]:
        """All complete rows; an incomplete last line (of a killed run) is skipped."""
        rows = []
        for number, line in enumerate(self._lines(), 1):
            try:
                rows.append(_row(line))
            except ValueError as error:
                raise UserError(
                    f"{self.metrics_file}, line {number} is damaged: {error}; restore the file "
                    "from a backup, or delete that line"
                ) from error
        return rows

    def history(self, step: int) -> list[dict[str, Any]]:
        """The rows 0 to `step`, for a run that is resumed from there. Later lines are not checked,
        since the run writes them again."""
        rows = []
        lines = [*self._lines(), b""]  # a missing row is an empty line
        for expected, line in enumerate(lines[: step + 1]):
            try:
                rows.append(_row(line, expected))
            except ValueError as error:
                raise UserError(
                    f"{self.metrics_file}, line {expected + 1} is damaged: {error}; "
                    f"{self._saved.remedy(expected)}"
                ) from error
        return rows

    def _lines(self) -> list[bytes]:
        """The complete lines of metrics.jsonl."""
        if not os.path.lexists(self.metrics_file):
            return []
        try:
            return self.metrics_file.read_bytes().split(b"\n")[:-1]
        except OSError as error:
            raise UserError(
                f"{self.metrics_file} cannot be read: {error.strerror}; expected the metrics file "
                "of the run; restore it"
            ) from error

    def append(self, row: Mapping[str, Any]) -> None:
        with self.metrics_file.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")

    def rewind(self, step: int | None) -> int:
        """Drops the rows after `step` (None: all), which a resumed run writes again. Returns their
        number."""
        lines = self._lines()
        kept = lines[: 0 if step is None else step + 1]
        write_atomic(self.metrics_file, b"".join(line + b"\n" for line in kept))
        self.timeline.rewind(step)
        return len(lines) - len(kept)

    def note(self, text: str) -> None:
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def noted(self, text: str) -> bool:
        """Whether log.txt contains exactly this note, at any time."""
        file = self.path / "log.txt"
        lines = file.read_text("utf-8", "replace").splitlines() if file.exists() else []
        return any(line.split(" ", 2)[2:] == [text] for line in lines)

    def save_samples(self, step: int, samples: Sequence[Sample], scores: Sequence[Score]) -> None:
        folder = self.path / "samples" / f"{step:06d}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for i, (sample, score) in enumerate(zip(samples, scores, strict=True)):
            image = video = ""
            if sample.image is not None:
                folder.mkdir(exist_ok=True)
                image = f"{folder.name}/{i:03d}.png"
                saved = media.save(sample, folder.parent / image)
                video = f"{folder.name}/{saved.name}" if sample.is_video else ""
            lines.append(
                {
                    "index": i,
                    "prompt": sample.prompt.text,
                    "seed": sample.seed,
                    "image": image,
                    **({"video": video, "fps": sample.fps} if video else {}),
                    "shown": self._save_shown(i, sample.prompt),
                    "response": sample.text or "",
                    "answer": sample.prompt.columns.get("answer"),
                    "reward": score.value,
                    "parts": dict(score.parts),
                    "text": score.text,
                    "error": score.error,
                }
            )
        body = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomic(folder.with_suffix(".jsonl"), body.encode())

    def _save_shown(self, index: int, prompt: Prompt) -> list[str]:
        """Saves the images of a prompt, once: they are the same at every evaluation."""
        folder = self.path / "samples" / "prompts"
        names = []
        for k, image in enumerate(prompt.images, 1):
            folder.mkdir(exist_ok=True)
            names.append(f"{folder.name}/{index:03d}-{k}.png")
            if not (folder.parent / names[-1]).exists():
                opened = image.open()
                opened.thumbnail((MAX_SHOWN, MAX_SHOWN))
                opened.save(folder.parent / names[-1])
        return names

    def save(self, step: int, write: Write, about: Mapping[str, Any], keep: int) -> None:
        """Saves a checkpoint atomically. `write` writes its tensors to a folder with
        `checkpoints.write_tensors`, `about` goes into state.json. The metrics are flushed to disk
        first."""
        self.begin_save(step, write, about, keep).finish()

    def begin_save(
        self, step: int, write: Write, about: Mapping[str, Any], keep: int
    ) -> Unfinished:
        """Like `save`, but the checkpoint is complete after `finish`. `write` may return before
        everything is written."""
        if self.metrics_file.exists():
            flush(self.metrics_file)
        return self._saved.begin(step, write, about, keep)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(self.steps, default=None)

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return self._saved.steps()

    def left_out(self) -> list[str]:
        """Messages about entries named like a checkpoint after the newest complete one, with the
        reason why each is incomplete."""
        latest = self.latest()
        return self._saved.left_out(-1 if latest is None else latest)

    def checkpoint(self, step: int) -> Path:
        """The folder of that checkpoint; `checkpoints.read_tensors` reads its tensors."""
        return self._saved.path(step)

    def meta(self, step: int) -> dict[str, Any]:
        """Contents of a checkpoint's state.json, and whether it can be "verified"."""
        return self._saved.meta(step)

    def load(self, step: int, table: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The verified tensors of a checkpoint whose names begin with `table`, and its state;
        written by one process or by several ranks."""
        return self._saved.load(step, table)


def _row(line: bytes, expected: int | None = None) -> dict[str, Any]:
    """Parses a line of metrics.jsonl, of step `expected`; a ValueError describes any damage."""
    row = renamed(parsed(line), older_names.METRICS)
    step = row.get("step")
    if type(step) is not int or expected not in (None, step):
        valid = "an integer" if expected is None else expected
        raise ValueError(f'"step" is {short(step)}, expected {valid}')
    if expected is not None and not _is_number(row.get("time/step")):
        raise ValueError(f'"time/step" is {short(row.get("time/step"))}, expected a number')
    for key, value in row.items():
        if key == "health":
            if not isinstance(value, list) or not all(isinstance(kind, str) for kind in value):
                raise ValueError(f'"health" is {short(value)}, expected a list of strings')
        elif value is not None and not _is_number(value):
            raise ValueError(f"{short(key)} is {short(value)}, expected a number")
    return row


def _is_number(value: Any) -> bool:
    """Finite, not NaN, and within the range of a float."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(v) for v in value]
    return value
