"""The balancer on its own, and over a service that counts."""

import threading

import numpy as np
import pytest

from rl_vllm.errors import ConfigError
from rl_vllm.service.load_balancer import LoadBalancer
from rl_vllm.service.router import Snapshot

ACTORS = ["a", "b", "c", "d"]
TEMPLATE = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"


class CountingService:
    """A service of three replicas, of which the second cannot be chosen."""

    def __init__(self) -> None:
        self.actors = [10, 11, 12]
        self.tokens = [0, 0]

    def snapshot(self) -> Snapshot:
        return Snapshot(
            indices_R=np.array([0, 2]),
            requests_R=np.array([2, 1]),
            tokens_R=np.array(self.tokens),
            kv_usage_R=np.array([0.25, np.nan]),
        )


def one_after_the_other(balancer: LoadBalancer, prompts: list) -> list[int]:
    """How often each actor was chosen, every request being over before the next one comes."""
    counts = [0] * len(balancer.actors)
    for prompt in prompts:
        index = balancer.acquire(prompt)
        counts[index] += 1
        balancer.release(index)
    return counts


@pytest.mark.parametrize("strategy", [None, "requests", "round-robin", "kv-cache", ["prefix-aware", "kv-cache"]])
def test_two_hundred_requests_to_idle_actors_are_spread(strategy):
    assert all(30 <= count <= 70 for count in one_after_the_other(LoadBalancer(ACTORS, strategy), [None] * 200))


def test_two_hundred_questions_in_one_chat_template_are_spread():
    texts = [f"{TEMPLATE}What is {at} times {at}?<|im_end|>" for at in range(200)]
    ids = [[*range(40), 100 + at, 5] for at in range(200)]
    for prompts in (texts, ids):
        assert all(30 <= count <= 70 for count in one_after_the_other(LoadBalancer(ACTORS), prompts))


@pytest.mark.parametrize(
    "prompt",
    ["Hello world", "word " * 200, [1, 2, 3], list(range(300)), {"prompt_token_ids": [4, 5]}, {"prompt": "hi"}],
)
def test_a_prompt_goes_where_it_went_before_while_actors_are_idle(prompt):
    balancer = LoadBalancer(ACTORS)
    balancer.select_actor()
    first = balancer.select_actor(prompt)
    assert ACTORS[first] == "b"
    assert [balancer.select_actor(prompt) for _ in range(20)] == [first] * 20


def test_ids_are_found_in_a_list_an_array_and_a_mapping_alike():
    ids = list(range(64))
    balancer = LoadBalancer(ACTORS)
    chosen = [balancer.select_actor(each) for each in (ids, np.array(ids), tuple(ids), {"prompt_token_ids": ids})]
    assert len(set(chosen)) == 1
    assert balancer.get_stats()["decisions"]["prefix"] == 3


def test_an_overloaded_actor_is_skipped_although_it_has_the_prefix():
    balancer = LoadBalancer(ACTORS)
    home = balancer.acquire("the same prompt")
    chosen = [balancer.acquire("the same prompt") for _ in range(19)]
    assert home in chosen
    assert max(chosen.count(index) + (index == home) for index in range(4)) <= 20 / 4 + 2


def test_released_requests_no_longer_count():
    balancer = LoadBalancer(["a", "b"], "requests")
    held = [balancer.acquire() for _ in range(6)]
    assert sorted(held) == [0, 0, 0, 1, 1, 1]
    for _ in range(3):
        balancer.release(0)
    assert [balancer.acquire() for _ in range(3)] == [0, 0, 0]


def test_a_block_of_code_holds_its_actor_and_gives_it_back_after_an_error():
    balancer = LoadBalancer(["a", "b"], "requests")
    with balancer.request() as first, balancer.request() as second:
        assert {first, second} == {"a", "b"}
        pending = [actor["pending_requests"] for actor in balancer.get_stats()["actor_stats"]]
        assert pending == [1, 1]
    with pytest.raises(KeyError), balancer.request():
        raise KeyError
    assert [actor["pending_requests"] for actor in balancer.get_stats()["actor_stats"]] == [0, 0]


