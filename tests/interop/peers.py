"""How a spec is held against a library's own layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compare import jit

import normjax as nj
from normjax.verify.oracles import numpy_reference

# 64 u (n + κ): rounding in float64 of at most 240 entries with an offset κ < 2.
CLOSE = 64 * 2.0**-53 * 242

Params = Mapping[str, Any]
# x, parameters and a cotangent → y, ∂x, and ∂ of every parameter.
Layer = Callable[[np.ndarray, Params, np.ndarray], tuple[Any, Any, Params]]


def close(actual: Any, expected: Any, rtol: float = CLOSE) -> None:
    expected = np.asarray(expected)
    size = float(np.abs(expected).max(initial=1))
    np.testing.assert_allclose(
        np.asarray(actual), expected, rtol=rtol, atol=rtol * size
    )


def by_jax(call: Callable[[Any, Params], Any]) -> Layer:
    """A layer that is a JAX function of x and its parameters."""

    def layer(x: np.ndarray, params: Params, weights: np.ndarray):
        def both(x, params, weights):
            y, pull = jax.vjp(call, x, params)
            return y, *pull(weights)

        return jit(both)(jnp.asarray(x), dict(params), jnp.asarray(weights))

    return layer


def check_layer(
    spec: nj.NormSpec,
    shape: tuple[int, ...],
    layer: Layer,
    *,
    reference: nj.Statistics | None = None,
    single: bool = False,
) -> None:
    """Values, and gradients by x and by every parameter, in float64.

    Args:
        spec: the convention.
        shape: of the input.
        layer: the library's.
        reference: as ``nj.normalize`` takes it.
        single: in float32, on inputs of a size that ε = 1e-6 still matters for.
    """
    dtype, size = (np.float32, 0.01) if single else (np.float64, 1.0)
    rtol = 256 * 2.0**-24 if single else CLOSE
    random = np.random.default_rng(0)
    x = size * random.normal(1.0, 1.5, shape).astype(dtype)
    weights = random.normal(size=shape).astype(dtype)
    params = {
        name: random.normal(1.0, 0.5, value.shape).astype(dtype)
        for name, value in nj.init(spec, shape, jnp.dtype(dtype)).items()
    }

    def ours(x, params):
        return nj.normalize(spec, x, params, reference=reference)

    y, by_x, by_params = by_jax(ours)(x, params, weights)
    theirs, their_x, their_params = layer(x, params, weights)
    close(y, theirs, rtol)
    close(by_x, their_x, rtol)
    assert set(by_params) == set(their_params)
    for name, value in by_params.items():
        close(value, np.reshape(their_params[name], value.shape), rtol)


def batches(shape: tuple[int, ...], count: int = 5) -> np.ndarray:
    return np.random.default_rng(1).normal(2.0, 3.0, (count, *shape))


def check_running(
    spec: nj.NormSpec,
    shape: tuple[int, ...],
    update: Callable[[np.ndarray], Any],
    stored: Callable[[], tuple[Any, Any]],
    evaluate: Callable[[np.ndarray], Any],
    *,
    state: nj.running.State | None = None,
    single: bool = False,
) -> None:
    """Stored statistics after five updates, and inference with them."""
    dtype = np.float32 if single else np.float64
    rtol = 256 * 2.0**-24 if single else CLOSE
    if state is None:
        state = nj.running.init(spec, shape, jnp.dtype(dtype))
    *seen, new = batches(shape, 6).astype(dtype)
    for x in seen:
        update(x)
        state = nj.running.update(spec, state, nj.moments(spec, jnp.asarray(x)))
    found = nj.running.read(spec, state)
    mean, variance = stored()
    close(found.mean, np.ravel(mean), rtol)
    close(found.variance, np.ravel(variance), rtol)
    close(nj.normalize(spec, jnp.asarray(new), moments=found), evaluate(new), rtol)


def right(spec: nj.NormSpec, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """x̂ in float64, from the entries of x as they are."""
    return numpy_reference(np.asarray(x, np.float64), axes, epsilon=spec.epsilon)


def distance(first: Any, second: Any) -> float:
    """Of two outputs, relative to the norm of the second."""
    one, other = (np.asarray(y, np.float64) for y in (first, second))
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))
