"""The arguments of every command, and their help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gesso import commands, options


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gesso",
        description="RL post-training for image, video and (vision-)language models.",
    )
    parser.set_defaults(json=False, more=None)  # `more`: the list that extra arguments go to
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _train,
        _check,
        _plan,
        _recipes,
        _sample,
        _eval,
        _export,
        _view,
        _timeline,
        _serve_reward,
        _env,
        _data,
    ):
        add(subparsers)
    return parser


def _train(subparsers: Any) -> None:
    train = options.add_command(subparsers, "train", "train a recipe, or resume a run")
    options.add_recipe(train, optional=True)
    train.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="new run folder (default: runs/RECIPE-001, runs/RECIPE-002, ...)",
    )
    options.add_card(train)
    train.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="continue this run from its newest checkpoint; only steps=N and cluster.* may change",
    )
    options.add_output(train)
    train.set_defaults(action=commands.train, more="overrides")


def _check(subparsers: Any) -> None:
    about = "run every part of a recipe once without training, and estimate its cost"
    check = options.add_command(subparsers, "check", about)
    options.add_recipe(check)
    options.add_card(check)
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
        help="only find the largest batches that fit a GPU of this size, by estimates",
    )
    options.add_output(check)
    check.set_defaults(action=commands.check, more="overrides")


def _plan(subparsers: Any) -> None:
    about = "predict step time, memory and cost on 1 to 1,024 GPUs, and choose settings"
    plan = options.add_command(subparsers, "plan", about)
    options.add_recipe(plan)
    options.add_card(plan)
    plan.add_argument(
        "--gpus", type=int, default=8, metavar="N", help="number of GPUs (default: 8)"
    )
    where = plan.add_mutually_exclusive_group()
    where.add_argument(
        "--gpu",
        default="h100",
        metavar="NAME",
        help="name of a GPU in gesso/plan/gpus.toml (default: h100), or a TOML file with its keys",
    )
    where.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine instead; --gpus is then the number of workers",
    )
    plan.add_argument(
        "--price", type=float, metavar="X", help="dollars per GPU-hour (default: as in gpus.toml)"
    )
    plan.add_argument(
        "--score-s",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds that a reward worker takes per sample (default: 0)",
    )
    plan.add_argument(
        "--response-tokens",
        type=int,
        metavar="N",
        help="mean length of responses, language models only (default: algorithm.max_tokens)",
    )
    plan.add_argument(
        "--explain", action="store_true", help="also show the time of each part of a step"
    )
    options.add_output(plan)
    plan.set_defaults(action=commands.plan, more="overrides")


def _recipes(subparsers: Any) -> None:
    recipes = options.add_command(subparsers, "recipes", "list the bundled recipes")
    recipes.set_defaults(action=commands.recipes)


def _sample(subparsers: Any) -> None:
    sample = options.add_command(
        subparsers, "sample", "generate samples with a run, a recipe or a model folder"
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
        action="append",
        default=[],
        metavar="FILE",
        help="input image for a vision-language, editing or image-to-video model; repeat it for "
        "several images",
    )
    sample.add_argument(
        "--out",
        type=Path,
        default=Path("."),
        metavar="PATH",
        help="folder for the generated images or videos (default: the working folder), or a file "
        "NAME.png or NAME.mp4 for one",
    )
    sample.add_argument(
        "--sheet", type=Path, metavar="FILE", help="also save all images as one contact sheet"
    )
    sample.add_argument(
        "--base",
        action="store_true",
        help="also sample from the base model, before any training",
    )
    options.add_sampling(sample, "score the samples with this reward; may be repeated")
    sample.set_defaults(action=commands.sample, more="prompts")


def _eval(subparsers: Any) -> None:
    evaluate = options.add_command(
        subparsers, "eval", "score held-out prompts with confidence intervals, and compare models"
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
    evaluate.add_argument(
        "--n", type=int, help="samples per prompt (default: eval.samples of the recipe)"
    )
    evaluate.add_argument("--seed", type=int, help="random seed (default: that of the recipe)")
    evaluate.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="new folder for the results: eval.json, samples.jsonl, and images",
    )
    options.add_sampling(
        evaluate, "score with this reward (default: the rewards of the recipe); may be repeated"
    )
    evaluate.set_defaults(action=commands.evaluate, more="others")


def _export(subparsers: Any) -> None:
    export = options.add_command(
        subparsers, "export", "save the weights of a run for diffusers, transformers or PEFT"
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
    options.add_checkpoint(export)
    export.set_defaults(action=commands.export)


def _view(subparsers: Any) -> None:
    view = options.add_command(
        subparsers, "view", "show runs in a browser, during training or afterwards"
    )
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
    options.add_access(view)
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
    view.set_defaults(action=commands.view)


def _timeline(subparsers: Any) -> None:
    about = "show what each worker of a run spends its time on, and what to change"
    timeline = options.add_command(subparsers, "timeline", about)
    timeline.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    timeline.add_argument(
        "--step", type=int, metavar="N", help="only this step (default: the newest 200)"
    )
    timeline.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="also write a trace for chrome://tracing or ui.perfetto.dev",
    )
    options.add_output(timeline)
    timeline.set_defaults(action=commands.timeline)


def _serve_reward(subparsers: Any) -> None:
    serve = options.add_command(subparsers, "serve-reward", "serve a reward over HTTP")
    serve.add_argument(
        "name", metavar="NAME", help='name of a bundled reward, or your code as "module:name"'
    )
    serve.add_argument(
        "overrides", nargs="*", metavar="key=value", help="set an option of the reward"
    )
    serve.add_argument("--port", type=int, required=True, help="port; 0 for any free port")
    options.add_access(serve)
    serve.add_argument(
        "--workers", type=int, default=1, help="number of worker processes (default: 1)"
    )
    serve.add_argument(
        "--batch", type=int, default=16, help="maximum samples per call of a worker (default: 16)"
    )
    serve.add_argument(
        "--max-mb", type=int, default=64, help="maximum size of a request in MiB (default: 64)"
    )
    serve.set_defaults(action=commands.serve_reward, more="overrides")


def _env(subparsers: Any) -> None:
    about = "install the separate environments of rewards (reward.env)"
    env = options.add_command(subparsers, "env", about)
    env.add_argument(
        "source",
        metavar="RECIPE_OR_FILE",
        help="a recipe, for all its reward.env, or a requirements file (.txt)",
    )
    env.add_argument("overrides", nargs="*", metavar="key=value", help="override a key")
    env.set_defaults(action=commands.env, more="overrides")


def _data(subparsers: Any) -> None:
    data = options.add_command(
        subparsers, "data", "generate a prompt set, or pairs for DPO from a run"
    )
    kinds = data.add_subparsers(title="kinds", required=True, metavar="KIND")
    ocr = options.add_command(
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
    ocr.set_defaults(action=commands.data_ocr)
    pairs = options.add_command(
        kinds, "pairs", "write the best and the worst sample of each group that a run has kept"
    )
    pairs.add_argument("run", type=Path, metavar="RUN", help="run folder")
    pairs.add_argument(
        "--out", type=Path, metavar="FILE", help="new .jsonl file (default: RUN/pairs.jsonl)"
    )
    pairs.add_argument(
        "--min-gap",
        type=float,
        default=0.0,
        metavar="X",
        help="minimum difference of the two rewards (default: any)",
    )
    pairs.set_defaults(action=commands.data_pairs)
