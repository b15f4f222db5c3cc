"""Values of a refit."""

import dataclasses
import json

import pytest

from rl_vllm.types import InFlight, KVCache, RefitReceipt, ShardEntry, TensorSpec, WeightManifest, hash_of_bytes

RECEIPT = RefitReceipt(
    version=3,
    transport="shared_storage",
    in_flight=InFlight.KEEP,
    kv=KVCache.RECOMPUTE,
    num_replicas=2,
    num_tensors=24,
    num_bytes=1_500_000,
    phase_s={"check": 0.25, "stage": 0.5, "commit": 1.0},
    stall_s=0.125,
    checksum="abc",
    num_rpcs=2,
)


def test_bytes_hash_to_published_values_of_xxh3() -> None:
    # https://github.com/Cyan4973/xxHash: XXH3_64bits of "" and of "abc", here as signed numbers.
    assert hash_of_bytes(b"") == 0x2D06800538D394C2
    assert hash_of_bytes(b"abc") == 0x78AF5F94892F3950
    assert min(hash_of_bytes(bytes([value])) for value in range(8)) < 0


def test_a_receipt_adds_up_its_phases():
    assert RECEIPT.total_s == 1.75


def test_a_receipt_reads_as_one_line_with_every_fact():
    assert str(RECEIPT) == (
        "version=3 transport=shared_storage replicas=2 tensors=24 MB=1.5 check=0.250s stage=0.500s commit=1.000s "
        "stall=0.125s in_flight=keep kv=recompute double_buffered=no checksum=abc"
    )


def test_a_receipt_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECEIPT.version = 4


def test_a_manifest_returns_from_its_file_unchanged():
    manifest = WeightManifest(
        version=3,
        writer="trainer-1",
        entries=(
            ShardEntry(TensorSpec("model.norm.weight", "float32", (64,)), file="0.safetensors", xxh3=17),
            ShardEntry(TensorSpec("scale", "bfloat16", ()), file="1.safetensors", xxh3=2**32 - 1),
        ),
    )
    again = WeightManifest.from_json(manifest.to_json())
    assert again == manifest
    assert isinstance(again.entries[0].spec.shape, tuple)


def test_a_manifest_file_names_its_contents():
    manifest = WeightManifest(1, "w", (ShardEntry(TensorSpec("a", "float32", (2, 3)), file="f", xxh3=5),))
    assert json.loads(manifest.to_json()) == {
        "version": 1,
        "writer": "w",
        "entries": [{"spec": {"name": "a", "dtype": "float32", "shape": [2, 3]}, "file": "f", "xxh3": 5}],
    }
