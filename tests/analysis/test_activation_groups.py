"""The numbers of every group against NumPy in float64, in any file and cut."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import polars as pl
import pytest

import normjax as nj
from normjax.analysis import ActivationAnalysis, cutting, source
from normjax.analysis.measures import DTYPES, RISK
from normjax.analysis.tally import EDGES

pytestmark = pytest.mark.jax_defaults

UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
TINY = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}
LARGEST = {"float32": 3.4028235e38, "bfloat16": 3.3895314e38, "float16": 65504.0}


def oracle(x: np.ndarray, epsilon: float, center: bool = True) -> dict[str, np.ndarray]:
    """Layer norm (RMS norm without centering) over the last axis, by the formulas."""
    wide = x.astype(np.float64)
    mean, std = wide.mean(-1), wide.std(-1)
    rms = np.sqrt((wide**2).mean(-1))
    v = std**2 if center else rms**2
    s = np.sqrt(v + epsilon)
    share = epsilon / (v + epsilon)
    with np.errstate(divide="ignore", invalid="ignore"):
        kappa = np.where(std > 0, abs(mean) / std, np.where(mean != 0, np.inf, 0))
        found = {
            "share": share,
            "radial": share / s,
            "tangential": 1 / s,
            "condition": np.where(v > 0, 1 / share, 1.0),
            "distance": np.sqrt(v * x.shape[-1]),
            "kappa": kappa,
        }
        offset = kappa if center else 0 * kappa
        for dtype in DTYPES:
            lost = UNITS[dtype] * rms + TINY[dtype] / 2
            error = np.where(v > 0, lost / np.sqrt(v), np.inf)
            over = abs(wide).max(-1) > LARGEST[dtype]
            found[f"rounding_{dtype}"] = np.where(over, np.inf, error)
            over = rms**2 * x.shape[-1] > LARGEST[dtype]
            error = UNITS[dtype] * (1 + offset**2)
            found[f"cancellation_{dtype}"] = np.where(over, np.inf, error)
    return found


def activations(dtype: str, rows: int = 90) -> np.ndarray:
    """Offsets, a constant row, zeros, NaN, inf, overflow of float16, tiny numbers."""
    rng = np.random.default_rng(66)
    x = rng.normal(size=(rows, 12)) * np.exp(rng.normal(0, 2, (rows, 1)))
    x += rng.normal(0, 3, (rows, 1)) * 2.0 ** rng.integers(0, 4, (rows, 1))
    x[3], x[9], x[11, 2], x[40, 1], x[50, 0] = 7, 0, np.nan, -np.inf, 1e5
    x[60], x[70] = 3000 + rng.integers(0, 2, 12), np.arange(12) * 5e-4
    return x.astype(dtype)


def same(first: ActivationAnalysis, second: ActivationAnalysis) -> bool:
    """Every count, extreme, index and value, bit for bit."""
    ours, theirs = first.to_dict(), second.to_dict()
    return {**ours, "source": ""} == {**theirs, "source": ""}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_histograms_and_flags_are_those_of_float64(dtype: str):
    x = activations(dtype)
    found = nj.analysis.analyze(x, nj.layer_norm())
    finite = np.isfinite(x).all(1)
    right = oracle(x[finite], 1e-5)
    rows = np.flatnonzero(finite)
    for name, values in right.items():
        inside = values[(values > 0) & np.isfinite(values)]
        # Some 20 roundings of the largest term, where 12 terms are added. No number is
        # that near an edge, so every count is decided.
        margin = 4 * 20 * 2.0 ** (-24 if dtype == "float32" else -53)
        assert abs(inside[:, None] / EDGES - 1).min() > margin, name
        histogram = found.distributions[name].histogram
        assert np.array_equal(histogram.counts[1:-1], np.histogram(inside, EDGES)[0])
        assert histogram.zero == (values == 0).sum()
        assert histogram.infinite == np.isinf(values).sum()
        assert histogram.highest is not None
        assert histogram.highest.index == (rows[values.argmax()],), name
        if np.isfinite(values.max()):
            assert histogram.highest.value == pytest.approx(values.max(), rel=margin)
    flat = right["distance"] == 0
    expected = {"stabilized": right["share"] >= 0.5, "no_variance": flat}
    for name in right:
        if name.startswith(("rounding", "cancellation")):
            expected[name] = right[name] >= RISK
    for name, chosen in expected.items():
        kept = rows[chosen & (~flat | (name == "no_variance"))]
        assert len(kept) > (0 if "float32" not in name else -1), name
        finding = found.findings[name].found
        assert finding.count == len(kept)
        assert sorted(finding.index[:, 0].tolist()) == kept.tolist()
    assert found.findings["not_finite"].found.index[:, 0].tolist() == [11, 40]
    assert found.findings["no_variance"].found.values.tolist() == [7, 0]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same array in every kind of file."""
    folder, x = tmp_path_factory.mktemp("stored"), activations("float32", 101)
    names = ("npy", "fortran", "big", "npz", "array", "columns")
    paths = {name: folder / name for name in names}
    arrays = {"npy": x, "fortran": np.asfortranarray(x), "big": x.astype(">f4")}
    for name, array in arrays.items():
        with paths[name].open("wb") as file:  # the content decides, not the suffix
            np.save(file, array)
    with paths["npz"].open("wb") as file:
        np.savez_compressed(file, x=x)
    pl.DataFrame({"x": x}).write_parquet(paths["array"], row_group_size=13)
    pl.DataFrame(x, orient="row").write_parquet(paths["columns"], row_group_size=64)
    return paths


