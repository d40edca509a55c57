"""What dropout before a norm does to the statistics that evaluation uses.

Training drops a share 1 − p of x and divides the rest by p; evaluation drops nothing:

    E[x] is the same,   Var_train/Var_eval = (E[x²]/p − E[x]²)/(E[x²] − E[x]²)

so a batch norm that normalizes with the stored variance of training returns values of
standard deviation 1/√ratio. For x = max(0, z), z standard normal: E[x²] = 1/2,
E[x] = 1/√(2π); the ratio is 2.467 at p = 1/2. Source: Li, Chen, Hu, Yang 2019.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import normjax as nj
from normjax import study
from normjax.study.cells import stream

SEEDED = True
LABELS = {
    "ratio": "variance in training over variance in evaluation",
    "eval_std": "standard deviation of the output in evaluation",
    "train_std": "standard deviation of the output in training",
}


class Settings(study.Settings):
    """ReLU features, dropout, and whether it stands before or after the norm.

    ``statistics: recomputed`` takes those of a batch on which nothing was dropped.
    """

    keep: float = study.Field(default=0.5, gt=0, le=1)
    where: Literal["before", "after"] = "before"
    statistics: Literal["training", "recomputed"] = "training"
    batch: int = study.Field(default=512, ge=2)
    features: int = study.Field(default=64, ge=1)


def measure(cell: study.Cell, key: jax.Array) -> dict[str, Any]:
    """Ratio of variances and size of the output in evaluation, with their closed form.

    Args:
        cell: the arm.
        key: of two batches and the dropped units; arms share their numbers.

    Returns:
        ``ratio`` and ``eval_std``, each with ``_predicted``, and ``train_std``.
    """
    settings: Settings = cell.settings
    shape = settings.batch, settings.features
    train, test = (
        jax.nn.relu(jax.random.normal(stream(key, name), shape))
        for name in ("train", "test")
    )
    draw = jax.random.uniform(stream(key, "dropout"), shape)
    seen = train
    if settings.where == "before":
        seen = jnp.where(draw < settings.keep, train / settings.keep, 0)
    spec = nj.batch_norm()
    stored = nj.moments(spec, train if settings.statistics == "recomputed" else seen)
    evaluated = nj.normalize(spec, test, moments=stored)
    clean = nj.moments(spec, test).variance()
    ratio = _ratio(settings.keep) if settings.where == "before" else 1.0
    shift = 1.0 if settings.statistics == "recomputed" else ratio
    return {
        "ratio": nj.moments(spec, seen).variance().mean() / clean.mean(),
        "ratio_predicted": jnp.asarray(ratio),
        "eval_std": jnp.sqrt(jnp.mean(evaluated.var(0))),
        "eval_std_predicted": jnp.asarray(shift**-0.5),
        "train_std": jnp.sqrt(jnp.mean(nj.normalize(spec, seen).var(0))),
    }


def _ratio(keep: float) -> float:
    """The closed form for a ReLU of a standard normal number."""
    square, mean = 0.5, (2 * np.pi) ** -0.5
    return float((square / keep - mean**2) / (square - mean**2))
