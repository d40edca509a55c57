"""How a design makes arms: validated, named once, one property from another arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from normjax.study.arms import Change, PlannedArm, differences, misfits
from normjax.study.cells import Cell
from normjax.study.document import Document, Location
from normjax.study.experiment import Experiment
from normjax.study.validation import InvalidError, parse

# 2^5 arms are the most that one design makes.
MOST = 5


class RefusedError(Exception):
    """Settings that cannot be built, and why."""


class Builder:
    """Makes generated arms; no two share a name, and none is what another is.

    Args:
        document: for the places of errors.
        experiment: whose schema the settings have.
        arms: those that are there.
    """

    def __init__(
        self, document: Document, experiment: Experiment, arms: dict[str, PlannedArm]
    ):
        """Start from the declared arms."""
        self.document, self.experiment, self.arms = document, experiment, dict(arms)

    def settings(self, raw: Mapping[str, Any]) -> Any:
        """Validated settings; raises ``RefusedError`` if they are wrong."""
        try:
            found = parse(self.experiment.settings, raw)
        except InvalidError as error:
            where = ".".join(map(str, error.location))
            raise RefusedError(f"{where}: {error}") from None
        for path, message in misfits(found, self.experiment.shapes(found)):
            raise RefusedError(f"{path}: {message}")
        return found

    def changes(self, first: Any, second: Any) -> tuple[Change, ...]:
        """Properties in which two settings differ."""
        shapes = self.experiment.shapes
        return differences(first, second, shapes(first), shapes(second))

    def add(
        self, name: str, settings: Any, parents: Sequence[str], role: str, at: Location
    ) -> None:
        """An arm from the first of the parents that it is one property away from.

        If it is so from none, it is from the first, and labelled with all it changes.
        """
        if name in self.arms:
            raise self.document.error(at, f"makes an arm {name!r}, which is there")
        found = {p: self.changes(self.arms[p].cell.settings, settings) for p in parents}
        parent = next((p for p in parents if len(found[p]) == 1), parents[0])
        changes = found[parent]
        if not changes:
            raise self.document.error(at, f"{name} changes nothing of {parent!r}")
        cell = Cell(name, settings)
        several = len(changes) > 1
        self.arms[name] = PlannedArm(name, parent, cell, changes, role, several)


def bits(mask: int) -> list[int]:
    """Places of the ones, the highest first."""
    return [i for i in reversed(range(mask.bit_length())) if mask >> i & 1]


def members(titles: Sequence[str], mask: int) -> list[str]:
    """The titles whose bit is set."""
    return [title for i, title in enumerate(titles) if mask >> i & 1]
