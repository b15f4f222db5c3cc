"""The policy on event loops: rows as their samples finish, and whole calls that are awaited."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict, assert_close, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import Tokens

from rl_vllm.errors import BadInputError, BadPromptError, ConfigError, GenerationError
from rl_vllm.policy import PolicyOptions, VLLMPolicy
from rl_vllm.testing import FakeScript, FakeService
from rl_vllm.testing.answers import FAKE_MODEL
from rl_vllm.testing.models import tiny_tokenizer
from rl_vllm.types import BadPrompt

MARK = PolicyOptions(on_bad_prompt=BadPrompt.MARK)


def tokens_td(rows, **entries):
    return lazy_stack(
        [TensorDict(tokens=Tokens(prompt=torch.tensor(row, dtype=torch.int64)), **entries) for row in rows]
    )


async def read(policy, td, **overrides):
    async with asyncio.timeout(60.0), aclosing(policy.stream(td, **overrides)) as stream:
        return [pair async for pair in stream]


def assert_same(rows, whole):
    flat = whole.reshape(-1)
    assert sorted(index for index, _ in rows) == list(range(len(flat)))
    for index, row in rows:
        assert row.batch_size == torch.Size([])
        assert_close(row, flat[index], equal_nan=True)


@pytest.mark.parametrize("num_samples", [None, 3])
async def test_rows_are_those_of_an_unpadded_call_in_the_order_in_which_they_finish(num_samples):
    service = FakeService(script=FakeScript(order=(2, 0, 1)))
    options = PolicyOptions(in_place=False)
    policy = VLLMPolicy(service, num_samples=num_samples, pad_output=False, options=options, tokenizer=tiny_tokenizer())
    td = tokens_td([[5, 6, 7], [4], [9, 9]])
    rows = await read(policy, td)
    n = num_samples or 1
    assert [index for index, _ in rows] == [prompt * n + sample for prompt in (2, 0, 1) for sample in range(n)]
    assert td.get("completion", None) is None
    assert_same(rows, policy(td))
    # Whatever the policy pads.
    padding = VLLMPolicy(service, num_samples=num_samples, tokenizer=tiny_tokenizer())
    assert_same(await read(padding, td), policy(td))


async def test_batches_of_any_shape_are_flattened():
    policy = VLLMPolicy(FakeService(), num_samples=2, pad_output=False)
    td = TensorDict(tokens=TensorDict(prompt=torch.arange(3, 9).reshape(2, 3, 1), batch_size=(2, 3)), batch_size=(2, 3))
    assert_same(await read(policy, td), policy(td))
    single = TensorDict(tokens=TensorDict(prompt=torch.tensor([5, 6])))
    assert [index for index, _ in await read(policy, single)] == [0, 1]
    assert await read(policy, TensorDict(tokens=TensorDict(prompt=torch.zeros(0, 1)), batch_size=(0,))) == []


async def test_chats_and_texts_stream_too():
    chats = [[{"role": "user", "content": text}] for text in ("a", "b a")]
    codec = {"tokenizer": tiny_tokenizer(), "pad_output": False, "sampling": {"max_tokens": 4}, "num_samples": 2}
    service = FakeService(info=replace(FAKE_MODEL, vocab_size=512, max_model_len=256))
    options = PolicyOptions(chat_template_name="chatml_format")
    policy = VLLMPolicy(service, input_mode="history", options=options, **codec)
    td = TensorDict(history=TensorDict(prompt=History.from_chats(chats), batch_size=2), batch_size=2)
    rows, whole = await read(policy, td), policy(td).reshape(-1)
    assert sorted(index for index, _ in rows) == [0, 1, 2, 3]
    for index, row in rows:
        assert row["text"].full == whole[index]["text"].full
        assert row["history"].full.content == whole[index]["history"].full.content
    texts = VLLMPolicy(service, input_mode="text", **codec)
    td = TensorDict(text=TensorDict(prompt=["a", "b a"], batch_size=2), batch_size=2)
    whole = texts(td).reshape(-1)
    for index, row in await read(texts, td):
        assert row["text"].full == whole[index]["text"].full


async def test_failed_prompts_come_as_invalid_rows_or_as_an_error_after_the_others():
    service = FakeService(script=FakeScript(failures={0: "lost"}))
    policy = VLLMPolicy(service, num_samples=2, options=MARK, pad_output=False)
    rows = dict(await read(policy, tokens_td([[5], [6], [64]])))
    assert [bool(rows[index]["completion", "valid"]) for index in range(6)] == [False, False, True, True, False, False]
    assert rows[0]["tokens", "response"].shape == (0,)
    policy, seen = VLLMPolicy(service), []
    with pytest.raises(GenerationError, match="lost"):
        seen += [index async for index, _ in policy.stream(tokens_td([[5], [6]]))]
    with pytest.raises(BadPromptError, match="prompt 0"):
        await read(policy, tokens_td([[], [6]]))
    with pytest.raises(BadInputError, match="tensordict"):
        await read(policy, [[5]])


async def test_a_service_that_loses_or_repeats_a_sample_is_found_out():
    class Wrong(FakeService):
        def __init__(self, count):
            super().__init__()
            self.count = count

        async def stream_batch(self, *args, **kwargs):
            async for chunk in FakeService().stream_batch(*args, **kwargs):
                for _ in range(self.count):
                    yield chunk

    with pytest.raises(GenerationError, match="neither sample 0 nor a failure"):
        await read(VLLMPolicy(Wrong(0)), tokens_td([[5], [6]]))
    with pytest.raises(GenerationError, match="sample 0 twice"):
        await read(VLLMPolicy(Wrong(2)), tokens_td([[5], [6]]))


async def test_closing_the_iterator_closes_the_services():
    closed = asyncio.Event()

    class Watched(FakeService):
        async def stream_batch(self, *args, **kwargs):
            try:
                async for chunk in FakeService().stream_batch(*args, **kwargs):
                    yield chunk
            finally:
                closed.set()

    stream = VLLMPolicy(Watched()).stream(tokens_td([[5], [6]]))
    await anext(stream)
    await stream.aclose()
    assert closed.is_set()


async def test_a_call_that_is_awaited_is_the_call():
    def policy():
        return VLLMPolicy(FakeService(), num_samples=2, sampling={"seed": 7})

    td = tokens_td([[5, 6, 7], [4]])
    blocking, awaited = policy(), policy()
    first, second = [blocking(td) for _ in range(2)]
    assert_close(await awaited.acall(td), first, equal_nan=True)
    assert_close(await awaited.acall(td), second, equal_nan=True)
    assert_close(await awaited.acall(td, seed=7), first, equal_nan=True)
    target = TensorDict(batch_size=(2, 2))
    assert await awaited.acall(td, target, seed=7) is target
    assert_close(target, first, equal_nan=True)
    in_place = tokens_td([[5], [4]]).contiguous()
    assert await VLLMPolicy(FakeService()).acall(in_place) is in_place


async def test_calls_get_their_seeds_in_the_order_in_which_they_are_made():
    service = FakeService()
    policy = VLLMPolicy(service, sampling={"seed": 7})
    streams = [policy.stream(tokens_td([[5]])) for _ in range(3)]
    for stream in reversed(streams):
        async with aclosing(stream):
            await anext(stream)
    seeds = [call.sampling.seed for call in service.generate_calls]
    again = VLLMPolicy(service, sampling={"seed": 7})
    for _ in range(3):
        again(tokens_td([[5]]))
    assert [call.sampling.seed for call in service.generate_calls[3:]] == seeds[::-1]


async def test_a_service_that_cannot_stream_is_named():
    class Blocking:
        def __init__(self):
            self._fake = FakeService()

        def model_info(self):
            return self._fake.model_info()

        def generate_batch(self, *args, **kwargs):
            return self._fake.generate_batch(*args, **kwargs)

    policy = VLLMPolicy(Blocking())
    assert len(policy(tokens_td([[5]]))) == 1
    with pytest.raises(ConfigError, match=r"Blocking has no stream_batch\(\).*AsyncVLLM"):
        policy.stream(tokens_td([[5]]))
    with pytest.raises(ConfigError, match="Blocking has no stream_batch"):
        await policy.acall(tokens_td([[5]]))
