"""Equivalence of mathematical answers, decided by the library math-verify (LaTeX, sets, intervals, units, percent)."""

import importlib.util
import re
import threading
from dataclasses import dataclass
from typing import Any

from ..errors import DataConfigError
from .base import AnswerReward, PromptFields, tail
from .gsm8k import accepted_answers

_TAIL_CHARACTERS = 2000
_PAIR = re.compile(r"\[\s*(-?\d+(?:\.\d+)?)\s*,\s*(-?\d+(?:\.\d+)?)\s*\]", re.ASCII)
_LIMIT_S = 3
"""Seconds for one parse or one comparison: `9^{9^{9^9}}` would take all memory otherwise."""


@dataclass(frozen=True, kw_only=True)
class MathReward(AnswerReward):
    """An answer that is mathematically equal to the ground truth, as math-verify finds and compares them.

    The answer is the last `\\boxed{}`, else the last formula or number, in the last 2,000 characters; several boxed
    answers are a set. The ground truth is LaTeX or a number, or a JSON list of them, each of which is right; `[-2, 7]`
    is the interval, and `["-2", "7"]` are two right answers. An answer that takes too long to evaluate is wrong. Needs
    the package math-verify.
    """

    def prepare(self) -> str:
        if importlib.util.find_spec("math_verify") is None:
            raise DataConfigError("math-verify is not installed", remedy="pip install 'math-verify>=0.9,<0.10'")
        return ""

    def __call__(self, response_text: str, prompt: PromptFields, **facts: Any) -> float:
        answer = self.answer(response_text)
        if answer is None:
            return 0.0
        for right in _accepted(prompt.ground_truth):
            boxed = right if "\\boxed" in right else f"\\boxed{{{right}}}"
            if self.same_answer(_parse(boxed), answer):
                return self.score
        return self.format_score

    def answer(self, response_text: str) -> Any:
        return _parse(tail(response_text, _TAIL_CHARACTERS)) or None

    def same_answer(self, one: Any, other: Any) -> bool:
        from math_verify import verify

        return bool(verify(one, other, timeout_seconds=_limit_s()))


def _accepted(ground_truth: str) -> list[str]:
    """The right answers; two ascending numbers in brackets are an interval, as in LaTeX."""
    pair = _PAIR.fullmatch(ground_truth.strip())
    return [ground_truth] if pair and float(pair[1]) < float(pair[2]) else accepted_answers(ground_truth)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=_limit_s()))


def _limit_s() -> int | None:
    """math-verify's limits are signals, which only the main thread can use."""
    return _LIMIT_S if threading.current_thread() is threading.main_thread() else None
