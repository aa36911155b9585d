"""Judges that query a general vision-language model, as Flow-GRPO does with Qwen-VL."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from gesso.rewards.image import ocr
from gesso.rewards.judges.chat import ChatJudge
from gesso.rewards.judges.judge import parse_rating
from gesso.types import Prompt, Sample, Score


class QwenVlScore(ChatJudge):
    """Image quality according to a served VLM: its score from 1 to 5, divided by 5. Environment:
    `QWEN_VL_VLLM_URL`, `QWEN_VL_PATH`."""

    URL_ENV: ClassVar[str] = "QWEN_VL_VLLM_URL"
    MODEL_ENV: ClassVar[str] = "QWEN_VL_PATH"
    TEMPLATE: ClassVar[str] = (
        "You judge how good generated images look, on this scale:\n"
        "1: bad, broken or hard to make out. 2: poor, with plain flaws. 3: fair, ordinary. "
        "4: good, clear and well composed. 5: excellent, as by a professional.\n"
        "First weigh its strengths and flaws between <Thought> and </Thought>. Then give one "
        "number from 1 to 5 between <Score> and </Score>."
    )

    def read(self, response: str, sample: Sample) -> Score:
        return parse_rating(response, r"<Score>\s*([1-5](?:\.\d+)?)\s*</Score>", 1, 5)


class QwenVlOcr(ChatJudge):
    """The text that a served VLM reads in the image, scored like `ocr`. Environment:
    `QWEN_VL_OCR_VLLM_URL`, `QWEN_VL_OCR_PATH`."""

    max_tokens: int = Field(256, ge=1)
    """Maximum length of the judge's response."""

    URL_ENV: ClassVar[str] = "QWEN_VL_OCR_VLLM_URL"
    MODEL_ENV: ClassVar[str] = "QWEN_VL_OCR_PATH"
    TEMPLATE: ClassVar[str] = (
        "Write down only the text that is in the image, without any description or formatting."
    )

    def unfit(self, prompt: Prompt) -> str | None:
        return super().unfit(prompt) or ocr.Ocr().unfit(prompt)

    def read(self, response: str, sample: Sample) -> Score:
        return ocr.spelling_score(response, sample.prompt)
