"""Services and policies that are pickled: themselves at home, and asked from elsewhere."""

from __future__ import annotations

import asyncio
import copy
import pickle
import socket
import subprocess
import sys
import threading
import time
from contextlib import aclosing
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens

from rl_vllm import AsyncVLLM, VLLMPolicy
from rl_vllm.config import ServiceConfig
from rl_vllm.errors import (
    BadPromptError,
    ConfigError,
    DeadlineError,
    GenerationError,
    RefitError,
    ServiceNotRunningError,
)
from rl_vllm.protocols import AsyncGenerationService
from rl_vllm.service import front_door
from rl_vllm.service.front_door import attach
from rl_vllm.service.remote import RemoteService
from rl_vllm.testing import FakeExecutor, Gate
from rl_vllm.types import BadPrompt, CompletionBatch, InFlight, KVCache
from tests.unit.processes import ROOT

from .conftest import TWO_TOKENS, answering, engines, first_tokens, prompts, running, service_config, update
from .fleet import until

EVENTUALLY_S = 60.0


def from_elsewhere(service: AsyncVLLM) -> RemoteService:
    """As another process sees it, over a real connection."""
    return RemoteService(service.door.ticket(), attach)


def tokens_td(rows):
    return lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row))) for row in rows])


# At home


def test_at_home_a_pickled_service_is_itself_and_so_is_a_copy():
    with running(*engines(1), name="mine") as service:
        assert service.name == "mine"
        assert pickle.loads(pickle.dumps(service)) is service
        assert copy.deepcopy(service) is service
        policy = VLLMPolicy(service)
        assert pickle.loads(pickle.dumps(policy)).service is service
        assert copy.deepcopy(policy).service is service


def test_only_a_running_service_can_be_pickled():
    service = AsyncVLLM(service_config(1), executor=FakeExecutor(engines(1)))
    with pytest.raises(ServiceNotRunningError, match=r"pickling it needs a running service.*not launched"):
        pickle.dumps(service)
    with service:
        ticket = pickle.dumps(service)
    with pytest.raises(ServiceNotRunningError, match="shut down"):
        pickle.dumps(service)
    assert pickle.loads(ticket) is not None


def test_names_are_random_or_given_once():
    with running(*engines(1)) as one, running(*engines(1)) as other:
        assert one.name != other.name
    with running(*engines(1), name="mine") as one, running(*engines(1), name="mine") as other:
        pickle.dumps(one)
        with pytest.raises(ConfigError, match="two services of this process are called 'mine'"):
            pickle.dumps(other)
    with pytest.raises(ConfigError, match="name must be"):
        ServiceConfig(engine=one.config.engine, name="")


# From elsewhere


