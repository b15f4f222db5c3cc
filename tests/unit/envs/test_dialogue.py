"""Dialogues go on from exact ids, and every token says where it came from."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vllm.envs import dialogue as module
from rl_vllm.envs.dialogue import Answer, Dialogue
from rl_vllm.errors import ConfigError
from rl_vllm.policy import ChatRenderer
from rl_vllm.testing.models import tiny_tokenizer
from rl_vllm.types import FinishReason

END = 511
# As Qwen's do: thoughts are left out of every answer but the last message.
STRIPS_THOUGHTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and '</think>' in message['content'] and not loop.last %}"
    "{{ message['content'].split('</think>')[-1] }}{% else %}{{ message['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Leaves out answers that say nothing.
DROPS_EMPTY = (
    "{% for message in messages %}{% if message['content'] %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(autouse=True)
def warn_again(monkeypatch):
    monkeypatch.setattr(module._Once, "warned", False)


def said(tokenizer, text, *, ended=True, version=0):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + ([END] if ended else [])
    return sampled(ids, version=version, finish=FinishReason.STOP if ended else FinishReason.LENGTH)


def sampled(ids, *, version=0, finish=FinishReason.STOP):
    scores = np.array([-(1 + position) / 8 for position in range(len(ids))], np.float32)
    return Answer(np.array(ids, np.int32), scores, np.full(len(ids), version), int(finish))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_two_turns_are_one_segment_whose_sampled_tokens_are_the_answers(tokenizer):
    talk = Dialogue(ChatRenderer(tokenizer))
    first = talk.prompt([user("hi")]).tolist()
    assert first == ids_of(tokenizer, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    answer = said(tokenizer, "yo", version=3)
    assert talk.answer(answer) == "yo"
    second = talk.prompt([user("hi"), assistant("yo"), user("go on")]).tolist()
    new = ids_of(tokenizer, "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
    assert second == [*first, *answer.tokens_T.tolist(), *new]
    last = said(tokenizer, "no", version=4)
    talk.answer(last)
    (segment,) = talk.segments
    one, two = len(answer.tokens_T), len(last.tokens_T)
    assert segment.tokens_T.tolist() == [*second, *last.tokens_T.tolist()]
    assert segment.num_prompt == len(first)
    mask = [False] * len(first) + [True] * one + [False] * len(new) + [True] * two
    assert segment.sampled_T.tolist() == mask
    assert segment.versions_T.tolist() == [-1] * len(first) + [3] * one + [-1] * len(new) + [4] * two
    assert segment.logprobs_T[segment.sampled_T].tolist() == [*answer.logprobs_T, *last.logprobs_T]
    assert np.isnan(segment.logprobs_T[~segment.sampled_T]).all()


def test_ids_that_the_tokenizer_would_not_choose_are_kept(tokenizer):
    # "yo" letter by letter, where the tokenizer may have one id; and as two line feeds.
    letters = [ord("y"), ord("o"), ord("\n"), ord("\n")]
    talk = Dialogue(ChatRenderer(tokenizer))
    first = talk.prompt([user("hi")]).tolist()
    text = talk.answer(sampled([*letters, END]))
    assert text == "yo\n\n"
    second = talk.prompt([user("hi"), assistant(text), user("x")]).tolist()
    assert second[: len(first) + 5] == [*first, *letters, END]


def test_an_answer_cut_by_length_gets_the_templates_end_which_was_not_sampled(tokenizer):
    talk = Dialogue(ChatRenderer(tokenizer))
    first = talk.prompt([user("hi")])
    cut = said(tokenizer, "so long", ended=False)
    talk.answer(cut)
    second = talk.prompt([user("hi"), assistant("so long"), user("x")])
    place = len(first) + len(cut.tokens_T)
    assert second[place] == END
    segment = talk.segments[0]
    assert segment.sampled_T[place - 1]
    assert not segment.sampled_T[place]


@pytest.mark.parametrize("ids", [[END], []])
def test_an_answer_of_nothing_is_a_turn_like_any_other(tokenizer, ids):
    talk = Dialogue(ChatRenderer(tokenizer))
    first = talk.prompt([user("hi")]).tolist()
    assert talk.answer(sampled(ids)) == ""
    second = talk.prompt([user("hi"), assistant(""), user("x")]).tolist()
    assert second[: len(first) + 1] == [*first, END]
    assert talk.segments[0].sampled_T.sum() == len(ids)
    assert len(talk.segments) == 1


def drop_an_empty_answer(tokenizer, on_rewrite):
    talk = Dialogue(ChatRenderer(tokenizer, chat_template=DROPS_EMPTY), on_rewrite=on_rewrite)
    first = talk.prompt([user("hi")]).tolist()
    talk.answer(sampled([END]))
    return talk, first, talk.prompt([user("hi"), assistant(""), user("x")]).tolist()


def test_an_empty_answer_that_the_template_leaves_out_stays_in_the_exact_ids(tokenizer):
    talk, first, second = drop_an_empty_answer(tokenizer, "splice")
    new = "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert second == [*first, END, *ids_of(tokenizer, new)]
    assert len(talk.segments) == 1


def test_an_empty_answer_that_the_template_leaves_out_begins_a_new_segment_when_asked(tokenizer):
    talk, _, second = drop_an_empty_answer(tokenizer, "segment")
    turns = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert second == ids_of(tokenizer, turns)
    assert [segment.sampled_T.sum() for segment in talk.segments] == [1, 0]


# Shows the last answer only while it is the last message: as many turns end as before, and they are other turns.
FORGETS_ANSWERS = (
    "{% for message in messages %}{% if message['role'] != 'assistant' or loop.last %}{{ '<|im_start|>' "
    "+ message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("on_rewrite", ["splice", "segment"])
def test_a_template_that_forgets_answers_never_costs_the_next_question(tokenizer, on_rewrite):
    talk = Dialogue(ChatRenderer(tokenizer, chat_template=FORGETS_ANSWERS), on_rewrite=on_rewrite)
    talk.prompt([user("hi")])
    talk.answer(said(tokenizer, "yo"))
    second = talk.prompt([user("hi"), assistant("yo"), user("what now?")]).tolist()
    turns = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\nwhat now?<|im_end|>\n<|im_start|>assistant\n"
    assert second == ids_of(tokenizer, turns)
    assert len(talk.segments) == 2


THOUGHT = "<think>hm</think>yes"


def think(tokenizer, on_rewrite):
    talk = Dialogue(ChatRenderer(tokenizer, chat_template=STRIPS_THOUGHTS), on_rewrite=on_rewrite)
    first = talk.prompt([user("hi")]).tolist()
    answer = said(tokenizer, THOUGHT)
    talk.answer(answer)
    second = talk.prompt([user("hi"), assistant(THOUGHT), user("x")]).tolist()
    return talk, first, answer.tokens_T.tolist(), second


def test_thoughts_that_a_template_strips_are_kept_and_said_once(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        talk, first, answer, second = think(tokenizer, "splice")
        talk.answer(said(tokenizer, THOUGHT))
        talk.prompt([user("hi"), assistant(THOUGHT), user("x"), assistant(THOUGHT), user("y")])
        think(tokenizer, "splice")
    assert second[: len(first) + len(answer)] == first + answer
    assert len(talk.segments) == 1
    assert len([record for record in caplog.records if "thoughts" in record.message]) == 1


def test_thoughts_that_a_template_strips_begin_a_new_segment_when_asked(tokenizer, caplog):
    talk, first, answer, second = think(tokenizer, "segment")
    turns = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
    assert second == ids_of(tokenizer, turns + "<|im_start|>assistant\n")
    assert [len(segment) for segment in talk.segments] == [len(first) + len(answer), len(second)]
    assert not caplog.records


def test_an_edited_history_begins_a_new_segment_and_leaves_the_old_one_alone(tokenizer):
    talk = Dialogue(ChatRenderer(tokenizer))
    first = talk.prompt([user("hi")]).tolist()
    answer = said(tokenizer, "yo")
    talk.answer(answer)
    talk.prompt([user("a summary of what was said"), user("go on")])
    assert len(talk.segments) == 2
    assert talk.segments[0].tokens_T.tolist() == first + answer.tokens_T.tolist()
    assert not talk.segments[1].sampled_T.any()
    # And it goes on from there.
    more = said(tokenizer, "ok")
    talk.answer(more)
    third = talk.prompt([user("a summary of what was said"), user("go on"), assistant("ok"), user("x")])
    assert third[: len(talk.segments[1]) - len(third)].tolist() == talk.segments[1].tokens_T[: -len(third)].tolist()
    assert len(talk.segments) == 2
    assert talk.segments[1].sampled_T.sum() == len(more.tokens_T)


def test_answers_that_were_in_the_prompt_are_no_turns_of_the_model(tokenizer):
    shown = [user("1+1"), assistant("2"), user("2+2")]
    talk = Dialogue(ChatRenderer(tokenizer))
    first = talk.prompt(shown).tolist()
    answer = said(tokenizer, "4")
    talk.answer(answer)
    second = talk.prompt([*shown, assistant("4"), user("3+3")]).tolist()
    assert second[: len(first) + 2] == first + answer.tokens_T.tolist()
    assert talk.segments[0].sampled_T.sum() == 2


def test_the_end_of_turn_may_be_another_token_than_the_eos_and_must_be_the_templates(tokenizer):
    with pytest.raises(ConfigError, match="end_of_turn_ids"):
        ChatRenderer(tokenizer, end_of_turn_ids=[5])
    renderer = ChatRenderer(tokenizer, end_of_turn_ids=[END], eos_token_ids=[7])
    assert renderer.end_of_turn_ids == {END}
    assert ChatRenderer(tokenizer, eos_token_ids=[7]).end_of_turn_ids == {END, 7}


def test_a_tokenizer_without_a_template_needs_one():
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(ConfigError, match="chat_template="):
        ChatRenderer(bare)


def test_an_unknown_rule_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="on_rewrite"):
        Dialogue(ChatRenderer(tokenizer), on_rewrite="mend")


ANSWERS = st.lists(
    st.tuples(st.lists(st.integers(0, 508), max_size=8), st.booleans(), st.text(max_size=6)), min_size=1, max_size=4
)
SHARED = tiny_tokenizer()


@settings(deadline=None, max_examples=80)
@given(ANSWERS)
def test_every_prompt_begins_with_the_exact_ids_and_every_token_has_its_provenance(turns):
    talk = Dialogue(ChatRenderer(SHARED))
    messages = [user("hi")]
    exact: list[int] = []
    for count, (ids, ended, reply) in enumerate(turns):
        prompt = talk.prompt(messages).tolist()
        assert prompt[: len(exact)] == exact
        answer = sampled([*ids, *([END] if ended else [])], version=count)
        text = talk.answer(answer)
        exact = [*prompt, *answer.tokens_T.tolist()]
        assert talk.segments[-1].tokens_T.tolist() == exact
        messages = [*messages, assistant(text), user(reply)]
    (segment,) = talk.segments
    lengths = {len(values) for values in (segment.sampled_T, segment.logprobs_T, segment.versions_T)}
    assert lengths == {len(segment)}
    assert segment.sampled_T.sum() == sum(len(ids) + ended for ids, ended, _ in turns)
    assert np.array_equal(segment.sampled_T, segment.versions_T >= 0)
    assert np.array_equal(segment.sampled_T, np.isfinite(segment.logprobs_T))
