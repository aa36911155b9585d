"""The command line. Heavy packages are imported by the commands that need them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso import imports
from gesso.track import displays, progress
from gesso.track.run_folder import RunFolder, must_be_possible
from gesso.types import StopRun, UserError, bad_text, out_of_memory

if TYPE_CHECKING:
    from gesso.config import Recipe
    from gesso.config.tables import RecipeTables
    from gesso.use.source import ModelSource

HEADINGS = {
    "demo": "demos, with bundled models",
    "flow": "image models",
    "language": "language and vision-language models",
}  # of `gesso recipes`


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    for argument in sys.argv[1:] if arguments is None else arguments:
        if fault := bad_text(argument):
            print(f"error: an argument {fault}: {argument!r:.60}", file=sys.stderr)
            return 2
    options, rest = parser.parse_known_args(arguments)
    if rest:  # argparse accepts a positional list only in one place; we accept it anywhere
        unknown = any(r.startswith("-") for r in rest) or options.more is None
        if unknown or (options.more == "overrides" and any("=" not in r for r in rest)):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        vars(options)[options.more] += rest
    try:
        sys.path[:] = imports.import_path()  # the working folder comes last
        options.action(options)
        sys.stdout.flush()
    except UserError as error:
        return _failed(options, f"error: {error}", 2)
    except StopRun as error:
        return _failed(options, f"stopped: {error}", 3)
    except (MemoryError, RuntimeError) as error:
        if (message := out_of_memory(error)) is None:
            raise
        return _failed(options, f"error: {message}", 3)
    except BrokenPipeError:  # `gesso recipes | head`: the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _failed(options, "interrupted", 130)
    return 0


def _failed(options: argparse.Namespace, text: str, code: int) -> int:
    if options.json:
        progress.Json().error(text, code)
    else:
        print(text, file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gesso",
        description="RL post-training for flow-matching image models and (vision-)language models.",
    )
    parser.set_defaults(json=False, more=None)  # `more`: the list that extra arguments go to
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = _add_command(commands, "train", "train a recipe, or resume a run")
    train.add_argument("recipe", nargs="?", help="name of a bundled recipe, or a TOML file")
    train.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="override a key of the recipe, e.g. optimizer.lr=1e-4",
    )
    train.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="new run folder (default: runs/RECIPE-001, runs/RECIPE-002, ...)",
    )
    _add_card(train)
    train.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="continue this run from its newest checkpoint; only steps=N may be changed",
    )
    _add_output(train)
    train.set_defaults(action=_train, more="overrides")

    check = _add_command(
        commands, "check", "run every part of a recipe once without training, and estimate its cost"
    )
    check.add_argument("recipe", help="name of a bundled recipe, or a TOML file")
    check.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="override a key of the recipe, e.g. optimizer.lr=1e-4",
    )
    _add_card(check)
    what = check.add_mutually_exclusive_group()
    what.add_argument(
        "--memory",
        action="store_true",
        help="only estimate the peak memory; needs neither the weights nor a GPU",
    )
    what.add_argument(
        "--fit",
        type=int,
        metavar="GB",
        help="only find the largest batches for a GPU with this much memory, by estimates",
    )
    _add_output(check)
    check.set_defaults(action=_check, more="overrides")

    recipes = _add_command(commands, "recipes", "list the bundled recipes")
    recipes.set_defaults(action=_recipes)

    sample = _add_command(
        commands, "sample", "generate images or responses with a run, a recipe or a model folder"
    )
    sample.add_argument(
        "source",
        metavar="RUN_OR_MODEL",
        help="a run folder, a recipe (its untrained model), an export, or a model folder of "
        "diffusers or transformers",
    )
    sample.add_argument("prompts", nargs="*", metavar="PROMPT", help="text of a prompt")
    sample.add_argument(
        "--prompts",
        dest="file",
        type=Path,
        metavar="FILE",
        help="read more prompts from this file, in any format that data.train accepts",
    )
    sample.add_argument("--n", type=int, default=1, help="samples per prompt (default: 1)")
    sample.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    sample.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="input image for a vision-language model; repeat it for several images",
    )
    sample.add_argument(
        "--out",
        type=Path,
        default=Path("."),
        metavar="DIR",
        help="folder for the generated images (default: the working folder)",
    )
    sample.add_argument(
        "--sheet", type=Path, metavar="FILE", help="also save all images as one contact sheet"
    )
    sample.add_argument(
        "--base",
        action="store_true",
        help="also sample from the base model, before any training",
    )
    _add_sampling(sample, "score the samples with this reward; may be repeated")
    sample.set_defaults(action=_sample, more="prompts")

    evaluate = _add_command(
        commands, "eval", "score held-out prompts with confidence intervals, and compare models"
    )
    evaluate.add_argument(
        "source",
        metavar="RUN_OR_MODEL",
        help="a run folder, a recipe (its untrained model), an export, or a model folder of "
        "diffusers or transformers",
    )
    evaluate.add_argument(
        "others",
        nargs="*",
        metavar="OTHER",
        help="more runs or models; the first one is compared with each of them",
    )
    evaluate.add_argument(
        "--base",
        action="store_true",
        help="also compare with the base model, before any training",
    )
    evaluate.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompt file (default: data.eval of the recipe)",
    )
    evaluate.add_argument(
        "--first",
        type=int,
        metavar="N",
        help="use only the first N prompts (default: eval.prompts of the recipe; all of --prompts)",
    )
    evaluate.add_argument("--n", type=int, default=1, help="samples per prompt (default: 1)")
    evaluate.add_argument("--seed", type=int, help="random seed (default: that of the recipe)")
    evaluate.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="new folder for the results: eval.json, samples.jsonl, and images",
    )
    _add_sampling(
        evaluate, "score with this reward (default: the rewards of the recipe); may be repeated"
    )
    evaluate.set_defaults(action=_eval, more="others")

    export = _add_command(
        commands, "export", "save the weights of a run for diffusers, transformers or PEFT"
    )
    export.add_argument("source", type=Path, metavar="RUN", help="run folder")
    export.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="new folder for the weights"
    )
    export.add_argument(
        "--merged",
        action="store_true",
        help="merge the LoRA into the base weights and save the whole model",
    )
    export.add_argument(
        "--shard-size", metavar="SIZE", help="maximum size per weight file (default: 5GB)"
    )
    export.add_argument(
        "--dtype",
        metavar="DTYPE",
        help="convert to float32, bfloat16 or float16 (default: no conversion)",
    )
    _add_checkpoint(export)
    export.set_defaults(action=_export)

    view = _add_command(commands, "view", "show runs in a browser, during training or afterwards")
    view.add_argument(
        "runs",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="RUNS",
        help="a run folder, or a folder of runs (default: runs)",
    )
    view.add_argument(
        "--port", type=int, default=7860, help="port; 0 for any free port (default: 7860)"
    )
    _add_access(view)
    view.add_argument(
        "--trust-code",
        action="store_true",
        help='allow the playground to import "module:Name" code that a run refers to',
    )
    view.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write everything to one HTML file instead of starting a server",
    )
    view.set_defaults(action=_view)

    serve = _add_command(commands, "serve-reward", "serve a reward over HTTP")
    serve.add_argument(
        "name", metavar="NAME", help='name of a bundled reward, or your code as "module:name"'
    )
    serve.add_argument(
        "overrides", nargs="*", metavar="key=value", help="set an option of the reward"
    )
    serve.add_argument("--port", type=int, required=True, help="port; 0 for any free port")
    _add_access(serve)
    serve.add_argument(
        "--workers", type=int, default=1, help="number of worker processes (default: 1)"
    )
    serve.add_argument(
        "--batch", type=int, default=16, help="maximum samples per call of a worker (default: 16)"
    )
    serve.add_argument(
        "--max-mb", type=int, default=64, help="maximum size of a request in MiB (default: 64)"
    )
    serve.set_defaults(action=_serve_reward, more="overrides")

    data = _add_command(commands, "data", "generate a prompt set")
    kinds = data.add_subparsers(title="kinds", required=True, metavar="KIND")
    ocr = _add_command(
        kinds, "ocr", "generate prompts for images that contain text, for the reward ocr"
    )
    ocr.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for train.txt and test.txt"
    )
    ocr.add_argument(
        "--train", type=int, default=20_000, help="prompts in DIR/train.txt (default: 20000)"
    )
    ocr.add_argument(
        "--test", type=int, default=1_000, help="prompts in DIR/test.txt (default: 1000)"
    )
    ocr.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    ocr.set_defaults(action=_data_ocr)
    return parser


def _add_card(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--card",
        type=int,
        metavar="GB",
        help="use the recipe's settings for a GPU with this much memory, e.g. 24",
    )


def _add_command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    """`about` is shown by `gesso --help` and by `gesso NAME --help`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}."
    )
    return parser


