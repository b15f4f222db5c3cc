"""Groups are read and written under the names that were set."""

import pytest
import torch
from tensordict import TensorDict, is_leaf_nontensor

from rl_vllm.errors import BadInputError, ConfigError
from rl_vllm.policy import VLLMPolicy
from rl_vllm.testing import FakeService

RENAMED = {"tokens": ("a", "tokens"), "masks": "m", "log_probs": "lp", "policy_version": "v", "completion": ("a", "c")}


def prompts(key=("tokens", "prompt")):
    return TensorDict({key: torch.tensor([[5, 6, 7], [8, 9, 10]])}, batch_size=2)


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("num_samples", [None, 2])
def test_the_same_values_are_under_the_new_names(pad_output, num_samples):
    policy = VLLMPolicy(FakeService(), pad_output=pad_output, num_samples=num_samples)
    usual = policy(prompts())
    renamed = policy.get_new_version()
    renamed.set_keys(**RENAMED)
    assert renamed.in_keys == [("a", "tokens", "prompt")]
    assert renamed.out_keys == [("a", "tokens"), "m", "lp", "v", ("a", "c")]
    out = renamed(prompts(("a", "tokens", "prompt")))
    rows = list(zip(usual.reshape(-1).unbind(0), out.reshape(-1).unbind(0), strict=True))
    for was, now in rows:
        for group, entry in [("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full")]:
            name = RENAMED[group] if isinstance(RENAMED[group], tuple) else (RENAMED[group],)
            torch.testing.assert_close(was[group, entry], now[(*name, entry)], equal_nan=True)
        assert torch.equal(was["policy_version"], now["v"])
        assert torch.equal(was["completion", "finish_reason"], now["a", "c", "finish_reason"])
        if num_samples:
            assert not {"tokens", "masks", "log_probs", "policy_version", "completion"} & set(now.keys())


def test_torchrls_names_of_the_keys_say_where_they_are():
    policy = VLLMPolicy(FakeService())
    assert (policy.tokens_key, policy.masks_key, policy.log_probs_key, policy.text_key, policy.history_key) == (
        "tokens", "masks", "log_probs", "text", "history",
    )  # fmt: skip
    policy.set_keys(log_probs="old")
    assert policy.log_probs_key == "old"
    assert policy.get_new_version(pad_output=False).log_probs_key == "old"


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ({"logprobs": "x"}, "did you mean 'log_probs'"),
        ({"tokens": ""}, "must be a string"),
        ({"tokens": 3}, "must be a string"),
        ({"tokens": ()}, "must be a string"),
        ({"tokens": "masks"}, "two groups"),
    ],
)
def test_names_that_cannot_be_are_refused_and_change_nothing(names, match):
    policy = VLLMPolicy(FakeService())
    with pytest.raises(ConfigError, match=match):
        policy.set_keys(**names)
    assert policy.tokens_key == "tokens"


def test_the_missing_entry_is_named_as_it_was_set():
    policy = VLLMPolicy(FakeService())
    policy.set_keys(tokens="ids")
    with pytest.raises(BadInputError, match=r"\('ids', 'prompt'\)"):
        policy(prompts())


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("with_text", [True, False])
def test_the_spec_has_the_keys_that_are_written_and_takes_what_is_there(tiny_info, tokenizer, generate, with_text):
    policy = VLLMPolicy(FakeService(info=tiny_info), generate=generate, tokenizer=tokenizer if with_text else None)
    td = prompts(("tokens", "prompt" if generate else "full"))
    out = policy(td).select(*policy.out_keys)
    spec = policy.output_spec([2])
    leaves = {key for key in out.keys(True, True, is_leaf=is_leaf_nontensor) if out.get(key) is not None}
    # Stated by the spec, and None for every row here.
    leaves |= {("completion", "stop_reason")} & set(spec.keys(True, True))
    assert set(spec.keys(True, True)) == leaves
    for key in leaves:
        value = out.get(key)
        if isinstance(value, torch.Tensor):
            assert spec[key].dtype == value.dtype, key
            assert len(spec[key].shape) == value.ndim
            assert all(wanted in (-1, found) for wanted, found in zip(spec[key].shape, value.shape, strict=True))


def test_the_spec_has_the_samples_axis():
    spec = VLLMPolicy(FakeService(), num_samples=3).output_spec([2])
    assert spec.shape == (2, 3)
    assert spec["tokens", "full"].shape == (2, 3, -1)


def test_torchrls_property_is_the_spec_of_one_row_and_expands_to_any_batch():
    spec = VLLMPolicy(FakeService()).spec
    assert spec.shape == ()
    assert spec["policy_version"].shape == (-1,)
    assert spec.expand(4)["policy_version"].shape == (4, -1)
