"""Replicas with prefix caches, simulated step by step, under one router after another.

A replica works as vLLM does: continuous batching, blocks of KV that are shared by equal prefixes and dropped least
recently used first, prompts computed in chunks beside the running responses. One step takes ``STEP_S``, ``SEQUENCE_S``
for each running response and ``PREFILL_S`` for each prompt token that is not in the cache: about an 8B model on a GPU.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from rl_vllm.config import RoutingConfig
from rl_vllm.service.router import Router, Snapshot
from rl_vllm.types import PromptBatch

BLOCK_SIZE = 16
NUM_REPLICAS = 8
# KV of 24,576 tokens per replica: a fifth to a third of what a workload touches in all.
CAPACITY_BLOCKS = 1536
MAX_RUNNING = 64
CHUNK_TOKENS = 2048
STEP_S = 0.008
SEQUENCE_S = 0.00005
PREFILL_S = 0.00005
# How old a sampled KV use may be.
SAMPLE_PERIOD_S = 0.5
# What the router is told of a response's length; the simulated ones end earlier, at random.
MAX_TOKENS = 256


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt on its way: its ids, its response's ids, and the chat it belongs to."""

    prompt: np.ndarray
    response: np.ndarray
    session: str | None = None

    @cached_property
    def blocks(self) -> list[int]:
        """One number per full block of prompt and response, which stands for all ids up to the block's end."""
        tokens = np.concatenate([self.prompt, self.response])
        data = tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE].astype(np.int32).tobytes()
        size = 4 * BLOCK_SIZE
        each = (hash(data[at : at + size]) for at in range(0, len(data), size))
        return list(itertools.accumulate(each, lambda before, block: hash((before, block))))


class Workload(Protocol):
    """Batches of requests; the next ones may depend on what has finished."""

    def first(self) -> list[tuple[float, list[Request]]]:
        """Batches that come by themselves, with their times in seconds."""
        ...

    def after(self, request: Request, now_s: float) -> list[tuple[float, list[Request]]]:
        """Batches that come because a request has finished."""
        ...


Choose = Callable[[list[Request], list["Replica"], float], Sequence[int]]


@dataclass(eq=False)
class _Running:
    request: Request
    blocks: list[int]
    to_prefill: int
    to_decode: int


@dataclass(eq=False)
class Replica:
    """One engine; times are in seconds."""

    index: int
    waiting: deque[Request] = field(default_factory=deque)
    running: list[_Running] = field(default_factory=list)
    users: dict[int, int] = field(default_factory=dict)
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    busy_s: float = 0.0
    is_stepping: bool = False
    outstanding_tokens: int = 0
    sampled: tuple[float, float] = (-1.0, 0.0)

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def usage(self) -> float:
        """Fraction of blocks that running requests hold."""
        return (len(self.users) - len(self.idle)) / CAPACITY_BLOCKS

    def step(self) -> tuple[float, list[Request]]:
        """Run one step; returns what it took and what finished."""
        while self.waiting and len(self.running) < MAX_RUNNING and self._admit(self.waiting[0]):
            self.waiting.popleft()
        budget = CHUNK_TOKENS
        prefilled = decoding = 0
        finished = []
        for one in self.running:
            if one.to_prefill:
                now = min(one.to_prefill, budget)
                one.to_prefill -= now
                budget -= now
                prefilled += now
                if one.to_prefill:
                    continue
            decoding += 1
            one.to_decode -= 1
            if one.to_decode == 0:
                finished.append(one)
        for one in finished:
            self.running.remove(one)
            self._release(one.blocks)
            self.outstanding_tokens -= cost(one.request)
        took_s = STEP_S + decoding * SEQUENCE_S + prefilled * PREFILL_S
        self.busy_s += took_s
        return took_s, [one.request for one in finished]

    def _admit(self, request: Request) -> bool:
        """Give a request its blocks, for its whole response too; False when not enough are free."""
        blocks = request.blocks
        # The last token of a prompt is always computed: its logits are wanted.
        sharable = (len(request.prompt) - 1) // BLOCK_SIZE
        hits = sum(1 for _ in itertools.takewhile(self.users.__contains__, blocks[:sharable]))
        held = [block for block in blocks[:hits] if block in self.idle]
        missing = [block for block in blocks[hits:] if block not in self.users]
        free = CAPACITY_BLOCKS - len(self.users) + len(self.idle) - len(held)
        if len(missing) > free:
            return False
        for block in held:
            del self.idle[block]
        for block in blocks[hits:]:
            self.idle.pop(block, None)
        while len(self.users) + len(missing) > CAPACITY_BLOCKS:
            evicted, _ = self.idle.popitem(last=False)
            del self.users[evicted]
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + 1
        self.prompt_tokens += len(request.prompt)
        self.hit_tokens += hits * BLOCK_SIZE
        self.running.append(
            _Running(request, blocks, len(request.prompt) - hits * BLOCK_SIZE, max(1, len(request.response)))
        )
        return True

    def _release(self, blocks: list[int]) -> None:
        # The end of a prompt is dropped before its start, which more prompts may share.
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.idle[block] = None


