"""A chat-completions endpoint that the policy of one episode answers, for agents that send their own requests.

An agent sends the whole conversation with every request. The endpoint checks that it continues the conversation so far,
and hands on only the new messages, so that what the policy sampled stays the tokens that it sampled.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from aiohttp import web

from .environment_process import Message
from .processes import describe
from .protocols.base import ConversationError, Reply, read_reply, text_of
from .protocols.chat_completions import openai_error
from .tools import ToolCall

_MAX_BODY_BYTES = 16 * 2**20
_READ_FIELDS = {"messages", "model", "stream", "stream_options", "tools"}
_DEFAULTS = {"n": 1, "tool_choice": "auto", "parallel_tool_calls": True, "store": False}  # what happens anyway

_KEEP = "the agent has to keep earlier messages and add new ones (no compaction, no second conversation)"


def new_messages(history: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """The messages after `history`, with which the request has to begin. Space around texts is not compared.

    Raises ConversationError if they do not continue the history, or if there is nothing new.
    """
    for index, (old, message) in enumerate(zip(history, messages, strict=False)):
        if not _is_same(old, message):
            problem = f"it differs from the conversation so far: {_shown(message)} instead of {_shown(old)}"
            raise ConversationError(problem, field=f"messages[{index}]", remedy=_KEEP)
    if len(messages) <= len(history):
        problem = f"there are {len(messages)}, and the conversation so far has {len(history)}"
        raise ConversationError(problem, field="messages", remedy=_KEEP)
    return [*messages[len(history) :]]


class ChatEndpoint:
    """The endpoint of one conversation; use it as an async context manager.

    read_calls: finds the tool calls in the text of a turn, as a value of `CALL_FORMATS`.

    The run's sampling settings hold: a request that sets its own (temperature, max_tokens, ...) is an error. Answers
    have no token counts, and their finish reason is never "length".
    """

    def __init__(self, read_calls: Callable[[str], list[ToolCall]]) -> None:
        self._read_calls = read_calls
        self._history: list[Message] = []
        self._requests: asyncio.Queue[list[Message] | ConversationError] = asyncio.Queue()
        self._open: asyncio.Future[Reply | None] | None = None
        self._num_turns = 0
        self.tools: list[Message] = []
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        self.url = ""

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def request(self) -> list[Message]:
        """The new messages of the next request. Raises ConversationError if it cannot be answered."""
        messages = await self._requests.get()
        if isinstance(messages, ConversationError):
            raise messages
        return messages

    def answer(self, text: str) -> None:
        """Answers the open request with the text of a turn."""
        reply = read_reply(text, self._read_calls if self.tools else None, turn_number=self._num_turns)
        self._num_turns += 1
        self._history.append(reply.message)
        self._close_with(reply)

    def refuse(self) -> None:
        """Refuses the open request: the conversation is too long."""
        self._close_with(None)

    def _close_with(self, reply: Reply | None) -> None:
        assert self._open is not None
        self._open.set_result(reply)
        self._open = None

    async def _handle(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            if self._open is not None:
                raise ConversationError("a request was sent before the last one was answered", allowed="one agent")
            messages = self._accept(body)
        except ConversationError as error:
            return self._refuse_request(error)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            return self._refuse_request(ConversationError(f"the request cannot be read: {describe(error)}"))
        self._open = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(messages)
        reply = await self._open
        if reply is None:
            return _refusal("maximum context length reached: no tokens are left", "context_length_exceeded")
        return _completion(reply, model=str(body.get("model")), is_streamed=bool(body.get("stream")))

    def _refuse_request(self, error: ConversationError) -> web.Response:
        self._requests.put_nowait(error)
        return _refusal(str(error), "unsupported", error.field)

    def _accept(self, body: Mapping[str, Any]) -> list[Message]:
        """The new messages of a request, which become part of the conversation."""
        extra = sorted(
            name
            for name, value in body.items()
            if name not in _READ_FIELDS and value is not None and value != _DEFAULTS.get(name)
        )
        if extra:
            remedy = "the run's sampling settings hold: remove it from the configuration of the agent"
            raise ConversationError(field=", ".join(extra), allowed="none", remedy=remedy)
        messages = new_messages(self._history, [_as_text(message) for message in body["messages"]])
        tools = list(body.get("tools") or [])
        if self._history and tools != self.tools:
            raise ConversationError("others than in the first request would change the prompt", field="tools")
        self.tools = tools
        self._history += messages
        return messages


def _as_text(message: Message) -> Message:
    """The message with its content as one text."""
    content = message.get("content")
    return {**message, "content": text_of(content)} if isinstance(content, list) else message


def _is_same(old: Message, message: Message) -> bool:
    texts = [str(each.get("content") or "").strip() for each in (old, message)]
    calls = [_calls(each) for each in (old, message)]
    has_same_text = texts[0] == texts[1] or (calls[0] and not texts[1])  # some agents keep the calls alone
    return bool(old.get("role") == message.get("role") and calls[0] == calls[1] and has_same_text)


def _calls(message: Message) -> list[tuple[Any, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def _shown(message: Message) -> str:
    return f"{message.get('role')}: {str(message.get('content') or '')[:60]!r}"


def _refusal(why: str, code: str, field: str | None = None) -> web.Response:
    return web.json_response(openai_error(why, code, field), status=400)


def _completion(reply: Reply, *, model: str, is_streamed: bool) -> web.Response:
    """The answer as one JSON object, or as a stream of one chunk."""
    message, created = reply.message, int(time.time())
    choice = {"index": 0, "finish_reason": "tool_calls" if reply.calls else "stop"}
    head = {"id": f"chatcmpl-{created}", "created": created, "model": model}
    if not is_streamed:
        return web.json_response({**head, "object": "chat.completion", "choices": [{**choice, "message": message}]})
    if reply.calls:
        message["tool_calls"] = [{**call, "index": index} for index, call in enumerate(reply.calls)]
    chunk = {**head, "object": "chat.completion.chunk", "choices": [{**choice, "delta": message}]}
    return web.Response(text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")
