"""Makes torchvision importable beside a CPU build of torch, in vLLM's environment.

`make test-vllm` runs this on machines without a GPU. vLLM's vision-language models import
torchvision. The package index's x86 build is compiled against CUDA: its operators do not load, and
the import fails where it registers two of them. No image processor uses these two, so declaring
them is enough for the Python part of torchvision.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

IMPORT = [sys.executable, "-c", "import torchvision.transforms.v2"]
DECLARATIONS = """\
import torch

for _name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
"""


def main() -> None:
    if subprocess.run(IMPORT, capture_output=True).returncode == 0:
        return
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.origin is not None, "torchvision comes with vLLM"
    file = Path(spec.origin).parent / "_meta_registrations.py"
    file.write_text(DECLARATIONS + file.read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run(IMPORT, check=True)


if __name__ == "__main__":
    main()
