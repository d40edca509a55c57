"""Masks, stored statistics, parameters and refusals of mixtures."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit
from mixtures import (
    BOUND,
    MIXTURES,
    SHAPE,
    apply,
    arrays,
    draw,
    every,
    gap,
    parameters,
    plain,
)
from small import refuse

import normjax as nj
from normjax.mixture import Mixture, init, normalize, switchable_norm


@every
def test_nothing_under_a_mask_is_seen(name: str):
    mixture, axes = MIXTURES[name]
    x, params = draw(*SHAPE), arrays(parameters(mixture))
    mask = np.random.default_rng(2).random((3, 4, 5, 1)) < 0.6
    dirty = np.where(mask, x, np.where(x > 0, np.nan, np.inf))
    expected = np.asarray(plain(mixture, axes, jnp.asarray(x), params, mask))
    where = np.broadcast_to(mask, SHAPE)

    @jit
    def outcome(x):
        def call(x, mask):
            return normalize(mixture, x, params, mask=jnp.asarray(mask))

        def loss(x):
            return jnp.sum(jnp.where(where, call(x, mask), 0) ** 2)

        return call(x, mask), call(x, mask[..., 0]), jax.grad(loss)(x)

    *ys, slope = map(np.asarray, outcome(jnp.asarray(dirty)))
    assert all(gap(y[where], expected[where]) <= BOUND for y in ys)
    assert np.isfinite(slope[where]).all()
    assert (slope[~where] == 0).all()


@pytest.mark.parametrize("masked", ["keep", "zero", "passthrough"])
@pytest.mark.parametrize("name", ["switchable", "nothing in common"])
def test_a_group_that_is_masked_altogether(name: str, masked: str):
    specs = [s.replace(masked_output=masked) for s in MIXTURES[name][0].specs]
    mixture = Mixture(tuple(specs))
    x = jnp.asarray(draw(*SHAPE)).at[1].set(jnp.nan)
    mask = jnp.ones((3, 4, 5), bool).at[1].set(False)
    y = np.asarray(apply(mixture, x, mask=mask))
    expected = {"keep": 0.0, "zero": 0.0, "passthrough": np.nan}[masked]
    np.testing.assert_array_equal(y[1], np.full(y[1].shape, expected))
    two = apply(mixture, x[jnp.array([0, 2])])
    np.testing.assert_allclose(y[[0, 2]], two, rtol=1e-12)
    nothing = apply(mixture, x, mask=jnp.zeros_like(mask))
    assert masked == "passthrough" or (np.asarray(nothing) == 0).all()


@pytest.mark.parametrize("name", ["with groups", "nothing in common"])
@pytest.mark.parametrize("shape", [(0, 4, 5, 6), (3, 0, 5, 6)])
def test_an_empty_batch(name: str, shape):
    mixture, _ = MIXTURES[name]
    slope = jit(jax.grad(lambda x: jnp.sum(normalize(mixture, x))))
    assert apply(mixture, jnp.ones(shape)).shape == shape
    assert slope(jnp.ones(shape)).shape == shape


def test_equal_elements_are_zero():
    mixture = switchable_norm()
    x = jnp.full(SHAPE, 3.1e7, jnp.float32)
    assert (np.asarray(apply(mixture, x)) == 0).all()
    slope = jit(jax.grad(lambda x: jnp.sum(normalize(mixture, x) ** 2)))(x)
    assert (np.asarray(slope) == 0).all()


def test_one_member_is_the_spec_itself():
    for spec in (nj.group_norm(2), nj.rms_norm(), nj.batch_norm()):
        x = jnp.asarray(draw(*SHAPE))
        alone = apply(Mixture((spec,)), x)
        assert gap(alone, nj.normalize(spec, x)) <= BOUND


def test_far_logits_choose_one_member_for_each_example():
    mixture = Mixture((nj.layer_norm(), nj.batch_norm()))
    x = jnp.asarray(draw(*SHAPE))
    logits = jnp.array([[0.0, 800.0], [800.0, 0.0], [0.0, 800.0]])
    y = apply(mixture, x, {"mean_logits": logits, "variance_logits": logits})
    layer, batch = (nj.normalize(s, x) for s in (nj.layer_norm(), nj.batch_norm()))
    np.testing.assert_allclose(y, jnp.stack([batch[0], layer[1], batch[2]]), rtol=1e-12)


def test_stored_statistics_of_one_member():
    mixture = switchable_norm()
    x, state = jnp.asarray(draw(*SHAPE)), nj.running.init(mixture.specs[2], SHAPE)
    moments = nj.moments(mixture.specs[2], x)
    own = apply(mixture, x, moments=(None, None, moments))
    assert gap(own, apply(mixture, x)) <= BOUND
    state = nj.running.update(mixture.specs[2], state, moments)
    stored = nj.running.read(mixture.specs[2], state)
    alone = apply(mixture, x[:1], moments=(None, None, stored))
    both = apply(mixture, x, moments=[None, None, stored])
    np.testing.assert_allclose(alone, both[:1], rtol=1e-12)
    mean = (x.mean((1, 2), keepdims=True) + x.mean((1, 2, 3), keepdims=True)) / 3
    wide = {k: jnp.asarray(v, x.dtype) for k, v in vars(stored).items()}
    mean = mean + wide["mean"].reshape(1, 1, 1, 6) / 3
    variance = x.var((1, 2), keepdims=True) + x.var((1, 2, 3), keepdims=True)
    variance = (variance + wide["variance"].reshape(1, 1, 1, 6)) / 3
    assert gap(both, (x - mean) / jnp.sqrt(variance + 1e-5)) <= BOUND


def test_the_batch_member_alone_is_merged_across_devices():
    instance, layer, batch = switchable_norm().specs
    across = Mixture((instance, layer, batch.replace(axis_names="shards")))
    x = jnp.asarray(draw(4, 5, 6))
    y = jit(jax.vmap(lambda x: normalize(across, x[None]), axis_name="shards"))(x)
    expected = apply(Mixture((instance, layer, batch)), x)
    np.testing.assert_allclose(y[:, 0], expected, rtol=1e-9)


def test_channels_first_is_the_transpose():
    x = jnp.asarray(draw(*SHAPE))
    first = apply(switchable_norm(channels="first"), jnp.moveaxis(x, -1, 1))
    last = apply(switchable_norm(), x)
    np.testing.assert_allclose(jnp.moveaxis(first, 1, -1), last, rtol=1e-12)
    with refuse("channels is 'middle', expected 'first' or 'last'"):
        switchable_norm(channels="middle")


def test_parameters_are_those_that_have_an_effect():
    def names(name: str) -> list[str]:
        return sorted(init(MIXTURES[name][0], SHAPE))

    assert names("switchable") == ["bias", "mean_logits", "scale", "variance_logits"]
    assert names("rms") == ["bias", "scale", "variance_logits"]
    assert names("centre only") == ["mean_logits"]
    grouped = Mixture((nj.group_norm(2), nj.batch_norm()), affine="(g c)")
    assert init(grouped, SHAPE)["scale"].shape == (6,)
    stored = Mixture((nj.layer_norm(),), affine=nj.Affine("c", stored="1+w"))
    assert init(stored, SHAPE, jnp.bfloat16)["scale"].tolist() == [0.0] * 6


def test_a_mixture_is_static_and_one_program_serves_all_logits():
    mixture = switchable_norm()
    assert hash(mixture) == hash(switchable_norm())
    assert mixture == eval(repr(mixture), {"Mixture": Mixture} | vars(nj))
    assert mixture.replace(affine=None) != mixture
    traces = []

    def traced(mixture, x, params):
        traces.append(1)
        return normalize(mixture, x, params)

    compiled = jax.jit(traced, static_argnums=0)
    x = jnp.asarray(draw(*SHAPE))
    for seed in range(3):
        params = arrays(parameters(mixture)) | {"bias": jnp.full(6, float(seed))}
        np.testing.assert_allclose(
            compiled(switchable_norm(), x, params),
            normalize(mixture, x, params),
            rtol=1e-9,
        )
    assert len(traces) == 1


LAYER, BATCH = nj.layer_norm(), nj.batch_norm()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture(()), "specs is (), expected one spec or more"),
        (lambda: Mixture(LAYER), "specs is NormSpec('... [c]', affine='c'), expected"),  # type: ignore[arg-type]
        (lambda: Mixture((LAYER, "c")), "spec is 'c', expected a NormSpec"),  # type: ignore[arg-type]
        (
            lambda: Mixture((LAYER, nj.batch_norm(epsilon=1e-3))),
            "epsilon is 1e-05 in the first member and 0.001 in member 1: a mixture",
        ),
        (lambda: Mixture((LAYER, nj.rms_norm())), "center is True in the first"),
        (
            lambda: Mixture((nj.layer_norm(detach="mean"),)),
            "detach is ('mean',) in member 0, expected ()",
        ),
        (
            lambda: Mixture((LAYER, nj.batch_norm(statistics="blend"))),
            "statistics is 'blend' in member 1, expected 'input'",
        ),
        (
            lambda: Mixture((nj.layer_norm(precision=nj.Precision(rescale=True)),)),
            "precision.rescale is True in member 0, expected False",
        ),
        (lambda: Mixture((LAYER,), affine=3), "affine is 3, expected axes such as 'c'"),
        (
            lambda: Mixture((LAYER, BATCH), affine="d"),
            "affine is over 'd', expected whole dimensions of one of '... [c]', '[",
        ),
        (lambda: Mixture((nj.group_norm(2),), affine="g"), "affine is over 'g'"),
    ],
)
def test_members_that_do_not_go_together_are_refused(make, message: str):
    with refuse(message):
        make()


X = jnp.ones((2, 3, 4), jnp.float32)
GOOD = {"mean_logits": jnp.zeros(2), "variance_logits": jnp.zeros(2)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"params": {"scale": jnp.ones(4)}},
            "params is ['scale'], expected a dict with",
        ),
        (
            {"params": [1.0]},
            "params is list, expected a dict with mean_logits, variance",
        ),
        (
            {"params": GOOD | {"mean_logits": jnp.zeros(3)}},
            "params.mean_logits has shape (3,), expected (2,), or leading sizes of x",
        ),
        (
            {"params": GOOD | {"mean_logits": jnp.zeros((3, 2))}},
            "params.mean_logits has shape (3, 2), expected (2,), or leading sizes of x",
        ),
        ({"params": GOOD | {"gamma": X}}, "params has ['gamma'], expected []"),
        (
            {"moments": [None]},
            "moments is [None], expected Moments, Statistics or None",
        ),
        ({"moments": [None, 3]}, "moments is a int, expected Moments (nj.moments)"),
        ({"mask": jnp.ones((5,))}, "mask has shape (5,), x has (2, 3, 4)"),
    ],
)
def test_wrong_input_is_one_clear_line(arguments: dict, message: str):
    with refuse(message):
        normalize(Mixture((LAYER, BATCH)), X, **arguments)
    with refuse("mixture is NormSpec("):
        normalize(LAYER, X)  # type: ignore[arg-type]
    with refuse("x has dtype int32, expected a float dtype"):
        normalize(Mixture((LAYER, BATCH)), X.astype("int32"))
    with refuse("dimensions, the tensor has 1"):
        init(switchable_norm(), (3,))
