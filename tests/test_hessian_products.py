"""Hessian-vector products of a loss through norms, at sizes that users train."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit, unit_roundoff

import normjax as nj
from normjax.verify.oracles import reference

# The norm, and by hand the view and the axes of its groups on (64, 96).
NORMS = {
    "layer": (nj.layer_norm(), (64, 96), (1,)),
    "batch": (nj.batch_norm(), (64, 96), (0,)),
    "group": (nj.group_norm(groups=8), (64, 8, 12), (2,)),
    "rms": (nj.rms_norm(), (64, 96), (1,)),
}


def draw(name: str) -> tuple[dict, dict]:
    """Parameters of two layers with a norm each, and a direction."""
    rng = np.random.default_rng(len(name))
    shapes = {"w1": (32, 96), "w2": (96, 96), "w3": (96, 10), "scale": (96,)}
    params = {key: rng.normal(1.0, 1.0, shape) for key, shape in shapes.items()}
    params = {key: value / len(value) ** 0.5 for key, value in params.items()}
    return params, {key: rng.normal(size=shape) for key, shape in shapes.items()}


def loss(norm, params, x):
    """Cross-entropy of the first class behind two normalized layers."""
    for name in ("w1", "w2"):
        x = jnp.tanh(norm(x @ params[name]) * params["scale"][None])
    return -jnp.mean(jax.nn.log_softmax(x @ params["w3"])[:, 0])


def products(norm, params, x, t):
    """H t in three compositions, and the third derivative along t twice."""
    slope = jax.grad(partial(loss, norm))

    def forward(params):
        return jax.jvp(lambda p: slope(p, x), (params,), (t,))[1]

    def reverse(params):
        dots = jax.tree.map(lambda g, t: jnp.sum(g * t), slope(params, x), t)
        return sum(jax.tree.leaves(dots))

    def along(params):
        return jax.jvp(lambda p: loss(norm, p, x), (params,), (t,))[1]

    return {
        "forward over reverse": forward(params),
        "reverse over reverse": jax.grad(reverse)(params),
        "reverse over forward": jax.grad(along)(params),
        "third": jax.jvp(forward, (params,), (t,))[1],
    }


def errors(found, expected) -> dict[str, float]:
    """Normwise relative error of each composition, over all parameters."""

    def length(tree):
        flat = [np.asarray(a, np.float64).ravel() for a in jax.tree.leaves(tree)]
        return np.linalg.norm(np.concatenate(flat))

    gaps = {
        key: jax.tree.map(
            lambda a, b: np.asarray(a, np.float64) - np.asarray(b), found[key], right
        )
        for key, right in expected.items()
    }
    return {
        key: float(length(gap) / length(expected[key])) for key, gap in gaps.items()
    }


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("layer", "float64"),
        ("batch", "float32"),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name in NORMS
            for dtype in ("float64", "float32")
            if (name, dtype) not in {("layer", "float64"), ("batch", "float32")}
        ),
    ],
)
def test_products_agree_with_plain_autodiff(name: str, dtype: str):
    """Within 64 u √n of sums over n = 96; each derivative multiplies errors by a few.

    A planted error: with its variance detached no composition is right.
    """
    spec, view, axes = NORMS[name]
    center, divide = spec.center, spec.divide
    params, t = draw(name)
    x = np.random.default_rng(9).normal(2.0, 1.0, (64, 32))
    settings = {"epsilon": spec.epsilon, "center": center, "divide": divide}

    def plain(h):
        return reference(h.reshape(view), axes, **settings).reshape(h.shape)

    def given(dtype):
        trees = params, x, t
        return jax.tree.map(lambda a: jnp.asarray(np.asarray(a, dtype)), trees)

    exact = [jax.tree.map(lambda a: a.astype(dtype), tree) for tree in (params, x, t)]
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), exact)
        right = jit(partial(products, plain))(*wide)
        bare = spec.replace(affine=None)
        found = jit(partial(products, lambda h: nj.normalize(bare, h)))(*given(dtype))
        cut = bare.replace(detach=("variance",))
        wrong = jit(partial(products, lambda h: nj.normalize(cut, h)))(*given(dtype))
    limit = 64 * unit_roundoff(dtype) * 96**0.5
    print(errors(found, right))
    assert max(errors(found, right).values()) <= limit
    assert min(errors(wrong, right).values()) > 1e-2
