"""Faults between a run and its rewards, injected on purpose. Only the misbehaving server is not
real."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
import torch

from gesso import build, run
from gesso.check import check
from gesso.config import RemoteEntry
from gesso.rewards.transport import pool
from gesso.rewards.transport.pool import NoResponse, ServerPool
from gesso.rewards.transport.remote import RemoteScorer
from gesso.track.run_folder import RunFolder
from gesso.types import Sample, Score, UserError
from tests.conftest import small_recipe
from tests.rewards.servers import Misbehaving, Rendezvous, Served, free_port, grey
from tests.test_loop import comparable, final_state
from tests.waiting import LIMIT, until

GREYS = [grey(value) for value in (0, 51, 102, 153, 204, 255)]
VALUES = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FIRST_BACKOFF", 0.05)


def ask(
    urls: Sequence[str], samples: Sequence[Sample] = GREYS, **settings: object
) -> tuple[list[Score], RemoteScorer]:
    settings = {"timeout": 60.0, "retries": 3, "batch": 6} | settings
    remote = RemoteScorer(RemoteEntry(urls=list(urls), **settings))  # type: ignore[arg-type]

    async def go() -> list[Score]:
        try:
            return await remote.score(samples)
        finally:
            await remote.close()

    return asyncio.run(go()), remote


@pytest.mark.parametrize("protocol", ["gesso", "openrlhf"])
@pytest.mark.parametrize("fault", ["hang", "500 Oh", "502 Oh", "429 Slow", "close", "half", "drip"])
def test_transient_faults_are_retried(fault: str, protocol: str) -> None:
    timeout = 1.0 if fault in ("hang", "drip") else 60.0  # only these reach the timeout
    with Misbehaving([fault, fault]) as server:
        scores, _ = ask([server.url], protocol=protocol, timeout=timeout)
        assert [s.value for s in scores] == VALUES  # each once, in order
        assert len(server.requests) == 3


FINAL = {
    "count": "returned 5 (scores|rewards) for 6 samples",
    "truncated": "returned invalid JSON",
    "garbage": "returned more than 4,194,304 bytes",
    "404 No": 'returned 404: {"detail": "not today"}',
    "301 Moved": "returned 301",
    "body:[]": r"returned '\[\]'; expected an object with a list",
    "body:<html>": "returned invalid JSON: '<html>'",
    'body:{"scores": 3, "rewards": "x"}': "expected an object with a list",
    "body:" + "[" * 100_000: "returned invalid JSON",
    "body:": "returned invalid JSON: ''",
}


@pytest.mark.parametrize("protocol", ["gesso", "openrlhf"])
@pytest.mark.parametrize("fault", FINAL, ids=lambda fault: fault[:24])
def test_an_invalid_response_is_an_error(fault: str, protocol: str) -> None:
    with Misbehaving([fault]) as server:
        scores, _ = ask([server.url], protocol=protocol)
        assert len(server.requests) == 1  # a retry would not help
    assert all(s.value is None and not s.ok for s in scores) and len(scores) == 6
    with pytest.raises(AssertionError, match=FINAL[fault]):
        raise AssertionError(scores[0].error)


@pytest.mark.parametrize("protocol", ["gesso", "openrlhf"])
@pytest.mark.parametrize("fault", ["NaN", "Infinity", "1e999", "null", "true", '"0.5"'])
def test_an_invalid_value_fails_only_its_sample(fault: str, protocol: str) -> None:
    with Misbehaving([fault]) as server:
        scores, _ = ask([server.url], protocol=protocol)
    assert scores[0].value is None
    not_applicable = (fault, protocol) == ("null", "gesso")  # null: the reward does not apply
    assert (scores[0].error is None) == not_applicable
    assert [s.value for s in scores[1:]] == VALUES[1:]


def test_a_check_repeats_a_request_once(recipe_data: dict) -> None:
    """And not six times, as a run that waits for its server to return."""
    with Misbehaving(["500 Oh"] * 99) as server:
        recipe_data["reward"] = [{"name": "served", "remote": {"urls": [server.url], "batch": 99}}]
        with pytest.raises(UserError, match=r"500.*; tried 2 times"):
            check(build.recipe_from(recipe_data))


@pytest.mark.parametrize("fault", ["hang", "drip", "500 Oh", "close"])
def test_attempts_and_time_are_limited(fault: str) -> None:
    started = time.monotonic()
    slow = fault in ("hang", "drip")
    with Misbehaving([fault] * 99) as server:
        scores, _ = ask([server.url], timeout=0.4 if slow else 60.0, retries=2)
        # On a busy machine 0.4 s may pass before the server reads the request.
        assert len(server.requests) == 3 or (slow and len(server.requests) < 3)
    assert all(s.error and s.error.endswith("; tried 3 times") for s in scores)
    assert time.monotonic() - started < 120  # a hang alone takes 600


def test_no_server() -> None:
    scores, _ = ask([f"http://127.0.0.1:{free_port()}"], retries=1)
    assert all("ConnectError" in str(s.error) for s in scores)


def test_load_is_spread_and_bounded() -> None:
    full = Rendezvous(6)  # a response comes only when both servers are at their limit
    with Misbehaving(rendezvous=full) as one, Misbehaving(rendezvous=full) as two:
        scores, _ = ask([one.url, two.url], GREYS * 4, batch=1, in_flight=3)
        assert [s.value for s in scores] == VALUES * 4
        assert one.most == two.most == 3
        assert len(one.requests) == len(two.requests) == 12


def test_few_requests_are_spread_too() -> None:
    full = Rendezvous(6)
    with Misbehaving(rendezvous=full) as one, Misbehaving(rendezvous=full) as two:
        ask([one.url, two.url], batch=1)  # 6 concurrent, of 32 possible
        assert len(one.requests) == len(two.requests) == 3
    with Misbehaving() as one, Misbehaving() as two:

        async def in_turns() -> None:
            remote = RemoteScorer(RemoteEntry(urls=[one.url, two.url]))
            for sample in GREYS:
                await remote.score([sample])
            await remote.close()

        asyncio.run(in_turns())
        assert len(one.requests) == len(two.requests) == 3


def test_a_slow_server_gets_less() -> None:
    with Misbehaving() as fast, Misbehaving(hold=lambda: len(fast.scored) >= 40) as slow:
        scores, _ = ask([slow.url, fast.url], GREYS * 8, batch=1, in_flight=2)
        assert [s.value for s in scores] == VALUES * 8
        assert len(slow.requests) < len(fast.requests) / 3


@pytest.mark.parametrize("fault", ["500 Oh", "close", "hang"])
def test_a_dead_server_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_BACKOFF", "MAX_BACKOFF"):
        monkeypatch.setattr(pool, name, 300.0)
    with Misbehaving([fault] * 99) as dead, Misbehaving(delay=0.01) as alive:
        started = time.monotonic()
        settings = {"batch": 1, "in_flight": 2, "timeout": 2.0}
        scores, remote = ask([dead.url, alive.url], GREYS * 8, **settings)
        assert time.monotonic() - started < 120  # waiting for the dead one takes at least 150
        assert [s.value for s in scores] == VALUES * 8
        assert len(dead.requests) == 2 and len(alive.requests) == 48
    assert remote.pool.servers[0].failures == 1  # two concurrent failures count as one


def test_a_server_that_comes_back_is_used_again() -> None:
    port = free_port()
    remote = RemoteScorer(
        RemoteEntry(urls=[f"http://127.0.0.1:{port}"], retries=8, batch=1, timeout=2.0)
    )

    async def go() -> tuple[list[Score], list[Score]]:
        with Misbehaving(port=port):
            before = await remote.score(GREYS)
        late = asyncio.get_running_loop().run_in_executor(None, later)
        after = await remote.score(GREYS)  # sent while there is no server
        await remote.close()
        (await late).end()
        return before, after

    def later() -> Misbehaving:
        time.sleep(0.7)
        return Misbehaving(port=port)

    before, after = asyncio.run(go())
    assert [s.value for s in before] == [s.value for s in after] == VALUES
    assert remote.pool.servers[0].failures == 0


def test_backoff_doubles_with_jitter_up_to_a_limit() -> None:
    async def go() -> list[float]:
        one = ServerPool(["http://127.0.0.1:9"])
        backoffs = []
        for _ in range(14):
            now = asyncio.get_running_loop().time()
            one._back_off(one.servers[0], now)
            backoffs.append(one.servers[0].retry_at - one.servers[0].failed_at)
        one._back_off(one.servers[0], now - 1)  # began before the last failure: ignored
        assert one.servers[0].failures == 14
        one._back_off(one.servers[0], asyncio.get_running_loop().time(), requested=20.0)
        backoffs.append(one.servers[0].retry_at - one.servers[0].failed_at)
        return backoffs

    *backoffs, requested = asyncio.run(go())
    for i, backoff in enumerate(backoffs):
        middle = min(30.0, 0.05 * 2**i)
        assert 0.5 * middle <= backoff <= 1.5 * middle
    assert len({round(r / min(30.0, 0.05 * 2**i), 6) for i, r in enumerate(backoffs)}) > 10
    assert requested >= 20.0 - 1e-6


def test_retry_after() -> None:
    with Misbehaving(["429 Slow\r\nRetry-After: 1"]) as server:
        started = time.monotonic()
        scores, _ = ask([server.url])
        assert [s.value for s in scores] == VALUES
        assert time.monotonic() - started >= 1.0


def test_a_lost_response_counts_once() -> None:
    """The response is cut after the server scored the samples: it scores again, and one counts."""
    with Misbehaving(["half", "close"]) as server:
        scores, _ = ask([server.url])
        assert len(server.scored) == 18
    assert [s.value for s in scores] == VALUES


def test_compressed_responses_are_rejected() -> None:
    with Misbehaving(["200 OK\r\nContent-Encoding: gzip"]) as server:
        scores, _ = ask([server.url])
        assert "accept-encoding: identity" in server.heads[0].lower()
    assert "compressed" in str(scores[0].error)


def test_the_final_error_has_a_reason() -> None:
    async def go() -> None:
        one = ServerPool(["http://127.0.0.1:9"], retries=0)
        with pytest.raises(NoResponse, match=r"http://127.0.0.1:9 failed: ConnectError .*once"):
            await one.get("/x")
        await one.close()

    asyncio.run(go())


def test_a_cancelled_request_passes_its_turn_on() -> None:
    async def go(released_first: bool) -> None:
        one = ServerPool(["http://127.0.0.1:9"], in_flight=1)
        server = await one._acquire()
        waiting = [asyncio.ensure_future(one._acquire()) for _ in range(2)]
        await asyncio.sleep(0.01)
        if released_first:  # cancelled after its turn came, before it ran
            one._release(server)
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        if not released_first:
            one._release(server)
        assert await asyncio.wait_for(waiting[1], LIMIT) is server
        assert not one._waiting

    for released_first in (False, True):
        asyncio.run(go(released_first))


# Training through faults: the real loop, real processes, real SIGKILL.

STEPS = 3
COUNTED = "tests.rewards.served_rewards:counted"  # brightness, as `Misbehaving` scores


def trained(data: dict, folder: Path, beside: Callable[[RunFolder], None] | None = None) -> Path:
    """A whole run, with `beside` running in a thread."""
    failures: list[BaseException] = []

    def watch() -> None:
        try:
            assert beside
            beside(RunFolder(folder))
        except BaseException as error:
            failures.append(error)

    helper = threading.Thread(target=watch, daemon=True) if beside else None
    if helper:
        helper.start()
    run.train(build.recipe_from(data | {"steps": STEPS}), folder=folder, quiet=True)
    if helper:
        helper.join(LIMIT)
    assert not failures, failures
    return folder


def longer_than(file: Path, size: int) -> Callable[[], bool]:
    return lambda: file.exists() and file.stat().st_size > size


def rows_there(folder: RunFolder, count: int) -> Callable[[], bool]:
    return lambda: folder.path.exists() and len(folder.rows()) >= count


def same(one: Path, other: Path) -> None:
    """The same rows and, bit for bit, the same weights: nothing lost, nothing counted twice."""
    rows, expected = (comparable(RunFolder.open(f).rows()) for f in (one, other))
    assert rows == expected and len(rows) == STEPS + 1
    a, b = final_state(one), final_state(other)
    assert all(torch.equal(a[k], b[k]) for k in a)


def remote_data(data: dict, *urls: str) -> dict:
    remote = {"urls": list(urls), "timeout": 20.0, "retries": 12, "batch": 1}
    return data | {"reward": [{"name": COUNTED, "remote": remote}]}


def local_data(data: dict, log: Path, seconds: float = 0.0) -> dict:
    entry = {"name": COUNTED, "log": str(log), "seconds": seconds, "workers": 2}
    return data | {"reward": [entry]}


@pytest.fixture(scope="module")
def calm(
    pipeline_folder: Path, prompt_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Scored on this machine, in two worker processes. `log` beside it has a line per sample."""
    folder = tmp_path_factory.mktemp("calm")
    data = local_data(small_recipe(pipeline_folder, prompt_file), folder / "log")
    return trained(data, folder / "run")


