"""Haiku's layers against their conventions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peers import by_jax, check_layer, check_running, close, distance, right

import normjax as nj

haiku = pytest.importorskip("haiku", reason="Haiku is not installed")
pytestmark = pytest.mark.jax_defaults

SHAPE = (5, 4, 3, 6)
BOTH = {"create_scale": True, "create_offset": True}
BATCH = {**BOTH, "decay_rate": 0.9}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "batch": ("BatchNorm", BATCH),
    "batch, channels first": ("BatchNorm", {**BATCH, "data_format": "NC..."}),
    "batch, two axes": ("BatchNorm", {**BATCH, "axis": (0, 1), "eps": 1e-3}),
    "batch, no offset": ("BatchNorm", {**BATCH, "create_offset": False}),
    "layer": ("LayerNorm", {**BOTH, "axis": -1}),
    "layer, slice": ("LayerNorm", {**BOTH, "axis": slice(1, None), "param_axis": -1}),
    "layer, one pass": ("LayerNorm", {**BOTH, "axis": -1, "use_fast_variance": True}),
    "layer, many parameters": (
        "LayerNorm", {**BOTH, "axis": (-2, -1), "param_axis": (-2, -1)},
    ),
    "layer, no parameters": (
        "LayerNorm", {"axis": -1, "create_scale": False, "create_offset": False},
    ),
    "rms": ("RMSNorm", {"axis": -1}),
    "rms, slice": ("RMSNorm", {"axis": slice(2, None), "eps": 0.1}),
    "group": ("GroupNorm", {"groups": 3}),
    "group, slice": ("GroupNorm", {"groups": 2, "axis": slice(2, None)}),
    "group, channels first": (
        "GroupNorm", {"groups": 2, "data_format": "channels_first"},
    ),
    "instance": ("InstanceNorm", BOTH),
    "instance, channels first": ("InstanceNorm", {**BOTH, "data_format": "NC..."}),
}  # fmt: skip


def spec_of(name: str, arguments: dict[str, Any]) -> nj.NormSpec:
    return nj.interop.convention(f"haiku.{name}", **arguments)


class Made:
    """A layer and what it holds after it was initialized with x."""

    def __init__(self, name: str, arguments: dict[str, Any], x: Any):
        more = {"is_training": True} if name == "BatchNorm" else {}

        def forward(x, **given):
            return getattr(haiku, name)(**arguments, name="norm")(x, **more | given)

        self.pure = haiku.transform_with_state(forward)
        self.params, self.state = self.pure.init(None, x)

    def __call__(self, x: Any, params: Any = None, **given: Any) -> tuple[Any, Any]:
        own = self.params
        if params is not None:
            words = {"scale": "scale", "bias": "offset"}
            held = {words[w]: v for w, v in params.items()}
            own = {
                module: {w: held[w].reshape(v.shape) for w, v in parts.items()}
                for module, parts in self.params.items()
            }
        return self.pure.apply(own, self.state, None, jnp.asarray(x), **given)

    def stored(self) -> tuple[Any, Any]:
        return tuple(
            self.state[f"norm/~/{name}_ema"]["average"] for name in ("mean", "var")
        )  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients(case: str):
    name, arguments = CASES[case]
    with jax.enable_x64(True):
        layer = Made(name, arguments, jnp.ones(SHAPE))
        held = [word for parts in layer.params.values() for word in parts]
        spec = spec_of(name, arguments)
        assert len(held) == len(nj.init(spec, SHAPE))
        check_layer(spec, SHAPE, by_jax(lambda x, params: layer(x, params)[0]))


def test_stored_statistics_after_five_updates():
    """Debiased as Adam's, from (0, 0); the state after init is not used."""
    with jax.enable_x64(True):
        layer = Made("BatchNorm", BATCH, jnp.zeros(SHAPE))
        for parts in layer.state.values():
            assert parts["counter"] == 0

        def update(x):
            layer.state = layer(x)[1]

        check_running(
            spec_of("BatchNorm", BATCH),
            SHAPE,
            update,
            layer.stored,
            lambda x: layer(x, is_training=False)[0],
        )


def test_a_negative_axis_keeps_parameters_there():
    """The note: it is reduced, and has a scale for each of its entries all the same."""
    arguments = {**BATCH, "axis": (0, 1, -2)}
    layer = Made("BatchNorm", arguments, jnp.ones(SHAPE))
    assert layer.params["norm"]["scale"].shape == (1, 1, 3, 6)
    spec = spec_of("BatchNorm", arguments)
    assert nj.init(spec, SHAPE)["scale"].shape == (6,)
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    close(nj.normalize(spec, jnp.asarray(x)), layer(x)[0], rtol=1e-5)


