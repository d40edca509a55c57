"""Activations from a file or an array, in blocks of rows, never as a whole.

A ``.npy`` is mapped into memory, the member of an ``.npz`` is read as a stream, a
Parquet file by slices that skip the row groups outside of them.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import polars as pl

from normjax.records import suggest
from normjax.spec import FLOATS

# What is decoded of a Parquet file at once, beside the row groups that it touches.
SLICE_BYTES = 64 * 2**20
Blocks = Iterator[np.ndarray]


class AnalysisError(ValueError):
    """Input that cannot be analyzed: where, what was got, what is expected."""


@dataclass(frozen=True)
class Source:
    """An array that is read block by block.

    Attributes:
        name: the file, or ``"array"``.
        shape: of the whole array.
        dtype: one of the float dtypes.
        read: ``read(n, rows)`` yields blocks ``(some rows, *shape[n:])`` in C order;
            n ≥ 1 leading axes count as one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int, int], Blocks]


def open_source(source: Any) -> Source:
    """Open a file, or take an array as it is.

    Args:
        source: a path to a ``.npy``, ``.npz`` (``FILE.npz:MEMBER`` selects a member) or
            Parquet file, or an array. The content decides, not the suffix.

    Returns:
        A ``Source``; a file that changes while it is read is not noticed.

    Raises:
        AnalysisError: if there is no array of floats in it.

    Example:
        >>> open_source(np.zeros((8, 3), np.float32)).shape
        (8, 3)
    """
    if not isinstance(source, str | Path):
        array = np.asarray(source)
        found = Source("array", array.shape, array.dtype, _rows(array))
        return _checked(found)
    path, member = _located(str(source))
    try:
        with path.open("rb") as file:
            magic = file.read(6)
        if magic.startswith(b"\x93NUMPY"):
            return _checked(_npy(path))
        if magic.startswith(b"PK"):
            return _checked(_npz(path, member))
        if magic.startswith(b"PAR1"):
            return _checked(_parquet(path))
    except OSError as error:
        raise AnalysisError(f"{path}: {error.strerror or error}") from None
    what = "is empty" if not magic else "is none of these"
    raise AnalysisError(f"{path}: expected a .npy, .npz or Parquet file, this {what}")


def _located(text: str) -> tuple[Path, str | None]:
    """The file, and the member behind a colon."""
    path, member = Path(text), None
    if not path.exists() and ":" in text:
        head, _, tail = text.rpartition(":")
        if Path(head).exists():
            path, member = Path(head), tail
    if not path.is_file():
        is_folder = "is a folder, expected a file" if path.is_dir() else None
        raise AnalysisError(f"{path}: {is_folder or 'there is no such file'}")
    return path, member


def _checked(source: Source) -> Source:
    """Floats, and at least one of them."""
    dtype = source.dtype
    if dtype.kind == "V" and dtype.names is None and dtype.name not in FLOATS:
        hint = "NumPy stores bfloat16 so: save it as float32"
        raise AnalysisError(f"{source.name} has raw bytes (dtype {dtype.str}); {hint}")
    if dtype.newbyteorder("=").name not in FLOATS:
        raise AnalysisError(
            f"{source.name} has dtype {dtype}, expected one of {', '.join(FLOATS)}: "
            "cast it first, for instance .astype('float32')"
        )
    if 0 in source.shape or not source.shape:
        raise AnalysisError(
            f"{source.name} has shape {source.shape}: there is nothing to analyze"
        )
    return source


