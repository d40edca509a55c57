"""Curves under a bound: their panels, their share of it, their files."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest
from studies import exact, write

from normjax import report, study

pytestmark = pytest.mark.jax_defaults

BOUNDS = """\
import jax.numpy as jnp
from normjax import study
LABELS = {"coordinate_scale": "log", "late": "late error", "early": "early error",
          "late_scale": "log", "lost": "<i>lost</i>"}
class Settings(study.Settings):
    x: float = 1.0
def measure(cell, key):
    x, at = cell.settings.x, jnp.arange(1.0, 5)
    line = study.Curve(at, x * at)
    limit = study.Curve(at, jnp.array([4.0, 4.0, 4.0, jnp.inf]))
    early = (None, None) if x == 3 else (line, study.Curve(at, 0 * at + 8))
    bad = study.Curve(at, at.at[3 if x == 5 else 0].set(jnp.nan)) if x > 3 else line
    return {"early": early[0], "early_bound": early[1], "late": bad,
            "late_bound": limit}
"""


@pytest.fixture(scope="module")
def bounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bounds")
    text = exact(folder, BOUNDS) + "arms:\n  absent: {set: {x: 3.0}}\n"
    text += "  beyond: {set: {x: 5.0}}\n  lost: {set: {x: 6.0}}\n"
    study.run(write(folder, text), out=folder / "run")
    report.write(folder / "run")
    return folder / "run"


def test_bounds_have_a_section_of_their_own(bounds: Path):
    page = (bounds / "report.html").read_text("utf-8")
    assert "<h2>Measured and bound</h2>" in page
    assert "Computed and closed form" not in page
    assert page.count("<svg") == 2
    assert page.index("<h3>late error") < page.index("<h3>early error")  # as labelled
    assert "&lt;i&gt;lost&lt;/i&gt;" in page
    assert "<i>lost" not in page


def test_a_value_above_its_bound_is_marked(bounds: Path):
    """The baseline reaches 3/4 of its bound; where that is inf, nothing is judged."""
    analysis = study.analyze(study.load(bounds))
    found = {(b.arm, b.metric): (b.largest, b.share, b.ok) for b in analysis.bounds}
    assert found["baseline", "late"] == (4.0, 0.75, True)
    assert found["absent", "late"] == (12.0, 2.25, False)
    assert ("absent", "early") not in found
    assert found["beyond", "late"] == (None, 0.75, True)
    assert found["lost", "late"] == (None, None, False)
    assert not analysis.held
    page = (bounds / "report.html").read_text("utf-8")
    assert page.count(">above<") == 4  # late: absent, lost; early: beyond, lost
    for text in ("4, 75 %", "12, 225 %", "not finite, 75 %", "not finite <"):
        assert f">{text}" in page


def test_bounds_are_files_of_their_own(bounds: Path):
    with (bounds / "figures/late.csv").open() as file:
        (*_, last) = csv.DictReader(file)
    assert float(last["baseline_measured"]) == 4
    assert float(last["baseline_bound"]) == math.inf
    # Panels: of every arm, and of those that have the curve.
    for metric, panels in (("late", 4), ("early", 3)):
        drawn = (bounds / f"figures/{metric}.svg").read_text("utf-8")
        axes = set(re.findall(r'id="(axes_\d+)"', drawn))
        assert len(axes) == panels


def test_a_bound_without_any_curve_has_no_figure(tmp_path: Path):
    script = BOUNDS.replace("x == 3", "x > 0")
    study.run(write(tmp_path, exact(tmp_path, script)), out=tmp_path / "run")
    page = report.write(tmp_path / "run").read_text("utf-8")
    assert page.count("<svg") == 1
    assert "early error" not in page
