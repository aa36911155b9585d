"""Selects the display from a command's options."""

from __future__ import annotations

from gesso.track.progress import Display, Json, Silent


def display(quiet: bool = False, as_json: bool = False, aside: bool = True) -> Display:
    """The display for `--quiet` and `--json`. `aside`: progress goes to stderr, since stdout is for
    the result, which may be piped."""
    if as_json:
        return Json()
    if quiet:
        return Silent()
    from gesso.track.console import Console

    return Console(aside=aside)