def test_nothing_depends_on_the_file_and_its_blocks(stored, monkeypatch):
    """101 rows: seven pieces of 16 on as many devices, blocks of 5, 13, 16 and 64."""
    row = 12 * 4
    monkeypatch.setattr(cutting, "PIECE_BYTES", 16 * row)
    monkeypatch.setattr(source, "SLICE_BYTES", 5 * row)
    x = activations("float32", 101)
    right = nj.analysis.analyze(x, nj.layer_norm(), keep=5)
    for name, path in stored.items():
        assert same(nj.analysis.analyze(path, nj.layer_norm(), keep=5), right), name
    named = nj.analysis.analyze(f"{stored['npz']}:x", nj.layer_norm(), keep=5)
    assert same(named, right)
    x[100, 0] += 1  # it can fail
    assert not same(nj.analysis.analyze(x, nj.layer_norm(), keep=5), right)
    alone = jax.local_devices()[:1]
    assert len(jax.local_devices()) > 1
    monkeypatch.setattr(jax, "local_devices", lambda: alone)
    assert same(nj.analysis.analyze(stored["npy"], nj.layer_norm(), keep=5), right)


def test_pieces_of_another_size_change_roundings_alone(monkeypatch):
    """XLA sums in another order for another shape; counts and places stay."""
    x = activations("float32")
    found = []
    for rows in (7, 64):
        monkeypatch.setattr(cutting, "PIECE_BYTES", rows * 12 * 4)
        found.append(nj.analysis.analyze(x, nj.layer_norm()))
    for name, one in found[0].distributions.items():
        other = found[1].distributions[name].histogram
        assert np.array_equal(one.histogram.counts, other.counts), name
        assert one.histogram.zero == other.zero
    for name, finding in found[0].findings.items():
        other = found[1].findings[name].found
        assert finding.found.count == other.count
        assert sorted(finding.found.index.tolist()) == sorted(other.index.tolist())
        np.testing.assert_allclose(finding.found.values, other.values, rtol=1e-4)


def test_leading_axes_are_rows_and_every_group_has_a_place():
    """Layer norm on (b, t, c), group norm on (b, h, c): places are those of NumPy."""
    x = np.random.default_rng(2).normal(size=(3, 5, 8)).astype(np.float32)
    tables: list[dict] = []
    found = nj.analysis.analyze(
        x,
        nj.layer_norm(),
        axis_names=("b", "t", "c"),
        receive=lambda name, table: tables.append({"name": name, **table}),
    )
    assert {table["name"] for table in tables} == {"groups"}
    share = np.concatenate([table["share"] for table in tables]).reshape(3, 5)
    right = oracle(x, 1e-5)["share"]
    np.testing.assert_allclose(share, right, rtol=1e-5)
    highest = found.distributions["share"].histogram.highest
    assert found.distributions["share"].axes == ("b", "t")
    assert highest is not None
    assert highest.index == np.unravel_index(right.argmax(), right.shape)
    assert found.groups == 15
    groups = nj.analysis.analyze(x, nj.group_norm(groups=2))
    view = x.reshape(3, 5, 2, 4).transpose(0, 2, 1, 3).reshape(3, 2, 20)
    right = oracle(view, 1e-5)["distance"]
    lowest = groups.distributions["distance"].histogram.lowest
    assert groups.distributions["distance"].axes == ("b", "g")
    assert lowest is not None
    assert lowest.index == np.unravel_index(right.argmin(), right.shape)


def test_a_pattern_with_names_and_sizes():
    x = np.random.default_rng(3).normal(size=(4, 3, 6)).astype(np.float32)
    spec = nj.NormSpec("b t [c]", sizes={"b": 4})
    found = nj.analysis.analyze(x, spec)
    assert found.distributions["share"].axes == ("b", "t")
    assert same(found, found)
    assert found.groups == 12


def test_an_offset_costs_a_layer_that_subtracts_nothing_no_digits():
    """x/rms keeps the offset as signal; what is subtracted would be lost."""
    x = (1e4 + np.random.default_rng(4).normal(size=(6, 12))).astype(np.float32)
    rms, layer = (nj.analysis.analyze(x, s()) for s in (nj.rms_norm, nj.layer_norm))
    for kind in ("rounding", "cancellation"):
        for dtype in DTYPES:
            name = f"{kind}_{dtype}"
            right = oracle(x, 1e-5, center=False)[name]
            highest = rms.distributions[name].histogram.highest
            assert highest is not None
            assert highest.value == pytest.approx(right.max(), rel=1e-4)
    assert rms.findings["rounding_bfloat16"].found.count == 0
    assert layer.findings["rounding_bfloat16"].found.count == 6


def test_a_layer_that_divides_by_nothing_has_no_stabilizer():
    found = nj.analysis.analyze(activations("float32"), nj.center_only())
    assert "stabilized" not in found.findings


def test_bfloat16_arrays_from_a_model():
    x = jax.numpy.asarray(activations("float32"), jax.numpy.bfloat16)
    found = nj.analysis.analyze(x, nj.layer_norm())
    assert (found.dtype, found.groups) == ("bfloat16", 90)
    assert found.findings["not_finite"].found.count == 2


def test_progress_ends_with_all_rows():
    seen: list[tuple[int, int]] = []
    nj.analysis.analyze(
        activations("float32"),
        nj.layer_norm(),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (90, 90)
