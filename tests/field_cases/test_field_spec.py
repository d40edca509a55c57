"""Field cases of declaration: axes, parameter shapes, groups, layouts, epsilon.

The kind: every preset that reduces or keeps the axis in question, functional and in
layers. Of the same theme elsewhere: refusals of the constructor in
tests/test_spec_errors.py; conventions of other libraries come with interop.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit, wide
from kinds import VECTOR, bound
from small import refuse

import normjax as nj

KEY = jax.random.key(0)
normalize = jit(nj.normalize)
EIGHT = np.arange(1.0, 9.0).reshape(1, 4, 2)


def close(y, right, rtol: float = 0.0) -> None:
    np.testing.assert_allclose(wide(y), right, rtol=rtol or bound(8), atol=bound(8))


@pytest.mark.jax_defaults
def test_n54_what_layer_norm_reduces():
    """N54: the last axis, or all but the examples; one group is the latter.

    Flax agrees with each where it is asked for the same axes.
    """
    x = jnp.asarray(EIGHT, jnp.float32)
    last = np.tile([-0.5, 0.5], 4).reshape(1, 4, 2) / np.sqrt(0.25 + 1e-6)
    whole = (EIGHT - 4.5) / np.sqrt(5.25 + 1e-6)
    np.testing.assert_allclose(whole.ravel()[:2], [-1.5275, -1.0911], atol=5e-5)
    close(normalize(nj.layer_norm(epsilon=1e-6), x), last)
    close(normalize(nj.layer_norm("t c", epsilon=1e-6), x), whole)
    close(normalize(nj.group_norm(groups=1, epsilon=1e-6), x), whole)
    theirs: list[tuple[Any, np.ndarray]] = [
        (nn.LayerNorm(), last),
        (nn.LayerNorm(reduction_axes=(1, 2)), whole),
        (nn.GroupNorm(num_groups=1), whole),
    ]
    for layer, right in theirs:
        close(layer.init_with_output(KEY, x)[0], right)


@pytest.mark.jax_defaults
def test_n55_parameters_have_their_own_axes():
    """N55: over (t, c): one for each entry, each channel, each position, or none."""
    x = jnp.ones((2, 3, 4))
    shapes = {"t c": (3, 4), "c": (4,), "t": (3,)}
    for axes, shape in shapes.items():
        spec = nj.layer_norm("t c", affine=axes)
        assert nj.init(spec, x.shape)["scale"].shape == shape
        layer: Any = nj.linen.Norm(spec).init(KEY, x)
        assert layer["params"]["bias"].shape == shape
        assert nj.nnx.Norm(spec, x.shape).scale.get_value().shape == shape
    assert nj.init(nj.layer_norm("t c", affine=None), x.shape) == {}
    with refuse("affine axes 'c t' are not in the order of the pattern"):
        nj.init(nj.layer_norm("t c", affine="c t"), x.shape)
    flax: Any = nn.LayerNorm(reduction_axes=(1, 2)).init(KEY, x)
    assert flax["params"]["scale"].shape == (4,)
    both: Any = nn.LayerNorm(reduction_axes=(1, 2), feature_axes=(1, 2)).init(KEY, x)
    assert both["params"]["scale"].shape == (3, 4)


def test_n55_each_parameter_meets_its_axis():
    """N55: the product is along the axes that are named, in the order they are."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)))
    x_hat = wide(normalize(nj.layer_norm("t c"), x))
    for axes, full in (("t c", (1, 3, 4)), ("c", (1, 1, 4)), ("t", (1, 3, 1))):
        spec = nj.layer_norm("t c", affine=nj.Affine(axes, bias=False))
        shape = nj.init(spec, x.shape)["scale"].shape
        scale = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
        y = normalize(spec, x, {"scale": jnp.asarray(scale)})
        close(y, x_hat * scale.reshape(full))


def test_n56_rms_is_the_root_of_the_mean_square():
    """N56: [0.3651, …]; the standard deviation without centring is another spec."""
    x = jnp.asarray(VECTOR)
    close(normalize(nj.rms_norm(epsilon=0.0), x), VECTOR / np.sqrt(7.5))
    other = nj.layer_norm(center=False, epsilon=0.0)
    close(normalize(other, x), VECTOR / np.sqrt(1.25))
    assert "divide" in nj.diff(nj.rms_norm(), other).__str__()


