"""Parts of chat messages: calls' arguments in another form, and parts that a rendering lacks."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from .files.table import parse_json
from .rows import Message

Convert = Callable[[Any], Any]
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_END_OF_THOUGHT = "</think>"


def unchanged(arguments: Any) -> Any:
    """The arguments of a call as they are."""
    return arguments


def as_object(arguments: Any) -> Any:
    """Arguments given as JSON text as the object."""
    try:
        value = parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def as_text(arguments: Any) -> Any:
    """Arguments given as an object as JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _function(call: Any) -> dict[str, Any]:
    """The name and the arguments of a call, which may be in `function`."""
    inner = call.get("function", call) if isinstance(call, dict) else {}
    return inner if isinstance(inner, dict) else {}


def arguments_of(messages: Sequence[Message]) -> list[Any]:
    """The arguments of all calls that have some."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return [_function(call)["arguments"] for call in calls if _function(call).get("arguments")]


def with_arguments(messages: Sequence[Message], convert: Convert) -> list[Message]:
    """The messages with the arguments of their calls converted."""

    def converted(call: Any) -> Any:
        function = _function(call)
        if not function.get("arguments"):
            return call
        changed = {**function, "arguments": convert(function["arguments"])}
        return {**call, "function": changed} if "function" in call else changed

    return [
        {**message, "tool_calls": list(map(converted, message["tool_calls"]))} if message.get("tool_calls") else message
        for message in messages
    ]


def first_lost(
    messages: Sequence[Message], text: str, *, trained: Collection[int], template: str
) -> tuple[int, str] | None:
    """Index and field of a message that a rendering lacks in part; None if it has all parts.

    The longest parts are looked for first and taken out, so that a short one is not seen in another part.
    """
    parts = [
        (part, index, field)
        for index, message in enumerate(messages)
        for field, part in _parts(message, template if index not in trained else "")
    ]
    rest = _squeezed(text)
    for part, index, field in sorted(parts, key=lambda one: -len(one[0])):
        forms = (
            _squeezed(part),
            _squeezed(json.dumps(part, ensure_ascii=False)[1:-1]),
            "none" if part == "null" else "",
        )
        form = next((form for form in forms if form and form in rest), None)
        if form is None:
            return index, field
        rest = rest.replace(form, "\0", 1)
    return None


def _parts(message: Message, template: str) -> Iterator[tuple[str, str]]:
    """Field and text of all that a rendering has to show, without thoughts that the template knows."""
    for field in _THOUGHTS:
        if isinstance(message.get(field), str) and message[field].strip() and field not in template:
            yield field, message[field]
    content = message["content"]
    if isinstance(content, list):  # with images
        yield from (("content", part["text"]) for part in content if part["type"] == "text" and part["text"].strip())
        content = ""
    if _END_OF_THOUGHT in template:
        content = content.rpartition(_END_OF_THOUGHT)[2]
    yield from [("content", content)] if content.strip() else []
    for call in message.get("tool_calls") or ():
        function = _function(call)
        shown = [function.get("name") or "", as_object(function.get("arguments") or {})]
        for leaf in leaves(shown if function else call):
            yield "tool_calls", leaf


def leaves(value: Any) -> Iterator[str]:
    """The texts in a JSON value, and its numbers and constants as JSON."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    elif not isinstance(value, str):
        yield json.dumps(value)
    elif value.strip():
        yield value


def _squeezed(text: str) -> str:
    """The text without white space, which templates trim and add, and without differences of case (true, True)."""
    return "".join(text.casefold().split())
