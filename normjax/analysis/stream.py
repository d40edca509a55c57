"""The whole analysis: chunks from a source, spread over the devices, added up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import numpy as np

from normjax.analysis.counting import Receive, Tally, ignore
from normjax.analysis.cutting import Cut, cut_up
from normjax.analysis.kernels import measured
from normjax.analysis.record import ActivationAnalysis
from normjax.analysis.source import AnalysisError, Blocks, cut, is_wide, open_source
from normjax.records import check_count
from normjax.spec import NormSpec


def analyze(
    source: Any,
    spec: NormSpec,
    *,
    axis_names: Sequence[str] | None = None,
    batch_size: int | None = None,
    keep: int = 100,
    receive: Receive | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ActivationAnalysis:
    """Measure what a layer does to every group of an array, however large the file.

    The affine part is left out. Numbers do not depend on how the file is stored, on the
    blocks that are read, or on how many devices share the work.

    Args:
        source: a path (``.npy``, ``.npz``, Parquet), or an array of floats.
        spec: the layer.
        axis_names: a name for each axis of the array, for the indices of what is found.
        batch_size: how many examples, along the first axis, are normalized together;
            for layers that couple examples, and for no other.
        keep: how many of the worst rows of each flag are kept.
        receive: called with ``"groups"`` or ``"examples"`` and the columns of each
            chunk, in order: the numbers of every one.
        progress: called with the rows done so far and all rows.

    Returns:
        An ``ActivationAnalysis``.

    Raises:
        AnalysisError: if the source is no array of floats, or does not fit the spec.

    Example:
        >>> import normjax as nj
        >>> x = np.array([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]], np.float32)
        >>> found = nj.analysis.analyze(x, nj.layer_norm())
        >>> flagged = found.findings["no_variance"].found
        >>> flagged.count, flagged.index.tolist(), flagged.values.tolist()
        (1, [[1]], [4.0])
    """
    try:
        check_count("keep", keep)
    except ValueError as error:
        raise AnalysisError(str(error)) from None
    opened = open_source(source)
    names = None if axis_names is None else tuple(axis_names)
    wide = is_wide(opened.dtype) or "float64" in vars(spec.precision).values()
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        whole, last, left_out = cut_up(opened, spec, names, batch_size)
        total = prod(opened.shape[: whole.leading])
        report = progress or ignore
        tally = Tally(opened, whole, keep, receive)
        blocks = opened.read(whole.leading, whole.piece * whole.rows)
        tail = _run(whole, blocks, tally, lambda: report(tally.row, total))
        remainder = None
        if last is not None:
            apart = Tally(opened, last, keep, receive, after=whole)
            _run(last, iter([tail]), apart, lambda: report(total, total))
            remainder = apart.found(spec)
    return replace(tally.found(spec), remainder=remainder, left_out=left_out)


def _run(
    piece: Cut, blocks: Blocks, tally: Tally, report: Callable[[], None]
) -> np.ndarray:
    """Compute and count every unit; the next chunk is computed while one is counted.

    Returns:
        The rows behind the last whole unit.
    """
    devices = jax.local_devices()[: -(-piece.units // piece.piece)]
    mesh = jax.sharding.Mesh(np.array(devices), ("rows",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    size = len(devices) * piece.piece * piece.rows
    tail, pending = np.zeros(0), None
    for chunk in cut(blocks, size):
        whole = len(chunk) // piece.rows * piece.rows
        chunk, tail = chunk[:whole], chunk[whole:]
        if not whole:
            break
        full = chunk
        if whole < size:  # the same program for the last chunk
            full = np.zeros((size, *chunk.shape[1:]), chunk.dtype)
            full[:whole] = chunk
        parts = measured(
            piece.spec,
            jax.device_put(full, place),
            layout=piece.layout,
            units=piece.piece,
            coupled=piece.met,
            mesh=mesh,
        )
        if pending is not None:
            tally.add(*pending)
            report()
        pending = chunk, parts
    if pending is not None:
        tally.add(*pending)
        report()
    return tail
