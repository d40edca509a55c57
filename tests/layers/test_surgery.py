"""Norm layers are found and watched; the model is left as it was."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from normed_models import KEY, SPEC, Lifted, Mixed, MixedNnx, batch, linen

import normjax as nj
from normjax.layers.surgery import norm_inputs, norm_layers

pytestmark = pytest.mark.jax_defaults

X = batch()
KINDS = {
    "first": "flax.linen.BatchNorm",
    "Dense_0": "flax.linen.LayerNorm",
    "ours": "normjax.linen.BatchNorm",
    "group": "flax.linen.GroupNorm",
    "rms": "flax.linen.RMSNorm",
    "norm": "normjax.linen.Norm",
}
NNX_KINDS = {
    "first": "flax.nnx.BatchNorm",
    "shared": "flax.nnx.LayerNorm",
    "rest/0": "normjax.nnx.BatchNorm",
    "rest/1": "flax.nnx.GroupNorm",
    "rest/2": "flax.nnx.RMSNorm",
    "rest/3": "normjax.nnx.Norm",
}


def same(first: Any, second: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_every_norm_of_a_linen_model_is_listed_with_what_it_holds():
    model, variables = linen(Mixed(), X, train=False)
    found = norm_layers(model, variables, X, train=False)
    assert {path: each.kind for path, each in found.items()} == KINDS
    for path, each in found.items():
        assert each.path == path
        assert each.shape == X.shape
        same(each.params, variables["params"][path])
        same(each.stored, variables["batch_stats"].get(path, {}))
    assert found["norm"].spec == SPEC
    assert found["ours"].spec == SPEC
    assert found["first"].spec == SPEC.replace(**{"precision.algorithm": "one_pass"})
    assert found["rms"].spec.divide == "rms"
    assert found["Dense_0"].spec.epsilon == 1e-6


def test_every_norm_of_an_nnx_model_is_listed_with_and_without_a_call():
    model = MixedNnx(rngs=nnx.Rngs(0))
    found, called = norm_layers(model), norm_layers(model, None, X)
    assert (
        {path: each.kind for path, each in found.items()}
        == NNX_KINDS
        == {path: each.kind for path, each in called.items()}
    )
    for path, each in found.items():
        assert each.spec == called[path].spec
        assert (each.shape, called[path].shape) == (None, X.shape)
    same(found["first"].params, {"scale": jnp.ones(4), "bias": jnp.zeros(4)})
    assert sorted(found["rest/3"].stored) == ["count", "mean", "var"]


def test_a_norm_that_is_the_model_has_the_empty_path():
    variables = nn.LayerNorm().init(KEY, X)
    assert list(norm_layers(nn.LayerNorm(), variables, X)) == [""]
    assert list(norm_layers(nnx.LayerNorm(4, rngs=nnx.Rngs(0)))) == [""]


@pytest.mark.parametrize("train", [True, False])
def test_linen_inputs_are_what_the_layers_got_and_the_variables_stay(train):
    model, variables = linen(Mixed(), X, train=train)
    before = jax.tree.map(np.asarray, variables)
    found = norm_inputs(model, variables, X, train=train)
    same(variables, before)
    assert {path: len(each.calls) for path, each in found.items()} == {
        **dict.fromkeys(KINDS, 1), "Dense_0": 2,
    }  # fmt: skip
    same(found["first"].calls[0].x, X)
    _, kept = model.apply(
        variables, X, train=train, capture_intermediates=True,
        mutable=["intermediates", "batch_stats"],
    )  # fmt: skip
    for path, each in found.items():
        outputs = kept["intermediates"][path]["__call__"]
        for call, y in zip(each.calls, outputs, strict=True):
            same(call.y, y)
            assert call.stored == (not train and path in variables["batch_stats"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nnx_inputs_are_what_the_layers_got_and_the_model_stays(dtype):
    model, x = MixedNnx(dtype, rngs=nnx.Rngs(0)), batch(dtype=dtype)
    before = nnx.to_pure_dict(nnx.state(model))
    types = {path: type(each) for path, each in nnx.iter_modules(model)}
    found = norm_inputs(model, None, x)
    same(nnx.to_pure_dict(nnx.state(model)), before)
    assert types == {path: type(each) for path, each in nnx.iter_modules(model)}
    same(found["first"].calls[0].x, x)
    first, second = found["shared"].calls
    same(second.x, jnp.tanh(first.y))
    same(found["rest/3"].calls[0].y, model(x))
    assert found["shared"].calls[0].x.dtype == dtype
    model.eval()
    seen = norm_inputs(model, None, x)
    assert [each.calls[0].stored for each in seen.values()] == [
        True, False, True, False, False, True,
    ]  # fmt: skip


def test_inside_of_lifted_transformations_each_step_and_lane_is_one_call():
    model, variables = linen(Lifted(), X)
    for _ in range(2):  # nothing hides in a cache
        found = norm_inputs(model, variables, X)
        counts = {path: len(each.calls) for path, each in found.items()}
        assert counts == {"scan/norm": 3, "remat": 1, "jit": 1, "vmap": len(X)}
    steps = found["scan/norm"]
    assert steps.layer.params["scale"].shape == (3, 4)
    assert steps.layer.shape == X.shape
    same(steps.calls[0].x, 2 * X)
    same(steps.calls[2].x, 2 * steps.calls[1].y)
    same(found["remat"].calls[0].x, steps.calls[2].y)
    rows = {tuple(np.asarray(call.x)) for call in found["vmap"].calls}
    assert rows == {tuple(np.asarray(row)) for row in found["jit"].calls[0].y}


class Rolled(nnx.Module):
    """Norms inside nnx.jit, nnx.remat and nnx.scan."""

    def __init__(self, rngs):
        create = nnx.vmap(lambda rngs: nnx.LayerNorm(4, rngs=rngs))
        self.stack = nnx.split_rngs(splits=3)(create)(rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        step = lambda x, layer: layer(2 * x)  # noqa: E731
        roll = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = roll(x, self.stack)
        x = nnx.remat(lambda layer, x: layer(x))(self.norm, x)
        return nnx.jit(lambda layer, x: layer(x))(self.norm, x)


def test_inside_of_nnx_transformations_too():
    model = Rolled(nnx.Rngs(0))
    for _ in range(2):
        found = norm_inputs(model, None, X)
        assert {path: len(each.calls) for path, each in found.items()} == {
            "stack": 3, "norm": 2,
        }  # fmt: skip
    same(found["stack"].calls[1].x, 2 * found["stack"].calls[0].y)
    assert found["stack"].layer.params["scale"].shape == (3, 4)


def test_masks_are_recorded_as_normalize_takes_them():
    mask = jnp.arange(3) < jnp.array([[2], [3]])
    x = batch(shape=(2, 3, 4))
    norm = nn.BatchNorm(use_running_average=False)
    variables: Any = norm.init(KEY, x)
    found = norm_inputs(norm, variables, x, mask=mask[..., None])
    call = found[""].calls[0]
    y = nj.normalize(found[""].layer.spec, x, variables["params"], mask=call.mask)
    valid = np.asarray(mask)
    np.testing.assert_allclose(y[valid], call.y[valid], rtol=1e-5, atol=1e-6)


def test_wrong_input_gets_one_line():
    model, variables = linen(Mixed(), X, train=False)
    with pytest.raises(ValueError, match=r"variables is a NoneType.*Mixed\.init"):
        norm_layers(model, None, X, train=False)
    with pytest.raises(ValueError, match=r"variables is a .*expected None: MixedNnx"):
        norm_inputs(MixedNnx(rngs=nnx.Rngs(0)), X)
    with pytest.raises(ValueError, match="expected a linen or an nnx module"):
        norm_layers(lambda x: x, variables, X)
    with pytest.raises(ValueError, match="called no norm layer"):
        norm_inputs(nn.Dense(3), nn.Dense(3).init(KEY, X), X)
    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        jax.jit(lambda x: norm_inputs(model, variables, x, train=False))(X)
    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        nnx.jit(lambda model: norm_inputs(model, None, X))(MixedNnx(rngs=nnx.Rngs(0)))
    ambiguous = nnx.GroupNorm(4, num_groups=2, reduction_axes=(1, 2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"flax.nnx.GroupNorm: .*an example input"):
        norm_layers(ambiguous)
    assert norm_layers(ambiguous, None, batch(shape=(2, 3, 4)))[""].spec.parsed
