"""Records shared by all packages: inputs (Prompt, specs), results (Sample, Score), errors. Records
of how samples were generated are in traces/."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NewType, TypeVar

from gesso.image_files import ImageFault, check_pixels, fitted, read_rgb, read_size

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from torch import Tensor

TeacherName = NewType("TeacherName", str)
"""Name of a copy that holds the weights of a teacher; `teacher_name` makes it."""

Which = Literal["current", "old", "reference", "renewed", "ema"] | TeacherName
"""Which weights of the policy a forward pass uses."""


def teacher_name(name: str) -> TeacherName:
    """Copies of teachers have a prefix, so that no teacher is called like another copy."""
    return TeacherName(f"teacher:{name}")


Weights = Mapping[str, "Tensor"]
"""The trained tensors by name; a transfer with a missing or extra name raises."""


class UserError(ValueError):
    """An error that the user can fix; one sentence: expected, got, where, what to do."""


class StopRun(RuntimeError):
    """The run cannot continue usefully; `--resume` continues from what was saved."""


class WorkerLost(StopRun):
    """A worker process has ended or does not answer."""

    def __init__(self, reason: str, rank: int) -> None:
        super().__init__(reason)
        self.rank = rank


def out_of_memory(error: BaseException) -> str | None:
    """One sentence for an out-of-memory error, None for any other error."""
    text = str(error)
    known = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc")
    if not isinstance(error, MemoryError) and not any(words in text for words in known):
        return None
    reason = text.splitlines()[0] if text else type(error).__name__
    return (
        f"out of memory ({reason:.200}); lower sampler.batch, learner.micro_batch or the size of "
        "the samples; `gesso check RECIPE --memory` estimates the memory of a recipe"
    )


def bad_text(text: str) -> str | None:
    """Why a text cannot be encoded or used in a path, or None."""
    if "\0" in text:
        return "has a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8 also become lone surrogates
        return "is not valid Unicode (it has a lone surrogate)"
    return None


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else: (run seed, step, sample…)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


def groupwise(function: Function) -> Function:
    """Marks a reward function that compares the samples of a prompt: it gets all of them at
    once."""
    function.groupwise = True  # type: ignore[attr-defined]
    return function


def eval_seed(seed: int, prompt: int, sample: int) -> int:
    """The seed of a sample of a held-out prompt: the same in training and in `gesso eval`."""
    return seed_of(seed, "eval", prompt, sample) if sample else seed_of(seed, "eval", prompt)


@dataclass(frozen=True)
class PromptImage:
    """An image of a row, not yet decoded: the path of a file, or its content."""

    kind: ClassVar[str] = "image"

    path: str = ""
    data: bytes = field(default=b"", repr=False)

    def open(self) -> Image:
        """The decoded image, as RGB and upright; see `image_files.read_rgb`."""
        return self._read(read_rgb)

    def fitted(self, height: int, width: int) -> np.ndarray:
        """(height, width, 3) uint8: cropped and resized, see `image_files.fitted`."""
        import numpy as np

        return np.asarray(fitted(self.open(), height, width))

    @cached_property
    def size(self) -> tuple[int, int]:
        """Height and width of the upright image, without decoding it."""
        return self._read(read_size)

    def fault(self, decode: bool = True) -> str | None:
        """Why the image cannot be used, or None. Without `decode` only its header is read."""
        try:
            self._read(check_pixels if decode else read_size)
        except UserError as error:
            return str(error)
        return None

    def _read(self, function: Callable[[str | bytes], T]) -> T:
        try:
            return function(self.data or self.path)
        except ImageFault as fault:
            name = self.path or f"the {self.kind} of {len(self.data):,} bytes"
            raise UserError(f"{name} {fault}") from fault

    def digest(self) -> str:
        """A digest of the content: a file may change."""
        return hashlib.blake2b(self.read(), digest_size=16).hexdigest()

    def read(self) -> bytes:
        """The content of the file, still encoded."""
        if self.data:
            return self.data
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise UserError(f"{self.kind} {self.path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class Prompt:
    """One row of the user's data; `columns` holds the row's other columns.

    `messages` is the conversation that a language model continues, in the format of chat templates:
    {"role", "content"}, where the content is a list of {"type": "text", "text"} and
    {"type": "image"} parts, with one image part for each of `images`, in order. Without messages
    the conversation is one user message: the images, then the text.

    `given` are samples from the row, images, clips or texts, the best first: with
    `sampler.engine = "data"` they are trained on instead of generated ones.

    `image_columns` are further images of the row, for rewards of edits: "mask", which is white
    where the image may change, and "target_image", the edited image.
    """

    text: str
    negative: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""  # "train.txt:17", for error messages
    images: tuple[PromptImage, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    given: tuple[PromptImage | str, ...] = ()
    image_columns: Mapping[str, PromptImage] = field(default_factory=dict)
    is_negative: bool = False  # `text` is a negative prompt, which SANA encodes in another way

    @property
    def all_images(self) -> list[PromptImage]:
        """Images of the prompt, then of `given` and of `image_columns`."""
        given = [each for each in self.given if isinstance(each, PromptImage)]
        return [*self.images, *given, *self.image_columns.values()]

    @property
    def for_rewards(self) -> list[PromptImage]:
        """The images that rewards receive with a sample."""
        return [*self.images, *self.image_columns.values()]


@dataclass(frozen=True)
class Sample:
    """One finished sample, as passed to rewards: the image or video of a flow model or the response
    of a language model."""

    prompt: Prompt
    image: np.ndarray | None  # (height, width, 3) uint8, RGB; of a video (frames, height, width, 3)
    seed: int
    text: str | None = None
    tokens: int | None = None  # length of the text in the model's tokens
    given: float | None = None  # its score, if it is from the data
    fps: float | None = None  # of a video: frames per second

    def __post_init__(self) -> None:
        assert not self.is_video or self.fps is not None, "a video needs fps"

    @property
    def is_video(self) -> bool:
        return self.image is not None and self.image.ndim == 4

    @property
    def pixels(self) -> np.ndarray:
        """(height, width, 3): the image, or an error if the sample is not one."""
        if self.is_video:
            raise UserError(
                'this sample is a video; expected an image: set frames = "mean" in the reward\'s '
                "entry, or read `sample.frames`"
            )
        return self.frames[0]

    @property
    def frames(self) -> np.ndarray:
        """(frames, height, width, 3): all frames of a video; an image is one frame."""
        if self.image is None:
            raise UserError("this sample is a text; expected an image")
        return self.image if self.is_video else self.image[None]

    @property
    def response(self) -> str:
        """`text`, or an error if there is none. An empty response is a response."""
        if self.text is None:
            kind = "a video" if self.is_video else "an image"
            raise UserError(f"this sample is {kind}; expected a text")
        return self.text


@dataclass(frozen=True)
class Score:
    """The result of a reward. A failure is reported in `error`, never as a number; neither value
    nor error means that the reward does not apply to this sample.

    `parts` has every contribution ("ocr", "jpeg") and detail ("ocr/exact"); `text` is displayed
    with the sample: what a reward recognized or a judge answered.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    error: str | None = None

    @staticmethod
    def failed(error: str) -> Score:
        return Score(value=None, error=error)

    @property
    def ok(self) -> bool:
        return self.error is None and self.value is not None and math.isfinite(self.value)


