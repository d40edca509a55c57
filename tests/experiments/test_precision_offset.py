"""What an offset costs each way of computing a layer, and each library's default."""

from __future__ import annotations

import csv
import importlib.util
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from normjax import report, study

pytestmark = pytest.mark.jax_defaults

ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / "configs/precision_offset.yaml"
DTYPES = ("float32", "bfloat16", "float16")
OTHERS = ("flax", "keras", "torch")
U = 2.0**-24


def installed(arm: str) -> bool:
    return importlib.util.find_spec(arm) is not None


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> study.Results:
    """The study with half of its groups, and its page."""
    folder = tmp_path_factory.mktemp("precision") / "run"
    found, _ = study.run(CONFIG, out=folder, overrides=["settings.groups=16"])
    report.write(folder)
    return found


def curves(results: study.Results, arm: str, dtype: str = "float32"):
    """Offset, error and bound."""
    error, bound = (
        results.curve(arm, f"error_{dtype}{side}") for side in ("", "_bound")
    )
    assert error["coordinate"].to_list() == bound["coordinate"].to_list()
    return tuple(
        column.to_numpy()
        for column in (error["coordinate"], error["value"], bound["value"])
    )


def at(results: study.Results, arm: str, offset: float) -> float:
    """The error in float32 at the offset nearest to one."""
    offsets, errors, _ = curves(results, arm)
    return float(errors[np.argmin(np.abs(np.log(offsets / offset)))])


def slope(results: study.Results, arm: str, low: float, high: float) -> float:
    """Of the logarithm of the error against that of the offset."""
    offsets, errors, _ = curves(results, arm)
    inside = (offsets >= low) & (offsets <= high)
    return float(np.polyfit(np.log(offsets[inside]), np.log(errors[inside]), 1)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_error_is_under_its_bound(results, dtype):
    """Of all arms, the other libraries judged by what their source computes."""
    for arm in results.plan["arms"]:
        _, errors, bounds = curves(results, arm, dtype)
        assert np.all(errors <= bounds), arm


def test_the_default_is_right_at_every_offset(results):
    """To the last bits from 1 to 2²⁴ standard deviations, and as half precision is."""
    offsets, errors, _ = curves(results, "baseline")
    assert offsets[0] == 1
    assert offsets[-1] == pytest.approx(2.0**24)
    assert errors.max() < 10 * U
    for dtype, unit in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        assert curves(results, "baseline", dtype)[1].max() < unit


def test_one_pass_loses_the_variance_and_two_pass_the_mean(results):
    """N01 at 10⁴, N04 at 2²⁴; κ² u and κ u up to there."""
    assert at(results, "one_pass", 1e4) > 100
    assert at(results, "two_pass", 1e4) < 0.01
    assert at(results, "two_pass", 2.0**24) > 0.1
    assert slope(results, "one_pass", 10, 1e3) == pytest.approx(2, abs=0.3)
    assert slope(results, "two_pass", 10, 1e6) == pytest.approx(1, abs=0.2)


def test_folding_the_mean_loses_one_digit_for_each_of_the_offset(results):
    """N05: from κ = 10² on about κ u, which the default does not have."""
    assert slope(results, "folded", 100, 1e6) == pytest.approx(1, abs=0.2)
    offsets, errors, _ = curves(results, "folded")
    far = offsets >= 100
    units = errors[far] / (offsets[far] * U)
    assert 0.05 < units.min() < units.max() < 4
    assert errors[-1] > 1e5 * curves(results, "baseline")[1][-1]


def test_the_default_of_flax_is_wrong_at_ten_thousand(results):
    """N01: ±1500 in place of ±1.34."""
    assert at(results, "flax", 1e4) > 100
    assert at(results, "flax", 100) < 0.1


@pytest.mark.parametrize("arm", OTHERS[1:])
def test_other_libraries_lose_the_offset_once(results, arm):
    """PyTorch as two_pass, Keras as two_pass_folded; null where there is none."""
    if not installed(arm):
        pytest.skip(f"{arm} is not installed")
    assert at(results, arm, 1e4) < 0.01
    assert at(results, arm, 2.0**24) > 0.1


def test_an_accumulation_in_the_input_dtype_has_no_curve_in_float32(results):
    for arm in ("narrow", "narrow_two_pass", "narrow_one_pass"):
        assert curves(results, arm)[0].size == 0
    baseline = curves(results, "baseline", "bfloat16")[1]
    assert curves(results, "narrow_one_pass", "bfloat16")[1].max() > 100
    assert curves(results, "narrow", "bfloat16")[1].max() < 10 * baseline.max()
    lost = curves(results, "narrow_two_pass", "float16")
    assert np.isinf(lost[1][-1])  # 64 times the offset is above 65504
    assert np.isinf(lost[2][-1])


def test_the_page_shows_bounds_and_exports_them(results):
    page = (results.folder / "report.html").read_text("utf-8")
    assert "Measured and bound" in page
    assert "Computed and closed form" not in page
    assert page.count("<svg") == 3
    assert ">above<" not in page
    with (results.folder / "figures/error_float32.csv").open() as file:
        table = list(csv.DictReader(file))
    offsets, errors, bounds = curves(results, "flax")
    assert [float(row["coordinate"]) for row in table] == list(offsets)
    assert [float(row["flax_measured"]) for row in table] == list(errors)
    assert [float(row["flax_bound"]) for row in table] == list(bounds)


@pytest.fixture(scope="module")
def module():
    """The script itself."""
    path = ROOT / "experiments/precision_offset.py"
    found = importlib.util.spec_from_file_location("precision_offset", path)
    assert found is not None
    assert found.loader is not None
    script = importlib.util.module_from_spec(found)
    sys.modules["precision_offset"] = script
    found.loader.exec_module(script)
    return script


def values(module, layer: str) -> set:
    settings = module.Settings(layer=layer, points=3, groups=2)
    return set(module.measure(study.Cell("a", settings), None).values())


@pytest.mark.parametrize("backend", [None, "numpy"])
@pytest.mark.parametrize("layer", OTHERS[1:])
def test_a_library_that_is_absent_is_null(module, monkeypatch, layer, backend):
    """And the process keeps its choice of a Keras backend, or none."""
    monkeypatch.setitem(sys.modules, layer, None)
    if backend is None:
        monkeypatch.delenv("KERAS_BACKEND", raising=False)
    else:
        monkeypatch.setenv("KERAS_BACKEND", backend)
    assert values(module, layer) == {None}
    assert os.environ.get("KERAS_BACKEND") == backend


def test_keras_on_another_backend_is_null(module, monkeypatch):
    other = types.SimpleNamespace(
        backend=types.SimpleNamespace(backend=lambda: "numpy")
    )
    monkeypatch.setitem(sys.modules, "keras", other)
    assert values(module, "keras") == {None}


def test_a_library_that_is_absent_says_so(module):
    assert module.LABELS["flax"].startswith("flax 0.")
    assert module._version("no_such_library") == "no_such_library (not installed)"
