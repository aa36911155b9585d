"""Run folders as training leaves them, made in a moment: a real learner's state with weights that
were moved, rows of metrics, and samples of two evaluations."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from gesso import build
from gesso.learner.learner import Learner
from gesso.track.checkpoints import write_tensors
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, Sample, Score
from tests import tokens

STEPS = (2, 4)  # of the checkpoints
TOLD = "a red cat"
PROMPTS = Path(__file__).with_name("prompts.txt")


def moved(learner: Learner, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tables = [{n: p.data for n, p in learner.policy.trainable.items()}]
    tables += learner.policy.copies.values()
    for table in tables:
        for tensor in table.values():
            tensor += size * torch.randn(tensor.shape, generator=generator)


def make(data: dict[str, Any], folder: Path, size: float = 0.03) -> RunFolder:
    """Checkpoints of STEPS, each with weights of its own."""
    recipe = build.recipe_from(data)
    model, algorithm = build.model(recipe), build.algorithm(recipe)
    algorithm, critic = build.add_critic(recipe, algorithm, model)
    learner = Learner(model, algorithm, recipe.optimizer, recipe.learner, recipe.seed, critic)
    run = RunFolder.create(folder, recipe.model_dump())
    samples = evaluation(data)
    for k, step in enumerate((0, *STEPS)):
        run.append({"step": step, "reward": 0.2, "eval/reward": 0.25 + k / 4, "time/step": 1.0})
        run.save_samples(step, samples, [Score(k / 4, {"jpeg": k / 4})] * len(samples))
        if step:
            moved(learner, size, step)
            write = partial(write_tensors, state=learner.state())
            run.save(step, write, {"seed": recipe.seed}, keep=9)
    return run


def evaluation(data: dict[str, Any]) -> list[Sample]:
    import numpy as np

    name = data["model"]["name"]
    if name == "causal":
        return [Sample(Prompt("what is 3 + 4?"), None, 7, "it is 7")]
    if name == "vision-language":
        seen = Prompt("how many dots?", images=(tokens.picture(32, 48),))
        return [Sample(seen, None, 7, "<b>two</b> | `dots` ```")]
    image: np.ndarray = np.full((24, 16, 3), 90, dtype=np.uint8)
    return [Sample(Prompt(TOLD), image, 7), Sample(Prompt("oak"), 255 - image, 8)]


def draws(name: str, folder: Path, lora: bool, **model: Any) -> dict[str, Any]:
    """A recipe for one of tests/pipelines.py."""
    kind = {"sd35": "sd3", "flux-dev": "flux", "flux-schnell": "flux"}.get(name, name)
    section = {"name": kind, "path": str(folder), "height": 24, "width": 16, "text_length": 16}
    section |= {"lora": {"rank": 4, "alpha": 12}} if lora else {}
    scale = 1.0 if name == "flux-schnell" else 2.5
    return {
        "about": "A tiny one, for tests.",
        "model": section | model,
        "data": {"train": str(PROMPTS), "eval": str(PROMPTS), "groups": 2},
        "algorithm": {"name": "flow-grpo", "group": 2, "updates": 1, "guidance": scale},
        "reward": [{"name": "jpeg-compressibility"}],
        "eval": {"prompts": 3, "steps": 3},
        "learner": {"ema": {}},
    }


def signs(folder: Path) -> RunFolder:
    """A run of the bundled model that draws, with a LoRA, at two steps a picture."""
    size = {"path": "zoo:signs", "height": 32, "width": 96, "text_length": 0}
    return make(draws("sd3", folder, lora=True, **size) | {"eval": {"steps": 2}}, folder)


def writes(
    tiny: tokens.Tiny, lora: bool, algorithm: dict[str, Any], **model: Any
) -> dict[str, Any]:
    """A recipe for one of tests/tokens.py."""
    file = tiny.folder.parent / "questions.jsonl"
    file.write_text('{"prompt": "how many?", "answer": "3"}\n{"prompt": "and 3 + 4?"}\n')
    name = "vision-language" if tiny.sees else "causal"
    section: dict[str, Any] = {"name": name, "path": str(tiny.folder)}
    section |= {"lora": {"rank": 4, "alpha": 12}} if lora else {}
    return {
        "model": section | {"max_prompt": 256} | model,
        "data": {"train": str(file), "eval": str(file), "groups": 2},
        "algorithm": {"group": 2, "max_tokens": 12} | algorithm,
        "reward": [{"name": "format"}],
        "eval": {"prompts": 2},
        "learner": {"ema": {}},
    }
