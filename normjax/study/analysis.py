"""From a table of numbers to verdicts, contrasts and manipulation checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from normjax.study.inference import Paired, Verdict, contrast, judge, pair
from normjax.study.interventions import Manipulation, check_arm
from normjax.study.store import Results

PREDICTED = "_predicted"
BOUND = "_bound"


@dataclass(frozen=True)
class Contrast:
    """An arm against the arm that it is from, on one outcome or diagnostic.

    Attributes:
        arm: the arm.
        parent: what it is from.
        metric: what is compared.
        paired: the difference, arm − parent.
        verdict: better, worse, equivalent or undecided; None for a diagnostic.
    """

    arm: str
    parent: str
    metric: str
    paired: Paired
    verdict: str | None


@dataclass(frozen=True)
class Agreement:
    """A measured metric against its closed form, ``<metric>_predicted``.

    Attributes:
        arm: the arm.
        metric: the measured one.
        largest: value that the prediction reaches at most, in absolute terms.
        error: largest distance over coordinates and seeds; both are None if a value is
            not finite.
    """

    arm: str
    metric: str
    largest: float | None
    error: float | None


@dataclass(frozen=True)
class Bounded:
    """A measured metric under a bound that was computed beforehand, ``<metric>_bound``.

    Attributes:
        arm: the arm.
        metric: the measured one.
        largest: its largest absolute value; None if one is not finite.
        share: the largest share of the bound; a bound of inf is none. None if there is
            no finite one.
        ok: whether no value lies above its bound.
    """

    arm: str
    metric: str
    largest: float | None
    share: float | None
    ok: bool


@dataclass(frozen=True)
class Analysis:
    """Everything that a run says.

    Attributes:
        verdicts: on the declared hypotheses.
        contrasts: of every arm, on the primary outcome and then the diagnostics.
        manipulations: checks that arms did what they claim.
        agreements: measured against predicted.
        bounds: measured against a bound.
        diverged: seeds that diverged, by arm.
    """

    verdicts: tuple[Verdict, ...]
    contrasts: tuple[Contrast, ...]
    manipulations: tuple[Manipulation, ...]
    agreements: tuple[Agreement, ...]
    bounds: tuple[Bounded, ...]
    diverged: Mapping[str, int]

    @property
    def held(self) -> bool:
        """Whether every check, every bound and every required hypothesis held."""
        hypotheses = all(v.verdict == "supported" for v in self.verdicts if v.required)
        return hypotheses and all(c.ok for c in (*self.manipulations, *self.bounds))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``analysis.json``."""
        return asdict(self)


def analyze(
    results: Results, registry: Mapping[str, Callable[..., Any]] | None = None
) -> Analysis:
    """Judge a finished run.

    Args:
        results: of the run.
        registry: manipulation checks of the experiment.

    Returns:
        The ``Analysis``.
    """
    plan = results.plan
    return Analysis(
        judge(plan["hypotheses"], results.values),
        tuple(_contrasts(results)),
        tuple(_manipulations(results, registry or {})),
        tuple(_agreements(results)),
        tuple(_bounds(results)),
        {arm: _diverged(results, arm) for arm in plan["arms"]},
    )


def _contrasts(results: Results):
    outcomes = results.plan["outcomes"]
    if outcomes is None:
        return
    for metric in (outcomes["primary"], *outcomes["diagnostics"]):
        primary = metric == outcomes["primary"]
        for arm, about in results.plan["arms"].items():
            parent = about["from"]
            if parent is None:
                continue
            before, after = results.values(parent, metric), results.values(arm, metric)
            if not before or not after:
                continue
            paired = pair(f"{parent}.{metric}", f"{arm}.{metric}", before, after)
            verdict = None
            if primary:
                within = outcomes["equivalent_within"]
                verdict = contrast(paired, outcomes["better"], within)
            yield Contrast(arm, parent, metric, paired, verdict)


def _manipulations(results: Results, registry: Mapping[str, Callable[..., Any]]):
    for arm, about in results.plan["arms"].items():
        if about["from"] is None:
            continue
        values, parent = _checks(results, arm), _checks(results, about["from"])
        if values:
            yield from check_arm(arm, about["changes"], values, parent, registry)


def _checks(results: Results, arm: str) -> dict[str, np.ndarray]:
    """The ``check.*`` metrics of an arm, over seeds."""
    chosen = results.table.filter(
        (pl.col("arm") == arm)
        & pl.col("metric").str.starts_with("check.")
        & pl.col("value").is_not_null()
    )
    return {
        str(metric): frame.sort("seed")["value"].to_numpy()
        for (metric,), frame in chosen.group_by("metric", maintain_order=True)
    }


def _pairs(results: Results, suffix: str):
    """Every metric with its partner, by arm, matched by seed and coordinate."""
    table = results.table
    names = table["metric"].unique().to_list()
    for arm in results.plan["arms"]:
        for metric in sorted(n for n in names if f"{n}{suffix}" in names):
            first, second = (
                table.filter((pl.col("arm") == arm) & (pl.col("metric") == name)).sort(
                    "seed", "coordinate"
                )["value"]
                for name in (metric, f"{metric}{suffix}")
            )
            has_value = first.null_count() < len(first)
            if has_value and len(first) == len(second):
                yield arm, metric, first.to_numpy(), second.to_numpy()


def _agreements(results: Results):
    for arm, metric, measured, predicted in _pairs(results, PREDICTED):
        if not np.isfinite([measured, predicted]).all():
            yield Agreement(arm, metric, None, None)
            continue
        error = float(np.max(np.abs(measured - predicted)))
        yield Agreement(arm, metric, float(np.max(np.abs(predicted))), error)


def _bounds(results: Results):
    for arm, metric, measured, bound in _pairs(results, BOUND):
        value = np.where(np.isfinite(measured), np.abs(measured), np.inf)
        judged = (value > 0) & ~np.isinf(bound)
        shares = value[judged] / np.maximum(bound[judged], np.finfo(np.float64).tiny)
        numbers = float(value.max()), float(np.max(shares, initial=0.0))
        shown = (n if np.isfinite(n) else None for n in numbers)
        yield Bounded(arm, metric, *shown, ok=numbers[1] <= 1)


def _diverged(results: Results, arm: str) -> int:
    """Seeds whose loss stopped being finite."""
    values = results.values(arm, "diverged_at").values()
    return sum(bool(np.isfinite(value)) for value in values)
