"""The code blocks of the tutorial and the how-to pages, which the tests run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    line: int
    code: str
    intro: str  # the paragraph before it

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The Python file that the paragraph before the block names last."""
        names = re.findall(r"`(\w+\.py)`", self.intro)
        return names[-1] if names else None


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(language: str, *names: str) -> list[Block]:
    """Of all pages, or of those named as in "how-to/train.md"."""
    found = []
    for name in names or [str(path.relative_to(DOCS)) for path in PAGES]:
        text = page(name)
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            before = text[: match.start()]
            intro = before.rstrip().rpartition("\n\n")[2]
            line = before.count("\n") + 1
            found.append(Block(name, match[1], line, match[2], intro))
    return [block for block in found if block.language == language]


def commands(*names: str) -> list[tuple[str, list[str]]]:
    """(page:line, arguments) of every `gesso` command."""
    shown = []
    for block in [*blocks("bash", *names), *blocks("console", *names)]:
        for k, line in enumerate(block.code.splitlines(), block.line + 1):
            command = re.sub(r"^(\$ )?([A-Z_]+=\S+ )?", "", line)
            if command.startswith("gesso "):
                shown.append((f"{block.page}:{k}", shlex.split(command, comments=True)[1:]))
    return shown
