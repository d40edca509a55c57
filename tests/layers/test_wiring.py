"""Where the norm stands: each placement's formula, in the core, in linen and in nnx."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_layers import KEY, draw
from small import refuse

import normjax as nj
from normjax.layers.wiring import DROPOUT_AT, PLACEMENTS, residual

pytestmark = pytest.mark.jax_defaults

EPSILON = 1e-6


def standardized(v: np.ndarray) -> np.ndarray:
    centred = v - v.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)


def marked(place: str, chosen: str, v: np.ndarray) -> np.ndarray:
    """Stands for dropout: what no norm undoes and no sum hides."""
    return v + np.arange(v.shape[-1]) ** 2 if place == chosen else v


def formula(placement: str, x, f, a: float, chosen: str = "") -> np.ndarray:
    """The five formulas as they are read, with a mark where dropout stands."""
    n, d = standardized, partial(marked, chosen=chosen)
    inner = {
        "pre": lambda: x + a * d("branch", v=f(n(d("norm_input", v=x)))),
        "post": lambda: n(d("norm_input", v=x + a * d("branch", v=f(x)))),
        "sandwich": lambda: x + a * d("branch", v=n(f(n(d("norm_input", v=x))))),
        "branch": lambda: x + a * d("branch", v=n(d("norm_input", v=f(x)))),
        "none": lambda: x + a * d("branch", v=f(x)),
    }
    return d("output", v=inner[placement]())


@pytest.mark.parametrize("chosen", ["", *DROPOUT_AT])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_formula_with_dropout_in_each_place(placement, chosen):
    x: Any = np.random.default_rng(0).normal(1, 2, (3, 5))
    f = lambda v: np.sin(v) + v**2  # noqa: E731
    norms: Any = {"norm": standardized, "norm_after": standardized}
    dropout: Any = partial(marked, chosen, chosen)
    y = residual(
        placement, x, f, norms, scale=0.3,
        dropout=dropout if chosen else None, dropout_at=chosen,
    )  # fmt: skip
    np.testing.assert_array_equal(y, formula(placement, x, f, 0.3, chosen))


def test_no_two_formulas_are_alike():
    """What the test above rests on."""
    x = np.random.default_rng(0).normal(1, 2, (3, 5))
    found = {
        (placement, chosen): formula(placement, x, np.sin, 0.3, chosen)
        for placement in PLACEMENTS
        for chosen in ("", *DROPOUT_AT)
        if (placement, chosen) != ("none", "norm_input")
    }
    names = list(found)
    for i, one in enumerate(names):
        for other in names[:i]:
            gap = np.abs(found[one] - found[other]).max()
            assert gap > 0.01, (one, other)


REPORT = {
    "pre": [-1.6833, 1.1056, 3.8944, 6.6833],
    "post": [-1.3416, -0.4472, 0.4472, 1.3416],
    "sandwich": [-0.3416, 1.5528, 3.4472, 5.3416],
    "branch": [-0.3416, 1.5528, 3.4472, 5.3416],
    "none": [3, 6, 9, 12],
}
NORMS = {
    "linen": (nj.layer_norm(epsilon=EPSILON), nn.LayerNorm, nj.linen.LayerNorm),
    "nnx": (nj.layer_norm(epsilon=EPSILON), nnx.LayerNorm, nj.nnx.LayerNorm),
}


def called(framework: str, block: Any, norm: Any, placement: str, x, call, **more):
    """The output of a fresh layer."""
    if framework == "linen":
        layer: Any = nj.layers.linen.Residual(block, norm, placement, **more)
        return layer.apply(layer.init(KEY, x, **call), x, **call)
    rngs = nnx.Rngs(0)
    residual = nj.layers.nnx.Residual
    return residual(block, norm, x.shape, placement=placement, rngs=rngs, **more)(
        x, **call
    )


@pytest.mark.parametrize("framework", NORMS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_numbers_of_the_report(framework, placement):
    """N66: x = [1, 2, 3, 4] and f(v) = 2 v, by a spec, by Flax's layer and by ours."""
    x = jnp.array([[1.0, 2, 3, 4]])
    for norm in NORMS[framework]:
        y = called(framework, lambda v: 2 * v, norm, placement, x, {})
        np.testing.assert_allclose(y[0], REPORT[placement], rtol=0, atol=5e-5)
    half = called(
        framework, lambda v: 2 * v, norm, placement, x, {}, residual_scale=0.5
    )
    wide = formula(placement, np.arange(1.0, 5)[None], lambda v: 2 * v, 0.5)
    np.testing.assert_allclose(half, wide, rtol=8 * 2.0**-23)


