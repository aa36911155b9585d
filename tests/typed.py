"""What a test knows of a thing and its type does not say, told to the type checker and to the run
alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from gesso.models.flow.pipeline import PipelineModel
    from gesso.models.tokens.transformer import TransformerModel

T = TypeVar("T")


def sure(kind: type[T], found: object) -> T:
    assert isinstance(found, kind), f"expected {kind.__name__}, got {found!r:.200}"
    return found


def drawing(model: object) -> PipelineModel:
    """A model that draws: a pipeline of diffusers."""
    from gesso.models.flow.pipeline import PipelineModel

    assert isinstance(model, PipelineModel)
    return model


def writing(model: object) -> TransformerModel:
    """A model that writes: a decoder of transformers."""
    from gesso.models.tokens.transformer import TransformerModel

    assert isinstance(model, TransformerModel)
    return model
