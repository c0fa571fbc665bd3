"""`prepare`: chats → sample table, units, head and run.json in a store.

One pass over the inputs tokenises them into temporary files by a seeded hash; a second pass reads these in
order, and cuts them into units. run.json is written last and once: until then a run does not exist, and an
interrupted `prepare` is simply started again. Every object is a function of the inputs and the settings, so a
repetition writes the same bytes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_stream import layout
from dflash_stream.config import Config
from dflash_stream.errors import UserError
from dflash_stream.hashing import mix64
from dflash_stream.head import CONFIG, WEIGHTS, write_head
from dflash_stream.prepare.identity import Draft
from dflash_stream.prepare.inputs import Chunk, find_files, read_chunks
from dflash_stream.prepare.report import Report, check_share
from dflash_stream.prepare.samples import TOKEN_BYTES
from dflash_stream.prepare.spill import Spill, bucket_count
from dflash_stream.prepare.template import Renderer
from dflash_stream.prepare.units import Writer
from dflash_stream.prepare.workers import make_renderer, make_samples, worker_count
from dflash_stream.run import Identity, Run, ValidationRule, compare
from dflash_stream.store import NotFound, Store, Uploader, open_store

REJECTED = layout.TOKENS + "rejected.jsonl"
TABLE_FILE, REJECTED_FILE = "samples.parquet", "rejected.jsonl"  # in the temporary directory
HELD_OUT = 0x68656C64  # keeps the split's hash apart from every other use of the same hash
PROGRESS_S = 10.0
Log = Callable[[str], None]


@dataclass(frozen=True)
class Inputs:
    """The files of a run. `held_out`: how many of them, at the end of `paths`, are validation_inputs.

    A file's number, its `source`, is its place in `paths`.
    """

    paths: list[Path]
    held_out: int

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def is_held_out(self, source: int) -> bool:
        """Whether the file of this number is one of the validation_inputs."""
        return source >= len(self.paths) - self.held_out

    def chunks(self) -> Iterator[Chunk]:
        """The rows of all files, one file after the other."""
        for source, path in enumerate(self.paths):
            yield from read_chunks(path, source)


def find_inputs(config: Config) -> Inputs:
    """The files that the settings name. UserError when there are none, or one is both training and held-out."""
    if not config.prepare.inputs:
        raise UserError(
            "prepare.inputs is empty: name JSONL or Parquet files, e.g. --prepare.inputs 'chats/*.jsonl'"
        )
    train = find_files(config.prepare.inputs, "prepare.inputs")
    held_out = find_files(config.prepare.validation_inputs, "prepare.validation_inputs")
    both = {path.resolve() for path in train} & {path.resolve() for path in held_out}
    if both:
        raise UserError(f"{sorted(both)[0]} is both in prepare.inputs and in prepare.validation_inputs")
    return Inputs(train + held_out, len(held_out))


def prepare(config: Config, *, log: Log) -> Run:
    """Prepare the run of `config`. Raises UserError; a run that is there already and equal is returned as it is."""
    inputs = find_inputs(config)
    store = open_store(config.store)
    try:
        return _prepare(config, inputs, store, log)
    except BaseException:
        store.close()
        raise


def _prepare(config: Config, inputs: Inputs, store: Store, log: Log) -> Run:
    draft = Draft.from_settings(config)
    existing = _find_run(store)
    if existing is not None:
        log(f"{store.url} holds a run already: preparing anew to compare, nothing is written")
        compare(existing, draft.like(existing), store.url)
    else:
        store.check()
        _refuse_remains(store)
    with tempfile.TemporaryDirectory(prefix="dflash-prepare-") as directory:
        scratch = Path(directory)
        if existing is not None:
            identity = _make(config, inputs, None, draft, scratch / "compared", log)
            compare(existing, identity, store.url)
            lacking = _lacking(store, identity.units)
            if not lacking:
                log(f"{store.url} is prepared already, with the same data and settings: nothing to do")
                return Run(store, identity)
            log(f"{store.url} lacks {lacking[0]} (objects missing: {len(lacking)}): writing all of them again")
        identity = _make(config, inputs, store, draft, scratch / "written", log)
        _put_file(store, config, layout.SAMPLES, scratch / "written" / TABLE_FILE)
        _put_file(store, config, REJECTED, scratch / "written" / REJECTED_FILE)
    log(f"copying the head of {config.target.id}: embedding, final norm, lm_head, tokenizer, config")
    write_head(store, config.store, config.target)
    _delete_stale(store, identity.units)
    run = Run(store, identity)
    run.publish()
    log(f"{store.url} is prepared")
    return run


def _find_run(store: Store) -> Identity | None:
    """The run that is there already."""
    try:
        store.head(layout.RUN)
    except NotFound:
        return None
    return Run.open(store).identity


def _refuse_remains(store: Store) -> None:
    """UserError when shards of a run are here whose run.json is not: they would be taken for those of the new one."""
    if remains := next(iter(store.list(layout.INDEX)), None):
        raise UserError(
            f"{store.url} holds what is left of a run without its {layout.RUN} ({remains.key} and more): "
            "use another store.url, or delete everything under this one first"
        )


def _make(
    config: Config,
    inputs: Inputs,
    store: Store | None,
    draft: Draft,
    scratch: Path,
    log: Log,
) -> Identity:
    """Tokenise, shuffle, cut, write units; the identity of what was made. Table and refusals are in `scratch`."""
    settings = config.prepare
    scratch.mkdir()
    report = Report(scratch / REJECTED_FILE)
    try:
        train, held_out = _tokenise(config, inputs, draft, report, scratch, log)
    finally:
        report.close()
    report.check(settings.max_rejected_fraction)
    renderer = make_renderer(config.target, settings) if report.chats else None
    writer = Writer(
        store,
        [path.name for path in inputs.paths],
        settings.unit_bytes,
        draft.sample_bytes,
        scratch / TABLE_FILE,
        config.store.max_concurrent_uploads,
    )
    try:
        left_out = _write(config, train, held_out, writer)
        table_sha256 = writer.finish()
    finally:
        writer.close()
    if not writer.totals[False].samples:
        raise UserError(
            f"no training samples: {report.samples} samples, {writer.totals[True].samples} of them held out; "
            "raise prepare.max_samples or max_total_tokens, or lower prepare.validation_fraction"
        )
    identity = draft.finish(
        renderer,
        samples_sha256=table_sha256,
        samples=writer.samples,
        tokens=sum(totals.tokens for totals in writer.totals.values()),
        units=writer.units,
        validation=ValidationRule(
            rule=_rule(config),
            units=writer.validation_units,
            samples=writer.totals[True].samples,
            new_tokens=settings.validation_new_tokens,
        ),
    )
    _summarise(report, writer, identity, renderer, left_out, log)
    return identity


def _tokenise(
    config: Config, inputs: Inputs, draft: Draft, report: Report, scratch: Path, log: Log
) -> tuple[Spill, Spill]:
    """Every input row into the spill of training samples or that of candidates for validation."""
    settings = config.prepare
    buckets = bucket_count(inputs.bytes)
    explicit = bool(settings.validation_inputs)
    train = Spill(scratch / "train", buckets, lambda meta: meta["order"])
    held_out = Spill(scratch / "held-out", buckets, (lambda meta: meta["order"]) if explicit else _group_place)
    workers = worker_count(settings, inputs.bytes)
    log(f"reading {inputs.bytes / 2**20:,.1f} MiB (files: {len(inputs.paths)}, processes: {workers})")
    next_line = time.monotonic() + PROGRESS_S
    for chunk, samples in make_samples(inputs.chunks(), config.target, settings, draft.limits, workers):
        report.add(samples)
        report.check_early()
        if explicit:
            chosen = np.full(len(samples.meta), inputs.is_held_out(chunk.source))
        else:
            chosen = held_out_by_hash(samples.meta["group"], settings.validation_fraction)
        for spill, take in ((train, ~chosen), (held_out, chosen)):
            spill.add(samples.meta[take], _payload(samples.meta, samples.payload, take))
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + PROGRESS_S
            log(f"  {report.rows:,} rows, {report.samples:,} samples, {report.rejected:,} rejected")
    return train, held_out


def _group_place(meta: NDArray[Any]) -> NDArray[np.uint64]:
    """The order in which held-out conversations are taken: whole conversations, and not by the split's own hash."""
    return mix64(HELD_OUT + 1, meta["group"])


