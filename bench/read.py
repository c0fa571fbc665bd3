"""How fast a run is read back: this project's loader, bare boto3, and stock webdataset, on the same bytes.

    python -m bench.read                         a synthetic run on a local S3 server
    python -m bench.read --url s3://bucket/run   an extracted run

Every reader takes all training samples once a round, with the index at hand; rounds are interleaved, so that
other load on the machine meets all of them alike, and medians are printed as ratios to bare boto3, which only
moves bytes: no checksum, no tensors, no order. CPU seconds are those of this process and its children, not the
server's.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import safetensors.torch
import webdataset as wds

from bench.rounds import Figures, measure, medians
from dflash_stream.config import Config, MiB, StoreSettings, StreamSettings, TrainSettings
from dflash_stream.run import Run
from dflash_stream.shards.index import STORED, load_index
from dflash_stream.shards.webdataset import decode_sample, register_s3, shard_urls
from dflash_stream.store import open_store
from dflash_stream.stream import TrainStream
from dflash_stream.stream.ranges import cut
from launch.s3_server import S3Server
from tests.synthetic_run import extract_run, prepare_run

UNIT_SAMPLES = 16


@dataclass
class Case:
    """A run to be read: its training shards as (bucket, key, bytes), and what they hold."""

    config: Config
    stream: TrainStream
    urls: list[str]
    objects: list[tuple[str, str, int]]
    samples: int
    client: Any  # plain boto3

    @property
    def total_bytes(self) -> int:
        return sum(size for _, _, size in self.objects)


def synthetic(url: str, megabytes: int, hidden: int, layers: int) -> None:
    """A run of about `megabytes` of training samples of 200 to 1,000 tokens, at `url`."""
    settings = StoreSettings(url=url, pool_bytes=64 * MiB)
    per_sample = 600 * hidden * layers * 2
    units = 1 + max(1, round(megabytes * 1e6 / per_sample / UNIT_SAMPLES))
    store = open_store(settings)
    run = prepare_run(store, units=units, each=UNIT_SAMPLES, tokens=(200, 1000), layers=layers, hidden=hidden)
    extract_run(run, settings, units=range(1, units))


def open_case(url: str, stream: StreamSettings) -> Case:
    """The run at `url`, with its index loaded and clients open: nothing of that is measured."""
    import boto3
    from botocore.config import Config as BotoConfig

    config = Config(store=StoreSettings(url=url), stream=stream, train=TrainSettings(batch_samples=1))
    store = open_store(config.store)
    run = Run.open(store)
    units = np.unique(run.samples.unit[~run.samples.validation]).tolist()
    index = load_index(store, run, units)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    objects = [(bucket, f"{prefix}/{key}", store.head(key).size_bytes) for key, _ in index.objects.values()]
    client = boto3.client(
        "s3",
        endpoint_url=os.environ.get("AWS_ENDPOINT_URL_S3"),
        config=BotoConfig(
            s3={"addressing_style": "path"},
            max_pool_connections=stream.threads,
            response_checksum_validation="when_required",
        ),
    )
    register_s3(config.store)
    steps = int((~run.samples.validation).sum())  # of one sample each: exactly one epoch, whatever the run
    train_stream = TrainStream(store, run, config, steps=steps)
    samples = int((index.state[np.isin(index.unit, units)] == STORED).sum())
    return Case(config, train_stream, shard_urls(url, settings=config.store), objects, samples, client)


def read_with_loader(case: Case) -> int:
    """TrainStream: formula order, ranges on threads, CRC32C, tensors."""
    case.stream.position = 0
    return sum(len(batch.samples) for batch in case.stream)


def read_with_boto3(case: Case) -> int:
    """Ranged GETs of the whole objects into reused buffers, with the threads and ranges of the loader."""
    stream = case.config.stream
    free = [bytearray(stream.range_bytes) for _ in range(stream.threads)]

    def fetch(bucket: str, key: str, start: int, stop: int) -> None:
        buffer = free.pop()
        body = case.client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}")["Body"]
        view, reached = memoryview(buffer), 0
        while count := body.readinto(view[reached : min(reached + MiB, stop - start)]):
            reached += count
        if reached != stop - start:
            raise SystemExit(f"{key}: {reached} bytes instead of {stop - start}")
        free.append(buffer)

    with ThreadPoolExecutor(stream.threads) as pool:
        jobs = [
            pool.submit(fetch, bucket, key, start, stop)
            for bucket, key, size in case.objects
            for start, stop in cut(0, size, stream.range_bytes)
        ]
        for job in jobs:
            job.result()
    return case.samples


def read_with_webdataset(case: Case) -> int:
    """webdataset alone: signed addresses, which it pipes through curl, and safetensors for the members."""
    urls = [
        case.client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": key}, ExpiresIn=3600)
        for bucket, key, _ in case.objects
    ]
    urls = [f"pipe:curl -s -f '{url}'" for url in urls]
    pipeline = wds.WebDataset(urls, shardshuffle=False).decode(
        wds.handle_extension("safetensors", safetensors.torch.load)
    )
    return sum(1 for _ in pipeline)


def read_with_registered_webdataset(case: Case) -> int:
    """webdataset over this project's verified s3:// stream."""
    return sum(1 for _ in wds.WebDataset(case.urls, shardshuffle=False).map(decode_sample))


READERS: dict[str, Callable[[Case], int]] = {
    "boto3, ranges only": read_with_boto3,
    "TrainStream": read_with_loader,
    "webdataset, curl": read_with_webdataset,
    "webdataset, register_s3": read_with_registered_webdataset,
}


def counted(case: Case, name: str, number: int) -> None:
    """One round of a reader, which must have read every sample."""
    samples = READERS[name](case)
    if samples != case.samples:
        raise SystemExit(f"{name} read {samples} samples of {case.samples}")


def report(case: Case, figures: Figures) -> None:
    """The table: medians, and ratios to the first reader."""
    gigabytes = case.total_bytes / 1e9
    found = medians(figures)
    base_wall, base_cpu = next(iter(found.values()))
    print(
        f"{case.samples} samples, {gigabytes * 1000:.0f} MB, {len(case.objects)} shards, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':26}{'MB/s':>8}{'speed ratio':>13}{'CPU s/GB':>10}{'CPU ratio':>11}")
    for name, (wall, cpu) in found.items():
        speed = f"{gigabytes * 1000 / wall:8.0f}{base_wall / wall:13.2f}"
        print(f"{name:26}{speed}{cpu / gigabytes:10.2f}{cpu / base_cpu:11.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="an extracted run; unset: a synthetic one on a local server")
    parser.add_argument("--megabytes", type=int, default=100, help="size of the synthetic run")
    parser.add_argument("--hidden", type=int, default=576, help="its hidden size")
    parser.add_argument("--layers", type=int, default=5, help="its tapped layers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=StreamSettings().threads)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        url = arguments.url
        if not url:
            server = stack.enter_context(S3Server())
            os.environ.update(server.environment)
            url = f"s3://{server.bucket}/bench"
            synthetic(url, arguments.megabytes, arguments.hidden, arguments.layers)
        # Less than the run, as in any real training: memory goes round instead of growing.
        stream = StreamSettings(threads=arguments.threads, prefetch_bytes=64 * MiB)
        case = open_case(url, stream)
        ways = {name: partial(counted, case, name) for name in READERS}
        report(case, measure(ways, arguments.rounds))


if __name__ == "__main__":
    main()
