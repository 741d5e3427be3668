"""Odd parquet files: each loads right, or is refused with file, column and row."""

import datetime
import decimal
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rl_data_rows import iter_rows

from plinth_testing import raises
from rl_data import DataConfig, DataError, RewardConfig, check_demonstrations, check_files, gsm8k_score
from rl_data.rows import Row

SOURCE = "openai/gsm8k"
NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"\xff\xfea")]
)
DAY = datetime.datetime(2026, 11, 22)


def answers(values: Any, type_: pa.DataType | None = None) -> pa.Table:
    """Rows of the verl schema with these values of `ground_truth`."""
    truth = values if isinstance(values, pa.Array) else pa.array(values, type_)
    rewards = pa.StructArray.from_arrays([truth], ["ground_truth"])
    return pa.table({"prompt": ["1+1?"] * len(truth), "reward_model": rewards, "data_source": [SOURCE] * len(truth)})


def verl(**columns: Any) -> pa.Table:
    """Two rows of the verl schema with some columns replaced."""
    table = {"prompt": ["1+1?"] * 2, "reward_model": [{"ground_truth": "2"}] * 2, "data_source": [SOURCE] * 2}
    return pa.table(table | columns)


def gsm8k(question: Any = ("1+1?", "2+2?"), answer: Any = ("#### 2", "#### 4"), **more: Any) -> pa.Table:
    """Two rows of the GSM8K schema with some columns replaced."""
    columns = {"question": question, "answer": answer, **more}
    return pa.table({name: list(value) if isinstance(value, tuple) else value for name, value in columns.items()})


def dictionary(values: list[Any]) -> pa.Array:
    return pa.array(values).dictionary_encode()


LOADED: dict[str, tuple[pa.Table, list[str]]] = {
    "text": (gsm8k(), ["2", "4"]),
    "large text": (gsm8k(pa.array(["a", "b"], pa.large_string())), ["2", "4"]),
    "text views": (gsm8k(pa.array(["a", "b"], pa.string_view())), ["2", "4"]),
    "dictionary-encoded text": (gsm8k(dictionary(["a", "a"]), dictionary(["#### 1", "#### 1"])), ["1", "1"]),
    "huge text": (gsm8k(("a" * 1_000_000, "b")), ["2", "4"]),
    "fractions as answers": (gsm8k(answer=("#### 1", "#### 3/4")), ["1", "3/4"]),
    "text with NUL and emoji": (gsm8k(("a\0\N{GRINNING FACE}", "\u202e")), ["2", "4"]),
    "further columns of odd types": (
        gsm8k(when=[DAY, None], raw=[b"\xff", None], deep=[[[{"a": []}]], None]),
        ["2", "4"],
    ),
    "further columns that occur twice": (
        pa.Table.from_arrays(
            [pa.array(["q"]), pa.array(["#### 1"]), pa.array([1]), pa.array([2])], ["question", "answer", "x", "x"]
        ),
        ["1"],
    ),
    "no data source in some rows": (gsm8k(data_source=[SOURCE, None]), ["2", "4"]),
    "both schemas": (verl(question=["a", "b"], answer=[None, None]), ["2", "2"]),
    "messages": (verl(prompt=[[{"role": "user", "content": "a"}]] * 2), ["2", "2"]),
    "messages with further fields": (verl(prompt=[[{"role": "user", "content": "a", "name": None}]] * 2), ["2", "2"]),
    "map reward_model": (
        verl(reward_model=pa.array([[("ground_truth", "2")]] * 2, pa.map_(pa.string(), pa.string()))),
        ["2", "2"],
    ),
    "int8 answers": (answers([-7, 3], pa.int8()), ["-7", "3"]),
    "uint64 answers": (answers([2**64 - 1], pa.uint64()), [str(2**64 - 1)]),
    "float answers": (answers([0.5, 72.0]), ["0.5", "72.0"]),
    "decimal answers": (answers([decimal.Decimal("1.10")]), ["1.10"]),
    "answers with spaces, commas and $": (answers([" $1,000 "]), ["$1,000"]),
    "dictionary-encoded answers": (answers(dictionary(["7", "7"])), ["7", "7"]),
    "lists of accepted answers": (answers([["1", "1.5"], ["$2"]]), ['["1", "1.5"]', '["$2"]']),
    "lists of numbers": (answers([[1, 2]]), ["[1, 2]"]),
    "fixed-size lists of decimals": (answers([[decimal.Decimal("1.5")]]), ['["1.5"]']),
}
"""By name: the table, and the answers that its rows have."""

