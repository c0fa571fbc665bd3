"""What it costs to upload: this project's uploader against boto3's own ways, on the same bytes.

    python -m bench.write                 a local S3 server
    python -m bench.write --megabytes 128 --rounds 9

Every way writes one object a round from memory that is filled already; the uploader also copies it into its part
buffers and computes CRC32C, as extraction does. Rounds are interleaved. A local server is slow at taking uploads, so
the figure that means something is the CPU time of this process: medians, and ratios to `put_object` as boto3 does it
by default.
"""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Callable
from typing import Any

import boto3
import numpy as np
from boto3.s3.transfer import TransferConfig
from botocore.config import Config as BotoConfig

from bench.rounds import measure, medians
from dflash_stream.config import MiB, StoreSettings
from dflash_stream.store import open_store
from dflash_stream.store.upload import Uploader
from launch.s3_server import S3Server

PART_BYTES = 8 * MiB


def ways(server: S3Server, data: bytes) -> dict[str, Callable[[int], None]]:
    """Name → a function that writes the data as object number n."""
    path_style = BotoConfig(s3={"addressing_style": "path"})
    client: Any = boto3.client("s3", endpoint_url=server.endpoint, config=path_style)
    transfer = TransferConfig(multipart_chunksize=PART_BYTES, max_concurrency=4)
    settings = StoreSettings(
        url=f"s3://{server.bucket}/bench",
        part_bytes=PART_BYTES,
        pool_bytes=8 * PART_BYTES,
        max_concurrent_uploads=4,
    )
    uploader = Uploader(open_store(settings), settings)
    view = memoryview(data)

    def put_object(number: int) -> None:
        client.put_object(Bucket=server.bucket, Key=f"put-{number}", Body=data)

    def upload_fileobj(number: int) -> None:
        client.upload_fileobj(io.BytesIO(data), server.bucket, f"fileobj-{number}", Config=transfer)

    def ours(number: int) -> None:
        upload = uploader.open(f"ours-{number}", size_hint=len(data))
        for start in range(0, len(data), MiB):  # as tensors come: in pieces
            upload.write(view[start : start + MiB])
        upload.finish().result()

    return {"boto3 put_object": put_object, "boto3 upload_fileobj": upload_fileobj, "Uploader": ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="size of an object, MiB")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    data = np.random.default_rng(0).bytes(arguments.megabytes * MiB)
    with S3Server() as server:
        os.environ.update(server.environment)
        found = medians(measure(ways(server, data), arguments.rounds))
    print(f"objects of {arguments.megabytes} MiB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':24}{'MiB/s':>8}{'CPU ms/MiB':>12}{'CPU ratio':>11}")
    base = found["boto3 put_object"][1]
    for name, (wall, cpu) in found.items():
        per_mib = 1000 * cpu / arguments.megabytes
        print(f"{name:24}{arguments.megabytes / wall:8.0f}{per_mib:12.2f}{cpu / base:11.2f}")


if __name__ == "__main__":
    main()