@dataclass(frozen=True)
class Scales:
    """What earlier iterations change in this one: factors of the recipe's learning rate and KL
    weight (`on_symptom`), the share of a gate, and whether the reference of the KL is renewed."""

    lr: float = 1.0
    kl: float = 1.0
    share: float | None = None
    renew: bool | None = None  # None: it is never renewed


UNSCALED = Scales()

Solver = Literal["euler", "dpm2"]
GuidanceGradient = Literal["both", "conditional"]
"""The guidance branches through which gradients flow."""


@dataclass(frozen=True)
class Trajectory:
    """Record the latents and log-probs of the trained steps, and optionally their means."""

    means: bool = False


@dataclass(frozen=True)
class OnePass:
    """Record the latents and log-probs of the trained steps, and the gradient of each sample's
    summed log-probs."""


class Size(NamedTuple):
    """The size of an image or a video, in pixels and frames."""

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True)
class SampleSpec:
    """How images or videos are sampled. Steps in `stochastic` use the SDE `rule`, the others the
    ODE `solver`."""

    max_tokens: ClassVar[None] = None  # images have no tokens

    steps: int
    height: int
    width: int
    frames: int = 1  # above 1: of a video
    fps: float = 16.0  # frames per second of a video
    rule: str = "flow-sde"
    noise: float = 0.0
    stochastic: range = range(0)
    trained: range = range(0)
    solver: Solver = "euler"
    guidance: float = 1.0
    weights: Which = "current"
    same_noise: bool = False  # one initial noise per group, whose first ODE steps its samples share
    guidance_gradient: GuidanceGradient = "both"  # "conditional": records the negative branch
    record: Trajectory | OnePass = Trajectory()  # what is recorded of the trained steps
    starts: range = range(0)  # the window of each prompt starts at one of these; empty: as given
    negatives: bool = False  # encode negative prompts even if sampling has no guidance

    @property
    def size(self) -> Size:
        return Size(self.height, self.width, self.frames)

    def placed(self, seed: int) -> SampleSpec:
        """The spec of a prompt whose group has this seed."""
        if not self.starts:
            return self
        start = random.Random(seed).choice(self.starts)
        window = range(start, start + len(self.trained))
        return replace(self, stochastic=window, trained=window, starts=range(0))

    @property
    def means(self) -> bool:
        """Whether the trace contains the means of the trained steps."""
        return isinstance(self.record, Trajectory) and self.record.means

    @property
    def per_sample_grads(self) -> bool:
        """Whether the trace contains the gradient of each sample's summed log-probs."""
        return isinstance(self.record, OnePass)


@dataclass(frozen=True)
class ResponseSpec:
    """How responses are generated. Temperature 0 is greedy decoding."""

    max_tokens: int
    temperature: float = 1.0
    weights: Which = "current"
