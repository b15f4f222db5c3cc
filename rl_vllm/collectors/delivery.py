"""What becomes of a finished group: rows, or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tensordict import TensorDictBase

from rl_vllm.collectors.config import CollectorConfig
from rl_vllm.collectors.groups import Group
from rl_vllm.collectors.rows import group_tensordict
from rl_vllm.collectors.staleness import oldest_version, without_stale_tokens
from rl_vllm.collectors.stats import CollectorStats
from rl_vllm.envs.dialogue import Segment
from rl_vllm.errors import BadInputError
from rl_vllm.policy.rendering import ChatRenderer
from rl_vllm.protocols import GenerationService

# From the rows of a group to the rows that are delivered, or None to reject it.
PostProcess: TypeAlias = Callable[[TensorDictBase], TensorDictBase | None]

EQUAL_REWARDS = "with equal rewards"
POSTPROC = "rejected by postproc"
STALE = "too old"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a finished group is not delivered."""

    reason: str


@dataclass(frozen=True, slots=True)
class Parcel:
    """What of a finished group can be delivered while one version is served.

    Attributes:
        rows: A lazy stack.
        version: The weights that are served.
        num_trained: Sampled tokens that can be trained on.
        num_truncated: Sampled tokens that became context.
    """

    rows: TensorDictBase
    version: int
    num_trained: int
    num_truncated: int


class Delivery:
    """Turns finished groups into rows, by the rules of a config; safe to use from several threads."""

    def __init__(
        self,
        config: CollectorConfig,
        service: GenerationService,
        renderer: ChatRenderer,
        stats: CollectorStats,
        postproc: PostProcess | None,
    ) -> None:
        self._config = config
        self._service = service
        self._renderer = renderer
        self._stats = stats
        self._postproc = postproc
        self._lock = threading.Lock()

    def accepts_rewards(self, group: Group) -> bool:
        """Whether the rewards tell the rollouts apart, if they must."""
        if not self._config.require_different_rewards:
            return True
        return len({sample.reward for sample in group.samples}) > 1

    def parcel(self, group: Group) -> Parcel | Refusal:
        """The rows of a group, at the version that is served now.

        Raises:
            BadInputError: ``postproc`` returned what are no rows.
            Exception: What ``postproc`` raised.
        """
        version = self._service.weight_version
        segments = [sample.rollout.segments for sample in group.samples]
        truncated = 0
        if self._config.max_staleness is not None and self._config.on_stale != "keep":
            fresh, truncated = self._fresh(segments, version, self._config.max_staleness)
            if fresh is None:
                return Refusal(STALE)
            segments = fresh
        rows = group_tensordict(
            group,
            segments,
            version=version,
            logprobs_mode=self._service.model_info().logprobs_mode,
            renderer=self._renderer,
        )
        processed = self._processed(rows)
        if processed is None:
            return Refusal(POSTPROC)
        trained = sum(int(segment.sampled_T.sum()) for of_one in segments for segment in of_one)
        return Parcel(processed, version, trained, truncated)

    def _processed(self, rows: TensorDictBase) -> TensorDictBase | None:
        if self._postproc is None:
            return rows
        try:
            processed = self._postproc(rows)
        except StopIteration as error:
            # The iteration would end with it, as if there were no more prompts.
            raise RuntimeError("postproc raised StopIteration: a next() in it found nothing") from error
        if processed is None:
            return None
        if isinstance(processed, TensorDictBase) and processed.batch_dims and len(processed):
            return processed
        shown = f"batch size {list(processed.batch_size)}" if isinstance(processed, TensorDictBase) else "no tensordict"
        raise BadInputError(
            f"postproc returned a {type(processed).__name__} ({shown}): return the rows of a group, [R] with R >= 1, "
            "or None to reject it"
        )

    def is_current(self, parcel: Parcel) -> bool:
        """Whether the version it was made for is still the one that is served, or no bound depends on it."""
        return self._config.max_staleness is None or parcel.version == self._service.weight_version

    def count(self, outcome: Parcel | Refusal) -> None:
        """Count what was delivered, or refused."""
        with self._lock:
            if isinstance(outcome, Parcel):
                self._stats.groups_delivered += 1
                self._stats.tokens_delivered += outcome.num_trained
                self._stats.tokens_truncated += outcome.num_truncated
            elif outcome.reason == STALE:
                self._stats.groups_stale += 1
            else:
                self._stats.groups_rejected += 1

    def _fresh(
        self, segments: list[list[Segment]], version: int, max_staleness: int
    ) -> tuple[list[list[Segment]] | None, int]:
        """Segments without tokens that are too old, and how many such tokens there were; None drops the group."""
        oldest = oldest_version([segment for of_one in segments for segment in of_one])
        if oldest is None or version - oldest <= max_staleness:
            return segments, 0
        if self._config.on_stale == "drop":
            return None, 0
        kept = []
        truncated = 0
        for of_one in segments:
            pairs = [without_stale_tokens(each, version=version, max_staleness=max_staleness) for each in of_one]
            truncated += sum(count for _, count in pairs)
            trained = [segment for segment, _ in pairs if segment.sampled_T.any()]
            if not trained and any(count for _, count in pairs):
                # A rollout of which nothing is left would leave its group one short.
                return None, 0
            kept.append(trained or [segment for segment, _ in pairs])
        return kept, truncated
