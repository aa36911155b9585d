"""The model card (README.md) of an export, in the format of the Hugging Face Hub: description,
results with a curve, samples before and after training, usage, training details."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gesso
from gesso.config import PACKAGE, ZOO, Model, Recipe, resolve_path
from gesso.track import figures
from gesso.track.console import held_out_key
from gesso.track.run_folder import RunFolder
from gesso.track.samples import Shown, input_images
from gesso.types import UserError
from gesso.use import folders, usage
from gesso.use.loaded import LoadedModel
from gesso.use.sheets import Cell, Row, curve, sheet
from gesso.use.source import ModelSource

CURVE, SHEET = "curve.png", "samples.png"
IMAGES, RESPONSES = 8, 4  # prompts shown
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "safetensors")
FOLD = 700  # longer responses are truncated to this number of characters


@dataclass(frozen=True)
class CardFacts:
    """The content of a model card."""

    loaded: LoadedModel
    folder: Path  # of the finished export
    whole: bool  # all weights, not an adapter
    rows: Sequence[Mapping[str, Any]]  # of metrics.jsonl, up to the exported step
    shown: Mapping[int, Sequence[Shown]]  # samples of the first and the last evaluation
    hashes: Mapping[str, tuple[int, str]]

    @property
    def source(self) -> ModelSource:
        return self.loaded.source

    @property
    def recipe(self) -> Recipe:
        assert self.source.training is not None, "only runs are exported"
        return self.source.training

    @property
    def run(self) -> RunFolder:
        assert self.source.run is not None, "only runs are exported"
        return self.source.run

    @property
    def has_images(self) -> bool:
        """Whether samples are images rather than texts."""
        return self.recipe.model.output == "image"

    @property
    def metric(self) -> str:
        """The main held-out metric of the run."""
        return held_out_key(key for row in self.rows for key in row)


def write(
    loaded: LoadedModel, aside: Path, folder: Path, hashes: Mapping[str, tuple[int, str]]
) -> None:
    """Writes README.md and its images to `aside`, which is later renamed to `folder`."""
    run = loaded.source.run
    assert run is not None, "only runs are exported"
    rows = [row for row in run.rows() if row["step"] <= loaded.source.step]
    whole = not folders.is_adapter(aside)
    facts = CardFacts(loaded, folder, whole, rows, _shown(run, loaded.source.step), hashes)
    parts = [
        _front(facts),
        _head(facts),
        _result(facts, aside),
        _samples(facts, aside),
        _usage(facts, aside),
        _continue(facts),
        _details(facts),
        _files(facts),
    ]
    text = "\n\n".join(part for part in parts if part)
    (aside / "README.md").write_text(text + "\n", encoding="utf-8")


def _shown(run: RunFolder, step: int) -> dict[int, list[Shown]]:
    """Samples of the first and the last evaluation up to `step` that saved any."""
    stored = (run.path / "samples").glob("*.jsonl")
    files = {int(f.stem): f for f in stored if re.fullmatch("[0-9]{6,12}", f.stem)}
    steps = sorted(s for s in files if s <= step)
    ends = dict.fromkeys(steps[:1] + steps[-1:])
    kept = {s: figures.lines(files[s], Shown.of, []) for s in ends}
    return {s: rows for s, rows in kept.items() if rows}


# The front matter


def _front(facts: CardFacts) -> str:
    from huggingface_hub import ModelCardData

    recipe = facts.recipe
    base = recipe.model.path if _is_hub_name(recipe.model.path) else None
    sets = {s.path for s in (*recipe.data.train, *recipe.data.eval) if s.path.startswith("hub:")}
    adapter = [] if facts.whole else ["lora"]
    family = facts.loaded.family
    card = ModelCardData(
        base_model=base,
        base_model_relation=("finetune" if facts.whole else "adapter") if base else None,
        library_name=family.library(facts.whole),
        pipeline_tag=_task(facts),
        license=license_of(recipe.model.path),
        datasets=sorted(s.removeprefix("hub:").partition("@")[0] for s in sets) or None,
        tags=["gesso", "reinforcement-learning", recipe.algorithm.name, *adapter],
    )
    return f"---\n{card.to_yaml()}\n---"


def _task(facts: CardFacts) -> str:
    task, section = facts.loaded.family.task(facts.loaded.model), facts.recipe.model
    is_video = isinstance(section, Model) and section.frames > 1
    return task.removesuffix("image") + "video" if is_video else task


def _is_hub_name(path: str) -> bool:
    local = path.startswith((ZOO, ".", "/", "~")) or resolve_path(path).exists()
    return not local and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", path))


def license_of(path: str) -> str | None:
    """The license in the card of a local base model; bundled models have Gesso's license."""
    if path.startswith(ZOO):
        return "apache-2.0"
    card = resolve_path(path) / "README.md"
    if not card.is_file():
        return None
    from huggingface_hub import ModelCard

    try:
        return ModelCard.load(card).data.to_dict().get("license")
    except ValueError as error:
        raise UserError(f"{card}: the front matter is not valid YAML: {error}") from error


