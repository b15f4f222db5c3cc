"""Templates and interactions that do what they should not: nothing is lost, doubled, or changed for others."""

import copy
import json

import numpy as np
import pytest

from rl_vllm.envs import Reply, Rollout, RolloutSetup
from rl_vllm.envs.dialogue import Answer, Dialogue
from rl_vllm.errors import BadInputError, RewardError
from rl_vllm.policy.rendering import ChatRenderer
from rl_vllm.testing.models import tiny_tokenizer
from rl_vllm.types import FinishReason

TOKENIZER = tiny_tokenizer()
PAD, END = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id
HI = {"role": "user", "content": "hi"}
TURN = "'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'"
HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
# Shows the last two messages only.
WINDOW = "{% for m in messages[-2:] %}{{ " + TURN + " }}{% endfor %}" + HEADER
# As Llama 3.1's does: what tools say is JSON, plain text too.
JSON_TOOLS = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{{ '<|im_start|>tool\n' + (m['content'] | tojson) + '<|im_end|>\n' }}"
    "{% else %}{{ " + TURN + " }}{% endif %}{% endfor %}" + HEADER
)
# The same, and thoughts are left out of every answer but the last message.
JSON_TOOLS_STRIPS = JSON_TOOLS.replace(
    "{% else %}", "{% elif m['role'] == 'assistant' and not loop.last %}"
    "{{ '<|im_start|>assistant\n' + m['content'].split('</think>')[-1] + '<|im_end|>\n' }}{% else %}"
)  # fmt: skip


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def sampled(ids, finish=FinishReason.STOP, stop=None):
    count = len(ids)
    zeros = np.zeros(count, np.float32)
    return Answer(np.array(ids, np.int32), zeros, np.zeros(count, np.int64), finish, stop)


def spoken(text):
    return sampled([*encode(text), END])


def render(messages, template=None):
    return ChatRenderer(TOKENIZER, chat_template=template).ids(messages, add_generation_prompt=True)


def second_prompt(template, answer, new, **settings):
    """The second prompt's ids, and the dialogue."""
    dialogue = Dialogue(ChatRenderer(TOKENIZER, chat_template=template), **settings)
    dialogue.prompt([HI])
    text = dialogue.answer(answer)
    return dialogue.prompt([HI, {"role": "assistant", "content": text}, *new]).tolist(), dialogue


@pytest.mark.parametrize("question", ["a", "assistant", "user", "\n"])
def test_a_question_that_reads_like_the_header_is_not_lost(question):
    new = [{"role": "user", "content": question}]
    prompt, dialogue = second_prompt(WINDOW, spoken("yo"), new)
    assert TOKENIZER.decode(prompt).count(f"user\n{question}<|im_end|>") == 1
    assert len(dialogue.segments) == 2


def test_of_two_equal_messages_none_is_lost():
    # Three turns end before and three now, of which the last is new: counting would keep one "go on" of two.
    window = WINDOW.replace("[-2:]", "[-3:]")
    dialogue = Dialogue(ChatRenderer(TOKENIZER, chat_template=window))
    chat = [HI, {"role": "user", "content": "you"}]
    dialogue.prompt(chat)
    answered = [*chat, {"role": "assistant", "content": dialogue.answer(spoken("yo"))}]
    go_on = {"role": "user", "content": "go on"}
    prompt = dialogue.prompt([*answered, go_on, go_on]).tolist()
    assert TOKENIZER.decode(prompt).count("go on") == 2


@pytest.mark.parametrize("result", ['{"a": "b"}', "one\ntwo", "<b>", "it's"])
@pytest.mark.parametrize("template", [JSON_TOOLS, JSON_TOOLS_STRIPS], ids=["json", "strips"])
def test_results_that_a_template_escapes_keep_the_exact_ids(template, result):
    ids = [*encode("<think>x</think>yo"), END]
    prompt, dialogue = second_prompt(template, sampled(ids), [{"role": "tool", "content": result}])
    new = f"\n<|im_start|>tool\n{json.dumps(result)}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == [*render([HI]), *ids, *encode(new)]
    assert len(dialogue.segments) == 1


