"""What holds for every batch: lengths, provenance, order, and padded equals ragged."""

import asyncio

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens

from rl_vllm.policy import PolicyOptions, VLLMPolicy
from rl_vllm.testing.fake_service import FakeScript, FakeService
from rl_vllm.types import BadPrompt

# Ids of padding, EOS and plain tokens alike, on both sides: masks must not care. 70 is outside the vocabulary.
IDS = st.integers(0, 8)
PROMPTS = st.lists(st.lists(st.one_of(IDS, IDS, IDS, st.just(70)), min_size=1, max_size=6), min_size=1, max_size=5)


@st.composite
def batches(draw):
    prompts = draw(PROMPTS)
    n = draw(st.integers(1, 3))
    responses = {
        (row, sample): draw(st.lists(IDS, min_size=1, max_size=6)) for row in range(len(prompts)) for sample in range(n)
    }
    return prompts, n, responses


def run(prompts, n, responses, *, pad_output):
    service = FakeService(
        script=FakeScript(respond=lambda request: responses[request.row, request.sample], next_version=(2, 5))
    )
    policy = VLLMPolicy(
        service, num_samples=n, pad_output=pad_output, options=PolicyOptions(on_bad_prompt=BadPrompt.MARK)
    )
    return policy(lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row))) for row in prompts]))


@settings(deadline=None, max_examples=60)
@given(batches())
def test_every_token_is_where_it_came_from(batch):
    prompts, n, responses = batch
    out = run(prompts, n, responses, pad_output=False)
    for row, prompt in enumerate(prompts):
        for sample in range(n):
            got = out[row, sample]
            failed = 70 in prompt
            response = [] if failed else responses[row, sample]
            assert got["completion", "valid"].item() is not failed
            assert got["tokens", "prompt"].tolist() == prompt
            assert got["tokens", "response"].tolist() == response
            assert got["tokens", "full"].tolist() == prompt + response
            assert got["masks", "all_assistant_mask"].tolist() == [False] * len(prompt) + [True] * len(response)
            assert got["masks", "all_attention_mask"].all()
            versions = [0 if position < 2 else 5 for position in range(len(response))]
            assert got["policy_version"].tolist() == [-1] * len(prompt) + versions
            scores = np.array([-(1 + token % 7) / 8 for token in response], np.float32)
            np.testing.assert_array_equal(got["log_probs", "response"].numpy(), scores)
            np.testing.assert_array_equal(got["log_probs", "full"].numpy()[len(prompt) :], scores)
            assert got["log_probs", "full"][: len(prompt)].isnan().all()
            assert got["completion", "prompt_length"] == len(prompt)
            assert got["completion", "response_length"] == len(response)


PER_FULL_TOKEN = [
    ("tokens", "full"), ("log_probs", "full"), ("masks", "all_assistant_mask"), "policy_version",
]  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(batches())
def test_padded_and_ragged_output_say_the_same(batch):
    prompts, n, responses = batch
    padded = run(prompts, n, responses, pad_output=True)
    ragged = run(prompts, n, responses, pad_output=False)
    mask = padded["masks", "all_attention_mask"]
    width = max(map(len, prompts))
    assert padded["tokens", "full"].shape == (len(prompts), n, width + padded["tokens", "response"].shape[-1])
    for row, prompt in enumerate(prompts):
        for sample in range(n):
            real = mask[row, sample]
            for key in PER_FULL_TOKEN:
                expected = ragged[row, sample].get(key)
                torch.testing.assert_close(padded.get(key)[row, sample][real], expected, rtol=0, atol=0, equal_nan=True)
            # The prompt ends and the response begins at the same place in every row.
            assert real[width - len(prompt) : width].all()
            assert real.sum() == len(prompt) + ragged[row, sample]["tokens", "response"].numel()
    hidden = ~mask
    assert (padded["log_probs", "full"][hidden] == 0).all()
    assert (padded["policy_version"][hidden] == -1).all()
    assert not padded["masks", "all_assistant_mask"][hidden].any()


LAYOUTS = ("left", "right", "nested", "lazy", "list")


@st.composite
def shaped_batches(draw):
    """Rows of ids, the batch shape they fill, and the layout they come in."""
    shape = draw(st.sampled_from([(1,), (3,), (2, 2), (1, 3), (2, 1, 2)]))
    count = int(np.prod(shape))
    rows = draw(st.lists(st.lists(IDS, min_size=1, max_size=6), min_size=count, max_size=count))
    layout = draw(st.sampled_from(LAYOUTS if len(shape) == 1 else ("left", "right", "lazy")))
    return rows, shape, layout


