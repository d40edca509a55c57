"""Paired comparisons over seeds, and verdicts on hypotheses that were declared before.

A difference is taken seed by seed; its interval is Student's t interval (bootstrap
intervals are too narrow below about 20 seeds). Hypotheses are corrected together by
Holm's method; everything else is exploratory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

ALPHA = 0.05


@dataclass(frozen=True)
class Paired:
    """A paired difference second − first.

    Attributes:
        first: arm.outcome.
        second: arm.outcome.
        seeds: seeds with finite values in both.
        lost: seeds without a finite value in the first, in the second, in both.
        first_mean: over the common seeds.
        second_mean: over the common seeds.
        mean: of the differences; None without common seeds.
        sd: of the differences.
        low: of the 95 % t interval.
        high: of the 95 % t interval.
        correlation: between the two; what pairing gains.
        p: two-sided, of no difference.
        differences: by seed.
    """

    first: str
    second: str
    seeds: int
    lost: tuple[int, int, int]
    first_mean: float | None
    second_mean: float | None
    mean: float | None
    sd: float | None
    low: float | None
    high: float | None
    correlation: float | None
    p: float | None
    differences: tuple[float, ...]

    def interval(self, level: float) -> tuple[float, float]:
        """The t interval at another level; infinite with fewer than two seeds."""
        if self.mean is None or self.sd is None or self.seeds < 2:
            return -np.inf, np.inf
        if self.sd == 0:
            return self.mean, self.mean
        half = stats.t.ppf((1 + level) / 2, self.seeds - 1)
        half *= self.sd / np.sqrt(self.seeds)
        return float(self.mean - half), float(self.mean + half)

    def above(self, bound: float) -> float:
        """One-sided p of the mean difference being at most ``bound``."""
        if self.mean is None or self.sd is None or self.seeds < 2:
            return 1.0
        if self.sd == 0:
            return 0.0 if self.mean > bound else 1.0
        t = (self.mean - bound) / (self.sd / np.sqrt(self.seeds))
        return float(stats.t.sf(t, self.seeds - 1))

    def below(self, bound: float) -> float:
        """One-sided p of the mean difference being at least ``bound``."""
        if self.mean is None or self.sd is None or self.seeds < 2:
            return 1.0
        if self.sd == 0:
            return 0.0 if self.mean < bound else 1.0
        t = (self.mean - bound) / (self.sd / np.sqrt(self.seeds))
        return float(stats.t.cdf(t, self.seeds - 1))


@dataclass(frozen=True)
class Verdict:
    """A hypothesis, judged.

    Attributes:
        id: as declared.
        statement: as declared, with its margin.
        required: whether the run fails if it does not hold.
        paired: the difference second − first.
        p_for: Holm-adjusted p in favour.
        p_against: Holm-adjusted p against.
        verdict: supported, contradicted or undecided.
    """

    id: str
    statement: str
    required: bool
    paired: Paired
    p_for: float
    p_against: float
    verdict: str


def pair(
    first: str, second: str, before: Mapping[int, float], after: Mapping[int, float]
) -> Paired:
    """Compare two sets of values seed by seed.

    Args:
        first: what ``before`` is.
        second: what ``after`` is.
        before: value by seed.
        after: value by seed.

    Returns:
        The ``Paired`` difference after − before; seeds that are missing or not finite
        in either are counted as lost.
    """
    every = sorted(set(before) | set(after))
    x = np.array([before.get(seed, np.nan) for seed in every], np.float64)
    y = np.array([after.get(seed, np.nan) for seed in every], np.float64)
    bad_x, bad_y = ~np.isfinite(x), ~np.isfinite(y)
    lost = (
        int((bad_x & ~bad_y).sum()),
        int((bad_y & ~bad_x).sum()),
        int((bad_x & bad_y).sum()),
    )
    x, y = x[~(bad_x | bad_y)], y[~(bad_x | bad_y)]
    n, d = len(x), y - x
    sd = float(d.std(ddof=1)) if n > 1 else None
    moving = n > 2 and x.std() > 0 and y.std() > 0
    draft = Paired(
        first,
        second,
        n,
        lost,
        float(x.mean()) if n else None,
        float(y.mean()) if n else None,
        float(d.mean()) if n else None,
        sd,
        None,
        None,
        float(np.corrcoef(x, y)[0, 1]) if moving else None,
        None,
        tuple(d.tolist()),
    )
    if sd is None:
        return draft
    low, high = draft.interval(1 - ALPHA)
    p = min(1.0, 2 * min(draft.above(0.0), draft.below(0.0)))
    return replace(draft, low=low, high=high, p=p)


def contrast(paired: Paired, better: str, within: float | None) -> str:
    """Better, worse, equivalent or undecided, of the second against the first.

    Where seeds diverged in one of the two only, an exact sign test of these decides
    first: the arm that is lost is worse. Equivalent: the 90 % interval lies within the
    margin (two one-sided tests), or all differences are exactly 0. Better and worse:
    the 95 % interval excludes 0.

    Args:
        paired: the difference.
        better: ``"higher"`` or ``"lower"``.
        within: margin of equivalence, or None.

    Returns:
        One of the four words.
    """
    only_first, only_second, _ = paired.lost
    if only_first + only_second:
        p = stats.binomtest(only_second, only_first + only_second).pvalue
        if p <= ALPHA:
            return "worse" if only_second > only_first else "better"
    if paired.low is None or paired.high is None:
        return "undecided"
    if not any((*paired.differences, only_first, only_second)):
        return "equivalent"  # bit for bit, in every seed
    if within is not None:
        low, high = paired.interval(1 - 2 * ALPHA)
        if -within < low and high < within:
            return "equivalent"
    if paired.low > 0 or paired.high < 0:
        return "better" if (paired.low > 0) == (better == "higher") else "worse"
    return "undecided"


def judge(hypotheses: Sequence[Mapping[str, Any]], values: Any) -> tuple[Verdict, ...]:
    """Judge all hypotheses together.

    ``a < b`` by at least m: supported if b − a > m, contradicted if b − a < m, each at
    a Holm-adjusted one-sided level of 5 %. ``a = b`` within m: supported by two
    one-sided tests, contradicted if the difference lies beyond m.

    Args:
        hypotheses: as the plan holds them, with ``sides``.
        values: ``values(arm, outcome)`` gives the values by seed.

    Returns:
        One ``Verdict`` each.
    """
    pairs, for_it, against = [], [], []
    for hypothesis in hypotheses:
        (arm, outcome), relation, (other, other_outcome) = hypothesis["sides"]
        first, second = f"{arm}.{outcome}", f"{other}.{other_outcome}"
        paired = pair(first, second, values(arm, outcome), values(other, other_outcome))
        if relation == "=":
            margin = hypothesis["within"]
            inside = max(paired.above(-margin), paired.below(margin))
            outside = min(1.0, 2 * min(paired.above(margin), paired.below(-margin)))
        else:
            margin = hypothesis["at_least"] or 0.0
            sign = 1 if relation == "<" else -1
            tests = (paired.above(margin), paired.below(margin))
            if sign < 0:
                tests = (paired.below(-margin), paired.above(-margin))
            inside, outside = tests
        pairs.append(paired)
        for_it.append(inside)
        against.append(outside)
    return tuple(
        Verdict(
            hypothesis["id"],
            described(hypothesis),
            bool(hypothesis["required"]),
            paired,
            p_for,
            p_against,
            _verdict(p_for, p_against),
        )
        for hypothesis, paired, p_for, p_against in zip(
            hypotheses, pairs, holm(for_it), holm(against), strict=True
        )
    )


def described(hypothesis: Mapping[str, Any]) -> str:
    """The statement with its margin."""
    if hypothesis["within"] is not None:
        return f"{hypothesis['statement']} within {hypothesis['within']:g}"
    if hypothesis["at_least"]:
        return f"{hypothesis['statement']} by at least {hypothesis['at_least']:g}"
    return hypothesis["statement"]


def _verdict(p_for: float, p_against: float) -> str:
    if p_for <= ALPHA:
        return "supported"
    return "contradicted" if p_against <= ALPHA else "undecided"


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = np.argsort(p, kind="stable")
    adjusted, highest = [0.0] * len(p), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = highest
    return adjusted