def _add_access(action: argparse.ArgumentParser) -> None:
    """Options of a server: who may connect."""
    action.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1); any other than loopback needs --token-env",
    )
    action.add_argument(
        "--token-env",
        metavar="NAME",
        help="environment variable that holds the token which clients must send",
    )


def _add_checkpoint(action: argparse.ArgumentParser) -> None:
    """Options that choose a checkpoint of a run and change its recipe."""
    action.add_argument(
        "--step", type=int, help="step of the run's checkpoint (default: the newest)"
    )
    action.add_argument(
        "--weights",
        choices=["ema", "current"],
        help="averaged or current weights of the checkpoint (default: ema if the run has them)",
    )
    action.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="key=value",
        help="override a key of the recipe, e.g. model.device=cpu; may be repeated",
    )
    _add_output(action)


def _add_sampling(action: argparse.ArgumentParser, rewards: str) -> None:
    """Options of sampling and scoring."""
    action.add_argument("--reward", action="append", default=[], metavar="NAME", help=rewards)
    action.add_argument(
        "--steps",
        type=int,
        help="denoising steps, image models only (default: eval.steps of the recipe)",
    )
    action.add_argument(
        "--guidance",
        type=float,
        help="guidance scale, image models only (default: eval.guidance of the recipe)",
    )
    action.add_argument(
        "--temperature",
        type=float,
        help="sampling temperature, language models only; 0 is greedy (default: eval.temperature "
        "of the recipe; 1 instead of 0 for several samples per prompt)",
    )
    _add_checkpoint(action)


