"""Field cases of derivatives: one element, zeros, constants, renormalization, modes.

The kind: every preset, in forward, reverse and closed form. Of the same theme
elsewhere: large offsets in test_field_offsets.py, NaN under a mask in
test_field_masks.py, everything against autodiff in tests/test_standardize.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit, wide
from flax import nnx
from kinds import DIVIDING, VECTOR, bound, random

import normjax as nj

KEY = jax.random.key(0)
normalize = jit(nj.normalize)


@jit
def matrices(spec: nj.NormSpec, x, **given):
    """y, and ∂y/∂x by forward mode, by reverse mode and in closed form."""
    call = partial(nj.normalize, spec, **given)
    modes = [mode(call)(x).reshape(x.size, x.size) for mode in (jax.jacfwd, jax.jacrev)]
    return call(x), [*modes, nj.input_jacobian(spec, x, **given).as_matrix()]


@jit
def all_gradients(spec: nj.NormSpec, x, params):
    y, pull = jax.vjp(partial(nj.normalize, spec), x, params)
    return y, *pull(jnp.full_like(y, 3))


ONE = {
    "instance_norm": (nj.instance_norm(), (2, 1, 1, 3)),
    "group_norm": (nj.group_norm(groups=4), (2, 1, 4)),
    "layer_norm": (nj.layer_norm(), (4, 1)),
    "batch_norm": (nj.batch_norm(ddof=1), (1, 3)),
    "ghost_batch_norm": (nj.ghost_batch_norm(ghosts=2), (2, 3)),
    "weight_standardization": (nj.weight_standardization("i", affine="o"), (1, 3)),
}
ARITHMETIC = {
    "float32": ("float32", {}),
    "float16": ("float16", {}),
    "one_pass": ("float32", {"precision": nj.Precision(algorithm="one_pass")}),
    "rescale": ("float32", {"precision": nj.Precision(rescale=True)}),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "float32") for name in ONE),
        *(("layer_norm", kind) for kind in ARITHMETIC if kind != "float32"),
    ],
)
def test_n27_groups_of_one_element(name: str, kind: str):
    """N27: exactly the bias, and no gradient of x and scale, in every arithmetic."""
    (spec, shape), (dtype, fields) = ONE[name], ARITHMETIC[kind]
    spec = spec.replace(**fields)
    size = 6e4 if dtype == "float16" else 1e6
    x = jnp.asarray(size + 0.3 * np.arange(np.prod(shape)).reshape(shape), dtype)
    params = jax.tree.map(lambda leaf: leaf + 2, nj.init(spec, shape))
    params["bias"] = jnp.full_like(params["bias"], 3)
    y, x_bar, params_bar = all_gradients(spec, x, params)
    assert np.array_equal(y, np.full(shape, 3.0))
    assert not x_bar.any()
    assert not params_bar["scale"].any()


@pytest.mark.parametrize("ddof", [0, 1])
def test_n27_what_is_stored_is_no_nan(ddof: int):
    """N27: instance norm of one position: three instances pool into one variance.

    With one instance there is one value: ddof 1 leaves the state as it was.
    """
    spec = nj.instance_norm(running=nj.Running(decay=0.0, ddof=ddof))
    x = jnp.array([1.0, 2.0, 3.0], jnp.float32).reshape(3, 1, 1)
    update, find = jit(nj.running.update), jit(nj.moments)
    state = nj.running.init(spec, x.shape)
    new = update(spec, state, find(spec, x))
    np.testing.assert_allclose(new.variance, [2 / (3 - ddof)], rtol=bound(3))
    one = update(spec, state, find(spec, x[:1]))
    assert one.variance.tolist() == [float(ddof)]
    assert one.count.tolist() == [1 - ddof]


def renormalized(x, mean0, variance0, r_max, d_max, epsilon):
    """By the paper, in float64: y, and r."""
    mean, s = x.mean(), np.sqrt(x.var() + epsilon)
    s0 = np.sqrt(variance0 + epsilon)
    r = np.clip(s / s0, 1 / r_max, r_max)
    d = np.clip((mean - mean0) / s0, -d_max, d_max)
    return (x - mean) / s * r + d, r


# Batch, stored (mean, variance), r_max, d_max.
RENORM = {
    "free": ([3.0, 7.0], (4.0, 1.0), 3.0, 5.0),
    "r above": ([-5.0, 15.0], (4.0, 1.0), 3.0, 5.0),
    "r below": ([4.9, 5.1], (4.0, 1.0), 3.0, 5.0),
    "d above": ([30.0, 34.0], (4.0, 1.0), 3.0, 5.0),
    "d below": ([-30.0, -34.0], (4.0, 1.0), 3.0, 5.0),
    "batch norm": ([3.0, 7.0, 8.0], (4.0, 1.0), 1.0, 0.0),
}


@jit
@partial(jax.grad, argnums=2)
def by_reference(spec: nj.NormSpec, x, reference):
    return jnp.sum(nj.normalize(spec, x, reference=reference) ** 3)


@pytest.mark.parametrize("name", RENORM)
def test_n41_batch_renormalization(name: str):
    """N41: r·x̂ + d with both clipped and without gradient: J = r · J of batch norm."""
    values, stored, r_max, d_max = RENORM[name]
    spec = nj.batch_norm(statistics="renorm", r_max=r_max, d_max=d_max)
    reference = nj.Statistics(*(jnp.full(1, v, jnp.float32) for v in stored))
    x = jnp.array(values, jnp.float32)[:, None]
    right, r = renormalized(np.array(values), *stored, r_max, d_max, 1e-5)
    y, found = matrices(spec, x, reference=reference)
    plain, own = matrices(nj.batch_norm(), x)
    np.testing.assert_allclose(wide(y)[:, 0], right, rtol=bound(4), atol=bound(4))
    for J in found:
        np.testing.assert_allclose(
            J, r * wide(own[0]), rtol=bound(40), atol=bound(4) * r
        )
    if name == "batch norm":
        np.testing.assert_allclose(y, plain, rtol=bound(1))
    if name == "free":  # the report: r 2, d 1: (7 − 5)/2 · 2 + 1 = (7 − 4)/1
        exact = spec.replace(epsilon=0.0)
        assert float(normalize(exact, x, reference=reference)[1, 0]) == 3.0
    slopes = jax.tree.leaves(by_reference(spec, x, reference))
    assert not any(slope.any() for slope in slopes)


@pytest.mark.jax_defaults
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_n41_layers_correct_towards_what_they_store(kind: str):
    """N41: with the statistics before this batch, which is stored afterwards."""
    fields: dict[str, Any] = {"statistics": "renorm", "epsilon": 0.0}
    spec = nj.batch_norm(running=nj.Running(decay=0.9, initial=(4.0, 1.0)), **fields)
    x = jnp.array([[3.0], [7.0]])
    if kind == "linen":
        layer = nj.linen.Norm(spec, use_running_average=False)
        variables: Any = layer.init(KEY, x)
        y, changed = layer.apply(variables, x, mutable=["batch_stats"])
        mean, variance = (changed["batch_stats"][name] for name in ("mean", "var"))
    else:
        layer = nj.nnx.Norm(spec, x.shape)
        y = layer(x)
        mean, variance = layer.mean.get_value(), layer.var.get_value()
    assert y.tolist() == [[-1.0], [3.0]]
    np.testing.assert_allclose(mean, [4.1], rtol=bound(1))
    np.testing.assert_allclose(variance, [1.3], rtol=bound(10))


def test_n41_needs_what_it_corrects_towards():
    """N41: without a reference it is an error, not batch norm."""
    with pytest.raises(ValueError, match="needs reference=Statistics"):
        nj.normalize(nj.batch_norm(statistics="renorm"), jnp.ones((2, 1)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in DIVIDING),
        *((name, "float16") for name in ("layer_norm", "l2_norm", "batch_norm")),
        ("rms_norm", "bfloat16"),
    ],
)
def test_n68_n72_zeros(name: str, dtype: str):
    """N68, N72: zeros give zeros, J is P/S(0) where it centres and I/S(0) elsewhere.

    Without ε both are 0: a documented finite choice, where a quotient is NaN.
    """
    case = DIVIDING[name]
    zeros = jnp.zeros(case.frame.shape, dtype)
    bar = jnp.asarray(case.rng("bar").integers(-4, 5, zeros.shape) / 64, dtype)

    @jit
    def run(spec, x, bar):
        y, pull = jax.vjp(partial(nj.normalize, spec), x)
        return y, pull(bar)[0], nj.input_jacobian(spec, x).T.mv(bar.astype("float32"))

    y, *slopes = run(case.spec, zeros, bar)
    assert not y.any()
    view = wide(bar).reshape(case.frame.view)
    if case.spec.center:
        view = view - view.mean(case.frame.axes, keepdims=True)
    right = (view / np.sqrt(1e-5)).reshape(zeros.shape)
    for slope in slopes:
        narrow = float(jnp.finfo(slope.dtype).eps)
        size = np.max(abs(right))
        np.testing.assert_allclose(
            wide(slope), right, rtol=narrow + bound(8), atol=bound(8) * size
        )
    for found in run(case.spec.replace(epsilon=0.0), zeros, bar):
        assert not found.any()


@pytest.mark.parametrize("constant", [0.1, 1e4 + 0.1, 1e20])
@pytest.mark.parametrize("rescale", [False, True])
def test_n72_constant_groups(constant: float, rescale: bool):
    """N72: x̂ exactly 0 and J = P/√ε: 210.8185 and −105.4093; rescaled as well."""
    spec = nj.layer_norm(precision=nj.Precision(rescale=rescale))
    y, found = matrices(spec, jnp.full(3, constant, jnp.float32))
    assert not y.any()
    right = (np.eye(3) - 1 / 3) / np.sqrt(1e-5)
    np.testing.assert_allclose(right[0, :2], [210.8185, -105.4093], atol=5e-5)
    for J in found:
        np.testing.assert_allclose(J, right, rtol=bound(3))


def test_n72_plain_autodiff_is_nan():
    """N72, N68: the control: √ at 0, and a quotient by a norm."""
    zeros = jnp.zeros(3)
    outside = jax.jacrev(lambda x: (x - x.mean()) / (jnp.std(x) + 1e-5))(zeros)
    norm = jax.jacrev(lambda v: v / jnp.linalg.norm(v))(zeros)
    assert np.isnan(outside).all()
    assert np.isnan(norm).any()
    spec = nj.layer_norm(epsilon_placement="outside_sqrt")
    for J in matrices(spec, zeros)[1]:
        np.testing.assert_allclose(J, (np.eye(3) - 1 / 3) * 1e5, rtol=bound(3))


def test_n71_numbers_of_the_report():
    """N71: rows of J and its eigenvalues for [1, 2, 3, 4], layer and RMS."""
    rows = [
        [0.2683303, -0.3577684, -0.0894434, 0.1788815],
        [-0.3577684, 0.6260969, -0.1788851, -0.0894434],
    ]
    for J in matrices(nj.layer_norm(), jnp.array(VECTOR))[1]:
        np.testing.assert_allclose(J[:2], rows, rtol=0, atol=1e-7)
        values = np.sort(np.linalg.eigvalsh((J + J.T) / 2))
        np.testing.assert_allclose(
            values, [0, 7.155e-6, 0.8944236, 0.8944236], rtol=1e-4, atol=1e-12
        )
    row = [0.3529767, -0.0243432, -0.0365148, -0.0486864]
    for J in matrices(nj.rms_norm(epsilon=1e-6), jnp.array(VECTOR))[1]:
        np.testing.assert_allclose(J[0], row, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "name", ["layer_norm", "rms_norm", "l2_norm", "batch_norm", "group_norm"]
)
def test_n71_invariants(name: str):
    """N71: J 1 = 0, J c = ρ x̂ and J = Jᵀ, for everything whose J is symmetric."""
    case = DIVIDING[name]
    spec, frame = case.spec, case.frame
    x = jnp.asarray(random(case) + 1, jnp.float32)
    y, found = matrices(spec, x)
    view, axes = wide(x).reshape(frame.view), frame.axes
    mean = view.mean(axes, keepdims=True)
    about = view - mean if spec.divide == "std" else view
    total = (about**2).sum if spec.divide == "l2" else (about**2).mean
    variance = total(axes, keepdims=True)
    c = view - mean if spec.center else view
    right = wide(y).reshape(frame.view) * 1e-5 / (variance + 1e-5)
    size = np.linalg.norm(found[0])
    for J in map(wide, found):
        close = bound(frame.group_size) * size
        if spec.center:
            assert np.max(abs(J @ np.ones(x.size))) <= close
        if spec.center == (spec.divide == "std"):  # c is what the variance is about
            error = J @ c.ravel() - right.ravel()
            assert np.max(abs(error)) <= close * np.linalg.norm(c)
            assert np.max(abs(J - J.T)) <= close


@pytest.mark.jax_defaults
def test_n71_a_bias_before_batch_norm_has_no_gradient():
    """N71: it vanishes but for rounding: u·n beside the kernel's."""
    x = jax.random.normal(KEY, (8, 4))
    params = {"kernel": jax.random.normal(KEY, (4, 3)), "bias": jnp.ones(3)}

    def loss(params):
        hidden = x @ params["kernel"] + params["bias"]
        return jnp.sum(nj.normalize(nj.batch_norm(), hidden) ** 3)

    found = jit(jax.grad(loss))(params)
    size = np.max(abs(wide(found["kernel"])))
    assert size > 0.1
    assert np.max(abs(wide(found["bias"]))) <= bound(8) * size


