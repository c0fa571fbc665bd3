"""One small interface for figures, with wandb behind it on the main process and the heartbeat on every process.

The loops call `log` and `summary` and never ask whether wandb is there. wandb failing (no service, full disk,
cut network) is said once and then ignored. Settings are sent as wandb's config; secrets are not settings.
"""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from dflash_stream.config import Config
from dflash_stream.store import Store
from dflash_stream.tracking.heartbeat import Heartbeat


def has_wandb_key() -> bool:
    """Whether wandb would find credentials: WANDB_API_KEY, or a netrc entry for its host."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class _Wandb:
    """One wandb run. The first failure is printed and ends the tracking, never the work."""

    def __init__(self, config: Config, store: Store, phase: str, settings: Mapping[str, Any]) -> None:
        self._run: Any = None
        self.where = ""
        try:
            import wandb

            mode = os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")
            if "WANDB_MODE" not in os.environ and mode == "offline":
                print("wandb: no key is set: logging offline (to upload it: wandb login, then wandb sync)")
            if config.tracking.directory:
                Path(config.tracking.directory).mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=config.tracking.project,
                name=f"{phase} {store.url.rstrip('/').rsplit('/', 1)[-1]}",
                job_type=phase,
                dir=config.tracking.directory,
                mode=mode,  # type: ignore[arg-type]
                config={**settings, "store": store.url},  # its address, whatever the settings hold of it
                settings=wandb.Settings(
                    console="off", silent=True, init_timeout=30.0, disable_git=True, save_code=False
                ),
            )
            self._run.define_metric("*", step_metric="step")
            self.where = str(Path(self._run.dir).parent) if self._run.offline else str(self._run.url or "")
        except Exception as error:
            self._fail("start", error)

    def _fail(self, what: str, error: Exception) -> None:
        print(
            f"wandb: could not {what} ({type(error).__name__}: {error}); going on without it", file=sys.stderr
        )
        self._run = None

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        if self._run is not None:
            try:
                self._run.log({**values, "step": step})
            except Exception as error:
                self._fail("log", error)

    def summary(self, values: Mapping[str, Any]) -> None:
        if self._run is not None:
            try:
                self._run.summary.update(dict(values))
            except Exception as error:
                self._fail("write its summary", error)

    def close(self, state: str) -> None:
        if self._run is not None:
            try:
                self._run.finish(exit_code=0 if state == "finished" else 1)
            except Exception as error:
                self._fail("finish", error)


class Tracker:
    """The heartbeat of one process, and on the main process wandb. `where` tells a person how to find its figures."""

    def __init__(self, heartbeat: Heartbeat, wandb: _Wandb | None) -> None:
        self._heartbeat = heartbeat
        self._wandb = wandb
        self.where = wandb.where if wandb else ""
        self._heartbeat.update({"wandb": self.where})

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Figures at a step; steps rise."""
        self._heartbeat.update({**values, "step": step})
        if self._wandb:
            self._wandb.log(values, step=step)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Figures of the whole phase."""
        self._heartbeat.update({"summary": dict(values)})
        if self._wandb:
            self._wandb.summary(values)

    def close(self, state: str = "finished") -> None:
        """The last beat, with how the process ended, and the end of the wandb run."""
        self._heartbeat.close(state)
        if self._wandb:
            self._wandb.close(state)


def open_tracker(
    config: Config, store: Store, phase: str, *, settings: Mapping[str, Any], primary: bool
) -> Tracker:
    """The tracker of one process, of `phase` ("extract", "train").

    settings: what wandb shows of them; primary: true on the one process that writes to wandb.
    """
    wandb = _Wandb(config, store, phase, settings) if primary and config.tracking.wandb else None
    return Tracker(Heartbeat(store, phase), wandb)
