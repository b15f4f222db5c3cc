"""Where prompts go, batch after batch: expected places worked out by hand, and what holds for every batch."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vllm.config import RoutingConfig
from rl_vllm.errors import ConfigError
from rl_vllm.service.router import Router, Snapshot
from rl_vllm.service.routing import ALLOWED_REQUESTS
from rl_vllm.types import PromptBatch

BLOCK = 4
RESPONSE = 8


def router(*strategy: str, **settings) -> Router:
    return Router(RoutingConfig(strategy=strategy or ("prefix-aware", "requests"), **settings), block_size=BLOCK)


def snapshot(tokens: list[int], *, indices: list[int] | None = None, kv_usage: list[float] | None = None) -> Snapshot:
    return Snapshot(
        indices_R=np.array(range(len(tokens)) if indices is None else indices, np.int64),
        requests_R=np.zeros(len(tokens), np.int64),
        tokens_R=np.array(tokens, np.int64),
        kv_usage_R=np.array([np.nan] * len(tokens) if kv_usage is None else kv_usage),
    )


def assign(to: Router, rows: list[list[int]], loads: list[int] | Snapshot, *, sessions=None, loras=None) -> list[int]:
    flat = PromptBatch.from_rows(rows)
    prompts = PromptBatch(flat.tokens_T, flat.offsets_B1, session_ids=sessions, loras=loras)
    costs_B = flat.lengths_B + RESPONSE
    where = loads if isinstance(loads, Snapshot) else snapshot(loads)
    return to.assign(prompts, range(len(rows)), costs_B, where).tolist()


def prompt(seed: int, length: int = 32) -> list[int]:
    """Ids that no prompt of another seed has."""
    return list(range(1000 * seed, 1000 * seed + length))


# Prefixes


def test_a_known_prefix_wins_a_tie_and_a_lower_load_wins_over_it():
    to = router()
    [first] = assign(to, [prompt(1)], [0, 0, 0, 0])
    assert [assign(to, [prompt(1)], [7, 7, 7, 7]) for _ in range(50)] == [[first]] * 50
    loads = [0, 0, 0, 0]
    loads[first] = 1000
    assert assign(to, [prompt(1)], loads) != [first]


def test_a_prompt_stays_while_the_rest_of_the_work_is_worth_less_than_its_prefix():
    # Cost 40, load L on the first of two: share (L + 40) / 2, allowance 80, saved 32; it stays while
    # L + 40 <= (L + 40) / 2 + 112, that is L <= 184; the hard bound 1.5 (L + 40) / 2 + 80 is L <= 280.
    for load, expected in ((184, 0), (186, 1)):
        to = router()
        assert assign(to, [prompt(1)], [0, 0]) == [0]
        assert assign(to, [prompt(1)], [load, 0]) == [expected]


def test_beyond_the_bound_even_a_long_prefix_is_left():
    # Cost 408, load L on the first of four: the bound is 1.5 (L + 408) / 4 + 816, reached with L = 897.6. A threshold
    # of 2 lets the prefix's worth of 400 tokens decide, which is until L = 1,213.
    for threshold, load, expected in ((1.5, 896, 0), (1.5, 900, 1), (2.0, 1200, 0)):
        to = router(overload_threshold=threshold)
        assert assign(to, [prompt(1, 400)], [0, 0, 0, 0]) == [0]
        assert assign(to, [prompt(1, 400)], [load, 0, 0, 0]) == [expected]


def test_a_replica_that_took_a_prefix_over_is_known_for_it():
    to = router()
    assert assign(to, [prompt(1)], [0, 0, 0]) == [0]
    assert assign(to, [prompt(1)], [1000, 500, 0]) == [2]
    assert assign(to, [prompt(1)], [1000, 0, 0]) == [2]


def test_a_longer_prompt_goes_where_its_beginning_is_and_the_longest_match_decides():
    to = router()
    assert assign(to, [prompt(1, 16), prompt(2, 16)], [0, 0]) == [0, 1]
    longer = prompt(1, 16) + prompt(3, 12)
    assert assign(to, [longer], [0, 0]) == [0]
    assert assign(to, [longer], [1000, 0]) == [1]
    assert assign(to, [[*longer, 7, 7, 7, 7]], [0, 0]) == [1]


def test_equal_ids_under_another_adapter_are_another_prefix():
    to = router()
    assert assign(to, [prompt(1)], [0, 9], loras=("a",)) == [0]
    assert assign(to, [prompt(1)], [9, 0], loras=("b",)) == [1]
    assert assign(to, [prompt(1)], [9, 0], loras=("a",)) == [0]


def test_a_prefix_that_is_a_small_part_of_the_prompt_binds_nothing():
    to = router()
    template = prompt(9, 16)
    assert assign(to, [template + prompt(1, 40)], [0, 0]) == [0]
    assert assign(to, [template + prompt(2, 40)], [1, 0]) == [1]


def test_two_hundred_questions_after_one_system_prompt_are_spread_while_all_replicas_are_idle():
    to = router()
    system = prompt(9, 40)
    chosen = [assign(to, [system + prompt(at + 10, 9)], [0, 0, 0, 0])[0] for at in range(200)]
    assert all(30 <= chosen.count(replica) <= 70 for replica in range(4))


def test_a_chat_without_a_session_id_is_not_taken_for_a_system_prompt():
    to, chat, chosen = router(), prompt(1, 40), []
    for turn in range(40):
        chosen += assign(to, [chat], [0, 0, 0, 0])
        chat = chat + prompt(100 + turn, 11)
    assert chosen == [chosen[0]] * 40


def test_prompts_without_a_full_block_are_spread_because_no_cache_shares_them():
    to = router()
    chosen = [assign(to, [[5, 6, 7]], [0, 0, 0, 0])[0] for _ in range(200)]
    assert [chosen.count(replica) for replica in range(4)] == [50] * 4


# Groups of one batch


def test_a_group_stays_together_and_groups_are_spread():
    rows = [prompt(group) for group in range(8) for _ in range(8)]
    chosen = np.array(assign(router(), rows, [0, 0, 0, 0])).reshape(8, 8)
    assert all(len(set(group)) == 1 for group in chosen.tolist())
    assert np.bincount(chosen[:, 0]).tolist() == [2, 2, 2, 2]


def test_a_group_whose_rows_are_scattered_over_the_batch_stays_together_too():
    rows = [prompt(at % 8) for at in range(64)]
    chosen = assign(router(), rows, [0, 0, 0, 0])
    assert all(len({chosen[at] for at in range(group, 64, 8)}) == 1 for group in range(8))


def test_a_group_too_large_for_one_replica_is_split():
    chosen = assign(router(), [prompt(1)] * 64, [0, 0, 0, 0])
    # A share is 16 prompts of 40 tokens; two more, and what 32 tokens of prefix are worth, may stay.
    assert sorted(np.bincount(chosen).tolist()) == [64 - 3 * 18, 18, 18, 18]


def test_a_group_is_not_split_for_less_than_its_prefix_is_worth():
    # A share is 40 + 4 prompts of 40 tokens; two more and 32 tokens: 312. The first replica reaches 20 + 7 x 40 = 300.
    assert assign(router(), [prompt(1)] * 8, [20, 60]) == [0] * 7 + [1]


def test_a_group_that_moves_moves_together():
    to = router()
    assign(to, [prompt(1)] * 2 + [prompt(2)] * 2, [0, 0, 0])
    assert assign(to, [prompt(1)] * 4, [5000, 9000, 8000]) == [0] * 4
    assert assign(to, [prompt(1)] * 4, [9000, 8000, 0]) == [2] * 4


# Sessions


def test_a_session_stays_where_it_began_although_its_prompts_have_nothing_in_common():
    to = router()
    [home] = assign(to, [prompt(1)], [0, 0, 0], sessions=("s",))
    assert [assign(to, [prompt(at)], [0, 0, 0], sessions=("s",)) for at in range(2, 12)] == [[home]] * 10


def test_alternating_loads_do_not_move_a_session():
    # In units of one request of 40 tokens: 3 and 2, then 2 and 3, and so on.
    to, chosen = router(), []
    for turn in range(40):
        loads = [120, 80] if turn % 2 else [80, 120]
        chosen += assign(to, [prompt(turn)], loads, sessions=("s",))
    assert sum(one != other for one, other in itertools.pairwise(chosen)) <= 1


def test_an_overloaded_replica_loses_a_session_once_and_does_not_get_it_back_at_once():
    to = router()
    assert assign(to, [prompt(1)], [0, 5], sessions=("s",)) == [0]
    assert assign(to, [prompt(2)], [1000, 0], sessions=("s",)) == [1]
    assert assign(to, [prompt(3)], [0, 0], sessions=("s",)) == [1]
    assert to.stats().moved == 1


def test_a_session_stays_for_more_load_when_its_history_is_there():
    # Cost 408, load L on the first of two: it stays while L <= 1,224 with nothing to lose, and 2,024 with 400 tokens,
    # of which only the first 40 are looked at.
    for next_prompt, load, expected in ((2, 1220, 0), (2, 1230, 1), (1, 2020, 0), (1, 2030, 1)):
        to = router(prefix_length=40)
        assert assign(to, [prompt(1, 400)], [0, 0], sessions=("s",)) == [0]
        assert assign(to, [prompt(next_prompt, 400)], [load, 0], sessions=("s",)) == [expected]


def test_prompts_of_a_new_session_in_one_batch_go_to_one_replica():
    chosen = assign(router(), [prompt(at) for at in range(6)], [0, 0, 0], sessions=("a", "a", "b", None, "b", "c"))
    assert chosen[0] == chosen[1]
    assert chosen[2] == chosen[4]
    assert set(chosen) == {0, 1, 2}


def test_the_least_recently_used_session_is_dropped():
    to = router(max_sessions=2)
    for session in ("a", "b", "a", "c"):
        assign(to, [[1]], [0, 0], sessions=(session,))
    assert to.stats().sessions == 2
    home = assign(to, [[1]], [0, 0], sessions=("a",))
    assert to.stats().session == 2
    assert home == assign(to, [[1]], [0, 0], sessions=("a",))


# Strategies


def test_requests_looks_at_load_alone():
    to = router("requests")
    assert assign(to, [prompt(1)], [0, 9]) == [0]
    assert assign(to, [prompt(1)], [1, 0], sessions=("s",)) == [1]
    assert to.stats().prefixes == 0


def test_round_robin_takes_replicas_in_turn_over_batches_whatever_their_load():
    to = router("round-robin")
    assert assign(to, [[1]] * 4, [99, 0, 0]) == [0, 1, 2, 0]
    assert assign(to, [[1]] * 3, [99, 0, 0]) == [1, 2, 0]
    assert to.stats().turn == 7


def test_prefixes_then_turns():
    to = router("prefix-aware", "round-robin")
    assert assign(to, [prompt(1), prompt(2), prompt(3)], [0, 0]) == [0, 1, 0]
    assert assign(to, [prompt(2), prompt(4)], [0, 0]) == [1, 1]


def test_kv_cache_chooses_the_lowest_use_and_adds_what_was_sent_since_the_sample():
    to = router("kv-cache")
    # 1,000 tokens fill 0.5 in all: 2,000 make a full cache. Use is then worth 800 and 200 tokens.
    assert assign(to, [prompt(1)], snapshot([500, 500], kv_usage=[0.4, 0.1])) == [1]
    # The same sample with 700 more tokens on the second: 800 against 900.
    assert assign(to, [prompt(1)], snapshot([500, 1200], kv_usage=[0.4, 0.1])) == [0]
    assert assign(to, [prompt(1)], snapshot([500, 1200], kv_usage=[0.4, 0.0])) == [1]


def test_an_unknown_kv_use_leaves_the_choice_to_the_next_strategy():
    unknown = snapshot([5, 0, 3], kv_usage=[0.1, np.nan, 0.0])
    assert assign(router("kv-cache", "round-robin"), [[1], [1]], unknown) == [0, 1]
    assert assign(router("kv-cache"), [[1]], unknown) == [1]


@pytest.mark.parametrize("settings", [{"max_prefixes": 3}, {"max_sessions": 0}, {"max_sessions": True}])
def test_a_table_without_room_is_refused(settings):
    with pytest.raises(ConfigError, match="must be an integer of at least"):
        RoutingConfig(**settings)


# Forgetting and counting


def test_forgetting_a_replica_leaves_no_trace_of_it():
    to, rows = router(), [prompt(at) for at in range(9)]
    assign(to, rows, [0, 0, 0], sessions=tuple(f"s{at}" for at in range(9)))
    to.forget(1)
    stats = to.stats()
    assert stats.sessions == 6
    assert [index for index, _ in stats.per_replica] == [0, 2]
    # What replica 1 had goes to whoever is least loaded; what the others had stays, whatever the load.
    chosen = assign(to, rows, [30, 0, 30])
    assert [chosen[at] for at in (0, 2, 3, 5, 6, 8)] == [0, 2, 0, 2, 0, 2]
    assert chosen[1] == 1


def test_nothing_is_sent_to_a_replica_that_is_not_in_the_snapshot():
    to = router()
    assert assign(to, [prompt(1)], snapshot([9, 9, 0], indices=[3, 5, 8]), sessions=("s",)) == [2]
    assert assign(to, [prompt(1)], snapshot([0, 9], indices=[3, 5]), sessions=("s",)) == [0]
    assert assign(to, [prompt(1)], snapshot([9, 9, 9], indices=[3, 5, 8]), sessions=("s",)) == [0]


def test_after_a_refit_prefixes_bind_no_longer_and_sessions_stay():
    to = router()
    assert assign(to, [prompt(1), prompt(2)], [0, 0], sessions=("s", None)) == [0, 1]
    to.forget_prefixes()
    assert to.stats().prefixes == 0
    assert assign(to, [prompt(2), prompt(3)], [0, 1], sessions=(None, "s")) == [1, 0]


def test_decisions_are_counted_by_cause():
    to = router()
    assign(to, [prompt(1), prompt(1), prompt(2)], [0, 0], sessions=(None, None, "s"))
    assign(to, [prompt(3), prompt(1)], [0, 0], sessions=("s", None))
    assign(to, [prompt(1)], [9999, 0])
    stats = to.stats()
    assert (stats.load, stats.prefix, stats.session, stats.moved, stats.decisions) == (2, 2, 1, 1, 6)
    assert sum(count for _, count in stats.per_replica) == 6


# What holds for every batch

LOADS = st.lists(st.integers(0, 500), min_size=1, max_size=5)
BATCHES = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40), st.sampled_from([None, "a", "b"])), max_size=10),
    min_size=1,
    max_size=4,
)


def run(batches, loads) -> list[list[int]]:
    to = router()
    chosen = []
    for batch in batches:
        rows = [prompt(1, length) + [seed] * 5 for seed, length, _ in batch]
        chosen.append(assign(to, rows, loads, sessions=tuple(session for _, _, session in batch)))
    return chosen


@settings(derandomize=True, deadline=None, max_examples=80)
@given(batches=BATCHES, loads=LOADS)
def test_every_row_is_assigned_to_a_replica_and_none_beyond_the_bound(batches, loads):
    for batch, chosen in zip(batches, run(batches, loads), strict=True):
        costs = [length + 5 + RESPONSE for _, length, _ in batch]
        assert len(chosen) == len(batch)
        assert set(chosen) <= set(range(len(loads)))
        if not batch:
            continue
        share = (sum(loads) + sum(costs)) / len(loads)
        bound = max(1.5 * share + ALLOWED_REQUESTS * sum(costs) / len(costs), share + max(costs))
        for replica, load in enumerate(loads):
            added = sum(cost for cost, at in zip(costs, chosen, strict=True) if at == replica)
            assert added == 0 or load + added <= bound


@settings(derandomize=True, deadline=None, max_examples=30)
@given(batches=BATCHES, loads=LOADS)
def test_the_same_history_gives_the_same_choice(batches, loads):
    assert run(batches, loads) == run(batches, loads)


def test_rows_may_be_a_part_of_the_batch_in_any_order():
    to = router()
    prompts = PromptBatch.from_rows([prompt(at) for at in range(4)])
    costs = np.full(2, 40, np.int64)
    assert to.assign(prompts, [3, 1], costs, snapshot([0, 0])).tolist() == [0, 1]
    assert assign(to, [prompt(1), prompt(3)], [0, 0]) == [1, 0]


def test_no_rows_are_assigned_to_nobody():
    assert assign(router(), [], [0, 0]) == []
