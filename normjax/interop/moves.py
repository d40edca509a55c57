"""Where each library keeps the arrays of a layer, and how they are turned on the way.

"Ours" are Flax's names and shapes. A kind of layer is a tuple of moves, one for each
array; a move that does not fit raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Turn = Callable[[np.ndarray, Shape], np.ndarray]


@dataclass(frozen=True)
class Move:
    """One array of theirs, or one of equal parts of it, and ours.

    Attributes:
        theirs: name below the layer.
        ours: name below the layer.
        forth: from theirs to an array of our shape.
        back: from ours to one of their shape (of the part).
        part: which of how many parts along the first axis.
        optional: whether either may be missing.
    """

    theirs: str
    ours: str
    forth: Turn
    back: Turn
    part: tuple[int, int] = (0, 1)
    optional: bool = False


Kind = tuple[Move, ...]


def _same(array: np.ndarray, shape: Shape) -> np.ndarray:
    del shape
    return array


def _dense(array: np.ndarray, shape: Shape) -> np.ndarray:
    """(out, in) to (in, out), either of which may be several axes."""
    if array.ndim != 2 or not any(
        prod(shape[:k]) == array.shape[1] and prod(shape[k:]) == array.shape[0]
        for k in range(1, len(shape))
    ):
        raise ValueError
    return array.T.reshape(shape)


def _dense_back(array: np.ndarray, shape: Shape) -> np.ndarray:
    if len(shape) != 2 or array.size != prod(shape):
        raise ValueError
    return array.reshape(shape[::-1]).T


def _flat(array: np.ndarray, shape: Shape) -> np.ndarray:
    """A bias over one axis or several."""
    return array.reshape(shape)


def _turned(array: np.ndarray) -> np.ndarray:
    """The two channel axes of a kernel change places and ends: (O, I, ...)."""
    if array.ndim < 3:
        raise ValueError
    return array


def _conv(array: np.ndarray, shape: Shape) -> np.ndarray:
    """(O, I, ...) to (..., I, O)."""
    del shape
    return _turned(array).transpose(*range(2, array.ndim), 1, 0)


def _conv_back(array: np.ndarray, shape: Shape) -> np.ndarray:
    del shape
    n = _turned(array).ndim
    return array.transpose(n - 1, n - 2, *range(n - 2))


def _transposed(array: np.ndarray, shape: Shape) -> np.ndarray:
    """(I, O, ...) to (..., I, O) with all positions reversed.

    Theirs is the gradient of a convolution, Flax's a convolution of a dilated input.
    """
    del shape
    turned = _turned(array).transpose(*range(2, array.ndim), 0, 1)
    return np.flip(turned, tuple(range(array.ndim - 2)))


def _transposed_back(array: np.ndarray, shape: Shape) -> np.ndarray:
    del shape
    n = _turned(array).ndim
    return np.flip(array, tuple(range(n - 2))).transpose(n - 2, n - 1, *range(n - 2))


def _swapped(array: np.ndarray, shape: Shape) -> np.ndarray:
    """(..., O, I) to (..., I, O) with all positions reversed, and back."""
    del shape
    return np.flip(np.swapaxes(_turned(array), -1, -2), tuple(range(array.ndim - 2)))


def _depthwise(array: np.ndarray, shape: Shape) -> np.ndarray:
    """(..., C, M) to (..., 1, C·M)."""
    n = len(shape)
    if n < 3 or array.ndim != n or shape[-2] != 1 or array.shape[:-2] != shape[:-2]:
        raise ValueError
    return array.reshape(shape)


def _depthwise_back(array: np.ndarray, shape: Shape) -> np.ndarray:
    if array.ndim < 3 or array.shape[-2] != 1:
        raise ValueError
    return array.reshape(shape)


def _first_to_last(array: np.ndarray, shape: Shape) -> np.ndarray:
    del shape
    return np.moveaxis(array, 0, -1)


def _last_to_first(array: np.ndarray, shape: Shape) -> np.ndarray:
    del shape
    return np.moveaxis(array, -1, 0)


def _counter(array: np.ndarray, shape: Shape) -> np.ndarray:
    return np.broadcast_to(array.astype(np.int32), shape)


def _counter_back(array: np.ndarray, shape: Shape) -> np.ndarray:
    if shape != () or (array != array.flat[0]).any():
        raise ValueError
    return np.asarray(array.flat[0], np.int64)


def flattened(move: Move, sizes: Shape) -> Move:
    """A dense move whose inputs are a flattened (C, ...) there and (..., C) here."""

    def forth(array: np.ndarray, shape: Shape) -> np.ndarray:
        split = array.reshape(len(array), *sizes)
        return move.forth(np.moveaxis(split, 1, -1).reshape(len(array), -1), shape)

    def back(array: np.ndarray, shape: Shape) -> np.ndarray:
        flat = move.back(array, shape)
        split = flat.reshape(len(flat), *sizes[1:], sizes[0])
        return np.moveaxis(split, -1, 1).reshape(len(flat), -1)

    return Move(move.theirs, move.ours, forth, back)


_equal = partial(Move, forth=_same, back=_same)
_BIAS = Move("bias", "bias", _flat, _flat)


def _attention_of_torch() -> Kind:
    moves = [
        Move("out_proj/weight", "out/kernel", _dense, _dense_back),
        Move("out_proj/bias", "out/bias", _flat, _flat),
    ]
    for k, name in enumerate(("query", "key", "value")):
        kernel, bias = f"{name}/kernel", f"{name}/bias"
        moves += [
            Move("in_proj_weight", kernel, _dense, _dense_back, (k, 3)),
            Move(f"{name[0]}_proj_weight", kernel, _dense, _dense_back),
            Move("in_proj_bias", bias, _flat, _flat, (k, 3)),
        ]
    return tuple(moves)


def _norm_of_torch(forth: Turn = _same, back: Turn = _same) -> Kind:
    return (
        Move("weight", "scale", forth, back),
        Move("bias", "bias", forth, back),
        _equal("running_mean", "mean"),
        _equal("running_var", "var"),
        Move("num_batches_tracked", "count", _counter, _counter_back, optional=True),
    )


TORCH: dict[str, Kind] = {
    "dense": (Move("weight", "kernel", _dense, _dense_back), _BIAS),
    "conv": (Move("weight", "kernel", _conv, _conv_back), _BIAS),
    "conv_transpose": (
        Move("weight", "kernel", _transposed, _transposed_back),
        _BIAS,
    ),
    "conv_transpose_kernel": (Move("weight", "kernel", _conv, _conv_back), _BIAS),
    "embedding": (_equal("weight", "embedding"),),
    "norm": _norm_of_torch(),
    "norm_channels_first": _norm_of_torch(_first_to_last, _last_to_first),
    "attention": _attention_of_torch(),
}

_PLAIN = (_equal("kernel", "kernel"), _equal("bias", "bias"))
KERAS: dict[str, Kind] = {
    "dense": _PLAIN,
    "conv": _PLAIN,
    "conv_transpose": (
        Move("kernel", "kernel", _swapped, _swapped),
        _equal("bias", "bias"),
    ),
    "conv_transpose_kernel": _PLAIN,
    "depthwise": (
        Move("kernel", "kernel", _depthwise, _depthwise_back),
        _equal("bias", "bias"),
    ),
    "embedding": (_equal("embeddings", "embedding"),),
    "norm": (
        _equal("gamma", "scale"),
        _equal("scale", "scale"),
        _equal("beta", "bias"),
        _equal("moving_mean", "mean"),
        _equal("moving_variance", "var"),
        Move("count", "count", _same, _same, optional=True),
    ),
    "attention": tuple(
        _equal(f"{theirs}/{leaf}", f"{ours}/{leaf}")
        for theirs, ours in (
            *((name, name) for name in ("query", "key", "value")),
            ("attention_output", "out"),
        )
        for leaf in ("kernel", "bias")
    ),
}


def same(leaves: set[str]) -> dict[str, Kind]:
    """The one kind of a library whose names and shapes are ours."""
    moves = [_equal(leaf, leaf, optional=leaf == "count") for leaf in sorted(leaves)]
    return {"same": tuple(moves)}


def arrived(move: Move, array: Any, shape: Shape) -> np.ndarray | None:
    """The array (or its part) in our shape; None if it does not fit."""
    k, count = move.part
    if count > 1:
        if array.ndim == 0 or len(array) % count:
            return None
        array = np.split(array, count)[k]
    return _fitting(move.forth, array, shape)


def returned(move: Move, array: Any, shape: Shape) -> np.ndarray | None:
    """The array in their shape (of the part); None if it does not fit."""
    count = move.part[1]
    if count > 1:
        shape = (shape[0] // count, *shape[1:])
    return _fitting(move.back, array, shape)


def _fitting(turn: Turn, array: np.ndarray, shape: Shape) -> np.ndarray | None:
    try:
        found = turn(array, shape)
    except ValueError:
        return None
    return found if found.shape == shape else None
