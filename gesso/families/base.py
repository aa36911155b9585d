"""The interface of a model family.

There are two: flow models through diffusers (`flow.py`) and language models through transformers
(`tokens.py`). Everything that differs between them goes through these objects, so that shared code
depends on neither family nor its classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gesso.config import AnyModel, AnyRecipe, Eval, FamilyName, Recipe, Strict
from gesso.types import Prompt

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.data.prompts import LargestPrompt, LoadedData
    from gesso.memory.meta import Load
    from gesso.models.tokens.critic import Critic
    from gesso.samplers.base import Sampler
    from gesso.track.progress import Progress


@dataclass(frozen=True)
class BatchSize:
    """A size that changes memory and speed, not the result of an update."""

    keys: Sequence[str]  # of the recipe; all have the same value
    values: Sequence[int]  # sensible ones, ascending


class Family(Protocol):
    """`Any` is a model of this family; `protocol` returns its type."""

    name: FamilyName
    section: type[AnyModel]  # of `[model]`
    models: Mapping[str, str]  # bundled names → "module:Class"
    activity: str  # "generating images": for progress
    gathers_to_sample: bool  # whether sampling needs all weights of a sharded model on each worker
    foreign_options: Sequence[str]  # sampling options that only the other family has
    default_algorithm: str  # for a folder without a recipe
    tight_clip: bool  # clip ranges can be as small as the rounding error of replayed log-probs

    def protocol(self) -> type:
        """The protocol that a user's model class must implement."""

    def is_model(self, kind: type) -> bool:
        """Whether a class looks like a model of this family."""

    # Building

    def model(self, recipe: AnyRecipe) -> Any: ...

    def built_in_sampler(self, recipe: AnyRecipe, model: Any) -> Sampler:
        """Gesso's denoising or decoding loop over the model."""

    def sampler(self, recipe: Recipe, algorithm: Algorithm, model: Any) -> Sampler:
        """The engine that the recipe selects."""

    def add_critic(
        self, recipe: Recipe, algorithm: Algorithm, model: Any
    ) -> tuple[Algorithm, Critic | None]:
        """The algorithm with its critic, and the critic; None for an algorithm without one."""

    # Checking

    def check_model(self, recipe: AnyRecipe, where: str) -> None:
        """Raises for keys that a model of this family does not use."""

    def check(self, recipe: Recipe, algorithm: Algorithm, where: str) -> None:
        """Raises if the recipe and the options of its algorithm contradict each other."""

    def check_machine(self, recipe: Recipe, algorithm: Algorithm) -> None:
        """Raises for requirements that this machine does not meet. May import torch."""

    def notes(self, recipe: Recipe, algorithm: Algorithm) -> list[str]:
        """Notes about settings that are valid but slow, or unusual."""

    def fit(
        self, recipe: Recipe, algorithm: Algorithm, model: Any, data: LoadedData, progress: Progress
    ) -> LoadedData:
        """The prompts that the model accepts, with notes about the others. Raises for settings that
        do not fit the model."""

    # Describing

    def algorithm_defaults(self, recipe: AnyRecipe, kind: type) -> Mapping[str, Strict]:
        """Subsections that an algorithm of this class has unless the recipe sets them: those that
        depend on the rest of the recipe."""

    def eval_section(self, recipe: AnyRecipe, algorithm: Algorithm) -> Eval:
        """The recipe's `[eval]` with the defaults that depend on the algorithm filled in."""

    def eval_cost(self, recipe: Recipe, algorithm: Algorithm) -> float:
        """Time per sample in evaluation, relative to training."""

    def network(self, model: Any) -> str:
        """The name of the trained network, for messages."""

    def library_kinds(self, name: str) -> Sequence[str]:
        """The pipeline classes of diffusers or model types of transformers that a bundled name
        loads."""

    def library(self, whole: bool) -> str:
        """The library that loads an export: all weights (`whole`), or an adapter."""

    def task(self, model: Any) -> str:
        """The pipeline tag of the Hugging Face Hub."""

    def sees(self, model: Any) -> bool:
        """Whether its prompts may contain images."""

    def wraps_library(self, model: Any) -> bool:
        """Whether the class wraps a model of diffusers or transformers. The memory of such models
        can be estimated, and their exports run without Gesso."""

    def assumed_prompts(self, recipe: Recipe, largest: LargestPrompt | None) -> str:
        """What a memory estimate assumes about the prompts, given the largest of the data or, if it
        cannot be read, None. Empty if the memory does not depend on the prompts."""

    def batch_sizes(self, recipe: Recipe, algorithm: Algorithm) -> Sequence[BatchSize]:
        """The sizes that can be fitted to a GPU."""

    def memory_load(self, recipe: Recipe, algorithm: Algorithm, model: Any) -> Load:
        """The memory and the work of a run; the model is on torch's meta device."""

    # Sampling from a loaded model

    def unfit(self, model: Any, prompt: Prompt) -> str | None:
        """Why the model does not accept a prompt, or None."""

    def check_prompts(self, model: Any, prompts: Sequence[Prompt], spec: Any) -> list[str]:
        """Raises for prompts and options that the model does not accept; returns notes about parts
        of the prompts that these options ignore."""

    def truncated(self, model: Any, prompts: Sequence[Prompt]) -> list[str]:
        """Notes about prompts that the model truncates."""
