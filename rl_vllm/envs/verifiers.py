"""Environments of the ``verifiers`` package, versions 0.1.3 to 0.1.7, as source, rewards and interaction.

Those versions describe an environment by a dataset, a rubric and two methods, ``env_response(messages, state)`` and
``is_completed(messages, state)``; only that is used, never their clients and rollouts. From 0.1.8 on, an environment
owns the whole rollout, calls to the model included, and cannot be taken apart like this.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

from rl_vllm.config import require_above_zero
from rl_vllm.envs.calls import call, function_name
from rl_vllm.envs.episode import Finished, Interaction, Message, Reply
from rl_vllm.envs.prompts import Entry
from rl_vllm.envs.rewards import Reward
from rl_vllm.envs.sources import PromptSource, first_messages
from rl_vllm.envs.tools import ToolCall, parse_tool_calls
from rl_vllm.errors import BadInputError, ConfigError

# States of finished rollouts that wait to be scored; a rollout in flight counts too.
_MAX_STATES = 8192
# What identifies a chat: roles and contents.
_Key: TypeAlias = tuple[tuple[str, str], ...]


def from_verifiers(
    environment: Any, *, seed: int | None = None, epochs: int | None = 1, timeout_s: float = 60.0
) -> tuple[PromptSource, list[Reward], VerifiersRollouts | None]:
    """Take an environment of ``verifiers`` 0.1.3 to 0.1.7 apart.

    Its reward functions are called as its rubric calls them, with the arguments that they name, but one that fails
    costs its rollout the value instead of counting as 0. They get the rollout's ``state`` when its last answer is one
    that the environment saw; otherwise a state with the chat and nothing of the environment's own.

    Args:
        environment: A ``SingleTurnEnv``, ``MultiTurnEnv``, ``ToolEnv`` or a subclass, for chats.
        seed: See :class:`PromptSource`.
        epochs: See :class:`PromptSource`.
        timeout_s: For each call of the environment's methods.

    Returns:
        Prompts; a reward for each function of the rubric, weights included; and the interaction factory, None for a
        single turn.

    Raises:
        ConfigError: It is no such environment, or replaces its rollout or its rubric's scoring by its own.
    """
    require_above_zero("timeout_s", timeout_s)
    kind = type(environment)
    try:
        message_type, _, _ = environment.message_type, environment.oai_tools, environment.env_response
        rubrics = vars(environment.rubric).get("rubrics") or [environment.rubric]
        functions = [
            (function, weight, rubric.class_objects)
            for rubric in rubrics
            for function, weight in zip(rubric.get_reward_funcs(), rubric.get_reward_weights(), strict=True)
        ]
        data = environment.get_dataset()
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{kind.__name__} is no environment of verifiers 0.1.3 to 0.1.7 with training data ({error}): give one, or "
            "write its PromptSource, Rewards and interaction"
        ) from error
    if message_type != "chat":
        raise ConfigError(f"{kind.__name__} has message_type={message_type!r}: only 'chat' has turns")
    own_parts = [
        (kind, "rollout", "MultiTurnEnv"),
        (kind, "get_context_messages", "MultiTurnEnv"),
        *(
            (type(rubric), name, "Rubric")
            for rubric in rubrics
            for name in ("score_rollouts", "score_rollout", "call_reward_func")
        ),
    ]
    for owner, method, expected in own_parts:
        found = _defined_in(owner, method)
        if found not in (None, expected):
            raise ConfigError(
                f"{found} replaces {expected}.{method}, which is not used here: write it as a Reward or interaction"
            )
    rollouts = VerifiersRollouts(environment, timeout_s=timeout_s)
    rewards = [
        Reward(_RubricFunction(function, objects, rollouts.chats), weight, function_name(function), whole=True)
        for function, weight, objects in functions
    ]
    is_single = any(base.__name__ == "SingleTurnEnv" for base in kind.__mro__)
    return PromptSource(data, seed=seed, epochs=epochs), rewards, None if is_single else rollouts


class VerifiersRollouts:
    """An interaction factory over a multi-turn environment of ``verifiers``; :func:`from_verifiers` makes it.

    The calls of a ``ToolEnv`` are read from the answer as :func:`parse_tool_calls` does.
    """

    def __init__(self, environment: Any, *, timeout_s: float) -> None:
        self.environment = environment
        self.chats = _States()
        self.timeout_s = timeout_s

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The environment's tools, for chat templates; empty without any."""
        return list(self.environment.oai_tools or [])

    def __call__(self, entry: Entry) -> Interaction:
        """A fresh interaction for one rollout."""
        return _Rollout(self, entry)

    async def ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call one of the environment's methods, ordinary or coroutine; what it raises, and a timeout, rises."""
        outcome = await call(method, *arguments, timeout_s=self.timeout_s)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value