# Description and results


def _head(facts: CardFacts) -> str:
    recipe, source = facts.recipe, facts.source
    about = f"{_md(recipe.about)}\n\n" if recipe.about else ""
    lora = recipe.model.lora
    if lora is None:
        what = f"All weights of {_base(recipe)}, fine-tuned"
    elif facts.whole:
        what = f"{_base(recipe)} with a LoRA of rank {lora.rank} merged into its weights"
    else:
        what = f"A LoRA of rank {lora.rank} and alpha {lora.alpha} for {_base(recipe)}"
    averaged = " These are the averaged (EMA) weights." if source.table == "ema" else ""
    return (
        f"# {_md(facts.folder.resolve().name)}\n\n{about}{what}. Trained {_method(recipe)} "
        f"for {source.step} of {recipe.steps} steps with Gesso.{averaged}"
    )


def _method(recipe: Recipe) -> str:
    name = f"`{recipe.algorithm.name}`"
    if recipe.sampler.engine == "data":
        return f"by {name} on samples of the data"
    rewards = " and ".join(f"`{entry.name}`" for entry in recipe.reward)
    several = "s" if len(recipe.reward) > 1 else ""
    return f"by reinforcement learning ({name}) on the reward{several} {rewards}"


def _base(recipe: Recipe) -> str:
    path = recipe.model.path
    if _is_hub_name(path):
        return f"[{path}](https://huggingface.co/{path})"
    return f"`{path}`" + (" (bundled with Gesso)" if path.startswith(ZOO) else "")


def _result(facts: CardFacts, aside: Path) -> str:
    evals = [row for row in facts.rows if row.get("eval/reward") is not None]
    if not evals:
        return "## Results\n\nThe run was not evaluated before this step."
    first, last = evals[0], evals[-1]
    keys = [key for key in last if key.startswith("eval/") and last[key] is not None]
    keys = [key for key in keys if key != "eval/failed" or last[key]]
    if len(facts.recipe.eval_reward or facts.recipe.reward) == 1 and len(keys) > 1:
        keys.remove("eval/reward")  # the only reward is the total
    lines = [f"| held-out | step {first['step']} | step {last['step']} |", "|---|---|---|"]
    for key in keys:
        before = first.get(key)
        shown = "" if before is None else f"{before:.3f}"
        lines.append(f"| {_md(key.removeprefix('eval/'))} | {shown} | {last[key]:.3f} |")
    sources = " and ".join(f"`{source.path}`" for source in facts.recipe.data.eval)
    n = facts.recipe.eval.samples
    each = "one sample" if n == 1 else f"{n} samples"
    text = (
        f"Evaluated on the first {facts.recipe.eval.prompts} prompts of {sources} (all, if there "
        f"are fewer), with {each} each, always from the same seeds."
    )
    if facts.recipe.learner.ema is not None and facts.source.table == "current":
        text += " These results are for the averaged weights; this folder has the current weights."
    if last["step"] != facts.source.step:
        text += f" The last evaluation up to step {facts.source.step} was at step {last['step']}."
    key = facts.metric
    twin = "reward" if key == "eval/reward" else key.replace("eval/", "reward/", 1)
    lines_of = {"held-out": figures.series(facts.rows, key)}
    lines_of["training"] = figures.series(facts.rows, twin)
    curve(key.removeprefix("eval/"), lines_of).save(aside / CURVE)
    image = f"![{_md(key.removeprefix('eval/'))} over training steps]({CURVE})"
    return "\n".join(["## Results", "", image, "", *lines, "", text])


