"""A model with the weights of a run, a recipe or a folder: draw from it, score it, export it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso import build
from gesso.config import Eval, family
from gesso.config.parsing import parse
from gesso.data import prompts
from gesso.track import bars
from gesso.track.progress import SILENT, Progress
from gesso.types import (
    Prompt,
    ReplySpec,
    Sample,
    SampleSpec,
    UserError,
    Which,
    seed_of,
)
from gesso.use.notes import outside
from gesso.use.source import Source, find

if TYPE_CHECKING:
    from gesso.config import Recipe
    from gesso.models.flow.base import FlowModel
    from gesso.models.tokens.base import TokenModel
    from gesso.samplers.base import Piece
    from gesso.use.evaluate import Evaluation


@dataclass(frozen=True)
class Drawing:
    """How samples are drawn; None: as the recipe's evaluations."""

    steps: int | None = None  # of a model that draws
    guidance: float | None = None
    temperature: float | None = None  # of a model that writes; 0: greedy
    weights: Which = "current"  # "reference": untrained, of a model opened with its base


AS_EVALUATED = Drawing()


@dataclass(frozen=True)
class Trained:
    source: Source
    model: FlowModel | TokenModel

    @property
    def recipe(self) -> Recipe:
        return self.source.recipe

    @property
    def writes(self) -> bool:
        return family(self.recipe.model) == "writes"

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
        """n pictures (PIL) of one prompt; or of a model that writes n replies (str) to it and to
        the pictures of those files. By the recipe's evaluation settings, but that several replies
        are not greedy, which would all be the same."""
        from PIL import Image

        drawing = Drawing(steps, guidance, temperature)
        made = self.draw([self.ask(prompt, images)], [0] * n, picture_seeds(seed, n), drawing)
        return [s.reply if self.writes else Image.fromarray(s.picture) for s in made]

    def ask(self, text: str, images: Sequence[str | Path | bytes] = ()) -> Prompt:
        """A person's prompt, formed as the rows of the recipe's data are."""
        if images and not self.writes:
            raise UserError("this model draws; it takes no pictures to look at")
        return prompts.typed_prompt(text, images, self.recipe.data)

    def fitting(self, found: Sequence[Prompt], path: str, told: prompts.LoadReport) -> list[Prompt]:
        """Of the rows of a file those that a model that writes takes; the others are told."""
        why = "do not fit the model"
        return prompts.fit(found, lambda prompt: unfit(self.model, prompt), path, told, why)

    def draw(
        self,
        asked: Sequence[Prompt],
        row: Sequence[int],
        seeds: Sequence[int],
        drawing: Drawing = AS_EVALUATED,
        progress: Progress = SILENT,
        each: Callable[[Piece], object] = lambda piece: None,
    ) -> list[Sample]:
        """A sample of asked[row[i]] from seeds[i] for every i. `each` is called with finished
        pieces while the rest is still being drawn."""
        spec = self.spec(drawing, several=len(set(row)) < len(row))
        self._check(asked, spec, progress)
        doing = "writing" if self.writes else "drawing"
        progress.phase(f"{doing} with {self.source.name}", len(row))
        sampler = build.own_sampler(self.recipe, self.model)  # no engine is started for a few
        found: dict[int, Sample] = {}
        for piece in sampler.sample(asked, row, seeds, spec):
            found |= zip(piece.index, piece.samples, strict=True)
            each(piece)
            progress.advance(len(piece.samples))
        return [found[i] for i in range(len(row))]

    def spec(self, drawing: Drawing, several: bool) -> SampleSpec | ReplySpec:
        wrong = ("steps", "guidance") if self.writes else ("temperature",)
        said = {key: value for key, value in vars(drawing).items() if value is not None}
        weights = said.pop("weights")
        if odd := next((key for key in wrong if key in said), None):
            does, other = ("writes", "draw") if self.writes else ("draws", "write")
            raise UserError(f"this model {does}; {odd} is for models that {other}, leave it out")
        watched = self.recipe.eval
        if several and watched.temperature == 0:
            watched = watched.model_copy(update={"temperature": 1.0})
        watched = parse(Eval, watched.model_dump() | said, "sampling")
        return build.algorithm(self.recipe).eval_spec(watched, self.recipe.model, weights)

    def _check(self, asked: Sequence[Prompt], spec: Any, progress: Progress) -> None:
        """Raises for what the model cannot take; tells of what it does not read of a prompt, and of
        prompts that a bundled model was not trained on."""
        unknown = outside(self.source, asked)
        if self.writes:
            for prompt in asked:
                if reason := unfit(self.model, prompt):
                    raise UserError(f"{prompt.where}: {reason}")
            for told in unknown:
                progress.note(told)
            return
        from gesso.models.flow.base import check_guidance, over_long, unused_negatives

        model: Any = self.model
        check_guidance(model, spec.guidance, asked)
        these = "these" if len(asked) > 1 else "one"
        unused = unused_negatives(model, spec.guidance, asked, these, "guidance")
        for told in [*unused, *(unknown or over_long(model, asked, these))]:
            progress.note(told)

    def evaluate(
        self,
        rewards: Sequence[str] = (),
        prompts: str | Path | Sequence[str] = (),
        n: int = 1,
        seed: int | None = None,
        first: int | None = None,
        drawing: Drawing = AS_EVALUATED,
        progress: Progress = SILENT,
    ) -> Evaluation:
        """Draw and score held-out prompts. Rewards, prompts and seed are those of the recipe unless
        given: names of rewards, a prompt file or a list of prompts."""
        from gesso.use import evaluate

        asked = evaluate.Asked(tuple(rewards), prompts, n, seed, first, drawing)
        return evaluate.evaluate(self, asked, progress)

    def export(
        self,
        folder: str | Path,
        merged: bool = False,
        shard: str | None = None,
        dtype: str | None = None,
        progress: Progress = SILENT,
    ) -> Path:
        """LoRA in the format of diffusers or PEFT; or a whole pipeline or model, of a full
        fine-tune or with `merged`, the LoRA folded into its weights. With a model card."""
        from gesso.use.export import Form, export

        return export(self, Path(folder), Form(merged, shard, dtype), progress)


