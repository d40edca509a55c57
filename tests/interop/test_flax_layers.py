"""Flax's layers, linen and nnx, against their conventions."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peers import by_jax, check_layer, check_running, close, distance, right

import normjax as nj

pytestmark = pytest.mark.jax_defaults

X = np.array([[1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3]], np.float32)
SHAPE = (5, 4, 3, 6)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "batch": ("BatchNorm", {}),
    "batch, kept axis 1": ("BatchNorm", {"axis": 1, "epsilon": 1e-3}),
    "batch, kept axis -2": ("BatchNorm", {"axis": -2}),
    "batch, scale only": ("BatchNorm", {"use_bias": False, "momentum": 0.9}),
    "layer": ("LayerNorm", {}),
    "layer, no parameters": ("LayerNorm", {"use_bias": False, "use_scale": False}),
    "layer, all but the first": (
        "LayerNorm", {"reduction_axes": (1, 2, 3), "feature_axes": 3},
    ),
    "layer, three last": (
        "LayerNorm", {"reduction_axes": (-3, -2, -1), "feature_axes": (-2, -1)},
    ),
    "layer, not the last": ("LayerNorm", {"reduction_axes": -2, "epsilon": 0.1}),
    "layer, two passes": ("LayerNorm", {"use_fast_variance": False}),
    "rms": ("RMSNorm", {}),
    "rms, two axes": ("RMSNorm", {"reduction_axes": (-2, -1), "epsilon": 0.1}),
    "group": ("GroupNorm", {"num_groups": 3}),
    "group, by size": ("GroupNorm", {"num_groups": None, "group_size": 3}),
    "group, last axis": ("GroupNorm", {"num_groups": 2, "reduction_axes": -1}),
    "instance": ("InstanceNorm", {}),
    "instance, kept axis 1": ("InstanceNorm", {"feature_axes": 1}),
    "instance, kept axis -3": ("InstanceNorm", {"feature_axes": -3}),
    "instance, two features": ("InstanceNorm", {"feature_axes": (-2, -1)}),
}  # fmt: skip
# nnx makes a parameter of num_features entries, so of one axis, and does not do what
# its reduction_axes say.
NNX = [case for case in CASES if case not in ("group, last axis",
       "layer, three last", "instance, two features")]  # fmt: skip


def features(name: str, arguments: dict[str, Any]) -> int:
    word = {"BatchNorm": "axis", "InstanceNorm": "feature_axes"}.get(name, "")
    return SHAPE[arguments.get(word, -1)]


def nnx_layer(name: str, arguments: dict[str, Any], **more: Any) -> Any:
    if "num_features" not in more:
        more["num_features"] = features(name, arguments)
    layer = getattr(flax.nnx, name)(**arguments, **more, rngs=flax.nnx.Rngs(0))
    if name == "BatchNorm" and "param_dtype" in more:
        for stored in (layer.mean, layer.var):
            stored.set_value(stored.get_value().astype(more["param_dtype"]))
    return layer


@pytest.mark.parametrize("case", CASES)
def test_linen_value_and_gradients(case: str):
    name, arguments = CASES[case]
    spec = nj.interop.convention(f"flax.linen.{name}", **arguments)
    with jax.enable_x64(True):
        layer = getattr(flax.linen, name)(**arguments, param_dtype=jnp.float64)
        more = {"use_running_average": False} if name == "BatchNorm" else {}

        def call(x, params):
            variables = {"params": params}
            if name == "BatchNorm":
                return layer.apply(variables, x, mutable=["batch_stats"], **more)[0]
            return layer.apply(variables, x)

        check_layer(spec, SHAPE, by_jax(call))


@pytest.mark.parametrize("case", NNX)
def test_nnx_value_and_gradients(case: str):
    name, arguments = CASES[case]
    spec = nj.interop.convention(f"flax.nnx.{name}", **arguments)
    with jax.enable_x64(True):
        layer = nnx_layer(name, arguments, param_dtype=jnp.float64)
        definition, own, rest = flax.nnx.split(layer, flax.nnx.Param, ...)

        def call(x, params):
            learned, others = jax.tree.map(lambda leaf: leaf, (own, rest))
            for word, value in params.items():
                learned[word].set_value(value)
            return flax.nnx.merge(definition, learned, others)(x)

        check_layer(spec, SHAPE, by_jax(call))


def test_linen_stored_statistics_after_five_updates():
    arguments: dict[str, Any] = {"momentum": 0.9}
    spec = nj.interop.convention("flax.linen.BatchNorm", **arguments)
    with jax.enable_x64(True):
        layer = flax.linen.BatchNorm(**arguments, param_dtype=jnp.float64)
        x = jnp.ones(SHAPE, jnp.float64)
        variables: Any = layer.init(jax.random.key(0), x, use_running_average=False)
        kept = {"batch_stats": jax.tree.map(lambda a: a.astype(x.dtype),
                                            variables["batch_stats"])}  # fmt: skip

        def apply(x, stored: bool):
            return layer.apply(
                {"params": variables["params"], **kept},
                jnp.asarray(x),
                use_running_average=stored,
                mutable=["batch_stats"],
            )

        check_running(
            spec,
            SHAPE,
            lambda x: kept.update(apply(x, stored=False)[1]),
            lambda: (kept["batch_stats"]["mean"], kept["batch_stats"]["var"]),
            lambda x: apply(x, stored=True)[0],
        )


def test_nnx_stored_statistics_after_five_updates():
    spec = nj.interop.convention("flax.nnx.BatchNorm")
    with jax.enable_x64(True):
        layer = nnx_layer("BatchNorm", {}, param_dtype=jnp.float64)
        check_running(
            spec,
            SHAPE,
            lambda x: layer(jnp.asarray(x)),
            lambda: (layer.mean.get_value(), layer.var.get_value()),
            lambda x: layer(jnp.asarray(x), use_running_average=True),
        )


def test_axes_from_both_ends_must_not_meet():
    """A spec does not know the rank: it is refused, not guessed."""
    spec = nj.interop.convention("flax.linen.LayerNorm", reduction_axes=(1, 2))
    assert spec.pattern == "b [x1 x2] ... c"
    assert nj.init(spec, SHAPE)["scale"].shape == (6,)
    with pytest.raises(
        ValueError, match=r"has at least 4 dimensions, the tensor has 3"
    ):
        nj.init(spec, (5, 4, 6))


def test_nnx_group_norm_does_not_do_what_its_reduction_axes_say():
    """It repeats the statistics along axis 1; linen and the spec agree."""
    name, arguments = CASES["group, last axis"]
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    theirs = nnx_layer(name, arguments)(jnp.asarray(x))
    linen = output("flax.linen.GroupNorm", arguments, x)
    spec = nj.interop.convention("flax.nnx.GroupNorm", **arguments)
    assert spec == nj.interop.convention("flax.linen.GroupNorm", **arguments)
    assert distance(nj.normalize(spec, jnp.asarray(x)), linen) < 1e-5
    assert distance(theirs, linen) > 0.1
    assert "axis 1" in nj.interop.notes("flax.nnx.GroupNorm")[-1]


OFFSET = {
    "flax.linen.LayerNorm": (X, {}, 1),
    "flax.nnx.LayerNorm": (X, {}, 1),
    "flax.linen.BatchNorm": (X.T, {}, 0),
    "flax.linen.GroupNorm": (X, {"num_groups": 1}, 1),
    "flax.linen.InstanceNorm": (X[..., None], {}, 1),
}


def output(name: str, arguments: dict[str, Any], x: np.ndarray) -> Any:
    _, module, layer = name.split(".")
    if module == "nnx":
        return nnx_layer(layer, arguments, num_features=x.shape[-1])(jnp.asarray(x))
    more = {"use_running_average": False} if layer == "BatchNorm" else {}
    made = getattr(flax.linen, layer)(**arguments)
    return made.init_with_output(jax.random.key(0), jnp.asarray(x), **more)[0]


@pytest.mark.parametrize("name", OFFSET)
def test_wrong_by_a_thousand_at_1e4_and_so_is_the_spec(name: str):
    """N01: the same wrong digits; without its precision the spec is right."""
    x, arguments, axis = OFFSET[name]
    spec = nj.interop.convention(name, **arguments)
    theirs = output(name, arguments, x)
    assert distance(nj.normalize(spec, jnp.asarray(x)), theirs) < 1e-6
    truth = right(spec, x, (axis,))
    assert distance(theirs, truth) > 300
    safe = spec.replace(precision=nj.Precision())
    assert distance(nj.normalize(safe, jnp.asarray(x)), truth) < 1e-6
    slow = nj.interop.convention(name, **arguments, use_fast_variance=False)
    again = output(name, {**arguments, "use_fast_variance": False}, x)
    assert distance(nj.normalize(slow, jnp.asarray(x)), again) < 1e-6
    assert distance(again, truth) < 1e-3


def test_the_gradient_is_wrong_by_a_billion_and_so_is_that_of_the_spec():
    """N73b: ±2.8e8 where 0.27 is right; max(0, 0) halves it there, and only there."""
    x, params = jnp.asarray(X), {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
    spec = nj.interop.convention("flax.linen.LayerNorm")

    def first(call) -> np.ndarray:
        return np.asarray(jax.grad(lambda x: call(x)[0, 0])(x))[0]

    def flax_layer(x) -> Any:
        return flax.linen.LayerNorm().apply({"params": params}, x)

    theirs, ours = first(flax_layer), first(partial(nj.normalize, spec))
    assert np.abs(theirs).max() > 1e8
    np.testing.assert_allclose(ours, 2 * theirs, rtol=2e-3)
    safe = first(partial(nj.normalize, spec.replace(precision=nj.Precision())))
    truth = [0.26833, -0.35777, -0.08944, 0.17888]
    np.testing.assert_allclose(safe, truth, atol=1e-4)


def test_which_wrong_digits_depends_on_the_order_of_the_sum():
    """Both variances are off by less than 4 κ² u, and not by the same."""
    x = np.random.default_rng(0).normal(1e3, 1, (64, 128)).astype(np.float32)
    spec = nj.interop.convention("flax.linen.LayerNorm")
    theirs = output("flax.linen.LayerNorm", {}, x)
    ours = nj.normalize(spec, jnp.asarray(x))
    truth = right(spec, x, (1,))
    bound = 4 * 1e6 * 2.0**-24
    assert 1e-3 < distance(theirs, truth) < bound
    assert 1e-3 < distance(ours, truth) < bound
    assert distance(ours, theirs) < bound


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "InstanceNorm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_comes_out_as_the_parameters_or_as_dtype_says(name, dtype):
    """N18: the note about dtype."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 16)), dtype)
    plain = output(f"flax.linen.{name}", {}, np.asarray(x))
    wide = nj.interop.convention(f"flax.linen.{name}", dtype="float32")
    found = nj.normalize(wide, x)
    assert plain.dtype == found.dtype == jnp.float32
    close(found, plain, rtol=1e-5)
    narrow = nj.interop.convention(f"flax.linen.{name}", dtype=dtype)
    stated = output(f"flax.linen.{name}", {"dtype": jnp.dtype(dtype)}, np.asarray(x))
    found = nj.normalize(narrow, x)
    assert stated.dtype == found.dtype == jnp.dtype(dtype)
    close(found.astype("float32"), stated.astype("float32"), rtol=2.0**-8)


