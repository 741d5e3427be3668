"""Configuration of data and rewards; standard library only, so that a config error comes before heavy imports."""

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["DataConfig", "RewardConfig"]


def _require_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field}={value!r}: must be one of {', '.join(allowed)}")


def _require_positive(field: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{field}={value!r}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which files hold the prompts and how a row becomes the token ids given to the model."""

    #: Training parquet files (GSM8K schema or verl schema). Empty: the caller supplies the built-in arithmetic task.
    train: tuple[str, ...] = ()
    #: Held-out parquet files, same schemas. Empty: no validation (or the built-in task's held-out part).
    val: tuple[str, ...] = ()
    #: Longest prompt in tokens, chat template included.
    max_prompt_length: int = 512
    #: What to do with a longer prompt: "filter" drops it (the number dropped is logged), "refuse" raises DataError.
    overlong: Literal["filter", "refuse"] = "filter"
    #: "auto": the tokenizer's chat template when it has one, else plain text; "always": refuse a tokenizer without
    #: one; "never": plain text. Plain text is every message's content followed by a line break.
    chat_template: Literal["auto", "always", "never"] = "auto"
    #: A system message put before the conversation of rows that have none. None: nothing is added.
    system_prompt: str | None = None
    #: How a GSM8K question becomes the user's message; must contain "{question}". An instruction model that was not
    #: fine-tuned on the answer format wants a sentence here that asks for "#### " before the final answer.
    question_template: str = "{question}"
    #: Draw training prompts in a random order, a new one each epoch.
    shuffle: bool = True
    #: Use only the first so many validation prompts. None: all.
    max_val_prompts: int | None = None

    def __post_init__(self) -> None:
        _require_choice("overlong", self.overlong, ("filter", "refuse"))
        _require_choice("chat_template", self.chat_template, ("auto", "always", "never"))
        _require_positive("max_prompt_length", self.max_prompt_length)
        _require_positive("max_val_prompts", self.max_val_prompts)
        if "{question}" not in self.question_template:
            raise ValueError(f"question_template={self.question_template!r}: must contain {{question}}")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How the rule reward reads an answer and what it pays."""

    #: "strict": the last "#### number" counts; "flexible": the last number of any kind.
    method: Literal["strict", "flexible"] = "strict"
    #: Paid for the right answer.
    score: float = 1.0
    #: Paid when an answer was found but is wrong.
    format_score: float = 0.0

    def __post_init__(self) -> None:
        _require_choice("method", self.method, ("strict", "flexible"))
        for field in ("score", "format_score"):
            if not math.isfinite(getattr(self, field)):
                raise ValueError(f"{field}={getattr(self, field)!r}: must be a finite number")
        if self.score <= 0:
            raise ValueError(f"score={self.score!r}: must be above 0, so that a right answer is worth something")
        if self.format_score >= self.score:
            raise ValueError(f"format_score={self.format_score!r}: must be below score={self.score!r}")
