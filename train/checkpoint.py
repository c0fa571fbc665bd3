"""Checkpoints of a drafter in the store: who may publish them, how they are written, and how they are read back.

Everything of a drafter lies under drafters/NAME/. `owner` is its commit record: a small object that names the
trainer in charge (generation and token) and the checkpoints that exist, newest last. A checkpoint is published
by an If-Match put of `owner`, after all its objects are complete. So a checkpoint exists whole or not at all,
and a trainer that was replaced by a newer one can publish nothing: it does not hold the etag any more.

A checkpoint is model.safetensors (published tensor names, fp32), optimizer.safetensors (AdamW's moments) and
state.json (step, position in the data, settings). The owner's record holds the size and CRC32C of each. Neither
pickle nor a local file is involved.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_stream import layout
from dflash_stream.errors import UserError
from dflash_stream.store import NotFound, PreconditionFailed, Store, Uploader, crc32c
from dflash_stream.store.upload import ObjectUpload
from dflash_stream.tensorfile import objects
from dflash_stream.tensorfile.pieces import pieces, total_bytes

OWNER_VERSION = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Frozen):
    """How to know that an object of a checkpoint is whole."""

    size: int  # bytes
    crc32c: int


class CheckpointRecord(_Frozen):
    """A published checkpoint: `prefix` + name of the file is the key of each object."""

    step: int  # optimizer steps of the training that lie behind it
    prefix: str
    files: dict[str, FileRecord]

    @property
    def keys(self) -> list[str]:
        """The keys of its objects."""
        return [self.prefix + name for name in self.files]


class OwnerRecord(_Frozen):
    """The content of drafters/NAME/owner."""

    version: int = OWNER_VERSION
    generation: int  # rises by one with every trainer that takes over
    token: str  # of the trainer in charge; part of the keys of its checkpoints
    fingerprint: str  # of run.json
    settings: dict[str, Any]  # those that may not change while the drafter trains
    checkpoints: list[CheckpointRecord] = []  # newest last

    @property
    def newest(self) -> CheckpointRecord | None:
        return self.checkpoints[-1] if self.checkpoints else None


class TrainState(_Frozen):
    """The content of state.json."""

    step: int
    total_steps: int
    optimizer_steps: int  # fewer than `step` when a batch had nothing to learn from
    tokens: int  # seen so far
    first_loss: float
    last_loss: float
    acceptance: float | None  # over the target's own text, as last measured
    stream: dict[str, Any]  # position in the data: TrainStream.state_dict()
    drafter: dict[str, Any]  # config.json of the published layout
    fingerprint: str  # of run.json
    settings: dict[str, Any]  # as in the owner's record


class LostOwnership(UserError):  # noqa: N818
    """Another trainer took the drafter over; this one may publish nothing any more."""


def read_owner(store: Store, name: str) -> tuple[OwnerRecord, str] | None:
    """The owner's record and its etag; None when no trainer has ever started. UserError when it cannot be read."""
    key = layout.owner(name)
    try:
        body, etag = store.get(key)
    except NotFound:
        return None
    try:
        record = OwnerRecord.model_validate_json(body)
    except ValidationError as error:
        lacking = ", ".join(".".join(map(str, problem["loc"])) or problem["msg"] for problem in error.errors())
        raise UserError(
            f"{store.url}/{key} is damaged, it is not an owner record ({lacking}): choose another --train.name"
        ) from None
    if record.version != OWNER_VERSION:
        raise UserError(
            f"{store.url}/{key} has version {record.version}, this dflash-stream reads {OWNER_VERSION}"
        )
    return record, etag


def newest_checkpoint(store: Store, name: str) -> CheckpointRecord:
    """The newest published checkpoint of a drafter; UserError when there is none."""
    found = read_owner(store, name)
    if found is None or found[0].newest is None:
        raise UserError(
            f"{store.url}/{layout.drafter(name)} has no checkpoint yet: "
            "train it first, or name another --train.name"
        )
    return found[0].newest


