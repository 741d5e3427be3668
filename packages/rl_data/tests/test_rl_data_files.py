"""All kinds of data files: the same rows, whatever the file; errors with file, place and column."""

import csv
import gzip
import json
import logging
import math
import random
import runpy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_data_rows import Rows, iter_rows, write_lines

from plinth_testing import raises
from rl_data import (
    ColumnsConfig,
    DataConfig,
    DataError,
    check_demonstrations,
    check_files,
    load_demonstrations,
    load_prompts,
    load_tokenizer,
    make_reward,
)

ROWS: Rows = [
    {"question": "Tom has 3 apples.", "answer": "#### 3", "level": 1, "tags": ["a"], "meta": {"x": 1.5, "ok": True}},
    {"question": "Tom has 4 apples.", "answer": "#### 4", "level": None, "tags": [], "meta": {"x": 2.0, "ok": None}},
]
FREE = DataConfig(columns=ColumnsConfig(prompt="problem", ground_truth="solution"))
"""Columns of the user's own."""


def write_parquet(path: Path, rows: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"), row_group_size=3)
    return path.with_suffix(".parquet")


def write_saved(path: Path, rows: Rows) -> Path:
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(path.with_suffix(".saved"))
    return path.with_suffix(".saved")


def write_split(path: Path, rows: Rows) -> Path:
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list(rows)
    datasets.DatasetDict(train=data, other=data.select([0])).save_to_disk(path.with_suffix(".splits"))
    return Path(f"{path.with_suffix('.splits')}:train")


def write_json_lines(path: Path, rows: Rows) -> Path:
    return write_lines(path.with_suffix(".jsonl"), rows)


def write_compressed(path: Path, rows: Rows) -> Path:
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return path.with_suffix(".jsonl.gz")


def write_array(path: Path, rows: Rows) -> Path:
    path.with_suffix(".json").write_bytes(b"\xef\xbb\xbf\n" + json.dumps(rows, indent=2).encode())
    return path.with_suffix(".json")


def write_csv(path: Path, rows: Rows) -> Path:
    def cell(value: Any) -> str:
        return "" if value is None else value if isinstance(value, str) else json.dumps(value)

    with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(rows[0])
        writer.writerows([cell(row[name]) for name in rows[0]] for row in rows)
    return path.with_suffix(".csv")


WRITERS: list[Callable[[Path, Rows], Path]] = [
    write_parquet,
    write_saved,
    write_split,
    write_json_lines,
    write_compressed,
    write_array,
    write_csv,
]


def contents(file: Path, config: DataConfig) -> list[tuple[Any, ...]]:
    """The rows without their places."""
    rows = list(iter_rows(file, config))
    assert [row.place.number for row in rows] == sorted({row.place.number for row in rows})
    return [(row.messages, row.tools, row.ground_truth, row.data_source, row.extra, row.is_question) for row in rows]


@pytest.mark.parametrize("write", WRITERS)
def test_every_kind_of_file_gives_the_same_prompts(
    tmp_path: Path, tokenizer: Any, write: Callable[[Path, Rows], Path]
) -> None:
    file = write(tmp_path / "a", ROWS)
    assert check_files([file]) == check_demonstrations([file]) == 2
    prompts = load_prompts([file], tokenizer, DataConfig(system_prompt="all"))
    assert [prompt.text for prompt in prompts] == ["all\nTom has 3 apples.\n", "all\nTom has 4 apples.\n"]
    assert [prompt.ground_truth for prompt in prompts] == ["3", "4"]
    assert [prompt.extra for prompt in prompts] == [
        {"level": 1, "tags": ["a"], "meta": {"x": 1.5, "ok": True}},
        {"level": None, "tags": [], "meta": {"x": 2.0, "ok": None}},
    ]
    roles = [{"role": "system", "content": "all"}, {"role": "user", "content": "Tom has 3 apples."}]
    assert list(prompts[0].messages) == roles
    assert len(load_demonstrations([file], tokenizer, DataConfig())) == 2


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
# A text that reads as a number, true or JSON in each row is one of them in CSV, which has no types.
WORDS = TEXTS.map(lambda text: f"w{text}")
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=64).map(lambda x: x + 0.0)
EXTRA: dict[str, st.SearchStrategy[Any]] = {
    "word": WORDS,
    "whole": st.integers(-(2**63), 2**63 - 1),
    "ratio": FLOATS,
    "truth": st.booleans(),
    "items": st.lists(WORDS | st.none(), max_size=3),
    "deep": st.fixed_dictionaries({"a": st.lists(st.fixed_dictionaries({"b": st.none() | FLOATS}), max_size=2)}),
}