def test_one_of_two_servers_dies_and_the_other_recovers(
    calm: Path, recipe_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "FIRST_BACKOFF", 0.3)
    reward = COUNTED, f"log={tmp_path / 'log'}"
    servers = [Served(*reward) for _ in range(2)]

    def kill_and_return(folder: RunFolder) -> None:
        until(rows_there(folder, 1))
        os.kill(servers[0].process.pid, signal.SIGKILL)
        until(rows_there(folder, 2))  # the other one has scored a step by itself
        os.kill(servers[1].process.pid, signal.SIGKILL)
        servers[1].process.wait()
        time.sleep(0.5)
        servers.append(Served(*reward, port=servers[1].port))

    try:
        data = remote_data(recipe_data, *(server.url for server in servers))
        data["reward"][0]["remote"] |= {"retries": 24}  # 12 of each server
        same(trained(data, tmp_path / "killed", kill_and_return), calm)
        assert httpx.get(f"{servers[2].url}/health").json()["scored"] > 0  # the last one worked
    finally:
        for server in servers:
            server.end()


def workers_of(parent: int) -> list[int]:
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if f"PPid:\t{parent}\n" in status and b"gesso.rewards.transport.worker" in command:
            processes.append(int(folder.name))
    return processes


def test_workers_that_are_killed_repeatedly(calm: Path, recipe_data: dict, tmp_path: Path) -> None:
    log = tmp_path / "log"
    killed = []

    def kill(folder: RunFolder) -> None:
        for count in range(STEPS - 1):
            until(rows_there(folder, count))
            begun = log.stat().st_size if log.exists() else 0
            until(longer_than(log, begun))
            for process in workers_of(os.getpid()):  # one has just begun
                os.kill(process, signal.SIGKILL)
                killed.append(process)

    data = local_data(recipe_data, log, 0.2)  # at work long enough
    same(trained(data, tmp_path / "killed", kill), calm)
    assert len(killed) >= STEPS - 1
    requested = [len(file.read_text().split()) for file in (calm.parent / "log", log)]
    assert requested[0] == 3 * 3 + 6 * STEPS < requested[1]  # some were retried, none counted twice


