"""Weights & Biases, online or to files that `wandb sync` uploads later."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from gesso.track.samples import Shown
from gesso.track.trackers.base import Setup, caption, image_of, image_path

# No error reports, no list of installed packages, no metadata about machine and command.
QUIET = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_X_SAVE_REQUIREMENTS": "false",
    "WANDB_X_DISABLE_META": "true",
}


class Wandb:
    def __init__(self, setup: Setup) -> None:
        os.environ |= QUIET | {"WANDB_X_STATS_PID": str(os.getppid())}  # of the run
        import wandb

        self.dir = setup.run
        self.run = wandb.init(
            project=setup.settings.project,
            name=setup.name,
            dir=str(setup.folder.parent),  # wandb creates a folder "wandb" in it
            config=dict(setup.config),
            mode="offline" if setup.settings.offline else None,
            id=setup.id,
            resume="allow",
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, save_code=False
            ),
        )
        self.id = self.run.id
        self.where = self.run.url or self.run.dir.removesuffix("/files")

    def log(self, step: int, figures: Mapping[str, float], samples: Sequence[Shown]) -> None:
        self.run.log({**figures, **self._media(samples)}, step=step, commit=True)

    def finish(self, ok: bool) -> None:
        self.run.finish(exit_code=0 if ok else 1)

    def _shown(self, sample: Shown) -> Any:
        import wandb

        if sample.video:
            path = image_path(self.dir, sample.video)
            return wandb.Video(path, caption=caption(sample), format="mp4")
        return wandb.Image(image_of(self.dir, sample), caption=caption(sample))

    def _media(self, samples: Sequence[Shown]) -> dict[str, Any]:
        import wandb

        images = [self._shown(s) for s in samples if s.image]
        if images or not samples:
            return {"samples": images} if images else {}
        table = wandb.Table(columns=["prompt", "image", "response", "expected", "reward"])
        for s in samples:
            image = wandb.Image(image_path(self.dir, s.shown[0])) if s.shown else None
            table.add_data(s.prompt, image, s.response, s.answer, s.reward)
        return {"samples": table}
