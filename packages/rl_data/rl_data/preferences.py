"""Preferences: pairs of a chosen and a rejected response, and responses that are labeled one by one.

The columns of a file of pairs determine its format:

- `question`, `chosen`, `rejected`: texts; the question is rendered as in `load_prompts`.
- `prompt`, `chosen`, `rejected`: a text that texts follow, without a template; or messages that texts or the
  assistant's messages follow.
- `chosen`, `rejected` alone: two conversations that differ in their last message, the assistant's. Other columns, such
  as a `prompt` that repeats the first message, are not read.

`margin`, a number from 0 on, says how much better the chosen response is; without the column it is 0.

Labeled responses have `prompt` and `completion`, or `question` and `answer`, as demonstrations do, and `label`: true
for a desirable response. Files of pairs are taken for them too: each pair is one response of either label.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from plinth_base.errors import shown

from .config import DataConfig
from .demonstrations import (
    AnsweredRow,
    Demonstration,
    RowEncoder,
    media_of,
    of_completion,
    of_messages,
    of_question,
    with_images,
)
from .errors import DataError
from .files.opening import open_table
from .files.table import Place, Table
from .prompts import batches
from .tokenizer import Tokenizer

PreferenceKind = Literal["pairs", "labeled"]
ExtraT = TypeVar("ExtraT")
_Group: TypeAlias = tuple[tuple[AnsweredRow, ...], ExtraT]
"""Responses of a row that are kept or dropped together, and what belongs to them."""

_PAIRS_HELP = (
    "Pairs need the columns `question` or `prompt`, `chosen` and `rejected`, or two conversations in `chosen` and "
    "`rejected`; rename the columns."
)
_LABELED_HELP = (
    "Labeled responses need the columns `prompt` and `completion`, or `question` and `answer`, and `label`; or give "
    "pairs: `chosen` and `rejected`."
)
_FIX = "Fix it or drop the row."
_LABELS = {True: True, False: False, "1": True, "0": False, "true": True, "false": False}


@dataclass(frozen=True)
class PreferencePair:
    """Two responses to one prompt."""

    chosen: Demonstration
    rejected: Demonstration
    margin: float = 0.0
    """Difference in quality between the chosen and the rejected response; 0 or more."""

    @property
    def num_tokens(self) -> int:
        """Tokens of both sequences."""
        return self.chosen.num_tokens + self.rejected.num_tokens


@dataclass(frozen=True)
class LabeledResponse:
    """A response with its label, for KTO."""

    response: Demonstration
    is_desirable: bool
    unrelated: Demonstration
    """The same prompt with the response to another prompt: the sample of KTO's estimate of the KL divergence."""

    @property
    def num_tokens(self) -> int:
        """Tokens of both sequences."""
        return self.response.num_tokens + self.unrelated.num_tokens


# ------------------------------------------------------------------------ rows


def _pairs(file: str | Path) -> Iterator[_Group[float]]:
    table = open_table(file)
    with_margin = ["margin"] if "margin" in table.columns else []
    columns, parse = _format(table)
    table.require([*columns, *with_margin], _PAIRS_HELP)
    for place, row in table.rows([*columns, *with_margin, *media_of(table)], text=columns):
        pair = tuple(with_images(parse(place, row, name), row) for name in ("chosen", "rejected"))
        if row.get("chosen") == row.get("rejected"):
            raise place.error("the chosen response equals the rejected one", "Drop the row.", column="rejected")
        yield pair, _margin(place, row.get("margin", 0.0))


def _format(table: Table) -> tuple[list[str], Callable[[Place, dict[str, Any], str], AnsweredRow]]:
    """The columns that are read, and the function that reads the response of one of them."""
    if "question" in table.columns:
        return ["question", "chosen", "rejected"], of_question
    before = ["prompt"] if "prompt" in table.columns else []
    return [*before, "chosen", "rejected"], _of_prompt


def _of_prompt(place: Place, row: dict[str, Any], column: str) -> AnsweredRow:
    """The response in `column`, which follows the column `prompt` or is the end of a conversation."""
    chosen: Any = row.get("chosen")
    rejected: Any = row.get("rejected")
    if not _is_conversation(row.get(column)):
        return of_completion(place, row, column)
    if not (_is_conversation(chosen) and _is_conversation(rejected)) or chosen[:-1] != rejected[:-1]:
        problem = "the conversations in 'chosen' and 'rejected' differ before their last message"
        raise place.error(problem, "They must share the prompt.", column="rejected")
    return of_messages(place, row, column)


