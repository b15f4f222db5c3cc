"""Results in the shape of vLLM's, rebuilt from columns."""

import numpy as np
import pytest

from rl_vllm.service.outputs import Logprob, to_request_outputs
from rl_vllm.types import CompletionBatch, FinishReason, RequestFailure, WeightVersionSpan

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
    return to_request_outputs(PROMPTS, ("five six", None, None), batch, ["a", "b", "c"], with_logprobs=with_logprobs)


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
