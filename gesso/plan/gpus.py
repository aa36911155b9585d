"""The GPUs of `gpus.toml`, or of a file with the same keys."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from gesso.config import Strict
from gesso.config.tables import read_toml
from gesso.types import UserError

TABLE = Path(__file__).with_name("gpus.toml")
NODE = 8  # GPUs of a machine


class Gpu(Strict):
    name: str = ""
    memory: int = Field(ge=1)  # GB
    bf16: float = Field(gt=0)  # TFLOP/s, dense
    fp32: float = Field(gt=0)
    bandwidth: float = Field(gt=0)  # TB/s of its memory
    node: float = Field(gt=0)  # GB/s to the other GPUs of its machine
    network: float = Field(gt=0)  # GB/s to other machines
    price: float = Field(ge=0)  # dollars per hour

    def link(self, count: int) -> float:
        """Bytes per second between `count` GPUs."""
        return 1e9 * (self.node if count <= NODE else self.network)


def known() -> dict[str, Gpu]:
    return {name: Gpu(name=name, **values) for name, values in read_toml(TABLE).items()}


def find(name: str) -> Gpu:
    """A GPU of the table by its name, or of a TOML file with the keys of one."""
    if name.endswith(".toml"):
        return _read(Path(name))
    gpus = known()
    if name.lower() in gpus:
        return gpus[name.lower()]
    close = get_close_matches(name.lower(), gpus, 1)
    meant = f'did you mean "{close[0]}"? known: ' if close else "known: "
    raise UserError(
        f'--gpu "{name}" is not in the table; {meant}{", ".join(gpus)}; for another GPU pass a '
        "TOML file with the same keys"
    )


def _read(file: Path) -> Gpu:
    if not file.is_file():
        raise UserError(f"--gpu {file}: no such file")
    values: dict[str, Any] = read_toml(file)
    try:
        return Gpu.model_validate({"name": file.stem, **values}, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"--gpu {file}: {where}: {first['msg']}; expected the keys memory, bf16, fp32, "
            "bandwidth, node, network and price"
        ) from error
