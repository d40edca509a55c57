"""Forward and backward of each layer, against the same layer of other JAX libraries.

Both programs are jitted and return all that they compute: y, and for the backward pass
the gradients of parameters and input. A *copy* is ``x * 1.5``: what reading x and
writing one such array costs at least, on whatever device this is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.libraries import Layer, layers
from benchmarks.timing import Spread, drawn, spread, times
from residuals import kept

OURS = "normjax"


class Workload(NamedTuple):
    """One layer on one shape, channels last."""

    kind: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __str__(self) -> str:
        size = " × ".join(map(str, self.shape))
        dtype = "" if self.dtype == "float32" else f", {self.dtype}"
        return f"{self.kind} {size}{dtype}"


WORKLOADS = (
    Workload("layer", (8192, 1024)),
    Workload("layer", (2048, 4096)),
    Workload("layer", (512, 768)),
    Workload("layer", (64, 128, 512)),
    Workload("layer", (2048, 4096), "bfloat16"),
    Workload("rms", (2048, 4096)),
    Workload("rms", (512, 768)),
    Workload("batch", (256, 512)),
    Workload("batch", (32, 32, 32, 64)),
    Workload("group", (16, 32, 32, 128)),
    Workload("instance", (16, 32, 32, 64)),
)
SMALL = (Workload("batch", (4, 8, 8, 32)),)


class Against(NamedTuple):
    """Our time over that of the fastest other library, and over that of a copy."""

    peer: str
    ratio: Spread
    copies: Spread
    all: dict[str, float]


class Row(NamedTuple):
    """What is known of one workload; kept arrays are in units of x."""

    workload: Workload
    both: Against
    forward: Against
    kept: float
    kept_by_flax: float


def rows(workloads: tuple[Workload, ...], rounds: int) -> Iterator[Row]:
    for workload in workloads:
        x = drawn(workload.shape, workload.dtype)
        found, missing = layers(workload.kind, x)
        for name, reason in missing.items():
            print(f"{workload}: without {name}: {reason}")
        check_alike(workload, found, x)
        held = {
            name: kept(_swapped(found[name]), x, found[name].params, jit=True)[1]
            for name in (OURS, "linen")
        }
        both, forward = (
            _against({name: program(layer, x) for name, layer in found.items()}, x, n)
            for program, n in ((_both, rounds), (_forward, rounds))
        )
        yield Row(workload, both, forward, held[OURS], held["linen"])


def _swapped(layer: Layer):
    return lambda x, params: layer.call(params, x)


def moved(x: jax.Array, channel: int) -> jax.Array:
    return jnp.moveaxis(x, -1, channel).copy()


def check_alike(workload: Workload, found: dict[str, Layer], x: jax.Array) -> None:
    """Refuse to compare layers that do not compute the same up to ε and rounding.

    Raises:
        ValueError: if y differs by more than what an ε of 1e-3 or bfloat16 explains.
    """
    expected = np.asarray(_forward(found[OURS], x)(), np.float32)
    for name, layer in found.items():
        y = _forward(layer, x)()
        same = y.dtype == x.dtype and np.allclose(
            np.asarray(jnp.moveaxis(y, layer.channel, -1), np.float32),
            expected,
            atol=0.05 if x.dtype == jnp.bfloat16 else 0.01,
        )
        if not same:
            raise ValueError(f"{workload}: {name} computes another layer")


def _forward(layer: Layer, x: jax.Array) -> Callable[[], jax.Array]:
    return partial(jax.jit(layer.call), layer.params, moved(x, layer.channel))


def _both(layer: Layer, x: jax.Array) -> Callable[[], object]:
    bar = moved(drawn(x.shape, x.dtype, seed=1), layer.channel)

    def run(params, x, bar):
        y, pull = jax.vjp(layer.call, params, x)
        return y, pull(bar)

    return partial(jax.jit(run), layer.params, moved(x, layer.channel), bar)


def _against(programs, x: jax.Array, rounds: int) -> Against:
    copy = partial(jax.jit(lambda x: x * x.dtype.type(1.5)), x)
    found = times({**programs, "copy": copy}, rounds)
    ours, mul = found.pop(OURS), found.pop("copy")
    middle = {name: float(np.median(taken)) for name, taken in found.items()}
    peer = min(middle, key=lambda name: middle[name])
    relative = {name: float(np.median(ours / taken)) for name, taken in found.items()}
    return Against(peer, spread(ours / found[peer]), spread(ours / mul), relative)


HEADER = (
    "layer",
    "forward and backward",
    "in copies",
    "forward",
    "in copies",
    "kept",
    "kept by Flax",
)


def cells(row: Row) -> list[str]:
    """The row as text, in the order of ``HEADER``."""

    def against(found: Against) -> list[str]:
        low, middle, high = found.ratio
        return [
            f"{middle:.2f} ({low:.2f} to {high:.2f}) of {found.peer}",
            f"{found.copies.middle:.1f}",
        ]

    held = [f"{row.kept:.2f}", f"{row.kept_by_flax:.2f}"]
    return [str(row.workload), *against(row.both), *against(row.forward), *held]
