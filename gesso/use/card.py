"""The model card (README.md) of an export, in the format of the Hugging Face Hub: description,
results with a curve, samples before and after training, usage, training details."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from gesso.config import ZOO, Model, Recipe, resolve_path
from gesso.track import figures
from gesso.track.run_folder import RunFolder
from gesso.track.samples import Shown
from gesso.types import UserError
from gesso.use import folders, usage
from gesso.use.card_details import continue_training, details, files
from gesso.use.card_facts import CardFacts, fenced, md
from gesso.use.card_samples import samples
from gesso.use.loaded import LoadedModel
from gesso.use.sheets import curve

CURVE = "curve.png"


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
        samples(facts, aside),
        _usage(facts, aside),
        continue_training(facts),
        details(facts),
        files(facts),
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
    about = f"{md(recipe.about)}\n\n" if recipe.about else ""
    lora = recipe.model.lora
    if lora is None:
        what = f"All weights of {_base(recipe)}, fine-tuned"
    elif facts.whole:
        what = f"{_base(recipe)} with a LoRA of rank {lora.rank} merged into its weights"
    else:
        what = f"A LoRA of rank {lora.rank} and alpha {lora.alpha} for {_base(recipe)}"
    averaged = " These are the averaged (EMA) weights." if source.table == "ema" else ""
    return (
        f"# {md(facts.folder.resolve().name)}\n\n{about}{what}. Trained {_method(recipe)} "
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
        lines.append(f"| {md(key.removeprefix('eval/'))} | {shown} | {last[key]:.3f} |")
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
    image = f"![{md(key.removeprefix('eval/'))} over training steps]({CURVE})"
    return "\n".join(["## Results", "", image, "", *lines, "", text])


# Usage


def _usage(facts: CardFacts, aside: Path) -> str:
    example = _example(facts)
    if example.image is not None:
        shutil.copyfile(example.image, aside / usage.EXAMPLE)
    option = f" --image {usage.EXAMPLE}" if example.image is not None else ""
    command = fenced(f"gesso sample DIR {shlex.quote(example.prompt)}{option}")
    if not facts.loaded.family.wraps_library(facts.loaded.model):
        return f"## Usage\n\nWith Gesso, where DIR is this folder:\n\n{command}"
    code = usage.code(facts.loaded, example, facts.whole)
    _, as_trained = usage.prompt_of(facts.loaded, example)
    if not as_trained:
        return (
            f"## Usage\n\n{fenced(code, 'python')}\n\nDuring training, prompts were formatted "
            "with `data.template` of the recipe; this code does not apply it."
        )
    what = "sample" if facts.has_images else "response"
    gesso = f"Gesso generates the same {what}, where DIR is this folder"
    return f"## Usage\n\n{fenced(code, 'python')}\n\n{gesso}:\n\n{command}"


def _example(facts: CardFacts) -> usage.Example:
    """The first prompt of the evaluations with at most one image."""
    folder = facts.run.path / "samples" / "prompts"
    for rows in facts.shown.values():
        for row in rows:
            files = [folder / Path(name).name for name in row.shown]
            if len(files) <= 1 and all(file.is_file() for file in files):
                return usage.Example(row.prompt, files[0] if files else None)
    return usage.Example("a photo of a cat" if facts.has_images else "What is 3 + 4?")
