"""What an analysis found, as frozen data; pages and tables are made of it later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from normjax.analysis.measures import Flag, Measure
from normjax.analysis.tally import Extreme, Flagged, Histogram
from normjax.spec import NormSpec


class Placed:
    """What has an index: a row of numbers, one for each of its axes."""

    axes: tuple[str, ...]

    def place(self, index: Sequence[int]) -> str:
        """Where a row stands, like ``b 3, t 17``."""
        pairs = zip(self.axes, index, strict=True)
        return ", ".join(f"{axis} {i}" for axis, i in pairs)


@dataclass(frozen=True)
class Distribution(Placed):
    """One measure over all finite groups, or over all examples.

    Attributes:
        measure: what was measured.
        axes: names of the columns of an index.
        histogram: of all numbers, with their exact extremes.
    """

    measure: Measure
    axes: tuple[str, ...]
    histogram: Histogram


@dataclass(frozen=True)
class Finding(Placed):
    """The rows that have one flag.

    Attributes:
        flag: what it says.
        axes: names of the columns of an index.
        found: how many have it, and the worst of them with their numbers.
    """

    flag: Flag
    axes: tuple[str, ...]
    found: Flagged


@dataclass(frozen=True)
class Strongest:
    """The batch in which one companion pulls hardest.

    Attributes:
        batch: its number.
        first: the row of its first example.
        pull: the largest one.
        influence: who moves whom, (examples, examples), as ``nj.influence``.
    """

    batch: int
    first: int
    pull: float
    influence: np.ndarray


@dataclass(frozen=True)
class ActivationAnalysis:
    """What a layer does to every group of an array.

    Attributes:
        source: the file, or ``"array"``.
        spec: the layer.
        shape: of the array.
        dtype: of the array.
        batch_size: examples that are normalized together; None if none are.
        groups: how many groups there are.
        distributions: of every measure, by its name.
        findings: of every flag, by its name.
        examples: how many examples were compared with their companions; 0 without any.
        judged_alike: whether an example has numbers enough for the flag ``alike``.
        strongest: the batch with the largest pull, None without companions.
        remainder: the last batch, where it is smaller than the others.
        left_out: examples of a last batch that the layer cannot take.
    """

    source: str
    spec: NormSpec
    shape: tuple[int, ...]
    dtype: str
    batch_size: int | None
    groups: int
    distributions: Mapping[str, Distribution]
    findings: Mapping[str, Finding]
    examples: int = 0
    judged_alike: bool = True
    strongest: Strongest | None = None
    remainder: ActivationAnalysis | None = None
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Everything but the influence matrix as plain data, fit for JSON."""
        rest = self.remainder
        return {
            "source": self.source,
            "spec": self.spec.to_dict(),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "batch_size": self.batch_size,
            "groups": self.groups,
            "examples": self.examples,
            "left_out": self.left_out,
            "distributions": {
                name: _distribution(one) for name, one in self.distributions.items()
            },
            "findings": {name: _finding(one) for name, one in self.findings.items()},
            "remainder": None if rest is None else rest.to_dict(),
        }


def _distribution(one: Distribution) -> dict[str, Any]:
    histogram = one.histogram
    return {
        "label": one.measure.label,
        "axes": list(one.axes),
        "lowest": _extreme(histogram.lowest),
        "highest": _extreme(histogram.highest),
        "zero": histogram.zero,
        "infinite": histogram.infinite,
        "undefined": histogram.undefined,
        "counts": {
            str(i): int(histogram.counts[i]) for i in histogram.counts.nonzero()[0]
        },
    }


def _extreme(extreme: Extreme | None) -> dict[str, Any] | None:
    if extreme is None:
        return None
    return {"value": _number(extreme.value), "index": list(extreme.index)}


def _finding(one: Finding) -> dict[str, Any]:
    return {
        "measure": one.flag.measure,
        "meaning": one.flag.meaning,
        "reason": one.flag.reason,
        "axes": list(one.axes),
        "count": one.found.count,
        "worst": [
            {"index": index, "value": _number(value)}
            for index, value in zip(
                one.found.index.tolist(), one.found.values.tolist(), strict=True
            )
        ],
    }


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if np.isfinite(value) else str(value)