def _rows(array: np.ndarray) -> Callable[[int, int], Blocks]:
    """Slices of an array that is there, or mapped into memory."""

    def read(leading: int, rows: int) -> Blocks:
        rest = array.shape[leading:]
        flat, step = array, max(1, rows // prod(array.shape[1:leading]))
        if array.flags.c_contiguous:  # a view; of anything else it would be a copy
            flat, step = array.reshape(-1, *rest), rows
        for start in range(0, len(flat), step):
            yield _native(flat[start : start + step]).reshape(-1, *rest)

    return read


def _native(block: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(block, block.dtype.newbyteorder("="))


def _header(name: str, file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype of a .npy stream; objects are refused, never unpickled."""
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        else:  # 3.0 exists for the names of structured dtypes
            raise AnalysisError(f"{name} has fields, expected an array of floats")
    except AnalysisError:
        raise
    except (ValueError, EOFError) as error:
        raise AnalysisError(f"{name} has no readable header: {error}") from None
    if dtype.hasobject:
        raise AnalysisError(
            f"{name} holds Python objects, which are never unpickled here: save an "
            "array of floats"
        )
    return shape, fortran, dtype


def _npy(path: Path) -> Source:
    with path.open("rb") as file:
        shape, fortran, dtype = _header(str(path), file)
        offset = file.tell()
    size, expected = path.stat().st_size - offset, prod(shape) * dtype.itemsize
    if size < expected:
        raise AnalysisError(
            f"{path} is cut short: {size} bytes of numbers, its header says {expected}"
        )

    def read(leading: int, rows: int) -> Blocks:
        order = "F" if fortran else "C"
        mapped = np.memmap(path, dtype, "r", offset, shape, order)
        yield from _rows(mapped)(leading, rows)

    return Source(str(path), shape, dtype, read)


def _npz(path: Path, member: str | None) -> Source:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [n.removesuffix(".npy") for n in archive.namelist()]
            name = _member(path, names, member)
            entry = f"{name}.npy" if f"{name}.npy" in archive.namelist() else name
            with archive.open(entry) as file:
                full = f"{path}:{name}"
                shape, fortran, dtype = _header(full, file)
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise AnalysisError(f"{path} is cut short or damaged: {error}") from None
    if fortran and len(shape) > 1:
        raise AnalysisError(
            f"{full} is stored column by column, which no stream can give row by row: "
            "save np.ascontiguousarray of it, or a .npy"
        )

    def read(leading: int, rows: int) -> Blocks:
        rest = shape[leading:]
        row = prod(rest) * dtype.itemsize
        left = prod(shape[:leading])
        try:
            with zipfile.ZipFile(path) as archive, archive.open(entry) as file:
                _header(full, file)
                while left:
                    count = min(rows, left)
                    content = file.read(count * row)
                    if len(content) < count * row:
                        raise EOFError(f"{left} rows are missing")
                    block = np.frombuffer(content, dtype).reshape(count, *rest)
                    yield _native(block)
                    left -= count
                file.read(1)  # at the end the checksum is compared
        except (zipfile.BadZipFile, EOFError, zlib.error) as error:
            raise AnalysisError(f"{full} is cut short or damaged: {error}") from None

    return Source(full, shape, dtype, read)


def _member(path: Path, names: list[str], member: str | None) -> str:
    if not names:
        raise AnalysisError(f"{path} has no member")
    if member is None:
        if len(names) > 1:
            raise AnalysisError(
                f"{path} has {len(names)} members, {', '.join(names)}: choose one, "
                f"like {path}:{names[0]}"
            )
        return names[0]
    if member not in names:
        raise AnalysisError(f"{path} has no member {member!r}{suggest(member, names)}")
    return member


def _parquet(path: Path) -> Source:
    """Columns of floats side by side, or one column of arrays of a fixed shape."""
    frame = pl.scan_parquet(path)
    try:
        schema = frame.collect_schema()
        count = frame.select(pl.len()).collect().item()
    except pl.exceptions.PolarsError as error:
        raise AnalysisError(f"{path} cannot be read: {_first_line(error)}") from None
    kinds = list(schema.values())
    arrays = [kind for kind in kinds if isinstance(kind, pl.Array)]
    if len(kinds) == 1 and arrays:
        shape, inner = (count, *arrays[0].shape), _innermost(arrays[0])
    else:
        shape, inner = (count, len(kinds)), None
        for name, kind in schema.items():
            if not kind.is_float():
                raise AnalysisError(
                    f"{path}: column {name!r} is {kind}, expected columns of floats, "
                    "or one column of type Array (lists of one fixed size)"
                )
            inner = kind if inner in (None, kind) else pl.Float64()
    if inner is None or not inner.is_float():
        raise AnalysisError(f"{path} holds {inner or 'no column'}, expected floats")
    dtype = pl.Series([], dtype=inner).to_numpy().dtype

    def read(leading: int, rows: int) -> Blocks:
        rest = shape[leading:]
        step = max(1, SLICE_BYTES // (prod(shape[1:]) * dtype.itemsize))
        for start in range(0, count, step):
            try:
                part = frame.slice(start, step).collect()
            except (pl.exceptions.PolarsError, OSError) as error:
                message = f"{path}: rows from {start}: {_first_line(error)}"
                raise AnalysisError(message) from None
            block = part.to_series() if arrays else part
            numbers = np.asarray(block.to_numpy(), dtype).reshape(-1, *rest)
            for first in range(0, len(numbers), rows):
                yield _native(numbers[first : first + rows])

    return Source(str(path), shape, dtype, read)


def _innermost(kind: Any) -> Any:
    while isinstance(kind, pl.Array):
        kind = kind.inner
    return kind


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def cut(blocks: Blocks, rows: int) -> Blocks:
    """The same rows in pieces of exactly ``rows``; the last may be shorter.

    What is computed on a piece then never depends on how the file was written.

    Example:
        >>> [len(p) for p in cut(iter([np.zeros(3), np.zeros(4)]), 2)]
        [2, 2, 2, 1]
    """
    kept: list[np.ndarray] = []
    held = 0
    for block in blocks:
        while held + len(block) >= rows:
            taken = rows - held
            kept.append(block[:taken])
            yield kept[0] if len(kept) == 1 else np.concatenate(kept)
            block, kept, held = block[taken:], [], 0
        if len(block):
            kept.append(block)
            held += len(block)
    if kept:
        yield kept[0] if len(kept) == 1 else np.concatenate(kept)


def is_wide(dtype: np.dtype) -> bool:
    """Whether JAX needs 64-bit types for these numbers."""
    return jnp.dtype(dtype.newbyteorder("=")) == jnp.float64
