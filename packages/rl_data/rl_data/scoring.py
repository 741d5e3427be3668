"""Rule rewards, chosen by a prompt's data source.

A reward is a function (response text, ground truth, config) -> float. It is pure and needs no tokenizer: the text is
the decoded response without special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

from .config import RewardConfig
from .errors import UnknownDataSourceError

__all__ = ["RewardFn", "extract_answer", "gsm8k_score", "register_reward", "reward_for"]

RewardFn = Callable[[str, str, RewardConfig], float]

#: Only the end of a response is read; an answer stands at the end, and a regex over long texts is slow.
TAIL_CHARACTERS = 300
# A minus sign and a dollar sign in either order, digits with commas, a fraction. A full stop that ends the sentence is
# not part of the number.
_NUMBER = r"(?:-\$?|\$-?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_STRICT = re.compile(rf"####\s?({_NUMBER})")
_FLEXIBLE = re.compile(_NUMBER)


def _clean(number: str) -> str:
    return number.replace(",", "").replace("$", "")


def extract_answer(text: str, method: str) -> str | None:
    """The answer in the last 300 characters of `text`, commas and $ dropped; None when there is none.

    "strict": the number of the last `#### number`; "flexible": the last number.
    """
    found = (_STRICT if method == "strict" else _FLEXIBLE).findall(text[-TAIL_CHARACTERS:])
    return _clean(found[-1]) if found else None


def _equal(answer: str, ground_truth: str) -> bool:
    if answer == ground_truth:
        return True
    if not re.fullmatch(_NUMBER, ground_truth):
        return False
    # By value, so that 72.00 equals 72; decimal, so that no digit is lost.
    return Decimal(answer) == Decimal(ground_truth)


def gsm8k_score(text: str, ground_truth: str, config: RewardConfig) -> float:
    """GSM8K rule reward: config.score for the right answer, config.format_score for a wrong one, 0 for none."""
    answer = extract_answer(text, config.method)
    if answer is None:
        return 0.0
    return config.score if _equal(answer, _clean(ground_truth.strip())) else config.format_score


_REGISTRY: dict[str, RewardFn] = {"openai/gsm8k": gsm8k_score, "gsm8k": gsm8k_score}


def register_reward(data_source: str, reward: RewardFn) -> None:
    """Use `reward` for prompts of `data_source` in this process. Raises ValueError when the name is taken."""
    if _REGISTRY.get(data_source, reward) is not reward:
        raise ValueError(f"data_source={data_source!r}: a reward is registered already; choose another name")
    _REGISTRY[data_source] = reward


def reward_for(data_source: str) -> RewardFn:
    """The reward registered for `data_source`. Raises UnknownDataSourceError naming those registered."""
    try:
        return _REGISTRY[data_source]
    except KeyError:
        raise UnknownDataSourceError(
            f"data_source={data_source!r}: no reward is registered for it. Known: {', '.join(sorted(_REGISTRY))}. Use "
            "one of them in the data, or call rl_data.register_reward before loading."
        ) from None
