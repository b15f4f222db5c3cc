"""The service on real vLLM and real Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from vllm import SamplingParams, TokensPrompt

from rl_vllm import AsyncVLLM, SamplingConfig, VLLMWeightSyncScheme
from rl_vllm.errors import BadPromptError, ConfigError, DeadlineError
from rl_vllm.types import BadPrompt, FinishReason, PromptBatch
from tests.integration.conftest import MAX_MODEL_LEN
from tests.integration.truth import load_trainer, response_logprobs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPTS = [[7, 3, 300, 41, 9, 120, 77, 8][: 3 + row % 6] for row in range(16)]
TOLERANCE_NATS = 1e-4


@pytest.fixture(scope="module", autouse=True)
def checkpoint_weights(service: AsyncVLLM, tiny_qwen3_tied: Path) -> None:
    """The weights of the checkpoint, also after tests that refitted the shared service."""
    if service.weight_version > 0:
        scheme = VLLMWeightSyncScheme(transport="shared_storage", service=service)
        scheme.create_sender().update_weights(load_trainer(tiny_qwen3_tied))
        scheme.shutdown()


def wait_until_idle(service: AsyncVLLM, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while True:
        counts = [(m.num_running, m.num_waiting) for m in service.metrics() if m is not None]
        if counts == [(0, 0), (0, 0)]:
            return
        assert time.monotonic() < deadline, f"running and waiting after {within_s} s: {counts}"
        time.sleep(0.05)


def test_every_prompt_gets_its_samples_in_order(service: AsyncVLLM) -> None:
    batch = service.generate_batch(PromptBatch.from_rows(PROMPTS), SamplingConfig(n=3, max_tokens=5, ignore_eos=True))
    assert batch.numbers_N.tolist() == [row for row in range(16) for _ in range(3)]
    assert batch.samples_N.tolist() == [0, 1, 2] * 16
    assert batch.lengths_N.tolist() == [5] * 48
    assert batch.finish_N.tolist() == [FinishReason.LENGTH] * 48
    assert np.isfinite(batch.logprobs_T).all()
    assert not batch.failures


def test_engines_run_at_the_priority_of_the_program(service: AsyncVLLM) -> None:
    engines = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("VLLM::")]
    assert len(engines) >= 2
    assert {engine.nice() for engine in engines} == {psutil.Process().nice()}


def test_both_replicas_share_a_batch(service: AsyncVLLM) -> None:
    before = [m.generated_tokens for m in service.metrics() if m is not None]
    service.generate_batch(PromptBatch.from_rows(PROMPTS), SamplingConfig(max_tokens=8, ignore_eos=True))
    after = [m.generated_tokens for m in service.metrics() if m is not None]
    made = [new - old for new, old in zip(after, before, strict=True)]
    assert sum(made) == 16 * 8
    # Costs differ by the prompts' few tokens only.
    assert min(made) >= 7 * 8


def test_logprobs_under_temperature_are_those_of_the_tempered_distribution(
    service: AsyncVLLM, tiny_qwen3_tied: Path
) -> None:
    model = load_trainer(tiny_qwen3_tied)
    batch = service.generate_batch(
        PromptBatch.from_rows(PROMPTS[:4]), SamplingConfig(max_tokens=12, temperature=0.6, ignore_eos=True, seed=5)
    )
    for index in range(4):
        ids = batch.tokens(index).tolist()
        prompt = PROMPTS[index]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.6
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(batch.logprobs(index)), expected, atol=TOLERANCE_NATS, rtol=0)


def test_greedy_takes_the_most_likely_token(service: AsyncVLLM, tiny_qwen3_tied: Path) -> None:
    model = load_trainer(tiny_qwen3_tied)
    batch = service.generate_batch(
        PromptBatch.from_rows(PROMPTS[:4]), SamplingConfig(max_tokens=6, temperature=0.0, ignore_eos=True)
    )
    for index in range(4):
        ids = list(PROMPTS[index])
        for token in batch.tokens(index).tolist():
            with torch.no_grad():
                assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)


def test_one_seed_gives_the_same_distinct_samples_again(service: AsyncVLLM) -> None:
    same_prompt = PromptBatch.from_rows([[5, 6, 7]] * 4)
    sampling = SamplingConfig(n=2, max_tokens=8, seed=3, ignore_eos=True)
    first, second = (service.generate_batch(same_prompt, sampling) for _ in range(2))
    assert first.tokens_T.tolist() == second.tokens_T.tolist()
    assert len({tuple(first.tokens(index)) for index in range(8)}) == 8


def test_replicas_without_a_seed_explore_differently(service: AsyncVLLM) -> None:
    batch = service.generate_batch(
        PromptBatch.from_rows([[5, 6, 7]] * 8), SamplingConfig(max_tokens=8, ignore_eos=True)
    )
    assert max(Counter(tuple(batch.tokens(index)) for index in range(8)).values()) == 1


def test_max_tokens_is_clamped_to_what_the_context_leaves(service: AsyncVLLM) -> None:
    long = [9] * (MAX_MODEL_LEN - 4)
    batch = service.generate_batch(PromptBatch.from_rows([long]), SamplingConfig(max_tokens=50, ignore_eos=True))
    assert batch.lengths_N.tolist() == [4]


def test_a_bad_row_is_marked_and_its_siblings_are_answered(service: AsyncVLLM) -> None:
    rows = [[5, 6], [], [9] * MAX_MODEL_LEN, [5, 100_000], [5, -1], [7]]
    batch = service.generate_batch(
        PromptBatch.from_rows(rows), SamplingConfig(max_tokens=3, ignore_eos=True), on_bad_prompt=BadPrompt.MARK
    )
    assert batch.numbers_N.tolist() == [0, 5]
    assert [failure.number for failure in batch.failures] == [1, 2, 3, 4]
    with pytest.raises(BadPromptError, match="prompt 1: it is empty"):
        service.generate_batch(PromptBatch.from_rows(rows), SamplingConfig())


def test_an_expired_deadline_leaves_the_engines_idle(service: AsyncVLLM) -> None:
    with pytest.raises(DeadlineError, match=r"0\.2 s"):
        service.generate_batch(
            PromptBatch.from_rows(PROMPTS), SamplingConfig(n=4, max_tokens=400, ignore_eos=True), timeout_s=0.2
        )
    wait_until_idle(service, within_s=2.0)
    answer = service.generate_batch(PromptBatch.from_rows([[5]]), SamplingConfig(max_tokens=2, ignore_eos=True))
    assert answer.lengths_N.tolist() == [2]


def test_generate_reads_prompts_and_parameters_as_vllm_does(service: AsyncVLLM) -> None:
    params = SamplingParams(max_tokens=4, logprobs=0, n=2, ignore_eos=True)
    outputs = service.generate(["hello", TokensPrompt(prompt_token_ids=[5, 6])], params, use_tqdm=False)
    assert isinstance(outputs, list)
    tokenizer = service.get_tokenizer()
    assert tokenizer is not None
    assert outputs[0].prompt == "hello"
    assert outputs[0].prompt_token_ids == tokenizer.encode("hello")
    assert outputs[1].prompt_token_ids == [5, 6]
    for output in outputs:
        assert [sample.index for sample in output.outputs] == [0, 1]
        for sample in output.outputs:
            assert len(sample.token_ids) == 4
            # As vLLM's, it leaves out a character that the last ids begin and do not end.
            whole = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            assert sample.text == whole.rstrip("\ufffd")
            assert sample.logprobs is not None
            total = sum(row[token].logprob for row, token in zip(sample.logprobs, sample.token_ids, strict=True))
            assert sample.cumulative_logprob == pytest.approx(total, abs=1e-4)
    single = service.generate(prompt_token_ids=[5, 6, 7], sampling_params=SamplingParams(max_tokens=2), use_tqdm=False)
    assert not isinstance(single, list)
    assert single.prompt_token_ids == [5, 6, 7]
    assert single.outputs[0].logprobs is None


def test_a_stop_string_ends_the_text_before_it(service: AsyncVLLM) -> None:
    tokenizer = service.get_tokenizer()
    assert tokenizer is not None
    sampling = SamplingConfig(max_tokens=12, temperature=0.0, ignore_eos=True)
    whole = service.generate([[7, 3, 41]], sampling, use_tqdm=False)[0].outputs[0]  # type: ignore[index]
    stop = tokenizer.decode(whole.token_ids[4:6], skip_special_tokens=True)
    if not stop.strip("\ufffd"):
        pytest.fail(f"choose a prompt whose greedy response is text, got {whole.text!r}")
    stopping = SamplingConfig(max_tokens=12, temperature=0.0, ignore_eos=True, stop=(stop,))
    stopped = service.generate([[7, 3, 41]], stopping, use_tqdm=False)[0].outputs[0]  # type: ignore[index]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == stop
    assert stopped.text == whole.text[: whole.text.index(stop)]


def test_prompt_logprobs_equal_the_models_and_are_unknown_for_the_first_token(
    service: AsyncVLLM, tiny_qwen3_tied: Path
) -> None:
    prompt = [7, 3, 300, 41, 9]
    batch = service.generate_batch(PromptBatch.from_rows([prompt]), SamplingConfig(max_tokens=1, prompt_logprobs=0))
    assert batch.prompt_logprobs is not None
    row = torch.tensor(batch.prompt_logprobs[0])
    assert torch.isnan(row[0])
    expected = response_logprobs(load_trainer(tiny_qwen3_tied), prompt[:1], prompt[1:])
    torch.testing.assert_close(row[1:], expected, atol=TOLERANCE_NATS, rtol=0)


def test_threads_and_running_loops_may_call_at_once(service: AsyncVLLM) -> None:
    answers: dict[int, list[int]] = {}

    def ask(thread: int) -> None:
        rows = PromptBatch.from_rows([[thread + 1, row] for row in range(8)])
        batch = service.generate_batch(rows, SamplingConfig(max_tokens=1 + thread, ignore_eos=True))
        answers[thread] = batch.lengths_N.tolist()

    async def ask_inside_a_loop() -> None:
        ask(4)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    asyncio.run(ask_inside_a_loop())
    for thread in threads:
        thread.join(60)
    assert answers == {thread: [1 + thread] * 8 for thread in range(5)}


def test_an_unknown_sampling_field_is_refused(service: AsyncVLLM) -> None:
    with pytest.raises(ConfigError, match="not_a_field"):
        service.generate_batch(PromptBatch.from_rows([[5]]), SamplingConfig(extra=(("not_a_field", 1),)))