def test_wrong_by_a_hundred_at_1e4_and_so_is_the_spec():
    """N01: ±474 where ±1.34 is right, both with a variance of 0."""
    x = np.array([[1e4], [1e4 + 1], [1e4 + 2], [1e4 + 3]], np.float32)
    spec = spec_of("BatchNorm", BATCH)
    theirs = Made("BatchNorm", BATCH, jnp.asarray(x))(x)[0]
    truth = right(spec, x, (0,))
    assert distance(nj.normalize(spec, jnp.asarray(x)), theirs) < 1e-6
    assert distance(theirs, truth) > 300
    safe = spec.replace(precision=nj.Precision())
    assert distance(nj.normalize(safe, jnp.asarray(x)), truth) < 1e-6


def test_layer_norm_has_two_passes_and_is_wrong_at_two_to_the_24_only():
    x = (np.arange(4) * 2 + 2.0**24).astype(np.float32)[None]
    arguments = {**BOTH, "axis": -1}
    spec = spec_of("LayerNorm", arguments)
    theirs = Made("LayerNorm", arguments, jnp.asarray(x))(x)[0]
    np.testing.assert_allclose(nj.normalize(spec, jnp.asarray(x)), theirs, atol=1e-6)
    assert distance(theirs, right(spec, x, (1,))) > 0.3


def test_a_negative_variance_is_nan_there_and_clamped_here():
    """N02: no spec gives NaN; the right one is ±1.3416, ±0.4472."""
    x = jnp.asarray([[100], [100.5], [101], [101.5]], "bfloat16")
    theirs = Made("BatchNorm", BATCH, x)(x)[0]
    assert bool(jnp.isnan(theirs).all())
    spec = spec_of("BatchNorm", BATCH)
    narrow = spec.replace(**{"precision.accumulate": "bfloat16"})
    assert bool(jnp.isfinite(nj.normalize(narrow, x)).all())
    truth = [[-1.3416], [-0.4472], [0.4472], [1.3416]]
    close(nj.normalize(spec, x).astype("float32"), truth, rtol=2.0**-8)


def test_a_decay_that_rounds_to_one_is_nan_there():
    """N14: 0/0 for 0.999 in bfloat16; 2.5 and 1.25 are right."""
    arguments = {**BOTH, "decay_rate": 0.999}
    x = jnp.asarray([[1], [2], [3], [4]], "bfloat16")
    layer = Made("BatchNorm", arguments, x)
    layer.state = layer(x)[1]
    assert all(bool(jnp.isnan(value).all()) for value in layer.stored())
    spec = spec_of("BatchNorm", arguments)
    fresh = nj.running.init(spec, x.shape, x.dtype)
    found = nj.running.read(spec, nj.running.update(spec, fresh, nj.moments(spec, x)))
    close([found.mean[0], found.variance[0]], [2.5, 1.25], rtol=1e-4)


def test_squares_of_float16_overflow_there():
    """N06: 0 where ±1 is right; NaN with float16 sums, which no layer should hide."""
    x = jnp.asarray([[300.0, -300.0, 300.0, 300.0]], "float16")
    arguments = {"axis": -1}
    theirs = Made("RMSNorm", arguments, x)(x)[0]
    assert theirs.tolist() == [[0.0, -0.0, 0.0, 0.0]]
    spec = spec_of("RMSNorm", arguments)
    assert nj.normalize(spec, x).tolist() == [[1.0, -1.0, 1.0, 1.0]]
    narrow = spec.replace(**{"precision.accumulate": "float16"})
    assert bool(jnp.isnan(nj.normalize(narrow, x)).all())


def test_the_gain_is_applied_in_bfloat16():
    """N16: cast, then multiply; accumulate='bfloat16' rounds as often."""
    x = jnp.asarray([[1, 2, 3, 4]], "bfloat16")
    gain = jnp.full(4, 1.3, "bfloat16")
    layer = Made("RMSNorm", {"axis": -1, "eps": 1e-6}, x)
    theirs = layer(x, {"scale": gain})[0].astype("float32")
    spec = spec_of("RMSNorm", {"axis": -1, "eps": 1e-6})
    narrow = spec.replace(**{"precision.accumulate": "bfloat16"})
    ours = nj.normalize(narrow, x, {"scale": gain}).astype("float32")
    exact = 1.296875 * np.array([[1, 2, 3, 4]]) / np.sqrt(7.5)
    close(ours, theirs, rtol=2.0**-8)
    assert distance(theirs, exact) > 2.0**-10
    close(nj.normalize(spec, x, {"scale": gain}).astype("float32"), exact, 2.0**-9)
