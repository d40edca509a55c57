"""A model run with something around the call of every norm layer; the model stays.

Linen models are run under ``flax.linen.intercept_methods``; of an nnx model a clone is
run, in which the classes of norm layers have another ``__call__``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.core import Tracer

from normjax.flax_rules import from_right
from normjax.layers.found import (
    Call,
    NormCall,
    NormInputs,
    NormLayer,
    bound,
    declared,
    follows_flax,
    kind_of,
)

Around = Callable[[Call], Array]


def norm_layers(
    model: Any, variables: Any = None, *args: Any, **kwargs: Any
) -> dict[str, NormLayer]:
    """Every norm layer of a Flax model, Flax's own and ours.

    Args:
        model: a linen or an nnx module.
        variables: of a linen model; None for nnx.
        args: what the model is called with. An nnx model needs no call, but then
            shapes are unknown; nothing is computed.
        kwargs: as of ``model.apply``, ``mutable`` without effect; of an nnx model
            keywords of its call, and ``method``, the name of another method.

    Returns:
        By path, in the order of the calls; what was not called comes last.

    Raises:
        ValueError: if variables are missing, or given for nnx, or a layer says what no
            spec does.

    Example:
        >>> import normjax as nj
        >>> from flax import nnx
        >>> rngs = nnx.Rngs(0)
        >>> layers = nnx.Linear(3, 4, rngs=rngs), nnx.RMSNorm(4, rngs=rngs)
        >>> model = nnx.Sequential(*layers)
        >>> [(each.path, each.kind) for each in nj.surgery.norm_layers(model).values()]
        [('layers/1', 'flax.nnx.RMSNorm')]
    """
    found: dict[str, NormLayer] = {}

    def around(call: Call) -> Array:
        found.setdefault(call.path, layer_record(model, variables, call))
        return call.run()

    if isinstance(model, nn.Module) or args or kwargs:
        abstractly(observe, model, variables, args, kwargs, around)
    elif variables is not None:
        _check(model, variables)
    if isinstance(model, nnx.Module):
        for path, module in modules(model).items():
            kind = kind_of(module)
            if path not in found and kind is not None:
                spec = declared(module, path, kind)
                found[path] = NormLayer(path, kind, spec, *held(module))
    return found


def norm_inputs(
    model: Any, variables: Any = None, *args: Any, **kwargs: Any
) -> dict[str, NormInputs]:
    """What every norm layer of a Flax model gets and gives on one batch.

    The model and its variables stay as they are; stored statistics that a call in
    training mode updates are dropped. Inside ``jax.jit``, ``nn.scan``, ``nn.remat``,
    ``nnx.jit`` and the like values come out by ``jax.debug.callback``.

    Args:
        model: as for ``norm_layers``.
        variables: as for ``norm_layers``.
        args: what the model is called with.
        kwargs: as for ``norm_layers``.

    Returns:
        By path, in the order of the calls.

    Raises:
        ValueError: as ``norm_layers``, or if this is called inside a transformation, or
            the model calls no norm layer.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> rngs = nnx.Rngs(0)
        >>> layers = nnx.Linear(3, 4, rngs=rngs), nnx.RMSNorm(4, rngs=rngs)
        >>> model = nnx.Sequential(*layers)
        >>> found = nj.surgery.norm_inputs(model, None, jnp.ones((2, 3)))
        >>> found["layers/1"].calls[0].x.shape
        (2, 4)
    """
    own = nnx.state(model) if isinstance(model, nnx.Module) else variables
    leaves = jax.tree.leaves((own, args, kwargs))
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise ValueError(
            "norm_inputs got traced arrays: call it outside of jax.jit, jax.grad and "
            "jax.vmap; the model itself may use them inside"
        )

    around, recorded = recorder(model, variables)
    observe(model, variables, args, kwargs, around)
    return recorded()


def recorder(
    model: Any, variables: Any
) -> tuple[Around, Callable[[], dict[str, NormInputs]]]:
    """What to put around calls to record them, and what gives the records afterwards.

    Args:
        model: as for ``norm_layers``.
        variables: as for ``norm_layers``.

    Returns:
        An ``Around``, and a function that returns what ``norm_inputs`` does, or raises
        a ValueError if no norm layer was called.
    """
    layers: dict[str, NormLayer] = {}
    calls: dict[str, list[NormCall]] = {}

    def around(call: Call) -> Array:
        if call.path not in layers:
            layers[call.path] = layer_record(model, variables, call)
        kept = calls.setdefault(call.path, [])
        stored = call.stored
        y = call.run()
        deliver(kept.append, NormCall(call.given["x"], y, call_mask(call), stored))
        return y

    def recorded() -> dict[str, NormInputs]:
        jax.effects_barrier()
        if not layers:
            name = type(model).__name__
            raise ValueError(f"{name} called no norm layer on this batch")
        return {path: NormInputs(layers[path], tuple(calls[path])) for path in layers}

    return around, recorded


def call_mask(call: Call) -> Array | None:
    """The mask of a call as ``nj.normalize`` takes one."""
    mask = call.given.get("mask")
    if mask is None or not follows_flax(call.kind):
        return mask
    return from_right(mask, call.given["x"].shape)


def deliver(receive: Callable[[Any], None], tree: Any) -> None:
    """Hand over concrete arrays, also those of a traced computation when it runs."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        jax.debug.callback(receive, tree, ordered=True)
    else:
        jax.effects_barrier()  # what was traced before this comes first
        receive(tree)


