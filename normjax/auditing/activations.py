"""Functions of each element that stand alone or behind a norm: φ(w z + b)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
from scipy.special import erf

from normjax.auditing.formula import Floats
from normjax.auditing.probing import Probe

PROBES = 24
ACCEPTED = 3e-3
STEPS = 60


def _sigmoid(z: Floats) -> Floats:
    return 0.5 * (1 + np.tanh(z / 2))


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "relu": lambda z: np.maximum(z, 0),
    "leaky relu": lambda z: np.where(z > 0, z, 0.01 * z),
    "gelu": lambda z: z * 0.5 * (1 + erf(z / math.sqrt(2))),
    "gelu (tanh form)": lambda z: (
        z * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    ),
    "silu": lambda z: z * _sigmoid(z),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
}


def fit_tanh(probe: Probe) -> tuple[float, float, bool] | None:
    """α of y = w tanh(αx) + b, the misfit, and whether w = b = α = 1/2: a sigmoid.

    With t = tanh(α/4), z(1/2)/z(1/4) = 2/(1 + t²); the gain is read at x = 1.
    """
    signs = np.where(probe.rng.random(probe.shape) < 0.5, -1.0, 1.0)
    # α is read where tanh(αx) neither is a straight line nor has come to its end.
    for exponent in (0, -3, 3, -6, 6):
        unit = 2.0**exponent
        found = _tanh_at(probe, unit * signs)
        if found is not None:
            alpha, misfit, half = found
            return alpha / unit, misfit, half and exponent == 0
    return None


def _tanh_at(probe: Probe, x: Floats) -> tuple[float, float, bool] | None:
    """The same in units of |x|."""
    signs = np.sign(x)
    parts = []
    for size in (0.25, 0.5, 1.0):
        plus, minus = probe(size * x), probe(-size * x)
        parts.append((signs * (plus - minus) / 2, (plus + minus) / 2))
    (low, even), (middle, even_middle), (high, even_high) = parts
    largest = np.abs(high).max()
    allowed = 10 * probe.limits.fit * largest
    if not largest or np.ptp([even, even_middle, even_high], axis=0).max() > allowed:
        return None
    with np.errstate(all="ignore"):
        tangent = np.sqrt(2 / np.median(middle / low) - 1)
    if not 0.05 < tangent < 0.8:
        return None
    alpha = 4 * np.arctanh(tangent)
    gains = high / np.tanh(alpha)
    predicted = [gains * np.tanh(alpha * size) for size in (0.25, 0.5)]
    misfit = max(
        float(np.abs(value - z).max())
        for value, z in zip(predicted, (low, middle), strict=True)
    )
    if misfit > allowed:
        return None
    known = (float(alpha), float(np.median(gains)), float(np.median(even)))
    half = max(abs(value - 0.5) for value in known)
    return known[0], misfit / largest, half < 30 * probe.limits.fit


def fit_activation(
    probe: Probe, inner: Callable[[Floats], Floats]
) -> tuple[str, float] | None:
    """The φ of y = φ(w z + b), z = inner(x), with w and b free for each element.

    Returns:
        Its name and the rms misfit, or None if it is none of ``ACTIVATIONS``.
    """
    inputs = [
        probe.cast(2.0 ** probe.rng.integers(0, 3) * (probe.normal() + 0.3))
        for _ in range(PROBES)
    ]
    z = np.stack([inner(x) for x in inputs])
    y = np.stack([probe(x) for x in inputs])
    size = np.sqrt(np.mean(y**2))
    misfits = {name: _misfit(phi, z, y) / size for name, phi in ACTIVATIONS.items()}
    best = min(misfits, key=lambda name: misfits[name])
    return (best, float(misfits[best])) if misfits[best] < ACCEPTED else None


def _misfit(phi: Callable[[Floats], Floats], z: Floats, y: Floats) -> float:
    """Damped Gauss-Newton in (w, b) for every element at once, from several starts."""
    best = np.full(y.shape[1:], np.inf)
    for gain, offset in itertools.product((1.0, -1.0), (0.0, -1.0, 1.0)):
        w, b = np.full(y.shape[1:], gain), np.full(y.shape[1:], offset)
        damping = np.full(y.shape[1:], 1e-3)
        error = np.sum((phi(w * z + b) - y) ** 2, axis=0)
        for _ in range(STEPS):
            inner, h = w * z + b, 1e-6
            left = phi(inner) - y
            slope = (phi(inner + h) - phi(inner - h)) / (2 * h)
            jw, jb = slope * z, slope
            aa, bb = np.sum(jw * jw, 0), np.sum(jb * jb, 0)
            ab, ga, gb = np.sum(jw * jb, 0), np.sum(jw * left, 0), np.sum(jb * left, 0)
            aa, bb = aa * (1 + damping) + 1e-12, bb * (1 + damping) + 1e-12
            det = aa * bb - ab * ab
            dw, db = (bb * ga - ab * gb) / det, (aa * gb - ab * ga) / det
            trial = np.sum((phi((w - dw) * z + (b - db)) - y) ** 2, axis=0)
            better = trial < error
            w, b = np.where(better, w - dw, w), np.where(better, b - db, b)
            error = np.where(better, trial, error)
            damping = np.clip(np.where(better, damping / 5, damping * 5), 1e-9, 1e9)
        best = np.minimum(best, error)
    return float(np.sqrt(np.mean(best) / len(y)))
