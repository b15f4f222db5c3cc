"""The next turn's prompt from the exact ids of the turns before, without decoding and encoding them again."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rl_vllm.errors import PrefixMismatchError


def replace_prefix_tokens(
    model_prefix: Sequence[int],
    template_prefix: Sequence[int],
    template_full: Sequence[int],
    end_of_turn_ids: int | Collection[int],
) -> list[int]:
    """Put the ids that really passed through the model in place of what the template made of them.

    A chat rendered anew may tokenise differently from what was sampled, and templates leave out what they do not want
    to see again (thoughts, white space). The turns are matched by counting: the prefix ends with its n-th end of turn,
    and what follows the n-th end of turn in the full render is new.

    The rule is NeMo RL's. Departure: of several end-of-turn ids, the one that was sampled stays.

    Args:
        model_prefix: Prompt and response ids of the turns before, or nothing on the first turn.
        template_prefix: The template's render of the same messages, up to and including the last answer, without a
            generation prompt.
        template_full: The template's render of all messages.
        end_of_turn_ids: What ends a turn; a model's often is not its EOS.

    Returns:
        ``model_prefix`` followed by what is new. When its last turn was cut off, the end of turn that the template
        writes stands between them.

    Raises:
        PrefixMismatchError: ``template_prefix`` has no end of turn, or ``template_full`` has fewer of them: the
            template left a turn out.
    """
    if not len(model_prefix):
        return list(template_full)
    ends = {end_of_turn_ids} if isinstance(end_of_turn_ids, int) else set(end_of_turn_ids)
    expected = sum(token in ends for token in template_prefix)
    places = [place for place, token in enumerate(template_full) if token in ends]
    if not 0 < expected <= len(places):
        raise PrefixMismatchError(expected, len(places), tuple(sorted(ends)))
    cut = places[expected - 1]
    if model_prefix[-1] in ends:
        cut += 1
    return [*model_prefix, *template_full[cut:]]
