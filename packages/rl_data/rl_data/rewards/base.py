"""The interface of every reward in the registry: a call that scores a response, and checks of a row of data."""

import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ..errors import DataConfigError


class PromptFields(Protocol):
    """The fields of a prompt that the rewards of the registry read."""

    @property
    def ground_truth(self) -> str: ...
    @property
    def extra(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Reward(ABC):
    """A reward with its options as fields: `reward(response_text, prompt)` is the score.

    Instances are picklable, so they run in worker processes. Options are checked when the instance is made: a wrong one
    raises DataConfigError. A reward whose `__call__` has a parameter `num_tokens` also gets the number of response
    tokens.
    """

    needs_ground_truth: ClassVar[bool] = True
    """Rows without a ground truth are refused."""
    is_quick: ClassVar[bool] = False
    """A call takes microseconds whatever the response is: a scoring process gets the responses of a group together."""

    @abstractmethod
    def __call__(self, response_text: str, prompt: PromptFields, **facts: Any) -> float:
        """The score of a response, which is the decoded text without special tokens."""

    def score_each(
        self, response_texts: Sequence[str], prompts: Sequence[PromptFields], **facts: Sequence[Any]
    ) -> list[float | Exception]:
        """The score of each response, or what its call raised; `facts`: a value for each."""
        scores: list[float | Exception] = []
        for index, (text, prompt) in enumerate(zip(response_texts, prompts, strict=True)):
            try:
                scores.append(self(text, prompt, **{name: values[index] for name, values in facts.items()}))
            except Exception as error:
                scores.append(error)
        return scores

    @property
    def full_score(self) -> float:
        """The score of a response that is entirely right."""
        return 1.0

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts without which a response cannot score, so that a prompt has to ask for them."""
        return ()

    @property
    def max_duration_s(self) -> float:
        """Seconds that a call takes at most by its own limits; 0: it has none."""
        return 0.0

    def prepare(self) -> str:
        """Checks once, before a run starts, that this machine has all that the reward needs.

        Returns a line for the log, or "".

        Raises:
            DataConfigError: something is missing.
        """
        return ""

    def problem(self, ground_truth: str, extra: Mapping[str, Any]) -> str:
        """The reason why no response can ever be right for this row, or "".

        Args:
            ground_truth: the row's ground truth as text; JSON text of a list or struct; "" if there is none.
            extra: the other columns of the row.
        """
        if self.needs_ground_truth and not ground_truth.strip():
            return "there is no ground truth"
        return ""


@dataclass(frozen=True, kw_only=True)
class AnswerReward(Reward):
    """A reward that compares an extracted answer with the ground truth: `score` for the right answer, `format_score`
    for another one, 0 without an answer."""

    score: float = 1.0
    format_score: float = 0.0

    def __post_init__(self) -> None:
        for field in ("score", "format_score"):
            require_number(field, getattr(self, field))
        if not self.format_score < self.score:
            raise DataConfigError(field="format_score", value=self.format_score, allowed=f"below score={self.score}")

    @abstractmethod
    def answer(self, response_text: str) -> Any:
        """The answer that a response gives, None if it gives none. Equal answers are equal by `same_answer`."""

    def same_answer(self, one: Any, other: Any) -> bool:
        """True if two results of `answer` are the same answer."""
        return bool(one == other)

    def votes(self, response_texts: Sequence[str]) -> list[int]:
        """Index of the first response with the same answer, for each response to one prompt; -1 without an answer."""
        return equal_answers([self.answer(text) for text in response_texts], self.same_answer)

    @property
    def full_score(self) -> float:
        return self.score


def tail(text: str, num_characters: int) -> str:
    """The end of a text from the beginning of a line or, if it is far, of a word on: no number is cut in two."""
    start = len(text) - num_characters
    if start <= 0:
        return text
    line = text.rfind("\n", max(0, start - num_characters), start)
    # The mark keeps the word from looking like the beginning of a line.
    return text[line + 1 :] if line >= 0 else "… " + re.split(r"\s", text[start - 1 :], maxsplit=1)[-1]


def equal_answers(answers: Sequence[Any], same: Callable[[Any, Any], bool] = operator.eq) -> list[int]:
    """Index of the first equal answer, for each answer; -1 for None, which is no answer."""
    firsts: list[int] = []
    votes: list[int] = []
    for index, answer in enumerate(answers):
        if answer is None:
            votes.append(-1)
            continue
        votes.append(next((i for i in firsts if same(answers[i], answer)), index))
        firsts += [index] if votes[-1] == index else []
    return votes


def require_number(field: str, value: object, *, above: float | None = None) -> None:
    """Raises DataConfigError unless `value` is a finite number, larger than `above`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise DataConfigError(field=field, value=value, allowed="a finite number")
    if above is not None and not value > above:
        raise DataConfigError(field=field, value=value, allowed=f"above {above:g}")
