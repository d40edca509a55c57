"""Layers of any library, and plain functions, as targets of an audit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from normjax.auditing.adapters.equinox import equinox_target
from normjax.auditing.adapters.flax import linen, linen_target, nnx, nnx_target
from normjax.auditing.adapters.functions import function_calls, stateful_calls
from normjax.auditing.adapters.haiku import haiku_target
from normjax.auditing.adapters.keras import keras_target
from normjax.auditing.adapters.torch import torch_target
from normjax.auditing.target import Target, TargetError, argument_names, said

# By the module that defines a class among the bases of an object's class.
LIBRARIES: dict[str, Callable[[Any, dict[str, Any], int | None], Target]] = {
    "flax.linen": linen_target,
    "flax.nnx": nnx_target,
    "equinox": equinox_target,
    "haiku": haiku_target,
    "torch.nn": torch_target,
    "keras": keras_target,
}


def adapt(
    layer: Any,
    shape: tuple[int, ...],
    dtype: Any = "float32",
    *,
    train: bool = False,
    seed: int | None = 0,
    name: str = "",
) -> Target:
    """A layer of any library, or a function of one array, as a target.

    Args:
        layer: a function of a NumPy or JAX array, a linen, nnx or Equinox module (the
            last with its state if it was made apart), a PyTorch module, a Keras layer
            on JAX, or what ``haiku.transform`` gives.
        shape: of x, with the batch; an Equinox module is mapped over leading axes until
            it takes the rest.
        dtype: of x.
        train: whether plain calls are as in training.
        seed: of the parameters: gains within a half of where they start, biases normal
            around it, so that the axes they vary along show; None leaves them as is.
        name: as it is printed, if not the layer's own.

    Returns:
        The target.

    Raises:
        TargetError: if it is no such thing, or refuses the shape.

    Example:
        >>> from flax import linen
        >>> target = adapt(linen.LayerNorm(), (8, 16))
        >>> target.name, sorted(target.parameters), target.resizable
        ('LayerNorm', ['bias', 'scale'], (0,))
    """
    if isinstance(layer, Target):
        return layer
    kind = np.dtype(jnp.dtype(dtype))
    settings = {"shape": tuple(shape), "dtype": kind, "train": train}
    library = _library(layer)
    if library is None and not callable(layer):
        raise TargetError(
            f"the target is a {type(layer).__name__}, expected a function of one array "
            "or a layer of flax, equinox, haiku, torch or keras"
        )
    if library is None:
        name = name or getattr(layer, "__name__", type(layer).__name__)
        how = function_calls(layer, tuple(shape), kind)
        masked = "mask" in argument_names(layer)
        target = Target(name, how=how, accepts_mask=masked, **settings)
    else:
        target = _made(library, layer, settings, seed)
        target = replace(target, name=name) if name else target
    target.check()
    target.counter[0] = 0
    return target


def adapt_step(
    step: Callable[[Any, np.ndarray, bool], tuple[Any, Any]],
    initial: Any,
    shape: tuple[int, ...],
    dtype: Any = "float32",
    *,
    train: bool = False,
    name: str = "",
) -> Target:
    """A function ``step(state, x, train)`` that returns y and the next state.

    Args:
        step: of NumPy arrays; it leaves ``state`` as it is.
        initial: the first state, not None.
        shape: of x.
        dtype: of x.
        train: whether plain calls are as in training.
        name: as it is printed, if not the function's own.

    Returns:
        The target.

    Raises:
        TargetError: if it refuses the shape.

    Example:
        >>> mean = adapt_step(lambda m, x, train: (x - m, x.mean()), 0.0, (2, 3))
        >>> print(mean.step(mean.initial(), np.ones((2, 3)), True)[1])
        1.0
    """
    name = name or getattr(step, "__name__", type(step).__name__)
    kind = np.dtype(jnp.dtype(dtype))
    how = stateful_calls(step)
    target = Target(name, tuple(shape), kind, how, state=initial, train=train)
    target.check()
    target.counter[0] = 0
    return target


def _made(
    library: str, layer: Any, settings: dict[str, Any], seed: int | None
) -> Target:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return LIBRARIES[library](layer, settings, seed)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(
            f"{type(layer).__name__} cannot be set up for an input of shape "
            f"{settings['shape']}: {type(error).__name__}: {said(error)}"
        ) from error


def _library(layer: Any) -> str | None:
    if isinstance(layer, tuple) and len(layer) == 2 and not hasattr(layer, "_fields"):
        layer = layer[0]  # an Equinox module and its state
    return library_of(type(layer))


def library_of(kind: type) -> str | None:
    """The key of ``LIBRARIES`` whose classes it derives from."""
    if issubclass(kind, linen.Module):
        return "flax.linen"
    if issubclass(kind, nnx.Module):
        return "flax.nnx"
    for base in kind.__mro__:
        for library in LIBRARIES:
            if base.__module__.startswith(f"{library}."):
                return library
    return None
