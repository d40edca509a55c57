"""Errors of the same layer in every library: ``python -m benchmarks.correctness``.

Values, gradients and stored statistics of each library's layer, with its own defaults,
against NumPy float64 on the same entries and with the same ε; and the bytes that stay
for the backward pass. Prints Markdown, and with ``--readme`` writes it there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import by_torch
from benchmarks.layers import moved
from benchmarks.libraries import SPECS, Layer, layers
from benchmarks.readme import put, table
from residuals import kept

import normjax as nj

BEGIN = "<!-- correctness: cd tests && python -m benchmarks.correctness -->"
END = "<!-- end of correctness -->"
# Above this an error is printed bold: the second digit is wrong.
WRONG = 1e-2


class Input(NamedTuple):
    """Normal entries of this mean and standard deviation."""

    name: str
    mean: float
    std: float
    dtype: str = "float32"

    def draw(self, shape: tuple[int, ...], seed: int = 0) -> jax.Array:
        values = np.random.default_rng(seed).normal(self.mean, self.std, shape)
        return jnp.asarray(values, self.dtype)


INPUTS = (
    Input("benign", 1, 1),
    Input("offset 1e4", 1e4, 1),
    Input("small variance", 1, 1e-3),
    Input("bfloat16", 1, 1, "bfloat16"),
)
SHAPES = {
    "layer": (64, 512),
    "rms": (64, 512),
    "batch": (256, 64),
    "group": (8, 8, 8, 128),
}
SMALL = {"batch": (16, 8)}
# Columns: a heading, the distribution that has a version, and the convention.
LIBRARIES = {
    "normjax": ("normjax", ""),
    "linen": ("flax", "flax.linen.{}Norm"),
    "torch": ("torch", "torch.nn.{}Norm"),
    "keras": ("keras", "keras.layers.{}Normalization"),
    "equinox": ("equinox", "equinox.nn.{}Norm"),
    "haiku": ("dm-haiku", "haiku.{}Norm"),
}
# Arguments without a default.
GIVEN = {
    "axis": -1,
    "create_scale": True,
    "create_offset": True,
    "decay_rate": 0.99,
    "groups": 32,
    "num_groups": 32,
    "num_channels": 128,
    "num_features": 64,
    "normalized_shape": 512,
    "shape": 512,
    "channels": 128,
    "size": 64,
    "input_size": 64,
}


def spec_of(library: str, kind: str) -> nj.NormSpec:
    """What the library's layer is by its defaults: its ε, and how it stores."""
    convention = LIBRARIES[library][1]
    if not convention:
        return SPECS[kind]
    word = "RMS" if kind == "rms" else kind.capitalize()
    name = convention.format(word)
    if name == "torch.nn.BatchNorm":
        name += "1d"
    more = {"axis_name": "i"} if name == "equinox.nn.BatchNorm" else {}
    known = nj.interop.conventions.CONVENTIONS[name].arguments
    given = {
        word: GIVEN[word]
        for word, parameter in known.items()
        if parameter.default is parameter.empty
    }
    return nj.interop.convention(name, **given, **more)


