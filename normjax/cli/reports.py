"""``normjax report``, ``compare`` and ``results``: what finished runs say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from normjax.cli.app import app
from normjax.terminal import out, table

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
OtherRun = Annotated[Path, typer.Argument(metavar="RUN", help="Another one.")]


@app.command("report")
def write_report(folder: RunFolder) -> None:
    """Write the page of a run that is there."""
    from normjax import report

    out.print(f"page: {report.write(folder)}", soft_wrap=True)


@app.command("compare")
def compare_runs(
    first: RunFolder,
    second: OtherRun,
    every: Annotated[
        bool, typer.Option("--all", help="The effects on diagnostics too.")
    ] = False,
) -> None:
    """Say in what two runs differ: config, data, versions, effects."""
    from normjax import report, study

    found = study.compare(first, second)
    _show_differences("config", found.config)
    _show_differences("data, versions, device", found.sources)
    _show_hypotheses(found)
    _show_seeds(found)
    _show_effects(found, report.interval, every)


@app.command("results")
def show_results(
    folder: RunFolder,
    out_: Annotated[
        Path | None,
        typer.Option(
            "--out", help="FILE.csv or FILE.parquet: one row for each number."
        ),
    ] = None,
) -> None:
    """Print mean and 95 % interval of every arm, and write the whole table."""
    from normjax import report, study

    results = study.load(folder)
    if out_ is not None:
        path = study.write_table(results, out_)
        out.print(f"{len(results.table):,} rows: {path}", soft_wrap=True)
        return
    rows = table("arm", "metric", "mean, 95 % interval", "seeds", "lost")
    for row in study.summarize(results).iter_rows(named=True):
        exact = row["low"] is None
        mean = report.number(row["mean"]) if exact else report.interval(row)
        counts = ("", "") if not row["seeds"] + row["lost"] else _counts(row)
        rows.add_row(row["arm"], row["metric"], mean, *counts)
    out.print(rows)


def _counts(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["seeds"]), str(row["lost"]) if row["lost"] else ""


def _show_differences(title: str, differences: Any) -> None:
    if not differences:
        out.print(f"{title}: the same")
        return
    rows = table(title, "first", "second")
    for one in differences:
        rows.add_row(one.key, str(one.first), str(one.second))
    out.print(rows)


def _show_hypotheses(found: Any) -> None:
    same = "the same" if found.same_hypotheses else "not declared alike"
    out.print(f"hypotheses and outcomes: {same}")
    if found.hypotheses:
        rows = table("hypothesis", "first", "second")
        for name, verdicts in found.hypotheses.items():
            rows.add_row(name, *verdicts)
        out.print(rows)


def _show_seeds(found: Any) -> None:
    both, first, second = found.seeds
    if not both + first + second:
        out.print("seeds: none, both are exact")
        return
    rest = f", {first} only in the first, {second} only in the second"
    text = f"seeds: {both} in both" + (rest if first + second else "")
    if not found.pairs:
        text += "; effects do not pair: that takes two common seeds and equal data"
    out.print(text, soft_wrap=True)


def _show_effects(found: Any, interval: Any, every: bool) -> None:
    shown = [e for e in found.effects if every or any(e.verdicts)]
    for metric in dict.fromkeys(one.metric for one in shown):
        rows = table(metric, "first", "second", "second − first", "verdicts")
        for one in shown:
            if one.metric == metric:
                at = f" at {one.at}" if one.at else ""
                both = interval(vars(one.first)), interval(vars(one.second))
                change = "–" if one.change is None else interval(vars(one.change))
                verdicts = " → ".join(v for v in one.verdicts if v)
                name = f"{one.arm} − {one.parent}{at}"
                rows.add_row(name, *both, change, verdicts)
        out.print(rows)
    rest = dict.fromkeys(one.metric for one in found.effects if one not in shown)
    if rest:
        out.print(f"--all shows diagnostics too: {', '.join(rest)}", soft_wrap=True)
    for which, names in (("first", found.only_first), ("second", found.only_second)):
        for name in names:
            out.print(f"only in the {which}: {name}", soft_wrap=True)
