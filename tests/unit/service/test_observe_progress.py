from __future__ import annotations

import io
from functools import partial

import numpy as np
import pytest
from tqdm import tqdm

from rl_vllm.service.observe.progress import Progress
from rl_vllm.types import CompletionBatch, RequestFailure, pack_rows


def chunk(numbers: list[int], tokens: list[list[int]], failures: tuple[RequestFailure, ...] = ()) -> CompletionBatch:
    flat, offsets = pack_rows(tokens)
    count = len(numbers)
    return CompletionBatch(
        numbers_N=np.array(numbers, np.int64),
        samples_N=np.zeros(count, np.int32),
        offsets_N1=offsets,
        tokens_T=flat,
        logprobs_T=np.zeros(len(flat), np.float32),
        versions_T=np.zeros(len(flat), np.int32),
        finish_N=np.zeros(count, np.int8),
        stops_N=(None,) * count,
        cached_N=np.zeros(count, np.int32),
        failures=failures,
    )


class Clock:
    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


class RecordingBar:
    """A bar of the user's own."""

    def __init__(self, **arguments: object) -> None:
        self.arguments = arguments
        self.postfix = ""
        self.done = 0
        self.closed = False

    def update(self, n: float | None = 1) -> None:
        self.done += int(n or 0)

    def close(self) -> None:
        self.closed = True


class Bars:
    """Builds bars and keeps them."""

    def __init__(self) -> None:
        self.built: list[RecordingBar] = []

    def __call__(self, **arguments: object) -> RecordingBar:
        self.built.append(RecordingBar(**arguments))
        return self.built[-1]


def test_a_bar_counts_prompts_tokens_per_second_and_failures():
    clock, bars = Clock(), Bars()
    with Progress(total=4, use_tqdm=bars, clock=clock) as progress:
        bar = bars.built[0]
        clock.now_s += 2
        # Two samples of prompt 0 and one of prompt 2: eight tokens in two seconds.
        progress.update(chunk([0, 0, 2], [[1, 2, 3], [4], [5, 6, 7, 8]]))
        assert (bar.done, bar.postfix) == (2, "4 tokens/s")
        progress.update(chunk([3], [[1, 2]], failures=(RequestFailure(1, "refused"),)))
        assert (bar.done, bar.postfix) == (4, "5 tokens/s, 1 failed")
        assert not bar.closed

    assert bar.closed
    assert bar.arguments["total"] == 4


def test_a_bar_is_closed_when_the_call_fails():
    bars = Bars()
    with pytest.raises(KeyError), Progress(total=1, use_tqdm=bars):
        raise KeyError
    assert bars.built[0].closed


def test_the_bar_of_tqdm_shows_how_many_of_how_many():
    text = io.StringIO()
    with Progress(total=2, use_tqdm=partial(tqdm, file=text, mininterval=0)) as progress:
        progress.update(chunk([0], [[1, 2]]))
        progress.update(chunk([1], [[3]]))
    assert "2/2" in text.getvalue()
    assert "tokens/s" in text.getvalue()


def test_without_a_bar_nothing_is_written(capsys):
    with Progress(total=2, use_tqdm=False) as progress:
        progress.update(chunk([0], [[1, 2]]))
    assert capsys.readouterr() == ("", "")


def test_by_default_there_is_a_bar_on_the_error_stream(capsys):
    with Progress(total=3) as progress:
        progress.update(chunk([0, 1, 2], [[1], [2], [3]]))
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/3" in err
