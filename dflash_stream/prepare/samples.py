"""Rows → samples: what is cut, what is dropped, what is rejected, and the hashes that place a sample.

Runs inside the worker processes; everything here is a function of the row and the settings, so that neither the
number of workers nor their timing can show in a run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_stream.config import PrepareSettings
from dflash_stream.hashing import mix64, token_hash
from dflash_stream.prepare.chats import BadRow, parse_chat
from dflash_stream.prepare.template import Renderer, Tokens

META = np.dtype(
    [
        ("order", "<u8"),  # place in the seeded order
        ("group", "<u8"),  # hash of the prompt: the samples of a conversation are held out together
        ("token_hash", "<u8"),
        ("row", "<i8"),
        ("source", "<i4"),  # number of the input file
        ("turn", "<i4"),
        ("tokens", "<i4"),
        ("supervised", "<i4"),
        ("prompt", "<i4"),  # tokens before the first supervised one
    ]
)
REASON_CHARS = 400
TOKEN_BYTES = 5  # of a token in a spill file: its id and its mask


@dataclass(frozen=True)
class Record:
    """A sample on its way: its row of META, input_ids [T] int32, loss_mask [T] uint8."""

    meta: Any
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


def records(meta: NDArray[Any], payload: bytes, order: NDArray[np.int64] | None = None) -> Iterator[Record]:
    """The samples of META [n] and their payloads, one after the other or in the given order."""
    ends = np.cumsum(meta["tokens"].astype(np.int64)) * TOKEN_BYTES
    for i in range(len(meta)) if order is None else order.tolist():
        tokens = int(meta["tokens"][i])
        start = int(ends[i]) - tokens * TOKEN_BYTES
        yield Record(
            meta[i],
            np.frombuffer(payload, "<i4", tokens, start),
            np.frombuffer(payload, np.uint8, tokens, start + 4 * tokens),
        )


@dataclass(frozen=True)
class Rejection:
    """A row, or one turn of it, that made no sample. `rejected`: the row is bad; otherwise a rule dropped it."""

    source: str
    row: int
    reason: str
    rejected: bool

    def to_json(self) -> str:
        kind = "rejected" if self.rejected else "dropped"
        return json.dumps({"source": self.source, "row": self.row, "kind": kind, "reason": self.reason})


@dataclass
class Samples:
    """What a chunk of rows became: META [n], and for each sample its ids (int32) and then its mask (uint8)."""

    rows: int = 0
    chats: int = 0
    meta: NDArray[Any] = field(default_factory=lambda: np.empty(0, META))
    payload: bytes = b""
    refused: list[Rejection] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """What a sample must keep to. `max_sample_tokens`: the most whose states fit into one member of a shard."""

    vocab_size: int
    max_sample_tokens: int


class Maker:
    """Turns rows into samples. The renderer is needed, and made, only when a row is a conversation."""

    def __init__(
        self, settings: PrepareSettings, limits: Limits, make_renderer: Callable[[], Renderer]
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._make_renderer = make_renderer
        self._renderer: Renderer | None = None

    def make(self, source: int, name: str, rows: list[tuple[int, Any]]) -> Samples:
        """Samples of (row number, row) pairs of the file `name`; a row that could not be read is a BadRow."""
        out = Samples(rows=len(rows))
        metas: list[tuple[Any, ...]] = []
        payloads: list[bytes] = []
        for number, row in rows:
            try:
                tokenised, found = self._tokens(row)
                made = [self._sample(source, name, number, tokens) for tokens in found]
            except BadRow as reason:
                out.refused.append(Rejection(name, number, shorten(str(reason)), True))
                continue
            out.chats += not tokenised
            for sample in made:
                if isinstance(sample, str):
                    out.refused.append(Rejection(name, number, sample, False))
                else:
                    metas.append(sample[0])
                    payloads.append(sample[1])
        out.meta = np.array(metas, META)
        out.payload = b"".join(payloads)
        return out

    def _tokens(self, row: Any) -> tuple[bool, list[Tokens]]:
        if isinstance(row, BadRow):
            raise row
        if not isinstance(row, dict):
            raise BadRow(f"the row is {type(row).__name__}, not an object")
        if row.get("input_ids") is not None:
            return True, [parse_tokens(row, self._limits.vocab_size)]
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return False, self._renderer.tokens(parse_chat(row))

    def _sample(self, source: int, name: str, row: int, tokens: Tokens) -> tuple[tuple[Any, ...], bytes] | str:
        """Meta and payload of a sample, or why it is dropped."""
        if not tokens.loss_mask.any():
            return f"no supervised token{turn_suffix(tokens)}"
        cut = cut_sample(
            tokens.input_ids, tokens.loss_mask, self._settings.max_tokens, self._settings.truncation
        )
        if isinstance(cut, str):
            return cut + turn_suffix(tokens)
        ids, mask = cut
        supervised = int(mask.sum())
        if supervised < self._settings.min_supervised_tokens:
            return f"fewer than {self._settings.min_supervised_tokens} supervised tokens{turn_suffix(tokens)}"
        if len(ids) > self._limits.max_sample_tokens:
            raise BadRow(
                f"{len(ids)} tokens, more than the {self._limits.max_sample_tokens} whose states fit into a "
                "shard's member (8 GiB): lower prepare.max_tokens"
            )
        if int(ids.max()) >= self._limits.vocab_size or int(ids.min()) < 0:
            raise BadRow(
                f"token id {int(ids.max())} is outside the target's vocabulary of {self._limits.vocab_size}"
            )
        content = token_hash(ids)
        order = int(mix64(self._settings.seed, name_hash(name), row, tokens.turn, content))
        prompt = int(mask.argmax())
        meta = (order, tokens.group, content, row, source, tokens.turn, len(ids), supervised, prompt)
        return meta, ids.astype("<i4").tobytes() + mask.tobytes()


def shorten(reason: str) -> str:
    """A reason may quote the row, which may be of any size."""
    return reason if len(reason) <= REASON_CHARS else reason[: REASON_CHARS - 2] + " …"


def turn_suffix(tokens: Tokens) -> str:
    """What a reason says of a sample that is one turn of its conversation."""
    return "" if tokens.turn < 0 else " in a turn"


def name_hash(name: str) -> int:
    """A hash of a file's base name, so that the order does not depend on where the file lies."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def cut_sample(
    ids: NDArray[np.int32], mask: NDArray[np.uint8], max_tokens: int, truncation: str
) -> tuple[NDArray[np.int32], NDArray[np.uint8]] | str:
    """ids [T], mask [T] without what serves nothing, or the reason to drop the sample.

    Ends after the last supervised token (states behind it are never read). Longer than `max_tokens`: cut on the
    right and ended anew, or dropped. Without two consecutive supervised tokens there is no anchor, hence
    nothing to train on.
    """
    ids, mask = _end(ids, mask)
    if len(ids) > max_tokens:
        if truncation == "drop":
            return f"longer than {max_tokens} tokens"
        ids, mask = _end(ids[:max_tokens], mask[:max_tokens])
        if not len(ids):
            return f"no supervised token among the first {max_tokens}"
    if not (mask[:-1] & mask[1:]).any():
        return "no two consecutive supervised tokens"
    return ids, mask


