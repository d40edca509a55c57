"""Measured chunks, counted in the order of the array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from normjax.analysis.cutting import Cut
from normjax.analysis.kernels import ghosts
from normjax.analysis.measures import (
    EXAMPLE_FLAGS,
    EXAMPLE_MEASURES,
    FEWEST_VALUES,
    LEVERAGE,
    LIKENESS,
    MOST_OF_IT,
    PULL,
    RISK,
    STABILIZED,
    Flag,
    Measure,
    group_flags,
    group_measures,
)
from normjax.analysis.record import (
    ActivationAnalysis,
    Distribution,
    Finding,
    Strongest,
)
from normjax.analysis.source import Source
from normjax.analysis.tally import Flagged, Histogram
from normjax.spec import NormSpec

# Equal examples have a gap of 0 to rounding, so only such are compared bit by bit.
NEARLY = 0.02
Table = dict[str, np.ndarray]
Receive = Callable[[str, Table], None]


def ignore(*_: Any) -> None:
    """Do nothing with what is offered."""


class Tally:
    """Histograms and flagged rows so far.

    Args:
        source: what is analyzed.
        cut: how it is cut.
        keep: how many rows of each flag are kept.
        receive: called with the columns of every chunk, or None.
        after: the units that stand before these.
    """

    def __init__(
        self,
        source: Source,
        cut: Cut,
        keep: int,
        receive: Receive | None,
        after: Cut | None = None,
    ):
        self.source, self.cut, self.keep = source, cut, keep
        self.receive = receive or ignore
        self.unit = 0 if after is None else after.units
        self.row = 0 if after is None else after.units * after.rows
        self.groups = self.examples = 0
        self.distributions: dict[str, Distribution] = {}
        self.findings: dict[str, Finding] = {}
        self.strongest: Strongest | None = None

    def add(self, rows: np.ndarray, parts: tuple[Any, ...]) -> None:
        """Count the units of one chunk.

        Args:
            rows: as they were read, without padding.
            parts: what ``measured`` gave for them.
        """
        units = len(rows) // self.cut.rows
        table = {n: np.asarray(c)[:units].reshape(-1) for n, c in parts[0].items()}
        self._groups(table, self.cut.index(self.unit, units))
        if self.cut.met:
            columns = {n: np.asarray(c)[:units] for n, c in parts[1].items()}
            flat = rows.reshape(units, self.cut.rows, -1)
            self._examples(flat, columns, parts[2])
        self.unit += units
        self.row += units * self.cut.rows

    def found(self, spec: NormSpec) -> ActivationAnalysis:
        """What was counted, as a record."""
        return ActivationAnalysis(
            source=self.source.name,
            spec=spec,
            shape=self.source.shape,
            dtype=self.source.dtype.name,
            batch_size=self.cut.rows if self.cut.coupled else None,
            groups=self.groups,
            distributions=self.distributions,
            findings=self.findings,
            examples=self.examples,
            judged_alike=self.cut.values >= FEWEST_VALUES,
            strongest=self.strongest,
        )

    def _groups(self, table: Table, index: np.ndarray) -> None:
        axes = self.cut.axes
        names = [measure.name for measure in group_measures()]
        table = {name: table[name] for name in (*names, "largest", "bad")}
        self.receive("groups", dict(zip(axes, index.T, strict=True)) | table)
        self.groups += len(index)
        finite = table["bad"] == 0
        for measure in group_measures():
            self._count(measure, axes, table[measure.name][finite], index[finite])
        flat = finite & (table["distance"] == 0)
        for flag in group_flags(self.cut.spec):
            number = table[flag.measure]
            if flag.name == "not_finite":
                chosen = ~finite
            elif flag.name == "no_variance":
                chosen = flat
            elif flag.name == "stabilized":
                chosen = finite & ~flat & (number >= STABILIZED)
            else:
                chosen = finite & ~flat & (number >= RISK)
            self._flag(flag, axes, chosen, number, index)

    def _examples(self, rows: np.ndarray, columns: Table, matrices: Any) -> None:
        """Whole batches; nobody is compared where all groups are left out.

        Args:
            rows: (batches, examples, numbers).
            columns: arrays (batches, examples).
            matrices: the influence matrix of each.
        """
        batches, size = rows.shape[:2]
        good = columns["seen"][:, 0] > 0
        first = self.row + size * np.arange(batches)
        index = first[:, None] + np.arange(size)
        bad = (~np.isfinite(rows)).sum(axis=2)
        broken, repeated, alike, pulled, dominant = EXAMPLE_FLAGS
        places = index.reshape(-1, 1)
        one = ("example",)
        self._flag(broken, one, bad.reshape(-1) > 0, bad.reshape(-1), places)
        if not good.any():
            return
        ghost = ghosts(self.cut.layout, self.cut.spec.example)
        table = {name: column[good] for name, column in columns.items()}
        pairs = [
            twins(batch, ghost, gap < NEARLY)
            for batch, gap in zip(rows[good], table["gap"], strict=True)
        ]
        twin, later = (np.stack(part) for part in zip(*pairs, strict=True))
        again = twin >= 0
        table["gap"] = np.where(again, 0, table["gap"]).astype(table["gap"].dtype)
        table["nearest"] = np.where(again, twin, table["nearest"])
        for name in ("companion", "nearest"):
            table[name] = table[name] + first[good][:, None]
        table["repeats"] = np.where(later, table["nearest"], -1)
        names = [measure.name for measure in EXAMPLE_MEASURES]
        names += [name for name in table if name not in names]
        table = {name: table[name].reshape(-1) for name in names}
        index, later, again = index[good].reshape(-1), later.ravel(), again.ravel()
        numbers = np.repeat(self.unit + np.flatnonzero(good), size)
        self.receive("examples", {"example": index, "batch": numbers} | table)
        self.examples += len(index)
        near = ~again & (table["likeness"] >= LIKENESS)
        values = table["seen"] * (self.cut.values / self.cut.groups)
        near &= values >= FEWEST_VALUES
        most = min(LEVERAGE, MOST_OF_IT * size)
        to_nearest = np.stack([index, table["nearest"]], axis=1)
        to_companion = np.stack([index, table["companion"]], axis=1)
        places = index[:, None]
        two = ("example", "companion")
        self._flag(repeated, two, later, table["gap"], to_nearest)
        self._flag(alike, two, near, table["gap"], to_nearest)
        self._flag(pulled, two, table["pull"] >= PULL, table["pull"], to_companion)
        lever = table["leverage"]
        self._flag(dominant, one, lever > most, lever, places)
        for measure in EXAMPLE_MEASURES:
            self._count(measure, one, table[measure.name], places)
        self._strongest(columns["pull"], good, matrices)

    def _strongest(self, pull: np.ndarray, good: np.ndarray, matrices: Any) -> None:
        """Keep the matrix of the first batch with the largest pull."""
        each = np.where(good, pull.max(axis=1), -1)
        best = int(each.argmax())
        before = self.strongest
        if before is None or each[best] > before.pull:
            self.strongest = Strongest(
                batch=self.unit + best,
                first=self.row + best * pull.shape[1],
                pull=float(each[best]),
                influence=np.array(matrices[best]),
            )

    def _count(
        self, measure: Measure, axes: tuple[str, ...], values, index: np.ndarray
    ) -> None:
        histogram = Histogram.of(values, index)
        before = self.distributions.get(measure.name)
        if before is not None:
            histogram = before.histogram + histogram
        self.distributions[measure.name] = Distribution(measure, axes, histogram)

    def _flag(
        self, flag: Flag, axes: tuple[str, ...], chosen, values, index: np.ndarray
    ) -> None:
        order = {"keep": self.keep, "highest": flag.highest}
        found = Flagged.of(chosen, values, index, **order)
        before = self.findings.get(flag.name)
        if before is not None:
            found = before.found.plus(found, **order)
        self.findings[flag.name] = Finding(flag, axes, found)


def twins(
    rows: np.ndarray, ghost: np.ndarray, some: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Examples of one batch that are equal bit for bit (0 and −0 count as equal).

    Args:
        rows: (examples, numbers).
        ghost: which examples are normalized together.
        some: which examples to compare.

    Returns:
        For each example one that equals it (the first, and of the first the second; −1
        without any), and whether it repeats an earlier one.

    Example:
        >>> rows = np.array([[1.0], [2.0], [1.0], [1.0]])
        >>> found = twins(rows, np.zeros(4, int), np.ones(4, bool))
        >>> [part.tolist() for part in found]
        [[2, -1, 0, 0], [False, False, True, True]]
    """
    twin, later = np.full(len(rows), -1), np.zeros(len(rows), bool)
    seen: dict[tuple[int, bytes], int] = {}
    for i in np.flatnonzero(some).tolist():
        row = rows[i] + np.zeros((), rows.dtype)
        earlier = seen.setdefault((int(ghost[i]), row.tobytes()), i)
        if earlier != i:
            twin[i], later[i] = earlier, True
            if twin[earlier] < 0:
                twin[earlier] = i
    return twin, later
