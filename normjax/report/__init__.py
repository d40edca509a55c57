"""One self-contained HTML page about a run, and its figures and curves as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normjax import study
from normjax.report import figures
from normjax.report.activations import write_activations as write_activations
from normjax.report.html import change as change
from normjax.report.html import interval as interval
from normjax.report.html import number as number
from normjax.report.html import p_value as p_value
from normjax.report.html import render


def write(run: str | Path) -> Path:
    """Write ``report.html`` into a run directory.

    The page needs no network. Curves with a closed form (``<metric>_predicted``) or a
    bound (``<metric>_bound``) are also written as ``figures/<metric>.svg`` and
    ``figures/<metric>.csv``.

    Args:
        run: the run directory.

    Returns:
        The path of the page.

    Raises:
        ConfigError: if there is no finished, analyzed run.
    """
    results = study.load(run)
    path = results.folder / "analysis.json"
    if not path.is_file():
        raise study.ConfigError(
            f"{run} holds no finished run: analysis.json is missing"
        )
    analysis = json.loads(path.read_text(encoding="utf-8"))
    page = results.folder / "report.html"
    text = render(
        "page.html",
        plan=results.plan,
        provenance=results.provenance,
        analysis=analysis,
        **_drawings(results, analysis),
    )
    page.write_text(text, encoding="utf-8")
    return page


def _drawings(results: study.Results, analysis: Mapping[str, Any]) -> dict[str, Any]:
    """Every figure that this run has."""
    labels, outcomes = results.plan["labels"], results.plan["outcomes"]
    found: dict[str, Any] = {"forest": None, "paired": None}
    found |= {"curves": [], "closed": [], "bounded": []}
    names = set(results.table["metric"].unique().to_list())
    if outcomes is not None:
        primary = outcomes["primary"]
        label = labels.get(primary, primary)
        judged = [c for c in analysis["contrasts"] if c["metric"] == primary]
        if judged:
            within = outcomes["equivalent_within"]
            found["forest"] = figures.forest(judged, label, within)
            found["paired"] = figures.paired(results, primary, label)
    for name in sorted(n for n in names if n.startswith("curve.")):
        metric = name.removeprefix("curve.")
        label = labels.get(metric, metric)
        log = metric.endswith(("loss", "norm"))
        drawing = figures.learning_curves(results, name, label, log)
        found["curves"].append({"label": label, "svg": drawing})
    for metric in sorted({a["metric"] for a in analysis["agreements"]}):
        if results.curve(next(iter(results.plan["arms"])), metric).is_empty():
            continue
        svg = figures.predicted(results, metric)
        _export(results, metric, svg, {"": "computed", "_predicted": "closed_form"})
        found["closed"].append({"label": labels.get(metric, metric), "svg": svg})
    bounds = {b["metric"] for b in analysis["bounds"]}
    for metric in sorted(bounds, key=[*labels, *sorted(bounds)].index):
        shares = {b["arm"]: b for b in analysis["bounds"] if b["metric"] == metric}
        svg, label = figures.bounded(results, metric), labels.get(metric, metric)
        _export(results, metric, svg, {"": "measured", "_bound": "bound"})
        found["bounded"].append({"label": label, "svg": svg, "shares": shares})
    return found


def _export(
    results: study.Results, metric: str, svg: str, sides: Mapping[str, str]
) -> None:
    """A figure of two curves for each arm, and its numbers, as files of their own.

    ``sides`` names the columns of both by the suffix of the metric.
    """
    folder = results.folder / "figures"
    folder.mkdir(exist_ok=True)
    (folder / f"{metric}.svg").write_text(svg, encoding="utf-8")
    keys, joined = ["seed", "coordinate"], None
    for arm in results.plan["arms"]:
        for suffix, side in sides.items():
            curve = results.curve(arm, f"{metric}{suffix}")
            column = curve.rename({"value": f"{arm}_{side}"})
            joined = (
                column
                if joined is None
                else joined.join(
                    column, on=keys, how="full", coalesce=True, nulls_equal=True
                )
            )
    if joined is not None:
        exact = results.plan["seeds"] is None
        joined = joined.sort(keys).drop("seed") if exact else joined.sort(keys)
        joined.write_csv(folder / f"{metric}.csv")