# Samples


def _samples(facts: CardFacts, aside: Path) -> str:
    if not facts.shown:
        return ""
    first, last = min(facts.shown), max(facts.shown)
    before = {row.index: row for row in facts.shown[first]}
    pairs = [(before.get(row.index, row), row) for row in facts.shown[last]]
    head = f"## Samples\n\nThe first prompts of the evaluation, without selection, at step {first}"
    head += f" and step {last}, from the same seeds." if last != first else "."
    if facts.has_images:
        return f"{head}\n\n{_sheet(facts, pairs[:IMAGES], (first, last), aside)}"
    return f"{head}\n\n{_responses(facts, pairs[:RESPONSES], (first, last), aside)}"


def _sheet(
    facts: CardFacts, pairs: Sequence[tuple[Shown, Shown]], steps: tuple[int, int], aside: Path
) -> str:
    """A contact sheet, and its prompts as text, since its font does not support all characters."""
    ends = steps if steps[0] != steps[1] else steps[:1]
    rows = [
        Row(f"{i}. {pair[0].prompt}", [_cell(facts.run, s, shown) for s, shown in _of(ends, pair)])
        for i, pair in enumerate(pairs, 1)
    ]
    sources = [input_images(facts.run.path, pair[0]) for pair in pairs]
    sheet(rows, [f"step {step}" for step in ends], sources).save(aside / SHEET)
    prompts = "\n".join(f"{i}. {_md(pair[0].prompt)}" for i, pair in enumerate(pairs, 1))
    return f"![images before and after training]({SHEET})\n\n{prompts}"


def _of(steps: Sequence[int], pair: Sequence[Shown]) -> list[tuple[int, Shown]]:
    return list(zip(steps, pair, strict=False))


def _cell(run: RunFolder, step: int, row: Shown) -> Cell:
    from PIL import Image

    reward = "no score" if row.reward is None else f"{row.reward:.3f}"
    text = f'   "{row.text}"' if row.text else ""
    try:
        with Image.open(run.path / "samples" / f"{step:06d}" / Path(row.strip).name) as opened:
            return Cell(opened.convert("RGB"), reward + text)
    except Exception:  # Pillow raises many types for damaged files; show the others anyway
        return Cell(None, f"{row.image} cannot be read")


