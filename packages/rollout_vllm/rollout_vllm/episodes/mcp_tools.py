"""The tools of an MCP server: a process that is started for the episode, or a server at a URL."""

import asyncio
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ..config import require
from ..errors import RolloutConfigError, RolloutError

PREFIX = "mcp:"


class ToolError(RolloutError):
    """The server answers a call with an error. The text is for the policy."""


class McpServer:
    """A connection to an MCP server, `mcp:COMMAND ARGUMENT…` or `mcp:http://HOST:PORT/mcp`; one object per episode.

    Needs the package mcp 2. A process gets the few variables that the package passes on (PATH, HOME, …), no others.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        target = source.removeprefix(PREFIX).strip()
        try:
            self._words = [] if target.startswith(("http://", "https://")) else shlex.split(target)
        except ValueError as error:
            raise RolloutConfigError(str(error), field="tools", value=source) from error
        self._target = target
        require(bool(target), "tools", source, "mcp:COMMAND, or mcp:http://HOST:PORT/PATH")
        if find_spec("mcp") is None:
            problem = "the package mcp is not installed"
            raise RolloutConfigError(problem, field="tools", value=source, remedy="pip install 'mcp>=2,<3'")
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def open(self) -> list[dict[str, Any]]:
        """Connects, and returns the JSON schemas of the server's tools as chat templates take them."""
        ready: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._hold(ready))
        return await ready

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a tool's result. Raises ToolError for an error of the tool."""
        result = await self._client.call_tool(name, dict(arguments))
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        text = "\n".join(parts)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """Ends the connection, and the process that was started for it."""
        self._closing.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _hold(self, ready: asyncio.Future[list[dict[str, Any]]]) -> None:
        """Keeps the connection open: it has to be closed in the task that opened it."""
        from mcp import Client, StdioServerParameters

        try:
            server: Any = self._target
            if self._words:
                server = StdioServerParameters(command=self._words[0], args=self._words[1:])
            async with Client(server) as self._client:
                ready.set_result([_schema(tool) for tool in await self._tools()])
                await self._closing.wait()
        except Exception as error:
            if not ready.done():
                problem = f"the MCP server cannot be used: {_first(error)}"
                ready.set_exception(RolloutConfigError(problem, field="tools", value=self._source))

    async def _tools(self) -> list[Any]:
        tools, cursor = [], None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _first(error: BaseException) -> str:
    """The first error of a group, which anyio raises."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
