"""What an offset costs: error of a layer against |mean|/std, and its bound.

The error is normwise and relative, ‖x̂ − x̂*‖/‖x̂*‖ of a group, with x̂* in float64 from
the rounded input; the largest over the groups is drawn. With κ = |mean|/std, n elements
and u the unit roundoff of the accumulation it grows like

    shifted   √n u log₂n at most, at any κ      folded   + κ u
    two_pass  κ u log₂n                         one_pass κ² u log₂n, up to √(σ²/ε)

(``normjax.verify.precision_bound``). The other libraries' layers are judged by the
bound of what their source computes.
"""

from __future__ import annotations

import contextlib
import os
from importlib import metadata
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

import normjax as nj
from normjax import study
from normjax.verify import normwise, precision_bound
from normjax.verify.oracles import numpy_reference
from normjax.verify.tolerance import unit_roundoff

DTYPES = ("float32", "bfloat16", "float16")
# What the sources of the three compute: algorithm, application, default epsilon.
EQUIVALENT = {
    "flax": ("one_pass", "centered", 1e-6),
    "keras": ("two_pass", "folded", 1e-3),
    "torch": ("two_pass", "centered", 1e-5),
}


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} (not installed)"


LABELS = {
    "coordinate": "offset in standard deviations",
    "coordinate_scale": "log",
    "baseline": "shifted, the default",
    **{name: _version(name) for name in EQUIVALENT},
    **{f"error_{dtype}": f"error of x̂, {dtype} input" for dtype in DTYPES},
    **{f"error_{dtype}_scale": "log" for dtype in DTYPES},
}


class Settings(study.Settings):
    """One layer, and the groups that it gets.

    ``accumulate: input`` keeps the statistics in the dtype of the input; the last three
    layers choose for themselves.
    """

    layer: Literal["normjax", "flax", "keras", "torch"] = "normjax"
    algorithm: Literal["shifted", "two_pass", "one_pass"] = "shifted"
    apply: Literal["centered", "folded"] = "centered"
    accumulate: Literal["float32", "input"] = "float32"
    size: int = study.Field(default=64, ge=2)
    groups: int = study.Field(default=32, ge=1)
    points: int = study.Field(default=57, ge=2)


def measure(cell: study.Cell, _key: None) -> dict[str, Any]:
    """The largest error at each offset, and the largest bound, for every dtype.

    Args:
        cell: the arm.
        _key: nothing is random.

    Returns:
        The curves ``error_<dtype>`` and ``error_<dtype>_bound``; null where the
        library is not installed (Keras: or already runs on another backend than JAX),
        and in float32 where ``accumulate: input`` is float32 too.
    """
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        same = cell.settings.accumulate == "input" and dtype == "float32"
        pair = (None, None) if same else _curves(cell.settings, dtype)
        found[f"error_{dtype}"], found[f"error_{dtype}_bound"] = pair
    return found


def _curves(settings: Settings, dtype: str) -> tuple[Any, Any]:
    """Errors and bounds from κ = 1 to 1/u, where a step of the input is one std."""
    offsets = np.geomspace(1, 1 / unit_roundoff(dtype), settings.points)
    drawn = np.random.default_rng(0).normal(size=(settings.groups, settings.size))
    drawn = (drawn - drawn.mean(1, keepdims=True)) / drawn.std(1, keepdims=True)
    x = jnp.asarray((offsets[:, None, None] + drawn).reshape(-1, settings.size), dtype)
    spec = _spec(settings, dtype)
    y = _outputs(settings.layer, spec, x)
    if y is None:
        return None, None

    def largest(values: list[float]) -> study.Curve:
        worst = np.reshape(values, (settings.points, settings.groups)).max(1)
        return study.Curve(jnp.asarray(offsets), jnp.asarray(worst))

    rows = np.asarray(x.astype(jnp.float32), np.float64)
    expected = numpy_reference(rows, (1,), epsilon=spec.epsilon)
    pairs = zip(np.asarray(y, np.float64), expected, strict=True)
    errors = [normwise(found[None], right[None]) for found, right in pairs]
    return largest(errors), largest([_bound(spec, dtype, row) for row in rows])


def _spec(settings: Settings, dtype: str) -> nj.NormSpec:
    """The layer as a spec: of normjax, or the equivalent of another library's."""
    algorithm, apply, epsilon = EQUIVALENT.get(
        settings.layer, (settings.algorithm, settings.apply, 1e-5)
    )
    accumulate = dtype if settings.accumulate == "input" else "float32"
    precision = nj.Precision(algorithm=algorithm, apply=apply, accumulate=accumulate)
    return nj.layer_norm(affine=None, epsilon=epsilon, precision=precision)


def _bound(spec: nj.NormSpec, dtype: str, row: np.ndarray) -> float:
    """The bound for one group, from its own mean and standard deviation."""
    shifted = row - row[0]
    mean, std = row[0] + shifted.mean(), shifted.std()
    return precision_bound(spec, dtype, len(row), abs(mean) / std, std=std).value


def _outputs(layer: str, spec: nj.NormSpec, x: jax.Array):
    """x̂ in float32, or None where the library is not there."""
    if layer == "keras":
        return _keras(x)
    if layer == "torch":
        return _torch(x)
    if layer == "flax":
        return linen.LayerNorm(dtype=x.dtype).init_with_output(jax.random.key(0), x)[0]
    return nj.normalize(spec, x).astype(jnp.float32)


def _keras(x: jax.Array):
    """Keras's default layer on the JAX backend, if that is what this process has."""
    with contextlib.ExitStack() as stack:
        stack.callback(_restore, "KERAS_BACKEND", os.environ.get("KERAS_BACKEND"))
        os.environ["KERAS_BACKEND"] = "jax"
        try:
            import keras  # pyright: ignore[reportMissingImports]
        except ImportError:
            return None
    if keras.backend.backend() != "jax":
        return None
    layer = keras.layers.LayerNormalization(dtype=x.dtype.name)
    return layer(x).astype(jnp.float32)


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _torch(x: jax.Array) -> np.ndarray | None:
    """PyTorch's default layer, on the CPU."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    dtype = getattr(torch, x.dtype.name)
    layer = torch.nn.LayerNorm(x.shape[-1], dtype=dtype)
    with torch.no_grad():
        y = layer(torch.tensor(np.asarray(x.astype(jnp.float32))).to(dtype))
    return y.to(torch.float32).numpy()