def test_an_empty_batch_ends_the_stored_statistics_there():
    """N28: NaN for ever; an unchanged state here."""
    x = jnp.zeros((0, 2))
    layer = nnx_layer("BatchNorm", {}, num_features=2)
    layer(x)
    assert bool(jnp.isnan(layer.mean.get_value()).all())
    spec = nj.interop.convention("flax.nnx.BatchNorm")
    fresh = nj.running.init(spec, x.shape)
    state = nj.running.update(spec, fresh, nj.moments(spec, x))
    assert (state.mean.tolist(), state.variance.tolist()) == ([0, 0], [1, 1])


def test_nnx_rounds_the_stored_statistics_to_its_dtype():
    """101 − 100.3 in bfloat16 is 0.5 there, and 0.7 here."""
    x = jnp.array([[101.0]], "bfloat16")
    layer = nnx_layer("BatchNorm", {"dtype": jnp.bfloat16}, num_features=1)
    layer.mean.set_value(jnp.array([100.3]))
    assert layer(x, use_running_average=True).tolist() == [[0.5]]
    spec = nj.interop.convention("flax.nnx.BatchNorm", dtype="bfloat16")
    stored = nj.Statistics(jnp.array([100.3]), jnp.array([1.0]))
    found = nj.normalize(spec, x, moments=stored)
    close(found.astype("float32"), [[0.7]], rtol=2.0**-8)


