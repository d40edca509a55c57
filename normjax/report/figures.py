"""The figures of a report, as SVG text; each draws what a table beside it lists."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normjax.study import Results

# Okabe and Ito's colours, which stay apart for colour-blind readers.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666",
    "#8C564B",
)  # fmt: skip
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#333333",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "normjax",
}
VERDICT_COLOURS = {
    "better": "#009E73",
    "worse": "#D55E00",
    "equivalent": "#0072B2",
    "undecided": "#777777",
}


def colours(arms: Sequence[str]) -> dict[str, str]:
    """A colour for each arm, the same in every figure."""
    return {arm: COLOURS[i % len(COLOURS)] for i, arm in enumerate(arms)}


def forest(contrasts: Sequence[Mapping[str, Any]], label: str, within=None) -> str:
    """Mean paired differences with their 95 % intervals, arm against its parent.

    Args:
        contrasts: on one metric, as in ``analysis.json``.
        label: of the metric.
        within: margin of equivalence, drawn as a band.

    Returns:
        SVG text.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(8.2, 0.55 * len(contrasts) + 1.1), layout="constrained"
        )
        axes = figure.add_subplot()
        if within is not None:
            axes.axvspan(-within, within, color="#0072B2", alpha=0.09, lw=0)
        axes.axvline(0, color="#888888", lw=1)
        names = []
        for row, contrast in enumerate(reversed(contrasts)):
            paired = contrast["paired"]
            names.append(f"{contrast['arm']} − {contrast['parent']}")
            colour = VERDICT_COLOURS.get(contrast["verdict"], "#555555")
            if paired["low"] is None:
                lost = sum(paired["lost"])
                text = f"no interval: {lost} of {lost + paired['seeds']} seeds diverged"
                axes.text(0, row, f"  {text}", va="center", color=colour, fontsize=9)
                continue
            d = np.array(paired["differences"])
            axes.plot(
                d, np.full(d.shape, row - 0.2), "|", color=colour, alpha=0.45, ms=6
            )
            axes.plot([paired["low"], paired["high"]], [row, row], color=colour, lw=3)
            axes.plot(paired["mean"], row, "o", color=colour, ms=7, mec="white")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.set_xlabel(f"difference in {label}: mean, 95 % interval, every seed")
        axes.grid(visible=False, axis="y")
        return svg(figure)


def paired(results: Results, metric: str, label: str) -> str:
    """Every seed of every arm beside the same seed of the arm that it is from."""
    pairs = [
        (arm, about["from"])
        for arm, about in results.plan["arms"].items()
        if about["from"] is not None and results.values(arm, metric)
    ]
    columns = min(4, len(pairs))
    rows = -(-len(pairs) // columns)
    palette = colours(list(results.plan["arms"]))
    every = [
        v for arm in results.plan["arms"] for v in results.values(arm, metric).values()
    ]
    finite = np.array(every)[np.isfinite(every)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    pad = 0.06 * (high - low) or 0.1
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.15 * columns, 2.5 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes in grid.flat[len(pairs) :]:
            axes.set_visible(False)
        for axes, (arm, parent) in zip(grid.flat, pairs, strict=False):
            _slopes(
                axes,
                results.values(parent, metric),
                results.values(arm, metric),
                palette[parent],
                palette[arm],
            )
            axes.set_ylim(low - pad, high + pad)
            axes.set_xticks([0, 1], [_wrapped(parent), _wrapped(arm)], fontsize=8)
            axes.set_xlim(-0.35, 1.35)
            axes.grid(visible=False, axis="x")
        for row in grid:
            row[0].set_ylabel(label)
        return svg(figure)


def _slopes(
    axes: Axes, before: Mapping[int, float], after: Mapping[int, float], *tints
):
    lost = 0
    for seed, value in before.items():
        other = after.get(seed, np.nan)
        if not (np.isfinite(value) and np.isfinite(other)):
            lost += 1
            continue
        axes.plot([0, 1], [value, other], color="#999999", lw=0.7, alpha=0.6)
    for place, (values, tint) in enumerate(zip((before, after), tints, strict=True)):
        good = [v for v in values.values() if np.isfinite(v)]
        axes.plot([place] * len(good), good, "o", color=tint, ms=3.5, alpha=0.8)
    if lost:
        text = f"{lost} of {len(before)}\ndiverged"
        axes.text(
            1,
            0.5,
            text,
            ha="center",
            va="center",
            fontsize=8,
            color="#D55E00",
            transform=axes.get_xaxis_transform(),
        )


def learning_curves(
    results: Results, metric: str, label: str, log: bool = False
) -> str:
    """Median over seeds with a pointwise band from the 10th to the 90th percentile."""
    palette = colours(list(results.plan["arms"]))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 3.4), layout="constrained")
        axes = figure.add_subplot()
        bottom = np.inf
        for arm in results.plan["arms"]:
            frame = results.curve(arm, metric).filter(pl.col("value").is_finite())
            if frame.is_empty():
                continue
            value = pl.col("value")
            bands = (
                frame.group_by("coordinate")
                .agg(
                    value.median().alias("middle"),
                    value.quantile(0.1).alias("low"),
                    value.quantile(0.9).alias("high"),
                )
                .sort("coordinate")
            )
            x = bands["coordinate"].to_numpy()
            axes.plot(
                x, bands["middle"].to_numpy(), color=palette[arm], label=arm, lw=1.8
            )
            axes.fill_between(
                x,
                bands["low"].to_numpy(),
                bands["high"].to_numpy(),
                color=palette[arm],
                alpha=0.13,
                lw=0,
            )
            bottom = min(bottom, float(bands["middle"].quantile(0.1) or 0.0))
        if log:
            axes.set_yscale("log")
        elif np.isfinite(bottom):
            axes.set_ylim(bottom=min(bottom, 0.0) - 0.05)
        axes.set_xlabel(results.plan["labels"].get("coordinate", "coordinate"))
        axes.set_ylabel(label)
        if np.isfinite(bottom):
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
        return svg(figure)


