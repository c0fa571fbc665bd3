"""The files of a pretrained model, on the Hugging Face hub or in a local directory.

Single tensors are fetched by ranged reads, and errors say what to do. Only the safetensors layout is known here
(8 bytes of header length, a JSON header, then the tensors' bytes), not what the tensors mean. Whole models are
loaded by transformers, elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from dflash_stream.config import TargetSettings
from dflash_stream.errors import UserError
from dflash_stream.tensorfile.header import MAX_HEADER_BYTES, PREFIX_BYTES

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CHUNK_BYTES = 16 << 20  # of a ranged read; what is tried again after a fault


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of a checkpoint: dtype as safetensors spells it ("BF16"), shape, and bytes [start, end) of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int


class Files(Protocol):
    """Where the files of a model are."""

    def read(self, file: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`. FileNotFoundError when there is no such file."""
        ...

    def read_whole(self, file: str) -> bytes:
        """A small file. FileNotFoundError when there is no such file."""
        ...


class LocalFiles:
    """A model directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, file: str, start: int, length: int) -> bytes:
        with (self._directory / file).open("rb") as opened:
            opened.seek(start)
            return opened.read(length)

    def read_whole(self, file: str) -> bytes:
        return (self._directory / file).read_bytes()


class HubFiles:
    """A repository on the hub, at one revision. Nothing is cached on disk."""

    def __init__(self, repository: str, revision: str | None) -> None:
        self._repository = repository
        self._revision = revision

    def read(self, file: str, start: int, length: int) -> bytes:
        return self._get(file, {"Range": f"bytes={start}-{start + length - 1}"}, length)

    def read_whole(self, file: str) -> bytes:
        return self._get(file, {}, None)

    def _get(self, file: str, headers: dict[str, str], length: int | None) -> bytes:
        from huggingface_hub import hf_hub_url, is_offline_mode
        from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        if is_offline_mode():
            raise OfflineModeIsEnabled(f"cannot read {file} of {self._repository}: HF_HUB_OFFLINE is set")
        url = hf_hub_url(self._repository, file, revision=self._revision)
        answer = http_backoff(
            "GET", url, headers={**build_hf_headers(), **headers}, follow_redirects=True, timeout=60
        )
        try:
            hf_raise_for_status(answer)
        except EntryNotFoundError:
            raise FileNotFoundError(f"{self._repository} has no {file}") from None
        body = bytes(answer.content)
        if length is not None and len(body) != length:
            raise UserError(
                f"{url} answered a range of {length} bytes with {len(body)} bytes (status {answer.status_code}): "
                "a proxy in between does not pass ranges; download the model and give its directory as target.id"
            )
        return body


def is_local(settings: TargetSettings) -> bool:
    """Whether target.id is a directory on this machine. UserError for what can only be a path but is not there."""
    if Path(settings.id).is_dir():
        return True
    if settings.id.startswith(("/", "./", "../", "~")) or settings.id.count("/") > 1:
        raise UserError(
            f"target.id {settings.id}: no such directory. Correct the path, or name a model on the hub as OWNER/NAME"
        )
    return False


def open_files(settings: TargetSettings, revision: str | None = None) -> Files:
    """The files of the target; `revision` (a commit) instead of the settings' one, to stay at what was resolved."""
    if is_local(settings):
        return LocalFiles(Path(settings.id))
    return HubFiles(settings.id, revision or settings.revision)


