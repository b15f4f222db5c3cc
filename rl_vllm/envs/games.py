"""Text games: environments with Gymnasium's interface as the other side of a rollout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from rl_vllm.config import require_at_least
from rl_vllm.envs.episode import Interaction, Message, Reply
from rl_vllm.envs.prompts import Entry
from rl_vllm.envs.reward import one_finite_number, shorten
from rl_vllm.errors import BadInputError

_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_FORM = "<action>...</action>"


class TextEnv(Protocol):
    """What is used of a ``gymnasium.Env``; without an ``action_space``, actions are texts."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: Any, /) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...

    def close(self) -> None: ...


# From an observation and its info to what the model reads.
Renderer: TypeAlias = Callable[[Any, Mapping[str, Any]], str]


class GymnasiumText:
    """An interaction factory: each rollout is one episode of an environment.

    The first observation is added to the prompt; every further one answers the model. A turn's reward is that of its
    step. An entry's ``seed`` and ``options`` go to ``reset``, so that rollouts of one prompt start alike. An answer
    that is no action makes no step: the model is told so and tries again. For environments that differ by entry, write
    ``lambda entry: GymnasiumText(lambda: make(entry["id"]))(entry)``.

    Args:
        make_env: A new environment for each rollout. One rollout's calls come one after the other, but from different
            threads.
        parse_action: From the model's answer to an action, or a ValueError whose text tells the model what to do. None
            takes the last ``<action>...</action>``, or else the whole answer: as a number where the action space is
            ``Discrete``, as text otherwise; it must be in the space.
        render: From an observation and its info to text. None takes observations that are text.
        invalid_reward: Of a turn without an action.
        max_turns: Answers of the model, after which the rollout is over, wherever the episode is.

    Raises:
        ConfigError: ``max_turns`` is out of range.
        BadInputError: In a rollout: an observation is not text.
        RewardError: In a rollout: a step's reward is not one finite number.
    """

    def __init__(
        self,
        make_env: Callable[[], TextEnv],
        *,
        parse_action: Callable[[str], Any] | None = None,
        render: Renderer | None = None,
        invalid_reward: float = 0.0,
        max_turns: int = 32,
    ) -> None:
        require_at_least("max_turns", max_turns, 1)
        self.make_env = make_env
        self.parse_action = parse_action
        self.render = _as_it_is if render is None else render
        self.invalid_reward = one_finite_number(invalid_reward, "invalid_reward")
        self.max_turns = max_turns

    def __call__(self, entry: Entry) -> Interaction:
        """A fresh interaction for one rollout."""
        return _Episode(self, entry)


class _Episode:
    """One rollout's environment."""

    def __init__(self, game: GymnasiumText, entry: Entry) -> None:
        self._game = game
        self._entry = entry
        self._env: TextEnv | None = None
        self._num_answers = 0

    def begin(self, messages: Sequence[Message]) -> Sequence[Message]:
        self._env = self._game.make_env()
        observation, info = self._env.reset(seed=self._entry.get("seed"), options=self._entry.get("options"))
        text = self._game.render(observation, info)
        *before, last = messages
        if last["role"] == "user" and isinstance(last["content"], str):
            # Many chat templates refuse two messages of the user in a row.
            return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]
        return [*messages, {"role": "user", "content": text}]

    def reply(self, answer: str, messages: Sequence[Message]) -> Reply:  # noqa: ARG002
        assert self._env is not None
        self._num_answers += 1
        is_last = self._num_answers >= self._game.max_turns
        parse = self._game.parse_action
        try:
            action = _read_action(answer, self._env) if parse is None else parse(answer)
        except ValueError as error:
            return _turn(f"That is not an action: {error}", self._game.invalid_reward, done=is_last)
        observation, reward, terminated, truncated, info = self._env.step(action)
        value = one_finite_number(reward, f"action {shorten(str(action))}, turn {self._num_answers}")
        if terminated or truncated or is_last:
            return Reply(reward=value, done=True)
        return _turn(self._game.render(observation, info), value, done=False)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def _turn(text: str, reward: float, *, done: bool) -> Reply:
    return Reply(() if done else ({"role": "user", "content": text},), reward, done)


def _as_it_is(observation: Any, info: Mapping[str, Any]) -> str:  # noqa: ARG001
    if not isinstance(observation, str):
        shown = shorten(str(observation))
        raise BadInputError(
            f"the observation is {shown} ({type(observation).__name__}): give render= to make it text for the model"
        )
    return observation


def _read_action(answer: str, env: TextEnv) -> Any:
    """The action in an answer.

    Raises:
        ValueError: There is none; the text is for the model.
    """
    marked = _ACTION.findall(answer)
    text = (marked[-1] if marked else answer).strip()
    if not text:
        raise ValueError(f"it is empty. Write {_FORM}.")
    space = _action_space(env)
    if space is None:
        return text
    action: Any = text
    if type(space).__name__ == "Discrete":
        first = int(space.start)
        wanted = f"Write a number from {first} to {first + int(space.n) - 1} as {_FORM}."
        if re.fullmatch(r"[+-]?[0-9]{1,18}", text) is None:
            raise ValueError(f"{shorten(text)} is not a number. {wanted}")
        action = int(text)
    else:
        wanted = f"Write one of {shorten(str(space))} as {_FORM}."
    if not space.contains(action):
        raise ValueError(f"{shorten(text)} is not possible. {wanted}")
    return action


def _action_space(env: TextEnv) -> Any:
    """A Gymnasium environment's action space; None for one that has none."""
    try:
        return env.action_space  # type: ignore[attr-defined]
    except AttributeError:
        return None
