"""What a diagnosis found, as frozen data; tables are made of it later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STEPS = (
    "axes",
    "training against evaluation",
    "denominators",
    "derivative",
    "precision",
    "coupling",
    "configuration",
)


@dataclass(frozen=True)
class Finding:
    """One thing that was measured and is worth a look.

    Attributes:
        severity: ``"error"``: what the layer does is not what it says, or its result is
            lost; ``"warning"``: it does what it says, and that is known to hurt;
            ``"note"``: worth knowing, and no reason to stop.
        step: one of ``STEPS``.
        path: of the layer, as in ``NormLayer``; ``""`` is the model.
        what: the finding in a few words, without numbers.
        numbers: what was measured, by name.
        why: why it matters.
        remedy: what to try.
    """

    severity: str
    step: str
    path: str
    what: str
    numbers: Mapping[str, Any]
    why: str
    remedy: str

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, fit for JSON."""
        return {
            "severity": self.severity,
            "step": self.step,
            "path": self.path,
            "what": self.what,
            "numbers": {name: _plain(value) for name, value in self.numbers.items()},
            "why": self.why,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class Diagnosis:
    """What the steps found on one model and one batch.

    Attributes:
        model: the class of the model.
        layers: the spec of every norm layer that was called, by path and in the order
            of the calls, as text.
        batch: shape and dtype of every array of the batch, by the name of the argument.
        deployment_dtype: the narrow dtype that was tried.
        findings: in the order of the steps, and in a step in that of the layers.
    """

    model: str
    layers: Mapping[str, str]
    batch: Mapping[str, str]
    deployment_dtype: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing above a note was found."""
        return all(each.severity == "note" for each in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, fit for JSON."""
        return {
            "model": self.model,
            "ok": self.ok,
            "layers": dict(self.layers),
            "batch": dict(self.batch),
            "deployment_dtype": self.deployment_dtype,
            "findings": [each.to_dict() for each in self.findings],
        }


def _plain(value: Any) -> Any:
    """Of NumPy to Python, and infinities, which JSON does not have, as text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
