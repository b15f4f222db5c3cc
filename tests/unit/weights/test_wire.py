"""What both ends of a broadcast agree on."""

from __future__ import annotations

import json

import pytest
import torch

from rl_vllm.protocols import wire
from rl_vllm.types import TensorSpec

INVITATION = wire.Invitation(
    host="192.0.2.7",
    port=4000,
    group="v3-ab",
    first_ranks={"0": 1, "2": 3},
    world_size=4,
    backend="gloo",
    bucket_bytes=64,
    hold="none",
    timeout_s=5.0,
    checksum=False,
)


def test_an_invitation_survives_json_and_a_replicas_index() -> None:
    payload = json.loads(json.dumps({**INVITATION.to_payload(), "replica": 2}))
    assert wire.Invitation.from_payload(payload) == INVITATION


def test_specs_survive_json_in_their_order() -> None:
    specs = (TensorSpec("b", "bfloat16", (2, 3)), TensorSpec("a", "int64", ()), TensorSpec("c", "bool", (0, 4)))
    assert wire.specs_from_json(wire.specs_to_json(specs)) == specs


def test_every_tensor_begins_where_any_dtype_may() -> None:
    specs = [TensorSpec("x", "bfloat16", (3, 5)), TensorSpec("y", "uint8", ()), TensorSpec("z", "float64", (2,))]
    assert wire.starts_of(specs) == [0, 32, 48, 64]
    assert wire.starts_of([]) == [0]


@pytest.mark.parametrize(("num_bytes", "lengths"), [(0, []), (3, [3]), (4, [4]), (5, [4, 1]), (12, [4, 4, 4])], ids=str)
def test_only_the_last_bucket_is_shorter(num_bytes: int, lengths: list[int]) -> None:
    assert wire.bucket_lengths(num_bytes, 4) == lengths


def test_sizes_are_those_of_the_tensors_memory() -> None:
    assert wire.size_bytes(TensorSpec("x", "bfloat16", (3, 5))) == 30
    assert wire.size_bytes(TensorSpec("x", "float64", ())) == 8
    assert wire.size_bytes(TensorSpec("x", "float32", (0, 5))) == 0


def test_bytes_of_a_contiguous_tensor_are_its_own_memory() -> None:
    tensor = torch.zeros(2, 2)
    wire.flat_bytes(tensor).fill_(255)
    assert torch.isnan(tensor).all()


def test_a_wait_ends_with_what_its_check_raises() -> None:
    def gone() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        wire.wait_until(lambda: False, gone, wire.Deadline(60.0))


def test_a_wait_ends_at_its_deadline() -> None:
    assert not wire.wait_until(lambda: False, lambda: None, wire.Deadline(0.0))
