"""How sampling settings are read, merged and refused, and how seeds advance."""

import itertools
import threading

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules.llm.policies import Tokens

from rl_vllm.errors import ConfigError
from rl_vllm.policy import CallSeeds, PolicyOptions, VLLMPolicy, sampling_from
from rl_vllm.testing.fake_service import FakeService
from rl_vllm.types import SamplingConfig


def td():
    return TensorDict(tokens=Tokens(prompt=torch.tensor([[5, 6], [7, 8]]), batch_size=[2]), batch_size=[2])


def test_names_of_hugging_face_mean_the_same_as_vllms():
    hugging_face = {
        "max_new_tokens": 9, "min_new_tokens": 2, "num_return_sequences": 3, "stop_strings": ["a", "b"], "top_k": None,
        "temperature": 1, "do_sample": True, "num_beams": 1, "early_stopping": False,
    }  # fmt: skip
    vllm = {"max_tokens": 9, "min_tokens": 2, "n": 3, "stop": ("a", "b"), "temperature": 1.0}
    assert sampling_from(hugging_face) == sampling_from(vllm)
    assert sampling_from(vllm) == SamplingConfig(
        max_tokens=9, min_tokens=2, n=3, stop=("a", "b"), temperature=1.0, skip_special_tokens=False
    )


def test_not_sampling_is_temperature_zero():
    assert sampling_from({"do_sample": False}).temperature == 0.0


def test_single_stops_booleans_and_engine_fields_become_what_the_engine_takes():
    config = sampling_from(
        {"stop": "x", "stop_token_ids": [7], "logprobs": True, "prompt_logprobs": True, "bad_words": ["y"]}
    )
    assert (config.stop, config.stop_token_ids, config.logprobs, config.prompt_logprobs) == (("x",), (7,), 0, 1)
    assert config.extra == (("bad_words", ["y"]),)


def test_none_keeps_its_meaning_for_max_tokens_and_leaves_others_unset():
    assert sampling_from({"max_tokens": None, "top_p": None}) == SamplingConfig(
        max_tokens=None, skip_special_tokens=False
    )


def test_the_callers_mapping_is_never_edited():
    mapping = {"max_new_tokens": 4, "do_sample": False, "stop": ["x"]}
    VLLMPolicy(FakeService(), sampling=mapping)
    assert mapping == {"max_new_tokens": 4, "do_sample": False, "stop": ["x"]}


REFUSED = {
    "two names of one setting": ({"max_tokens": 4, "max_new_tokens": 4}, "max_tokens and max_new_tokens, which mean"),
    "two names of n": ({"n": 2, "num_return_sequences": 2}, "n and num_return_sequences"),
    "a misspelt name": ({"temprature": 1.0}, "'temprature': did you mean 'temperature'"),
    "a name like no other": ({"zzz": 1}, "known names: allowed_token_ids"),
    "greedy with a temperature": ({"do_sample": False, "temperature": 0.7}, "greedy and contradicts temperature=0.7"),
    "sampling at zero": ({"do_sample": True, "temperature": 0}, "contradicts temperature=0"),
    "beam search": ({"num_beams": 4}, "num_beams=4 is not supported: beam search"),
    "no logprobs": ({"logprobs": False}, "always returned"),
    "a value out of range": ({"temperature": -1}, r"temperature must be finite and in \[0, 2\], got -1"),
    "a value of the wrong type": ({"max_tokens": "9"}, "max_tokens must be an integer, got '9'"),
    "a stop that is no list": ({"stop": 1.5}, "stop must be one value or a list of values, got 1.5"),
    "no mapping": ([("n", 1)], "a SamplingConfig or a mapping"),
    "nucleus sampling": ({"top_p": 0.9}, "top_p=0.9.*biased.*allow_truncated_sampling=True"),
    "top-k": ({"top_k": 5}, "top_k=5"),
    "min-p": ({"min_p": 0.1}, "min_p=0.1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_be_meant_are_refused(case):
    settings, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        VLLMPolicy(FakeService(), sampling=settings)


def test_truncation_is_allowed_on_request_and_when_greedy():
    service = FakeService()
    VLLMPolicy(service, sampling={"top_p": 0.9}, options=PolicyOptions(allow_truncated_sampling=True))(td())
    assert service.generate_calls[0].sampling.top_p == 0.9
    VLLMPolicy(service, sampling={"top_k": 5, "temperature": 0})


def test_a_call_changes_only_what_it_names():
    service = FakeService()
    policy = VLLMPolicy(service, sampling={"max_tokens": 4, "temperature": 0.5})
    policy(td(), temperature=0.25)
    policy(td())
    first, second = (call.sampling for call in service.generate_calls)
    assert (first.max_tokens, first.temperature) == (4, 0.25)
    assert (second.max_tokens, second.temperature) == (4, 0.5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"top_p": 0.5}, "biased"),
        ({"num_samples": 3}, "from 1 to 3.*get_new_version"),
        ({"max_token": 3}, "did you mean"),
    ],
)
def test_a_call_cannot_change_what_the_policy_promises(override, message):
    with pytest.raises(ConfigError, match=message):
        VLLMPolicy(FakeService())(td(), **override)


