"""Loads the model of a run, a recipe or a folder, and samples from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso import build, families
from gesso.config import AnyRecipe, Eval
from gesso.config.parsing import parse
from gesso.data import prompts
from gesso.families.base import Family
from gesso.track import bars, media
from gesso.track.progress import SILENT, Progress
from gesso.types import (
    Prompt,
    ResponseSpec,
    Sample,
    SampleSpec,
    UserError,
    Which,
    seed_of,
)
from gesso.use.notes import outside
from gesso.use.source import ModelSource

if TYPE_CHECKING:
    from gesso.samplers.base import Piece


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options; None: as in the recipe's evaluations."""

    steps: int | None = None  # denoising steps, image models only
    guidance: float | None = None  # guidance scale, image models only
    temperature: float | None = None  # language models only; 0: greedy
    weights: Which = "current"  # "reference": the untrained weights, if opened with `base`


AS_EVALUATED = SamplingOptions()


@dataclass(frozen=True)
class SampledModel(ABC):
    """A model to sample from, in this process or in others."""

    source: ModelSource

    # What a subclass computes

    @abstractmethod
    def unfit(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """For each prompt, why the model does not accept it."""

    @abstractmethod
    def inspect(
        self, prompts: Sequence[Prompt], spec: SampleSpec | ResponseSpec
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Raises for prompts that the model does not accept. Returns notes about parts of prompts
        that these options ignore, and about prompts that are truncated."""

    @abstractmethod
    def pieces(
        self,
        prompts: Sequence[Prompt],
        row: Sequence[int],
        seeds: Sequence[int],
        spec: SampleSpec | ResponseSpec,
    ) -> Iterator[Piece]:
        """Like `Sampler.sample`."""

    @abstractmethod
    def close(self) -> None:
        """Releases its processes. It cannot be used afterwards."""

    @property
    def recipe(self) -> AnyRecipe:
        return self.source.recipe

    @property
    def family(self) -> Family:
        return families.of(self.recipe)

    @property
    def gives_text(self) -> bool:
        """Whether samples are texts rather than images."""
        return self.recipe.model.output == "text"

    def sample(
        self,
        prompt: str,
        n: int = 1,
        seed: int = 0,
        images: Sequence[str | Path] = (),
        *,
        steps: int | None = None,
        guidance: float | None = None,
        temperature: float | None = None,
    ) -> list[Any]:
        """n samples of one prompt: images (PIL), videos (`Clip`: `frames`, `fps`, `save("a.mp4")`),
        or texts (str) from a language model. `images` are input images for a vision-language,
        editing or image-to-video model. Uses the evaluation settings of the recipe, except that
        several texts are sampled at temperature 1 instead of 0, where all would be equal."""
        settings = SamplingOptions(steps, guidance, temperature)
        samples = self.draw([self.ask(prompt, images)], [0] * n, sample_seeds(seed, n), settings)
        return [s.response if self.gives_text else media.content(s) for s in samples]

    def ask(self, text: str, images: Sequence[str | Path | bytes] = ()) -> Prompt:
        """A prompt from a text, formatted like the rows of the recipe's data."""
        if isinstance(images, str | Path | bytes):
            raise UserError(f"images: expected a list, as in [{str(images)[:80]!r}]")
        return prompts.typed_prompt(text, images, self.recipe.data)

    def fitting(
        self, candidates: Sequence[Prompt], path: str, report: prompts.LoadReport
    ) -> list[Prompt]:
        """The rows of a file that the model accepts; `report` lists the others."""
        found = dict(zip(map(id, candidates), self.unfit(candidates), strict=True))
        reason = "do not fit the model"
        return prompts.fit(candidates, lambda prompt: found[id(prompt)], path, report, reason)

    def draw(
        self,
        prompts: Sequence[Prompt],
        row: Sequence[int],
        seeds: Sequence[int],
        settings: SamplingOptions = AS_EVALUATED,
        progress: Progress = SILENT,
        each: Callable[[Piece], object] = lambda piece: None,
    ) -> list[Sample]:
        """A sample of prompts[row[i]] from seeds[i] for every i. `each` is called with every piece
        as soon as it is finished."""
        spec = self.spec(settings, several=len(set(row)) < len(row))
        self._check(prompts, spec, progress)
        progress.phase(f"{self.family.activity} with {self.source.name}", len(row))
        samples: dict[int, Sample] = {}
        for piece in self.pieces(prompts, row, seeds, spec):
            samples |= zip(piece.index, piece.samples, strict=True)
            each(piece)
            progress.advance(len(piece.samples))
        return [samples[i] for i in range(len(row))]

    def spec(self, settings: SamplingOptions, several: bool) -> SampleSpec | ResponseSpec:
        options = {key: value for key, value in vars(settings).items() if value is not None}
        weights = options.pop("weights")
        family = self.family
        for option in family.foreign_options:
            if option in options:
                (other,) = (name for name in families.BY_NAME if name != family.name)
                raise UserError(
                    f"{option} is for {other} models, but this is a {family.name} model; remove it"
                )
        section = self.recipe.eval
        if several and section.temperature == 0:
            section = section.model_copy(update={"temperature": 1.0})
        section = parse(Eval, section.model_dump() | options, "sampling")
        return build.algorithm(self.recipe).eval_spec(section, self.recipe.model, weights)

    def _check(self, prompts: Sequence[Prompt], spec: Any, progress: Progress) -> None:
        """Raises for prompts that the model does not accept. Adds notes about parts of prompts that
        it ignores, and prompts unlike the training data of a bundled model."""
        notes, truncated = self.inspect(prompts, spec)
        for note in [*notes, *(outside(self.source, prompts) or truncated)]:
            progress.note(note)


@dataclass(frozen=True)
class LoadedModel(SampledModel):
    """A model loaded in this process."""

    model: Any  # of the recipe's family

    def unfit(self, prompts: Sequence[Prompt]) -> list[str | None]:
        return [self.family.unfit(self.model, prompt) for prompt in prompts]

    def inspect(
        self, prompts: Sequence[Prompt], spec: SampleSpec | ResponseSpec
    ) -> tuple[Sequence[str], Sequence[str]]:
        notes = self.family.check_prompts(self.model, prompts, spec)
        return notes, self.family.truncated(self.model, prompts)

    def pieces(
        self,
        prompts: Sequence[Prompt],
        row: Sequence[int],
        seeds: Sequence[int],
        spec: SampleSpec | ResponseSpec,
    ) -> Iterator[Piece]:
        # External engines are too slow to start for a few samples.
        sampler = build.built_in_sampler(self.recipe, self.model)
        yield from sampler.sample(prompts, row, seeds, spec)

    def close(self) -> None:
        """The model is released with this object."""


def open_model(source: ModelSource, progress: Progress = SILENT, base: bool = False) -> LoadedModel:
    """`base`: keep a copy of the untrained weights, to sample from them as well."""
    source.announce_code("model", "algorithm")
    with bars.loading(progress, source.name, source.recipe.model.path):
        model = build.model(eager(source.recipe))
    if base:
        model.policy.snapshot("reference")
    if source.run is not None:
        table = f"{source.table}/"
        state, _ = source.run.load(source.step, table)
        weights = {name.removeprefix(table): tensor for name, tensor in state.items()}
        with matching(source):
            model.policy.load(weights)
    return LoadedModel(source, model)


@contextmanager
def matching(source: ModelSource) -> Iterator[None]:
    """Around loading the weights of a run."""
    try:
        yield
    except ValueError as error:
        assert source.run is not None
        raise UserError(
            f"{source.run.path / 'config.toml'} does not match the checkpoint of step "
            f"{source.step}: {error}; restore config.toml, or the model it refers to "
            f"({source.recipe.model.path})"
        ) from error


def eager(recipe: AnyRecipe) -> Any:
    """Compiles only if the recipe sets `model.compile`: compilation takes a minute, a few samples
    less."""
    if recipe.model.compile is not None:
        return recipe
    eager = recipe.model.model_copy(update={"compile": False})
    return recipe.model_copy(update={"model": eager})


def sample_seeds(seed: int, n: int) -> list[int]:
    """Seeds of n samples of one prompt, independent of other prompts."""
    return [seed_of(seed, "picture", i) for i in range(n)]  # another word would change all samples
