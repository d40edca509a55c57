"""NumPy layers with a known truth, right ones and ones with a planted error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

RNG = np.random.default_rng(7)
W = RNG.uniform(0.5, 1.5, size=12).round(3)
B = RNG.normal(size=12).round(3)


def typed(value: Any, x: np.ndarray) -> np.ndarray:
    """A number or array in x's dtype, so that NumPy widens nothing."""
    return np.asarray(value, x.dtype)


def normalizer(
    *,
    axes: tuple[int, ...] = (-1,),
    eps: float = 1e-5,
    power: float = 0.5,
    ddof: int = 0,
    alpha: int = 1,
    size: Callable | None = None,
    denominator: Callable | None = None,
    gain: Any = None,
    bias: Any = None,
    channel: int = -1,
) -> Callable[[np.ndarray], np.ndarray]:
    """A norm in which each part can be replaced.

    ``size(x, d)`` stands for the variance, ``denominator(v, e)`` for (v + e) ** power.
    """

    def layer(x: np.ndarray) -> np.ndarray:
        count = np.prod([x.shape[a] for a in axes])
        mean = x.mean(axes, keepdims=True)
        d = x - mean
        v = (d * d).sum(axes, keepdims=True) / typed(count - ddof, x)
        if size is not None:
            v = size(x, d)
        e = typed(eps, x)
        below = (v + e) ** typed(power, x) if denominator is None else denominator(v, e)
        y = (d if alpha else x) / below
        row = [1] * x.ndim
        row[channel] = -1
        if gain is not None:
            y = y * typed(gain[: x.shape[channel]], x).reshape(row)
        if bias is not None:
            y = y + typed(bias[: x.shape[channel]], x).reshape(row)
        return y.astype(x.dtype)

    return layer


def mean_square(x: np.ndarray, _: np.ndarray) -> np.ndarray:
    return (x * x).mean(-1, keepdims=True)


def total_square(x: np.ndarray, _: np.ndarray) -> np.ndarray:
    return (x * x).sum(-1, keepdims=True)


def mean_abs(x: np.ndarray, _: np.ndarray) -> np.ndarray:
    return np.abs(x).mean(-1, keepdims=True)


def outside(v: np.ndarray, e: np.ndarray) -> np.ndarray:
    return np.sqrt(v) + e


def added(v: np.ndarray, e: np.ndarray) -> np.ndarray:
    return v + e


def floor(v: np.ndarray, e: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(v, e))


def norm_floor(v: np.ndarray, e: np.ndarray) -> np.ndarray:
    return np.maximum(np.sqrt(v), e)


def root(v: np.ndarray, _: np.ndarray) -> np.ndarray:
    return np.sqrt(v)


def one(v: np.ndarray, _: np.ndarray) -> np.ndarray:
    return np.ones_like(v)


def reshaped(view: tuple[int, ...], axes: tuple[int, ...], **parts: Any):
    """A norm of the input in another shape."""
    inner = normalizer(axes=axes, **parts)
    return lambda x: inner(x.reshape(view)).reshape(x.shape)


def in_float32(layer: Callable) -> Callable:
    """Computed in float32, returned in the input's dtype."""
    return lambda x: layer(x.astype(np.float32)).astype(x.dtype)


class Known(NamedTuple):
    """A layer and what an audit must say of it.

    ``axes``, ``measure``, ``alpha``, ``power``, ``epsilon``, ``placement``, ``divisor``
    (None: open), ``gain`` and ``bias`` (axes), ``spec`` (whether one reproduces it),
    ``defects`` (names of findings).
    """

    layer: Callable
    shape: tuple[int, ...] = (3, 5, 6)
    axes: str = "kept kept reduced"
    measure: str = "std"
    alpha: int = 1
    power: float = 0.5
    epsilon: float = 1e-5
    placement: str = "inside"
    divisor: str | None = "n"
    gain: tuple[int, ...] = (2,)
    bias: tuple[int, ...] = (2,)
    spec: bool = True
    defects: tuple[str, ...] = ()
    dtype: Any = np.float32


PARTS: dict[str, Any] = {"gain": W, "bias": B}
RMS: dict[str, Any] = {"alpha": 0, "size": mean_square, "gain": W}
BARE: dict[str, Any] = {"gain": (), "bias": ()}
SCALED: dict[str, Any] = {"gain": (2,), "bias": ()}
F64 = np.float64