def test_a_session_stays_on_its_actor():
    balancer = LoadBalancer(ACTORS)
    context = {"session_id": 7, "other": "ignored"}
    home = balancer.select_actor("first question", context)
    assert [balancer.select_actor(f"question {at}", context) for at in range(20)] == [home] * 20


def test_a_forgotten_actor_keeps_neither_its_sessions_nor_its_prefixes():
    balancer = LoadBalancer(["a", "b"])
    assert balancer.select_actor([1] * 20, {"session_id": "s"}) == 0
    balancer.forget(0)
    assert balancer.select_actor([1] * 20, {"session_id": "s"}) == 1


def test_over_a_service_its_own_counts_decide_and_only_what_serves_is_chosen():
    service = CountingService()
    balancer = LoadBalancer(service, "requests")
    service.tokens = [50, 0]
    assert balancer.actors[balancer.select_actor()] == 12
    assert balancer.acquire() == 2
    balancer.release(2)
    service.tokens = [0, 50]
    assert [balancer.select_actor() for _ in range(3)] == [0] * 3


def test_stats_tell_settings_loads_and_decisions():
    balancer = LoadBalancer(ACTORS, ("prefix-aware", "requests"), prefix_length=8, overload_threshold=2.0)
    for _ in range(3):
        balancer.acquire([1, 2, 3, 4, 5, 6, 7, 8])
    stats = balancer.get_stats()
    assert stats["strategies"] == ["prefix-aware", "requests"]
    assert (stats["primary_strategy"], stats["num_actors"]) == ("prefix-aware", 4)
    assert (stats["prefix_length"], stats["overload_threshold"]) == (8, 2.0)
    assert sum(actor["pending_requests"] for actor in stats["actor_stats"]) == 3
    assert [actor["cache_usage"] for actor in stats["actor_stats"]] == [None] * 4
    assert sum(stats["selected_per_actor"].values()) == 3
    assert "error" not in stats


def test_stats_of_a_service_show_what_it_knows_and_none_for_the_rest():
    actors = LoadBalancer(CountingService()).get_stats()["actor_stats"]
    assert [actor["pending_requests"] for actor in actors] == [2, None, 1]
    assert [actor["cache_usage"] for actor in actors] == [0.25, None, None]


@pytest.mark.parametrize("strategy", ["fastest", [], ["requests", "fastest"], ""])
def test_an_invalid_strategy_is_refused(strategy):
    with pytest.raises(ValueError, match="strategy must be"):
        LoadBalancer(ACTORS, strategy)


@pytest.mark.parametrize("actors", [[], (), "abc", 5])
def test_no_actors_are_refused(actors):
    with pytest.raises(ConfigError, match="actors"):
        LoadBalancer(actors)


NO_PROMPTS = [5.0, True, [[1, 2], [3, 4]], [[1], [2, 3]], ["a", "b"], [1.5, 2.0], {"tokens": [1]}]


@pytest.mark.parametrize("prompt", NO_PROMPTS)
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(ConfigError, match="prompt"):
        LoadBalancer(ACTORS).select_actor(prompt)


def test_releasing_what_was_not_acquired_is_refused():
    balancer = LoadBalancer(ACTORS)
    for index in (0, 4, -1):
        with pytest.raises(ConfigError, match="no request is in flight"):
            balancer.release(index)


def test_threads_lose_no_count():
    balancer = LoadBalancer(ACTORS)

    def work() -> None:
        for at in range(100):
            with balancer.request(f"{at}", {"session_id": at % 5}):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    stats = balancer.get_stats()
    assert sum(stats["selected_per_actor"].values()) == 400
    assert all(actor["pending_requests"] == 0 for actor in stats["actor_stats"])