def _responses(
    facts: CardFacts, pairs: Sequence[tuple[Shown, Shown]], steps: tuple[int, int], aside: Path
) -> str:
    parts = []
    for number, (before, after) in enumerate(pairs, 1):
        answer = f" (expected answer: {_md(after.answer)})" if after.answer else ""
        lines = [f"**{_md(after.prompt)}**{answer}", ""]
        for k, name in enumerate(after.shown, 1):
            file = facts.run.path / "samples" / "prompts" / Path(name).name
            if file.is_file():
                copy = f"prompt-{number}-{k}.png"
                shutil.copyfile(file, aside / copy)
                lines += [f"![image {k} of the prompt]({copy})", ""]
        for step, row in dict(zip(steps, (before, after), strict=True)).items():
            reward = "no score" if row.reward is None else f"reward {row.reward:.3f}"
            lines += [f"Step {step}, {reward}:", _fenced(row.response)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


# Usage and training details


def _usage(facts: CardFacts, aside: Path) -> str:
    example = _example(facts)
    if example.image is not None:
        shutil.copyfile(example.image, aside / usage.EXAMPLE)
    option = f" --image {usage.EXAMPLE}" if example.image is not None else ""
    command = _fenced(f"gesso sample DIR {shlex.quote(example.prompt)}{option}")
    if not facts.loaded.family.wraps_library(facts.loaded.model):
        return f"## Usage\n\nWith Gesso, where DIR is this folder:\n\n{command}"
    code = usage.code(facts.loaded, example, facts.whole)
    _, as_trained = usage.prompt_of(facts.loaded, example)
    if not as_trained:
        return (
            f"## Usage\n\n{_fenced(code, 'python')}\n\nDuring training, prompts were formatted "
            "with `data.template` of the recipe; this code does not apply it."
        )
    what = "sample" if facts.has_images else "response"
    gesso = f"Gesso generates the same {what}, where DIR is this folder"
    return f"## Usage\n\n{_fenced(code, 'python')}\n\n{gesso}:\n\n{command}"


def _example(facts: CardFacts) -> usage.Example:
    """The first prompt of the evaluations with at most one image."""
    folder = facts.run.path / "samples" / "prompts"
    for rows in facts.shown.values():
        for row in rows:
            files = [folder / Path(name).name for name in row.shown]
            if len(files) <= 1 and all(file.is_file() for file in files):
                return usage.Example(row.prompt, files[0] if files else None)
    return usage.Example("a photo of a cat" if facts.has_images else "What is 3 + 4?")


def _continue(facts: CardFacts) -> str:
    key = "model.path" if facts.whole else "model.lora.path"
    return (
        "## Continue training\n\n"
        f"From the run, `{facts.run.path.resolve().name}`: `gesso train --resume RUN steps=N`. "
        f"From this folder, DIR, with its recipe: `gesso train DIR/recipe.toml {key}=DIR`."
    )


def _details(facts: CardFacts) -> str:
    recipe = facts.recipe
    rewards = "\n".join(
        f"- `{entry.name}`, weight {entry.weight:g}" + _options(entry.options)
        for entry in recipe.reward or recipe.eval_reward
    )
    paths = [
        " and ".join(f"`{s.path}`" for s in part) for part in (recipe.data.train, recipe.data.eval)
    ]
    table = {
        "algorithm": f"`{recipe.algorithm.name}`",
        "learning rate": f"{recipe.optimizer.lr:g}",
        "prompts per step × samples": f"{recipe.data.groups} × {recipe.algorithm.options['group']}",
        "seed": recipe.seed,
        "training prompts": paths[0],
        "evaluation prompts": paths[1],
        "source of the settings": _md(recipe.source),
        "exported with": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "git commit": commit(),
    }
    lines = "\n".join(
        f"| {name} | {value} |" for name, value in table.items() if value not in ("", None)
    )
    return (
        "## Training details\n\nAll settings are in [recipe.toml](recipe.toml).\n\n"
        f"| | |\n|---|---|\n{lines}\n\nRewards:\n\n{rewards}"
    )


def _options(options: Mapping[str, Any]) -> str:
    text = ", ".join(f"{key} = {value!r}" for key, value in options.items())
    return f" ({_md(text)})" if text else ""


def versions() -> dict[str, str]:
    """Versions at the time of export; a run folder does not record those of the training."""
    installed = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"gesso": gesso.__version__} | installed  # Gesso itself need not be installed


def commit() -> str | None:
    """The git commit of Gesso, if it runs from a git checkout."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str] | None:
        command = ["git", "-C", str(PACKAGE), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = git("rev-parse", "HEAD")
    return head.stdout.strip() if head is not None else None


def _files(facts: CardFacts) -> str:
    lines = "\n".join(
        f"| {name} | {size:,} | `{digest}` |" for name, (size, digest) in facts.hashes.items()
    )
    return f"## Files\n\n| file | bytes | sha256 |\n|---|---|---|\n{lines}"


def _md(text: str) -> str:
    """Escapes text for Markdown, on one line, also within a table."""
    return re.sub(r"([\\`*_{}\[\]<>#|!&])", r"\\\1", " ".join(text.split()))


def _fenced(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any run of backticks in its content."""
    shown = text if language or len(text) <= FOLD else text[:FOLD] + " …"
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{shown}\n{fence}"
