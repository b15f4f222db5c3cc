"""Random multi-turn tool dialogues on a running service, and what is checked of them."""

from __future__ import annotations

import itertools
import random
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from transformers import PreTrainedModel

from rl_vllm.envs import Entry, Message, Reply

NUM_TURNS = 4
# Text that tokenises differently beside other text: white space, digits, accents, an emoji, the template's own words.
PIECES = ("7", " 42", "\n", "\n\n", " Skinny", "é", "🙂", "  ", "assistant", '{"a": 1}', "naïve", "\t", "<think>", "-")


class RandomTool:
    """Answers each of the model's turns with a random tool result, three times."""

    def __init__(self, entry: Entry) -> None:
        self._random = random.Random(entry["question"])
        self._turns = 0

    def begin(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def reply(self, answer: str, messages: Sequence[Message]) -> Reply:
        assert messages[-1]["content"] == answer
        self._turns += 1
        text = "".join(self._random.choices(PIECES, k=self._random.randint(1, 8)))
        return Reply(({"role": "tool", "content": text},), done=self._turns == NUM_TURNS)

    def close(self) -> None:
        """It holds nothing."""


class Recorder:
    """A service in front of another, which remembers what each session was asked and what it answered."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._lock = threading.Lock()
        self.turns: dict[str, list[tuple[list[int], list[int]]]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    async def agenerate_batch(self, prompts: Any, sampling: Any, **options: Any) -> Any:
        batch = await self._service.agenerate_batch(prompts, sampling, **options)
        with self._lock:
            self.turns[prompts.session_ids[0]].append((prompts.row(0).tolist(), batch.tokens(0).tolist()))
        return batch


def check_prefixes(turns: dict[str, list[tuple[list[int], list[int]]]]) -> int:
    """Every prompt begins with the exact ids of the turn before; returns how many prompts were compared."""
    compared = 0
    for dialogue in turns.values():
        for (prompt, response), (following, _) in itertools.pairwise(dialogue):
            exact = [*prompt, *response]
            assert following[: len(exact)] == exact
            assert len(following) > len(exact)
            compared += 1
    return compared


def worst_error(rows: Sequence[TensorDictBase], model: PreTrainedModel) -> tuple[float, int]:
    """Largest difference of a sampled token's logprob from the model's, in nats, and the number of such tokens."""
    worst, count = 0.0, 0
    for row in rows:
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        places = mask.nonzero()[:, 0]
        with torch.no_grad():
            # The head at the sampled positions alone: of a large vocabulary it costs more than the layers.
            hidden = model.base_model(ids[None]).last_hidden_state[0, places - 1]
            logprobs = torch.log_softmax(model.get_output_embeddings()(hidden).float(), -1)
        expected = logprobs.gather(1, ids[places, None])[:, 0]
        error = row["log_probs", "full"][places] - expected
        worst, count = max(worst, float(error.abs().max())), count + len(error)
    return worst, count