@st.composite
def tables(draw: st.DrawFn) -> Rows:
    """Rows of the same columns; every extra column has a value in the first row, which gives it its type."""
    names = draw(st.lists(st.sampled_from(sorted(EXTRA)), unique=True))
    rows = []
    for number in range(draw(st.integers(1, 5))):
        extra = {name: draw(EXTRA[name] if number == 0 else st.none() | EXTRA[name]) for name in names}
        rows.append({"problem": draw(WORDS), "solution": draw(st.none() | WORDS), **extra})
    return rows


@settings(deadline=None, max_examples=10)
@given(rows=tables())
def test_the_same_table_in_all_formats_gives_the_same_rows(rows: Rows) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = [write(Path(folder) / "a", rows) for write in WRITERS]
        expected = [
            (
                ({"role": "user", "content": row["problem"]},),
                (),
                (row["solution"] or "").strip(),
                "",
                row_extra(row),
                True,
            )
            for row in rows
        ]
        for file in files:
            rows_read = contents(file, FREE)
            assert rows_read == expected, file
            assert repr([row[4] for row in rows_read]) == repr([row[4] for row in expected]), f"types in {file}"
            assert check_files([file], FREE, rewards=()) == len(rows)


def row_extra(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("problem", "solution")}


@pytest.mark.parametrize("write", WRITERS)
def test_row_1234_without_an_answer_is_named(tmp_path: Path, write: Callable[[Path, Rows], Path]) -> None:
    rows = [{"question": "a", "answer": "#### 1", "x": "y"}] * 1_240
    rows = [*rows[:1_234], {"question": "a", "answer": None, "x": "y"}, *rows[1_234:]]
    file = write(tmp_path / "a", rows)
    lines = {"a.jsonl": 1_235, "a.jsonl.gz": 2_469}  # blank lines count
    with raises(DataError, row=lines.get(file.name, 1_234), is_line=file.name in lines, column="answer"):
        check_files([file])


