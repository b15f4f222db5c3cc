"""Results in the shape of vLLM's, rebuilt from columns."""

import numpy as np
import pytest
import torch

from rl_vllm.service.outputs import (
    Logprob,
    OutputOptions,
    end_samples,
    join_pieces,
    to_pooling_outputs,
    to_request_outputs,
)
from rl_vllm.testing.answers import pieces
from rl_vllm.types import CompletionBatch, EmbeddingBatch, FinishReason, RequestFailure, WeightVersionSpan

from .conftest import prompts

PROMPTS = prompts([5, 6], [7], [8, 9])


def columns(**changes) -> CompletionBatch:
    """Two samples of row 0, none of row 1, one of row 2."""
    values = {
        "numbers_N": np.array([0, 0, 2]),
        "samples_N": np.array([0, 1, 0], np.int32),
        "offsets_N1": np.array([0, 2, 3, 6]),
        "tokens_T": np.array([11, 12, 13, 14, 15, 2], np.int32),
        "logprobs_T": np.array([-0.5, -0.25, -1, -2, -4, -8], np.float32),
        "versions_T": np.array([3, 4, 4, 4, 4, 5], np.int32),
        "finish_N": np.array([FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP], np.int8),
        "stops_N": (None, 13, None),
        "cached_N": np.array([1, 1, 0], np.int32),
        "failures": (RequestFailure(1, "refused"),),
    }
    return CompletionBatch(**values | changes)


def outputs(batch: CompletionBatch, *, with_logprobs=True):
    options = OutputOptions(("five six", None, None), (with_logprobs,) * 3, ("poet", None, None))
    return to_request_outputs(PROMPTS, batch, ["a", "b", "c"], options)


def test_there_is_one_output_per_prompt_with_all_its_samples():
    first, failed, last = outputs(columns())
    assert [sample.index for sample in first.outputs] == [0, 1]
    assert [sample.token_ids for sample in first.outputs] == [[11, 12], [13]]
    assert [sample.text for sample in first.outputs] == ["a", "b"]
    assert failed.outputs == []
    assert last.outputs[0].token_ids == [14, 15, 2]


def test_facts_of_the_prompt_are_kept():
    first, failed, last = outputs(columns())
    assert (first.request_id, first.prompt, first.prompt_token_ids) == ("0", "five six", [5, 6])
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("2", None, [8, 9])
    assert [output.num_cached_tokens for output in (first, failed, last)] == [1, 0, 0]
    assert [output.error for output in (first, failed, last)] == [None, "refused", None]
    assert [output.lora_request for output in (first, failed, last)] == ["poet", None, None]
    assert all(output.finished for output in (first, failed, last))


def test_what_ended_a_sample_is_told_in_vllms_words():
    samples = outputs(columns())[0].outputs
    assert [(sample.finish_reason, sample.stop_reason) for sample in samples] == [("length", None), ("stop", 13)]
    assert all(sample.finished() for sample in samples)


def test_versions_are_told_as_spans():
    first, _, last = outputs(columns())
    assert first.outputs[0].weight_versions == (WeightVersionSpan(3, 0, 1), WeightVersionSpan(4, 1, 2))
    assert last.outputs[0].weight_versions == (WeightVersionSpan(4, 0, 2), WeightVersionSpan(5, 2, 3))


def test_logprobs_are_read_by_position_and_token():
    sample = outputs(columns())[2].outputs[0]
    assert sample.cumulative_logprob == -14.0
    assert len(sample.logprobs) == 3
    assert sample.logprobs[1] == {15: Logprob(-4.0)}
    assert sample.logprobs[-1][2].logprob == -8.0
    assert [next(iter(row)) for row in sample.logprobs] == [14, 15, 2]
    assert sample.logprobs[1:] == [{15: Logprob(-4.0)}, {2: Logprob(-8.0)}]
    with pytest.raises(IndexError):
        sample.logprobs[3]


def test_alternatives_stand_beside_the_sampled_token():
    top = (({11: -0.5, 40: -0.75}, {12: -0.25}), ({13: -1.0},), ({14: -2.0}, {15: -4.0}, {2: -8.0}))
    sample = outputs(columns(top_logprobs=top))[0].outputs[0]
    assert sample.logprobs[0] == {11: Logprob(-0.5), 40: Logprob(-0.75)}
    assert sample.logprobs[1] == {12: Logprob(-0.25)}


