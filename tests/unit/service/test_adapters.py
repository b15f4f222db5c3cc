"""LoRA adapters: on every replica or on none, and in every request that names one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest

from rl_vllm.config import HealthConfig
from rl_vllm.errors import ConfigError, ReplicaCallError, UnsupportedByEngineError
from rl_vllm.testing import FakeEngine, FakeEngineScript
from rl_vllm.types import LoRAAdapter

from .conftest import TWO_TOKENS, engines, first_tokens, prompts, running

POET = LoRAAdapter(name="poet", number=1, path="/adapters/poet")
EVENTUALLY_S = 60.0


@dataclass
class LoRARequest:
    """As vLLM's."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class FullEngine(FakeEngine):
    async def remove_lora(self, name: str) -> bool:
        raise RuntimeError("the worker is busy")

    async def pin_lora(self, name: str) -> None:
        raise RuntimeError("no slot is free")


def test_an_adapter_is_loaded_on_every_replica_under_one_number():
    fakes = engines(2)
    with running(*fakes) as service:
        assert service.add_lora("poet", "/adapters/poet") == POET
        assert service.add_lora(LoRARequest("judge", 7, "/adapters/judge")).number == 7
        third = service.add_lora("cook", "/adapters/cook")
        assert third.number not in (1, 7)
        assert [adapter.name for adapter in service.list_loras()] == ["poet", "cook", "judge"]
        assert service.list_loras(actor_index=1) == service.list_loras()
    assert fakes[0].adapters == fakes[1].adapters
    assert fakes[0].adapters["poet"] == POET


def test_adding_the_same_adapter_again_changes_nothing():
    with running(*engines(1)) as service:
        assert service.add_lora("poet", "/adapters/poet") == POET
        assert service.add_lora("poet", "/adapters/poet") == POET
        assert service.add_lora(LoRARequest("poet", 1, "/adapters/poet")) == POET
        assert service.list_loras() == (POET,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("poet", "/elsewhere"), "adapter 'poet' is number 1 from /adapters/poet: remove_lora"),
        ((LoRARequest("poet", 2, "/adapters/poet"),), "adapter 'poet' is number 1"),
        ((LoRARequest("judge", 1, "/adapters/judge"),), "number 1 is adapter 'poet' already: give 'judge' another one"),
        (("judge",), "adapter 'judge' needs a path"),
        ((POET, "/adapters/poet"), "the path is in LoRAAdapter already"),
        (("", "/adapters/x"), "needs a name and a path"),
        ((LoRARequest("judge", 2, ""),), "needs a name and a path"),
        ((5,), "an adapter is a name, a LoRARequest or a LoRAAdapter, got 5"),
    ],
    ids=str,
)
def test_what_cannot_be_added_says_why(given, message):
    with running(*engines(1)) as service:
        service.add_lora("poet", "/adapters/poet")
        with pytest.raises(ConfigError, match=message):
            service.add_lora(*given)
        assert service.list_loras() == (POET,)


def test_an_adapter_that_fails_on_one_replica_is_undone_on_the_others_and_the_error_names_it():
    well = FakeEngine(0)
    broken = FakeEngine(1, script=FakeEngineScript(adapter_error=ConfigError("no such folder")))
    with running(well, broken) as service:
        with pytest.raises(
            ReplicaCallError, match=r"add_lora.. failed on 1 replicas: replica 1: no such folder"
        ) as raised:
            service.add_lora("poet", "/adapters/poet")
        assert raised.value.failures == ((1, "no such folder"),)
        assert well.adapters == {}
        assert service.list_loras() == ()
        broken.script = FakeEngineScript()
        assert service.add_lora("poet", "/adapters/poet").name == "poet"


@pytest.mark.parametrize("error", [ConfigError("rank 64 is above max_lora_rank"), UnsupportedByEngineError("no LoRA")])
def test_what_no_replica_can_load_raises_the_engines_own_error(error):
    with running(*engines(2, adapter_error=error)) as service:
        with pytest.raises(type(error), match=str(error)):
            service.add_lora("poet", "/adapters/poet")
        assert service.list_loras() == ()


def test_an_adapter_is_removed_by_name_number_or_request():
    (one,) = engines(1)
    with running(one) as service:
        for given in ("poet", 1, POET, LoRARequest("poet", 1, "/adapters/poet")):
            service.add_lora(POET)
            assert service.remove_lora(given)
            assert one.adapters == {}
            assert not service.remove_lora(given)


