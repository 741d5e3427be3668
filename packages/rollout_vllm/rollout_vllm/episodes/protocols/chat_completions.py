"""OpenAI's chat completions."""

from collections.abc import Mapping
from typing import Any

from ..environment_process import Message
from .base import Answer, Ask, Event, Protocol, Reply, call_of, ignored_of, text_of

_READ = ("messages", "model", "stream", "stream_options", "tools", "n", "max_tokens", "max_completion_tokens", "stop")
_DEFAULTS = {"tool_choice": "auto", "parallel_tool_calls": True, "store": False, "user": "", "metadata": {}}


def _read(body: Mapping[str, Any]) -> Ask:
    stop = body.get("stop") or ()
    return Ask(
        messages=list(map(_message, body["messages"])),
        tools=list(body.get("tools") or ()),
        n=int(body.get("n") or 1),
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        reads_calls=body.get("tool_choice") != "none",
        is_streamed=bool(body.get("stream")),
        has_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        model=str(body.get("model")),
        ignored=ignored_of(body, _READ, _DEFAULTS),
    )


def _message(given: Message) -> Message:
    role = str(given["role"])
    message = {"role": "system" if role == "developer" else role, "content": text_of(given.get("content"))}
    if thoughts := given.get("reasoning_content") or given.get("reasoning"):
        message["reasoning_content"] = str(thoughts)
    calls = given.get("tool_calls") or ()
    functions = [(call.get("id", ""), call["function"]) for call in calls]
    made = [call_of(identity, one["name"], one["arguments"]) for identity, one in functions]
    kept = {name: given[name] for name in ("name", "tool_call_id") if given.get(name)}
    return {**message, **kept, **({"tool_calls": made} if made else {})}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    identity = {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created}
    return {**identity, "model": answer.ask.model}


def _usage(answer: Answer) -> dict[str, int]:
    sizes = (answer.num_prompt_tokens, answer.num_tokens, answer.num_prompt_tokens + answer.num_tokens)
    return dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), sizes, strict=True))


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.calls else "length" if reply.is_cut else "stop"


def _body(answer: Answer) -> dict[str, Any]:
    choices = [
        {"index": index, "message": reply.message, "finish_reason": _finish(reply), "logprobs": None}
        for index, reply in enumerate(answer.replies)
    ]
    return {**_head(answer, "chat.completion"), "choices": choices, "usage": _usage(answer)}


def _events(answer: Answer) -> list[Event]:
    head, events = _head(answer, "chat.completion.chunk"), list[Event]()

    def add(choices: list[dict[str, Any]], **more: Any) -> None:
        events.append(("", {**head, "choices": choices, **more}))

    for index, reply in enumerate(answer.replies):
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": reply.reasoning}] if reply.reasoning else []
        deltas += [{"content": reply.content}] if reply.content else []
        deltas += [{"tool_calls": [{**call, "index": place}]} for place, call in enumerate(reply.calls)]
        for delta in deltas:
            add([{"index": index, "delta": delta, "finish_reason": None}])
        add([{"index": index, "delta": {}, "finish_reason": _finish(reply)}])
    if answer.ask.has_usage:
        add([], usage=_usage(answer))
    return events


def openai_error(message: str, code: str, field: str | None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": field}}


CHAT_COMPLETIONS = Protocol(
    routes=("/v1/chat/completions", "/chat/completions"),
    read=_read,
    body=_body,
    events=_events,
    error=openai_error,
    end="data: [DONE]\n\n",
)