def _add_output(action: argparse.ArgumentParser) -> None:
    """Options for progress output; `_display` reads them."""
    how = action.add_mutually_exclusive_group()
    how.add_argument("--quiet", action="store_true", help="print only the result and errors")
    how.add_argument(
        "--json", action="store_true", help="print progress and the result as JSON lines"
    )


def _display(options: argparse.Namespace) -> progress.Display:
    return displays.display(options.quiet, options.json)


def _train(options: argparse.Namespace) -> None:
    from gesso import run

    shown = progress.Json() if options.json else None
    if options.resume:
        finished = run.resume(options.resume, options.quiet, _new_steps(options), shown)
    elif options.recipe:
        finished = run.train(
            options.recipe, options.overrides, options.run, options.quiet, shown, options.card
        )
    else:
        raise UserError("train expects a recipe (see `gesso recipes`) or --resume RUN")
    text, data = _summary(finished.path, finished.rows(), run.recipe_of(finished).steps)
    (shown or progress.SILENT).result(text, data)


def _new_steps(options: argparse.Namespace) -> int | None:
    """The new number of steps in `--resume RUN steps=60`; nothing else may be changed."""
    if options.card is not None:
        raise UserError("--card cannot change a run, which keeps its recipe; leave --card out")
    given = [o for o in (options.recipe, *options.overrides) if o]
    if not given and not options.run:
        return None
    key, _, value = given[0].partition("=") if given else ("", "", "")
    if len(given) > 1 or options.run or key != "steps" or not value.isdigit():
        raise UserError(
            "--resume uses the recipe and the folder of the run; only steps=N may be changed"
        )
    return int(value)