def test_n74_train_couples_the_batch_and_eval_does_not():
    """N74: eval per sample is diag(gain/√(σ² + ε)); train is N71 for each channel."""
    spec = nj.batch_norm()
    x = jnp.asarray(np.stack([VECTOR, VECTOR**2], axis=1), jnp.float32)
    params = {"scale": jnp.array([2.0, 3.0], x.dtype), "bias": jnp.ones(2, x.dtype)}
    stored = nj.Statistics(jnp.zeros(2, x.dtype), jnp.array([1.0, 4.0], x.dtype))

    def one(row):
        return nj.normalize(spec, row[None], params, moments=stored)[0]

    each = jit(jax.vmap(jax.jacrev(one)))(x)
    right = np.diag([2.0, 3.0] / np.sqrt(np.array([1.0, 4.0]) + 1e-5))
    np.testing.assert_allclose(each, np.broadcast_to(right, (4, 2, 2)), rtol=bound(1))
    whole = normalize(spec, x, params, moments=stored)
    np.testing.assert_array_equal(jit(jax.vmap(one))(x), whole)
    J = wide(jit(jax.jacrev(partial(nj.normalize, spec)))(x))
    layer = wide(matrices(nj.layer_norm(), x[:, 0])[1][0])
    np.testing.assert_allclose(J[:, 0, :, 0], layer, rtol=bound(4), atol=bound(4))
    assert not J[:, 0, :, 1].any()
    assert abs(J[0, 0, 1, 0]) > 0.1


