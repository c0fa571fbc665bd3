"""One process of extraction from start to end: what it checks, opens, and closes again, in which order."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch

from dflash_stream import __version__
from dflash_stream.config import Config
from dflash_stream.errors import Interrupted
from dflash_stream.extract.claims import Claims
from dflash_stream.extract.lifetime import Lifetime
from dflash_stream.extract.place import Place, take_place
from dflash_stream.extract.settings import check_settings, check_target
from dflash_stream.extract.worker import ExtractSummary, Worker
from dflash_stream.run import Identity, Run
from dflash_stream.shards.codec import require
from dflash_stream.shards.index import build_blocks, committed_units
from dflash_stream.store import Store, open_store
from dflash_stream.store.upload import Uploader
from dflash_stream.target.identity import describe_target, target_settings
from dflash_stream.target.load import Target, load_target
from dflash_stream.tracking import open_tracker

log = logging.getLogger(__name__)


def extract(config: Config) -> ExtractSummary:
    """Make the shards of the run at store.url that are missing, together with every other process that does so.

    Returns when all units of the run are committed. Raises UserError for what the user can mend, Interrupted (a
    BaseException) when a signal or a dead launcher ends it first; both leave nothing half-published.
    """
    place = take_place()
    with Lifetime(config.extract.grace_s) as lifetime, closing(open_store(config.store)) as store:
        run = Run.open(store)
        identity = run.identity
        log.info(
            "%s: process %d of %d on %s, %d units of %s samples, %s tokens, %.1f GiB of states",
            store.url, place.rank, place.world, place.device, identity.units, f"{identity.samples:,}",
            f"{identity.tokens:,}", identity.tokens * identity.bytes_per_token / 2**30,
        )  # fmt: skip
        check_settings(identity, config, store.url)
        done = committed_units(store) & set(range(identity.units))  # others may lie beside them
        if len(done) == identity.units:
            log.info("all %d units are extracted: nothing to do", identity.units)
            return ExtractSummary()
        log.info("%d of %d units are extracted", len(done), identity.units)
        require(identity.codec)
        store.check()
        target = _load(config, identity, store, place, done)
        return _work(config, run, target, place, lifetime)


def _load(config: Config, identity: Identity, store: Store, place: Place, done: set[int]) -> Target:
    """The target of the run, checked. Whole only while held-out units lack their continuations."""
    settings = target_settings(identity, config.target)
    check_target(identity, describe_target(settings), store.url)
    rule = identity.validation
    whole = rule.new_tokens > 0 and not done.issuperset(range(rule.units))
    started = time.monotonic()
    target = load_target(
        settings, layers=identity.layers, whole=whole, device=place.device,
        final_state=identity.final_state == "pre_norm",
    )  # fmt: skip
    log.info(
        "loaded %s in %.0f s: %d of %d layers, tapping %s", settings.id, time.monotonic() - started,
        len(target.layers), identity.target.num_layers, identity.layers,
    )  # fmt: skip
    return target


def _work(config: Config, run: Run, target: Target, place: Place, lifetime: Lifetime) -> ExtractSummary:
    tracker = open_tracker(
        config, run.store, "extract", settings=_tracked(config, run.identity, place), primary=place.rank == 0
    )
    uploader = Uploader(run.store, config.store)
    claims = Claims(run.store, config.extract.claim_ttl_s)
    worker = Worker(
        run, config.extract, target, uploader, claims, tracker,
        made_with=_made_with(config, run.identity, place),
    )  # fmt: skip
    state = "failed"
    try:
        worker.work()
        if place.rank == 0:
            _gather(run)
        state = "finished"
    except Interrupted as stop:
        state = "stopped"
        log.info("%s: ending what is open; what is committed stays, starting again continues", stop)
        raise
    finally:
        if state != "finished":
            worker.finish_draining(timeout_s=lifetime.remaining_s() / 2)
        for key in uploader.close(timeout_s=lifetime.remaining_s() / 2):
            log.error("the upload of %s could not be aborted: its parts stay until the store drops them", key)
        claims.close()
        summary = worker.summary()
        tracker.summary(asdict(summary))
        tracker.close(state)
    log.info("extracted: %s", summary)
    return summary


def _gather(run: Run) -> None:
    """Gather the records in index blocks, now that all are there: a trainer then starts with a few reads."""
    try:
        built = build_blocks(run.store, run)
        log.info("gathered the index in %d blocks", len(built))
    except Exception as error:  # the records stand for themselves
        log.warning("the index was not gathered, so training will start more slowly: %s", error)


def _made_with(config: Config, identity: Identity, place: Place) -> dict[str, Any]:
    """What the bits of the states depend on, apart from the run."""
    import transformers

    cuda = place.device.type == "cuda"
    return {
        "dflash_stream": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(place.device) if cuda else "cpu",
        "dtype": identity.dtype,
        "attention": config.target.attention,
        "tokens_per_batch": config.extract.tokens_per_batch,
    }


def _tracked(config: Config, identity: Identity, place: Place) -> dict[str, Any]:
    return {
        "run": identity.fingerprint,
        "target": identity.target.id,
        "layers": identity.layers,
        "samples": identity.samples,
        "tokens": identity.tokens,
        "units": identity.units,
        "processes": place.world,
        "extract": config.extract.model_dump(),
    }
