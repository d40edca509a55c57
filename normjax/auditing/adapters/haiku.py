"""Haiku's modules, and functions that ``haiku.transform`` made."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from normjax.auditing.adapters.functions import layer_calls
from normjax.auditing.adapters.parameters import randomized
from normjax.auditing.target import Target, mode_arguments


def transformed(kind: type, *args: Any, **kwargs: Any) -> Any:
    """A Haiku module with its arguments as a pair of pure functions."""
    haiku: Any = import_module("haiku")

    def forward(x: Any, is_training: bool = False) -> Any:
        return kind(*args, **kwargs)(x, **mode_arguments(kind.__call__, is_training))

    return haiku.transform_with_state(forward)


def haiku_target(
    pair: Any, settings: dict[str, Any], seed: int | None, name: str = ""
) -> Target:
    """``haiku.transform(f)`` or ``haiku.transform_with_state(f)``, initialized here.

    f takes x, and ``is_training`` if it has two modes.
    """
    with_state = "WithState" in type(pair).__name__
    x = jax.numpy.ones(settings["shape"], settings["dtype"])
    key = jax.random.key(0)
    try:
        made = pair.init(key, x, is_training=settings["train"])
        has_mode = True
    except TypeError:
        made = pair.init(key, x)
        has_mode = False
    learned, state = made if with_state else (made, {})
    parameters = randomized(flatten_dict(dict(learned), sep=":"), seed)

    def apply(parameters: Any, state: Any, x: Any, _mask: Any, train: bool):
        more = {"is_training": train} if has_mode else {}
        own = unflatten_dict(parameters, sep=":")
        if not with_state:
            return pair.apply(own, key, x, **more), None
        y, after = pair.apply(own, state or {}, key, x, **more)
        return y, after or None

    return Target(
        name=name or "haiku.transform",
        how=layer_calls(apply, parameters),
        parameters=parameters,
        state=state or None,
        **settings,
    )