class Weights:
    """The tensors of a safetensors checkpoint, single or sharded, by name. Raises UserError when there is none."""

    def __init__(self, files: Files, where: str) -> None:
        self._files = files
        self._where = where
        self._headers: dict[str, dict[str, Any]] = {}
        self._file_of: dict[str, str] = {}
        try:
            self._file_of = dict(json.loads(files.read_whole(INDEX_FILE))["weight_map"])
        except FileNotFoundError:
            try:
                self._file_of = dict.fromkeys(self._header(SINGLE_FILE)[1], SINGLE_FILE)
            except FileNotFoundError:
                raise UserError(
                    f"{where} has neither {SINGLE_FILE} nor {INDEX_FILE}: convert the checkpoint to "
                    "safetensors, with save_pretrained of transformers"
                ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where}/{INDEX_FILE} is not an index of safetensors files: {error!r}") from None

    @property
    def names(self) -> list[str]:
        """Every tensor of the checkpoint."""
        return sorted(self._file_of)

    def find(self, name: str) -> StoredWeight:
        """Where the tensor's bytes lie. KeyError for a name that is not in `names`."""
        file = self._file_of[name]
        try:
            begin, header = self._header(file)
            entry = header[name]
        except (FileNotFoundError, KeyError):
            raise UserError(
                f"{self._where} is incomplete: {INDEX_FILE} names {name} in {file}, which lacks it"
            ) from None
        start, end = entry["data_offsets"]
        return StoredWeight(name, entry["dtype"], tuple(entry["shape"]), file, begin + start, begin + end)

    def read(self, weight: StoredWeight) -> Iterator[bytes]:
        """The tensor's bytes in pieces of 16 MiB."""
        for start in range(weight.start, weight.end, CHUNK_BYTES):
            length = min(CHUNK_BYTES, weight.end - start)
            piece = self._files.read(weight.file, start, length)
            if len(piece) != length:
                raise UserError(
                    f"{self._where}/{weight.file} ends inside {weight.name}: the file is cut off, fetch it anew"
                )
            yield piece

    def _header(self, file: str) -> tuple[int, dict[str, Any]]:
        """Where the tensors' bytes begin, and the header without its metadata."""
        if file not in self._headers:
            size = int.from_bytes(self._files.read(file, 0, PREFIX_BYTES), "little")
            try:
                if size > MAX_HEADER_BYTES:
                    raise ValueError(f"its header would have {size} bytes")
                header = json.loads(self._files.read(file, PREFIX_BYTES, size))
                if not isinstance(header, dict):
                    raise ValueError("its header is no table of tensors")
            except ValueError as error:
                raise UserError(f"{self._where}/{file} is not a safetensors file: {error}") from None
            header.pop("__metadata__", None)
            self._headers[file] = {"begin": PREFIX_BYTES + size, "tensors": header}
        known = self._headers[file]
        return known["begin"], known["tensors"]


@lru_cache(maxsize=1)
def read_tokenizer(target: TargetSettings) -> Any:
    """The target's tokenizer, read once a process. UserError when there is none."""
    from transformers import AutoTokenizer

    with explained(target, "tokenizer"):
        return AutoTokenizer.from_pretrained(
            target.id, revision=target.revision, trust_remote_code=target.trust_remote_code
        )


@contextmanager
def explained(settings: TargetSettings, what: str) -> Iterator[None]:
    """Turns what transformers and huggingface_hub raise while reading `what` into a UserError with advice."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UserError(
            f"cannot read the {what} of target.id {settings.id}: {advice(error, settings)}"
        ) from None
    except Exception as error:
        library = type(error).__module__.split(".")[0]
        if library in ("httpx", "httpcore", "huggingface_hub", "requests"):
            raise UserError(
                f"cannot read the {what} of target.id {settings.id}: {advice(error, settings)}"
            ) from None
        raise


def advice(error: BaseException, settings: TargetSettings) -> str:
    """What went wrong and what to do, from the error and the ones behind it."""
    from huggingface_hub import errors

    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    statuses = {getattr(getattr(link, "response", None), "status_code", None) for link in chain}
    at = f" at revision {settings.revision}" if settings.revision else ""
    if has(errors.GatedRepoError) or 403 in statuses:
        return (
            "the model is gated. Accept its licence on its page on the hub, then set HF_TOKEN to a token of "
            "that account with read access"
        )
    if has(errors.RevisionNotFoundError):
        return f"it has no revision {settings.revision}: correct target.revision"
    if has(errors.RepositoryNotFoundError) or 401 in statuses:
        return (
            "there is no such public model (a private one answers the same). Check the spelling of target.id; "
            "for a private model set HF_TOKEN; for one on this machine give its directory"
        )
    if has(errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set and it is not in the cache. Unset it, or give a directory as target.id"
    if has(errors.LocalEntryNotFoundError, ConnectionError) or any(
        "Connect" in type(link).__name__ for link in chain
    ):
        return (
            "the hub cannot be reached and the file is not in the local cache. Check the network and its "
            "proxy, or give a local directory as target.id"
        )
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return f"{text}{at}. Check the id or directory; a new model family needs a newer transformers"
