"""Writes clips for SFT of the bundled video model: `python -m tools.zoo.make_clips`.

gesso/zoo/slides/clips.jsonl    prompts of the training list, each with a right video (MP4)
"""

import base64
import json

import numpy as np

from gesso.types import Prompt
from gesso.video_files import encode_mp4
from tools.zoo import video_rows
from tools.zoo.evaluate_videos import rendered
from tools.zoo.render_videos import to_bytes

FILE = video_rows.FOLDER / "clips.jsonl"
ROWS = 96
FPS = 8.0


def rows() -> list[dict[str, str]]:
    chosen = video_rows.rows("train")[:ROWS]
    videos = to_bytes(rendered([Prompt(row["prompt"], columns=row) for row in chosen]))
    return [row | {"video": mp4(video.numpy())} for row, video in zip(chosen, videos, strict=True)]


def mp4(frames: np.ndarray) -> str:
    return "data:video/mp4;base64," + base64.b64encode(encode_mp4(frames, FPS)).decode()


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(row) + "\n" for row in rows()))
