"""The examples train, in every placement that they can be given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax_layers import KEY, draw

import normjax as nj
from normjax.layers import examples

pytestmark = pytest.mark.jax_defaults

LENGTHS = jnp.array([[2], [6], [5], [4]] * 4)
CASES = {
    "mlp": (examples.ResidualMLP(1, 16, placement="sandwich"), draw((16, 5)), ()),
    "cnn": (examples.ResidualCNN(1, (4, 8)), draw((16, 8, 8, 1)), (False,)),
    "encoder": (
        examples.Encoder(1, 16, qk_norm=nj.qk_norm(), norm=nj.rms_norm()),
        draw((16, 6, 4)),
        (jnp.arange(6) < LENGTHS,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_example_fits_a_rule_of_its_input(name):
    model, x, call = CASES[name]
    target = jnp.sin(x.reshape(16, -1)[:, :1])
    variables: Any = jax.jit(lambda key: model.init(key, x, *call))(KEY)
    optimizer = optax.adam(1e-2)

    def loss(params, kept):
        held = {**kept, "params": params}
        y, changed = model.apply(held, x, *call, mutable=["batch_stats"])
        return jnp.mean((y - target) ** 2), changed

    @jax.jit
    def step(params, kept, state):
        (value, kept), slopes = jax.value_and_grad(loss, has_aux=True)(params, kept)
        updates, state = optimizer.update(slopes, state)
        return optax.apply_updates(params, updates), kept, state, value

    params, values = variables.pop("params"), []
    kept, state = variables, optimizer.init(params)
    for _ in range(40):
        params, kept, state, value = step(params, kept, state)
        values.append(float(value))
    assert np.isfinite(values).all()
    assert values[-1] < values[0] / 4
    if name == "cnn":
        assert set(kept["batch_stats"]) == {"Residual_0", "Residual_1", "Norm_0"}
        y = model.apply({"params": params, **kept}, x, True)
        assert y.shape == (16, 1)
