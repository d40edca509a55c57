"""The linen layer holds state and calls the functional core, under every transform."""

from __future__ import annotations

import re
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj

pytestmark = pytest.mark.jax_defaults

KEY = jax.random.key(0)
STATELESS = {
    "layer": nj.layer_norm(),
    "rms": nj.rms_norm(),
    "group": nj.group_norm(groups=2),
    "instance": nj.instance_norm(),
    "none": nj.layer_norm(affine=None),
    "1+w": nj.rms_norm(affine=nj.Affine("c", bias=False, stored="1+w")),
}


def draw(shape=(4, 5, 6), scale=3.0, offset=2.0):
    return jax.random.normal(KEY, shape) * scale + offset


@pytest.mark.parametrize("spec", STATELESS.values(), ids=STATELESS)
def test_a_stateless_layer_is_the_functional_core(spec):
    x = draw()
    layer = nj.linen.Norm(spec)
    variables = layer.init(KEY, x)
    params = nj.init(spec, x.shape)
    assert jax.tree.map(jnp.shape, variables.get("params", {})) == jax.tree.map(
        jnp.shape, params
    )
    assert "batch_stats" not in variables
    np.testing.assert_array_equal(
        layer.apply(variables, x), nj.normalize(spec, x, params)
    )


def test_training_normalizes_with_the_batch_and_updates_once():
    spec, x = nj.batch_norm(), draw((8, 3))
    layer = nj.linen.Norm(spec, use_running_average=False)
    variables = layer.init(KEY, x)
    assert variables["batch_stats"]["count"].tolist() == [0, 0, 0]
    y, changed = layer.apply(variables, x, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, nj.normalize(spec, x, variables["params"]))
    fresh = nj.running.init(spec, x.shape)
    state = nj.running.update(spec, fresh, nj.moments(spec, x))
    found = changed["batch_stats"]
    np.testing.assert_array_equal(found["mean"], state.mean)
    np.testing.assert_array_equal(found["var"], state.variance)
    assert found["count"].tolist() == [1, 1, 1]


def test_inference_uses_the_stored_statistics_and_changes_nothing():
    spec, x = nj.batch_norm(), draw((8, 3))
    layer = nj.linen.Norm(spec)
    variables = layer.init(KEY, x, use_running_average=True)
    y = layer.apply(variables, x, use_running_average=True)
    np.testing.assert_allclose(y, x / np.sqrt(1 + 1e-5), rtol=1e-6)
    _, changed = layer.apply(
        variables, x, use_running_average=True, mutable=["batch_stats"]
    )
    np.testing.assert_array_equal(changed["batch_stats"]["count"], 0)


def test_agrees_with_flax_where_flax_is_right():
    x = draw((8, 3))
    ours = nj.linen.Norm(nj.batch_norm(), use_running_average=False)
    theirs = nn.BatchNorm(use_running_average=False)
    variables = theirs.init(KEY, x)
    y, state = cast("Any", theirs.apply(variables, x, mutable=["batch_stats"]))
    z, mine = ours.apply(ours.init(KEY, x), x, mutable=["batch_stats"])
    # Flax's one-pass variance errs by κ² u log₂ n with κ = 2/3 here.
    np.testing.assert_allclose(z, y, rtol=0, atol=64 * 2.0**-24 * 8)
    for name in ("mean", "var"):
        np.testing.assert_allclose(
            mine["batch_stats"][name],
            state["batch_stats"][name],
            rtol=64 * 2.0**-24 * 8,
        )


def test_is_right_where_flax_default_layer_norm_is_not():
    """N01: ±1500 where ±1.34 is right."""
    x = jnp.array([[1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3]], jnp.float32)
    wrong: Any = nn.LayerNorm().init_with_output(KEY, x)[0]
    layer = nj.linen.Norm(nj.layer_norm())
    right = layer.apply(layer.init(KEY, x), x)
    np.testing.assert_allclose(wrong, [[-1500, -500, 500, 1500]], rtol=1e-5)
    np.testing.assert_allclose(right, [[-1.3416, -0.4472, 0.4472, 1.3416]], atol=5e-5)


def test_a_mask_reaches_the_core_and_the_statistics():
    """N43: valid mean 4 and variance 4 whatever stands under the mask."""
    rows = [[1.0, 2.0, 3.0, np.nan, np.inf], [4.0, 5.0, 6.0, 7.0, -10.0]]
    x = jnp.array(rows)[..., None]
    mask = jnp.array([[True] * 3 + [False] * 2, [True] * 4 + [False]])
    layer = nj.linen.Norm(
        nj.batch_norm(running=nj.Running(decay=0.0)), use_running_average=False
    )
    variables = layer.init(KEY, x, mask=mask)
    _, changed = layer.apply(variables, x, mask=mask, mutable=["batch_stats"])
    assert changed["batch_stats"]["mean"].tolist() == [4.0]
    assert changed["batch_stats"]["var"].tolist() == [4.0]


def test_the_mode_must_be_given_and_given_once():
    layer, x = nj.linen.Norm(nj.batch_norm()), draw((8, 3))
    with pytest.raises(ValueError, match=r"use_running_average.* must be passed"):
        layer.init(KEY, x)
    both = nj.linen.Norm(nj.batch_norm(), use_running_average=True)
    with pytest.raises(ValueError, match=r"use_running_average.* just once"):
        both.init(KEY, x, use_running_average=False)


