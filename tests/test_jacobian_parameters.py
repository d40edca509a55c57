"""Derivatives by scale, bias, ε and the statistics, against JAX's own of the map."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import jacobian

PLACEMENTS = ("inside_sqrt", "outside_sqrt", "floor_var", "floor_std")
SHAPE = (4, 3, 6)
SPECS = {
    "layer": nj.layer_norm(epsilon=0.1),
    "rms": nj.rms_norm(epsilon=0.1),
    "batch": nj.batch_norm(epsilon=0.1, ddof=1),
    "group": nj.group_norm(groups=2, epsilon=0.1),
    "center_only": nj.center_only(),
    "rescaled": nj.layer_norm(epsilon=0.1).replace(**{"precision.rescale": True}),
    **{
        f"{p}_divides": nj.layer_norm(epsilon=0.1, epsilon_placement=p)
        for p in PLACEMENTS
    },
    **{
        f"{p}_rules": nj.layer_norm(epsilon=9.0, epsilon_placement=p)
        for p in PLACEMENTS
    },
}
each = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
MASKS = {"none": None, "masked": np.arange(12).reshape(4, 3, 1) % 4 > 0}


def draw(seed: int, shape=SHAPE) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(0.7, 1.5, shape))


def params(spec: nj.NormSpec):
    shapes = {name: value.shape for name, value in nj.init(spec, SHAPE).items()}
    return {name: draw(9, shape) for name, shape in shapes.items()}


def agree(operator, right: jax.Array, columns: int) -> None:
    """64 u n of the whole, n being the largest group."""
    with jax.numpy_dtype_promotion("standard"):
        found = np.asarray(operator.as_matrix())
    exact = np.asarray(right).reshape(-1, columns)
    assert found.shape == exact.shape
    bound = 64 * 2.0**-53 * 72 * np.linalg.norm(exact)
    assert np.linalg.norm(found - exact) <= bound


@each
@pytest.mark.parametrize("masked_output", ["keep", "zero", "passthrough"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_scale_and_bias(spec, masked_output, mask):
    spec, x = spec.replace(masked_output=masked_output), draw(0)
    start = params(spec)
    right = jax.jacfwd(partial(nj.normalize, spec, x, mask=mask))(start)
    found = jacobian.scale_jacobian(spec, x, mask=mask)
    agree(found, right["scale"], start["scale"].size)
    if "bias" in start:
        found = jacobian.bias_jacobian(spec, x, mask=mask)
        agree(found, right["bias"], start["bias"].size)


@each
def test_epsilon(spec):
    x, start = draw(1), params(spec)

    def layer(epsilon):
        return nj.normalize(spec.replace(epsilon=epsilon), x, start)

    right = jax.jacfwd(layer)(jnp.asarray(spec.epsilon, jnp.float64))
    agree(jacobian.epsilon_jacobian(spec, x, start), right, 1)


@each
def test_statistics(spec):
    """Given statistics; and those of the input, as if they had been given."""
    x, start = draw(2), params(spec)
    own = nj.moments(spec, x)
    square = own.variance(spec.ddof) if spec.divide == "std" else own.mean_square()
    stored = nj.Statistics(own.mean + own.mean_low, square)
    layer = partial(nj.normalize, spec, x, start)
    right = jax.jacfwd(lambda given: layer(moments=given))(stored)
    for moments in (stored, None):
        found = jacobian.statistics_jacobian(spec, x, start, moments=moments)
        agree(found.mean, right.mean, own.mean.size)
        agree(found.variance, right.variance, own.mean.size)


def test_no_parameter_to_differentiate_by():
    with pytest.raises(ValueError, match=r"has no bias to differentiate by"):
        jacobian.bias_jacobian(nj.rms_norm(), draw(0))
    with pytest.raises(ValueError, match=r"has no scale to differentiate by"):
        jacobian.scale_jacobian(nj.layer_norm(affine=None), draw(0))


def test_a_chain_of_two_norms_and_a_kernel_stays_lazy():
    """J of layer norm, Dense, RMS norm is the product of the three."""
    kernel = draw(3, (6, 5))
    first, second = nj.layer_norm(epsilon=0.1), nj.rms_norm(epsilon=0.1)
    x = draw(4, (2, 6))

    def chain(x):
        hidden = jnp.matmul(nj.normalize(first, x), kernel, precision="highest")
        return nj.normalize(second, hidden)

    hidden = jnp.matmul(nj.normalize(first, x), kernel, precision="highest")
    found = (
        nj.input_jacobian(second, hidden)
        @ nj.operators.Dense(kernel, lead=(2,))
        @ nj.input_jacobian(first, x)
    )
    agree(found, jax.jacfwd(chain)(x), 12)
    with pytest.raises(ValueError, match="Product has no closed-form rank"):
        nj.operators.rank(found)
    assert nj.operators.rank(found, numerical=True) == 2 * 5
