"""A real Chromium, driven over its own DevTools protocol: one process, a tab a test.

`websockets` is all this needs. A driver such as Playwright would do, but its wheel brings 40 MB of
Node with it for what is a page of code here.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.waiting import Started

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-port=0",
)
PATIENCE = 60.0  # seconds until something in a page counts as missing
KEYS = {
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27, "Enter": 13,
    "Tab": 9, "Home": 36, "End": 35, " ": 32,
}  # fmt: skip


def find() -> str | None:
    """The program, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    def __init__(self, folder: Path) -> None:
        program = find()
        assert program, "ask find() first"
        command = [program, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        self.started = Started(command)
        self.process = self.started.process
        told = folder / "DevToolsActivePort"
        self.started.until(lambda: told.is_file() and "\n" in told.read_text())
        self.address = f"http://127.0.0.1:{told.read_text().split()[0]}"

    def tab(self, width: int = 1440, height: int = 900) -> Tab:
        asked = urllib.request.Request(f"{self.address}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(asked) as answer:
            found = json.load(answer)
        return Tab(found["webSocketDebuggerUrl"], width, height)

    def close(self) -> None:
        self.started.end(5.0)  # it is killed if it ignores SIGTERM


class Tab:
    """One page. What its console complains of gathers in `complaints`."""

    def __init__(self, address: str, width: int, height: int) -> None:
        from websockets.sync.client import connect

        self.socket = connect(address, max_size=None)
        self.complaints: list[str] = []
        self._asked = 0
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.size(width, height)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._asked += 1
        self.socket.send(json.dumps({"id": self._asked, "method": method, "params": params}))
        while True:
            told = json.loads(self.socket.recv(PATIENCE))
            self._heard(told)
            if told.get("id") == self._asked:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']['message']}")
                return told["result"]

    def _heard(self, told: dict[str, Any]) -> None:
        params = told.get("params", {})
        if told.get("method") == "Runtime.exceptionThrown":
            found = params["exceptionDetails"]
            self.complaints.append(found.get("exception", {}).get("description") or found["text"])
        elif told.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
        elif told.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.complaints.append(str([a.get("value") for a in params["args"]]))

    def size(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def prefer(self, **features: str) -> None:
        """Media features: prefer(prefers_color_scheme="dark")."""
        told = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.send("Emulation.setEmulatedMedia", features=told)

    def open(self, address: str) -> None:
        """Until the page says that it is ready."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)
        self.wait("document.documentElement.dataset.ready !== undefined")

    def go(self, place: str) -> None:
        self.js(f"location.hash = {json.dumps(place)}")

    def js(self, code: str) -> Any:
        """The value of an expression; promises are awaited."""
        found = self.send(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True,
        )  # fmt: skip
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def wait(self, code: str, seconds: float = PATIENCE) -> None:
        """Until the expression is true."""
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(RuntimeError):  # the page is on its way to another
                if self.js(f"Boolean({code})"):
                    return
            if time.monotonic() > until:
                raise AssertionError(f"never true: {code}; the page says: {self.text()[:2000]}")
            time.sleep(0.03)

    def text(self, selector: str = "body") -> str:
        return self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def texts(self, selector: str) -> list[str]:
        return self.js(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText)"
        )

    def count(self, selector: str) -> int:
        return self.js(f"document.querySelectorAll({json.dumps(selector)}).length")

    def box(self, selector: str) -> dict[str, float]:
        return self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return {x: b.x, y: b.y, width: b.width, height: b.height}; })()"
        )

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of it."""
        self.wait(f"document.querySelector({json.dumps(selector)})")
        box = self.box(selector)
        self.drag((box["x"] + box["width"] / 2, box["y"] + box["height"] / 2))

    def drag(self, *points: tuple[float, float]) -> None:
        """Press at the first, let go at the last."""
        for kind, (x, y) in [
            ("mousePressed", points[0]),
            *(("mouseMoved", p) for p in points[1:]),
            ("mouseReleased", points[-1]),
        ]:
            self.send(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1,
                clickCount=1,
            )  # fmt: skip

    def hover(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, key: str) -> None:
        code = KEYS.get(key) or ord(key.upper())
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more
            )

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def settle(self, seconds: float = 0.1) -> None:
        """Two frames, and then some."""
        self.js("new Promise((d) => requestAnimationFrame(() => requestAnimationFrame(d)))")
        time.sleep(seconds)

    def picture(self, path: Path, whole: bool = False) -> None:
        """A screenshot, of the window or of the whole page."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self.send("Page.close")
        self.socket.close()
