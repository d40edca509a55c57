"""The numbers of a run as tables: the long one as a file, and means with intervals."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from normjax.study.document import ConfigError
from normjax.study.inference import pair
from normjax.study.store import Results

WRITERS = {".csv": pl.DataFrame.write_csv, ".parquet": pl.DataFrame.write_parquet}
SUMMARY = {
    "arm": pl.String,
    "role": pl.String,
    "metric": pl.String,
    "seeds": pl.Int64,
    "lost": pl.Int64,
    "mean": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
}


def summarize(results: Results) -> pl.DataFrame:
    """Mean and 95 % t interval over seeds, for each arm and each number.

    Curves and manipulation checks are left out. Seeds without a finite value are
    counted, and are in no mean. A study without seeds has values and no intervals.

    Args:
        results: of a finished run.

    Returns:
        Columns arm, role, metric, seeds, lost, mean, low, high.
    """
    scalars = results.table.filter(
        pl.col("coordinate").is_null()
        & pl.col("value").is_not_null()
        & ~pl.col("metric").str.starts_with("check.")
        & (pl.col("metric") != "diverged_at")
    )
    rows = []
    for arm, about in results.plan["arms"].items():
        mine = scalars.filter(pl.col("arm") == arm)
        for metric in mine["metric"].unique(maintain_order=True).to_list():
            values = results.values(arm, metric)
            if not values:  # exact: no seed
                (value,) = mine.filter(pl.col("metric") == metric)["value"].to_list()
                row = (0, 0, value, None, None)
            else:
                mean = pair("0", metric, dict.fromkeys(values, 0.0), values)
                lost = sum(mean.lost)
                row = (mean.seeds, lost, mean.mean, mean.low, mean.high)
            rows.append((arm, about["role"], metric, *row))
    return pl.DataFrame(rows, schema=SUMMARY, orient="row")


def write_table(results: Results, target: str | Path) -> Path:
    """Write every number of a run, one row each, as CSV or Parquet.

    Columns: study, arm, role, block, seed, metric, coordinate (of a curve), value.

    Args:
        results: of a finished run.
        target: a path that ends in .csv or .parquet.

    Returns:
        The path.

    Raises:
        ConfigError: if the path ends otherwise, or its folder is not there.
    """
    path = Path(target)
    write = WRITERS.get(path.suffix)
    if write is None:
        text = f"{path} ends in {path.suffix or 'no suffix'}, expected "
        raise ConfigError(text + " or ".join(WRITERS))
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} to write {path.name} into")
    write(results.table, path)
    return path
