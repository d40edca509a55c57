"""Parquet of every group, written as it comes; a failure leaves what was there."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import polars as pl
import pytest

import normjax as nj
from normjax.analysis import AnalysisError, Tables, new_folder, save_record, tables

pytestmark = pytest.mark.jax_defaults

X = np.random.default_rng(0).normal(1, 2, (40, 6)).astype(np.float32)
X[7], X[9, 2] = 3, np.inf


@pytest.mark.parametrize("part", [1, 10**9])
def test_every_group_has_a_row(tmp_path: Path, monkeypatch, part: int):
    """In one part or in many; the numbers are those of nj.geometry."""
    monkeypatch.setattr(tables, "PART", part)
    monkeypatch.setattr("normjax.analysis.cutting.PIECE_BYTES", 8 * 24)
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    written = Tables(tmp_path)
    nj.analysis.analyze(X, nj.layer_norm(), receive=written.append)
    assert len(written.parts.get("groups", ())) == (5 if part == 1 else 0)
    written.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["groups.parquet"]
    frame = pl.read_parquet(tmp_path / "groups.parquet")
    assert frame["axis0"].to_list() == list(range(40))
    assert frame["bad"].to_list() == [int(i == 9) for i in range(40)]
    finite = np.arange(40) != 9
    right = nj.geometry(nj.layer_norm(), jax.numpy.asarray(X[finite]))
    for name, values in (
        ("share", right.share),
        ("kappa", right.kappa),
        ("tangential", right.spectrum.tangential),
        ("rounding_float16", right.rounding("float16")),
    ):
        np.testing.assert_allclose(frame[name].to_numpy()[finite], values, rtol=1e-5)


def test_the_record_is_plain_json(tmp_path: Path):
    found = nj.analysis.analyze(X, nj.layer_norm(), axis_names=("row", "c"))
    save_record(found, tmp_path)
    stored = json.loads((tmp_path / "analysis.json").read_text("utf-8"))
    assert nj.NormSpec.from_dict(stored["spec"]) == nj.layer_norm()
    assert stored["findings"]["no_variance"]["worst"] == [{"index": [7], "value": 3.0}]
    kappa = stored["distributions"]["kappa"]
    assert kappa["highest"] == {"value": "inf", "index": [7]}
    assert sum(kappa["counts"].values()) == 38
    assert not (tmp_path / "influence.npy").exists()


def test_a_folder_appears_when_all_went_well(tmp_path: Path):
    out = tmp_path / "some" / "where"
    with new_folder(out, force=False) as draft:
        (draft / "analysis.json").write_text("first")
        assert not out.exists()
    assert (out / "analysis.json").read_text() == "first"
    already = pytest.raises(AnalysisError, match="holds an analysis already: --force")
    with already, new_folder(out, force=False):
        pytest.fail("it was entered")
    with pytest.raises(ZeroDivisionError), new_folder(out, force=True) as draft:
        (draft / "analysis.json").write_text(f"second, {1 / 0}")
    assert (out / "analysis.json").read_text() == "first"
    with new_folder(out, force=True) as draft:
        (draft / "analysis.json").write_text("third")
    assert (out / "analysis.json").read_text() == "third"
    assert list(out.parent.iterdir()) == [out]  # and nothing is left over


def test_what_is_no_analysis_is_never_replaced(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("dear")
    for out in (tmp_path, tmp_path / "mine.txt"):
        with (
            pytest.raises(AnalysisError, match="holds no analysis: choose another"),
            new_folder(out, force=True),
        ):
            pytest.fail("it was entered")
    assert (tmp_path / "mine.txt").read_text() == "dear"
