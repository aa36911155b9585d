"""Networks on torch's meta device: shapes without values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

RANDOM = {nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}


class _Uninitialised(TorchFunctionMode):
    """Skips random initialisation: there are no values to set, but on the meta device torch takes
    longer for it than for the rest of a network."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in RANDOM:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """New tensors are created on the meta device."""
    with torch.device("meta"), _Uninitialised():
        yield