@pytest.mark.parametrize("framework", NORMS)
def test_dropout_in_a_layer(framework):
    """Kept entries are doubled, the others are what is left without the branch."""
    x = draw((64, 4))
    drop = {"dropout": 0.5, "dropout_at": "branch"}
    if framework == "linen":
        layer = nj.layers.linen.Residual(jnp.sin, **drop, placement="none")
        y = layer.apply({}, x, deterministic=False, rngs={"dropout": KEY})
        still = layer.apply({}, x, deterministic=True)
    else:
        made = partial(nj.layers.nnx.Residual, jnp.sin, None, (1, 4))
        layer = made(placement="none", **drop, rngs=nnx.Rngs(0))
        y = layer(x)
        still = nnx.view(layer, deterministic=True)(x)
        np.testing.assert_array_equal(still, layer(x, deterministic=True))
    np.testing.assert_array_equal(still, x + jnp.sin(x))
    kept = np.asarray(y != x)
    assert 0.3 < kept.mean() < 0.7
    np.testing.assert_allclose(np.asarray(y - x)[kept], 2 * np.sin(x)[kept], atol=2e-6)


@pytest.mark.parametrize("learn", ["number", "channel"])
def test_a_learned_scale_begins_where_it_is_told(learn):
    """ReZero: the identity, whose only gradient is that of the scale."""
    x, shape = draw((8, 4)), () if learn == "number" else (4,)
    wiring: Any = {"residual_scale": 0.0, "learn_scale": learn}
    layer: Any = nj.layers.linen.Residual(nn.Dense(4), nj.layer_norm(), **wiring)
    variables = layer.init(KEY, x)
    np.testing.assert_array_equal(layer.apply(variables, x), x)
    loss = lambda v: jnp.sum(layer.apply(v, x) ** 2)  # noqa: E731
    slopes = jax.grad(loss)(variables)["params"]
    assert slopes["scale"].shape == shape
    assert bool((slopes["scale"] != 0).all())
    assert not slopes["block"]["kernel"].any()
    twin = nj.layers.nnx.Residual(
        nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nj.layer_norm(), (1, 4), **wiring
    )
    assert twin.scale.get_value().shape == shape
    np.testing.assert_array_equal(twin(x), x)


def test_linen_and_nnx_agree_bit_for_bit():
    """The same parameters; a batch norm that stores, and a scale for each channel."""
    x, spec = draw((6, 5, 4)), nj.batch_norm()
    wiring: Any = {
        "placement": "sandwich", "residual_scale": 0.5, "learn_scale": "channel"
    }  # fmt: skip
    layer: Any = nj.layers.linen.Residual(nn.Dense(4), spec, **wiring)
    variables = layer.init(KEY, x, use_running_average=False)
    twin: Any = nj.layers.nnx.Residual(
        nnx.Linear(4, 4, rngs=nnx.Rngs(1)), spec, x.shape, **wiring
    )
    for name in ("kernel", "bias"):
        getattr(twin.block, name).set_value(variables["params"]["block"][name])
    mask = jnp.arange(5) < jnp.arange(1, 7)[:, None]
    y, changed = layer.apply(
        variables, x, mask=mask, use_running_average=False, mutable=["batch_stats"]
    )
    np.testing.assert_array_equal(twin(x, mask=mask), y)
    for name, stats in changed["batch_stats"].items():
        np.testing.assert_array_equal(getattr(twin, name).mean[...], stats["mean"])
        np.testing.assert_array_equal(getattr(twin, name).var[...], stats["var"])
    assert set(changed["batch_stats"]) == {"norm", "norm_after"}
    kept: Any = {"params": variables["params"], **changed}
    infer = layer.apply(kept, x, mask=mask, use_running_average=True)
    twin.eval()
    np.testing.assert_array_equal(twin(x, mask=mask), infer)
    assert np.abs(np.asarray(infer - y)).max() > 0.1


def test_words_that_are_none():
    x, norm, f = jnp.ones((2, 4)), nj.layer_norm(), jnp.sin
    cases = [
        ({"placement": "per"}, "placement is 'per', expected one of 'pre', 'post', "
         "'sandwich', 'branch', 'none'; did you mean 'pre'?"),
        ({"learn_scale": True}, "learn_scale is True, expected one of 'no', 'number'"),
        ({"dropout": 1}, "dropout is 1, expected a share from 0 to below 1"),
        ({"dropout_at": "end"}, "dropout_at is 'end', expected one of 'norm_input', "),
        ({"dropout_at": "norm_input", "dropout": 0.1, "placement": "none"},
         "dropout_at is 'norm_input' and placement is 'none', which has no norm: say"),
        ({"norm": None}, "placement is 'pre' and norm is None: give a norm, for "
         "instance nj.layer_norm(), or say placement='none'"),
    ]  # fmt: skip
    for wrong, text in cases:
        with refuse(text):
            nj.layers.linen.Residual(f, **{"norm": norm, **wrong}).init(KEY, x)
        with refuse(text):
            given = wrong.get("norm", norm)
            more: Any = {k: v for k, v in wrong.items() if k != "norm"}
            nj.layers.nnx.Residual(f, given, x.shape, rngs=nnx.Rngs(0), **more)
    with refuse("the block maps (2, 4) to (2, 1), and what is added to x must have"):
        nj.layers.linen.Residual(nn.Dense(1), norm).init(KEY, x)
    with refuse("mask has shape (4,), x has (2, 4): expected full rank with size 1"):
        nj.layers.linen.Residual(f, norm).init(KEY, x, mask=jnp.ones(4, bool))