def test_a_message_of_parts_is_not_lost():
    parts = (
        "{% for m in messages[-2:] %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}"
        "{{ m['content'] }}{% else %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}" + HEADER
    )
    new = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    prompt, _ = second_prompt(parts, spoken("yo"), new)
    assert TOKENIZER.decode(prompt).count("user\na<|im_end|>") == 1
    assert new == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_an_eos_that_is_no_end_of_turn_is_no_text():
    # The model's EOS is <|endoftext|> and its template ends turns with <|im_end|>.
    dialogue = Dialogue(ChatRenderer(TOKENIZER, end_of_turn_ids=(END,), eos_token_ids=(PAD,)))
    first = dialogue.prompt([HI]).tolist()
    text = dialogue.answer(sampled([121, PAD]))
    assert text == "y"
    chat = [HI, {"role": "assistant", "content": text}, HI]
    new = encode("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert dialogue.prompt(chat).tolist() == [*first, 121, PAD, *new]
    assert dialogue.segments[0].sampled_T.tolist() == [False] * len(first) + [True, True] + [False] * len(new)


def test_a_stop_id_is_no_text():
    dialogue = Dialogue(ChatRenderer(TOKENIZER))
    dialogue.prompt([HI])
    assert dialogue.answer(sampled([121, 65], stop=65)) == "y"
    dialogue = Dialogue(ChatRenderer(TOKENIZER))
    dialogue.prompt([HI])
    assert dialogue.answer(sampled([121, 65], FinishReason.LENGTH)) == "yA"


class Editor:
    """Edits the chat that it is shown."""

    def __init__(self, edit, done=False, reward=0.0):
        self._edit, self._done, self._reward = edit, done, reward

    def begin(self, messages):
        return messages

    def reply(self, answer, messages):
        self._edit(messages)
        return Reply(() if self._done else (HI,), self._reward, self._done)

    def close(self):
        pass


def rollout_of(interaction, entry=None, *, max_model_len=256):
    setup = RolloutSetup(
        renderer=ChatRenderer(TOKENIZER), max_model_len=max_model_len, interaction=lambda entry: interaction
    )
    return Rollout(setup, entry or {"question": "q", "messages": [{"role": "user", "content": "q"}]})


@pytest.mark.parametrize("changed", [0, 1])
async def test_a_history_edited_in_place_begins_a_new_segment(changed):
    rollout = rollout_of(Editor(lambda messages: messages[changed].update(content="other")))
    await rollout.begin()
    await rollout.take(spoken("yo"))
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yo"}, HI]
    chat[changed] = {**chat[changed], "content": "other"}
    assert rollout.prompt_T.tolist() == render(chat)
    assert [segment.sampled_T.sum() for segment in rollout.segments] == [len(encode("yo")) + 1, 0]


async def test_an_edit_does_not_reach_the_prompts_of_others():
    class Hints(Editor):
        def begin(self, messages):
            messages[0]["content"] += "!"
            return messages

    entry = {"question": "q", "messages": [{"role": "user", "content": "q"}]}
    before = copy.deepcopy(entry)
    prompts = []
    for _ in range(2):
        rollout = rollout_of(Hints(lambda messages: None), entry)
        await rollout.begin()
        prompts.append(TOKENIZER.decode(rollout.prompt_T))
    assert prompts == ["<|im_start|>user\nq!<|im_end|>\n<|im_start|>assistant\n"] * 2
    assert entry == before


async def test_the_response_is_the_models_last_answer_whatever_became_of_the_chat():
    rollout = rollout_of(Editor(lambda messages: messages.clear(), done=True))
    await rollout.begin()
    await rollout.take(spoken(" yo "))
    assert rollout.finished().response == "yo"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1"])
async def test_a_turns_reward_is_one_finite_number(reward):
    rollout = rollout_of(Editor(lambda messages: None, reward=reward))
    await rollout.begin()
    with pytest.raises(RewardError, match=f"{reward}.*'q'.*'yo'"):
        await rollout.take(spoken("yo"))


async def test_a_turns_reward_may_be_any_kind_of_number():
    rollout = rollout_of(Editor(lambda messages: None, reward=np.float32(0.5)))
    await rollout.begin()
    assert await rollout.take(spoken("yo")) == 0.5
    assert [type(reward) for reward in rollout.turn_rewards] == [float]


@pytest.mark.parametrize("reply", [None, "more", HI])
async def test_what_is_not_a_reply_is_named(reply):
    class Wrong(Editor):
        def reply(self, answer, messages):
            return reply

    rollout = rollout_of(Wrong(lambda messages: None))
    await rollout.begin()
    with pytest.raises(BadInputError, match=r"Wrong\.reply returned .* instead of a Reply"):
        await rollout.take(spoken("yo"))


async def test_a_prompt_that_does_not_fit_is_never_shown():
    # 13 tokens are read and 3 sampled; what comes next needs 14 more.
    rollout = rollout_of(Editor(lambda messages: None), max_model_len=20)
    await rollout.begin()
    first = rollout.prompt_T.tolist()
    await rollout.take(sampled([121, 111, END]))
    assert (rollout.done, rollout.truncated) == (True, True)
    assert rollout.prompt_T.tolist() == first
    assert rollout.segments[0].tokens_T.tolist() == [*first, 121, 111, END]
    assert [message["content"] for message in rollout.finished().messages] == ["q", "yo", "hi"]
