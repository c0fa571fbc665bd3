"""Who works on a unit, until when: small objects that keep processes from doing the same work twice.

A claim is advice. It never decides what is part of the run (the commit record alone does), so the worst
that a lost claim, a late renewal or clocks that disagree can do is work done twice. A claim names a random
token and a time, no host and no rank.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType

from dflash_stream import layout
from dflash_stream.store import NotFound, PreconditionFailed, Store, StoreError

log = logging.getLogger(__name__)


class Claims:
    """The claims of one process. A thread renews them every third of `ttl_s` until they are released.

    Expiry is the writer's clock plus `ttl_s`; a reader judges it by its own clock (seconds since 1970).
    """

    def __init__(self, store: Store, ttl_s: float, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._ttl_s, self._clock = store, ttl_s, clock
        self._token = layout.new_token()
        self._etags: dict[int, str] = {}  # of the claims held
        self._unsettled: set[int] = set()  # being taken or released: an interrupt may come in between
        self._lock = threading.Lock()  # a claim is renewed or released, never both at once
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="claims", daemon=True)
        self._thread.start()

    @property
    def held(self) -> set[int]:
        """The units this process works on, as far as it knows."""
        return set(self._etags)

    def open_units(self, missing: Iterable[int], limit: int) -> list[int]:
        """The first `limit` of the `missing` units that nobody seems to work on, in their order. One listing.

        A claim that was not rewritten for `ttl_s` is likely to have lapsed, so its unit counts; `take`
        looks closely.
        """
        written = {layout.unit_of_claim(info.key): info.modified for info in self._store.list(layout.CLAIMS)}
        found: list[int] = []
        for unit in missing:
            if len(found) == limit:
                break
            if unit not in self._etags and written.get(unit, 0.0) + self._ttl_s <= self._clock():
                found.append(unit)
        return found

    def take(self, unit: int) -> bool:
        """Claim a unit. False when another process holds it, or was faster."""
        key = layout.claim(unit)
        self._unsettled.add(unit)
        try:
            try:
                etag = self._store.put(key, self._body(), if_none_match=True)
            except PreconditionFailed:
                body, theirs = self._store.get(key)
                if not self._lapsed(body):
                    self._unsettled.discard(unit)
                    return False
                etag = self._store.put(key, self._body(), if_match=theirs)
                log.info("unit %d: taking over a claim that lapsed", unit)
        except (PreconditionFailed, NotFound):  # taken over, renewed or released by another in between
            self._unsettled.discard(unit)
            return False
        self._etags[unit] = etag
        self._unsettled.discard(unit)
        return True

    def release(self, unit: int) -> None:
        """Delete the claim, unless another process has taken it over. A failure only leaves it to lapse."""
        with self._lock:
            if unit not in self._etags:
                return
            self._unsettled.add(unit)
            del self._etags[unit]
            try:
                self._store.delete([layout.claim(unit)])
            except StoreError as error:
                log.warning("unit %d: its claim stays until it lapses: %s", unit, error)
            self._unsettled.discard(unit)

    def renew(self) -> None:
        """Put the expiry of every held claim `ttl_s` from now."""
        for unit in list(self._etags):
            with self._lock:
                if unit not in self._etags:
                    continue
                try:
                    self._etags[unit] = self._store.put(
                        layout.claim(unit), self._body(), if_match=self._etags[unit]
                    )
                except (PreconditionFailed, NotFound):
                    self._etags.pop(unit)
                    log.warning(
                        "unit %d: the claim lapsed and went to another process; one of the two works in vain",
                        unit,
                    )
                except StoreError as error:
                    log.warning("unit %d: could not renew its claim: %s", unit, error)

    def close(self) -> None:
        """Stop renewing and release what is held."""
        self._closed.set()
        self._thread.join(timeout=5)
        for unit in list(self._etags):
            self.release(unit)
        for unit in list(self._unsettled):
            self._drop_if_mine(unit)

    def _drop_if_mine(self, unit: int) -> None:
        """Delete a claim if its token is this process's."""
        try:
            body, _ = self._store.get(layout.claim(unit))
            if self._token.encode() in body:
                self._store.delete([layout.claim(unit)])
        except NotFound:
            pass
        except StoreError as error:
            log.warning("unit %d: its claim stays until it lapses: %s", unit, error)

    def __enter__(self) -> Claims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep(self) -> None:
        while not self._closed.wait(self._ttl_s / 3):
            self.renew()

    def _body(self) -> bytes:
        return json.dumps({"token": self._token, "expires": round(self._clock() + self._ttl_s, 3)}).encode()

    def _lapsed(self, body: bytes) -> bool:
        """Whether a claim has expired; one that cannot be read has."""
        try:
            return float(json.loads(body)["expires"]) <= self._clock()
        except (ValueError, TypeError, KeyError):
            return True
