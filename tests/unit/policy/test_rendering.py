import pytest

from rl_vllm.errors import ConfigError
from rl_vllm.policy.rendering import ChatRenderer

HI = [{"role": "user", "content": "hi"}]


def test_a_chat_renders_as_the_template_says(tokenizer):
    renderer = ChatRenderer(tokenizer)
    ids = renderer.ids(HI, add_generation_prompt=True)
    assert renderer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.decode(ids, skip_special_tokens=True) == "user\nhi\nassistant\n"


def test_line_ends_are_not_tidied(tokenizer):
    assert ChatRenderer(tokenizer).decode([10, 10, 256]) == "\n\n\n\n"


def test_ends_of_turn_are_the_eos_tokens_unless_named(tokenizer):
    eos = tokenizer.eos_token_id
    assert ChatRenderer(tokenizer, eos_token_ids=(509,)).end_of_turn_ids == {eos, 509}
    other = "{% for m in messages %}{{ m['content'] + '<|endoftext|>' }}{% endfor %}"
    assert ChatRenderer(tokenizer, chat_template=other, end_of_turn_ids=(509,)).end_of_turn_ids == {509}


def test_a_template_that_never_ends_an_answer_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="end_of_turn_ids"):
        ChatRenderer(tokenizer, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")


def test_template_kwargs_and_tools_reach_the_template(tokenizer):
    template = (
        "{{ mode }}{{ (tools or []) | length }}{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    )
    renderer = ChatRenderer(tokenizer, chat_template=template, template_kwargs={"mode": "x"})
    schema = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    assert renderer.decode(renderer.ids(HI, add_generation_prompt=False)) == "x0hi<|im_end|>"
    assert renderer.decode(renderer.ids(HI, add_generation_prompt=False, tools=[schema])) == "x1hi<|im_end|>"


@pytest.mark.parametrize("own_end", ["", "<|endoftext|>"])
def test_a_template_that_ends_only_what_users_say_is_refused(tokenizer, own_end):
    # Turns are told apart by their ends: such an answer would be read twice.
    template = (
        "{% for m in messages %}{{ m['content'] + ('<|im_end|>' if m['role'] == 'user' else '" + own_end + "') }}"
        "{% endfor %}"
    )
    with pytest.raises(ConfigError, match="ends an answer with none"):
        ChatRenderer(tokenizer, chat_template=template)
