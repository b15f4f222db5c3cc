"""Our values as vLLM's and back, on vLLM's own classes; no engine is started."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import FinishReason as VLLMFinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats

from rl_vllm.config import EngineConfig
from rl_vllm.engine.args import AsyncEngineArgs, build_engine_args, check_engine_kwarg, config_from_engine_args
from rl_vllm.engine.columns import to_columns
from rl_vllm.engine.params import from_vllm, to_vllm
from rl_vllm.engine.prometheus import EnginePrometheus, NoPrometheus
from rl_vllm.engine.stats import LatestStats, total
from rl_vllm.errors import ConfigError
from rl_vllm.service import outputs as our_outputs
from rl_vllm.service.text import decode_samples
from rl_vllm.testing.models import tiny_tokenizer
from rl_vllm.types import (
    CompletionBatch,
    EngineMetrics,
    FinishReason,
    PromptBatch,
    RequestFailure,
    SamplingConfig,
)

# Settings of an engine

# vLLM looks for folders as soon as it has their names.
MODEL = str(Path(__file__).parent)
OTHER_MODEL = str(Path(__file__).parents[1])
TOKENIZER_FOLDER = str(Path(__file__).parents[2])

# What a field becomes in vLLM's settings: its value here, vLLM's name, the value there.
SETTINGS = {
    "model": (MODEL, "model", MODEL),
    "tokenizer": (TOKENIZER_FOLDER, "tokenizer", TOKENIZER_FOLDER),
    "skip_tokenizer": (True, "skip_tokenizer_init", True),
    "dtype": ("bfloat16", "dtype", "bfloat16"),
    "max_model_len": (512, "max_model_len", 512),
    "tensor_parallel_size": (2, "tensor_parallel_size", 2),
    "pipeline_parallel_size": (3, "pipeline_parallel_size", 3),
    "data_parallel_size": (4, "data_parallel_size", 4),
    "enable_prefix_caching": (False, "enable_prefix_caching", False),
    "enforce_eager": (False, "enforce_eager", False),
    "enable_fp32_output": (True, "hf_overrides", {"head_dtype": "float32"}),
    "seed": (7, "seed", 7),
    "logprobs_mode": ("raw_logprobs", "logprobs_mode", "raw_logprobs"),
    "gpu_memory_utilization": (0.5, "gpu_memory_utilization", 0.5),
    "cpu_kv_cache_gib": (0.25, "kv_cache_memory_bytes", 2**28),
    "engine_kwargs": ({"max_num_seqs": 5}, "max_num_seqs", 5),
}


def test_every_field_of_the_config_is_in_the_table_above():
    # The cores are no setting of vLLM's: the actor binds them. Nor are metrics: the engine keeps them or not.
    assert {field.name for field in dataclasses.fields(EngineConfig)} == {*SETTINGS, "cpu_cores", "prometheus"}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_field_reaches_the_engine(name):
    ours, theirs, expected = SETTINGS[name]
    config = EngineConfig(**{"model": OTHER_MODEL, name: ours})
    assert getattr(build_engine_args(config, replica=0, on_cpu=True), theirs) == expected
    untouched = build_engine_args(EngineConfig(model=OTHER_MODEL), replica=0, on_cpu=True)
    assert getattr(untouched, theirs) != expected


def test_what_is_not_set_is_the_engines_own_choice():
    args = build_engine_args(EngineConfig(model=MODEL), replica=0, on_cpu=False)
    plain = AsyncEngineArgs(model=MODEL)
    for name in ("tokenizer", "max_model_len", "gpu_memory_utilization", "kv_cache_memory_bytes", "hf_overrides"):
        assert getattr(args, name) == getattr(plain, name)
    assert args.logprobs_mode == "processed_logprobs"


@pytest.mark.parametrize(
    ("on_cpu", "given", "expected"), [(True, None, True), (False, None, False), (True, False, False)]
)
def test_engines_run_eagerly_on_cpus_unless_told_otherwise(on_cpu, given, expected):
    assert (
        build_engine_args(EngineConfig(model=MODEL, enforce_eager=given), replica=0, on_cpu=on_cpu).enforce_eager
        is expected
    )


def test_vllm_logs_its_statistics_when_the_user_says_so():
    quiet = build_engine_args(EngineConfig(model=MODEL), replica=0, on_cpu=True)
    assert quiet.disable_log_stats is True
    config = EngineConfig(model=MODEL, engine_kwargs={"disable_log_stats": False})
    assert build_engine_args(config, replica=0, on_cpu=True).disable_log_stats is False


def test_a_profiler_is_given_as_a_dictionary(tmp_path):
    settings = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    config = EngineConfig(model=MODEL, engine_kwargs={"profiler_config": settings})
    profiler = build_engine_args(config, replica=0, on_cpu=True).profiler_config
    assert (profiler.profiler, profiler.torch_profiler_dir) == ("torch", str(tmp_path))


def test_every_replica_has_a_seed_of_its_own():
    seeds = [build_engine_args(EngineConfig(model=MODEL, seed=7), replica=i, on_cpu=True).seed for i in range(3)]
    assert seeds == [7, 8, 9]


def test_refits_are_always_possible():
    args = build_engine_args(EngineConfig(model=MODEL), replica=0, on_cpu=True)
    assert args.weight_transfer_config.backend == "rl_vllm"
    assert args.worker_extension_cls == "rl_vllm.engine.transfer.WeightWorkerExtension"


def test_the_users_overrides_of_the_model_config_are_kept_beside_ours():
    config = EngineConfig(model=MODEL, enable_fp32_output=True, engine_kwargs={"hf_overrides": {"rope_theta": 5.0}})
    args = build_engine_args(config, replica=0, on_cpu=True)
    assert args.hf_overrides == {"rope_theta": 5.0, "head_dtype": "float32"}
    contradicting = dataclasses.replace(config, engine_kwargs={"hf_overrides": {"head_dtype": "bfloat16"}})
    with pytest.raises(ConfigError, match="enable_fp32_output contradicts hf_overrides"):
        build_engine_args(contradicting, replica=0, on_cpu=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_seq", "vLLM has no engine setting 'max_num_seq'; did you mean max_num_seqs"),
        ("cpu_kv_cache_gb", "did you mean .*cpu_kv_cache_gib"),
        ("zzz", "vLLM has no engine setting 'zzz'$"),
        ("tensor_parallel_size", "it is a field of EngineConfig"),
        ("skip_tokenizer_init", "it is a field of EngineConfig"),
        ("weight_transfer_config", "refits depend on it"),
        ("worker_extension_cls", "refits depend on it"),
    ],
)
def test_a_setting_that_cannot_be_passed_through_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        check_engine_kwarg(name)
    with pytest.raises(ConfigError, match=message):
        build_engine_args(EngineConfig(model=MODEL, engine_kwargs={name: 1}), replica=0, on_cpu=True)


def test_vllms_settings_become_ours_and_the_same_engine_again():
    theirs = AsyncEngineArgs(
        model=MODEL,
        dtype="float16",
        max_model_len=256,
        tensor_parallel_size=2,
        seed=5,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        max_num_seqs=12,
        max_num_batched_tokens=300,
    )
    config = config_from_engine_args(theirs)
    assert config == EngineConfig(
        model=MODEL,
        dtype="float16",
        max_model_len=256,
        tensor_parallel_size=2,
        seed=5,
        enable_prefix_caching=False,
        skip_tokenizer=True,
        engine_kwargs={"max_num_seqs": 12, "max_num_batched_tokens": 300},
    )
    again = build_engine_args(config, replica=0, on_cpu=False)
    ours = {"weight_transfer_config", "worker_extension_cls", "logprobs_mode", "disable_log_stats"}
    for field in dataclasses.fields(AsyncEngineArgs):
        if field.name not in ours:
            assert getattr(again, field.name) == getattr(theirs, field.name), field.name


def test_settings_that_vllm_has_by_default_take_our_defaults():
    assert config_from_engine_args(AsyncEngineArgs(model=MODEL)) == EngineConfig(model=MODEL)


def test_settings_that_refits_depend_on_are_not_taken_over():
    with pytest.raises(ConfigError, match="worker_extension_cls"):
        config_from_engine_args(AsyncEngineArgs(model=MODEL, worker_extension_cls="mine.Extension"))


# Settings of a request

FULL = SamplingConfig(
    n=3,
    max_tokens=40,
    temperature=0.5,
    top_p=0.75,
    top_k=9,
    min_p=0.125,
    seed=2**62,
    stop=("a", "bb"),
    stop_token_ids=(4, 5),
    ignore_eos=True,
    min_tokens=2,
    presence_penalty=0.25,
    frequency_penalty=-0.25,
    repetition_penalty=1.5,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    logprobs=4,
    extra=(("logit_bias", {5: 1.0}), ("bad_words", ["no"])),
)


def test_every_sampling_setting_survives_the_way_to_vllm_and_back():
    default = SamplingConfig()
    changed = [
        field.name for field in dataclasses.fields(FULL) if getattr(FULL, field.name) != getattr(default, field.name)
    ]
    # Prompt logprobs make vLLM set a further field of its own.
    assert {*changed, "prompt_logprobs"} == {field.name for field in dataclasses.fields(FULL)}
    assert from_vllm(to_vllm(FULL)) == FULL
    assert to_vllm(dataclasses.replace(FULL, prompt_logprobs=2)).prompt_logprobs == 2


def test_vllms_fields_have_our_values():
    params = to_vllm(FULL)
    for name in ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "logprobs"):
        assert getattr(params, name) == getattr(FULL, name), name
    assert (params.stop, params.stop_token_ids) == (["a", "bb"], [4, 5])
    assert (params.logit_bias, params.bad_words) == ({5: 1.0}, ["no"])


def test_vllms_defaults_are_ours():
    assert from_vllm(SamplingParams()) == SamplingConfig()


def test_only_final_outputs_with_flat_logprobs_are_asked_for_and_text_only_where_a_stop_string_needs_it():
    params = to_vllm(SamplingConfig())
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    assert params.flat_logprobs
    assert params.logprobs == 0
    assert not params.detokenize
    assert to_vllm(SamplingConfig(stop=("a",))).detokenize


def test_pieces_are_cut_from_cumulative_outputs():
    assert to_vllm(SamplingConfig(), pieces=True).output_kind is RequestOutputKind.CUMULATIVE


def test_what_we_have_no_name_for_is_kept_and_reaches_the_engine():
    given = SamplingParams(bad_words=["no"], allowed_token_ids=[1, 2], stop="x", logprobs=None, top_k=-1)
    ours = from_vllm(given)
    assert dict(ours.extra) == {"bad_words": ["no"], "allowed_token_ids": [1, 2]}
    assert ours.stop == ("x",)
    sent = to_vllm(ours)
    assert (sent.bad_words, sent.allowed_token_ids) == (["no"], [1, 2])


def test_greedy_settings_of_vllm_are_greedy_here():
    ours = from_vllm(SamplingParams(temperature=0, top_p=0.5, top_k=3))
    assert ours.is_greedy
    assert not ours.truncates


@pytest.mark.parametrize("name", ["no_such_field", "output_kind", "temperature", "detokenize"])
def test_extra_fields_must_be_further_fields_of_vllm(name):
    with pytest.raises(ConfigError, match=f"cannot set '{name}'"):
        to_vllm(SamplingConfig(extra=((name, 1),)))


# Outputs


def flat(*positions: dict[int, float]) -> FlatLogprobs:
    """Logprobs of consecutive positions, the sampled token's first."""
    result = FlatLogprobs()
    for position in positions:
        result.append_fast(list(position), list(position.values()), itertools.repeat(1), itertools.repeat(None))
    return result


