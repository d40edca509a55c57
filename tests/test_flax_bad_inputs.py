"""What does not fit a layer is one line that says so: Norm and the drop-ins."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_layers import KEY, KINDS, OURS
from small import refuse

import normjax as nj

pytestmark = pytest.mark.jax_defaults

X, WIDER = jnp.ones((4, 3)), jnp.ones((4, 5))
BATCH = nj.batch_norm()
STORING = ("Norm", "BatchNorm")


def made(framework: str, kind: str, **arguments: Any) -> Any:
    """A layer for three features; ``Norm`` is a batch norm."""
    if kind == "GroupNorm":
        arguments["num_groups"] = 1
    if framework == "linen":
        given = (BATCH,) if kind == "Norm" else ()
        return getattr(nj.linen, kind)(*given, **arguments)
    given = (BATCH, X.shape) if kind == "Norm" else (3,)
    return getattr(nj.nnx, kind)(*given, rngs=nnx.Rngs(0), **arguments)


def train(kind: str) -> dict[str, Any]:
    return {"use_running_average": False} if kind in STORING else {}


@pytest.mark.parametrize("kind", ["Norm", *KINDS])
@pytest.mark.parametrize("framework", OURS)
def test_another_number_of_features(framework, kind):
    first = "mean" if kind == "BatchNorm" else "scale"
    text = (
        f"{kind} holds {first} of shape (3,), and this input needs (5,): give it the "
        "features that it was made for, or make it for these"
    )
    layer, call = made(framework, kind), train(kind)
    if framework == "linen":
        variables = layer.init(KEY, X, **call)
        with refuse(text):
            layer.apply(variables, WIDER, mutable=["batch_stats"], **call)
    else:
        with refuse(text):
            layer(WIDER, **call)
        if kind in STORING:
            np.testing.assert_array_equal(layer.mean.get_value(), jnp.zeros(3))
            with refuse(text):
                layer(WIDER, use_running_average=True)


def test_a_layer_without_parameters_names_its_statistics():
    spec = nj.batch_norm(affine=None)
    text = "holds mean of shape (3,), and this input needs (5,)"
    layer: Any = nj.linen.Norm(spec)
    variables = layer.init(KEY, X, use_running_average=True)
    with refuse(f"Norm {text}"):
        layer.apply(variables, WIDER, use_running_average=True)
    with refuse(f"Norm {text}"):
        nj.nnx.Norm(spec, X.shape)(WIDER)


@pytest.mark.parametrize("framework", OURS)
def test_an_axis_that_the_input_does_not_have(framework):
    def call(x, **arguments):
        layer = made(framework, "BatchNorm", **arguments)
        call = {"use_running_average": False}
        return layer.init(KEY, x, **call) if framework == "linen" else layer(x, **call)

    for axis in (2, -3):
        text = (
            f"axis is {axis}, and the input has 2 axes: expected numbers from -2 to 1"
        )
        with refuse(text):
            call(X, axis=axis)
    with refuse("the input is one number, and axis is -1: it has none"):
        call(jnp.float32(1))
    with refuse("axis is 'c', expected whole numbers, for instance -1"):
        call(X, axis="c")
    with refuse("pattern '... [c]' has at least 1 dimensions, the tensor has 0"):
        nj.linen.Norm(nj.layer_norm()).init(KEY, jnp.float32(1))


@pytest.mark.parametrize("kind", STORING)
def test_a_mode_that_is_not_told(kind):
    layer = made("linen", kind)
    variables = layer.init(KEY, X, use_running_average=False)
    with refuse('"use_running_average" must be passed to the constructor or at call'):
        layer.apply(variables, X, mutable=["batch_stats"])
    silent = made("nnx", kind, use_running_average=None)
    with refuse(f"use_running_average is given nowhere: pass it to {kind} or to the"):
        silent(X)
    assert silent(X, use_running_average=True).shape == X.shape
    silent.train()
    assert silent(X).shape == X.shape


def test_a_mixture_that_is_not_told_its_mode():
    switchable, x = nj.mixture.switchable_norm(), jnp.ones((4, 2, 3))
    layer = nj.nnx.MixtureNorm(switchable, x.shape)
    layer.use_running_average = None
    with refuse("use_running_average is given nowhere: pass it to MixtureNorm"):
        layer(x)


@pytest.mark.parametrize("kind", STORING)
def test_statistics_that_cannot_change_or_are_missing(kind):
    layer = made("linen", kind)
    variables = layer.init(KEY, X, use_running_average=False)
    with refuse(
        f"{kind} updates its stored statistics, but 'batch_stats' is immutable: pass "
        "mutable=['batch_stats'] to apply, or do not update: update=False or "
        "use_running_average=True"
    ):
        layer.apply(variables, X, use_running_average=False)
    names = ("mean", "var", "count")[: 3 if kind == "Norm" else 2]
    with refuse(f"{kind} misses {', '.join(names)} in 'batch_stats': init makes"):
        layer.apply({"params": variables["params"]}, X, use_running_average=True)


@pytest.mark.parametrize("kind", STORING)
@pytest.mark.parametrize("framework", OURS)
def test_statistics_that_are_read_before_any_update(framework, kind):
    """N24: mean 0 and variance 1, never those of the batch that init saw.

    Whether there was an update is a value and not a shape, so that no error can tell;
    ``Norm`` holds it as ``count``.
    """
    x, layer = jnp.array([[1.0, 2, 3], [4, 5, 60]]), made(framework, kind)
    if framework == "linen":
        variables = layer.init(KEY, x, use_running_average=False)
        y = layer.apply(variables, x, use_running_average=True)
        count = variables["batch_stats"].get("count")
    else:
        y = layer(x, use_running_average=True)
        count = layer.count.get_value() if kind == "Norm" else None
    np.testing.assert_allclose(y, x / np.sqrt(np.float32(1 + 1e-5)), rtol=4 * 2.0**-23)
    assert count is None or count.tolist() == [0, 0, 0]
