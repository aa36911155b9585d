"""The sections of a recipe: typed, frozen and strict.

A recipe is TOML. The sections below are fixed; `algorithm` and each `reward` have a `name` and
the options of the class of that name, which `build.py` looks up; `parsing.py` validates both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from gesso.config.bundled import FAMILIES, MODELS, FamilyName
from gesso.types import UserError

if TYPE_CHECKING:
    import torch

PACKAGE = Path(__file__).parent.parent
ZOO = "zoo:"
"""Prefix of paths inside the package: "zoo:signs" is a bundled model."""

MAX_SIDE = 16_384  # pixels
MAX_STEPS = 1_000  # denoising steps; flow models are trained with as many timesteps
MAX_SAMPLES = 1_000_000  # in memory at once

Dtype = Literal["float32", "bfloat16", "float16"]


class Strict(BaseModel):
    """Frozen, no unknown keys, no silent conversion from text to number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Lora(Strict):
    rank: int = Field(32, ge=1)
    alpha: int = Field(64, ge=1)
    targets: list[str] | None = None  # None: the model's own list
    path: str | None = None  # start from this adapter, in diffusers' format


class AnyModel(Strict):
    """Keys that the sections of both families share."""

    family_name: ClassVar[FamilyName]
    output: ClassVar[Literal["image", "text"]]  # what a sample is

    name: str
    path: str
    dtype: Dtype = "float32"
    device: str = "auto"
    quantize: Literal["nf4"] | None = None  # the large frozen parts in 4 bits
    gradient_checkpointing: bool = False  # activations are computed again instead of kept
    lora: Lora | None = None  # None: full fine-tuning
    compile: bool | None = None  # block by block; None: where it pays
    fold: bool | None = None  # LoRA into the weights while these are frozen; None: where it pays
    family: FamilyName | None = None  # of a model of your own; None: by its class

    @model_validator(mode="after")
    def _possible(self) -> AnyModel:
        if self.family not in (None, self.family_name):
            raise ValueError(
                f'family = "{self.family}", but name = "{self.name}" is a {self.family_name} '
                "model; remove family"
            )
        if self.quantize is not None and self.lora is None:
            raise ValueError(
                f'quantize = "{self.quantize}" freezes the weights, so only a LoRA can be trained; '
                "set model.lora.rank"
            )
        if self.fold and (self.lora is None or self.quantize is not None):
            raise ValueError(
                "fold = true needs a LoRA and weights that are not quantized; set model.lora.rank "
                "and remove quantize, or remove fold"
            )
        if self.compile and self.quantize is not None:
            raise ValueError(
                f'compile = true does not support quantize = "{self.quantize}"; remove one of them'
            )
        return self


class Model(AnyModel):
    """A flow model."""

    family_name: ClassVar[FamilyName] = "flow"
    output: ClassVar[Literal["image", "text"]] = "image"

    name: str = "sd3"
    height: int = Field(512, ge=8, le=MAX_SIDE)
    width: int = Field(512, ge=8, le=MAX_SIDE)
    text_length: int | None = Field(None, ge=0)  # tokens of a prompt; None: the model's own


class TokenModel(AnyModel):
    """A language or vision-language model."""

    family_name: ClassVar[FamilyName] = "language"
    output: ClassVar[Literal["image", "text"]] = "text"

    name: str = "vision-language"
    max_prompt: int = Field(2048, ge=1)  # tokens; longer prompts are left out, and counted
    min_pixels: int | None = Field(None, ge=1)  # of a picture; None: the image processor's own
    max_pixels: int | None = Field(None, ge=1)
    train_vision: bool = False  # the vision tower too; frozen, it sees each picture once

    @model_validator(mode="after")
    def _bounded(self) -> TokenModel:
        low, high = self.min_pixels, self.max_pixels
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_pixels = {low} must be at most max_pixels = {high}")
        return self


class DataSource(Strict):
    """Where prompts come from; `data/readers.py` knows the formats."""

    path: str = Field(min_length=1)
    column: str | None = None  # that holds the prompt; None: the first that data/rows.py knows
    images: str | None = None  # that holds the pictures; None: "images" or "image"
    drop: list[str] = []  # columns that are not read


class TrainDataSource(DataSource):
    weight: float = Field(1.0, gt=0)  # how often it is drawn, relative to the other sources


def _sources(value: Any) -> Any:
    """A single path is a list of one source."""
    if isinstance(value, list):
        return value
    if isinstance(value, str):
        return [{"path": value}]
    raise ValueError(
        f"expected a path in quotes, or a list of tables such as [[data.train]], got {value!r}"
    )