def sample(ids, *, index=0, logprobs="ids", spans=None, finish="length", stop=None) -> CompletionOutput:
    """A sample whose logprobs are ``-id`` unless given."""
    if logprobs == "ids":
        logprobs = flat(*({token: -float(token)} for token in ids))
    spans = [(0, 0, len(ids))] if spans is None else spans
    return CompletionOutput(
        index=index,
        text="",
        token_ids=ids,
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason=finish,
        stop_reason=stop,
        weight_versions=[WeightVersionSpan(str(version), start, end) for version, start, end in spans],
    )


def output(*samples: CompletionOutput, prompt=(1, 2), prompt_logprobs=None, cached=None) -> RequestOutput:
    return RequestOutput(
        request_id="7",
        prompt=None,
        prompt_token_ids=list(prompt),
        prompt_logprobs=prompt_logprobs,
        outputs=list(samples),
        finished=True,
        num_cached_tokens=cached,
    )


def test_samples_become_rows_of_columns():
    batch = to_columns(
        [
            (40, output(sample([11, 12], index=0), sample([13], index=1, finish="stop", stop=13), cached=1)),
            (41, output(sample([14, 15, 2], spans=[(3, 0, 1), (4, 1, 3)], finish="stop"))),
        ],
        [RequestFailure(42, "refused")],
    )
    assert batch.numbers_N.tolist() == [40, 40, 41]
    assert batch.samples_N.tolist() == [0, 1, 0]
    assert batch.offsets_N1.tolist() == [0, 2, 3, 6]
    assert batch.tokens_T.tolist() == [11, 12, 13, 14, 15, 2]
    assert batch.logprobs_T.tolist() == [-11, -12, -13, -14, -15, -2]
    assert batch.versions_T.tolist() == [0, 0, 0, 3, 4, 4]
    assert batch.finish_N.tolist() == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP]
    assert batch.stops_N == (None, 13, None)
    assert batch.cached_N.tolist() == [1, 1, 0]
    assert batch.failures == (RequestFailure(42, "refused"),)
    assert batch.top_logprobs is None
    assert batch.prompt_logprobs is None
    dtypes = [column.dtype for column in (batch.tokens_T, batch.logprobs_T, batch.versions_T, batch.numbers_N)]
    assert dtypes == [np.int32, np.float32, np.int32, np.int64]


