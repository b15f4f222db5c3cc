"""Another process: reads a pickled policy and prompts, and says what it generated, as one pickled dictionary."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys

from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens


def main() -> None:
    policy, rows, passed_on = pickle.load(sys.stdin.buffer)
    import torch

    td = lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row))) for row in rows])

    async def streamed() -> list[int]:
        return [index async for index, _ in policy.stream(td)]

    found = {
        "pid": os.getpid(),
        "kind": type(policy.service).__name__,
        "whole": policy(td.copy())["tokens", "response"].tolist(),
        "awaited": asyncio.run(policy.acall(td.copy()))["tokens", "response"].tolist(),
        "streamed": sorted(asyncio.run(streamed())),
        "version": policy.service.weight_version,
        "replicas": policy.service.num_replicas,
        "model": policy.service.model_info(),
        "same": pickle.loads(pickle.dumps(passed_on)) is not None,
        "back": policy.service,
    }
    sys.stdout.buffer.write(pickle.dumps(found))


if __name__ == "__main__":
    main()