def laid_out(rows, shape, layout, entry):
    """The same rows as one tensordict."""
    key = ("tokens", entry)
    if layout in ("left", "right"):
        width = max(map(len, rows)) + 1
        ids, mask = torch.full((len(rows), width), 3), torch.zeros(len(rows), width, dtype=torch.int64)
        for index, row in enumerate(rows):
            place = slice(width - len(row), None) if layout == "left" else slice(0, len(row))
            ids[index, place], mask[index, place] = torch.tensor(row), 1
        shaped = {key: ids.reshape(*shape, width), "attention_mask": mask.reshape(*shape, width)}
        return TensorDict(shaped, batch_size=shape)
    if layout == "nested":
        nested = torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
        return TensorDict({key: nested}, batch_size=shape)
    if layout == "list":
        td = TensorDict(batch_size=shape)
        td["tokens"] = TensorDict(batch_size=shape)
        td["tokens"].set_non_tensor(entry, [list(row) for row in rows])
        return td
    flat = [TensorDict({key: torch.tensor(row)}) for row in rows]

    def stack(part, axes):
        if not axes:
            return part[0]
        step = len(part) // axes[0]
        return lazy_stack([stack(part[i * step : (i + 1) * step], axes[1:]) for i in range(axes[0])])

    return stack(flat, shape)


@settings(deadline=None, max_examples=80)
@given(shaped_batches(), st.booleans())
def test_layout_and_rank_of_the_prompts_change_nothing_about_a_row(batch, pad_output):
    rows, shape, layout = batch
    out = VLLMPolicy(FakeService(), pad_output=pad_output)(laid_out(rows, shape, layout, "prompt"))
    assert out.batch_size == shape
    for got, prompt in zip(out.reshape(-1).unbind(0), rows, strict=True):
        alone = VLLMPolicy(FakeService(), pad_output=False)(laid_out([prompt], (1,), "lazy", "prompt"))[0]
        real = got["masks", "all_attention_mask"]
        for key in PER_FULL_TOKEN:
            torch.testing.assert_close(got.get(key)[real], alone.get(key), rtol=0, atol=0, equal_nan=True)
        assert got["completion", "prompt_length"] == len(prompt)
        assert got["completion", "response_length"] == alone["completion", "response_length"]


@settings(deadline=None, max_examples=80)
@given(shaped_batches(), st.booleans())
def test_scores_are_of_the_tokens_beside_them_in_any_layout_and_rank(batch, pad_output):
    rows, shape, layout = batch
    policy = VLLMPolicy(FakeService(), generate=False, pad_output=pad_output)
    out = policy(laid_out(rows, shape, layout, "full"))
    assert out.batch_size == shape
    for got, row in zip(out.reshape(-1).unbind(0), rows, strict=True):
        real = got["masks", "all_attention_mask"]
        assert got["tokens", "full"][real].tolist() == row
        scores = [-(1 + token % 7) / 8 for token in row]
        assert got["log_probs", "full"][real][1:].tolist() == scores[1:]
        assert got["log_probs", "full"][real][0].isnan()
        assert got["completion", "known"][real].tolist() == [False] + [True] * (len(row) - 1)
        assert not got["completion", "known"][~real].any()
        assert (got["log_probs", "full"][~real] == 0).all()


@settings(deadline=None, max_examples=60)
@given(batches(), st.randoms(use_true_random=False))
def test_rows_that_are_streamed_come_once_in_any_order_and_are_those_of_one_call(batch, random):
    prompts, n, responses = batch
    whole = run(prompts, n, responses, pad_output=False).reshape(-1).unbind(0)
    order = list(range(len(prompts)))
    random.shuffle(order)
    script = FakeScript(
        respond=lambda request: responses[request.row, request.sample], next_version=(2, 5), order=order
    )
    policy = VLLMPolicy(FakeService(script=script), num_samples=n, options=PolicyOptions(on_bad_prompt=BadPrompt.MARK))

    async def read():
        td = lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row))) for row in prompts])
        return [pair async for pair in policy.stream(td)]

    rows = asyncio.run(read())
    assert sorted(index for index, _ in rows) == list(range(len(prompts) * n))
    assert list(dict.fromkeys(index // n for index, _ in rows)) == order
    for index, row in rows:
        for key in PER_FULL_TOKEN:
            torch.testing.assert_close(row.get(key), whole[index].get(key), rtol=0, atol=0, equal_nan=True)
        assert row["completion", "valid"] == whole[index]["completion", "valid"]
