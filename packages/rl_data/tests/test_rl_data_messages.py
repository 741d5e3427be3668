"""Conversations with system, assistant and tool turns, tools, and arguments of the chat template."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rl_data_rows import iter_rows, write_lines

from plinth_testing import raises
from rl_data import (
    DataConfig,
    DataConfigError,
    DataError,
    check_demonstrations,
    check_files,
    load_demonstrations,
    load_prompts,
)

TEMPLATE = """\
{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '\\n' }}{% endif %}
{% for message in messages %}
{% if message.role == 'strange' %}{{ raise_exception('Unknown role') }}{% endif %}
{{ '<' ~ message.role ~ '>' ~ message.content }}
{%- if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}
{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}
"""
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}},
}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Tom"},
    CALL,
    {"role": "tool", "content": "2", "name": "add"},
]
RENDERED = (
    '<tools>{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": '
    '{"x": {"type": "number"}}}}}\n<user>Tom\n'
    '<assistant>[{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]\n<tool>2\n<assistant>'
)


@pytest.fixture
def tokenizer(tokenizer: Any) -> Any:
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(folder: Path, kind: str, *rows: dict[str, Any]) -> Path:
    file = folder / f"a.{kind}"
    if kind == "csv":
        with file.open("w", newline="") as stream:
            cells = [[json.dumps(v) if not isinstance(v, str) else v for v in row.values()] for row in rows]
            csv.writer(stream).writerows([rows[0], *cells])
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    else:
        write_lines(file, list(rows))
    return file


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])], ids=["list", "text"])
def test_conversations_and_tools_are_rendered_and_kept(tmp_path: Path, tokenizer: Any, kind: str, tools: Any) -> None:
    file = write(tmp_path, kind, {"messages": MESSAGES, "tools": tools, "level": 1})
    assert check_files([file], rewards=()) == 1
    (prompt,) = load_prompts([file], tokenizer, DataConfig())
    assert prompt.text == RENDERED
    assert list(prompt.tools) == [ADD]
    # The content of a call is empty, not null: most templates write a null out.
    assert list(prompt.messages) == [MESSAGES[0], {"content": "", **CALL}, MESSAGES[2]]
    assert (prompt.ground_truth, prompt.data_source, prompt.extra) == ("", "", {"level": 1})
    (with_system,) = load_prompts([file], tokenizer, DataConfig(system_prompt="all"))
    assert "<system>all\n<user>Tom\n" in with_system.text
    assert with_system.messages[0] == {"role": "system", "content": "all"}


def test_arguments_of_the_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path, "jsonl", {"messages": MESSAGES[:1]})
    (prompt,) = load_prompts([file], tokenizer, DataConfig(chat_template_kwargs={"enable_thinking": False}))
    assert prompt.text == "<user>Tom\n<assistant><no>"
    for options in (
        {"chat_template_kwargs": {"tools": []}},
        {"chat_template_kwargs": {"a": 1}, "chat_template": "never"},
    ):
        with raises(DataConfigError, field="chat_template_kwargs"):
            DataConfig(**options)
    tokenizer.chat_template = None
    with raises(DataError, file=None):
        load_prompts([file], tokenizer, DataConfig(chat_template_kwargs={"a": 1}))


def test_one_line_says_how_messages_became_text(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning if roles are lost without the user's choice; nothing if there are no messages."""
    prompts = write(tmp_path, "jsonl", {"messages": MESSAGES[:1]})
    texts = write(tmp_path, "csv", {"prompt": "a", "completion": "b"})

    def levels(config: DataConfig, load: Any = load_prompts, file: Path = prompts) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="rl_data"):
            load([file], tokenizer, config)
        return [record.levelname for record in caplog.records if record.name == "rl_data.rendering"]

    assert levels(DataConfig()) == levels(DataConfig(chat_template="never")) == ["INFO"]
    tokenizer.chat_template = None
    assert levels(DataConfig()) == ["WARNING"]
    assert levels(DataConfig(), load_demonstrations, texts) == []


