"""Norm layers of a model in place of others; the model's code and arrays stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import flax.linen as nn
from flax import nnx
from jax import Array

from normjax import running
from normjax.layers.found import (
    Call,
    NormLayer,
    Replacement,
    declared,
    kind_of,
    stores,
)
from normjax.layers.replaced import ReplacedNorms, rebuilt, stored_names
from normjax.layers.watch import (
    abstractly,
    arrays_inside,
    held,
    layer_record,
    modules,
    observe,
)
from normjax.records import check_choice
from normjax.spec import NormSpec
from normjax.stateful import parameter_shape
from normjax.traits import Difference, diff

Rule = Callable[[str, Any], Any]
_WORDS = ("freeze", "batch")


@dataclass(frozen=True)
class NormChange:
    """One norm layer that was replaced.

    Attributes:
        path: as in ``NormLayer``.
        kind: of the layer that was there.
        before: its spec.
        after: the new spec.
        statistics: ``"freeze"``, ``"batch"`` or None, as in ``replace_norms``.
        differences: ``nj.diff(before, after)``.
        added: variables that the layer did not have. An nnx model has them now, at the
            identity; of a linen model ``init`` of the new model makes them.
    """

    path: str
    kind: str
    before: NormSpec
    after: NormSpec
    statistics: str | None
    differences: tuple[Difference, ...]
    added: tuple[str, ...]


def replace_norms(
    model: Any, rule: Rule, variables: Any = None, *args: Any, **kwargs: Any
) -> tuple[Any, tuple[NormChange, ...]]:
    """A model in which norm layers compute something else; the given one stays.

    Paths, parameters and stored statistics stay as they are. Layers of Flax and our
    drop-ins keep Flax's rules: ``precision.output="input"`` is the dtype that Flax
    would give, and masks broadcast from the right.

    Args:
        model: a linen or an nnx module.
        rule: (path, spec) ↦ None: leave the layer; a spec: compute that; ``"freeze"``:
            normalize with the stored statistics, in training too, and never update them
            (scale and bias still train); ``"batch"``: normalize with the batch's own
            statistics, in inference too, and never update; or a pair (spec, word).
        variables: of a linen model; None for nnx.
        args: what the model is called with: nothing is computed. For nnx they may be
            left out if no layer needs a new variable; shapes are checked with them.
        kwargs: as for ``norm_layers``.

    Returns:
        The new model and what changed. Of linen it wraps the given one, under the same
        variables; where a layer now stores statistics and the model does not tell it
        the mode, say ``new.clone(use_running_average=True)`` or False. Of nnx it is a
        clone; layers shared in two places stay shared.

    Raises:
        ValueError: if the rule leaves all layers or gives something else, a parameter
            or statistic does not have the shape that the new spec needs, or a layer
            without stored statistics is to be frozen.

    Example:
        >>> import normjax as nj
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.LayerNorm(4, rngs=nnx.Rngs(0)))
        >>> new, changes = nj.surgery.replace_norms(
        ...     model, lambda path, spec: spec.replace(epsilon=1e-3)
        ... )
        >>> [(c.path, [(d.name, d.second) for d in c.differences]) for c in changes]
        [('layers/0', [('epsilon', 0.001)])]
    """
    found: dict[
        str, tuple[Replacement | None, NormChange | None, tuple[int, ...] | None]
    ]
    found = {}

    def around(call: Call) -> Array:
        if call.path not in found:
            layer, inner = (
                layer_record(model, variables, call),
                arrays_inside(call.layer),
            )
            found[call.path] = (*decided(rule, layer, inner), layer.shape)
        return call.run()

    if isinstance(model, nn.Module) or args or kwargs:
        abstractly(observe, model, variables, args, kwargs, around)
    if isinstance(model, nnx.Module):
        for path, module in modules(model).items():
            kind = kind_of(module)
            if kind is not None and path not in found:
                layer = NormLayer(
                    path, kind, declared(module, path, kind), *held(module)
                )
                found[path] = (*decided(rule, layer, None), None)
    changes = tuple(change for _, change, _ in found.values() if change is not None)
    if not changes:
        paths = ", ".join(map(repr, found)) or "none"
        raise ValueError(
            f"rule replaces no norm layer of {type(model).__name__}; there are {paths}"
        )
    new = {path: (how, shape) for path, (how, _, shape) in found.items() if how}
    if isinstance(model, nnx.Module):
        return rebuilt(model, new), changes
    here = {path: how for path, (how, _) in new.items()}
    if isinstance(model, ReplacedNorms):
        merged = {**dict(model.replacements), **here}
        return model.clone(replacements=tuple(merged.items())), changes
    method = kwargs.get("method") or "__call__"
    return ReplacedNorms(model, tuple(here.items()), method), changes


def freeze(
    model: Any, variables: Any = None, *args: Any, **kwargs: Any
) -> tuple[Any, tuple[NormChange, ...]]:
    """A model whose norms use their stored statistics, in training too.

    It is ``replace_norms`` with ``"freeze"`` for every norm that stores any: these are
    read and never updated, whatever mode is asked for. Scale and bias still train: to
    hold them too, leave ``norm_parameters`` out of the optimizer.

    Args:
        model: as for ``replace_norms``.
        variables: as there.
        args: as there.
        kwargs: as there.

    Returns:
        As ``replace_norms``.

    Raises:
        ValueError: if no norm of the model stores statistics.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> frozen, _ = nj.surgery.freeze(nnx.BatchNorm(1, rngs=nnx.Rngs(0)))
        >>> frozen.train()
        >>> y = frozen(jnp.array([[1.0], [3.0]]))
        >>> y.ravel().round(4).tolist(), frozen.mean.get_value().tolist()
        ([1.0, 3.0], [0.0])
    """
    return replace_norms(
        model,
        lambda _, spec: "freeze" if stores(spec) else None,
        variables,
        *args,
        **kwargs,
    )


def decided(
    rule: Rule, layer: NormLayer, inner: Mapping[str, Array] | None
) -> tuple[Replacement | None, NormChange | None]:
    """What the rule says of a layer, checked.

    Args:
        rule: as for ``replace_norms``.
        layer: as the model holds it.
        inner: its variables as a call sees them, for their shapes; None: unknown.

    Returns:
        The replacement and the record of it, or None twice.

    Raises:
        ValueError: as ``replace_norms``.
    """
    answer = rule(layer.path, layer.spec)
    if answer is None:
        return None, None
    spec, word = (
        answer
        if isinstance(answer, tuple) and len(answer) == 2
        else ((layer.spec, answer) if isinstance(answer, str) else (answer, None))
    )
    where = layer.path or layer.kind
    if not isinstance(layer.spec, NormSpec) or layer.kind.endswith("ModulatedNorm"):
        raise ValueError(
            f"{where} is a {layer.kind}, which cannot be replaced: let the rule leave "
            "it, and change it where the model makes it"
        )
    if not isinstance(spec, NormSpec):
        raise ValueError(
            f"rule gave {answer!r} for {where}, expected None, a NormSpec, 'freeze', "
            "'batch', or a pair of a NormSpec and a word"
        )
    if word is not None:
        check_choice(f"what rule says of {where}", word, _WORDS)
        if spec.running is None:
            raise ValueError(
                f"rule says {word!r} of {where}, whose spec stores no statistics: give "
                "a spec with running=Running(...), or leave it"
            )
    before = layer.spec
    both = before.running is not None and spec.running is not None
    if both and before.divide != spec.divide:
        raise ValueError(
            f"{where} stores what divide={before.divide!r} needs, and the new spec has "
            f"divide={spec.divide!r}: keep it, or give running=None"
        )
    added = _added(spec, layer, inner, where)
    change = NormChange(
        layer.path, layer.kind, before, spec, word, diff(before, spec), added
    )
    return Replacement(spec, word), change


def _added(
    spec: NormSpec, layer: NormLayer, inner: Mapping[str, Array] | None, where: str
) -> tuple[str, ...]:
    """Names of the variables that the layer does not have; shapes are checked."""
    there = {**layer.params, **layer.stored}
    shapes = _needed(spec, layer.kind, layer.shape)
    added = tuple(name for name in shapes if name not in there)
    if inner is None or layer.shape is None:
        if added:
            raise ValueError(
                f"{where} has no {', '.join(added)}, which the new spec needs: give "
                "replace_norms an input of the model, for its shape"
            )
        return added
    for name in (name for name in shapes if name not in added):
        shape = inner[name].shape
        flat = ".nnx." in layer.kind  # keeps them so, whatever their axes
        if shape != shapes[name] and not (flat and prod(shape) == prod(shapes[name])):
            raise ValueError(
                f"{where} has {name} of shape {shape}, and the new spec needs "
                f"{shapes[name]} on an input of shape {layer.shape}: name the same "
                "axes, or leave the layer"
            )
    if added and any(there[name].shape != inner[name].shape for name in there):
        raise ValueError(
            f"{where} runs inside nn.scan, nn.vmap or the like and has no "
            f"{', '.join(added)}, which the new spec needs: make it there"
        )
    return added


def _needed(
    spec: NormSpec, kind: str, shape: tuple[int, ...] | None
) -> dict[str, tuple[int, ...]]:
    """Variables of a spec in place of a kind of layer, with () for unknown shapes."""
    names = [name for name in ("scale", "bias") if getattr(spec.affine, name, False)]
    learned = () if shape is None else parameter_shape(spec, shape)
    needed = dict.fromkeys(names, learned)
    if spec.running is not None:
        kept = () if shape is None else running.init(spec, shape).mean.shape
        needed |= dict.fromkeys(stored_names(spec, kind), kept)
    return needed
