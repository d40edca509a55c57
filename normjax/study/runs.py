"""Running a study: what is there, what is computed, what it says."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from normjax.study.analysis import Analysis, analyze
from normjax.study.caching import kept_programs
from normjax.study.clusters import ray
from normjax.study.document import ConfigError
from normjax.study.executors import local
from normjax.study.plan import Block, Plan, make_plan
from normjax.study.provenance import collect
from normjax.study.store import Results, Store

EXECUTORS = ("local", "ray")


def run(
    config: str | Path,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    seeds: int | None = None,
    smoke: bool = False,
    mode: str = "new",
    shard: tuple[int, int] | None = None,
    max_failures: int | None = None,
    executor: str = "local",
    programs: Path | None = None,
    progress: bool = False,
) -> tuple[Results, Analysis]:
    """Run a study.

    A block that fails stops no other: its traceback is kept beside the blocks. Stopped
    at any moment, the run goes on with ``mode="resume"``.

    Args:
        config: its YAML file.
        out: the run directory; ``runs/<study>`` if None.
        overrides: ``settings.steps=400``: changes of the baseline, for all arms.
        seeds: in place of ``seeds.count``.
        smoke: the small form, in ``runs/<study>-smoke``.
        mode: ``"new"`` refuses a directory with a run, ``"resume"`` computes what is
            missing or failed in it, ``"retry"`` what failed, ``"force"`` starts anew,
            ``"read"`` computes and writes nothing.
        shard: (i, n): compute the i-th of n fixed parts, from 1, of one run directory.
        max_failures: stop once so many blocks have failed.
        executor: ``"local"`` computes in this process, ``"ray"`` in those of a cluster.
        programs: a folder that keeps compiled programs; None leaves JAX as it is.
        progress: show a progress bar on standard error.

    Returns:
        The results and the analysis, which is also written beside them.

    Raises:
        ConfigError: with ``file:line:column``, before anything runs.
        UnfinishedError: afterwards, if blocks failed, or are another shard's.
    """
    if executor not in EXECUTORS:
        known = ", ".join(EXECUTORS)
        raise ConfigError(f"executor: got {executor!r}, expected one of {known}")
    if executor == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError("ray is missing: pip install 'normjax[ray]'")
    decided = make_plan(config, overrides=overrides, seeds=seeds, smoke=smoke)
    name = decided.study.study + ("-smoke" if smoke else "")
    store = Store(Path("runs", name) if out is None else Path(out))
    if mode == "read":
        results = store.read(decided)
        return results, analyze(results, decided.experiment.manipulations)
    options = [part for text in overrides for part in ("--set", text)]
    options += [] if seeds is None else ["--seeds", str(seeds)]
    options += ["--smoke"] if smoke else []
    source = collect(str(config), decided.experiment.data(), options)
    shards = None if shard is None else shard[1]
    store.open(decided, source, mode, shards)
    blocks = _chosen(decided, store, mode, shard)
    with kept_programs(programs), _bar(decided, len(blocks), progress) as report:
        work = (decided, store, blocks, report, max_failures)
        if executor == "ray":
            given = {"overrides": tuple(overrides), "seeds": seeds, "smoke": smoke}
            ray(*work, options=given, programs=programs)
        else:
            local(*work)
    results = store.finish(decided, shards)
    analysis = analyze(results, decided.experiment.manipulations)
    store.write_json("analysis.json", analysis.to_dict())
    return results, analysis


def _chosen(
    plan: Plan, store: Store, mode: str, shard: tuple[int, int] | None
) -> list[Block]:
    """The blocks that this process computes."""
    parts = {} if shard is None else plan.shards(shard[1])
    wanted = store.failed if mode == "retry" else lambda block: not store.has(block)
    return [
        block
        for block in plan.blocks
        if (shard is None or parts[block.id] == shard[0]) and wanted(block)
    ]


@contextlib.contextmanager
def _bar(plan: Plan, total: int, shown: bool) -> Iterator[Callable[[Block], None]]:
    """A bar on standard error; yields what advances it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task(plan.study.study, total=total)
        yield lambda block: bar.update(task, advance=1, description=block.arm)
