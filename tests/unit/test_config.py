"""Configs are checked when built, and environment variables when read."""

import dataclasses
from pathlib import Path

import pytest

from rl_vllm import config
from rl_vllm.config import EngineConfig, RefitConfig, ServiceConfig
from rl_vllm.errors import ConfigError

ENGINE = EngineConfig(model="some/model")

REFUSED = [
    (EngineConfig, {"model": ""}, "model must be a path or a hub id, got ''"),
    (EngineConfig, {"model": 7}, "model must be a path or a hub id, got 7"),
    (RefitConfig, {"kv": "recompute"}, "kv must be one of KVCache.RECOMPUTE, KVCache.REUSE, got 'recompute'"),
    (RefitConfig, {"in_flight": "keep"}, "in_flight must be one of InFlight.KEEP, InFlight.WAIT, InFlight.ABORT"),
    (EngineConfig, {"model": "m", "tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1"),
    (EngineConfig, {"model": "m", "pipeline_parallel_size": 1.0}, "pipeline_parallel_size must be an integer"),
    (EngineConfig, {"model": "m", "data_parallel_size": True}, "data_parallel_size must be an integer"),
    (EngineConfig, {"model": "m", "cpu_cores": -1}, "cpu_cores must be an integer of at least 1, got -1"),
    (EngineConfig, {"model": "m", "max_model_len": 1}, "max_model_len must be an integer of at least 2, got 1"),
    (EngineConfig, {"model": "m", "dtype": "fp32"}, "dtype must be one of auto, float32, bfloat16, float16"),
    (EngineConfig, {"model": "m", "logprobs_mode": "raw"}, "logprobs_mode must be one of processed_logprobs"),
    (EngineConfig, {"model": "m", "cpu_kv_cache_gib": 0}, "cpu_kv_cache_gib must be a finite number above 0, got 0"),
    (EngineConfig, {"model": "m", "cpu_kv_cache_gib": float("nan")}, "cpu_kv_cache_gib must be a finite number"),
    (EngineConfig, {"model": "m", "gpu_memory_utilization": 1.1}, r"gpu_memory_utilization must be in \(0, 1\]"),
    (ServiceConfig, {"engine": ENGINE, "num_replicas": 0}, "num_replicas must be an integer of at least 1, got 0"),
    (ServiceConfig, {"engine": ENGINE, "request_timeout_s": 0}, "request_timeout_s must be a finite number above 0"),
    (ServiceConfig, {"engine": ENGINE, "rpc_timeout_s": float("inf")}, "rpc_timeout_s must be a finite number"),
    (ServiceConfig, {"engine": ENGINE, "shutdown_timeout_s": "5"}, "shutdown_timeout_s must be a finite number"),
    (ServiceConfig, {"engine": ENGINE, "launch_timeout_s": -1}, "launch_timeout_s must be a finite number above 0"),
    (RefitConfig, {"stage_timeout_s": 0}, "stage_timeout_s must be a finite number above 0"),
    (RefitConfig, {"commit_timeout_s": None}, "commit_timeout_s must be a finite number above 0, got None"),
    (RefitConfig, {"double_buffer": "auto"}, "double_buffer must be True, False or None, got 'auto'"),
    (RefitConfig, {"keep_versions": 0}, "keep_versions must be an integer of at least 1"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED)
def test_a_setting_out_of_range_is_refused_with_its_name(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


@pytest.mark.parametrize("kind", [EngineConfig, ServiceConfig, RefitConfig])
def test_an_unknown_setting_is_refused(kind):
    with pytest.raises(TypeError, match="num_replica"):
        kind(num_replica=2)


def test_a_config_that_is_replaced_is_checked_again():
    with pytest.raises(ConfigError, match="num_replicas"):
        dataclasses.replace(ServiceConfig(engine=ENGINE), num_replicas=-1)


def test_the_workers_of_a_replica_are_the_product_of_its_parallel_sizes():
    engine = EngineConfig(model="m", tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=5)
    assert engine.num_workers == 30


def test_a_replica_has_ten_minutes_to_start_unless_the_variable_says_otherwise(monkeypatch):
    monkeypatch.delenv("RL_VLLM_TIMEOUT_SECONDS", raising=False)
    assert config.start_timeout_s() == 600.0
    monkeypatch.setenv("RL_VLLM_TIMEOUT_SECONDS", "12.5")
    assert config.start_timeout_s() == 12.5


@pytest.mark.parametrize("text", ["", "soon", "0", "-3", "nan", "inf"])
def test_a_start_timeout_that_is_no_number_of_seconds_is_refused(monkeypatch, text):
    monkeypatch.setenv("RL_VLLM_TIMEOUT_SECONDS", text)
    with pytest.raises(ConfigError, match="RL_VLLM_TIMEOUT_SECONDS"):
        config.start_timeout_s()


def test_the_cache_is_in_the_home_folder_unless_the_variable_says_otherwise(monkeypatch):
    monkeypatch.delenv("RL_VLLM_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert config.cache_dir() == Path("/home/somebody/.cache/rl_vllm")
    monkeypatch.setenv("RL_VLLM_CACHE", "~/elsewhere")
    assert config.cache_dir() == Path("/home/somebody/elsewhere")


def test_a_path_is_a_model_and_the_home_folder_is_resolved():
    assert EngineConfig(model=Path("some/model")).model == "some/model"
    assert EngineConfig(model="~/model").model == str(Path.home() / "model")
