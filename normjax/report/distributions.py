"""The figures of an analysis of activations: distributions, and who moves whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normjax.analysis import Distribution
from normjax.analysis.measures import DTYPES, LEVERAGE, PULL, RISK, STABILIZED
from normjax.analysis.record import Strongest
from normjax.analysis.tally import EDGES, PER_DECADE, Histogram
from normjax.report.figures import COLOURS, STYLE, svg

RED, GREY = COLOURS[1], "#777777"


class Limit(NamedTuple):
    """A threshold in a figure; on its bad side the background is tinted."""

    value: float
    text: str
    above: bool = True


GEOMETRY = ("share", "tangential", "radial", "condition", "distance", "kappa")
LIMITS = {
    "share": Limit(STABILIZED, "ε ≥ variance"),
    "pull": Limit(PULL, "as far as its own input"),
    "leverage": Limit(LEVERAGE, f"{LEVERAGE:g} fair shares"),
    "gap": Limit(2**0.5 * 0.1, "alike", above=False),
}


def panels(found: Sequence[Distribution], what: str) -> str:
    """A histogram for each measure, on logarithmic axes.

    Args:
        found: the distributions, at most six.
        what: what is counted: groups or examples.

    Returns:
        SVG text.
    """
    columns = 3
    rows = -(-len(found) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 2.5 * rows + 0.1), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(found) :]:
            axes.set_visible(False)
        for axes, one in zip(grid.flat, found, strict=False):
            _bars(axes, one.histogram, COLOURS[0])
            axes.set_title(one.measure.label, loc="left", fontsize=9.5)
            if one.measure.name in LIMITS:
                _limit(axes, LIMITS[one.measure.name])
        for line in grid:
            line[0].set_ylabel(f"{what} per bin")
        return svg(figure)


def precision(found: Mapping[str, Distribution]) -> str:
    """Errors of storing x and of a one-pass variance, a line for each dtype.

    Args:
        found: all distributions of groups.

    Returns:
        SVG text.
    """
    titles = {
        "rounding": "error of x̂ after storing x",
        "cancellation": "error of E[x²] − E[x]², accumulated in",
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 3.0), layout="constrained")
        both = figure.subplots(1, 2, sharey=True)
        for axes, (kind, title) in zip(both, titles.items(), strict=True):
            spans = [_span(found[f"{kind}_{dtype}"].histogram) for dtype in DTYPES]
            reach = [span for span in spans if span is not None]
            for dtype, tint in zip(DTYPES, COLOURS, strict=False):
                _outline(axes, found[f"{kind}_{dtype}"].histogram, dtype, tint)
            axes.set(xscale="log", yscale="log", xlim=(RISK / 10, 10 * RISK))
            axes.set_ylim(bottom=0.7)
            if reach:
                low, high = min(s[0] for s in reach), max(s[1] for s in reach)
                axes.set_xlim(low / 2, max(high, RISK * 3) * 2)
            _limit(axes, Limit(RISK, "a tenth"))
            axes.set_title(title, loc="left", fontsize=9.5)
            axes.set_xlabel("relative error")
        both[0].set_ylabel("groups per bin")
        both[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
        return svg(figure)


def moved(strongest: Strongest) -> str:
    """Who moves whom in one batch, as a share of each example's own influence.

    Args:
        strongest: the batch.

    Returns:
        SVG text.
    """
    matrix = np.asarray(strongest.influence, np.float64)
    own = np.diagonal(matrix)
    ratio = matrix / np.where(own > 0, own, np.nan)[:, None]
    np.fill_diagonal(ratio, np.nan)
    size, first = len(matrix), strongest.first
    low, high = first - 0.5, first + size - 0.5
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(6.6, 5.2), layout="constrained")
        axes = figure.add_subplot()
        tint = mpl.colormaps["viridis"].with_extremes(bad="#e8e8e8")
        shown = axes.imshow(
            ratio, cmap=tint, extent=(low, high, high, low), interpolation="nearest"
        )
        if np.isfinite(ratio).any():
            i, j = np.unravel_index(np.nanargmax(ratio), ratio.shape)
            style: dict[str, Any] = {"mfc": "none", "mec": RED, "mew": 2}
            axes.plot(first + j, first + i, "o", ms=13, clip_on=False, **style)
            axes.set_title(
                f"batch {strongest.batch}; circled: example {first + j} moves example "
                f"{first + i}\n{ratio[i, j]:.3g} times as far as its own input does",
                loc="left",
                fontsize=9.5,
            )
        axes.set_xlabel("whose input changes (example)")
        axes.set_ylabel("whose output moves (example)")
        label = "movement, relative to that by its own input"
        figure.colorbar(shown, ax=axes, label=label, shrink=0.85)
        return svg(figure)


def _bars(axes: Axes, histogram: Histogram, tint: str) -> None:
    """Filled bins over the range that has any, the median, and what no bin holds."""
    span = _span(histogram)
    axes.set(xscale="log", yscale="log", xlim=(0.1, 10))
    if span is not None:
        low, high = span
        axes.stairs(histogram.counts[1:-1], EDGES, fill=True, color=tint, alpha=0.75)
        middle = np.sqrt(low * high)
        width = max(high / low, 10.0) ** 0.55
        axes.set_xlim(middle / width, middle * width)
        edges = histogram.quantile(0.5)
        if edges[0] > 0 and np.isfinite(edges[1]):
            median = np.sqrt(edges[0] * edges[1])
            axes.axvline(median, color="#222222", lw=1.2)
            axes.text(
                median,
                0.98,
                f" median {median:.2g} ",
                transform=axes.get_xaxis_transform(),
                ha="left" if median < middle else "right",
                va="top",
                fontsize=8,
            )
    axes.set_ylim(0.7, max(10.0, 6.0 * int(histogram.counts.max())))
    apart = {"0": histogram.zero, "∞": histogram.infinite}
    text = ", ".join(f"{name}: {count:,}" for name, count in apart.items() if count)
    if text:
        axes.text(
            0.99,
            0.84,
            f"also {text}",
            transform=axes.transAxes,
            ha="right",
            va="top",
            fontsize=8,
            color=GREY,
        )
    axes.tick_params(labelsize=8)


def _outline(axes: Axes, histogram: Histogram, dtype: str, tint: str) -> None:
    lost = f" (∞: {histogram.infinite:,})" if histogram.infinite else ""
    counts = histogram.counts[1:-1]
    axes.plot([], [], color=tint, lw=1.5, label=f"{dtype}{lost}")
    if counts.any():  # an empty one has no place on a logarithmic axis
        axes.stairs(counts, EDGES, fill=True, color=tint, alpha=0.18)
        axes.stairs(counts, EDGES, color=tint, lw=1.5)


def _limit(axes: Axes, limit: Limit) -> None:
    """The threshold, the tint behind it, and its name, where the axes reach it."""
    low, high = axes.get_xlim()
    if not low < limit.value < high:
        return
    edges = (limit.value, high) if limit.above else (low, limit.value)
    axes.axvspan(*edges, color=RED, alpha=0.08, lw=0)
    axes.axvline(limit.value, color=RED, lw=1.2, ls="--")
    axes.text(
        limit.value,
        0.03,
        f" {limit.text}" if limit.above else f"{limit.text} ",
        transform=axes.get_xaxis_transform(),
        ha="left" if limit.above else "right",
        fontsize=8,
        color=RED,
        rotation=90 if limit.above else 0,
        va="bottom",
        bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 1},
    )
    axes.set_xlim(low, high)


def _span(histogram: Histogram) -> tuple[float, float] | None:
    """Outer edges of the bins that are not empty."""
    filled = np.flatnonzero(histogram.counts[1:-1])
    if not len(filled):
        return None
    return float(EDGES[filled[0]]), float(EDGES[filled[-1] + 1])


# Half a bin, as a share of the number: what a quantile is known to.
HALF_BIN = 10 ** (0.5 / PER_DECADE) - 1
