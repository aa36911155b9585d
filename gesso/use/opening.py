"""Opens a model where it is sampled from: in this process, or in the workers of its run."""

from __future__ import annotations

from gesso.track.progress import SILENT, Progress
from gesso.use.loaded import SampledModel, eager, open_model
from gesso.use.source import ModelSource


def open_to_sample(
    source: ModelSource, progress: Progress = SILENT, base: bool = False, few: bool = False
) -> SampledModel:
    """Opens the model in worker processes if the recipe has several; for a `few` samples only if no
    process has all weights. `base`: as in `open_model`."""
    recipe = source.training
    if recipe is None or recipe.cluster.workers in (None, 1):
        return open_model(source, progress, base)
    if few and recipe.cluster.sharding is None:
        return open_model(source, progress, base)
    from gesso.cluster.placement import place_to_sample
    from gesso.use.in_workers import open_in_workers

    placement = place_to_sample(recipe)
    if placement.workers == 1:
        return open_model(source, progress, base)
    source.announce_code("model", "algorithm")
    return open_in_workers(source, eager(recipe), placement, progress, base)
