"""What every norm layer of a model gets, against the same geometry one by one."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import normjax as nj
from normjax.analysis import AnalysisError, analyze_model

pytestmark = pytest.mark.jax_defaults

X = np.random.default_rng(0).normal(3.0, 2.0, (8, 5)).astype(np.float32)


class Linen(nn.Module):
    """Flax's batch norm, ours, and a layer that is called twice."""

    @nn.compact
    def __call__(self, x, train: bool, mask=None):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(6)(x))
        x = nj.linen.Norm(nj.layer_norm())(nn.relu(x), mask=mask)
        again = nn.RMSNorm(name="again")
        return again(again(x) + 1)


def extremes(analysis: Any, name: str) -> list[float]:
    histogram = analysis.distributions[name].histogram
    return [histogram.lowest.value, histogram.highest.value]


@pytest.mark.parametrize("train", [True, False])
def test_linen_layers_are_measured_on_their_own_inputs(train: bool):
    """In inference too, with the batch's own statistics."""
    model: Any = Linen()
    variables = model.init(jax.random.key(0), X, True)
    found = analyze_model(model, variables, X, train)
    assert list(found) == ["BatchNorm_0", "Norm_0", "again", "again#2"]
    inputs = nj.surgery.norm_inputs(model, variables, X, train)
    for path, analysis in found.items():
        name, _, second = path.partition("#")
        layer, calls = inputs[name].layer, inputs[name].calls
        x = calls[1 if second else 0].x
        right = nj.geometry(layer.spec.replace(affine=None, running=None), x)
        for measure, values in (("share", right.share), ("kappa", right.kappa)):
            expected = [float(np.min(values)), float(np.max(values))]
            np.testing.assert_allclose(
                extremes(analysis, measure), expected, rtol=1e-5, atol=1e-6
            )
    batch = found["BatchNorm_0"]
    assert (batch.batch_size, batch.examples) == (8, 8)
    assert found["Norm_0"].batch_size is None
    # The second call gets what the first one made: other numbers.
    assert extremes(found["again"], "share") != extremes(found["again#2"], "share")


def test_nnx_model_a_mixture_and_its_members():
    rngs = nnx.Rngs(0)
    mixture = nj.mixture.Mixture((nj.layer_norm(), nj.batch_norm()), affine="c")
    model = nnx.Sequential(
        nnx.Linear(5, 6, rngs=rngs), nj.nnx.MixtureNorm(mixture, (8, 6))
    )
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    found = analyze_model(model, None, jnp.asarray(X))
    assert list(found) == ["layers/1[0]", "layers/1[1]"]
    assert [each.batch_size for each in found.values()] == [None, 8]
    after = nnx.to_pure_dict(nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_a_constant_channel_is_flagged_at_its_layer():
    model: Any = Linen()
    variables = model.init(jax.random.key(0), X, True)
    kernel = variables["params"]["Dense_0"]["kernel"].at[:, 2].set(0)
    variables["params"]["Dense_0"]["kernel"] = kernel
    found = analyze_model(model, variables, X, True)["BatchNorm_0"]
    flagged = found.findings["no_variance"].found
    assert (flagged.count, flagged.index.tolist()) == (1, [[0, 2]])


def test_a_mask_is_refused_and_named():
    model: Any = Linen()
    variables = model.init(jax.random.key(0), X, True)
    with pytest.raises(AnalysisError, match="Norm_0 is called with a mask"):
        analyze_model(model, variables, X, True, jnp.ones((8, 1), bool))
