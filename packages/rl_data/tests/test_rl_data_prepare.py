"""`prepare_data`: published data sets in, files that the apps read out; refusals."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_data_rows import GSM8K, NAMES, Rows, write_lines

from plinth_testing import raises
from rl_data import (
    DataConfig,
    DataError,
    PrepareConfig,
    check_demonstrations,
    check_files,
    load_demonstrations,
    load_prompts,
    prepare_data,
)
from rl_data.prepare.card import DUPLICATE
from rl_data.prepare.layouts import last_boxed

FILES = ("train.parquet", "val.parquet")
MATH: Rows = [
    {
        "problem": f"What is ${number} + \\frac12$?",
        "solution": f"So \\boxed{{\\frac{{{2 * number + 1}}}{{2}}}}.",
        "type": "A",
    }
    for number in range(20)
]
CHAT: Rows = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"Greet {name}."},
            {"role": "assistant", "content": f"Hello {name}!"},
        ]
    }
    for name in NAMES
]
VERL: Rows = [
    {
        "prompt": [{"role": "user", "content": f"Who is {name}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "data_source": "openai/gsm8k",
        "extra_info": {"index": number},
    }
    for number, name in enumerate(NAMES)
]


def run(out: Path, *files: Path | str, **options: Any) -> Any:
    options = {"validation": 0.3} | options
    return prepare_data(PrepareConfig(files=tuple(map(str, files)), out=str(out), **options))


def read(out: Path, *names: str) -> Rows:
    """The rows of both files."""
    return [row for name in names or ("train", "val") for row in pq.read_table(out / f"{name}.parquet").to_pylist()]


def num_rows(report: Any) -> tuple[int, int]:
    """Usable rows that were read, and rows that were written."""
    read, written = (sum(file.num_rows for file in report.files if file.use == use) for use in ("read", "written"))
    return read, written


def sizes(report: Any) -> dict[str, int]:
    return {reason: count for reason, count in report.counts.items() if count}


def test_rows_become_the_training_schema_with_other_columns(tmp_path: Path) -> None:
    report = run(tmp_path / "out", write_lines(tmp_path / "gsm8k.jsonl", GSM8K))
    expected = [row | {"ground_truth": row["answer"].split()[-1], "data_source": "openai/gsm8k"} for row in GSM8K]
    key = lambda row: row["question"]  # noqa: E731
    assert sorted(read(tmp_path / "out"), key=key) == sorted(expected, key=key)
    assert sizes(report) == {}


@pytest.mark.parametrize(
    ("rows", "name", "source", "truths"),
    [
        (GSM8K, "question", "openai/gsm8k", {"1200", "7"}),
        (MATH, "math", "lighteval/MATH", {f"\\frac{{{2 * number + 1}}}{{2}}" for number in range(20)}),
        (CHAT, "chat", "", {""}),
        (VERL, "prompt", "openai/gsm8k", set("0123456789")),
    ],
    ids=["gsm8k", "math", "chat", "verl"],
)
def test_the_apps_read_what_is_written(
    rows: Rows, name: str, source: str, truths: set[str], tokenizer: Any, tmp_path: Path
) -> None:
    report = run(tmp_path / "out", write_lines(tmp_path / "a.jsonl", rows))
    assert report.notes == [f"{tmp_path}/a.jsonl: layout {name}"]
    files = [tmp_path / "out" / "train.parquet", tmp_path / "out" / "val.parquet"]
    assert check_files(files, rewards=None if source else ()) == len(rows)
    prompts = load_prompts(files, tokenizer, DataConfig(max_prompt_length=1000))
    assert {prompt.ground_truth for prompt in prompts} == truths
    assert {prompt.data_source for prompt in prompts} == {source}
    if name != "prompt":
        assert check_demonstrations(files) == len(rows)
        demonstrations = load_demonstrations(files, tokenizer, DataConfig(max_prompt_length=1000))
        assert sorted(one.prompt_ids for one in demonstrations) == sorted(prompt.token_ids for prompt in prompts)


@pytest.mark.parametrize("rows", [GSM8K, MATH, CHAT, VERL], ids=["gsm8k", "math", "chat", "verl"])
def test_preparing_again_changes_nothing(rows: Rows, tmp_path: Path) -> None:
    run(tmp_path / "once", write_lines(tmp_path / "a.jsonl", rows + rows[:3]))
    report = run(tmp_path / "twice", tmp_path / "once" / "train.parquet", tmp_path / "once" / "val.parquet")
    assert sizes(report) == {}
    for name in ("train.parquet", "val.parquet"):
        assert pq.read_table(tmp_path / "once" / name).equals(pq.read_table(tmp_path / "twice" / name))


_SENTENCE = st.lists(
    st.sampled_from(["tom", "ann", "has", "3", "4", "pens", "and", "a", "cup"]), min_size=1, max_size=9
)


@settings(max_examples=8, deadline=None)
@given(
    sentences=st.lists(st.tuples(_SENTENCE, st.integers(0, 3)), min_size=3, max_size=25),
    rng=st.randoms(use_true_random=False),
)
def test_the_rows_kept_depend_neither_on_order_nor_on_files(
    sentences: list[tuple[list[str], int]], rng: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    rows = [{"question": " ".join(words), "answer": f"#### {truth}"} for words, truth in sentences]
    shuffled = rng.sample(rows, len(rows))
    options = {"validation": 0}
    run(folder / "one", write_lines(folder / "a.jsonl", rows), **options)
    first, second = write_lines(folder / "b.jsonl", shuffled[:1]), write_lines(folder / "c.jsonl", shuffled[1:])
    run(folder / "two", second, first, **options)
    tables = [pq.read_table(folder / name / "train.parquet").to_pylist() for name in ("one", "two")]
    assert sorted(map(json.dumps, tables[0])) == sorted(map(json.dumps, tables[1]))
    again = run(folder / "again", folder / "one" / "train.parquet", **options)
    assert num_rows(again)[1] == len(tables[0])


def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", GSM8K + GSM8K[:5])

    def files() -> dict[str, str]:
        run(tmp_path / "out", file, overwrite=True)
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "out").iterdir()}

    assert files() == files()
    assert sorted(files()) == ["card.md", "train.parquet", "val.parquet"]


def test_rows_added_later_leave_the_others_on_their_side(tmp_path: Path) -> None:
    def val(out: str, rows: Rows, seed: int = 0) -> set[str]:
        run(tmp_path / out, write_lines(tmp_path / f"{out}.jsonl", rows), seed=seed)
        return set(pq.read_table(tmp_path / out / "val.parquet")["question"].to_pylist())

    rows = [{"question": f"{number} pens?", "answer": "#### 1"} for number in range(400)]
    fewer, more = val("fewer", rows[:300]), val("more", rows)
    assert fewer == more & {row["question"] for row in rows[:300]}
    assert 0.2 < len(more) / len(rows) < 0.4
    assert 0.15 < len(more & val("other", rows, seed=1)) / len(more) < 0.45, "another seed, another split"


def test_duplicates_are_dropped_and_near_ones_only_with_the_same_numbers(tmp_path: Path) -> None:
    text = "Ann reads {} pages every day for a whole week in her long holidays, most of them in the old garden under "
    text += "the apple tree, and the rest in the kitchen when it rains. How many pages does Ann read {}?"
    rows = [
        {"question": text.format(12, "in total"), "answer": "#### 84"},
        {"question": text.format(12, "in all"), "answer": "#### 84"},  # near
        {"question": text.format(13, "in total"), "answer": "#### 91"},  # another problem
        {"question": text.format(13, "IN  total"), "answer": "#### 92"},  # the same, with another answer
        *GSM8K,
    ]
    report = run(tmp_path / "out", write_lines(tmp_path / "a.jsonl", rows))
    assert sizes(report) == {DUPLICATE: 2}
    pairs = [example.split("\n") for example in report.examples[DUPLICATE]]
    lines = [{f"{tmp_path}/a.jsonl: line {line}" for line in pair} for pair in ((1, 2), (3, 4))]
    assert [{place, other} for place, _, _, other, _ in pairs] == lines
    exact = run(tmp_path / "exact", tmp_path / "a.jsonl", duplicates="exact")
    assert sizes(exact) == {DUPLICATE: 1}
    assert sizes(run(tmp_path / "all", tmp_path / "a.jsonl", duplicates="keep")) == {}


def test_a_shared_system_message_makes_no_duplicates_and_no_contamination(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are a helpful assistant and answer in one short sentence. " * 20}
    other = {"role": "system", "content": "You are a pirate."}

    def row(first: dict[str, str], text: str) -> dict[str, Any]:
        return {"messages": [first, {"role": "user", "content": text}, {"role": "assistant", "content": "Aye."}]}

    rows = [row(system, f"Tell me all that you know about {name}.") for name in NAMES]
    rows += [row(other, "Tell me all that you know about Tom.")]
    test = write_lines(tmp_path / "test.jsonl", [row(system, "An entirely different question.")])
    report = run(tmp_path / "out", write_lines(tmp_path / "a.jsonl", rows), held_out=(str(test),))
    assert sizes(report) == {}
    sides = [
        {row["prompt"][1]["content"] for row in pq.read_table(tmp_path / "out" / name).to_pylist()} for name in FILES
    ]
    assert not sides[0] & sides[1], "one question is on one side whatever the system message"
    leak = write_lines(tmp_path / "leak.jsonl", [row(other, rows[3]["messages"][1]["content"])])
    assert sizes(run(tmp_path / "leak", tmp_path / "a.jsonl", held_out=(str(leak),))) == {
        "contains a held-out prompt": 1
    }


def test_rows_that_contain_held_out_prompts_are_dropped(tmp_path: Path) -> None:
    question = "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many in all?"
    leak = {"question": f"Solve this: {question} Think well.", "answer": "#### 72"}
    file = write_lines(tmp_path / "a.jsonl", [*GSM8K, leak])
    test = write_lines(tmp_path / "test.jsonl", [{"question": question, "answer": "#### 72", "id": {}}])
    report = run(tmp_path / "drop", file, held_out=(str(test),))
    assert sizes(report) == {"contains a held-out prompt": 1}
    assert leak["question"] not in {row["question"] for row in read(tmp_path / "drop")}


BAD = 'oops\n{"question": "a", "answer": "b"}\n{"question": null, "answer": "#### 1"}\n["x"]\n'


def test_bad_rows_are_refused_or_counted(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", GSM8K)
    file.write_text(file.read_text() + BAD)
    with raises(DataError, file=str(file), row=21):
        run(tmp_path / "out", file)
    assert not (tmp_path / "out").exists()
    report = run(tmp_path / "out", file, skip_bad=True)
    assert sizes(report) == {"unusable": 4}
    assert f"{len(GSM8K) + 4} rows read" in report.summary()
    assert "line 22, column 'answer': no answer" in (tmp_path / "out" / "card.md").read_text()


def test_bad_rows_of_csv_are_skipped_too(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\nq,#### 1\none,two,three\nother,#### 2\n")
    report = run(tmp_path / "csv", tmp_path / "a.csv", skip_bad=True, validation=0)
    assert (num_rows(report), sizes(report)) == ((2, 2), {"unusable": 1})


@pytest.mark.parametrize(
    ("rows", "options", "column", "row"),
    [
        ([{"text": "a"}], {}, None, None),
        (GSM8K, {"prompt_column": "prompt"}, "prompt", None),
        (GSM8K, {"response_column": "solution"}, "solution", None),
        ([{"problem": "p", "solution": "no box"}], {}, "solution", 1),
        ([{"problem": "p", "solution": "\\boxed{1}", "question": "?"}], {}, None, 1),
        (CHAT, {"prompt_column": "messages", "response_column": "nope"}, "nope", None),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], {}, "messages", 1),
        ([{"messages": [*CHAT[0]["messages"][:2], {"role": "assistant", "content": " "}]}], {}, "messages", 1),
        ([{"question": "q", "data_source": "openai/gsm8k", "ground_truth": "x"}], {}, "ground_truth", 1),
        ([{"problem": "p", "solution": "\\boxed{1}", "answer": "2", "tools": "x"}], {}, "tools", 1)
    ]
)  # fmt: skip
def test_files_that_cannot_be_prepared_are_refused(
    rows: Rows, options: dict[str, Any], column: str | None, row: int | None, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "a.jsonl", rows)
    with raises(DataError, file=str(file), row=row) as caught:
        run(tmp_path / "out", file, **options)
    assert caught.value.column == column or (rows[0].get("question") == "?" and caught.value.column)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_column_of_different_types_is_refused(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [GSM8K[0] | {"x": 1}, GSM8K[2] | {"x": "1"}])
    with raises(DataError, column="x"):
        run(tmp_path / "out", file, validation=0)


@pytest.mark.parametrize("validation", [0.01, 0.99])
def test_a_split_without_rows_is_refused(validation: float, tmp_path: Path) -> None:
    with raises(DataError, file=str(tmp_path / "out")):
        run(tmp_path / "out", write_lines(tmp_path / "a.jsonl", GSM8K[:1]), validation=validation)


def test_questions_and_conversations_are_not_mixed(tmp_path: Path) -> None:
    files = write_lines(tmp_path / "a.jsonl", GSM8K), write_lines(tmp_path / "b.jsonl", CHAT)
    with raises(DataError, file=", ".join(map(str, files))):
        run(tmp_path / "out", *files)


def test_named_columns_and_extra_columns(tmp_path: Path) -> None:
    rows = [
        {"q": f"How far is {name}?", "r": f"It is far: {i}", "t": i, "keep": [i], "lose": {}}
        for i, name in enumerate(NAMES)
    ]
    file = write_lines(tmp_path / "a.jsonl", rows)
    names = {"prompt_column": "q", "response_column": "r", "ground_truth_column": "t", "data_source": "mine"}
    run(tmp_path / "out", file, extra_columns=("keep",), validation=0.5, **names)
    written = sorted(read(tmp_path / "out"), key=lambda row: int(row["ground_truth"]))
    assert written[3] == {
        "question": "How far is Cleo?",
        "answer": "It is far: 3",
        "ground_truth": "3",
        "data_source": "mine",
        "keep": [3],
    }
    report = run(tmp_path / "all", file, validation=0, **names)
    assert any("empty in every row: 'lose'" in note for note in report.notes)
    assert "lose" not in pq.read_table(tmp_path / "all" / "train.parquet").column_names


def test_columns_that_would_change_the_schema_are_left_out_and_named(tmp_path: Path) -> None:
    """OpenR1-Math has both the problem and its messages."""
    rows = [row | {"messages": CHAT[0]["messages"], "answer": "1", "source": "x"} for row in MATH]
    report = run(tmp_path / "out", write_lines(tmp_path / "a.jsonl", rows))
    assert [note for note in report.notes if "left out" in note and "'messages'" in note]
    assert set(read(tmp_path / "out")[0]) == {"question", "answer", "ground_truth", "data_source", "type", "source"}


def test_conversations_keep_tools_tool_calls_and_rows_without_a_response(tmp_path: Path, tokenizer: Any) -> None:
    call = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": None}}}],
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    turns = [{"role": "user", "content": "Add."}, call, {"role": "tool", "content": "2"}]
    rows = [
        {"messages": [*turns, {"role": "assistant", "content": "It is 2."}], "tools": tools},
        {"messages": [{"role": "user", "content": "No response yet."}], "tools": None},
    ]
    report = run(tmp_path / "out", write_lines(tmp_path / "a.jsonl", rows), validation=0)
    assert (num_rows(report), report.num_responses) == ((2, 2), 1)
    assert "1 rows have no response" in (tmp_path / "out" / "card.md").read_text()
    assert check_files([tmp_path / "out" / "train.parquet"], rewards=()) == 2
    (written,) = [row["prompt"][1] for row in read(tmp_path / "out", "train") if row["tools"]]
    assert written["tool_calls"][0]["function"]["arguments"] == '{"x": null}'
    again = run(tmp_path / "again", tmp_path / "out" / "train.parquet", validation=0)
    assert (num_rows(again), again.num_responses) == ((2, 2), 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so \\boxed{1} and \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\fbox{ 3 }", "3"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("\\boxed{1", None),
        ("no box", None),
    ],
)
def test_the_last_box(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


def test_an_existing_folder_is_kept_unless_its_files_may_be_replaced(tmp_path: Path) -> None:
    file, out = write_lines(tmp_path / "a.jsonl", GSM8K), tmp_path / "out"
    out.mkdir()
    run(out, file)
    (out / "notes.txt").write_text("mine")
    before = (out / "train.parquet").read_bytes()
    with raises(DataError, file=str(out)):
        run(out, file)
    with raises(DataError, file=str(tmp_path / "none.jsonl")):
        run(out, tmp_path / "none.jsonl", overwrite=True)
    assert (out / "train.parquet").read_bytes() == before, "a failure leaves the old files"
    run(out, file, overwrite=True, validation=0)
    assert sorted(path.name for path in out.iterdir()) == ["card.md", "notes.txt", "train.parquet"]
