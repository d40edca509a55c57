"""From a long table to verdicts, contrasts, checks and agreements."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from normjax.study.analysis import Analysis, analyze
from normjax.study.cells import Row
from normjax.study.store import Results

pytestmark = pytest.mark.jax_defaults

SEEDS = range(8)
NOISE = np.random.default_rng(0).normal(0, 0.05, len(SEEDS))
OUTCOMES = {
    "primary": "score",
    "better": "higher",
    "equivalent_within": 0.2,
    "diagnostics": ["loss", "only_up"],
}


def results(rows: dict[str, list[Row]], **plan: Any) -> Results:
    """A finished run of the arms baseline, up (from it) and down (from up)."""
    frames = [
        pl.DataFrame(
            found,
            schema={
                "seed": pl.Int64,
                "metric": pl.String,
                "coordinate": pl.Float64,
                "value": pl.Float64,
            },
            orient="row",
        ).select(pl.lit(arm).alias("arm"), pl.all())
        for arm, found in rows.items()
    ]
    parents = {"baseline": None, "up": "baseline", "down": "up"}
    changes = {"up": [{"name": "a.level", "before": 0, "after": 1}]}
    arms = {
        arm: {"from": parents[arm], "changes": changes.get(arm, [])} for arm in rows
    }
    declared = {"outcomes": OUTCOMES, "hypotheses": [], "arms": arms, **plan}
    return Results(Path(), declared, {}, pl.concat(frames))


def scores(mean: float, lose: int = 0, **more: float) -> list[Row]:
    """Scores of every seed around a mean; the first few diverged."""
    found = []
    for seed in SEEDS:
        value = math.nan if seed < lose else mean + NOISE[seed] * (1 + mean)
        found += [
            Row(seed, "score", None, value),
            Row(seed, "loss", None, -value),
            Row(seed, "diverged_at", None, 3.0 if seed < lose else math.nan),
        ]
        found += [Row(seed, name, None, v) for name, v in more.items()]
    return found


def statement(text: str, **more: Any) -> dict[str, Any]:
    left, relation, right = text.split()
    sides = [left.split("."), relation, right.split(".")]
    declared = {"id": "H1", "statement": text, "sides": sides, "required": False}
    return {**declared, "at_least": None, "within": None, **more}


THREE = {
    "baseline": scores(0.0),
    "up": scores(1.0, only_up=2.0),
    "down": scores(0.9, lose=2),
}


def test_every_arm_is_compared_with_the_arm_it_is_from():
    found = analyze(results(THREE)).contrasts
    assert [(c.arm, c.parent, c.metric) for c in found] == [
        ("up", "baseline", "score"),
        ("down", "up", "score"),
        ("up", "baseline", "loss"),
        ("down", "up", "loss"),
    ]
    up, down, loss, _ = found
    assert up.verdict == "better"
    assert up.paired.mean == pytest.approx(1 + NOISE.mean())
    assert (up.paired.first, up.paired.second) == ("baseline.score", "up.score")
    assert down.verdict == "equivalent"
    assert down.paired.lost == (0, 2, 0)
    assert loss.verdict is None
    assert loss.paired.mean == pytest.approx(-1 - NOISE.mean())


def test_lower_may_be_better():
    outcomes = {**OUTCOMES, "better": "lower", "equivalent_within": None}
    found = analyze(results(THREE, outcomes=outcomes)).contrasts
    assert [c.verdict for c in found[:2]] == ["worse", "better"]


def test_without_outcomes_there_is_no_contrast():
    assert analyze(results(THREE, outcomes=None)).contrasts == ()


def test_hypotheses_are_judged_on_the_table():
    declared = [
        statement("up.score > baseline.score", at_least=0.5),
        statement("baseline.score > up.score", id="H2"),
        statement("up.score = down.score", within=0.01, id="H3"),
    ]
    found = analyze(results(THREE, hypotheses=declared)).verdicts
    assert [v.verdict for v in found] == ["supported", "contradicted", "contradicted"]
    assert [v.id for v in found] == ["H1", "H2", "H3"]
    assert found[2].paired.lost == (0, 2, 0)


def test_diverged_seeds_are_counted():
    assert analyze(results(THREE)).diverged == {"baseline": 0, "up": 0, "down": 2}


def checked(level: float, start: float = 1.0) -> list[Row]:
    rows = [Row(s, "check.level", None, level) for s in SEEDS]
    return rows + [Row(s, "check.init.leaf 2", None, start) for s in SEEDS]


def level(after: Any, values: Any):
    found = values["check.level"]
    yield "the level", str(after), found, bool((found == after).all())


def manipulations(up: list[Row], base: list[Row]) -> list[tuple[str, str, bool]]:
    table = results({"baseline": base, "up": up}, outcomes=None)
    found = analyze(table, {"level": level}).manipulations
    return [(m.arm, m.name, m.ok) for m in found]


SAME = "same data and initial values of shared leaves as its parent"


def test_manipulations_are_checked_by_the_experiments_registry():
    good = manipulations(checked(1.0), checked(0.0))
    assert good == [("up", SAME, True), ("up", "the level", True)]
    bad = manipulations(checked(0.5), checked(0.0))
    assert bad == [("up", SAME, True), ("up", "the level", False)]
    other = manipulations(checked(1.0, start=2.0), checked(0.0))
    assert other == [("up", SAME, False), ("up", "the level", True)]


def test_without_a_registry_only_the_start_is_checked():
    table = results({"baseline": checked(0.0), "up": checked(1.0)}, outcomes=None)
    assert [m.name for m in analyze(table).manipulations] == [SAME]


def test_an_experiment_without_checks_has_no_manipulations():
    assert analyze(results(THREE), {"level": level}).manipulations == ()


def curves(error: float, bad: float | None = 0.0) -> list[Row]:
    found = []
    for seed in SEEDS:
        for x in (1.0, 2.0):
            found.append(Row(seed, "line", x, x * seed))
            wrong = error if (seed, x) == (3, 2.0) else bad
            predicted = None if wrong is None else x * seed + wrong
            found.append(Row(seed, "line_predicted", x, predicted))
    return found


@pytest.mark.parametrize("error", [0.0, 0.25, -3.0])
def test_a_metric_agrees_with_its_closed_form_up_to_its_largest_distance(error: float):
    found = analyze(results({"baseline": curves(error)}, outcomes=None)).agreements
    assert [(a.arm, a.metric) for a in found] == [("baseline", "line")]
    assert found[0].error == pytest.approx(abs(error))
    assert found[0].largest == pytest.approx(14.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_distance_that_is_not_finite_is_no_agreement(bad: float | None):
    found = analyze(results({"baseline": curves(0.0, bad)}, outcomes=None))
    assert [(a.largest, a.error) for a in found.agreements] == [(None, None)]
    assert "NaN" not in json.dumps(found.to_dict(), allow_nan=False)


def test_rows_are_matched_by_seed_and_place_and_not_by_order():
    rows = curves(0.0)
    rows = [r for r in rows if r.metric == "line"] + rows[::-1][::2]
    assert {r.metric for r in rows[len(rows) // 2 :]} == {"line_predicted"}
    found = analyze(results({"baseline": rows}, outcomes=None)).agreements
    assert found[0].error == 0


def test_a_closed_form_of_another_length_is_not_compared():
    rows = [*curves(0.0), Row(0, "line_predicted", 3.0, 0.0)]
    assert analyze(results({"baseline": rows}, outcomes=None)).agreements == ()


def held(verdict_of: str, required: bool, level_of_up: float = 1.0) -> bool:
    declared = statement(f"{verdict_of} > baseline.score", required=required)
    rows = {
        "baseline": [*THREE["baseline"], *checked(0.0)],
        "up": [*THREE["up"], *checked(level_of_up)],
        "down": [*THREE["down"], *checked(1.0)],
    }
    return analyze(results(rows, hypotheses=[declared]), {"level": level}).held


def test_a_run_holds_if_checks_and_required_hypotheses_do():
    assert held("up.score", required=True)
    assert held("baseline.score", required=False)
    assert not held("baseline.score", required=True)
    assert not held("up.score", required=False, level_of_up=0.5)


def test_the_analysis_is_json_without_nan():
    declared = [statement("up.score > baseline.score")]
    found: Analysis = analyze(results(THREE, hypotheses=declared))
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["verdicts"][0]["paired"]["seeds"] == len(SEEDS)
    assert data["contrasts"][1]["paired"]["lost"] == [0, 2, 0]
    assert data["diverged"] == {"baseline": 0, "up": 0, "down": 2}


def test_an_arm_that_diverged_altogether_is_worse():
    rows = {"baseline": scores(0.0), "up": scores(1.0, lose=len(SEEDS))}
    found = analyze(results(rows))
    (score, loss) = found.contrasts
    assert score.verdict == "worse"
    assert (score.paired.seeds, score.paired.lost) == (0, (0, 8, 0))
    assert (score.paired.mean, score.paired.low) == (None, None)
    assert loss.verdict is None
    json.dumps(found.to_dict(), allow_nan=False)
