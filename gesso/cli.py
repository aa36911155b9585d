"""The command line: runs a command, and turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from gesso import arguments, imports
from gesso.track import progress
from gesso.types import StopRun, UserError, bad_text, out_of_memory


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments.parser()
    for argument in sys.argv[1:] if given is None else given:
        if fault := bad_text(argument):
            print(f"error: an argument {fault}: {argument!r:.60}", file=sys.stderr)
            return 2
    options, rest = parser.parse_known_args(given)
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
    except KeyboardInterrupt as error:  # a run says how to continue it
        return _failed(options, "; ".join(["interrupted", *map(str, error.args)]), 130)
    return 0


def _failed(options: argparse.Namespace, text: str, code: int) -> int:
    if options.json:
        progress.Json().error(text, code)
    else:
        print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
