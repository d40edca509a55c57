"""How the residual stream grows with depth, by the place of the norm.

With branches f(h) = W₂ relu(W₁ h), entries of variance 1/d and 2/m (so that a
branch of unit input has unit output), and N without affine part:

    pre       h + f(N(h))      1 + l after l blocks: each adds 1
    sandwich  h + N(f(N(h)))   1 + l, now by the norm and not by the initialization
    post      N(h + f(h))      1, whatever f is (within ε)
    none      h + f(h)         2^l: each doubles

as far as branches are uncorrelated with the stream. Source: Xiong et al. 2020 (linear
growth under pre, between ½ and 1½ for each block).
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

import normjax as nj
from normjax import study
from normjax.study.cells import stream

SEEDED = True
LABELS = {
    "coordinate": "block",
    "curve.power": "mean square of the stream",
    "last": "mean square of the stream after the last block",
    "growth": "growth of the mean square by block",
    "doublings": "doublings of the mean square by block",
}


class Settings(study.Settings):
    """Random blocks of two layers, and where their norm stands."""

    placement: Literal["pre", "post", "sandwich", "none"] = "pre"
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    depth: int = study.Field(default=16, ge=2)
    width: int = study.Field(default=128, ge=2)
    examples: int = study.Field(default=32, ge=1)


def measure(cell: study.Cell, key: jax.Array) -> dict[str, Any]:
    """The mean square of the stream after each block.

    Args:
        cell: the arm.
        key: of inputs and weights; arms share their numbers.

    Returns:
        The curve ``curve.power``, ``last`` with ``last_predicted``, ``growth``, the
        slope of a line through the curve, with ``growth_predicted`` (None without
        norm), and ``doublings``, the slope of its log₂.
    """
    settings: Settings = cell.settings
    spec = getattr(nj, settings.norm)()
    shape = settings.examples, settings.width
    x = nj.normalize(spec, jax.random.normal(stream(key, "input"), shape))
    blocks = jax.random.split(stream(key, "blocks"), settings.depth)

    def block(h, own):
        h = _block(settings, spec, own, h)
        return h, jnp.mean(h**2)

    power = jax.lax.scan(block, x, blocks)[1]
    at = jnp.arange(1, settings.depth + 1, dtype=jnp.float32)
    line = at - at.mean()
    slope = jnp.sum(line * power) / jnp.sum(line**2)
    rate = jnp.sum(line * jnp.log2(power)) / jnp.sum(line**2)
    expected = {"post": 1.0, "none": 2.0**settings.depth}
    last = expected.get(settings.placement, 1.0 + settings.depth)
    grows = {"post": 0.0, "none": None}.get(settings.placement, 1.0)
    return {
        "curve.power": study.Curve(at, power),
        "last": power[-1],
        "last_predicted": jnp.asarray(last),
        "growth": slope,
        "growth_predicted": None if grows is None else jnp.asarray(grows),
        "doublings": rate,
        "doublings_predicted": jnp.asarray(1.0) if grows is None else None,
    }


def _block(settings: Settings, spec: nj.NormSpec, key: jax.Array, h: jax.Array):
    first, second = jax.random.split(key)
    d, m = settings.width, 4 * settings.width
    into = jax.random.normal(first, (d, m)) * d**-0.5
    back = jax.random.normal(second, (m, d)) * (2 / m) ** 0.5
    before = settings.placement in ("pre", "sandwich")
    branch = nj.normalize(spec, h) if before else h
    branch = jax.nn.relu(branch @ into) @ back
    if settings.placement == "sandwich":
        branch = nj.normalize(spec, branch)
    h = h + branch
    return nj.normalize(spec, h) if settings.placement == "post" else h
