"""Adapter of ``verifiers`` environments: over stand-ins that have what is read, and over the package if it is there."""

import threading
from types import SimpleNamespace

import pytest

from rl_vllm.envs import Finished, Rewards, first_messages, from_verifiers
from rl_vllm.errors import BadInputError, ConfigError, DeadlineError

ROWS = [
    {
        "question": "Guess.",
        "answer": "7",
        "prompt": [{"role": "system", "content": "play"}, {"role": "user", "content": "Guess."}],
        "info": {"most": 9},
    }
]


class Rubric:
    def __init__(self, functions, weights):
        self.functions, self.weights = functions, weights
        self.class_objects = {"parser": "the parser"}

    def get_reward_funcs(self):
        return self.functions

    def get_reward_weights(self):
        return self.weights

    async def score_rollout(self): ...

    async def score_rollouts(self): ...

    async def call_reward_func(self): ...


class MultiTurnEnv:
    message_type = "chat"
    oai_tools = None
    max_turns = 3

    def __init__(self, rubric, rows=ROWS):
        self.rubric, self.rows = rubric, rows

    def get_dataset(self):
        return self.rows

    async def rollout(self): ...

    async def setup_state(self, state):
        return state

    async def is_completed(self, messages, state):
        return bool(state["completion"]) and state["completion"][-1]["content"] == state["answer"]

    async def env_response(self, messages, state):
        said = messages[-1]["content"]
        state["misses"] = [*state.get("misses", []), said]
        return [{"role": "user", "content": f"not {said}"}], state


class SingleTurnEnv(MultiTurnEnv):
    pass


def right(completion, answer):
    return completion[-1]["content"] == answer


def misses(state, parser, **others):
    assert parser == "the parser"
    assert others["info"]["most"] == 9
    return len(state["misses"])


async def played(factory, entry, *answers):
    """The finished rollout and its replies."""
    interaction = factory(entry)
    chat = list(await interaction.begin(first_messages(entry)))
    replies = []
    for answer in answers:
        chat.append({"role": "assistant", "content": answer})
        replies.append(await interaction.reply(answer, chat))
        chat.extend(replies[-1].messages)
    interaction.close()
    return Finished(entry, tuple(chat), answers[-1].strip(), len(answers)), replies


async def test_a_single_turn_environment_is_prompts_and_rewards():
    source, rewards, factory = from_verifiers(SingleTurnEnv(Rubric([right], [2.0])), epochs=2)
    assert factory is None
    first, second = source.entries()
    assert first == second
    assert first_messages(first) == ROWS[0]["prompt"]
    chats = [(*ROWS[0]["prompt"], {"role": "assistant", "content": said}) for said in ("7", "8")]
    finished = [Finished(first, chat, chat[-1]["content"]) for chat in chats]
    scores = await Rewards(rewards).score(finished)
    assert [(score.value, score.parts) for score in scores] == [(2.0, {"right": 1.0}), (0.0, {"right": 0.0})]


async def test_a_system_prompt_that_was_added_is_no_part_of_the_completion():
    row = {"question": "Guess.", "answer": "7", "prompt": [{"role": "user", "content": "Guess."}]}
    seen = []
    rubric = Rubric([lambda prompt, completion: seen.append((prompt, completion)) or 1], [1.0])
    source, rewards, _ = from_verifiers(SingleTurnEnv(rubric, [row]))
    chat = ({"role": "system", "content": "s"}, row["prompt"][0], {"role": "assistant", "content": "7"})
    await Rewards(rewards).score([Finished(next(source.entries()), chat, "7")])
    assert seen == [([chat[0], chat[1]], [chat[2]])]


async def test_a_multi_turn_environment_answers_until_it_is_completed():
    source, rewards, factory = from_verifiers(MultiTurnEnv(Rubric([right, misses], [1.0, -0.1])))
    finished, replies = await played(factory, next(source.entries()), "3", "7")
    assert [reply.done for reply in replies] == [False, True]
    assert replies[0].messages == ({"role": "user", "content": "not 3"},)
    (score,) = await Rewards(rewards).score([finished])
    assert score.parts == {"right": 1.0, "misses": 1.0}
    assert score.value == pytest.approx(0.9)


