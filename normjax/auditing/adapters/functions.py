"""Plain functions, and what JAX-based libraries have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from normjax.auditing.target import Calls, argument_names, mode_arguments, one_array


def function_calls(function: Callable, shape: tuple[int, ...], dtype: Any) -> Calls:
    """How a function of NumPy or JAX arrays is called, as its user calls it: eagerly.

    A function that JAX can trace gets JAX arrays and has a derivative; any other one
    gets NumPy arrays.
    """
    masked = "mask" in argument_names(function)

    def call(x: Any, mask: Any, train: bool) -> Any:
        more = {"mask": mask} if masked and mask is not None else {}
        return one_array(function(x, **more, **mode_arguments(function, train)))

    def by_jax(state: Any, x: Any, mask: Any, train: bool) -> tuple[Any, Any]:
        return call(x, None if mask is None else jax.numpy.asarray(mask), train), state

    def by_numpy(
        state: Any, x: np.ndarray, mask: Any, train: bool
    ) -> tuple[np.ndarray, Any]:
        return np.asarray(call(x.copy(), mask, train)), state

    example = jax.ShapeDtypeStruct(shape, dtype)
    try:
        jax.eval_shape(lambda x: by_jax(None, x, None, False)[0], example)
    except Exception:
        return Calls(by_numpy)
    return jax_calls(by_jax)


def stateful_calls(step: Callable) -> Calls:
    """How ``step(state, x, train)``, which returns y and a state, is called."""

    def forward(
        state: Any, x: np.ndarray, mask: Any, train: bool
    ) -> tuple[np.ndarray, Any]:
        del mask
        y, after = step(state, x, train)
        return np.asarray(one_array(y)), after

    return Calls(forward)


def jax_calls(call: Callable[[Any, Any, Any, bool], tuple[Any, Any]]) -> Calls:
    """Calls of ``call(state, x, mask, train)``, a function of JAX arrays."""

    def forward(
        state: Any, x: np.ndarray, mask: Any, train: bool
    ) -> tuple[np.ndarray, Any]:
        y, after = call(state, jax.numpy.asarray(x), mask, train)
        return np.asarray(one_array(y)), after

    def jacobian(state: Any, x: np.ndarray, mask: Any, train: bool) -> np.ndarray:
        reverse = jax.jacrev(lambda x: call(state, x, mask, train)[0])
        return np.asarray(reverse(jax.numpy.asarray(x)))

    def shape_of(state: Any, x: np.ndarray, train: bool) -> tuple[int, ...]:
        example = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = jax.eval_shape(lambda x: call(state, x, None, train)[0], example)
        return y.shape

    return Calls(forward, jacobian, shape_of)


def layer_calls(
    call: Callable[[Any, Any, Any, Any, bool], tuple[Any, Any]], parameters: Any
) -> Calls:
    """Calls of ``call(parameters, state, x, mask, train)``, compiled as in use."""
    compiled = jax.jit(call, static_argnums=4)

    def with_parameters(state: Any, x: Any, mask: Any, train: bool) -> tuple[Any, Any]:
        return compiled(parameters, state, x, mask, train)

    return jax_calls(with_parameters)
