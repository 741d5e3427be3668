"""Multiple choice: the letter that a response chooses."""

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import DataConfigError
from .base import AnswerReward, PromptFields, tail

_TAIL_CHARACTERS = 1000


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceReward(AnswerReward):
    """The letter of the right choice, in the last 1,000 characters of the response.

    Read in this order, the last one each: `\\boxed{B}` (also `\\boxed{\\text{(B)}}`); `answer is B`, `Answer: (B)` or
    `#### B`; a line that is only a letter, as `B`, `(B)`, `**B.**` or `B) some text`. Letters are capital, but after
    `answer` one at the end of a line or before a punctuation mark (`answer is a prime` has none). The ground truth is a
    letter, such as `B` or `(b)`.
    """

    is_quick: ClassVar[bool] = True
    num_choices: int = 5
    """Number of choices: 5 are A to E."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.num_choices) is not int or not 2 <= self.num_choices <= 26:
            raise DataConfigError(field="num_choices", value=self.num_choices, allowed="an integer from 2 to 26")

    def __call__(self, response_text: str, prompt: PromptFields, **facts: Any) -> float:
        letter = self.answer(response_text)
        if letter is None:
            return 0.0
        return self.score if letter == _letter(prompt.ground_truth) else self.format_score

    def answer(self, response_text: str) -> str | None:
        text = tail(response_text, _TAIL_CHARACTERS)
        letters = string.ascii_uppercase[: self.num_choices]
        either = rf"[{letters}](?![A-Za-z0-9'])|[{letters.lower()}](?=[).,;:*]|[ \t]*$)"
        patterns = (
            rf"\\boxed{{\s*(?:\\\w+{{)?\s*\(?([{letters}])\)?\s*}}",
            rf"(?:\b[Aa]nswer\b(?:\s+is)?\s*:?|####)[\s*(]*({either})",
            rf"^[ *(]*([{letters}])(?:[ *.):]*$|[.):] )",
        )
        matches = (re.findall(pattern, text, re.MULTILINE | re.ASCII) for pattern in patterns)
        return next((chosen[-1].upper() for chosen in matches if chosen), None)

    def problem(self, ground_truth: str, extra: Mapping[str, Any]) -> str:
        if missing := super().problem(ground_truth, extra):
            return missing
        letters = string.ascii_uppercase[: self.num_choices]
        if _letter(ground_truth) in set(letters):
            return ""
        return f"the answer {ground_truth[:60]!r} is no letter from A to {letters[-1]}"


def _letter(ground_truth: str) -> str:
    return ground_truth.strip().strip("().").upper()
