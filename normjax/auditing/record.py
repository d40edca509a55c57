"""What an audit found: findings with their confidence and evidence, and the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from normjax.records import Record, check_choice
from normjax.spec import NormSpec

CONFIDENCE = ("certain", "strong", "assumed", "open")


@dataclass(frozen=True, repr=False)
class Finding(Record):
    """One fact about a callable, how sure it is, and what shows it.

    Attributes:
        name: the property: ``"grouping"``, ``"epsilon"``, ``"variance"``, ...
        value: what was found, as it is printed: a text or a number; None is open.
        confidence: ``"certain"``: discrete evidence, or a fit that is 100 times better
            than the next one; ``"strong"``: 10 times better; ``"assumed"``: it needs a
            prior, which the evidence names; ``"open"``: it cannot be identified.
        evidence: the decisive measurement, in one line.
        defect: whether a user would want to mend it.
        facts: the same for programs: words, measured numbers, thresholds.
    """

    name: str
    value: Any
    confidence: str
    evidence: str = ""
    defect: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        """Validate."""
        check_choice("confidence", self.confidence, CONFIDENCE)


@dataclass(frozen=True, repr=False)
class Audit(Record):
    """What a callable is, as far as its values say.

    Attributes:
        target: its name.
        shape: of the probes.
        dtype: of the probes.
        findings: in the order of the report.
        spec: the layer that reproduces it on held-out inputs; None if there is none.
        nearest: the layer that comes closest where no spec reproduces it.
        differs: the facts in which ``nearest`` differs.
        kind: what it is where it is no normalization, else None.
        open: what values cannot tell apart, in words.
        calls: how often it was called.
        seconds: how long that took.
        seed: of the probes.
    """

    target: str
    shape: tuple[int, ...]
    dtype: str
    findings: tuple[Finding, ...]
    spec: NormSpec | None = None
    nearest: NormSpec | None = None
    differs: tuple[str, ...] = ()
    kind: str | None = None
    open: tuple[str, ...] = ()
    calls: int = 0
    seconds: float = 0.0
    seed: int = 0

    @property
    def defects(self) -> tuple[Finding, ...]:
        """The findings that a user would want to mend."""
        return tuple(finding for finding in self.findings if finding.defect)

    def __getitem__(self, name: str) -> Finding:
        """The finding of that name.

        Raises:
            KeyError: if there is none, naming those that there are.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding
        there = ", ".join(finding.name for finding in self.findings)
        raise KeyError(f"there is no finding {name!r}; there are {there}")

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data that JSON can hold; NaN and infinity are text."""
        return _plain({name: getattr(self, name) for name in self.__dataclass_fields__})


def _plain(value: Any) -> Any:
    """Numbers, strings, lists, dicts, None."""
    if isinstance(value, Audit | NormSpec):
        return _plain(value.to_dict())
    if isinstance(value, Finding):
        return _plain({key: getattr(value, key) for key in value.__dataclass_fields__})
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
