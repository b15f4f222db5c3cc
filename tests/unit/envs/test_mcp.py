"""Tools of a real MCP server, in a process of its own, for our interactions and TorchRL's transform."""

import asyncio
import sys
import threading
from pathlib import Path

import psutil
import pytest
from tensordict import TensorDict, set_list_to_stack
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms.tools import SimpleToolTransform

from rl_vllm.envs import MCPServer, ToolUse
from rl_vllm.errors import ConfigError, DeadlineError

SCRIPT = Path(__file__).parent / "mcp_adder.py"


@pytest.fixture(scope="module")
def server():
    with MCPServer(sys.executable, [str(SCRIPT)], timeout_s=60.0) as running:
        yield running


def test_the_servers_tools_are_functions_with_its_schemas(server):
    assert set(server.tools) == {"add", "fail", "sleep"}
    assert server.tools["add"](a=1, b=2) == "3"
    function = server.tools["add"].schema["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["properties"]["a"]["type"] == "integer"


def test_what_the_server_refuses_is_an_error_in_its_words(server):
    with pytest.raises(RuntimeError, match="too blue"):
        server.tools["fail"](why="too blue")


def test_a_model_calls_them_and_reads_results_and_errors(server):
    use = ToolUse(server.tools)
    assert [schema["function"]["name"] for schema in use.schemas] == ["add", "fail", "sleep"]
    answer = (
        '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {"a": "x", "b": 22}}</tool_call>'
        '<tool_call>{"name": "fail", "arguments": {"why": "no"}}</tool_call>'
    )
    reply = asyncio.run(use({}).reply(answer, []))
    contents = [message["content"] for message in reply.messages]
    assert contents[0] == "42"
    assert "add takes a as" in contents[1]
    assert "no" in contents[2]
    assert contents[2].startswith("Error")


def test_torchrls_tool_transform_calls_them_in_a_chat(server):
    with set_list_to_stack(True):
        env = ChatEnv(batch_size=(1,)).append_transform(SimpleToolTransform(tools=server.tools))
        state = env.reset(TensorDict(query="hi", batch_size=(1,)))
        history = state["history"]
        answer = History(role="assistant", content='<tool>add\n{"a": 1, "b": 2}</tool>').unsqueeze(0).unsqueeze(0)
        history.full = history.prompt.extend(answer, inplace=False, dim=-1)
        history.response = answer
        stepped = env.step(state.set("history", history))["next", "history"].prompt
    assert "3" in stepped[0].content[-1]
    assert stepped[0].role[-1] == "tool"


def test_a_server_that_does_not_start_is_named_with_its_reason():
    with pytest.raises(ConfigError, match="no-such-command"):
        MCPServer("no-such-command", timeout_s=20.0)
    with pytest.raises(ConfigError, match="did not start"):
        MCPServer(sys.executable, ["-c", "raise SystemExit(3)"], timeout_s=20.0)


def test_a_call_has_a_limit_and_nothing_is_left_when_the_server_is_closed():
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    threads = {thread.name for thread in threading.enumerate()}
    server = MCPServer(sys.executable, [str(SCRIPT)], timeout_s=20.0)
    server._timeout_s = 0.3
    with pytest.raises(DeadlineError, match="sleep"):
        server.tools["sleep"](seconds=30.0)
    server.close()
    server.close()
    left = {process.pid for process in psutil.Process().children(recursive=True)} - before
    assert not left
    assert {thread.name for thread in threading.enumerate()} <= threads