def test_logprobs_are_none_when_nobody_asked():
    sample = outputs(columns(), with_logprobs=False)[0].outputs[0]
    assert sample.logprobs is None
    assert sample.cumulative_logprob is None


def test_an_unknown_prompt_logprob_is_none_and_never_zero():
    rows = tuple(np.array(row, np.float32) for row in ([np.nan, -3], [np.nan, -3], [np.nan, -6]))
    first, failed, last = outputs(columns(prompt_logprobs=rows))
    assert first.prompt_logprobs == [None, {6: Logprob(-3.0)}]
    assert failed.prompt_logprobs is None
    assert last.prompt_logprobs == [None, {9: Logprob(-6.0)}]
    assert outputs(columns())[0].prompt_logprobs is None


def test_logprobs_are_shown_for_the_prompts_that_asked_alone():
    options = OutputOptions((None,) * 3, (False, False, True), (None,) * 3)
    first, _, last = to_request_outputs(PROMPTS, columns(), ["a", "b", "c"], options)
    assert first.outputs[0].logprobs is None
    assert last.outputs[0].cumulative_logprob == -14.0


def test_a_vector_is_a_tensor_and_a_list_and_a_prompt_without_one_says_why():
    batch = EmbeddingBatch(
        np.array([2, 0]), np.array([[1, 2], [3, 4]], np.float32), failures=(RequestFailure(1, "refused"),)
    )
    first, failed, last = to_pooling_outputs(PROMPTS, (None, "seven", None), batch)
    assert first.outputs.data.dtype == torch.float32
    assert first.outputs.embedding == [3.0, 4.0]
    assert last.outputs.embedding == [1.0, 2.0]
    assert last.outputs.hidden_size == 2
    assert (failed.outputs, failed.error, failed.prompt) == (None, "refused", "seven")
    assert [output.prompt_token_ids for output in (first, failed, last)] == [[5, 6], [7], [8, 9]]


# Pieces


def assert_equal_columns(one: CompletionBatch, other: CompletionBatch) -> None:
    for name in (
        "numbers_N",
        "samples_N",
        "offsets_N1",
        "tokens_T",
        "logprobs_T",
        "versions_T",
        "finish_N",
        "cached_N",
    ):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    assert one.stops_N == other.stops_N
    assert one.top_logprobs == other.top_logprobs
    assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
    for left, right in zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
        np.testing.assert_array_equal(left, right)


TOP = (({11: -0.5, 40: -0.75}, {12: -0.25}), ({13: -1.0},), ({14: -2.0}, {15: -4.0}, {2: -8.0}))
PROMPT_LOGPROBS = tuple(np.array(row, np.float32) for row in ([np.nan, -3], [np.nan, -3], [np.nan, -6]))


@pytest.mark.parametrize("changes", [{}, {"top_logprobs": TOP}, {"prompt_logprobs": PROMPT_LOGPROBS}], ids=list)
def test_pieces_joined_are_the_whole_in_whatever_order_samples_go_on(changes):
    whole = columns(failures=(), **changes)
    parts = list(pieces(whole))
    assert len(parts) == 3
    assert_equal_columns(join_pieces(parts), whole)
    # One sample after the other.
    apart = [part.take(np.array([index])) for part in parts for index in range(len(part))]
    apart.sort(key=lambda part: (-int(part.numbers_N[0]), -int(part.samples_N[0])))
    assert_equal_columns(join_pieces(apart), whole)


def test_no_pieces_are_an_empty_batch():
    assert len(join_pieces([])) == 0


def test_samples_that_have_not_ended_are_ended_without_tokens():
    one_ended = columns(
        numbers_N=np.array([0, 0, 0]),
        samples_N=np.array([0, 1, 2], np.int32),
        finish_N=np.array([FinishReason.UNFINISHED, FinishReason.STOP, FinishReason.UNFINISHED], np.int8),
        failures=(),
    )
    rest = end_samples(one_ended, 4, FinishReason.ABORT)
    assert rest.samples_N.tolist() == [0, 2, 3]
    joined = join_pieces([one_ended, rest])
    assert joined.samples_N.tolist() == [0, 1, 2, 3]
    assert joined.finish_N.tolist() == [FinishReason.ABORT, FinishReason.STOP, FinishReason.ABORT, FinishReason.ABORT]
    assert joined.lengths_N.tolist() == [2, 1, 3, 0]
    assert joined.tokens_T.tolist() == one_ended.tokens_T.tolist()
