"""A model with the weights of a run, a recipe or a folder: load it, and sample from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso import build, families
from gesso.config import AnyRecipe, Eval
from gesso.config.parsing import parse
from gesso.data import prompts
from gesso.families.base import Family
from gesso.track import bars
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
class Drawing:
    """How samples are drawn; None: as the recipe's evaluations."""

    steps: int | None = None  # of a model that draws
    guidance: float | None = None
    temperature: float | None = None  # of a model that writes; 0: greedy
    weights: Which = "current"  # "reference": untrained, of a model opened with its base


AS_EVALUATED = Drawing()


@dataclass(frozen=True)
class LoadedModel:
    source: ModelSource
    model: Any  # of the recipe's family

    @property
    def recipe(self) -> AnyRecipe:
        return self.source.recipe

    @property
    def family(self) -> Family:
        return families.of(self.recipe)

    @property
    def writes(self) -> bool:
        """Whether it is a language model."""
        return self.gives_text

    @property
    def gives_text(self) -> bool:
        """Whether its samples are texts; else they are images."""
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
        """n samples of one prompt: images (PIL), or texts (str) of a language model, which may see
        the images of those files. By the evaluation settings of the recipe, except that several
        texts are not greedy: they would all be equal."""
        from PIL import Image

        drawing = Drawing(steps, guidance, temperature)
        samples = self.draw([self.ask(prompt, images)], [0] * n, sample_seeds(seed, n), drawing)
        return [s.response if self.gives_text else Image.fromarray(s.pixels) for s in samples]

    def ask(self, text: str, images: Sequence[str | Path | bytes] = ()) -> Prompt:
        """A prompt that a person typed, formed as the rows of the recipe's data are."""
        if images and not self.family.takes_images:
            raise UserError("this model draws; it takes no pictures to look at")
        return prompts.typed_prompt(text, images, self.recipe.data)

    def fitting(
        self, candidates: Sequence[Prompt], path: str, report: prompts.LoadReport
    ) -> list[Prompt]:
        """The rows of a file that the model takes; `report` names the others."""
        why = "do not fit the model"

        def unfit(prompt: Prompt) -> str | None:
            return self.family.unfit(self.model, prompt)

        return prompts.fit(candidates, unfit, path, report, why)

    def draw(
        self,
        prompts: Sequence[Prompt],
        row: Sequence[int],
        seeds: Sequence[int],
        drawing: Drawing = AS_EVALUATED,
        progress: Progress = SILENT,
        each: Callable[[Piece], object] = lambda piece: None,
    ) -> list[Sample]:
        """A sample of prompts[row[i]] from seeds[i] for every i. `each` is called with finished
        pieces while the rest is still being drawn."""
        spec = self.spec(drawing, several=len(set(row)) < len(row))
        self._check(prompts, spec, progress)
        progress.phase(f"{self.family.doing} with {self.source.name}", len(row))
        # No engine is started for a few samples.
        sampler = build.built_in_sampler(self.recipe, self.model)
        samples: dict[int, Sample] = {}
        for piece in sampler.sample(prompts, row, seeds, spec):
            samples |= zip(piece.index, piece.samples, strict=True)
            each(piece)
            progress.advance(len(piece.samples))
        return [samples[i] for i in range(len(row))]

    def spec(self, drawing: Drawing, several: bool) -> SampleSpec | ResponseSpec:
        options = {key: value for key, value in vars(drawing).items() if value is not None}
        weights = options.pop("weights")
        family = self.family
        for option in family.foreign_options:
            if option in options:
                (other,) = (f for f in families.BY_NAME.values() if f.name != family.name)
                raise UserError(
                    f"this model {family.name}; {option} is for models that {other.verb}, leave it "
                    "out"
                )
        section = self.recipe.eval
        if several and section.temperature == 0:
            section = section.model_copy(update={"temperature": 1.0})
        section = parse(Eval, section.model_dump() | options, "sampling")
        return build.algorithm(self.recipe).eval_spec(section, self.recipe.model, weights)

    def _check(self, prompts: Sequence[Prompt], spec: Any, progress: Progress) -> None:
        """Raises for what the model does not take. Notes the parts of prompts that it does not
        read, and prompts unlike those that a bundled model was trained on."""
        notes = self.family.check_prompts(self.model, prompts, spec)
        unlike = outside(self.source, prompts)
        for note in [*notes, *(unlike or self.family.truncated(self.model, prompts))]:
            progress.note(note)


def open_model(source: ModelSource, progress: Progress = SILENT, base: bool = False) -> LoadedModel:
    """`base`: keeps a copy of the untrained weights, to sample from these as well."""
    source.announce_code("model", "algorithm")
    with bars.loading(progress, source.name, source.recipe.model.path):
        model = build.model(_eager(source.recipe))
    if base:
        model.policy.snapshot("reference")
    if source.run is not None:
        table = f"{source.table}/"
        state, _ = source.run.load(source.step, table)
        weights = {name.removeprefix(table): tensor for name, tensor in state.items()}
        try:
            model.policy.load(weights)
        except ValueError as error:
            raise UserError(
                f"{source.run.path / 'config.toml'} does not match the checkpoint of step "
                f"{source.step}: {error}; restore config.toml, or the model that it names "
                f"({source.recipe.model.path})"
            ) from error
    return LoadedModel(source, model)


def _eager(recipe: AnyRecipe) -> AnyRecipe:
    """Compiles only where the recipe asks for it: that takes a minute, a few samples take less."""
    if recipe.model.compile is not None:
        return recipe
    eager = recipe.model.model_copy(update={"compile": False})
    return recipe.model_copy(update={"model": eager})


def sample_seeds(seed: int, n: int) -> list[int]:
    """Of n samples of one prompt, whatever other prompts there are."""
    return [seed_of(seed, "picture", i) for i in range(n)]
