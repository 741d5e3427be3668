"""Pairs and labeled responses: formats, tokens, and errors that name the row."""

import random
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_data_rows import write_lines

from plinth_testing import raises
from rl_data import (
    DataConfig,
    DataConfigError,
    DataError,
    Demonstration,
    check_preferences,
    load_demonstrations,
    load_labeled,
    load_pairs,
    write_task,
)
from rl_data.preferences import _unrelated
from rl_data.tasks.arithmetic import NUM_NUMBERS, slipped, working

CONFIG = DataConfig()
USER = {"role": "user", "content": "2 + 3"}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    return write_lines(path, list(rows))


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_pairs_of_the_built_in_task_share_the_prompt_and_end(tmp_path: Path, tokenizer: Any) -> None:
    files = write_task(tmp_path, num_train=2, num_val=2, num_demonstrations=2, num_pairs=50)
    assert files.pairs is not None
    assert check_preferences([files.pairs], "pairs") == 50
    pairs = load_pairs([files.pairs], tokenizer, CONFIG)
    for pair in pairs:
        assert pair.chosen.prompt_ids == pair.rejected.prompt_ids
        assert pair.chosen.response_ids[-1] == pair.rejected.response_ids[-1] == tokenizer.eos_token_id
        assert pair.num_tokens == pair.chosen.num_tokens + pair.rejected.num_tokens
        right, wrong = (tokenizer.decode(one.response_ids[:-1]).split()[-1] for one in (pair.chosen, pair.rejected))
        assert right != wrong
    # About half of the rejected responses show a calculation.
    lines = [tokenizer.decode(pair.rejected.response_ids).count("\n") for pair in pairs]
    assert 10 < sum(count == 2 for count in lines) < 40
    # The files without pairs are the same.
    alone = write_task(tmp_path / "alone", num_train=2, num_val=2, num_demonstrations=2)
    assert alone.pairs is None
    assert alone.demonstrations.read_bytes() == files.demonstrations.read_bytes()


