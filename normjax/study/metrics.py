"""Outcomes and diagnostics of a trained model, each with what it measures."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from normjax.spectra import stabilizer_share
from normjax.study.norm_setting import NormSetting


def r2(prediction: Array, target: Array) -> Array:
    """1 − Σ(y − ŷ)²/Σ(y − ȳ)²: 1 is perfect, 0 as good as the mean of the targets."""
    rest = jnp.sum((target - prediction) ** 2)
    return 1 - rest / jnp.sum((target - target.mean()) ** 2)


def norm(tree: Any) -> Array:
    """Euclidean norm of all leaves together."""
    leaves = [jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(leaves))


def mean_stabilizer_share(setting: NormSetting | None, x: Array | None) -> Array | None:
    """Mean of ρ = ε/(σ² + ε) over the groups of a layer's input; None without a layer.

    0: locally scale invariant; 1: the layer is linear along x.
    """
    if setting is None or x is None:
        return None
    return stabilizer_share(setting.spec, x).mean()


def linear_probe(
    train_x: Array, train_y: Array, test_x: Array, test_y: Array, ridge: float = 1e-4
) -> Array:
    """Test R² of a ridge regression of y on a representation.

    What a linear readout can still tell about y; the ridge is relative to the mean
    square of the columns.

    Args:
        train_x: examples × units.
        train_y: what is read out.
        test_x: other examples.
        test_y: their values.
        ridge: relative strength.

    Returns:
        R² on the test part.
    """
    mean_x, mean_y = train_x.mean(0), train_y.mean()
    x, y = train_x - mean_x, train_y - mean_y
    gram = x.T @ x / len(y)
    strength = ridge * jnp.trace(gram) / len(gram) + 1e-12
    weights = jnp.linalg.solve(gram + strength * jnp.eye(len(gram)), x.T @ y / len(y))
    return r2((test_x - mean_x) @ weights + mean_y, test_y)


def correlation(x: Array, y: Array) -> Array:
    """Pearson correlation."""
    x, y = x - x.mean(), y - y.mean()
    return jnp.sum(x * y) / jnp.sqrt(jnp.sum(x * x) * jnp.sum(y * y))