async def test_a_rollout_ends_at_the_environments_turns():
    source, rewards, factory = from_verifiers(MultiTurnEnv(Rubric([misses], [1.0])))
    finished, replies = await played(factory, next(source.entries()), "1", "2", "3")
    assert [reply.done for reply in replies] == [False, False, True]
    assert (await Rewards(rewards).score([finished]))[0].value == 2.0


async def test_each_rollout_is_scored_with_its_own_state():
    source, rewards, factory = from_verifiers(MultiTurnEnv(Rubric([misses], [1.0])))
    entry = next(source.entries())
    one, _ = await played(factory, entry, "1", "7")
    same, _ = await played(factory, entry, "1", "7")
    other, _ = await played(factory, entry, "1", "2", "7")
    cut, _ = await played(factory, entry, "1")
    scores = await Rewards(rewards).score([one, same, other, cut])
    assert [score.value for score in scores] == [1.0, 1.0, 2.0, 1.0]


async def test_a_state_that_the_environment_never_had_costs_the_value_and_is_no_zero():
    source, rewards, _ = from_verifiers(MultiTurnEnv(Rubric([misses], [1.0])))
    unseen = Finished(next(source.entries()), (*ROWS[0]["prompt"], {"role": "assistant", "content": "1"}), "1")
    (score,) = await Rewards(rewards).score([unseen])
    assert score.value is None
    assert "reward 'misses' raised KeyError: 'misses'" in str(score.error)


async def test_a_group_of_rubrics_gives_the_functions_of_all():
    group = SimpleNamespace(rubrics=[Rubric([right], [1.0]), Rubric([right], [3.0])])
    _, rewards, _ = from_verifiers(SingleTurnEnv(group))
    assert [(reward.label, reward.weight) for reward in rewards] == [("right", 1.0), ("right", 3.0)]


# From 0.1.6 on it has this method, and calls are mappings.
NewerMultiTurnEnv = type("MultiTurnEnv", (MultiTurnEnv,), {"get_context_messages": None})


class ToolEnv(NewerMultiTurnEnv):
    oai_tools = ({"type": "function", "function": {"name": "half"}},)

    async def is_completed(self, messages, state):
        return messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]

    async def env_response(self, messages, state):
        return [
            {
                "role": "tool",
                "tool_call_id": one["id"],
                "content": f"{one['function']['name']}{one['function']['arguments']}",
            }
            for one in messages[-1]["tool_calls"]
        ], state


async def test_tool_calls_are_read_from_the_answer():
    source, _, factory = from_verifiers(ToolEnv(Rubric([right], [1.0])))
    assert factory.schemas == list(ToolEnv.oai_tools)
    call = '<tool_call>{"name": "half", "arguments": {"x": 4}}</tool_call>'
    _, replies = await played(factory, next(source.entries()), call, f"<tool_call>bad</tool_call>{call}", "2")
    assert replies[0].messages == ({"role": "tool", "tool_call_id": "call_0", "content": 'half{"x": 4}'},)
    problem, result = replies[1].messages
    assert problem["content"].startswith("Error: this tool call is not JSON")
    assert result["content"] == 'half{"x": 4}'
    assert [reply.done for reply in replies] == [False, False, True]


async def test_calls_that_cannot_be_read_are_answered_until_the_turns_are_over():
    source, _, factory = from_verifiers(ToolEnv(Rubric([right], [1.0])))
    _, replies = await played(factory, next(source.entries()), *["<tool_call>bad</tool_call>"] * 3)
    assert [(len(reply.messages), reply.done) for reply in replies] == [(1, False), (1, False), (0, True)]


async def test_what_the_environment_raises_fails_the_rollout():
    class Failing(MultiTurnEnv):
        def env_response(self, messages, state):
            raise RuntimeError("no connection")

    source, _, factory = from_verifiers(Failing(Rubric([right], [1.0])))
    with pytest.raises(RuntimeError, match="no connection"):
        await played(factory, next(source.entries()), "1")


async def test_an_environment_that_hangs_fails_the_rollout(event):
    class Hanging(MultiTurnEnv):
        def env_response(self, messages, state):
            event.wait(20)

    source, _, factory = from_verifiers(Hanging(Rubric([right], [1.0])), timeout_s=0.1)
    with pytest.raises(DeadlineError, match=r"0.1 s waiting for env_response"):
        await played(factory, next(source.entries()), "1")


