"""A batch bound to a model's call: its arguments, and its switch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from normjax.diagnosis.subject import SWITCHES, BoundModel
from normjax.layers.replaced import ReplacedNorms
from normjax.records import suggest


def subject(
    model: Any,
    variables: Any,
    batch: Any,
    *,
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
) -> BoundModel:
    """Bind a batch to a model's call, and find its switch.

    Args:
        model: a linen or an nnx module.
        variables: of a linen model, or None.
        batch: as for ``diagnose``.
        train: as for ``diagnose``.
        evaluate: as for ``diagnose``.

    Returns:
        A ``BoundModel``.

    Raises:
        ValueError: if the model is none, or the batch does not fit its call.
    """
    if not isinstance(model, nn.Module | nnx.Module):
        raise ValueError(
            f"model is a {type(model).__name__}, expected a linen or an nnx module"
        )
    if isinstance(model, nnx.Module) and variables is not None:
        raise ValueError(
            f"variables is a {type(variables).__name__}, expected None: "
            f"{type(model).__name__} is an nnx model, which holds its own"
        )
    taken, open_ended = _arguments(model)
    args, named = _given(batch, taken, open_ended)
    names = (*taken[: len(args)], *named)
    known = {name: value for name, value in SWITCHES.items() if name in taken}
    known = {name: value for name, value in known.items() if name not in names}
    ways = []
    for name, given, way in (("train", train, True), ("evaluate", evaluate, False)):
        default = {key: value if way else not value for key, value in known.items()}
        unknown = [key for key in given or {} if key not in taken]
        if unknown and not open_ended:
            raise ValueError(
                f"{name} has {unknown[0]!r}, which the call of {type(model).__name__} "
                f"does not take{suggest(unknown[0], taken)}"
            )
        ways.append(default if given is None else dict(given))
    found = BoundModel(model, variables, args, named, names, *ways)
    _check_call(found, taken)
    if isinstance(model, nn.Module) and variables is None:
        key = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
        made = model.init(key, *args, **named, **found.evaluate)
        found = replace(found, variables=made)
    elif isinstance(model, nn.Module) and not isinstance(variables, Mapping):
        raise ValueError(
            f"variables is a {type(variables).__name__}, expected those of the linen "
            f"model {type(model).__name__}: {type(model).__name__}.init(...) gives them"
        )
    return found


def _arguments(model: Any) -> tuple[list[str], bool]:
    """Names of what a model's call takes, and whether it takes any other."""
    inner, method = model, "__call__"
    if isinstance(model, ReplacedNorms):
        inner, method = model.model, model.method
    found = list(inspect.signature(getattr(type(inner), method)).parameters.values())
    names = [
        p.name for p in found[1:] if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    return names, any(p.kind == p.VAR_KEYWORD for p in found)


def _given(
    batch: Any, taken: list[str], open_ended: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and named ones."""

    def array(value: Any) -> Any:
        return jnp.asarray(value) if isinstance(value, np.ndarray | list) else value

    if batch is None:
        raise ValueError("batch is None, expected an array, a tuple or a dict of them")
    if not isinstance(batch, Mapping):
        args = batch if isinstance(batch, tuple) else (batch,)
        found = tuple(map(array, args)), {}
    else:
        values = {name: array(value) for name, value in batch.items()}
        if len(values) == 1 and taken and next(iter(values)) not in taken:
            found = tuple(values.values()), {}
        else:
            strange = [n for n in values if n not in taken and not open_ended]
            if strange:
                raise ValueError(
                    f"batch has {strange[0]!r}, and the call takes {', '.join(taken)}"
                    f"{suggest(strange[0], taken)}"
                )
            found = (), values
    sizes = [each for each in jax.tree.leaves(found) if getattr(each, "ndim", 0)]
    if not sizes or 0 in sizes[0].shape:
        raise ValueError(
            "batch has no array with examples on a leading axis: give the model's "
            "input, or a dict by the names of its arguments"
        )
    return found


def _check_call(found: BoundModel, taken: list[str]) -> None:
    """Refuse what Python would refuse, in a line that says what to do."""
    call = type(found.model).__call__
    if isinstance(found.model, ReplacedNorms):
        return
    for way, flags in (("train", found.train), ("evaluate", found.evaluate)):
        try:
            inspect.signature(call).bind(
                found.model, *found.args, **{**found.named, **flags}
            )
        except TypeError as problem:
            raise ValueError(
                f"the batch has {', '.join(found.names)}, and the call of "
                f"{type(found.model).__name__} takes {', '.join(taken)}: {problem}; "
                f"say {way}={{...}} if that is its switch"
            ) from None
