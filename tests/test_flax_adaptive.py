"""Modulated norms, mixtures and standardized kernels in linen and nnx."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_layers import KEY, draw, slow

import normjax as nj

pytestmark = pytest.mark.jax_defaults

X = draw((8, 5, 6))
CONDITION = draw((8, 4), offset=0.0)
RANDOM = jax.nn.initializers.normal(0.5)
MODULATED = {
    "layer": (nj.adaptive_layer_norm(), CONDITION),
    "instance": (nj.adaptive_instance_norm(), CONDITION),
    "each position": (
        nj.layer_norm(pattern="b t [c]", affine=nj.Affine("b t c", stored="1+w")),
        draw((8, 5, 4), offset=0.0),
    ),
    "scale alone": (
        nj.rms_norm(pattern="b ... [c]", affine=nj.Affine("b c", bias=False)),
        CONDITION,
    ),
    "batch norm": (nj.batch_norm(pattern="[b ...] c", affine="b c"), CONDITION),
}


def linen_call(layer: Any, *arrays: Any, **call: Any):
    """Its variables, and (variables, arrays) ↦ (y, what changed), jitted."""
    variables: Any = jax.jit(layer.init)(KEY, *arrays)

    def apply(variables, *arrays):
        return layer.apply(variables, *arrays, mutable=["batch_stats"], **call)

    return variables, jax.jit(apply)


@pytest.mark.parametrize("case", slow(MODULATED, "instance", "scale alone"))
def test_a_fresh_modulated_norm_is_the_spec_without_affine_part(case):
    """N65: the identity is 0 for 1 + scale and 1 for scale."""
    spec, condition = MODULATED[case]
    layer = nj.linen.ModulatedNorm(spec, use_running_average=False)
    variables, apply = linen_call(layer, X, condition)
    y, _ = apply(variables, X, condition)
    bare = nj.normalize(spec.replace(affine=None), X)
    np.testing.assert_allclose(y, bare, rtol=0, atol=4 * 2.0**-24 * 4)
    twin = nj.nnx.ModulatedNorm(spec, X.shape, condition.shape, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(nnx.jit(lambda m, *a: m(*a))(twin, X, condition), y)


@pytest.mark.parametrize(
    "case", slow(MODULATED, "layer", "each position", "batch norm")
)
def test_a_modulated_norm_is_the_core_with_the_parameters_of_its_dense(case):
    spec, condition = MODULATED[case]
    layer = nj.linen.ModulatedNorm(spec, use_running_average=False, kernel_init=RANDOM)
    variables, apply = linen_call(layer, X, condition)
    params = {}
    for name, dense in variables["params"].items():
        value = np.asarray(condition, np.float64) @ np.asarray(dense["kernel"], float)
        params[name] = jnp.asarray(value + np.asarray(dense["bias"]), jnp.float32)
    assert ("bias" in params) == spec.affine.bias
    y, changed = apply(variables, X, condition)
    expected = nj.normalize(spec, X, params)
    # The product of 4 entries is rounded otherwise than in float64.
    np.testing.assert_allclose(y, expected, rtol=0, atol=64 * 2.0**-24 * 8)
    if spec.running is not None:
        assert changed["batch_stats"]["count"].tolist() == [1] * 6
    slope = jax.grad(lambda c: jnp.sum(apply(variables, X, c)[0] ** 2))(condition)
    assert bool((jnp.abs(slope) > 0).all())


def test_modulated_statistics_are_held_as_those_of_norm():
    spec, condition = MODULATED["batch norm"]
    plain = nj.linen.Norm(spec.replace(affine=None), use_running_average=False)
    _, state = plain.apply(plain.init(KEY, X), X, mutable=["batch_stats"])
    layer = nj.linen.ModulatedNorm(spec, use_running_average=False)
    variables, apply = linen_call(layer, X, condition)
    _, changed = apply(variables, X, condition)
    twin = nj.nnx.ModulatedNorm(spec, X.shape, condition.shape, rngs=nnx.Rngs(0))
    twin(X, condition)
    for name in ("mean", "var", "count"):
        expected = state["batch_stats"][name]
        np.testing.assert_allclose(
            changed["batch_stats"][name], expected, rtol=1e-6, atol=1e-7
        )
        np.testing.assert_allclose(getattr(twin, name).get_value(), expected, rtol=1e-6)
    twin.eval()
    twin(X, condition)
    assert twin.count.get_value().tolist() == [1] * 6


@pytest.mark.parametrize(
    ("spec", "shape", "said"),
    [
        (
            nj.layer_norm(affine=None),
            (8, 4),
            "the affine axes None of '... [c]' are ()",
        ),
        (
            nj.adaptive_layer_norm(),
            (7, 4),
            "condition has shape (7, 4), and the affine",
        ),
        (nj.layer_norm(), (8, 4), "the affine axes 'c' of '... [c]' are (6,)"),
    ],
)
def test_a_condition_that_does_not_fit(spec, shape, said):
    condition = jnp.ones(shape)
    with pytest.raises(ValueError, match=re.escape(said)):
        nj.linen.ModulatedNorm(spec).init(KEY, X, condition)
    with pytest.raises(ValueError, match=re.escape(said)):
        nj.nnx.ModulatedNorm(spec, X.shape, shape, rngs=nnx.Rngs(0))


def logits() -> dict[str, jax.Array]:
    params = nj.mixture.init(nj.mixture.switchable_norm(), X.shape)
    keys = jax.random.split(KEY, len(params))
    named = zip(params.items(), keys, strict=True)
    return {name: jax.random.normal(key, v.shape) for (name, v), key in named}


def test_a_mixture_layer_is_the_functional_mixture():
    mixture, params = nj.mixture.switchable_norm(), logits()
    layer = nj.linen.MixtureNorm(mixture, use_running_average=False)
    variables, apply = linen_call(layer, X)
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(
        jnp.shape, params
    )
    held = {**variables, "params": params}
    y, changed = apply(held, X)
    expected = jax.jit(lambda p, x: nj.mixture.normalize(mixture, x, p))(params, X)
    np.testing.assert_allclose(y, expected, rtol=0, atol=64 * 2.0**-24)
    spec = mixture.specs[2]
    state = nj.running.update(spec, nj.running.init(spec, X.shape), nj.moments(spec, X))
    stats = changed["batch_stats"]
    assert sorted(stats) == ["count_2", "mean_2", "var_2"]
    np.testing.assert_allclose(stats["mean_2"], state.mean, rtol=1e-6)
    np.testing.assert_allclose(stats["var_2"], state.variance, rtol=1e-6)
    twin = nj.nnx.MixtureNorm(mixture, X.shape)
    for name, value in params.items():
        getattr(twin, name).set_value(value)
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(twin, X), y)
    np.testing.assert_array_equal(twin.var_2.get_value(), stats["var_2"])


def test_a_mixture_infers_with_stored_statistics_and_changes_none():
    mixture, params = nj.mixture.switchable_norm(), logits()
    layer = nj.linen.MixtureNorm(mixture, use_running_average=True)
    variables, apply = linen_call(layer, X)
    y, changed = apply({**variables, "params": params}, X)
    zero, one = jnp.zeros(6), jnp.ones(6)
    given = (None, None, nj.Statistics(zero, one))
    expected = nj.mixture.normalize(mixture, X, params, moments=given)
    np.testing.assert_allclose(y, expected, rtol=0, atol=64 * 2.0**-24)
    assert changed["batch_stats"]["count_2"].tolist() == [0] * 6
    twin = nj.nnx.MixtureNorm(mixture, X.shape)
    twin.eval()
    twin(X)
    assert twin.count_2.get_value().tolist() == [0] * 6
    twin(X, update=True)
    assert twin.count_2.get_value().tolist() == [1] * 6


def test_a_mixture_says_which_statistics_are_missing():
    layer = nj.linen.MixtureNorm(nj.mixture.switchable_norm(), True)
    variables: Any = layer.init(KEY, X)
    text = "MixtureNorm misses mean_2, var_2, count_2 in 'batch_stats'"
    with pytest.raises(ValueError, match=text):
        layer.apply({"params": variables["params"]}, X)
    stateless = nj.mixture.Mixture((nj.instance_norm(), nj.layer_norm()), affine="c")
    assert "batch_stats" not in nj.linen.MixtureNorm(stateless).init(KEY, X)


IMAGE = draw((1, 4, 4, 6))
# A layer, its input, and the axes of its kernel that enter each output channel.
KERNELS: dict[str, tuple[Any, Any, jax.Array, tuple[int, ...]]] = {
    "dense": (
        lambda **k: nn.Dense(4, **k),
        lambda **k: nnx.Linear(6, 4, **k), X, (0,),
    ),
    "conv": (
        lambda **k: nn.Conv(4, (3, 3), **k),
        lambda **k: nnx.Conv(6, 4, (3, 3), **k), IMAGE, (0, 1, 2),
    ),
    "conv, two groups": (
        lambda **k: nn.Conv(4, (3,), feature_group_count=2, **k),
        lambda **k: nnx.Conv(6, 4, (3,), feature_group_count=2, **k), X, (0, 1),
    ),
    "transposed conv": (
        lambda **k: nn.ConvTranspose(4, (3, 3), **k),
        lambda **k: nnx.ConvTranspose(6, 4, (3, 3), **k), IMAGE, (0, 1, 2),
    ),
    "transposed kernel": (
        lambda **k: nn.ConvTranspose(4, (3, 3), transpose_kernel=True, **k),
        lambda **k: nnx.ConvTranspose(6, 4, (3, 3), transpose_kernel=True, **k),
        IMAGE, (0, 1, 3),
    ),
}  # fmt: skip


def standardized(kernel: Any, axes: tuple[int, ...]) -> jax.Array:
    """In float64, by NumPy."""
    wide = np.asarray(kernel, np.float64)
    mean, variance = (f(wide, axis=axes, keepdims=True) for f in (np.mean, np.var))
    return jnp.asarray((wide - mean) / np.sqrt(variance + 1e-5), jnp.float32)


def summed(y: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(jnp.sin(y)), y


class Wrapped(nn.Module):
    """As a user writes it: the layer's parameters stay in the parent."""

    make: Any

    @nn.compact
    def __call__(self, x):
        return nj.linen.WeightStandardized(self.make(bias_init=RANDOM))(x)


