"""SwanLab, online or to files that `swanlab sync` uploads later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gesso.track.samples import Shown
from gesso.track.trackers.base import Setup, caption, gif_of, image_of, score


class SwanLab:
    def __init__(self, setup: Setup) -> None:
        import swanlab

        self.dir = setup.run
        settings = swanlab.Settings(
            interactive=False,
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
            probe=swanlab.Settings.Probe(runtime=False, requirements=False, git=False),
        )
        self.run = swanlab.init(
            project=setup.settings.project,
            name=setup.name,
            log_dir=str(setup.folder),
            config=dict(setup.config),
            mode="offline" if setup.settings.offline else None,
            id=setup.id,
            resume="allow",
            settings=settings,
        )
        self.id = self.run.id
        self.where = _url(self.run) or str(setup.folder)

    def log(self, step: int, figures: Mapping[str, float], samples: Sequence[Shown]) -> None:
        self.run.log({**figures, **self._media(samples)}, step=step)

    def finish(self, ok: bool) -> None:
        self.run.finish("success") if ok else self.run.finish("crashed", "the run stopped")

    def _media(self, samples: Sequence[Shown]) -> dict[str, Any]:
        import swanlab

        images = [
            swanlab.Video(gif_of(self.dir, s), caption=caption(s))
            if s.video
            else swanlab.Image(image_of(self.dir, s), caption=caption(s))
            for s in samples
            if s.image
        ]
        texts = [
            swanlab.Text(f"{s.prompt}\n\n{s.response}\n\nexpected: {s.answer}", caption=score(s))
            for s in samples
            if not s.image
        ]
        return ({"samples": images} if images else {}) | ({"samples": texts} if texts else {})


def _url(run: Any) -> str | None:
    """None if it is offline, by the recipe or by SWANLAB_MODE."""
    try:
        return run.url
    except ValueError:
        return None