def view(kind: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The group view of a shape, and its reduced axes."""
    if kind == "group":
        return (*shape[:-1], 32, shape[-1] // 32), (*range(1, len(shape) - 1), -1)
    return shape, tuple(range(len(shape) - 1)) if kind == "batch" else (-1,)


class Exact(NamedTuple):
    """In float64: x̂, the gradient by x, and mean and variance of the groups."""

    y: np.ndarray
    gradient: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


def exact(kind: str, x: Any, bar: Any, epsilon: float) -> Exact:
    """The layer and its gradient by NumPy.

        x̂ = (x − μ)/s,  ∂x = (ȳ − mean(ȳ) − x̂ mean(x̂ ȳ))/s,  s = √(σ² + ε)

    Args:
        kind: a name of ``SHAPES``; ``rms`` has μ = 0, and no mean(ȳ).
        x: the input, channels last.
        bar: ȳ, the gradient by y.
        epsilon: ε.
    """
    shape, axes = view(kind, x.shape)
    x, bar = (np.asarray(a, np.float64).reshape(shape) for a in (x, bar))
    mean = partial(np.mean, axis=axes, keepdims=True)
    center = kind != "rms"
    mu = mean(x) * center
    mu = mu + mean(x - mu) * center
    variance = mean((x - mu) ** 2)
    s = np.sqrt(variance + epsilon)
    y = (x - mu) / s
    slope = (bar - center * mean(bar) - y * mean(y * bar)) / s
    return Exact(y, slope, mu, variance)


class Measured(NamedTuple):
    """Relative errors, and bytes kept in units of x."""

    value: float
    gradient: float
    stored: float | None
    kept: float


def error(found: Any, right: np.ndarray) -> float:
    """‖found − right‖/‖right‖; infinite where something is not finite."""
    gap = np.asarray(found, np.float64).reshape(right.shape) - right
    relative = float(np.linalg.norm(gap) / np.linalg.norm(right))
    return relative if np.isfinite(relative) else float("inf")


def compared(
    library: str, kind: str, layer: Layer | by_torch.Torch, x: jax.Array
) -> Measured:
    """One layer on one input."""
    spec = spec_of(library, kind)
    bar = Input("", 0, 1, x.dtype.name).draw(x.shape, seed=1)
    right = exact(kind, wide(x), wide(bar), float(spec.epsilon))
    if isinstance(layer, by_torch.Torch):
        y, slope, held = layer.run(wide(x), wide(bar), x.dtype.name)
    else:
        y, slope = by_jax(layer, x, bar)
        held = kept(lambda x, p: layer.call(p, x), moved(x, layer.channel),
                    layer.params, jit=True)[1]  # fmt: skip
    stored = None
    if kind == "batch" and layer.stored is not None:
        stored = stored_error(spec, right, x, layer.stored)
    return Measured(error(y, right.y), error(slope, right.gradient), stored, held)


def wide(array: jax.Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32))


def by_jax(layer: Layer, x: jax.Array, bar: jax.Array) -> tuple[Any, Any]:
    """y and the gradient by x, channels last."""

    @jax.jit
    def run(params, x, bar):
        y, pull = jax.vjp(layer.call, params, x)
        return y, pull(bar.astype(y.dtype))[1]

    found = run(layer.params, *(moved(a, layer.channel) for a in (x, bar)))
    y, slope = (wide(jnp.moveaxis(a, layer.channel, -1)) for a in found)
    return y, slope


def stored_error(
    spec: nj.NormSpec, right: Exact, x: jax.Array, update: Callable[[Any], Any]
) -> float:
    """The larger of both errors, after one update of a fresh layer."""
    running = spec.running
    assert running is not None
    decay, n = float(running.decay), x.size // x.shape[-1]
    found = []
    batch = (right.mean, right.variance * n / (n - running.ddof))
    for start, value in zip(running.initial, batch, strict=True):
        mixed = decay * start + (1 - decay) * value
        found.append(value if running.debias else mixed)
    return max(map(error, update(x), found))


def columns(
    kind: str, x: jax.Array
) -> tuple[dict[str, Layer | by_torch.Torch], dict[str, str]]:
    """The layer of every library that is here, and why one is not."""
    found, missing = layers(kind, x)
    every: dict[str, Layer | by_torch.Torch] = {**found}
    try:
        every["torch"] = by_torch.Torch(kind, x.shape)
    except ImportError as problem:
        missing["torch"] = str(problem)
    return {name: every[name] for name in LIBRARIES if name in every}, missing


def shown(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"**{value:.0e}**" if value > WRONG else f"{value:.0e}"


def sections(smoke: bool) -> Iterator[str]:
    """The block of the README, paragraph by paragraph."""
    errors, stored, held = [], [], []
    names: list[str] = []
    for kind, shape in (SMALL if smoke else SHAPES).items():
        for given in INPUTS[::3] if smoke else INPUTS:
            x = given.draw(shape)
            found, missing = columns(kind, x)
            names = list(found)
            row = [compared(name, kind, layer, x) for name, layer in found.items()]
            title = f"{kind} norm, {given.name}"
            each = [f"{shown(m.value)}, {shown(m.gradient)}" for m in row]
            errors.append([title, *each])
            if kind == "batch":
                stored.append([title, *(shown(m.stored) for m in row)])
            if given.name in ("benign", "bfloat16"):
                title = f"{kind} norm, {given.dtype}"
                held.append([title, *(f"{m.kept:.2f}" for m in row)])
    yield ", ".join(map(version, names)) + ", on CPU."
    for name in sorted(set(missing) & set(LIBRARIES)):
        yield f"Without {name}: {missing[name]}."
    heads = [name.replace("linen", "flax linen") for name in names]
    yield table(["relative error of y, of ∂x", *heads], errors)
    yield table(["relative error of what is stored", *heads], stored)
    yield table(["kept for backward, in units of x", *heads], held)


def version(name: str) -> str:
    distribution = LIBRARIES[name][0]
    return f"{distribution} {metadata.version(distribution)}"


def main() -> None:
    """Print the block, or put it into the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="the smallest form")
    parser.add_argument("--readme", action="store_true", help="write the README")
    chosen = parser.parse_args()
    block = "\n\n".join(sections(chosen.smoke))
    print(block)
    if chosen.readme:
        put(block, BEGIN, END)


if __name__ == "__main__":
    main()
