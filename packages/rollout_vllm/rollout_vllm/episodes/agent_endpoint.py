"""The HTTP endpoint through which the agent of an episode reaches the policy, in the protocols of `protocols`.

Only the agent has the key of its episode. Answers are whole turns: a stream begins when its turn has ended. A turn
whose reader has hung up is kept, and answers the same request when it is sent again.
"""

import asyncio
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
from aiohttp import web

from ..errors import RolloutError
from .chat import ChatFormat
from .conversations import Conversations
from .environment_process import Message
from .episodes import Episode, TurnFailedError
from .processes import describe
from .protocols.base import Answer, Ask, Protocol, Reply, call_of, read_reply
from .protocols.chat_completions import CHAT_COMPLETIONS
from .protocols.messages import MESSAGES
from .protocols.responses import RESPONSES
from .tools import ToolCall

PROTOCOLS: tuple[Protocol, ...] = (CHAT_COMPLETIONS, RESPONSES, MESSAGES)
_MAX_BODY_BYTES = 64 * 2**20
_FULL = "maximum context length reached: no tokens are left"
_NO_TURNS = "maximum context length reached: no turns are left (episode.max_turns)"


@dataclass(eq=False)
class _Pending:
    """An answer that nobody has read yet."""

    answer: asyncio.Task[Answer]
    reader: web.Request

    @property
    def is_left(self) -> bool:
        """True if the reader has hung up."""
        return self.reader.transport is None or self.reader.transport.is_closing()