REFUSED: dict[str, tuple[pa.Table, str | None, int | None]] = {
    "no rows": (gsm8k().slice(0, 0), None, None),
    "no columns": (pa.table({}), None, None),
    "integer questions": (gsm8k((1, 2)), "question", 0),
    "list questions": (gsm8k((["a"], ["b"])), "question", 0),
    "null questions": (gsm8k(("a", None)), "question", 1),
    "blank questions": (gsm8k(("a", " \n")), "question", 1),
    "columns of type null": (gsm8k(pa.nulls(2)), "question", 0),
    "integer answers to questions": (gsm8k(answer=(1, 2)), "answer", 0),
    "list answers to questions": (gsm8k(answer=(["#### 1"], [])), "answer", 0),
    "answers that are no number": (gsm8k(answer=("#### 1", "#### seven")), "answer", 1),
    "answers without a mark": (gsm8k(answer=("#### 1", "72")), "answer", 1),
    "answers with a mark alone": (gsm8k(answer=("#### 1", "####\n")), "answer", 1),
    "null answers to questions": (gsm8k(answer=("#### 1", None)), "answer", 1),
    "empty answers to questions": (gsm8k(answer=("#### 1", "")), "answer", 1),
    "answers with two commas": (gsm8k(answer=("#### 1", "#### 1.3.4")), "answer", 1),
    "questions that are not UTF-8": (gsm8k(NOT_UTF8), None, None),
    "integer data sources": (gsm8k(data_source=[SOURCE, ""]), "data_source", 1),
    "list data sources": (verl(data_source=[[SOURCE], []]), "data_source", 0),
    "unknown data sources": (verl(data_source=[SOURCE, "mine"]), "data_source", 1),
    "null data sources": (verl(data_source=[SOURCE, None]), "data_source", 1),
    "integer prompts": (verl(prompt=[1, 2]), "prompt", 0),
    "struct prompts": (verl(prompt=[{"role": "user", "content": "a"}] * 2), "prompt", 0),
    "null prompts": (verl(prompt=["a", None]), "prompt", 1),
    "empty lists as prompts": (verl(prompt=[[], []]), "prompt", 0),
    "lists of texts as prompts": (verl(prompt=[["a"], ["b"]]), "prompt", 0),
    "lists of nulls as prompts": (verl(prompt=[[None], [None]]), "prompt", 0),
    "messages with parts": (verl(prompt=[[{"role": "user", "content": ["a"]}]] * 2), "prompt", 0),
    "messages without a role": (verl(prompt=[[{"content": "a"}]] * 2), "prompt", 0),
    "text reward_model": (verl(reward_model=['{"ground_truth": 1}'] * 2), "reward_model", 0),
    "list reward_model": (verl(reward_model=[[{"ground_truth": "1"}]] * 2), "reward_model", 0),
    "null reward_model": (verl(reward_model=[{"ground_truth": "1"}, None]), "reward_model", 1),
    "null answers": (answers(["1", None]), "reward_model", 1),
    "empty lists as answers": (answers([["1"], []]), "reward_model", 1),
    "nan answers": (answers([1.0, float("nan")]), "reward_model", 1),
    "infinite answers": (answers([1.0, float("inf")]), "reward_model", 1),
    "boolean answers": (answers([True]), "reward_model", 0),
    "bytes as answers": (answers([b"1"]), "reward_model", 0),
    "dates as answers": (answers([DAY]), "reward_model", 0),
    "lists of bytes as answers": (answers([[b"1"]]), "reward_model", 0),
    "lists of words as answers": (answers([["1"], ["1", "one"]]), "reward_model", 1),
    "lists of lists as answers": (answers([[["1"]]]), "reward_model", 0),
    "struct answers": (answers([{"target": ["1"]}]), "reward_model", 0),
    "times that Python cannot hold": (answers(pa.array([1], pa.timestamp("ns"))), "reward_model", 0),
    "two question columns": (
        pa.Table.from_arrays([pa.array(["a"])] * 2 + [pa.array(["#### 1"])], ["question", "question", "answer"]),
        "question",
        None,
    ),
    "two data_source columns": (
        pa.Table.from_arrays([*verl().columns, verl()["data_source"]], [*verl().column_names, "data_source"]),
        "data_source",
        None,
    ),
    "column names in capitals": (pa.table({"Question": ["a"], "Answer": ["#### 1"]}), "prompt", None),
    "three thousand columns": (pa.table({f"c{i}": [1] for i in range(3_000)}), "prompt", None),
}
"""By name: the table, and the column and row that the error names."""


