"""A loaded model with everything that can be done with it: sample, evaluate, export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gesso.track.progress import SILENT, Progress
from gesso.use import evaluate, export
from gesso.use.loaded import AS_EVALUATED, Drawing, LoadedModel, open_model
from gesso.use.source import find


class Trained(LoadedModel):
    def evaluate(
        self,
        rewards: Sequence[str] = (),
        prompts: str | Path | Sequence[str] = (),
        n: int = 1,
        seed: int | None = None,
        first: int | None = None,
        drawing: Drawing = AS_EVALUATED,
        progress: Progress = SILENT,
    ) -> evaluate.Evaluation:
        """Draw and score held-out prompts. Rewards, prompts and seed are those of the recipe unless
        given: names of rewards, a prompt file or a list of prompts."""
        request = evaluate.EvaluationRequest(tuple(rewards), prompts, n, seed, first, drawing)
        return evaluate.evaluate(self, request, progress)

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
        return export.export(self, Path(folder), export.Form(merged, shard, dtype), progress)


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
    loaded = open_model(find(source, step, weights, overrides), progress)
    return Trained(loaded.source, loaded.model)
