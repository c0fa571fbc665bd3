"""Object stores: the protocol, S3, a local directory, and the upload of one object from memory."""

from dflash_stream.store.base import (
    NotFound,
    ObjectChanged,
    ObjectInfo,
    Part,
    PreconditionFailed,
    Store,
    StoreError,
    UploadInfo,
)

__all__ = [
    "NotFound",
    "ObjectChanged",
    "ObjectInfo",
    "Part",
    "PreconditionFailed",
    "Store",
    "StoreError",
    "UploadInfo",
]
