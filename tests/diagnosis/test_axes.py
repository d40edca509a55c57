"""Each layer on a small input: what it computes, and what it declares."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import normjax as nj
from normjax.diagnosis.alone import alone
from normjax.diagnosis.axes import by_hand
from normjax.diagnosis.binding import subject

pytestmark = pytest.mark.jax_defaults

AXES, DERIVATIVE = nj.diagnosis.STEPS[0], nj.diagnosis.STEPS[3]
IMAGES = np.random.default_rng(0).normal(size=(4, 5, 3, 6)).astype(np.float32)
SQUARE = np.random.default_rng(1).normal(size=(4, 4, 4)).astype(np.float32)


class FirstAxis(nn.LayerNorm):
    """A layer norm that takes its statistics over the positions."""

    def __call__(self, x):
        return jnp.swapaxes(super().__call__(jnp.swapaxes(x, -1, -2)), -1, -2)


class Variance(nn.LayerNorm):
    """Divides by the variance."""

    def __call__(self, x):
        y = super().__call__(x)
        return y / jnp.std(x, -1, keepdims=True)


class Detached(nn.LayerNorm):
    """Its statistics carry no gradient, and nothing says so."""

    def __call__(self, x):
        mean = jax.lax.stop_gradient(jnp.mean(x, -1, keepdims=True))
        var = jax.lax.stop_gradient(jnp.var(x, -1, keepdims=True))
        y = super().__call__(x)
        same = (x - mean) / jnp.sqrt(var + self.epsilon)
        bare = (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(
            jnp.var(x, -1, keepdims=True) + self.epsilon
        )
        scale = self.get_variable("params", "scale")
        return y + (same - bare) * scale


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        return nn.LayerNorm()(x, mask=mask)


def of(found: Any, step: str) -> list[tuple[str, str]]:
    return [
        (each.severity, each.what)
        for each in found.findings
        if each.step == step and each.severity != "note"
    ]


WRONG = {
    "square axes": (FirstAxis(), SQUARE, AXES, "error"),
    "power": (Variance(), IMAGES, AXES, "error"),
    "channels first": (nn.BatchNorm(axis=1), IMAGES, AXES, "warning"),
    "detached": (Detached(), IMAGES, DERIVATIVE, "error"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_is_not_what_it_says_is_found(name: str):
    model, x, step, severity = WRONG[name]
    found = of(nj.diagnose(model, None, x), step)
    assert [each for each, _ in found] == [severity]


def test_the_value_of_a_detached_layer_is_right():
    assert of(nj.diagnose(Detached(), None, IMAGES), AXES) == []


def test_a_mask_of_examples_and_positions_is_not_one_of_positions_and_features():
    mask = np.arange(4) < np.array([[4], [3], [2], [4]])
    found = nj.diagnose(Masked(), None, {"x": SQUARE, "mask": mask})
    assert ("error", "the mask tells features of one position apart") in of(found, AXES)
    right = nj.diagnose(Masked(), None, {"x": SQUARE, "mask": mask[..., None]})
    assert of(right, AXES) == []


class Both(nnx.Module):
    """Layers of both libraries over one axis and over several."""

    def __init__(self, rngs: nnx.Rngs):
        wide: Any = {"reduction_axes": (1, 2, 3), "dtype": jnp.bfloat16}
        layers: list[Any] = [
            nnx.BatchNorm(6, rngs=rngs),
            nnx.GroupNorm(6, num_groups=3, rngs=rngs),
            nnx.LayerNorm(6, **wide, rngs=rngs),
            nnx.RMSNorm(6, rngs=rngs),
            nj.nnx.Norm(nj.instance_norm(), (4, 5, 3, 6)),
        ]
        self.layers = nnx.List(layers)
        self.last: Any = nj.nnx.Norm(nj.batch_norm(), (4, 5, 3, 6))

    def __call__(self, x, train: bool = True):
        for layer in self.layers:
            x = layer(x)
        return self.last(x, use_running_average=not train)


def test_right_layers_of_both_libraries_are_right():
    found = nj.diagnose(Both(nnx.Rngs(0)), None, IMAGES)
    assert of(found, AXES) == of(found, DERIVATIVE) == []
    assert not [each for each in found.findings if each.step == AXES]


def test_the_small_input_is_small_and_the_formula_by_hand():
    model = nn.LayerNorm(epsilon=1e-5)
    bound = subject(model, None, np.ones((16, 7, 2), np.float32))
    layer = alone(bound, bound.run("train"), "")
    assert not isinstance(layer, str)
    assert layer.layout.shape == (2, 3, 2)
    x = np.zeros((2, 3, 2))
    x[0, 0] = 1, 3
    y = by_hand(layer, x)
    # (1, 3) is (−1, 1) up to ε; scale is (1, 2) and bias (0, 10).
    np.testing.assert_allclose(y[0, 0], (-1, 12), rtol=1e-5)
    np.testing.assert_array_equal(y[1], [[0, 10]] * 3)
