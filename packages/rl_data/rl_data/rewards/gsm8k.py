"""The GSM8K rule: the last number of a response, or the last number after `####`.

A number is read whole or not at all: `-$1,234.50`, `1e3`, `3/4` and `1 1/2` are values, and `3,4` or `1.2.3` are none.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from plinth_base.errors import shown

from ..config import RewardConfig, require_choice
from .base import AnswerReward, PromptFields

#: The last number counts if it ends here, as in verl; what follows a `####` counts anywhere.
TAIL_CHARACTERS = 300
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
# A minus after a letter, a digit or a bracket is an operator. Whatever continues a number belongs to it.
_SIGN = r"(?:(?<![\w)\]}%])-[$€£]?|[$€£]-?|\+)?"
_DIGITS = r"(?:(?<![.\w])\.)?[0-9](?:[0-9]|[.,](?=[0-9])|[eE](?=[+-]?[0-9])|(?<=[eE])[+-])*"
_NUMBER = rf"{_SIGN}(?:[0-9]+ (?=[0-9]+ ?/ ?[0-9]))?{_DIGITS}(?: ?/ ?{_DIGITS})*"
_FLEXIBLE = re.compile(_NUMBER)
_STRICT = re.compile(rf"####(?:[\s*_$€£\\({{]|boxed)*({_NUMBER})")
_PART = r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)"
_VALUE = re.compile(rf"([-+$€£]*)(?:([0-9]+) (?=[0-9]+ ?/))?{_PART}(?: ?/ ?{_PART})?")


def read_number(text: str) -> Fraction | None:
    """The value of a text that is a number and nothing else; None for any other text."""
    parts = _VALUE.fullmatch(text)
    if parts is None:
        return None
    sign, whole, above, below = (part and part.replace(",", "") for part in parts.groups())
    try:
        value = int(whole or 0) + Fraction(above) / Fraction(below or 1)
    except (ValueError, ZeroDivisionError):  # no digit, more digits than Python converts, or a division by 0
        return None
    return -value if "-" in sign else value


def extract_answer(text: str, method: str) -> Fraction | None:
    """The answer of a response; None if there is none.

    "strict": the number of the last `#### number`; "flexible": the last number, if it ends in the last 300 characters.
    """
    text = _LATEX_FRACTION.sub(r"\1/\2", _plain(text))
    numbers = list((_STRICT if method == "strict" else _FLEXIBLE).finditer(text))
    if not numbers or (method == "flexible" and numbers[-1].end() <= len(text) - TAIL_CHARACTERS):
        return None
    return read_number(numbers[-1][numbers[-1].lastindex or 0])


def _plain(text: str) -> str:
    """The text with ASCII's minus, and thousands as in plain text instead of LaTeX."""
    return text.replace("\u2212", "-").replace("{,}", ",")


def accepted_answers(ground_truth: str) -> list[str]:
    """The accepted answers: the items of a JSON list, or the text itself."""
    text = ground_truth.strip()
    if text.startswith("["):
        try:
            return [str(item).strip() for item in json.loads(text)] or [text]
        except (ValueError, RecursionError):
            pass
    return [text]


def _numbers(ground_truth: str) -> list[Fraction | None]:
    return [read_number(_plain(answer)) for answer in accepted_answers(ground_truth)]


def gsm8k_score(text: str, ground_truth: str, config: RewardConfig) -> float:
    """GSM8K rule: config.score for the right answer, config.format_score for a wrong answer, 0 without an answer.

    `ground_truth` is a number, or a JSON list of numbers, each of which is right.
    """
    answer = extract_answer(text, config.method)
    if answer is None:
        return 0.0
    return config.score if answer in _numbers(ground_truth) else config.format_score


@dataclass(frozen=True, kw_only=True)
class Gsm8kReward(AnswerReward):
    """The GSM8K rule (`gsm8k_score`): numbers compared by value."""

    is_quick: ClassVar[bool] = True
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

    def answer(self, response_text: str) -> Fraction | None:
        return extract_answer(response_text, self.method)

    def problem(self, ground_truth: str, extra: Mapping[str, Any]) -> str:
        if missing := super().problem(ground_truth, extra):
            return missing
        if None not in _numbers(ground_truth):
            return ""
        return f"the answer {shown(ground_truth)} is no number, which the GSM8K rule needs"
