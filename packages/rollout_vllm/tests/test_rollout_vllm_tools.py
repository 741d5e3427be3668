"""Tool calls in a chat format: tokens between turns from real chat templates, sampled tokens never encoded again."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_vllm_helpers import group_of_one

from plinth_testing import raises
from rollout_vllm import (
    ChatFormat,
    ChatTemplateError,
    EnvironmentRollout,
    EnvironmentSpec,
    Episode,
    Group,
    Request,
    RolloutConfigError,
    Sample,
    SamplingConfig,
    ToolEnvironment,
    run_episodes,
)
from rollout_vllm.episodes.tools import ToolCall, hermes_calls, llama_calls, mistral_calls, tool_schema

QUICK = settings(deadline=None, derandomize=True, max_examples=40)
#: As in Qwen 2.5: results of tools are messages of the user, several in one.
CHATML = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\nTHOUGHTS{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nSTART{% endif %}"
)
#: As in Qwen 3: only the last answer has its (empty) thoughts; the start of an answer can have them too.
THOUGHTS = "<think>\n\n</think>\n\n"
THINKING = CHATML.replace(
    "THOUGHTS", "{% if loop.last and m.role == 'assistant' %}" + THOUGHTS + "{% endif %}"
).replace("START", "{% if enable_thinking is defined and not enable_thinking %}" + THOUGHTS + "{% endif %}")
CHATML = CHATML.replace("THOUGHTS", "").replace("START", "")
#: As in Llama 3: a token at the start of the text, and a role of its own for tools.
LLAMA = (
    "<|bos|>{% for m in messages %}<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_of_role|>\n\n"
    "{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end_of_role|>\n\n{% endif %}"
)
#: As in Mistral: the tools stand before the last message of the user, so they move.
MOVING = (
    "{% for m in messages %}{% if loop.last and tools and m.role == 'user' %}[TOOLS]{{ tools | tojson }}{% endif %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
#: As in Gemma: no other roles.
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTINUED = {"chatml": CHATML, "thinking": THINKING, "llama": LLAMA}


@functools.cache
def tokenizer_of(template: str) -> Any:
    """A byte-level BPE tokenizer with merges, trained here, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    special = ["<|im_end|>", "<|im_start|>", "<|bos|>", "<|start|>", "<|end_of_role|>"]
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=special[1:],
        chat_template=template,
    )
    made.name_or_path = "our-model"
    return made


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


