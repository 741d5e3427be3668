"""Tools that the policy calls: Python functions as an environment, and the formats of calls in a turn."""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..config import require
from ..errors import RolloutConfigError
from .environment_process import Message, Observation
from .mcp_tools import PREFIX, McpServer, ToolError
from .processes import describe

ToolFunction = Callable[..., Any]


@dataclass(frozen=True)
class ToolCall:
    """A call in a turn. problem: why it cannot be made, for the policy to read; empty if it can."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


def hermes_calls(text: str) -> list[ToolCall]:
    """Calls of Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number."""
    return [_call(call) for call in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)]


def llama_calls(text: str) -> list[ToolCall]:
    """The call of Llama 3: the whole turn is `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`."""
    body = text.strip().removeprefix("<|python_tag|>")
    return [_call(body)] if body.lstrip().startswith("{") else []


def mistral_calls(text: str) -> list[ToolCall]:
    """Calls of Mistral: `[TOOL_CALLS]` and a JSON list of `{"name": …, "arguments": {…}}`."""
    _, mark, body = text.partition("[TOOL_CALLS]")
    if not mark:
        return []
    try:
        calls = json.loads(body)
    except (ValueError, RecursionError) as error:
        return [ToolCall("", {}, f"the call is no JSON: {error}")]
    return [_checked(call) for call in (calls if isinstance(calls, list) else [calls])]


CALL_FORMATS: dict[str, Callable[[str], list[ToolCall]]] = {
    "hermes": hermes_calls,
    "llama": llama_calls,
    "mistral": mistral_calls,
}
"""The calls in the text of a turn, by the name of the format."""


def check_call_format(name: str) -> None:
    """Raises RolloutConfigError unless `name` is a key of `CALL_FORMATS`."""
    require(name in CALL_FORMATS, "call_format", name, ", ".join(CALL_FORMATS))


class ToolEnvironment:
    """An environment whose steps make the calls in a turn and answer with the results; a turn without a call ends it.

    It gives no reward, so the configured reward scores the episode; a subclass may override `step` and add one.

    tools: functions or `package.module:function`, coroutine functions too, and MCP servers (`McpServer`), which are
    opened by `reset`. The chat template gets their JSON schemas: the attribute `schema` of a function if it has one,
    else the one that transformers derives from its type hints and its docstring. call_format: a key of `CALL_FORMATS`.
    max_result_chars: longer results are shortened.

    A call that cannot be made (no JSON, no such tool, wrong arguments) or raises is answered by a line that begins with
    `error:`, which the policy reads.
    """

    # Imported once, before processes are forked; transformers looks for torch.Tensor in type hints.
    preload = ("transformers.utils.chat_template_utils", "torch", "mcp")

    def __init__(
        self, tools: Sequence[ToolFunction | str], *, call_format: str = "hermes", max_result_chars: int = 4000
    ) -> None:
        require(bool(tools), "tools", tools, "functions, package.module:function, or mcp:COMMAND or mcp:URL")
        check_call_format(call_format)
        self._servers = [McpServer(tool) for tool in tools if isinstance(tool, str) and tool.startswith(PREFIX)]
        functions = [_function(tool) for tool in tools if not (isinstance(tool, str) and tool.startswith(PREFIX))]
        self.tools: list[Any] = []
        self._functions: dict[str, ToolFunction] = {}
        for function in functions:
            self._add(tool_schema(function), function)
        self._read_calls, self._max_result_chars = CALL_FORMATS[call_format], max_result_chars

    def _add(self, schema: dict[str, Any], function: ToolFunction) -> None:
        name = schema["function"]["name"]
        require(name not in self._functions, "tools", name, "tools with different names")
        self.tools.append(schema)
        self._functions[name] = function

    async def reset(self, prompt: Any) -> Observation:
        """The conversation of the prompt, to which the chat template adds the tools."""
        for server in self._servers:
            for schema in await server.open():
                self._add(schema, partial(_call_server, server, schema["function"]["name"]))
        messages = getattr(prompt, "messages", ())
        return list(messages) if messages else str(prompt.text)

    async def step(self, action: str) -> tuple[Observation, float | None, bool, dict[str, Any]]:
        """Makes the calls in the turn."""
        calls = self._read_calls(action)
        results = [await self._result(call) for call in calls]
        messages: list[Message] = [
            {"role": "tool", "name": call.name, "content": result} for call, result in zip(calls, results, strict=True)
        ]
        return messages, None, not calls, {}

    async def close(self) -> None:
        """Ends the MCP servers of the episode."""
        for server in self._servers:
            await server.close()

    async def _result(self, call: ToolCall) -> str:
        if call.problem:
            return f"error: {call.problem}"
        if call.name not in self._functions:
            return f"error: there is no tool {call.name!r}, only {', '.join(self._functions)}"
        try:
            result = self._functions[call.name](**call.arguments)
            if inspect.isawaitable(result):
                result = await result
        except ToolError as error:
            return f"error: {error}"
        except Exception as error:
            return f"error: {describe(error)}"
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        limit = self._max_result_chars
        return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} characters left out)"


async def _call_server(server: McpServer, name: str, /, **arguments: Any) -> str:
    return await server.call(name, arguments)


def tool_schema(function: ToolFunction) -> dict[str, Any]:
    """The JSON schema of a tool, as chat templates take it.

    Raises RolloutConfigError if the function has no attribute `schema` and its type hints and docstring give none.
    """
    own = getattr(function, "schema", None)
    if own is not None:
        return dict(own)
    from transformers.utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # it raises exceptions of its own
        raise RolloutConfigError(
            describe(error),
            field="tools",
            value=function.__name__,
            remedy="give every argument a type hint and a line under `Args:` of the docstring, or set the function's "
            "attribute `schema`",
        ) from error
    return schema


def _function(tool: ToolFunction | str) -> ToolFunction:
    if callable(tool):
        return tool
    module, colon, name = tool.partition(":")
    require(bool(module and colon and name), "tools", tool, "package.module:function")
    function: ToolFunction = getattr(importlib.import_module(module), name)
    return function


def _call(text: str) -> ToolCall:
    try:
        return _checked(json.loads(text))
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is no JSON: {error}")


def _checked(call: Any) -> ToolCall:
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return ToolCall("", {}, "the call has no name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments are no JSON object")
    return ToolCall(name, arguments)
