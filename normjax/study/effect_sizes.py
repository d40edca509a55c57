"""How large a paired difference is, how sure, and how many seeds it would take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import stats

from normjax.study.inference import ALPHA, Paired

EXACT_UP_TO = 16
DRAWS = 99_999
ALL: Any = np.inf  # SciPy enumerates; its annotation knows whole numbers only
POWER = 0.8
MOST_SEEDS = 100_000


@dataclass(frozen=True)
class EffectSize:
    """What stands beside a mean difference.

    Attributes:
        d_z: mean difference in standard deviations of the differences.
        superiority: share of seeds in which the second is larger; ties count half.
        hodges_lehmann: median of the means of all pairs of differences.
        skewed: whether the skewness lies beyond twice its standard error, so that the
            median says more than the mean.
        p_exact: sign-flip p, two-sided: all 2^n flips up to 16 seeds, 10^5 above.
        seeds_for_difference: seeds that find the declared difference at 80 % power.
        seeds_for_equivalence: seeds that show equivalence within it at 80 % power, if
            there is no difference.
    """

    d_z: float | None
    superiority: float | None
    hodges_lehmann: float | None
    skewed: bool
    p_exact: float | None
    seeds_for_difference: int | None
    seeds_for_equivalence: int | None


def effect_size(paired: Paired, declared: float | None) -> EffectSize:
    """The size of a difference.

    Args:
        paired: the difference.
        declared: the difference that matters; None if the study declares none.

    Returns:
        The ``EffectSize``; None where there are too few seeds, or no variation.
    """
    d = np.array(paired.differences, np.float64)
    if not d.size:
        return EffectSize(None, None, None, False, None, None, None)
    first, second = np.triu_indices(len(d))
    sd, needed = paired.sd, (None, None)
    if declared and sd is not None:
        needed = (
            seeds_needed(difference_power, declared, sd),
            seeds_needed(equivalence_power, declared, sd),
        )
    return EffectSize(
        paired.mean / sd if sd and paired.mean is not None else None,
        float(np.mean((d > 0) + 0.5 * (d == 0))),
        float(np.median((d[first] + d[second]) / 2)),
        _skewed(d),
        sign_flip(paired.differences) if len(d) > 1 else None,
        *needed,
    )


def _skewed(d: np.ndarray) -> bool:
    n = len(d)
    if n < 8 or np.ptp(d) == 0:
        return False
    error = np.sqrt(6 * n * (n - 1) / ((n - 2) * (n + 1) * (n + 3)))
    return bool(abs(stats.skew(d, bias=False)) > 2 * error)


@lru_cache(maxsize=4096)
def sign_flip(differences: tuple[float, ...]) -> float:
    """Two-sided p that the differences are symmetric around zero.

    Args:
        differences: by seed.

    Returns:
        The share of sign flips whose mean is at least as far from zero: exact up to 16
        seeds, else by 99 999 seeded draws. It cannot be below 2 / 2^n.

    Example:
        >>> sign_flip((1.0, 2.0, 3.0, 4.0, 5.0))
        0.0625
    """
    d = np.array(differences, np.float64)
    if not d.any():
        return 1.0
    found = stats.permutation_test(
        (d,),
        lambda x, axis: np.mean(x, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=ALL if len(d) <= EXACT_UP_TO else DRAWS,
        rng=np.random.default_rng(0),
    )
    return min(1.0, float(found.pvalue))


def difference_power(n: int, ratio: float) -> float:
    """Power of the two-sided paired t test at 5 %.

    Args:
        n: seeds.
        ratio: true difference in standard deviations of the differences.

    Returns:
        From the noncentral t distribution.
    """
    limit, shift = stats.t.ppf(1 - ALPHA / 2, n - 1), ratio * np.sqrt(n)
    upper = stats.nct.sf(limit, n - 1, shift)
    lower = stats.nct.cdf(-limit, n - 1, shift)
    # The far tail underflows to NaN at large shifts, where it is zero.
    return float(np.nan_to_num(upper, nan=1.0) + np.nan_to_num(lower))


def equivalence_power(n: int, ratio: float) -> float:
    """Power of two one-sided t tests at 5 %, where there is no difference.

    P(|mean| < margin − t s/√n), averaged over the distribution of s by 2000 quantiles.

    Args:
        n: seeds.
        ratio: margin in standard deviations of the differences.

    Returns:
        The probability of the verdict "equivalent".
    """
    middles = (np.arange(2000) + 0.5) / 2000
    s = np.sqrt(stats.chi2.ppf(middles, n - 1) / (n - 1))
    room = ratio * np.sqrt(n) - stats.t.ppf(1 - ALPHA, n - 1) * s
    return float(np.mean(np.where(room > 0, 2 * stats.norm.cdf(room) - 1, 0)))


def seeds_needed(
    power: Callable[[int, float], float], difference: float, sd: float
) -> int | None:
    """The fewest seeds that reach a power of 80 %.

    Args:
        power: ``difference_power`` or ``equivalence_power``.
        difference: what is to be found, or the margin.
        sd: of the differences, as it was measured.

    Returns:
        2 or more; None if it takes more than 100 000.
    """
    if sd == 0:
        return 2
    low, high = 1, 2
    while power(high, difference / sd) < POWER:
        low, high = high, 2 * high
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        enough = power(middle, difference / sd) >= POWER
        low, high = (low, middle) if enough else (middle, high)
    return high
