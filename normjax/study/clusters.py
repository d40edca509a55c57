"""Computing the blocks of a plan in the processes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from normjax.study.caching import kept_programs
from normjax.study.document import ConfigError
from normjax.study.executors import Report, Worker, watch
from normjax.study.plan import Block, Plan, make_plan
from normjax.study.store import Store

# Of a block whose process died: not of one that raised, which is recorded as failed.
RETRIES = 3


def ray(
    plan: Plan,
    store: Store,
    blocks: Sequence[Block],
    report: Report,
    max_failures: int | None = None,
    *,
    options: Mapping[str, Any],
    programs: Path | None = None,
) -> None:
    """Compute blocks as tasks of Ray, one CPU each; one GPU too where there are some.

    A cluster that runs is used (``RAY_ADDRESS``), else one is started on this machine
    and stopped afterwards. The run directory must be one that all machines see: each
    process stores what it computes. The block of a process that dies is computed
    again by another one, at most three times, and then recorded as failed.

    Args:
        plan: whose blocks.
        store: where they go.
        blocks: which ones.
        report: called after each one.
        max_failures: stop once so many have failed.
        options: of ``make_plan``, which every process calls.
        programs: a folder that keeps compiled programs.
    """
    import ray as cluster  # pyright: ignore[reportMissingImports]

    started = not cluster.is_initialized()
    if started:
        cluster.init(log_to_driver=False)
    tasks: dict[Any, Block] = {}
    try:
        gpus = 1 if cluster.cluster_resources().get("GPU") else 0
        remote = cluster.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(_task)
        shared = cluster.put(
            (str(Path(plan.document.name).resolve()), dict(options),
             store.folder.resolve(), programs and programs.resolve())
        )  # fmt: skip
        tasks |= {remote.remote(shared, block.id): block for block in blocks}
        watch(_done(cluster, tasks, store), report, max_failures)
    finally:
        for task in tasks:  # those that nobody waits for any more
            cluster.cancel(task)
        if started:
            cluster.shutdown()


def _done(
    cluster: Any, tasks: dict[Any, Block], store: Store
) -> Iterator[tuple[Block, bool]]:
    """Blocks as their tasks end."""
    while tasks:
        (ready, *_), _ = cluster.wait(list(tasks))
        block = tasks.pop(ready)
        try:
            yield block, cluster.get(ready)
        except cluster.exceptions.RayError as error:
            store.fail(block, error)
            yield block, False


_WORKERS: dict[Any, Worker] = {}


def _task(shared: tuple[str, dict[str, Any], Path, Path | None], name: str) -> bool:
    """Compute one block; the process plans once and keeps its programs."""
    config, options, folder, programs = shared
    key = (config, repr(sorted(options.items())), folder)
    if key not in _WORKERS:
        _WORKERS[key] = Worker(make_plan(config, **options), Store(folder))
    worker = _WORKERS[key]
    found = [block for block in worker.plan.blocks if block.id == name]
    if not found:
        raise ConfigError(f"{config} or its experiment has changed since the run began")
    if worker.store.has(found[0]):  # by a process that died thereafter
        return True
    with kept_programs(programs):
        return worker.compute(found[0])
