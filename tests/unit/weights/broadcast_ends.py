"""The processes of the broadcast's tests, in a module that a spawned process can import."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from rl_vllm.engine.broadcast import ReceivedWeights
from rl_vllm.errors import RefitError
from rl_vllm.types import WeightReceiver
from rl_vllm.weights.broadcast import BroadcastTransport
from rl_vllm.weights.source import ModuleSource

LIMIT_S = 60.0
BUCKET_BYTES = 1000
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every kind of tensor; ``large`` spans several buckets, and odd lengths put most of the others across an edge."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        str(dtype).removeprefix("torch."): (torch.randn(7, 13, generator=generator) * 50).to(dtype) for dtype in DTYPES
    }
    return {
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 5),
        **made,
        "byte": torch.tensor([seed], dtype=torch.uint8),
        "large": torch.randn(1301, generator=generator).to(torch.bfloat16),
    }


def work(pipe: Connection) -> None:
    """A worker: receives whenever it is told to, and answers with what it got or the error it met."""
    torch.set_num_threads(1)
    pipe.send("up")
    while (order := pipe.recv()) is not None:
        update, rank, expected, dies_after = order
        received: ReceivedWeights | None = None
        try:
            received = ReceivedWeights(update, rank)
            received.verify(expected, threading.Event())
            got: dict[str, Any] = {}
            for name, tensor in received:
                got[name] = (str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist())
                if len(got) == dies_after:
                    os.kill(os.getpid(), signal.SIGKILL)
            pipe.send((got, received.checksum))
        except RefitError as error:
            pipe.send(str(error.reason))
        finally:
            if received is not None:
                received.close()


def train(pipe: Connection) -> None:
    """A trainer that is killed while its workers wait for bytes."""
    transport = BroadcastTransport(address="127.0.0.1", bucket_bytes=BUCKET_BYTES)
    source = Dying()
    receivers = (WeightReceiver(replica=0, num_workers=1), WeightReceiver(replica=1, num_workers=1))
    update = transport.announce(source, 1, receivers=receivers, timeout_s=LIMIT_S)
    pipe.send(update.payload)
    transport.send(source, update, stop=threading.Event(), timeout_s=LIMIT_S)


class Dying(ModuleSource):
    def __init__(self) -> None:
        super().__init__(weights())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(super().__iter__()):
            if index == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


class Process:
    """A process and the pipe to it."""

    def __init__(self, target: Any) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        assert self.pipe.poll(LIMIT_S), "no answer"
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join(LIMIT_S)
        self.process.close()
        self.pipe.close()
