"""Where one turn ends and the next begins: ends of turn in odd places, turns that templates leave out."""

import numpy as np
import pytest

from rl_vllm.envs.dialogue import Answer, Dialogue
from rl_vllm.policy.rendering import ChatRenderer
from rl_vllm.testing.models import tiny_tokenizer
from rl_vllm.types import FinishReason

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
HEADER = "<|im_start|>assistant\n"
HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
# Leaves out of earlier answers what stands before </think>.
STRIPS = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Leaves an earlier answer out that has no text.
DROPS = (
    "{% for m in messages %}{% if m['role'] != 'assistant' or m['content'] or loop.last %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def said(tokens, *, finish=FinishReason.STOP, version=3):
    count = len(tokens)
    logprobs = -np.arange(1, count + 1, dtype=np.float32)
    return Answer(np.array(tokens, np.int32), logprobs, np.full(count, version, np.int64), finish)


def spoken(text):
    return said([*encode(text), END])


def begun(answer, *, template=None, **settings):
    """A dialogue after its first answer, with the chat."""
    dialogue = Dialogue(ChatRenderer(TOKENIZER, chat_template=template), **settings)
    first = dialogue.prompt([HI]).tolist()
    text = dialogue.answer(answer)
    return dialogue, first, [HI, {"role": "assistant", "content": text}]


def test_no_new_segment_without_thoughts():
    dialogue, _, chat = begun(spoken("b"), template=STRIPS, on_rewrite="segment")
    dialogue.prompt([*chat, MORE])
    assert len(dialogue.segments) == 1


def test_a_turn_that_the_template_drops_begins_a_new_segment():
    dialogue, _, chat = begun(said([END]), template=DROPS)
    prompt = dialogue.prompt([*chat, MORE]).tolist()
    # The template shows two ends before and two now, and the second is the new user's: counting alone loses its words.
    assert prompt == encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n" + HEADER)
    assert len(dialogue.segments) == 2


@pytest.mark.parametrize("changed", [0, 1])
def test_an_edited_history_begins_a_new_segment(changed):
    dialogue, _, chat = begun(spoken("yo"))
    chat[changed] = {**chat[changed], "content": "other"}
    prompt = dialogue.prompt([*chat, MORE]).tolist()
    assert prompt == ChatRenderer(TOKENIZER).ids([*chat, MORE], add_generation_prompt=True)
    assert len(dialogue.segments) == 2


def test_a_compacted_history_begins_a_new_segment():
    dialogue, first, _ = begun(spoken("yo"))
    assert dialogue.prompt([HI]).tolist() == first
    assert len(dialogue.segments) == 2


def test_several_dropped_answers_begin_one_new_segment():
    dialogue, _, chat = begun(said([END]), template=DROPS)
    for _ in range(2):
        prompt = dialogue.prompt([*chat, MORE]).tolist()
        chat = [*chat, MORE, {"role": "assistant", "content": dialogue.answer(said([END]))}]
        assert TOKENIZER.decode(prompt).count("more") == chat.count(MORE)
    assert len(dialogue.segments) == 3


def test_the_header_of_each_answer_is_read_and_not_sampled():
    dialogue, _, chat = begun(spoken("yo"))
    prompt = dialogue.prompt([*chat, MORE]).tolist()
    header = encode(HEADER)
    assert prompt[-len(header) :] == header
    assert not dialogue.segments[0].sampled_T[-len(header) :].any()


def test_a_tool_call_that_was_cut_is_text_like_any_other():
    broken = '<tool_call>{"name": "f", "arg'
    dialogue, first, chat = begun(said(encode(broken), finish=FinishReason.LENGTH))
    assert chat[-1]["content"] == broken
    assert dialogue.prompt([*chat, MORE])[len(first) :][: len(encode(broken))].tolist() == encode(broken)


def test_a_sampled_end_of_turn_inside_an_answer_loses_nothing():
    ids = [121, END, 111, END]
    dialogue, first, chat = begun(said(ids))
    new = encode("\n<|im_start|>user\nmore<|im_end|>\n" + HEADER)
    assert dialogue.prompt([*chat, MORE]).tolist() == [*first, *ids, *new]


def test_a_stop_token_other_than_eos_stands_for_the_end():
    other = TOKENIZER.pad_token_id
    dialogue = Dialogue(ChatRenderer(TOKENIZER, eos_token_ids=(other,)))
    first = dialogue.prompt([HI]).tolist()
    text = dialogue.answer(said([121, other]))
    assert text == "y"
    new = encode("\n<|im_start|>user\nmore<|im_end|>\n" + HEADER)
    chat = [HI, {"role": "assistant", "content": text}, MORE]
    assert dialogue.prompt(chat).tolist() == [*first, 121, other, *new]
