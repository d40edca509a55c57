"""How much variance a small reduction group misses, and what merging brings back.

For independent x of variance σ², a group of n examples, and its biased variance v:

    E[v] = (n − 1)/n · σ²,   E[v with ddof 1] = σ²

Means of such variances stay too small however many groups there are. Moments that are
merged (count, mean and m2, with the distances between means) are those of all examples.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import normjax as nj
from normjax import study
from normjax.statistics import merge
from normjax.study.cells import stream

SEEDED = True
LABELS = {
    "variance": "mean variance of a group",
    "merged": "variance of the merged moments",
}


class Settings(study.Settings):
    """A batch of standard normal features, in groups of ``size`` examples."""

    size: int = study.Field(default=64, ge=2)
    ddof: int = study.Field(default=0, ge=0, le=1)
    batch: int = study.Field(default=64, ge=2)
    features: int = study.Field(default=4096, ge=1)


def measure(cell: study.Cell, key: jax.Array) -> dict[str, Any]:
    """Mean over groups and features, beside its expectation.

    Args:
        cell: the arm.
        key: of the batch; arms share its numbers.

    Returns:
        ``variance`` with the expectation ``variance_predicted``, and ``merged``, the
        mean biased variance of the merged moments, with that of the whole batch as
        ``merged_predicted``.
    """
    settings: Settings = cell.settings
    shape = settings.batch, settings.features
    x = jax.random.normal(stream(key, "batch"), shape)
    ghosts = settings.batch // settings.size
    parts = nj.moments(nj.ghost_batch_norm(ghosts), x)
    merged = merge(parts)
    n = settings.size
    return {
        "variance": parts.variance(settings.ddof).mean(),
        "variance_predicted": jnp.asarray((n - 1) / (n - settings.ddof)),
        "merged": merged.variance().mean(),
        "merged_predicted": nj.moments(nj.batch_norm(), x).variance().mean(),
    }
