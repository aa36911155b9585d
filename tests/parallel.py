"""A pytest plugin: test files in several processes, which are forked after everything is imported
and collected. With pytest-xdist every process imports and collects for itself.

    python -m pytest -p tests.parallel --processes 3

A file runs in one process, and the processes take the files in their order. What they report goes
to the first process, which prints it.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from signal import Signals
from typing import Any

import numpy as np
import pytest

from gesso.quiet import quiet
from tests import forked, forked_rewards, loaded_once

Files = list[list[pytest.Item]]
OFTEN_USED = [
    "diffusers.pipelines.flux.pipeline_flux", "diffusers.pipelines.qwenimage.pipeline_qwenimage",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "torch._dynamo", "fastapi.testclient",
    "gesso.rewards.image.ocr", "rapidocr", "onnxruntime",
]  # fmt: skip
NUMBER = 4  # bytes of the number of a file
ENDING = 10.0  # seconds for threads that a test has left


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="run test files in that many")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    if config.option.processes == 1 or config.option.collectonly or session.testsfailed:
        return None
    with quiet():
        for name in (*forked.NEEDED, *OFTEN_USED):
            importlib.import_module(name)
        _read_once()
    gc.freeze()  # garbage collection skips them
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # they share it
    files = [[*items] for _, items in itertools.groupby(session.items, lambda item: item.path)]
    children = _start(config, files, config.option.processes)
    try:
        _report(session, children)
    finally:
        for child in children.values():
            child.join(0 if session.shouldfail else ENDING)
            child.kill()
            child.join()
    return True


def _read_once() -> None:
    """The first OCR of a process imports more than a second's worth, and creates an engine for
    signs, which has one thread and so works in forked processes, too."""
    from gesso.rewards.image import ocr

    ocr.Ocr(detect=False).read(np.zeros((32, 96, 3), np.uint8))


Children = dict[Connection, Any]


def _start(config: pytest.Config, files: Files, count: int) -> Children:
    queue, filled = os.pipe()
    os.write(filled, b"".join(i.to_bytes(NUMBER, "big") for i in range(len(files))))
    os.close(filled)
    children: Children = {}
    for _ in range(count):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(
            target=_run, args=(config, files, queue, theirs)
        )
        child.start()
        theirs.close()
        children[ours] = child
    os.close(queue)
    return children


def _run(config: pytest.Config, files: Files, queue: int, connection: Connection) -> None:
    """In a new process, which skips what pytest does at the end of a session."""
    plugins: Any = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are shared with the other processes
    capture.start_global_capturing()
    forked.serve_from_here(connection)
    forked_rewards.use()
    loaded_once.use()
    plugins.register(Reporter(config, connection))
    for item, following in _pairs(files, lambda: os.read(queue, NUMBER)):
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    connection.send(None)


def _pairs(
    files: Files, take: Callable[[], bytes]
) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Every test of the files that this process gets, and the one after it, on which depends what
    is torn down. The next file is taken as late as possible."""
    number = take()
    while number:
        items = files[int.from_bytes(number, "big")]
        yield from itertools.pairwise(items)
        number = take()
        yield items[-1], files[int.from_bytes(number, "big")][0] if number else None


class Reporter:
    """Sends to the first process what the terminal shows."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection = config, connection

    def pytest_runtest_logstart(self, nodeid: str, location: tuple) -> None:
        self.connection.send(("logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("logreport", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple) -> None:
        self.connection.send(("logfinish", {"nodeid": nodeid, "location": location}))


def _report(session: pytest.Session, children: Children) -> None:
    """Until all processes have ended."""
    hook, running = session.config.hook, {connection: "no test" for connection in children}
    while running:
        for connection in wait([*running]):
            assert isinstance(connection, Connection)
            try:
                message = connection.recv()
            except EOFError:
                children[connection].join()
                died = _death(running.pop(connection), children[connection].exitcode)
                hook.pytest_runtest_logreport(report=died)
                continue
            if message is None:
                del running[connection]
                continue
            name, data = message
            if name == "logstart":
                running[connection] = data["nodeid"]
            if name == "logreport":
                data = {
                    "report": hook.pytest_report_from_serializable(config=session.config, data=data)
                }
            getattr(hook, f"pytest_runtest_{name}")(**data)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)


def _death(test: str, status: int) -> pytest.TestReport:
    """A failure: the other tests of its file do not run."""
    how = f"killed by {Signals(-status).name}" if status < 0 else f"ended with status {status}"
    text = f"the process of this test was {how}; its file was not finished"
    return pytest.TestReport(test, (test, None, test), {}, "failed", text, "call")
