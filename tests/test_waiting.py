"""The helper that waits for servers: for them, not for the clock."""

from __future__ import annotations

import sys
import time

import httpx
import pytest

from tests.rewards.servers import free_port
from tests.waiting import Started, until

SERVER = """
import http.server, sys, time
time.sleep(1)
print("at last", flush=True)
time.sleep(1)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler
    ).serve_forever()
"""


def answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_a_server_that_needs_a_while() -> None:
    port = free_port()
    started = time.monotonic()
    server = Started([sys.executable, "-c", SERVER, str(port)])
    try:
        assert server.printed("(last)")[1] == "last" and time.monotonic() - started >= 1
        with httpx.Client() as client:
            assert server.until(lambda: answers(client, f"http://127.0.0.1:{port}"))
        assert time.monotonic() - started >= 2 and server.process.poll() is None
    finally:
        server.end()
    assert server.process.poll() is not None


def test_a_command_that_fails_is_shown_at_once() -> None:
    """Not after the limit, which is minutes; with what it said."""
    code = "import sys; print('began'); sys.exit('no such model')"
    for wait in (lambda s: s.until(lambda: False), lambda s: s.printed("http")):
        server = Started([sys.executable, "-c", code])
        with pytest.raises(AssertionError, match=r"(?s)exit status 1: .*no such model") as error:
            wait(server)
        assert "began" in str(error.value)


def test_what_was_done_before_the_end_counts() -> None:
    server = Started([sys.executable, "-c", "print('at http://127.0.0.1:1')"])
    server.process.wait()
    assert server.printed(r"(http\S+)")[1] == "http://127.0.0.1:1"
    assert server.end() == 0


def test_a_hang_has_an_end() -> None:
    code = "import time; print('x' * 9999, flush=True); time.sleep(600)"
    server = Started([sys.executable, "-c", code])
    server.printed("x")
    with pytest.raises(AssertionError, match=r"not so far after 0\.3 s") as error:
        server.until(lambda: False, limit=0.3)
    assert len(str(error.value)) < 5000, "the end of the output is enough"
    assert server.process.poll() is not None, "it does not stay behind"
    assert until(lambda: "found") == "found"


def test_one_that_does_not_listen_is_killed() -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True)\n"
    server = Started([sys.executable, "-c", f"{code}while True: signal.pause()"])
    server.printed("on")
    assert server.end(0.2) == -9