class Data(Strict):
    train: Annotated[list[TrainDataSource], BeforeValidator(_sources)] = Field(min_length=1)
    eval: Annotated[list[DataSource], BeforeValidator(_sources)] = Field(min_length=1)
    groups: int = Field(48, ge=1, le=MAX_SAMPLES)  # prompts a step
    template: str | None = Field(None, min_length=1)  # jinja, or a file of it, around the question
    system: str | None = Field(None, min_length=1)  # the message before it, where a row has none


Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Strict):
    lr: float = Field(3e-4, ge=0)
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), strict=False)  # TOML has lists only
    weight_decay: float = Field(1e-4, ge=0)
    eps: float = Field(1e-8, gt=0)
    max_norm: float = Field(1.0, gt=0)  # of the gradient
    warmup: int = Field(0, ge=0)  # optimizer steps of linear warm-up


class Ema(Strict):
    decay: float = Field(0.9, ge=0, lt=1)
    every: int = Field(8, ge=1)  # optimizer steps


class Learner(Strict):
    micro_batch: int = Field(8, ge=1)  # terms (sample × step) a forward-backward pass
    micro_tokens: int = Field(8192, ge=1)  # the same for models that write: tokens, prompts too
    ema: Ema | None = None  # evaluation and export use the averaged weights when there are any


class Vllm(Strict):
    """Options of the engine "vllm"; the rest follows from the recipe."""

    gpu_memory: float = Field(0.4, gt=0, lt=1)  # share of the GPU that it has while it samples
    enforce_eager: bool = False  # no compiling, no CUDA graphs: starts sooner, writes slower


class Sampler(Strict):
    batch: int = Field(16, ge=1, le=MAX_SAMPLES)  # pictures drawn, or responses written, at a time
    engine: Literal["built-in", "vllm"] = "built-in"
    vllm: Vllm = Vllm()

    @model_validator(mode="after")
    def _possible(self) -> Sampler:
        if self.engine != "vllm" and self.vllm != Vllm():
            raise ValueError(f'sampler.vllm requires engine = "vllm", got "{self.engine}"')
        return self


class Eval(Strict):
    every: int = Field(10, ge=0)  # steps; 0: only before and after
    prompts: int = Field(64, ge=1)
    shown: int = Field(24, ge=0)  # pictures kept of each evaluation
    steps: int = Field(40, ge=1, le=MAX_STEPS)  # of a model that draws
    guidance: float | None = Field(None, ge=0)  # the same; None: as in training
    temperature: float = Field(0.0, ge=0)  # of a model that writes; 0: greedy


class Save(Strict):
    every: int = Field(10, ge=1)
    keep: int = Field(2, ge=1)
    groups: int = Field(4, ge=0)  # of a training step before each evaluation, kept to look at


def _all_named(value: Any) -> Any:
    """Rejects a single name: it could mean "in addition to the console" or "instead of it"."""
    if isinstance(value, str):
        with_display = '["console"]' if value == "console" else f'["console", "{value}"]'
        raise ValueError(
            f'expected a list of all displays and trackers, got "{value}"; write track = '
            f"{with_display}, without console for a run without a display"
        )
    return value


class Tracker(Strict):
    """Options of the services of `track`; each takes those that it knows."""

    project: str = Field("gesso", min_length=1)
    name: str | None = Field(None, min_length=1)  # of the run; None: its folder's
    offline: bool = False  # W&B and SwanLab write files, which can be uploaded later
    dir: str | None = Field(None, min_length=1)  # for their files; None: in the run folder
    uri: str | None = Field(None, min_length=1)  # MLflow's store; None: MLFLOW_TRACKING_URI, or
    # a database in the run folder
    patience: float = Field(60.0, gt=0)  # seconds without an answer until one is switched off


