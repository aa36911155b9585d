"""The sections of a recipe: typed, frozen and strict.

A recipe is TOML. The sections below are fixed; `algorithm` and each `reward` have a `name` and
the options of the class of that name, which `build.py` looks up; `parsing.py` validates both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from gesso.config.base import MAX_FRAMES, MAX_LAG, MAX_SAMPLES, MAX_SIDE, MAX_STEPS, Named, Strict
from gesso.config.expect import Expect
from gesso.config.model import ModelSection
from gesso.config.reward import RewardEntry


class DataSource(Strict):
    """Where prompts come from; `data/readers.py` knows the formats."""

    path: str = Field(min_length=1)
    """A file, a folder, "folder@split" or "hub:owner/name@split"."""
    column: str | None = None
    """Column with the prompt. None: the first of `prompt`, `problem`, `message`, `messages`,
    `question` that exists."""
    images: str | None = None
    """Column with the prompt's images. None: `images` or `image`."""
    drop: list[str] = Field([])
    """Columns to skip when reading."""


class TrainDataSource(DataSource):
    weight: float = Field(1.0, gt=0)
    """Sampling weight of this source relative to the others."""


def _sources(value: Any) -> Any:
    """A single path is a list of one source."""
    if isinstance(value, list):
        return value
    if isinstance(value, str):
        return [{"path": value}]
    raise ValueError(
        f"expected a path in quotes, or a list of tables such as [[data.train]], got {value!r}"
    )


class Curriculum(Strict):
    """Draws prompts in proportion to the spread of their rewards when they were last sampled."""

    floor: float = Field(0.2, gt=0, le=1)
    """Share of draws that ignore the spread, so that no prompt is forgotten."""


def _curriculum(value: Any) -> Any:
    if isinstance(value, str) and value != "spread":
        raise ValueError(f'expected "spread" or a table, got "{value}"')
    return {} if value == "spread" else value


class Data(Strict):
    train: Annotated[list[TrainDataSource], BeforeValidator(_sources)] = Field(min_length=1)
    """Training prompts: a path, or one `[[data.train]]` table per source."""
    eval: Annotated[list[DataSource], BeforeValidator(_sources)] = Field(min_length=1)
    """Held-out prompts: a path, or one `[[data.eval]]` table per set. Sets are interleaved, so the
    first `eval.prompts` contain some of each."""
    groups: int = Field(48, ge=1, le=MAX_SAMPLES)
    """Prompts per step; each is sampled `algorithm.group` times."""
    curriculum: Annotated[Curriculum | None, BeforeValidator(_curriculum)] = None
    """"spread": prompts are drawn by how much can still be learned from them, the spread of their
    rewards when they were last sampled, instead of in passes. Or a table of options."""
    template: str | None = Field(None, min_length=1)
    """Jinja template applied to every prompt of a language model, or the path of a file with
    one."""
    system: str | None = Field(None, min_length=1)
    """System message for rows that have none."""


Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Strict):
    lr: float = Field(3e-4, ge=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), strict=False)
    """AdamW betas."""
    weight_decay: float = Field(1e-4, ge=0)
    """AdamW weight decay."""
    eps: float = Field(1e-8, gt=0)
    """AdamW epsilon."""
    max_norm: float = Field(1.0, gt=0)
    """Gradient norm for clipping."""
    warmup: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""


class Ema(Strict):
    decay: float = Field(0.9, ge=0, lt=1)
    """Maximum decay; the effective decay is lower during the first updates."""
    every: int = Field(8, ge=1)
    """Optimizer steps between EMA updates."""


class Learner(Strict):
    micro_batch: int = Field(8, ge=1)
    """Flow models: terms (sample × denoising step) per forward-backward pass. Changes memory and
    speed, not the gradient."""
    micro_tokens: int = Field(8192, ge=1)
    """Language models: tokens per forward-backward pass, prompts included. Responses are packed
    without padding."""
    ema: Ema | None = None
    """EMA settings. When set, evaluation, `sample` and `export` use the averaged weights."""


class Vllm(Strict):
    """Options of the engine "vllm"; the rest follows from the recipe."""

    gpu_memory: float = Field(0.4, gt=0, lt=1)
    """Fraction of GPU memory vLLM may use while sampling; it is released before the update."""
    enforce_eager: bool = False
    """Disable vLLM's compilation and CUDA graphs: faster start, slower generation. Always on for
    CPUs."""
    tensor_parallel: int = Field(1, ge=1)
    """Consecutive workers that share one engine and divide its model; divides `cluster.workers`, or
    `cluster.samplers` if it is set."""