REFUSED: dict[str, tuple[str, str | bytes, int | None, str | None]] = {
    "no lines": ("a.jsonl", "\n\n", None, None),
    "an empty array": ("a.json", "[]", None, None),
    "only a header": ("a.csv", "question,answer\n", None, None),
    "only blank lines": ("a.csv", "\n\n", None, None),
    "a broken line": ("a.jsonl", '{"question": "a", "answer": "#### 1"}\n{"question": \n', 2, None),
    "a broken array": ("a.json", '[{"question": "a"},\n\n {]', 3, None),
    "a line that is no object": ("a.jsonl", "7\n", 1, None),
    "an array in a line": ("a.jsonl", '{"question": "a", "answer": "#### 1"}\n[1]', 2, None),
    "an array of numbers": ("a.json", "[1]", 0, None),
    "nesting without end": ("a.jsonl", '{"a": ' + "[" * 100_000, 1, None),
    "a number of 5000 digits": ("a.jsonl", '{"a": ' + "1" * 5000 + "}", 1, None),
    "half a surrogate pair": ("a.jsonl", '{"question": "a", "answer": "#### 1", "x": ["\\ud800"]}', 1, None),
    "half a surrogate pair as a key": ("a.jsonl", '{"\\ud800": 1}', 1, None),
    "latin-1": ("a.jsonl", '{"question": "é"}'.encode("latin-1"), 1, None),
    "UTF-16": ("a.jsonl", '{"question": "a"}'.encode("utf-16"), 1, None),
    "NaN": ("a.jsonl", '{"question": "a", "answer": "#### 1", "x": NaN}', 1, "x"),
    "a number above all floats": ("a.jsonl", '{"question": "a", "answer": "#### 1", "x": 1e999}', 1, "x"),
    "a line without the question": (
        "a.jsonl",
        '{"question": "a", "answer": "#### 1"}\n{"answer": "#### 1"}',
        2,
        "question",
    ),
    "no question column": ("a.jsonl", '{"text": "a", "answer": "#### 1"}', None, "question"),
    "parquet named as JSON": ("a.jsonl", b"PAR1\xff\xfe", 1, None),
    "JSON named as parquet": ("a.parquet", '{"question": "a"}', None, None),
    "not compressed": ("a.jsonl.gz", '{"question": "a"}', None, None),
    "compressed and cut": ("a.jsonl.gz", gzip.compress(b'{"question": "a"}' * 99)[:-9], None, None),
    "compressed and damaged": ("a.csv.gz", gzip.compress(bytes(range(256)) * 9)[:40] + b"\xff" * 40, None, None),
    "compressed parquet": ("a.parquet.gz", gzip.compress(b"PAR1"), None, None),
    "a short row": ("a.csv", 'question,answer\na,"#### 1"\nb\n', 1, None),
    "a long row": ("a.csv", "question,answer\na,#### 1,000\n", 0, None),
    "an open quote": ("a.csv", 'question,answer\na,#### 1\nb,"#### 2\nc,#### 3\n', None, None),
    "CSV in latin-1": ("a.csv", "question,answer\né,#### 1\n".encode("latin-1"), None, None),
    "an empty cell": ("a.csv", 'question,answer\n"a\nb",#### 1\n\n,#### 2\n', 1, "question"),
    "a header that occurs twice": ("a.csv", "question,question,answer\na,b,#### 1\n", None, "question"),
    "semicolons": ("a.csv", "question;answer\na;#### 1\n", None, "prompt"),
}
"""By name: file name, content, and the row and column that the error names."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_text_file_is_refused_with_line_and_column(tmp_path: Path, case: str) -> None:
    name, content, row, column = REFUSED[case]
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with raises(DataError, file=str(file), row=row, column=column) as caught:
        check_files([file])
    assert len(str(caught.value).encode()) < 1000


def test_cells_of_csv_have_the_types_of_their_column(tmp_path: Path) -> None:
    text = (
        'problem,solution,id,zip,mixed,flag,list,"odd, name"\n1,007,1,007,1,True,"[1, ""a""]",\n'
        '2,1.50,-2.5e3,8,x,false,{},""\n'
    )
    (tmp_path / "a.csv").write_text(text)
    first, second = iter_rows(tmp_path / "a.csv", FREE)
    assert (first.messages[0]["content"], first.ground_truth, second.ground_truth) == ("1", "007", "1.50")
    assert first.extra == {"id": 1, "zip": "007", "mixed": "1", "flag": True, "list": [1, "a"], "odd, name": None}
    assert second.extra == {"id": -2500.0, "zip": "8", "mixed": "x", "flag": False, "list": {}, "odd, name": None}


def test_huge_cells_and_lines_of_all_ends_are_read(tmp_path: Path) -> None:
    huge = "a" * 300_000
    (tmp_path / "a.csv").write_bytes(f'\ufeffquestion,answer\r\n"{huge}\r\n,",#### 1\r\nb,#### 2'.encode())
    (tmp_path / "b.jsonl").write_bytes(b'{"question": "a\\u2028", "answer": "#### 1"}\r\n')
    assert [row.place.number for row in iter_rows(tmp_path / "a.csv", DataConfig())] == [0, 1]
    assert next(iter_rows(tmp_path / "a.csv", DataConfig())).messages[0]["content"] == f"{huge}\r\n,"
    (row,) = iter_rows(tmp_path / "b.jsonl", DataConfig())
    assert row.messages[0]["content"] == "a\u2028"


def test_columns_are_named_by_the_configuration(tmp_path: Path) -> None:
    rows = [{"problem": "a", "info": {"target": [1, 2]}, "kind": "openai/gsm8k", "question": "b", "answer": "c"}]
    file = write_json_lines(tmp_path / "a", rows)
    config = DataConfig(
        columns=ColumnsConfig(prompt="problem", ground_truth="info.target", data_source="kind"),
        extra_columns=("answer", "info"),
        question_template="say {question}",
    )
    assert check_files([file], config) == 1
    (row,) = iter_rows(file, config)
    assert (row.ground_truth, row.data_source) == ("[1, 2]", "openai/gsm8k")
    assert row.extra == {"answer": "c", "info": {"target": [1, 2]}}
    assert row.is_question
    for columns, named in (
        (ColumnsConfig(prompt="x"), "x"),
        (ColumnsConfig(prompt="problem", ground_truth="y.z"), "y"),
        (ColumnsConfig(prompt="problem", data_source="z"), "z"),
        (ColumnsConfig(prompt="problem", tools="t"), "t"),
    ):
        with raises(DataError, column=named, row=None, setting="data.columns"):
            check_files([file], DataConfig(columns=columns))
    with raises(DataError, column="w", row=None):
        check_files([file], DataConfig(columns=config.columns, extra_columns=("w",)))
    with raises(DataError, column="info", row=1):
        check_files([file], DataConfig(columns=ColumnsConfig(prompt="problem", ground_truth="info.nothing")))


def test_an_extra_column_that_a_line_lacks_is_named(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "#### 1", "x": 1}] * 3
    file = write_json_lines(tmp_path / "a", [*rows, {"question": "a", "answer": "#### 1"}])
    assert [row.extra for row in iter_rows(file, DataConfig())] == [{"x": 1}] * 3 + [{}]
    with raises(DataError, column="x", row=4, setting="data.extra_columns"):
        check_files([file], DataConfig(extra_columns=("x",)))


def test_columns_that_json_cannot_hold_are_left_out_with_one_line(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"question": ["Tom"], "answer": ["#### 1"], "raw": [b"a"], "deep": [[{"a": b""}]], "n": [1]})
    file = tmp_path / "a.parquet"
    pq.write_table(table, file)
    with caplog.at_level(logging.WARNING):
        (prompt,) = load_prompts([file], tokenizer, DataConfig())
    assert prompt.extra == {"n": 1}
    record, _how_rendered = caplog.records
    assert "left out of prompt.extra: 'raw' (has the type binary), 'deep' (has the type list<" in record.getMessage()
    with raises(DataError, column="raw", row=None, setting="data.extra_columns"):
        check_files([file], DataConfig(extra_columns=("raw",)))
    caplog.clear()
    (prompt,) = load_prompts([file], tokenizer, DataConfig(extra_columns=()))
    assert (prompt.extra, len(caplog.records)) == ({}, 1)


def test_numbers_that_json_cannot_hold_are_refused_with_their_row(tmp_path: Path) -> None:
    table = pa.table({"question": ["a", "b"], "answer": ["#### 1"] * 2, "x": [1.0, math.nan], "y": [1, 2]})
    file = tmp_path / "a.parquet"
    pq.write_table(table, file)
    with raises(DataError, column="x", row=1):
        check_files([file])
    assert check_files([file], DataConfig(extra_columns=("y",))) == 2


def test_json_columns_of_datasets_are_values(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    columns = {"question": ["a", "b"], "answer": ["#### 1"] * 2, "x": [{"a": 1}, {"b": "c"}], "y": [[1, "a"], []]}
    data = datasets.Dataset.from_dict(columns, on_mixed_types="use_json")
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "a.parquet")
    for name in ("saved", "a.parquet"):
        assert [row.extra for row in iter_rows(tmp_path / name, DataConfig())] == [
            {"x": {"a": 1}, "y": [1, "a"]},
            {"x": {"b": "c"}, "y": []},
        ]


def test_a_saved_data_set_keeps_its_selection_and_order(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"question": list("abc"), "answer": ["#### 1"] * 3}).select([2, 0])
    data.with_format("numpy", columns=["question"]).save_to_disk(tmp_path / "a")
    assert [row.messages[0]["content"] for row in iter_rows(tmp_path / "a", DataConfig())] == ["c", "a"]


def test_folders(tmp_path: Path) -> None:
    write_split(tmp_path / "a", ROWS)
    write_saved(tmp_path / "b", ROWS)
    splits, saved = tmp_path / "a.splits", tmp_path / "b.saved"
    assert check_files([f"{splits}:other"]) == 1
    names = (splits, f"{splits}:test", f"{splits}:", f"{saved}:train", f"{tmp_path}:train", f"{tmp_path / 'c'}:train")
    for name in names:
        with raises(DataError, file=str(name), row=None):
            check_files([name])
    (tmp_path / "d:e.jsonl").write_text(json.dumps(ROWS[0]))
    assert check_files([tmp_path / "d:e.jsonl"]) == 1


@pytest.mark.parametrize("damage", ["cut", "gone", "state", "info", "splits"])
def test_a_damaged_saved_data_set_is_refused(tmp_path: Path, damage: str) -> None:
    write_split(tmp_path / "a", ROWS)
    folder = tmp_path / "a.splits" / "train"
    (data,) = folder.glob("*.arrow")
    if damage == "cut":
        data.write_bytes(data.read_bytes()[:100])
    elif damage == "gone":
        data.unlink()
    else:
        name = {"state": "train/state.json", "info": "train/dataset_info.json", "splits": "dataset_dict.json"}[damage]
        (tmp_path / "a.splits" / name).write_text("{")
    with raises(DataError, file=f"{tmp_path / 'a.splits'}:train", row=None):
        check_files([f"{tmp_path / 'a.splits'}:train"])


def test_reading_writes_nothing_and_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    files = [write(tmp_path / "a", ROWS) for write in WRITERS]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr("socket.socket.connect", refuse)
    assert check_files(files) == 2 * len(files)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["user", "assistant", "tool"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "ground_truth"]) | st.text(), inner, max_size=3
        )
    ),
    max_leaves=8,
)
NAMES = ("question", "answer", "prompt", "messages", "reward_model", "ground_truth", "data_source", "tools", "images")
CONTENTS = st.lists(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=2), VALUES, max_size=5), max_size=3)


def data_error(call: Callable[[], int]) -> DataError | None:
    try:
        assert call() > 0
    except DataError as error:
        return error
    return None


@settings(deadline=None, max_examples=80)
@given(
    content=st.binary(max_size=60)
    | st.text('[]{}":,\n\r\\u0dn1 e-.', max_size=60).map(str.encode)
    | CONTENTS.map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
    | CONTENTS.map(lambda rows: json.dumps(rows).encode()),
    suffix=st.sampled_from([".jsonl", ".json", ".csv", ".csv.gz", ".parquet"]),
)
def test_any_content_gives_rows_or_a_data_error(content: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"a{suffix}"
        file.write_bytes(gzip.compress(content) if suffix.endswith(".gz") and len(content) % 2 else content)
        for check in (lambda: check_files([file], rewards=()), lambda: check_demonstrations([file])):
            error = data_error(check)
            assert error is None or error.file == str(file)
            assert len(str(error).encode()) < 4000
        try:
            rows = list(iter_rows(file, DataConfig()))
        except DataError:
            return
        for row in rows:
            json.dumps(
                [row.messages, row.tools, row.extra, row.ground_truth], allow_nan=False, ensure_ascii=False
            ).encode()


def test_the_example_writes_files_that_load(tmp_path: Path) -> None:
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "own_columns.py"))
    example["main"](tmp_path, num_train=64, num_demonstrations=8)
    config = DataConfig(columns=ColumnsConfig(prompt="problem", ground_truth="solution"))
    assert check_files([tmp_path / "train.jsonl", tmp_path / "val.jsonl"], config, rewards=()) == 64 + 256
    assert check_demonstrations([tmp_path / "demonstrations.jsonl"]) == 8
    prompts = load_prompts([tmp_path / "val.jsonl"], load_tokenizer(tmp_path / "model"), config, max_prompts=9)
    for prompt in prompts:
        right = int(prompt.ground_truth)
        answers = {
            f"#### {right}": 1.0,
            f"#### {right + prompt.extra['tolerance']}": 0.5,
            "#### ": 0.0,
            "#### 999": 0.0,
        }
        assert {text: example["near"](text, prompt) for text in answers} == answers


def test_the_rewards_of_the_example_can_be_learned_from_its_demonstrations(tmp_path: Path) -> None:
    """Some demonstrations are right and some wrong, no row is refused, and the tokenizer keeps every text."""
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "registry_rewards.py"))
    example["main"](tmp_path, num_train=16, num_val=4, num_demonstrations=64)
    tokenizer = load_tokenizer(tmp_path / "model")
    config = DataConfig(columns=ColumnsConfig(prompt="question", ground_truth="solution"))
    for name in ("code", "math"):
        reward = make_reward(name)
        train, val = (tmp_path / name / f"{file}.jsonl" for file in ("train", "val"))
        assert check_files([train, val], config, rewards=[reward]) > 4
        held_out, known = ({p.text for p in load_prompts([file], tokenizer, config)} for file in (val, train))
        demonstrations = load_demonstrations([tmp_path / name / "demonstrations.jsonl"], tokenizer, config)
        assert not held_out & (known | {tokenizer.decode(one.prompt_ids) for one in demonstrations})
        assert all(tokenizer.unk_token_id not in one.prompt_ids + one.response_ids for one in demonstrations)
    (prompt,) = load_prompts([tmp_path / "math" / "val.jsonl"], tokenizer, config, max_prompts=1)
    right = replace(prompt, ground_truth="\\frac{1}{2}")
    answers = {"\\boxed{\\frac{3}{6}}": 1.0, "\\boxed{\\frac{1}{2}}": 1.0, "\\boxed{\\frac{3}{12}}": 0.0}
    assert {text: make_reward("math")(text, right) for text in answers} == answers
    (prompt,) = load_prompts([tmp_path / "code" / "val.jsonl"], tokenizer, config, max_prompts=1)
    sampled = {example["code_row"](random.Random(seed), True)["answer"] for seed in range(3)}
    assert {text: tokenizer.decode(tokenizer(text)["input_ids"]) for text in sampled} == {
        text: text for text in sampled
    }
    tests = "assert f(2, 5) == 21"
    programs = {"a + (b * 3)": 0.0, "(a + b) * 3": 1.0}
    for expression, score in programs.items():
        program = f"```python\ndef f(a, b):\n    return {expression}\n```"
        assert make_reward("code")(program, replace(prompt, ground_truth=tests)) == score


def test_the_rewards_of_the_run_decide_what_a_row_needs(tmp_path: Path) -> None:
    rows: Rows = [{"prompt": "a", "ground_truth": "1", "x": 1}, {"prompt": "b", "ground_truth": "one", "x": 2}]
    file = write_json_lines(tmp_path / "a", rows)
    assert check_files([file], rewards=()) == 2
    assert check_files([file], rewards=[make_reward("length", {"target": 4, "unit": "characters"})]) == 2
    assert check_files([write_json_lines(tmp_path / "b", rows[:1])], rewards=[make_reward("gsm8k")]) == 1
    with raises(DataError, row=2, column="ground_truth"):
        check_files([file], rewards=[make_reward("gsm8k")])
    with raises(DataError, row=None, column="data_source"):
        check_files([file])
    without = write_json_lines(tmp_path / "c", [{"prompt": "a"}])
    assert check_files([without], rewards=()) == 1
    with raises(DataError, row=None, column="reward_model"):
        check_files([without], rewards=[make_reward("gsm8k")])