class AgentEndpoint:
    """The endpoint of one episode; use it as an async context manager, in the event loop of the episode.

    read_calls: finds the tool calls in the text of a turn, as a value of `CALL_FORMATS`. max_turns: further requests
    are refused. max_context: tokens of a prompt and its answer.

    `episode.is_cut` is true if the last request was refused; its agent reads that its context is full. `ignored`:
    settings of requests that had no effect, since those of the run hold. `failure`: of the first turn that failed.
    """

    def __init__(
        self,
        episode: Episode,
        chat: ChatFormat,
        read_calls: Callable[[str], list[ToolCall]],
        *,
        max_turns: int,
        max_context: int,
    ) -> None:
        self._episode, self._chat, self._read_calls = episode, chat, read_calls
        self._max_turns, self._max_context = max_turns, max_context
        self._conversations = Conversations(chat, episode.tree)
        episode.tree.decode = chat.text
        self._pending: dict[tuple[Any, ...], list[_Pending]] = {}
        self._told: dict[str, Sequence[Message]] = {}
        self._num_asked = 0
        self.ignored: set[str] = set()
        self.failure: TurnFailedError | None = None
        self.key, self.url = secrets.token_urlsafe(32), ""
        self.listener: socket.socket | None = None  # of an isolated agent
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        for protocol in PROTOCOLS:
            for route in protocol.routes:
                app.router.add_post(route, partial(self._handle, protocol))
        for route in MESSAGES.routes:
            app.router.add_post(f"{route}/count_tokens", self._count)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        here = self.listener or socket.create_server(("127.0.0.1", 0))
        await web.SockSite(self._runner, here).start()
        self.url = f"http://127.0.0.1:{here.getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        answers = [pending.answer for many in self._pending.values() for pending in many]
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    def turn_of(self, reply_id: str) -> int:
        """The turn of the (first) reply with this id. Raises KeyError for an id that no reply has."""
        number = reply_id.rpartition("-")[2]
        if not number.isdigit() or int(number) >= len(self._episode.tree.turns):
            raise KeyError(reply_id)
        return int(number)

    # ---- requests ------------------------------------------------------------------------------------------------
    def _is_allowed(self, request: web.Request) -> bool:
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(errors="surrogateescape"), self.key.encode())

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if not self._is_allowed(request):
            return _error(CHAT_COMPLETIONS, 401, "this is not the key of the episode", "invalid_api_key")
        models = [{"id": "policy", "object": "model", "created": 0, "owned_by": "plinth"}]
        return web.json_response({"object": "list", "data": models})

    async def _count(self, request: web.Request) -> web.StreamResponse:
        """Anthropic's count of the tokens of a request, by which its agents decide to compact."""
        outcome = await self._read(MESSAGES, request)
        return outcome if isinstance(outcome, web.Response) else web.json_response({"input_tokens": len(outcome[1])})

    async def _read(self, protocol: Protocol, request: web.Request) -> tuple[Ask, list[int]] | web.Response:
        """A request and the tokens of its prompt, or why it is refused."""
        if not self._is_allowed(request):
            return _error(protocol, 401, "this is not the key of the episode", "invalid_api_key")
        try:
            ask = protocol.read(await request.json())
            if ask.previous:
                ask = replace(ask, messages=[*self._told[ask.previous], *ask.messages])
            return ask, self._conversations.prompt_ids(ask.messages, ask.tools)
        except RolloutError as error:
            return _error(protocol, 400, str(error), "unsupported", error.field)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            return _error(protocol, 400, f"the request cannot be read: {describe(error)}", "invalid_request")

    async def _handle(self, protocol: Protocol, request: web.Request) -> web.StreamResponse:
        outcome = await self._read(protocol, request)
        if isinstance(outcome, web.Response):
            return outcome
        ask, prompt_ids = outcome
        self.ignored |= {*ask.ignored}
        key = (bytes(np.array(prompt_ids, np.int32)), ask.n, ask.max_tokens, ask.stop, ask.is_streamed)
        pending = next((one for one in self._pending.get(key, ()) if one.is_left), None)
        if pending is None:
            left = self._max_context - len(prompt_ids)
            if left <= 0 or self._num_asked + ask.n > self._max_turns:
                self._episode.is_cut = True
                return _error(protocol, 400, _FULL if left <= 0 else _NO_TURNS, "context_length_exceeded", "messages")
            self._num_asked += ask.n
            self._episode.is_cut = False  # an agent that has made room goes on
            pending = _Pending(asyncio.ensure_future(self._answer(ask, prompt_ids, left)), request)
            self._pending.setdefault(key, []).append(pending)
        pending.reader = request
        try:
            answer = await asyncio.shield(pending.answer)
        except TurnFailedError as error:
            self.failure = self.failure or error
            self._forget(key, pending)
            return _error(protocol, 503, str(error), "server_error")
        except (RolloutError, ValueError, TypeError) as error:  # a setting that nothing samples with
            self._forget(key, pending)
            return _error(protocol, 400, describe(error), "invalid_request", getattr(error, "field", None))
        response = await _respond(protocol, answer, request)
        if not pending.is_left:
            self._forget(key, pending)
        return response

    def _forget(self, key: tuple[Any, ...], pending: _Pending) -> None:
        self._pending[key] = [one for one in self._pending[key] if one is not pending]

    async def _answer(self, ask: Ask, prompt_ids: list[int], left: int) -> Answer:
        limit = left if ask.max_tokens is None else min(left, ask.max_tokens)
        turns = await self._episode.answer(prompt_ids, n=ask.n, max_tokens=limit, stop=ask.stop)
        replies = [self._reply(ask, turn) for turn in turns]
        identity = f"{secrets.token_hex(8)}-{turns[0]}"
        for reply, turn in reversed([*zip(replies, turns, strict=True)]):
            functions = [(call["id"], call["function"]) for call in reply.calls]
            calls = [call_of(call_id, one["name"], one["arguments"]) for call_id, one in functions]
            message = {**reply.message, "tool_calls": calls}
            self._conversations.add(ask.messages, ask.tools, message, turn)
            self._told[identity] = [*ask.messages, message]
        return Answer(
            id=identity, created=int(time.time()), ask=ask, replies=replies, num_prompt_tokens=len(prompt_ids)
        )

    def _reply(self, ask: Ask, turn: int) -> Reply:
        sample = self._episode.tree.turns[turn].sample
        text = self._chat.text(sample.response_ids)
        text = next((text.removesuffix(stop) for stop in ask.stop if text.endswith(stop)), text)
        read_calls = self._read_calls if ask.tools and ask.reads_calls else None
        reply = read_reply(text, read_calls, turn_number=turn)
        return replace(reply, is_cut=sample.finish_reason == "length", num_tokens=sample.response_ids.size)


async def _respond(protocol: Protocol, answer: Answer, request: web.Request) -> web.StreamResponse:
    response: web.StreamResponse
    if answer.ask.is_streamed:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    else:
        response = web.json_response(protocol.body(answer))
    with suppress(ConnectionError):  # the reader may have hung up
        await response.prepare(request)
        for name, data in protocol.events(answer) if answer.ask.is_streamed else ():
            head = f"event: {name}\n" if name else ""
            await response.write(f"{head}data: {json.dumps(data)}\n\n".encode())
        if answer.ask.is_streamed:
            await response.write(protocol.end.encode())
        await response.write_eof()
    return response


def _error(protocol: Protocol, status: int, message: str, code: str, field: str | None = None) -> web.Response:
    return web.json_response(protocol.error(message, code, field), status=status)