def test_the_sampled_tokens_logprob_is_the_first_of_its_position_and_the_others_are_alternatives():
    logprobs = flat({11: -3.0, 40: -0.5}, {12: -0.25})
    batch = to_columns([(1, output(sample([11, 12], logprobs=logprobs)))], [])
    assert batch.logprobs_T.tolist() == [-3.0, -0.25]
    assert batch.top_logprobs == (({11: -3.0, 40: -0.5}, {12: -0.25}),)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_a_logprob_that_is_no_number_fails_its_request_alone_and_names_it(value):
    broken = sample(
        [11, 12, 13], index=1, logprobs=flat({11: -1.0}, {12: value}, {13: value}), spans=[(5, 0, 1), (6, 1, 3)]
    )
    batch = to_columns([(40, output(sample([9]), broken)), (41, output(sample([8])))], [])
    assert batch.numbers_N.tolist() == [41]
    assert batch.tokens_T.tolist() == [8]
    (failure,) = batch.failures
    assert failure.number == 40
    assert failure.reason.startswith(f"request 40, response token 1, weight version 6: logprob is {value}")


@pytest.mark.parametrize(("logprobs", "position"), [(None, 0), (FlatLogprobs(), 0), (flat({11: -1.0}), 1)])
def test_a_missing_logprob_fails_its_request_and_is_never_zero(logprobs, position):
    batch = to_columns([(40, output(sample([11, 12], logprobs=logprobs)))], [])
    assert len(batch) == 0
    assert f"request 40, response token {position}, weight version 0: logprob is missing" in batch.failures[0].reason


