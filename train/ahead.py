"""Making the next item of an iteration in a thread, while the caller works on the current one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
_POLL_S = 0.1
JOIN_S = 5.0  # on closing, how long to wait for the item that is being made


def ahead(items: Iterable[T], depth: int = 1) -> Generator[T, None, None]:
    """The same items in the same order; up to `depth` of them are made and wait, while one more is being made.

    What making an item raises is raised here, in its place. Closing the generator ends the thread after the
    item that it is making; a thread that does not get that far is a daemon, and no exit waits for it.
    """
    made: queue.Queue[tuple[T | None, BaseException | None, bool]] = queue.Queue(depth)
    closed = threading.Event()

    def put(item: T | None, error: BaseException | None, last: bool) -> None:
        while not closed.is_set():
            try:
                made.put((item, error, last), timeout=_POLL_S)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(item, None, False)
                if closed.is_set():
                    return
            put(None, None, True)
        except BaseException as error:
            put(None, error, True)

    thread = threading.Thread(target=work, name="ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error, last = made.get()
            if error is not None:
                raise error
            if last:
                return
            yield item  # type: ignore[misc]
            del item
    finally:
        closed.set()
        thread.join(timeout=JOIN_S)
