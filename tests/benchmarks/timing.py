"""Ratios of times: interleaved rounds in one process, medians, and their spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import jax
import numpy as np


def ratios(
    candidates: Mapping[str, Callable[[], object]], peer: str, rounds: int = 31
) -> dict[str, tuple[float, float, float]]:
    """Time of each candidate over that of the peer in the same round.

    Args:
        candidates: by name; each returns arrays that are waited for.
        peer: the name that all are compared with.
        rounds: how often all of them run, one after the other.

    Returns:
        Lower quartile, median and upper quartile of the ratio.
    """
    for run in candidates.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    found = {}
    for name, taken in times.items():
        share = np.asarray(taken) / np.asarray(times[peer])
        low, middle, high = np.quantile(share, [0.25, 0.5, 0.75])
        found[name] = (float(low), float(middle), float(high))
    return found