class FakeClient:
    """Samples the given turns, one after the other."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self.turns, self.prompts = [list(turn) for turn in turns], list[list[int]]()

    async def sample(self, request: Request, sampling: SamplingConfig) -> Group:
        ids = self.turns[len(self.prompts)]
        self.prompts.append(list(request.prompt_ids))
        return group_of_one(request, ids)


def play(
    tokenizer: Any, turns: Sequence[Sequence[int]], tools: Sequence[str], **chat: Any
) -> tuple[Sample, FakeClient]:
    client: Any = FakeClient(turns)
    options = {"tools": [name if ":" in name else f"rollout_vllm_environments:{name}" for name in tools]}
    spec = EnvironmentSpec(path="rollout_vllm:ToolEnvironment", options=options)
    rollout = EnvironmentRollout(spec=spec, chat=ChatFormat(tokenizer, **chat), max_turns=8)
    prompt = SimpleNamespace(messages=({"role": "user", "content": "How much is 17 + 25?"},), text="")

    async def function(episode: Episode) -> None:
        await rollout(episode, prompt)

    requests = [Request(prompt_id="p", prompt_ids=[0])]
    (group,) = asyncio.run(run_episodes(client, requests, function, SamplingConfig(n=1, max_tokens=4096)))
    if group.failures:
        raise AssertionError(group.failures[0].message)
    return group.samples[0], client


CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 17, "y": 25}}\n</tool_call>'


@pytest.mark.parametrize("name", CONTINUED)
def test_a_conversation_with_a_tool_is_that_of_the_template(name: str) -> None:
    """Prompt, call, result and answer are the tokens of the whole conversation, and the mask tells them apart."""
    tokenizer = tokenizer_of(CONTINUED[name])
    turns = [ids_of(tokenizer, text + "<|im_end|>") for text in (CALL, "It is 42.")]
    result, client = play(tokenizer, turns, ["add", "shout"])
    messages = [
        {"role": "user", "content": "How much is 17 + 25?"},
        {"role": "assistant", "content": CALL},
        {"role": "tool", "name": "add", "content": "42"},
    ]
    tools = ToolEnvironment(["rollout_vllm_environments:add", "rollout_vllm_environments:shout"]).tools
    render = functools.partial(tokenizer.apply_chat_template, tools=tools, tokenize=False, add_generation_prompt=True)
    assert client.prompts[0] == result.prompt_ids.tolist() == ids_of(tokenizer, render(messages[:1]))
    assert '"name": "shout"' in tokenizer.decode(result.prompt_ids) or name == "llama"
    assert client.prompts[1] == ids_of(tokenizer, render(messages))
    sampled = result.response_ids[result.response_mask].tolist()
    assert sampled == turns[0] + turns[1]
    assert result.score is None, "the configured reward scores it"


@QUICK
@given(data=st.data(), name=st.sampled_from(sorted(CONTINUED)))
def test_sampled_ids_are_never_changed(data: st.DataObject, name: str) -> None:
    """Turns of any tokens, which decode to anything and would be encoded differently."""
    tokenizer = tokenizer_of(CONTINUED[name])
    chat = ChatFormat(tokenizer)
    ids = st.integers(0, len(tokenizer) - 1)
    turns = data.draw(st.lists(st.lists(ids, min_size=1, max_size=12), min_size=1, max_size=4))
    texts = data.draw(st.lists(st.text(max_size=8), min_size=len(turns), max_size=len(turns)))
    client: Any = FakeClient(turns)

    async def function(episode: Episode) -> None:
        for turn_ids, text in zip(turns, texts, strict=True):
            turn = await episode.generate()
            assert isinstance(chat.text(turn.response_ids), str)
            episode.add_context(chat.context_ids(turn_ids, [{"role": "tool", "content": text}]))

    (group,) = asyncio.run(
        run_episodes(client, [Request(prompt_id="p", prompt_ids=[1])], function, SamplingConfig(n=1, max_tokens=4096))
    )
    (result,) = group.samples
    pairs = list(zip(result.response_ids.tolist(), result.response_mask.tolist(), strict=True))
    assert [token for token, own in pairs if own] == [token for turn in turns for token in turn]
    # What lies between does not depend on the tokens of a turn, but for the token that ends it.
    end = tokenizer.eos_token_id
    expected: list[int] = []
    for turn_ids, text in zip(turns, texts, strict=True):
        between = chat.context_ids([], [{"role": "tool", "content": text}])
        expected += between[1:] if turn_ids[-1] == end else between
        assert between[0] == end
    assert [token for token, own in pairs if not own] == expected


def test_arguments_of_the_template_are_those_of_the_prompt() -> None:
    chat = ChatFormat(tokenizer_of(THINKING), template_kwargs={"enable_thinking": False})
    text = tokenizer_of(THINKING).decode(chat.context_ids([], "Go on."))
    assert text.endswith("<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_templates_that_cannot_continue_are_refused_by_name() -> None:
    tools = [tool_schema(len_of)]
    chat = ChatFormat(tokenizer_of(MOVING))
    with raises(ChatTemplateError, field="chat_template", value="our-model") as caught:
        chat.context_ids([], "Go on.", tools)
    assert "role user" in caught.value.problem
    assert chat.context_ids([], "Go on.")
    with raises(ChatTemplateError, field="chat_template", value="our-model") as caught:
        ChatFormat(tokenizer_of(STRICT)).context_ids([], [{"role": "tool", "content": "1"}])
    assert "only user and assistant" in caught.value.problem, "what the template itself says"
    with raises(ChatTemplateError, field="tools"):
        ChatFormat(tokenizer_of(CHATML), with_template=False).prompt_ids("Hello", tools)


def len_of(text: str) -> int:
    """The length.

    Args:
        text: any text.
    """
    return len(text)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ('{"name": "add", "arguments": {"x": 1, "y": 2}}', "3"),
        ('{"name": "add", "arguments": "{\\"x\\": 1, \\"y\\": 2}"}', "3"),
        ('{"name": "shout", "arguments": {"text": "é"}}', "É"),
        ('{"name": "add", "arguments": {"x": 1}}', "error: TypeError: add() missing 1 required"),
        ('{"name": "sub", "arguments": {}}', "error: there is no tool 'sub', only add, shout, fails"),
        ('{"name": "fails", "arguments": {}}', "error: RuntimeError: out of order"),
        ('{"name": "add", "arguments": [1]}', "error: the arguments are no JSON object"),
        ('{"arguments": {}}', "error: the call has no name"),
        ("[1, 2]", "error: the call has no name"),
        ("add(1, 2)", "error: the call is no JSON"),
        ("[" * 100_000, "error: the call is no JSON"),
    ],
)
def test_the_policy_reads_results_and_its_mistakes(call: str, answer: str) -> None:
    tools = ToolEnvironment([f"rollout_vllm_environments:{name}" for name in ("add", "shout", "fails")])
    messages, reward, done, _ = asyncio.run(tools.step(f"I ask.<tool_call>{call}</tool_call>"))
    assert messages is not None
    assert not isinstance(messages, str)
    assert messages[0]["content"].startswith(answer)
    assert (reward, done) == (None, False)


def test_calls_of_the_common_formats() -> None:
    call = {"name": "f", "arguments": {"x": "</tool>"}}
    text = json.dumps(call)
    expected = [ToolCall("f", {"x": "</tool>"})]
    assert hermes_calls(f"<tool_call>\n{text}\n</tool_call>\n<tool_call>{text}") == expected * 2
    assert mistral_calls(f"Well[TOOL_CALLS]{json.dumps([call, call])}") == expected * 2
    assert llama_calls(json.dumps({"name": "f", "parameters": {"x": "</tool>"}})) == expected
    assert llama_calls(f"<|python_tag|>{text}") == expected
    for read in (hermes_calls, llama_calls, mistral_calls):
        assert read("The answer is 42.") == []


@QUICK
@given(st.text(st.sampled_from('<>tool_call/{}[]":,TOL_CAS name1'), max_size=60))
def test_any_text_is_read_without_an_exception(text: str) -> None:
    for read in (hermes_calls, llama_calls, mistral_calls):
        assert all(call.problem or call.name for call in read(text))


def test_tools_are_checked() -> None:
    with raises(RolloutConfigError, field="tools", value="without_hints"):
        ToolEnvironment(["rollout_vllm_environments:without_hints"])
    with raises(RolloutConfigError, field="call_format", value="xml", allowed="hermes, llama, mistral"):
        ToolEnvironment([len_of], call_format="xml")
    with raises(RolloutConfigError, field="tools", value=[]):
        ToolEnvironment([])
    with raises(RolloutConfigError, field="tools", value="add"):
        ToolEnvironment(["add"])


MCP = f"mcp:{sys.executable} {Path(__file__).with_name('rollout_vllm_mcp_server.py')}"


@pytest.mark.slow
@pytest.mark.long
def test_tools_of_an_mcp_server_serve_one_episode() -> None:
    """A server of its own for each episode: the number of calls that it counts starts over."""
    tokenizer = tokenizer_of(CHATML)
    texts = [
        CALL + CALL + '<tool_call>{"name": "shout", "arguments": {"text": "a"}}',
        '<tool_call>{"name": "fail", "arguments": {}}</tool_call><tool_call>{"name": "add", "arguments": {"x": 1}}',
        "It is 42.",
    ]
    turns = [ids_of(tokenizer, text + "<|im_end|>") for text in texts]
    for _ in range(2):
        result, client = play(tokenizer, turns, [MCP, "rollout_vllm_environments:shout"])
        assert '"name": "fail"' in tokenizer.decode(client.prompts[0])
        answers = tokenizer.decode(result.response_ids[~result.response_mask])
        for answer in (
            "42 after 1 calls",
            "42 after 2 calls",
            "\nA\n",
            "error: Error executing tool fail",
            "y\n  Field req",
        ):
            assert answer in answers, answer


@pytest.mark.slow
@pytest.mark.long
def test_an_mcp_server_at_a_url_serves_many_episodes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([*MCP.removeprefix("mcp:").split(), str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        seen = []
        for _ in range(2):
            tools = ToolEnvironment([f"mcp:http://127.0.0.1:{port}/mcp"])
            seen.append(asyncio.run(one_step(tools, CALL)))
        assert seen == ["42 after 1 calls", "42 after 2 calls"]
    finally:
        server.terminate()
        server.wait()


async def one_step(tools: ToolEnvironment, action: str) -> str:
    """The answer of a tool, in an episode of one turn."""
    await tools.reset(SimpleNamespace(messages=(), text="q"))
    messages, *_ = await tools.step(action)
    await tools.close()
    assert isinstance(messages, list)
    return str(messages[0]["content"])


@pytest.mark.parametrize(
    "source", ["mcp:", "mcp:no_such_command_here", "mcp:false", "mcp:'", "mcp:http://127.0.0.1:9/mcp"]
)
def test_an_mcp_server_that_does_not_answer_is_refused(source: str) -> None:
    with raises(RolloutConfigError, field="tools", value=source):
        asyncio.run(one_step(ToolEnvironment([source]), ""))


def test_two_tools_of_one_name_are_refused() -> None:
    with raises(RolloutConfigError, field="tools", value="len_of"):
        ToolEnvironment([len_of, len_of])


def test_long_results_are_shortened() -> None:
    tools = ToolEnvironment(["rollout_vllm_environments:shout"], max_result_chars=5)
    messages, *_ = asyncio.run(tools.step('<tool_call>{"name": "shout", "arguments": {"text": "abcdefgh"}}'))
    assert messages is not None
    assert not isinstance(messages, str)
    assert messages[0]["content"] == "ABCDE … (3 characters left out)"
