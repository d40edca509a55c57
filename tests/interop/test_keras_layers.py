"""Keras's layers on the JAX backend against their conventions.

In float32: Keras computes float64 layers in it too.
"""

from __future__ import annotations

import os
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from peers import batches, by_jax, check_layer, check_running, close, distance, right

import normjax as nj

pytestmark = pytest.mark.jax_defaults


@pytest.fixture(scope="module")
def keras() -> Any:
    """Keras, if this process has it on JAX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "KERAS_BACKEND", "jax")
        keras = pytest.importorskip("keras", reason="Keras is not installed")
    if keras.backend.backend() != "jax":
        pytest.skip(f"this process has Keras on {keras.backend.backend()}, not on JAX")
    return keras


SHAPE = (5, 4, 3, 6)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "batch": ("BatchNormalization", {}),
    "batch, axis 1": ("BatchNormalization", {"axis": 1, "epsilon": 1e-5}),
    "batch, no gamma": ("BatchNormalization", {"scale": False}),
    "layer": ("LayerNormalization", {}),
    "layer, two axes": ("LayerNormalization", {"axis": [-2, -1], "epsilon": 0.1}),
    "layer, not the last": ("LayerNormalization", {"axis": 1}),
    "layer, no beta": ("LayerNormalization", {"center": False}),
    "layer, rms scaling": ("LayerNormalization", {"rms_scaling": True}),
    "group": ("GroupNormalization", {"groups": 3}),
    "group, axis 1": ("GroupNormalization", {"groups": 2, "axis": 1, "scale": False}),
    "group, instances": ("GroupNormalization", {"groups": -1}),
    "rms": ("RMSNormalization", {}),
    "rms, two axes": ("RMSNormalization", {"axis": (-2, -1), "epsilon": 0.1}),
}


def spec_of(name: str, arguments: dict[str, Any]) -> nj.NormSpec:
    return nj.interop.convention(f"keras.layers.{name}", **arguments)


def made(keras: Any, name: str, arguments: dict[str, Any], shape, dtype="float32"):
    if not arguments.get("rms_scaling"):
        layer = getattr(keras.layers, name)(**arguments, dtype=dtype)
    else:
        with pytest.warns(UserWarning, match="rms_scaling=True.*deprecated"):
            layer = getattr(keras.layers, name)(**arguments, dtype=dtype)
    layer.build(shape)
    return layer


def call(layer: Any, x: Any, params: Any, training: bool = True, **more: Any) -> Any:
    words = {"gamma": "scale", "beta": "bias", "scale": "scale"}
    trained = [params[words[variable.name]] for variable in layer.trainable_variables]
    others = [variable.value for variable in layer.non_trainable_variables]
    if "training" in layer._call_signature.parameters:
        more["training"] = training
    return layer.stateless_call(trained, others, x, **more)[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:You passed `rms_scaling")
def test_value_and_gradients(keras: Any, case: str):
    name, arguments = CASES[case]
    layer = made(keras, name, arguments, SHAPE)
    check_layer(
        spec_of(name, arguments),
        SHAPE,
        by_jax(lambda x, p: call(layer, x, p)),
        single=True,
    )


def test_stored_statistics_after_five_updates(keras: Any):
    """N21: momentum is the share that is kept, the variance has ddof 0."""
    arguments = {"momentum": 0.9}
    layer = made(keras, "BatchNormalization", arguments, SHAPE)
    check_running(
        spec_of("BatchNormalization", arguments),
        SHAPE,
        lambda x: layer(jnp.asarray(x), training=True),
        lambda: (layer.moving_mean.value, layer.moving_variance.value),
        lambda x: layer(jnp.asarray(x), training=False),
        single=True,
    )


def test_renorm_corrects_towards_averages_of_its_own(keras: Any):
    clipping = {"rmax": 2.0, "rmin": 0.5, "dmax": 0.005}
    arguments = {"renorm": True, "renorm_clipping": clipping, "epsilon": 1e-2}
    spec = spec_of("BatchNormalization", arguments)
    layer = made(keras, "BatchNormalization", arguments, SHAPE)
    layer(jnp.asarray(batches(SHAPE, 1)[0], jnp.float32), training=True)
    mean, std = layer.renorm_mean.value, layer.renorm_stddev.value
    check_layer(
        spec,
        SHAPE,
        by_jax(lambda x, p: call(layer, x, p)),
        reference=nj.Statistics(mean, std**2 - spec.epsilon),
        single=True,
    )
    with pytest.raises(ValueError, match="expected rmin to be 1/rmax"):
        spec_of("BatchNormalization", {"renorm": True, "renorm_clipping": {"rmax": 3}})
    with pytest.raises(ValueError, match="did you mean 'rmax'"):
        spec_of("BatchNormalization", {"renorm": True, "renorm_clipping": {"r_max": 3}})
    with pytest.raises(ValueError, match="renorm_clipping is 3, expected a dict"):
        spec_of("BatchNormalization", {"renorm": True, "renorm_clipping": 3})


def test_not_trainable_is_inference(keras: Any):
    """N30: stored statistics and no update, which are two acts here."""
    layer = made(keras, "BatchNormalization", {}, (2, 1))
    layer.trainable = False
    x = jnp.array([[1.0], [3.0]])
    theirs = layer(x, training=True)
    spec = spec_of("BatchNormalization", {})
    stored = nj.running.read(spec, nj.running.init(spec, x.shape))
    close(nj.normalize(spec, x, moments=stored), theirs, rtol=1e-6)
    assert layer.moving_mean.value.tolist() == [0.0]


def test_a_mask_leaves_entries_out(keras: Any):
    """N43: mean 4 and variance 4 whatever stands under the mask."""
    rows = [[1.0, 2, 3, -10, -10], [4, 5, 6, 7, -10]]
    x = jnp.stack([jnp.array(rows)] * 2, axis=-1)
    mask = jnp.array([[True] * 3 + [False] * 2, [True] * 4 + [False]])
    layer = made(keras, "BatchNormalization", {"momentum": 0.0}, x.shape)
    theirs = layer(x, training=True, mask=mask)
    spec = spec_of("BatchNormalization", {})
    found = nj.moments(spec, x, mask)
    close(found.mean, layer.moving_mean.value, rtol=1e-6)
    close(found.variance(), layer.moving_variance.value, rtol=1e-6)
    close(nj.normalize(spec, x, mask=mask), theirs, rtol=1e-6)


FOLDED: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "BatchNormalization": ({}, (4, 1), (0,)),
    "LayerNormalization": ({}, (1, 4), (1,)),
    "GroupNormalization": ({"groups": 1}, (1, 4), (1,)),
}


def output(keras: Any, name: str, arguments: dict[str, Any], x: np.ndarray) -> Any:
    layer = made(keras, name, arguments, x.shape, "float32")
    ones = {"scale": jnp.ones(x.shape[-1:]), "bias": jnp.zeros(x.shape[-1:])}
    return call(layer, jnp.asarray(x), ones)


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_folding_loses_digits_and_so_does_the_spec(keras: Any, name: str, offset):
    """N05: off by up to |mean|/std units of rounding; the default by less than 8."""
    arguments, shape, axes = FOLDED[name]
    x = (np.arange(4) + offset).astype(np.float32).reshape(shape)
    spec = spec_of(name, arguments)
    theirs, truth = output(keras, name, arguments, x), right(spec, x, axes)
    kappa = offset / np.sqrt(1.25) * 2.0**-24
    found = distance(nj.normalize(spec, jnp.asarray(x)), truth)
    assert kappa / 50 < distance(theirs, truth) < 2 * kappa
    assert kappa / 50 < found < 2 * kappa
    safe = spec.replace(precision=nj.Precision())
    assert distance(nj.normalize(safe, jnp.asarray(x)), truth) < 8 * 2.0**-24


@pytest.mark.parametrize("name", FOLDED)
def test_at_two_to_the_24_the_digits_are_the_same(keras: Any, name: str):
    """N04, operation by operation; up to 0.5 away from x̂."""
    arguments, shape, axes = FOLDED[name]
    x = (np.arange(4) * 2 + 2.0**24).astype(np.float32).reshape(shape)
    spec = spec_of(name, arguments)
    theirs, truth = output(keras, name, arguments, x), right(spec, x, axes)
    ours = nj.normalize(spec, jnp.asarray(x))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert np.abs(np.asarray(theirs) - truth).max() > 0.3
    safe = spec.replace(precision=nj.Precision())
    np.testing.assert_allclose(nj.normalize(safe, jnp.asarray(x)), truth, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "finite"),
    [("BatchNormalization", False), ("LayerNormalization", True),
     ("RMSNormalization", False)],
)  # fmt: skip
def test_autocast_overflows_before_the_layer_can_widen(keras: Any, name, finite):
    """N10: 70000 is inf in float16; only a cast of x itself reproduces that."""
    x = jnp.array([[70000.0, 60000.0]])
    x = x.T if name == "BatchNormalization" else x
    layer = made(keras, name, {}, x.shape, "mixed_float16")
    theirs = layer(x, training=True) if name == "BatchNormalization" else layer(x)
    spec = spec_of(name, {})
    ours = nj.normalize(spec, x)
    assert bool(jnp.isfinite(ours).all())
    assert bool(jnp.isfinite(theirs).all()) == finite
    close(ours, [[1.07381, 0.92041]] if name == "RMSNormalization"
          else [[1], [-1]] if name == "BatchNormalization" else [[1, -1]],
          rtol=1e-2)  # fmt: skip
    if not finite:
        cast = nj.normalize(spec, x.astype("float16"))
        assert not bool(jnp.isfinite(cast).all())


@pytest.mark.parametrize("name", ["LayerNormalization", "GroupNormalization"])
def test_a_half_input_is_rounded_and_widened_again(keras: Any, name: str):
    """The note: the output is float32 with the digits of bfloat16."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32)), "bfloat16")
    layer = made(keras, name, {}, x.shape)
    theirs = layer(x)
    ours = nj.normalize(spec_of(name, {}), x)
    assert (theirs.dtype, ours.dtype) == (jnp.float32, jnp.bfloat16)
    close(ours.astype(jnp.float32), theirs, rtol=2.0**-8)
    assert bool((theirs == theirs.astype("bfloat16").astype("float32")).all())


@pytest.mark.parametrize("name", ["BatchNormalization", "RMSNormalization"])
def test_the_output_has_the_dtype_of_the_layer(keras: Any, name: str):
    """The note; precision.output states it."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16)), "bfloat16")
    more = {"training": True} if name == "BatchNormalization" else {}
    theirs = made(keras, name, {}, x.shape)(x, **more)
    wide = spec_of(name, {}).replace(**{"precision.output": "float32"})
    assert theirs.dtype == nj.normalize(wide, x).dtype == jnp.float32
    close(nj.normalize(wide, x), theirs, rtol=1e-5)
