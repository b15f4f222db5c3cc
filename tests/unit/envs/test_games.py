import random
from types import SimpleNamespace

import pytest

from rl_vllm.envs import GymnasiumText, Rewards, TaskConfig, first_messages, from_prompt_set, load_task
from rl_vllm.envs.episode import Finished
from rl_vllm.errors import BadInputError, ConfigError, RewardError

QUESTION = [{"role": "system", "content": "play"}, {"role": "user", "content": "Guess the number."}]


class Guess:
    """Guess a number from 1 to 9 in four steps; each miss costs a tenth."""

    def __init__(self):
        self.closed = 0
        self.reward = -0.1

    def reset(self, *, seed=None, options=None):
        self.most = (options or {}).get("most", 9)
        self.number = random.Random(seed).randint(1, self.most)
        self.steps = 0
        return f"From 1 to {self.most}.", {"hint": self.number}

    def step(self, action):
        self.steps += 1
        if int(action) == self.number:
            return "Yes.", 1.0, True, False, {}
        return ("Higher." if int(action) < self.number else "Lower."), self.reward, False, self.steps == 4, {}

    def close(self):
        self.closed += 1


NUMBER = random.Random(5).randint(1, 9)
ENTRY = {"question": "Guess the number.", "seed": 5}


def played(game, *answers, entry=ENTRY):
    interaction = game(entry)
    interaction.begin(QUESTION)
    replies = [interaction.reply(answer, []) for answer in answers]
    interaction.close()
    return replies


def test_the_first_observation_is_added_to_the_question():
    interaction = GymnasiumText(Guess)(ENTRY)
    assert interaction.begin(QUESTION) == [
        QUESTION[0],
        {"role": "user", "content": "Guess the number.\n\nFrom 1 to 9."},
    ]
    assert interaction.begin(QUESTION[:1]) == [QUESTION[0], {"role": "user", "content": "From 1 to 9."}]


def test_every_step_has_its_observation_and_reward_and_the_last_one_ends_it():
    wrong, right = played(GymnasiumText(Guess), "I say <action>0</action>", f"<action> {NUMBER} </action>")
    assert wrong.messages == ({"role": "user", "content": "Higher."},)
    assert (wrong.reward, wrong.done) == (-0.1, False)
    assert (right.messages, right.reward, right.done) == ((), 1.0, True)


def test_an_episode_that_the_environment_cuts_is_over():
    replies = played(GymnasiumText(Guess), *["0"] * 4)
    assert [reply.done for reply in replies] == [False, False, False, True]


def test_a_rollout_ends_after_its_turns_with_the_reward_of_the_last():
    replies = played(GymnasiumText(Guess, max_turns=2), "0", str(NUMBER))
    assert [(reply.reward, reply.done) for reply in replies] == [(-0.1, False), (1.0, True)]
    replies = played(GymnasiumText(Guess, max_turns=2), "", "")
    assert [reply.done for reply in replies] == [False, True]


def test_seed_and_options_of_an_entry_reach_the_environment():
    envs = []
    game = GymnasiumText(lambda: envs.append(Guess()) or envs[-1])
    for entry in (ENTRY, ENTRY, {"question": "q", "seed": 5, "options": {"most": 1}}):
        game(entry).begin(QUESTION)
    assert [env.number for env in envs] == [NUMBER, NUMBER, 1]


def test_an_environment_is_closed_once_and_not_without_having_begun():
    env = Guess()
    played(GymnasiumText(lambda: env), "1")
    assert env.closed == 1
    GymnasiumText(lambda: pytest.fail("made"))(ENTRY).close()