def cost(request: Request) -> int:
    return len(request.prompt) + MAX_TOKENS


@dataclass(frozen=True)
class Outcome:
    """What a workload came to.

    Attributes:
        hit_rate: Prompt tokens found in a cache, of all.
        imbalance: Seconds of work of the busiest replica over the mean.
        makespan_s: Seconds until the last request had finished.
    """

    hit_rate: float
    imbalance: float
    makespan_s: float


def simulate(workload: Workload, choose: Choose, num_replicas: int = NUM_REPLICAS) -> Outcome:
    """Run a workload to its end, every batch assigned by ``choose`` when it comes."""
    replicas = [Replica(index) for index in range(num_replicas)]
    order = itertools.count()
    events: list[tuple[float, int, list[Request] | Replica]] = []

    def post(batches: list[tuple[float, list[Request]]]) -> None:
        for at_s, batch in batches:
            heapq.heappush(events, (at_s, next(order), batch))

    def wake(replica: Replica, now_s: float) -> None:
        if not replica.is_stepping and replica.unfinished:
            replica.is_stepping = True
            heapq.heappush(events, (now_s, next(order), replica))

    post(workload.first())
    now_s = 0.0
    while events:
        now_s, _, event = heapq.heappop(events)
        if isinstance(event, Replica):
            took_s, finished = event.step()
            event.is_stepping = False
            for request in finished:
                post(workload.after(request, now_s + took_s))
            wake(event, now_s + took_s)
            continue
        for request, index in zip(event, choose(event, replicas, now_s), strict=True):
            replicas[index].waiting.append(request)
            replicas[index].outstanding_tokens += cost(request)
            wake(replicas[index], now_s)
    busy = [replica.busy_s for replica in replicas]
    return Outcome(
        hit_rate=sum(replica.hit_tokens for replica in replicas) / sum(replica.prompt_tokens for replica in replicas),
        imbalance=max(busy) / (sum(busy) / len(busy)),
        makespan_s=now_s,
    )


def ours(*strategy: str) -> Choose:
    """Our router, given what the driver knows: what it has sent, and KV use as of the last sample."""
    router = Router(RoutingConfig(strategy=strategy), block_size=BLOCK_SIZE)

    def choose(batch: list[Request], replicas: list[Replica], now_s: float) -> Sequence[int]:
        for replica in replicas:
            if now_s - replica.sampled[0] >= SAMPLE_PERIOD_S or replica.sampled[0] < 0:
                replica.sampled = (now_s, replica.usage())
        snapshot = Snapshot(
            indices_R=np.arange(len(replicas)),
            requests_R=np.array([replica.unfinished for replica in replicas], np.int64),
            tokens_R=np.array([replica.outstanding_tokens for replica in replicas], np.int64),
            kv_usage_R=np.array([replica.sampled[1] for replica in replicas]),
        )
        flat = PromptBatch.from_rows([request.prompt for request in batch])
        prompts = PromptBatch(flat.tokens_T, flat.offsets_B1, session_ids=tuple(request.session for request in batch))
        costs_B = np.array([cost(request) for request in batch], np.int64)
        return router.assign(prompts, range(len(batch)), costs_B, snapshot).tolist()

    return choose


def torchrl(*strategy: str) -> Choose:
    """TorchRL's balancer over a service, as its ``AsyncVLLM`` uses it: one prompt after the other.

    The service here answers its two questions with the truth, at once.
    """
    import logging

    from torchrl._utils import logger
    from torchrl.modules.llm.backends.vllm.vllm_async import LoadBalancer

    # It warns for each prompt that it cannot read the loads.
    logger.setLevel(logging.ERROR)

    class Service:
        def __init__(self) -> None:
            self.actors: list[Replica] = []
            self.sent: list[int] = []

        def get_num_unfinished_requests(self) -> list[int]:
            return [replica.unfinished + sent for replica, sent in zip(self.actors, self.sent, strict=True)]

        def get_cache_usage(self) -> list[float]:
            return [replica.usage() for replica in self.actors]

    service = Service()
    balancers: list[LoadBalancer] = []

    def choose(batch: list[Request], replicas: list[Replica], _now_s: float) -> Sequence[int]:
        service.actors = replicas
        service.sent = [0] * len(replicas)
        if not balancers:
            balancers.append(LoadBalancer(service, list(strategy)))
        chosen = []
        for request in batch:
            index = balancers[0].select_actor(prompt=request.prompt.tolist())
            service.sent[index] += 1
            chosen.append(index)
        return chosen

    return choose


