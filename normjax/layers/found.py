"""Which modules are norm layers, what they declare, and how they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
from jax import Array

import normjax.linen
import normjax.nnx
from normjax.flax_rules import flax_spec
from normjax.interop.flax import LAYERS
from normjax.mixture import Mixture
from normjax.spec import NormSpec, Precision

_DROP_IN = ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")
# What holds its own spec comes first, and ours before Flax's, which it derives from.
KINDS: dict[str, type] = {
    f"{library}.{kind}": getattr(module, kind)
    for library, module, kinds in (
        ("normjax.linen", normjax.linen, ("Norm", "ModulatedNorm", "MixtureNorm")),
        ("normjax.nnx", normjax.nnx, ("Norm", "ModulatedNorm", "MixtureNorm")),
        ("normjax.linen", normjax.linen, _DROP_IN),
        ("normjax.nnx", normjax.nnx, _DROP_IN),
        ("flax.linen", flax.linen, _DROP_IN),
        ("flax.nnx", flax.nnx, _DROP_IN),
    )
    for kind in kinds
}

# What layers of any library call the argument that switches between training and
# inference, and what it says in training.
LAYER_SWITCHES = {
    "use_running_average": False,
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "inference": False,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormLayer:
    """One norm layer of a model.

    Attributes:
        path: names from the model down to the layer, joined by ``/``; ``""`` where the
            model is the layer.
        kind: library and class, for instance ``"flax.nnx.BatchNorm"``.
        spec: what it computes; of a ``MixtureNorm`` its ``Mixture``.
        params: its own parameters by name; of a ``ModulatedNorm`` none, since there
            Dense layers give scale and bias.
        stored: its stored statistics by name: ``mean``, ``var``, and ours ``count``.
        shape: of its input in the first call; None where it was not called.
    """

    path: str = field(metadata={"static": True})
    kind: str = field(metadata={"static": True})
    spec: Any = field(metadata={"static": True})
    params: dict[str, Array]
    stored: dict[str, Array]
    shape: tuple[int, ...] | None = field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormCall:
    """What one call of a norm layer got and gave.

    Attributes:
        x: the input.
        y: the output.
        mask: of full rank, as ``nj.normalize`` takes it, or None.
        stored: whether it normalized with stored statistics (inference).
    """

    x: Array
    y: Array
    mask: Array | None
    stored: bool = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormInputs:
    """A norm layer and its calls on one batch.

    Attributes:
        layer: what it is.
        calls: in order; a layer that is used twice has two, and one inside
            ``nn.scan``, ``nn.vmap`` and the like one for each step or lane, whose
            arrays are those of that step or lane.
    """

    layer: NormLayer
    calls: tuple[NormCall, ...]


@dataclass(frozen=True)
class Replacement:
    """What a norm layer computes in place of what it declares.

    Attributes:
        spec: the layer.
        statistics: ``"freeze"``: the stored ones, in training too, and no update;
            ``"batch"``: the batch's own, in inference too, and no update; None: as the
            model asks.
    """

    spec: NormSpec
    statistics: str | None = None


@dataclass(frozen=True)
class Call:
    """A norm layer that is about to be called.

    Attributes:
        layer: the module, bound to its variables.
        path: as in ``NormLayer``.
        kind: as in ``NormLayer``.
        given: arguments of the call by name; the input is ``x``.
        run: makes the call as it is, or with the input that it is given.
    """

    layer: Any
    path: str
    kind: str
    given: dict[str, Any]
    run: Callable[..., Array]

    @property
    def spec(self) -> Any:
        """The layer's spec for an input of this rank."""
        return declared(self.layer, self.path, self.kind, self.given["x"].ndim)

    @property
    def stored(self) -> bool:
        """Whether it normalizes with stored statistics."""
        if not stores(self.spec):
            return False
        how = replacement_of(self.layer)
        fixed = None if how is None else how.statistics
        return (
            bool(asked(self.layer, self.given)) if fixed is None else fixed == "freeze"
        )


def kind_of(module: Any) -> str | None:
    """The kind of a norm layer, None of any other module; subclasses count as theirs.

    Example:
        >>> import flax.linen as nn
        >>> kind_of(nn.LayerNorm()), kind_of(nn.Dense(3, name="scale"))
        ('flax.linen.LayerNorm', None)
    """
    replaced = getattr(module, "replaced_kind", None)  # of nnx
    if replaced is not None:
        return replaced
    return next((kind for kind, cls in KINDS.items() if isinstance(module, cls)), None)


