"""Equinox's layers, under jax.vmap as they are used, against their conventions."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peers import batches, by_jax, check_layer, check_running, close, distance, right

import normjax as nj

equinox = pytest.importorskip("equinox", reason="Equinox is not installed")
pytestmark = pytest.mark.jax_defaults

CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "layer": ("LayerNorm", {"shape": 6}, (5, 6)),
    "layer, two axes": ("LayerNorm", {"shape": (4, 6), "eps": 1e-3}, (5, 4, 6)),
    "layer, no bias": ("LayerNorm", {"shape": 6, "use_bias": False}, (5, 6)),
    "layer, no parameters": (
        "LayerNorm", {"shape": 6, "use_bias": False, "use_weight": False}, (5, 6),
    ),
    "rms": ("RMSNorm", {"shape": 6}, (5, 6)),
    "rms, no bias": ("RMSNorm", {"shape": (4, 6), "use_bias": False}, (5, 4, 6)),
    "group": ("GroupNorm", {"groups": 3, "channels": 6}, (5, 6, 4, 2)),
    "group, no parameters": (
        "GroupNorm",
        {"groups": 2, "channels": 6, "channelwise_affine": False},
        (5, 6, 4),
    ),
}  # fmt: skip
BATCH = {"input_size": 3, "momentum": 0.9}
SHAPE = (8, 3, 5)


def spec_of(name: str, arguments: dict[str, Any]) -> nj.NormSpec:
    return nj.interop.convention(f"equinox.nn.{name}", **arguments)


def filled(layer: Any, params: Any) -> Any:
    for word, name in (("scale", "weight"), ("bias", "bias")):
        if word in params:
            layer = equinox.tree_at(partial(_part, name), layer, params[word])
    return layer


def _part(name: str, layer: Any) -> Any:
    return getattr(layer, name)


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients(case: str):
    name, arguments, shape = CASES[case]
    with jax.enable_x64(True):
        layer = getattr(equinox.nn, name)(**arguments)
        check_layer(
            spec_of(name, arguments),
            shape,
            by_jax(lambda x, params: jax.vmap(filled(layer, params))(x)),
        )


def batch_layer(mode: str) -> tuple[Any, Any]:
    return equinox.nn.make_with_state(equinox.nn.BatchNorm)(
        **BATCH, axis_name="batch", mode=mode
    )


def apply(layer: Any, state: Any, x: Any, stored: bool = False) -> tuple[Any, Any]:
    call = partial(layer, inference=stored)
    return jax.vmap(call, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
        jnp.asarray(x), state
    )


def test_batch_mode_value_and_gradients():
    with jax.enable_x64(True):
        layer, state = batch_layer("batch")
        check_layer(
            spec_of("BatchNorm", {**BATCH, "mode": "batch"}),
            SHAPE,
            by_jax(lambda x, params: apply(filled(layer, params), state, x)[0]),
        )


def test_batch_mode_for_one_example_with_its_axis_name():
    """As the layer is called: the pattern has no batch, and the axis is named."""
    arguments = {**BATCH, "mode": "batch", "axis_name": "batch"}
    spec = spec_of("BatchNorm", arguments)
    assert (spec.pattern, spec.axis_names) == ("c [...]", ("batch",))
    with jax.enable_x64(True):
        layer, state = batch_layer("batch")
        x = jnp.asarray(batches(SHAPE, 1)[0])
        theirs, state = apply(layer, state, x)
        ours = jax.vmap(partial(nj.normalize, spec), axis_name="batch")(x)
        close(ours, theirs)
        moments = jax.vmap(partial(nj.moments, spec), axis_name="batch")(x)
        first = jax.tree.map(lambda array: array[0], moments)
        fresh = nj.running.init(spec, SHAPE[1:], jnp.float64)
        found = nj.running.read(spec, nj.running.update(spec, fresh, first))
        stored = state.get(layer.batch_state_index)
        close(found.mean, stored[0] / (1 - 0.9))


@pytest.mark.parametrize("start", [1.0, 0.0])
def test_batch_mode_stored_statistics_after_five_updates(start: float):
    """Its variance starts at 1 and is debiased as if at 0: a State from 1 does that.

    The spec itself starts at 0, and so reads back no prior: 0.9⁵/(1 − 0.9⁵) less.
    """
    spec = spec_of("BatchNorm", {**BATCH, "mode": "batch"})
    with jax.enable_x64(True):
        layer, found = batch_layer("batch")
        kept = {"state": found}
        fresh = nj.running.init(spec, SHAPE, jnp.float64)
        state = dataclasses.replace(fresh, variance=fresh.variance + start)
        prior = 0.0 if start else 0.9**5 / (1 - 0.9**5)

        def update(x):
            kept["state"] = apply(layer, kept["state"], x)[1]

        def stored():
            mean, variance = kept["state"].get(layer.batch_state_index)
            scale = 1 - 0.9**5
            return mean / scale, variance / scale - prior

        def evaluate(x):
            if start:
                return apply(layer, kept["state"], x, stored=True)[0]
            mean, variance = (np.reshape(v, (3, 1)) for v in stored())
            return (x - mean) / np.sqrt(variance + 1e-5)

        check_running(spec, SHAPE, update, stored, evaluate, state=state)


def test_ema_mode_is_a_blend_after_the_first_batch():
    """Values and gradients of training, and five updates; the first one is copied."""
    spec = spec_of("BatchNorm", BATCH)
    assert (spec.statistics, round(spec.mean_weight, 9)) == ("blend", 0.1)
    with jax.enable_x64(True):
        layer, found = batch_layer("ema")
        first, *others = batches(SHAPE)
        theirs, found = apply(layer, found, first)
        moments = nj.moments(spec, jnp.asarray(first))
        fresh = nj.running.init(spec, SHAPE, jnp.float64)
        state = dataclasses.replace(
            fresh, mean=moments.mean + moments.mean_low, variance=moments.variance()
        )
        alone = spec.replace(mean_weight=1.0, variance_weight=1.0)
        reference = nj.running.read(spec, fresh)
        close(nj.normalize(alone, jnp.asarray(first), reference=reference), theirs)
        for x in others:
            reference, kept = nj.running.read(spec, state), found
            check_layer(
                spec,
                SHAPE,
                by_jax(lambda x, p, kept=kept: apply(filled(layer, p), kept, x)[0]),
                reference=reference,
            )
            _, found = apply(layer, found, x)
            state = nj.running.update(spec, state, nj.moments(spec, jnp.asarray(x)))
        mean, variance = found.get(layer.ema_state_index)
        close(state.mean, mean)
        close(state.variance, variance)
        stored = nj.running.read(spec, state)
        x = jnp.asarray(first)
        close(nj.normalize(spec, x, moments=stored), apply(layer, found, x, True)[0])


def test_ema_mode_before_any_update_divides_by_the_root_of_epsilon():
    """N24: x/√ε there; x/√(1 + ε) here."""
    layer, state = batch_layer("ema")
    x = np.ones((2, 3), np.float32)
    close(apply(layer, state, x, stored=True)[0], x / np.sqrt(1e-5), rtol=1e-5)
    spec = spec_of("BatchNorm", BATCH)
    found = nj.running.read(spec, nj.running.init(spec, x.shape))
    close(nj.normalize(spec, jnp.asarray(x), moments=found), x, rtol=1e-5)


def test_right_at_1e6_and_wrong_at_two_to_the_24():
    """N04: two passes in float32; the default specs are right at both."""
    x = (np.arange(4) + 1e6).astype(np.float32)[None]
    spec = spec_of("LayerNorm", {"shape": 4})
    layer = jax.vmap(equinox.nn.LayerNorm(4))
    assert distance(layer(jnp.asarray(x)), right(spec, x, (1,))) < 1e-6
    x = (np.arange(4) * 2 + 2.0**24).astype(np.float32)[None]
    theirs, truth = layer(jnp.asarray(x)), right(spec, x, (1,))
    np.testing.assert_allclose(nj.normalize(spec, jnp.asarray(x)), theirs, atol=1e-6)
    assert distance(theirs, truth) > 0.3
    safe = spec.replace(precision=nj.Precision())
    assert distance(nj.normalize(safe, jnp.asarray(x)), truth) < 1e-6


def test_float16_overflows_in_batch_norm_only():
    """N06: 0 where ±1 is right; with float16 sums a spec says NaN, not 0."""
    x = jnp.asarray([[300.0], [-300.0], [300.0], [-300.0]], "float16")
    layer, state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(
        1, axis_name="batch", mode="batch", dtype=jnp.float16
    )
    assert apply(layer, state, x)[0].tolist() == [[0.0], [-0.0], [0.0], [-0.0]]
    spec = spec_of("BatchNorm", {"mode": "batch"})
    close(nj.normalize(spec, x).astype("float32"), [[1], [-1], [1], [-1]], 1e-3)
    narrow = spec.replace(**{"precision.accumulate": "float16"})
    assert bool(jnp.isnan(nj.normalize(narrow, x)).all())


def test_integers_are_cut_off_there_and_refused_here():
    """N19."""
    x = jnp.array([[1, 2, 3, 4]])
    theirs = jax.vmap(equinox.nn.LayerNorm(4))(x)
    assert theirs.tolist() == [[-1, 0, 0, 1]]
    with pytest.raises(ValueError, match="expected a float dtype"):
        nj.normalize(spec_of("LayerNorm", {}), x)
