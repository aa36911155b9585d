"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from typing import Any


def add_recipe(action: argparse.ArgumentParser, optional: bool = False) -> None:
    number = "?" if optional else None
    action.add_argument("recipe", nargs=number, help="name of a bundled recipe, or a TOML file")
    action.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="override a key of the recipe, e.g. optimizer.lr=1e-4",
    )


def add_card(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--card",
        type=_card,
        metavar="GB",
        help="use the recipe's settings for a GPU with this much memory, e.g. 24, or for several, "
        "e.g. 8x24",
    )


def _card(text: str) -> str:
    from gesso.config.tables import parse_card

    if parse_card(text) is None:
        raise argparse.ArgumentTypeError(
            f"expected GB of GPU memory as in 24, or 8x24 for 8 GPUs, got {text!r:.40}"
        )
    return text


def add_command(subparsers: Any, name: str, about: str) -> argparse.ArgumentParser:
    """`about` is shown by `gesso --help` and by `gesso NAME --help`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}."
    )
    return parser


def add_access(action: argparse.ArgumentParser) -> None:
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


def add_checkpoint(action: argparse.ArgumentParser) -> None:
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
    add_output(action)


def add_sampling(action: argparse.ArgumentParser, rewards: str) -> None:
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
    add_checkpoint(action)


def add_output(action: argparse.ArgumentParser) -> None:
    """Options for progress output; `_display` reads them."""
    how = action.add_mutually_exclusive_group()
    how.add_argument("--quiet", action="store_true", help="print only the result and errors")
    how.add_argument(
        "--json", action="store_true", help="print progress and the result as JSON lines"
    )
