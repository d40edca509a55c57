"""How far the output of a layer follows the scale of its input.

For x scaled by a > 0, with c = x − mean(x) and σ² = mean(c²):

    N(a x) = a c / √(a² σ² + ε),   amplitude over its limit:  1/√(1 + ε/(a² σ²))

Far above a* = √(ε/σ²) the layer is scale invariant, far below it is linear; at a* the
amplitude is 1/√2 of its limit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import normjax as nj
from normjax import study

LABELS = {
    "coordinate": "scale a of the input",
    "coordinate_scale": "log",
    "amplitude": "amplitude over its limit",
    "transition": "scale a* at which the amplitude is 1/√2 of its limit",
}


class Settings(study.Settings):
    """One group x, epsilon, and the decades of scale."""

    epsilon: float = study.Field(default=1e-5, gt=0)
    x: list[float] = study.Field(default=[1.0, 2.0, 4.0], min_length=2)
    lowest: float = -6
    highest: float = 6
    points: int = study.Field(default=241, ge=2)


def measure(cell: study.Cell, _key: None) -> dict[str, Any]:
    """The computed amplitude and its closed form, in float32 as a layer runs.

    Args:
        cell: the arm.
        _key: nothing is random.

    Returns:
        The curves ``amplitude`` and ``amplitude_predicted``, and ``transition``, the
        scale at which the computed curve crosses 1/√2, with its prediction √(ε/σ²).
    """
    settings: Settings = cell.settings
    x = np.array(settings.x)
    scales = np.logspace(settings.lowest, settings.highest, settings.points)
    spec = nj.layer_norm(epsilon=settings.epsilon)
    inputs = jnp.asarray(scales[:, None] * x, jnp.float32)
    outputs = jax.vmap(lambda row: nj.normalize(spec, row))(inputs)
    amplitude = jnp.sqrt(jnp.mean(outputs**2, axis=1))
    star = np.sqrt(settings.epsilon / x.var())
    predicted = 1 / np.sqrt(1 + (star / scales) ** 2)
    crossing = np.interp(0.5**0.5, np.asarray(amplitude), np.log(scales))
    return {
        "amplitude": study.Curve(jnp.asarray(scales), amplitude),
        "amplitude_predicted": study.Curve(jnp.asarray(scales), jnp.asarray(predicted)),
        "transition": np.exp(crossing),
        "transition_predicted": star,
    }
