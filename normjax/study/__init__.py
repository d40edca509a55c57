"""Declared studies that change one property at a time, paired over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from normjax.study.analysis import Analysis as Analysis
from normjax.study.analysis import analyze as analyze
from normjax.study.cells import Cell as Cell
from normjax.study.cells import Curve as Curve
from normjax.study.comparison import Comparison as Comparison
from normjax.study.comparison import compare as compare
from normjax.study.comparison import load_judged as load_judged
from normjax.study.document import ConfigError as ConfigError
from normjax.study.executors import local
from normjax.study.norm_setting import NormSetting as NormSetting
from normjax.study.plan import Plan as Plan
from normjax.study.plan import make_plan as make_plan
from normjax.study.provenance import collect
from normjax.study.schema import Field as Field
from normjax.study.schema import Settings as Settings
from normjax.study.store import Results as Results
from normjax.study.store import Store
from normjax.study.store import load as load
from normjax.study.summary import summarize as summarize
from normjax.study.summary import write_table as write_table


def run(
    config: str | Path,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    seeds: int | None = None,
    smoke: bool = False,
    mode: str = "new",
    progress: bool = False,
) -> tuple[Results, Analysis]:
    """Run a study.

    Args:
        config: its YAML file.
        out: the run directory; ``runs/<study>`` if None.
        overrides: ``settings.steps=400``: changes of the baseline, for all arms.
        seeds: in place of ``seeds.count``.
        smoke: the small form, in ``runs/<study>-smoke``.
        mode: ``"new"`` refuses a directory with a run, ``"resume"`` computes what is
            missing in it, ``"force"`` starts anew.
        progress: show a progress bar on standard error.

    Returns:
        The results and the analysis, which is also written beside them.

    Raises:
        ConfigError: with ``file:line:column``, before anything runs.
    """
    decided = make_plan(config, overrides=overrides, seeds=seeds, smoke=smoke)
    name = decided.study.study + ("-smoke" if smoke else "")
    store = Store(Path("runs", name) if out is None else Path(out))
    options = [part for text in overrides for part in ("--set", text)]
    options += [] if seeds is None else ["--seeds", str(seeds)]
    options += ["--smoke"] if smoke else []
    source = collect(str(config), decided.experiment.data(), options)
    store.open(decided, source, mode)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not progress) as bar:
        task = bar.add_task(decided.study.study, total=len(decided.blocks))
        local(
            decided,
            store,
            lambda block, _: bar.update(task, advance=1, description=block.arm),
        )
    results = store.finish(decided)
    analysis = analyze(results, decided.experiment.manipulations)
    store.write_json("analysis.json", analysis.to_dict())
    return results, analysis
