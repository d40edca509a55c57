"""Where a layer rounds when its input is a half type."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from numpy_layers import B, W

import normjax as nj

pytestmark = pytest.mark.jax_defaults
SHAPE = (3, 5, 6)
GAIN = np.asarray(W[:6], np.float32)
BIAS = np.asarray(B[:6], np.float32)


def rms(order: str, *, bias: bool = False):
    """An RMS norm in float32 whose gain is met before or after the cast."""
    offset = BIAS if bias else np.zeros_like(BIAS)

    def function(x):
        kind, wide = x.dtype, x.astype(jnp.float32)
        z = wide / jnp.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
        if order == "after":
            return (z * GAIN + offset).astype(kind)
        if order == "before":
            return z.astype(kind) * GAIN.astype(kind) + offset.astype(kind)
        if order == "before, wide gain":
            return (z.astype(kind).astype(jnp.float32) * GAIN + offset).astype(kind)
        if order == "before, wide output":
            return z.astype(kind).astype(jnp.float32) * GAIN + offset
        y = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + jnp.asarray(1e-6, kind))
        return y * GAIN.astype(kind) + offset.astype(kind)

    return function


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "order", ["after", "before", "before, wide gain", "before, wide output"]
)
def test_planted_cast_before_the_gain(order: str, *, bias: bool):
    found = nj.audit(rms(order, bias=bias), SHAPE)
    halves = found["half types"]
    expected = order.split(",")[0]
    assert halves.facts["order"] == dict.fromkeys(("bfloat16", "float16"), expected)
    assert halves.defect == (expected == "before")
    assert ("CASTS BEFORE THE GAIN" in halves.value) == halves.defect
    narrow = "output" not in order
    assert (halves.facts["output"]["float16"] == "float16") == narrow
    assert found.spec is not None
    assert found.spec.affine is not None
    assert found.spec.affine.cast == expected


def test_planted_arithmetic_in_half_types():
    halves = nj.audit(rms("half"), SHAPE)["half types"]
    assert halves.facts["order"] == {"bfloat16": "half", "float16": "half"}
    assert halves.facts["overflow"] == 300
    assert "FLOAT16 SQUARES OVERFLOW at 300" in halves.value
    assert halves.defect


def test_no_order_is_claimed_for_a_gain_of_one():
    def plain(x):
        wide = x.astype(jnp.float32)
        d = wide - wide.mean(-1, keepdims=True)
        return (d / jnp.sqrt((d * d).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)

    halves = nj.audit(plain, SHAPE)["half types"]
    assert (halves.facts["cast"], halves.confidence) == (None, "open")
    assert halves.facts["output"] == {"bfloat16": "bfloat16", "float16": "float16"}
    assert not halves.defect


def test_a_layer_that_refuses_half_types_has_no_such_finding():
    def picky(x):
        if x.dtype != jnp.float32:
            raise TypeError("float32 only")
        return rms("after")(x)

    names = {finding.name for finding in nj.audit(picky, SHAPE).findings}
    assert "half types" not in names
