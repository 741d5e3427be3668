"""Parts of messages that a chat template drops or changes are refused with their row, in prompts and demonstrations."""

from pathlib import Path
from typing import Any

import pytest
from rl_data_rows import write_lines

from plinth_testing import raises
from rl_data import DataConfig, DataError, Demonstration, load_demonstrations, load_pairs, load_prompts

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHTS = CHATML.replace("{{ m.content }}", "<think>{{ m.reasoning_content }}</think>{{ m.content }}")
CALLS = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}ARGS{% endfor %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}<think>{{ m.reasoning_content }}</think>{% endgeneration %}|"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER, ANSWER = {"role": "user", "content": "What is 1+2?"}, {"role": "assistant", "content": "It is 3."}
THOUGHT = {**ANSWER, "reasoning_content": "one and two"}


def call(arguments: Any, name: str = "add") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def write(folder: Path, **row: Any) -> Path:
    return write_lines(folder / "a.jsonl", [row])


def trained(tokenizer: Any, one: Demonstration) -> str:
    mask = one.response_mask or (True,) * len(one.response_ids)
    return str(tokenizer.decode([token for token, on in zip(one.response_ids, mask, strict=True) if on]))


DROPPED: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "a thought": (CHATML, [USER, THOUGHT]),
    "a thought under another name": (CHATML, [USER, {**ANSWER, "thinking": "one and two"}]),
    "a call": (CHATML, [USER, call({"a": 1})]),
    "the system message": (CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"),
                           [{"role": "system", "content": "Be brief."}, USER]),
    "a name": (CALLS.replace("{{ c.function.name }}", "").replace("ARGS", "{{ c.function.arguments | tojson }}"),
               [USER, call({"a": 1})]),
    "a value": (CALLS.replace("ARGS", "{{ c.function.arguments.a }}"), [USER, call({"a": 1, "b": {"c": ["x", 25]}})]),
    "a result": (CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"),
                 [USER, {"role": "tool", "content": "3"}]),
    "half of a text": (CHATML.replace("m.content", "m.content[:9]"), [USER]),
    "a text that is part of another": (CHATML.replace("m.content", "m.content if loop.first"),
                                       [USER, {**USER, "content": "1"}]),
}  # fmt: skip
"""By name: the template, and messages of which it drops the last one's, or the system's, part."""


@pytest.mark.parametrize("name", DROPPED)
def test_a_part_that_the_template_drops_is_refused(tmp_path: Path, byte_tokenizer: Any, name: str) -> None:
    byte_tokenizer.chat_template, messages = DROPPED[name]
    with raises(DataError, row=1, column="messages"):
        load_prompts([write(tmp_path, messages=[*messages, USER])], byte_tokenizer, DataConfig())
    ends = messages if messages[-1]["role"] == "assistant" else [*messages, ANSWER]
    with raises(DataError, row=1, column="messages"):
        load_demonstrations([write(tmp_path, messages=ends)], byte_tokenizer, DataConfig())


def test_a_configured_system_prompt_that_is_dropped_is_refused(tmp_path: Path, byte_tokenizer: Any) -> None:
    byte_tokenizer.chat_template, _ = DROPPED["the system message"]
    file = write(tmp_path, messages=[USER])
    assert len(load_prompts([file], byte_tokenizer, DataConfig())) == 1
    with raises(DataError, row=1, setting="data.system_prompt=null"):
        load_prompts([file], byte_tokenizer, DataConfig(system_prompt="Be brief."))


def test_a_thought_in_plain_text_is_refused(tmp_path: Path, byte_tokenizer: Any) -> None:
    file = write(tmp_path, messages=[USER, THOUGHT, USER])
    with raises(DataError, row=1):
        load_prompts([file], byte_tokenizer, DataConfig(chat_template="never"))


def test_a_template_that_knows_thoughts_may_drop_those_of_earlier_turns(tmp_path: Path, byte_tokenizer: Any) -> None:
    """As Qwen3's, in a field or in the text; the turn that is trained on keeps its thought."""
    byte_tokenizer.chat_template = THOUGHTS.replace("m.reasoning_content", "m.reasoning_content if loop.last").replace(
        "m.content }}", "m.content if loop.last else m.content.split('</think>')[-1] }}"
    )
    for earlier in (THOUGHT, {**ANSWER, "content": "<think>hm</think>It is 3."}):
        messages = [USER, earlier, USER]
        (prompt,) = load_prompts([write(tmp_path, messages=messages)], byte_tokenizer, DataConfig())
        assert "It is 3." in prompt.text
        file = write(tmp_path, messages=[*messages, THOUGHT])
        (one,) = load_demonstrations([file], byte_tokenizer, DataConfig(), turns="last")
        assert "one and two" in trained(byte_tokenizer, one)
        with raises(DataError, row=1) as caught:
            load_demonstrations([file], byte_tokenizer, DataConfig(), section="supervised")
        assert "supervised.turns=each" in caught.value.remedy


@pytest.mark.parametrize("arguments", [{"a": 1, "b": None, "c": True}, '{"a": 1, "b": null, "c": true}'])
@pytest.mark.parametrize(
    "form",
    [
        "{{ c.function.arguments | tojson }}",
        "{{ c.function.arguments }}",
        "{{ '' + c.function.arguments }}",
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
    ],
)
def test_arguments_are_written_as_json_whatever_their_form(
    tmp_path: Path, byte_tokenizer: Any, form: str, arguments: Any
) -> None:
    byte_tokenizer.chat_template = CALLS.replace("ARGS", form)
    file = write(tmp_path, messages=[USER, call(arguments)])
    (one,) = load_demonstrations([file], byte_tokenizer, DataConfig())
    assert trained(byte_tokenizer, one) == 'add{"a": 1, "b": null, "c": true}<|im_end|>'


def test_every_marked_run_of_a_turn_is_trained_on(tmp_path: Path, byte_tokenizer: Any) -> None:
    byte_tokenizer.chat_template = MARKED
    file = write(tmp_path, messages=[USER, {**THOUGHT, "reasoning_content": "first"}, USER, THOUGHT])
    texts = ["<think>first</think>It is 3.<|im_end|>", "<think>one and two</think>It is 3.<|im_end|>"]
    for turns, expected in (("all", ["".join(texts)]), ("each", texts), ("last", texts[1:])):
        loaded = load_demonstrations([file], byte_tokenizer, DataConfig(), turns=turns)  # type: ignore[arg-type]
        assert [trained(byte_tokenizer, one) for one in loaded] == expected


def test_pairs_that_differ_only_in_what_is_not_rendered_are_refused(tmp_path: Path, byte_tokenizer: Any) -> None:
    byte_tokenizer.chat_template = CHATML
    named = {**ANSWER, "name": "other"}
    file = write(tmp_path, chosen=[USER, ANSWER], rejected=[USER, named])
    with raises(DataError, row=1, column="rejected"):
        load_pairs([file], byte_tokenizer, DataConfig())
