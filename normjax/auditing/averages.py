"""Stored statistics: their rule, from what known updates do to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from normjax.auditing.formula import Floats, Formula
from normjax.auditing.probing import Probe
from normjax.auditing.reading import Reader, Stored
from normjax.auditing.record import Finding
from normjax.auditing.target import CallError

# Of the batches: far from each other, and spreads far above the usual start at 1, so
# that a weight of 0.001 and the factor n/(n − 1) show.
LEVELS = (3.0, -1.0, 11.0, -9.0)
SPREADS = (8, 32)
NEAR = 3e-4  # of a weight
FACTOR = 2e-3  # of a stored variance
HALF = 2.0**-20  # outputs of half types cannot be read so closely


@dataclass(frozen=True)
class Average:
    """How a new value enters.

    Attributes:
        rule: ``"exponential"``, ``"cumulative"``, ``"first copied"`` or ``"debiased"``.
        decay: the share that is kept; None for a cumulative average.
        weights: of the newest batch, update by update.
    """

    rule: str
    decay: float | None
    weights: tuple[float, ...]


def running_finding(probe: Probe, formula: Formula) -> Finding | None:
    """The rule of the stored statistics, what they start with, and who updates them.

    Args:
        probe: a callable in training that stores something.
        formula: what it computes there.

    Returns:
        The finding; None where nothing is stored, it is not audited as in training, or
        outputs are too narrow to read what is stored.
    """
    target = probe.target
    if not (target.has_state and target.train) or probe.limits.unit > HALF:
        return None
    if formula.alpha != 1 or formula.measure != "std" or formula.power != 0.5:
        return None
    try:
        return _observed(Reader(probe, formula))
    except CallError as error:
        return _open(f"a probe raised {error}")


def _open(evidence: str, **facts: Any) -> Finding:
    return Finding("running", None, "open", evidence, facts=facts)


def _observed(reader: Reader) -> Finding:
    """Four updates, and a reading after each."""
    probe, formula = reader.probe, reader.formula
    state = probe.target.initial()
    reads, batches = [reader.read(state)], []
    for level in LEVELS:
        x = _batch(probe, formula, level)
        _, state = reader.step(state, x, train=True)
        reads.append(reader.read(state))
        batches.append(formula.statistics(x))
    known = [each for each in reads if each is not None]
    if len(known) < len(reads):
        return _open("inference is no fixed affine map of each element")
    shared = _sharing(known[-1])
    weights = _weights(known, np.array([shared @ each.mean for each in batches]))
    if np.abs(weights).max() < NEAR:
        text = "stored, but training does not update it"
        return Finding("running", text, "certain", defect=True, facts={"rule": None})
    average = _rule(weights)
    if average is None:
        shown = ", ".join(f"{w:.4g}" for w in weights)
        return _open(
            f"no known rule: weights of the newest batch {shown}", weights=weights
        )
    variances = np.array([shared @ each.variance for each in batches])
    ddof, hidden, factor = _stored_ddof(average, known, variances, formula)
    facts = {
        "rule": average.rule,
        "decay": average.decay,
        "weights": weights,
        "initial": _start(known[0]),
        "stored_ddof": ddof,
        "factor": factor,
        "hidden_start": hidden,
        "updates_in_inference": _moves_in_inference(reader, state),
        "nonfinite": _after_infinity(reader, state),
        "training_uses": _used(reader, state),
    }
    return _said(average, facts)


def _batch(probe: Probe, formula: Formula, level: float) -> Floats:
    x = np.zeros(probe.shape)
    for inside in formula.members:
        spread = probe.rng.uniform(*SPREADS)
        values = probe.rng.normal(size=inside.size)
        # Around a mean that is far from the last one, whatever the draw.
        values = spread * (values - values.mean()) + level + probe.rng.normal()
        x.flat[inside] = values
    return probe.cast(x)


def _sharing(stored: Stored) -> Floats:
    """Averages over the groups that share what is stored, as a matrix."""
    _, cluster = np.unique(np.round(stored.mean, 2), return_inverse=True)
    same = (cluster[:, None] == cluster).astype(float)
    return same / same.sum(axis=1, keepdims=True)


def _weights(reads: list[Stored], means: Floats) -> Floats:
    """Of the newest batch: (m_k − m_{k−1})/(M_k − m_{k−1}), the median over groups."""
    found = []
    for before, after, mean in zip(reads, reads[1:], means, strict=False):
        start = np.where(np.isfinite(before.mean), before.mean, 0.0)
        found.append(np.median((after.mean - start) / (mean - start)))
    return np.array(found)


def _rule(weights: Floats) -> Average | None:
    """The rule whose weights these are."""
    count = np.arange(1, len(weights) + 1)
    tail = float(np.median(weights[1:]))
    second = float(weights[1])
    kept = _round(1 / second - 1) if second > 0 else 0.0
    with np.errstate(all="ignore"):
        debiased = (1 - kept) / (1 - kept**count)
    plain = float(np.median(weights))
    candidates = [
        ("exponential", _round(1 - plain), np.full(len(weights), plain)),
        ("cumulative", None, 1 / count),
        ("first copied", _round(1 - tail), np.where(count == 1, 1, tail)),
        ("debiased", kept, debiased),
    ]
    for rule, decay, expected in candidates:
        if np.abs(weights - expected).max() < NEAR:
            return Average(rule, decay, tuple(map(float, weights)))
    return None


def _round(decay: float) -> float:
    """Four digits, if that is what was meant."""
    near = round(decay, 4)
    return near if abs(near - decay) < 2e-5 else decay


def _start(before: Stored) -> tuple[float, float] | None:
    """Mean and variance before the first update; None if they differ or are NaN."""
    values = [np.median(before.mean), np.median(before.variance)]
    if not np.isfinite(values).all():
        return None
    rounded = [float(round(value, 3)) + 0.0 for value in values]
    return rounded[0], rounded[1]


def _stored_ddof(
    average: Average, reads: list[Stored], variances: Floats, formula: Formula
) -> tuple[int | None, float | None, float]:
    """The ddof of what is stored, what a debiased average started at, and κ.

    κ in v_k = v_{k−1} + r_k (κ V_k − v_{k−1}); of a debiased average κ and the start a
    in (1 − dᵏ) v_k = dᵏ a + κ (1 − d) Σ dᵏ⁻ⁱ V_i, by least squares.
    """
    counts = np.array([len(inside) for inside in formula.members])
    hidden: float | None = None
    if average.rule == "debiased" and average.decay is not None:
        d, rows, left = average.decay, [], []
        total = np.zeros(len(counts))
        for k, (square, after) in enumerate(
            zip(variances, reads[1:], strict=True), start=1
        ):
            total = d * total + (1 - d) * square
            size = np.maximum(np.abs(after.variance), 1e-300)
            rows.append(np.stack([d**k / size, total / size], axis=1))
            left.append((1 - d**k) * after.variance / size)
        solved, *_ = np.linalg.lstsq(
            np.concatenate(rows), np.concatenate(left), rcond=None
        )
        hidden, factor = float(solved[0]), float(solved[1])
    else:
        ratios = [
            (after.variance - (1 - r) * np.nan_to_num(before.variance)) / (r * square)
            for before, after, square, r in zip(
                reads, reads[1:], variances, average.weights, strict=False
            )
        ]
        factor = float(np.median(ratios))
    n = float(np.median(counts))
    options = {0: 1.0, 1: n / max(n - 1, 1)}
    close = [d for d, kappa in options.items() if abs(factor - kappa) < FACTOR]
    return (close[0] if len(close) == 1 else None), hidden, factor


def _moves_in_inference(reader: Reader, state: Any) -> bool:
    """Whether a call in inference changes what is stored."""
    x = reader.probe.cast(100 + reader.probe.normal())
    before = reader.read(state)
    _, after = reader.step(state, x, train=False)
    if after is None or before is None:
        return False
    moved = reader.read(after)
    return moved is None or bool(np.abs(moved.mean - before.mean).max() > 1e-2)


def _after_infinity(reader: Reader, state: Any) -> str:
    """What a batch with one infinity leaves in the state."""
    x = reader.probe.normal()
    x.flat[reader.formula.members[0][0]] = np.inf
    try:
        _, after = reader.step(state, x, train=True)
        found = reader.read(after)
    except CallError:
        return "error"
    finite = found is not None and np.isfinite(found.mean).all()
    return "skip" if finite else "propagate"


def _used(reader: Reader, state: Any) -> str:
    """What a call in training normalizes with, once something is stored."""
    probe = reader.probe
    x = _batch(probe, reader.formula, LEVELS[0])
    y, after = reader.step(state, x, train=True)
    held = {"the batch": reader.formula.reference(x)}
    for word, each in (("after", after), ("before", state)):
        stored = reader.read(each)
        if stored is not None:
            held[f"what is stored {word} the update"] = reader.fixed(x, stored)
    errors = {word: np.abs(y - other).max() for word, other in held.items()}
    best = min(errors, key=lambda word: errors[word])
    return best if errors[best] < 1e-3 * np.abs(y).max() else "not recognized"


def _said(average: Average, facts: dict[str, Any]) -> Finding:
    """For the report."""
    decay, ddof = average.decay, facts["stored_ddof"]
    words = [average.rule if decay is None else f"{average.rule}, keeps {decay:.6g}"]
    if decay is not None:
        words[0] += f" (update rate {1 - decay:.4g})"
    words.append(f"stores ddof {'?' if ddof is None else ddof}")
    start = facts["initial"]
    words.append(f"starts at {'NaN' if start is None else '{:g}, {:g}'.format(*start)}")
    wrong = []
    hidden = facts["hidden_start"]
    if hidden is not None and hidden > 0.5:
        wrong.append(f"VARIANCE DEBIASED FROM A START AT {hidden:.3g}")
    if facts["updates_in_inference"]:
        wrong.append("INFERENCE UPDATES IT")
    if facts["training_uses"] != "the batch":
        wrong.append(f"TRAINING NORMALIZES WITH {facts['training_uses'].upper()}")
    text = "; ".join([", ".join(words), *wrong])
    shown = ", ".join(f"{w:.4g}" for w in average.weights)
    evidence = (
        f"weights of the newest batch {shown}; stored variance {facts['factor']:.5g} "
        f"of the batch's; an infinite input: {facts['nonfinite']}"
    )
    confidence = "strong" if ddof is None else "certain"
    return Finding("running", text, confidence, evidence, bool(wrong), facts)
