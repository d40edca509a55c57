"""Norm layers that compute another spec than the one they were made with."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import canonicalize_dtype
from jax import Array

from normjax import functional, running
from normjax.flax_rules import flax_forward
from normjax.layers.found import (
    Call,
    Replacement,
    Replacing,
    asked,
    bound,
    follows_flax,
    kind_of,
    replacing,
)
from normjax.layers.watch import intercepted, modules
from normjax.linen.stored import overwrite, variables
from normjax.spec import NormSpec
from normjax.stateful import forward, parameter_shape

Shape = tuple[int, ...]


class ReplacedNorms(nn.Module):
    """A linen model in which some norm layers compute something else.

    It has the model's variables, and is called as the model is. ``replace_norms`` makes
    one.

    Attributes:
        model: as it was.
        replacements: paths of norm layers, and what they compute.
        method: of the model, which a call calls.
        use_running_average: for layers that store statistics and that the model does
            not tell the mode.
    """

    model: nn.Module
    replacements: tuple[tuple[str, Replacement], ...]
    method: str = "__call__"
    use_running_average: bool | None = None

    def setup(self):
        """Take the model's place."""
        nn.share_scope(self, self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; arguments and result are its own."""
        above, replacements = self.path, dict(self.replacements)

        def around(call: Call) -> Array:
            how = replacements.get(call.path)
            return call.run() if how is None else self._normalized(call, how)

        default = self.use_running_average
        replacing.append(Replacing(len(above), replacements, default))
        try:
            with intercepted(around, above):
                return getattr(self.model, self.method)(*args, **kwargs)
        finally:
            replacing.pop()

    def _normalized(self, call: Call, how: Replacement) -> Array:
        module, spec, shape = call.layer, how.spec, call.given["x"].shape
        fresh = functional.init(spec, shape, module.param_dtype)
        missing = [name for name in fresh if not module.has_variable("params", name)]
        if missing and not module.is_initializing():
            raise ValueError(
                f"{call.path} has no {', '.join(missing)} in 'params', which its new "
                "spec needs: init of the new model makes them"
            )
        shifted = spec.affine is not None and spec.affine.stored == "1+w"
        params = {}
        for name, value in fresh.items():
            start = None if shifted else getattr(module, f"{name}_init", None)
            made = (lambda _, value=value: value) if start is None else start
            more = () if start is None else (value.shape, value.dtype)
            params[name] = module.param(name, made, *more)
        state, kept = None, {}
        if spec.running is not None:
            state = running.init(spec, shape)
            values = (state.mean, state.variance, state.count)
            names = stored_names(spec, call.kind)
            kept = variables(module, dict(zip(names, values, strict=False)))
            arrays = [variable.value for variable in kept.values()]
            state = running.State(*arrays, *values[len(arrays) :])
        alone = module.is_initializing()
        y, new = normalized(call, how, params, state, alone=alone)
        if new is not None:
            arrays = [new.mean, new.variance, new.count][: len(kept)]
            overwrite(module, kept, jax.lax.stop_gradient(arrays))
        return y


class ReplacedNorm(nnx.Module):
    """An nnx norm layer in place of another one, with its variables and its call.

    Args:
        layer: what was there.
        kind: of it.
        how: what to compute.
        fresh: variables that it does not have.
    """

    def __init__(
        self, layer: Any, kind: str, how: Replacement, fresh: Mapping[str, Array]
    ):
        """Take over the variables that the new spec has."""
        self.replacement = nnx.static(how)
        self.replaced_kind = kind
        self.use_running_average = getattr(layer, "use_running_average", False)
        spec = how.spec
        for name in ("scale", "bias"):
            kept: Any = nnx.data(None)
            if getattr(spec.affine, name, False):
                kept = nnx.Param(fresh[name]) if name in fresh else getattr(layer, name)
            setattr(self, name, kept)
        names = () if spec.running is None else stored_names(spec, kind)
        for name in names:
            made = nnx.BatchStat(fresh[name]) if name in fresh else getattr(layer, name)
            setattr(self, name, made)

    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        """Normalize; arguments are those of the layer that was there."""
        kind, how = self.replaced_kind, self.replacement
        given = bound(kind, self, args, kwargs)
        params = {
            name: getattr(self, name).get_value()
            for name in ("scale", "bias")
            if getattr(self, name) is not None
        }
        state, kept = None, []
        if how.spec.running is not None:
            kept = [getattr(self, name) for name in stored_names(how.spec, kind)]
            arrays = [variable.get_value() for variable in kept]
            count = jnp.zeros(arrays[0].shape, jnp.int32)
            state = running.State(*arrays, *[count][len(arrays) - 2 :])
        call = Call(self, "", kind, given, lambda: given["x"])
        y, new = normalized(call, how, params, state)
        if new is not None:
            new = jax.lax.stop_gradient(new)
            for variable, value in zip(kept, jax.tree.leaves(new), strict=False):
                variable.set_value(value)
        return y


def rebuilt(
    model: nnx.Module, new: Mapping[str, tuple[Replacement, Shape | None]]
) -> nnx.Module:
    """A clone of an nnx model with layers replaced by path.

    Args:
        model: stays as it is.
        new: what to compute, and the shape of an input if variables are to be made.

    Returns:
        The clone.
    """
    copy = nnx.clone(model)
    for path, module in modules(copy).items():
        kind = kind_of(module)
        if kind is None or path not in new:
            continue
        how, shape = new[path]
        fresh: dict[str, Array] = {}
        if shape is not None:
            dtype = getattr(module, "param_dtype", jnp.float32)
            fresh = _fresh(how.spec, shape, dtype)
        missing = [name for name in fresh if getattr(module, name, None) is None]
        made = ReplacedNorm(module, kind, how, {name: fresh[name] for name in missing})
        # In place: what else holds this layer holds the new one.
        object.__setattr__(module, "__class__", ReplacedNorm)
        vars(module).clear()
        vars(module).update(vars(made))
    return copy


def normalized(
    call: Call,
    how: Replacement,
    params: dict[str, Array],
    state: running.State | None,
    *,
    alone: bool = False,
) -> tuple[Array, running.State | None]:
    """One call of a layer with another spec, by the rules of the layer that was there.

    Args:
        call: the call.
        how: what to compute.
        params: of the new spec.
        state: of its stored statistics, if it has any.
        alone: outside of the transformation that names the spec's axes.

    Returns:
        y, and the new state, None where it stays as it is.

    Raises:
        ValueError: if nobody says the mode.
    """
    spec, given, said = how.spec, call.given, asked(call.layer, call.given)
    if given.get("epsilon") is not None:
        spec = spec.replace(epsilon=given["epsilon"])
    if spec.running is not None and how.statistics is None and said is None:
        raise ValueError(
            f"{call.path or call.kind} stores statistics and nobody says whether to "
            "use them: use_running_average of the new model does, or let the rule give "
            "a pair (spec, 'freeze') or (spec, 'batch')"
        )
    stored = spec.running is not None and bool(said)
    if how.statistics is not None:
        stored = how.statistics == "freeze"
    if alone or stored:
        spec = spec.replace(axis_names=())
    x, mask = given["x"], given.get("mask")
    update = False if how.statistics is not None else given.get("update")
    if not follows_flax(call.kind):
        reference = given.get("reference")
        return forward(
            spec, x, params, state,
            mask=mask, stored=stored, update=update, reference=reference,
        )  # fmt: skip
    shape = parameter_shape(spec, x.shape)
    params = {
        name: value.reshape(shape) if value.size == prod(shape) else value
        for name, value in params.items()
    }
    asked_for = spec.precision.output
    dtype = None if asked_for == "input" else asked_for
    output = canonicalize_dtype(x, *params.values(), dtype=dtype)
    y, new = flax_forward(spec, x, params, output, state, mask=mask, stored=stored)
    return y, None if how.statistics is not None else new


def stored_names(spec: NormSpec, kind: str) -> tuple[str, ...]:
    """Names of stored statistics; a Flax layer has a count only where it matters."""
    run: Any = spec.running
    counted = run.debias or run.average == "cumulative" or not follows_flax(kind)
    return ("mean", "var", "count") if counted else ("mean", "var")


def _fresh(spec: NormSpec, shape: Shape, dtype: Any) -> dict[str, Array]:
    fresh = functional.init(spec, shape, dtype)
    if spec.running is not None:
        state = running.init(spec, shape)
        fresh |= {"mean": state.mean, "var": state.variance, "count": state.count}
    return fresh
