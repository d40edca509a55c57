"""Stored statistics across devices: the same on each, and those of one device."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from meshes import SPLIT, WHOLE, close, draw, named, needs_devices
from meshes import mesh as mesh

import normjax as nj

pytestmark = [pytest.mark.jax_defaults, needs_devices]


def test_running_statistics_are_those_of_one_device(mesh):
    spec, x = nj.batch_norm(running=nj.Running(decay=0.9, ddof=1)), draw(offset=5.0)
    state = nj.running.init(spec, x.shape)
    expected = nj.running.update(spec, state, nj.moments(spec, x))

    def step(state, x):
        moments = nj.moments(named(spec), x)
        return nj.running.update(named(spec), state, moments)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=WHOLE)
    found = jax.jit(mapped)(state, x)
    close((found.mean, found.variance), (expected.mean, expected.variance), n=64)
    np.testing.assert_array_equal(found.count, expected.count)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_flax_layers(mesh, kind: str):
    """Made on one device, used on eight; the state is the same everywhere."""
    x, spec = draw(offset=5.0), nj.batch_norm()
    one = nj.linen.Norm(spec, use_running_average=False)
    variables = one.init(jax.random.key(0), x)
    y, state = one.apply(variables, x, mutable=["batch_stats"])
    if kind == "linen":
        layer = nj.linen.Norm(named(spec), use_running_average=False)
        assert jax.tree.structure(layer.init(jax.random.key(0), x)) == (
            jax.tree.structure(variables)
        )

        step = partial(layer.apply, mutable=["batch_stats"])
    else:
        from flax import nnx

        graph, variables = nnx.split(nj.nnx.Norm(named(spec), x.shape))

        def graph_step(variables, x):
            layer = nnx.merge(graph, variables)
            y = layer(x)
            kept = {n: getattr(layer, n).get_value() for n in ("mean", "var", "count")}
            return y, {"batch_stats": kept}

        step = graph_step

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=(SPLIT, WHOLE)
    )
    found, moved = jax.jit(mapped)(variables, x)
    close(found, y, n=64, kappa=5.0)
    close(moved, state, n=64)


LAYERS = {
    "norm": lambda: nj.linen.Norm(nj.batch_norm(), use_running_average=False),
    "mixture": lambda: nj.linen.MixtureNorm(nj.mixture.switchable_norm(), False),
    "batch": lambda: nj.linen.BatchNorm(use_running_average=False),
    "layer": lambda: nj.linen.LayerNorm(),
    "group": lambda: nj.linen.GroupNorm(num_groups=3),
}


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("batch", "group")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in LAYERS
    ],
)
def test_a_mesh_with_explicit_axes_is_no_different(name: str):
    """``jax.make_mesh`` makes such axes; the output is sharded as the input."""
    x, layer = draw((64, 2, 6), offset=5.0), LAYERS[name]()
    mask = jax.numpy.arange(2)[None, :, None] < 1
    variables = layer.init(jax.random.key(0), x)

    @jax.jit
    def step(variables, x):
        def loss(x):
            y, changed = layer.apply(variables, x, mask=mask, mutable=["batch_stats"])
            return (y**3).sum(), (y, changed)

        slope, (y, changed) = jax.grad(loss, has_aux=True)(x)
        return slope, y, changed

    expected = step(variables, x)
    explicit = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((8,), ("i",), axis_types=explicit)):
        found = step(variables, jax.device_put(x, SPLIT))
        assert jax.typeof(found[1]).sharding.spec[0] == "i"
        found = jax.device_get(found)
    close(found, jax.device_get(expected), n=128, kappa=5.0)


def test_nnx_on_a_mesh_with_explicit_axes():
    from flax import nnx

    x = draw((64, 6), offset=5.0)
    alone = nj.nnx.BatchNorm(6, rngs=nnx.Rngs(0))
    expected = alone(x), alone.var.get_value()
    explicit = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((8,), ("i",), axis_types=explicit)):
        layer = nj.nnx.BatchNorm(6, rngs=nnx.Rngs(0))
        y = nnx.jit(lambda layer, x: layer(x))(layer, jax.device_put(x, SPLIT))
        found = jax.device_get((y, layer.var.get_value()))
    close(found, jax.device_get(expected), n=64, kappa=5.0)
