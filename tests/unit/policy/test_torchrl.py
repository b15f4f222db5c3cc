"""TorchRL's own loss, collector, environments and buffers take the output as it is."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer
from torchrl.envs.llm import ChatEnv, DatasetChatEnv
from torchrl.modules.llm.policies import Tokens, TransformersWrapper
from torchrl.objectives.llm.grpo import GRPOLoss, MCAdvantage

from rl_vllm.policy import PolicyOptions, VLLMPolicy
from rl_vllm.testing import FakeScript, FakeService

PROMPTS = [[104, 105], [119, 104, 97, 116, 32, 105, 115], [103]]
ADVANTAGES = [1.0, -0.5, 2.0]


def prompts_td():
    return lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row))) for row in PROMPTS])


def trainer(hf_model, tokenizer, *, pad):
    return TransformersWrapper(
        hf_model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=pad, pad_model_input=True
    )


@pytest.mark.parametrize("masking_strategy", ["sft", "rlhf", "generic"])
@pytest.mark.parametrize("pad_output", [True, False])
def test_grpo_takes_the_output_and_finds_the_same_policy(
    hf_model, hf_scored_service, tokenizer, pad_output, masking_strategy
):
    out = VLLMPolicy(hf_scored_service, pad_output=pad_output, sampling={"max_tokens": 8})(prompts_td())
    out["advantage"] = torch.tensor(ADVANTAGES).reshape(3, 1, 1)
    hf_model.zero_grad()
    loss = GRPOLoss(
        trainer(hf_model, tokenizer, pad=pad_output), masking_strategy=masking_strategy, entropy_bonus=False
    )(out)
    # One weight of 1 per sampled token: the loss is minus the token-weighted mean advantage.
    lengths = out["completion", "response_length"].float()
    expected = -(lengths * torch.tensor(ADVANTAGES)).sum() / lengths.sum()
    torch.testing.assert_close(loss.loss_objective.squeeze(), expected, rtol=1e-4, atol=1e-4)
    assert lengths.unique().numel() > 1
    torch.testing.assert_close(loss.ESS.squeeze(), torch.tensor(1.0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss.kl_approx, torch.tensor(0.0), rtol=0, atol=1e-5)
    loss.loss_objective.backward()
    norm = sum(parameter.grad.norm() for parameter in hf_model.parameters() if parameter.grad is not None)
    assert torch.isfinite(norm)
    assert norm > 1e-3


def test_grpo_takes_groups_of_samples_and_the_kl_to_inference(hf_model, hf_scored_service, tokenizer):
    out = VLLMPolicy(hf_scored_service, num_samples=2, sampling={"max_tokens": 8})(prompts_td()).reshape(-1)
    out["advantage"] = torch.tensor([1.0, -1.0] * 3).reshape(6, 1, 1)
    loss = GRPOLoss(
        trainer(hf_model, tokenizer, pad=True), masking_strategy="sft", entropy_bonus=False, kl_to_inference_coeff=0.1
    )(out)
    torch.testing.assert_close(loss.ESS.squeeze(), torch.tensor(1.0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss.kl_to_inference, torch.tensor(0.0), rtol=0, atol=1e-6)


def test_grpo_sees_it_when_one_logprob_is_wrong(hf_model, hf_scored_service, tokenizer):
    dense = PolicyOptions(in_place=False)
    out = VLLMPolicy(hf_scored_service, sampling={"max_tokens": 8}, options=dense)(prompts_td())
    first = out["masks", "all_assistant_mask"].nonzero()[0].tolist()
    out["log_probs", "full"][first[0], first[1]] -= 1.0
    out["advantage"] = torch.ones(3, 1, 1)
    loss = GRPOLoss(trainer(hf_model, tokenizer, pad=True), masking_strategy="sft", entropy_bonus=False)(out)
    assert loss.ESS.item() < 0.95


# Of equal length in tokens: in tokens mode ChatEnv can neither reset nor step a ragged batch.
QUERIES = ["1 + 1?", "2 + 2?", "3 + 3?"]


def dataset_env(input_mode, tokenizer, *, repeats=1, num_envs=2):
    loader = DataLoader(
        [{"query": query} for query in QUERIES],
        batch_size=1,
        collate_fn=lambda rows: {"query": [r["query"] for r in rows]},
    )
    return DatasetChatEnv.from_dataloader(
        loader, repeats=repeats, batch_size=(num_envs,), tokenizer=tokenizer, input_mode=input_mode
    )


@pytest.mark.parametrize(
    ("input_mode", "pad_output"),
    [("history", True), ("history", False), ("text", True), ("text", False), ("tokens", True)],
)
def test_llm_collector_runs_dataset_chat_env_with_the_policy(tiny_info, tokenizer, input_mode, pad_output):
    service = FakeService(info=tiny_info)
    policy = VLLMPolicy(
        service, input_mode=input_mode, tokenizer=tokenizer, pad_output=pad_output, sampling={"max_new_tokens": 6}
    )
    collector = LLMCollector(
        dataset_env(input_mode, tokenizer), policy=policy, dialog_turns_per_batch=4, total_dialog_turns=8
    )
    assert policy.collector is collector
    assert collector.get_policy_model() is service
    batches = list(collector)
    assert [batch.batch_size for batch in batches] == [(2, 2), (2, 2)]
    queries = {batches[0][row, 0]["query"] for row in range(2)}
    assert len(queries & set(QUERIES)) == 2
    for row in range(2):
        first = batches[0][row, 0]
        prompt = first["tokens", "full"][~first["masks", "all_assistant_mask"] & first["masks", "all_attention_mask"]]
        assert tokenizer.decode(prompt) == f"<|im_start|>user\n{first['query']}<|im_end|>\n<|im_start|>assistant\n"
        assert first["policy_version"].shape == first["tokens", "full"].shape
        # In tokens mode the second turn continues from exactly the first turn's ids, padding left out.
        if input_mode == "tokens":
            second = service.generate_calls[1].prompts.row(row).tolist()
            assert second == first["tokens", "full"][first["masks", "all_attention_mask"]].tolist()
    collector.shutdown()


def test_the_collectors_own_version_tracking_leaves_the_per_token_versions_alone(tiny_info, tokenizer):
    policy = VLLMPolicy(FakeService(info=tiny_info), input_mode="history", tokenizer=tokenizer)
    collector = LLMCollector(
        dataset_env("history", tokenizer), policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2,
        track_policy_version=True,
    )  # fmt: skip
    batch = next(iter(collector))
    row = batch[0, 0]
    assert row["policy_version"].shape == row["tokens", "full"].shape
    assert set(row["policy_version"][row["masks", "all_assistant_mask"]].tolist()) == {0}
    collector.shutdown()


def test_chat_env_steps_on_the_policys_history(tiny_info, tokenizer):
    service = FakeService(
        info=tiny_info, script=FakeScript(respond=lambda request: [ord("o"), ord("k"), tokenizer.eos_token_id])
    )
    env = ChatEnv(batch_size=(1,), tokenizer=tokenizer, input_mode="history", system_prompt="be brief")
    policy = VLLMPolicy(service, input_mode="history", tokenizer=tokenizer)
    state = policy(env.reset(TensorDict(query="hi", batch_size=(1,))))
    following = env.step(state)["next", "history"].prompt
    assert list(following[0].role) == ["system", "user", "assistant"]
    assert list(following[0].content) == ["be brief", "hi", "ok"]


@pytest.mark.parametrize("input_mode", ["history", "tokens"])
@pytest.mark.parametrize("pad_output", [True, False])
def test_replay_buffer_with_mc_advantage_takes_collected_groups(tiny_info, tokenizer, input_mode, pad_output):
    # Rows 0 and 1 are one group: rewards 1 and 0, mean 0.5, standard deviation sqrt(0.5): advantages +-sqrt(0.5).
    policy = VLLMPolicy(
        FakeService(info=tiny_info), input_mode=input_mode, tokenizer=tokenizer, pad_output=pad_output,
        sampling={"seed": 1},
    )  # fmt: skip
    collector = LLMCollector(
        dataset_env(input_mode, tokenizer, repeats=2), policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2
    )
    batch = next(iter(collector))
    collector.shutdown()
    batch["next", "reward"] = torch.tensor([1.0, 0.0]).reshape(2, 1, 1)
    batch["next", "done"] = torch.ones(2, 1, 1, dtype=torch.bool)
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(grpo_size=2), batch_size=2)
    buffer.extend(batch)
    stored = buffer[:]
    assert len(buffer) == 2
    order = stored["next", "reward"].flatten().argsort(descending=True)
    torch.testing.assert_close(
        stored["advantage"].flatten()[order], torch.tensor([0.5**0.5, -(0.5**0.5)]), rtol=1e-5, atol=1e-5
    )
    sampled = buffer.sample()
    for row in sampled.unbind(0):
        assert row["policy_version"].shape == row["tokens", "full"].shape


@pytest.mark.parametrize("storage", [LazyStackStorage, LazyTensorStorage])
def test_padded_rows_survive_a_trip_through_storage(storage):
    out = VLLMPolicy(FakeService(), num_samples=2)(prompts_small()).reshape(-1)
    buffer = ReplayBuffer(storage=storage(8), batch_size=4)
    buffer.extend(out)
    back = buffer[:]
    torch.testing.assert_close(back["tokens", "full"], out["tokens", "full"])
    torch.testing.assert_close(back["policy_version"], out["policy_version"])
    torch.testing.assert_close(back["completion", "response_length"], out["completion", "response_length"])


def prompts_small():
    return lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row))) for row in ([5, 6], [7, 8])])