class Plain(nn.Module):
    make: Any

    @nn.compact
    def __call__(self, x):
        return self.make(bias_init=RANDOM)(x)


@pytest.mark.parametrize(
    "case", slow(KERNELS, "dense", "conv, two groups", "transposed kernel")
)
def test_a_standardized_layer_is_the_layer_with_a_standardized_kernel(case):
    make, make_nnx, x, axes = KERNELS[case]
    plain, model = Plain(make), Wrapped(make)
    variables: Any = plain.init(KEY, x)
    mine: Any = jax.eval_shape(model.init, KEY, x)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(lambda a: a.shape, mine)
    (name, params), *_ = variables["params"].items()
    kernel = standardized(params["kernel"], axes)
    right = jax.jit(plain.apply)({"params": {name: {**params, "kernel": kernel}}}, x)
    found, slopes = jax.jit(jax.value_and_grad(
        lambda v: summed(model.apply(v, x)),
        has_aux=True,
    ))(variables)  # fmt: skip
    # Sums of up to 54 products of size 1 to 10.
    bound = 64 * 2.0**-24 * 54
    np.testing.assert_allclose(found[1], right, rtol=0, atol=bound)
    # The derivative goes through the standardization: an offset of a kernel is nothing.
    slope = np.asarray(slopes["params"][name]["kernel"])
    assert np.abs(slope.sum(axes)).max() < 1e-4 * np.abs(slope).sum(axes).max()
    layer = make_nnx(rngs=nnx.Rngs(0))
    for word in ("kernel", "bias"):
        getattr(layer, word).set_value(params[word])
    twin = nj.nnx.WeightStandardized(layer)
    both = nnx.jit(nnx.value_and_grad(lambda m, x: summed(m(x)), has_aux=True))
    found, twins = both(twin, x)
    np.testing.assert_allclose(found[1], right, rtol=0, atol=bound)
    np.testing.assert_array_equal(layer.kernel.get_value(), params["kernel"])
    found = twins["layer_instance"]["kernel"].get_value()
    np.testing.assert_allclose(found, slope, rtol=0, atol=1e-4 * np.abs(slope).max())


