"""The command line: train · check · recipes · sample · export · serve-reward · data."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gesso.track.run_folder import RunFolder
from gesso.types import StopRun, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest:  # argparse takes key=value only right behind the recipe; we take it anywhere
        if "overrides" not in options or any("=" not in r or r.startswith("-") for r in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        options.overrides += rest
    sys.path.insert(0, os.getcwd())  # rewards and algorithms of the user's lie here
    try:
        options.action(options)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StopRun as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 3
    except BrokenPipeError:  # `gesso recipes | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gesso", description="RL post-training for models that draw and models that see."
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

    train = actions.add_parser("train", help="train a recipe, or resume a run")
    train.add_argument("recipe", nargs="?", help="a bundled recipe's name or a TOML file")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="as optimizer.lr=1e-4")
    train.add_argument("--run", type=Path, help="run folder (default: runs/RECIPE-001 and so on)")
    train.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run")
    train.add_argument("--quiet", action="store_true", help="no progress display")
    train.set_defaults(action=_train)

    check = actions.add_parser("check", help="try everything a recipe needs, without training")
    check.add_argument("recipe")
    check.add_argument("overrides", nargs="*", metavar="key=value")
    check.add_argument(
        "--memory", action="store_true", help="only say how much memory it takes; loads no weights"
    )
    check.set_defaults(action=_check)

    recipes = actions.add_parser("recipes", help="list the bundled recipes")
    recipes.set_defaults(action=_recipes)

    sample = actions.add_parser("sample", help="draw pictures from a run or a recipe's base model")
    sample.add_argument("source", metavar="RUN_OR_RECIPE")
    sample.add_argument("prompt")
    sample.add_argument("--n", type=int, default=1)
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument(
        "--image", type=Path, action="append", default=[], help="to look at; may be given again"
    )
    sample.add_argument("--out", type=Path, default=Path("."), help="folder for the pictures")
    sample.set_defaults(action=_sample)

    export = actions.add_parser("export", help="write a run's weights for plain diffusers")
    export.add_argument("source", type=Path, metavar="RUN")
    export.add_argument("--to", type=Path, required=True, metavar="DIR")
    export.add_argument("--merged", action="store_true", help="fold a LoRA in: a whole pipeline")
    export.set_defaults(action=_export)

    serve = actions.add_parser("serve-reward", help="serve a reward over HTTP")
    serve.add_argument("name", metavar="NAME", help='a reward, or "module:name" of your own')
    serve.add_argument("overrides", nargs="*", metavar="key=value", help="its options")
    serve.add_argument("--port", type=int, required=True, help="0: any free one")
    serve.add_argument("--host", default="127.0.0.1", help="another needs --token-env")
    serve.add_argument("--token-env", metavar="NAME", help="environment variable with the token")
    serve.add_argument("--workers", type=int, default=1, help="processes")
    serve.add_argument("--batch", type=int, default=16, help="samples a process takes at a time")
    serve.add_argument("--max-mb", type=int, default=64, help="of a request")
    serve.set_defaults(action=_serve_reward)

    data = actions.add_parser("data", help="make a prompt set")
    kinds = data.add_subparsers(title="kinds", required=True, metavar="KIND")
    ocr = kinds.add_parser("ocr", help="scenes with a text to write, for the reward ocr")
    ocr.add_argument("--out", type=Path, required=True, metavar="DIR")
    ocr.add_argument("--train", type=int, default=20_000, help="prompts in DIR/train.txt")
    ocr.add_argument("--test", type=int, default=1_000, help="prompts in DIR/test.txt")
    ocr.add_argument("--seed", type=int, default=0)
    ocr.set_defaults(action=_data_ocr)
    return parser


def _train(options: argparse.Namespace) -> None:
    from gesso import run

    if options.resume:
        finished = run.resume(options.resume, options.quiet, _new_steps(options))
    elif options.recipe:
        finished = run.train(options.recipe, options.overrides, options.run, options.quiet)
    else:
        raise UserError("train what? give a recipe (see `gesso recipes`) or --resume RUN")
    _summary(finished.path, finished.rows(), run.recipe_of(finished).steps)


def _new_steps(options: argparse.Namespace) -> int | None:
    """What `--resume RUN steps=60` may change of a run: how far it goes."""
    given = [o for o in (options.recipe, *options.overrides) if o]
    if not given and not options.run:
        return None
    key, _, value = given[0].partition("=") if given else ("", "", "")
    if len(given) > 1 or options.run or key != "steps" or not value.isdigit():
        raise UserError(
            "--resume takes recipe and folder from the run; only steps=N may be given with it"
        )
    return int(value)


def _summary(path: Path, rows: Sequence[dict], steps: int) -> None:
    evals = [row for row in rows if "eval/reward" in row]
    done = rows[-1]["step"] if rows else 0
    if len(evals) > 1:
        first, last = evals[0], evals[-1]
        print(
            "\nheld-out".ljust(26)
            + f"step {first['step']}".rjust(9)
            + f"step {last['step']}".rjust(12)
        )
        for key in (k for k in last if k.startswith("eval/")):
            if key == "eval/failed" and not last[key]:
                continue
            name = key.removeprefix("eval/")
            print(f"  {name:<22} {_figure(first.get(key)):>9} {_figure(last[key]):>11}")
    if done < steps:
        print(f"\nstopped after step {done} of {steps}; go on: gesso train --resume {path}")
    print(f"\nrun     {path}\nreport  {path / 'report.html'}")


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _check(options: argparse.Namespace) -> None:
    from gesso import build
    from gesso.check import Findings, check, memory

    recipe = build.recipe(options.recipe, options.overrides)
    print(f"{'recipe':<8} {options.recipe}: every key is known, every value fits")
    found = Findings(memory(recipe)) if options.memory else check(recipe)
    for name, fact in found.facts:
        print(f"{name:<8} {fact}")
    for warning in found.warnings:
        print(f"warning  {warning}")


def _recipes(options: argparse.Namespace) -> None:
    from gesso import build

    found = build.bundled_recipes()
    width = max(map(len, found))
    for name, about in found.items():
        print(f"{name:<{width}}  {about}")


def _sample(options: argparse.Namespace) -> None:
    from gesso import run

    if options.n < 1 or (options.out.exists() and not options.out.is_dir()):
        raise UserError("sample wants --n of at least 1, and a folder for --out")
    model = run.load(options.source)
    made = model.sample(options.prompt, options.n, options.seed, options.image)
    for i, sample in enumerate(made):
        if isinstance(sample, str):
            print(sample)
            continue
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"sample-{options.seed}-{i}.png"
        sample.save(path)
        print(path)


def _export(options: argparse.Namespace) -> None:
    from gesso import run

    print(run.load(RunFolder.open(options.source).path).export(options.to, options.merged))


def _serve_reward(options: argparse.Namespace) -> None:
    from gesso import build
    from gesso.rewards.remote import token_from
    from gesso.rewards.serve import serve

    if min(options.workers, options.batch, options.max_mb) < 1:
        raise UserError("serve-reward wants --workers, --batch and --max-mb of at least 1")
    if not 0 <= options.port < 2**16:
        raise UserError(f"serve-reward wants --port from 0 to 65535, got {options.port}")
    entry = build.reward_entry(options.name, options.overrides, options.workers)
    scorer = build.served(entry, options.batch)
    token, limit = token_from(options.token_env), options.max_mb * 2**20
    serve(entry.name, scorer, options.host, options.port, token, limit)


def _data_ocr(options: argparse.Namespace) -> None:
    from gesso.data import ocr

    for file in ocr.write(options.out, options.train, options.test, options.seed):
        print(file)
    print(f'in a recipe: data.train = "{options.out}@train", data.eval = "{options.out}@test"')


if __name__ == "__main__":
    sys.exit(main())