KNOWN = {
    "layer norm": Known(normalizer(**PARTS)),
    "layer norm without parameters": Known(normalizer(), **BARE),
    "layer norm over two axes": Known(
        normalizer(axes=(1, 2), **PARTS), axes="kept reduced reduced"
    ),
    "batch norm": Known(
        normalizer(axes=(0,), **PARTS), (5, 4), "reduced kept", gain=(1,), bias=(1,)
    ),
    "group norm": Known(
        reshaped((2, 5, 3, 2), (1, 3), eps=1e-3),
        (2, 5, 6),
        "kept reduced blocks",
        epsilon=1e-3,
        **BARE,
    ),
    "ghost batch norm": Known(
        reshaped((2, 3, 4), (1,)), (6, 4), "blocks kept", **BARE
    ),
    "RMS norm": Known(
        normalizer(eps=1e-6, **RMS), measure="rms", alpha=0, epsilon=1e-6, **SCALED
    ),
    "RMS norm with torch's epsilon": Known(
        normalizer(eps=2.0**-23, **RMS),
        measure="rms",
        alpha=0,
        epsilon=2.0**-23,
        **SCALED,
    ),
    "planted: ddof 1": Known(
        normalizer(ddof=1, **PARTS), divisor="n-1", defects=("ddof",)
    ),
    "planted: epsilon outside the root": Known(
        normalizer(denominator=outside, **PARTS), placement="outside"
    ),
    "planted: power 2 for 1/2": Known(
        normalizer(power=2, **PARTS), power=2, spec=False, defects=("formula",)
    ),
    "planted: variance for its root": Known(
        normalizer(denominator=added, **PARTS),
        power=1,
        spec=False,
        defects=("formula",),
    ),
    "planted: wrong axis on a square": Known(
        normalizer(axes=(1,), **PARTS), (3, 6, 6), "kept reduced kept"
    ),
    "planted: interleaved groups": Known(
        reshaped((2, 5, 2, 3), (1, 2)),
        (2, 5, 6),
        "kept reduced interleaved",
        defects=("grouping",),
        **BARE,
    ),
    "planted: sum for the mean": Known(
        normalizer(alpha=0, size=total_square, eps=1e-6),
        measure="rms",
        alpha=0,
        epsilon=1e-6,
        divisor="1",
        **BARE,
    ),
    "epsilon of 1": Known(normalizer(eps=1.0, **PARTS), epsilon=1.0),
    "no epsilon": Known(
        normalizer(denominator=root, **PARTS),
        epsilon=0.0,
        placement="none",
        divisor=None,
        defects=("epsilon",),
    ),
    "floor under the variance": Known(
        normalizer(denominator=floor, **PARTS), placement="clamp", divisor=None
    ),
    "floor under the L2 norm": Known(
        normalizer(alpha=0, size=total_square, denominator=norm_floor, eps=1e-12),
        measure="rms",
        alpha=0,
        epsilon=1e-24,
        placement="clamp",
        divisor="1",
        **BARE,
    ),
    "tiny epsilon outside": Known(
        normalizer(denominator=outside, eps=1e-12, **PARTS),
        epsilon=1e-12,
        placement="outside",
    ),
    "groups along memory": Known(
        reshaped((2, 3, 8), (2,)), (2, 4, 6), "irregular", spec=False,
        defects=("grouping",), **BARE,
    ),
    "std of an uncentered x": Known(
        normalizer(alpha=0, eps=1e-3, gain=W), alpha=0, epsilon=1e-3, **SCALED
    ),
    "ddof 1 over the batch": Known(
        normalizer(axes=(0,), ddof=1, gain=W),
        (5, 4),
        "reduced kept",
        divisor="n-1",
        gain=(1,),
        bias=(),
        defects=("ddof",),
    ),
    "ddof 1 and an odd epsilon": Known(
        normalizer(ddof=1, eps=1.2345e-5, **PARTS), divisor=None, epsilon=1.02875e-5
    ),
    "gain with zeros": Known(normalizer(gain=W * (np.arange(12) % 3 > 0), bias=B)),
    "mean only": Known(
        normalizer(denominator=one), measure="none", placement="none", epsilon=0.0,
        power=0.0, **BARE,
    ),
    "L1 norm": Known(
        normalizer(alpha=0, size=mean_abs, denominator=added, eps=1e-6),
        measure="mean_abs",
        alpha=0,
        epsilon=1e-6,
        placement="outside",
        spec=False,
        **BARE,
    ),
    "float64, epsilon 1e-12": Known(
        normalizer(eps=1e-12, **PARTS), epsilon=1e-12, dtype=F64
    ),
    "float64, epsilon of float32": Known(
        normalizer(eps=float(np.float32(1e-5)), **PARTS),
        epsilon=float(np.float32(1e-5)),
        dtype=F64,
    ),
    "float64, epsilon of 1": Known(normalizer(eps=1.0, **PARTS), epsilon=1, dtype=F64),
    "bfloat16": Known(in_float32(normalizer(**PARTS)), dtype=jnp.bfloat16),
    "float16": Known(in_float32(normalizer(eps=1e-3, **PARTS)), epsilon=1e-3,
                     dtype=np.float16),
}  # fmt: skip