def follows_flax(kind: str) -> bool:
    """Whether dtypes, masks and axes are Flax's: its own layers and our drop-ins."""
    return kind.rpartition(".")[2] in _DROP_IN


def bound(kind: str, module: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments of a call by the names that the kind's own signature gives them."""
    taken = inspect.signature(KINDS[kind].__call__).bind(module, *args, **kwargs)
    return {name: value for name, value in taken.arguments.items() if name != "self"}


def declared(module: Any, path: str, kind: str, ndim: int | None = None) -> Any:
    """The spec of a norm layer.

    Args:
        module: the layer.
        path: for messages.
        kind: of the layer.
        ndim: of its input. None: unknown; then axes that are counted from both ends
            cannot be told apart.

    Returns:
        Its own spec or mixture. Of Flax's layers the one of ``nj.interop.convention``,
        with Flax's variance algorithm; of our drop-ins with the right one.

    Raises:
        ValueError: if the layer says what no spec does.

    Example:
        >>> import flax.linen as nn
        >>> spec = declared(nn.RMSNorm(), "norm", "flax.linen.RMSNorm", 2)
        >>> spec.pattern, spec.divide, spec.epsilon
        ('... [c]', 'rms', 1e-06)
    """
    how = replacement_of(module)
    if how is not None:
        return how.spec
    if hasattr(module, "spec"):
        return module.spec
    if hasattr(module, "mixture"):
        return module.mixture
    library, _, name = kind.rpartition(".")
    convention = LAYERS[f"flax.linen.{name}"]
    # Of nnx, num_groups says it all.
    changes = {"group_size": None} if kind.endswith("nnx.GroupNorm") else {}
    values = {each: getattr(module, each, None) for each in convention.arguments}
    try:
        if ndim is None:
            spec = convention.build(**{**values, **changes})
        else:
            spec = flax_spec(name, module, ndim, **changes)
    except ValueError as problem:
        hint = "" if ndim else "; an example input of the model may settle it"
        raise ValueError(f"{path or kind}: {problem}{hint}") from None
    precision = Precision()
    if library.startswith("flax") and name != "RMSNorm":
        fast = values["use_fast_variance"]
        precision = Precision(algorithm="one_pass" if fast else "two_pass")
    if values["dtype"] is not None:
        precision = precision.replace(output=jnp.dtype(values["dtype"]).name)
    return spec.replace(precision=precision, example=_example(spec))


def _example(spec: NormSpec) -> str | None:
    """No axis of the examples, where it would be one of the stored statistics."""
    first = spec.parsed.example("auto")
    kept = first is not None and not any(part.reduced for part in first.parts)
    return None if kept and spec.running is not None else "auto"


@dataclass(frozen=True)
class Replacing:
    """A linen model that runs with replaced norms.

    Attributes:
        above: how many names stand above it.
        replacements: by path.
        use_running_average: where neither the call nor the layer says it.
    """

    above: int
    replacements: Mapping[str, Replacement]
    use_running_average: bool | None


replacing: list[Replacing] = []


def replacement_of(module: Any) -> Replacement | None:
    """What a norm layer computes instead, where it was replaced."""
    if not isinstance(module, flax.linen.Module):
        return getattr(module, "replacement", None)
    for each in replacing:  # the outermost was made last
        found = each.replacements.get("/".join(module.path[each.above :]))
        if found is not None:
            return found
    return None


def stores(spec: NormSpec | Mixture) -> bool:
    """Whether a layer has stored statistics."""
    specs = spec.specs if isinstance(spec, Mixture) else (spec,)
    return any(each.running is not None for each in specs)


def asked(module: Any, given: Mapping[str, Any]) -> bool | None:
    """Whether the call, or else the layer, asks for stored statistics."""
    said = given.get("use_running_average")
    if said is None:
        said = getattr(module, "use_running_average", None)
    if said is None and isinstance(module, flax.linen.Module):
        models = (each.use_running_average for each in replacing)
        said = next((each for each in models if each is not None), None)
    return said
