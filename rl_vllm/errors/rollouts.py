"""What may go wrong with a rollout and what is made of it."""

from __future__ import annotations

from rl_vllm.errors.base import RLVLLMError


class RewardError(RLVLLMError, ValueError):
    """A reward function returned something that is not one finite number per completion."""


class PrefixMismatchError(RLVLLMError, ValueError):
    """The turns of a rendered chat cannot be matched with those that passed through the model.

    Attributes:
        expected: Ends of turn in the render of the turns before.
        found: Ends of turn in the render of the whole chat.
        end_of_turn_ids: What was counted.
    """

    def __init__(self, expected: int, found: int, end_of_turn_ids: tuple[int, ...]) -> None:
        super().__init__(expected, found, end_of_turn_ids)
        self.expected = expected
        self.found = found
        self.end_of_turn_ids = end_of_turn_ids

    def message(self) -> str:
        ends = " or ".join(map(str, self.end_of_turn_ids))
        if not self.expected:
            return (
                f"the render of the turns before has no token {ends}: name the ids with which the chat template ends a "
                "turn in end_of_turn_ids"
            )
        return (
            f"the turns before end with {self.expected} tokens {ends}, and the whole chat has {self.found}: the chat "
            "template left a turn out; begin a new segment with the whole render, or use a template that keeps turns"
        )


class NoProgressError(RLVLLMError, RuntimeError):
    """A collector delivered nothing for too long.

    Attributes:
        limit_s: How long it may.
        waited_for: What was in flight.
        last_error: The newest failure's words, or None when nothing failed.
    """

    def __init__(self, limit_s: float, waited_for: str, last_error: str | None) -> None:
        super().__init__(limit_s, waited_for, last_error)
        self.limit_s = limit_s
        self.waited_for = waited_for
        self.last_error = last_error

    def message(self) -> str:
        cause = "nothing failed" if self.last_error is None else f"the last failure: {self.last_error}"
        return (
            f"no group was finished within {self.limit_s:g} s while waiting for {self.waited_for}; {cause}. Look at "
            "what the environment and the service do, or raise no_progress_s"
        )


class OverSamplingError(RLVLLMError, RuntimeError):
    """Too many groups were rejected for one batch.

    Attributes:
        cap: Groups that may be finished for one batch.
        accepted: Those that were accepted.
        wanted: Groups of a batch.
        reasons: Why the others were not, with their numbers, as (reason, number) pairs.
    """

    def __init__(self, cap: int, accepted: int, wanted: int, reasons: tuple[tuple[str, int], ...]) -> None:
        super().__init__(cap, accepted, wanted, reasons)
        self.cap = cap
        self.accepted = accepted
        self.wanted = wanted
        self.reasons = reasons

    def message(self) -> str:
        listed = ", ".join(f"{number} {reason}" for reason, number in self.reasons)
        return (
            f"{self.cap} groups were finished for one batch, and {self.accepted} of the {self.wanted} it needs were "
            f"accepted ({listed}): use prompts of another difficulty, or raise max_oversampling"
        )


class GenerationError(RLVLLMError, RuntimeError):
    """The engine refused or lost requests for a reason that is not the replica's health.

    Attributes:
        failures: ``(row, reason)`` for each prompt that got no answer.
    """

    def __init__(self, failures: tuple[tuple[int, str], ...]) -> None:
        super().__init__(failures)
        self.failures = failures

    def message(self) -> str:
        row, reason = self.failures[0]
        return f"{len(self.failures)} prompts failed; first, prompt {row}: {reason}"


class MissingLogprobError(RLVLLMError, RuntimeError):
    """The engine returned a sampled token without its logprob, or with a NaN.

    Attributes:
        request: The request's number.
        position: Index of the token in the response.
        value: What came instead.
        version: Weight version that produced the token, or None when unknown.
    """

    def __init__(self, request: int, position: int, value: str, version: int | None) -> None:
        super().__init__(request, position, value, version)
        self.request = request
        self.position = position
        self.value = value
        self.version = version

    def message(self) -> str:
        return (
            f"request {self.request}, response token {self.position}, weight version {self.version}: "
            f"logprob is {self.value}; the weights are probably broken (NaN or infinity)"
        )


class MixedVersionsError(RLVLLMError, RuntimeError):
    """A refit came into the middle of a response, and partial rollouts were not wanted.

    Attributes:
        oldest: The version that sampled its first token.
        newest: The version that sampled its last one.
    """

    def __init__(self, oldest: int, newest: int) -> None:
        super().__init__(oldest, newest)
        self.oldest = oldest
        self.newest = newest

    def message(self) -> str:
        return (
            f"versions {self.oldest} to {self.newest} sampled one response, and partial_rollouts=False: allow them, or "
            "refit less often"
        )
