import asyncio
import functools
import json
import threading

import pytest
from torchrl.envs.llm.transforms.tools import JSONCallParser, XMLBlockParser

from rl_vllm.envs import PythonSandbox, ToolCall, ToolUse, parse_tool_calls
from rl_vllm.errors import ConfigError

PROMPT = [{"role": "user", "content": "What is 2 + 3?"}]


def add(a: int, b: int = 10) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def look_up(word: str) -> dict:
    """Look a word up.

    Args:
        word: What to look up.
    """
    await asyncio.sleep(0)
    return {"word": word, "size": len(word)}


def divide(a: float) -> float:
    """Divide one by a number.

    Args:
        a: The number.
    """
    return 1 / a


def block(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def replied(use, *answers):
    """The last reply of one rollout."""
    interaction = use({"question": "q"})
    messages = list(interaction.begin(PROMPT))
    for answer in answers:
        messages.append({"role": "assistant", "content": answer})
        reply = await interaction.reply(answer, messages)
        messages.extend(reply.messages)
    interaction.close()
    return reply


async def result(use, answer):
    (message,) = (await replied(use, answer)).messages
    assert message["role"] == "tool"
    return message["content"]


async def test_calls_are_made_in_order_and_their_results_are_messages():
    reply = await replied(ToolUse([add, look_up]), f"Wait. {block('look_up', word='ä')} and {block('add', a=2, b=3)}")
    assert not reply.done
    assert reply.reward == 0.0
    assert reply.messages == (
        {"role": "tool", "name": "look_up", "content": '{"word": "ä", "size": 1}'},
        {"role": "tool", "name": "add", "content": "5"},
    )


async def test_an_answer_without_a_call_ends_the_rollout():
    reply = await replied(ToolUse([add]), block("add", a=1), "It is 11.")
    assert reply.done
    assert reply.messages == ()


async def test_the_last_turn_makes_no_calls():
    made = []

    def note(text: str) -> str:
        """Note.

        Args:
            text: What.
        """
        made.append(text)
        return "noted"

    reply = await replied(ToolUse([note], max_turns=2), block("note", text="one"), block("note", text="two"))
    assert reply.done
    assert made == ["one"]


def test_schemas_are_what_chat_templates_show():
    (schema,) = ToolUse({"plus": add}).schemas
    assert schema["function"]["name"] == "plus"
    assert schema["function"]["description"] == "Add two numbers."
    assert schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert schema["function"]["parameters"]["required"] == ["a"]


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ('<tool_call>{"name": "add", </tool_call>', "this tool call is not JSON (Expecting property name"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "this tool call is not JSON"),
        ('<tool_call>["add", 1]</tool_call>', 'this tool call has no name: \'["add", 1]\'; write <tool_call>{"name"'),
        ('<tool_call>{"arguments": {}}</tool_call>', "this tool call has no name"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be a JSON object, got '[1]'"),
        (block("ad", a=1), "there is no tool 'ad'; there are: add, divide"),
        (block("add"), 'do not fit: missing a required argument: \'a\'; it takes {"a": {"type": "integer"'),
        (block("add", a=1, c=2), "do not fit: got an unexpected keyword argument 'c'"),
        (block("add", a="1"), 'add takes a as {"type": "integer", "description": "The first."}, got "\'1\'"'),
        (block("add", a=True), "add takes a as"),
        (block("divide", a=0), "divide raised ZeroDivisionError: "),
    ],
)
async def test_what_goes_wrong_is_told_to_the_model(answer, complaint):
    content = await result(ToolUse([add, divide]), answer)
    assert content.startswith("Error: ")
    assert complaint in content


async def test_a_good_call_after_a_bad_one_is_made():
    reply = await replied(ToolUse([add]), f"<tool_call>nonsense</tool_call>{block('add', a=1)}")
    assert [message["content"][:6] for message in reply.messages] == ["Error:", "11"]


