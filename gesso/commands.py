"""The commands of the command line. Heavy packages are imported by those that need them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso.track import displays, progress
from gesso.track.run_folder import RunFolder, must_be_possible
from gesso.types import UserError

if TYPE_CHECKING:
    from gesso.config import Recipe
    from gesso.config.tables import RecipeTables
    from gesso.use.source import ModelSource

HEADINGS = {
    "demo": "demos, with bundled models",
    "flow": "image models, with sizes for --card",
    "language": "language and vision-language models, with sizes for --card",
}  # of `gesso recipes`


def _display(options: argparse.Namespace) -> progress.Display:
    return displays.display(options.quiet, options.json)


def train(options: argparse.Namespace) -> None:
    from gesso import run
    from gesso.cluster import launched

    launch = launched.Launch.find()
    if launch is not None and launch.rank > 0:
        from gesso import worker

        worker.serve(launched.join(launch))
    workers = [] if launch is None else [f"cluster.workers={launch.count}"]
    shown = progress.Json() if options.json else None
    if options.resume:
        steps, cluster = _changes(options)
        finished = run.resume(options.resume, options.quiet, steps, shown, [*workers, *cluster])
    elif options.recipe:
        overrides = [*workers, *options.overrides]
        finished = run.train(
            options.recipe, overrides, options.run, options.quiet, shown, options.card
        )
    else:
        raise UserError("train expects a recipe (see `gesso recipes`) or --resume RUN")
    text, data = _summary(finished.path, finished.rows(), run.recipe_of(finished))
    (shown or progress.SILENT).result(text, data)


def _changes(options: argparse.Namespace) -> tuple[int | None, list[str]]:
    """The new number of steps and the changes of the cluster in `--resume RUN steps=60
    cluster.workers=4`; nothing else may be changed."""
    if options.card is not None:
        raise UserError(
            "--card cannot be used with --resume, since a run keeps its recipe; remove it"
        )
    given = [o for o in (options.recipe, *options.overrides) if o]
    steps = [o.removeprefix("steps=") for o in given if o.startswith("steps=")]
    cluster = [o for o in given if o.startswith("cluster.") and "=" in o]
    known = len(steps) + len(cluster) == len(given) and len(steps) < 2
    if options.run or not known or not all(value.isdigit() for value in steps):
        raise UserError(
            "--resume uses the recipe and the folder of the run; only steps=N and the keys of "
            "cluster may be changed"
        )
    return int(steps[0]) if steps else None, cluster


def _summary(path: Path, rows: Sequence[dict], recipe: Recipe) -> tuple[str, dict[str, Any]]:
    steps, expect = recipe.steps, recipe.expect
    evals = [row for row in rows if "eval/reward" in row]
    done = rows[-1]["step"] if rows else 0
    report = path / "report.html"
    data = {
        "run": str(path),
        "report": str(report),
        "step": done,
        "steps": steps,
        "last": evals[-1] if evals else None,
    }
    lines = []
    if len(evals) > 1:
        first, last = evals[0], evals[-1]
        lines.append(
            "\nheld-out".ljust(26)
            + f"step {first['step']}".rjust(9)
            + f"step {last['step']}".rjust(12)
        )
        for key in (k for k in last if k.startswith("eval/")):
            if key == "eval/failed" and not last[key]:
                continue
            name = key.removeprefix("eval/")
            lines.append(f"  {name:<22} {_number(first.get(key)):>9} {_number(last[key]):>11}")
    if expect is not None and evals and evals[-1].get(expect.metric) is not None:
        lines.append(f"\n{expect.compared(evals[-1][expect.metric])}")
    if done < steps:
        lines.append(
            f"\nstopped after step {done} of {steps}; to continue: gesso train --resume {path}"
        )
    return "\n".join([*lines, f"\nrun     {path}", f"report  {report}"]), data


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def check(options: argparse.Namespace) -> None:
    from gesso import build
    from gesso.check import Findings, check, memory
    from gesso.config.tables import read_recipe

    recipe = build.recipe(options.recipe, options.overrides, options.card)
    if options.fit is not None:
        return _fit(options, recipe)
    with _display(options) as shown:
        findings = Findings(memory(recipe, shown)) if options.memory else check(recipe, shown)
        card = "" if options.card is None else f" --card {options.card}"
        valid = f"{options.recipe}{card}: all keys and values are valid"
        facts = [("recipe", valid), *findings.facts, *(("warning", w) for w in findings.warnings)]
        if options.memory and not card and (sizes := read_recipe(options.recipe).sizes):
            facts.append(("sizes", f"--card {sizes}"))
        lines = [f"{name:<8} {fact}" for name, fact in facts]
        shown.result("\n".join(lines), {"facts": facts})


def _fit(options: argparse.Namespace, recipe: Recipe) -> None:
    from gesso.check import size_of
    from gesso.fitting import fit

    with _display(options) as shown:
        fitted = fit(recipe, options.fit, shown)
        card = [] if options.card is None else ["--card", str(options.card)]
        others = [o for o in options.overrides if o.partition("=")[0] not in fitted.settings]
        command = ["gesso", "train", options.recipe, *card, *others, *fitted.overrides]
        facts = [
            ("fit", shlex.join(command)),
            ("memory", f"about {size_of(fitted.memory.peak)} at the peak"),
        ]
        facts += [("", f"assuming {fitted.prompts}")] if fitted.prompts else []
        lines = [f"{name:<8} {fact}" for name, fact in facts]
        shown.result("\n".join(lines), {"facts": facts, "overrides": fitted.overrides})


def plan(options: argparse.Namespace) -> None:
    from gesso import build
    from gesso.plan import command, text

    if given := [o for o in options.overrides if o.startswith("cluster.workers=")]:
        raise UserError(f"gesso plan chooses cluster.workers for --gpus; remove {given[0]}")
    workers = f"cluster.workers={max(1, options.gpus)}"
    recipe = build.recipe(options.recipe, [workers, *options.overrides], options.card)
    with _display(options) as shown:
        gpu = None if options.measure else options.gpu
        wanted = command.Wanted(
            options.gpus, gpu, options.score_s, options.response_tokens, options.price
        )
        planned = command.plan(recipe, wanted, shown)
        price = planned.price
        card = [] if options.card is None else ["--card", str(options.card)]
        lines = text.report(
            planned.plan, [options.recipe, *card], options.overrides, price, options.explain
        )
        shown.result(lines, text.data(planned.plan, price))


def recipes(options: argparse.Namespace) -> None:
    from gesso.config import tables

    bundled = [tables.read_recipe(name) for name in tables.bundled_recipes()]
    for kind, heading in HEADINGS.items():
        recipes = [recipe for recipe in bundled if _kind(recipe) == kind]
        name_width = max(len(recipe.name) for recipe in recipes)
        about_width = max(len(recipe.recipe["about"]) for recipe in recipes)
        print(f"{heading}:")
        for recipe in recipes:
            about = f"{recipe.recipe['about']:<{about_width}}"
            print(f"  {recipe.name:<{name_width}}  {about}  {' '.join(recipe.cards)}".rstrip())


def _kind(bundled: RecipeTables) -> str:
    """One of HEADINGS."""
    from gesso.config import ZOO, family

    model = bundled.recipe["model"]
    return "demo" if model["path"].startswith(ZOO) else family(model)


def sample(options: argparse.Namespace) -> None:
    from gesso.use import sampling
    from gesso.use.loaded import SamplingOptions

    source = _source(options)
    sources = [source.base, source] if options.base else [source]
    settings = SamplingOptions(options.steps, options.guidance, options.temperature)
    request = sampling.SampleRequest(
        options.prompts, options.file, options.image, options.n, options.seed, options.reward,
        settings,
    )  # fmt: skip
    sampling.check_out(options.out, request, len(sources), source.recipe)
    if options.sheet is not None:
        sampling.check_sheet(options.sheet, source.recipe)
    with _display(options) as display:
        results = sampling.sample_all(sources, request, display)
        files = {} if results[0].texts else sampling.save(results, options.out)
        if options.sheet is not None:
            sampling.save_sheet(results, options.sheet)
        display.result(*sampling.report(results, files))


def _source(options: argparse.Namespace) -> ModelSource:
    from gesso.use.source import find

    return find(options.source, options.step, options.weights, options.set)


def evaluate(options: argparse.Namespace) -> None:
    from gesso.use import evaluate, results
    from gesso.use.export import must_be_free
    from gesso.use.loaded import SamplingOptions
    from gesso.use.source import find

    first = _source(options)
    others = [find(other, overrides=options.set) for other in options.others]
    sources = [first, *others, *([first.base] if options.base else [])]
    settings = SamplingOptions(options.steps, options.guidance, options.temperature)
    rewards, prompts = tuple(options.reward), options.prompts or ()
    request = evaluate.EvaluationRequest(
        rewards, prompts, options.n, options.seed, options.first, settings
    )
    if options.out is not None:
        must_be_free(options.out, "folder")
    with _display(options) as display:
        evaluations = evaluate.evaluate_all(sources, request, display)
        if options.out is not None:
            results.write(evaluations, options.out)
        expect = None if first.training is None else first.training.expect
        display.result(evaluate.table(evaluations, expect), evaluate.summary(evaluations))


def export(options: argparse.Namespace) -> None:
    from gesso.use.export import Form, check, export
    from gesso.use.loaded import open_model

    RunFolder.open(options.source)
    source, form = _source(options), Form(options.merged, options.shard_size, options.dtype)
    check(source, options.to, form)
    with _display(options) as display:
        folder = export(open_model(source, display), options.to, form, display)
        display.result(str(folder), {"folder": str(folder)})


def view(options: argparse.Namespace) -> None:
    from gesso.rewards.transport.pool import token_from
    from gesso.viewer import report, server
    from gesso.viewer.studio import Studio

    if options.report:
        must_be_possible(options.report.parent, "folder")
        try:
            print(report.write(options.runs, options.report))
        except OSError as error:
            raise UserError(f"{options.report} cannot be written: {error}") from error
        return
    if not 0 <= options.port < 2**16:
        raise UserError(f"view expects --port from 0 to 65535, got {options.port}")
    token = token_from(options.token_env)
    studio = Studio(options.trust_code)
    server.serve(options.runs, studio, options.host, options.port, token)


def timeline(options: argparse.Namespace) -> None:
    import json

    from gesso.timeline import advice, chrome
    from gesso.track.atomic import write_atomic
    from gesso.viewer import timelines
    from gesso.viewer.reading import RunReader

    RunFolder.open(options.run)
    reader = RunReader(options.run)
    steps = timelines.steps_of(reader)
    if not steps:
        raise UserError(
            f"{options.run} has no timeline.jsonl: it was made by an earlier version of gesso, or "
            "has not finished a step yet"
        )
    if options.step is not None:
        first, last = steps[0].step, steps[-1].step
        steps = [step for step in steps if step.step == options.step]
        if not steps:
            raise UserError(f"--step {options.step}: the timeline has steps {first} to {last}")
    found = advice.summary(steps)
    lines = [timelines.table(found), found.sentence]
    if options.out is not None:
        must_be_possible(options.out.parent, "folder")
        try:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(options.out, json.dumps(chrome.trace(steps)).encode())
        except OSError as error:
            raise UserError(f"{options.out} cannot be written: {error.strerror}") from error
        lines.append(f"{options.out}: open it in https://ui.perfetto.dev or chrome://tracing")
    with _display(options) as display:
        display.result("\n".join(lines), timelines.summary(steps))


def serve_reward(options: argparse.Namespace) -> None:
    from gesso.rewards import assembly
    from gesso.rewards.transport.pool import token_from
    from gesso.rewards.transport.serve import serve

    for name in ("workers", "batch", "max_mb"):
        if (value := vars(options)[name]) < 1:
            option = name.replace("_", "-")
            raise UserError(f"serve-reward expects --{option} of at least 1, got {value}")
    if not 0 <= options.port < 2**16:
        raise UserError(f"serve-reward expects --port from 0 to 65535, got {options.port}")
    entry = assembly.reward_entry(options.name, options.overrides, options.workers)
    scorer = assembly.served(entry, options.batch)
    token, limit = token_from(options.token_env), options.max_mb * 2**20
    serve(entry.name, scorer, options.host, options.port, token, limit)


def env(options: argparse.Namespace) -> None:
    from gesso import build
    from gesso.rewards import environments

    files = [options.source]
    if not options.source.endswith(".txt"):
        recipe = build.recipe(options.source, options.overrides)
        entries = (*recipe.reward, *recipe.eval_reward)
        files = list(dict.fromkeys(entry.env for entry in entries if entry.env is not None))
        if not files:
            raise UserError(f"no reward of {options.source} has an env; set reward.env")
    for file in files:
        print(f"{file}: {environments.install(file)}")


def data_ocr(options: argparse.Namespace) -> None:
    from gesso.data import ocr

    for file in ocr.write(options.out, options.train, options.test, options.seed):
        print(file)
    print(f'use in a recipe: data.train = "{options.out}@train", data.eval = "{options.out}@test"')


def data_pairs(options: argparse.Namespace) -> None:
    from gesso.use import pairs

    result = pairs.write(options.run, options.out, options.min_gap)
    print(f"{result.file}: {result.pairs} pairs")
    for note in result.notes:
        print(note)
    print(f'use in a recipe: data.train = "{result.file}", sampler.engine = "data"')
