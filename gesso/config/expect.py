"""What the authors of a recipe report, to compare a run with."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from gesso.config.base import Strict


def _steps(points: dict[str, float]) -> dict[str, float]:
    for step in points:
        if not step.isdecimal():
            raise ValueError(f'points: expected steps, as in {{ 1000 = 0.9 }}, got "{step}"')
    return points


class Expect(Strict):
    source: str = Field(min_length=1)
    """Where the figures are from: paper or page, and the place in it."""
    metric: str = Field(pattern="^eval/.+")
    """Metric of the evaluation that they are of, such as eval/ocr."""
    value: float
    """Reported after training."""
    start: float | None = None
    """Reported before training."""
    points: Annotated[dict[str, float], AfterValidator(_steps)] = Field({})
    """Reported during training: step → value."""

    @property
    def figure(self) -> str:
        """Name of the metric in `gesso eval`."""
        return self.metric.removeprefix("eval/")

    def compared(self, value: float) -> str:
        """How far a run is from the reported value, in one line."""
        away = value - self.value
        distance = f"{abs(away):.3f} {'above' if away > 0 else 'below'}"
        reported = f"{self.value:g}" if self.start is None else f"{self.start:g} → {self.value:g}"
        return f"{self.figure} {value:.3f}, {distance} the authors' {reported} ({self.source})"
