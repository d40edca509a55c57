"""Field cases of masks: padding, NaN beside valid entries, groups with one entry.

The kind: every preset × masks of every dtype × what stands under them, in value and
gradient. Of the same theme elsewhere: ranks of masks in
tests/test_standardize_masks.py, random masks in tests/test_properties_masks.py.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit, wide
from flax import nnx
from frames import Case
from kinds import ONE_EACH, bound, by_hand, random

import normjax as nj

KEY = jax.random.key(0)
normalize = jit(nj.normalize)
HIDDEN = (np.nan, np.inf, -np.inf, 1e30, -10.0)
GRID = {
    (name, kind): Case(
        f"field {name}", case.frame, mask=kind, mask_shape=case.frame.shape
    )
    for name, case in ONE_EACH.items()
    for kind in ("bool", "int", "float", "weights")
}


SEEN = [
    *((name, "bool") for name in ONE_EACH),
    *((name, "weights") for name in [*ONE_EACH][::2]),
]


def filled(case: Case, x: np.ndarray, padding: float, dtype: str = "float32"):
    """x with something under the mask."""
    return jnp.asarray(np.where(case.valid, x, padding), dtype)


@jit
def value_and_slope(spec, x, mask, bar):
    """y, and the gradient of Σ bar · y over valid entries."""
    valid = jnp.broadcast_to(mask.astype(bool), x.shape)

    def loss(x):
        y = nj.normalize(spec, x, mask=mask)
        return jnp.sum(jnp.where(valid, y * bar.astype(y.dtype), 0)), y

    slope, y = jax.grad(loss, has_aux=True)(x)
    return y, slope


@pytest.mark.parametrize(("name", "kind"), SEEN)
def test_n43_n45_what_stands_under_a_mask_is_not_seen(name: str, kind: str):
    """N43, N45: valid outputs and all gradients are the same bits for any padding."""
    case = GRID[name, kind]
    mask = jnp.asarray(case.weights, jnp.float32 if kind == "weights" else bool)
    x, bar = random(case) + 3, jnp.asarray(random(case, purpose="bar"), jnp.float32)
    y, slope = value_and_slope(case.spec, filled(case, x, 0.0), mask, bar)
    if kind == "bool":
        given = case.valid.reshape(case.frame.view)
        right = by_hand(case.spec, case.frame, np.float32(x), given)
        error = np.where(case.valid, wide(y) - right, 0)
        size = np.linalg.norm(right[case.valid])
        assert np.linalg.norm(error) <= bound(case.frame.group_size) * size
    assert slope[case.valid].any()
    for padding in HIDDEN:
        found = value_and_slope(case.spec, filled(case, x, padding), mask, bar)
        assert np.array_equal(found[0][case.valid], y[case.valid])
        assert np.array_equal(found[1], slope)
        assert not found[1][~case.valid].any()


@pytest.mark.parametrize("name", [*ONE_EACH][::2])
def test_n43_kinds_of_masks_agree(name: str):
    """N43: bool, integers and 0/1 floats, for every preset: the same bits."""
    case = GRID[name, "bool"]
    x = filled(case, random(case) + 3, np.nan)
    y = normalize(case.spec, x, mask=case.weights)[case.valid]
    for kind in ("int", "float"):
        other = normalize(case.spec, x, mask=GRID[name, kind].weights)[case.valid]
        assert np.array_equal(other, y)


VARIED = {
    "one_pass": {"precision": nj.Precision(algorithm="one_pass")},
    "two_pass": {"precision": nj.Precision(algorithm="two_pass")},
    "folded": {"precision": nj.Precision(apply="folded")},
    "rescale": {"precision": nj.Precision(rescale=True)},
    "renorm": {"statistics": "renorm"},
    "zero": {"masked_output": "zero"},
    "passthrough": {"masked_output": "passthrough"},
    "outside_sqrt": {"epsilon_placement": "outside_sqrt"},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((n, "float32") for n in VARIED), ("folded", "float16"), ("renorm", "float16")],
)
def test_n45_every_program_selects_before_the_arithmetic(name: str, dtype: str):
    """N43, N45: algorithms, applications, corrections and masked outputs alike."""
    case = Case(f"varied {name}", ONE_EACH["batch_norm"].frame, VARIED[name], "bool")
    case = Case(case.name, case.frame, case.fields, "bool", case.frame.shape)
    mask, bar = jnp.asarray(case.weights), random(case, purpose="bar")
    reference = nj.Statistics(jnp.full(2, 2.5), jnp.full(2, 1.5))
    given: dict[str, Any] = {"reference": reference} if name == "renorm" else {}

    @jit
    def run(x):
        def loss(x):
            y = nj.normalize(case.spec, x, mask=mask, **given)
            weighted = y * jnp.asarray(bar, dtype)
            return jnp.sum(jnp.where(mask, weighted, jnp.zeros_like(weighted))), y

        return jax.grad(loss, has_aux=True)(x)

    x = random(case) + 3
    slope, y = run(filled(case, x, 0.0, dtype))
    assert np.isfinite(slope).all()
    for padding in (np.nan, np.inf, -np.inf, -10.0):
        found = run(filled(case, x, padding, dtype))
        assert np.array_equal(found[0], slope)
        assert np.array_equal(found[1][case.valid], y[case.valid])


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "group_norm", "rms_norm"])
def test_n45_closed_forms_do_not_see_it_either(name: str):
    """N45: moments, spectrum, share, and the operator on valid tangents."""
    case = GRID[name, "bool"]
    mask, t = jnp.asarray(case.weights), jnp.asarray(random(case), jnp.float32)

    @jit
    def run(x):
        spec = case.spec.replace(masked_output="zero")
        J = nj.input_jacobian(spec, x, mask=mask)
        found = [nj.moments(spec, x, mask), nj.spectrum(spec, x, mask=mask)]
        share = nj.stabilizer_share(spec, x, mask=mask)
        values = nj.singular_values(J)
        return *found, share, values, J.mv(t), J.T.mv(t), J.as_matrix()

    x = random(case) + 3
    expected = run(filled(case, x, 0.0))
    for padding in HIDDEN:
        found = run(filled(case, x, padding))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(("name", "kind"), SEEN)
def test_n27_one_valid_entry_in_each_group(name: str, kind: str):
    """N26, N27, N43: N = 1 by a mask: exactly 0 and no gradient where it centres.

    Elsewhere it is finite, and what is masked has no part in it.
    """
    case = ONE_EACH[name]
    view, axes = case.frame.view, case.frame.axes
    first = np.zeros(view)
    first[
        tuple(slice(0, 1) if i in axes else slice(None) for i in range(len(view)))
    ] = 1
    valid = first.reshape(case.frame.shape).astype(bool)
    mask = jnp.asarray(valid if kind == "bool" else 0.3 * valid, jnp.float32)
    mask = mask.astype(bool) if kind == "bool" else mask
    x = jnp.asarray(np.where(valid, 1e6 + 0.3 * random(case), np.nan), jnp.float32)
    y, slope = value_and_slope(case.spec, x, mask, jnp.ones_like(x))
    if case.spec.center:
        assert not y[valid].any()
        assert not slope.any()
    else:
        assert np.isfinite(y[valid]).all()
        assert np.isfinite(slope).all()
        assert not slope[~valid].any()


P = 7.0
ROWS = np.array([[1, 2, 3, P, P], [4, 5, 6, 7, P]], np.float32)[..., None]
VALID = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], bool)


@pytest.mark.jax_defaults
@pytest.mark.parametrize("padding", [-10.0, 0.0, np.nan, np.inf])
def test_n43_numbers_of_the_report(padding: float):
    """N43: mean 4 and variance 4 whatever P is; in y, in the state, in both layers."""
    x = jnp.where(VALID[..., None], ROWS, padding)
    spec = nj.batch_norm(running=nj.Running(decay=0.0))
    right = (ROWS[..., 0] - 4) / np.sqrt(4 + 1e-5)
    linen = nj.linen.Norm(spec, use_running_average=False)
    variables: Any = linen.init(KEY, ROWS)
    y, changed = linen.apply(variables, x, mask=VALID, mutable=["batch_stats"])
    layer = nj.nnx.Norm(spec, x.shape)
    z = layer(x, mask=VALID)
    found = changed["batch_stats"]
    assert (found["mean"].tolist(), found["var"].tolist()) == ([4.0], [4.0])
    assert layer.mean.get_value().tolist() == layer.var.get_value().tolist() == [4.0]
    for out in (normalize(spec, x, mask=VALID), y, z):
        np.testing.assert_allclose(out[VALID][:, 0], right[VALID], rtol=bound(7))
    if padding in (-10.0, 0.0):
        plain = nj.moments(spec, x)
        wrong = {-10.0: (-0.2, 43.96), 0.0: (2.8, 6.16)}[padding]
        numbers = float(plain.mean[0]), float(plain.variance()[0])
        np.testing.assert_allclose(numbers, wrong, rtol=bound(10))


@pytest.mark.parametrize("name", ["instance_norm", "group_norm", "layer_norm"])
def test_n44_lengths(name: str):
    """N44: [1, 3] padded to four is [−1, 1, …]; unmasked [0, 1.63, −0.82, −0.82]."""
    spec = {
        "instance_norm": nj.instance_norm(),
        "group_norm": nj.group_norm(groups=1),
        "layer_norm": nj.layer_norm("t c"),
    }[name]
    x = jnp.array([1.0, 3.0, 0.0, 0.0], jnp.float32).reshape(1, 4, 1)
    mask = jnp.array([[1, 1, 0, 0]], bool)
    y = np.ravel(normalize(spec, x, mask=mask))
    np.testing.assert_allclose(y, [-1, 1, -2, -2], rtol=bound(2) + 1e-5)
    plain = np.ravel(normalize(spec, x))
    np.testing.assert_allclose(plain, [0, 1.633, -0.8165, -0.8165], atol=5e-5)
    for hidden in (np.nan, 5.0):
        out = spec.replace(masked_output="zero")
        padded = x.at[:, 2:].set(hidden)
        zero = np.ravel(normalize(out, padded, mask=mask))
        assert zero.tolist() == [y[0], y[1], 0.0, 0.0]
    passed = normalize(out.replace(masked_output="passthrough"), padded, mask=mask)
    assert np.ravel(passed).tolist() == [y[0], y[1], 5.0, 5.0]


@pytest.mark.jax_defaults
def test_n44_masked_outputs_beside_flax():
    """N44: "keep" is what Flax does: [0, 2, 10, 14] under 1100 gives [−1, 1, 9, 13]."""
    x, mask = jnp.array([0.0, 2.0, 10.0, 14.0]), jnp.array([1, 1, 0, 0], bool)
    layer: Any = nn.LayerNorm(epsilon=0.0)
    theirs = layer.apply(layer.init(KEY, x), x, mask=mask)
    ours = normalize(nj.layer_norm(epsilon=0.0), x, mask=mask)
    assert theirs.tolist() == ours.tolist() == [-1, 1, 9, 13]


X45, MASK45 = np.array([1, 2, 4, np.nan], np.float32), np.array([1, 1, 1, 0], bool)


def cubes(y):
    return jnp.sum(jnp.where(MASK45, y, jnp.zeros_like(y)) ** 3)


@pytest.mark.jax_defaults
def test_n45_numbers_of_the_report():
    """N45: value, gradient by x and by a shared gain; Flax's gradient is all NaN."""

    def loss(x, gain):
        params = {"scale": jnp.full(4, gain), "bias": jnp.zeros(4)}
        return cubes(nj.normalize(nj.layer_norm(), x, params, mask=jnp.array(MASK45)))

    found = jit(jax.value_and_grad(loss, (0, 1)))(jnp.array(X45), jnp.float32(1))
    right = 1.1453948, ([1.3253782, -1.9880784, 0.6626999, 0], 3.4361846)
    for actual, expected in zip(
        jax.tree.leaves(found), jax.tree.leaves(right, is_leaf=_is_list), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=bound(3))
    layer: Any = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False)
    variables = layer.init(KEY, X45)
    run = jax.value_and_grad(lambda x: cubes(layer.apply(variables, x, mask=MASK45)))
    value, slope = run(jnp.array(X45))
    np.testing.assert_allclose(value, 1.1453948, rtol=bound(3))
    assert np.isnan(slope).all()


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


@pytest.mark.jax_defaults
def test_n45_layers_have_finite_gradients_beside_nan():
    """N45: parameters of a layer whose batch holds NaN under the mask."""
    x = jnp.where(VALID[..., None], ROWS, np.nan)

    def loss(layer):
        y = layer(x, mask=jnp.array(VALID))
        return _summed(y)

    layer = nj.nnx.Norm(nj.batch_norm(), x.shape)
    found = nnx.jit(nnx.grad(loss))(layer)

    def by_hand(params):
        mask = jnp.array(VALID)
        return _summed(
            nj.normalize(nj.batch_norm(), jnp.array(ROWS), params, mask=mask)
        )

    expected = jit(jax.grad(by_hand))(nj.init(nj.batch_norm(), x.shape))
    for name in ("scale", "bias"):
        np.testing.assert_allclose(
            found[name].get_value(), expected[name], rtol=bound(7)
        )


def _summed(y):
    """Select before use here as well: exp(NaN) · 0 would be NaN."""
    return jnp.sum(jnp.exp(jnp.where(VALID[..., None], y, 0)))
