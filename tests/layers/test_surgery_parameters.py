"""Parameters of norms are told by their role, whatever names say."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from normed_models import KEY, Lifted, Mixed, MixedNnx, batch, linen

import normjax as nj
from normjax.layers.surgery import norm_parameters

pytestmark = pytest.mark.jax_defaults

X = batch()


def by_name(params: Any) -> Any:
    """The planted error: everything called scale or bias, or in a layer called so."""
    return jax.tree.map_with_path(
        lambda path, _: any(
            getattr(entry, "key", None) in ("scale", "bias") for entry in path
        ),
        params,
    )


def test_names_do_not_fool_it():
    model, variables = linen(Mixed(), X, train=False)
    found = norm_parameters(model, variables, X, train=False)
    params = variables["params"]
    expected = {
        path: dict.fromkeys(each, path != "scale") for path, each in params.items()
    }
    assert found.mask == expected  # the Dense called scale, and its bias, are not
    assert found.mask["Dense_0"] == {"scale": True, "bias": True}
    assert found.mask != by_name(params)
    assert found.others == jax.tree.map(lambda norm: not norm, expected)
    # first, Dense_0, ours, group and norm have two, rms has one.
    assert (found.arrays, found.numbers) == (11, 44)
    assert (found.other_arrays, found.other_numbers) == (2, 20)


def test_weight_decay_reaches_the_others_alone_in_linen():
    """N81: ten steps of rate 0.1 and decay 0.1 leave 0.904382 of what they reach."""
    model, variables = linen(Mixed(), X, train=False)
    params = variables["params"]
    found = norm_parameters(model, variables, X, train=False)
    optimizer = optax.chain(
        optax.add_decayed_weights(0.1, mask=found.others), optax.scale(-0.1)
    )
    moved: Any = params
    state = optimizer.init(params)
    for _ in range(10):
        zero = jax.tree.map(jnp.zeros_like, moved)
        updates, state = optimizer.update(zero, state, moved)
        moved = optax.apply_updates(moved, updates)
    for path, each in moved.items():
        share = 0.99**10 if path == "scale" else 1.0
        for name, value in each.items():
            np.testing.assert_allclose(value, share * params[path][name], rtol=2e-6)


def test_weight_decay_reaches_the_others_alone_in_nnx():
    model: Any = MixedNnx(rngs=nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    found = norm_parameters(model)
    assert (found.arrays, found.numbers) == (11, 44)
    assert (found.other_arrays, found.other_numbers) == (2, 20)
    transform = optax.adamw(0.1, weight_decay=0.1, mask=found.others)
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
    zero = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    optimizer.update(model, zero)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    np.testing.assert_allclose(
        after["scale"]["kernel"], 0.99 * before["scale"]["kernel"], rtol=1e-6
    )
    for path in ("first", "shared", "rest"):
        jax.tree.map(np.testing.assert_array_equal, after[path], before[path])


def test_stacked_layers_boxed_parameters_and_a_model_that_is_a_norm():
    model, variables = linen(Lifted(), X)
    found = norm_parameters(model, variables, X)
    assert all(jax.tree.leaves(found.mask))
    assert found.numbers == 2 * 3 * 4 + 8 + 4 + 8
    boxed = nn.LayerNorm(
        scale_init=nn.with_partitioning(nn.initializers.ones_init(), ("features",))
    )
    held: Any = boxed.init(KEY, X)
    found = norm_parameters(boxed, held, X)
    assert found.mask == {"scale": True, "bias": True}
    assert found.numbers == 8
    transform = optax.add_decayed_weights(0.1, mask=found.mask)
    updates, _ = transform.update(
        held["params"], transform.init(held["params"]), held["params"]
    )
    np.testing.assert_allclose(nn.meta.unbox(updates)["scale"], 1.1, rtol=1e-6)


def test_a_modulated_norm_holds_no_parameters_and_a_mixture_its_logits():
    model = nj.nnx.ModulatedNorm(
        nj.adaptive_layer_norm(), (8, 5, 6), (8, 16), rngs=nnx.Rngs(0)
    )
    both = nnx.Dict(first=model, second=nnx.RMSNorm(6, rngs=nnx.Rngs(0)))

    class Both(nnx.Module):
        def __init__(self):
            self.both = both

    found = norm_parameters(Both())
    assert (found.arrays, found.other_arrays) == (1, 4)
    mixture = nj.nnx.MixtureNorm(nj.mixture.switchable_norm(), (6, 2, 4))
    assert norm_parameters(mixture).arrays == 4


def test_a_model_without_norm_parameters_gets_one_line():
    dense = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"of Linear has parameters; it has no norm"):
        norm_parameters(dense)
    bare = nnx.LayerNorm(4, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"of LayerNorm has parameters; it has ''"):
        norm_parameters(bare)
