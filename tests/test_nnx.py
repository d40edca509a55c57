"""The nnx layer holds state and calls the functional core, as the linen layer does."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import normjax as nj

pytestmark = pytest.mark.jax_defaults

KEY = jax.random.key(0)
SPECS = {
    "layer": nj.layer_norm(),
    "rms": nj.rms_norm(),
    "batch": nj.batch_norm(),
    "ghost": nj.ghost_batch_norm(ghosts=2),
    "group": nj.group_norm(groups=2),
    "none": nj.layer_norm(affine=None),
}


def draw(shape=(4, 5, 6), scale=3.0, offset=2.0):
    return jax.random.normal(KEY, shape) * scale + offset


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_linen_and_nnx_agree_bit_for_bit(spec):
    x = draw()
    layer = nj.nnx.Norm(spec, x.shape, rngs=nnx.Rngs(0))
    twin = nj.linen.Norm(spec)
    mode = {} if spec.running is None else {"use_running_average": False}
    variables = twin.init(KEY, x, **mode)
    y = nnx.jit(lambda layer, x: layer(x))(layer, x)
    apply = jax.jit(lambda v, x: twin.apply(v, x, mutable=["batch_stats"], **mode))
    z, changed = apply(variables, x)
    np.testing.assert_array_equal(y, z)
    if spec.running is not None:
        for name in ("mean", "var", "count"):
            mine = getattr(layer, name).get_value()
            np.testing.assert_array_equal(mine, changed["batch_stats"][name])


def test_parameters_and_statistics_are_variables_of_their_kind():
    layer = nj.nnx.Norm(nj.batch_norm(), (8, 3), rngs=nnx.Rngs(0))
    assert set(nnx.state(layer, nnx.Param)) == {"scale", "bias"}
    assert set(nnx.state(layer, nnx.BatchStat)) == {"mean", "var", "count"}
    bare = nj.nnx.Norm(nj.rms_norm(), (8, 3))
    assert set(nnx.state(bare)) == {"scale"}


def test_eval_and_train_of_the_model_set_the_mode():
    x = draw((8, 3))
    layer = nj.nnx.Norm(nj.batch_norm(), x.shape)
    layer.eval()
    np.testing.assert_allclose(layer(x), x / np.sqrt(1 + 1e-5), rtol=1e-6)
    assert layer.count.get_value().tolist() == [0, 0, 0]
    layer.train()
    layer(x)
    assert layer.count.get_value().tolist() == [1, 1, 1]
    layer(x, use_running_average=True)
    assert layer.count.get_value().tolist() == [1, 1, 1]


def test_agrees_with_flax_batch_norm():
    x = draw((8, 3))
    ours, theirs = (
        nj.nnx.Norm(nj.batch_norm(), x.shape),
        nnx.BatchNorm(3, rngs=nnx.Rngs(0)),
    )
    # Flax's one-pass variance errs by κ² u log₂ n with κ = 2/3 here.
    np.testing.assert_allclose(ours(x), theirs(x), rtol=0, atol=64 * 2.0**-24 * 8)


def test_gradients_are_those_of_the_core():
    spec, x = nj.layer_norm(), draw()
    layer = nj.nnx.Norm(spec, x.shape)
    found = nnx.grad(lambda layer: jnp.sum(layer(x) ** 3))(layer)
    expected = jax.grad(lambda p: jnp.sum(nj.normalize(spec, x, p) ** 3))(
        nj.init(spec, x.shape)
    )
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name].get_value(), value)


def test_a_clone_updates_by_itself_and_once_for_each_step_under_jit():
    x = draw((8, 3))
    layer = nj.nnx.Norm(nj.batch_norm(), x.shape)
    copy = nnx.clone(layer)
    assert jax.tree.structure(nnx.split(copy)) == jax.tree.structure(nnx.split(layer))

    @nnx.jit
    def step(layer):
        return nnx.value_and_grad(lambda layer: jnp.sum(layer(x) ** 3))(layer)

    step(copy)
    step(copy)
    assert copy.count.get_value().tolist() == [2, 2, 2]
    assert layer.count.get_value().tolist() == [0, 0, 0]


def test_a_mask_and_a_varied_epsilon_reach_the_core():
    spec, x = nj.layer_norm(masked_output="zero"), draw((4, 6))
    mask = jnp.arange(6)[None] < 4
    layer = nj.nnx.Norm(spec, x.shape)
    found = layer(x, mask=mask, epsilon=0.5)
    expected = nj.normalize(spec.replace(epsilon=0.5), x, mask=mask)
    np.testing.assert_array_equal(found, expected)
    assert float(jnp.abs(found[:, 4:]).max()) == 0.0


def test_another_batch_size_is_fine_and_other_channels_are_not():
    layer = nj.nnx.Norm(nj.batch_norm(), (8, 3))
    assert layer(draw((5, 3))).shape == (5, 3)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        layer(draw((5, 4)))


def test_is_right_where_flax_default_layer_norm_is_not():
    x = jnp.array([[1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3]], jnp.float32)
    wrong: Any = nn.LayerNorm().init_with_output(KEY, x)[0]
    right = nj.nnx.Norm(nj.layer_norm(), x.shape)(x)
    assert float(jnp.abs(wrong).max()) > 1000
    np.testing.assert_allclose(right, [[-1.3416, -0.4472, 0.4472, 1.3416]], atol=5e-5)
