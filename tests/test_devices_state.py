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
