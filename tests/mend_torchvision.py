"""Run by `make test-vllm` on machines without a GPU, with the Python of vLLM's environment.

vLLM's models that see import torchvision. The package index's build of it for x86 is compiled
against CUDA, so its operators do not load beside a CPU build of torch, and importing it fails where
it describes two of them that do not exist. No image processor uses them: declared, they may stay
empty, and all of torchvision that is written in Python works.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

IMPORT = [sys.executable, "-c", "import torchvision.transforms.v2"]
DECLARED = """\
import torch

for _name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
"""


def main() -> None:
    if subprocess.run(IMPORT, capture_output=True).returncode == 0:
        return
    found = importlib.util.find_spec("torchvision")
    assert found is not None and found.origin is not None, "torchvision comes with vLLM"
    file = Path(found.origin).parent / "_meta_registrations.py"
    file.write_text(DECLARED + file.read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run(IMPORT, check=True)


if __name__ == "__main__":
    main()