def test_an_axis_name_synchronizes_and_masks_of_different_counts_do_not():
    """N48: 7.75 and 15.4375 are right; Flax averages the means: 5.5 and 20.75."""
    spec = nj.interop.convention("flax.linen.BatchNorm", axis_name="d", momentum=0.0)
    rows = np.zeros((2, 6, 1), np.float32)
    rows[0, :2, 0], rows[1] = (0, 2), 10
    mask = np.ones((2, 6, 1), bool)
    mask[0, 2:] = False
    layer = flax.linen.BatchNorm(axis_name="d", momentum=0.0, use_running_average=False)

    def theirs(x, mask):
        variables = {"params": {"scale": jnp.ones(1), "bias": jnp.zeros(1)}}
        _, state = layer.apply(variables, x, mask=mask, mutable=["batch_stats"])
        return state["batch_stats"]["mean"], state["batch_stats"]["var"]

    def ours(x, mask):
        found = nj.moments(spec, x, mask)
        return found.mean, found.variance()

    def statistics(call, mask):
        pair = jax.vmap(call, axis_name="d")(jnp.asarray(rows), jnp.asarray(mask))
        return [float(np.asarray(value)[0, 0]) for value in pair]

    full = np.ones_like(mask)
    np.testing.assert_allclose(statistics(ours, full), statistics(theirs, full))
    np.testing.assert_allclose(statistics(theirs, mask), [5.5, 20.75])
    np.testing.assert_allclose(statistics(ours, mask), [7.75, 15.4375])