def test_immutable_statistics_are_one_clear_message():
    layer, x = nj.linen.Norm(nj.batch_norm(), use_running_average=False), draw((8, 3))
    variables = layer.init(KEY, x)
    message = "'batch_stats' is immutable: pass mutable=['batch_stats'] to apply"
    with pytest.raises(ValueError, match=re.escape(message)):
        layer.apply(variables, x)


def test_epsilon_can_be_varied_in_the_call_without_recompiling():
    x = draw((8, 3))
    layer = nj.linen.Norm(nj.layer_norm())
    variables = layer.init(KEY, x)
    traces = []

    @jax.jit
    def apply(epsilon):
        traces.append(1)
        return layer.apply(variables, x, epsilon=epsilon)

    for epsilon in (1e-5, 1e-2, 1.0):
        expected = nj.normalize(nj.layer_norm(epsilon=epsilon), x)
        np.testing.assert_allclose(apply(epsilon), expected, rtol=1e-6, atol=1e-6)
    assert len(traces) == 1


class Block(nn.Module):
    """A Dense with a batch norm, as a user writes it."""

    @nn.compact
    def __call__(self, x, train: bool):
        norm = nj.linen.Norm(nj.batch_norm(running=nj.Running(decay=0.9)))
        return norm(nn.Dense(3)(x), use_running_average=not train)


@pytest.mark.parametrize("remat", [False, True])
def test_one_update_for_each_step_under_grad_jit_and_remat(remat):
    """N33: rematerialization runs the forward pass twice and must update once."""
    x = draw((8, 4))
    kind = nn.remat(Block, static_argnums=(2,)) if remat else Block
    model = kind()
    variables = model.init(KEY, x, True)

    @jax.jit
    def step(variables):
        def loss(params):
            y, changed = model.apply(
                {**variables, "params": params}, x, True, mutable=["batch_stats"]
            )
            return jnp.sum(y**3), changed

        return jax.grad(loss, has_aux=True)(variables["params"])

    gradient, changed = step(variables)
    stats = next(iter(changed["batch_stats"].values()))
    assert stats["count"].tolist() == [1, 1, 1]
    # A bias before batch norm has no effect, so its gradient vanishes.
    kernel = jnp.abs(gradient["Dense_0"]["kernel"]).max()
    assert jnp.abs(gradient["Dense_0"]["bias"]).max() < 1e-5 * kernel


def test_vmap_over_lanes_keeps_the_statistics_of_each_lane():
    x = draw((2, 8, 3))
    layer = nj.linen.Norm(nj.batch_norm(), use_running_average=False)
    variables = layer.init(KEY, x[0])
    y, changed = jax.vmap(lambda x: layer.apply(variables, x, mutable=["batch_stats"]))(
        x
    )
    for lane in range(2):
        alone, state = layer.apply(variables, x[lane], mutable=["batch_stats"])
        np.testing.assert_allclose(y[lane], alone, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            changed["batch_stats"]["mean"][lane],
            state["batch_stats"]["mean"],
            rtol=1e-6,
        )


def test_statistics_carried_through_scan():
    """N36: means 1, 2, 3 with keep 0.9 give 0.561; zero variances 0.729."""
    layer = nj.linen.Norm(
        nj.batch_norm(running=nj.Running(decay=0.9)), use_running_average=False
    )
    x = jnp.ones((4, 1)) * jnp.array([1.0, 2.0, 3.0])[:, None, None]
    variables = layer.init(KEY, x[0])

    def step(stats, batch):
        _, changed = layer.apply(
            {**variables, "batch_stats": stats}, batch, mutable=["batch_stats"]
        )
        return changed["batch_stats"], None

    stats, _ = jax.lax.scan(step, variables["batch_stats"], x)
    np.testing.assert_allclose(stats["mean"], [0.561], rtol=1e-6)
    np.testing.assert_allclose(stats["var"], [0.729], rtol=1e-6)


def test_output_and_parameters_keep_their_dtypes():
    x = draw((8, 3)).astype(jnp.bfloat16)
    layer = nj.linen.Norm(nj.batch_norm(), use_running_average=False)
    variables = layer.init(KEY, x)
    y, changed = layer.apply(variables, x, mutable=["batch_stats"])
    assert y.dtype == jnp.bfloat16
    assert variables["params"]["scale"].dtype == jnp.float32
    assert changed["batch_stats"]["mean"].dtype == jnp.float32


def test_eval_shape_traces_without_values():
    layer = nj.linen.Norm(nj.batch_norm(), use_running_average=False)
    shapes = jax.eval_shape(layer.init, KEY, jax.ShapeDtypeStruct((8, 3), jnp.float32))
    assert shapes["params"]["scale"].shape == (3,)
    assert shapes["batch_stats"]["var"].shape == (3,)


@pytest.mark.parametrize("kind", ["LayerNorm", "BatchNorm", "RMSNorm"])
def test_drop_ins_run_in_64_bits_where_promotion_is_strict(kind: str):
    """With equal dtypes nothing is promoted but by Flax's own rule for the output."""
    more = {"use_running_average": False} if kind == "BatchNorm" else {}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        layer = getattr(nj.linen, kind)(param_dtype=jnp.float64, **more)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))
        variables = layer.init(jax.random.key(0), x)
        y, changed = layer.apply(variables, x, mutable=["batch_stats"])
    assert x.dtype == jnp.float64
    assert {leaf.dtype for leaf in jax.tree.leaves((y, changed))} == {x.dtype}
