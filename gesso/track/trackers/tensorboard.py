"""TensorBoard: event files in the run folder, for `tensorboard --logdir runs`.

Written with the classes of tensorboard: torch's writer would import torch a second time.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gesso.track.samples import Shown
from gesso.track.trackers.base import Setup, gif_of, image_of, score


class TensorBoard:
    def __init__(self, setup: Setup) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.run = setup.run
        self.id = setup.name
        # A folder shared by several runs needs one subfolder per run.
        self.where = str(setup.folder / setup.name if setup.settings.dir else setup.folder)
        self.writer = EventFileWriter(self.where)
        if setup.id is None:
            config = json.dumps(setup.config, indent=2)
            self._write(0, [_text("config", f"```json\n{config}\n```")])

    def log(self, step: int, figures: Mapping[str, float], samples: Sequence[Shown]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=value) for key, value in figures.items()]
        values += [_image(self.run, sample) for sample in samples if sample.image]
        values += [_text("samples", _table(samples))] if samples else []
        self._write(step, values)

    def finish(self, ok: bool) -> None:
        self.writer.close()

    def _write(self, step: int, values: Sequence[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        event = Event(step=step, wall_time=time.time(), summary=Summary(value=values))
        self.writer.add_event(event)
        self.writer.flush()


def _image(run: Path, sample: Shown) -> Any:
    """One tag per prompt, so that its slider shows the prompt over training; videos as GIF."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.image import metadata

    image, data = image_of(run, sample), io.BytesIO()
    image.save(data, "PNG")
    content = gif_of(run, sample) if sample.video else data.getvalue()
    about = metadata.create_summary_metadata(
        display_name="", description=sample.prompt, converted_to_tensor=False
    )
    shown = Summary.Image(
        width=image.width, height=image.height, colorspace=3, encoded_image_string=content
    )
    return Summary.Value(tag=f"samples/{sample.index:03d}", metadata=about, image=shown)


def _table(samples: Sequence[Shown]) -> str:
    lines = ["| | prompt | response | expected | reward |", "|-|-|-|-|-|"]
    for s in samples:
        cells = [f"{s.index:03d}", s.prompt, s.response, s.answer, score(s)]
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _text(tag: str, markdown: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text import metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    about = metadata.create_summary_metadata(display_name="", description="")
    return Summary.Value(tag=tag, metadata=about, tensor=make_tensor_proto([markdown.encode()]))
