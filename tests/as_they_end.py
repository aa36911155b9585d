"""A pytest plugin that prints every test, its seconds and its failure when it ends, so that the
output of a run that is cut off says how far it came.

    python -m pytest -m gpu -p tests.as_they_end
"""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        print(f"\n{report.outcome} {report.duration:6.1f} s  {report.nodeid}", flush=True)
        if report.failed:
            print(report.longreprtext[-3000:], flush=True)
