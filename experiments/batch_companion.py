"""How one companion decides the output of an example under batch norm.

For the batch {0, b} of two examples (biased variance b²/4):

    BN(0; {0, b}) = −b / √(b² + 4 ε)

The example is 0 in every batch; what comes out is near −1 or near +1, by the sign of
its companion, as soon as |b| is well above 2√ε.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import normjax as nj
from normjax import study

LABELS = {
    "coordinate": "companion b",
    "coordinate_scale": "linear",
    "output": "output of the example 0",
    "slope": "slope at b = 0",
}


class Settings(study.Settings):
    """Epsilon and the range of the companion."""

    epsilon: float = study.Field(default=1e-2, gt=0)
    largest: float = study.Field(default=2.0, gt=0)
    points: int = study.Field(default=201, ge=3)


def measure(cell: study.Cell, _key: None) -> dict[str, Any]:
    """The computed output of the example 0 and its closed form, in float32.

    Args:
        cell: the arm.
        _key: nothing is random.

    Returns:
        The curves ``output`` and ``output_predicted``, and ``slope``, the derivative of
        the output by the companion at b = 0 from the closed Jacobian, predicted to be
        −1/(2√ε).
    """
    settings: Settings = cell.settings
    companions = np.linspace(-settings.largest, settings.largest, settings.points)
    spec = nj.batch_norm(epsilon=settings.epsilon)
    batches = jnp.asarray(np.stack([0 * companions, companions], 1), jnp.float32)
    outputs = jax.vmap(lambda batch: nj.normalize(spec, batch[:, None])[0, 0])(batches)
    predicted = -companions / np.sqrt(companions**2 + 4 * settings.epsilon)
    coupling = nj.input_jacobian(spec, jnp.zeros((2, 1))).as_matrix()
    return {
        "output": study.Curve(jnp.asarray(companions), outputs),
        "output_predicted": study.Curve(
            jnp.asarray(companions), jnp.asarray(predicted)
        ),
        "slope": coupling[0, 1],
        "slope_predicted": -0.5 / np.sqrt(settings.epsilon),
    }
