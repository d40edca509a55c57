"""Which parameters of a model are those of norm layers, by role and not by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from normjax.layers.watch import norm_layers


@dataclass(frozen=True)
class NormParameters:
    """The parameters of a model's norm layers, among all of them.

    Attributes:
        mask: as the parameters, True for those of a norm.
        others: as the parameters, True for all others: what weight decay is for.
        arrays: how many arrays are a norm's.
        numbers: how many numbers these have.
        other_arrays: how many arrays are not.
        other_numbers: how many numbers these have.
    """

    mask: Any
    others: Any
    arrays: int
    numbers: int
    other_arrays: int
    other_numbers: int


def norm_parameters(
    model: Any, variables: Any = None, *args: Any, **kwargs: Any
) -> NormParameters:
    """Scale and bias of every norm layer, whatever its name, as a mask for optax.

    A parameter counts if a norm layer that the model calls holds it: a Dense called
    ``scale`` does not, nor do the Dense layers that give a ``ModulatedNorm`` its scale.

    Args:
        model: as for ``norm_layers``.
        variables: of a linen model, the parameters in ``params``; None for nnx.
        args: what the model is called with, for linen; nothing is computed.
        kwargs: as for ``norm_layers``.

    Returns:
        Masks and counts. Masks have the structure of ``variables["params"]``, or of
        ``nnx.state(model, nnx.Param)``, with one value for each variable or box.

    Raises:
        ValueError: as ``norm_layers``, or if the model has no norm with parameters.

    Example:
        >>> import normjax as nj, optax
        >>> from flax import nnx
        >>> rngs = nnx.Rngs(0)
        >>> layers = nnx.Linear(3, 4, rngs=rngs), nnx.LayerNorm(4, rngs=rngs)
        >>> found = nj.surgery.norm_parameters(nnx.Sequential(*layers))
        >>> found.arrays, found.numbers, found.other_arrays, found.other_numbers
        (2, 8, 2, 16)
        >>> decay = optax.add_decayed_weights(1e-2, mask=found.others)
    """
    layers = norm_layers(model, variables, *args, **kwargs)
    held = {(path, name) for path, each in layers.items() for name in each.params}
    if not held:
        raise ValueError(
            f"no norm layer of {type(model).__name__} has parameters; it has "
            f"{', '.join(map(repr, layers)) or 'no norm layers'}"
        )
    own = isinstance(model, nnx.Module)
    tree: Any = nnx.state(model, nnx.Param) if own else variables["params"]

    def of_a_norm(path: tuple[Any, ...], _: Any) -> bool:
        keys = [str(entry.key) for entry in path]
        return ("/".join(keys[:-1]), keys[-1]) in held

    def whole(node: Any) -> bool:
        return isinstance(node, nnx.Variable | nn.meta.AxisMetadata)

    mask = jax.tree.map_with_path(of_a_norm, tree, is_leaf=whole)
    parts = jax.tree.leaves(tree, is_leaf=whole)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(part)) for part in parts]
    pairs = list(zip(jax.tree.leaves(mask), sizes, strict=True))
    return NormParameters(
        mask,
        jax.tree.map(lambda norm: not norm, mask),
        arrays=sum(norm for norm, _ in pairs),
        numbers=sum(size for norm, size in pairs if norm),
        other_arrays=sum(not norm for norm, _ in pairs),
        other_numbers=sum(size for norm, size in pairs if not norm),
    )
