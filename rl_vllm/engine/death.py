"""An engine's death: noticed by every call that waits, and told with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rl_vllm.errors import EngineDiedError

T = TypeVar("T")


async def answered(llm: AsyncLLM, replica: int, call: Coroutine[Any, Any, T]) -> T:
    """Wait for a call into the engine's processes, or for the engine's death: vLLM ends no call that was under way.

    Raises:
        EngineDiedError: The engine is gone.
        Exception: Whatever the call raises.
    """
    if llm.errored:
        call.close()
        raise EngineDiedError(replica, why_it_died(llm))
    task = asyncio.ensure_future(call)
    # Ends when the engine core has died, and before that only with the loop.
    reader = llm.output_handler
    try:
        await asyncio.wait([task] if reader is None else [task, reader], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise EngineDiedError(replica, why_it_died(llm))
        return task.result()
    except Exception as error:
        if isinstance(error, EngineDeadError) or llm.errored:
            raise EngineDiedError(replica, why_it_died(llm)) from error
        raise
    finally:
        task.cancel()


async def check_health(llm: AsyncLLM, replica: int) -> None:
    """Ask the engine core and, through it, every worker; returns when all have answered, between two steps.

    Raises:
        EngineDiedError: One of them is gone or says that it cannot serve.
    """
    try:
        await answered(llm, replica, llm.collective_rpc("check_health"))
    except EngineDiedError:
        raise
    except Exception as error:
        raise EngineDiedError(replica, f"a worker is not well: {reason_of(error)}") from error


def why_it_died(llm: AsyncLLM) -> str:
    """What is known of an engine's end: how its processes ended, or vLLM's own words."""
    manager = llm.engine_core.resources.engine_manager
    ended = {} if manager is None else manager.finished_procs()
    if ended:
        return ", ".join(f"process {name} {_ending(code)}" for name, code in ended.items())
    return reason_of(EngineDeadError())


def _ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def reason_of(error: BaseException) -> str:
    """An error's class and words; of one that wraps another, the other's."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