def test_another_process_generates_with_a_pickled_policy():
    with running(*engines(2)) as service:
        policy = VLLMPolicy(service, num_samples=2, sampling={"max_tokens": 3, "ignore_eos": True})
        done = subprocess.run(
            [sys.executable, "-m", "tests.unit.service.guest"],
            input=pickle.dumps((policy, [[5], [6, 7]], service)),
            capture_output=True,
            cwd=ROOT,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        found = pickle.loads(done.stdout)
        assert found["kind"] == "RemoteService"
        assert found["whole"] == policy(tokens_td([[5], [6, 7]]))["tokens", "response"].tolist() == found["awaited"]
        assert found["streamed"] == [0, 1, 2, 3]
        assert (found["version"], found["replicas"], found["model"]) == (0, 2, service.model_info())
        # What comes home is at home.
        assert found["back"] is service


async def test_a_remote_service_keeps_the_protocol():
    with running(*engines(2)) as service:
        remote = from_elsewhere(service)
        assert isinstance(remote, AsyncGenerationService)
        batch, sampling = prompts([5], [], [6, 7]), [TWO_TOKENS, TWO_TOKENS, replace(TWO_TOKENS, n=2, logprobs=1)]
        expected = service.generate_batch(batch, sampling, on_bad_prompt=BadPrompt.MARK)
        whole = await asyncio.to_thread(remote.generate_batch, batch, sampling, on_bad_prompt=BadPrompt.MARK)
        awaited = await remote.agenerate_batch(batch, sampling, on_bad_prompt=BadPrompt.MARK)
        stream = remote.stream_batch(batch, sampling, on_bad_prompt=BadPrompt.MARK)
        streamed = CompletionBatch.concatenate([chunk async for chunk in stream]).sorted_rows()
        for found in (whole, awaited, streamed):
            assert found.tokens_T.tolist() == expected.tokens_T.tolist()
            assert found.failures == expected.failures
            assert found.top_logprobs == expected.top_logprobs
        assert remote.weight_receivers() == service.weight_receivers()
        assert remote.weight_specs() == service.weight_specs()
        remote.stage_weights(update(3), timeout_s=EVENTUALLY_S)
        reports = remote.commit_weights(update(3), in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE, timeout_s=60.0)
        assert (len(reports), remote.weight_version, service.weight_version) == (2, 3, 3)
        assert pickle.loads(pickle.dumps(remote)) is service
        assert copy.deepcopy(remote) is remote


def test_threads_have_connections_of_their_own():
    found: dict[int, list[int]] = {}
    with running(*engines(2)) as service:
        remote = from_elsewhere(service)

        def work(thread: int) -> None:
            rows = prompts([5 + thread])
            found[thread] = [first_tokens(remote.generate_batch(rows, TWO_TOKENS))[0] for _ in range(5)]

        threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(EVENTUALLY_S)
    assert found == {thread: [8 + thread] * 5 for thread in range(6)}


async def test_errors_travel_as_themselves_and_the_connection_lives_on():
    (one,) = engines(1)
    one.script = answering(failures={0: "no KV block"})
    with running(one) as service:
        remote = from_elsewhere(service)
        with pytest.raises(BadPromptError, match="prompt 1") as bad:
            remote.generate_batch(prompts([5], []), TWO_TOKENS)
        assert bad.value.row == 1
        with pytest.raises(GenerationError, match="no KV block"):
            remote.generate_batch(prompts([5]), TWO_TOKENS)
        with pytest.raises(RefitError, match="version 0"):
            remote.stage_weights(update(0), timeout_s=5.0)
        with pytest.raises(BadPromptError):
            await anext(remote.stream_batch(prompts([]), TWO_TOKENS))
        assert remote.num_replicas == 1
        with pytest.raises(ConfigError, match="'shutdown' is not for other processes"):
            remote._ask("shutdown")
        one.script = replace(one.script, gate=lambda _request: Gate())
        with pytest.raises(DeadlineError, match=r"0\.05 s waiting for 1 prompts"):
            remote.generate_batch(prompts([5]), TWO_TOKENS, timeout_s=0.05)


@pytest.mark.parametrize("how", ["close", "cancel", "awaited"])
async def test_a_reader_elsewhere_that_goes_away_aborts_what_is_unfinished(how):
    (one,) = engines(1)
    gates = [Gate(), Gate(is_open=how != "awaited"), Gate()]
    one.script = replace(one.script, gate=lambda request: gates[request.row])
    with running(one) as service:
        remote = from_elsewhere(service)
        if how == "awaited":
            task = asyncio.create_task(remote.agenerate_batch(prompts([5], [6], [7]), TWO_TOKENS))
            await asyncio.to_thread(gates[2].wait_until_held)
        else:
            stream = remote.stream_batch(prompts([5], [6], [7]), TWO_TOKENS)
            assert (await anext(stream)).numbers_N.tolist() == [1]
            task = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if how == "close":
            await stream.aclose()
        await until(lambda: one.aborted == ([0, 1, 2] if how == "awaited" else [0, 2]))


async def test_a_slow_reader_elsewhere_gets_everything():
    rows = [[3 + row % 60] for row in range(100)]
    with running(*engines(1)) as service:
        async with aclosing(from_elsewhere(service).stream_batch(prompts(*rows), TWO_TOKENS)) as stream:
            chunks = [await anext(stream)]
            await asyncio.sleep(0.2)
            chunks += [chunk async for chunk in stream]
    assert sorted(CompletionBatch.concatenate(chunks).numbers_N.tolist()) == list(range(100))


async def test_after_the_shutdown_everybody_is_told():
    (one,) = engines(1)
    gate = Gate()
    one.script = replace(one.script, gate=lambda _request: gate)
    with running(one) as service:
        remote = from_elsewhere(service)
        assert remote.num_replicas == 1
        waiting = asyncio.create_task(remote.agenerate_batch(prompts([5]), TWO_TOKENS))
        await asyncio.to_thread(gate.wait_until_held)
        await service.ashutdown()
        with pytest.raises(ServiceNotRunningError, match="shut down"):
            await waiting
        for _ in range(2):
            with pytest.raises(ServiceNotRunningError, match=r"model_info\(\) needs a running service.*gone"):
                remote.model_info()
        with pytest.raises(ServiceNotRunningError, match="gone"):
            await anext(remote.stream_batch(prompts([5]), TWO_TOKENS))
        assert not [thread for thread in threading.enumerate() if thread.name == "rl_vllm-guest"]


async def test_without_the_key_nobody_is_answered(caplog):
    with running(*engines(1)) as service:
        ticket = service.door.ticket()
        with pytest.raises(ServiceNotRunningError, match="does not answer"):
            RemoteService(replace(ticket, authkey=bytes(32)), attach).model_info()
        await until(lambda: "without its key" in caplog.text)
        assert repr(ticket.authkey) not in repr(ticket)
        # Somebody who says nothing holds up nobody else.
        with socket.create_connection((ticket.host, ticket.port)):
            assert from_elsewhere(service).num_replicas == 1
        assert not front_door._doors[service.name].is_closed


def test_an_owner_that_does_not_answer_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr("rl_vllm.service.remote.HANDSHAKE_TIMEOUT_S", 0.1)
    with running(*engines(1)) as service, socket.create_server(("127.0.0.1", 0)) as silent:
        ticket = replace(service.door.ticket(), host="127.0.0.1", port=silent.getsockname()[1])
        started = time.monotonic()
        with pytest.raises(ServiceNotRunningError, match=r"no word within 0\.1 s"):
            RemoteService(ticket, attach).model_info()
        assert time.monotonic() - started < 10


async def test_a_deadline_of_the_wait_itself_is_told_from_a_broken_connection(monkeypatch):
    monkeypatch.setattr("rl_vllm.service.remote._GRACE_S", -0.05)
    (one,) = engines(1)
    one.script = replace(one.script, gate=lambda _request: Gate())
    with running(one) as service:
        remote = from_elsewhere(service)
        with pytest.raises(DeadlineError, match=r"generate_batch\(\) of service"):
            await remote.agenerate_batch(prompts([5]), TWO_TOKENS, timeout_s=0.2)
        with pytest.raises(DeadlineError, match=r"generate_batch\(\) of service"):
            await asyncio.to_thread(remote.generate_batch, prompts([5]), TWO_TOKENS, timeout_s=0.2)
        await until(lambda: len(one.aborted) == 2)
