"""Finished groups as tensordict rows: one per segment, in the keys of :class:`rl_vllm.VLLMPolicy`.

A row is one sequence to train on. Of a dialogue in one piece it is the whole of it: ``tokens.prompt`` is what the model
read first, ``tokens.response`` everything from its first sampled token on, and ``masks.all_assistant_mask`` says which
tokens it sampled; the others have no logprob (NaN) and no version (-1).

=========================  ========  =======================================================================
Key                        Type      Meaning
=========================  ========  =======================================================================
``group_id``               int64     [], the prompt's position; rows of one group share it
``rollout.sample``         int64     [], the rollout's number in its group
``rollout.segment``        int64     [], the row's number among the segments of its rollout
``rollout.num_segments``   int64     [], rows of its rollout
``rollout.num_turns``      int64     [], answers of the model
``rollout.attempt``        int64     [], failed attempts before this one
``rollout.version``        int64     [], the weights that were served at the delivery
``rollout.staleness``      int64     [], versions that the oldest sampled token of the row is behind; -1 without any
``rollout.rewards``        float32   [], one entry per reward function, before its weight
``next.reward``            float32   [1], the rollout's whole reward, in each of its rows
``next.done``              bool      [1], True; ``next.terminated`` and ``next.truncated`` say how
=========================  ========  =======================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from rl_vllm.collectors.groups import Group, Sample
from rl_vllm.envs.dialogue import Segment
from rl_vllm.policy.columns import Slots, TokenColumns
from rl_vllm.policy.outputs import TextRows, ragged_tensordict
from rl_vllm.policy.rendering import ChatRenderer

_NOTHING_SAMPLED = -1


def group_tensordict(
    group: Group, segments: list[list[Segment]], *, version: int, logprobs_mode: str, renderer: ChatRenderer
) -> TensorDictBase:
    """A lazy stack of all rows of a group.

    Args:
        group: What was rolled out.
        segments: What is delivered of each sample.
        version: The weights that are served now.
        logprobs_mode: Of the service.
        renderer: Decodes the texts.
    """
    flat = [segment for of_one in segments for segment in of_one]
    text = TextRows(
        [renderer.decode(segment.tokens_T[: segment.num_prompt].tolist()) for segment in flat],
        [renderer.decode(segment.tokens_T[segment.num_prompt :].tolist()) for segment in flat],
    )
    columns = _columns(flat)
    stack = ragged_tensordict(
        columns,
        _slots(flat, columns),
        shape=torch.Size([len(flat)]),
        device=None,
        logprobs_mode=logprobs_mode,
        text=text,
    )
    rows = stack.unbind(0)
    place = 0
    for number, (sample, of_one) in enumerate(zip(group.samples, segments, strict=True)):
        for index, segment in enumerate(of_one):
            facts = _facts(sample, segment, version)
            facts["sample"], facts["segment"], facts["num_segments"] = number, index, len(of_one)
            _complete(rows[place], group.draw.position, facts, sample)
            place += 1
    return lazy_stack(list(rows))


def _facts(sample: Sample, segment: Segment, version: int) -> dict[str, int]:
    sampled = segment.versions_T[segment.sampled_T]
    return {
        "num_turns": len(sample.rollout.turn_rewards),
        "attempt": sample.attempt,
        "version": version,
        "staleness": version - int(sampled.min()) if len(sampled) else _NOTHING_SAMPLED,
    }


def _complete(row: TensorDictBase, position: int, facts: dict[str, int], sample: Sample) -> None:
    cut = sample.rollout.truncated
    row.set("group_id", torch.tensor(position))
    row.set("rollout", TensorDict({name: torch.tensor(value) for name, value in facts.items()}))
    parts = {name: torch.tensor(value, dtype=torch.float32) for name, value in sample.score.parts.items()}
    row.set(("rollout", "rewards"), TensorDict(parts))
    for name in ("done", "terminated", "truncated"):
        row.set(name, torch.zeros(1, dtype=torch.bool))
    ending = {"reward": torch.tensor([sample.reward], dtype=torch.float32)}
    ending |= {"done": torch.tensor([True]), "terminated": torch.tensor([not cut]), "truncated": torch.tensor([cut])}
    row.set("next", TensorDict(ending))


def _columns(segments: list[Segment]) -> TokenColumns:
    def response(of: Any) -> list[Any]:
        return [values[segment.num_prompt :] for values, segment in zip(of, segments, strict=True)]

    tokens = [segment.tokens_T for segment in segments]
    logprobs = [segment.logprobs_T for segment in segments]
    return TokenColumns(
        prompt=[segment.tokens_T[: segment.num_prompt] for segment in segments],
        response=response(tokens),
        full=tokens,
        response_logprobs=response(logprobs),
        full_logprobs=logprobs,
        prompt_logprobs=None,
        versions=[segment.versions_T for segment in segments],
        attention=[np.ones(len(segment), np.bool_) for segment in segments],
        assistant=[segment.sampled_T for segment in segments],
    )


def _slots(segments: list[Segment], columns: TokenColumns) -> Slots:
    prompt_lengths = np.array([segment.num_prompt for segment in segments], np.int64)
    lengths = np.array([len(segment) for segment in segments], np.int64) - prompt_lengths
    last = [segment.answers[-1] for segment in segments]
    return Slots(
        prompt_T=np.concatenate(columns.prompt),
        prompt_lengths_S=prompt_lengths,
        response_T=np.concatenate(columns.response),
        logprobs_T=np.concatenate(columns.response_logprobs),
        versions_T=np.concatenate([s.versions_T[s.num_prompt :] for s in segments]),
        lengths_S=lengths,
        prompt_logprobs_T=None,
        finish_S=np.array([answer.finish for answer in last], np.int64),
        stops_S=[answer.stop for answer in last],
        cached_S=np.array([sum(answer.num_cached for answer in s.answers) for s in segments], np.int64),
        valid_S=np.ones(len(segments), np.bool_),
        top_logprobs_S=None,
        seconds_S=np.array([sum(answer.seconds for answer in s.answers) for s in segments], np.float32),
    )
