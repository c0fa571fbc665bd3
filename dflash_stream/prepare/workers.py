"""Runs the tokenising of chunks on all cores, results in the order of the chunks, a bounded number in flight.

Processes are spawned, not forked: a parent with threads (a store's, the tokenizer's) may be forked only at a
risk. They ignore Ctrl-C, which their parent handles, and end with it, however it ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

from dflash_stream.config import PrepareSettings, TargetSettings
from dflash_stream.errors import UserError
from dflash_stream.hub import read_tokenizer
from dflash_stream.launched import usable_cores
from dflash_stream.prepare.inputs import CHUNK_BYTES, Chunk, decode
from dflash_stream.prepare.samples import Limits, Maker, Samples
from dflash_stream.prepare.template import Renderer

_maker: Maker | None = None


def make_renderer(target: TargetSettings, settings: PrepareSettings) -> Renderer:
    """The target's chat template and tokenizer. UserError when it has none that serve."""
    return Renderer(read_tokenizer(target), settings)


def make_maker(target: TargetSettings, settings: PrepareSettings, limits: Limits) -> Maker:
    """The Maker of one process; it reads the tokenizer when the first conversation comes."""
    return Maker(settings, limits, partial(make_renderer, target, settings))


def worker_count(settings: PrepareSettings, input_bytes: int) -> int:
    """Processes to use: as set, else all cores, but none that would have less than 4 MiB of input to work on."""
    if settings.workers is not None:
        return max(1, settings.workers)
    return max(1, min(usable_cores(), input_bytes // (4 * CHUNK_BYTES)))


def make_samples(
    chunks: Iterable[Chunk], target: TargetSettings, settings: PrepareSettings, limits: Limits, workers: int
) -> Iterator[tuple[Chunk, Samples]]:
    """Samples of every chunk, in order. Raises UserError; with one worker everything happens in this process."""
    if workers == 1:
        maker = make_maker(target, settings, limits)
        for chunk in chunks:
            yield chunk, maker.make(chunk.source, chunk.name, decode(chunk))
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(target, settings, limits, os.getpid()),
    )
    flying: deque[tuple[Chunk, Future[Samples]]] = deque()
    try:
        for chunk in chunks:
            flying.append((chunk, pool.submit(_make, chunk)))
            if len(flying) > 2 * workers:
                done = flying.popleft()
                yield done[0], done[1].result()
        while flying:
            done = flying.popleft()
            yield done[0], done[1].result()
    except BrokenProcessPool:
        raise UserError(
            "a tokenising process was killed, probably for want of memory: lower prepare.workers, start again"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(target: TargetSettings, settings: PrepareSettings, limits: Limits, parent: int) -> None:
    """Runs first in every worker."""
    global _maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _maker = make_maker(target, settings, limits)


def _make(chunk: Chunk) -> Samples:
    assert _maker is not None
    return _maker.make(chunk.source, chunk.name, decode(chunk))