class _Rollout:
    """One rollout: the loop of ``MultiTurnEnv.rollout``, turned inside out."""

    def __init__(self, rollouts: VerifiersRollouts, entry: Entry) -> None:
        self._rollouts = rollouts
        self._environment = rollouts.environment
        self._entry = entry
        self._state: dict[str, Any] = {}
        self._kept: tuple[_Key, dict[str, Any]] | None = None

    async def begin(self, messages: Sequence[Message]) -> Sequence[Message]:
        state = _new_state(self._entry, [dict(message) for message in messages], [])
        if self._environment.oai_tools:
            state["info"].setdefault("oai_tools", self._environment.oai_tools)
        self._state = await self._rollouts.ask(self._environment.setup_state, state)
        if await self._is_completed():
            raise BadInputError(
                f"{type(self._environment).__name__} is complete before the first answer: drop the prompt"
            )
        return list(self._state["prompt"])

    async def reply(self, answer: str, messages: Sequence[Message]) -> Reply:
        calls = parse_tool_calls(answer) if self._rollouts.schemas else []
        good = [_openai_call(self._environment, one, number) for number, one in enumerate(calls) if one.problem is None]
        problems = [{"role": "tool", "content": f"Error: {one.problem}"} for one in calls if one.problem is not None]
        said: dict[str, Any] = {"role": "assistant", "content": answer}
        if good:
            said["tool_calls"] = good
        self._state["completion"].append(said)
        self._state["responses"].append(_response(answer, good))
        self._state["turn"] += 1
        self._kept = self._rollouts.chats.move(messages, self._state, before=self._kept)
        if problems and not good:
            # To the environment it would look like a last answer; it never sees calls that cannot be read.
            is_last = 0 < self._environment.max_turns <= self._state["turn"]
            return self._say([] if is_last else problems, done=is_last)
        if await self._is_completed():
            return Reply(done=True)
        chat = self._chat()
        said_back, state = await self._rollouts.ask(self._environment.env_response, chat, self._state)
        if state is not self._state:
            self._state = state
            self._kept = self._rollouts.chats.move(messages, state, before=self._kept)
        reply = self._say([*problems, *said_back], done=False)
        return Reply(done=True) if await self._is_completed() else reply

    def close(self) -> None:
        """The state stays until it is scored, or pushed out by many later ones."""

    def _say(self, messages: list[Any], *, done: bool) -> Reply:
        self._state["completion"].extend(messages)
        return Reply(tuple(messages), done=done)

    def _chat(self) -> list[Any]:
        return [*self._state["prompt"], *self._state["completion"]]

    async def _is_completed(self) -> bool:
        # Up to 0.1.4 the loop counted the turns, later is_completed does.
        if 0 < self._environment.max_turns <= self._state["turn"]:
            return True
        return bool(await self._rollouts.ask(self._environment.is_completed, self._chat(), self._state))


