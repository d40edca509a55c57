"""jvp, vjp, jit, vmap, second and third order, checkpoint and scan of ``normalize``."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from compare import FACTOR, batched, jit, measure, unit_roundoff, wide
from frames import Case, inputs

import normjax as nj

TRANSFORMED = [
    "layer",
    "batch_space",
    "group",
    "rms",
    "center_std_outside_sqrt",
    "plain_std",
    "blend_batch",
    "mask_passthrough",
    "weights_keep",
]
SECOND = ["layer", "batch_space", "rms", "plain_std", "blend_batch", "mask_passthrough"]
THIRD = ["layer", "center_std_floor_var", "mask_zero", "rms", "blend_rms"]
SMALL = {"kappa": 10.0, "spread": 0.5}


def directions(case: Case, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tangents with an offset larger than their spread, and cotangents."""
    rng, shape = case.rng("directions"), (count, *case.frame.shape)
    return rng.normal(size=shape) + 10, rng.normal(size=shape)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_jvp_and_vjp(name: str):
    case = CASES[name]
    x, (t, bar) = inputs(case, 100), directions(case, 100)

    def both(function, x, t, bar):
        y, moved = jax.jvp(function, (x,), (t,))
        linear, along = jax.linearize(function, x)
        _, pull = jax.vjp(function, x)
        (transposed,) = jax.linear_transpose(along, x)(bar)
        return {
            "value": y,
            "linear value": linear,
            "jvp": moved,
            "linearized": along(t),
            "vjp": pull(bar)[0],
            "transposed": transposed,
        }

    found = batched(partial(both, case.call))(x, t, bar)
    oracle = batched(partial(both, case.oracle))(x, t, bar)
    J = batched(jax.jacfwd(case.oracle))(x)
    for key in ("value", "linear value"):
        measure(case, x, found[key], oracle[key]).check()
    # Errors are relative to |J|·|t|, since J t may vanish: J 1 = 0.
    scale = np.abs(J.reshape(100, -1, x[0].size))
    for key, vector, array in (
        ("jvp", t, scale),
        ("linearized", t, scale),
        ("vjp", bar, scale.swapaxes(1, 2)),
        ("transposed", bar, scale.swapaxes(1, 2)),
    ):
        most = (array @ np.abs(vector).reshape(100, -1, 1)).reshape(x.shape)
        measure(case, x, most + found[key] - oracle[key], most).check()


def nested(function, x, modes):
    for mode in modes:
        function = mode(function)
    return function(x)


HESSIANS = (
    (jax.jacrev, jax.jacfwd),
    (jax.jacrev, jax.jacrev),
    (jax.jacfwd, jax.jacfwd),
)


def scalar(function, case: Case, x):
    """Σ over a fixed cotangent: its derivatives are those of every output at once."""
    return jnp.sum(function(x) * jnp.asarray(directions(case, 1)[1][0], x.dtype))


@pytest.mark.parametrize("name", SECOND)
def test_second_order(name: str):
    """Compositions of modes against the oracle's Hessian."""
    case = CASES[name]
    x = inputs(case, 100, **SMALL)
    plain = partial(scalar, case.oracle, case)
    expected = batched(partial(nested, plain, modes=HESSIANS[0]))(x)
    ours = partial(scalar, case.call, case)
    compositions = HESSIANS if name == "layer" else HESSIANS[:2]
    found = batched(lambda x: [nested(ours, x, modes) for modes in compositions])(x)
    for hessian in found:
        measure(case, x, hessian, expected).check()


@cache
def third_derivative(name: str, dtype: str):
    """Inputs rounded to dtype, and the oracle's third derivative there."""
    case = CASES[name]
    x = wide(inputs(case, 20, **SMALL).astype(dtype))
    modes = (jax.jacrev, jax.jacfwd, jax.jacfwd)
    plain = partial(nested, partial(scalar, case.oracle, case), modes=modes)
    return x, batched(plain, exact=True)(x)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(("float64", name) for name in THIRD),
        *(("float32", name) for name in THIRD[:3]),
    ],
)
def test_third_order(name: str, dtype: str):
    """In float64, and in float32 at κ ≤ 10, forward over forward over reverse."""
    case = CASES[name]
    x, expected = third_derivative(name, dtype)
    modes = (jax.jacrev, jax.jacfwd, jax.jacfwd)
    found = batched(
        partial(nested, partial(scalar, case.call, case), modes=modes), dtype
    )(x)
    assert found.dtype == dtype
    measure(case, x, found, expected, dtype).check()


@pytest.mark.parametrize("name", ["mask_zero"])
def test_third_order_in_reverse_mode_only(name: str):
    case = CASES[name]
    x, expected = third_derivative(name, "float64")
    modes = (jax.jacrev, jax.jacrev, jax.jacrev)
    found = batched(partial(nested, partial(scalar, case.call, case), modes=modes))(x)
    measure(case, x, found, expected).check()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_planted_third_derivatives_are_rejected(dtype: str):
    case = CASES["layer"]
    x, expected = third_derivative("layer", dtype)
    swapped = expected.reshape(len(x), 2, 6, -1)[:, :, ::-1].reshape(expected.shape)
    for wrong in (0 * expected, -expected, 1.01 * expected, swapped):
        found = measure(case, x, wrong, expected, dtype)
        found.refute()