def test_a_server_that_always_fails_stops_the_run_with_a_reason(
    recipe_data: dict, tmp_path: Path
) -> None:
    from gesso.types import StopRun

    with (
        Misbehaving(["NaN"] * 999) as server,
        pytest.raises(StopRun, match=r"3 of 3 scores of the evaluation failed; .* returned nan"),
    ):
        trained(remote_data(recipe_data, server.url), tmp_path / "run")


def test_a_run_with_transient_faults(calm: Path, recipe_data: dict, tmp_path: Path) -> None:
    """Half of all requests fail, and the run equals the run without faults bit for bit."""
    faults = ["ok", "500 Oh", "close", "ok", "half", "429 Slow", "ok", "ok", "hang", "ok"] * 30
    with Misbehaving(faults) as server:
        data = remote_data(recipe_data, server.url)
        data["reward"][0]["remote"] |= {"timeout": 0.5, "retries": 12}
        same(trained(data, tmp_path / "rough"), calm)
        assert len(faults) - len(server.faults) > 30  # many were met


def test_a_run_continues_after_invalid_responses(recipe_data: dict, tmp_path: Path) -> None:
    """Faults that a retry would not fix fail only their samples; a drip is retried."""
    data = remote_data(recipe_data, "") | {"max_failed": 0.5}
    data["reward"][0] |= {"cache": False}
    data["reward"][0]["remote"] |= {"timeout": 3.0}  # for the drip; the others respond at once
    wrong = ["NaN", "Infinity", "count", "garbage", "truncated"]
    apart = [fault for one in wrong for fault in (*["ok"] * 4, one)]
    with Misbehaving(["ok", "drip", *apart]) as server:
        data["reward"][0]["remote"]["urls"] = [server.url]
        rows = RunFolder.open(trained(data, tmp_path / "run")).rows()
        assert not server.faults
    failed = sum(row.get("failed", 0) + row.get("eval/failed", 0) for row in rows)
    assert failed == len(wrong)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all(row["reward"] is not None and 0 < row["reward"] < 1 for row in rows[1:])
