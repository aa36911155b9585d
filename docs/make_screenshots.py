"""Makes docs/images/view-*.png: `gesso view` in Chromium, over two short runs.

    python docs/make_screenshots.py [RUNS]

RUNS is a folder with runs named demo-001 and demo-vlm-001. Without it both are trained first, some
minutes on 2 CPU cores.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402

from tests.viewer.browser import Browser, Tab, find  # noqa: E402

IMAGES = ROOT / "docs" / "images"
BOTH = "tick=demo-001&tick=demo-vlm-001"
SHORT = {
    "demo": ["steps=24", "eval.every=3", "eval.prompts=48"],
    "demo-vlm": ["steps=30", "eval.every=4"],
}
PLAYED = 300.0  # seconds for the playground: it loads the model


def train(runs: Path) -> None:
    for recipe, settings in SHORT.items():
        command = [sys.executable, "-m", "gesso.cli", "train", recipe, *settings]
        subprocess.run([*command, "--run", str(runs / f"{recipe}-001")], check=True, cwd=ROOT)


def shoot(tab: Tab, url: str) -> None:
    """Every view in the state in which it opens."""

    def save(name: str) -> None:
        """256 colours take a third of the bytes."""
        tab.settle(0.6)
        file = IMAGES / f"view-{name}.png"
        tab.picture(file)
        Image.open(file).convert("RGB").quantize(256).save(file, optimize=True)

    def take(name: str, place: str, ready: str) -> None:
        tab.open(f"{url}/#/{place}")
        tab.wait(ready)
        save(name)

    cards = "document.querySelectorAll('.card img').length > 8"
    take("runs", f"runs?{BOTH}&run=demo-001", "document.querySelectorAll('.pair img').length > 8")
    take("evolution", "evolution?run=demo-001", cards)
    take("responses", "evolution?run=demo-vlm-001", "document.querySelector('.turn.now mark')")
    take("curves", f"curves?{BOTH}", "document.querySelectorAll('.line').length > 8")
    take("groups", "groups?run=demo-001", "document.querySelectorAll('.sample img').length > 4")
    tab.open(f"{url}/#/playground?run=demo-001")
    tab.wait("document.getElementById('play-prompt')?.value")
    tab.click("button[type=submit]")
    tab.wait("document.querySelectorAll('.play-pair img').length > 4", PLAYED)
    save("playground")


def main() -> int:
    if find() is None:
        print("no Chromium on the path: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 1:
            runs = Path(sys.argv[1]).resolve()
        else:
            runs = Path(folder) / "runs"
            train(runs)
        command = [sys.executable, "-m", "gesso.cli", "view", str(runs), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        browser = Browser(Path(folder) / "chromium")
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found, "the server did not start"
            tab = browser.tab(1440, 900)
            tab.prefer(prefers_color_scheme="light")
            shoot(tab, found[0])
        finally:
            browser.close()
            server.terminate()
            server.wait(10)
    print(*sorted(p.name for p in IMAGES.glob("view-*.png")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
