"""The ways to install new weights that ``refit.py`` compares, and plain copies of the same bytes.

Ours refit one replica on Ray. TorchRL's double-buffer scheme writes a memory-mapped folder in memory and has the worker
of its own service load it; both engines hold the same model, and only one refit is under way at a time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from shared import launch_torchrl
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

KV_BYTES = 2**28
MAX_MODEL_LEN = 256
PROBE = [5, 17, 80, 41, 9, 120, 77, 33]


@dataclass(frozen=True)
class Way:
    """One way to move a model's weights.

    Attributes:
        run: Does it once and returns seconds by phase; "total" is among them.
        facts: What does not change from run to run.
    """

    run: Callable[[], dict[str, float]]
    facts: dict[str, object] = field(default_factory=dict)


def load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def build_synthetic(path: Path) -> Path:
    """A random Llama of about 1 GB in bfloat16, with its own output head."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=14,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def set_environment() -> None:
    """For Ray's processes, which inherit it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # TorchRL's engine finds its worker extension here.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )


def copies(model: PreTrainedModel, folder: Path) -> dict[str, Way]:
    """What no way can beat: the same bytes into new memory, over memory in use, and into a new file in memory."""
    flat = torch.cat([p.detach().reshape(-1).view(torch.uint8) for p in set(model.parameters())])
    used = torch.empty_like(flat).copy_(flat)

    def timed(copy: Callable[[], object]) -> dict[str, float]:
        started = time.perf_counter()
        copy()
        return {"total": time.perf_counter() - started}

    def to_file() -> None:
        target = folder / "copy"
        target.unlink(missing_ok=True)
        with target.open("wb", buffering=0) as file:
            data = flat.numpy().data
            while data:
                data = data[file.write(data) :]

    return {
        "memory copy, new": Way(lambda: timed(lambda: torch.empty_like(flat).copy_(flat))),
        "memory copy, in use": Way(lambda: timed(lambda: used.copy_(flat))),
        "file copy": Way(lambda: timed(to_file)),
    }


def ours(path: Path, model: PreTrainedModel, ends: ExitStack) -> dict[str, Way]:
    """Every transport that works without a GPU, over one service of one replica."""
    from rl_vllm import AsyncVLLM, EngineConfig
    from rl_vllm.config import RefitConfig
    from rl_vllm.types import Verify
    from rl_vllm.weights import BroadcastTransport, ModuleSource, ObjectStoreTransport, SharedStorageTransport, refit

    engine = EngineConfig(
        model=str(path),
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        cpu_kv_cache_gib=KV_BYTES / 2**30,
        skip_tokenizer=True,
        cpu_cores=len(os.sched_getaffinity(0)),
    )
    service = ends.enter_context(AsyncVLLM.launch(engine))
    source = ModuleSource(model)
    in_place = "shared_storage, in place"
    transports: dict[str, Any] = {
        "shared_storage": SharedStorageTransport(keep_versions=1),
        "shared_storage, no checksum": SharedStorageTransport(keep_versions=1, checksum=False),
        in_place: SharedStorageTransport(keep_versions=1),
        "broadcast": BroadcastTransport(),
        "broadcast, no checksum": BroadcastTransport(checksum=False),
        "broadcast, hold=none": BroadcastTransport(hold="none"),
        "object_store": ObjectStoreTransport(keep_versions=1),
    }

    def way(transport: Any, config: RefitConfig) -> Way:
        ends.callback(transport.close)

        def run() -> dict[str, float]:
            receipt = refit(service, source, transport, config=config)
            return {**receipt.phase_s, "stall": receipt.stall_s, "total": receipt.total_s, "rpcs": receipt.num_rpcs}

        return Way(run)

    def config(name: str) -> RefitConfig:
        verify = Verify.NONE if "no checksum" in name else Verify.CHECKSUM
        return RefitConfig(verify=verify, double_buffer=False if name == in_place else None)

    return {name: way(transport, config(name)) for name, transport in transports.items()}


class StorageLoader:
    """What TorchRL's scheme calls in a worker: its own worker class has it, and is one for GPUs.

    TorchRL 0.14 hands the pair of a name and a tensor to vLLM where pairs are wanted, and drops the error: no weight is
    ever loaded; it also sends buffers that no checkpoint has, and loads into layers that have packed their weights and
    on a CPU keep no place for others. What is timed leaves the buffers out and gives the rest to vLLM's own reload;
    ``as_it_is`` is the original.
    """

    model_runner: Any

    def load_weights_from_storage(self, storage_path: str, num_threads: int = 1) -> None:  # noqa: ARG002
        from tensordict import TensorDict

        weights = TensorDict.load_memmap(storage_path).flatten_keys(".")
        pairs = ((name, tensor) for name, tensor in weights.items() if "rotary_emb" not in name)
        self.model_runner.reload_weights(weights_iterator=pairs)

    def as_it_is(self, storage_path: str, num_threads: int = 1) -> None:
        from torchrl.modules.llm.backends.vllm.vllm_async import _AsyncvLLMWorker

        _AsyncvLLMWorker.load_weights_from_storage(self, storage_path, num_threads)


def torchrl(path: Path, model: PreTrainedModel, ends: ExitStack) -> dict[str, Way]:
    """TorchRL's double-buffer scheme over its own service, and whether it changed a single logprob."""
    import ray
    from torchrl.weight_update.llm import VLLMDoubleBufferSyncScheme
    from vllm import SamplingParams

    service, close = launch_torchrl(
        model=str(path),
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
        kv_cache_memory_bytes=KV_BYTES,
        skip_tokenizer_init=True,
        worker_extension_cls="refit_paths.StorageLoader",
    )
    ends.callback(close)
    folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="rl_vllm-bench-", dir=memory_folder()))
    scheme = VLLMDoubleBufferSyncScheme(remote_addr=folder, num_threads=1)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(service)
    sender.register_model(model)

    def logprobs() -> list[float]:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        output = service.generate([{"prompt_token_ids": PROBE}], params)[0]
        return [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], PROBE[1:], strict=True)]

    def took(load: Callable[[], object]) -> bool:
        """Whether a norm that is ten times the old one changes what the engine answers."""
        old, norm = logprobs(), model.get_parameter("model.norm.weight")
        with torch.no_grad():
            norm.mul_(10)
        sender.update_weights()
        load()
        service.reset_prefix_cache()
        new = logprobs()
        with torch.no_grad():
            norm.div_(10)
        return old != new

    def load_as_it_is() -> None:
        ray.get(service.collective_rpc(method="as_it_is", args=(folder, 1)))

    def run() -> dict[str, float]:
        started = time.perf_counter()
        sender.update_weights()
        staged = time.perf_counter()
        receiver.poll_and_apply()
        ended = time.perf_counter()
        return {"stage": staged - started, "commit": ended - staged, "total": ended - started}

    facts: dict[str, object] = {"as_it_is_took": took(load_as_it_is), "mended_took": took(receiver.poll_and_apply)}
    return {"TorchRL double buffer": Way(run, facts)}


def memory_folder() -> str | None:
    """Where files lie in memory; None where there is no such folder."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
