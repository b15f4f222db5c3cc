import time

import numpy as np
import pytest

from rl_vllm.envs import Reply, Rollout, RolloutSetup
from rl_vllm.envs.dialogue import Answer
from rl_vllm.errors import BadInputError, ConfigError, DeadlineError
from rl_vllm.policy.rendering import ChatRenderer
from rl_vllm.types import FinishReason

ENTRY = {"question": "hi", "messages": [{"role": "user", "content": "hi"}]}


class Game:
    def __init__(self, reply):
        self._reply, self.closed = reply, 0

    def begin(self, messages):
        return messages

    def reply(self, answer, messages):
        return self._reply()

    def close(self):
        self.closed += 1


def more():
    return Reply(({"role": "user", "content": "more"},))


def answer(tokens, finish=FinishReason.STOP):
    count = len(tokens)
    return Answer(np.array(tokens, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int64), finish)


def setup(tokenizer, *, max_model_len=256, **settings):
    return RolloutSetup(renderer=ChatRenderer(tokenizer), max_model_len=max_model_len, **settings)


async def test_one_turn_without_an_interaction(tokenizer):
    rollout = Rollout(setup(tokenizer), ENTRY)
    await rollout.begin()
    await rollout.take(answer([121, 111, tokenizer.eos_token_id]))
    assert (rollout.done, rollout.truncated, rollout.finished().response) == (True, False, "yo")


async def test_a_prompt_that_fills_the_context_is_refused(tokenizer):
    with pytest.raises(BadInputError, match="14 tokens"):
        await Rollout(setup(tokenizer, max_model_len=14), ENTRY).begin()
    await Rollout(setup(tokenizer, max_model_len=15), ENTRY).begin()


async def test_a_length_stop_truncates_only_in_the_last_turn(tokenizer):
    replies = iter([more(), Reply(done=True)])
    rollout = Rollout(setup(tokenizer, interaction=lambda entry: Game(lambda: next(replies))), ENTRY)
    await rollout.begin()
    await rollout.take(answer([121], FinishReason.LENGTH))
    assert not rollout.done
    await rollout.take(answer([121, tokenizer.eos_token_id]))
    assert (rollout.done, rollout.truncated) == (True, False)


async def test_an_interaction_that_hangs_meets_its_deadline_and_close_is_idempotent(tokenizer):
    game = Game(lambda: time.sleep(20))
    rollout = Rollout(setup(tokenizer, interaction=lambda entry: game, interaction_timeout_s=0.2), ENTRY)
    await rollout.begin()
    with pytest.raises(DeadlineError):
        await rollout.take(answer([121]))
    await rollout.close()
    await rollout.close()
    assert game.closed == 1


@pytest.mark.parametrize(
    "wrong", [{"max_turns": 0}, {"on_rewrite": "x"}, {"interaction_timeout_s": 0.0}], ids=lambda each: next(iter(each))
)
def test_settings_out_of_range_are_refused(tokenizer, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        setup(tokenizer, **wrong)
