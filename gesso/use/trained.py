"""A loaded model that can be sampled from, evaluated and exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gesso.track.progress import SILENT, Progress
from gesso.use import evaluate, export
from gesso.use.loaded import AS_EVALUATED, LoadedModel, SamplingOptions, open_model
from gesso.use.source import find


class Trained(LoadedModel):
    def evaluate(
        self,
        rewards: Sequence[str] = (),
        prompts: str | Path | Sequence[str] = (),
        n: int | None = None,
        seed: int | None = None,
        first: int | None = None,
        settings: SamplingOptions = AS_EVALUATED,
        progress: Progress = SILENT,
    ) -> evaluate.Evaluation:
        """Sample and score held-out prompts. Rewards (names), prompts (a file or a list),
        samples per prompt and seed default to those of the recipe."""
        request = evaluate.EvaluationRequest(tuple(rewards), prompts, n, seed, first, settings)
        return evaluate.evaluate(self, request, progress)

    def export(
        self,
        folder: str | Path,
        merged: bool = False,
        shard: str | None = None,
        dtype: str | None = None,
        progress: Progress = SILENT,
    ) -> Path:
        """Save the LoRA in the format of diffusers or PEFT; or the whole pipeline or model after
        full fine-tuning, or with `merged`, which merges the LoRA into the base weights. With a
        model card."""
        return export.export(self, Path(folder), export.Form(merged, shard, dtype), progress)


def load(
    source: str | Path,
    step: int | None = None,
    weights: str | None = None,
    overrides: Sequence[str] = (),
    progress: Progress = SILENT,
) -> Trained:
    """Load a run folder at its newest checkpoint or at `step`, with `weights` ("ema", "current";
    default: averaged weights if it has any); the untrained model of a recipe; or a folder saved by
    Gesso, diffusers or transformers. `overrides` change its recipe: `["eval.steps=20"]`."""
    loaded = open_model(find(source, step, weights, overrides), progress)
    return Trained(loaded.source, loaded.model)
