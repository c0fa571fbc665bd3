"""The names of the objects of a run. Nothing else builds a key by hand."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable

RUN = "run.json"
SAMPLES = "tokens/samples.parquet"
TOKENS = "tokens/"
SHARDS = "shards/"
INDEX = "index/"
BLOCKS = "index/blocks/"
CLAIMS = "claims/"
HEAD = "head/"
STATUS = "status/"
DRAFTERS = "drafters/"


def unit_tokens(unit: int) -> str:
    """The prepared samples of a unit."""
    return f"{TOKENS}unit-{unit:06d}.parquet"


def shard(unit: int, attempt: str) -> str:
    """The shard of a unit made by one attempt; two hex digits spread the requests over the store's partitions."""
    spread = hashlib.blake2b(f"{unit}-{attempt}".encode(), digest_size=1).hexdigest()
    return f"{SHARDS}{spread}/shard-{unit:06d}-{attempt}.tar"


def record(unit: int) -> str:
    """The commit record of a unit: its shard exists if, and only if, this object does."""
    return f"{INDEX}shard-{unit:06d}.json"


def unit_of_record(key: str) -> int | None:
    """The unit of a commit record's key, None for any other key under index/."""
    return _unit_of(key, key.removeprefix(f"{INDEX}shard-").removesuffix(".json"), record)


def unit_of_shard(key: str) -> int | None:
    """The unit of a shard's key, whichever attempt made it; None for any other key."""
    name = key.rpartition("/")[2]
    unit, _, attempt = name.removeprefix("shard-").removesuffix(".tar").partition("-")
    return _unit_of(key, unit, lambda number: shard(number, attempt)) if attempt else None


def unit_of_claim(key: str) -> int | None:
    """The unit of a claim's key, None for any other key."""
    return _unit_of(key, key.removeprefix(f"{CLAIMS}unit-"), claim)


def _unit_of(key: str, digits: str, name: Callable[[int], str]) -> int | None:
    """The number that `digits` spell, if `key` is exactly its object: strangers may lie beside ours."""
    return int(digits) if digits.isdecimal() and key == name(int(digits)) else None


def block(block: int, digest: str) -> str:
    """The index of 1,024 consecutive units, made from the records that `digest` stands for."""
    return f"{BLOCKS}block-{block:06d}-{digest}.parquet"


def claim(unit: int) -> str:
    """Who works on a unit, until when; advisory."""
    return f"{CLAIMS}unit-{unit:06d}"


def drafter(name: str) -> str:
    """The prefix of a drafter."""
    return f"{DRAFTERS}{name}/"


def drafter_config(name: str) -> str:
    """The drafter's geometry, in the published config.json layout."""
    return f"{drafter(name)}config.json"


def owner(name: str) -> str:
    """Who may publish checkpoints of a drafter, and which ones there are."""
    return f"{drafter(name)}owner"


def checkpoints(name: str) -> str:
    """The prefix of a drafter's checkpoints."""
    return f"{drafter(name)}checkpoints/"


def checkpoint(name: str, step: int, token: str) -> str:
    """The prefix of one checkpoint; the token of the trainer that wrote it keeps two of them apart."""
    return f"{checkpoints(name)}step-{step:08d}-{token}/"


def exported(name: str, file: str) -> str:
    """A file of the drafter as a published checkpoint."""
    return f"{drafter(name)}export/{file}"


def evaluation(name: str) -> str:
    """What the drafter was last found to be worth."""
    return f"{drafter(name)}eval.json"


def new_token() -> str:
    """A random token that names one attempt or one writer."""
    return secrets.token_hex(6)
