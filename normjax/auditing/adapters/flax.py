"""Flax's modules, linen and nnx."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen, nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from normjax.auditing.adapters.functions import layer_calls
from normjax.auditing.adapters.parameters import randomized
from normjax.auditing.target import Target, argument_names, mode_arguments


def linen_target(module: linen.Module, settings: dict[str, Any], seed: int | None):
    """A linen module, initialized here; ``seed`` is of its parameters, None: as are."""
    x = jax.numpy.ones(settings["shape"], settings["dtype"])
    call = type(module).__call__
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = dict(module.init(keys, x, **mode_arguments(call, settings["train"])))
    learned = flatten_dict(variables.pop("params", {}), sep="/")
    parameters = randomized(learned, seed)

    def apply(parameters: Any, state: Any, x: Any, mask: Any, train: bool):
        kept = {"params": unflatten_dict(parameters, sep="/"), **(state or {})}
        more = {} if mask is None else {"mask": mask}
        return module.apply(
            kept,
            x,
            **more,
            **mode_arguments(call, train),
            mutable=[*variables],
            rngs={"dropout": jax.random.key(1)},
        )

    return Target(
        name=type(module).__name__,
        how=layer_calls(apply, parameters),
        parameters=parameters,
        state=variables or None,
        accepts_mask="mask" in argument_names(call),
        **settings,
    )


def nnx_target(module: nnx.Module, settings: dict[str, Any], seed: int | None):
    """An nnx module, which stays as it is."""
    graph, learned, random, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
    flat = nnx.to_flat_state(learned)
    given = {"/".join(map(str, path)): leaf.get_value() for path, leaf in flat}
    parameters = randomized(given, seed)
    call = type(module).__call__

    def apply(parameters: Any, state: Any, x: Any, mask: Any, train: bool):
        leaves = [leaf.replace(parameters["/".join(map(str, p))]) for p, leaf in flat]
        paths = [path for path, _ in flat]
        own = nnx.from_flat_state(zip(paths, leaves, strict=True))
        layer = nnx.merge(graph, own, random, rest if state is None else state)
        layer.train() if train else layer.eval()
        more = {} if mask is None else {"mask": mask}
        y = layer(x, **more, **mode_arguments(call, train))
        stored = nnx.state(layer, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
        return y, None if state is None else stored

    return Target(
        name=type(module).__name__,
        how=layer_calls(apply, parameters),
        parameters=parameters,
        state=rest if nnx.to_flat_state(rest) else None,
        accepts_mask="mask" in argument_names(call),
        **settings,
    )
