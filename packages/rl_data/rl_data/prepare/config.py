"""Options of `prepare_data` and of its command line. Standard library only."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from ..config import require_at_least, require_choice
from ..errors import DataConfigError


def _option(help_text: str, default: Any = MISSING, **arguments: Any) -> Any:
    """A field with the arguments of its option on the command line, as argparse takes them."""
    return field(default=default, metadata={"help": help_text, **arguments})


_SHARE, _COUNT, _COLUMN = {"metavar": "N", "type": float}, {"metavar": "N", "type": int}, {"metavar": "COLUMN"}


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """The files that `prepare_data` reads, the rows that it keeps, and the folder that it writes.

    The option of a field is its name with dashes: `max_prompt_length` is `--max-prompt-length`.
    """

    files: tuple[str, ...] = _option(
        "parquet, .jsonl, .ndjson, .json or .csv (also with .gz), or a folder saved by Hugging Face datasets "
        "(folder:split if it has splits)",
        metavar="FILE",
        nargs="+",
    )
    out: str = _option("folder for train.parquet, val.parquet and card.md; it must not exist yet", metavar="FOLDER")
    overwrite: bool = _option("replace what an earlier prepare wrote to OUT", False, action="store_true")
    layout: Literal["auto", "question", "math", "chat", "prompt"] = _option(
        "columns of the files. question: question and answer (GSM8K), or question and ground_truth; math: problem and "
        "solution with \\boxed{}; chat: messages; prompt: prompt, and reward_model or ground_truth. auto: by the names "
        "of the columns",
        "auto",
        choices=("auto", "question", "math", "chat", "prompt"),
    )
    prompt_column: str | None = _option("column of the question, or of the messages", None, **_COLUMN)
    response_column: str | None = _option(
        "column of the whole response, for supervised fine-tuning", None, metavar="COLUMN"
    )
    ground_truth_column: str | None = _option("column of the right answer, or struct.field", None, **_COLUMN)
    data_source: str | None = _option("data source of rows that have none; it selects the reward", None, metavar="NAME")
    extra_columns: tuple[str, ...] | None = _option(
        "other columns to keep for rewards and environments (default: all that JSON can hold); none after the option "
        "keeps none",
        None,
        metavar="COLUMN",
        nargs="*",
    )
    validation: float = _option("share of the rows for val.parquet; 0 writes none", 0.05, **_SHARE)
    seed: int = _option("selects which rows are for validation", 0, **_COUNT)
    tokenizer: str | None = _option(
        "model folder; lengths are then in tokens, with its chat template, else in characters", None, metavar="FOLDER"
    )
    max_prompt_length: int | None = _option("drop rows with longer prompts", None, **_COUNT)
    max_response_length: int | None = _option("drop rows with longer responses", None, **_COUNT)
    duplicates: Literal["near", "exact", "keep"] = _option(
        "rows to drop. exact: equal prompts (without case and spaces); near: also those that MinHash finds similar and "
        "that have the same numbers and operators; keep: none",
        "near",
        choices=("near", "exact", "keep"),
    )
    similarity: float = _option(
        "Jaccard similarity of 5-token shingles above which prompts are near duplicates", 0.8, **_SHARE
    )
    held_out: tuple[str, ...] = _option(
        "files of evaluation prompts; rows that contain one are dropped", (), metavar="FILE", nargs="*"
    )
    skip_bad: bool = _option("drop and count unusable rows instead of refusing the file", False, action="store_true")

    def __post_init__(self) -> None:
        for name, empty in (("files", ()), ("out", "")):
            if getattr(self, name) == empty:
                raise DataConfigError(field=name, value=empty, allowed="at least one name")
        for name in ("max_prompt_length", "max_response_length"):
            require_at_least(1, name, getattr(self, name))
        require_at_least(0, "seed", self.seed)
        if not 0 <= self.validation < 1:
            raise DataConfigError(field="validation", value=self.validation, allowed="at least 0 and below 1")
        if not 0 < self.similarity <= 1:
            raise DataConfigError(field="similarity", value=self.similarity, allowed="above 0 and at most 1")
        for option in fields(self):
            if choices := option.metadata.get("choices"):
                require_choice(option.name, getattr(self, option.name), *choices)


_OPTIONS = {
    "data.columns": "--prompt-column and --ground-truth-column",
    "data.columns.prompt": "--prompt-column",
    "data.columns.ground_truth": "--ground-truth-column",
    "data.extra_columns": "--extra-columns",
}


def option(setting: str | None) -> str | None:
    """The option of the command line for a key of the apps' configuration, or `key=value`; None if there is none."""
    key, _, value = (setting or "").partition("=")
    return f"{_OPTIONS[key]} {value}".strip() if key in _OPTIONS else None