@pytest.mark.parametrize("channels", ["last", "first"])
def test_n57_groups_must_divide(channels: Any):
    """N57: named with both numbers wherever a shape is first met; 48 in 16 works."""

    def shape(size: int) -> tuple[int, ...]:
        return (2, size, 5) if channels == "first" else (2, 5, size)

    refused = [(6, 4), (16, 32), (7, 2)]
    for size, groups in refused:
        spec = nj.group_norm(groups=groups, channels=channels)
        for act in (
            lambda spec=spec, n=size: nj.init(spec, shape(n)),
            lambda spec=spec, n=size: nj.normalize(spec, jnp.ones(shape(n))),
            lambda spec=spec, n=size: nj.nnx.Norm(spec, shape(n)),
        ):
            with pytest.raises(
                ValueError, match=rf"g={groups} does not divide .* {size}$"
            ):
                act()
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape(48)))
    y = wide(normalize(nj.group_norm(groups=16, channels=channels), x))
    y = np.moveaxis(y, 1, -1) if channels == "first" else y
    view = y.reshape(2, 5, 16, 3)
    np.testing.assert_allclose(view.mean((1, 3)), 0, atol=1e-14)
    np.testing.assert_allclose(view.var((1, 3)), 1, rtol=1e-4)


def test_n57_ghosts_must_divide():
    """N57: the same for ghosts of a batch."""
    with pytest.raises(ValueError, match=r"g=4 does not divide .* 6$"):
        nj.normalize(nj.ghost_batch_norm(ghosts=4), jnp.ones((6, 3)))
    with refuse("sizes.g is 0, expected a whole number, 1 or more"):
        nj.group_norm(groups=0)


@pytest.mark.jax_defaults
def test_n61_batch_norm_keeps_its_channels():
    """N61: (2, 3, 2, 2): three parameters as channels first, two as channels last.

    The pattern says which axis is kept; what is reduced has mean 0 there.
    """
    x = jax.random.normal(KEY, (2, 3, 2, 2)) + 5
    for channels, count, axes in (("first", 3, (0, 2, 3)), ("last", 2, (0, 1, 2))):
        spec = nj.batch_norm(channels=channels)
        assert nj.init(spec, x.shape)["scale"].shape == (count,)
        assert nj.nnx.Norm(spec, x.shape).mean.get_value().shape == (count,)
        y = wide(normalize(spec, x))
        np.testing.assert_allclose(y.mean(axes), 0, atol=bound(12))
    for axis, count in ((-1, 2), (1, 3)):
        theirs: Any = nn.BatchNorm(use_running_average=False, axis=axis)
        assert theirs.init(KEY, x)["params"]["scale"].shape == (count,)


