"""A model in worker processes, as its run was trained: samples are generated on all devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gesso import families
from gesso.cluster import workers
from gesso.cluster.channel import pack_prompts, pack_spec
from gesso.cluster.collecting import Request
from gesso.cluster.placement import Placement
from gesso.config import Recipe, Sampler
from gesso.samplers.base import Piece
from gesso.track.progress import Progress
from gesso.types import Prompt, ResponseSpec, SampleSpec
from gesso.use.loaded import SampledModel, matching
from gesso.use.source import ModelSource

PARTS = 8
"""Into which samples are cut that would fit into one batch, for up to as many workers. It does not
depend on their number, so neither do the samples."""


@dataclass(frozen=True)
class ModelInWorkers(SampledModel):
    samplers: workers.Samplers

    def unfit(self, prompts: Sequence[Prompt]) -> list[str | None]:
        return self._ask("unfit", prompts, {})["reasons"]

    def inspect(
        self, prompts: Sequence[Prompt], spec: SampleSpec | ResponseSpec
    ) -> tuple[Sequence[str], Sequence[str]]:
        found = self._ask("inspect", prompts, {"spec": pack_spec(spec)})
        return found["notes"], found["truncated"]

    def _ask(self, task: str, prompts: Sequence[Prompt], content: dict[str, Any]) -> dict[str, Any]:
        processes = self.samplers.sampling
        return processes.one(0, task, content, pack_prompts(prompts, processes.same_machine))

    def pieces(
        self,
        prompts: Sequence[Prompt],
        row: Sequence[int],
        seeds: Sequence[int],
        spec: SampleSpec | ResponseSpec,
    ) -> Iterator[Piece]:
        batch = self.samplers.recipe.sampler.batch
        if len(row) <= batch:
            batch = -(-len(row) // PARTS)
        request = Request(prompts, row, seeds, spec, "", batch=batch)
        return self.samplers.generate(request)

    def close(self) -> None:
        self.samplers.sampling.close()


def open_in_workers(
    source: ModelSource, recipe: Recipe, placement: Placement, progress: Progress, base: bool
) -> ModelInWorkers:
    within = placement.sharded if 1 < placement.sharded < placement.workers else None
    cluster = {"workers": placement.workers, "samplers": 0, "shard_within": within}
    offline = recipe.sampler.engine == "data"  # its sampler generates, too; others are external
    changed = {
        "cluster": recipe.cluster.model_copy(update=cluster),
        "sampler": recipe.sampler if offline else Sampler(batch=recipe.sampler.batch),
    }
    recipe = recipe.model_copy(update=changed)
    processes = workers.start(recipe, placement, progress)
    try:
        folder = None if source.run is None else source.run.checkpoint(source.step)
        with matching(source):
            found = workers.checkpoint(processes, folder) if folder else {"folder": None}
            processes.all("use", {**found, "table": source.table, "base": base})
    except BaseException:
        processes.close()
        raise
    gathers = families.of(recipe).gathers_to_sample
    return ModelInWorkers(source, workers.Samplers(recipe, processes, gathers))
