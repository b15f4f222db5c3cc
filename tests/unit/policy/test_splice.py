"""The next prompt begins with what went through the model, whatever the template makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_vllm import replace_prefix_tokens
from rl_vllm.errors import PrefixMismatchError

E = 2


@pytest.mark.parametrize(
    ("model_prefix", "template_prefix", "template_full", "expected"),
    [
        # First turn: the template's own ids.
        ([], [9, 2], [9, 2, 33, 44], [9, 2, 33, 44]),
        # Several ends of turn in the prefix: the second one in the full render is the seam.
        ([100, 2], [9, 2, 9, 2], [9, 2, 9, 2, 77, 88], [100, 2, 77, 88]),
        # The template leaves thoughts out of the older turn, and one turn more follows in the full render.
        (
            [11, 12, 99, 99, 99, 55, 2], [11, 12, 88, 88, 88, 56, 2], [11, 12, 56, 2, 70, 71, 2, 40, 41],
            [11, 12, 99, 99, 99, 55, 2, 70, 71, 2, 40, 41],
        ),
        # The answer tokenises differently when it is rendered: 220, 17 were sampled, 1001 is rendered.
        (
            [11, 12, 13, 40, 41, 220, 17, 2], [11, 12, 13, 40, 41, 1001, 2],
            [11, 12, 13, 40, 41, 1001, 2, 21, 22, 40, 41], [11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41],
        ),
        # Two line feeds stay two ids where the template has one.
        ([5, 198, 198, 2], [5, 271, 2], [5, 271, 2, 6], [5, 198, 198, 2, 6]),
        # Cut off by length: the template's end of turn stands between what was sampled and what is new.
        ([7, 8], [7, 8, 2], [7, 8, 2, 9], [7, 8, 2, 9]),
        # Only the end of turn was sampled.
        ([7, 2], [7, 2], [7, 2, 9, 4], [7, 2, 9, 4]),
        # Nothing is new.
        ([7, 2], [7, 2], [7, 2], [7, 2]),
    ],
)  # fmt: skip
def test_the_rule_by_hand(model_prefix, template_prefix, template_full, expected):
    assert replace_prefix_tokens(model_prefix, template_prefix, template_full, E) == expected


def test_of_several_ends_of_turn_the_sampled_one_stays():
    # 3 was sampled; the template writes 2.
    assert replace_prefix_tokens([7, 8, 3], [7, 8, 2], [7, 8, 2, 10, 11], {2, 3}) == [7, 8, 3, 10, 11]


@pytest.mark.parametrize(
    ("template_prefix", "template_full", "match"),
    [
        ([9, 9, 9], [9, 9, 9, 2, 10], "no token 2"),
        # An empty answer was left out: two turns ended before, one is left.
        ([1, 2, 5, 2], [1, 2, 7, 8], "left a turn out"),
        ([9, 2], [9, 9], "left a turn out"),
    ],
)
def test_turns_that_do_not_match_are_an_error(template_prefix, template_full, match):
    with pytest.raises(PrefixMismatchError, match=match):
        replace_prefix_tokens([1, 2, 5, 2], template_prefix, template_full, E)


TOKENS = st.lists(st.integers(3, 9), max_size=5)


@given(st.lists(TOKENS, min_size=1, max_size=4), TOKENS, st.lists(TOKENS, min_size=1, max_size=4), st.booleans())
def test_the_result_begins_with_the_exact_ids_and_ends_with_all_that_is_new(before, rendered, new, ended):
    model = [token for turn in before for token in [*turn, E]]
    if not ended:
        model = model[:-1]
    # The template renders each turn as something else, with as many ends of turn.
    prefix = [token for _ in before for token in [*rendered, E]]
    suffix = [token for turn in new for token in [*turn, E]]
    result = replace_prefix_tokens(model, prefix, prefix + suffix, E)
    if not model:
        assert result == prefix + suffix
        return
    assert result[: len(model)] == model
    # Without a sampled end of turn, the template's is put in.
    assert result[len(model) :] == ([] if model[-1] == E else [E]) + suffix
