"""Masks and weights: what is hidden, in which order, and how often entries count."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compare import jit, unit_roundoff, wide
from frames import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import ONE_EACH, bound, by_hand, slope_by_jax

import normjax as nj

few = settings(deadline=None, derandomize=True, max_examples=30)
# Programs: a preset, the kind of its mask, the dtype, and what masked entries become.
PROGRAMS = [
    ("layer_norm", "bool", "float32", "keep"),
    ("layer_norm", "weights", "bfloat16", "zero"),
    ("rms_norm", "weights", "float32", "keep"),
    ("batch_norm", "weights", "float32", "passthrough"),
    ("instance_norm", "int", "float32", "passthrough"),
    ("group_norm", "bool", "float32", "zero"),
]
KINDS: dict[str, Any] = {"bool": bool, "int": np.int32, "weights": np.float32}


class Drawn(NamedTuple):
    """A preset, its spec, mask, values, what weighs the outputs, and the dtype."""

    case: Case
    spec: nj.NormSpec
    mask: np.ndarray
    x: np.ndarray
    bar: np.ndarray
    dtype: str

    @property
    def valid(self) -> np.ndarray:
        return self.mask != 0

    def filled(self, hidden: float) -> jax.Array:
        return jnp.asarray(np.where(self.valid, self.x, hidden), self.dtype)


@st.composite
def inputs(draw: st.DrawFn) -> Drawn:
    name, kind, dtype, output = draw(st.sampled_from(PROGRAMS))
    case = ONE_EACH[name]
    spec = case.spec.replace(masked_output=output)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.0, 0.2, 0.5, 0.9]))
    shape = case.frame.shape
    mask = (rng.random(shape) < density).astype(KINDS[kind])
    if kind == "weights":
        mask = mask * rng.choice([0.25, 1.0, 2.0], shape).astype(np.float32)
    base = draw(st.sampled_from([0.0, 3.0, 1e4] if dtype == "float32" else [0.0, 3.0]))
    x = base + rng.integers(-8, 9, shape) / 4
    return Drawn(case, spec, mask, x, rng.integers(-4, 5, shape).astype(float), dtype)


@jit
def value_and_slope(spec, x, mask, bar):
    """y, and the gradient of Σ bar · y over valid entries."""
    valid = mask.astype(bool)

    def loss(x):
        y = nj.normalize(spec, x, mask=mask)
        return jnp.sum(jnp.where(valid, y * bar.astype(y.dtype), 0)), y

    slope, y = jax.grad(loss, has_aux=True)(x)
    return y, slope


hidden_values = st.sampled_from([np.nan, np.inf, -np.inf, 1e30, 0.0, -7.0])


@few
@given(inputs(), hidden_values)
def test_nothing_depends_on_what_is_hidden(drawn: Drawn, hidden: float):
    """Bit for bit, with fully masked groups as well: value and gradient."""
    spec = drawn.spec
    y, slope = value_and_slope(spec, drawn.filled(1.0), drawn.mask, drawn.bar)
    z, other = value_and_slope(spec, drawn.filled(hidden), drawn.mask, drawn.bar)
    valid = drawn.valid
    assert np.isfinite(y).all()
    assert np.isfinite(slope).all()
    assert np.array_equal(y[valid], z[valid])
    assert np.array_equal(slope, other)
    assert not slope[~valid].any()
    if spec.masked_output == "zero":
        assert not z[~valid].any()
    if spec.masked_output == "passthrough":
        hidden_x = np.where(valid, 0, wide(drawn.filled(hidden)))
        np.testing.assert_array_equal(np.where(valid, 0, wide(z)), hidden_x)


def shuffled(case: Case, rng: np.random.Generator, *arrays: np.ndarray):
    """The entries of every group in another order, the same for all arrays."""
    view, axes = case.frame.view, case.frame.axes
    mapped = [i for i in range(len(view)) if i not in axes]
    order = [*mapped, *axes]
    index = np.arange(np.prod(view)).reshape(view).transpose(order)
    rows = index.reshape(-1, case.frame.group_size)
    moved = rng.permuted(rows, axis=1)
    back = np.empty(rows.size, int)
    back[rows.ravel()] = moved.ravel()
    return [a.ravel()[back].reshape(a.shape) for a in arrays]


def near(drawn: Drawn, actual, expected) -> None:
    """64·u·n beside the largest entry; a narrow result is rounded once more."""
    narrow = 2 * unit_roundoff(drawn.dtype) if drawn.dtype == "bfloat16" else 0.0
    size = np.max(abs(expected), initial=0)
    close = (narrow + bound(drawn.case.frame.group_size)) * size
    assert np.all(abs(actual - expected) <= close)


@few
@given(inputs(), st.integers(0, 99))
def test_the_order_within_a_group_does_not_matter(drawn: Drawn, seed: int):
    """Equivariance: another order in, the same order out; value and gradient.

    J has entries up to 1/√ε, so a slope is compared beside |bar|/S of its group.
    """
    case, rng = drawn.case, np.random.default_rng(seed)
    y, slope = value_and_slope(drawn.spec, drawn.filled(0.0), drawn.mask, drawn.bar)
    x, mask, bar, right, tilt = shuffled(
        case, rng, drawn.x, drawn.mask, drawn.bar, wide(y), wide(slope)
    )
    moved = drawn._replace(x=x, mask=mask, bar=bar)
    y, slope = value_and_slope(drawn.spec, moved.filled(0.0), mask, bar)
    valid = moved.valid
    near(drawn, np.where(valid, wide(y), 0), np.where(valid, right, 0))
    # A nearly constant group has S of about √ε: its largest term sets the scale.
    size = np.max(abs(drawn.bar)) / np.sqrt(1e-5) if valid.any() else 0
    gap = abs(wide(slope) - tilt)
    narrow = 2 * unit_roundoff(drawn.dtype) if drawn.dtype == "bfloat16" else 0.0
    entry = narrow * abs(tilt)
    assert np.all(gap <= entry + bound(case.frame.group_size) * size)


TOTAL = 12


@st.composite
def counted(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Six values, and how often each occurs: 12 times in all."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = rng.multinomial(TOTAL, rng.dirichlet(np.full(6, 0.7)))
    base = draw(st.sampled_from([0.0, 3.0, -1e4]))
    x = base + rng.integers(-8, 9, 6) / 4
    return x.astype(np.float32), counts


# Fields of the spec, and the kind of the weights.
CELLS: list[tuple[dict[str, Any], str]] = [
    ({"divide": "std", "ddof": 1}, "int"),
    ({"divide": "std", "center": False}, "weights"),
    ({"divide": "rms", "center": False, "ddof": 1}, "weights"),
    ({"divide": "l2", "center": False}, "int"),
]


@few
@given(counted(), st.sampled_from(CELLS))
def test_whole_weights_are_repetitions(drawn, cell):
    """An entry of weight w is w equal entries: y, moments, and Σ of their slopes."""
    (x, counts), (fields, kind) = drawn, cell
    spec = nj.NormSpec("[b]", **fields)
    copies = np.repeat(np.arange(6), counts)
    mask = counts.astype(KINDS[kind])
    bar = np.linspace(-1, 1, 6)
    y, slope = value_and_slope(spec, jnp.asarray(x), mask, bar * counts)
    every = np.ones(TOTAL, mask.dtype)
    z, each = value_and_slope(spec, jnp.asarray(x[copies]), every, bar[copies])
    # Where nothing is centred, y has the size of |x|/S, and a slope about the mean is
    # taken from it: κ more.
    size = max(np.max(abs(wide(z))), 1)
    close = bound(TOTAL) * size
    assert np.max(abs(wide(y)[copies] - wide(z))) <= close
    summed = np.bincount(copies, wide(each), 6)
    offset = 0.0 if fields.get("center", True) else size
    close = bound(TOTAL + offset) * size * np.max(counts) / np.sqrt(1e-5)
    assert np.max(abs(wide(slope) - summed)) <= close


@few
@given(inputs())
def test_a_mask_of_ones_is_no_mask(drawn: Drawn):
    """Beside the plain reference in float64, at any offset."""
    case, ones = drawn.case, np.ones_like(drawn.mask)
    x = jnp.asarray(drawn.x, drawn.dtype)
    y, slope = value_and_slope(drawn.spec, x, ones, drawn.bar)
    near(drawn, wide(y), by_hand(case.spec, case.frame, wide(x)))
    right = slope_by_jax(case, wide(x), drawn.bar)
    size = np.max(abs(drawn.bar)) / np.sqrt(1e-5)
    narrow = 2 * unit_roundoff(drawn.dtype) if drawn.dtype == "bfloat16" else 0.0
    close = narrow * abs(right) + bound(case.frame.group_size) * size
    assert np.all(abs(wide(slope) - right) <= close)
