"""Field cases of statistics under transforms: remat, scan, vmap, jit over a closure.

Functional, linen and nnx. Of the same theme elsewhere: layers at large in
tests/test_linen.py and tests/test_nnx.py, derivatives in test_field_gradients.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit
from flax import nnx
from flax.errors import FlaxError
from kinds import bound

import normjax as nj
from normjax import running

pytestmark = pytest.mark.jax_defaults

KEY = jax.random.key(0)
SPEC = nj.batch_norm(epsilon=1e-3, running=nj.Running(decay=0.9))
X = jnp.array([[1.0], [3.0]])


def apply(layer: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> Any:
    return layer.apply(variables, *args, **kwargs)


class Steps(nn.Module):
    """A batch norm as the body of a scan over batches."""

    @nn.compact
    def __call__(self, carry, x):
        return carry, nj.linen.Norm(SPEC, use_running_average=False)(x)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_n33_rematerialization_updates_once(kind: str):
    """N33: batch mean 1 from 0 at 0.9 is 0.1 after one step, not 0.19."""
    x = jnp.array([[0.0], [2.0]])
    if kind == "nnx":
        layer = nj.nnx.Norm(SPEC, x.shape)

        @nnx.jit
        def step(layer):
            run = nnx.remat(lambda layer, x: layer(x))
            return nnx.grad(lambda layer: jnp.sum(run(layer, x) ** 3))(layer)

        step(layer)
        mean, count = layer.mean.get_value(), layer.count.get_value()
    else:
        layer = nn.remat(nj.linen.Norm)(SPEC, use_running_average=False)
        variables: Any = layer.init(KEY, x)

        def loss(params):
            tree = {**variables, "params": params}
            y, changed = apply(layer, tree, x, mutable=["batch_stats"])
            return jnp.sum(y**3), changed["batch_stats"]

        found = jit(jax.grad(loss, has_aux=True))(variables["params"])[1]
        mean, count = found["mean"], found["count"]
    np.testing.assert_allclose(mean, [0.1], rtol=bound(10))
    assert count.tolist() == [1]


BATCHES = jnp.ones((3, 4, 1)) * jnp.array([1.0, 2.0, 3.0])[:, None, None]


@pytest.mark.parametrize("kind", ["functional", "linen", "nnx"])
def test_n36_statistics_are_carried_through_a_scan(kind: str):
    """N36: means 1, 2, 3 at 0.9 give 0.561 and 0.9³; built outside of the loop."""
    if kind == "linen":
        settings: Any = {"variable_carry": "batch_stats"}
        settings |= {"variable_broadcast": "params", "split_rngs": {"params": False}}
        model = nn.scan(Steps, **settings)()
        variables = Steps().init(KEY, 0.0, BATCHES[0])
        changed = apply(model, variables, 0.0, BATCHES, mutable=["batch_stats"])[1]
        found = changed["batch_stats"]["Norm_0"]
        mean, variance = found["mean"], found["var"]
    elif kind == "nnx":
        layer = nj.nnx.Norm(SPEC, (4, 1))
        axes = (nnx.Carry, 0)
        scan = nnx.scan(lambda layer, x: (layer, layer(x)), in_axes=axes, out_axes=axes)
        layer, _ = scan(layer, BATCHES)
        mean, variance = layer.mean.get_value(), layer.var.get_value()
    else:

        def step(state, x):
            return running.update(SPEC, state, nj.moments(SPEC, x)), None

        start = running.init(SPEC, (4, 1))
        state, _ = jit(partial(jax.lax.scan, step))(start, BATCHES)
        mean, variance = state.mean, state.variance
    np.testing.assert_allclose(mean, [0.561], rtol=bound(10))
    np.testing.assert_allclose(variance, [0.729], rtol=bound(10))


def test_n37_lanes_of_vmap():
    """N37: each lane has its own state, or they are merged: no tracer leaks."""
    lanes = jnp.array([[[1.0], [1.0]], [[3.0], [5.0]]])
    start = running.init(SPEC, X.shape)

    @jit
    @jax.vmap
    def lane(x):
        return nj.normalize(SPEC, x), running.update(SPEC, start, nj.moments(SPEC, x))

    y, states = lane(lanes)
    assert (y.shape, states.mean.shape) == (lanes.shape, (2, 1))
    np.testing.assert_allclose(states.mean[:, 0], [0.1, 0.4], rtol=bound(10))
    layer = nj.nnx.Norm(SPEC, X.shape)
    with pytest.raises(ValueError, match="output was batched"):
        nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(layer, lanes)
    layer = nj.nnx.Norm(SPEC, X.shape)
    each = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))
    layer.eval()  # nothing is written, so one module serves all lanes
    np.testing.assert_allclose(each(layer, lanes), lanes / np.sqrt(1.001), rtol=1e-6)


def test_n37_a_closure_under_jit_is_an_error_and_nothing_leaks():
    """N37: jax.jit over a module that updates raises, and leaves the module usable."""
    layer = nj.nnx.Norm(SPEC, X.shape)
    with pytest.raises(FlaxError, match="different trace level"):
        jax.jit(lambda x: layer(x))(X)
    assert layer.mean.get_value().tolist() == [0.0]  # no tracer, and no update
    layer(X)
    np.testing.assert_allclose(layer.mean.get_value(), [0.2], rtol=bound(10))