def predicted(results: Results, metric: str) -> str:
    """A measured curve as circles on the line of its closed form, for every arm."""
    labels, palette = results.plan["labels"], colours(list(results.plan["arms"]))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 3.8), layout="constrained")
        axes = figure.add_subplot()
        for arm, name in _titles(results.plan["arms"]).items():
            closed = results.curve(arm, f"{metric}_predicted")
            measured = results.curve(arm, metric)
            axes.plot(closed["coordinate"], closed["value"], color=palette[arm], lw=1.6)
            every = max(1, len(measured) // 40)
            x, y = (measured[c][::every] for c in ("coordinate", "value"))
            axes.plot(x, y, "o", color=palette[arm], ms=4, mfc="white")
            axes.plot([], [], "o-", color=palette[arm], mfc="white", ms=4, label=name)
        axes.set_xscale(labels.get("coordinate_scale", "linear"))
        axes.set_xlabel(labels.get("coordinate", "coordinate"))
        axes.set_ylabel(labels.get(metric, metric))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        return svg(figure)


def bounded(results: Results, metric: str) -> str:
    """A measured curve as circles under the line of its bound, a panel for each arm.

    Arms without this curve have no panel; a value that is not finite is a cross at the
    upper edge. The first panel's curve stands in grey in all others.
    """
    labels = results.plan["labels"]
    curves = {arm: results.curve(arm, metric) for arm in results.plan["arms"]}
    curves = {arm: curve for arm, curve in curves.items() if not curve.is_empty()}
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 1.75 * rows + 0.5), layout="constrained")
        shared: dict[str, Any] = {"squeeze": False, "sharex": True, "sharey": True}
        panels = figure.subplots(rows, columns, **shared).flat
        first = next(iter(curves))
        for axes, (arm, curve) in zip(panels, curves.items(), strict=False):
            axes.set_xscale(labels.get("coordinate_scale", "linear"))
            axes.set_yscale(labels.get(f"{metric}_scale", "linear"))
            if arm != first:
                axes.plot(*_finite(curves[first]), color="#b5b5b5", lw=1.4)
            _under(axes, curve, results.curve(arm, f"{metric}_bound"))
            axes.set_title(labels.get(arm, arm), loc="left", fontsize=9.5)
            axes.tick_params(labelsize=8)
        for axes in panels[len(curves) :]:
            axes.set_visible(False)
        panels[0].plot([], [], color="#b5b5b5", label=f"{first}, in the others")
        panels[0].legend(fontsize=8, labelspacing=0.3)
        figure.supxlabel(labels.get("coordinate", "coordinate"), fontsize=9.5)
        figure.supylabel(labels.get(metric, metric), fontsize=9.5)
        return svg(figure)


def _under(axes: Axes, curve: pl.DataFrame, bound: pl.DataFrame) -> None:
    """Circles, the line above them, and crosses for what is not finite."""
    axes.plot(*_finite(bound), color=COLOURS[1], lw=1.6, label="bound")
    x, y = _finite(curve)
    every = max(1, len(x) // 30)
    style: dict[str, Any] = {"color": COLOURS[0], "mfc": "white"}
    axes.plot(x[::every], y[::every], "o", ms=3.4, label="measured", **style)
    lost = curve.filter(~pl.col("value").is_finite())["coordinate"].to_numpy()
    edge = axes.get_xaxis_transform()
    axes.plot(lost, np.full(lost.shape, 0.96), "x", ms=4, transform=edge, **style)


def _finite(curve: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates and values where these are finite."""
    kept = curve.filter(pl.col("value").is_finite())
    return kept["coordinate"].to_numpy(), kept["value"].to_numpy()


def _titles(arms: Mapping[str, Any]) -> dict[str, str]:
    """Names of arms in a legend: the one property's value where all share it."""
    changes = [change for about in arms.values() for change in about["changes"]]
    if not changes or {c["name"] for c in changes} != {changes[0]["name"]}:
        return {arm: arm for arm in arms}
    short = changes[0]["name"].rsplit(".", 1)[-1]
    return {
        arm: f"{short} = {about['changes'][0]['after'] if about['changes'] else first}"
        for first in [changes[0]["before"]]
        for arm, about in arms.items()
    }


def _wrapped(name: str) -> str:
    """A long name on two lines, broken at an underscore."""
    if len(name) < 11 or "_" not in name:
        return name
    cuts = [i for i, letter in enumerate(name) if letter == "_"]
    cut = min(cuts, key=lambda i: abs(i - len(name) / 2))
    return f"{name[: cut + 1]}\n{name[cut + 1 :]}"


def svg(figure: Figure) -> str:
    """SVG without the XML prologue, so that it stands inside HTML."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
