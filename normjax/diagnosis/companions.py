"""Coupling: whether an example's result depends on its companions, or on padding."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from normjax.diagnosis.record import Finding
from normjax.diagnosis.subject import BoundModel, Run, specs
from normjax.traits import properties

STEP = "coupling"
# Other rows may take another order of summation: half of the digits are no rounding.
MOVED = 1e-4


def coupling_findings(
    subject: BoundModel, train: Run, evaluate: Run, mask: Any
) -> list[Finding]:
    """Examples that depend on others, examples that are repeated, padding that leaks.

    Args:
        subject: the model.
        train: a run in training.
        evaluate: one in evaluation.
        mask: True where an input is valid, over its leading axes; None: no padding.
    """
    found = []
    if subject.examples > 1:
        found += _companions(subject, evaluate) + _in_training(subject, train)
    return found + ([] if mask is None else _padding(subject, train, mask))


def _others(subject: BoundModel, mode: str) -> Run:
    """The others all become one other example, or the first of two."""
    examples = subject.examples
    index = np.full(examples, 1 if examples > 2 else 0)
    index[0] = 0

    def change(leaf: Any) -> Any:
        along = getattr(leaf, "ndim", 0) > 0 and leaf.shape[0] == examples
        return leaf[jnp.asarray(index)] if along else leaf

    return subject.mapped(change).run(mode)


def _companions(subject: BoundModel, evaluate: Run) -> list[Finding]:
    """The first layer that moves the first example when the others are exchanged."""
    first = np.zeros(subject.examples, bool)
    first[0] = True
    at = _first_moved(evaluate, _others(subject, "evaluate"), first)
    if at is None:
        return []
    path, came, went = at
    return [
        Finding(
            "error", STEP, path,
            "evaluation depends on the other examples" if came <= MOVED
            else "examples are mixed before this layer in evaluation",
            {"output moved by": went, "input moved by": came},
            "a prediction changes with what else is in the batch",
            "reduce over no axis of the examples, and use stored statistics",
        )
    ]  # fmt: skip


def _in_training(subject: BoundModel, train: Run) -> list[Finding]:
    first = np.zeros(subject.examples, bool)
    first[0] = True
    at = _first_moved(train, _others(subject, "train"), first)
    if at is None:
        return []
    path, came, went = at
    found = [
        Finding(
            "note", STEP, path, "training depends on the other examples",
            {"output moved by": went},
            "by the statistics of the batch: its size and its composition count"
            if _couples(train, path) else "by something else than a norm before it",
            "nothing, where batch statistics are meant",
        )
    ]  # fmt: skip
    rows = np.asarray(subject.x).reshape(subject.examples, -1)
    distinct = len(np.unique(rows, axis=0))
    if _couples(train, path) and came <= MOVED and distinct < subject.examples:
        found.append(
            Finding(
                "warning", STEP, path, "examples are repeated in the batch",
                {"distinct": distinct, "of": subject.examples},
                "each counts again in the statistics: their variance is that of fewer "
                "examples than the batch has",
                "draw without replacement, and do not fill up the last batch",
            )
        )  # fmt: skip
    return found


def _couples(run: Run, path: str) -> bool:
    inputs = run.layers[path]
    return any(properties(spec).couples_examples for spec in specs(inputs))


def padding_mask(subject: BoundModel, mask: Any) -> Any:
    """The mask of the padding, as NumPy, or None where there is none.

    Args:
        subject: the model and its batch.
        mask: as for ``diagnose``.

    Raises:
        ValueError: if it is no argument of the batch, or does not fit the input.
    """
    if mask is None:
        return None
    if isinstance(mask, str):
        given = {
            **dict(zip(subject.names, subject.args, strict=False)),
            **subject.named,
        }
        if mask not in given:
            raise ValueError(
                f"mask is {mask!r}, expected an argument of the batch ("
                f"{', '.join(given)}), or an array that is True where valid"
            )
        mask = given[mask]
    mask = np.asarray(mask, bool)
    shape = tuple(subject.x.shape)
    while mask.ndim > len(shape) or (
        mask.ndim > 1 and mask.shape != shape[: mask.ndim]
    ):
        if mask.shape[-1] != 1:
            break
        mask = mask[..., 0]
    if mask.ndim == 0 or mask.shape != shape[: mask.ndim]:
        raise ValueError(
            f"mask has shape {mask.shape}, expected that of the leading axes of the "
            f"input {shape}, as {shape[:2]}"
        )
    return mask


def _padding(subject: BoundModel, train: Run, mask: np.ndarray) -> list[Finding]:
    """Other numbers under the mask, and NaN: what is valid must stay as it is."""
    if mask.all():
        return []
    x = subject.x
    whole = jnp.asarray(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)))
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    # Ids stay among those that there are.
    others = 3 - 10 * x if floats else jnp.broadcast_to(jnp.max(x), x.shape)

    def filled(value: Any) -> Run:
        new = jnp.where(whole, x, value)
        return subject.mapped(lambda leaf: new if leaf is x else leaf).run("train")

    at = _first_moved(train, filled(others), mask)
    if at is not None:
        path, came, went = at
        return [
            Finding(
                "error", STEP, path,
                "padding leaks into the statistics" if came <= MOVED
                else "padding leaks before this layer",
                {"valid output moved by": went, "valid input moved by": came},
                "with other numbers under the mask a valid position is another one: "
                "the result depends on how long the padding is",
                "pass mask= to the layer, and a mask to what stands before it",
            )
        ]  # fmt: skip
    at = _first_moved(train, filled(jnp.nan), mask) if floats else None
    if at is None:
        return []
    return [
        Finding(
            "warning", STEP, at[0], "NaN under the mask spreads",
            {"valid output moved by": at[2]},
            "it is multiplied by 0, and not left out: 0 · NaN is NaN",
            "x = jnp.where(mask[..., None], x, 0) before anything else",
        )
    ]  # fmt: skip


def _first_moved(
    run: Run, other: Run, chosen: np.ndarray
) -> tuple[str, float, float] | None:
    """The first layer of which chosen outputs moved, and by how much input and output.

    Every call counts; of a layer whose leading axes are not those that choose, none.
    """
    for path, inputs in run.layers.items():
        if path not in other.layers:
            continue
        pairs = zip(inputs.calls, other.layers[path].calls, strict=False)
        for before, after in pairs:
            if before.x.shape[: chosen.ndim] != chosen.shape:
                continue
            went = _moved(before.y, after.y, chosen)
            if went > MOVED:
                return path, _moved(before.x, after.x, chosen), went
    return None


def _moved(before: Any, after: Any, chosen: np.ndarray) -> float:
    """How far chosen entries move, by the size of either; inf to or from NaN."""
    a, b = (np.asarray(each, np.float64)[chosen] for each in (before, after))
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return np.inf
    a, b = (np.where(np.isfinite(each), each, 0) for each in (a, b))
    size = max(np.linalg.norm(a), np.linalg.norm(b))
    return float(np.linalg.norm(a - b) / size) if size > 0 else 0.0
