"""Drive one engine through a refit: the calls that an actor makes, in their order."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from rl_vllm.errors import DeadlineError, RefitError
from rl_vllm.types import CommitReport, InFlight, KVCache, WeightUpdate

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

EXTENSION = "rl_vllm.engine.transfer.WeightWorkerExtension"

_FIRST_POLL_S = 0.005
_LONGEST_POLL_S = 0.03


async def stage_weights(llm: AsyncLLM, update: WeightUpdate, *, timeout_s: float) -> None:
    """Have every worker read and verify a version while generation goes on.

    Raises:
        RefitError: A worker cannot use it, with the worker's reason; the engine keeps its weights.
        DeadlineError: ``timeout_s`` passed; what was staged is dropped.
    """
    copies = llm.vllm_config.parallel_config.data_parallel_size
    if copies > 1:
        # It answers a call to its workers with those of the first copy: the others could fail unseen.
        reason = (
            f"with data_parallel_size={copies} vLLM does not say what became of each copy: use num_replicas instead"
        )
        raise RefitError(update.version, "stage", (), reason)
    deadline = time.monotonic() + timeout_s
    await llm.collective_rpc("rl_vllm_stage", args=({**asdict(update), "payload": dict(update.payload)},))
    pause_s = _FIRST_POLL_S
    while True:
        states = await llm.collective_rpc("rl_vllm_stage_state")
        failures = [failure for _, failure in states if failure is not None]
        if failures:
            await llm.collective_rpc("rl_vllm_discard")
            raise RefitError(update.version, "stage", (), failures[0])
        if all(ready for ready, _ in states):
            return
        if time.monotonic() > deadline:
            await llm.collective_rpc("rl_vllm_discard")
            raise DeadlineError(f"version {update.version} to be staged", timeout_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)


async def commit_weights(
    llm: AsyncLLM, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache, resume: bool = True
) -> CommitReport:
    """Pause, load what is staged, settle the cache, set the version, resume.

    ``resume=False`` leaves the engine paused: its KV cache sleeps, and waking it resumes.

    With ``KVCache.RECOMPUTE`` running requests are preempted while paused and rebuild their cache under the new
    weights; with ``REUSE`` nothing is forgotten, neither theirs nor cached prefixes.

    Raises:
        RefitError: Nothing is staged (the engine goes on with its old weights), or loading failed. After a failed load
            the engine stays paused, so that no token is made by mixed weights; the next commit that succeeds resumes
            it.
    """
    states = await llm.collective_rpc("rl_vllm_stage_state")
    if not all(ready for ready, _ in states):
        waiting_for = await _first_failure(llm) or "staging has not ended"
        raise RefitError(update.version, "commit", (), f"nothing was loaded: {waiting_for}")
    await llm.pause_generation(mode=in_flight.value, clear_cache=False)
    paused = time.perf_counter()
    try:
        answers = await llm.collective_rpc("rl_vllm_commit", args=(update.version,))
    except Exception as error:
        # The engine's own error carries the worker's words inside its own; the worker still knows them alone.
        reason = await _first_failure(llm)
        raise RefitError(update.version, "commit", (), reason or str(error)) from error
    digests = [digest for digest, _ in answers]
    if len(set(digests)) != 1:
        raise RefitError(update.version, "commit", (), f"the workers loaded different weights: {sorted(set(digests))}")
    reset = False
    if kv is KVCache.RECOMPUTE:
        reset = await llm.reset_prefix_cache(reset_running_requests=True)
        if not reset:
            raise RefitError(update.version, "commit", (), "the KV cache of the old weights could not be reset")
    # Last: a token is labelled by the version in force, and from here on that is true of all that will be made.
    await llm.update_weight_version(str(update.version))
    if resume:
        await llm.resume_generation()
    return CommitReport(
        version=update.version,
        stall_s=time.perf_counter() - paused,
        checksum=digests[0],
        prefix_cache_reset=reset,
        is_double_buffered=all(has_swapped for _, has_swapped in answers),
    )


async def _first_failure(llm: AsyncLLM) -> str | None:
    """Why the first worker that failed did so, or None when none says so."""
    states = await llm.collective_rpc("rl_vllm_stage_state")
    return next((failure for _, failure in states if failure is not None), None)
