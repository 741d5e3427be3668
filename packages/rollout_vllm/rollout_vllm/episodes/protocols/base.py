"""Requests and answers of agents, whatever their protocol. Messages are those of chat templates."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RolloutError
from ..environment_process import Message
from ..tools import ToolCall

_CALL_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")


class ConversationError(RolloutError, ValueError):
    """A request that the episode cannot answer. `field`: the field of its body that is refused."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request.

    max_tokens, stop: limits of an answer, besides those of the run. reads_calls: False: calls in the answer stay text.
    ignored: names of further settings, which the run decides (temperature, ...) or nobody enforces (response_format).
    previous: id of the answer that the messages follow; "": they are the whole conversation.
    """

    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    reads_calls: bool = True
    is_streamed: bool = False
    has_usage: bool = False
    model: str = "policy"
    ignored: tuple[str, ...] = ()
    previous: str = ""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer of the policy, as the agent reads it.

    content: the text after the thoughts. reasoning: the thoughts, up to `</think>`. calls: with their ids. is_cut: it
    has reached its limit of tokens.
    """

    content: str
    reasoning: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    is_cut: bool = False
    num_tokens: int = 0

    @property
    def message(self) -> dict[str, Any]:
        """The message in OpenAI's format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = list(self.calls)
        return message


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The replies to a request."""

    id: str
    created: int
    ask: Ask
    replies: Sequence[Reply]
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(reply.num_tokens for reply in self.replies)


Event = tuple[str, Mapping[str, Any]]
"""Name and data of a server-sent event; an event without a name has the name ""."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A protocol. end: what closes a stream. error: (message, code, field) -> body."""

    routes: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Ask]
    body: Callable[[Answer], Mapping[str, Any]]
    events: Callable[[Answer], list[Event]]
    error: Callable[[str, str, str | None], Mapping[str, Any]]
    end: str = ""


def read_reply(text: str, read_calls: Callable[[str], list[ToolCall]] | None, *, turn_number: int) -> Reply:
    """The reply in the text of a turn, whose content ends before the first call. A call that cannot be parsed stays
    text.

    read_calls: a value of `CALL_FORMATS`; None if the request has no tools. turn_number: part of the ids of the calls.
    """
    thoughts, mark, rest = text.partition("</think>")
    content = rest.lstrip() if mark else text
    calls = [] if read_calls is None else [call for call in read_calls(content) if not call.problem]
    if calls:
        starts = [place for place in map(content.find, _CALL_MARKS) if place >= 0]
        content = content[: min(starts, default=0)].rstrip()
    return Reply(
        content=content,
        reasoning=thoughts.strip().removeprefix("<think>").strip() if mark else "",
        calls=[
            {
                "id": f"call_{turn_number}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for index, call in enumerate(calls)
        ],
    )


def text_of(content: Any, *, kinds: Sequence[str] = ("text",)) -> str:
    """The content of a message as one text. Raises ConversationError for parts of other kinds, such as images."""
    if content is None or isinstance(content, str):
        return content or ""
    others = sorted({str(part.get("type")) for part in content} - {*kinds})
    if others:
        raise ConversationError(field="messages.content.type", value=", ".join(others), allowed=", ".join(kinds))
    return "".join(part["text"] for part in content)


def call_of(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in a message, with its arguments as an object if they are one, as chat templates take them."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        parsed = arguments
    arguments = parsed if isinstance(parsed, dict) else arguments
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def ignored_of(body: Mapping[str, Any], read: Sequence[str], defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the settings of a request that nothing reads and that are not what happens anyway."""
    others = {name: value for name, value in body.items() if name not in read and value is not None}
    return tuple(sorted(name for name, value in others.items() if name not in defaults or value != defaults[name]))
