"""What is too old is not delivered as if it were not."""

import numpy as np
import pytest
import torch

from rl_vllm.collectors.staleness import oldest_version, without_stale_tokens
from rl_vllm.envs.dialogue import Answer, Segment
from rl_vllm.errors import OverSamplingError
from rl_vllm.testing import FakeScript
from tests.unit.collectors.conftest import Gates, groups_of, prompts


def segment(*turns):
    """Turns of (what is read, versions of what is sampled)."""
    built = Segment()
    for read, versions in turns:
        built.read(read)
        count = len(versions)
        built.sample(Answer(np.arange(count, dtype=np.int32), np.full(count, -0.5), np.array(versions), finish=0))
    return built


def test_the_oldest_version_is_of_sampled_tokens_alone():
    assert oldest_version([segment(([5, 6], [4, 5])), segment(([7], [3]))]) == 3
    assert oldest_version([segment(([5], []))]) is None


def test_tokens_that_are_too_old_become_context_up_to_the_first_that_is_not():
    # Served: 6. Of versions 3, 4, 5, 6 with two versions of staleness, 3 is too old.
    kept, count = without_stale_tokens(segment(([9, 9], [3, 3, 4]), ([8], [5, 6])), version=6, max_staleness=2)
    assert count == 2
    assert kept.num_prompt == 4
    assert kept.sampled_T.tolist() == [False] * 4 + [True] + [False] + [True] * 2
    assert kept.versions_T.tolist() == [-1, -1, -1, -1, 4, -1, 5, 6]
    assert np.isnan(kept.logprobs_T).tolist() == [True] * 4 + [False] + [True] + [False] * 2
    assert kept.tokens_T.tolist() == segment(([9, 9], [3, 3, 4]), ([8], [5, 6])).tokens_T.tolist()


def test_what_is_fresh_is_left_as_it_is():
    fresh = segment(([9], [4, 5]))
    assert without_stale_tokens(fresh, version=6, max_staleness=2) == (fresh, 0)


def hold_first_batch(collect, service, **settings):
    """A collector with all its groups finished under version 0, and version 3 served now."""
    gates = Gates()

    async def before(text):
        if service.weight_version == 3:
            return
        await gates.wait("go")

    service.before = before
    collector = collect(prompts(8), max_in_flight=2, groups_per_batch=2, **settings)
    collector._begin(frees_slots=False)
    while service.num_running < 2:
        pass
    gates.open("go")
    pump = collector._pump
    with pump.changed:
        assert pump.changed.wait_for(lambda: len(pump.ready) == 2, timeout=10)
    service.serve_version(3)
    return collector


def test_groups_that_waited_too_long_are_dropped_and_replaced(collect, service):
    collector = hold_first_batch(collect, service, max_staleness=2)
    batch = next(collector)
    assert groups_of(batch) == [2, 3]
    assert batch["rollout", "staleness"].tolist() == [0] * 4
    assert batch["rollout", "version"].tolist() == [3] * 4
    assert collector.stats.groups_stale == 2


@pytest.mark.parametrize(("max_staleness", "on_stale"), [(3, "drop"), (None, "drop"), (1, "keep")])
def test_groups_within_the_bound_or_kept_are_labelled_with_their_age(collect, service, max_staleness, on_stale):
    collector = hold_first_batch(collect, service, max_staleness=max_staleness, on_stale=on_stale)
    batch = next(collector)
    assert sorted(groups_of(batch)) == [0, 1]
    assert batch["rollout", "staleness"].tolist() == [3] * 4
    assert collector.stats.groups_stale == 0


def test_a_rollout_with_nothing_fresh_drops_its_group_when_truncating(collect, service):
    collector = hold_first_batch(collect, service, max_staleness=1, on_stale="truncate")
    assert groups_of(next(collector)) == [2, 3]
    assert collector.stats.groups_stale == 2


def test_stale_spans_are_delivered_as_context_when_truncating(collect, service):
    service.script = FakeScript(
        respond=lambda request: [20, 21, 22, 23, request.info.eos_token_ids[0]], next_version=(2, 3)
    )
    collector = hold_first_batch(collect, service, max_staleness=1, on_stale="truncate")
    batch = next(collector)
    assert sorted(groups_of(batch)) == [0, 1]
    for row in batch.unbind(0):
        assert row["tokens", "response"].tolist() == [22, 23, 511]
        assert row["tokens", "prompt"][-2:].tolist() == [20, 21]
        assert row["policy_version"][row["masks", "all_assistant_mask"]].tolist() == [3, 3, 3]
        assert row["masks", "all_assistant_mask"].sum() == 3
        assert torch.isfinite(row["log_probs", "response"]).all()
    assert collector.stats.tokens_truncated == 8
    assert collector.stats.tokens_delivered == 12


def test_responses_of_mixed_versions_are_made_again_unless_partial_rollouts_are_wanted(collect, service):
    service.script = FakeScript(next_version=(1, 5), respond=lambda request: [20, 21, 511])
    (batch,) = collect(prompts(1), groups_per_batch=1)
    assert batch["policy_version"][0][-3:].tolist() == [0, 5, 5]
    collector = collect(prompts(2), groups_per_batch=1, partial_rollouts=False, max_retries=1, no_progress_s=5.0)
    service.script = FakeScript(respond=lambda request: [20, 511])
    assert len(list(collector)) == 2
    service.script = FakeScript(next_version=(1, 5), respond=lambda request: [20, 21, 511])
    strict = collect(prompts(1), groups_per_batch=1, partial_rollouts=False, max_retries=1, no_progress_s=5.0)
    with pytest.raises(Exception, match="versions 0 to 5"):
        next(strict)
    assert strict.stats.failures == {"MixedVersionsError": 3}


def test_too_many_stale_groups_end_in_an_error_that_says_so(collect, service):
    class Racing:
        @property
        def weight_version(self):
            return service.weight_version + 10

        def model_info(self):
            return service.model_info()

    collector = collect(prompts(50), max_staleness=1, max_oversampling=2.0)
    collector._delivery._service = Racing()
    with pytest.raises(OverSamplingError, match="too old"):
        next(collector)
