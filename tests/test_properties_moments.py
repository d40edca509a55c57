"""Moments of any partition, in any order and nesting, are the moments of the whole."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compare import jit, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import bound

import normjax as nj
from normjax.statistics import Moments, merge

few = settings(deadline=None, derandomize=True, max_examples=50)
SIZE = 8  # of the whole: one program for each size of a part, in each cell
SPEC = nj.batch_norm()
find_moments = jit(nj.moments)
find_merged = jit(merge)
CELLS = [
    ("float32", "none"),
    ("float32", "floats"),
    ("bfloat16", "mask"),
    ("float64", "counts"),
]
# Offsets at which a dtype still resolves steps of a quarter.
OFFSETS = {
    "bfloat16": [0.0, 16.0],
    "float32": [0.0, -100.0, 1e4, 1e6],
    "float64": [0.0, 1e6, -1e12],
}


class Whole(NamedTuple):
    """Values and weights (None: all one), and where they are cut."""

    x: jax.Array
    weights: np.ndarray | None
    cuts: list[int]
    order: list[int]


@st.composite
def wholes(draw: st.DrawFn) -> Whole:
    dtype, kind = draw(st.sampled_from(CELLS))
    offset = draw(st.sampled_from(OFFSETS[dtype]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    steps = rng.integers(-8, 9, (SIZE, 2)) / 4
    cuts = sorted(draw(st.lists(st.integers(0, SIZE), max_size=4)))
    weights = {
        "none": None,
        "mask": rng.integers(0, 2, SIZE).astype(bool),
        "counts": rng.integers(0, 4, SIZE).astype(np.int32),
        "floats": rng.choice([0.0, 0.25, 0.5, 1.0, 3.5], SIZE).astype(np.float32),
    }[kind]
    order = draw(st.permutations(range(len(cuts) + 1)))
    return Whole(jnp.asarray(steps + offset, dtype), weights, cuts, order)


def exact(whole: Whole) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Count, an element, mean − element, and M2, about that element in extended."""
    x = np.asarray(wide(whole.x), np.longdouble)
    w = np.ones(SIZE) if whole.weights is None else whole.weights.astype(np.float64)
    count = w.sum()
    d = x - x[0]
    rest = (w[:, None] * d).sum(0) / (count or 1)
    m2 = (w[:, None] * (d - rest) ** 2).sum(0)
    return np.full(2, count), x[0], rest, m2


def parts(whole: Whole) -> list[Moments]:
    pieces = np.split(np.arange(SIZE), whole.cuts)
    x, w = whole.x, whole.weights
    found = [
        find_moments(SPEC, x[piece], None if w is None else w[piece])
        for piece in pieces
    ]
    return [found[i] for i in whole.order]


def stack(found: list[Moments]) -> Moments:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *found)


def check(found: Moments, whole: Whole) -> None:
    """64·u·n, relative for M2, in standard deviations for the mean pair."""
    count, anchor, rest, m2 = exact(whole)
    dtype = found.mean.dtype
    assert dtype == (jnp.float64 if whole.x.dtype == jnp.float64 else jnp.float32)
    close = bound(SIZE, dtype)
    assert np.array_equal(found.count, count)
    assert np.all(abs(wide(found.m2) - m2) <= close * m2)
    if count[0] == 0:
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(found))
        return
    gap = (wide(found.mean) - anchor) + wide(found.mean_low) - rest
    assert np.all(abs(gap) <= close * np.sqrt(m2 / count))


@few
@given(wholes())
def test_the_whole(whole: Whole):
    check(find_moments(SPEC, whole.x, whole.weights), whole)


@few
@given(wholes())
def test_any_partition_in_any_order_is_the_whole(whole: Whole):
    check(find_merged(stack(parts(whole))), whole)


@few
@given(wholes())
def test_one_part_after_the_other_is_the_whole(whole: Whole):
    """A running merge of two, empty parts included, in any order."""
    found = parts(whole)
    total = found[0]
    for part in found[1:]:
        total = find_merged(stack([total, part]))
    check(total, whole)


@few
@given(wholes(), st.data())
def test_merging_in_two_levels_is_merging_at_once(whole: Whole, data: st.DataObject):
    """Devices first, then hosts: any split of the parts in two."""
    found = parts(whole)
    cut = data.draw(st.integers(0, len(found)))
    sides = [side for side in (found[:cut], found[cut:]) if side]
    check(find_merged(stack([find_merged(stack(side)) for side in sides])), whole)


@few
@given(wholes())
def test_normalizing_with_merged_moments_is_normalizing(whole: Whole):
    """The law of MATH.md §5, for the valid entries of a batch of any cut."""
    merged = find_merged(stack(parts(whole)))
    valid = np.ones(SIZE, bool) if whole.weights is None else whole.weights != 0
    spec = SPEC.replace(precision=nj.Precision(output=str(merged.mean.dtype)))
    normalize = jit(nj.normalize)
    own = wide(normalize(spec, whole.x, mask=whole.weights))[valid]
    given = wide(normalize(spec, whole.x, moments=merged))[valid]
    assert np.all(abs(given - own) <= bound(SIZE, merged.mean.dtype))
