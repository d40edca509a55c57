"""One self-contained page about an analysis of activations."""

from __future__ import annotations

import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from normjax.analysis import ActivationAnalysis, Distribution, Finding
from normjax.analysis.measures import EXAMPLE_MEASURES
from normjax.analysis.tally import PER_DECADE
from normjax.report import distributions
from normjax.report.html import number, render

# Rows that a page shows of each flag; the tables beside it have all.
SHOWN = 10
QUANTILES = (0.01, 0.5, 0.99)


def write_activations(
    found: ActivationAnalysis, folder: str | Path, command: str | None = None
) -> Path:
    """Write ``report.html`` about an analysis.

    Args:
        found: what ``nj.analysis.analyze`` returned.
        folder: where the page goes.
        command: the command line that repeats it.

    Returns:
        The path of the page, which needs no network and no other file.
    """
    page = Path(folder) / "report.html"
    names = [measure.name for measure in EXAMPLE_MEASURES]
    compared = [found.distributions[n] for n in names if n in found.distributions]
    geometry = [found.distributions[name] for name in distributions.GEOMETRY]
    text = render(
        "activations.html",
        found=found,
        geometry=distributions.panels(geometry, "groups"),
        precision=distributions.precision(found.distributions),
        compared=distributions.panels(compared, "examples") if compared else None,
        moved=distributions.moved(found.strongest) if found.strongest else None,
        rows={
            "geometry": [row(one) for one in geometry],
            "precision": [
                row(one)
                for name, one in found.distributions.items()
                if name.startswith(("rounding", "cancellation"))
            ],
            "compared": [row(one) for one in compared],
            "remainder": []
            if found.remainder is None
            else [row(one) for one in found.remainder.distributions.values()],
        },
        flags=[flag_row(found, one) for one in found.findings.values()],
        last=[]
        if found.remainder is None
        else [flag_row(found.remainder, x) for x in found.remainder.findings.values()],
        half=100 * distributions.HALF_BIN,
        per_decade=PER_DECADE,
        facts={
            "date": datetime.date.today().isoformat(),
            "command": command,
            "versions": ", ".join(
                f"{name} {_version(name)}" for name in ("normjax", "jax", "numpy")
            ),
            "device": f"{jax.local_device_count()} × {jax.devices()[0].device_kind}",
        },
    )
    page.write_text(text, encoding="utf-8")
    return page


def row(one: Distribution) -> dict[str, Any]:
    """One distribution in words: extremes with their places, quantiles between."""
    histogram = one.histogram
    cells: dict[str, Any] = {"label": one.measure.label, "meaning": one.measure.meaning}
    for side in ("lowest", "highest"):
        extreme = getattr(histogram, side)
        cells[side] = "–" if extreme is None else number(extreme.value)
        cells[f"{side}_at"] = "" if extreme is None else one.place(extreme.index)
    cells["quantiles"] = [between(*histogram.quantile(q)) for q in QUANTILES]
    cells["undefined"] = histogram.undefined
    return cells


def between(low: float, high: float) -> str:
    """A number that is known to lie in a bin, by its middle."""
    if low == high or not (low > 0 and np.isfinite(high)):
        return number(None if np.isnan(high) else low if low == high else high)
    return number(float(np.sqrt(low * high)), 2)


def flag_row(found: ActivationAnalysis, one: Finding) -> dict[str, Any]:
    """One flag in words, with its worst rows."""
    of = found.examples if one.axes[0] == "example" else found.groups
    rest = one.flag.name == "alike" and not found.judged_alike
    return {
        "name": one.flag.name,
        "meaning": one.flag.meaning,
        "reason": one.flag.reason,
        "measure": one.flag.measure,
        "count": one.found.count,
        "of": of,
        "judged": not rest,
        "worst": [
            (one.place(index), number(value))
            for index, value in zip(
                one.found.index[:SHOWN].tolist(),
                one.found.values[:SHOWN].tolist(),
                strict=True,
            )
        ],
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