def observe(model: Any, variables: Any, args: Any, kwargs: Any, around: Around) -> Any:
    """Call a model with ``around`` in place of its norm layers' calls.

    Raises:
        ValueError: if variables are missing, or given for nnx.
    """
    _check(model, variables)
    if isinstance(model, nnx.Module):
        kwargs = dict(kwargs)
        method = kwargs.pop("method", "__call__")
        return getattr(watched(model, around), method)(*args, **kwargs)
    changing = [name for name in variables if name != "params"]
    kwargs = kwargs | {"mutable": changing}
    with intercepted(around):
        return model.apply(variables, *args, **kwargs)


def abstractly(
    function: Any, model: Any, variables: Any, args: Any, kwargs: Any, around: Around
) -> Any:
    """``observe`` with shapes alone; arguments that are no arrays stay as they are."""
    if isinstance(variables, Mapping):  # what is missing has a shape all the same
        variables = {"batch_stats": {}, **variables}
    leaves, tree = jax.tree.flatten((variables, args, kwargs))
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]

    def call(arrays: list[Any]) -> Any:
        given = iter(arrays)
        filled = [
            next(given) if isinstance(leaf, jax.Array | np.ndarray) else leaf
            for leaf in leaves
        ]
        function(model, *jax.tree.unflatten(tree, filled), around)

    return jax.eval_shape(call, arrays)


@contextlib.contextmanager
def intercepted(around: Around, above: tuple[str, ...] = ()) -> Iterator[None]:
    """Linen's norm layers are called by way of ``around``.

    Args:
        around: gets the call.
        above: names from the root down to the model, which paths leave out.
    """
    inside: set[int] = set()

    def interceptor(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        kind = kind_of(module) if context.method_name == "__call__" else None
        if kind is None or id(module) in inside:  # a subclass calls its base
            return run(*args, **kwargs)
        path = "/".join(module.path[len(above) :])
        given = bound(kind, module, args, kwargs)
        inside.add(id(module))
        try:
            call = functools.partial(_run, run, args, kwargs)
            return around(Call(module, path, kind, given, call))
        finally:
            inside.discard(id(module))

    with nn.intercept_methods(interceptor):
        yield


def _run(run: Any, args: Any, kwargs: Any, x: Any = None) -> Array:
    """A call as it is, or with another input in the first place."""
    if x is None:
        return run(*args, **kwargs)
    return run(x, *args[1:], **kwargs) if args else run(**{**kwargs, "x": x})


def watched(model: nnx.Module, around: Around) -> Any:
    """A clone of an nnx model whose norm layers are called by way of ``around``."""
    copy = nnx.clone(model)
    for path, module in modules(copy).items():
        kind = kind_of(module)
        if kind is not None:
            object.__setattr__(module, "__class__", _watched(type(module)))
            module.around_call = nnx.static((path, kind, around))
    return copy


@functools.cache
def _watched(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        path, kind, around = self.around_call
        given = bound(kind, self, args, kwargs)
        own = functools.partial(cls.__call__, self)
        run = functools.partial(_run, own, args, kwargs)
        return around(Call(self, path, kind, given, run))

    return type(cls.__name__, (cls,), {"__call__": call, "__doc__": cls.__doc__})


def modules(model: nnx.Module) -> dict[str, Any]:
    """The modules of an nnx model by path; one in two places by the first of them."""
    return {"/".join(map(str, path)): each for path, each in nnx.iter_modules(model)}


def layer_record(model: Any, variables: Any, call: Call) -> NormLayer:
    """The layer of a call, with its arrays as the model holds them."""
    if isinstance(model, nnx.Module):
        arrays = held(modules(model)[call.path])
    else:
        arrays = tuple(
            own(variables.get(collection, {}), call.path)
            for collection in ("params", "batch_stats")
        )
    spec, shape = call.spec, call.given["x"].shape
    return NormLayer(call.path, call.kind, spec, *arrays, shape=tuple(shape))


def arrays_inside(module: Any) -> dict[str, Array]:
    """Parameters and stored statistics of a norm layer as its call sees them."""
    if isinstance(module, nnx.Module):
        params, stored = held(module)
    else:
        trees = module.variables
        params, stored = (own(trees.get(c, {}), "") for c in ("params", "batch_stats"))
    return {**params, **stored}


def own(tree: Mapping[str, Any], path: str) -> dict[str, Array]:
    """The arrays directly at a path in a tree of linen variables."""
    for name in path.split("/") if path else []:
        tree = tree.get(name, {})
    return {
        name: value
        for name, value in nn.meta.unbox(tree).items()
        if not isinstance(value, Mapping)
    }


def held(module: Any) -> tuple[dict[str, Array], dict[str, Array]]:
    """Parameters and stored statistics directly in an nnx module."""
    found: tuple[dict[str, Array], dict[str, Array]] = {}, {}
    for name, value in vars(module).items():
        if isinstance(value, nnx.Param):
            found[0][name] = value.get_value()
        elif isinstance(value, nnx.BatchStat):
            found[1][name] = value.get_value()
    return found


def _check(model: Any, variables: Any) -> None:
    name = type(model).__name__
    if isinstance(model, nnx.Module):
        if variables is not None:
            raise ValueError(
                f"variables is a {type(variables).__name__}, expected None: {name} is "
                "an nnx model, which holds its own; give the input after it"
            )
    elif not isinstance(model, nn.Module):
        raise ValueError(f"model is a {name}, expected a linen or an nnx module")
    elif not isinstance(variables, Mapping):
        raise ValueError(
            f"variables is a {type(variables).__name__}, expected those of the linen "
            f"model {name}: {name}.init(...) gives them"
        )
