"""A cell is one arm on one seed; a block of seeds runs in one compiled program."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, PartitionSpec

from normjax.study.structure import Leaves, leaves, put_leaves


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
        arm: its name; arms that share a program all see the name of one of them, so
            no number may depend on it.
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


Program = Callable[[Leaves, Array], Mapping[str, Any]]


def program(measure: Measure, cell: Cell) -> Program:
    """``measure`` for many seeds at once, compiled when it is first called.

    The leaves of the settings (``normjax.study.structure``) are arguments, so arms that
    differ in leaves alone share one program. On CPUs the seeds run one after the other
    (``lax.map``), which there is as fast as a batch and leaves convolutions as they
    are; elsewhere they are a batch (``vmap``). Seeds are shared out over the local
    devices; a seed gives the same numbers whatever runs beside it.

    Args:
        measure: of the experiment.
        cell: the arm, or any other one of its form.

    Returns:
        From leaves and seeds, a ``uint32`` array, to what ``measure`` gives, each with
        a leading axis of seeds.
    """

    def one(values: Leaves, seed: Array) -> Mapping[str, Any]:
        settings = put_leaves(cell.settings, values)
        return dict(measure(Cell(cell.arm, settings), jax.random.key(seed)))

    def every(values: Leaves, seeds: Array) -> Mapping[str, Any]:
        alone = functools.partial(one, values)
        if jax.default_backend() == "cpu":
            return jax.lax.map(alone, seeds)
        return jax.vmap(alone)(seeds)

    @jax.jit
    def shared(values: Leaves, seeds: Array) -> Mapping[str, Any]:
        devices = jax.local_devices()[: len(seeds)]
        if len(devices) == 1:
            return every(values, seeds)
        surplus = -len(seeds) % len(devices)
        filled = jnp.concatenate([seeds, jnp.repeat(seeds[-1:], surplus)])
        mesh = Mesh(np.array(devices), ("seeds",), axis_types=(AxisType.Auto,))
        lanes = PartitionSpec("seeds")
        # Every lane stands alone: there is nothing that could vary over devices.
        found = jax.shard_map(
            every,
            mesh=mesh,
            in_specs=(PartitionSpec(), lanes),
            out_specs=lanes,
            check_vma=False,
        )(values, filled)
        return jax.tree.map(lambda array: array[: len(seeds)], found)

    return shared


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
    measure: Measure,
    cell: Cell,
    seeds: tuple[int, ...],
    size: int,
    compiled: Program | None = None,
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
    compiled = program(measure, cell) if compiled is None else compiled
    found = compiled(leaves(cell.settings), jnp.asarray(lanes, jnp.uint32))
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
