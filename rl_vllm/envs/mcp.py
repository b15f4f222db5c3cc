"""The tools of an MCP server (https://modelcontextprotocol.io) as functions.

TorchRL 0.14's ``MCPToolTransform`` never initialises its session, which servers refuse. These functions go into its
``SimpleToolTransform`` instead, and into :class:`rl_vllm.envs.ToolUse`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from typing import Any, Self

from rl_vllm.config import require_above_zero
from rl_vllm.envs.background import Background
from rl_vllm.envs.reward import shorten
from rl_vllm.errors import ConfigError

_CLOSE_TIMEOUT_S = 10.0


class MCPTool:
    """One tool of a server: call it with its arguments by name.

    Attributes:
        schema: What chat templates show.
    """

    def __init__(self, server: MCPServer, schema: dict[str, Any]) -> None:
        self.schema = schema
        self._server = server

    def __call__(self, **arguments: Any) -> str:
        """The text of the result.

        Raises:
            RuntimeError: The server says that the call failed; in its words.
            DeadlineError: It took longer than the server's ``timeout_s``.
        """
        return self._server.call(self.schema["function"]["name"], arguments)


class MCPServer:
    """A server in a process of its own, spoken to over standard input and output; a context manager.

    Args:
        command: What starts it.
        args: Its arguments.
        env: Its environment; None means a small one of the MCP library's choice.
        timeout_s: Limit for its start, and for each call.

    Attributes:
        tools: A function for each tool, by name.

    Raises:
        ConfigError: There is no ``mcp`` package, or the server did not start, or does not speak MCP.
    """

    def __init__(
        self,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        require_above_zero("timeout_s", timeout_s)
        self._timeout_s = timeout_s
        self._described = " ".join([command, *args])
        self._background = Background("rl_vllm-mcp")
        self._stop: asyncio.Event | None = None
        self._session: Any = None
        started: Future[list[dict[str, Any]]] = Future()
        self._running = self._background.submit(self._run(command, list(args), env, started))
        try:
            schemas = started.result(timeout_s)
        except WaitTimeoutError:
            self.close()
            raise ConfigError(f"{self._described!r} had not started after {timeout_s:g} s: raise timeout_s") from None
        except BaseException:
            self.close()
            raise
        self.tools = {schema["function"]["name"]: MCPTool(self, schema) for schema in schemas}

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool answers, as text; raises as the tool's function."""
        work = self._session.call_tool(name, dict(arguments))
        result = self._background.run(work, timeout_s=self._timeout_s, waited_for=f"MCP tool {name}")
        text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text

    def close(self) -> None:
        """End the server. Idempotent."""
        stop, self._stop = self._stop, None
        if stop is not None:
            self._background.call_soon(stop.set)
            try:
                self._running.result(_CLOSE_TIMEOUT_S)
            except WaitTimeoutError:
                self._running.cancel()
        self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def _run(
        self, command: str, args: list[str], env: Mapping[str, str] | None, started: Future[list[dict[str, Any]]]
    ) -> None:
        """The session's life, in one task: what the MCP library opens in a task it must close there."""
        (failure,) = await asyncio.gather(self._serve(command, args, env, started), return_exceptions=True)
        if failure is not None and not started.done():
            reason = shorten(str(_first(failure)), 300)
            stated = ConfigError(f"the MCP server {self._described!r} did not start: {reason}")
            started.set_exception(failure if isinstance(failure, ConfigError) else stated)

    async def _serve(
        self, command: str, args: list[str], env: Mapping[str, str] | None, started: Future[list[dict[str, Any]]]
    ) -> None:
        try:
            from mcp import ClientSession, StdioServerParameters
            from mcp.client.stdio import stdio_client
        except ModuleNotFoundError as error:
            raise ConfigError(f"MCP servers need the mcp package, version 2 or newer ({error}): install it") from error
        stop = self._stop = asyncio.Event()
        parameters = StdioServerParameters(command=command, args=args, env=None if env is None else dict(env))
        async with stdio_client(parameters) as (reading, writing), ClientSession(reading, writing) as session:
            await session.initialize()
            listed = await session.list_tools()
            self._session = session
            started.set_result([_schema(tool) for tool in listed.tools])
            await stop.wait()


def _schema(tool: Any) -> dict[str, Any]:
    """As Hugging Face's chat templates read tools."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _first(error: BaseException) -> BaseException:
    """The cause at the bottom of a task group's error."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
