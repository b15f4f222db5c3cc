"""A collector that never waits for the slowest rollout: groups are delivered as they finish."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, Self

from tensordict import TensorDictBase, lazy_stack
from torchrl.data import ReplayBuffer

from rl_vllm.collectors.asking import Asker
from rl_vllm.collectors.config import CollectorConfig
from rl_vllm.collectors.delivery import Delivery, Parcel, PostProcess
from rl_vllm.collectors.groups import Group, GroupRunner
from rl_vllm.collectors.ledger import Ledger
from rl_vllm.collectors.pump import Pump
from rl_vllm.collectors.stats import CollectorStats
from rl_vllm.collectors.writer import BufferWriter
from rl_vllm.envs.background import Background
from rl_vllm.envs.rollout_task import RolloutTask
from rl_vllm.errors import BadInputError, ConfigError, NoProgressError
from rl_vllm.policy import VLLMPolicy
from rl_vllm.protocols import AsyncGenerationService
from rl_vllm.types import RefitReceipt
from rl_vllm.weights import VLLMWeightSyncScheme

_CALL_TIMEOUT_S = 30.0


class AsyncRolloutCollector(Iterator["TensorDictBase | None"]):
    """Keeps the replicas full and delivers whole groups, with a bound on how old their tokens are.

    An iterator::

        for batch in AsyncRolloutCollector(task, policy, config=CollectorConfig(groups_per_batch=8)):
            train(batch)

    A batch is a lazy stack of rows, group after group in the order in which they finished; their keys are those of
    ``rl_vllm.collectors.rows``. With a replay buffer each group is written as soon as it is finished, and a step of
    the iteration returns None when ``groups_per_batch`` more are in it. Rollouts go on while the caller trains, also
    through refits.

    A rollout that fails is made again with a fresh interaction, and after ``max_retries`` its group is dropped; a
    failure never becomes a reward.

    Args:
        task: What is asked, and how it goes on and is scored.
        policy: Whose service, sampling settings and time limit are used.
        config: None means the defaults.
        replay_buffer: Any of TorchRL's; its storage must take rows of different lengths (``LazyStackStorage``). Its
            transforms, for example ``MCAdvantage(grpo_size=..., prompt_key="group_id")``, see whole groups.
        postproc: From the rows of a group to what is delivered in their place; None rejects the group. It runs when the
            group is delivered: in the iterating thread, or in the one that writes into the buffer.
        weight_sync: What :meth:`update_policy_weights_` pushes with.

    Raises:
        ConfigError: Two settings contradict each other, or the service cannot be awaited.
    """

    def __init__(
        self,
        task: RolloutTask,
        policy: VLLMPolicy,
        *,
        config: CollectorConfig | None = None,
        replay_buffer: ReplayBuffer | None = None,
        postproc: PostProcess | None = None,
        weight_sync: VLLMWeightSyncScheme | None = None,
    ) -> None:
        self.task = task
        self.policy = policy
        self.config = config if config is not None else CollectorConfig()
        self.stats = CollectorStats()
        self._weight_sync = weight_sync
        service = policy.service
        if not isinstance(service, AsyncGenerationService):
            raise ConfigError(f"the collector awaits its service, and {type(service).__name__} has no agenerate_batch")
        seed = self.config.seed if self.config.seed is not None else policy.sampling.seed
        sampling = replace(policy.sampling, n=self.config.group_size)
        self._asker = Asker(
            service,
            sampling,
            timeout_s=policy.options.timeout_s,
            partial_rollouts=self.config.partial_rollouts,
            stats=self.stats,
        )
        self._runner = GroupRunner(
            task,
            self._asker,
            group_size=self.config.group_size,
            max_retries=self.config.max_retries,
            seed=seed,
            stats=self.stats,
        )
        self._delivery = Delivery(self.config, service, task.setup.renderer, self.stats, postproc)
        self._ledger = Ledger(task.source)
        self._buffer = replay_buffer
        self._background: Background | None = None
        self._pump: Pump | None = None
        self._writer: BufferWriter | None = None
        self._running: list[Future[None]] = []
        self._num_handed_over = 0
        self._closed = False
        # One step at a time, whoever asks for it.
        self._stepping = threading.Lock()
        policy.register_collector(self)

    @property
    def replay_buffer(self) -> ReplayBuffer | None:
        """Where groups are written, or None when iteration yields them."""
        return self._buffer

    def start(self) -> None:
        """Fill the replay buffer without being iterated over, until the prompts are exhausted or :meth:`shutdown`.

        Raises:
            ConfigError: There is no replay buffer, or the collector has been iterated over.
        """
        if self._buffer is None:
            raise ConfigError("start() fills a replay buffer: pass replay_buffer=, or iterate over the collector")
        if self._pump is not None:
            raise ConfigError("the collector has begun already: call start() before the first batch, and once")
        self._begin(frees_slots=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TensorDictBase | None:
        """The next batch; the last one may be smaller.

        Raises:
            StopIteration: The prompts are exhausted, or ``total_groups`` are delivered.
            NoProgressError: No group was accepted for ``no_progress_s``, or none of all prompts ever was.
            OverSamplingError: Too many groups were rejected.
            RewardError, BadInputError, ...: What nothing else would have escaped: see
                :data:`rl_vllm.collectors.groups.FATAL`, and what the source raises.
        """
        with self._stepping:
            return self._step()

    def _step(self) -> TensorDictBase | None:
        left = self._left()
        wanted = self.config.groups_per_batch if left is None else min(left, self.config.groups_per_batch)
        if not wanted:
            self.shutdown()
        if self._closed:
            raise StopIteration
        self._begin(frees_slots=False)
        taken = self._written(wanted) if self._writer is not None else self._batch(wanted)
        if not taken:
            self._raise_if_nothing_ever_came()
            self.shutdown()
            raise StopIteration
        assert self._pump is not None
        self._call(self._pump.batch_is_full())
        return taken[0]

    def update_policy_weights_(self, weights: Any = None) -> RefitReceipt:
        """Push weights to the service: the registered model's, or ``weights``; rollouts go on meanwhile.

        Raises:
            ConfigError: The collector has no ``weight_sync``.
            RefitError: As :meth:`rl_vllm.VLLMWeightSyncScheme.refit` says.
        """
        if self._weight_sync is None:
            raise ConfigError("the collector has no weight_sync: pass a VLLMWeightSyncScheme, or refit by yourself")
        return self._weight_sync.refit(weights)

    def state_dict(self) -> dict[str, Any]:
        """Where the prompts are, so that another collector goes on: none is repeated and none left out.

        A prompt counts as done when its group was delivered or dropped; of those in flight the rollouts are made again.
        """
        with self._pump.changed if self._pump is not None else nullcontext():
            # What is in the buffer is delivered, whether or not somebody has asked for it.
            num_waiting = 0 if self._writer is None else self._writer.num_waiting
            return {"ledger": self._ledger.state_dict(), "groups": self._num_handed_over + num_waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another collector over the same prompts.

        Raises:
            BadInputError: The state is not one of a collector, or this collector has begun.
        """
        missing = {"ledger", "groups"} - set(state if isinstance(state, Mapping) else ())
        if missing:
            raise BadInputError(f"the collector's state lacks {sorted(missing)}: give what state_dict() returned")
        groups = state["groups"]
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 0:
            raise BadInputError(f"the collector's state has groups={groups!r}: give what state_dict() returned")
        self._ledger.load_state_dict(state["ledger"])
        self._num_handed_over = groups

    def shutdown(self) -> None:
        """Abort what is in flight and end the threads. Idempotent."""
        self._closed = True
        background, self._background = self._background, None
        if background is not None:
            for running in self._running:
                running.cancel()
            if self._pump is not None:
                with self._pump.changed:
                    # A step of another thread may be waiting.
                    self._pump.changed.notify_all()
            background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _begin(self, *, frees_slots: bool) -> None:
        if self._pump is not None:
            return
        self._background = Background("rl_vllm-collector")
        self._pump = Pump(self.config, self._ledger, self._runner, self._delivery.accepts_rewards, self.stats)
        if self._buffer is not None:
            self._writer = BufferWriter(
                self._buffer,
                self._pump,
                self._delivery,
                self._ledger,
                frees_slots=frees_slots,
                total=self._left(),
            )
            self._running.append(self._background.submit(self._writer.run()))
        self._running.append(self._background.submit(self._pump.run()))

    def _left(self) -> int | None:
        return None if self.config.total_groups is None else max(0, self.config.total_groups - self._num_handed_over)

    def _batch(self, wanted: int) -> tuple[TensorDictBase] | None:
        """Groups turned into rows in this thread; all of them at one version, so that none grows old here."""
        pump = self._pump
        assert pump is not None
        parcels: dict[int, Parcel] = {}
        while True:
            self._wait(lambda: len(pump.ready) >= wanted, f"{wanted} groups ({len(pump.ready)} are finished)")
            with pump.changed:
                groups = list(islice(pump.ready, wanted))
            refused = [group for group in groups if not self._pack(group, parcels)]
            if not groups:
                return None
            if refused or not all(self._delivery.is_current(parcel) for parcel in parcels.values()):
                continue
            break
        batch = lazy_stack([row for group in groups for row in parcels[group.draw.position].rows.unbind(0)])
        self._call(pump.free(len(groups)))
        # Last: an interrupt that comes before leaves the groups where they are.
        with pump.changed:
            for group in groups:
                pump.ready.remove(group)
                self._ledger.settle(group.draw.position)
                self._delivery.count(parcels[group.draw.position])
            self._num_handed_over += len(groups)
        return (batch,)

    def _pack(self, group: Group, parcels: dict[int, Parcel]) -> bool:
        """Whether a group can be delivered now; its rows go into ``parcels``, or it leaves the pump."""
        pump = self._pump
        assert pump is not None
        position = group.draw.position
        if position in parcels and self._delivery.is_current(parcels[position]):
            return True
        parcels.pop(position, None)
        outcome = self._delivery.parcel(group)
        if isinstance(outcome, Parcel):
            parcels[position] = outcome
            return True
        with pump.changed:
            pump.ready.remove(group)
        self._delivery.count(outcome)
        self._call(pump.refuse(position, outcome.reason))
        return False

    def _written(self, wanted: int) -> tuple[None] | None:
        """Wait until that many more groups are in the buffer."""
        writer, pump = self._writer, self._pump
        assert writer is not None
        assert pump is not None
        self._wait(lambda: writer.num_waiting >= wanted, f"{wanted} more groups in the buffer")
        with pump.changed:
            count = min(wanted, writer.num_waiting)
            writer.num_waiting -= count
            self._num_handed_over += count
        if not writer.frees_slots:
            self._call(pump.free(count))
        return (None,) if count else None

    def _wait(self, is_ready: Any, waited_for: str) -> None:
        """Wait for groups, or for the end; raise what ended the pump."""
        pump = self._pump
        assert pump is not None
        begun = time.monotonic()
        with pump.changed:
            while not is_ready():
                if self._closed:
                    raise StopIteration
                if pump.error is not None:
                    raise pump.error
                if pump.exhausted and (self._writer is None or self._writer.is_done):
                    return
                limit_s = max(begun, pump.last_progress) + self.config.no_progress_s - time.monotonic()
                if limit_s <= 0:
                    raise NoProgressError(
                        self.config.no_progress_s, f"{waited_for} ({pump.describe()})", pump.last_failure
                    )
                pump.changed.wait(limit_s)

    def _raise_if_nothing_ever_came(self) -> None:
        pump = self._pump
        assert pump is not None
        if pump.exhausted and not self._num_handed_over and self.stats.groups_failed:
            raise NoProgressError(
                self.config.no_progress_s,
                f"a first group: all {self.stats.groups_failed} that were begun failed",
                pump.last_failure,
            )

    def _call(self, work: Any) -> None:
        background = self._background
        if background is None:
            # Shut down meanwhile: nothing runs that could be told.
            work.close()
            return
        background.run(work, timeout_s=_CALL_TIMEOUT_S, waited_for="the collector's loop")
