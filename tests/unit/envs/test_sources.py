import json
from itertools import islice

import pytest

from rl_vllm.envs import PromptSet, PromptSource, as_source, first_messages
from rl_vllm.errors import BadInputError, ConfigError
from tests.unit.envs.conftest import ENTRIES, exact

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi?"}]


class Rows:
    """What a Hugging Face dataset has: rows by number, a column per key, None where a row has no value."""

    def __init__(self, rows):
        self.rows = rows
        self.read = []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.read.append(index)
        return self.rows[index]


def questions(entries):
    return [entry["question"] for entry in entries]


def count_to(count):
    return lambda: (str(number) for number in range(count))


@pytest.mark.parametrize(
    ("row", "entry", "messages"),
    [
        ("why?", {"question": "why?"}, [{"role": "user", "content": "why?"}]),
        ({"question": "q", "answer": 3}, {"question": "q", "answer": 3}, [{"role": "user", "content": "q"}]),
        (
            {"prompt": "p", "level": 1},
            {"question": "p", "prompt": "p", "level": 1, "messages": [{"role": "user", "content": "p"}]},
            [{"role": "user", "content": "p"}],
        ),
        ({"prompt": CHAT}, {"question": "hi?", "prompt": CHAT, "messages": CHAT}, CHAT),
        (
            {"messages": CHAT, "question": "own", "prompt": None},
            {"question": "own", "prompt": None, "messages": CHAT},
            CHAT,
        ),
        (CHAT, {"question": "hi?", "messages": CHAT}, CHAT),
        (
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}],
            {
                "question": "what?",
                "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}],
            },
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}],
        ),
    ],
)  # fmt: skip
def test_rows_become_entries_with_a_question_and_a_chat(row, entry, messages):
    (found,) = as_source([row]).entries()
    assert found == entry
    assert first_messages(found) == messages


def test_a_system_prompt_goes_first_unless_the_chat_has_one():
    assert first_messages({"question": "q"}, "short") == [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "q"},
    ]
    assert first_messages({"question": "hi?", "messages": CHAT}, "short") == CHAT


def test_a_prompt_set_brings_its_examples_and_system_prompt():
    prompts = PromptSet(ENTRIES, exact, examples=({"question": "sky?", "answer": "blue"},), system_prompt="one word")
    entries = list(as_source(prompts).entries())
    assert questions(entries) == questions(ENTRIES)
    assert [first_messages(entry) for entry in entries] == [prompts.chat(index) for index in range(5)]
    assert entries[1]["answer"] == "green"


def test_a_dataset_is_read_row_by_row_as_it_is_needed():
    data = Rows([{"question": word} for word in "abc"])
    assert questions(islice(as_source(data).entries(), 2)) == ["a", "b"]
    assert data.read == [0, 1]
    assert as_source(data).num_entries == 3


def test_passes_follow_each_other():
    assert questions(PromptSource(["a", "b"], epochs=2).entries()) == ["a", "b", "a", "b"]
    assert questions(PromptSource(count_to(2), epochs=2).entries()) == ["0", "1", "0", "1"]
    assert questions(islice(PromptSource(["a", "b"], epochs=None).entries(), 5)) == ["a", "b", "a", "b", "a"]
    assert questions(islice(PromptSource(count_to(2), epochs=None).entries(), 5)) == ["0", "1", "0", "1", "0"]


def test_a_seed_shuffles_each_pass_as_a_prompt_set_does():
    source = PromptSource(ENTRIES, seed=3, epochs=2)
    order = islice(PromptSet(ENTRIES, exact).order(seed=3), 10)
    assert questions(source.entries()) == [ENTRIES[index]["question"] for index in order]


@pytest.mark.parametrize(
    "source",
    [PromptSource(list("abcde"), seed=1, epochs=3), PromptSource(count_to(5), epochs=3)],
)
def test_a_run_goes_on_where_it_stopped(source):
    whole = questions(source.entries())
    assert len(whole) == 15
    for start in (0, 4, 5, 7, 14, 15, 40):
        assert questions(source.entries(start)) == whole[start:]


def test_an_iterator_goes_on_from_where_it_is():
    source = PromptSource(count_to(6)(), epochs=None)
    assert questions(islice(source.entries(), 2)) == ["0", "1"]
    assert questions(source.entries(3)) == ["3", "4", "5"]
    with pytest.raises(ConfigError, match="start=2, but 6 rows of the iterator have been read"):
        source.entries(2)
    assert questions(source.entries(6)) == []