@pytest.mark.parametrize(
    ("num_samples", "sampling", "batch"),
    [(None, {"n": 3}, (2, 3)), (3, {"n": 3}, (2, 3)), (3, None, (2, 3)), (None, {"n": 1}, (2,)), (1, {"n": 1}, (2, 1)),
     (3, SamplingConfig(), (2, 3))],
)  # fmt: skip
def test_the_number_of_samples_may_be_stated_in_either_place(num_samples, sampling, batch):
    service = FakeService()
    assert VLLMPolicy(service, num_samples=num_samples, sampling=sampling)(td()).batch_size == batch
    assert service.generate_calls[0].sampling.n == (batch[1] if len(batch) > 1 else 1)


@pytest.mark.parametrize("sampling", [{"n": 2}, {"n": 1}, SamplingConfig(n=2)])
def test_two_different_numbers_of_samples_are_refused(sampling):
    with pytest.raises(ConfigError, match="num_samples=3 contradicts n="):
        VLLMPolicy(FakeService(), num_samples=3, sampling=sampling)


@pytest.mark.parametrize("num_samples", [0, -1, 1.5, True])
def test_a_number_of_samples_is_a_positive_integer(num_samples):
    with pytest.raises(ConfigError, match="num_samples must be an integer of at least 1"):
        VLLMPolicy(FakeService(), num_samples=num_samples)


def seeds_of(service):
    return [call.sampling.seed for call in service.generate_calls]


def test_calls_with_one_base_seed_never_repeat_and_a_second_run_repeats_them_all():
    runs = []
    for _ in range(2):
        service = FakeService()
        policy = VLLMPolicy(service, sampling={"seed": 7})
        for _ in range(50):
            policy(td())
        runs.append(seeds_of(service))
    assert runs[0] == runs[1]
    assert runs[0][0] == 7
    assert len(set(runs[0])) == 50
    # Far apart: the service derives neighbouring seeds for rows and samples.
    ordered = sorted(runs[0][1:])
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 1_000_000


def test_derived_seeds_are_splitmix64():
    # The first outputs of splitmix64 seeded with 0, from the authors' reference code.
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    seeds = CallSeeds()
    assert [seeds.next(0) for _ in range(4)] == [0, *[output >> 2 for output in outputs]]


def test_no_seed_stays_no_seed_and_a_calls_own_seed_is_used_as_it_is():
    service = FakeService()
    VLLMPolicy(service)(td())
    policy = VLLMPolicy(service, sampling={"seed": 7})
    policy(td(), seed=3)
    policy(td(), seed=3)
    assert seeds_of(service) == [None, 3, 3]


def test_threads_share_a_policy_and_each_gets_its_own_answer():
    service = FakeService()
    policy = VLLMPolicy(service, sampling={"seed": 7, "max_tokens": 8})
    answers = {}

    def work(name):
        prompt = torch.tensor([[name + 3]])
        out = policy(TensorDict(tokens=Tokens(prompt=prompt, batch_size=[1]), batch_size=[1]))
        answers[name] = out["tokens", "prompt"].tolist()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {name: [[name + 3]] for name in range(32)}
    assert len(set(seeds_of(service))) == 32


def test_a_new_version_changes_only_what_it_names():
    policy = VLLMPolicy(FakeService(), sampling={"max_tokens": 5}, pad_output=False)
    grouped = policy.get_new_version(num_samples=4)
    assert (grouped.num_samples, grouped.sampling.n, grouped.sampling.max_tokens, grouped.pad_output) == (
        4,
        4,
        5,
        False,
    )
    assert grouped.service is policy.service
    assert grouped.get_new_version(sampling={"max_tokens": 6}).num_samples is None
    assert grouped.get_new_version(num_samples=None).sampling.n == 1
    with pytest.raises(ConfigError, match="no argument 'engine'"):
        policy.get_new_version(engine=1)
    with pytest.raises(ConfigError, match="did you mean 'pad_output'"):
        policy.get_new_version(pad_outputs=True)
