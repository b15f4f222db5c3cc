"""An engine's variables are the program's own for as long as it starts, and not a moment longer."""

import os
import threading

import pytest

from rl_vllm.engine.starting import environment

NAME = "RL_VLLM_TEST_VARIABLE"


def test_variables_are_set_and_unset_and_back_as_they_were(monkeypatch):
    monkeypatch.setenv(NAME, "mine")
    monkeypatch.delenv(f"{NAME}_2", raising=False)
    before = dict(os.environ)
    with environment(**{NAME: None, f"{NAME}_2": "theirs"}):
        assert NAME not in os.environ
        assert os.environ[f"{NAME}_2"] == "theirs"
        # As vLLM does while it loads.
        os.environ[f"{NAME}_3"] = "added"
        os.environ.pop("PATH")
    assert dict(os.environ) == before


def test_they_are_back_after_an_error_too():
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="no start"), environment(**{NAME: "x"}):
        raise RuntimeError("no start")
    assert dict(os.environ) == before


def test_two_engines_do_not_see_each_others_variables():
    seen = []
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with environment(**{NAME: "2"}):
            seen.append(os.environ[NAME])

    with environment(**{NAME: "1"}):
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait(60)
        seen.append(os.environ[NAME])
    thread.join(60)
    assert seen == ["1", "2"]
    assert NAME not in os.environ
