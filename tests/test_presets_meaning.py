"""What presets do on what they are made for: conditions, heads and kernels."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import refuse

import normjax as nj

pytestmark = pytest.mark.jax_defaults

KEY = jax.random.key(0)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(0.5, 2.0, shape).astype(np.float32)


def standard(x: np.ndarray, axes, epsilon: float = 1e-5) -> np.ndarray:
    x = x.astype(np.float64)
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon)


@pytest.mark.parametrize("positions", [(), (5,), (5, 7)])
@pytest.mark.parametrize("channels", ["first", "last"])
def test_adaptive_layer_norm_modulates_every_position_alike(positions, channels: str):
    axis = 1 if channels == "first" else -1
    x = np.moveaxis(draw(3, *positions, 6), -1, axis)
    params: Any = {"scale": draw(3, 6), "bias": draw(3, 6)[::-1]}
    y = nj.normalize(nj.adaptive_layer_norm(channels=channels), jnp.asarray(x), params)
    rows = (3, *(1 for _ in positions), 6)
    scale, bias = (np.moveaxis(p.reshape(rows), -1, axis) for p in params.values())
    expected = (1 + scale) * standard(x, axis) + bias
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_adaptive_layer_norm_starts_as_layer_norm():
    """N65: scale 0 and shift 0 change nothing, since the scale is stored as 1 + w."""
    x, spec = jnp.array([[1.0, 2.0, 3.0, 4.0]]), nj.adaptive_layer_norm()
    y = nj.normalize(spec, x, nj.init(spec, x.shape))
    np.testing.assert_array_equal(y, nj.normalize(nj.layer_norm(), x))
    with refuse("params.scale has shape (4,), expected (1, 4): the axes 'b c' of"):
        nj.normalize(spec, x, {"scale": jnp.zeros(4), "bias": jnp.zeros(4)})


def test_a_condition_for_every_token():
    affine = nj.Affine("b t c", stored="1+w")
    spec = nj.adaptive_layer_norm(pattern="b t [c]", affine=affine)
    x = draw(2, 3, 4)
    params: Any = {"scale": draw(2, 3, 4), "bias": draw(2, 3, 4)}
    y = nj.normalize(spec, jnp.asarray(x), params)
    expected = (1 + params["scale"]) * standard(x, -1) + params["bias"]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_the_condition_gets_a_gradient():
    x, spec = jnp.asarray(draw(2, 5, 4)), nj.adaptive_layer_norm()

    def loss(condition):
        params = {"scale": condition @ jnp.ones((3, 4)), "bias": condition[:, :1] * 0}
        params["bias"] = jnp.broadcast_to(params["bias"], (2, 4))
        return jnp.sum(nj.normalize(spec, x, params) ** 2)

    assert np.abs(jax.grad(loss)(jnp.ones((2, 3)))).min() > 0.1


def test_adaptive_instance_norm_takes_the_style_s_statistics():
    content, style = jnp.asarray(draw(2, 5, 5, 3)), 7 * draw(2, 4, 4, 3) + 3
    params = {"scale": style.std((1, 2)), "bias": style.mean((1, 2))}
    y = nj.normalize(nj.adaptive_instance_norm(), content, params)
    np.testing.assert_allclose(y.mean((1, 2)), params["bias"], rtol=1e-4)
    np.testing.assert_allclose(y.std((1, 2)), params["scale"], rtol=1e-4)


def test_the_halves_make_a_layer_norm():
    """Scale-only after centre-only is layer norm; either alone is not."""
    x = jnp.asarray(draw(4, 6))
    centered = nj.normalize(nj.center_only(), x)
    whole = nj.normalize(nj.layer_norm(), x)
    both = nj.normalize(nj.scale_only(), centered)
    np.testing.assert_allclose(both, whole, rtol=1e-5, atol=1e-6)
    for half in (centered, nj.normalize(nj.scale_only(), x)):
        assert np.abs(half - whole).max() > 0.1
    assert [
        d.name for d in nj.diff(nj.layer_norm(), nj.scale_only()) if d.declared
    ] == ["center"]


def test_heads_one_by_one_and_together():
    """N64: [3, 4] and [30, 40] by each head, and over both."""
    x = jnp.array([[[3.0, 4.0], [30.0, 40.0]]])
    each = nj.normalize(nj.qk_norm(), x)
    np.testing.assert_allclose(each[0], [[0.8485, 1.1314]] * 2, atol=5e-5)
    both = nj.normalize(nj.qk_norm("h d"), x)
    expected = [[0.1194, 0.1592], [1.1940, 1.5921]]
    np.testing.assert_allclose(both[0], expected, atol=5e-5)


SCALES = {"d": (1, 1, 4), "h": (1, 3, 1), "h d": (1, 3, 4), "": (1, 1, 1)}


@pytest.mark.parametrize("axes", ["d", "h d"])
@pytest.mark.parametrize("scale", SCALES)
def test_whose_scale_a_head_has(axes: str, scale: str):
    x, spec = jnp.asarray(draw(5, 3, 4)), nj.qk_norm(axes, scale)
    stored = nj.init(spec, x.shape)["scale"].shape
    value = draw(*stored)
    y = nj.normalize(spec, x, {"scale": jnp.asarray(value)})
    bare = nj.normalize(nj.qk_norm(axes), x)
    np.testing.assert_allclose(y, bare * value.reshape(SCALES[scale]), rtol=1e-5)


def test_heads_before_the_positions_or_in_one_axis():
    x = draw(2, 5, 3, 4)
    y = nj.normalize(nj.qk_norm("h d"), jnp.asarray(x))
    first = nj.qk_norm("h d", pattern="b [h] ... [d]")
    moved = nj.normalize(first, jnp.asarray(np.moveaxis(x, 2, 1)))
    np.testing.assert_allclose(np.moveaxis(np.asarray(moved), 1, 2), y, rtol=1e-6)
    one = nj.qk_norm(pattern="... (h [d])", sizes={"h": 3})
    flat = nj.normalize(one, jnp.asarray(x.reshape(2, 5, 12)))
    each = nj.normalize(nj.qk_norm(), jnp.asarray(x))
    np.testing.assert_allclose(flat, np.asarray(each).reshape(2, 5, 12), rtol=1e-6)


def test_flax_s_own_normalization_of_queries():
    """What ``normalize_qk`` of Flax does: layer norm of each head, no bias."""
    x = jnp.asarray(draw(2, 5, 3, 4))
    theirs: Any = nn.LayerNorm(use_bias=False, epsilon=1e-5)
    spec = nj.qk_norm(center=True, divide="std")
    expected = theirs.init_with_output(KEY, x)[0]
    np.testing.assert_allclose(nj.normalize(spec, x), expected, rtol=1e-3, atol=1e-5)


# A Flax layer, an input, and the kernel's axes.
KERNELS: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "Dense": (nn.Dense(3), (2, 4), "i"),
    "Conv 1d": (nn.Conv(3, (5,), padding="VALID"), (2, 5, 4), "h i"),
    "Conv": (nn.Conv(3, (2, 3), padding="VALID"), (2, 2, 3, 4), "h w i"),
    "Conv of any rank": (nn.Conv(3, (2, 3), padding="VALID"), (2, 2, 3, 4), "... i"),
    "Conv with groups": (
        nn.Conv(6, (2, 2), padding="VALID", feature_group_count=2),
        (2, 2, 2, 4),
        "h w i",
    ),
    "depthwise": (
        nn.Conv(4, (2, 2), padding="VALID", feature_group_count=4),
        (2, 2, 2, 4),
        "h w i",
    ),
    "ConvTranspose": (nn.ConvTranspose(3, (2, 3)), (2, 4, 4, 2), "h w i"),
    "ConvTranspose, transposed": (
        nn.ConvTranspose(3, (2, 3), transpose_kernel=True),
        (2, 4, 4, 2),
        "h w o i",
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_standardized_together_is_what_enters_an_output(name: str):
    """Which entries those are, the gradient of a channel's output says."""
    layer, shape, axes = KERNELS[name]
    x = jnp.asarray(np.abs(draw(*shape)) + 1)
    params: Any = layer.init(KEY, x)["params"]
    kernel = params["kernel"] + 0.3
    spec = nj.weight_standardization(axes)
    found = np.asarray(nj.normalize(spec, kernel))
    channels = params["bias"].size

    def output(kernel, channel):
        y: Any = layer.apply({"params": {**params, "kernel": kernel}}, x)
        return jnp.sum(y[..., channel])

    for channel in range(channels):
        entries = np.asarray(jax.grad(output)(kernel, channel)) != 0
        assert 1 < entries.sum() == kernel.size // channels
        expected = standard(np.asarray(kernel)[entries], 0)
        np.testing.assert_allclose(found[entries], expected, rtol=1e-4, atol=1e-5)


