"""What a family of models is to the rest of Gesso.

There are two: flow models through diffusers (`flow.py`) and language models through transformers
(`tokens.py`). Everything that differs between them is asked of these objects, so shared code names
neither family nor any of its classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gesso.config import AnyModel, AnyRecipe, Eval, FamilyName, Recipe
from gesso.types import Prompt

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.data.prompts import LoadedData
    from gesso.memory.meta import Load
    from gesso.models.tokens.critic import Critic
    from gesso.samplers.base import Sampler
    from gesso.track.progress import Progress


class Family(Protocol):
    """`Any` stands for a model of this family; `protocol` says which methods it has."""

    name: FamilyName
    section: type[AnyModel]  # of `[model]`
    models: Mapping[str, str]  # bundled names → "module:Class"
    verb: str  # "draw": for messages
    doing: str  # "drawing": for progress
    takes_images: bool  # whether a prompt may hold images
    foreign_options: Sequence[str]  # options of sampling that only the other family has
    default_algorithm: str  # of a folder that does not say how it was trained
    tight_clip: bool  # clip ranges can be as small as the rounding of replayed log-probs

    def protocol(self) -> type:
        """The methods that a model class of the user's must have."""

    def is_model(self, kind: type) -> bool:
        """Whether a class looks like a model of this family."""

    # Building

    def model(self, recipe: AnyRecipe) -> Any: ...

    def built_in_sampler(self, recipe: AnyRecipe, model: Any) -> Sampler:
        """Gesso's own loop over the model: denoising or decoding."""

    def sampler(self, recipe: Recipe, algorithm: Algorithm, model: Any) -> Sampler:
        """The engine that the recipe names."""

    def add_critic(
        self, recipe: Recipe, algorithm: Algorithm, model: Any
    ) -> tuple[Algorithm, Critic | None]:
        """The algorithm with the critic that it asks for, and that critic."""

    # Checking

    def check_model(self, recipe: AnyRecipe, where: str) -> None:
        """Raises for keys that a model of this family does not read."""

    def check(self, recipe: Recipe, algorithm: Algorithm, where: str) -> None:
        """Raises where the recipe and the options of its algorithm contradict each other."""

    def check_machine(self, recipe: Recipe, algorithm: Algorithm) -> None:
        """Raises for what this machine does not have. May import torch."""

    def notes(self, recipe: Recipe, algorithm: Algorithm) -> list[str]:
        """Remarks about settings that work and cost time."""

    def fit(
        self, recipe: Recipe, algorithm: Algorithm, model: Any, data: LoadedData, progress: Progress
    ) -> LoadedData:
        """The prompts that the model takes, with notes about the others. Raises where none of the
        settings fits the model."""

    # Describing

    def eval_section(self, recipe: AnyRecipe, algorithm: Algorithm) -> Eval:
        """The recipe's `[eval]` with the defaults that depend on the algorithm filled in."""

    def eval_cost(self, recipe: Recipe, algorithm: Algorithm) -> float:
        """Time of a sample of an evaluation, relative to one of training."""

    def network(self, model: Any) -> str:
        """What the trained network is called."""

    def library_kinds(self, name: str) -> Sequence[str]:
        """What diffusers or transformers calls the models that a bundled name loads."""

    def library(self, whole: bool) -> str:
        """What loads an export: all weights (`whole`), or an adapter."""

    def task(self, model: Any) -> str:
        """As the Hugging Face hub calls it."""

    def sees(self, model: Any) -> bool:
        """Whether it has a vision tower."""

    def wraps_library(self, model: Any) -> bool:
        """Whether the model is one of diffusers or transformers, with Gesso's class around it: of
        these the memory can be estimated, and an export runs without Gesso."""

    def memory_load(self, recipe: Recipe, algorithm: Algorithm, model: Any) -> Load:
        """What a run does with memory; the model is on torch's meta device."""

    # Sampling from a loaded model

    def unfit(self, model: Any, prompt: Prompt) -> str | None:
        """Why the model does not take a prompt, or None."""

    def check_prompts(self, model: Any, prompts: Sequence[Prompt], spec: Any) -> list[str]:
        """Raises for prompts and options that the model does not take; returns notes about parts of
        the prompts that these options leave unread."""

    def truncated(self, model: Any, prompts: Sequence[Prompt]) -> list[str]:
        """Notes about prompts whose end the model does not see."""
