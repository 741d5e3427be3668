"""Configuration of data and rewards. Standard library only, so that it can be checked before heavy imports."""

import math
from dataclasses import dataclass
from typing import Literal


def _require_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field}={value!r}: must be one of {', '.join(allowed)}")


def _require_positive(field: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{field}={value!r}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The prompt files, and how their rows become token ids."""

    #: Training parquet files (GSM8K or verl schema). Empty: the caller uses the built-in arithmetic task.
    train: tuple[str, ...] = ()
    #: Validation parquet files (same schemas). Empty: no validation, or the held-out part of the built-in task.
    val: tuple[str, ...] = ()
    #: Maximum prompt length in tokens, including the chat template.
    max_prompt_length: int = 512
    #: Overlong prompts: "filter" drops them and logs their number, "refuse" raises DataError.
    overlong: Literal["filter", "refuse"] = "filter"
    #: "auto": the tokenizer's chat template if it has one, else plain text; "always": fail for a tokenizer without one;
    #: "never": plain text. Plain text is the content of each message followed by a line break.
    chat_template: Literal["auto", "always", "never"] = "auto"
    #: System message for rows that have none. None adds nothing.
    system_prompt: str | None = None
    #: User message of a GSM8K question; must contain "{question}". For an instruction model that was not fine-tuned on
    #: the answer format, add a sentence here that asks for "#### " before the final answer.
    question_template: str = "{question}"
    #: Shuffle the training prompts in each epoch.
    shuffle: bool = True
    #: Maximum number of validation prompts. None: all.
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
    """How the rule extracts the answer, and the scores it gives."""

    #: "strict": the answer is the last "#### number"; "flexible": the last number.
    method: Literal["strict", "flexible"] = "strict"
    #: Score of the right answer.
    score: float = 1.0
    #: Score of a wrong answer.
    format_score: float = 0.0

    def __post_init__(self) -> None:
        _require_choice("method", self.method, ("strict", "flexible"))
        for field in ("score", "format_score"):
            if not math.isfinite(getattr(self, field)):
                raise ValueError(f"{field}={getattr(self, field)!r}: must be a finite number")
        if self.score <= 0:
            raise ValueError(f"score={self.score!r}: must be above 0")
        if self.format_score >= self.score:
            raise ValueError(f"format_score={self.format_score!r}: must be below score={self.score!r}")