class Named(BaseModel):
    """A name and the options that belong to it; what the options may be, `build.py` knows."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


def web_addresses(urls: list[str]) -> list[str]:
    for url in urls:
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", url):
            raise ValueError(f'"{url}" is not a URL; expected one such as http://127.0.0.1:8000')
    return urls


Urls = Annotated[list[str], AfterValidator(web_addresses)]


class RemoteEntry(Strict):
    """Servers that score: `gesso serve-reward`, or others that speak one of the protocols."""

    urls: Urls = Field(min_length=1)
    protocol: Literal["gesso", "openrlhf"] = "gesso"
    token_env: str | None = None  # the environment variable that holds the token
    timeout: float = Field(60.0, gt=0)  # seconds of one attempt
    retries: int = Field(6, ge=0)
    in_flight: int = Field(16, ge=1)  # requests at a time, for each server
    batch: int = Field(4, ge=1)  # samples a request


class RewardEntry(Named):
    weight: float = Field(1.0, ge=-1e9, le=1e9)
    style: Literal["gesso", "easyr1", "openrlhf", "trl"] = "gesso"  # how a function is called
    workers: int = Field(1, ge=1, le=1024)  # processes
    patience: float = Field(300.0, gt=0)  # seconds a worker may take for a few samples
    optional: bool = False  # prompts it cannot score are left to the other rewards
    cache: bool = True  # the same sample is scored once; off for rewards that are random
    remote: RemoteEntry | None = None  # None: it runs here

    @property
    def label(self) -> str:
        """Its name in metrics, where "/" separates a reward from its details: of a path the last
        folder and the file, "rewards/math.py:score" → "rewards.math:score"."""
        place, colon, function = self.name.rpartition(":")
        path = place if colon else function
        parts = [p for p in path.removesuffix(".py").split("/") if p not in ("", ".", "..", "~")]
        return ".".join(parts[-2:]) + (f":{function}" if colon else "")

    @model_validator(mode="after")
    def _nameable(self) -> RewardEntry:
        if not self.name.isprintable() or not self.label.strip():
            raise ValueError(f"name = {self.name!r:.60}: expected a name of printable characters")
        if self.label in ("reward", "failed", "std", "max", "at_max"):
            raise ValueError(f'name = "{self.name}": this name is reserved for another metric')
        return self


def family(section: Any) -> FamilyName:
    """The family of a `[model]` section, parsed or not. For a bundled model the name decides; a
    user's model whose section has no `family` counts as a flow model, as in run folders written
    before the key existed."""
    if isinstance(section, AnyModel):
        return section.family_name
    if not isinstance(section, Mapping):
        return "flow"
    name, stated = section.get("name"), section.get("family")
    if isinstance(name, str) and name in MODELS:
        return MODELS[name].family
    return stated if stated in FAMILIES else "flow"


Draws = Annotated[Model, Tag("flow")]
Writes = Annotated[TokenModel, Tag("language")]
ModelSection = Annotated[Draws | Writes, Discriminator(family)]


class Recipe(Strict):
    about: str = ""
    source: str = ""  # where the settings come from
    seed: int = Field(0, ge=0)
    steps: int = Field(100, ge=0)
    lag: Literal[0, 1] = 0  # 0: on-policy; 1: samples may be one update old
    max_failed: float = Field(0.2, ge=0, le=1)  # share of a batch's scores that may fail
    model: ModelSection
    data: Data
    algorithm: Named
    reward: list[RewardEntry] = Field(min_length=1)
    eval_reward: list[RewardEntry] = []  # what evaluations are scored by; none: `reward`
    optimizer: Optimizer = Optimizer()
    learner: Learner = Learner()
    sampler: Sampler = Sampler()
    eval: Eval = Eval()
    save: Save = Save()
    track: Annotated[list[str], BeforeValidator(_all_named)] = ["console"]  # displays and trackers
    tracker: Tracker = Tracker()

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        for key, entries in (("reward", self.reward), ("eval_reward", self.eval_reward)):
            names = [entry.name for entry in entries]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f'{key} "{name}" is listed twice; merge the entries into one')
        return self


class ChatSettings(Strict):
    """What stands around a question, where there are no data."""

    template: str | None = Field(None, min_length=1)
    system: str | None = Field(None, min_length=1)


class ModelRecipe(Strict):
    """What it takes to load a model and to sample from it: a recipe without training. Folders that
    Gesso did not write have no more."""

    seed: int = Field(0, ge=0)
    model: ModelSection
    data: ChatSettings = ChatSettings()
    algorithm: Named
    learner: Learner = Learner()
    sampler: Sampler = Sampler()
    eval: Eval = Eval()


AnyRecipe = Recipe | ModelRecipe


def resolve_path(path: str) -> Path:
    """`zoo:…` → inside the package; any other path unchanged, apart from `~`."""
    if path.startswith(ZOO):
        return PACKAGE / "zoo" / path.removeprefix(ZOO)
    return Path(os.path.expanduser(path))


def pick_device(name: str, key: str = "device") -> torch.device:
    """`auto` is CUDA if available. `key` is the recipe's key, for the error about a device that
    cannot be used."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:  # each backend raises its own type
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise UserError(f'{key} = "{name}" is not available: {reason:.160}') from error
    return device
