import asyncio

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rl_vllm.envs.background import Background
from rl_vllm.envs.stepping import read_answers
from rl_vllm.errors import BadInputError, DeadlineError
from rl_vllm.types import FinishReason

PAD = 2
END = {2, 5}


def written(**more):
    response = torch.tensor([[7, 2, PAD], [7, 8, 9]])
    return TensorDict({("tokens", "response"): response, **more}, batch_size=[2])


def test_padding_that_is_the_end_of_turn_is_told_apart_by_length():
    td = written()
    td["completion"] = TensorDict({"response_length": torch.tensor([2, 3])}, batch_size=[2])
    answers = read_answers(td, END)
    assert [each.tokens_T.tolist() for each in answers] == [[7, 2], [7, 8, 9]]
    assert [each.finish for each in answers] == [FinishReason.STOP, FinishReason.LENGTH]


def test_padding_is_told_apart_by_the_mask_of_the_whole_sequence():
    td = written()
    mask = torch.tensor([[False, True, True, False], [False, True, True, True]])
    td["masks"] = TensorDict({"all_assistant_mask": mask}, batch_size=[2])
    assert [len(each.tokens_T) for each in read_answers(td, END)] == [2, 3]


def test_versions_are_those_of_the_response():
    td = written(policy_version=torch.tensor([[-1, -1, 4, 5, -1], [-1, -1, 6, 6, 7]]))
    assert [each.versions_T.tolist() for each in read_answers(td, END)][1] == [6, 6, 7]


def test_another_end_than_eos_stops():
    td = TensorDict({("tokens", "response"): torch.tensor([[7, 5]])}, batch_size=[1])
    (answer,) = read_answers(td, END)
    assert answer.finish == FinishReason.STOP
    assert np.isnan(answer.logprobs_T).all()
    assert answer.versions_T.tolist() == [-1, -1]


def test_an_empty_response_was_cut():
    td = TensorDict({("tokens", "response"): torch.zeros(1, 0, dtype=torch.int64)}, batch_size=[1])
    (answer,) = read_answers(td, END)
    assert (len(answer.tokens_T), answer.finish) == (0, FinishReason.LENGTH)


def test_what_is_missing_is_named():
    with pytest.raises(BadInputError, match="response"):
        read_answers(TensorDict({"x": torch.zeros(2)}, batch_size=[2]), END)
    td = written()
    td["completion"] = TensorDict({"valid": torch.tensor([True, False])}, batch_size=[2])
    with pytest.raises(BadInputError, match="row 1"):
        read_answers(td, END)


def test_background_work_has_a_deadline_and_is_cancelled():
    cancelled = []

    async def waits():
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.append(True)

    background = Background("test")
    with pytest.raises(DeadlineError, match="a long wait"):
        background.run(waits(), timeout_s=0.05, waited_for="a long wait")
    background.close()
    background.close()
    assert cancelled == [True]


def test_a_timeout_that_the_work_raises_is_not_the_deadline():
    async def fails():
        raise TimeoutError("its own")

    background = Background("test")
    with pytest.raises(TimeoutError, match="its own"):
        background.run(fails(), timeout_s=5.0, waited_for="work")
    background.close()