@pytest.mark.jax_defaults
def test_n74_layers_under_function_transforms():
    """N74: jacrev of an nnx layer in training, and vmap of one in eval, per sample."""
    x = jnp.asarray(VECTOR, jnp.float32)[:, None]
    layer = nj.nnx.Norm(nj.batch_norm(), x.shape)
    graph, state = nnx.split(layer)

    def train(x):
        fresh = jax.tree.map(jnp.asarray, state)  # variables of this trace level
        return nnx.merge(graph, fresh)(x)

    J = jit(jax.jacrev(train))(x)[:, 0, :, 0]
    right = matrices(nj.layer_norm(), x[:, 0])[1][0]
    np.testing.assert_allclose(J, right, rtol=bound(4), atol=bound(4))
    layer.eval()
    each = nnx.vmap(lambda layer, row: layer(row[None])[0], in_axes=(None, 0))
    np.testing.assert_allclose(each(layer, x), x / np.sqrt(1 + 1e-5), rtol=bound(1))


def test_n74_eval_of_a_sample_that_has_no_batch_axis():
    """N74: given statistics reduce nothing, so a sample of shape (c,) is enough."""
    stored = nj.Statistics(jnp.zeros(2), jnp.ones(2))
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    each = jax.vmap(lambda row: nj.normalize(nj.batch_norm(), row, moments=stored))
    np.testing.assert_allclose(each(x), x / np.sqrt(1 + 1e-5), rtol=bound(1))
