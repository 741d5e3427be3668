"""Options of `prepare_data` and of its command line. Standard library only."""

import re
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from ..config import require_choice


def _option(help_text: str, default: Any = MISSING, **metadata: Any) -> Any:
    """A field whose `help_text` is also the text of the option in --help."""
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What `prepare_data` reads, which rows it keeps, and where it writes them.

    The option of a field is its name with dashes: `max_prompt_length` is `--max-prompt-length`.
    """

    files: tuple[str, ...] = _option(
        "parquet, .jsonl, .ndjson, .json or .csv (also with .gz), or a folder saved by Hugging Face datasets "
        "(folder:split if it has splits)"
    )
    out: str = _option(
        "folder for train.parquet, val.parquet, card.md and card.html; it must not exist yet", metavar="FOLDER"
    )
    overwrite: bool = _option("replace what an earlier prepare wrote to OUT", False)
    layout: Literal["auto", "question", "math", "chat", "prompt"] = _option(
        "columns of the files. question: question and answer (GSM8K), or question and ground_truth; math: problem and "
        "solution with \\boxed{}; chat: messages; prompt: prompt, and reward_model or ground_truth. auto: by the names "
        "of the columns",
        "auto",
    )
    prompt_column: str | None = _option("column of the question, or of the messages", None, metavar="COLUMN")
    response_column: str | None = _option(
        "column of the whole response, for supervised fine-tuning", None, metavar="COLUMN"
    )
    ground_truth_column: str | None = _option("column of the right answer, or struct.field", None, metavar="COLUMN")
    data_source: str | None = _option("data source of rows that have none; it selects the reward", None, metavar="NAME")
    extra_columns: tuple[str, ...] | None = _option(
        "other columns to keep for rewards and environments (default: all that JSON can hold); none after the option "
        "keeps none",
        None,
        metavar="COLUMN",
    )
    validation: float = _option("share of the rows for val.parquet; 0 writes none", 0.05)
    seed: int = _option("selects which rows are for validation", 0)
    tokenizer: str | None = _option(
        "model folder; lengths are then in tokens, with its chat template, else in characters", None, metavar="FOLDER"
    )
    min_prompt_length: int = _option("drop rows with shorter prompts", 1)
    max_prompt_length: int | None = _option("drop rows with longer prompts", None)
    max_response_length: int | None = _option("drop rows with longer responses", None)
    duplicates: Literal["near", "exact", "keep"] = _option(
        "rows to drop. exact: equal prompts (without case and spaces); near: also those that MinHash finds similar and "
        "that have the same numbers and operators; keep: none",
        "near",
    )
    similarity: float = _option("Jaccard similarity of 5-token shingles above which prompts are near duplicates", 0.8)
    held_out: tuple[str, ...] = _option("files of evaluation prompts, which must not be trained on", (), metavar="FILE")
    contaminated: Literal["drop", "refuse", "keep"] = _option(
        "what to do with rows that contain a held-out prompt; keep only reports them", "drop"
    )
    overlap: float = _option("share of a held-out prompt's n-grams in a row from which it counts as contained", 0.7)
    ngram: int = _option("tokens per n-gram of the contamination check", 8)
    skip_bad: bool = _option("drop and count unusable rows instead of refusing the file", False)

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("files=(): must name at least one file")
        if not self.out:
            raise ValueError("out='': must name a folder")
        _require_at_least(1, min_prompt_length=self.min_prompt_length, ngram=self.ngram)
        _require_at_least(1, max_prompt_length=self.max_prompt_length, max_response_length=self.max_response_length)
        _require_at_least(0, seed=self.seed)
        if self.max_prompt_length is not None and self.max_prompt_length < self.min_prompt_length:
            raise ValueError(
                f"max_prompt_length={self.max_prompt_length}: must be at least min_prompt_length="
                f"{self.min_prompt_length}"
            )
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation={self.validation!r}: must be at least 0 and below 1")
        for name in ("similarity", "overlap"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be above 0 and at most 1")
        for name in ("layout", "duplicates", "contaminated"):
            require_choice(name, getattr(self, name), *PrepareConfig.__annotations__[name].__args__)


def _require_at_least(minimum: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < minimum:
            raise ValueError(f"{name}={value!r}: must be at least {minimum}")


def with_options(message: str) -> str:
    """The message of an error with options of the command line instead of keys of the apps and of `PrepareConfig`."""
    message = re.sub(r"data\.columns\.(\w+)=", lambda key: f"--{key[1].replace('_', '-')}-column ", message)
    message = re.sub(r"data\.extra_columns(=\[…\])?", "--extra-columns", message)
    names = "|".join(field.name for field in fields(PrepareConfig))
    return re.sub(rf"^({names})(?==)", lambda key: f"--{key[1].replace('_', '-')}", message)
