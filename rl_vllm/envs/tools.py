"""Tools: Python functions that a model calls in the middle of a rollout."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torchrl.envs.llm.transforms.tools import JSONCallParser
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from rl_vllm.config import require_above_zero, require_at_least
from rl_vllm.envs.calls import call, function_name
from rl_vllm.envs.episode import Interaction, Message, Reply
from rl_vllm.envs.mcp import MCPTool
from rl_vllm.envs.prompts import Entry
from rl_vllm.envs.reward import shorten
from rl_vllm.errors import ConfigError, DeadlineError

# An open block at the end was cut there, by a stop text or the number of tokens.
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FORM = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that was found in an answer.

    Attributes:
        name: The tool's.
        arguments: By name.
        call_id: What the model calls this call; the result repeats it.
        problem: Why the call cannot be made; its text goes to the model.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call_id: str | None = None
    problem: str | None = None


# From an answer to its calls in order, or TorchRL's form of the same: a mapping whose "calls" have tool, args and tag.
ToolParser: TypeAlias = Callable[[str], Sequence[ToolCall] | Mapping[str, Any]]


def parse_tool_calls(answer: str) -> list[ToolCall]:
    """Calls as Hermes and Qwen templates teach them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    What the model thinks, up to the last ``</think>``, is left out. A block that is not such JSON becomes a call with a
    problem.
    """
    return [_read_block(found.group(1).strip()) for found in _BLOCK.finditer(answer.rpartition("</think>")[2])]


class ToolUse:
    """An interaction factory: rollouts in which the model may call tools until it answers without a call.

    The calls of an answer run one after the other, in order; each result becomes a message of the role ``tool``. So
    does what goes wrong: a call that cannot be read, an unknown tool, arguments that do not fit, an exception, a
    timeout. The model reads it and may try again; the rollout does not fail.

    Ordinary functions run in daemon threads, which cannot be stopped: see :class:`Rewards`. The tools are shared by all
    rollouts that run at the same time.

    Args:
        tools: Functions or coroutine functions with type hints and a docstring that describes each argument, as
            :func:`transformers.utils.get_json_schema` reads them; by their own names, or a mapping from names, such as
            the ``tools`` of an :class:`MCPServer`.
        parse: Finds the calls in an answer: :func:`parse_tool_calls` (also for None), TorchRL's ``XMLBlockParser`` or
            ``JSONCallParser``, or your own.
        max_turns: Answers of the model per rollout. Calls in the last one are not made: nobody would read the result.
        timeout_s: For each call.
        max_result_chars: Longer results are cut, and say so.

    Raises:
        ConfigError: There are no tools, two have one name, one has no schema, or a number is out of range.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]],
        *,
        parse: ToolParser | None = None,
        max_turns: int = 8,
        timeout_s: float = 30.0,
        max_result_chars: int = 8192,
    ) -> None:
        require_at_least("max_turns", max_turns, 1)
        require_above_zero("timeout_s", timeout_s)
        require_at_least("max_result_chars", max_result_chars, 1)
        pairs = list(tools.items()) if isinstance(tools, Mapping) else [(function_name(tool), tool) for tool in tools]
        if not pairs:
            raise ConfigError("there are no tools: give at least one function")
        self.tools = dict(pairs)
        if len(self.tools) < len(pairs):
            raise ConfigError(f"two tools have one name among {[name for name, _ in pairs]}: give a mapping from names")
        self._schemas = {name: _schema(name, tool) for name, tool in pairs}
        self.parse = parse_tool_calls if parse is None else parse
        self.max_turns = max_turns
        self.timeout_s = float(timeout_s)
        self.max_result_chars = max_result_chars

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What chat templates show to the model: ``tokenizer.apply_chat_template(messages, tools=schemas)``."""
        return list(self._schemas.values())

    def __call__(self, entry: Entry) -> Interaction:  # noqa: ARG002
        """A fresh interaction for one rollout."""
        return _ToolInteraction(self)

    async def calls_in(self, answer: str) -> list[ToolCall]:
        """The calls of an answer, in order; a parser that fails becomes one call with a problem."""
        if isinstance(self.parse, JSONCallParser) and not _is_json_object(answer):
            return []  # It would fail on other JSON, such as a plain number.
        outcome = await call(self.parse, answer, timeout_s=self.timeout_s)
        if outcome.error is not None:
            reason = f"{type(outcome.error).__name__}: {outcome.error}"
            return [ToolCall("", problem=f"the tool calls of this answer could not be read ({reason})")]
        found = outcome.value
        if not isinstance(found, Mapping):
            return list(found)
        return [self._from_torchrl(one) for one in found["calls"]]

    async def run(self, asked: ToolCall) -> str:
        """What a call returns, as text; or what is wrong with it."""
        problem = asked.problem or self._misfit(asked)
        if problem is not None:
            return f"Error: {problem}"
        outcome = await call(self.tools[asked.name], timeout_s=self.timeout_s, **asked.arguments)
        if isinstance(outcome.error, DeadlineError):
            return f"Error: {asked.name} gave no result within {self.timeout_s:g} s; ask for less."
        if outcome.error is not None:
            return self._cut(f"Error: {asked.name} raised {type(outcome.error).__name__}: {outcome.error}")
        return self._cut(_as_text(outcome.value))

    def _cut(self, text: str) -> str:
        limit = self.max_result_chars
        return text if len(text) <= limit else f"{text[:limit]}\n[cut: {limit} of {len(text)} characters]"

    def _misfit(self, asked: ToolCall) -> str | None:
        """Why a tool cannot be called like this, or None."""
        known = ", ".join(self.tools)
        if asked.name not in self.tools:
            return f"there is no tool {asked.name!r}; there are: {known}."
        if not isinstance(asked.arguments, Mapping):
            return f"the arguments of {asked.name} must be a JSON object, got {shorten(str(asked.arguments))}."
        parameters = self._schemas[asked.name]["function"]["parameters"]
        shown = json.dumps(parameters["properties"])
        try:
            inspect.signature(self.tools[asked.name]).bind(**asked.arguments)
        except TypeError as error:
            return f"the arguments of {asked.name} do not fit: {error}; it takes {shown}."
        for name, value in asked.arguments.items():
            wanted = parameters["properties"].get(name, {})
            if not _fits(value, wanted):
                return f"{asked.name} takes {name} as {json.dumps(wanted)}, got {shorten(repr(value))}."
        return None

    def _from_torchrl(self, found: Any) -> ToolCall:
        properties = {}
        if found.tool in self._schemas:
            properties = self._schemas[found.tool]["function"]["parameters"]["properties"]
        problem = None
        if isinstance(found.args, Mapping) and set(found.args) == {"raw"} and "raw" not in properties:
            # The parser's way to say that it could not read the arguments.
            problem = f"the arguments of {found.tool} are not JSON: {shorten(str(found.args['raw']))}."
        return ToolCall(found.tool, found.args, found.tag, problem)


class _ToolInteraction:
    """One rollout's share of a :class:`ToolUse`."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._num_answers = 0

    def begin(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    async def reply(self, answer: str, messages: Sequence[Message]) -> Reply:  # noqa: ARG002
        self._num_answers += 1
        if self._num_answers >= self._use.max_turns:
            return Reply(done=True)
        results: list[Message] = []
        for asked in await self._use.calls_in(answer):
            message = {"role": "tool", "name": asked.name, "content": await self._use.run(asked)}
            results.append(message if asked.call_id is None else {**message, "tool_call_id": asked.call_id})
        return Reply(tuple(results), done=not results)

    def close(self) -> None:
        """It holds nothing."""


def _schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    if isinstance(tool, MCPTool):
        return {**tool.schema, "function": {**tool.schema["function"], "name": name}}
    if not callable(tool):
        raise ConfigError(f"tool {name!r} is {shorten(repr(tool))}: give a function")
    described = tool if inspect.isroutine(tool) else type(tool).__call__.__get__(tool)
    try:
        schema: dict[str, Any] = get_json_schema(described)
    except (DocstringParsingException, TypeHintParsingException, TypeError, ValueError) as error:
        raise ConfigError(
            f"tool {name!r} cannot be described to the model: {error}; write type hints, and a docstring that "
            "describes each argument under Args:"
        ) from error
    function = {**schema["function"], "name": name}
    return {**schema, "function": function}


def _read_block(text: str) -> ToolCall:
    try:
        found = json.loads(text)
        arguments = found.get("arguments", {}) if isinstance(found, dict) else {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except ValueError as error:
        return ToolCall("", problem=f"this tool call is not JSON ({error}): {shorten(text)}; write {_FORM}.")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", problem=f"this tool call has no name: {shorten(text)}; write {_FORM}.")
    call_id = found.get("id")
    return ToolCall(found["name"], arguments, call_id if isinstance(call_id, str) else None)


def _fits(value: Any, wanted: Mapping[str, Any]) -> bool:
    """Whether a value is of the type that a schema states, as far as the outermost type goes."""
    if value is None and wanted.get("nullable"):
        return True
    if "enum" in wanted and value not in wanted["enum"]:
        return False
    names = wanted.get("type", ())
    kinds = [_JSON_TYPES.get(name, (object,)) for name in ([names] if isinstance(names, str) else names)]
    if not kinds:
        return True
    if isinstance(value, bool):  # In Python an int, in JSON not.
        return any(bool in kind or object in kind for kind in kinds)
    return any(isinstance(value, kind) for kind in kinds)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