def test_a_request_aborted_before_its_first_token_is_an_empty_response():
    batch = to_columns([(40, output(sample([], logprobs=None, spans=[], finish="abort")))], [])
    assert batch.lengths_N.tolist() == [0]
    assert batch.finish_N.tolist() == [FinishReason.ABORT]
    unfinished = to_columns([(40, output(sample([7], finish=None)))], [])
    assert unfinished.finish_N.tolist() == [FinishReason.ABORT]


def test_labels_of_tokens_that_a_stop_string_cut_off_are_cut_off_too():
    cut = sample([11, 12], spans=[(1, 0, 1), (2, 1, 3), (3, 3, 4)], logprobs=flat({11: -1.0}, {12: -2.0}, {13: -3.0}))
    batch = to_columns([(40, output(cut, sample([14], index=1, spans=[(3, 0, 1)])))], [])
    assert batch.versions_T.tolist() == [1, 2, 3]
    assert batch.logprobs_T.tolist() == [-1.0, -2.0, -14.0]


def test_prompt_logprobs_are_nan_where_the_engine_has_none():
    known = FlatLogprobs()
    known.append(None)
    known.extend([flat({2: -0.5, 9: -0.25})[0], flat({3: -0.75})[0]])
    batch = to_columns(
        [(40, output(sample([9]), prompt=[1, 2, 3], prompt_logprobs=known)), (41, output(sample([9])))], []
    )
    np.testing.assert_array_equal(batch.prompt_logprobs[0], np.array([np.nan, -0.5, -0.75], np.float32))
    np.testing.assert_array_equal(batch.prompt_logprobs[1], np.array([np.nan, np.nan], np.float32))


