"""Which display a command's options select."""

from __future__ import annotations

from gesso.track.progress import Display, Json, Silent


def display(quiet: bool = False, as_json: bool = False, aside: bool = True) -> Display:
    """The one for `--quiet` and `--json`. `aside`: progress goes to stderr, since stdout belongs
    to the result, which may be piped on."""
    if as_json:
        return Json()
    if quiet:
        return Silent()
    from gesso.track.console import Console

    return Console(aside=aside)