@pytest.fixture
def event():
    released = threading.Event()
    yield released
    released.set()


async def test_a_prompt_that_is_complete_at_once_is_refused():
    class Done(MultiTurnEnv):
        async def is_completed(self, messages, state):
            return True

    source, _, factory = from_verifiers(Done(Rubric([right], [1.0])))
    with pytest.raises(BadInputError, match="Done is complete before the first answer"):
        await factory(next(source.entries())).begin(ROWS[0]["prompt"])


class OwnRollout(MultiTurnEnv):
    async def rollout(self): ...


class OwnScoring(Rubric):
    async def score_rollout(self): ...


class Completion(MultiTurnEnv):
    message_type = "completion"


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (object(), "object is no environment of verifiers 0.1.3 to 0.1.7"),
        (SingleTurnEnv(SimpleNamespace(funcs=[right])), "no environment of verifiers 0.1.3 to 0.1.7.*get_reward_funcs"),
        (Completion(Rubric([right], [1.0])), "Completion has message_type='completion'"),
        (OwnRollout(Rubric([right], [1.0])), "OwnRollout replaces MultiTurnEnv.rollout"),
        (SingleTurnEnv(OwnScoring([right], [1.0])), "OwnScoring replaces Rubric.score_rollout"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(environment, complaint):
    with pytest.raises(ConfigError, match=complaint):
        from_verifiers(environment)


@pytest.fixture
def verifiers():
    package = pytest.importorskip("verifiers")
    if package.__version__ not in ("0.1.3", "0.1.4", "0.1.5", "0.1.6", "0.1.7"):
        pytest.skip(f"verifiers {package.__version__} has another interface")
    return package


def data():
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list([{"question": "half of 4?", "answer": "2"}])


async def test_the_packages_single_turn_environment(verifiers):
    rubric = verifiers.Rubric(funcs=[right], weights=[0.5])
    environment = verifiers.SingleTurnEnv(dataset=data(), rubric=rubric, system_prompt="short")
    source, rewards, factory = from_verifiers(environment)
    assert factory is None
    entry = next(source.entries())
    assert first_messages(entry) == [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "half of 4?"},
    ]
    chat = (*first_messages(entry), {"role": "assistant", "content": "2"})
    assert (await Rewards(rewards).score([Finished(entry, chat, "2")]))[0].value == 0.5


async def test_the_packages_multi_turn_environment(verifiers):
    class Guess(verifiers.MultiTurnEnv):
        async def is_completed(self, messages, state, **kwargs):
            return await MultiTurnEnv.is_completed(self, messages, state)

        async def env_response(self, messages, state, **kwargs):
            return await MultiTurnEnv.env_response(self, messages, state)

    group = verifiers.RubricGroup(
        rubrics=[
            verifiers.Rubric(funcs=[right]),
            verifiers.Rubric(funcs=[lambda state: len(state["misses"])], weights=[0]),
        ]
    )
    source, rewards, factory = from_verifiers(Guess(dataset=data(), rubric=group, max_turns=3))
    finished, replies = await played(factory, next(source.entries()), "1", "2")
    assert [reply.done for reply in replies] == [False, True]
    (score,) = await Rewards(rewards).score([finished])
    assert (score.value, score.parts) == (1.0, {"right": 1.0, "<lambda>": 1.0})


async def test_the_packages_tool_environment(verifiers):
    def half(x: int) -> float:
        """Halve.

        Args:
            x: What.
        """
        return x / 2

    environment = verifiers.ToolEnv(tools=[half], dataset=data(), rubric=verifiers.Rubric(funcs=[right]))
    source, rewards, factory = from_verifiers(environment)
    assert factory.schemas[0]["function"]["name"] == "half"
    call = '<tool_call>{"name": "half", "arguments": {"x": 4}}</tool_call>'
    wrong = '<tool_call>{"name": "third", "arguments": {"x": 4}}</tool_call>'
    finished, replies = await played(factory, next(source.entries()), wrong, call, "2")
    assert replies[0].messages[0]["role"] == "tool"
    assert replies[1].messages[0]["content"] == "2.0"
    assert replies[2].done
    assert (await Rewards(rewards).score([finished]))[0].value == 1.0
