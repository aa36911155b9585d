"""Jobs that go on in threads while tests run, for the tests that wait for their results."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Background:
    """At most `at_once` jobs at a time. `kill` ends the processes for which jobs wait."""

    def __init__(self, at_once: int, kill: Callable[[], None]) -> None:
        self.at_once, self.kill = at_once, kill
        self._waiting: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def start(
        self, job: Callable[[], Any], early: bool = False, after: Future | None = None
    ) -> Future:
        """Its result, later. An `early` job precedes all that have not begun; one `after` another
        begins when that has ended, and fails if that failed."""
        future: Future = Future()

        def run() -> Any:
            if after is not None:
                after.result()
            return job()

        def enqueue(_: Future | None = None) -> None:
            with self._lock:
                if not self._stopped:
                    (self._waiting.appendleft if early else self._waiting.append)((future, run))
                    if len(self._threads) < self.at_once:
                        thread = threading.Thread(target=self._work, daemon=True)
                        self._threads.add(thread)
                        thread.start()
                    return
            future.cancel()  # without the lock, which `enqueue` of a job after this one takes

        if after is None:
            enqueue()
        else:
            after.add_done_callback(enqueue)
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads.discard(threading.current_thread())
                    return
                future, run = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = run()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

    def stop(self) -> None:
        """Jobs that have not begun never do. Returns when the others have ended."""
        with self._lock:
            self._stopped = True
            waiting, threads = [*self._waiting], [*self._threads]
            self._waiting.clear()
        for future, _ in waiting:
            future.cancel()
        while threads := [thread for thread in threads if thread.is_alive()]:
            self.kill()  # again and again: a job may start several processes in turn
            threads[0].join(0.1)
