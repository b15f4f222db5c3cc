"""Copies of policies: pickled, or deep."""

from __future__ import annotations

import copy
import pickle

import torch
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens

from rl_vllm.policy import CallSeeds, VLLMPolicy
from rl_vllm.testing import FakeService
from rl_vllm.testing.models import tiny_tokenizer

BASE = 7


def tokens_td(rows):
    return lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row))) for row in rows])


def seeds_of(seeds: CallSeeds, count: int = 50) -> list[int | None]:
    return [seeds.next(BASE) for _ in range(count)]


def test_a_pickled_policy_has_its_settings_and_a_service_of_its_own_when_that_goes_by_value():
    service = FakeService()
    policy = VLLMPolicy(service, num_samples=2, tokenizer=tiny_tokenizer(), sampling={"max_tokens": 3})
    policy(tokens_td([[5]]))
    owner = FakeService()
    policy.register_collector(owner)
    twin = pickle.loads(pickle.dumps(policy))
    assert twin.collector is None
    assert policy.collector is owner
    assert twin.service is not service
    assert len(twin.service.generate_calls) == 1
    td = tokens_td([[5, 6], [7]])
    assert twin(td)["text"].full == policy(td)["text"].full
    assert len(service.generate_calls) == 2
    assert (twin.sampling, twin.num_samples, twin.out_keys) == (policy.sampling, policy.num_samples, policy.out_keys)


def test_a_deep_copy_shares_the_service():
    policy = VLLMPolicy(FakeService(), tokenizer=tiny_tokenizer())
    twin = copy.deepcopy(policy)
    assert twin.service is policy.service
    assert twin is not policy
    assert twin(tokens_td([[5]]))["tokens", "response"].shape[0] == 1
    pair = copy.deepcopy([policy, policy])
    assert pair[0] is pair[1]


def test_copies_never_repeat_each_others_seeds_and_are_determined_by_their_order():
    def family():
        policy = VLLMPolicy(FakeService(), sampling={"seed": BASE})
        first, second = [pickle.loads(pickle.dumps(policy)) for _ in range(2)]
        return [
            each._seeds for each in (policy, first, second, pickle.loads(pickle.dumps(first)), copy.deepcopy(policy))
        ]

    streams = [seeds_of(seeds) for seeds in family()]
    assert streams[0] == seeds_of(CallSeeds())
    assert len({seed for stream in streams for seed in stream}) == 5 * 50
    assert all(2**62 <= seed < 2**63 for stream in streams[1:] for seed in stream)
    assert streams == [seeds_of(seeds) for seeds in family()]


def test_a_copy_without_a_seed_has_none_and_one_that_is_copied_goes_on():
    assert CallSeeds().derived().next(None) is None
    seeds = CallSeeds().derived()
    first = seeds.next(BASE)
    again = pickle.loads(pickle.dumps(seeds))
    assert first not in (again.next(BASE), None)
