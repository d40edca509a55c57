"""Masks and weights: what stands under them is never seen, and weights are counts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from compare import FACTOR, batched, jit, measure, unit_roundoff, wide
from frames import Case, inputs

import normjax as nj

MASKED = [
    "mask_keep",
    "mask_zero",
    "mask_passthrough",
    "mask_ghost_space",
    "mask_rms",
    "mask_center_only",
    "mask_blend",
    "mask_given",
    "weights_ddof",
]


def everything(case: Case):
    """Value, gradient by x and by parameters of Σ c·y over valid entries, and J."""
    valid = case.valid
    cotangent = np.where(valid, case.rng("cotangent").normal(size=valid.shape), 0)

    @jit
    def run(x, params):
        def call(x, params):
            return case.call(x, **({"params": params} if params else {}))

        y, pull = jax.vjp(call, x, params)
        x_bar, params_bar = pull(jnp.asarray(cotangent, x.dtype))
        _, along = jax.jvp(lambda x: call(x, params), (x,), (jnp.ones_like(x),))
        return y, x_bar, params_bar, along

    return run, valid


@pytest.mark.x32
@pytest.mark.parametrize("name", MASKED)
def test_what_is_masked_is_not_seen(name: str):
    """N43, N45: valid outputs and all gradients are the same bits for any padding."""
    case = CASES[name]
    run, valid = everything(case)
    params = case.arguments(np.float32).get("params", {})
    x = inputs(case, 1, kappa=10.0, spread=0.0)[0].astype(np.float32)
    first = run(np.where(valid, x, np.float32(0)), params)
    assert np.isfinite(first[0]).all()
    for padding in (np.nan, np.inf, -np.inf, 1e30, -10.0):
        found = run(np.where(valid, x, np.float32(padding)), params)
        assert np.array_equal(found[0][valid], first[0][valid])
        assert np.array_equal(found[3][valid], first[3][valid])
        for actual, expected in zip(
            jax.tree.leaves(found[1:3]), jax.tree.leaves(first[1:3]), strict=True
        ):
            assert np.array_equal(actual, expected)
        assert not found[1][~valid].any()  # no valid output depends on these
        assert np.isfinite(found[3]).all()


@pytest.mark.parametrize("name", ["mask_keep", "mask_zero", "mask_passthrough"])
def test_masked_output(name: str):
    """Keep: normalized by the valid statistics; zero; or x itself."""
    case = CASES[name]
    x = jnp.asarray(inputs(case, 1, kappa=10.0, spread=0.0)[0], jnp.float32)
    valid = case.valid
    y = jit(case.call)(x)
    if name == "mask_keep":
        assert y[~valid].all()
        assert not np.array_equal(y[~valid], x[~valid])
    else:
        passed = 0 * x if name == "mask_zero" else x
        assert np.array_equal(y[~valid], passed[~valid])


def test_masked_outputs_are_normalized_by_the_valid_statistics():
    """N44: [0, 2, 10, 14] under 1100 gives [−1, 1, 9, 13]."""
    x = jnp.array([[0.0, 2.0, 10.0, 14.0]], jnp.float32)
    mask = jnp.array([[1, 1, 0, 0]], bool)
    spec = nj.layer_norm(epsilon=0.0)
    call = jit(nj.normalize)
    assert call(spec, x, mask=mask).tolist() == [[-1, 1, 9, 13]]
    zero = spec.replace(masked_output="zero")
    assert call(zero, x, mask=mask).tolist() == [[-1, 1, 0, 0]]


@pytest.mark.x32
def test_gradient_beside_nan():
    """N45: the numbers of the report."""
    x = jnp.array([1, 2, 4, np.nan], jnp.float32)
    mask = jnp.array([1, 1, 1, 0], bool)
    spec, scale = nj.layer_norm(affine=nj.Affine("c", bias=False)), jnp.ones(4, x.dtype)

    def loss(x, scale):
        y = nj.normalize(spec, x, {"scale": scale}, mask=mask)
        return jnp.sum(jnp.where(mask, y, 0) ** 3)

    value, slopes = jit(jax.value_and_grad(loss, (0, 1)))(x, scale)
    bound = FACTOR * unit_roundoff(np.float32) * 3
    np.testing.assert_allclose(value, 1.1453948, rtol=bound)
    right = [1.3253782, -1.9880784, 0.6626999, 0]
    np.testing.assert_allclose(slopes[0], right, rtol=bound)
    np.testing.assert_allclose(float(slopes[1].sum()), 3.4361846, rtol=bound)


@pytest.mark.parametrize("name", ["layer", "ghost", "group"])
def test_kinds_of_masks_agree(name: str):
    """bool, integer and 0/1 float masks: the same bits, in value and derivative."""
    frame = CASES[name].frame
    shape = frame.shape if name == "layer" else (*frame.shape[:-1], 1)
    found = []
    for kind in ("bool", "int", "float"):  # the seed is the name, so one mask
        case = Case(f"kinds {name}", frame, {}, kind, shape)
        call = batched(
            lambda x, c=case: (c.call(x), jax.jacrev(c.call)(x)), jnp.float32
        )
        found.append(call(inputs(case, 5).astype(np.float32)))
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])


def test_ranks_of_masks_agree():
    """(b, h) is (b, h, 1) is the full mask, for every grouping of (b, h, c)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3, 4)).astype(np.float32)
    mask = rng.random((4, 3)) < 0.7
    mask[:, 0] = True
    full = np.broadcast_to(mask[..., None], x.shape)
    call = jit(nj.normalize)

    def agree(spec, lower, full):
        few, many = wide(call(spec, x, mask=lower)), wide(call(spec, x, mask=full))
        bound = FACTOR * unit_roundoff(np.float32) * x.size
        assert np.linalg.norm(few - many) <= bound * np.linalg.norm(many)
        other = wide(call(spec, x, mask=np.roll(lower, 1, axis=0)))
        assert np.linalg.norm(other - many) > bound * np.linalg.norm(many)

    for spec in (
        nj.batch_norm(),
        nj.ghost_batch_norm(ghosts=2),
        nj.group_norm(groups=2),
        nj.layer_norm("h c"),
    ):
        for lower in (mask, mask[..., None]):
            agree(spec, lower, full)
    examples = np.array([True, True, False, True])
    full = np.broadcast_to(examples[:, None, None], x.shape)
    agree(nj.batch_norm(), examples, full)