def _is_conversation(value: Any) -> bool:
    """True for messages that begin with a prompt."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and first.get("role") != "assistant"


def _margin(place: Place, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise place.error(f"no number from 0 on: {shown(value)}", _FIX, column="margin")
    return float(value)


def _labeled(file: str | Path) -> Iterator[_Group[bool]]:
    table = open_table(file)
    if "rejected" in table.columns:
        for (chosen, rejected), _ in _pairs(file):
            yield from (((chosen,), True), ((rejected,), False))
        return
    is_question = "question" in table.columns
    columns = ["question", "answer"] if is_question else ["prompt", "completion"]
    table.require([*columns, "label"], _LABELED_HELP)
    parse = of_question if is_question else of_completion
    for place, row in table.rows([*columns, "label", *media_of(table)], text=columns):
        yield (with_images(parse(place, row), row),), _label(place, row.get("label"))


def _label(place: Place, value: Any) -> bool:
    key = value.strip().lower() if isinstance(value, str) else value
    if not isinstance(key, str | bool | int) or key not in _LABELS:
        raise place.error(f"no label: {shown(value)}", "Give true (desirable) or false.", column="label")
    return _LABELS[key]


def check_preferences(files: Sequence[str | Path], kind: PreferenceKind) -> int:
    """Read every file once, without a tokenizer, and return the number of pairs or of labeled responses.

    Raises DataError for a file that is missing, empty or damaged, for a missing column, and for an unusable row.
    """
    read: Callable[[str | Path], Iterator[_Group[Any]]] = _pairs if kind == "pairs" else _labeled
    return sum(1 for file in files for _ in read(file))


# --------------------------------------------------------------------- loading


def load_pairs(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    max_length: int | None = None,
    section: str = "",
) -> list[PreferencePair]:
    """The pairs of all files, in order; a pair is dropped as overlong if one of its sequences is.

    Prompts are identical to those of `load_prompts`, and responses end as those of `load_demonstrations` do. Of a
    conversation only the last message is the response. Raises DataError naming file, row, column and remedy.

    Args:
        max_length: maximum tokens of prompt and response; None: no limit.
        section: the configuration section of `max_length`, for errors.
    """
    encoder = RowEncoder(files, tokenizer, config, "last", max_length=max_length, section=section)
    groups = (group for file in files for group in _pairs(file))
    return [PreferencePair(chosen, rejected, margin) for (chosen, rejected), margin in _load(groups, encoder)]


def load_labeled(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    max_length: int | None = None,
    seed: int = 0,
    section: str = "",
) -> list[LabeledResponse]:
    """The labeled responses of all files, in order; arguments and errors as those of `load_pairs`.

    Args:
        seed: chooses the unrelated response of each prompt.
    """
    encoder = RowEncoder(files, tokenizer, config, "last", max_length=max_length, section=section)
    groups = (group for file in files for group in _labeled(file))
    labeled = [(response, label) for (response,), label in _load(groups, encoder)]
    others = _unrelated([response for response, _ in labeled], files, seed)
    return [LabeledResponse(*one, other) for one, other in zip(labeled, others, strict=True)]


def _load(groups: Iterator[_Group[ExtraT]], encoder: RowEncoder) -> Iterator[tuple[tuple[Demonstration, ...], ExtraT]]:
    """The tokenized responses of each group of which none is overlong."""
    num_kept = 0
    for batch in batches(groups):
        encoded = encoder([row for rows, _ in batch for row in rows])
        for rows, extra in batch:
            responses = [next(encoded) for _ in rows]
            if any(encoder.drops(row.place, one) for row, one in responses):
                continue
            if len(responses) > 1 and responses[0][1] == responses[1][1]:
                problem = "the chosen and the rejected response have the same tokens"
                raise rows[0].place.error(problem, "Drop the row.", column="rejected")
            num_kept += 1
            yield tuple(one for _, one in responses), extra
    encoder.report(num_kept)


def _unrelated(responses: Sequence[Demonstration], files: Sequence[str | Path], seed: int) -> list[Demonstration]:
    """Each prompt with the response to another prompt: the next one in a random cycle whose prompt differs."""
    order = np.random.default_rng([seed, 2]).permutation(len(responses)).tolist()
    # Backwards through two rounds: the partner of a response is its successor's, if they share the prompt.
    partners: dict[int, int] = {}
    for position in reversed(range(2 * len(order) - 1)):
        here, after = order[position % len(order)], order[(position + 1) % len(order)]
        if responses[here].prompt_ids != responses[after].prompt_ids:
            partners[here] = after
        elif after in partners:
            partners[here] = partners[after]
    if len(partners) < len(responses):
        names = ", ".join(map(str, files))
        raise DataError("all responses belong to one prompt", "KTO needs at least two prompts.", file=names)
    return [
        Demonstration(one.prompt_ids, other.response_ids, other.response_mask)
        for one, other in ((responses[index], responses[partners[index]]) for index in range(len(responses)))
    ]
