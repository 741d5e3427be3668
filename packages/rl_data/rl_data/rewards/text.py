"""Rewards of the text itself, which need no ground truth: format and length."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..config import require_choice
from ..errors import DataConfigError
from .base import PromptFields, Reward, require_number


@dataclass(frozen=True, kw_only=True)
class FormatReward(Reward):
    """1 for a response that a regular expression matches, else 0.

    The pattern is searched by Python's `re`, with `.` matching line breaks. A pattern that takes exponential time fails
    the sample at the time limit of the scoring process.
    """

    needs_ground_truth: ClassVar[bool] = False
    pattern: str
    match: Literal["full", "search"] = "full"
    """"full": the whole response, without spaces and line breaks at its ends; "search": any part of it."""

    def __post_init__(self) -> None:
        require_choice("match", self.match, "full", "search")
        if not isinstance(self.pattern, str) or not self.pattern:
            raise DataConfigError(field="pattern", value=self.pattern, allowed="a regular expression")
        try:
            re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise DataConfigError(
                str(error), field="pattern", value=self.pattern, allowed="a regular expression"
            ) from None

    @property
    def markers(self) -> tuple[str, ...]:
        """The opening tags of a pattern that has no alternatives and no optional parts."""
        is_plain = re.search(r"\||\)[?*{]|\(\?[!<]", self.pattern) is None
        return tuple(re.findall(r"<\w+>", self.pattern)) if is_plain else ()

    def __call__(self, response_text: str, prompt: PromptFields, **facts: Any) -> float:
        if self.match == "full":
            return float(re.fullmatch(self.pattern, response_text.strip(), re.DOTALL) is not None)
        return float(re.search(self.pattern, response_text, re.DOTALL) is not None)


@dataclass(frozen=True, kw_only=True)
class LengthReward(Reward):
    """The length of a response, compared with a `target` or a `limit`; one of them is given.

    target: `max(0, 1 - |length - target| / target)`, which is 1 at the target and 0 at twice the target.
    limit: 1 up to the limit, then falling linearly to 0 at `limit + margin`.
    """

    needs_ground_truth: ClassVar[bool] = False
    is_quick: ClassVar[bool] = True
    target: int | None = None
    limit: int | None = None
    margin: int = 0
    unit: Literal["tokens", "characters"] = "tokens"
    """"tokens": response tokens that the policy sampled; "characters": of the response text."""

    def __post_init__(self) -> None:
        require_choice("unit", self.unit, "tokens", "characters")
        if (self.target is None) == (self.limit is None):
            raise DataConfigError(field="limit", value=self.limit, allowed="a number if target is null, and only then")
        name = "target" if self.limit is None else "limit"
        require_number(name, getattr(self, name), above=0)
        require_number("margin", self.margin)
        if self.margin < 0 or (self.margin and self.limit is None):
            raise DataConfigError(field="margin", value=self.margin, allowed="0 or more with limit, and 0 with target")

    def __call__(
        self, response_text: str, prompt: PromptFields, *, num_tokens: int | None = None, **facts: Any
    ) -> float:
        length = num_tokens if self.unit == "tokens" else len(response_text)
        if length is None:
            raise DataConfigError(field="num_tokens", value=None, allowed="the number of tokens with unit=tokens")
        if self.target is not None:
            return max(0.0, 1 - abs(length - self.target) / self.target)
        assert self.limit is not None
        over = length - self.limit
        return 1.0 if over <= 0 else max(0.0, 1 - over / self.margin) if self.margin else 0.0
