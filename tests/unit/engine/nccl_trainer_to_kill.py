"""A trainer that is killed while its workers wait for bytes, reduced to what they see of it so that it starts fast."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection

from torch.distributed import TCPStore

from rl_vllm.protocols import wire
from rl_vllm.types import TensorSpec

HOST = "127.0.0.1"
LIMIT_S = 120.0


def train(pipe: Connection, specs: list[TensorSpec]) -> None:
    """Let one worker join, and die when told to."""
    store = wire.Store(HOST, 0, is_master=True, timeout=timedelta(seconds=LIMIT_S), wait_for_workers=False)
    invitation = wire.Invitation(
        host=HOST,
        port=store.port,
        group="v1",
        first_ranks={"0": 1},
        world_size=2,
        backend="nccl",
        bucket_bytes=200,
        hold="none",
        timeout_s=LIMIT_S,
        checksum=True,
    )
    meeting = wire.Meeting(store, invitation.group)
    meeting.put(wire.SPECS, wire.specs_to_json(specs))
    pipe.send(invitation.to_payload())
    forming = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, use_libuv=False)
    facts = {"master_address": HOST, "master_port": forming.port, "rank_offset": 1, "world_size": 2, "packed": True}
    meeting.put(wire.GO, json.dumps({**facts, "packed_buffer_size_bytes": 200, "packed_num_buffers": 2}))
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)