CHANNELS = {
    "layer_norm": nj.layer_norm,
    "rms_norm": nj.rms_norm,
    "batch_norm": nj.batch_norm,
    "ghost_batch_norm": lambda **fields: nj.ghost_batch_norm(ghosts=2, **fields),
    "instance_norm": nj.instance_norm,
    "group_norm": lambda **fields: nj.group_norm(groups=2, **fields),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_n63_memory_layouts_agree(name: str):
    """N63: channels first and last after transposition, to the order of the sums."""
    x = np.random.default_rng(0).normal(size=(4, 3, 5, 6)).astype(np.float32) + 2
    last, first = (CHANNELS[name](channels=where) for where in ("last", "first"))
    params = {
        key: jnp.asarray(np.random.default_rng(1).normal(size=value.shape), jnp.float32)
        for key, value in nj.init(last, x.shape).items()
    }
    y = wide(normalize(last, x, params))
    moved = normalize(first, np.moveaxis(x, -1, 1), params)
    gap = np.moveaxis(wide(moved), 1, -1) - y
    # 4 ulp beside the largest term of scale · x̂ + bias, which may cancel.
    assert np.max(abs(gap)) <= 8 * 2.0**-24 * np.max(abs(y))


def test_n64_heads_of_qk_norm():
    """N64: per head [0.8485, 1.1314] for both; over all heads 0.1194 … 1.5921."""
    heads = jnp.array([[3.0, 4.0], [30.0, 40.0]])
    each = wide(normalize(nj.qk_norm(epsilon=0.0), heads))
    np.testing.assert_allclose(each, [[0.8485, 1.1314]] * 2, atol=5e-5)
    y = wide(normalize(nj.qk_norm("h d", epsilon=0.0), heads[None]))[0]
    np.testing.assert_allclose(y, [[0.1194, 0.1592], [1.1940, 1.5921]], atol=5e-5)


def test_n64_gains_of_qk_norm():
    """N64: (D,), (H, D) and (H,) are declared, and multiply what they name."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 4)))
    x_hat = wide(normalize(nj.qk_norm(), x))
    for axes, shape, full in (
        ("d", (4,), (1, 1, 1, 4)),
        ("h d", (3, 4), (1, 1, 3, 4)),
        ("h", (3,), (1, 1, 3, 1)),
    ):
        spec = nj.qk_norm(scale=axes)
        assert nj.init(spec, x.shape)["scale"].shape == shape
        scale = np.random.default_rng(1).normal(size=shape)
        y = normalize(spec, x, {"scale": jnp.asarray(scale)})
        close(y, x_hat * scale.reshape(full))


@pytest.mark.parametrize("d", [4, 64])
def test_n64_logits_are_bounded(d: int):
    """N64: unit gain, per head: |q·k|/√d ≤ √d, reached by parallel vectors."""
    rng = np.random.default_rng(d)
    q, k = (
        rng.normal(size=(50, d)) * 10.0 ** rng.uniform(-2, 4, (50, 1)) for _ in "qk"
    )
    k[0] = 3 * q[0]
    a, b = (wide(normalize(nj.qk_norm(), jnp.asarray(v))) for v in (q, k))
    logits = a @ b.T / np.sqrt(d)
    assert np.max(abs(logits)) <= np.sqrt(d) * (1 + bound(d, np.float64))
    assert logits[0, 0] >= np.sqrt(d) * (1 - 1e-2)


@pytest.mark.parametrize("preset", [nj.layer_norm, nj.rms_norm])
def test_n65_zero_modulation(preset):
    """N65: scale 0, shift 0: unchanged under 1 + scale, zeros under scale."""
    x = jnp.asarray(VECTOR)
    center = preset().center
    plain = normalize(preset(affine=None), x)
    for stored, right in (("1+w", wide(plain)), ("w", 0 * VECTOR)):
        spec = preset(affine=nj.Affine("c", bias=center, stored=stored))
        params = jax.tree.map(jnp.zeros_like, nj.init(spec, x.shape))
        close(normalize(spec, x, params), right)


def test_n65_a_second_norm_cancels_the_modulation():
    """N65: LN(a·LN(x) + b) = LN(x) for one a > 0 and b, up to ε/a²."""
    spec, x = nj.layer_norm(), jnp.asarray(VECTOR)
    y = normalize(spec, x)
    for a, b in ((2.0, 0.0), (0.5, 3.0), (10.0, -1.0)):
        np.testing.assert_allclose(normalize(spec, a * y + b), y, rtol=1e-4)


@pytest.mark.jax_defaults
def test_n75_epsilon_is_never_a_default_of_somebody_else():
    """N75: the numbers at 1e-3, 1e-5, 1e-6; all presets share 1e-5, Flax has 1e-6."""
    x = jnp.array([0.09484422, 0.16441762], jnp.float32)
    stored = nj.Statistics(jnp.zeros(1), jnp.full(1, 0.01))
    for epsilon, gain, value in (
        (1e-3, 0.953463, 0.739956),
        (1e-5, 0.999500, 0.995894),
        (1e-6, 0.999950, 0.999587),
    ):
        y = normalize(nj.layer_norm(epsilon=epsilon), x)
        np.testing.assert_allclose(y, [-value, value], atol=1e-6)
        spec = nj.batch_norm(epsilon=epsilon)
        y = normalize(spec, jnp.full((1, 1), 0.1), moments=stored)
        np.testing.assert_allclose(y, [[gain]], atol=1e-6)
    theirs: Any = nn.LayerNorm().init_with_output(KEY, x)[0]
    np.testing.assert_allclose(theirs, [-0.999587, 0.999587], atol=1e-5)
    assert {preset().epsilon for preset in nj.presets.PRESETS.values()} == {1e-5}


@pytest.mark.parametrize("divide", ["std", "rms"])
def test_n75_another_epsilon_can_be_absorbed_in_eval_only(divide: str):
    """N75: gain √((σ² + ε′)/(σ² + ε)): 1.048285 for 0.01, 1e-5 → 1e-3.

    Exact with stored statistics; with the input's own it depends on the input.
    """
    stored = nj.Statistics(jnp.array([0.5, -1.0]), jnp.array([0.01, 2.0]))
    factor = np.sqrt((wide(stored.variance) + 1e-3) / (wide(stored.variance) + 1e-5))
    np.testing.assert_allclose(factor[0], 1.048285, atol=1e-6)
    spec = nj.batch_norm(affine=nj.Affine("c", bias=False), divide=divide)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)))
    params = {"scale": jnp.asarray(factor)}
    absorbed = normalize(spec.replace(epsilon=1e-3), x, params, moments=stored)
    close(absorbed, wide(normalize(spec, x, moments=stored)))
    own = nj.layer_norm(affine=None)
    rows = jnp.asarray(np.array([[-0.1, 0.1], [-1.0, 1.0]]))
    ratio = wide(normalize(own, rows)) / wide(
        normalize(own.replace(epsilon=1e-3), rows)
    )
    assert abs(ratio[0, 0] - ratio[1, 0]) > 1e-2