def test_an_adapter_that_could_not_be_removed_everywhere_is_named_by_no_request_any_more():
    with running(FakeEngine(0), FullEngine(1)) as service:
        service.add_lora(POET)
        with pytest.raises(ReplicaCallError, match="replica 1: the worker is busy"):
            service.remove_lora("poet")
        with pytest.raises(ConfigError, match="no adapter is called 'poet'"):
            service.generate([5], TWO_TOKENS, lora_request="poet", use_tqdm=False)


def test_a_removal_that_failed_can_be_tried_again():
    class BusyOnce(FakeEngine):
        is_busy = True

        async def remove_lora(self, name: str) -> bool:
            if self.is_busy:
                raise ConfigError(f"adapter {name!r} is used by 1 unfinished requests")
            return await super().remove_lora(name)

    busy = BusyOnce(1)
    with running(FakeEngine(0), busy) as service:
        service.add_lora(POET)
        with pytest.raises(ReplicaCallError, match="used by 1 unfinished requests"):
            service.remove_lora("poet")
        assert service.list_loras() == ()
        with pytest.raises(ConfigError, match="remove_lora"):
            service.add_lora("poet", "/elsewhere")
        busy.is_busy = False
        assert service.remove_lora(1)
        assert busy.adapters == {}
        assert not service.remove_lora("poet")


def test_pinning_needs_an_adapter_and_every_replica():
    with running(FakeEngine(0), FullEngine(1)) as service:
        with pytest.raises(ConfigError, match="no adapter is called 'poet'"):
            service.pin_lora("poet")
        service.add_lora(POET)
        with pytest.raises(ReplicaCallError, match=r"pin_lora.. failed on 1 replicas: replica 1: no slot is free"):
            service.pin_lora("poet")
    with running(*engines(2)) as service:
        service.add_lora(POET)
        assert service.pin_lora(1) == POET


def test_each_prompt_may_name_an_adapter():
    # The fake adds 17 for each letter of the adapter's name: 3 + 5, and 3 + 5 + 4 * 17 - 61.
    (one,) = engines(1)
    with running(one) as service:
        service.add_lora(POET)
        outputs = service.generate([[5], [5]], TWO_TOKENS, lora_request=["poet", None], use_tqdm=False)
        assert [output.outputs[0].token_ids[0] for output in outputs] == [15, 8]
        assert [output.lora_request for output in outputs] == ["poet", None]
        both = service.generate([[5], [5]], TWO_TOKENS, lora_request=POET, use_tqdm=False)
        assert [output.outputs[0].token_ids[0] for output in both] == [15, 15]
        stream = list(service.stream_generate([5], TWO_TOKENS, lora_request="poet"))
        assert stream[0].outputs[0].token_ids == [15]
        batch = replace(prompts([5], [5]), loras=(None, "poet"))
        assert first_tokens(service.generate_batch(batch, TWO_TOKENS)) == [8, 15]
    assert one.batches[0].prompts.loras == ("poet", None)


def test_a_request_that_is_not_loaded_yet_is_added_first():
    fakes = engines(2)
    with running(*fakes) as service:
        request = LoRARequest("poet", 3, "/adapters/poet")
        output = service.generate([5], TWO_TOKENS, lora_request=request, use_tqdm=False)
        assert output.outputs[0].token_ids[0] == 15
        assert [fake.adapters["poet"].number for fake in fakes] == [3, 3]


@pytest.mark.parametrize(
    ("lora_request", "message"),
    [
        ("peot", "no adapter is called 'peot': did you mean poet"),
        ("x", r"no adapter is called 'x': there are \['poet'\]"),
        (["poet"], "1 lora_request for 2 prompts"),
    ],
    ids=str,
)
def test_an_adapter_that_is_not_there_stops_the_call_before_anything_is_sent(lora_request, message):
    (one,) = engines(1)
    with running(one) as service:
        service.add_lora(POET)
        with pytest.raises(ConfigError, match=message):
            service.generate([[5], [6]], TWO_TOKENS, lora_request=lora_request, use_tqdm=False)
    assert one.batches == []


def test_a_replica_that_joins_or_is_started_again_has_every_adapter():
    one, two = engines(2)
    with running(one, two, health=HealthConfig(heartbeat_period_s=0.02, restart_pause_s=0.001)) as service:
        service.add_lora(POET)
        service.pin_lora("poet")
        (index,) = service.add_replicas(1)
        assert service.list_loras(actor_index=index) == (POET,)
        two.kill("out of memory")
        deadline = time.monotonic() + EVENTUALLY_S
        while not (service.stats().counters.restarts and service.replica(1).is_running):
            assert time.monotonic() < deadline, "it was not started again"
            time.sleep(0.005)
        assert service.list_loras(actor_index=1) == (POET,)
