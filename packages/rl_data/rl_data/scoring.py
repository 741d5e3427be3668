"""Scoring functions of rewards, selected by the data source of a prompt; the GSM8K rule.

A scoring function is pure: (response text, ground truth, config) -> float. The text is the decoded response without
special tokens.
"""

import json
import re
from collections.abc import Callable
from decimal import Decimal

from .config import RewardConfig
from .errors import UnknownDataSourceError

RewardFn = Callable[[str, str, RewardConfig], float]

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
    found = (_STRICT if method == "strict" else _FLEXIBLE).findall(text[-TAIL_CHARACTERS:])
    return clean_number(found[-1]) if found else None


def _accepted(ground_truth: str) -> list[str]:
    """The accepted answers: the items of a JSON list, or the text itself; without commas and $."""
    text = ground_truth.strip()
    if text.startswith("["):
        try:
            return [clean_number(str(item).strip()) for item in json.loads(text)]
        except (ValueError, RecursionError):
            pass
    return [clean_number(text)]


def is_number_or_list(ground_truth: str) -> bool:
    """Whether the GSM8K rule can find this answer: a number, or a JSON list of numbers."""
    return all(re.fullmatch(_NUMBER, answer) for answer in _accepted(ground_truth))


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
    return config.score if any(_equal(answer, right) for right in _accepted(ground_truth)) else config.format_score


_REGISTRY: dict[str, RewardFn] = {"openai/gsm8k": gsm8k_score, "gsm8k": gsm8k_score}


def register_reward(data_source: str, reward: RewardFn) -> None:
    """Use `reward` for prompts of `data_source` in this process. Raises ValueError if another one is registered."""
    if _REGISTRY.get(data_source, reward) is not reward:
        raise ValueError(f"data_source={data_source!r}: already has a scoring function; choose another name")
    _REGISTRY[data_source] = reward


def reward_for(data_source: str) -> RewardFn:
    """The scoring function of `data_source`. Raises UnknownDataSourceError naming the registered data sources."""
    try:
        return _REGISTRY[data_source]
    except KeyError:
        raise UnknownDataSourceError(
            f"data_source={data_source!r}: no scoring function is registered for it, only for "
            f"{', '.join(sorted(_REGISTRY))}. Change the data, or call rl_data.register_reward before loading it."
        ) from None
