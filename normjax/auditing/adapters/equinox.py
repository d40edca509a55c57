"""Equinox's modules, which take one example: they are called under ``jax.vmap``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax

from normjax.auditing.adapters.functions import layer_calls
from normjax.auditing.adapters.parameters import randomized
from normjax.auditing.target import Target, TargetError, argument_names, mode_arguments


def equinox_target(module: Any, settings: dict[str, Any], seed: int | None) -> Target:
    """An Equinox module under as many ``jax.vmap`` as its shape of one example needs.

    Args:
        module: as it is made, or with its state, as ``make_with_state`` gives them.
        settings: shape, dtype and mode; the shape has the batch.
        seed: of the parameters; None leaves them as they are.

    Returns:
        The target.

    Raises:
        TargetError: if no number of leading axes leaves a shape that it takes.
    """
    equinox: Any = import_module("equinox")

    if isinstance(module, tuple):
        module, state = module
    else:
        is_index = [
            isinstance(leaf, equinox.nn.StateIndex)
            for leaf in jax.tree.leaves(module, is_leaf=_is(equinox.nn.StateIndex))
        ]
        state = equinox.nn.State(module) if any(is_index) else None
        module = equinox.nn.delete_init_state(module)
    learned, rest = equinox.partition(module, equinox.is_inexact_array)
    paths, tree = jax.tree.flatten_with_path(learned)
    given = {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in paths}
    parameters = randomized(given, seed)
    takes = argument_names(type(module).__call__)
    failures = []
    for mapped in range(1, len(settings["shape"]) + 1):

        def apply(
            parameters: Any, state: Any, x: Any, mask: Any, train: bool, mapped=mapped
        ) -> tuple[Any, Any]:
            leaves = [parameters[name] for name in given]
            layer = equinox.combine(jax.tree.unflatten(tree, leaves), rest)
            layer = equinox.nn.inference_mode(layer, value=not train)
            more = mode_arguments(type(layer).__call__, train)
            if "key" in takes:
                more = {**more, "key": jax.random.key(0)}

            def one(x: Any, mask: Any, state: Any) -> tuple[Any, Any]:
                masked = {} if mask is None else {"mask": mask}
                if "state" in takes:
                    return layer(x, state, **masked, **more)
                return layer(x, **masked, **more), state

            for _ in range(mapped):
                one = jax.vmap(
                    one,
                    in_axes=(0, None if mask is None else 0, None),
                    out_axes=(0, None),
                    axis_name=getattr(layer, "axis_name", None),
                )
            return one(x, mask, state)

        target = Target(
            name=type(module).__name__,
            how=layer_calls(apply, parameters),
            parameters=parameters,
            state=state,
            accepts_mask="mask" in takes,
            **settings,
        )
        try:
            target.check()
        except TargetError as error:
            failures.append(str(error))
        else:
            return target
    raise TargetError(failures[0])


def _is(kind: type) -> Any:
    return lambda leaf: isinstance(leaf, kind)
