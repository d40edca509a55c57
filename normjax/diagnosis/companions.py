"""Coupling: whether an example's evaluation depends on its companions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from normjax.diagnosis.record import Finding
from normjax.diagnosis.subject import BoundModel, Run

STEP = "coupling"
# Other rows may take another order of summation: half of the digits are no rounding.
MOVED = 1e-4


def coupling_findings(subject: BoundModel, evaluate: Run) -> list[Finding]:
    """The first layer that moves the first example when the others are exchanged."""
    examples = subject.examples
    if examples < 2:
        return []
    # The others all become one other example, or the first where there is one other.
    index = np.full(examples, 1 if examples > 2 else 0)
    index[0] = 0

    def change(leaf: Any) -> Any:
        along = getattr(leaf, "ndim", 0) > 0 and leaf.shape[0] == examples
        return leaf[jnp.asarray(index)] if along else leaf

    other = subject.mapped(change).run("evaluate")
    for path, inputs in evaluate.layers.items():
        if path not in other.layers:
            continue
        before, after = inputs.calls[0], other.layers[path].calls[0]
        if before.x.shape[:1] != (examples,):
            continue
        came, went = _moved(before.x, after.x), _moved(before.y, after.y)
        if went > MOVED:
            own = came <= MOVED
            return [
                Finding(
                    "error", STEP, path,
                    "evaluation depends on the other examples" if own
                    else "examples are mixed before this layer in evaluation",
                    {"output moved by": went, "input moved by": came},
                    "a prediction changes with what else is in the batch",
                    "reduce over no axis of the examples, and use stored statistics",
                )
            ]  # fmt: skip
    return []


def _moved(before: Any, after: Any) -> float:
    """How far the first example moves, relative to its size."""
    a, b = (np.asarray(each[0], np.float64) for each in (before, after))
    size = np.linalg.norm(a)
    return float(np.linalg.norm(a - b) / size) if size > 0 else 0.0
