"""Tables of a run: the means beside NumPy's, the long table as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy import stats
from studies import TOY, exact, refused, write

from normjax import study

pytestmark = pytest.mark.jax_defaults


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> study.Results:
    folder = tmp_path_factory.mktemp("summary")
    overrides = ["settings.poison=2"]
    return study.run(write(folder, TOY), out=folder / "run", overrides=overrides)[0]


def row(table: pl.DataFrame, arm: str, metric: str) -> dict[str, Any]:
    (found,) = table.filter(
        (pl.col("arm") == arm) & (pl.col("metric") == metric)
    ).to_dicts()
    return found


def test_means_and_intervals_are_those_of_the_finite_seeds(results: study.Results):
    values = np.array(list(results.values("again", "value").values()))
    kept = values[np.isfinite(values)]
    assert len(kept) == 5
    low, high = stats.ttest_1samp(kept, 0.0).confidence_interval(0.95)
    found = row(study.summarize(results), "again", "value")
    assert (found["role"], found["seeds"], found["lost"]) == ("negative_control", 5, 1)
    np.testing.assert_allclose(
        [found["mean"], found["low"], found["high"]], [kept.mean(), low, high]
    )


def test_rows_are_the_numbers_of_every_arm(results: study.Results):
    """No curve, no check, no metric that an arm does not have."""
    table = study.summarize(results)
    rows = {(arm, metric) for arm, metric in table.select("arm", "metric").iter_rows()}
    plain = {(a, m) for a in results.plan["arms"] for m in ("value", "loss")}
    assert rows == plain | {("extra", "extra")}


def test_an_exact_study_has_values_and_no_intervals(tmp_path: Path):
    config = write(tmp_path, exact(tmp_path) + "arms: {a: {set: {x: 2.0}}}\n")
    results, _ = study.run(config, out=tmp_path / "run")
    assert study.summarize(results).rows() == [
        ("baseline", "treatment", "y", 0, 0, 1.0, None, None),
        ("a", "treatment", "y", 0, 0, 2.0, None, None),
    ]


@pytest.mark.parametrize(
    ("name", "read"), [("x.csv", pl.read_csv), ("x.parquet", pl.read_parquet)]
)
def test_the_whole_table_is_written(results: study.Results, tmp_path, name, read):
    path = study.write_table(results, tmp_path / name)
    written = read(path)
    assert written.columns == results.table.columns
    assert len(written) == len(results.table)
    values = written["value"].to_numpy(), results.table["value"].to_numpy()
    np.testing.assert_array_equal(*values)


def test_where_it_cannot_be_written(results: study.Results, tmp_path: Path):
    with refused("x.xlsx ends in .xlsx, expected .csv or .parquet"):
        study.write_table(results, "x.xlsx")
    with refused("x ends in no suffix, expected .csv or .parquet"):
        study.write_table(results, "x")
    gone = tmp_path / "gone"
    with refused(f"there is no folder {gone} to write x.csv into"):
        study.write_table(results, gone / "x.csv")
