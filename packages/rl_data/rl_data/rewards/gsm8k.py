"""The GSM8K rule: the last number of a response, or the last number after `####`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from ..config import RewardConfig, require_choice
from .base import AnswerReward, PromptFields

#: Only the end of a response is searched: the answer is there, and a regex over a long text is slow.
TAIL_CHARACTERS = 300
# A minus sign and a dollar sign in either order, digits with commas, a fraction. The period at the end of a sentence is
# not part of the number.
_NUMBER = r"(?:-\$?|\$-?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_STRICT = re.compile(rf"####\s?({_NUMBER})")
_FLEXIBLE = re.compile(_NUMBER)


def clean_number(number: str) -> str:
    """The text without commas and dollar signs."""
    return number.replace(",", "").replace("$", "")


def extract_answer(text: str, method: str) -> str | None:
    """The answer in the last 300 characters of `text`, without commas and $; None if there is none.

    "strict": the number of the last `#### number`; "flexible": the last number.
    """
    numbers = (_STRICT if method == "strict" else _FLEXIBLE).findall(text[-TAIL_CHARACTERS:])
    return clean_number(numbers[-1]) if numbers else None


def accepted_answers(ground_truth: str) -> list[str]:
    """The accepted answers: the items of a JSON list, or the text itself."""
    text = ground_truth.strip()
    if text.startswith("["):
        try:
            return [str(item).strip() for item in json.loads(text)]
        except (ValueError, RecursionError):
            pass
    return [text]


def _numbers(ground_truth: str) -> list[str]:
    return [clean_number(answer) for answer in accepted_answers(ground_truth)]


def _equal(answer: str, ground_truth: str) -> bool:
    if answer == ground_truth:
        return True
    if not re.fullmatch(_NUMBER, ground_truth):
        return False
    # Compare values, so that 72.00 equals 72; Decimal is exact.
    return Decimal(answer) == Decimal(ground_truth)


def gsm8k_score(text: str, ground_truth: str, config: RewardConfig) -> float:
    """GSM8K rule: config.score for the right answer, config.format_score for a wrong answer, 0 without an answer.

    `ground_truth` is a number, or a JSON list of numbers, each of which is right.
    """
    answer = extract_answer(text, config.method)
    if answer is None:
        return 0.0
    return config.score if any(_equal(answer, right) for right in _numbers(ground_truth)) else config.format_score


@dataclass(frozen=True, kw_only=True)
class Gsm8kReward(AnswerReward):
    """The GSM8K rule (`gsm8k_score`): numbers compared by value, in the last 300 characters of the response."""

    method: Literal["strict", "flexible"] = "strict"
    """"strict": the answer is the last "#### number"; "flexible": the last number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("method", self.method, "strict", "flexible")

    @property
    def markers(self) -> tuple[str, ...]:
        return ("####",) if self.method == "strict" else ()

    def __call__(self, response_text: str, prompt: PromptFields, **facts: Any) -> float:
        config = RewardConfig(method=self.method, score=self.score, format_score=self.format_score)
        return gsm8k_score(response_text, prompt.ground_truth, config)

    def answer(self, response_text: str) -> Decimal | None:
        number = extract_answer(response_text, self.method)
        return None if number is None else Decimal(number)

    def problem(self, ground_truth: str, extra: Mapping[str, Any]) -> str:
        if missing := super().problem(ground_truth, extra):
            return missing
        if all(re.fullmatch(_NUMBER, answer) for answer in _numbers(ground_truth)):
            return ""
        shown = ground_truth if len(ground_truth) <= 60 else f"{ground_truth[:57]}..."
        return f"the answer {shown!r} is no number, which the GSM8K rule needs"