def _end(ids: NDArray[np.int32], mask: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    supervised = np.flatnonzero(mask)
    end = int(supervised[-1]) + 1 if len(supervised) else 0
    return ids[:end], mask[:end]


def parse_tokens(row: dict[str, Any], vocab_size: int) -> Tokens:
    """A row that came tokenised: input_ids and loss_mask of equal length. Raises BadRow."""
    if row.get("loss_mask") is None:
        raise BadRow("input_ids without loss_mask")
    try:
        ids, mask = np.asarray(row["input_ids"]), np.asarray(row["loss_mask"])
    except (ValueError, OverflowError) as error:
        raise BadRow(f"input_ids or loss_mask is not a flat list of numbers: {error}") from None
    if ids.ndim != 1 or mask.ndim != 1 or ids.dtype.kind not in "iu" or mask.dtype.kind not in "iub":
        raise BadRow("input_ids and loss_mask must be flat lists of integers")
    if len(ids) != len(mask):
        raise BadRow(f"{len(ids)} input_ids but a loss_mask of {len(mask)}")
    if not len(ids):
        raise BadRow("no tokens")
    if not np.isin(mask, (0, 1)).all():
        raise BadRow("loss_mask has values other than 0 and 1")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        wrong = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
        raise BadRow(f"token id {wrong} is outside the target's vocabulary of {vocab_size}")
    mask = mask.astype(np.uint8)
    prompt = int(mask.argmax()) or len(mask)  # nothing before the first supervised token tells samples apart
    return Tokens(ids.astype(np.int32), mask, -1, token_hash(ids[:prompt]))