def held_out_by_hash(groups: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Which conversations are held out; the same ones whatever the seed, the order and the other rows."""
    return mix64(HELD_OUT, groups) < np.uint64(int(fraction * 2**64))


def _payload(meta: NDArray[Any], payload: bytes, take: NDArray[np.bool_]) -> bytes:
    """The payloads of the chosen samples."""
    if take.all():
        return payload
    sizes = meta["tokens"].astype(np.int64) * TOKEN_BYTES
    ends = np.cumsum(sizes)
    return b"".join(payload[ends[i] - sizes[i] : ends[i]] for i in np.flatnonzero(take))


def _write(config: Config, train: Spill, held_out: Spill, writer: Writer) -> int:
    """Held-out samples up to their limit, then training samples up to theirs; returns how many training samples
    were left out because their prompt is that of a held-out one."""
    settings = config.prepare
    groups: set[int] = set()
    for record in held_out:
        if writer.samples < settings.max_validation_samples:
            groups.add(int(record.meta["group"]))
            writer.add(record, validation=True)
        elif not settings.validation_inputs:
            train.add_record(record)
    left_out = 0
    most_samples = np.inf if settings.max_samples is None else settings.max_samples
    most_tokens = np.inf if settings.max_total_tokens is None else settings.max_total_tokens
    totals = writer.totals[False]
    for record in train:
        if int(record.meta["group"]) in groups:
            left_out += 1
            continue
        if totals.samples >= most_samples or totals.tokens + int(record.meta["tokens"]) > most_tokens:
            break
        writer.add(record, validation=False)
    return left_out


def _rule(config: Config) -> str:
    settings = config.prepare
    if settings.validation_inputs:
        return f"validation_inputs, {settings.max_validation_samples} samples at most"
    share, most = settings.validation_fraction, settings.max_validation_samples
    return f"hash of the prompt below {share:g}, {most} samples at most"


def _put_file(store: Store, config: Config, key: str, path: Path) -> None:
    """Stream a local file into the store."""
    size = path.stat().st_size
    with Uploader(store, config.store) as uploader, path.open("rb") as file:
        upload = uploader.open(key, size_hint=size)
        while piece := file.read(1 << 20):
            upload.write(piece)
        upload.finish().result()


def _lacking(store: Store, units: int) -> list[str]:
    """What `prepare` wrote for this run and is not there any more."""
    wanted = [layout.unit_tokens(unit) for unit in range(units)] + [layout.SAMPLES, WEIGHTS, CONFIG]
    there = {info.key for prefix in (layout.TOKENS, layout.HEAD) for info in store.list(prefix)}
    return [key for key in wanted if key not in there]


def _delete_stale(store: Store, units: int) -> None:
    """Delete units that an interrupted `prepare` with other settings left behind."""
    wanted = {layout.unit_tokens(unit) for unit in range(units)} | {layout.SAMPLES, REJECTED}
    stale = [info.key for info in store.list(layout.TOKENS) if info.key not in wanted]
    if stale:
        store.delete(stale)


def _summarise(
    report: Report, writer: Writer, identity: Identity, renderer: Renderer | None, left_out: int, log: Log
) -> None:
    train, held_out = writer.totals[False], writer.totals[True]
    tokens, supervised = train.tokens + held_out.tokens, train.supervised + held_out.supervised
    warnings = check_share(identity.samples, tokens, supervised, renderer is None)
    warnings += renderer.warnings() if renderer is not None else []
    greedy = held_out.samples * identity.validation.new_tokens
    stored = (tokens + greedy) * identity.bytes_per_token
    log(f"rows       {report.rows:,} read, {report.rejected:,} rejected, {report.dropped:,} samples dropped")
    if report.reasons:
        log(report.listing())
    log(f"samples    {train.samples:,} for training, {held_out.samples:,} held out")
    if left_out:
        log(f"           {left_out:,} left out of training: their prompt is that of a held-out sample")
    log(f"tokens     {tokens:,}, {supervised / tokens:.1%} supervised")
    log(f"units      {identity.units:,}, {identity.validation.units:,} of them held-out samples")
    log(
        f"states     {stored / 2**30:,.2f} GiB to be made, as raw bf16: {identity.bytes_per_token:,} "
        f"bytes a token, layers {identity.layers}"
    )
    for warning in warnings:
        log(f"warning: {warning}")
