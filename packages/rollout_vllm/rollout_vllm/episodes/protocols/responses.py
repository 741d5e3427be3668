"""OpenAI's responses."""

from collections.abc import Mapping
from typing import Any

from ..environment_process import Message
from .base import Answer, Ask, ConversationError, Event, Protocol, Reply, call_of, ignored_of, text_of
from .chat_completions import openai_error

_READ = ("input", "instructions", "model", "stream", "tools", "max_output_tokens", "previous_response_id")
_DEFAULTS = {"tool_choice": "auto", "parallel_tool_calls": True, "store": True, "metadata": {}, "include": []}
_TEXTS = ("text", "input_text", "output_text")


def _read(body: Mapping[str, Any]) -> Ask:
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    instructions = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    previous = str(body.get("previous_response_id") or "")
    return Ask(
        messages=[*instructions, *_messages(items)],
        tools=list(map(_tool, body.get("tools") or ())),
        max_tokens=body.get("max_output_tokens"),
        reads_calls=body.get("tool_choice") != "none",
        is_streamed=bool(body.get("stream")),
        model=str(body.get("model")),
        ignored=ignored_of(body, _READ, _DEFAULTS),
        previous=previous.removeprefix("resp_"),
    )


def _messages(items: list[Mapping[str, Any]]) -> list[Message]:
    """The items as messages: thoughts, text and calls of one answer are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            text = text_of(item["output"], kinds=_TEXTS)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        elif kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": text_of(item["content"], kinds=_TEXTS)})
        elif kind in ("message", "function_call", "reasoning"):
            _add_part(messages, kind, item)
        else:
            allowed = "message, function_call, function_call_output, reasoning"
            raise ConversationError(field="input.type", value=kind, allowed=allowed)
    return list(messages)


def _add_part(messages: list[dict[str, Any]], kind: str, item: Mapping[str, Any]) -> None:
    """Adds a part of an answer, to the last message if it is of the same answer."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    order = ("reasoning_content", "content", "tool_calls")
    part = order[("reasoning", "message", "function_call").index(kind)]
    begun = [name for name in order if last is not None and last.get(name)]
    if last is None or (begun and order.index(part) <= order.index(begun[-1]) and part != "tool_calls"):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if kind == "function_call":
        last.setdefault("tool_calls", []).append(call_of(item["call_id"], item["name"], item["arguments"]))
    elif kind == "message":
        last["content"] = text_of(item["content"], kinds=_TEXTS)
    else:
        parts = item.get("content") or item.get("summary") or ()
        last["reasoning_content"] = "".join(part["text"] for part in parts)


def _tool(tool: Mapping[str, Any]) -> Message:
    if tool.get("type") != "function":
        raise ConversationError(field="tools.type", value=tool.get("type"), allowed="function")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _items(answer: Answer, reply: Reply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    content: list[dict[str, Any]]
    if reply.reasoning:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": content})
    if reply.content or not reply.calls:
        content = [{"type": "output_text", "text": reply.content, "annotations": []}]
        items.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": content})
    for call in reply.calls:
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        items.append({"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], **function})
    return [{**item, "status": "completed"} for item in items]


def _body(answer: Answer) -> dict[str, Any]:
    (reply,) = answer.replies
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if reply.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": answer.ask.model,
        "output": _items(answer, reply),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in answer.ask.tools],
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
        },
    }


def _events(answer: Answer) -> list[Event]:
    body = _body(answer)
    begun = {**body, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(body["output"]):
        place = {"item_id": item["id"], "output_index": index}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        events.append(("response.output_item.added", {**place, "item": {**item, **empty, "status": "in_progress"}}))
        if item["type"] == "function_call":
            done = {**place, "name": item["name"], "arguments": item["arguments"]}
            events.append(("response.function_call_arguments.delta", {**place, "delta": item["arguments"]}))
            events.append(("response.function_call_arguments.done", done))
        for part in item.get("content", ()):
            part_place = {**place, "content_index": 0}
            name, text = part["type"], part["text"]
            if name == "output_text":
                part_place |= {"logprobs": []}
            events += [
                ("response.content_part.added", {**part_place, "part": {**part, "text": ""}}),
                (f"response.{name}.delta", {**part_place, "delta": text}),
                (f"response.{name}.done", {**part_place, "text": text}),
                ("response.content_part.done", {**part_place, "part": part}),
            ]
        events.append(("response.output_item.done", {**place, "item": item}))
    events.append((f"response.{body['status']}", {"response": body}))
    return [(name, {"type": name, "sequence_number": number, **data}) for number, (name, data) in enumerate(events)]


RESPONSES = Protocol(routes=("/v1/responses", "/responses"), read=_read, body=_body, events=_events, error=openai_error)
