"""Running the blocks of a plan, one after the other, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable

from normjax.study import cells
from normjax.study.plan import Block, Plan
from normjax.study.store import Store


def local(plan: Plan, store: Store, report: Callable[[Block, float], None]) -> int:
    """Compute every block that is not there yet.

    An arm's blocks share one compiled program.

    Args:
        plan: what to run.
        store: where blocks go.
        report: called after each block with the seconds that it took; 0 for one that
            was there.

    Returns:
        How many programs were compiled.
    """
    seeds, programs = plan.study.seeds, 0
    for arm in plan.arms.values():
        compiled = None
        for block in (b for b in plan.blocks if b.arm == arm.name):
            if store.has(block):
                report(block, 0.0)
                continue
            start = time.perf_counter()
            if compiled is None and block.seeds:
                compiled = cells.program(plan.experiment.measure, arm.cell)
                programs += 1
            size = 0 if seeds is None else min(seeds.block, seeds.count)
            rows = cells.run_block(
                plan.experiment.measure, arm.cell, block.seeds, size, compiled
            )
            seconds = time.perf_counter() - start
            store.write(block, rows, seconds=round(seconds, 3))
            report(block, seconds)
    return programs
