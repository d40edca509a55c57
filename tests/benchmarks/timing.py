"""Times of programs: interleaved rounds in one process, medians, and their spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Spread(NamedTuple):
    """Lower quartile, median and upper quartile."""

    low: float
    middle: float
    high: float


def spread(values: np.ndarray) -> Spread:
    return Spread(*map(float, np.quantile(values, [0.25, 0.5, 0.75])))


def drawn(shape: tuple[int, ...], dtype: Any = "float32", seed: int = 0) -> jax.Array:
    """Normal numbers about 1: offset and spread alike."""
    return jnp.asarray(np.random.default_rng(seed).normal(1, 1, shape), dtype)


def times(
    candidates: Mapping[str, Callable[[], object]], rounds: int = 31
) -> dict[str, np.ndarray]:
    """Seconds of each candidate in each round.

    Args:
        candidates: by name; each returns arrays that are waited for.
        rounds: how often all of them run, in an order that is drawn for each round:
            what ran before a program warms or spoils its caches.

    Returns:
        One array of ``rounds`` numbers for each candidate.
    """
    for run in candidates.values():
        jax.block_until_ready(run())
    order = np.random.default_rng(0)
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name in map(str, order.permutation(list(candidates))):
            start = time.perf_counter()
            jax.block_until_ready(candidates[name]())
            found[name].append(time.perf_counter() - start)
    return {name: np.asarray(taken) for name, taken in found.items()}


def ratios(
    candidates: Mapping[str, Callable[[], object]], peer: str, rounds: int = 31
) -> dict[str, Spread]:
    """Time of each candidate over that of the peer in the same round."""
    found = times(candidates, rounds)
    return {name: spread(taken / found[peer]) for name, taken in found.items()}
