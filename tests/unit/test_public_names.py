"""``rl_vllm`` offers its public names without importing what is behind them."""

import ast
from pathlib import Path

import pytest

import rl_vllm
from rl_vllm.types import SamplingConfig


def test_a_name_is_the_object_of_its_home_module():
    assert rl_vllm.SamplingConfig is SamplingConfig


def test_type_checkers_and_the_interpreter_find_each_name_in_the_same_module():
    tree = ast.parse(Path(rl_vllm.__file__).read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    seen_by_type_checkers = {
        alias.name: statement.module
        for statement in guarded.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen_by_type_checkers == rl_vllm._HOMES
    assert set(rl_vllm.__all__) == {*seen_by_type_checkers, "__version__"}


def test_an_unknown_name_is_the_usual_attribute_error():
    with pytest.raises(AttributeError, match="module 'rl_vllm' has no attribute 'VLLMPolice'"):
        _ = rl_vllm.VLLMPolice
    with pytest.raises(ImportError, match="cannot import name 'VLLMPolice'"):
        from rl_vllm import VLLMPolice  # noqa: F401


def test_completion_in_an_interactive_session_offers_the_public_names():
    assert {"AsyncVLLM", "VLLMPolicy", "make_async_vllm_engine", "__version__"} <= set(dir(rl_vllm))