@pytest.mark.parametrize("divide", ["std", "rms"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_weights_are_repetitions(divide: str, ddof: int):
    """Element i counts wᵢ times, in y and in the derivative by it."""
    rng = np.random.default_rng(1)
    weights = np.array([2.0, 1.0, 3.0, 0.0, 1.0, 5.0])
    copies = np.repeat(np.arange(6), weights.astype(int))
    x = (rng.normal(size=6) + 3).astype(np.float32)
    spec = nj.NormSpec("[b]", divide=divide, ddof=ddof)

    @jit
    def both(x):
        few = partial(nj.normalize, spec, mask=jnp.asarray(weights, x.dtype))
        many = lambda x: nj.normalize(spec, x[copies])  # noqa: E731
        return (few(x)[copies], jax.jacrev(few)(x)[copies]), (
            many(x),
            jax.jacrev(many)(x),
        )

    few, many = wide(both(x))
    bound = FACTOR * unit_roundoff(np.float32) * (weights.sum() + 10)
    for actual, expected in zip(few, many, strict=True):
        assert np.linalg.norm(actual - expected) <= bound * np.linalg.norm(expected)


@pytest.mark.x32
@pytest.mark.parametrize(
    ("output", "kind"),
    [("keep", bool), ("keep", np.float32), ("zero", bool), ("passthrough", bool)],
)
def test_fully_masked_group(output: str, kind):
    """x̂ and J are 0 there, or the declared masked rows; other groups do not notice."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(3, 4)).astype(np.float32)
    mask = np.ones((3, 4), kind)
    mask[1] = 0
    spec = nj.layer_norm(masked_output=output)

    @jit
    def run(x):
        call = partial(nj.normalize, spec, mask=jnp.asarray(mask))
        J = nj.input_jacobian(spec, x, mask=jnp.asarray(mask))
        shape = (*x.shape, *x.shape)
        found = nj.moments(spec, x, jnp.asarray(mask))
        modes = jax.jacfwd(call)(x), jax.jacrev(call)(x), J.as_matrix().reshape(shape)
        return call(x), modes, found

    y, modes, found = run(x)
    unmasked, without, _ = run(np.where(mask.astype(bool), x, np.float32(np.nan)))
    passed = output == "passthrough"
    assert np.array_equal(y[1], x[1] if passed else np.zeros(4))
    for J, other in zip(modes, without, strict=True):
        assert np.array_equal(J[1, :, 1], np.eye(4) if passed else np.zeros((4, 4)))
        assert not J[1, :, 0].any()
        assert np.array_equal(J[::2], other[::2])
    assert np.array_equal(unmasked[::2], y[::2])
    assert [float(a[1]) for a in jax.tree.leaves(found)] == [0.0] * 4


def test_everything_masked():
    x = jnp.array([[1.0, 2.0]], jnp.float32)
    params = {"scale": jnp.full(2, 3.0, x.dtype), "bias": jnp.full(2, 5.0, x.dtype)}
    spec = nj.batch_norm()
    mask = jnp.zeros(1, bool)

    @jit
    def backward(x, params):
        y, pull = jax.vjp(partial(nj.normalize, spec, mask=mask), x, params)
        return y, *pull(jnp.ones_like(y))

    y, x_bar, params_bar = backward(x, params)
    assert y.tolist() == [[5.0, 5.0]]  # x̂ is 0
    assert not x_bar.any()
    assert not params_bar["scale"].any()


@pytest.mark.parametrize("name", ["weights_keep", "weights_ddof", "weights_center_rms"])
def test_weights_in_float32(name: str):
    """Against float64; the anchor is the heaviest element, not the first."""
    case = CASES[name]
    x = inputs(case, 200).astype(np.float32)
    call = batched(lambda x: (case.call(x), jax.jacrev(case.call)(x)), jnp.float32)
    y, J = call(x)
    plain = batched(lambda x: (case.oracle(x), jax.jacfwd(case.oracle)(x)), exact=True)
    value, derivative = plain(x)
    steady = name != "weights_center_rms"  # there J has terms in the mean itself
    measure(case, x, y, value, np.float32, any_offset=steady).check()
    measure(case, x, J, derivative, np.float32, any_offset=steady).check()
