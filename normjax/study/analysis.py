"""From a table of numbers to verdicts, contrasts and manipulation checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from normjax.study.design_results import Designed, judge_designs
from normjax.study.effect_sizes import EffectSize, effect_size
from normjax.study.inference import Paired, Verdict, contrast, judge, pair
from normjax.study.interventions import Manipulation, check_arm
from normjax.study.store import Results

PREDICTED = "_predicted"
BOUND = "_bound"
GENERATED = ("decomposition", "factorial", "grid", "tuning")


@dataclass(frozen=True)
class Contrast:
    """An arm against the arm that it is from, on one outcome or diagnostic.

    Attributes:
        arm: the arm.
        parent: what it is from.
        metric: what is compared.
        paired: the difference, arm − parent.
        verdict: better, worse, equivalent or undecided; None for a diagnostic.
        effect: how large the difference is, for the outcome; None for a diagnostic.
        complete: the same over the seeds in which neither diverged, where the study
            says what a diverged seed scores and some did; else None.
        at: ``shared`` or ``best``, where arms were tuned; None else.
    """

    arm: str
    parent: str
    metric: str
    paired: Paired
    verdict: str | None
    effect: EffectSize | None = None
    complete: Paired | None = None
    at: str | None = None


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
        effects: of the verdicts, how large each difference is.
        designed: decompositions, factorial, grid and tuning.
    """

    verdicts: tuple[Verdict, ...]
    contrasts: tuple[Contrast, ...]
    manipulations: tuple[Manipulation, ...]
    agreements: tuple[Agreement, ...]
    bounds: tuple[Bounded, ...]
    diverged: Mapping[str, int]
    effects: tuple[EffectSize, ...] = ()
    designed: Designed = Designed()

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
    values = scored(results)
    verdicts = judge(plan["hypotheses"], values)
    margins = [h["within"] or h["at_least"] for h in plan["hypotheses"]]
    designed = judge_designs(plan, values)
    return Analysis(
        verdicts,
        (*_contrasts(results, values), *_tuned(results, values, designed)),
        tuple(_manipulations(results, registry or {})),
        tuple(_agreements(results)),
        tuple(_bounds(results)),
        {arm: _diverged(results, arm) for arm in plan["arms"]},
        tuple(effect_size(v.paired, m) for v, m in zip(verdicts, margins, strict=True)),
        designed,
    )


def scored(results: Results) -> Callable[[str, str], dict[int, float]]:
    """Values by seed, where a diverged seed scores what the study declares."""
    outcomes = results.plan["outcomes"] or {}
    penalty, primary = outcomes.get("diverged"), outcomes.get("primary")

    def values(arm: str, metric: str) -> dict[int, float]:
        found = results.values(arm, metric)
        if penalty is None or metric != primary:
            return found
        return {s: v if np.isfinite(v) else penalty for s, v in found.items()}

    return values


def _contrasts(results: Results, values: Callable[[str, str], dict[int, float]]):
    """Arms that are declared; those of a design are judged in their design."""
    outcomes = results.plan["outcomes"]
    if outcomes is None:
        return
    for metric in (outcomes["primary"], *outcomes["diagnostics"]):
        for arm, about in results.plan["arms"].items():
            if about["from"] is None or about.get("role") in GENERATED:
                continue
            found = _contrast(results, values, (about["from"], arm), metric)
            if found is not None:
                yield found


def _contrast(
    results: Results,
    values: Callable[[str, str], dict[int, float]],
    arms: tuple[str, str],
    metric: str,
) -> Contrast | None:
    """Second against first; with a verdict on the primary outcome."""
    outcomes, (parent, arm) = results.plan["outcomes"], arms
    before, after = values(parent, metric), values(arm, metric)
    if not before or not after:
        return None
    paired = pair(f"{parent}.{metric}", f"{arm}.{metric}", before, after)
    if metric != outcomes["primary"]:
        return Contrast(arm, parent, metric, paired, None)
    within = outcomes["equivalent_within"]
    raw = results.values(parent, metric), results.values(arm, metric)
    complete = pair(paired.first, paired.second, *raw)
    return Contrast(
        arm,
        parent,
        metric,
        paired,
        contrast(paired, outcomes["better"], within),
        effect_size(paired, within),
        complete if sum(complete.lost) != sum(paired.lost) else None,
    )


def _tuned(
    results: Results,
    values: Callable[[str, str], dict[int, float]],
    designed: Designed,
):
    """Every declared arm against its parent, at the shared and at each one's best."""
    if designed.tuning is None:
        return
    rows = {row.arm: row for row in designed.tuning.rows}
    for at in ("shared", "best"):
        for arm, row in rows.items():
            parent = results.plan["arms"][arm]["from"]
            if parent is None:
                continue
            chosen = getattr(rows[parent], at), getattr(row, at)
            metric = results.plan["outcomes"]["primary"]
            found = _contrast(results, values, chosen, metric)
            if found is not None:
                yield replace(found, arm=arm, parent=parent, at=at)


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
