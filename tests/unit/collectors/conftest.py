import asyncio
import threading
from dataclasses import replace

import pytest

from rl_vllm import VLLMPolicy
from rl_vllm.collectors import AsyncRolloutCollector, CollectorConfig
from rl_vllm.envs import PromptSource, RolloutTask
from rl_vllm.testing import FakeScript, FakeService
from rl_vllm.testing.answers import FAKE_MODEL
from rl_vllm.testing.models import TINY_VOCAB_SIZE, tiny_tokenizer


class AwaitedService(FakeService):
    """A fake whose answers wait for ``before(prompt text)``, on the collector's loop."""

    def __init__(self, tokenizer, **settings):
        info = replace(
            FAKE_MODEL, vocab_size=TINY_VOCAB_SIZE, max_model_len=512, eos_token_ids=(tokenizer.eos_token_id,),
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        super().__init__(info=info, **settings)
        self.tokenizer = tokenizer
        self.before = None
        self.num_running = 0
        self.most_running = 0

    async def agenerate_batch(self, prompts, sampling, **options):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if self.before is not None:
                await self.before(self.tokenizer.decode(prompts.row(0).tolist()))
            return await super().agenerate_batch(prompts, sampling, **options)
        finally:
            self.num_running -= 1

    def serve_version(self, version):
        self._weights.version = version


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def service(tokenizer):
    return AwaitedService(tokenizer)


@pytest.fixture
def collect(service, tokenizer):
    """Builds collectors over ``service``, and shuts them down."""
    built = []

    def build(prompts, reward=lambda response, entry: float(len(response)), *, interaction=None, **settings):
        own = {name: settings.pop(name) for name in ("replay_buffer", "postproc", "weight_sync") if name in settings}
        policy = VLLMPolicy(service, tokenizer=tokenizer, sampling=settings.pop("sampling", {"max_tokens": 8}))
        task = RolloutTask(prompts, reward, policy=policy, interaction=interaction)
        config = CollectorConfig(**({"group_size": 2, "groups_per_batch": 2, "no_progress_s": 20.0} | settings))
        built.append(AsyncRolloutCollector(task, policy, config=config, **own))
        return built[-1]

    before = set(threading.enumerate())
    yield build
    for collector in built:
        collector.shutdown()
    left = {thread.name for thread in set(threading.enumerate()) - before if thread.name == "rl_vllm-collector"}
    assert not left


def prompts(count, **settings):
    return PromptSource([f"q{index}" for index in range(count)], **settings)


def groups_of(batch):
    return list(dict.fromkeys(batch["group_id"].tolist()))


class Gates:
    """An ``asyncio.Event`` per name, opened from the test's thread."""

    def __init__(self):
        self._events = {}
        self._loop = None

    async def wait(self, name):
        self._loop = asyncio.get_running_loop()
        await self._events.setdefault(name, asyncio.Event()).wait()

    def open(self, name):
        self._loop.call_soon_threadsafe(lambda: self._events.setdefault(name, asyncio.Event()).set())


__all__ = ["AwaitedService", "FakeScript", "Gates", "groups_of", "prompts"]
