"""The endpoint through which an agent talks to the policy of an episode, with OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError

from plinth_testing import raises
from rollout_vllm.episodes.chat_endpoint import ChatEndpoint, ConversationError, new_messages, read_reply
from rollout_vllm.episodes.tools import hermes_calls

QUICK = settings(deadline=None, derandomize=True)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text("ab \n", max_size=3)}
    ),
    max_size=5,
)
ASKED = {"role": "user", "content": "How much is 17 + 25?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 17}}\n</tool_call>'


def talk(agent: Callable[[AsyncOpenAI], Awaitable[Any]], policy: Callable[[ChatEndpoint], Awaitable[Any]]) -> Any:
    """The policy's result, after both have ended."""

    async def both() -> Any:
        async with ChatEndpoint(hermes_calls) as endpoint:
            async with AsyncOpenAI(base_url=endpoint.url, api_key="none", max_retries=0) as client:
                _, returned = await asyncio.wait_for(asyncio.gather(agent(client), policy(endpoint)), timeout=60)
            return returned

    return asyncio.run(both())


# ---- what is new in a request ----------------------------------------------------------------------------------------
@QUICK
@given(MESSAGES, MESSAGES)
def test_the_messages_after_the_history_are_new(history: list[Any], new: list[Any]) -> None:
    if new:
        assert new_messages(history, [*history, *new]) == new
    else:
        with raises(ConversationError, field="messages"):
            new_messages(history, history)


@QUICK
@given(MESSAGES.filter(len), MESSAGES, st.data())
def test_a_changed_or_dropped_message_is_refused(history: list[Any], new: list[Any], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(history) - 1))
    changed = [dict(message) for message in history]
    changed[index]["content"] += "c"
    with raises(ConversationError, field=f"messages[{index}]"):
        new_messages(history, [*changed, *new, ASKED])
    with pytest.raises(ConversationError):
        new_messages(history, history[:index])


def test_space_and_the_text_beside_a_call_may_be_left_out_by_the_agent() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 17}'}}
    history = [ASKED, {"role": "assistant", "content": f" {CALL}\n", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    function = {"name": "add", "arguments": '{"x":17}'}
    assert new_messages(history, [ASKED, {"role": "assistant", "tool_calls": [call | {"function": function}]}, result])
    with raises(ConversationError, field="messages[1]"):
        new_messages(history, [ASKED, {"role": "assistant", "content": CALL}, result])


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "names"),
    [
        ("42", "42", "", []),
        ("<think>\nSum.\n</think>\n\n42", "42", "Sum.", []),
        ("Sum.\n</think>42", "42", "Sum.", []),
        ("<think>\nSum", "<think>\nSum", "", []),
        (CALL, CALL, "", ["add"]),
        (f"<think>{CALL}</think>42", "42", CALL, []),
        ("<tool_call>add(17)</tool_call>", "<tool_call>add(17)</tool_call>", "", []),
    ],
)
def test_thoughts_text_and_calls_are_told_apart(text: str, content: str, reasoning: str, names: list[str]) -> None:
    reply = read_reply(text, hermes_calls, turn_number=0)
    assert (reply.content, reply.reasoning) == (content, reasoning)
    assert [call["function"]["name"] for call in reply.calls] == names
    assert not read_reply(text, None, turn_number=0).calls, "without tools there are no calls"


# ---- the endpoint ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_a_tool_has_its_conversation_with_the_policy(stream: bool) -> None:
    async def ask(client: AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
        options: Any = {"model": "policy", "messages": messages, "tools": [ADD], "tool_choice": "auto"}
        if not stream:
            answer = await client.chat.completions.create(**options)
        else:
            async with client.chat.completions.stream(**options) as events:
                answer = await events.get_final_completion()
        return answer.choices[0].message.model_dump(exclude_none=True)

    async def agent(client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": ASKED["content"]}]}]
        messages.append(await ask(client, messages))
        (call,) = messages[-1]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"x": 17}'} | {
            key: call["function"][key] for key in call["function"].keys() - {"name", "arguments"}
        }
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "42"})
        messages.append(await ask(client, messages))
        assert messages[-1]["content"] == "It is 42."

    async def policy(endpoint: ChatEndpoint) -> Any:
        opening = await endpoint.request()
        endpoint.answer(CALL)
        result = await endpoint.request()
        endpoint.answer("<think>\n\n</think>\n\nIt is 42.")
        return opening, endpoint.tools, result

    opening, tools, result = talk(agent, policy)
    assert opening == [ASKED]
    assert tools == [ADD]
    assert [message["content"] for message in result] == ["42"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": 0.5, "max_tokens": 9}, "max_tokens, temperature"),
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.content.type",
        ),
        ({"messages": 7}, None),
    ],
)
def test_a_request_that_the_policy_cannot_answer_is_refused_on_both_sides(
    options: dict[str, Any], field: str | None
) -> None:
    async def agent(client: AsyncOpenAI) -> None:
        request: Any = {"model": "policy", "messages": [ASKED]} | options
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(**request)
        assert (caught.value.code, caught.value.param) == ("unsupported", field)

    async def policy(endpoint: ChatEndpoint) -> None:
        with raises(ConversationError, field=field):
            await endpoint.request()

    talk(agent, policy)


def test_other_tools_two_requests_at_once_and_the_end_of_the_context_are_refused() -> None:
    async def agent(client: AsyncOpenAI) -> None:
        def ask(*messages: Any, **options: Any) -> Any:
            return client.chat.completions.create(model="policy", messages=list(messages), **options)

        answer = {"role": "assistant", "content": "?"}
        first = asyncio.ensure_future(ask(ASKED))
        await asyncio.sleep(0.2)
        with pytest.raises(BadRequestError):
            await ask(ASKED)
        await first
        with pytest.raises(BadRequestError) as refused:
            await ask(ASKED, answer, ASKED, tools=[ADD])
        assert refused.value.param == "tools"
        with pytest.raises(BadRequestError) as caught:
            await ask(ASKED, answer, ASKED)
        assert caught.value.code == "context_length_exceeded"

    async def policy(endpoint: ChatEndpoint) -> None:
        assert await endpoint.request() == [ASKED]
        with raises(ConversationError, allowed="one agent"):
            await endpoint.request()
        endpoint.answer("?")
        with raises(ConversationError, field="tools"):
            await endpoint.request()
        assert await endpoint.request() == [ASKED]
        endpoint.refuse()

    talk(agent, policy)