def cut(path: Path) -> None:
    pq.write_table(gsm8k(), path)
    path.write_bytes(path.read_bytes()[:-20])


def damage(path: Path) -> None:
    """Overwrites the data pages and leaves the footer."""
    pq.write_table(gsm8k(("a" * 5000, "b" * 5000)), path, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 5000 + whole[5004:])


def loop(path: Path) -> None:
    path.symlink_to(path.name)


FILES: dict[str, Callable[[Path], Any]] = {
    "truncated": cut,
    "damaged data": damage,
    "encrypted footer": lambda path: path.write_bytes(b"PARE" + bytes(100) + b"\4\0\0\0PARE"),
    "wrong magic": lambda path: path.write_bytes(b"PK\3\4" * 50),
    "only magic": lambda path: path.write_bytes(b"PAR1PAR1"),
    "footer of an impossible size": lambda path: path.write_bytes(b"PAR1" + b"\xff" * 4 + b"PAR1"),
    "loop of links": loop,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
}
"""By name: the function that makes the file."""


@pytest.mark.parametrize("case", LOADED)
def test_an_odd_file_loads(tmp_path: Path, case: str) -> None:
    table, expected = LOADED[case]
    pq.write_table(table, tmp_path / "a.parquet")
    assert check_files([tmp_path / "a.parquet"]) == len(expected)
    rows = list(iter_rows(tmp_path / "a.parquet", DataConfig()))
    assert [row.ground_truth for row in rows] == expected
    assert all(best_score(row) == 1.0 for row in rows), "the rule scores every answer"


def best_score(row: Row) -> float:
    right = row.ground_truth.strip('[]"').split(",")[-1].strip(' "') if row.ground_truth[0] == "[" else row.ground_truth
    return gsm8k_score(f"so #### {right}", row.ground_truth, RewardConfig())


@pytest.mark.parametrize("case", REFUSED)
def test_an_odd_file_is_refused_with_column_and_row(tmp_path: Path, case: str) -> None:
    table, column, row = REFUSED[case]
    file = tmp_path / "a.parquet"
    pq.write_table(table, file)
    with raises(DataError, file=str(file), column=column, row=row) as caught:
        check_files([file])
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("case", FILES)
def test_other_things_than_parquet_files_are_refused(tmp_path: Path, case: str) -> None:
    FILES[case](tmp_path / "a.parquet")
    for check in (check_files, check_demonstrations):
        with raises(DataError, file=str(tmp_path / "a.parquet"), row=None):
            check([tmp_path / "a.parquet"])


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000, "a\udcff", "", "a.json/b"])
def test_names_that_no_file_can_have(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").touch()
    with raises(DataError, file=name):
        check_files([name])


def test_functions_of_the_user_get_lists_and_structs_as_json(tmp_path: Path) -> None:
    truths = [{"target": ["a", "é"]}, {"target": []}]
    pq.write_table(answers(truths), tmp_path / "a.parquet")
    assert check_files([tmp_path / "a.parquet"], rewards=()) == 2
    assert [row.ground_truth for row in iter_rows(tmp_path / "a.parquet", DataConfig())] == [
        '{"target": ["a", "é"]}',
        '{"target": []}',
    ]


@pytest.mark.parametrize(("answer", "score"), [("2", 1.0), ("2.50", 1.0), ("3", 0.1), ("no number", 0.0)])
def test_every_accepted_answer_is_right(answer: str, score: float) -> None:
    config = RewardConfig(format_score=0.1)
    assert gsm8k_score(f"#### {answer}", '["2", "$2.5"]', config) == score
    assert gsm8k_score(f"#### {answer}", "[broken", config) == (0.1 if score else 0.0)
