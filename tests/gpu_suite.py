"""The GPU tests several times in one process, in which they compile only once.

    python -m tests.gpu_suite [--passes N] [pytest options]

A line per pass says how it ended; any failure makes the exit status 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence

import pytest

DEFAULTS = ["-m", "gpu", "-p", "tests.as_they_end"]


class Outcomes:
    """A pytest plugin that counts tests: an error before or after a test is a failure, too."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1


def graphs() -> int:
    """Compiled in this process so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_suite", allow_abbrev=False)
    parser.add_argument("--passes", type=int, default=1)
    own, options = parser.parse_known_args(arguments)
    lines, failed = [], False
    for number in range(1, own.passes + 1):
        outcomes, before, start = Outcomes(), graphs(), time.perf_counter()
        status = pytest.main([*DEFAULTS, *options], plugins=[outcomes])
        counts = ", ".join(f"{outcomes.counts[o]} {o}" for o in ("passed", "failed", "skipped"))
        seconds, made = time.perf_counter() - start, graphs() - before
        line = f"pass {number}: {counts}, {seconds:.0f} s, {made} graphs compiled"
        lines.append(line + (f", exit status {status:d}" if status else ""))
        print(lines[-1], flush=True)
        if status == pytest.ExitCode.INTERRUPTED:
            return 1
        failed = failed or status != pytest.ExitCode.OK
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends background runs, too
    sys.exit(main(sys.argv[1:]))