def test_a_standardized_kernel_with_a_gain():
    spec = nj.weight_standardization("... i", affine=nj.Affine("o", bias=False))
    layer = nj.linen.WeightStandardized(nn.Dense(4), spec)
    variables, apply = linen_call(layer, X)
    assert variables["params"]["scale"].shape == (4,)
    y, _ = apply(variables, X)
    doubled = {**variables["params"], "scale": jnp.full((4,), 2.0)}
    np.testing.assert_allclose(apply({"params": doubled}, X)[0], 2 * y, rtol=1e-5)
    twin = nj.nnx.WeightStandardized(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), spec=spec)
    before = twin(X)
    twin.scale.set_value(jnp.full((4,), 2.0))
    np.testing.assert_allclose(twin(X), 2 * before, rtol=1e-5)


def test_a_layer_of_others_keeps_its_own_state():
    """Both kernels are standardized, and the batch norm between them updates."""

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nj.linen.BatchNorm(use_running_average=False)(nn.Dense(5)(x))
            return nn.Dense(4)(x)

    variables, apply = linen_call(nj.linen.WeightStandardized(Two()), X)
    _, changed = apply(variables, X)
    (found,) = jax.tree.leaves(jax.tree.map(
        lambda a: float(jnp.abs(a).max()), changed["batch_stats"]
    ))[:1]  # fmt: skip
    rngs = nnx.Rngs(0)
    norm = nj.nnx.BatchNorm(5, rngs=rngs)
    layer = nnx.Sequential(
        nnx.Linear(6, 5, rngs=rngs), norm, nnx.Linear(5, 4, rngs=rngs)
    )
    nnx.jit(lambda m, x: m(x))(nj.nnx.WeightStandardized(layer), X)
    assert found > 0
    assert float(jnp.abs(norm.mean.get_value()).max()) > 0


def test_a_layer_without_a_kernel_or_with_two_and_a_gain():
    text = "the layer has 0 parameters named kernel, expected one"
    with pytest.raises(ValueError, match=text):
        nj.linen.WeightStandardized(nn.LayerNorm()).init(KEY, X)
    with pytest.raises(ValueError, match=text):
        nj.nnx.WeightStandardized(nnx.LayerNorm(6, rngs=nnx.Rngs(0)))
    spec = nj.weight_standardization("... i", affine="o")
    two = nn.Sequential([nn.Dense(4), nn.Dense(4)])
    with pytest.raises(ValueError, match="the layer has 2 parameters named kernel"):
        nj.linen.WeightStandardized(two, spec).init(KEY, X)