def _summary(path: Path, rows: Sequence[dict], steps: int) -> tuple[str, dict[str, Any]]:
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
    if done < steps:
        lines.append(
            f"\nstopped after step {done} of {steps}; to continue: gesso train --resume {path}"
        )
    return "\n".join([*lines, f"\nrun     {path}", f"report  {report}"]), data


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _check(options: argparse.Namespace) -> None:
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


def _recipes(options: argparse.Namespace) -> None:
    from gesso.config import tables

    bundled = [tables.read_recipe(name) for name in tables.bundled_recipes()]
    for kind, heading in HEADINGS.items():
        recipes = [recipe for recipe in bundled if _kind(recipe) == kind]
        name_width = max(len(recipe.name) for recipe in recipes)
        about_width = max(len(recipe.recipe["about"]) for recipe in recipes)
        print(f"{heading}:")
        for recipe in recipes:
            about = f"{recipe.recipe['about']:<{about_width}}"
            cards = f"cards {recipe.sizes} GB" if recipe.cards else ""
            print(f"  {recipe.name:<{name_width}}  {about}  {cards}".rstrip())


def _kind(bundled: RecipeTables) -> str:
    """One of HEADINGS."""
    from gesso.config import ZOO, family

    model = bundled.recipe["model"]
    return "demo" if model["path"].startswith(ZOO) else family(model)


def _sample(options: argparse.Namespace) -> None:
    from gesso.use import sampling
    from gesso.use.loaded import Drawing

    if options.out.exists() and not options.out.is_dir():
        raise UserError(f"sample expects a folder as --out, got the file {options.out}")
    must_be_possible(options.out, "folder")
    source = _source(options)
    sources = [source.base, source] if options.base else [source]
    drawing = Drawing(options.steps, options.guidance, options.temperature)
    request = sampling.SampleRequest(
        options.prompts, options.file, options.image, options.n, options.seed, options.reward,
        drawing,
    )  # fmt: skip
    with _display(options) as display:
        results = sampling.sample_all(sources, request, display)
        files = {} if results[0].texts else sampling.save(results, options.out)
        if options.sheet is not None:
            sampling.save_sheet(results, options.sheet)
        display.result(*sampling.report(results, files))


def _source(options: argparse.Namespace) -> ModelSource:
    from gesso.use.source import find

    return find(options.source, options.step, options.weights, options.set)


def _eval(options: argparse.Namespace) -> None:
    from gesso.use import evaluate, results
    from gesso.use.export import must_be_free
    from gesso.use.loaded import Drawing
    from gesso.use.source import find

    first = _source(options)
    others = [find(other, overrides=options.set) for other in options.others]
    sources = [first, *others, *([first.base] if options.base else [])]
    drawing = Drawing(options.steps, options.guidance, options.temperature)
    rewards, prompts = tuple(options.reward), options.prompts or ()
    request = evaluate.EvaluationRequest(
        rewards, prompts, options.n, options.seed, options.first, drawing
    )
    if options.out is not None:
        must_be_free(options.out, "folder")
    with _display(options) as display:
        evaluations = evaluate.evaluate_all(sources, request, display)
        if options.out is not None:
            results.write(evaluations, options.out)
        display.result(evaluate.table(evaluations), evaluate.summary(evaluations))


def _export(options: argparse.Namespace) -> None:
    from gesso.use.export import Form, check, export
    from gesso.use.loaded import open_model

    RunFolder.open(options.source)
    source, form = _source(options), Form(options.merged, options.shard_size, options.dtype)
    check(source, options.to, form)
    with _display(options) as display:
        folder = export(open_model(source, display), options.to, form, display)
        display.result(str(folder), {"folder": str(folder)})


def _view(options: argparse.Namespace) -> None:
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


def _serve_reward(options: argparse.Namespace) -> None:
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


def _data_ocr(options: argparse.Namespace) -> None:
    from gesso.data import ocr

    for file in ocr.write(options.out, options.train, options.test, options.seed):
        print(file)
    print(f'use in a recipe: data.train = "{options.out}@train", data.eval = "{options.out}@test"')


if __name__ == "__main__":
    sys.exit(main())
