"""A cell is one arm on one seed; a block of seeds runs in one compiled program."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Curve(NamedTuple):
    """Values along a coordinate; ``measure`` may return one (or a pair) for any metric.

    A metric named ``x_predicted`` is drawn and compared with ``x``.
    """

    coordinates: Array
    values: Array


@dataclass(frozen=True)
class Cell:
    """What ``measure`` gets: one arm.

    Attributes:
        arm: its name.
        settings: its validated settings.
    """

    arm: str
    settings: Any


class Row(NamedTuple):
    """One number of a run: a scalar has no coordinate, an exact study no seed."""

    seed: int | None
    metric: str
    coordinate: float | None
    value: float | None


Measure = Callable[[Cell, Any], Mapping[str, Any]]


def program(measure: Measure, cell: Cell) -> Callable[[Array], Mapping[str, Any]]:
    """``measure`` for many keys at once, compiled when it is first called."""
    return jax.jit(jax.vmap(lambda key: measure(cell, key)))


def kinds(measure: Measure, cell: Cell) -> dict[str, bool | None]:
    """The metrics of a cell, without running it: number, curve, or no value.

    Args:
        measure: of the experiment.
        cell: the arm.

    Returns:
        By name: True for one number, False for a curve, None for no value.
    """
    found = jax.eval_shape(lambda key: dict(measure(cell, key)), jax.random.key(0))
    return {
        name: None if value is None else not isinstance(value, tuple)
        for name, value in found.items()
    }


def run_block(
    measure: Measure, cell: Cell, seeds: tuple[int, ...], size: int, compiled=None
) -> list[Row]:
    """Measure a block.

    Args:
        measure: of the experiment.
        cell: the arm.
        seeds: the block's seeds; () for an exact study, which gets no key.
        size: lanes of the program; a short block is filled up and the surplus dropped,
            so that every block runs the same program.
        compiled: from ``program``, to be used again for the next block.

    Returns:
        One ``Row`` for each number; values that are not finite are kept.
    """
    if not seeds:
        return list(_rows(measure(cell, None), None))
    lanes = list(seeds) + [seeds[-1]] * (size - len(seeds))
    keys = jax.vmap(jax.random.key)(jnp.asarray(lanes, jnp.uint32))
    found = (program(measure, cell) if compiled is None else compiled)(keys)
    found = jax.tree.map(np.asarray, dict(found))
    rows: list[Row] = []
    for lane, seed in enumerate(seeds):
        rows += _rows(jax.tree.map(lambda array, i=lane: array[i], found), seed)
    return rows


def stream(key: Array, name: str) -> Array:
    """The key of a named stream: init, data order, noise do not share numbers.

    The key depends on the name and not on what else is drawn, so arms that share a name
    share its numbers.
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


def fingerprint(*arrays: np.ndarray) -> str:
    """SHA-256 of arrays: their dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _rows(measured: Mapping[str, Any], seed: int | None):
    """Rows of one cell; None is a metric that this arm does not have."""
    for metric, value in measured.items():
        if value is None:
            yield Row(seed, metric, None, None)
        elif isinstance(value, tuple):
            where, heights = (np.asarray(part, np.float64).ravel() for part in value)
            for x, y in zip(where, heights, strict=True):
                yield Row(seed, metric, float(x), float(y))
        else:
            yield Row(seed, metric, None, float(np.asarray(value)))