def test_the_two_transposed_forms_are_not_exchangeable():
    kernel = jnp.asarray(draw(2, 3, 4, 4))
    right, wrong = (
        nj.normalize(nj.weight_standardization(axes), kernel)
        for axes in ("h w o i", "h w i")
    )
    assert np.abs(right - wrong).max() > 0.1


@pytest.mark.parametrize(
    ("axes", "sizes", "shape"),
    [
        ("o i", {}, (6, 4)),
        ("o i h w", {}, (6, 4, 2, 3)),
        ("i o h w", {}, (4, 6, 2, 3)),
        ("(g i) o h w", {"g": 2}, (4, 3, 2, 3)),
    ],
)
def test_kernels_as_pytorch_stores_them(axes: str, sizes: dict, shape):
    """ConvTranspose2d: output channel (g, o) is made of the inputs of group g."""
    kernel = draw(*shape)
    found = nj.normalize(
        nj.weight_standardization(axes, sizes=sizes), jnp.asarray(kernel)
    )
    if axes.startswith("o"):
        expected = standard(kernel, tuple(range(1, len(shape))))
    else:
        split = kernel.reshape(sizes.get("g", 1), -1, *shape[1:])
        expected = standard(split, (1, 3, 4)).reshape(shape)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_grouped_kernel_says_how_many_groups_it_has():
    spec = nj.weight_standardization("(g i) o h w")
    with refuse("needs a size for all of its parts but one; pass sizes={'g': ...}"):
        nj.init(spec, (4, 3, 2, 2))
