"""vLLM's and TorchRL's interfaces, on real vLLM and real Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from pathlib import Path

import pytest
import torch
import vllm.outputs
from tensordict import TensorDict
from torchrl.collectors.llm.weight_update.vllm_v2 import vLLMUpdaterV2
from torchrl.modules.llm import Text
from torchrl.modules.llm.policies import vLLMWrapper
from vllm import SamplingParams, TokensPrompt
from vllm.config import ModelConfig, ParallelConfig, SchedulerConfig, StructuredOutputsConfig, VllmConfig

from rl_vllm import AsyncVLLM, SamplingConfig
from rl_vllm.errors import (
    BadPromptError,
    ConfigError,
    ReplicaCallError,
    ReplicaIndexError,
    ServiceAsleepError,
    UnsupportedByEngineError,
)
from rl_vllm.types import RequestStatus
from tests.integration.conftest import MAX_MODEL_LEN
from tests.integration.truth import load_trainer, response_logprobs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

GREEDY = SamplingConfig(max_tokens=24, temperature=0.0, ignore_eos=True)
SEEDED = SamplingConfig(max_tokens=24, seed=11, ignore_eos=True)
TOLERANCE_NATS = 1e-4
EVENTUALLY_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def checkpoint_weights(service: AsyncVLLM, tiny_qwen3_tied: Path) -> None:
    """The weights of the checkpoint, also after tests that refitted the shared service."""
    if service.weight_version > 0:
        service.update_weights(iter(load_trainer(tiny_qwen3_tied).state_dict().items()))


def one(output: object) -> object:
    """The single sample of a single output."""
    (sample,) = output.outputs  # type: ignore[attr-defined]
    return sample


# Streams


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("mode", ["delta", "cumulative"])
def test_a_stream_is_what_generate_gives_piece_by_piece(service, mode, sampling):
    outputs = list(service.stream_generate("hello", sampling, mode=mode))
    whole = one(service.generate("hello", sampling, use_tqdm=False))
    assert len(outputs) > 1
    assert outputs[-1].finished
    pieces = [one(output) for output in outputs]
    if mode == "delta":
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    else:
        assert pieces[-1].text == whole.text
        assert pieces[-1].token_ids == whole.token_ids
        assert all(later.text.startswith(earlier.text) for earlier, later in itertools.pairwise(pieces))
    assert pieces[-1].cumulative_logprob == pytest.approx(whole.cumulative_logprob, abs=1e-3)
    assert {span.version for piece in pieces for span in piece.weight_versions} == {service.weight_version}


def test_a_stream_with_a_stop_string_ends_before_it(service):
    plain = one(service.generate([7, 3, 41], GREEDY, use_tqdm=False))
    middle = plain.text[len(plain.text) // 2 :][:3]
    assert middle.strip("\ufffd"), f"choose a prompt whose greedy response is text, got {plain.text!r}"
    stopping = SamplingConfig(max_tokens=24, temperature=0.0, ignore_eos=True, stop=(middle,))
    pieces = [one(output) for output in service.stream_generate([7, 3, 41], stopping)]
    whole = one(service.generate([7, 3, 41], stopping, use_tqdm=False))
    assert whole.stop_reason == middle
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", middle)
    assert "".join(piece.text for piece in pieces) == whole.text == plain.text[: plain.text.index(middle)]


def test_the_samples_of_a_group_stream_side_by_side(service, tiny_qwen3_tied):
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    for output in service.stream_generate([5, 6, 7], SamplingConfig(n=3, max_tokens=12, seed=2, ignore_eos=True)):
        for sample in output.outputs:
            tokens.setdefault(sample.index, []).extend(sample.token_ids)
            logprobs.setdefault(sample.index, []).extend(
                row[token].logprob for row, token in zip(sample.logprobs, sample.token_ids, strict=True)
            )
    assert {index: len(ids) for index, ids in tokens.items()} == {0: 12, 1: 12, 2: 12}
    assert len({tuple(ids) for ids in tokens.values()}) == 3
    model = load_trainer(tiny_qwen3_tied)
    for index, ids in tokens.items():
        expected = response_logprobs(model, [5, 6, 7], ids)
        torch.testing.assert_close(torch.tensor(logprobs[index]), expected, atol=TOLERANCE_NATS, rtol=0)


async def test_streams_on_event_loops(service):
    async def read(first: int) -> list[int]:
        stream = await service.astream_generate([first, 6], GREEDY)
        return [token async for output in stream for token in one(output).token_ids]

    together = await asyncio.gather(*(read(first) for first in range(5, 11)))
    alone = [one(await service.agenerate([first, 6], GREEDY)).token_ids for first in range(5, 11)]
    assert together == alone


def test_requests_by_id(service):
    long = SamplingConfig(max_tokens=400, ignore_eos=True)
    name = service.add_request([5, 6], long)
    deadline = time.monotonic() + EVENTUALLY_S
    while service.get_request_status(name) is RequestStatus.WAITING:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert service.abort(name) in (0, 1)
    output = service.get_request_output(name)
    assert service.get_request_status(name) in (RequestStatus.CANCELLED, RequestStatus.COMPLETED)
    sample = one(output)
    assert 0 < len(sample.token_ids) <= 400
    assert sample.finish_reason == ("abort" if len(sample.token_ids) < 400 else "length")
    quick = service.add_request("hello", GREEDY)
    assert one(service.get_request_output(quick)).text == one(service.generate("hello", GREEDY, use_tqdm=False)).text


# Bad input


def test_bad_rows_of_every_kind_leave_their_siblings_and_the_engines_alone(service):
    vocab = service.model_info().vocab_size
    rows = [
        [5, 6],
        [],
        "",
        [9] * MAX_MODEL_LEN,
        [9] * (MAX_MODEL_LEN + 1),
        [9] * (MAX_MODEL_LEN - 1),
        [vocab],
        [-1],
        [6.5],
        [True],
        None,
        "a" * 10_000_000,
        [5] * 2_500_000,
        TokensPrompt(prompt_token_ids=[7]),
    ]
    outputs = service.generate(
        rows, SamplingConfig(max_tokens=3, ignore_eos=True), use_tqdm=False, on_bad_prompt="mark"
    )
    good = [index for index, output in enumerate(outputs) if output.error is None]
    # An empty text may have a token of its own in a model's tokenizer.
    assert [index for index in good if index != 2] == [0, 5, 13]
    assert [len(one(outputs[index]).token_ids) for index in (0, 5, 13)] == [3, 1, 3]
    assert all(output.outputs == [] for index, output in enumerate(outputs) if index not in good)
    for row in (1, 3, 4, 6, 7, 8, 9, 10, 11, 12):
        with pytest.raises(BadPromptError, match=r"^prompt 0: "):
            service.generate([rows[row]], use_tqdm=False)
    service.check_health()


@pytest.mark.parametrize(
    "params", [{"temperature": float("nan")}, {"max_tokens": 0}, {"n": 0}, {"top_p": 0.0}], ids=str
)
def test_settings_out_of_range_are_refused_before_an_engine_sees_them(service, params):
    settings = SamplingParams()
    ((name, value),) = params.items()
    # vLLM checks its settings when they are built, not when they are changed.
    setattr(settings, name, value)
    with pytest.raises(ConfigError, match=name):
        service.generate([5], settings, use_tqdm=False)
    service.check_health()


def test_vllms_settings_one_for_each_prompt(service):
    params = [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0 if n == 2 else None) for n in (1, 2, 3)]
    outputs = service.generate([[5], [6], [7]], params, use_tqdm=False)
    assert [len(one(output).token_ids) for output in outputs] == [1, 2, 3]
    assert [one(output).logprobs is None for output in outputs] == [True, False, True]


# Counts, settings, workers


def test_counts_are_the_engines_own(service):
    assert service.get_num_unfinished_requests() == [0, 0]
    work = threading.Thread(
        target=service.generate,
        args=([[5, 6]] * 4, SamplingConfig(n=2, max_tokens=400, ignore_eos=True)),
        kwargs={"use_tqdm": False, "actor_index": 1},
    )
    work.start()
    seen_requests, seen_usage = 0, 0.0
    deadline = time.monotonic() + EVENTUALLY_S
    while work.is_alive() and time.monotonic() < deadline:
        requests, usage = service.get_num_unfinished_requests(), service.get_cache_usage(1)
        assert requests[0] == 0
        assert 0.0 <= usage <= 1.0
        seen_requests, seen_usage = max(seen_requests, requests[1]), max(seen_usage, usage)
    work.join(EVENTUALLY_S)
    assert seen_requests > 0
    assert seen_usage > 0.0
    for index in (2, -1):
        with pytest.raises(ReplicaIndexError):
            service.get_cache_usage(index)
    assert service.get_random_actor_index() in (0, 1)


def test_settings_are_vllms_own(service):
    config = service.get_vllm_config()
    assert isinstance(config, VllmConfig)
    assert isinstance(service.get_model_config(), ModelConfig)
    assert service.get_model_config().max_model_len == MAX_MODEL_LEN
    assert isinstance(service.get_parallel_config(), ParallelConfig)
    assert isinstance(service.get_scheduler_config(), SchedulerConfig)
    assert isinstance(service.get_decoding_config(), StructuredOutputsConfig)
    assert service.get_lora_config() is None
    assert not service.is_tracing_enabled()
    seeds = [service.get_vllm_config(index).model_config.seed for index in (0, 1)]
    assert seeds[0] != seeds[1]


def test_a_worker_method_answers_for_every_worker(service):
    versions = service.collective_rpc("check_health")
    assert len(versions) == 2
    assert all(len(answers) == 1 for answers in versions)
    with pytest.raises(ReplicaCallError, match="no_such_method"):
        service.collective_rpc("no_such_method")
    service.check_health()


def test_health_state_and_caches(service):
    service.check_health()
    assert (service.is_running, service.is_stopped, service.errored, service.dead_error) == (True, False, False, None)
    assert service.reset_prefix_cache()
    service.reset_mm_cache()
    with pytest.raises((UnsupportedByEngineError, ConfigError)):
        service.start_profile()
    with pytest.raises(UnsupportedByEngineError):
        service.encode([5, 6])
    with pytest.raises(UnsupportedByEngineError):
        service.add_lora("poet", "/no/such/folder")
    assert "2 of 2 replicas serve" in str(service)


# TorchRL


def test_torchrls_updater_refits_every_replica(service, tiny_qwen3_tied):
    model = load_trainer(tiny_qwen3_tied)
    updater = vLLMUpdaterV2(service)
    assert set(updater.model_metadata) == set(dict(model.named_parameters()))
    updater.init()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    try:
        updater.push_weights(iter(model.state_dict().items()))
        for index in (0, 1):
            sample = one(service.generate([7, 3, 41], GREEDY, use_tqdm=False, actor_index=index))
            expected = response_logprobs(model, [7, 3, 41], sample.token_ids)
            found = torch.tensor([row[t].logprob for row, t in zip(sample.logprobs, sample.token_ids, strict=True)])
            # Greedy logprobs are those of the undivided logits.
            torch.testing.assert_close(found, expected, atol=TOLERANCE_NATS, rtol=0)
    finally:
        service.update_weights(iter(load_trainer(tiny_qwen3_tied).state_dict().items()))


def test_torchrls_wrapper_reads_our_outputs(service):
    # It tells engines apart by the name of their class and of its module.
    accepted = type("AsyncVLLM", (), {"__module__": "torchrl.modules.llm.backends.vllm", "generate": None})
    accepted.generate = staticmethod(service.generate)
    tokenizer = service.get_tokenizer()
    wrapper = vLLMWrapper(
        accepted(),
        tokenizer=tokenizer,
        input_mode="text",
        generate=True,
        return_log_probs=True,
        generate_kwargs={"max_tokens": 6, "temperature": 0.0, "ignore_eos": True},
    )
    texts = ["hello", "a longer prompt"]
    answered = wrapper(TensorDict(text=Text(prompt=texts, batch_size=(2,)), batch_size=(2,)))
    direct = service.generate(texts, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True), use_tqdm=False)
    assert list(answered["text"].response) == [one(output).text for output in direct]
    found = answered.get(("tokens", "response"), as_list=True)
    assert [ids.tolist() for ids in found] == [one(output).token_ids for output in direct]


# Sleep


def test_sleep_and_the_ordered_way_back(service, tiny_qwen3_tied):
    before = one(service.generate([7, 3, 41], GREEDY, use_tqdm=False)).token_ids
    service.sleep(1)
    try:
        assert service.is_sleeping()
        with pytest.raises(ServiceAsleepError):
            service.generate([7, 3, 41], GREEDY, use_tqdm=False)
    finally:
        service.wake_up()
    assert one(service.generate([7, 3, 41], GREEDY, use_tqdm=False)).token_ids == before
    service.sleep(2)
    try:
        service.wake_up(["weights"])
        with pytest.raises(ServiceAsleepError, match="push weights"):
            service.generate([7, 3, 41], GREEDY, use_tqdm=False)
        service.update_weights(iter(load_trainer(tiny_qwen3_tied).state_dict().items()))
    finally:
        service.wake_up()
    assert not service.is_sleeping()
    assert one(service.generate([7, 3, 41], GREEDY, use_tqdm=False)).token_ids == before


def test_one_replica_sleeps_alone(service):
    service.sleep(actor_index=1)
    try:
        assert (service.is_sleeping(0), service.is_sleeping(1)) == (False, True)
        outputs = service.generate([[5, 6]] * 4, GREEDY, use_tqdm=False)
        assert all(len(one(output).token_ids) == 24 for output in outputs)
    finally:
        service.wake_up(actor_index=1)
    assert len(one(service.generate([5, 6], GREEDY, use_tqdm=False, actor_index=1)).token_ids) == 24


def test_the_attributes_are_those_of_vllms_outputs(service):
    output = service.generate([5, 6], SamplingParams(max_tokens=2, logprobs=0), use_tqdm=False)
    for name in ("request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished", "metrics"):
        getattr(output, name)
    theirs = {field.name for field in dataclasses.fields(vllm.outputs.CompletionOutput)}
    assert theirs <= {field.name for field in dataclasses.fields(output.outputs[0])}
