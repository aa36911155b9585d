"""The stages that bundled models for edits and videos share: a model that does its task well is
fine-tuned on mixtures with faulty samples, one trial per share, so that it often fails."""

import argparse
import shutil
from abc import ABC, abstractmethod
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, ClassVar

import torch

from tools.zoo.build import save_pipeline
from tools.zoo.evaluate_edits import SPLITS
from tools.zoo.fit import Log
from tools.zoo.make_signs import load_weights, weights_of


class Training(ABC):
    """Runs the stages of one model; they share the pipeline, the pool and the log."""

    name: ClassVar[str]  # of the bundled folder
    target: ClassVar[float]  # exact score on training words of a good trial

    def __init__(self, args: argparse.Namespace, pool: Pool) -> None:
        self.args, self.pool = args, pool
        args.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        if args.device.startswith("cuda"):
            use_plain_attention()
        self.log = Log(args.out / "log.jsonl")
        self.pipe = self.build().to(args.device)

    @abstractmethod
    def build(self) -> Any:
        """The pipeline that is trained."""

    @abstractmethod
    def train(self, stage: str, faulty: float, lr: float, steps: int, seconds: float) -> None:
        """Trains transformer and text encoders on this share of faulty samples."""

    @abstractmethod
    def score(self, folder: Path, split: str) -> Any:
        """Scores with a field `exact` of the model, which is saved in the folder."""

    def run_trials(self, seconds: float) -> None:
        """DIR/NAME-35 and so on; DIR/NAME is a copy of the one nearest to the target."""
        args, start, distances = self.args, weights_of(self.pipe), {}
        for faulty in args.faulty:
            name = f"{self.name}-{round(100 * faulty)}"
            load_weights(self.pipe, start)
            self.train(name, faulty, args.lr / 3, args.tune_steps, seconds)
            if (exact := self.finish(name)) is not None:
                distances[name] = abs(exact - self.target)
        if distances:
            nearest = min(distances, key=lambda name: distances[name])
            shutil.copytree(args.out / nearest, args.out / self.name, dirs_exist_ok=True)

    def finish(self, name: str) -> float | None:
        """Saves the model and its scores; returns the exact score on training words."""
        folder = self.args.out / name
        save_pipeline(self.pipe, folder)
        if not self.args.rows:
            return None
        splits = {split: self.score(folder, split) for split in SPLITS}
        for split, scores in splits.items():
            self.log.write(f"{split} {name}", **scores._asdict())
        exact: float = splits["train"].exact
        return exact


def use_plain_attention() -> None:
    """With autocast and torch's choice of kernels the first step ended with an illegal memory
    access on an H200; which kernel is not known. At 108 tokens plain attention is cheap."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
