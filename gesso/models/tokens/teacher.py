"""A second, frozen language model that scores the responses of the trained one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gesso import config
from gesso.models.located import TRANSFORMER, locate
from gesso.models.tokens.transformer import TransformerModel
from gesso.models.tokens.vision_language import VisionLanguage
from gesso.traces.tokens import TokenTrace
from gesso.types import UserError

KEY = "algorithm.teacher.path"
UNTRAINED = config.Lora(rank=1, alpha=1)
"""Without it a model is loaded for full fine-tuning, in float32. It is always switched off."""
IMAGE_SETTINGS = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")


class FrozenTeacher:
    """Its distribution is over the tokens that the student may sample."""

    def __init__(self, network: TransformerModel) -> None:
        self.network = network

    def logp(self, trace: TokenTrace, temperature: float) -> Tensor:
        """(n, S) float32, 0 outside the responses."""
        return self.network.logp(trace, temperature, "reference").logp


def make_teacher(student: TransformerModel, section: config.TokenModel, path: str) -> FrozenTeacher:
    """Another model of the student's class, in the student's precision."""
    changes = {"path": path, "lora": UNTRAINED, "fold": False, "gradient_checkpointing": False}
    with _as_teacher():
        teacher = type(student)(section.model_copy(update=changes))
    where = f'{KEY} = "{path}"'
    _check_vocabulary(student, teacher, where)
    if isinstance(student, VisionLanguage) and isinstance(teacher, VisionLanguage):
        _check_images(student, teacher, where)
    teacher.suppressed = _suppressed(student, len(teacher.allowed)).to(teacher.device)
    return FrozenTeacher(teacher)


def check_path(section: config.TokenModel, path: str) -> None:
    """Raises if there is no such model, before the student is loaded."""
    with _as_teacher():
        locate(section.model_copy(update={"path": path}), TRANSFORMER)


@contextmanager
def _as_teacher() -> Iterator[None]:
    """Errors name the key of the teacher."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.path", KEY)) from error


def _check_vocabulary(student: TransformerModel, teacher: TransformerModel, where: str) -> None:
    """Raises unless every token has the same id in both models."""
    own, theirs = (model.tokenizer.get_vocab() for model in (student, teacher))
    if own == theirs:
        return
    different = {word for word in own.keys() | theirs if theirs.get(word) != own.get(word)}
    token = min(different, key=lambda word: own.get(word, len(own)))
    raise UserError(
        f"{where} has another vocabulary than the student: {len(theirs)} tokens, expected "
        f"{len(own)}, and {token!r} is {theirs.get(token, 'missing')}, expected "
        f"{own.get(token, 'missing')}; use a teacher of the same family of models"
    )


def _check_images(student: VisionLanguage, teacher: VisionLanguage, where: str) -> None:
    for name in IMAGE_SETTINGS:
        own, theirs = (getattr(model.images, name) for model in (student, teacher))
        if own != theirs:
            raise UserError(
                f"{where} prepares images differently: {name} = {theirs}, expected {own} as for "
                "the student; use a teacher of the same family of models"
            )


def _suppressed(student: TransformerModel, rows: int) -> Tensor:
    """Which of `rows` ids the student cannot sample: both models may pad their vocabulary."""
    beyond = range(len(student.allowed), rows)
    ids = {*student.suppressed_ids(), *beyond}
    return torch.tensor(sorted(i for i in ids if i < rows), dtype=torch.long)
