"""What the playground asks and gets. Who draws is above this room: the server is given one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from gesso.config import Strict
from gesso.track.progress import Progress


class Ask(Strict):
    run: str
    prompt: str = Field(min_length=1, max_length=20_000)
    seed: int = Field(0, ge=0, lt=2**31)
    n: int = Field(1, ge=1, le=16)
    image: str = ""  # base64 of a picture to look at, for a model that sees
    answer: str = Field("", max_length=2_000)  # the wanted one, for rewards that look for it
    score: bool = True  # by the run's rewards, too


class Studio(Protocol):
    def draw(self, run: Path, asked: Ask, progress: Progress) -> dict[str, Any]:
        """{"base": cells, "trained": cells, "step": …}; a cell has `image` (a data URI) or `reply`,
        and `reward`, `parts`, `text`, `error` as samples have."""

    def close(self) -> None:
        """The server ends: let go of the model and of whatever runs beside it."""
