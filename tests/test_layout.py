"""Which object of a store belongs to which unit; what lies beside them belongs to none."""

from __future__ import annotations

import pytest

from dflash_stream import layout


@pytest.mark.parametrize("unit", [0, 7, 999_999, 1_000_000])
def test_a_unit_is_lost_from_its_objects_names(unit: int) -> None:
    assert layout.unit_of_record(layout.record(unit)) == unit
    assert layout.unit_of_claim(layout.claim(unit)) == unit
    assert layout.unit_of_shard(layout.shard(unit, "6f2a09c1d4e8")) == unit


@pytest.mark.parametrize(
    "digits", ["7", "00007", "0000007", "00000²", "00000٣", "000007 ", "-00007", "", "+00007"]
)
def test_an_object_of_someone_else_is_taken_for_a_unit(digits: str) -> None:
    assert layout.unit_of_record(f"index/shard-{digits}.json") is None
    assert layout.unit_of_claim(f"claims/unit-{digits}") is None
    assert layout.unit_of_shard(f"shards/a7/shard-{digits}-6f2a09c1d4e8.tar") is None