class Ownership:
    """The right to publish checkpoints of one drafter. One trainer in the world holds it at a time."""

    def __init__(self, store: Store, name: str, fingerprint: str, settings: Mapping[str, Any]) -> None:
        self.store = store
        self.name = name
        self.token = layout.new_token()
        self._fingerprint = fingerprint
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._record: OwnerRecord | None = None
        self._etag = ""

    @property
    def record(self) -> OwnerRecord:
        """The owner's record as this trainer has put it last."""
        assert self._record is not None, "take() comes first"
        return self._record

    def inspect(self) -> OwnerRecord | None:
        """What is published, after a check that this training is its continuation. Takes nothing.

        Raises UserError naming each setting that differs, both values, and what to do. A drafter without a
        checkpoint may be started anew with other settings.
        """
        found = read_owner(self.store, self.name)
        if found is None:
            return None
        record = found[0]
        if record.checkpoints:
            self._compare(record)
        return record

    def _compare(self, record: OwnerRecord) -> None:
        where = f"{self.store.url}/{layout.drafter(self.name)}"
        if record.fingerprint != self._fingerprint:
            raise UserError(
                f"{where} was trained on another run (fingerprint {record.fingerprint[:12]}, this run has "
                f"{self._fingerprint[:12]}): choose another --train.name"
            )
        theirs, ours = record.settings, self._settings
        lines = [
            f"  {name}: the checkpoint has {theirs.get(name)!r}, these settings give {ours.get(name)!r}"
            for name in sorted(theirs.keys() | ours.keys())
            if theirs.get(name) != ours.get(name)
        ]
        if lines:
            raise UserError(
                f"{where} was trained with other settings, which cannot change on the way:\n"
                + "\n".join(lines)
                + f"\nUse those of its checkpoint (step {record.checkpoints[-1].step}), or another --train.name"
            )

    def take(self) -> OwnerRecord:
        """Become the owner, and delete what trainers before left unpublished. Raises UserError as `inspect` does.

        What is deleted was listed before the record was read, and is not named in it: its writer does not hold
        the record's etag any more once this put has succeeded, so nobody can ever publish it.
        """
        checkpoints = layout.checkpoints(self.name)
        objects = [info.key for info in self.store.list(checkpoints)]
        uploads = list(self.store.list_uploads(checkpoints))
        found = read_owner(self.store, self.name)
        old = found[0] if found else None
        if old is None and objects:
            raise UserError(
                f"{self.store.url}/{layout.owner(self.name)} is missing, while there are {len(objects)} objects of "
                f"checkpoints: it was deleted from outside. Choose another --train.name, or delete {checkpoints}"
            )
        if old is not None and old.checkpoints:
            self._compare(old)
        self._record = OwnerRecord(
            generation=old.generation + 1 if old else 1,
            token=self.token,
            fingerprint=self._fingerprint,
            settings=self._settings,
            checkpoints=old.checkpoints if old else [],
        )
        try:
            self._etag = self._put(if_match=found[1] if found else None)
        except PreconditionFailed:
            raise UserError(
                f"another trainer took over {self.store.url}/{layout.drafter(self.name)} at this moment: "
                "stop it and start this one again, or choose another --train.name"
            ) from None
        named = {key for checkpoint in self._record.checkpoints for key in checkpoint.keys}
        self.store.delete([key for key in objects if key not in named])
        for upload in uploads:
            self.store.abort_upload(upload.key, upload.upload_id)
        return self._record

    def _put(self, if_match: str | None) -> str:
        body = self.record.model_dump_json(indent=1).encode()
        key = layout.owner(self.name)
        return self.store.put(key, body, if_none_match=if_match is None, if_match=if_match)

    def publish(self, checkpoint: CheckpointRecord, keep: int) -> None:
        """Name a complete checkpoint in the owner's record, keep the newest `keep`, and delete the older ones' objects.

        Raises LostOwnership when another trainer has taken over; then only this checkpoint's own objects are
        deleted.
        """
        before = self.record
        self._record = before.model_copy(update={"checkpoints": [*before.checkpoints, checkpoint][-keep:]})
        try:
            self._etag = self._put(if_match=self._etag)
        except PreconditionFailed:
            self._record = before
            raise self._lost(checkpoint) from None
        kept = {old.prefix for old in self.record.checkpoints}
        self.store.delete([key for old in before.checkpoints if old.prefix not in kept for key in old.keys])

    def _lost(self, checkpoint: CheckpointRecord) -> LostOwnership:
        found = read_owner(self.store, self.name)
        now = f"generation {found[0].generation}" if found else "nobody: its record is gone"
        if found and found[0].token != self.token:
            self.store.delete(checkpoint.keys)
        return LostOwnership(
            f"{self.store.url}/{layout.drafter(self.name)} was taken over by another trainer (it belongs "
            f"to {now}, this one is generation {self.record.generation}). This one stops: its checkpoint of "
            f"step {checkpoint.step} is not published, and nothing of the other one is touched."
        )


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint on the host, before it is published. The tensors are contiguous CPU copies of their own."""

    state: TrainState
    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


def host_copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous copies on the host that later changes of `tensors` do not reach."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


class Publisher:
    """Publishes snapshots in the background, one at a time, while training goes on. Owns the uploader.

    `published`: the newest checkpoint that this trainer knows to be published.
    """

    def __init__(self, uploader: Uploader, ownership: Ownership, keep: int) -> None:
        self.published: CheckpointRecord | None = None
        self._uploader = uploader
        self._ownership = ownership
        self._keep = keep
        self._running: Future[None] | None = None
        self._closed = threading.Event()

    def start(self, snapshot: Snapshot) -> None:
        """Begin to publish. The one before must have ended well (`settle`, `failed`)."""
        self.wait()
        running = self._running = Future()
        # A daemon: a process that has given its checkpoint up must not wait for it on exit.
        threading.Thread(target=self._run, args=(snapshot, running), name="checkpoint", daemon=True).start()

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is under way, whatever came of it, `timeout_s` at most; whether that is so.

        Once closed, wait for nothing.
        """
        if self._running is not None and not self._closed.is_set():
            wait([self._running], timeout_s)
        return self._running is None or self._running.done()

    @property
    def failed(self) -> bool:
        """Whether the last publication ended with an error, which `wait` raises."""
        return self._running is not None and self._running.done() and self._running.exception() is not None

    def wait(self) -> None:
        """Wait for the publication that is under way, and raise what it failed with."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def close(self, *, timeout_s: float) -> list[str]:
        """Abort a publication that is under way, within `timeout_s`; the keys of uploads that stay all the same.

        Nothing is lost by it: what the owner's record does not name does not exist.
        """
        self._closed.set()
        left = self._uploader.close(timeout_s=timeout_s)
        if self._running is not None:
            wait([self._running], timeout_s)
        return left

    def _run(self, snapshot: Snapshot, running: Future[None]) -> None:
        try:
            self._publish(snapshot)
            running.set_result(None)
        except BaseException as error:
            running.set_exception(error)

    def _publish(self, snapshot: Snapshot) -> None:
        ownership, step = self._ownership, snapshot.state.step
        prefix = layout.checkpoint(ownership.name, step, ownership.token)
        # What a failure leaves of complete objects, the next trainer deletes when it takes over.
        record = CheckpointRecord(step=step, prefix=prefix, files=self._upload(prefix, snapshot))
        if self._closed.is_set():
            raise UserError(f"the checkpoint of step {step} was given up")
        ownership.publish(record, self._keep)
        self.published = record

    def _upload(self, prefix: str, snapshot: Snapshot) -> dict[str, FileRecord]:
        """Upload the three objects and return their records once all are complete."""
        files = {}
        uploads: list[ObjectUpload] = []
        try:
            for name, tensors in ((MODEL, snapshot.model), (OPTIMIZER, snapshot.optimizer)):
                upload = self._uploader.open(prefix + name, size_hint=total_bytes(tensors))
                uploads.append(upload)
                checksum = objects.send(upload, pieces(tensors))
                files[name] = FileRecord(size=upload.position, crc32c=checksum)
            body = snapshot.state.model_dump_json(indent=1).encode()
            self._ownership.store.put(prefix + STATE, body)
            files[STATE] = FileRecord(size=len(body), crc32c=crc32c(body))
            for end in [upload.finish() for upload in uploads]:
                end.result()
        except BaseException:
            for upload in uploads:
                upload.abort()
            raise
        return files


def read_state(store: Store, checkpoint: CheckpointRecord) -> TrainState:
    """state.json of a checkpoint; UserError when it is missing or damaged."""
    key = checkpoint.prefix + STATE
    where = f"{store.url}/{key}"
    try:
        body, _ = store.get(key)
    except NotFound:
        raise UserError(f"{where} is missing: the checkpoint was deleted or damaged from outside") from None
    expected = checkpoint.files[STATE]
    if len(body) != expected.size or crc32c(body) != expected.crc32c:
        raise UserError(f"{where} is damaged: its size or CRC32C is not what the owner records")
    try:
        return TrainState.model_validate_json(body)
    except ValidationError as error:
        raise UserError(f"{where} is not the state of a training: {error}") from None


def load_tensors(
    store: Store, checkpoint: CheckpointRecord, file: str, destinations: Mapping[str, torch.Tensor]
) -> None:
    """Fill `destinations`, on any device, from an object of a checkpoint (MODEL or OPTIMIZER).

    UserError when a tensor is missing, unknown, of another shape, or the object is damaged.
    """
    key = checkpoint.prefix + file
    expected = checkpoint.files[file]
    missing = set(destinations)
    try:
        found = objects.find(store, key, size_bytes=expected.size)
    except NotFound:
        raise UserError(f"{store.url}/{key} is missing: it was deleted or damaged from outside") from None
    with torch.no_grad():
        for name, tensor in objects.read(found, checksum=expected.crc32c):
            destination = destinations.get(name)
            if destination is None or destination.shape != tensor.shape:
                mine = "none" if destination is None else list(destination.shape)
                raise UserError(
                    f"{store.url}/{key} holds {name} {list(tensor.shape)}, "
                    f"the drafter of these settings has {mine}: "
                    "use the settings that it was trained with"
                )
            destination.copy_(tensor)
            missing.discard(name)
    if missing:
        raise UserError(f"{store.url}/{key} lacks {_some(missing)}: use the settings that it was trained with")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
