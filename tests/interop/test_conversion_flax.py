"""Between Flax models: other names, linen and nnx."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import normjax as nj
from normjax.interop import from_flax

pytestmark = pytest.mark.jax_defaults


def test_linen_to_nnx_and_a_counter_for_a_norm_that_counts():
    """N80: a counter that the source does not have is 0."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.Linear(4, 6, rngs=rngs)])
            self.norm = nj.nnx.Norm(nj.batch_norm(), (3, 6), rngs=rngs)

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.BatchNorm(True)(nn.Dense(6)(x))

    source: Any = Linen().init(jax.random.key(0), jnp.ones((3, 4), jnp.float32))
    names = {"layers/0": "Dense_0", "norm": "BatchNorm_0"}
    model = Model(nnx.Rngs(1))
    state = nnx.state(model)
    found = from_flax(source, nnx.to_pure_dict(state), names=names)
    nnx.replace_by_pure_dict(state, found)
    nnx.update(model, state)
    x = jnp.ones((3, 4), jnp.float32)
    y = model.norm(model.layers[0](x), use_running_average=True)
    expected: Any = Linen().apply(source, x)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert found["norm"]["count"].tolist() == [0] * 6
    kernel = source["params"]["Dense_0"]["kernel"]
    np.testing.assert_array_equal(found["layers"][0]["kernel"], kernel)
    back = from_flax(found, source, names={v: k for k, v in names.items()})
    jax.tree.map(np.testing.assert_array_equal, back, source)


def test_what_flax_does_not_hold_is_refused():
    """N80: stored statistics that are not there, and two arrays of one name."""
    source = {"params": {"norm": {"scale": jnp.ones(3)}}}
    template = {**source, "batch_stats": {"norm": {"mean": jnp.zeros(3)}}}
    with pytest.raises(ValueError, match=r"without a source: norm/mean"):
        from_flax(source, template)
    with pytest.raises(ValueError, match="left over: norm/mean"):
        from_flax(template, source)
    twice = {**source, "batch_stats": {"norm": {"scale": jnp.ones(3)}}}
    with pytest.raises(ValueError, match="two arrays named norm/scale"):
        from_flax(twice, source)
