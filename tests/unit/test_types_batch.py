"""Columns of prompts and completions, checked against values worked out by hand."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_vllm.types import (
    CompletionBatch,
    FinishReason,
    PromptBatch,
    RequestBatch,
    RequestFailure,
    SamplingConfig,
    WeightVersionSpan,
    pack_rows,
)


def three_samples(**columns: object) -> CompletionBatch:
    """Request 7 has samples 1 and 0, request 4 has sample 0; their tokens are [10, 11], [] and [20, 21, 22]."""
    values: dict[str, object] = {
        "numbers_N": np.array([7, 7, 4], np.int64),
        "samples_N": np.array([1, 0, 0], np.int32),
        "offsets_N1": np.array([0, 2, 2, 5], np.int64),
        "tokens_T": np.array([10, 11, 20, 21, 22], np.int32),
        "logprobs_T": np.array([-0.1, -0.2, -1.0, -2.0, -3.0], np.float32),
        "versions_T": np.array([3, 3, 3, 4, 4], np.int32),
        "finish_N": np.array([FinishReason.LENGTH, FinishReason.ABORT, FinishReason.STOP], np.int8),
        "stops_N": (None, None, "END"),
        "cached_N": np.array([16, 0, 32], np.int32),
    }
    return CompletionBatch(**{**values, **columns})


def rows(batch: CompletionBatch) -> list[tuple[object, ...]]:
    """Each sample with all that belongs to it, as plain values."""
    return [
        (
            int(batch.numbers_N[i]),
            int(batch.samples_N[i]),
            batch.tokens(i).tolist(),
            batch.logprobs(i).round(3).tolist(),
            batch.versions(i).tolist(),
            FinishReason(batch.finish_N[i]),
            batch.stops_N[i],
            int(batch.cached_N[i]),
        )
        for i in range(len(batch))
    ]


FIRST = (7, 1, [10, 11], pytest.approx([-0.1, -0.2]), [3, 3], FinishReason.LENGTH, None, 16)
EMPTY = (7, 0, [], [], [], FinishReason.ABORT, None, 0)
LAST = (4, 0, [20, 21, 22], pytest.approx([-1.0, -2.0, -3.0]), [3, 4, 4], FinishReason.STOP, "END", 32)


def test_rows_are_laid_end_to_end_with_their_offsets():
    tokens_T, offsets_B1 = pack_rows([[5, 6, 7], [], [8]])
    assert tokens_T.tolist() == [5, 6, 7, 8]
    assert offsets_B1.tolist() == [0, 3, 3, 4]
    assert (tokens_T.dtype, offsets_B1.dtype) == (np.int32, np.int64)


def test_no_rows_are_one_offset_and_no_token():
    tokens_T, offsets_B1 = pack_rows([])
    assert tokens_T.tolist() == []
    assert offsets_B1.tolist() == [0]


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=6))
def test_a_packed_prompt_is_the_row_it_came_from(prompts):
    batch = PromptBatch.from_rows(prompts)
    assert len(batch) == len(prompts)
    assert [batch.row(b).tolist() for b in range(len(batch))] == prompts
    assert batch.lengths_B.tolist() == [len(prompt) for prompt in prompts]


def test_arrays_and_lists_pack_alike():
    batch = PromptBatch.from_rows([np.array([1, 2]), [3]])
    assert [batch.row(0).tolist(), batch.row(1).tolist()] == [[1, 2], [3]]


def test_a_row_of_a_prompt_batch_is_a_view():
    batch = PromptBatch.from_rows([[1, 2], [3]])
    assert np.shares_memory(batch.row(1), batch.tokens_T)


def test_a_request_batch_counts_requests_and_not_tokens():
    prompts = PromptBatch.from_rows([[1, 2, 3], [4]])
    request = RequestBatch(np.array([8, 9]), prompts, (SamplingConfig(),) * 2)
    assert len(request) == 2


def test_a_sample_has_its_own_part_of_every_column():
    assert rows(three_samples()) == [FIRST, EMPTY, LAST]


def test_taking_reorders_every_column_and_keeps_failures():
    failure = RequestFailure(5, "too long")
    taken = three_samples(failures=(failure,)).take(np.array([2, 0]))
    assert rows(taken) == [LAST, FIRST]
    assert taken.offsets_N1.tolist() == [0, 3, 5]
    assert taken.tokens_T.tolist() == [20, 21, 22, 10, 11]
    assert taken.failures == (failure,)


def test_taking_may_repeat_and_may_be_empty():
    assert rows(three_samples().take(np.array([0, 0]))) == [FIRST, FIRST]
    nothing = three_samples().take(np.array([], dtype=np.intp))
    assert len(nothing) == 0
    assert nothing.offsets_N1.tolist() == [0]


def test_taking_reorders_the_optional_columns():
    top = (({1: -0.1},), (), ({2: -0.5},))
    prompt = (np.float32([np.nan, -1.0]), np.float32([np.nan]), np.float32([np.nan, -2.0, -3.0]))
    taken = three_samples(top_logprobs=top, prompt_logprobs=prompt).take(np.array([2, 1]))
    assert taken.top_logprobs == (({2: -0.5},), ())
    assert [len(column) for column in taken.prompt_logprobs] == [3, 1]


def test_sorting_orders_by_request_then_by_sample():
    assert rows(three_samples().sorted_rows()) == [LAST, EMPTY, FIRST]


def test_chunks_are_joined_in_the_order_given():
    whole = three_samples(failures=(RequestFailure(5, "too long"),))
    other = three_samples().take(np.array([2]))
    joined = CompletionBatch.concatenate([other, CompletionBatch.empty(), whole])
    assert rows(joined) == [LAST, FIRST, EMPTY, LAST]
    assert joined.offsets_N1.tolist() == [0, 3, 5, 5, 8]
    assert joined.failures == (RequestFailure(5, "too long"),)
    assert (joined.tokens_T.dtype, joined.logprobs_T.dtype, joined.finish_N.dtype) == (np.int32, np.float32, np.int8)


@pytest.mark.parametrize("chunks", [[], [CompletionBatch.empty()], [CompletionBatch.empty()] * 2])
def test_joining_nothing_is_an_empty_batch(chunks):
    joined = CompletionBatch.concatenate(chunks)
    assert len(joined) == 0
    assert joined.offsets_N1.tolist() == [0]
    assert joined.top_logprobs is None


def test_optional_columns_are_joined_past_chunks_that_have_no_sample():
    top = (({1: -0.1},), (), ({2: -0.5},))
    joined = CompletionBatch.concatenate([CompletionBatch.empty(), three_samples(top_logprobs=top)])
    assert joined.top_logprobs == top
    assert joined.prompt_logprobs is None


def test_spans_are_the_runs_of_equal_version():
    batch = three_samples()
    assert batch.spans(0) == (WeightVersionSpan(version=3, start=0, end=2),)
    assert batch.spans(1) == ()
    assert batch.spans(2) == (
        WeightVersionSpan(version=3, start=0, end=1),
        WeightVersionSpan(version=4, start=1, end=3),
    )


def test_a_version_that_returns_starts_a_new_span():
    batch = three_samples(versions_T=np.array([3, 3, 5, 4, 5], np.int32))
    assert [span.version for span in batch.spans(2)] == [5, 4, 5]


def test_completions_cross_a_process_boundary_unchanged():
    batch = pickle.loads(pickle.dumps(three_samples()))
    assert rows(batch) == [FIRST, EMPTY, LAST]


@pytest.mark.parametrize("word", ["stop", "length", "abort", "error"])
def test_a_finish_reason_has_the_word_of_the_engine(word):
    assert FinishReason.from_label(word).label == word


def test_an_unknown_finish_reason_is_an_error():
    with pytest.raises(KeyError, match="NO_SUCH_REASON"):
        FinishReason.from_label("no_such_reason")


def test_arrival_times_go_with_their_samples_and_are_unknown_when_a_part_has_none():
    timed = three_samples(seconds_N=np.array([0.5, 0.25, 1.0], np.float32))
    assert timed.sorted_rows().seconds_N.tolist() == [1.0, 0.25, 0.5]
    later = timed.take(np.array([0])).arrived(3.0)
    joined = CompletionBatch.concatenate([timed, CompletionBatch.empty(), later])
    assert (joined.seconds_N.tolist(), joined.seconds_N.dtype) == ([0.5, 0.25, 1.0, 3.0], np.float32)
    assert CompletionBatch.concatenate([timed, three_samples()]).seconds_N is None


def test_columns_that_others_asked_for_are_filled_in():
    filled = three_samples().filled(top_logprobs=True, prompt_lengths_B=np.array([0, 0, 0, 0, 2, 0, 0, 1]))
    assert filled.top_logprobs == ((), (), ())
    assert [np.isnan(row).tolist() for row in filled.prompt_logprobs] == [[True], [True], [True, True]]
    assert filled.filled(top_logprobs=True, prompt_lengths_B=None).prompt_logprobs is filled.prompt_logprobs
    assert three_samples().filled(top_logprobs=False, prompt_lengths_B=None).top_logprobs is None