def test_nothing_finished_is_an_empty_batch():
    batch = to_columns([], [])
    assert len(batch) == 0
    assert batch.offsets_N1.tolist() == [0]


def test_every_finish_reason_of_vllm_has_ours():
    assert {FinishReason.from_label(str(reason)).label for reason in VLLMFinishReason} == set(
        map(str, VLLMFinishReason)
    )


def test_our_outputs_have_every_attribute_of_vllms():
    request = output(sample([1]))
    theirs = {"RequestOutput": set(vars(request)), "CompletionOutput": set(vars(request.outputs[0]))}
    for name, attributes in theirs.items():
        ours = {field.name for field in dataclasses.fields(getattr(our_outputs, name))}
        assert attributes <= ours


# Text

TOKENIZER = tiny_tokenizer()


def vllms_text(
    prompt: list[int], ids: list[int], params: SamplingParams, *, ended_by_id: bool
) -> tuple[str, str | None]:
    """Text that vLLM's own detokenizer makes token by token, and the stop string it met."""
    request = EngineCoreRequest("0", prompt, None, params, None, 0.0, None, None, None)
    detokenizer = IncrementalDetokenizer.from_new_request(TOKENIZER, request)
    for position, token in enumerate(ids):
        stop = detokenizer.update([token], ended_by_id and position == len(ids) - 1)
        if stop is not None:
            del ids[position + 1 :]
            return detokenizer.get_next_output_text(True, False), stop
    return detokenizer.get_next_output_text(True, False), None


def our_text(
    prompt: list[int], ids: list[int], params: SamplingParams, stop: str | int | None, finish: FinishReason
) -> str:
    batch = CompletionBatch(
        numbers_N=np.array([0]),
        samples_N=np.array([0], np.int32),
        offsets_N1=np.array([0, len(ids)]),
        tokens_T=np.array(ids, np.int32),
        logprobs_T=np.zeros(len(ids), np.float32),
        versions_T=np.zeros(len(ids), np.int32),
        finish_N=np.array([finish], np.int8),
        stops_N=(stop,),
        cached_N=np.array([0], np.int32),
    )
    (text,) = decode_samples(TOKENIZER, PromptBatch.from_rows([prompt]), batch, from_vllm(params))
    return text


