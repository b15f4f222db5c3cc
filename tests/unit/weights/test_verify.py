"""The proof by logprobs, against a service whose prompt scores are stated."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rl_vllm.config import RefitConfig
from rl_vllm.engine.shared_storage import StagedFolder
from rl_vllm.errors import BadInputError, ConfigError, RefitError
from rl_vllm.testing.answers import FAKE_MODEL, FakeScript
from rl_vllm.testing.fake_service import FakeService
from rl_vllm.types import CommitReport, InFlight, KVCache, RefitReceipt, TensorSpec, Verify, WeightUpdate
from rl_vllm.weights.shared_storage import SharedStorageTransport
from rl_vllm.weights.source import ModuleSource
from rl_vllm.weights.update import refit
from rl_vllm.weights.verify import default_limit

Float32 = NDArray[np.float32]

WEIGHTS = {"a": torch.tensor([1.0, 2.0])}
SPECS = (TensorSpec("a", "float32", (2,)),)
PROBE = ((5, 6, 7), (8, 9))
LOGPROBS = RefitConfig(verify=Verify.LOGPROBS, probe_prompts=PROBE)


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[SharedStorageTransport]:
    transport = SharedStorageTransport(tmp_path)
    yield transport
    transport.close()


def halves(rows: Sequence[Sequence[int]]) -> list[Float32]:
    """A trainer that gives every token probability exp(-1/2)."""
    return [np.full(len(row) - 1, -0.5, dtype=np.float32) for row in rows]


def off_by(*distances: float, old: float = 5.0) -> FakeScript:
    """Replica ``i`` is ``distances[i]`` nats below ``halves``; ``old`` below while it serves version 0."""

    def score(prompt_T: NDArray[np.int32], version: int, replica: int) -> Float32:
        return np.full(len(prompt_T), -0.5 - (distances[replica] if version else old), dtype=np.float32)

    return FakeScript(score_prompt=score)


def serving(script: FakeScript, specs: tuple[TensorSpec, ...] = SPECS) -> FakeService:
    return FakeService(specs=specs, num_replicas=2, script=script)


def test_every_replica_scores_the_new_weights_and_the_receipt_tells_the_differences(
    transport: SharedStorageTransport,
) -> None:
    service = serving(off_by(0.0, 2.0**-11))
    receipt = refit(service, ModuleSource(WEIGHTS), transport, config=LOGPROBS, scorer=halves)
    assert receipt.logprob_max_difference == 2.0**-11
    # One replica is exact, both score the same three tokens.
    assert receipt.logprob_mean_difference == 2.0**-12
    assert receipt.phase_s["verify"] > 0
    assert [call.actor_index for call in service.generate_calls] == [0, 1]
    assert [call.sampling.prompt_logprobs for call in service.generate_calls] == [0, 0]
    assert service.generate_calls[0].prompts.tokens_T.tolist() == [5, 6, 7, 8, 9]


def test_a_replica_beyond_the_limit_is_named_with_figures_and_the_weights_do_serve(
    transport: SharedStorageTransport,
) -> None:
    service = serving(off_by(0.0, 0.25))
    with pytest.raises(RefitError, match=r"up to 0.25 nats .*mean 0.125 over 3 tokens; at most 0.001") as caught:
        refit(service, ModuleSource(WEIGHTS), transport, config=LOGPROBS, scorer=halves)
    assert (caught.value.phase, caught.value.replicas) == ("verify", (1,))
    assert "every replica serves the new weights" in str(caught.value)
    assert service.weight_version == 1


@pytest.mark.parametrize(("limit", "passes"), [(0.5, True), (0.125, False)])
def test_the_limit_can_be_chosen(transport: SharedStorageTransport, limit: float, passes: bool) -> None:
    config = RefitConfig(verify=Verify.LOGPROBS, probe_prompts=PROBE, max_logprob_difference=limit)
    service = serving(off_by(0.25, 0.25))
    if passes:
        assert refit(service, ModuleSource(WEIGHTS), transport, config=config, scorer=halves).version == 1
        return
    with pytest.raises(RefitError) as caught:
        refit(service, ModuleSource(WEIGHTS), transport, config=config, scorer=halves)
    assert caught.value.replicas == (0, 1)


def test_a_score_that_is_no_number_is_beyond_every_limit(transport: SharedStorageTransport) -> None:
    config = RefitConfig(verify=Verify.LOGPROBS, probe_prompts=PROBE, max_logprob_difference=1e9)
    with pytest.raises(RefitError, match="up to inf nats") as caught:
        refit(serving(off_by(0.0, float("nan"))), ModuleSource(WEIGHTS), transport, config=config, scorer=halves)
    assert caught.value.replicas == (1,)


def test_a_scorer_that_scores_the_first_token_too_is_refused(transport: SharedStorageTransport) -> None:
    def scorer(rows: Sequence[Sequence[int]]) -> list[Float32]:
        return [np.zeros(len(row), dtype=np.float32) for row in rows]

    with pytest.raises(RefitError, match=r"rows of \[3, 2\] logprobs and \[2, 1\] are due"):
        refit(serving(off_by(0.0, 0.0)), ModuleSource(WEIGHTS), transport, config=LOGPROBS, scorer=scorer)


def test_weights_without_a_model_are_refused_before_a_byte_moves(
    transport: SharedStorageTransport, tmp_path: Path
) -> None:
    service = serving(off_by(0.0, 0.0))
    with pytest.raises(BadInputError, match=r"scorer="):
        refit(service, ModuleSource(WEIGHTS), transport, config=LOGPROBS)
    assert (service.stage_calls, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (((3, 64),), r"probe_prompts\[0\] has token 64, the vocabulary ends at 64"),
        (((3, 4), (1,) * 64), r"probe_prompts\[1\] has 64 tokens, the engine takes 63"),
    ],
)
def test_a_probe_that_the_model_cannot_score_is_refused_before_a_byte_moves(
    transport: SharedStorageTransport, prompts: tuple[tuple[int, ...], ...], message: str
) -> None:
    config = RefitConfig(verify=Verify.LOGPROBS, probe_prompts=prompts)
    service = serving(off_by(0.0, 0.0))
    with pytest.raises(BadInputError, match=message):
        refit(service, ModuleSource(WEIGHTS), transport, config=config, scorer=halves)
    assert service.stage_calls == []


def test_an_engine_that_gives_logits_is_refused_before_a_byte_moves(transport: SharedStorageTransport) -> None:
    service = FakeService(specs=SPECS, info=replace(FAKE_MODEL, logprobs_mode="raw_logits"))
    with pytest.raises(BadInputError, match="the engine returns raw_logits"):
        refit(service, ModuleSource(WEIGHTS), transport, config=LOGPROBS, scorer=halves)
    assert service.stage_calls == []


def test_the_default_probe_is_the_same_at_every_refit_and_fits_the_model(transport: SharedStorageTransport) -> None:
    service = serving(off_by(0.0, 0.0))
    config = RefitConfig(verify=Verify.LOGPROBS)
    for _ in range(2):
        refit(service, ModuleSource(WEIGHTS), transport, config=config, scorer=halves)
    first, *others = [call.prompts for call in service.generate_calls]
    assert first.lengths_B.tolist() == [24] * 4
    assert all(np.array_equal(first.tokens_T, other.tokens_T) for other in others)
    assert 0 <= first.tokens_T.min() <= first.tokens_T.max() < FAKE_MODEL.vocab_size


def test_the_limit_follows_the_engines_dtype() -> None:
    assert default_limit(SPECS) == 1e-3
    assert default_limit((*SPECS, TensorSpec("b", "bfloat16", (2,)))) == 0.05
    assert default_limit((TensorSpec("b", "float16", (2,)),)) == 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probe_prompts": ()}, "at least one tuple"),
        ({"probe_prompts": ((5,),)}, r"probe_prompts\[0\] must be a tuple of at least two token ids, got \(5,\)"),
        ({"probe_prompts": ((5, -1),)}, "at least 0, got -1"),
        ({"max_logprob_difference": 0.0}, "max_logprob_difference must be a finite number above 0, got 0.0"),
    ],
)
def test_settings_of_the_proof_are_checked_when_built(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RefitConfig(**changes)  # type: ignore[arg-type]


def test_a_model_scores_itself_as_its_logits_say_and_keeps_its_modes(untied_model: PreTrainedModel) -> None:
    untied_model.train()
    untied_model.lm_head.eval()
    before = [child.training for child in untied_model.modules()]
    short, long = ModuleSource(untied_model).score([[3, 4], [3, 4, 5, 6]])
    assert [child.training for child in untied_model.modules()] == before
    assert (len(short), len(long)) == (1, 3)
    # Causal: what follows changes nothing.
    np.testing.assert_allclose(short[0], long[0], atol=1e-6)
    probabilities = untied_model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits[0].softmax(-1)
    for position, token in enumerate((4, 5, 6)):
        assert np.exp(long[position]) == pytest.approx(probabilities[position, token].item(), rel=1e-5)


def test_the_sources_own_model_is_the_default_scorer(
    untied_model: PreTrainedModel, transport: SharedStorageTransport
) -> None:
    source = ModuleSource(untied_model)
    known = source.score(PROBE)

    def score(prompt_T: NDArray[np.int32], _version: int, _replica: int) -> Float32:
        row = known[PROBE.index(tuple(prompt_T.tolist()))]
        return np.concatenate([np.zeros(1, dtype=np.float32), row])

    service = serving(FakeScript(score_prompt=score), source.specs())
    assert refit(service, source, transport, config=LOGPROBS).logprob_max_difference == 0.0


def test_a_receipt_gives_metrics_by_name_and_one_line() -> None:
    receipt = RefitReceipt(
        version=3,
        transport="shared_storage",
        in_flight=InFlight.KEEP,
        kv=KVCache.RECOMPUTE,
        num_replicas=2,
        num_tensors=4,
        num_bytes=3_000_000_000,
        phase_s={"check": 0.5, "stage": 2.0, "commit": 1.0},
        stall_s=0.25,
        checksum="ab",
        num_rpcs=2,
    )
    assert receipt.as_metrics() == {
        "refit/version": 3.0,
        "refit/num_replicas": 2.0,
        "refit/num_tensors": 4.0,
        "refit/num_bytes": 3e9,
        "refit/num_rpcs": 2.0,
        "refit/is_double_buffered": 0.0,
        "refit/check_s": 0.5,
        "refit/stage_s": 2.0,
        "refit/commit_s": 1.0,
        "refit/total_s": 3.5,
        "refit/stall_s": 0.25,
        "refit/stage_gb_per_s": 1.5,
    }
    assert receipt.as_metrics(prefix="")["stall_s"] == 0.25
    assert "\n" not in str(receipt)


def test_checksums_that_a_transport_does_not_compute_are_missed(tmp_path: Path) -> None:
    class Reading(FakeService):
        """Reports what a reader of the staged folder found."""

        def commit_weights(
            self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache, timeout_s: float
        ) -> tuple[CommitReport, ...]:
            staged = StagedFolder(update)
            staged.verify(SPECS, threading.Event())
            assert torch.equal(dict(staged)["a"], WEIGHTS["a"])
            (report,) = super().commit_weights(update, in_flight=in_flight, kv=kv, timeout_s=timeout_s)
            return (replace(report, checksum=staged.checksum),)

    transport = SharedStorageTransport(tmp_path, checksum=False)
    service = Reading(specs=SPECS)
    receipt = refit(service, ModuleSource(WEIGHTS), transport, config=RefitConfig(verify=Verify.NONE))
    assert (receipt.version, receipt.checksum) == (1, "")
    with pytest.raises(RefitError, match="the transport computes no checksums"):
        refit(service, ModuleSource(WEIGHTS), transport)
    transport.close()


def test_without_a_proof_no_checksum_is_asked_for(transport: SharedStorageTransport) -> None:
    service = serving(FakeScript())
    receipt = refit(service, ModuleSource(WEIGHTS), transport, config=RefitConfig(verify=Verify.NONE))
    assert (receipt.version, receipt.checksum, receipt.logprob_max_difference) == (1, "", None)
    assert service.generate_calls == []
