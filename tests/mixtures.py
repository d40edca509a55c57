"""Mixtures, and the plain formula that they are compared with in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from compare import jit, unit_roundoff

import normjax as nj
from normjax.mixture import Mixture, init, normalize, switchable_norm

SHAPE = (3, 4, 5, 6)
RMS = {"center": False, "divide": "rms"}
# Members, and by hand which tensor axes each reduces; "g": two groups of channels.
MIXTURES: dict[str, tuple[Mixture, list[Any]]] = {
    "switchable": (switchable_norm(), [(1, 2), (1, 2, 3), (0, 1, 2)]),
    "with groups": (
        Mixture((nj.group_norm(2), nj.layer_norm(), nj.batch_norm()), affine="c"),
        ["g", (3,), (0, 1, 2)],
    ),
    "nothing in common": (
        Mixture((nj.layer_norm(), nj.instance_norm()), affine="c"),
        [(3,), (1, 2)],
    ),
    "rms": (
        Mixture((nj.rms_norm(), nj.instance_norm(**RMS)), affine=nj.Affine("c")),
        [(3,), (1, 2)],
    ),
    "l2": (Mixture((nj.l2_norm(), nj.l2_norm(pattern="b [...] c"))), [(3,), (1, 2)]),
    "centred rms": (
        Mixture((nj.layer_norm(divide="rms"), nj.instance_norm(divide="rms"))),
        [(3,), (1, 2)],
    ),
    "centre only": (
        Mixture((nj.center_only(), nj.instance_norm(divide="none"))),
        [(3,), (1, 2)],
    ),
    "ddof and floor": (
        Mixture(
            (
                nj.layer_norm(epsilon=0.5, epsilon_placement="floor_std", ddof=1),
                nj.batch_norm(epsilon=0.5, epsilon_placement="floor_std"),
            )
        ),
        [(3,), (0, 1, 2)],
    ),
}
every = pytest.mark.parametrize("name", MIXTURES)


apply = jit(normalize, static_argnums=0)


def draw(*shape: int, seed: int = 0, offset: float = 0.7) -> np.ndarray:
    return np.random.default_rng(seed).normal(offset, 1.5, shape)


def parameters(mixture: Mixture, lead: tuple[int, ...] = ()) -> dict[str, Any]:
    shapes = {name: v.shape for name, v in init(mixture, SHAPE).items()}
    return {
        name: draw(*(lead if "logits" in name else ()), *shape, seed=len(name))
        for name, shape in shapes.items()
    }


def plain(mixture: Mixture, axes: list[Any], x, params=None, mask=None):
    """The module's formula in plain jnp; broadcasting does what the layouts do."""
    params = {} if params is None else params
    first, ndim = mixture.specs[0], x.ndim
    w = (
        jnp.ones_like(x)
        if mask is None
        else jnp.broadcast_to(mask, x.shape).astype(x.dtype)
    )
    x = jnp.where(w > 0, x, 0) if mask is not None else x
    means, variances = [], []
    for spec, over in zip(mixture.specs, axes, strict=True):
        halves = (*x.shape[:-1], 2, x.shape[-1] // 2)
        view, ww = (a.reshape(halves) if over == "g" else a for a in (x, w))
        over = (1, 2, 4) if over == "g" else over
        count = ww.sum(over, keepdims=True)
        mean = (ww * view).sum(over, keepdims=True) / count
        about = mean if spec.divide == "std" else 0.0
        divisor = 1.0 if spec.divide == "l2" else count - spec.ddof
        variance = (ww * (view - about) ** 2).sum(over, keepdims=True) / divisor
        both = (
            jnp.broadcast_to(a, view.shape).reshape(x.shape) for a in (mean, variance)
        )
        for found, value in zip((means, variances), both, strict=True):
            found.append(value)

    def shares(name: str):
        logits = jnp.asarray(params.get(name, np.zeros(len(axes))))
        share = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
        shape = share.shape[:-1] + (1,) * (ndim + 1 - share.ndim)
        return [share[..., k].reshape(shape) for k in range(len(axes))]

    mean = sum(p * m for p, m in zip(shares("mean_logits"), means, strict=True))
    variance = sum(
        q * v for q, v in zip(shares("variance_logits"), variances, strict=True)
    )
    floor = first.epsilon_placement == "floor_std"
    s = (
        jnp.maximum(jnp.sqrt(variance), first.epsilon)
        if floor
        else jnp.sqrt(variance + first.epsilon)
    )
    y = (x - mean if first.center else x) / (1.0 if first.divide == "none" else s)
    row = (1,) * (ndim - 1) + (-1,)
    y = y * jnp.asarray(params["scale"]).reshape(row) if "scale" in params else y
    return y + jnp.asarray(params["bias"]).reshape(row) if "bias" in params else y


def gap(actual, expected) -> float:
    """Normwise relative error."""
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def arrays(params: dict[str, Any], dtype: Any = jnp.float64) -> dict[str, Any]:
    return {name: jnp.asarray(value, dtype) for name, value in params.items()}


BOUND = 64 * unit_roundoff(np.float64) * 90
