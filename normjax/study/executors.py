"""Computing the blocks of a plan; one that fails is recorded and stops no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from normjax.study import cells
from normjax.study.plan import Block, Plan
from normjax.study.store import Store

Report = Callable[[Block], None]


class Worker:
    """Computes blocks in this process; arms of one form share one compiled program.

    Args:
        plan: whose blocks.
        store: where they go.
    """

    def __init__(self, plan: Plan, store: Store):
        """Nothing is compiled yet."""
        self.plan, self.store = plan, store
        self.programs: dict[str, cells.Program] = {}

    def compute(self, block: Block) -> bool:
        """Compute a block and store it, or the traceback of what it raised.

        Args:
            block: of the plan.

        Returns:
            Whether it is there now.
        """
        start = time.perf_counter()
        try:
            rows = self._rows(block)
        except Exception as error:
            self.store.fail(block, error)
            return False
        seconds = time.perf_counter() - start
        self.store.write(block, rows, seconds=round(seconds, 3))
        return True

    def _rows(self, block: Block) -> list[cells.Row]:
        measure, cell = self.plan.experiment.measure, self.plan.arms[block.arm].cell
        seeds, compiled, size = self.plan.study.seeds, None, 0
        if seeds is not None:
            form = self.plan.forms[block.arm]
            if form not in self.programs:
                self.programs[form] = cells.program(measure, cell)
            compiled, size = self.programs[form], min(seeds.block, seeds.count)
        return cells.run_block(measure, cell, block.seeds, size, compiled)


def local(
    plan: Plan,
    store: Store,
    blocks: Sequence[Block],
    report: Report,
    max_failures: int | None = None,
) -> int:
    """Compute blocks one after the other in this process.

    Args:
        plan: whose blocks.
        store: where they go.
        blocks: which ones.
        report: called after each one.
        max_failures: stop once so many have failed.

    Returns:
        How many programs were compiled.
    """
    worker = Worker(plan, store)
    done = ((block, worker.compute(block)) for block in plan.by_form(blocks))
    watch(done, report, max_failures)
    return len(worker.programs)


def watch(
    done: Iterable[tuple[Block, bool]], report: Report, max_failures: int | None
) -> None:
    """Report blocks as they are done, until too many have failed."""
    failures = 0
    for block, there in done:
        report(block)
        failures += not there
        if max_failures is not None and failures >= max_failures:
            return
