"""Refits one model by several transports and commit modes, and prints, as JSON, how far the engines were from it.

Usage: ``refit_matrix_script.py MODEL TENSOR_PARALLEL_SIZE TRANSPORT:IN_FLIGHT...``. A program of its own: it needs a
Ray with room of its own. One worker per replica makes two replicas, two workers make one.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rl_vllm import AsyncVLLM, EngineConfig, ServiceConfig, VLLMWeightSyncScheme
from rl_vllm.config import RefitConfig
from rl_vllm.errors import RefitError
from rl_vllm.types import FinishReason, InFlight, Verify
from rl_vllm.weights import ModuleSource, SharedStorageTransport, refit
from tests.integration.facts import tell
from tests.integration.refit_checks import Error, Models, Under, errors_by_replica
from tests.integration.truth import load_trainer, train_a_bit

REFITS = 3


def run_cell(service: AsyncVLLM, trained: PreTrainedModel, transport: str, in_flight: InFlight) -> dict[str, Any]:
    """Three refits under load, each with a model further from the first."""
    trained = copy.deepcopy(trained)
    schemes = {
        double_buffer: VLLMWeightSyncScheme(
            transport=transport, service=service, config=RefitConfig(in_flight=in_flight, double_buffer=double_buffer)
        )
        for double_buffer in (True, False)
    }
    senders = {double_buffer: scheme.create_sender() for double_buffer, scheme in schemes.items()}
    found: dict[str, Any] = {"errors": [], "in_flight_errors": [], "spans": [], "finish": [], "rpcs": []}
    try:
        models: Models = {senders[True].update_weights(trained).version: copy.deepcopy(trained)}
        for seed in range(REFITS):
            train_a_bit(trained, seed)
            # Swapping follows loading in place, and the other way round.
            double_buffer = seed % 2 == 0
            with Under(service) as load:
                receipt = senders[double_buffer].update_weights(trained)
            assert receipt.is_double_buffered == double_buffer
            models[receipt.version] = copy.deepcopy(trained)
            error = Error()
            for batch in load.results():
                error.add(batch, models)
                found["spans"].append(sorted({len(batch.spans(index)) for index in range(len(batch))}))
                found["finish"] += [FinishReason(code).name for code in batch.finish_N.tolist()]
            found["in_flight_errors"].append(error.worst)
            found["errors"].append(errors_by_replica(service, {receipt.version: trained}))
            found["rpcs"].append(receipt.num_rpcs)
            assert receipt.num_replicas == service.num_replicas
            assert receipt.transport == transport
            models = {receipt.version: models[receipt.version]}
    finally:
        for scheme in schemes.values():
            scheme.shutdown()
    found["finish"] = sorted(set(found["finish"]))
    return found


def run_proof(service: AsyncVLLM, trained: PreTrainedModel) -> dict[str, Any]:
    """The same weights twice, proven by logprobs, and a trainer that is another model."""
    transport, config = SharedStorageTransport(), RefitConfig(verify=Verify.LOGPROBS, double_buffer=False)
    other = copy.deepcopy(trained)
    train_a_bit(other, 99)
    found: dict[str, Any] = {"proven": [], "refused": None}
    try:
        for _ in range(2):
            receipt = refit(service, ModuleSource(trained), transport, config=config)
            assert receipt.checksum
            found["proven"].append(receipt.logprob_max_difference)
        found["errors"] = errors_by_replica(service, {receipt.version: trained})
        try:
            refit(service, ModuleSource(trained), transport, config=config, scorer=ModuleSource(other).score)
        except RefitError as error:
            found["refused"] = [error.phase, *error.replicas]
    finally:
        transport.close()
    return found


def main() -> None:
    model, size, *cells = sys.argv[1:]
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning")
    engine = EngineConfig(
        model=model, dtype="float32", max_model_len=512, cpu_kv_cache_gib=0.25, tensor_parallel_size=int(size)
    )
    trained = load_trainer(Path(model))
    with AsyncVLLM(ServiceConfig(engine=engine, num_replicas=1 if int(size) == 2 else 2)) as service:
        started = time.monotonic()
        found: dict[str, Any] = {"before": errors_by_replica(service, {0: trained})}
        for cell in cells:
            transport, in_flight = cell.split(":")
            found[cell] = run_cell(service, trained, transport, InFlight(in_flight))
            print(f"{time.monotonic() - started:.1f} s {cell}", flush=True)
        found["proof"] = run_proof(service, trained)
        # The facts can be wrong: a model trained a little further explains nothing.
        train_a_bit(trained, 98)
        found["wrong"] = errors_by_replica(service, {service.weight_version: trained})
    tell(found)


if __name__ == "__main__":
    main()