async def test_a_tool_that_hangs_is_told_to_the_model():
    released = threading.Event()

    def hang() -> str:
        """Hang."""
        released.wait(20)
        return "late"

    content = await result(ToolUse([hang], timeout_s=0.1), block("hang"))
    released.set()
    assert content == "Error: hang gave no result within 0.1 s; ask for less."


async def test_a_long_result_is_cut():
    def shout() -> str:
        """Shout."""
        return "a" * 100

    assert (
        await result(ToolUse([shout], max_result_chars=10), block("shout"))
        == "a" * 10 + "\n[cut: 10 of 100 characters]"
    )


def test_blocks_are_read_with_their_ids_and_without_thoughts():
    answer = (
        f"<think>maybe {block('no')}</think>"
        '<tool_call>{"name": "a", "id": "7", "arguments": "{\\"x\\": 1}"}</tool_call>'
        '<tool_call>{"name": "b"}'
    )
    assert parse_tool_calls(answer) == [ToolCall("a", {"x": 1}, "7"), ToolCall("b")]


async def test_an_id_is_repeated_with_the_result():
    answer = '<tool_call>{"name": "add", "id": "7", "arguments": {"a": 1}}</tool_call>'
    (message,) = (await replied(ToolUse([add]), answer)).messages
    assert message == {"role": "tool", "name": "add", "content": "11", "tool_call_id": "7"}


async def test_torchrls_xml_parser_is_accepted():
    use = ToolUse([add], parse=XMLBlockParser())
    answer = '<tool name="add" tag="T">{"a": 2, "b": 3}</tool> and <tool name="add">nonsense</tool>'
    first, second = (await replied(use, answer)).messages
    assert first == {"role": "tool", "name": "add", "content": "5", "tool_call_id": "T"}
    assert second["content"] == "Error: the arguments of add are not JSON: 'nonsense'."
    assert (await replied(use, "5")).done


async def test_torchrls_json_parser_is_accepted():
    use = ToolUse([add], parse=JSONCallParser())
    assert await result(use, '{"message": "wait", "tools": [{"tool": "add", "args": {"a": 2, "b": 3}}]}') == "5"
    for last in ('{"message": "It is 5."}', "It is 5.", "5"):
        assert (await replied(use, last)).done
    assert "could not be read (TypeError: " in await result(use, '{"tools": [{"name": "add"}]}')


async def test_a_parser_of_ones_own_may_fail():
    def parse(answer):
        raise ValueError("oh")

    content = await result(ToolUse([add], parse=parse), "bla")
    assert content == "Error: the tool calls of this answer could not be read (ValueError: oh)"


async def test_optional_and_limited_arguments_are_checked_as_their_schemas_say():
    def choose(kind: str, size: int | None = None) -> str:
        """Choose.

        Args:
            kind: Which. (choices: ["a", "b"])
            size: How large.
        """
        return f"{kind}{size}"

    use = ToolUse([choose])
    assert await result(use, block("choose", kind="a", size=None)) == "aNone"
    assert await result(use, block("choose", kind="b", size=3)) == "b3"
    assert "choose takes kind as" in await result(use, block("choose", kind="c"))
    assert "choose takes size as" in await result(use, block("choose", kind="a", size="3"))


async def test_the_sandbox_is_a_tool():
    use = ToolUse([PythonSandbox(timeout_s=20)])
    (schema,) = use.schemas
    assert schema["function"]["name"] == "run_python"
    assert schema["function"]["parameters"]["required"] == ["code"]
    assert await result(use, block("run_python", code="print(6 * 7)")) == "42"


def undescribed(x: int) -> int:
    return x


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ([], "there are no tools"),
        ([add, add], "two tools have one name"),
        ([7], "tool 'int' is '7': give a function"),
        ([undescribed], "tool 'undescribed' cannot be described to the model: .*write type hints"),
        ([functools.partial(undescribed, 1)], "tool 'undescribed' cannot be described"),
    ],
)
def test_tools_that_cannot_be_are_refused(tools, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ToolUse(tools)


@pytest.mark.parametrize("settings", [{"max_turns": 0}, {"timeout_s": 0}, {"max_result_chars": 0}])
def test_numbers_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ToolUse([add], **settings)
