"""Groups that are hard to normalize, and how far a layer is from exact on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import normjax as nj
from normjax.verify import normwise, precision_bound
from normjax.verify.oracles import numpy_reference
from normjax.verify.tolerance import unit_roundoff

ALGORITHMS = ("shifted", "two_pass", "one_pass")
APPLICATIONS = ("centered", "folded")
DTYPES = ("float32", "float16", "bfloat16")
SIZES = (3, 64, 1000, 4096)
COMBINED = [(a, b) for a in ALGORITHMS for b in APPLICATIONS]
U = 2.0**-24


def layer(algorithm="shifted", apply="centered", accumulate="float32", **fields):
    precision = nj.Precision(algorithm=algorithm, apply=apply, accumulate=accumulate)
    return nj.layer_norm(affine=None, precision=precision, **fields)


def offsets(dtype) -> list[float]:
    """κ from 1 to min(10⁶, 0.1/u), of the input's own unit roundoff."""
    return list(np.geomspace(1, min(1e6, 0.1 / unit_roundoff(dtype)), 7))


def groups(n: int, dtype, kappas, seed: int = 0) -> np.ndarray:
    """Rows of n: five shapes of distribution at each κ, rounded to the dtype.

    The last is nearly constant but for its first element, at (almost) √(n−1) standard
    deviations: the worst one to subtract.
    """
    random = np.random.default_rng(seed)
    outlier = 1e-3 * random.normal(size=(4, n))
    outlier[:, 0] = 1
    shapes = np.concatenate([
        random.normal(size=(8, n)),
        random.uniform(-1, 1, size=(4, n)),
        random.exponential(size=(4, n)),
        np.resize([-1.0, 1.0], (1, n)),
        outlier,
    ])  # fmt: skip
    shapes -= shapes.mean(1, keepdims=True)
    shapes /= shapes.std(1, keepdims=True)
    rows = np.concatenate([shapes + kappa for kappa in kappas])
    return np.asarray(jnp.asarray(rows, dtype).astype(jnp.float64))


class Measured(NamedTuple):
    """Errors of groups; their bounds, and those for the element that was subtracted."""

    errors: np.ndarray
    bounds: np.ndarray
    anchored: np.ndarray

    def held(self) -> bool:
        """Whether every error is under both; a bound of inf holds for anything."""
        return bool(
            np.all((self.errors <= self.bounds) & (self.errors <= self.anchored))
        )


def measure(
    spec: nj.NormSpec,
    rows: np.ndarray,
    dtype,
    apply: Callable[..., np.ndarray] | None = None,
    judged_by: nj.NormSpec | None = None,
) -> Measured:
    """Errors of a spec on rows, one group each, against float64.

    Args:
        spec: that is applied to the last axis, or as ``apply`` says.
        rows: values that the dtype holds exactly.
        dtype: of the input.
        apply: another implementation: spec and rows to rows.
        judged_by: the spec whose bound is taken, if another.
    """
    found = (apply or normalized)(spec, jnp.asarray(rows, dtype))
    expected = reference(spec, rows)
    mean, std = moments(rows)
    judge, n = judged_by or spec, rows.shape[1]
    errors, bounds, anchored = [], [], []
    for i in np.flatnonzero(std):
        errors.append(normwise(found[i : i + 1], expected[i : i + 1]))
        kappa, t = abs(mean[i]) / std[i], abs(rows[i, 0] - mean[i]) / std[i]
        bounds.append(precision_bound(judge, dtype, n, kappa, std=std[i]).value)
        known = precision_bound(judge, dtype, n, kappa, std=std[i], anchor=t)
        anchored.append(known.value)
    return Measured(np.array(errors), np.array(bounds), np.array(anchored))


def normalized(spec: nj.NormSpec, x) -> np.ndarray:
    return np.asarray(nj.normalize(spec, x).astype(jnp.float64))


def reference(spec: nj.NormSpec, rows: np.ndarray) -> np.ndarray:
    return numpy_reference(
        rows,
        (1,),
        epsilon=spec.epsilon,
        center=spec.center,
        divide=spec.divide,
        placement=spec.epsilon_placement,
        ddof=spec.ddof,
    )


def moments(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and std of each row, about its first element."""
    shifted = rows - rows[:, :1]
    rest = shifted.mean(1)
    return rows[:, 0] + rest, (shifted - rest[:, None]).std(1)
