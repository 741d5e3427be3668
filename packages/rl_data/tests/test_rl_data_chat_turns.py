"""The tokens of a conversation that are trained on, by markers and by difference."""

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from rl_data_rows import write_lines

from plinth_testing import raises
from rl_data import DataConfig, DataError, Demonstration, TurnsTrained, check_demonstrations, load_demonstrations
from rl_data.chat_turns import ChatTurns
from rl_data.files.table import Place
from rl_data.rendering import Renderer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content ~ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content ~ '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# As Qwen3's: the last turn gets an empty thought, earlier ones get none.
THOUGHTS = UNMARKED.replace(
    "'\\n' }}{% if m.role", "'\\n' ~ ('<think></think>' if loop.last and m.role == 'assistant' else '') }}{% if m.role"
)
# As DeepSeek-R1-Distill's: the generation prompt opens a thought, which the messages lose.
REASONER = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content.split('</think>')[-1] ~ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
PLAIN_END = (
    "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
HERE = Place(file="a.jsonl", number=0)


def conversation(*contents: str) -> list[dict[str, str]]:
    """The user and the assistant in turn."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]


def load(
    folder: Path, tokenizer: Any, *rows: dict[str, Any], config: DataConfig | None = None, **options: Any
) -> list[Demonstration]:
    file = write_lines(folder / "a.jsonl", list(rows))
    assert check_demonstrations([file]) == len(rows)
    return load_demonstrations([file], tokenizer, config or DataConfig(), **options)


def trained(tokenizer: Any, one: Demonstration) -> str:
    mask = one.response_mask or (True,) * len(one.response_ids)
    return str(tokenizer.decode([token for token, on in zip(one.response_ids, mask, strict=True) if on]))


def whole(tokenizer: Any, one: Demonstration) -> str:
    return str(tokenizer.decode([*one.prompt_ids, *one.response_ids]))


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00<"), min_size=1, max_size=8).filter(str.strip)


@settings(max_examples=30)
@given(contents=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_difference_and_markers_train_on_what_the_assistant_writes(
    byte_tokenizer: Any, contents: list[tuple[str, str]]
) -> None:
    messages = conversation(*(text for pair in contents for text in pair))
    answers = "".join(f"{answer}<|im_end|>" for _, answer in contents)
    trained_texts = {}
    for template in (CHATML, UNMARKED):
        byte_tokenizer.chat_template = template
        chat = ChatTurns(byte_tokenizer, Renderer(byte_tokenizer, DataConfig()), "all")
        assert chat.has_markers == (template == CHATML)
        (script,) = chat.scripts(messages, (), HERE)
        assert not script.ends
        if chat.has_markers:
            ids = [token for token, on in zip(script.ids, script.mask, strict=True) if on]
            trained_texts[template] = byte_tokenizer.decode(ids)
        else:
            trained_texts[template] = "".join(part.text for part in script.segments if part.is_trained)
            rendered = byte_tokenizer.apply_chat_template(messages, tokenize=False)
            assert rendered == "".join(part.text for part in script.segments) + "\n"
    assert trained_texts == {CHATML: answers, UNMARKED: answers}


@pytest.mark.parametrize("template", [CHATML, UNMARKED])
def test_turns_of_a_conversation(tmp_path: Path, byte_tokenizer: Any, template: str) -> None:
    byte_tokenizer.chat_template = template
    row = {"messages": conversation("a", "one", "b", "two")}
    (every,) = load(tmp_path, byte_tokenizer, row)
    assert trained(byte_tokenizer, every) == "one<|im_end|>two<|im_end|>"
    assert byte_tokenizer.decode(every.prompt_ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    (last,) = load(tmp_path, byte_tokenizer, row, turns="last")
    assert (trained(byte_tokenizer, last), last.response_mask) == ("two<|im_end|>", None)
    assert whole(byte_tokenizer, last) == whole(byte_tokenizer, every)
    first, second = load(tmp_path, byte_tokenizer, row, turns="each")
    assert (trained(byte_tokenizer, first), second) == ("one<|im_end|>", last)


def test_a_template_that_changes_earlier_turns_is_refused_unless_each_has_its_own_prompt(
    tmp_path: Path, byte_tokenizer: Any
) -> None:
    byte_tokenizer.chat_template = THOUGHTS
    row = {"messages": conversation("a", "one", "b", "two")}
    with raises(DataError, row=1, column="messages"):
        load(tmp_path, byte_tokenizer, row)
    with raises(DataError) as caught:
        load(tmp_path, byte_tokenizer, row, section="supervised")
    assert "supervised.turns=each" in caught.value.remedy
    assert "'<think></think>one" in caught.value.problem, "the message shows both renderings"
    alone: tuple[TurnsTrained, ...] = ("each", "last")
    texts = [
        [trained(byte_tokenizer, one) for one in load(tmp_path, byte_tokenizer, row, turns=turns)] for turns in alone
    ]
    assert texts == [["<think></think>one<|im_end|>", "<think></think>two<|im_end|>"], ["<think></think>two<|im_end|>"]]


def test_a_template_that_drops_reasoning_is_refused_and_a_completion_keeps_it(
    tmp_path: Path, byte_tokenizer: Any
) -> None:
    byte_tokenizer.chat_template = REASONER
    reasoned = "I add.\n</think>\n7"
    for turns in ("all", "each", "last"):
        with raises(DataError, row=1, column="messages"):
            load(tmp_path, byte_tokenizer, {"messages": conversation("a", reasoned)}, turns=turns)
    byte_tokenizer.chat_template = REASONER.replace("<think>\\n", "")
    with raises(DataError, row=1, column="messages"):
        load(tmp_path, byte_tokenizer, {"messages": conversation("a", reasoned)})
    byte_tokenizer.chat_template = REASONER
    (one,) = load(tmp_path, byte_tokenizer, {"prompt": conversation("a"), "completion": reasoned})
    assert trained(byte_tokenizer, one) == f"{reasoned}<|im_end|>"
    assert byte_tokenizer.decode(one.prompt_ids).endswith("<|im_start|>assistant\n<think>\n")


def test_a_generation_prompt_may_open_a_thought_that_the_message_has(tmp_path: Path, byte_tokenizer: Any) -> None:
    """As Qwen3.5's: the prompt ends in <think>, and messages keep their thoughts."""
    byte_tokenizer.chat_template = UNMARKED.replace("assistant\\n' }}", "assistant\\n<think>' }}")
    (one,) = load(tmp_path, byte_tokenizer, {"messages": conversation("a", "<think>hm</think>7")})
    assert trained(byte_tokenizer, one) == "hm</think>7<|im_end|>"
    assert byte_tokenizer.decode(one.prompt_ids).endswith("<|im_start|>assistant\n<think>")
    with raises(DataError, row=1, column="messages"):
        load(tmp_path, byte_tokenizer, {"messages": conversation("a", "7")})


def test_a_marked_template_that_drops_reasoning_is_refused_too(tmp_path: Path, byte_tokenizer: Any) -> None:
    byte_tokenizer.chat_template = CHATML.replace("m.content ~", "m.content.split('</think>')[-1] ~")
    with raises(DataError, row=1, column="messages"):
        load(tmp_path, byte_tokenizer, {"messages": conversation("a", "<think>hm</think>7")})


def test_a_template_without_a_token_that_ends_turns(tmp_path: Path, byte_tokenizer: Any) -> None:
    byte_tokenizer.chat_template = PLAIN_END
    (one,) = load(tmp_path, byte_tokenizer, {"messages": conversation("a", "one", "b", "two")})
    assert trained(byte_tokenizer, one) == "one\ntwo<|im_end|>"
    assert whole(byte_tokenizer, one) == "user: a\nassistant: one\nuser: b\nassistant: two<|im_end|>"


def test_a_system_prompt_and_a_last_call_of_a_tool(tmp_path: Path, byte_tokenizer: Any) -> None:
    byte_tokenizer.chat_template = UNMARKED.replace("m.content ~", "m.content ~ (m.tool_calls | default('', true)) ~")
    call = {"role": "assistant", "tool_calls": [{"type": "function"}]}
    row = {"messages": [*conversation("a"), call]}
    (one,) = load(tmp_path, byte_tokenizer, row, config=DataConfig(system_prompt="be brief"))
    assert trained(byte_tokenizer, one) == "[{'type': 'function'}]<|im_end|>"
    assert byte_tokenizer.decode(one.prompt_ids).startswith("<|im_start|>system\nbe brief<|im_end|>\n")


def test_completions_follow_a_prompt(tmp_path: Path, byte_tokenizer: Any) -> None:
    byte_tokenizer.chat_template = UNMARKED
    plain, chat, history = load(
        tmp_path,
        byte_tokenizer,
        {"prompt": "def f(", "completion": "x):"},
        {"prompt": conversation("a"), "completion": conversation("", "one")[1:]},
        {"prompt": conversation("a", "one", "b"), "completion": conversation("", "two", "c", "three")[1:]},
    )
    assert (whole(byte_tokenizer, plain), trained(byte_tokenizer, plain)) == ("def f(x):<|im_end|>", "x):<|im_end|>")
    assert trained(byte_tokenizer, chat) == "one<|im_end|>"
    assert trained(byte_tokenizer, history) == "two<|im_end|>three<|im_end|>"
    # A configured system message shifts no turn.
    system = DataConfig(system_prompt="s")
    row = {"prompt": conversation("a", "one", "b"), "completion": conversation("", "two")[1:]}
    assert trained(byte_tokenizer, load(tmp_path, byte_tokenizer, row, config=system)[0]) == "two<|im_end|>"


def test_plain_text_is_trained_on_but_for_its_first_token(tmp_path: Path, byte_tokenizer: Any) -> None:
    (one,) = load(tmp_path, byte_tokenizer, {"text": "abc"})
    assert byte_tokenizer.decode(one.prompt_ids) == "a"
    assert (trained(byte_tokenizer, one), one.num_tokens) == ("bc<|im_end|>", 4)


def test_long_demonstrations_are_dropped_or_refused(
    tmp_path: Path, byte_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": "abc"}, {"text": "abcd" * 3}]
    (one,) = load(tmp_path, byte_tokenizer, *rows, max_length=4)
    assert one.num_tokens == 4
    assert "1 of 2 demonstrations are longer than max_length=4 tokens" in caplog.text
    with raises(DataError, row=2, setting="data.overlong=filter"):
        load(tmp_path, byte_tokenizer, *rows, max_length=4, config=DataConfig(overlong="refuse"))
    with raises(DataError, row=None):
        load(tmp_path, byte_tokenizer, *rows, max_length=3)


@pytest.mark.parametrize(
    ("column", "row"),
    [
        ("messages", {"messages": conversation("", "one")[1:]}),
        ("messages", {"messages": conversation("a")}),
        ("completion", {"prompt": "a", "completion": " "}),
        ("completion", {"prompt": "a", "completion": conversation("", "b")[1:]}),
        ("completion", {"prompt": conversation("a"), "completion": conversation("b")}),
        ("prompt", {"prompt": [], "completion": "a"}),
        ("text", {"text": " "}),
        ("question", {"prompt": "a"}),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(tmp_path: Path, column: str, row: dict[str, Any]) -> None:
    file = write_lines(tmp_path / "a.jsonl", [row])
    with raises(DataError, file=str(file), row=None if column == "question" else 1, column=column):
        check_demonstrations([file])


def test_a_template_that_marks_too_few_turns_is_refused(tmp_path: Path, byte_tokenizer: Any) -> None:
    byte_tokenizer.chat_template = CHATML.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with raises(DataError, row=1, column="messages"):
        load(tmp_path, byte_tokenizer, {"messages": conversation("a", "one", "b", "two")})
