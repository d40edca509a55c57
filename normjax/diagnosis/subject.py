"""A model, a batch and the two ways to call it; every run starts from the same state.

The model and its variables stay as they are: linen models are applied, and of an nnx
model a clone is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from normjax.layers.found import LAYER_SWITCHES, Call, NormInputs, stores
from normjax.layers.snapshots import Snapshot, snapshot
from normjax.layers.watch import (
    intercepted,
    modules,
    recorder,
    watched,
)
from normjax.mixture import Mixture
from normjax.spec import NormSpec

# What models call their switch, and what it says in training.
SWITCHES = LAYER_SWITCHES | {"is_train": True, "is_eval": False, "eval": False}


@dataclass(frozen=True)
class Run:
    """One call of the model.

    Attributes:
        output: what it returned.
        layers: what every norm layer got and gave, in the order of the calls.
        modules: the first module that was called for each of them.
        stored: statistics after the call, {} if there are none.
    """

    output: Any
    layers: dict[str, NormInputs]
    modules: dict[str, Any]
    stored: Snapshot


@dataclass(frozen=True)
class BoundModel:
    """What is diagnosed.

    Attributes:
        model: a linen or an nnx module.
        variables: of a linen model, else None.
        args: positional arguments of the call.
        named: named ones.
        names: of all arguments, positional ones first.
        train: arguments that ask for training.
        evaluate: arguments that ask for evaluation.
    """

    model: Any
    variables: Any
    args: tuple[Any, ...]
    named: dict[str, Any]
    names: tuple[str, ...]
    train: dict[str, Any]
    evaluate: dict[str, Any]

    @property
    def x(self) -> Array:
        """The first argument that is an array with examples."""
        given = [*self.args, *self.named.values()]
        return next(each for each in given if getattr(each, "ndim", 0) > 0)

    @property
    def examples(self) -> int:
        """How many examples the batch has: the size of the leading axis."""
        return self.x.shape[0]

    def mapped(self, change: Callable[[Any], Any]) -> BoundModel:
        """The same with other arrays in the batch."""
        args, named = jax.tree.map(change, (self.args, self.named))
        return replace(self, args=args, named=named)

    def cast(self, dtype: Any) -> BoundModel:
        """The same with parameters and batch in another dtype; statistics keep theirs.

        Those of an nnx model become float64 with it. A layer that was given a dtype of
        its own keeps computing in that one.
        """

        def change(leaf: Any) -> Any:
            floats = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
            return jnp.asarray(leaf).astype(dtype) if floats else leaf

        moved = self.mapped(change)
        if isinstance(self.model, nnx.Module):
            # Flax writes statistics in their own dtype, and cannot narrow float64.
            wide = jnp.dtype(dtype) == jnp.float64
            taken = (nnx.Param, nnx.BatchStat) if wide else nnx.Param
            graph, params, other = nnx.split(self.model, taken, ...)
            params = jax.tree.map(change, params)
            return replace(moved, model=nnx.merge(graph, params, nnx.clone(other)))
        params = jax.tree.map(change, self.variables.get("params", {}))
        return replace(moved, variables={**self.variables, "params": params})

    def run(self, mode: str, *, dropout: bool = False) -> Run:
        """Call the model in a mode.

        Args:
            mode: ``"train"`` or ``"evaluate"``.
            dropout: whether dropout layers drop; off, nothing is random.

        Returns:
            What happened.
        """
        record, recorded = recorder(self.model, self.variables)
        found: dict[str, Any] = {}

        def around(call: Call) -> Array:
            found.setdefault(call.path, call.layer)
            return record(call)

        output, stored = self.call(mode, around, dropout=dropout)
        return Run(output, recorded(), found, stored)

    def call(
        self,
        mode: str,
        around: Callable[[Call], Array],
        *,
        dropout: bool = False,
    ) -> tuple[Any, Snapshot]:
        """Call the model with something around its norm layers.

        Args:
            mode: as for ``run``.
            around: as for ``normjax.layers.watch``.
            dropout: as for ``run``.

        Returns:
            The output, and the statistics after the call.
        """
        flags = self.train if mode == "train" else self.evaluate
        named = {**self.named, **flags}
        if isinstance(self.model, nnx.Module):
            copy = nnx.clone(self.model)
            getattr(copy, "train" if mode == "train" else "eval")()
            if not dropout:
                _without_dropout(copy)
            copy = watched(copy, around)
            return copy(*self.args, **named), stored_in(copy)
        model = self.model
        fields = {
            name: (value if mode == "train" else not value)
            for name, value in SWITCHES.items()
            if name in getattr(model, "__dataclass_fields__", {}) and name not in named
        }
        model = model.clone(**fields) if fields else model
        changing = [name for name in self.variables if name != "params"]
        key = jax.random.key(0)
        rngs = {"dropout": key, "params": key}
        with _dropout(dropout), intercepted(around):
            output, changed = model.apply(
                self.variables, *self.args, **named, mutable=changing, rngs=rngs
            )
        return output, stored_in({**self.variables, **changed})


def specs(inputs: NormInputs) -> tuple[NormSpec, ...]:
    """The spec of a layer, or those of a mixture's members."""
    spec = inputs.layer.spec
    return spec.specs if isinstance(spec, Mixture) else (spec,)


def stateful(run: Run) -> dict[str, NormInputs]:
    """The layers of one spec that store statistics, one set for each, not stacked."""
    return {
        path: each
        for path, each in run.layers.items()
        if isinstance(each.layer.spec, NormSpec)
        and stores(each.layer.spec)
        and {"mean", "var"} <= set(each.layer.stored)
    }


def stored_in(model_or_variables: Any) -> Snapshot:
    """``nj.surgery.snapshot``, and {} where there is nothing."""
    if isinstance(model_or_variables, Mapping):
        there = bool(jax.tree.leaves(model_or_variables.get("batch_stats", {})))
    else:
        there = bool(jax.tree.leaves(nnx.state(model_or_variables, nnx.BatchStat)))
    return snapshot(model_or_variables) if there else {}


@contextlib.contextmanager
def _dropout(on: bool) -> Iterator[None]:
    """Linen's dropout as it is, or off."""

    def interceptor(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__":
            return run(*args, **kwargs)
        if isinstance(module, nn.Dropout):
            return run(*args, **kwargs) if on else args[0]
        if isinstance(module, nn.MultiHeadDotProductAttention) and not on:
            kwargs = {**kwargs, "deterministic": True}
        return run(*args, **kwargs)

    with nn.intercept_methods(interceptor):
        yield


def _without_dropout(model: nnx.Module) -> None:
    for module in modules(model).values():
        if isinstance(module, nnx.Dropout):
            module.rate = 0.0
        elif isinstance(module, nnx.MultiHeadAttention):
            module.dropout_rate = 0.0
