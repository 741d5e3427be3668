"""Anthropic's messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..environment_process import Message
from .base import Answer, Ask, ConversationError, Event, Protocol, Reply, call_of, ignored_of, text_of

_READ = ("messages", "system", "model", "stream", "tools", "max_tokens", "stop_sequences")
_DEFAULTS = {"tool_choice": {"type": "auto"}, "metadata": {}, "thinking": {"type": "disabled"}}


def _read(body: Mapping[str, Any]) -> Ask:
    system = text_of(body.get("system"))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return Ask(
        messages=[*messages, *(message for given in body["messages"] for message in _messages(given))],
        tools=list(map(_tool, body.get("tools") or ())),
        max_tokens=body.get("max_tokens"),
        stop=tuple(body.get("stop_sequences") or ()),
        reads_calls=(body.get("tool_choice") or {}).get("type") != "none",
        is_streamed=bool(body.get("stream")),
        model=str(body.get("model")),
        ignored=ignored_of(body, _READ, _DEFAULTS),
    )


def _messages(given: Message) -> list[Message]:
    """A message in this protocol: results of tools, which are messages of their own, then the rest."""
    content = given["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    results: list[Message] = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text_of(block.get("content"))}
        for block in blocks
        if block["type"] == "tool_result"
    ]
    rest = [block for block in blocks if block["type"] != "tool_result"]
    if given["role"] != "assistant":
        return results + ([{"role": given["role"], "content": text_of(rest)}] if rest else [])
    texts = [block for block in rest if block["type"] not in ("tool_use", "thinking", "redacted_thinking")]
    message: dict[str, Any] = {"role": "assistant", "content": text_of(texts)}
    if thoughts := "".join(block["thinking"] for block in rest if block["type"] == "thinking"):
        message["reasoning_content"] = thoughts
    if calls := [call_of(block["id"], block["name"], block["input"]) for block in rest if block["type"] == "tool_use"]:
        message["tool_calls"] = calls
    return [message]


def _tool(tool: Mapping[str, Any]) -> Message:
    if "input_schema" not in tool:
        raise ConversationError(field="tools.type", value=tool.get("type"), allowed="custom")
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": tool["input_schema"]}}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": "none"})
    if reply.content or not reply.calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        function = call_of(call["id"], call["function"]["name"], call["function"]["arguments"])["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def _body(answer: Answer) -> dict[str, Any]:
    (reply,) = answer.replies
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.ask.model,
        "content": _blocks(reply),
        "stop_reason": "tool_use" if reply.calls else "max_tokens" if reply.is_cut else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_tokens},
    }


def _events(answer: Answer) -> list[Event]:
    body = _body(answer)
    end = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    events: list[tuple[str, dict[str, Any]]] = [
        ("message_start", {"message": {**body, "content": [], "stop_reason": None}})
    ]
    for index, block in enumerate(body["content"]):
        start, deltas = _parts(block)
        events.append(("content_block_start", {"index": index, "content_block": start}))
        events += [("content_block_delta", {"index": index, "delta": delta}) for delta in deltas]
        events.append(("content_block_stop", {"index": index}))
    events += [("message_delta", {"delta": end, "usage": body["usage"]}), ("message_stop", {})]
    return [(name, {"type": name, **data}) for name, data in events]


def _parts(block: Mapping[str, Any]) -> tuple[dict[str, Any], Sequence[Mapping[str, Any]]]:
    """A block as it begins, and what is added to it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    signed = {"type": "signature_delta", "signature": block["signature"]}
    return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}, signed]


def _error(message: str, code: str, field: str | None) -> dict[str, Any]:
    kinds = {"invalid_api_key": "authentication_error", "server_error": "api_error"}
    if code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kinds.get(code, "invalid_request_error"), "message": message}}


MESSAGES = Protocol(
    # its clients add /v1 to the address, which has one already
    routes=("/v1/messages", "/v1/v1/messages", "/messages"),
    read=_read,
    body=_body,
    events=_events,
    error=_error,
)
