"""Eight virtual devices, inputs for them, and how their numbers are compared."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import FACTOR, unit_roundoff, wide
from jax.sharding import PartitionSpec

import normjax as nj

DEVICES = 8
U = unit_roundoff(np.float32)
SPLIT, WHOLE = PartitionSpec("i"), PartitionSpec()
needs_devices = pytest.mark.skipif(
    jax.device_count() < DEVICES, reason="needs 8 virtual devices"
)


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    kind = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((DEVICES,), ("i",), axis_types=kind)


def draw(shape=(64, 6), offset: float = 0.0, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape) + offset
    return jnp.asarray(values, jnp.float32)


def named(spec: nj.NormSpec) -> nj.NormSpec:
    return spec.replace(axis_names=("i",))


def close(found, expected, n: int, kappa: float = 1.0) -> None:
    """Normwise, to 64 u (n + κ): the order of a sum is each machine's own."""
    found, expected = wide(found), wide(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        gap = np.linalg.norm(a - b)
        assert gap <= FACTOR * U * (n + kappa) * max(np.linalg.norm(b), 1e-3), gap