def agree(actual, expected, n: int, dtype=np.float32) -> None:
    """Equal but for the order of sums, which compilation may change."""
    bound = FACTOR * unit_roundoff(dtype) * n
    for one, other in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        one, other = wide(one), wide(other)
        assert np.linalg.norm(one - other) <= bound * np.linalg.norm(other)


def some(spec: nj.NormSpec, shape: tuple, dtype=jnp.float32):
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.normal(size=shape) + 2, dtype)
    params = {
        name: jnp.asarray(rng.normal(size=leaf.shape), dtype)
        for name, leaf in nj.init(spec, shape).items()
    }
    return x, params, jnp.asarray(rng.normal(size=shape), dtype)


SPECS = {
    "layer": nj.layer_norm(),
    "batch": nj.batch_norm(),
    "group": nj.group_norm(groups=2),
    "rms": nj.rms_norm(),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.mark.parametrize("name", ["batch", "group"])
def test_jit_and_eager_agree(name: str):
    spec = SPECS[name]
    x, params, bar = some(spec, (6, 3, 4))

    def backward(x, params):
        y, pull = jax.vjp(partial(nj.normalize, spec), x, params)
        return y, *pull(bar)

    agree(jit(backward)(x, params), backward(x, params), x.size)


@each_spec
def test_vmap_is_a_loop(spec: nj.NormSpec):
    """Over inputs, and over parameters and inputs; value and gradient."""
    x, params, bar = some(spec, (5, 6, 3, 4))
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)

    def backward(x, params):
        y, pull = jax.vjp(partial(nj.normalize, spec), x, params)
        return y, *pull(bar[0])

    one = jit(backward)
    lanes = jit(jax.vmap(jax.vmap(backward, (0, None)), (None, 0)))(x, params)
    for i, j in ((0, 0), (1, 3)):
        chosen = jax.tree.map(lambda leaf, i=i: leaf[i], params)
        lane = jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], lanes)
        agree(lane, one(x[j], chosen), x[0].size)


@pytest.mark.parametrize("asked", ["x", "scale", "bias"])
def test_gradient_of_one_argument_alone(asked: str):
    """Tangents that are zero by construction change nothing in the others."""
    spec = nj.batch_norm()
    x, params, bar = some(spec, (6, 3, 4))
    everything = {"x": x, **params}

    def loss(part, rest):
        whole = rest | part
        y = nj.normalize(spec, whole["x"], {k: whole[k] for k in params})
        return jnp.sum(bar * y)

    part = {asked: everything[asked]}
    alone = jit(jax.grad(loss))(part, everything)
    full = jit(jax.grad(lambda whole: loss(whole, {})))(everything)
    agree(alone[asked], full[asked], x.size)


@pytest.mark.parametrize("name", ["layer", "batch"])
def test_checkpoint_and_scan(name: str):
    """A stack of layers as a loop, as a scan, and as a scan that recomputes."""
    spec = SPECS[name]
    x, params, bar = some(spec, (6, 3, 4))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1, -leaf]), params)

    def layer(x, params):
        return nj.normalize(spec, jnp.tanh(x), params)

    def loop(x, stacked):
        for i in range(3):
            x = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
        return jnp.sum(bar * x)

    def scanned(x, stacked, step=layer):
        x, _ = jax.lax.scan(lambda x, p: (step(x, p), None), x, stacked)
        return jnp.sum(bar * x)

    expected = jit(jax.grad(loop, (0, 1)))(x, stacked)
    for function in (scanned, partial(scanned, step=jax.checkpoint(layer))):
        found = jit(jax.grad(function, (0, 1)))(x, stacked)
        agree(found, expected, 3 * x.size)


@pytest.mark.x32
def test_epsilon_sweep_compiles_once():
    """The numbers of a spec are leaves: of jit, of vmap, and of grad."""
    traces = []
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)), jnp.float32)

    @jax.jit
    def apply(spec, x):
        traces.append(None)
        return nj.normalize(spec, x)

    epsilons = np.logspace(-6, 1, 12).astype(np.float32)
    loop = [apply(nj.layer_norm(epsilon=float(e)), x) for e in epsilons]
    assert len(traces) == 1
    swept = jax.vmap(lambda e: nj.normalize(nj.layer_norm(epsilon=e), x))(epsilons)
    agree(swept, jnp.stack(loop), 5)
    c = wide(x) - wide(x).mean(1, keepdims=True)
    square = (c**2).mean(1, keepdims=True)
    right = [c / np.sqrt(square + epsilon) for epsilon in wide(epsilons)]
    agree(swept, np.stack(right), 5)


def test_gradient_by_a_mask_is_zero():
    """Weights carry no gradient: as for stop_gradient, an array of zeros."""
    x, _, bar = some(nj.layer_norm(), (3, 4))
    weights = jnp.asarray(np.random.default_rng(1).uniform(1, 2, (3, 4)), x.dtype)

    def loss(weights):
        return jnp.sum(bar * nj.normalize(nj.layer_norm(), x, mask=weights))

    assert not jax.grad(loss)(weights).any()
    _, moved = jax.jvp(loss, (weights,), (jnp.ones_like(weights),))
    assert float(moved) == 0


def test_rule_is_in_the_program_and_the_oracle_has_none():
    case = CASES["layer"]
    x = jnp.asarray(inputs(case, 1)[0])
    assert "custom_jvp" in str(jax.make_jaxpr(case.call)(x))
    assert "custom" not in str(jax.make_jaxpr(case.oracle)(x))
