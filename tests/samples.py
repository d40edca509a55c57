"""Paired samples with a known difference, and how often chance may be wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

REPEATS = 500
Values = dict[int, float]


def by_seed(values: Any) -> Values:
    return dict(enumerate(map(float, values)))


def draws(seed: int, shift: float = 0.0, n: int = 12, sd: float = 1.0):
    """Two arms that share the noise of their seeds."""
    random = np.random.default_rng(seed)
    common = random.normal(5.0, 2.0, n)
    first, second = random.normal(0, sd / 2**0.5, (2, n)) + common
    return by_seed(first), by_seed(second + shift)


def binomial_range(p: float, n: int = REPEATS) -> tuple[int, int]:
    """What 99.9 % of binomial counts lie in."""
    low, high = stats.binom.interval(0.999, n, p)
    return int(low), int(high)
