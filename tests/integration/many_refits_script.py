"""Refits a service fifty times in a row while requests run, and prints what its processes hold, as JSON.

Usage: ``many_refits_script.py TRANSPORT...``. The model is large enough for one version that is kept to show.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from rl_vllm import AsyncVLLM, EngineConfig, SamplingConfig, ServiceConfig, VLLMWeightSyncScheme
from rl_vllm.types import PromptBatch
from tests.integration.facts import tell
from tests.integration.refit_checks import ROWS, errors_by_replica
from tests.integration.truth import load_trainer, train_a_bit

REFITS, WARM_UP = 50, 10
SHARED_MEMORY = Path("/dev/shm")


def build_model(path: Path) -> Path:
    """A random Llama of 42 MB."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def holdings() -> dict[str, Any]:
    """What this program and its engines hold; by process where a sum would hide one that grows."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    ours = [process for process in family if process.pid == family[0].pid or "VLLM" in process.name()]
    return {
        "memory": {process.pid: process.memory_info().rss for process in ours},
        "handles": {process.pid: process.num_fds() for process in ours},
        "threads": {process.pid: process.num_threads() for process in ours},
        "segments": len(list(SHARED_MEMORY.iterdir())),
    }


def run(service: AsyncVLLM, model: PreTrainedModel, transport: str) -> dict[str, Any]:
    scheme = VLLMWeightSyncScheme(transport=transport, service=service)
    sender = scheme.create_sender()
    over = threading.Event()
    found: dict[str, Any] = {"errors": []}

    def keep_busy() -> None:
        while not over.is_set():
            service.generate_batch(PromptBatch.from_rows(ROWS), SamplingConfig(max_tokens=64, ignore_eos=True))

    load = threading.Thread(target=keep_busy)
    load.start()
    try:
        for number in range(REFITS):
            if number == WARM_UP:
                found["before"] = holdings()
            receipt = sender.update_weights(model)
            if number % 10 == 9:
                found["errors"].append(max(errors_by_replica(service, {receipt.version: model})))
        found["after"] = holdings()
        train_a_bit(model, seed=1)
        receipt = sender.update_weights(model)
        found["errors"].append(max(errors_by_replica(service, {receipt.version: model})))
        found["is_double_buffered"] = receipt.is_double_buffered
    finally:
        over.set()
        load.join(60)
        scheme.shutdown()
    return found


def main() -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning")
    with tempfile.TemporaryDirectory() as folder:
        path = build_model(Path(folder) / "model")
        engine = EngineConfig(
            model=str(path), dtype="float32", max_model_len=512, cpu_kv_cache_gib=0.25, skip_tokenizer=True
        )
        model = load_trainer(path)
        with AsyncVLLM(ServiceConfig(engine=engine, num_replicas=2)) as service:
            found = {}
            for transport in sys.argv[1:]:
                started = time.monotonic()
                # A copy: training moves it on.
                found[transport] = run(service, copy.deepcopy(model), transport)
                print(f"{transport}: {time.monotonic() - started:.0f} s", flush=True)
    tell(found)


if __name__ == "__main__":
    main()
