"""Rollouts on real engines: exact ids over many turns, and a bound on age while weights change."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer

from rl_vllm import AsyncVLLM, VLLMPolicy, VLLMWeightSyncScheme
from rl_vllm.collectors import AsyncRolloutCollector, CollectorConfig, ratio_stats
from rl_vllm.envs import PromptSource, RolloutTask
from rl_vllm.testing.models import tiny_tokenizer
from tests.integration.dialogues import NUM_TURNS, RandomTool, Recorder, check_prefixes, worst_error
from tests.integration.facts import found_by
from tests.integration.truth import load_trainer, response_logprobs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

NUM_DIALOGUES = 200
TOLERANCE_NATS = 1e-3
REFITS = 6
# Lengths with a long tail: about one token in a hundred ends a response.
LONG_TAILED = {"max_tokens": 400, "logit_bias": {511: 1.5}}


@pytest.fixture
def scheme(service: AsyncVLLM):
    scheme = VLLMWeightSyncScheme(service=service)
    yield scheme
    scheme.shutdown()


def test_tool_dialogues_go_on_from_the_exact_ids_and_the_trainer_agrees_on_every_trained_token(
    service: AsyncVLLM, tiny_qwen3_tied: Path, scheme: VLLMWeightSyncScheme
) -> None:
    model = load_trainer(tiny_qwen3_tied)
    scheme.create_sender().update_weights(model)
    recorder = Recorder(service)
    policy = VLLMPolicy(recorder, tokenizer=tiny_tokenizer(), sampling={"max_tokens": 24})
    task = RolloutTask(
        [f"question {number}" for number in range(NUM_DIALOGUES)],
        lambda response, entry: 1.0,
        policy=policy,
        interaction=RandomTool,
    )
    config = CollectorConfig(group_size=1, groups_per_batch=50, no_progress_s=120.0)
    with AsyncRolloutCollector(task, policy, config=config) as collector:
        rows = [row for batch in collector for row in batch.unbind(0)]
    assert len(rows) == NUM_DIALOGUES
    assert all(row["rollout", "num_turns"] == NUM_TURNS for row in rows)
    assert check_prefixes(recorder.turns) == NUM_DIALOGUES * (NUM_TURNS - 1)
    worst, count = worst_error(rows, model)
    assert count > NUM_DIALOGUES * NUM_TURNS
    assert worst < TOLERANCE_NATS


@pytest.mark.parametrize("on_stale", ["drop", "truncate"])
def test_no_token_older_than_the_bound_reaches_the_buffer_while_weights_change_every_second(
    service: AsyncVLLM, tiny_qwen3_tied: Path, scheme: VLLMWeightSyncScheme, on_stale: str
) -> None:
    model = load_trainer(tiny_qwen3_tied)
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.update_weights()
    policy = VLLMPolicy(service, tokenizer=tiny_tokenizer(), sampling=LONG_TAILED)
    task = RolloutTask(PromptSource([f"go {n}" for n in range(16)], epochs=None), lambda r, e: 1.0, policy=policy)
    config = CollectorConfig(
        group_size=2, groups_per_batch=4, max_in_flight=24, max_staleness=1, on_stale=on_stale,
        max_oversampling=1000.0, no_progress_s=120.0,
    )  # fmt: skip
    buffer = ReplayBuffer(storage=LazyStackStorage(10_000))
    with AsyncRolloutCollector(task, policy, config=config, replay_buffer=buffer) as collector:
        collector.start()
        for _ in range(REFITS):
            time.sleep(1.0)
            sender.update_weights()
        time.sleep(1.0)
    stats = collector.stats
    rows = list(buffer[:].unbind(0))
    assert len(rows) >= 8
    mixed = 0
    for row in rows:
        versions = row["policy_version"][row["masks", "all_assistant_mask"]]
        assert len(versions)
        assert row["rollout", "version"] - versions.min() <= 1
        assert row["rollout", "staleness"] == row["rollout", "version"] - versions.min()
        assert torch.isfinite(row["log_probs", "full"][row["masks", "all_assistant_mask"]]).all()
        mixed += versions.unique().numel() > 1
    print(f"{on_stale}: {len(rows)} rows, {mixed} of mixed versions, {stats}")
    assert mixed
    if on_stale == "drop":
        assert stats.groups_stale
        assert not stats.tokens_truncated
    else:
        assert stats.tokens_truncated
    assert stats.groups_delivered * 2 == len(rows)


def test_the_iterating_collector_refits_by_itself_and_delivers_only_what_is_fresh(
    service: AsyncVLLM, tiny_qwen3_tied: Path, scheme: VLLMWeightSyncScheme
) -> None:
    scheme.register_model(load_trainer(tiny_qwen3_tied))
    policy = VLLMPolicy(service, tokenizer=tiny_tokenizer(), sampling={"max_tokens": 16, "seed": 1})
    task = RolloutTask([f"prompt {n}" for n in range(12)], lambda r, e: 1.0, policy=policy)
    config = CollectorConfig(group_size=2, groups_per_batch=3, max_in_flight=3, max_staleness=0, no_progress_s=60.0)
    seen: list[int] = []
    with AsyncRolloutCollector(task, policy, config=config, weight_sync=scheme) as collector:
        for batch in collector:
            version = service.weight_version
            sampled = batch["rollout", "version"]
            assert sampled.unique().tolist() == [version]
            assert batch["rollout", "staleness"].unique().tolist() == [0]
            seen += batch["group_id"].tolist()
            assert collector.update_policy_weights_().version == version + 1
    # What was begun before a refit and finished after it is older than 0 versions allow: dropped, never delivered.
    assert len(seen) == len(set(seen)) * 2
    assert collector.stats.groups_delivered + collector.stats.groups_stale == 12


def test_tokens_score_alike_as_they_were_sampled_alone_and_in_a_batch(
    service: AsyncVLLM, tiny_qwen3_tied: Path, scheme: VLLMWeightSyncScheme
) -> None:
    """Decoding, prefill alone and prefill among others run different kernels; nothing promises equal bits."""
    model = load_trainer(tiny_qwen3_tied)
    scheme.create_sender().update_weights(model)
    policy = VLLMPolicy(service, sampling={"max_tokens": 32, "ignore_eos": True})
    prompts = torch.randint(3, 500, (16, 8), generator=torch.Generator().manual_seed(0))
    sampled = policy(TensorDict({("tokens", "prompt"): prompts}, batch_size=16))
    mask = sampled["masks", "all_assistant_mask"]
    decoded = sampled["log_probs", "full"].clone()
    scorer = policy.get_new_version(generate=False)
    together = scorer(sampled.select("tokens", "masks").clone())["log_probs", "full"]
    alone = torch.cat([scorer(row.clone())["log_probs", "full"] for row in sampled.select("tokens", "masks").split(1)])
    for row in range(16):
        # The independent answer, for the prompt's tokens too.
        ids = sampled["tokens", "full"][row].tolist()
        expected = response_logprobs(model, ids[:1], ids[1:])
        torch.testing.assert_close(together[row, 1:], expected, rtol=0, atol=TOLERANCE_NATS)
        assert together[row, 0].isnan()
    for name, scores in (("in a batch", together), ("alone", alone)):
        stats = ratio_stats(scores, decoded, mask, cap=2.0)
        print(f"prefill {name} against decoding: {stats}")
        assert stats.largest < 1 + TOLERANCE_NATS
        assert stats.smallest > 1 - TOLERANCE_NATS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2s_dialogues_go_on_from_the_exact_ids_too() -> None:
    found = found_by("smollm2_dialogues_script", timeout_s=880.0)
    assert found["dialogues"] == NUM_DIALOGUES
    assert set(found["turns"]) == {NUM_TURNS}
    assert found["compared"] == NUM_DIALOGUES * (NUM_TURNS - 1)
    assert found["tokens"] > NUM_DIALOGUES * NUM_TURNS
    assert found["worst_error_nats"] < TOLERANCE_NATS