def load(
    source: str | Path,
    step: int | None = None,
    weights: str | None = None,
    overrides: Sequence[str] = (),
    progress: Progress = SILENT,
) -> Trained:
    """A run folder, at its newest checkpoint or at `step`, with its averaged weights where it has
    them or with `weights` ("ema", "current"); the untrained model of a recipe; or a folder that
    Gesso, diffusers or transformers saved. `overrides` change its recipe: `["eval.steps=20"]`."""
    return opened(find(source, step, weights, overrides), progress)


def opened(source: Source, progress: Progress = SILENT, base: bool = False) -> Trained:
    """`base`: the untrained weights are kept beside the trained ones, to be drawn from as well."""
    source.announce_code("model", "algorithm")
    with bars.loading(progress, source.name, source.recipe.model.path):
        model = build.model(_at_once(source.recipe))
    if base:
        model.policy.snapshot("reference")
    if source.run is not None:
        table = f"{source.table}/"
        state, _ = source.run.load(source.step, table)
        found = {name.removeprefix(table): tensor for name, tensor in state.items()}
        try:
            model.policy.load(found)
        except ValueError as error:
            raise UserError(
                f"{source.run.path / 'config.toml'} does not match the checkpoint of step "
                f"{source.step}: {error}; restore config.toml, or the model that it names "
                f"({source.recipe.model.path})"
            ) from error
    return Trained(source, model)


def _at_once(recipe: Recipe) -> Recipe:
    """Compiled where the recipe asks for it alone: a minute is long before a few pictures."""
    if recipe.model.compile is not None:
        return recipe
    eager = recipe.model.model_copy(update={"compile": False})
    return recipe.model_copy(update={"model": eager})


def picture_seeds(seed: int, n: int) -> list[int]:
    """Of n samples of one prompt, whatever else is asked for."""
    return [seed_of(seed, "picture", i) for i in range(n)]


def unfit(model: Any, prompt: Prompt) -> str | None:
    """Why a model that writes does not take this prompt, or None."""
    try:
        return too_many(model, model.length(prompt))
    except UserError as error:  # a picture too narrow, a token that stands for pictures
        return str(error).removeprefix(f"{prompt.where}: ")


def too_many(model: Any, tokens: int) -> str | None:
    if tokens <= model.max_prompt:
        return None
    return f"{tokens} tokens, more than model.max_prompt = {model.max_prompt}"
