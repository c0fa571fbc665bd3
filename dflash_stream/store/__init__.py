"""Object stores: the protocol, S3, a local directory, and the upload of one object from memory."""

from dflash_stream.config import StoreSettings
from dflash_stream.errors import UserError
from dflash_stream.store.base import (
    NotFound,
    ObjectChanged,
    ObjectInfo,
    Part,
    PreconditionFailed,
    Store,
    StoreError,
    Traffic,
    UploadInfo,
)
from dflash_stream.store.checksum import crc32c
from dflash_stream.store.local import LocalStore
from dflash_stream.store.s3 import S3Store
from dflash_stream.store.upload import ObjectUpload, UploadedObject, Uploader, UploadStats

__all__ = [
    "NotFound",
    "ObjectChanged",
    "ObjectInfo",
    "ObjectUpload",
    "Part",
    "PreconditionFailed",
    "Store",
    "StoreError",
    "Traffic",
    "UploadInfo",
    "UploadStats",
    "UploadedObject",
    "Uploader",
    "crc32c",
    "open_store",
]


def open_store(settings: StoreSettings) -> Store:
    """The store of `--store.url`: s3://bucket/prefix or file:///directory. UserError for any other address."""
    scheme = settings.url.partition("://")[0]
    if scheme == "s3":
        return S3Store(settings)
    if scheme == "file":
        return LocalStore(settings)
    given = "is not set" if not settings.url else f"{settings.url!r} names no store"
    raise UserError(f"--store.url {given}: it must be s3://bucket/prefix or file:///directory")
