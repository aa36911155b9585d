"""The command line. Heavy things are imported where an action needs them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso import imports
from gesso.track import displays, progress
from gesso.track.run_folder import RunFolder, must_be_possible
from gesso.types import StopRun, UserError, bad_text, out_of_memory

if TYPE_CHECKING:
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
    if rest:  # argparse takes a list only right behind what comes before; we take it anywhere
        unknown = any(r.startswith("-") for r in rest) or options.more is None
        if unknown or (options.more == "overrides" and any("=" not in r for r in rest)):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        vars(options)[options.more] += rest
    try:
        sys.path[:] = imports.import_path()  # user code is found in the working folder, last
        options.action(options)
        sys.stdout.flush()
    except UserError as error:
        return _failed(options, f"error: {error}", 2)
    except StopRun as error:
        return _failed(options, f"stopped: {error}", 3)
    except (MemoryError, RuntimeError) as error:
        if (sentence := out_of_memory(error)) is None:
            raise
        return _failed(options, f"error: {sentence}", 3)
    except BrokenPipeError:  # `gesso recipes | head`: the reader has what it wanted
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
        prog="gesso", description="RL post-training for models that draw and models that see."
    )
    parser.set_defaults(json=False, more=None)  # `more`: the list that arguments may be added to
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

    train = actions.add_parser("train", help="train a recipe, or resume a run")
    train.add_argument("recipe", nargs="?", help="a bundled recipe's name or a TOML file")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="as optimizer.lr=1e-4")
    train.add_argument("--run", type=Path, help="run folder (default: runs/RECIPE-001 and so on)")
    _add_card(train)
    train.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run")
    _add_output(train)
    train.set_defaults(action=_train, more="overrides")

    check = actions.add_parser("check", help="try everything a recipe needs, without training")
    check.add_argument("recipe")
    check.add_argument("overrides", nargs="*", metavar="key=value")
    _add_card(check)
    check.add_argument(
        "--memory", action="store_true", help="only say how much memory it takes; loads no weights"
    )
    _add_output(check)
    check.set_defaults(action=_check, more="overrides")

    recipes = actions.add_parser("recipes", help="list the bundled recipes")
    recipes.set_defaults(action=_recipes)

    sample = actions.add_parser("sample", help="draw from a run, a recipe's base or a folder")
    sample.add_argument("source", metavar="RUN_OR_MODEL")
    sample.add_argument("prompts", nargs="*", metavar="PROMPT")
    sample.add_argument("--prompts", dest="file", type=Path, metavar="FILE", help="more of them")
    sample.add_argument("--n", type=int, default=1, help="samples of each prompt")
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument(
        "--image", type=Path, action="append", default=[], help="to look at; may be given again"
    )
    sample.add_argument("--out", type=Path, default=Path("."), help="folder for the pictures")
    sample.add_argument("--sheet", type=Path, metavar="FILE", help="all pictures in one")
    sample.add_argument("--base", action="store_true", help="and from what it was trained from")
    _add_drawing(sample, "score the samples; may be given again")
    sample.set_defaults(action=_sample, more="prompts")

    evaluate = actions.add_parser("eval", help="score held-out prompts, and compare models")
    evaluate.add_argument("source", metavar="RUN_OR_MODEL")
    evaluate.add_argument("others", nargs="*", metavar="OTHER", help="to compare the first with")
    evaluate.add_argument("--base", action="store_true", help="compare with what it came from")
    evaluate.add_argument("--prompts", type=Path, metavar="FILE", help="default: the held-out ones")
    evaluate.add_argument("--first", type=int, metavar="N", help="only so many prompts")
    evaluate.add_argument("--n", type=int, default=1, help="samples of each prompt")
    evaluate.add_argument("--seed", type=int, help="default: the recipe's")
    evaluate.add_argument("--out", type=Path, metavar="DIR", help="figures, samples and pictures")
    _add_drawing(evaluate, "default: those of the recipe; may be given again")
    evaluate.set_defaults(action=_eval, more="others")

    export = actions.add_parser("export", help="write a run's weights for plain diffusers and peft")
    export.add_argument("source", type=Path, metavar="RUN")
    export.add_argument("--to", type=Path, required=True, metavar="DIR")
    export.add_argument("--merged", action="store_true", help="fold a LoRA in: a whole model")
    export.add_argument("--shard-size", metavar="SIZE", help="largest file (default: 5GB)")
    export.add_argument("--dtype", help="float32, bfloat16 or float16; default: as they are")
    _add_checkpoint(export)
    export.set_defaults(action=_export)

    view = actions.add_parser("view", help="look at runs in a browser, while they go on or later")
    view.add_argument("runs", nargs="?", type=Path, default=Path("runs"), metavar="RUNS")
    view.add_argument("--port", type=int, default=7860, help="0: any free one")
    view.add_argument("--host", default="127.0.0.1", help="another needs --token-env")
    view.add_argument("--token-env", metavar="NAME", help="environment variable with the token")
    view.add_argument(
        "--trust-code",
        action="store_true",
        help='let the playground import "module:Name" code that runs name',
    )
    view.add_argument(
        "--report", type=Path, metavar="FILE", help="write it all into one HTML file; no server"
    )
    view.set_defaults(action=_view)

    serve = actions.add_parser("serve-reward", help="serve a reward over HTTP")
    serve.add_argument("name", metavar="NAME", help='a reward, or "module:name" of your own')
    serve.add_argument("overrides", nargs="*", metavar="key=value", help="its options")
    serve.add_argument("--port", type=int, required=True, help="0: any free one")
    serve.add_argument("--host", default="127.0.0.1", help="another needs --token-env")
    serve.add_argument("--token-env", metavar="NAME", help="environment variable with the token")
    serve.add_argument("--workers", type=int, default=1, help="processes")
    serve.add_argument("--batch", type=int, default=16, help="samples a process takes at a time")
    serve.add_argument("--max-mb", type=int, default=64, help="of a request")
    serve.set_defaults(action=_serve_reward, more="overrides")

    data = actions.add_parser("data", help="make a prompt set")
    kinds = data.add_subparsers(title="kinds", required=True, metavar="KIND")
    ocr = kinds.add_parser("ocr", help="scenes with a text to write, for the reward ocr")
    ocr.add_argument("--out", type=Path, required=True, metavar="DIR")
    ocr.add_argument("--train", type=int, default=20_000, help="prompts in DIR/train.txt")
    ocr.add_argument("--test", type=int, default=1_000, help="prompts in DIR/test.txt")
    ocr.add_argument("--seed", type=int, default=0)
    ocr.set_defaults(action=_data_ocr)
    return parser


def _add_card(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--card", type=int, metavar="GB", help="GPU memory: one of the recipe's sizes, as 24"
    )


def _add_checkpoint(action: argparse.ArgumentParser) -> None:
    """Which weights of a run, and changes of its recipe."""
    action.add_argument("--step", type=int, help="checkpoint (default: the newest)")
    action.add_argument("--weights", choices=["ema", "current"], help="default: ema if there are")
    action.add_argument(
        "--set", action="append", default=[], metavar="key=value", help="as model.device=cpu"
    )
    _add_output(action)


def _add_drawing(action: argparse.ArgumentParser, rewards: str) -> None:
    """How samples are drawn, and what scores them."""
    action.add_argument("--reward", action="append", default=[], metavar="NAME", help=rewards)
    action.add_argument("--steps", type=int, help="of a model that draws")
    action.add_argument("--guidance", type=float, help="of a model that draws")
    action.add_argument("--temperature", type=float, help="of a model that writes; 0: greedy")
    _add_checkpoint(action)


def _add_output(action: argparse.ArgumentParser) -> None:
    """How an action reports its progress; `_display` builds it."""
    how = action.add_mutually_exclusive_group()
    how.add_argument("--quiet", action="store_true", help="nothing but the result and errors")
    how.add_argument("--json", action="store_true", help="progress and result as JSON, by lines")


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
        raise UserError("train what? give a recipe (see `gesso recipes`) or --resume RUN")
    text, data = _summary(finished.path, finished.rows(), run.recipe_of(finished).steps)
    (shown or progress.SILENT).result(text, data)


def _new_steps(options: argparse.Namespace) -> int | None:
    """What `--resume RUN steps=60` may change of a run: how far it goes."""
    if options.card is not None:
        raise UserError("--card cannot change a run, which keeps its recipe; leave --card out")
    given = [o for o in (options.recipe, *options.overrides) if o]
    if not given and not options.run:
        return None
    key, _, value = given[0].partition("=") if given else ("", "", "")
    if len(given) > 1 or options.run or key != "steps" or not value.isdigit():
        raise UserError(
            "--resume takes recipe and folder from the run; only steps=N may be given with it"
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
            lines.append(f"  {name:<22} {_figure(first.get(key)):>9} {_figure(last[key]):>11}")
    if done < steps:
        lines.append(f"\nstopped after step {done} of {steps}; go on: gesso train --resume {path}")
    return "\n".join([*lines, f"\nrun     {path}", f"report  {report}"]), data


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _check(options: argparse.Namespace) -> None:
    from gesso import build
    from gesso.check import Findings, check, memory
    from gesso.config.tables import read_recipe

    recipe = build.recipe(options.recipe, options.overrides, options.card)
    with _display(options) as shown:
        findings = Findings(memory(recipe)) if options.memory else check(recipe, shown)
        card = "" if options.card is None else f" --card {options.card}"
        fits = f"{options.recipe}{card}: every key is known, every value fits"
        facts = [("recipe", fits), *findings.facts, *(("warning", w) for w in findings.warnings)]
        if options.memory and not card and (sizes := read_recipe(options.recipe).sizes):
            facts.append(("sizes", f"--card {sizes}"))
        lines = [f"{name:<8} {fact}" for name, fact in facts]
        shown.result("\n".join(lines), {"facts": facts})


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
        raise UserError(f"sample wants a folder for --out; {options.out} is a file")
    must_be_possible(options.out, "folder")
    source = _source(options)
    sources = [source.base, source] if options.base else [source]
    drawing = Drawing(options.steps, options.guidance, options.temperature)
    wanted = sampling.Wanted(
        options.prompts, options.file, options.image, options.n, options.seed, options.reward,
        drawing,
    )  # fmt: skip
    with _display(options) as display:
        drawn = sampling.draw_all(sources, wanted, display)
        files = {} if drawn[0].texts else sampling.save(drawn, options.out)
        if options.sheet is not None:
            sampling.save_sheet(drawn, options.sheet)
        display.result(*sampling.report(drawn, files))


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
        raise UserError(f"view wants --port from 0 to 65535, got {options.port}")
    token = token_from(options.token_env)
    studio = Studio(options.trust_code)
    server.serve(options.runs, studio, options.host, options.port, token)


def _serve_reward(options: argparse.Namespace) -> None:
    from gesso.rewards import assembly
    from gesso.rewards.transport.pool import token_from
    from gesso.rewards.transport.serve import serve

    if min(options.workers, options.batch, options.max_mb) < 1:
        raise UserError("serve-reward wants --workers, --batch and --max-mb of at least 1")
    if not 0 <= options.port < 2**16:
        raise UserError(f"serve-reward wants --port from 0 to 65535, got {options.port}")
    entry = assembly.reward_entry(options.name, options.overrides, options.workers)
    scorer = assembly.served(entry, options.batch)
    token, limit = token_from(options.token_env), options.max_mb * 2**20
    serve(entry.name, scorer, options.host, options.port, token, limit)


def _data_ocr(options: argparse.Namespace) -> None:
    from gesso.data import ocr

    for file in ocr.write(options.out, options.train, options.test, options.seed):
        print(file)
    print(f'in a recipe: data.train = "{options.out}@train", data.eval = "{options.out}@test"')


if __name__ == "__main__":
    sys.exit(main())