class Sampler(Strict):
    batch: int = Field(16, ge=1, le=MAX_SAMPLES)
    """Images or responses generated at a time."""
    engine: Literal["built-in", "vllm", "data"] = "built-in"
    """Where training samples come from: "built-in", "vllm" for language models, or "data": the rows
    of `data.train` give them (SFT, offline DPO)."""
    vllm: Vllm = Vllm()
    """Options of the vLLM engine."""

    @model_validator(mode="after")
    def _possible(self) -> Sampler:
        if self.engine != "vllm" and self.vllm != Vllm():
            raise ValueError(f'sampler.vllm requires engine = "vllm", got "{self.engine}"')
        return self


def _workers(value: Any) -> Any:
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is None or value == "auto" or number:
        return value
    got = f'"{value}"' if isinstance(value, str) else str(value).lower()
    raise ValueError(f'expected a number of at least 1 or "auto", got {got}')


def _address(value: Any) -> Any:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if value in (None, "auto") or (host and "/" not in host and port.isdigit()):
        return value
    raise ValueError(f'expected "auto" or "HOST:PORT" of a Ray cluster, got "{value}"')


class Cluster(Strict):
    workers: Annotated[int | Literal["auto"] | None, BeforeValidator(_workers)] = None
    """Worker processes, one per device, which divide sampling and updates. "auto": one per visible
    GPU. None: no worker processes, or "auto" if `address` is set."""
    samplers: int = Field(0, ge=0)
    """Additional worker processes, on separate devices, that only sample; `workers` then only
    train. 0: workers do both."""
    address: Annotated[str | None, BeforeValidator(_address)] = None
    """A Ray cluster on which to start the workers: "auto" or "HOST:PORT". None: this machine."""
    sharding: Literal["base", "all"] | None = None
    """Shards the weights of the trained network over the workers with FSDP2. "base": the frozen
    weights below a LoRA. "all", for full fine-tuning: all weights, gradients, optimizer state and
    copies. None: every worker has all weights."""
    shard_within: int | None = Field(None, ge=1)
    """Shard within groups of this number of consecutive workers; each group has all weights. None:
    all workers are one group."""
    offload: bool = False
    """With sharding: keep the sharded weights in host memory, except for the block that runs."""
    patience: float = Field(1800.0, gt=0)
    """Seconds without a message after which a worker that has work counts as lost."""
    restarts: int = Field(0, ge=0)
    """How often the run continues with new workers after one was lost; the next loss stops it.
    Above 0 a snapshot is saved after every step, replacing the previous one, so that no step is
    repeated."""

    @model_validator(mode="before")
    @classmethod
    def _on_ray(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("address") and values.get("workers") is None:
            return values | {"workers": "auto"}
        return values


class Eval(Strict):
    every: int = Field(10, ge=0)
    """Steps between evaluations. 0: only before the first and after the last step."""
    prompts: int = Field(64, ge=1)
    """Number of held-out prompts used, counted from the first."""
    samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    """Samples per held-out prompt. Rewards that compare the samples of a prompt need at least 2."""
    shown: int = Field(24, ge=0)
    """Samples saved per evaluation, one per prompt."""
    steps: int = Field(40, ge=1, le=MAX_STEPS)
    """Flow models: denoising steps in evaluations."""
    guidance: float | None = Field(None, ge=0)
    """Flow models: guidance scale in evaluations; 1 disables guidance. None: as in training."""
    height: int | None = Field(None, ge=8, le=MAX_SIDE)
    """Flow models: height of the samples of evaluations. None: `model.height`."""
    width: int | None = Field(None, ge=8, le=MAX_SIDE)
    """Flow models: width of the samples of evaluations. None: `model.width`."""
    frames: int | None = Field(None, ge=1, le=MAX_FRAMES)
    """Flow models: frames of the videos of evaluations. None: `model.frames`."""
    temperature: float = Field(0.0, ge=0)
    """Language models: sampling temperature in evaluations; 0 is greedy."""


class Save(Strict):
    every: int = Field(10, ge=1)
    """Steps between checkpoints. The last step and an interrupted run are always saved."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep."""
    groups: int = Field(4, ge=0)
    """Training groups saved before each evaluation, to inspect in the viewer and for `gesso data
    pairs`. 0: none."""
    group_images: Literal["small", "full"] = "small"
    """Images of these groups: "small" (compressed, at most 256 pixels per side) or "full"."""
    background: bool | None = None
    """Write checkpoints during the next step, from a copy in host memory. None: on GPUs."""

    def in_background(self, device: str) -> bool:
        return device != "cpu" if self.background is None else self.background


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
    """Project or experiment name."""
    name: str | None = Field(None, min_length=1)
    """Run name. None: the name of the run folder."""
    offline: bool = False
    """W&B and SwanLab write files that can be uploaded later."""
    dir: str | None = Field(None, min_length=1)
    """Folder for tracker files. None: `trackers/` in the run folder."""
    uri: str | None = Field(None, min_length=1)
    """MLflow server or store. None: `MLFLOW_TRACKING_URI`, or a database in the run folder."""
    patience: float = Field(60.0, gt=0)
    """Seconds without a response after which a tracker is disabled; also the maximum wait at the
    end of a run."""


Reaction = Literal["stop", "lower_lr", "raise_kl"]


WARNINGS = (
    "clip-under-floor", "ratio-not-one", "flat-groups", "saturated", "old-samples",
    "clipping-most", "diversity", "reward-hacking", "truncated-responses", "longer-responses",
    "entropy-collapse", "constant-length", "kl-explodes", "sampler-mismatch", "idle-workers",
    "slow-worker",
)  # fmt: skip
"""Kinds of health warnings."""


def _reactions(given: Any) -> Any:
    if isinstance(given, str):
        given = {"reward-hacking": given}
    allowed = ", ".join(get_args(Reaction))
    if not isinstance(given, dict):
        raise ValueError(f"expected one of {allowed}, or a table of warnings and reactions")
    for kind, reaction in given.items():
        if reaction not in get_args(Reaction):
            raise ValueError(f'{kind}: expected one of {allowed}, got "{reaction}"')
    return given


class Recipe(Strict):
    about: str = ""
    """One-line description."""
    source: str = ""
    """Where the settings come from: paper or reference configuration."""
    seed: int = Field(0, ge=0)
    """Seed of everything random in the run."""
    steps: int = Field(100, ge=0)
    """Training iterations: sample, score, update."""
    lag: int = Field(0, ge=0, le=MAX_LAG)
    """Age of samples in updates. With k, batch i + k is scored during the update of batch i; with
    `cluster.samplers` it is also sampled then. 0: on-policy."""
    partial: bool = False
    """Language models, `lag` of at least 2: each step samples at most `max_tokens / lag` tokens per
    response; unfinished responses continue after the update with the new weights, so that long ones
    do not delay a step. Every token keeps its log-prob and the version of its weights."""
    max_failed: float = Field(0.2, ge=0, le=1)
    """Maximum fraction of a batch's scores that may fail before the run stops."""
    on_symptom: Annotated[dict[str, Reaction], BeforeValidator(_reactions)] = Field({})
    """Reactions to new health warnings, as in `on_symptom.reward-hacking="stop"`: "stop" saves the
    run and stops it, "lower_lr" halves the learning rate, "raise_kl" doubles the weight of the KL.
    `on_symptom="stop"` is short for the reaction to reward-hacking."""
    model: ModelSection
    """The model to train."""
    data: Data
    """Training and held-out prompts."""
    algorithm: Named
    """`name` and the options of that algorithm."""
    reward: list[RewardEntry] = Field([])
    """One `[[reward]]` table per reward, at least one. All keys other than those below are options
    of the reward itself. With `sampler.engine = "data"` for evaluations only."""
    eval_reward: list[RewardEntry] = Field([])
    """Rewards for evaluations, same format as `reward`. Empty: `reward`. A recipe or an override
    that sets `reward` does not inherit them."""
    optimizer: Optimizer = Optimizer()
    """AdamW settings."""
    learner: Learner = Learner()
    """Batching of the update, and EMA."""
    sampler: Sampler = Sampler()
    """Batching and engine of sampling."""
    cluster: Cluster = Cluster()
    """The processes that sample and train."""
    eval: Eval = Eval()
    """Evaluations: same prompts and seeds each time, without SDE noise."""
    save: Save = Save()
    """Checkpoints and saved samples."""
    track: Annotated[list[str], BeforeValidator(_all_named)] = Field(["console"])
    """Displays and trackers: "console", "tensorboard", "wandb", "swanlab", "mlflow", or
    "module:Name"."""
    tracker: Tracker = Tracker()
    """Options of the trackers."""
    expect: Expect | None = None
    """What the authors of the settings report; the viewer draws it behind the curve of a run. A
    recipe does not inherit it from its base."""

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows this step, counted from 1."""
        return step == self.steps or bool(self.eval.every and step % self.eval.every == 0)

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        for key, entries in (("reward", self.reward), ("eval_reward", self.eval_reward)):
            names = [entry.name if entry.alias is None else entry.alias for entry in entries]
            ramps = [entry.name for entry in entries if entry.ramp is not None]
            if key == "eval_reward" and ramps:
                raise ValueError(f'eval_reward "{ramps[0]}": evaluations have no ramp; remove it')
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(
                        f'{key} "{name}" is listed twice; merge the entries into one, or set alias '
                        "in one of them"
                    )
        offline = self.sampler.engine == "data" and self.eval_reward
        if not self.reward and not offline:
            raise ValueError("expected at least 1 item in reward; add a [[reward]] table")
        return self


class ChatSettings(Strict):
    """The template and system prompt, for a recipe without data."""

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
