"""What a person sees while a call runs."""

from __future__ import annotations

import time

from tqdm.auto import tqdm

from rl_vllm.types import CompletionBatch


class Progress:
    """A progress bar over samples, with tokens per second."""

    def __init__(self, *, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, disable=not shown, desc="generate", unit="sample")
        self._tokens = 0
        self._started = time.perf_counter()

    def update(self, chunk: CompletionBatch) -> None:
        self._tokens += len(chunk.tokens_T)
        rate = self._tokens / max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self._bar.update(len(chunk))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
