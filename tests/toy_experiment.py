"""An experiment that costs nothing: a number for each seed, with known differences."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax import study
from normjax.study.cells import stream

SEEDED = True
LABELS = {"coordinate": "place", "value": "value of the toy"}


class Settings(study.Settings):
    """``poison``: the seed whose value is not finite, -2 for all of them."""

    shift: Annotated[float, study.Leaf()] = 0.0
    noise: Annotated[float, study.Leaf()] = 1.0
    form: Literal["plain", "extra"] = "plain"
    poison: int = -1
    points: int = 3
    wrong: bool = False  # the closed form has another sign


def measure(cell: study.Cell, key: Array) -> dict[str, Any]:
    """A normal number around ``shift``; the noise has a stream of its own."""
    settings: Settings = cell.settings
    value = settings.shift + settings.noise * jax.random.normal(stream(key, "noise"))
    seed = jax.random.key_data(key)[-1]
    bad = (seed == settings.poison) | (settings.poison == -2)
    value = jnp.where(bad, jnp.nan, value)
    places = jnp.arange(1.0, settings.points + 1)
    sign = -1 if settings.wrong else 1
    return {
        "value": value,
        "loss": value**2,
        "extra": 2 * value if settings.form == "extra" else None,
        "diverged_at": jnp.where(jnp.isfinite(value), jnp.nan, 7.0),
        "curve.loss": study.Curve(places, value**2 / places),
        "line": study.Curve(places, settings.shift * places),
        "line_predicted": (places, sign * settings.shift * places),
        "check.data": jax.random.normal(stream(key, "data")),
        "check.shift": settings.shift + 0.0 * value,
    }


def _shifted(after: float, values):
    shift = values["check.shift"]
    good = bool(np.allclose(shift[np.isfinite(shift)], after))
    yield "the shift is what the arm says", f"{after:g}", shift, good


MANIPULATIONS = {"shift": _shifted}
