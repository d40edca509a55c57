"""Every config that is shipped runs, and the exact ones agree with their formulas."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from studies import quick_compile as quick_compile

from normjax import report, study

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("quick_compile")]

ROOT = Path(__file__).parent.parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
EXACT = ("scale_transition", "batch_companion")


def run(name: str, out: Path, **options: Any):
    return study.run(ROOT / "configs" / f"{name}.yaml", out=out, **options)


def test_there_are_configs_for_the_first_studies():
    assert {"level_side_route", *EXACT} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_smoke_runs_and_holds(config: Path, tmp_path: Path):
    results, analysis = study.run(config, out=tmp_path / "run", smoke=True)
    page = report.write(results.folder)
    assert analysis.held, [m for m in analysis.manipulations if not m.ok]
    assert page.stat().st_size > 10_000
    assert set(results.table["arm"]) == set(results.plan["arms"])
    assert results.plan["study"] == config.stem


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_named_after_its_file_and_asks_a_question(config: Path):
    decided = study.make_plan(config)
    assert decided.study.study == config.stem
    assert decided.study.question.endswith("?")
    assert len(decided.arms) > 1
    smoke = study.make_plan(config, smoke=True)
    assert len(smoke.blocks) <= len(decided.blocks)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory):
    """The exact studies in their full form."""
    folder = tmp_path_factory.mktemp("exact")
    found = {name: run(name, folder / name) for name in EXACT}
    for name in EXACT:
        report.write(folder / name)
    return found


def curve(results: study.Results, arm: str, metric: str):
    frame = results.curve(arm, metric)
    return frame["coordinate"].to_numpy(), frame["value"].to_numpy()


def scalars(results: study.Results, arm: str, metric: str) -> float:
    rows = results.table.filter(arm=arm, metric=metric)
    return float(rows["value"][0])


def test_amplitudes_follow_their_closed_form(exact):
    """In float32, against the formula in float64 and independently of the script."""
    results, analysis = exact["scale_transition"]
    x = np.array([1.0, 2.0, 4.0])
    for arm, epsilon in (("baseline", 1e-5), ("epsilon_1e-3", 1e-3)):
        scale, found = curve(results, arm, "amplitude")
        assert len(scale) == 241
        expected = scale * x.std() / np.sqrt(scale**2 * x.var() + epsilon)
        np.testing.assert_allclose(found, expected, rtol=2e-6)
        star = scalars(results, arm, "transition")
        np.testing.assert_allclose(star, np.sqrt(epsilon / x.var()), rtol=1e-3)
        assert found[0] < 1e-2
        assert found[-1] == pytest.approx(1, abs=1e-6)
    amplitude = [a for a in analysis.agreements if a.metric == "amplitude"]
    assert len(amplitude) == 3
    assert max(a.error for a in amplitude) < 1e-6


def test_a_companion_decides_as_its_closed_form_says(exact):
    results, analysis = exact["batch_companion"]
    for arm, epsilon in (("baseline", 1e-2), ("epsilon_1e-5", 1e-5)):
        b, found = curve(results, arm, "output")
        assert len(b) == 801
        np.testing.assert_allclose(found, -b / np.sqrt(b**2 + 4 * epsilon), atol=1e-6)
        slope = scalars(results, arm, "slope")
        np.testing.assert_allclose(slope, -0.5 / np.sqrt(epsilon), rtol=1e-6)
    b, found = curve(results, "epsilon_1e-5", "output")
    assert found[b == 2.0] == pytest.approx(-1, abs=1e-5)
    assert found[b == -2.0] == pytest.approx(1, abs=1e-5)
    output = [a for a in analysis.agreements if a.metric == "output"]
    assert max(a.error for a in output) < 1e-6


@pytest.mark.parametrize(
    ("name", "metric"),
    [("scale_transition", "amplitude"), ("batch_companion", "output")],
)
def test_both_curves_are_written_as_svg_and_csv(exact, name: str, metric: str):
    results, _ = exact[name]
    folder = results.folder / "figures"
    assert {p.name for p in folder.iterdir()} == {f"{metric}.svg", f"{metric}.csv"}
    with (folder / f"{metric}.csv").open() as file:
        table = list(csv.DictReader(file))
    for arm in results.plan["arms"]:
        for side, stored in (
            ("computed", metric),
            ("closed_form", f"{metric}_predicted"),
        ):
            where, values = curve(results, arm, stored)
            np.testing.assert_array_equal(
                [float(row["coordinate"]) for row in table], where
            )
            written = [float(row[f"{arm}_{side}"]) for row in table]
            np.testing.assert_array_equal(written, values)


@pytest.mark.parametrize(
    ("name", "right", "wrong", "metric"),
    [
        ("scale_transition", "(star / scales) ** 2", "star / scales", "amplitude"),
        ("scale_transition", "np.sqrt(settings.epsilon /", "(settings.epsilon /",
         "transition"),
        ("batch_companion", "+ 4 * settings", "+ 2 * settings", "output"),
        ("batch_companion", "predicted = -comp", "predicted = comp", "output"),
        ("batch_companion", "-0.5 / np.sqrt", "-0.25 / np.sqrt", "slope"),
    ],
)  # fmt: skip
def test_a_wrong_formula_is_a_large_distance(tmp_path, name, right, wrong, metric):
    """Twenty times what the right one has, at least."""
    script = (ROOT / f"experiments/{name}.py").read_text(encoding="utf-8")
    assert script.count(right) == 1
    errors = []
    for text in (script, script.replace(right, wrong)):
        folder = tmp_path / str(len(errors))
        (folder / "experiments").mkdir(parents=True)
        (folder / "configs").mkdir()
        (folder / f"experiments/{name}.py").write_text(text, encoding="utf-8")
        config = folder / f"configs/{name}.yaml"
        config.write_bytes((ROOT / f"configs/{name}.yaml").read_bytes())
        _, analysis = study.run(config, out=folder / "run", smoke=True)
        (found,) = [
            a.error
            for a in analysis.agreements
            if (a.arm, a.metric) == ("baseline", metric)
        ]
        assert found is not None
        errors.append(found)
    assert errors[1] > 20 * errors[0]
    assert errors[1] > 1e-3
