"""The protocols of agents, with the clients of their makers, against one policy in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import openai
import pytest
from rollout_vllm_agents import ChatTokenizer, Policy

from rollout_vllm import ChatFormat, Episode, Request, Sample, SamplingConfig
from rollout_vllm.episodes.agent_endpoint import AgentEndpoint
from rollout_vllm.episodes.tools import hermes_calls

# anthropic is imported for two seconds: in the tests, and on one worker.
pytestmark = pytest.mark.xdist_group("anthropic")

CALL = '<think>add</think>I add.<tool_call>{"name": "add", "arguments": {"x": 17}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}


def talk(agent: Callable[[AgentEndpoint], Awaitable[Any]], *answers: str, max_context: int = 4000) -> Sample:
    """The episode of an agent whose policy gives these answers."""
    policy: Any = Policy(answers)
    request = Request(prompt_id="p", prompt_ids=[1], prompt="hello", seed=7)
    episode = Episode(policy, request, 0, SamplingConfig(n=1, max_tokens=400))

    async def run() -> None:
        chat = ChatFormat(ChatTokenizer())
        async with AgentEndpoint(episode, chat, hermes_calls, max_turns=9, max_context=max_context) as endpoint:
            await asyncio.wait_for(agent(endpoint), timeout=60)

    asyncio.run(run())
    return episode.result(1.0)


def text(sample: Sample) -> str:
    return ChatTokenizer().decode(sample.token_ids.tolist())


CONVERSATION = (
    f"[tools 1][system]You add.¶[user]17 + 25?¶[assistant]{CALL}¶[tool]42¶"
    "[assistant]It is 42.¶[user]Sure?¶[assistant]Yes¶"
)
"""Of the agents below, in one piece: with the thoughts, which not all of them send back."""


async def with_chat_completions(endpoint: AgentEndpoint, *, is_streamed: bool) -> None:
    messages: list[Any] = [{"role": "developer", "content": "You add."}, {"role": "user", "content": "17 + 25?"}]
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:

        async def turn() -> Any:
            if not is_streamed:
                answer = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])  # type: ignore
                assert answer.usage is not None
                assert answer.usage.completion_tokens > 0
                return answer.choices[0].message
            async with client.chat.completions.stream(model="m", messages=messages, tools=[TOOL]) as stream:  # type: ignore
                return (await stream.get_final_completion()).choices[0].message

        message = await turn()
        assert message.content == "I add."
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"x": 17})
        call_part = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": '{"x":17}'}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call_part]},
            {"role": "tool", "tool_call_id": call.id, "content": "42"},
        ]
        messages += [await turn(), {"role": "user", "content": [{"type": "text", "text": "Sure?"}]}]
        assert (await turn()).content == "Yes"


async def with_responses(endpoint: AgentEndpoint, *, is_streamed: bool) -> None:
    tools = [{"type": "function", **TOOL["function"]}]  # type: ignore[dict-item]
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:

        async def turn(items: Any, **settings: Any) -> Any:
            if not is_streamed:
                return await client.responses.create(model="m", input=items, tools=tools, **settings)  # type: ignore
            async with client.responses.stream(model="m", input=items, tools=tools, **settings) as stream:  # type: ignore
                return await stream.get_final_response()

        items: list[Any] = [{"role": "user", "content": "17 + 25?"}]
        answer = await turn(items, instructions="You add.")
        assert answer.output_text == "I add."
        (call,) = [item for item in answer.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("add", {"x": 17})
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
        answer = await turn(items, instructions="You add.")
        answer = await turn("Sure?", previous_response_id=answer.id)
        assert answer.output_text == "Yes"


async def with_messages(endpoint: AgentEndpoint, *, is_streamed: bool) -> None:
    import anthropic

    tools = [{"name": "add", "description": "adds", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": "17 + 25?"}]
    settings: dict[str, Any] = {"model": "m", "max_tokens": 300, "system": "You add.", "tools": tools}
    async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:

        async def turn() -> Any:
            if not is_streamed:
                return await client.messages.create(messages=messages, **settings)
            async with client.messages.stream(messages=messages, **settings) as stream:
                return await stream.get_final_message()

        answer = await turn()
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        call = answer.content[-1]
        assert (call.name, call.input, answer.stop_reason) == ("add", {"x": 17}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "42"}]}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        counted = await client.messages.count_tokens(model="m", messages=messages, system="You add.", tools=tools)  # type: ignore
        assert counted.input_tokens == len(CONVERSATION) - len("It is 42.¶[user]Sure?¶[assistant]Yes¶")
        messages += [
            {"role": "assistant", "content": (await turn()).content},
            {"role": "user", "content": "Sure?"},
        ]
        answer = await turn()
        assert (answer.content[0].text, answer.stop_reason) == ("Yes", "end_turn")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("agent", [with_chat_completions, with_responses, with_messages])
def test_a_conversation_with_tools_is_one_sequence_of_sampled_tokens(agent: Any, is_streamed: bool) -> None:
    sample = talk(lambda endpoint: agent(endpoint, is_streamed=is_streamed), CALL, "It is 42.", "Yes")
    assert text(sample) == CONVERSATION
    assert len(sample.paths) == 1
    assert ChatTokenizer().decode(sample.response_ids[sample.response_mask].tolist()) == f"{CALL}¶It is 42.¶Yes¶"


def test_one_agent_cannot_read_or_spend_the_episode_of_another() -> None:
    import anthropic

    async def agent(endpoint: AgentEndpoint) -> None:
        question: Any = [{"role": "user", "content": "a"}]
        for key in ("none", endpoint.key[:-1], endpoint.key + "x"):
            client = openai.AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=question)
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
            other = anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=key, max_retries=0)
            with pytest.raises(anthropic.AuthenticationError):
                await other.messages.create(model="m", max_tokens=9, messages=question)
        async with aiohttp.ClientSession() as session:
            for route in ("chat/completions", "responses", "messages"):
                assert (await session.post(f"{endpoint.url}/{route}", json={})).status == 401
        await _one(endpoint)

    assert talk(agent, "b").num_turns == 1


async def _one(endpoint: AgentEndpoint, **settings: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
        messages: Any = settings.pop("messages", [{"role": "user", "content": "a"}])
        return await client.chat.completions.create(model="m", messages=messages, **settings)


def test_limits_of_a_request_hold_and_its_sampling_settings_are_noted() -> None:
    async def agent(endpoint: AgentEndpoint) -> None:
        answer = (await _one(endpoint, max_tokens=3, temperature=0.0, top_p=1)).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("abc", "length")
        answer = (await _one(endpoint, stop=["ef"])).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("d", "stop")
        assert endpoint.ignored == {"temperature", "top_p"}

    sample = talk(agent, "abcdef", "def")
    assert sample.num_generated == 3 + 4


def test_what_cannot_be_answered_is_said_with_the_field() -> None:
    import anthropic

    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]

    async def agent(endpoint: AgentEndpoint) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await _one(endpoint, messages=image)
        assert refused.value.param == "messages.content.type"
        with pytest.raises(openai.BadRequestError) as refused:
            await _one(endpoint, messages=[{"role": "user", "content": "a" * 5000}])
        assert refused.value.code == "context_length_exceeded"
        async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await client.messages.create(
                    model="m", max_tokens=9, messages=[{"role": "user", "content": "a" * 5000}]
                )
        for wrong in ({"max_tokens": "many"}, {"stop": [""]}, {"n": "two"}, {"messages": [{"role": "user"}, "text"]}):
            with pytest.raises(openai.BadRequestError):
                await _one(endpoint, **wrong)
        await _one(endpoint)
        assert not endpoint._episode.is_cut, "it has made room"
        with pytest.raises(openai.BadRequestError):
            await _one(endpoint, messages=[{"role": "user", "content": "a" * 5000}])

    assert talk(agent, "b").finish_reason == "length"
