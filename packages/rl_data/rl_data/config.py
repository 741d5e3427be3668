"""Configuration of data and rewards. Standard library only, so that it can be checked before heavy imports."""

import glob
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import DataConfigError

_TEMPLATE_ARGUMENTS = (
    *("conversation", "tools", "chat_template", "tokenize", "add_generation_prompt"),
    *("return_dict", "return_assistant_tokens_mask"),
)
"""Arguments of a tokenizer's `apply_chat_template` that prompts decide."""

TurnsTrained = Literal["all", "each", "last"]
"""`all`: one sequence per conversation, trained on every assistant turn. `each`: one sequence per assistant turn, with
the messages before it as the prompt. `last`: the last assistant turn only."""


def require_choice(field: str, value: object, *allowed: str) -> None:
    """Raises DataConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise DataConfigError(field=field, value=value, allowed=", ".join(allowed))


def require_at_least(minimum: int, field: str, value: int | None) -> None:
    """Raises DataConfigError for a smaller value; None is allowed."""
    if value is not None and value < minimum:
        raise DataConfigError(field=field, value=value, allowed=f"at least {minimum}")


MADE = ("fetched:", "reasoning_gym:")
"""Beginnings of names that `rl_data.tasks.fetched` makes files of."""


def expand_files(field: str, names: Sequence[str]) -> tuple[str, ...]:
    """The names with `~` as the home folder, and the sorted matches in place of each pattern (`*`, `?`, `[...]`, `**`).

    A pattern may end in `:split`. A name that exists is no pattern. Raises DataConfigError for one without a match.
    """
    expanded: list[str] = []
    for name in map(os.path.expanduser, names):
        if name.startswith(MADE):
            expanded.append(name)
            continue
        exists = os.path.lexists(name) or os.path.isdir(name.rpartition(":")[0])
        if exists or not glob.has_magic(name) or "\0" in name:
            expanded.append(name)
            continue
        matches, split = glob.glob(name, recursive=True), ""
        if not matches and ":" in name:
            folders, _, split = name.rpartition(":")
            matches = glob.glob(folders, recursive=True)
        if not matches:
            raise DataConfigError(field=field, value=name, allowed="a pattern that matches a file")
        expanded += [f"{match}:{split}" if split else match for match in sorted(matches)]
    return tuple(expanded)


@dataclass(frozen=True, kw_only=True)
class ColumnsConfig:
    """The columns of the data files, where their names are not those of GSM8K or verl."""

    prompt: str | None = None
    """Column of the prompt: text, or a list of chat messages. null: `question`, `prompt` or `messages`."""
    ground_truth: str | None = None
    """Column of the right answer, taken as it is; `struct.field` for a field of a struct. null: beside `question`,
    `ground_truth` or else `answer` after its last "####"; otherwise `reward_model.ground_truth` or `ground_truth`. A
    reward may need none."""
    data_source: str | None = None
    """Column of the text that selects the reward. null: `data_source`, if there is one."""
    tools: str | None = None
    """Column of the tools, a list of JSON schemas or its JSON text. null: `tools`, if there is one."""
    images: str | None = None
    """Column of the images: paths, bytes, or structs of `bytes` and `path`; a list, or one of them. null: `images`, if
    there is one. They stand where messages have image parts or `<image>`, else before the first user message."""

    def __post_init__(self) -> None:
        for name in ("prompt", "ground_truth", "data_source", "tools", "images"):
            if getattr(self, name) == "":
                raise DataConfigError(field=name, value="", allowed="the name of a column, or null")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The prompt files, and how their rows become token ids."""

    train: tuple[str, ...] = ()
    """Training files: parquet; JSON lines or an array (.jsonl, .ndjson, .json) or CSV with a header (.csv), these also
    with .gz; or a folder saved by Hugging Face `datasets` (`folder:split` if it has splits). A name may be a pattern
    (`data/*.parquet`) and begin with `~`; `reasoning_gym:TASK?size=5000` makes one. Empty: the task
    of the built-in model."""
    val: tuple[str, ...] = ()
    """Validation files of the same kinds. Empty: no validation, or the held-out part of the built-in task."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    extra_columns: tuple[str, ...] | None = None
    """Columns that reward functions and environments get as `prompt.extra`, typed as in the file. null: all that the
    prompt is not made of and that JSON can hold."""
    max_prompt_length: int = 512
    """Maximum prompt length in tokens, including the chat template."""
    overlong: Literal["filter", "refuse"] = "filter"
    """Longer prompts. filter: dropped, and their number is logged. refuse: an error that names the row."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: the tokenizer's chat template if it has one, else plain text. always: a tokenizer without one is refused.
    never: plain text, which is the content of each message and a line break."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template beside messages and tools, such as {enable_thinking: false}."""
    system_prompt: str | None = None
    """System message for conversations that have none. null: no message."""
    question_template: str = "{question}"
    """User message of a text in `question` or `columns.prompt`; must contain "{question}"."""
    instruction: str | None = None
    """Sentence at the end of these user messages. null: if the model has a chat template and the reward scores only
    responses with "####" (`gsm8k` with `method=strict`), one that asks for it, unless `system_prompt` or
    `question_template` is given. "": nothing."""
    shuffle: bool = True
    """Shuffle the training prompts in each epoch."""
    max_val_prompts: int | None = None
    """Maximum number of validation prompts. null: all."""

    def __post_init__(self) -> None:
        for name in ("train", "val"):
            object.__setattr__(self, name, expand_files(name, getattr(self, name)))
        require_choice("overlong", self.overlong, "filter", "refuse")
        require_choice("chat_template", self.chat_template, "auto", "always", "never")
        require_at_least(1, "max_prompt_length", self.max_prompt_length)
        require_at_least(1, "max_val_prompts", self.max_val_prompts)
        if "{question}" not in self.question_template:
            allowed = "text with {question}"
            raise DataConfigError(field="question_template", value=self.question_template, allowed=allowed)
        for name in self.chat_template_kwargs:
            if name in _TEMPLATE_ARGUMENTS:
                problem = f"{name!r} is set for each prompt"
                raise DataConfigError(problem, field="chat_template_kwargs", remedy="remove it")
        if self.chat_template_kwargs and self.chat_template == "never":
            raise DataConfigError(field="chat_template_kwargs", allowed="empty with chat_template=never")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Extraction of the answer by the rule of GSM8K, and the scores that the rule gives."""

    method: Literal["strict", "flexible"] = "strict"
    """strict: the answer is the last `#### number`. flexible: the last number, if it ends in the last 300
    characters."""
    score: float = 1.0
    """Score of the right answer."""
    format_score: float = 0.0
    """Score of a wrong answer; a response without an answer gets 0."""

    def __post_init__(self) -> None:
        require_choice("method", self.method, "strict", "flexible")
        for name in ("score", "format_score"):
            if not math.isfinite(getattr(self, name)):
                raise DataConfigError(field=name, value=getattr(self, name), allowed="a finite number")
        if self.score <= 0:
            raise DataConfigError(field="score", value=self.score, allowed="above 0")
        if self.format_score >= self.score:
            raise DataConfigError(field="format_score", value=self.format_score, allowed=f"below score={self.score}")
