"""The whole family beside NumPy: what the field cases and the properties compare with.

A field case is one reported input; its kind is every preset that could fail likewise.
``ONE_EACH`` has one small shape for each preset, ``CENTERED`` every one that centres.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compare import FACTOR, jit, measure, unit_roundoff, wide
from frames import FRAMES, Case, Frame

import normjax as nj
from normjax.verify.oracles import numpy_reference

# The same map as another preset: what differs is whose scale, bias and statistics.
ALIKE = {"adaptive_layer_norm", "adaptive_instance_norm", "batch_renorm"}
CASES = {
    name: Case(f"family {name}", frame)
    for name, frame in FRAMES.items()
    if frame.preset.__name__ not in ALIKE
}
ONE_EACH = {
    case.frame.preset.__name__: case for case in reversed([*CASES.values()])
}  # of a preset's frames the first
DIVIDING = {name: case for name, case in ONE_EACH.items() if case.spec.divide != "none"}
CENTERED = {
    name: case
    for name, case in CASES.items()
    if case.spec.center and case.spec.divide != "none"
}
VECTOR = np.array([1.0, 2.0, 3.0, 4.0])
STANDARD = np.array([-1.5, -0.5, 0.5, 1.5]) / np.sqrt(1.25 + 1e-5)


def bound(n: float, dtype: Any = np.float32) -> float:
    """64·u·n: a sum of n terms and a handful of operations, as in ``compare``."""
    return FACTOR * unit_roundoff(dtype) * n


def random(case: Case, size: float = 1.0, purpose: str = "x") -> np.ndarray:
    return case.rng(purpose).normal(size=case.frame.shape) * size


def steps(case: Case, base: float, step: float, dtype: str) -> np.ndarray:
    """base + step · {0, 1, 2, 3}, shuffled, all of them values of the dtype."""
    count = int(np.prod(case.frame.shape))
    k = case.rng("steps").permutation(np.arange(count) % 4).reshape(case.frame.shape)
    x = base + step * k
    assert np.array_equal(x, wide(jnp.asarray(x, dtype))), "not a value of the dtype"
    return x


def by_hand(spec: nj.NormSpec, frame: Frame, x, mask=None) -> np.ndarray:
    """x̂ in NumPy float64, in x's shape; NaN where masked."""
    found = numpy_reference(
        wide(x).reshape(frame.view),
        frame.axes,
        epsilon=spec.epsilon,
        center=spec.center,
        divide=spec.divide,
        placement=spec.epsilon_placement,
        ddof=spec.ddof,
        mask=mask,
    )
    return found.reshape(frame.shape)


@cache
def _slope(case: Case):
    def slope(x, bar):
        return jax.vjp(case.oracle, x)[1](bar)[0]

    return jit(slope)


def slope_by_jax(case: Case, x, bar) -> np.ndarray:
    """The gradient of Σ bar · x̂ by the plain reference in float64."""
    with jax.enable_x64(True):
        found = _slope(case)(jnp.asarray(wide(x)), jnp.asarray(wide(bar)))
        return np.asarray(found)


@jit
def forward_and_backward(spec: nj.NormSpec, x, bar, **passed):
    """y, and the gradient of Σ bar · y by x."""
    y, pull = jax.vjp(partial(nj.normalize, spec, **passed), x)
    return y, *pull(bar.astype(y.dtype))


def stored(expected: np.ndarray, dtype: Any) -> float:
    """Normwise error of rounding each entry to a dtype, its subnormals included.

    A group as small as the subnormals has no digits: the caller keeps away from that.
    """
    size = np.linalg.norm(expected) / np.sqrt(expected.size)
    tiny = float(jnp.finfo(dtype).smallest_subnormal) / 2
    return 2 * unit_roundoff(dtype) + tiny / max(size, 1e-300)


def agree(case: Case, x, actual, expected, output: Any, n: float = 1.0) -> None:
    """Normwise for each group: rounding to the output, and 64·u·(n·size) before it.

    u is float32's or the output's, whichever is finer; κ does not count.
    """
    narrow = jnp.finfo(output).bits < 32
    working = np.float32 if narrow else output
    entry = stored(expected, output) if narrow else 0.0
    found = measure(
        case,
        np.asarray(x, np.float64)[None],
        np.asarray(wide(actual))[None],
        np.asarray(expected)[None],
        working,
        entry=entry,
        any_offset=True,
    )
    found.check(FACTOR * n)
