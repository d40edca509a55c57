"""Keras's layers, on its JAX backend."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from normjax.auditing.adapters.functions import layer_calls
from normjax.auditing.adapters.parameters import randomized
from normjax.auditing.target import Target, TargetError, argument_names


def keras_target(layer: Any, settings: dict[str, Any], seed: int | None) -> Target:
    """A Keras layer, built here if it is not; its variables stay as they are.

    Raises:
        TargetError: if Keras runs on another backend.
    """
    keras: Any = import_module("keras")

    backend = keras.backend.backend()
    if backend != "jax":
        raise TargetError(
            f"Keras runs on {backend} here, expected JAX: set KERAS_BACKEND=jax before "
            "keras is imported"
        )
    shape = settings["shape"]
    if not layer.built:
        layer.build(shape)
    paths = [variable.path for variable in layer.trainable_variables]
    values = [np.asarray(variable.value) for variable in layer.trainable_variables]
    parameters = randomized(dict(zip(paths, values, strict=True)), seed)
    state = [variable.value for variable in layer.non_trainable_variables]
    takes = argument_names(layer.call)

    def apply(parameters: Any, state: Any, x: Any, mask: Any, train: bool):
        more = {"training": train} if "training" in takes else {}
        if mask is not None:
            more = {**more, "mask": mask}
        own = [parameters[path] for path in paths]
        y, after = layer.stateless_call(own, state or [], x, **more)
        return y, after or None

    return Target(
        name=type(layer).__name__,
        how=layer_calls(apply, parameters),
        parameters=parameters,
        state=state or None,
        accepts_mask="mask" in takes,
        mask_axes=tuple(range(len(shape) - 1)) if "mask" in takes else None,
        **settings,
    )