class _States:
    """The state of each rollout, by its chat up to the last answer that the environment saw."""

    def __init__(self) -> None:
        # Rollouts of one prompt may say the same for a while, or to the end.
        self._states: OrderedDict[_Key, list[dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def move(
        self, messages: Sequence[Message], state: dict[str, Any], *, before: tuple[_Key, dict[str, Any]] | None
    ) -> tuple[_Key, dict[str, Any]]:
        """Keep a rollout's state under its present chat, in place of what was kept ``before``; returns what is kept."""
        key = _key(messages)
        with self._lock:
            if before is not None and before[0] in self._states:
                others = [one for one in self._states.pop(before[0]) if one is not before[1]]
                if others:
                    self._states[before[0]] = others
            self._states.setdefault(key, []).append(state)
            while len(self._states) > _MAX_STATES:
                self._states.popitem(last=False)
        return key, state

    def of(self, finished: Finished) -> dict[str, Any]:
        """The state of a finished rollout; a plain one when there is none."""
        messages = list(finished.messages)
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()  # What the environment said last and no answer followed.
        with self._lock:
            found = self._states.get(_key(messages))
        if found:
            return found[-1]
        prompt = first_messages(finished.entry)
        if finished.messages and finished.messages[0]["role"] == "system" != prompt[0]["role"]:
            prompt = [finished.messages[0], *prompt]
        completion = [dict(message) for message in finished.messages[len(prompt) :]]
        state = _new_state(finished.entry, list(prompt), completion)
        state["turn"] = finished.num_turns
        state["responses"] = [_response(one["content"], []) for one in completion if one["role"] == "assistant"]
        return state


class _RubricFunction:
    """A rubric's function as a reward of a whole rollout."""

    def __init__(self, function: Callable[..., Any], objects: Mapping[str, Any], chats: _States) -> None:
        self._function = function
        self._objects = objects
        self._chats = chats

    def __call__(self, finished: Finished) -> Any:
        state = self._chats.of(finished)
        names = ("prompt", "completion", "answer", "task", "info", "example_id")
        given = {**{name: state[name] for name in names}, "state": state, **self._objects}
        parameters = inspect.signature(self._function).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return self._function(**given)
        return self._function(**{name: value for name, value in given.items() if name in parameters})


def _new_state(entry: Entry, prompt: list[Any], completion: list[Any]) -> dict[str, Any]:
    info = entry.get("info") or {}
    return {
        "id": 0,
        "prompt": prompt,
        "completion": completion,
        "answer": entry.get("answer") or "",
        "task": entry.get("task") or "default",
        "info": json.loads(info) if isinstance(info, str) else copy.deepcopy(dict(info)),
        "example_id": entry.get("example_id") or 0,
        "responses": [],
        "turn": 0,
        "timing": {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
    }


def _key(messages: Sequence[Message]) -> _Key:
    return tuple((str(message["role"]), str(message.get("content"))) for message in messages)


def _response(answer: str, calls: list[Any]) -> Any:
    """What environments read of an OpenAI response."""
    message = SimpleNamespace(role="assistant", content=answer, tool_calls=calls or None)
    return SimpleNamespace(id="", choices=[SimpleNamespace(index=0, message=message, finish_reason="stop")])


def _openai_call(environment: Any, asked: ToolCall, number: int) -> Any:
    """A tool call as the environment's version reads it: a mapping from 0.1.6 on, before that OpenAI's class."""
    function = {"name": asked.name, "arguments": json.dumps(asked.arguments)}
    fields = {"id": asked.call_id or f"call_{number}", "type": "function", "function": function}
    if _defined_in(type(environment), "get_context_messages") is not None:
        return fields
    module = importlib.import_module("openai.types.chat.chat_completion_message_tool_call")
    return module.ChatCompletionMessageToolCall.model_validate(fields)


def _defined_in(kind: type, method: str) -> str | None:
    """Name of the class that defines a method, or None."""
    return next((base.__name__ for base in kind.__mro__ if method in vars(base)), None)
