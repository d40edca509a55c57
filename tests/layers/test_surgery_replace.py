"""Norm layers replaced in models that exist."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from normed_models import KEY, Lifted, Mixed, MixedNnx, batch, linen

import normjax as nj
from normjax.layers.surgery import freeze, norm_inputs, norm_layers, replace_norms

pytestmark = pytest.mark.jax_defaults

X = batch()
MUTABLE: Any = ["batch_stats"]


def same(first: Any, second: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


def near(first: Any, second: Any, dtype: Any = np.float32, layers: int = 7) -> None:
    """To rounding: each layer may err by some units, one-pass variances by κ² of them.

    Columns have κ = |mean|/std below 3 here, and 8 units cover the sum of six numbers.
    """
    atol = layers * 8 * 9 * float(jnp.finfo(dtype).eps) / 2

    def close(a, b):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=atol, atol=atol
        )

    jax.tree.map(close, first, second)


def keep(_, spec):
    return spec


@pytest.mark.parametrize(("dtype", "train"), [(None, True), (jnp.bfloat16, False)])
def test_an_equal_spec_changes_nothing_in_linen(dtype, train):
    x = batch(dtype=dtype or np.float32)
    model, variables = linen(Mixed(dtype), x, train=train)
    new, changes = replace_norms(model, keep, variables, x, train=train)
    assert [change.path for change in changes] == [
        "first", "Dense_0", "ours", "group", "rms", "norm",
    ]  # fmt: skip
    assert not any(change.differences or change.added for change in changes)
    apply = [
        jax.jit(lambda v, x, m=m: m.apply(v, x, train=train, mutable=MUTABLE))
        for m in (model, new)
    ]
    near(apply[1](variables, x), apply[0](variables, x), dtype or np.float32)
    fresh, same_as = (
        jax.eval_shape(lambda x, m=m: m.init(KEY, x, train=train), x)
        for m in (new, model)
    )
    assert fresh == same_as


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_an_equal_spec_changes_nothing_in_nnx_and_sharing_stays(dtype):
    x = batch(dtype=dtype or np.float32)
    model: Any = MixedNnx(dtype, rngs=nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model))
    new, changes = replace_norms(model, keep)
    assert len(changes) == 6
    assert new.tied is new.shared
    assert new.tied is not model.tied
    same(nnx.to_pure_dict(nnx.state(new)), before)
    near(new(x), model(x), dtype or np.float32)
    stats = [nnx.to_pure_dict(nnx.state(each, nnx.BatchStat)) for each in (new, model)]
    near(stats[0], stats[1], dtype or np.float32)
    for each in (new, model):
        each.eval()
    near(new(x), model(x), dtype or np.float32)


def test_the_record_says_what_changed_and_only_that_changes():
    model, variables = linen(Mixed(), X, train=False)

    def rule(path, spec):
        return spec.replace(epsilon=0.5) if path == "group" else None

    new, changes = replace_norms(model, rule, variables, X, train=False)
    (change,) = changes
    assert (change.path, change.kind) == ("group", "flax.linen.GroupNorm")
    assert [(d.name, d.first, d.second) for d in change.differences] == [
        ("epsilon", 1e-6, 0.5)
    ]
    assert change.before.replace(epsilon=0.5) == change.after
    old, seen = (norm_inputs(each, variables, X, train=False) for each in (model, new))
    for path in ("first", "Dense_0", "ours"):
        same(seen[path].calls, old[path].calls)
    expected = nj.normalize(
        nj.group_norm(groups=2, epsilon=0.5), seen["group"].calls[0].x,
        variables["params"]["group"],
    )  # fmt: skip
    near(seen["group"].calls[0].y, expected)
    assert seen["group"].layer.spec == change.after
    with pytest.raises(AssertionError):  # another epsilon is more than rounding
        near(seen["group"].calls[0].y, old["group"].calls[0].y)


@pytest.mark.parametrize("word", ["freeze", "batch"])
def test_statistics_stay_and_the_mode_is_fixed(word):
    model = nnx.BatchNorm(4, momentum=0.9, rngs=nnx.Rngs(0))
    model(X)
    stored = nj.Statistics(model.mean.get_value(), model.var.get_value())
    new, _ = replace_norms(model, lambda *_: word)
    expected = nj.normalize(
        nj.batch_norm(), X, moments=stored if word == "freeze" else None
    )
    for mode in (new.train, new.eval):
        mode()
        near(new(X), expected)
        near(new(X, True), expected)  # Flax's argument is accepted, and does nothing
        assert norm_inputs(new, None, X)[""].calls[0].stored == (word == "freeze")
    same((new.mean.get_value(), new.var.get_value()), (stored.mean, stored.variance))


def test_a_freeze_lasts_in_linen_and_scale_and_bias_still_train():
    model, variables = linen(Mixed(), X, train=True)
    new, changes = freeze(model, variables, X, train=True)
    assert [change.path for change in changes] == ["first", "ours", "norm"]
    apply = jax.jit(lambda v, m=new: m.apply(v, X, train=True, mutable=MUTABLE))
    y, state = apply(variables)
    same(state["batch_stats"], variables["batch_stats"])
    near(y, model.apply(variables, X, train=False))
    gradient = jax.grad(
        lambda params: jnp.sum(apply({**variables, "params": params})[0] ** 3)
    )(variables["params"])
    assert float(jnp.abs(gradient["first"]["bias"]).max()) > 0


def test_detached_statistics_and_blends_are_specs():
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    detached, _ = replace_norms(
        model, lambda _, spec: spec.replace(detach=("mean", "variance"))
    )
    gradient = jax.grad(lambda x: jnp.sum(nnx.clone(detached)(x)))(X)
    std = np.sqrt(np.var(np.asarray(X, np.float64), axis=0) + 1e-5)
    np.testing.assert_allclose(gradient, np.broadcast_to(1 / std, X.shape), rtol=1e-5)
    blend = {"statistics": "blend", "mean_weight": 0.25, "variance_weight": 0.25}
    mixed, _ = replace_norms(model, lambda _, spec: (spec.replace(**blend), "batch"))
    wide = np.asarray(X, np.float64)
    mean, variance = 0.25 * wide.mean(0), 0.25 * wide.var(0) + 0.75  # stored: 0 and 1
    near(mixed(X), jnp.asarray((wide - mean) / np.sqrt(variance + 1e-5), np.float32))


def test_another_kind_of_norm_in_nnx_gets_what_it_lacks():
    model = MixedNnx(rngs=nnx.Rngs(0))

    def rule(path, spec):
        if spec.divide == "rms":
            return nj.layer_norm()
        return nj.batch_norm() if path == "shared" else None

    new, changes = replace_norms(model, rule, None, X)
    assert {change.path: change.added for change in changes} == {
        "shared": ("mean", "var"), "rest/2": ("bias",),
    }  # fmt: skip
    found = norm_inputs(new, None, X)
    near(
        found["rest/2"].calls[0].y,
        nj.normalize(nj.layer_norm(), found["rest/2"].calls[0].x),
    )
    assert [call.stored for call in found["shared"].calls] == [False, False]
    new(X)
    assert new.shared.mean.get_value().shape == (4,)
    with pytest.raises(ValueError, match=r"rest/2 has no bias.*give replace_norms an"):
        replace_norms(model, rule)


def test_another_kind_of_norm_in_linen_is_made_by_init():
    model, variables = linen(Mixed(), X, train=False)

    def rule(path, _):
        return nj.batch_norm() if path == "rms" else None

    new, changes = replace_norms(model, rule, variables, X, train=False)
    assert changes[0].added == ("bias", "mean", "var")
    with pytest.raises(ValueError, match=r"rms has no bias in 'params'.*init"):
        new.apply(variables, X, train=False)
    with pytest.raises(ValueError, match=r"rms stores statistics and nobody says"):
        new.init(KEY, X, train=False)
    fresh = new.clone(use_running_average=False).init(KEY, X, train=False)
    assert sorted(fresh["batch_stats"]["rms"]) == ["mean", "var"]
    frozen = new.clone(use_running_average=True)
    assert norm_inputs(frozen, fresh, X, train=False)["rms"].calls[0].stored
    frozen.apply(fresh, X, train=False)


def test_inside_of_scan_remat_and_vmap():
    model, variables = linen(Lifted(), X)
    same_model, _ = replace_norms(model, keep, variables, X)
    found, expected = (
        m.apply(variables, X, mutable=MUTABLE) for m in (same_model, model)
    )
    near(found, expected)
    new, changes = replace_norms(
        model,
        lambda path, _: nj.rms_norm() if path == "scan/norm" else None,
        variables,
        X,
    )
    assert changes[0].added == ()
    x = X
    for scale in variables["params"]["scan"]["norm"]["scale"]:
        x = nj.normalize(nj.rms_norm(), 2 * x, {"scale": scale})
    found = norm_inputs(new, variables, X)
    near(found["remat"].calls[0].x, x)
    with pytest.raises(ValueError, match=r"scan/norm runs inside nn.scan.*has no mean"):
        replace_norms(model, lambda *_: nj.batch_norm(), variables, X)


def test_surgery_twice_and_inside_of_another_model():
    model, variables = linen(nn.BatchNorm(use_running_average=True), X)
    once, _ = replace_norms(
        model, lambda _, spec: spec.replace(epsilon=0.5), variables, X
    )
    twice, (change,) = replace_norms(
        once, lambda _, spec: spec.replace(ddof=1), variables, X
    )
    assert (change.before.epsilon, change.after.ddof) == (0.5, 1)
    assert norm_layers(twice, variables, X)[""].spec == change.after
    near(twice.apply(variables, X), once.apply(variables, X))
    model = nn.Sequential([nn.Dense(4), once])
    held = model.init(KEY, X)
    assert sorted(held["params"]) == ["layers_0", "layers_1"]
    assert sorted(held["params"]["layers_1"]) == ["bias", "scale"]
    y = model.apply(held, X)
    inner: Any = nn.Dense(4).apply({"params": held["params"]["layers_0"]}, X)
    near(y, inner / np.float32(np.sqrt(1.5)))
    first, _ = replace_norms(MixedNnx(rngs=nnx.Rngs(0)), keep)
    second, changes = freeze(first)
    assert [change.kind for change in changes] == [
        "flax.nnx.BatchNorm", "normjax.nnx.BatchNorm", "normjax.nnx.Norm",
    ]  # fmt: skip
    second(X)


def test_wrong_rules_get_one_line():
    model, variables = linen(Mixed(), X, train=False)
    call: Any = (variables, X)
    with pytest.raises(
        ValueError, match=r"replaces no norm layer of Mixed; there are 'f"
    ):
        replace_norms(model, lambda *_: None, *call, train=False)
    with pytest.raises(ValueError, match=r"rule gave 3 for first, expected None, a"):
        replace_norms(model, lambda *_: 3, *call, train=False)
    with pytest.raises(
        ValueError, match=r"of first is 'frozen'.*did you mean 'freeze'"
    ):
        replace_norms(model, lambda *_: "frozen", *call, train=False)
    with pytest.raises(ValueError, match=r"'freeze' of Dense_0, whose spec stores no"):
        replace_norms(model, lambda *_: "freeze", *call, train=False)
    with pytest.raises(ValueError, match=r"first stores what divide='std' needs"):
        replace_norms(model, lambda _, s: s.replace(divide="rms"), *call, train=False)
    narrow = nj.NormSpec("[b] (g c)", sizes={"g": 2}, affine="c")
    with pytest.raises(ValueError, match=r"scale of shape \(4,\).*needs \(2,\)"):
        replace_norms(model, lambda *_: narrow, *call, train=False)
    mixture = nj.nnx.MixtureNorm(nj.mixture.switchable_norm(), (6, 2, 4))
    with pytest.raises(ValueError, match=r"is a normjax.nnx.MixtureNorm, which cannot"):
        replace_norms(mixture, lambda *_: nj.layer_norm())
    with pytest.raises(ValueError, match=r"replaces no norm"):
        freeze(nnx.LayerNorm(4, rngs=nnx.Rngs(0)))