@pytest.mark.parametrize("seed", range(40))
def test_text_of_random_responses_is_vllms_own(seed):
    rng = np.random.default_rng(seed)
    # Of every kind: ASCII, pairs, parts of characters, and special tokens.
    pool = np.concatenate([np.arange(32, 127), np.arange(256, 509), np.arange(0x80, 0x100), [509, 510]])
    params = SamplingParams(
        stop=["a", "th", "e "] if seed % 2 else None,
        min_tokens=seed % 5,
        max_tokens=24,
        include_stop_str_in_output=bool(seed % 3),
        skip_special_tokens=bool(seed % 4),
    )
    prompt = [65, *rng.choice(np.arange(32, 127), 8).tolist()]
    ids = rng.choice(pool, 24).tolist()
    ended_by_id = seed % 7 == 0
    if ended_by_id:
        ids[-1] = 511
    text, stop = vllms_text(prompt, ids, params, ended_by_id=ended_by_id)
    finish = FinishReason.STOP if stop is not None or ended_by_id else FinishReason.LENGTH
    assert our_text(prompt, ids, params, stop, finish) == text


# What an engine says of itself


def test_the_newest_counts_are_kept_and_generated_tokens_add_up():
    stats = LatestStats(None)
    assert stats.snapshot(num_unfinished=3) == EngineMetrics(0, 0, 0.0, 0)
    made = IterationStats()
    made.num_generation_tokens = 5
    stats.record(
        SchedulerStats(num_running_reqs=2, num_waiting_reqs=3, num_skipped_waiting_reqs=1, kv_cache_usage=0.5), made
    )
    stats.record(None, made)
    assert stats.snapshot(num_unfinished=6) == EngineMetrics(2, 4, 0.5, 10)


def test_an_idle_engine_has_nothing_running_whatever_its_last_step_said():
    stats = LatestStats(None)
    stats.record(SchedulerStats(num_running_reqs=2, num_waiting_reqs=3, kv_cache_usage=0.5), None)
    assert stats.snapshot(num_unfinished=0) == EngineMetrics(0, 0, 0.0, 0)


def test_what_was_found_in_the_prefix_cache_adds_up_without_what_preempted_requests_find_again():
    stats = LatestStats(None)
    stats.record(SchedulerStats(prefix_cache_stats=PrefixCacheStats(queries=100, hits=64)), None)
    stats.record(SchedulerStats(prefix_cache_stats=PrefixCacheStats(queries=30, hits=0, preempted_queries=9)), None)
    metrics = stats.snapshot(num_unfinished=0)
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (130, 64)


def test_the_engines_of_a_data_parallel_replica_are_added_up_and_their_kv_use_is_averaged():
    parts = [EngineMetrics(1, 2, 0.25, 10, 100, 40), EngineMetrics(3, 0, 0.75, 5, 20, 0)]
    assert total(parts) == EngineMetrics(4, 2, 0.5, 15, 120, 40)


# vLLM's own metrics


def counted(metrics: PrometheusStatLogger, tokens: int) -> None:
    made = IterationStats()
    made.num_generation_tokens = tokens
    metrics.record(SchedulerStats(num_running_reqs=2), made)


def stat_config() -> Any:
    """What vLLM's metrics read of a ``VllmConfig``."""
    config = MagicMock()
    config.model_config.served_model_name = "tiny"
    config.model_config.max_model_len = 512
    config.speculative_config = None
    config.kv_transfer_config = None
    config.ec_transfer_config = None
    config.observability_config.custom_histogram_buckets = None
    config.lora_config = None
    return config


def test_two_engines_of_one_process_keep_their_metrics_apart():
    first, second = EnginePrometheus(stat_config(), [0]), EnginePrometheus(stat_config(), [0])
    counted(first, 5)
    counted(second, 7)
    for metrics, tokens in ((first, 5), (second, 7)):
        assert f'vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {tokens}.0' in metrics.text()
        assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 2.0' in metrics.text()


def test_metrics_that_nobody_asked_for_are_not_kept():
    manager = StatLoggerManager(stat_config(), [0], [NoPrometheus], enable_default_loggers=False)
    assert [type(each) for each in manager.stat_loggers] == [NoPrometheus]
    manager.record(SchedulerStats(), IterationStats())
    manager.record_sleep_state(1, 1)
    manager.record_admission_rejection("max_num_queued_reqs")
    manager.log_engine_initialized()
    manager.log()
