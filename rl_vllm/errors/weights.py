"""What may go wrong with weights and refits."""

from __future__ import annotations

from rl_vllm.errors.base import RLVLLMError


class WeightsMismatchError(RLVLLMError, ValueError):
    """The trainer's tensors are not the ones the engine expects; found before any byte moved.

    Attributes:
        problems: One line for each difference.
    """

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def message(self) -> str:
        lines = "\n  ".join(self.problems)
        return f"{len(self.problems)} tensors do not match the engine's model; nothing was sent:\n  {lines}"


class AdapterMismatchError(WeightsMismatchError):
    """An adapter cannot be sent to this service; found before anything was written.

    Attributes:
        problems: One line for each reason.
    """

    def message(self) -> str:
        lines = "\n  ".join(self.problems)
        return f"the adapter does not fit the service, for {len(self.problems)} reasons; nothing was sent:\n  {lines}"


class RefitError(RLVLLMError, RuntimeError):
    """A refit did not take on every replica.

    Attributes:
        version: The version that was being installed.
        phase: "check", "stage", "commit" or "verify".
        replicas: The replicas that failed; empty when the trainer's side failed.
        reason: The first failing worker's own words.
    """

    def __init__(self, version: int, phase: str, replicas: tuple[int, ...], reason: str) -> None:
        super().__init__(version, phase, replicas, reason)
        self.version = version
        self.phase = phase
        self.replicas = replicas
        self.reason = reason

    def message(self) -> str:
        after = {
            "commit": "these replicas serve nothing until a refit completes",
            "verify": "every replica serves the new weights, which are committed",
        }.get(self.phase, "every replica still serves the old weights")
        who = f"replicas {list(self.replicas)}" if self.replicas else "the trainer"
        return f"refit to version {self.version} failed in {self.phase} on {who}: {self.reason} ({after})"


class AdapterRefitError(RefitError):
    """A version of an adapter was not installed on every replica, and has been removed where it was.

    Attributes:
        version: The version that was being installed.
        phase: "check", "stage" or "verify".
        replicas: The replicas that failed; empty when the trainer's side failed.
        reason: The first failing replica's own words.
    """

    def message(self) -> str:
        who = f"replicas {list(self.replicas)}" if self.replicas else "the trainer"
        return (
            f"adapter refit to version {self.version} failed in {self.phase} on {who}: {self.reason} (every replica "
            "still answers by the adapter it had)"
        )