def test_messages_that_the_template_refuses_are_refused_with_their_row(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"messages": MESSAGES[:1]}, {"messages": [{"role": "strange", "content": "a"}]}]
    with raises(DataError, row=2, setting="data.chat_template=never"):
        load_prompts([write(tmp_path, "jsonl", *rows)], tokenizer, DataConfig())
    with_tools = write(tmp_path, "jsonl", {"messages": MESSAGES[:1]}, {"messages": MESSAGES[:1], "tools": [ADD]})
    with_calls = write(tmp_path, "parquet", {"messages": MESSAGES})
    with raises(DataError, row=2):
        load_prompts([with_tools], tokenizer, DataConfig(chat_template="never"))
    with raises(DataError, row=0):
        load_prompts([with_calls], tokenizer, DataConfig(chat_template="never"))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with raises(DataError, row=2):
        load_prompts([with_tools], tokenizer, DataConfig())


USER = {"role": "user", "content": "a"}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no messages": ("messages", {"messages": []}),
    "an answer at the end": ("messages", {"messages": [USER, {"role": "assistant", "content": "b"}]}),
    "a call at the end": ("messages", {"messages": [USER, CALL]}),
    "a place without an image": ("images", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    "a part that is a video": ("messages", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
    "a user without content": ("messages", {"messages": [{"role": "user", "tool_calls": [1]}]}),
    "a message that is text": ("messages", {"messages": ["a"]}),
    "NaN in a call": ("messages", {"messages": [{"role": "assistant", "tool_calls": [float("nan")]}, USER]}),
    "tools that are a name": ("tools", {"messages": [USER], "tools": "add"}),
    "tools that are names": ("tools", {"messages": [USER], "tools": ["add"]}),
    "one tool": ("tools", {"messages": [USER], "tools": ADD}),
    "an empty tool": ("tools", {"messages": [USER], "tools": [{}]}),
    "an image file that is not there": ("images", {"messages": [USER], "images": ["a.png"]}),
    "an image that is a number": ("images", {"messages": [USER], "images": [3]}),
    "videos": ("videos", {"messages": [USER], "videos": ["a.mp4"]}),
}
"""By name: the column that the error names, and the row."""


@pytest.mark.parametrize("case", REFUSED)
def test_bad_conversations_are_refused_with_line_and_column(tmp_path: Path, case: str) -> None:
    column, row = REFUSED[case]
    file = write(tmp_path, "jsonl", {"messages": [USER], "images": [], "tools": None}, row)
    with raises(DataError, row=2, column=column):
        check_files([file], rewards=())


def test_fields_that_are_null_are_left_out_as_in_json_lines(tmp_path: Path) -> None:
    tool = ADD | {"function": {"name": "other", "parameters": {"type": "object", "properties": {"y": {"type": "x"}}}}}
    rows = [{"messages": MESSAGES, "tools": [ADD, tool]}, {"messages": [USER], "tools": None}]
    by_kind = [
        [(row.messages, row.tools) for row in iter_rows(write(tmp_path, kind, *rows), DataConfig())]
        for kind in ("jsonl", "parquet")
    ]
    assert by_kind[0] == by_kind[1]
    assert by_kind[0][0][1] == (ADD, tool)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_nulls_of_a_schema_are_kept_where_the_file_can_tell_them(tmp_path: Path, kind: str) -> None:
    """In JSON text they are values of the schema; in a parquet struct, fields that other rows have."""
    schema = {"enum": ["p", None], "default": None}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"z": schema}}}}
    (row,) = iter_rows(write(tmp_path, kind, {"messages": [USER], "tools": json.dumps([tool])}), DataConfig())
    assert row.tools == (tool,)
    if kind == "jsonl":
        call = {"content": None, "role": "assistant", "tool_calls": [{"function": {"arguments": {"x": None}}}]}
        (row,) = iter_rows(write(tmp_path, kind, {"messages": [call, USER], "tools": [tool]}), DataConfig())
        assert (row.tools, row.messages[0]) == ((tool,), {**call, "content": ""})


def test_demonstrations_from_messages(tmp_path: Path, tokenizer: Any) -> None:
    answer = {"role": "assistant", "content": "#### 7"}
    file = write(tmp_path, "jsonl", {"messages": [*MESSAGES, answer], "tools": [ADD]})
    assert check_demonstrations([file]) == 1
    (demonstration,) = load_demonstrations([file], tokenizer, DataConfig(), turns="last")
    assert demonstration.prompt_ids == tuple(tokenizer(RENDERED, add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(demonstration.response_ids[:-1]) == "#### 7"
    assert demonstration.response_ids[-1] == tokenizer.eos_token_id
    for messages in (MESSAGES, [USER, answer | {"content": " "}]):
        with raises(DataError, row=1, column="messages"):
            check_demonstrations([write(tmp_path, "jsonl", {"messages": messages})])
