from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from numpy_layers import normalizer

import normjax as nj
from normjax.auditing import Equivalence

pytestmark = pytest.mark.jax_defaults


def right(x: jnp.ndarray) -> jnp.ndarray:
    """A layer norm that shares no code with the library's."""
    wide = x.astype(jnp.float32)
    d = wide - wide.mean(-1, keepdims=True)
    return (d / jnp.sqrt((d * d).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


SPEC = nj.layer_norm(affine=None)


def compared(first, second, shape=(4, 6), **options) -> Equivalence:
    return nj.equivalent(first, second, shape, **options)


def test_a_right_layer_and_its_spec_are_the_same():
    found = compared(right, SPEC)
    assert (found.same, found.property, found.first) == (True, None, None)
    assert found.largest.ok
    kinds = [gap.kind for gap in found.gaps]
    assert len(kinds) == len(set(kinds)) >= 9
    assert {"large offset", "near zero variance", "float16", "bfloat16"} <= set(kinds)


@pytest.mark.parametrize(
    ("change", "property_", "first", "second"),
    [
        ({"epsilon": 1e-6}, "epsilon", "1e-05 (inside the root)",
         "1e-06 (inside the root)"),
        ({"epsilon_placement": "outside_sqrt"}, "epsilon", "1e-05 (inside the root)",
         "1e-05 (outside the root)"),
        ({"ddof": 1}, "ddof", "0", "1"),
        ({"center": False}, "formula", "y = w (x − mean) / √(var + eps) + b",
         "y = w x / √(var + eps) + b"),
        ({"pattern": "[b] c"}, "grouping",
         "axis 0 kept | axis 1 reduced; examples independent",
         "axis 0 reduced | axis 1 kept; examples coupled"),
        ({"affine": "c"}, "affine",
         "gain none, or at its initial value; bias none, or at its initial value",
         "gain along axis 1; bias along axis 1"),
    ],
)  # fmt: skip
def test_one_changed_property_is_named(change, property_, first, second):
    found = compared(right, SPEC.replace(**change))
    assert not found.same
    assert (found.property, found.first, found.second) == (property_, first, second)


def test_arithmetic_that_cancels_is_seen_where_it_cancels():
    def one_pass(x):
        x = x.astype(jnp.float32)
        m = x.mean(-1, keepdims=True)
        v = jnp.maximum((x * x).mean(-1, keepdims=True) - m * m, 0)
        return (x - m) / jnp.sqrt(v + 1e-5)

    found = compared(one_pass, right)
    assert not found.same
    assert found.largest.kind == "large offset"
    assert found.largest.difference > 1e-2
    assert {gap.kind for gap in found.gaps if gap.ok} >= {"normal", "zeros", "large"}
    one, other = found.largest.values
    place = np.unravel_index(0, (4, 6))
    assert len(found.largest.index) == len(place)
    assert abs(one - other) > 1e-2


def test_an_error_of_one_of_the_two_is_a_difference():
    def picky(x):
        if x.dtype == jnp.bfloat16:
            raise TypeError("no bfloat16")
        return right(x)

    found = compared(picky, right)
    assert (found.same, found.largest.kind) == (False, "bfloat16")
    assert found.first == "TypeError: no bfloat16"
    assert compared(picky, picky).same


def test_nan_on_one_side_only_is_a_difference():
    def guarded(v, _):
        return np.where(v == 0, 1, np.sqrt(v))

    def bare(v, _):
        return np.sqrt(v)

    first = normalizer(denominator=guarded)
    second = normalizer(denominator=bare)
    found = compared(first, second)
    bad = {gap.kind for gap in found.gaps if not gap.ok}
    assert bad == {"constant", "zeros"}
    assert found.largest.difference == np.inf


def test_layers_with_parameters_are_compared_at_their_start():
    assert compared(linen.RMSNorm(), nj.rms_norm(epsilon=1e-6)).same