@given(seed=st.integers(0, 10**6), x=st.integers(1, 50), y=st.integers(1, 50))
def test_a_slip_is_one_wrong_number_and_what_follows_from_it(seed: int, x: int, y: int) -> None:
    right, wrong = working(x, y), slipped(random.Random(seed), x, y)
    numbers = [[int(n) for n in re.findall(r"\d+", text)] for text in (right, wrong)]
    assert len(numbers[0]) == len(numbers[1]) == NUM_NUMBERS
    assert numbers[1][-1] != x + y
    assert re.sub(r"\d+", "n", right) == re.sub(r"\d+", "n", wrong)
    a, b, ones, d, e, carry, tens, answer = numbers[1]
    x_ones, x_tens, y_ones, y_tens = x % 10, x // 10, y % 10, y // 10
    slips = [a != x_ones, b != y_ones, ones != a + b, d != x_tens, e != y_tens, carry != ones // 10]
    assert sum(slips) + (tens != d + e + carry) + (answer != 10 * tens + ones % 10) == 1


def test_the_share_of_slips_changes_the_rejected_responses_alone(tmp_path: Path) -> None:
    def pairs(share: float) -> list[dict[str, Any]]:
        counts = {"num_train": 2, "num_val": 2, "num_demonstrations": 2, "num_pairs": 300}
        files = write_task(tmp_path / str(share), slip_share=share, **counts)
        assert files.pairs is not None
        return pq.read_table(files.pairs).to_pylist()

    def num_shown(rows: list[dict[str, Any]]) -> int:
        """Rejected responses that are calculations."""
        return sum("\n" in row["rejected"] for row in rows)

    without, half, all_ = pairs(0), pairs(0.5), pairs(1)
    assert num_shown(all_) == 300
    assert num_shown(without) < num_shown(half) < 300
    assert all(row["chosen"].split()[-1] != row["rejected"].split()[-1] for row in half)
    with raises(DataConfigError, field="slip_share", value=1.5):
        pairs(1.5)


def test_every_format_gives_the_tokens_of_demonstrations(tmp_path: Path, tokenizer: Any) -> None:
    wanted = load_demonstrations(
        [write(tmp_path / "d.jsonl", {"question": "2 + 3", "answer": "#### 5"})], tokenizer, CONFIG
    )
    rows: list[dict[str, Any]] = [
        {"question": "2 + 3", "chosen": "#### 5", "rejected": "#### 6"},
        {"prompt": "2 + 3\n", "chosen": "#### 5", "rejected": "#### 6"},
        {"prompt": [USER], "chosen": "#### 5", "rejected": "#### 6"},
        {"prompt": [USER], "chosen": [said("#### 5")], "rejected": [said("#### 6")]},
        {"chosen": [USER, said("#### 5")], "rejected": [USER, said("#### 6")]},
        {"prompt": "2 + 3", "chosen": [USER, said("#### 5")], "rejected": [USER, said("#### 6")]},
    ]
    for index, row in enumerate(rows):
        (pair,) = load_pairs([write(tmp_path / f"{index}.jsonl", row)], tokenizer, CONFIG)
        if index in (3, 4, 5):  # without a chat template, a turn of messages ends with its line break
            assert tokenizer.decode(pair.chosen.response_ids).startswith("#### 5")
        else:
            assert [pair.chosen] == wanted
        assert pair.chosen != pair.rejected
        assert pair.margin == 0.0


def test_margins_and_overlong_pairs(tmp_path: Path, tokenizer: Any) -> None:
    row = {"question": "2 + 3", "chosen": "#### 5", "rejected": "#### 6", "margin": 2}
    file = write(tmp_path / "p.jsonl", row, row | {"rejected": "2 + 3 = 6 " * 9, "margin": 0.5})
    assert [pair.margin for pair in load_pairs([file], tokenizer, CONFIG)] == [2.0, 0.5]
    assert [pair.margin for pair in load_pairs([file], tokenizer, CONFIG, max_length=10)] == [2.0]
    with raises(DataError, row=2, setting="data.overlong=filter"):
        load_pairs([file], tokenizer, DataConfig(overlong="refuse"), max_length=10)


@pytest.mark.parametrize(
    ("column", "value"),
    [("rejected", "#### 5"), ("chosen", ""), ("question", None), ("margin", -1), ("margin", "much"), ("margin", None)],
)
def test_bad_pairs_are_refused_by_row(tmp_path: Path, column: str, value: Any) -> None:
    good = {"question": "2 + 3", "chosen": "#### 5", "rejected": "#### 6", "margin": 0}
    file = write(tmp_path / "p.jsonl", good, good | {column: value})
    with raises(DataError, row=2, column=column):
        check_preferences([file], "pairs")


def test_conversations_must_share_their_prompt_and_files_their_columns(tmp_path: Path) -> None:
    other = {"role": "user", "content": "2 + 4"}
    file = write(tmp_path / "c.jsonl", {"chosen": [USER, said("5")], "rejected": [other, said("6")]})
    with raises(DataError, row=1, column="rejected"):
        check_preferences([file], "pairs")
    with raises(DataError, row=None, column="rejected"):
        check_preferences([write(tmp_path / "m.jsonl", {"prompt": "a", "chosen": "b"})], "pairs")
    with raises(DataError, row=None, column="label"):
        check_preferences([write(tmp_path / "l.jsonl", {"prompt": "a", "completion": "b"})], "labeled")
    bad = write(tmp_path / "b.jsonl", {"prompt": "a", "completion": "b", "label": "good"})
    with raises(DataError, row=1, column="label"):
        check_preferences([bad], "labeled")


def test_labeled_responses_and_pairs_as_such(tmp_path: Path, tokenizer: Any) -> None:
    labeled = write(
        tmp_path / "l.jsonl",
        *(
            {"question": f"2 + {n}", "answer": f"#### {n}", "label": label}
            for n, label in ((1, True), (2, 0), (3, "1"))
        ),
    )
    responses = load_labeled([labeled], tokenizer, CONFIG)
    assert [one.is_desirable for one in responses] == [True, False, True]
    for one in responses:
        assert one.unrelated.prompt_ids == one.response.prompt_ids
        assert one.unrelated.response_ids != one.response.response_ids
    pair = {"chosen": "#### 5", "rejected": "#### 6"}
    pairs = write(tmp_path / "p.jsonl", {"question": "2 + 3"} | pair, {"question": "2 + 4"} | pair)
    assert check_preferences([pairs], "labeled") == 4
    responses = load_labeled([pairs], tokenizer, CONFIG)
    assert [one.is_desirable for one in responses] == [True, False, True, False]
    with raises(DataError, file=str(tmp_path / "one.jsonl")):
        load_labeled([write(tmp_path / "one.jsonl", {"question": "2 + 3"} | pair)], tokenizer, CONFIG)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=20).filter(lambda prompts: len(set(prompts)) > 1),
    st.integers(0, 9),
)
def test_unrelated_responses_belong_to_other_prompts(prompts: list[int], seed: int) -> None:
    responses = [Demonstration((prompt,), (prompt, index)) for index, prompt in enumerate(prompts)]
    others = _unrelated(responses, ["f"], seed)
    assert [one.prompt_ids for one in others] == [one.prompt_ids for one in responses]
    assert all(other.response_ids[0] != one.prompt_ids[0] for one, other in zip(responses, others, strict=True))
    assert others == _unrelated(responses, ["f"], seed)


def test_a_task_without_pairs_refuses_them(tmp_path: Path) -> None:
    with raises(DataConfigError, field="num_pairs", value=3):
        write_task(tmp_path, kind="stones", num_pairs=3)
