"""How sure a mean over rounds of decoding is: resampling whole texts, since the rounds of one text hang together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000


def bootstrap(tokens: NDArray[np.int64], rounds: NDArray[np.int64], *, seed: int = 0) -> NDArray[np.float64]:
    """Σ tokens / Σ rounds in 1,000 draws of as many texts with replacement.

    tokens, rounds [n]: of each text, at least one round each. Equal seeds and n draw the same texts: the
    difference of two calls is a paired one.
    """
    picks = np.random.default_rng(seed).integers(len(tokens), size=(RESAMPLES, len(tokens)))
    return tokens[picks].sum(1) / rounds[picks].sum(1)


def interval_of(draws: NDArray[np.float64]) -> tuple[float, float]:
    """The middle 95 % of bootstrap draws."""
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)
