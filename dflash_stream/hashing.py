"""Integer hashes that are the same in every process, on every machine, and in every version of numpy or torch.

Everything with an order in it (the shuffle, the permutation of an epoch, the choice of anchors) is a sort by `mix64`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mix64(*parts: int | NDArray[Any]) -> NDArray[np.uint64]:
    """A uint64 hash of integers, elementwise over arrays that broadcast: a chain of splitmix64 finalizers.

    Negative integers are taken modulo 2**64. Source of the constants: splitmix64 (S. Vigna, public domain).
    """
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            word = np.uint64(part % (1 << 64)) if isinstance(part, int) else np.asarray(part).astype(np.uint64)
            state = (state ^ word) + _GAMMA
            state = (state ^ (state >> np.uint64(30))) * _MULTIPLY_1
            state = (state ^ (state >> np.uint64(27))) * _MULTIPLY_2
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


def permutation(size: int, *seeds: int) -> NDArray[np.int64]:
    """A permutation of 0..size-1 that depends on the seeds alone."""
    return np.argsort(mix64(*seeds, np.arange(size, dtype=np.uint64)), kind="stable").astype(np.int64)


def token_hash(input_ids: Any) -> int:
    """A 64-bit hash of a token sequence; identifies a sample's content across machines and tools."""
    data = np.asarray(input_ids, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def fingerprint(value: Any) -> str:
    """sha256 of a JSON value in canonical form (sorted keys, no blanks), as hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
