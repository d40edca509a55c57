"""Arrays that a module holds: made by init, read and written by every other call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.errors import ScopeParamShapeError
from jax import Array

from normjax.stateful import check_held


def parameter(
    module: nn.Module,
    name: str,
    init: Callable[..., Any],
    shape: tuple[int, ...],
    *args: Any,
) -> Array:
    """``module.param``, and what it refuses in our words.

    Args:
        module: inside its compact method.
        name: of the parameter.
        init: is called with a key, the shape, and what follows.
        shape: that the input needs.
        *args: of init.

    Returns:
        The parameter.

    Raises:
        ValueError: if it was made in another shape.
    """
    try:
        return module.param(name, init, shape, *args)
    except ScopeParamShapeError:
        held = nn.meta.unbox(module.get_variable("params", name))
        check_held(_called(module), name, jnp.shape(held), shape)
        raise


def variables(module: nn.Module, fresh: dict[str, Array]) -> dict[str, nn.Variable]:
    """The module's variables in ``batch_stats``.

    Args:
        module: inside its compact method.
        fresh: their names, and the values that init gives them.

    Returns:
        A variable for each name.

    Raises:
        ValueError: if one is missing outside of init, or was made in another shape.
    """
    missing = [name for name in fresh if not module.has_variable("batch_stats", name)]
    if missing and not module.is_initializing():
        raise ValueError(
            f"{_called(module)} misses {', '.join(missing)} in 'batch_stats': init "
            f"makes {', '.join(fresh)}, and a checkpoint must hold them"
        )
    held = {
        name: module.variable("batch_stats", name, lambda value=value: value)
        for name, value in fresh.items()
    }
    for name, variable in held.items():
        check_held(_called(module), name, variable.value.shape, fresh[name].shape)
    return held


def overwrite(
    module: nn.Module, held: dict[str, nn.Variable], new: list[Array]
) -> None:
    """Give variables their new values; the call that initializes changes none.

    Raises:
        ValueError: if ``batch_stats`` is immutable.
    """
    if module.is_initializing():
        return
    if not module.is_mutable_collection("batch_stats"):
        raise ValueError(
            f"{_called(module)} updates its stored statistics, but 'batch_stats' is "
            "immutable: pass mutable=['batch_stats'] to apply, or do not update: "
            "update=False or use_running_average=True"
        )
    for variable, value in zip(held.values(), new, strict=True):
        variable.value = value


def _called(module: nn.Module) -> str:
    return "/".join(module.path) or type(module).__name__