def test_an_answer_that_is_no_action_makes_no_step_and_says_what_to_write():
    def parse(answer):
        if not answer.isdigit():
            raise ValueError("write digits only.")
        return answer

    wrong, right = played(GymnasiumText(Guess, parse_action=parse, invalid_reward=-1), "nine", str(NUMBER))
    assert wrong.messages == ({"role": "user", "content": "That is not an action: write digits only."},)
    assert (wrong.reward, wrong.done) == (-1.0, False)
    assert right.done
    (empty,) = played(GymnasiumText(Guess), "<action> </action>")
    assert empty.messages[0]["content"] == "That is not an action: it is empty. Write <action>...</action>."


def test_observations_are_rendered_with_their_info():
    game = GymnasiumText(Guess, render=lambda observation, info: f"{observation} {info}")
    first = game(ENTRY).begin(QUESTION)
    assert first[-1]["content"].endswith(f"From 1 to 9. {{'hint': {NUMBER}}}")


def test_an_observation_that_is_not_text_needs_a_renderer():
    env = SimpleNamespace(reset=lambda seed, options: ([1, 2], {}))
    with pytest.raises(BadInputError, match=r"the observation is '\[1, 2\]' \(list\): give render="):
        GymnasiumText(lambda: env)(ENTRY).begin(QUESTION)


@pytest.mark.parametrize("reward", [None, float("nan")])
def test_a_reward_that_is_not_a_number_is_named_with_its_action(reward):
    env = Guess()
    env.reward = reward
    with pytest.raises(RewardError, match="on action '0', turn 1"):
        played(GymnasiumText(lambda: env), "0")


class Discrete:
    """Gymnasium's space of the integers from ``start``."""

    start, n = 1, 9

    def contains(self, action):
        return isinstance(action, int) and 1 <= action <= 9


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ("nine", "'nine' is not a number. Write a number from 1 to 9 as <action>...</action>."),
        ("<action>10</action>", "'10' is not possible. Write a number from 1 to 9 as <action>...</action>."),
    ],
)
def test_a_discrete_action_is_a_number_in_the_space(answer, complaint):
    env = Guess()
    env.action_space = Discrete()
    (reply,) = played(GymnasiumText(lambda: env), answer)
    assert reply.messages[0]["content"] == f"That is not an action: {complaint}"
    assert played(GymnasiumText(lambda: env), f"<action>{NUMBER}</action>")[0].done


def test_a_gymnasium_environment_is_played():
    gymnasium = pytest.importorskip("gymnasium")

    class Walk(gymnasium.Env):
        observation_space = gymnasium.spaces.Text(100)

        def __init__(self, space):
            self.action_space = space

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return f"start {self.np_random.integers(1000)}", {}

        def step(self, action):
            return "end", 2, action in (3, "go"), False, {}

    discrete = GymnasiumText(lambda: Walk(gymnasium.spaces.Discrete(3, start=1)))
    assert discrete(ENTRY).begin(QUESTION) == discrete(ENTRY).begin(QUESTION)
    wrong, one, last = played(discrete, "0", "1", "<action>3</action>")
    assert "Write a number from 1 to 3" in wrong.messages[0]["content"]
    assert (one.reward, one.done, last.reward, last.done) == (2.0, False, 2.0, True)
    text = GymnasiumText(lambda: Walk(gymnasium.spaces.Text(2)))
    wrong, last = played(text, "run away", "go")
    assert "'run away' is not possible. Write one of 'Text(" in wrong.messages[0]["content"]
    assert last.done


def test_turns_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="max_turns"):
        GymnasiumText(Guess, max_turns=0)


async def test_a_reasoning_gym_task_is_a_source_and_its_reward():
    options = {"min_num_statements": 2, "max_num_statements": 2}
    prompts = load_task(TaskConfig(name="needle_haystack", options=options, num_train=4, num_held_out=2)).train
    source, reward = from_prompt_set(prompts, seed=1, epochs=None)
    entry = next(source.entries())
    assert len(first_messages(entry)) == 5
    answers = (entry["answer"], "nobody")
    scores = await Rewards(reward).score([Finished(entry, (), answer) for answer in answers])
    assert [score.value for score in scores] == [1.0, 0.0]
