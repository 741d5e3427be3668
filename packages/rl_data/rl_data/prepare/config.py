"""Options of `prepare_data` and of its command line."""

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from ..config import require_at_least, require_choice
from ..errors import DataConfigError


def _option(help_text: str, default: Any = MISSING, **arguments: Any) -> Any:
    """A field with the arguments of its option on the command line, as argparse takes them."""
    return field(default=default, metadata={"help": help_text, **arguments})


_FILES, _COLUMN, _DUPLICATES = {"metavar": "FILE"}, {"metavar": "COLUMN"}, ("near", "exact", "keep")
_EXTRA = "other columns to keep for rewards and environments (default: all that JSON can hold); none keeps none"
_NEAR = "near (default): drop also similar prompts (MinHash) with the same numbers and operators; keep: drop none"


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """The files that `prepare_data` reads, the rows that it keeps, and the folder that it writes.

    The option of a field is its name with dashes: `skip_bad` is `--skip-bad`.
    """

    files: tuple[str, ...] = _option("files as data.train takes them: JSON lines, CSV, parquet …", nargs="+", **_FILES)
    out: str = _option("folder for train.parquet, val.parquet and card.md", metavar="FOLDER")
    overwrite: bool = _option("replace the files of an earlier prepare", False, action="store_true")
    prompt_column: str | None = _option("column of the question, or of the messages", None, **_COLUMN)
    response_column: str | None = _option("column of the response, for supervised fine-tuning", None, **_COLUMN)
    ground_truth_column: str | None = _option("column of the right answer, or struct.field", None, **_COLUMN)
    data_source: str | None = _option("data source of rows without one; it selects the reward", None, metavar="NAME")
    extra_columns: tuple[str, ...] | None = _option(_EXTRA, None, nargs="*", **_COLUMN)
    validation: float = _option("share for val.parquet (0.05); 0 writes none", 0.05, metavar="N", type=float)
    seed: int = _option("selects which rows are for validation", 0, metavar="N", type=int)
    duplicates: Literal["near", "exact", "keep"] = _option(_NEAR, "near", choices=_DUPLICATES)
    held_out: tuple[str, ...] = _option("evaluation prompts; rows with one are dropped", (), nargs="*", **_FILES)
    skip_bad: bool = _option("drop and count unusable rows instead of refusing the file", False, action="store_true")

    def __post_init__(self) -> None:
        require_at_least(0, "seed", self.seed)
        require_choice("duplicates", self.duplicates, *_DUPLICATES)
        if not 0 <= self.validation < 1:
            raise DataConfigError(field="validation", value=self.validation, allowed="at least 0 and below 1")
