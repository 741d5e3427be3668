"""Checks of data files before any process starts, without a tokenizer or torch."""

from collections.abc import Sequence
from pathlib import Path

from .config import DataConfig
from .errors import DataError, UnknownDataSourceError
from .files.opening import open_table
from .files.table import Table
from .rewards.base import Reward
from .rewards.registry import reward_for
from .rows import COLUMNS_HELP, GSM8K_DATA_SOURCE, Row, Schema, find_schema, read_rows

_SCORE = "or choose the reward in the configuration, such as reward.terms.correct.function=gsm8k."


def check_files(
    files: Sequence[str | Path], config: DataConfig | None = None, *, rewards: Sequence[Reward] | None = None
) -> int:
    """Read every file once and return the number of rows.

    Args:
        rewards: those that score every row. None: the data source of each row selects its reward. Empty: the caller
            scores by other means, which may need no ground truth.

    Raises DataError for a file that is missing, empty or damaged, for a missing column (naming those found), and for
    the first row without a prompt, without a reward for its data source, or that its rewards can never score.
    """
    config = config or DataConfig()
    num_rows, by_source = 0, dict[str, Reward]()
    for file in files:
        table = open_table(file)
        schema = find_schema(table, config)
        for row in read_rows(table, schema):
            if rewards is None and row.data_source not in by_source:
                by_source[row.data_source] = _reward_of(row, table, schema)
            for reward in (by_source[row.data_source],) if rewards is None else rewards:
                if problem := reward.problem(row.ground_truth, row.extra):
                    raise _unscorable(row, table, schema, problem)
            num_rows += 1
    return num_rows


def _reward_of(row: Row, table: Table, schema: Schema) -> Reward:
    """The reward of the row's data source. Raises DataError if there is none."""
    if not row.data_source and schema.data_source is None:
        table.require(
            ["data_source"], f"It selects the reward of a row. Add it, name it (data.columns.data_source=…), {_SCORE}"
        )
    if not row.data_source:
        raise row.place.error("empty", f"Name one, such as {GSM8K_DATA_SOURCE}, {_SCORE}", column=schema.data_source)
    try:
        return reward_for(row.data_source)
    except UnknownDataSourceError as error:
        what, _, remedy = str(error).partition(". ")
        raise row.place.error(what, remedy, column=schema.data_source) from error


def _unscorable(row: Row, table: Table, schema: Schema, problem: str) -> DataError:
    """The error of a row that a reward can never score; of the file, if it has no ground truth at all."""
    column = schema.ground_truth[0]
    if not row.ground_truth:
        table.require([column], COLUMNS_HELP)
    remedy = "Fix it, drop the row, or score with another reward."
    return row.place.error(problem, remedy, column=column if column in table.columns else None)
