"""A running MCP server, and its tools for programs in any thread or event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager

from anyio.from_thread import start_blocking_portal
from langchain_core.tools import BaseTool
from langchain_mcp_adapters.interceptors import MCPToolCallRequest, MCPToolCallResult
from langchain_mcp_adapters.tools import load_mcp_tools
from mcp import ClientSession, StdioServerParameters, stdio_client
from mcp.types import TextResourceContents


@asynccontextmanager
async def connect(
    command: Sequence[str], env: Mapping[str, str] | None = None
) -> AsyncIterator[ClientSession]:
    """Start an MCP server that speaks on standard input and output, and open a session with it.

    Args:
        command: The program and its arguments.
        env: Its environment. None: the few variables that MCP passes on by default.
    """
    server = StdioServerParameters(
        command=command[0], args=list(command[1:]), env=None if env is None else dict(env)
    )
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        yield session


async def describe(session: ClientSession) -> str:
    """What a server offers, in words: its tools with their arguments, and its text resources."""
    offered = ["Tools:"]
    for tool in (await session.list_tools()).tools:
        schema = json.dumps(tool.inputSchema.get("properties", {}))
        offered.append(f"- {tool.name}: {tool.description or ''} {schema}")
    capabilities = session.get_server_capabilities()
    if capabilities is not None and capabilities.resources is not None:
        for resource in (await session.list_resources()).resources:
            contents = (await session.read_resource(resource.uri)).contents
            texts = [one.text for one in contents if isinstance(one, TextResourceContents)]
            offered.append(f"Resource {resource.uri}:\n" + "\n".join(texts))
    return "\n".join(offered)


class McpServer:
    """One process of an MCP server and one session, which all runs share.

    A session belongs to the event loop that opened it. This one has a loop of its own in a thread,
    so that its tools work in every other.

    Example:
        >>> server = McpServer([sys.executable, "server.py", "climate.sqlite3"])  # doctest: +SKIP
        >>> agent = build_agent(model, server.tools)  # doctest: +SKIP
        >>> server.close()  # doctest: +SKIP
    """

    tools: list[BaseTool]
    offered: str
    """What the server offers, in words (`describe`)."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start the server; the arguments are those of `connect`."""
        with ExitStack() as opening:
            portal = opening.enter_context(start_blocking_portal())
            session = opening.enter_context(
                portal.wrap_async_context_manager(connect(command, env))
            )

            async def over_there(
                request: MCPToolCallRequest,
                handler: Callable[[MCPToolCallRequest], Awaitable[MCPToolCallResult]],
            ) -> MCPToolCallResult:
                return await asyncio.wrap_future(portal.start_task_soon(handler, request))

            async def load() -> list[BaseTool]:
                return await load_mcp_tools(session, tool_interceptors=[over_there])

            self.tools = portal.call(load)
            self.offered = portal.call(describe, session)
            self._stack = opening.pop_all()

    def close(self) -> None:
        """Stop the server; its tools stop working."""
        self._stack.close()
