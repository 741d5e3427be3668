"""An MCP server for tests: an adder that counts its calls; with a port it serves HTTP."""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("adder")
calls: list[int] = []


@server.tool()
def add(x: int, y: int) -> str:
    """Adds two numbers."""
    calls.append(x)
    return f"{x + y} after {len(calls)} calls"


@server.tool()
def fail() -> str:
    """Always fails."""
    raise RuntimeError("out of order")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
