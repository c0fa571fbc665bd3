"""Writes the shard of one unit straight into the store, and commits it.

Tensors are copied once, into the part buffers of the uploader; no shard is ever whole in memory or on a disk.
The object has a name of its own, so nothing is overwritten, and nothing counts until the commit record is put.
Which samples belong to the unit, in which order, is left to the caller; `index` compares it with the sample
table.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch

from dflash_stream import layout
from dflash_stream.errors import UserError
from dflash_stream.run import Identity
from dflash_stream.shards import tar
from dflash_stream.shards.codec import encode, payload_header, require
from dflash_stream.shards.index import Committed, commit
from dflash_stream.shards.record import INDEX_MEMBER, Refusal, SampleEntry, ShardRecord
from dflash_stream.shards.tensors import check
from dflash_stream.store import Store, crc32c
from dflash_stream.store.upload import UploadedObject, Uploader

SUFFIX = ".safetensors"
_KEY = re.compile(r"[A-Za-z0-9_-]{1,80}")  # no dot: webdataset ends a key at the first one


class ShardWriter:
    """The shard of one unit while it is written. Use from one thread, best as a context manager.

    Leaving the context without `finish` publishes nothing and aborts the upload; so does a finalizer.
    """

    def __init__(
        self,
        uploader: Uploader,
        store: Store,
        identity: Identity,
        unit: int,
        *,
        made_with: dict[str, Any],
        size_hint: int = 0,
    ) -> None:
        """made_with: what the bits of the states depend on, as JSON values. size_hint: expected bytes."""
        require(identity.codec)
        self._store = store
        self._identity = identity
        attempt = layout.new_token()
        self.key = layout.shard(unit, attempt)
        self._record = ShardRecord(
            run=identity.fingerprint, unit=unit, attempt=attempt, samples=[], refused=[], made_with=made_with
        )
        self._keys: set[str] = set()
        self._torn = False  # a member was begun and not ended: this can become no shard
        self._finished = False
        self._upload = uploader.open(self.key, size_hint=size_hint)

    def add(self, key: str, tensors: dict[str, torch.Tensor]) -> None:
        """Store a sample: tensors on the CPU, as `tensors.RULES` says, K and H as in the run.

        Blocks while the pool of part buffers is empty. Raises SampleError when the tensors are not what the run
        stores (the shard goes on: the sample can be refused instead), StoreError when the upload has failed.
        """
        self._check_key(key)
        where = f"sample {key} of unit {self._record.unit}"
        check(
            tensors,
            where,
            num_layers=len(self._identity.layers),
            hidden_size=self._identity.target.hidden_size,
            final_state=self._identity.final_state != "none",
        )
        stored = encode(self._identity.codec, tensors, where)
        header = payload_header(self._identity.codec, stored)
        size = len(header) + sum(len(tensor.data) for tensor in stored)
        checksum = crc32c(header)
        for tensor in stored:
            checksum = crc32c(tensor.data, checksum)
        offset = self._write_member(key + SUFFIX, [header, *(tensor.data for tensor in stored)], size)
        tokens = len(tensors["input_ids"])
        self._record.samples.append(
            SampleEntry(key=key, offset=offset, size=size, crc32c=checksum, tokens=tokens)
        )
        self._keys.add(key)

    def refuse(self, key: str, reason: str) -> None:
        """Note a sample that cannot be stored, and why."""
        self._check_key(key)
        self._record.refused.append(Refusal(key=key, reason=reason))
        self._keys.add(key)

    def finish(self) -> Future[Committed]:
        """End the shard and return at once; its last parts and its commit record are sent in the background.

        The future raises UserError when the shard was not committed, or when that cannot be known.
        """
        if self._torn or self._finished:
            raise UserError(
                f"shard {self.key} cannot be finished: "
                + ("a sample is cut" if self._torn else "it was already")
            )
        body = self._record.to_bytes()
        self._write_member(INDEX_MEMBER, [body], len(body))
        self._upload.write(tar.END)
        uploaded = self._upload.finish()
        self._finished = True
        committed: Future[Committed] = Future()
        committed.set_running_or_notify_cancel()  # what is under way here cannot be cancelled, only aborted
        # A thread of its own: one of the uploader's must not wait for a commit while parts wait for it.
        threading.Thread(
            target=self._commit, args=(uploaded, committed), name=f"commit-{self._record.unit}", daemon=True
        ).start()
        return committed

    def abort(self) -> None:
        """Drop the shard unless it is whole in the store already; idempotent."""
        self._upload.abort()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self.abort()

    def _check_key(self, key: str) -> None:
        if not _KEY.fullmatch(key):
            raise UserError(
                f"{key!r} cannot be the key of a sample: 1 to 80 of the characters A-Z a-z 0-9 _ - can"
            )
        if key in self._keys:
            raise UserError(f"sample {key} comes twice in unit {self._record.unit}: keys of a run are unique")

    def _write_member(self, name: str, pieces: list[bytes | memoryview], size: int) -> int:
        """Write a tar member and return the offset of its body."""
        header = tar.header(name, size)
        self._torn = True
        self._upload.write(header)
        offset = self._upload.position
        for piece in pieces:
            self._upload.write(piece)
        self._upload.write(tar.padding(size))
        self._torn = False
        return offset

    def _commit(self, uploaded: Future[UploadedObject], committed: Future[Committed]) -> None:
        try:
            whole = uploaded.result()
            record = self._record.model_copy(
                update={"object": whole.key, "size": whole.size, "etag": whole.etag}
            )
            committed.set_result(commit(self._store, record))
        except BaseException as error:
            committed.set_exception(error)
