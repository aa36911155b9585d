"""A pytest plugin that prints every test, its seconds with fixtures and its failure when it ends,
so that the output of a run that is cut off says how far it came.

    python -m pytest -m gpu -p tests.as_they_end
"""

from __future__ import annotations

import pytest

_setup: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "setup":
        _setup[report.nodeid] = report.duration
    if report.when == "call" or not report.passed:
        seconds = report.duration
        seconds += _setup.get(report.nodeid, 0.0) if report.when == "call" else 0.0
        print(f"\n{report.outcome} {seconds:6.1f} s  {report.nodeid}", flush=True)
        if report.failed:
            print(report.longreprtext[-3000:], flush=True)