@dataclass
class Steps:
    """Training steps: a batch comes when all of the one before has finished."""

    batches: list[list[Request]]
    _done: int = 0
    _next: int = 1

    def first(self) -> list[tuple[float, list[Request]]]:
        return [(0.0, self.batches[0])]

    def after(self, _request: Request, now_s: float) -> list[tuple[float, list[Request]]]:
        self._done += 1
        if self._done < len(self.batches[self._next - 1]) or self._next == len(self.batches):
            return []
        self._done = 0
        self._next += 1
        return [(now_s, self.batches[self._next - 1])]


class Chats:
    """Chats of several turns: each prompt is the whole chat so far, sent when its user has read the last answer."""

    def __init__(self, rng: np.random.Generator, *, num_chats: int, num_turns: int, template: np.ndarray) -> None:
        self._rng = rng
        self._turns_left = {f"chat-{chat}": num_turns - 1 for chat in range(num_chats)}
        self._starts = [(float(rng.uniform(0, 2)), [self._turn(template, name)]) for name in self._turns_left]

    def first(self) -> list[tuple[float, list[Request]]]:
        return self._starts

    def after(self, request: Request, now_s: float) -> list[tuple[float, list[Request]]]:
        assert request.session is not None
        if self._turns_left[request.session] == 0:
            return []
        self._turns_left[request.session] -= 1
        chat = np.concatenate([request.prompt, request.response])
        return [(now_s + float(self._rng.exponential(0.5)), [self._turn(chat, request.session)])]

    def _turn(self, chat: np.ndarray, name: str) -> Request:
        question = ids(self._rng, 60, 200)
        return Request(np.concatenate([chat, question]), ids(self._rng, 32, MAX_TOKENS), name)


def ids(rng: np.random.Generator, low: int, high: int) -> np.ndarray:
    """Random ids, their number in ``[low, high)``."""
    return rng.integers(0, 150_000, int(rng.integers(low, high)))


def workloads(seed: int) -> dict[str, Callable[[], Workload]]:
    """The workloads, each as a call that builds it anew."""

    def rng() -> np.random.Generator:
        random.seed(seed)
        return np.random.default_rng(seed)

    # Every prompt of a model starts with the ids of its chat template.
    template = np.arange(1000, 1024)

    def groups() -> Workload:
        source = rng()
        prompts = [np.concatenate([template, ids(source, 200, 500)]) for _ in range(128)]
        batches = []
        # Every prompt comes twice: in the second pass over the data the groups are sampled again.
        for _ in range(2):
            order = source.permutation(len(prompts)).reshape(4, 32)
            batches += [
                [Request(prompts[which], ids(source, 32, MAX_TOKENS)) for which in step for _ in range(8)]
                for step in order
            ]
        return Steps(batches)

    def chats() -> Workload:
        return Chats(rng(), num_chats=128, num_turns=6, template=template)

    def system_prompt(samples: int) -> Callable[[], Workload]:
        def build() -> Workload:
            source = rng()
            system = np.concatenate([template, ids(source, 512, 513)])
            questions = [np.concatenate([system, ids(source, 32, 160)]) for _ in range(1024 // samples)]
            rows = [questions[which] for which in source.permutation(np.repeat(np.arange(len(questions)), samples))]
            requests = [Request(row, ids(source, 32, MAX_TOKENS)) for row in rows]
            return Steps([requests[at : at + 128] for at in range(0, len(requests), 128)])

        return build

    return {
        "GRPO groups": groups,
        "multi-turn chats": chats,
        "one system prompt": system_prompt(4),
        "one system prompt, no question twice": system_prompt(1),
    }


def routers() -> Iterator[tuple[str, Callable[[], Choose]]]:
    """Every strategy of ours and of TorchRL's, the default first."""
    for name, make in (("rl_vllm", ours), ("TorchRL", torchrl)):
        for strategy in (("prefix-aware", "requests"), ("requests",), ("kv-cache",), ("round-robin",)):
            yield f"{name} {' + '.join(strategy)}", lambda make=make, strategy=strategy: make(*strategy)