def test_an_iterable_without_length_starts_anew_for_each_pass():
    class Stream:
        def __iter__(self):
            return iter(["a", "b"])

    assert questions(PromptSource(Stream(), epochs=2).entries(1)) == ["b", "a", "b"]


def test_a_file_has_a_row_per_line_that_is_not_blank(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "ä?"}\n\n"b?"\n' + json.dumps(CHAT) + "\n   ")
    for data in (path, str(path)):
        assert questions(as_source(data).entries()) == ["ä?", "b?", "hi?"]
    assert sorted(questions(PromptSource(path, seed=0).entries())) == ["b?", "hi?", "ä?"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question": ', r'prompts.jsonl, line 3, is not JSON \(.*\): .\{"question":'),
        ('{"question": ""}', "prompts.jsonl, line 3, of the data has question=''"),
        ("7", r"prompts.jsonl, line 3, of the data is '7' \(int\)"),
    ],
)
def test_a_bad_line_is_named_by_its_number_before_anything_runs(tmp_path, line, complaint):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"a"\n\n{line}\n"b"\n')
    with pytest.raises(BadInputError, match=complaint):
        as_source(path)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("  ", "row 1 of the data has text='  ': it must be text"),
        ({"question": 7}, "row 1 of the data has question=7"),
        ({"answer": "x", "question": None}, "row 1 of the data has the keys answer, question, but none of"),
        ({}, r"keys \(none\)"),
        (None, r"row 1 of the data is 'None' \(NoneType\): give a text"),
        ([], r"messages=\[\]: it must be a list of messages"),
        (["hi"], "has 'hi' as message 0: it needs a text as .role."),
        ({"messages": "hi"}, "row 1 of the data has messages='hi'"),
        ([{"role": "user", "content": ""}], r"messages\[...\].content=''"),
        ([*CHAT, {"role": "assistant", "content": "ho"}], "ends with the assistant's 'ho': the model answers next"),
    ],
)
def test_a_bad_row_is_named_by_its_position(row, complaint):
    with pytest.raises(BadInputError, match=complaint):
        as_source(["fine", row])
    for later in (Rows(["fine", row]), iter(["fine", row]), lambda: iter(["fine", row])):
        entries = as_source(later).entries()
        next(entries)
        with pytest.raises(BadInputError, match=complaint):
            next(entries)


@pytest.mark.parametrize("data", [[], (), Rows([])])
def test_empty_data_is_refused(data):
    with pytest.raises(BadInputError, match="the data is empty"):
        as_source(data)


def test_an_empty_file_iterator_or_pass_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(BadInputError, match="the data is empty"):
        as_source(tmp_path / "empty.jsonl")
    with pytest.raises(BadInputError, match="the data is empty"):
        list(as_source(iter([])).entries())
    used_up = iter(["a"])
    with pytest.raises(BadInputError, match="pass 1 over the data has no rows: return a fresh iterator"):
        list(PromptSource(lambda: used_up, epochs=2).entries())


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ("What is 2 + 2?", "no .jsonl file at 'What is 2 . 2.': .*put a single prompt into a list"),
        ("missing.jsonl", "no .jsonl file at 'missing.jsonl'"),
        ({"train": [], "test": []}, "a mapping of 'train, test': choose one split"),
        ({"a", "b"}, "a set, which has no order"),
        (7, r"the data is '7' \(int\): give a list"),
    ],
)
def test_data_of_another_kind_is_refused_with_what_to_give(data, complaint):
    with pytest.raises(BadInputError, match=complaint):
        as_source(data)


def test_settings_that_contradict_the_data_are_refused():
    with pytest.raises(ConfigError, match="seed=1 needs data of a known length"):
        PromptSource(count_to(3), seed=1)
    with pytest.raises(ConfigError, match="epochs=2, but an iterator has one pass"):
        PromptSource(iter(["a"]), epochs=2)
    for settings in ({"epochs": 0}, {"seed": -1}):
        with pytest.raises(ConfigError, match="must be an integer of at least"):
            PromptSource(["a"], **settings)
    with pytest.raises(ConfigError, match="start must be an integer of at least 0"):
        as_source(["a"]).entries(-1)


def test_a_source_stays_itself():
    source = PromptSource(["a"], epochs=None)
    assert as_source(source) is source
