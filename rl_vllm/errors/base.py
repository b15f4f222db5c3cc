"""The base class, and what may go wrong with settings, inputs and the service."""

from __future__ import annotations


class RLVLLMError(Exception):
    """Base class: ``except RLVLLMError`` catches everything this package raises on purpose."""

    def __init__(self, *facts: object) -> None:
        # ``args`` holds the constructor's arguments, so the default pickling rebuilds the instance from its facts.
        super().__init__(*facts)

    def __str__(self) -> str:
        return self.message()

    def message(self) -> str:
        """One sentence that says what happened and what to do."""
        return " ".join(str(fact) for fact in self.args)


class ConfigError(RLVLLMError, ValueError):
    """A setting has a value it cannot have, or two settings contradict each other."""


class BadPromptError(RLVLLMError, ValueError):
    """A row of the batch cannot be sent to the engine.

    Attributes:
        row: Position of the prompt in the batch.
        reason: What is wrong with it, with the value, and what to do.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(row, reason)
        self.row = row
        self.reason = reason

    def message(self) -> str:
        return f"prompt {self.row}: {self.reason}"


class BadInputError(RLVLLMError, ValueError):
    """A tensordict, dataset or tensor given by the caller cannot be used; says which entry and why."""


class ServiceNotRunningError(RLVLLMError, RuntimeError):
    """The service was used before ``launch`` or after ``shutdown``.

    Attributes:
        state: "not launched" or "shut down".
        call: The method that was called.
    """

    def __init__(self, state: str, call: str) -> None:
        super().__init__(state, call)
        self.state = state
        self.call = call

    def message(self) -> str:
        return (
            f"{self.call} needs a running service, but this one is {self.state}: build one with AsyncVLLM.launch(...)"
        )


class ServiceOverloadedError(RLVLLMError, RuntimeError):
    """The service holds as many requests as it may, and was configured to refuse more.

    Attributes:
        outstanding: Requests it holds.
        limit: The bound.
        asked: Requests that were to be added.
    """

    def __init__(self, outstanding: int, limit: int, asked: int) -> None:
        super().__init__(outstanding, limit, asked)
        self.outstanding = outstanding
        self.limit = limit
        self.asked = asked

    def message(self) -> str:
        return (
            f"{self.outstanding} of at most {self.limit} requests are outstanding and {self.asked} more were given: "
            "send them later, raise max_outstanding_requests, or set on_overload=Overload.WAIT"
        )


class ServiceAsleepError(RLVLLMError, RuntimeError):
    """The service cannot generate: its engines sleep, or have woken without weights.

    Attributes:
        call: The method that was called.
        remedy: What to do first.
    """

    def __init__(self, call: str, remedy: str) -> None:
        super().__init__(call, remedy)
        self.call = call
        self.remedy = remedy

    def message(self) -> str:
        return f"{self.call} needs engines that are awake and have weights: {self.remedy}"


class ReplicaIndexError(RLVLLMError, IndexError):
    """No replica has this index.

    Attributes:
        index: What was given.
        known: The indices there are.
    """

    def __init__(self, index: object, known: tuple[int, ...]) -> None:
        super().__init__(index, known)
        self.index = index
        self.known = known

    def message(self) -> str:
        return f"no replica has the index {self.index!r}: give one of {list(self.known)}, or None for all"


class UnknownRequestError(RLVLLMError, LookupError):
    """No request of this id is known.

    Attributes:
        request_id: What was given.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def message(self) -> str:
        return f"no request {self.request_id!r} is known: it was never added, or has been forgotten since it ended"


class ReplicaCallError(RLVLLMError, RuntimeError):
    """A call to all replicas failed on some of them.

    Attributes:
        call: The method that was called.
        failures: ``(replica, reason)`` for each that failed; the others have done it.
    """

    def __init__(self, call: str, failures: tuple[tuple[int, str], ...]) -> None:
        super().__init__(call, failures)
        self.call = call
        self.failures = failures

    def message(self) -> str:
        each = "; ".join(f"replica {replica}: {reason}" for replica, reason in self.failures)
        return f"{self.call} failed on {len(self.failures)} replicas: {each}"


class UnsupportedByEngineError(RLVLLMError, RuntimeError):
    """The engine cannot do what was asked, whatever its health: the model, the build or a setting does not allow it."""


class NotEnoughResourcesError(RLVLLMError, RuntimeError):
    """The Ray cluster cannot hold what was asked for.

    Attributes:
        wanted: What the replicas need, for example ``{"CPU": 4.0}``.
        available: What the cluster has.
        kind: "in total", or "free": large enough, but others hold what is missing.
    """

    def __init__(self, wanted: dict[str, float], available: dict[str, float], kind: str = "in total") -> None:
        super().__init__(wanted, available, kind)
        self.wanted = wanted
        self.available = available
        self.kind = kind

    def message(self) -> str:
        return (
            f"the replicas need {self.wanted}, each on one node, but the Ray cluster has {self.available} {self.kind}: "
            "lower num_replicas or tensor_parallel_size, shut down what holds the rest, or add nodes"
        )


class EngineStartError(RLVLLMError, RuntimeError):
    """An engine did not come up.

    Attributes:
        replica: Index of the replica.
        reason: The engine's own words, taken from the process that failed.
    """

    def __init__(self, replica: int, reason: str) -> None:
        super().__init__(replica, reason)
        self.replica = replica
        self.reason = reason

    def message(self) -> str:
        return f"replica {self.replica} did not start: {self.reason}"


class EngineDiedError(RLVLLMError, RuntimeError):
    """An engine stopped working while it held requests.

    Attributes:
        replica: Index of the replica.
        reason: What was observed.
    """

    def __init__(self, replica: int, reason: str) -> None:
        super().__init__(replica, reason)
        self.replica = replica
        self.reason = reason

    def message(self) -> str:
        return f"replica {self.replica} died: {self.reason}"


class NoReplicaServesError(EngineDiedError):
    """Fewer replicas can take requests than the floor, and none is on its way: each died, or a refit failed on it.

    Attributes:
        replica: Index of the first one.
        reason: What became of each, and what to do.
    """

    def message(self) -> str:
        return f"no replica serves: {self.reason}"


class DeadlineError(RLVLLMError, TimeoutError):
    """A wait ran out of time; what was waited for has been aborted.

    Attributes:
        waited_for: What was being waited for.
        timeout_s: The limit, in seconds.
    """

    def __init__(self, waited_for: str, timeout_s: float) -> None:
        super().__init__(waited_for, timeout_s)
        self.waited_for = waited_for
        self.timeout_s = timeout_s

    def message(self) -> str:
        return f"gave up after {self.timeout_s:g} s waiting for {self.waited_for}"
