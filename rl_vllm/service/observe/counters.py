"""What the service has done since launch, counted where it happens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ServiceCounters:
    """Plain counts that only grow; changed on the service's loop only.

    Attributes:
        requests: Prompts sent for the first time.
        completed: Prompts answered.
        failed: Prompts that ended in a failure of their own.
        cancelled: Prompts given up by their caller or a deadline.
        rerouted: Prompts sent again because their replica left.
        refused: Prompts refused because of the bound on outstanding ones.
        tokens: Response tokens delivered.
        deaths: Replicas that died.
        restarts: Replicas started again.
        refits: Refits committed on every replica.
        refits_failed: Refits that failed.
    """

    requests: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    rerouted: int = 0
    refused: int = 0
    tokens: int = 0
    deaths: int = 0
    restarts: int = 0
    refits: int = 0
    refits_failed: int = 0
