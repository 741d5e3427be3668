"""Prompts from rows of data, as text and token ids, and checks of their files before any process starts."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from .config import DataConfig
from .errors import DataError, UnknownDataSourceError
from .files.opening import open_table
from .files.table import Place, Table
from .images import VisionProcessor, as_parts, ids_with_images
from .rendering import Renderer, with_configured
from .rewards.base import Reward
from .rewards.registry import reward_for
from .rows import COLUMNS_HELP, GSM8K_DATA_SOURCE, Message, Row, Schema, Tool, find_schema, left_out, read_rows
from .tokenizer import Tokenizer

T = TypeVar("T")

_logger = logging.getLogger(__name__)
#: Rows tokenized in one call.
_BATCH_SIZE = 1024
_SCORE = "or choose the reward in the configuration, such as reward.terms.correct.function=gsm8k."


GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""The sentence that verl adds to GSM8K's questions."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for rollout.

    `id` is `<file stem>:<row>`, unique among the files loaded together and the same in every run; the row is counted as
    in errors: lines of text files from 1, rows of others from 0.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    ground_truth: str
    """Text; JSON text of a list (accepted answers) or struct; empty if the row has none."""
    data_source: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The other columns of the row as JSON values: text, numbers, bools, lists, dicts and None."""
    messages: tuple[Message, ...] = field(default=(), hash=False)
    """The conversation that `text` renders."""
    tools: tuple[Tool, ...] = field(default=(), hash=False)
    """JSON schemas of the tools that `text` describes."""
    images: tuple[str, ...] = field(default=(), hash=False)
    """Files of the images, in the order of their places; `token_ids` has their placeholders."""


def dotted(section: str, key: str) -> str:
    """The name of a configuration key; `section` is empty if it has none."""
    return f"{section}.{key}" if section else key


def file_labels(files: Sequence[str | Path]) -> list[str]:
    """A label for each file: its stem, with its position if several files have the same stem."""
    stems = [Path(file).stem for file in files]
    counts = Counter(stems)
    return [stem if counts[stem] == 1 else f"{stem}~{index}" for index, stem in enumerate(stems)]


def batches(rows: Iterable[T]) -> Iterator[list[T]]:
    """The rows in lists that are tokenized in one call."""
    iterator = iter(rows)
    while batch := list(islice(iterator, _BATCH_SIZE)):
        yield batch


def too_long(place: Place, length: int, config: DataConfig) -> bool:
    """True for a prompt that is dropped as overlong. Raises DataError instead for `overlong="refuse"`."""
    if length <= config.max_prompt_length:
        return False
    if config.overlong == "refuse":
        problem = f"the prompt has {length} tokens, data.max_prompt_length={config.max_prompt_length}"
        raise place.error(problem, "Raise the limit or drop the row.", setting="data.overlong=filter")
    return True


def report_filtered(
    num_filtered: int,
    num_kept: int,
    files: Sequence[str | Path],
    config: DataConfig,
    *,
    max_length: int | None = None,
    section: str = "",
) -> None:
    """Log the number of dropped prompts, or demonstrations (`max_length`). Raises DataError if none is left."""
    kind, limit = "prompts", f"data.max_prompt_length={config.max_prompt_length} tokens"
    if max_length is not None:
        kind = "demonstrations"
        limit = f"{dotted(section, 'max_length')}={max_length} tokens, or their prompts than {limit}"
    if num_kept == 0:
        names = ", ".join(map(str, files))
        raise DataError(f"all {num_filtered} {kind} are longer than {limit}", "Raise the limit.", file=names)
    if num_filtered:
        total = num_filtered + num_kept
        _logger.warning("%d of %d %s are longer than %s and are dropped", num_filtered, total, kind, limit)


def load_prompts(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    max_prompts: int | None = None,
    vision: VisionProcessor | None = None,
) -> list[Prompt]:
    """The prompts of all files, in the order of files and rows.

    `config.overlong` decides whether overlong prompts are dropped or raise; `max_prompts` limits the number of prompts;
    `vision` gives the token ids of prompts with images. Raises DataError naming file, row, column and remedy.
    """
    if not files:
        raise DataError("no files were given", "Name at least one.")
    renderer = Renderer(tokenizer, config)
    prompts: list[Prompt] = []
    num_filtered = 0
    for file, label in zip(files, file_labels(files), strict=True):
        table = open_table(file)
        schema = find_schema(table, config)
        if columns := left_out(table, schema):
            _logger.warning("%s: columns that JSON cannot hold are left out of prompt.extra: %s", file, columns)
        for rows in batches(read_rows(table, schema)):
            conversations = [
                as_parts(with_configured(row.messages, config, is_question=row.is_question), len(row.images))
                for row in rows
            ]
            texts = [
                renderer(messages, row.tools, row.place) for messages, row in zip(conversations, rows, strict=True)
            ]
            for row, messages, text, ids in zip(rows, conversations, texts, renderer.encode(texts), strict=True):
                if row.images:
                    ids = ids_with_images(text, row.images, vision, row.place, schema.images)
                if too_long(row.place, len(ids), config):
                    num_filtered += 1
                    continue
                if not row.images:  # placeholders are no characters of the text
                    renderer.lost.check(text, ids, row.place, schema.column_of)
                prompts.append(_prompt(label, row, messages, text, ids))
                if len(prompts) == max_prompts:
                    renderer.report()
                    return prompts
    report_filtered(num_filtered, len(prompts), files, config)
    renderer.report()
    return prompts


def _prompt(label: str, row: Row, messages: tuple[Message, ...], text: str, ids: tuple[int, ...]) -> Prompt:
    return Prompt(
        id=f"{label}:{row.place.number}",
        text=text,
        token_ids=ids,
        ground_truth=row.ground_truth,
        data_source=row.data_source,
        extra=row.extra,
        messages=messages,
        tools=row.tools,
        images=row.images,
    )


def first_row(file: str | Path, config: DataConfig) -> Row:
    """The first row of a file. Raises DataError."""
    table = open_table(file)
    return next(read_rows(table, find_schema(table, config)))


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
        remedy = f"It selects the reward of a row. Add it, name it (data.columns.data_source=…), {_SCORE}"
        table.require(["data_source"], remedy)
    if not row.data_source:
        raise row.place.error("empty", f"Name one, such as {GSM8K_DATA_SOURCE}, {_SCORE}", column=schema.data_source)
    try:
        return reward_for(row.data_source)
    except UnknownDataSourceError as error:
        problem = f"{row.data_source!r}: {error.problem}, only for {error.allowed}"
        raise row.place.error(problem, f"Change it, {_SCORE}", column=schema.data_source) from error


def _unscorable(row: Row, table: Table, schema: Schema, problem: str) -> DataError:
    """The error of a row that a reward can never score; of the file, if it has no ground truth at all."""
    column = schema.ground_truth[0]
    if not row.ground_truth:
        table.require([column], COLUMNS_HELP, setting="data.columns")
    remedy = "Fix it, drop the row, or score with another reward."
    return row.place.error(problem, remedy, column=column if column in table.columns else None)
