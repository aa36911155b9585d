"""`[[reward]]` and `[[eval_reward]]` of a recipe."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from gesso.config.base import Named, Strict


def web_addresses(urls: list[str]) -> list[str]:
    for url in urls:
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", url):
            raise ValueError(f'"{url}" is not a URL; expected one such as http://127.0.0.1:8000')
    return urls


Urls = Annotated[list[str], AfterValidator(web_addresses)]


class RemoteEntry(Strict):
    """Servers that score: `gesso serve-reward`, or others that speak one of the protocols."""

    urls: Urls = Field(min_length=1)
    """Server addresses; each request goes to the server with the fewest requests in flight."""
    protocol: Literal["gesso", "openrlhf"] = "gesso"
    """Protocol: "gesso", or "openrlhf" for the `/get_reward` endpoint of OpenRLHF and LMM-R1."""
    token_env: str | None = None
    """Environment variable with the bearer token. The token itself is never written to a run."""
    timeout: float = Field(60.0, gt=0)
    """Seconds per attempt."""
    retries: int = Field(6, ge=0)
    """Further attempts after transport errors, 429 and 5xx."""
    in_flight: int = Field(16, ge=1)
    """Maximum concurrent requests per server."""
    batch: int = Field(4, ge=1)
    """Samples per request."""
    groupwise: bool = False
    """Whether the reward compares the samples of a prompt: a request has one whole group. Bundled
    rewards do not need it."""

    @model_validator(mode="after")
    def _has_groups(self) -> RemoteEntry:
        if self.groupwise and self.protocol != "gesso":
            raise ValueError(f'groupwise requires protocol = "gesso", got "{self.protocol}"')
        return self


class Ramp(Strict):
    """A factor of a reward's weight that changes linearly over the first steps."""

    start: float = Field(0.0, ge=0, le=1e3)
    """Factor in the first step."""
    end: float = Field(1.0, ge=0, le=1e3)
    """Factor after `steps` steps, and from then on."""
    steps: int = Field(ge=1)
    """Steps from one to the other."""

    def at(self, step: int) -> float:
        """The weight in batch `step`, counted from 0."""
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


ENDS = ("first", "last", "first-last")
FRAMES = re.compile(rf"mean|{'|'.join(ENDS)}|(worst|best)(-[1-9]\d{{0,3}})?")


class RewardEntry(Named):
    weight: float = Field(1.0, ge=-1e9, le=1e9)
    """Weight in the total reward, Σ weight · value."""
    alias: str | None = Field(None, min_length=1)
    """Name in metrics, so that one reward can be listed twice with other options. None: `name`."""
    ramp: Ramp | None = None
    """Changes the weight during training, as in `ramp = { steps = 100 }`: from 0 to `weight` over
    100 steps. Evaluations have the whole weight."""
    bounds: tuple[float, float] | None = Field(None, strict=False)
    """[lowest, highest]: values are clipped to this range, so that more of one reward does not make
    up for another."""
    frames: str | None = None
    """How an image reward scores a video: the mean of its scores of all frames ("mean"), of the
    "first", the "last" or both ("first-last"), of the "worst" or the "best" frame, or of the k
    worst or best ("worst-3"). None: "mean" for bundled image rewards; other rewards get the whole
    video."""
    every: int = Field(1, ge=1)
    """With `frames`, score only every k-th frame, from the first."""
    style: Literal["gesso", "easyr1", "openrlhf", "trl"] = "gesso"
    """Calling convention of a custom function: "gesso", "easyr1", "openrlhf" or "trl"."""
    workers: int = Field(1, ge=1, le=1024)
    """Worker processes."""
    patience: float = Field(300.0, gt=0)
    """Seconds a worker may take for a batch of samples, loading included."""
    optional: bool = False
    """If true, prompts this reward cannot score are scored by the other rewards only; otherwise
    they are dropped."""
    cache: bool = True
    """Score identical samples once. Rewards marked random are never cached."""
    remote: RemoteEntry | None = None
    """Servers that compute the reward. None: local worker processes."""
    env: str | None = None
    """Requirements file of an environment for its workers, installed by `gesso env`. None: the
    environment of Gesso."""

    def weight_at(self, step: int) -> float:
        """Weight in batch `step`, counted from 0."""
        return self.weight if self.ramp is None else self.weight * self.ramp.at(step)

    @property
    def label(self) -> str:
        """Its name in metrics, where "/" separates a reward from its details: of a path the last
        folder and the file, "rewards/math.py:score" → "rewards.math:score"."""
        if self.alias is not None:
            return self.alias
        place, colon, function = self.name.rpartition(":")
        path = place if colon else function
        parts = [p for p in path.removesuffix(".py").split("/") if p not in ("", ".", "..", "~")]
        return ".".join(parts[-2:]) + (f":{function}" if colon else "")

    @model_validator(mode="after")
    def _nameable(self) -> RewardEntry:
        key, name = ("name", self.name) if self.alias is None else ("alias", self.alias)
        if not name.isprintable() or not self.label.strip():
            raise ValueError(f"{key} = {name!r:.60}: expected a name of printable characters")
        if "/" in self.label:
            raise ValueError(f'{key} = "{name}": a name in metrics has no "/"')
        if self.label in ("reward", "failed", "std", "max", "at_max"):
            raise ValueError(f'{key} = "{name}": this name is reserved for another metric')
        if self.frames is not None and not FRAMES.fullmatch(self.frames):
            raise ValueError(
                f'frames = "{self.frames}": expected "mean", "first", "last", "first-last", '
                '"worst", "best", or a number of them as in "worst-3"'
            )
        if self.every > 1 and (self.frames is None or self.frames in ENDS):
            raise ValueError(
                f'every = {self.every} needs frames = "mean", "worst" or "best"; set it, '
                "or remove every"
            )
        if self.bounds and not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds = {list(self.bounds)}: expected the lower bound first")
        return self
