"""What is mixed: a ``Mixture`` of specs that share one division."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import jax

from normjax.pattern import dimensions
from normjax.presets import batch_norm, instance_norm, layer_norm
from normjax.records import Record
from normjax.spec import Affine, NormSpec, check_numbers

LOGITS = ("mean_logits", "variance_logits")
# What the one division after mixing needs from all members alike.
ALIKE = (
    "center", "divide", "epsilon", "epsilon_placement", "masked_output", "precision"
)  # fmt: skip
# What it cannot do, by the value that it can.
_PLAIN = {"statistics": "input", "detach": (), "precision.rescale": False}


@jax.tree_util.register_static
@dataclass(frozen=True, repr=False)
class Mixture(Record):
    """Members whose means and variances are mixed, and one affine part for all.

    Attributes:
        specs: the members, with plain numbers. They may differ in pattern, sizes, ddof,
            example, single, axis_names and running. Their affine parts are left out.
        affine: the learned part; its axes are whole dimensions in a member's pattern.

    Raises:
        ValueError: if the members differ in anything else.

    Example:
        >>> import normjax as nj
        >>> Mixture((nj.instance_norm(), nj.layer_norm()), affine="c")
        Mixture((NormSpec('b [...] c'), NormSpec('... [c]')), affine='c')
    """

    specs: tuple[NormSpec, ...]
    affine: Any = None

    def __post_init__(self):
        """Bring the members to the form that is used, and validate."""
        if isinstance(self.affine, str):
            object.__setattr__(self, "affine", Affine(self.affine))
        if not isinstance(self.affine, Affine | None):
            raise ValueError(f"affine is {self.affine!r}, expected axes such as 'c'")
        if not isinstance(self.specs, Sequence) or not self.specs:
            raise ValueError(
                f"specs is {self.specs!r}, expected one spec or more: "
                "(instance_norm(), layer_norm())"
            )
        for spec in self.specs:
            check_numbers(spec)
        bare = tuple(spec.replace(affine=None) for spec in self.specs)
        object.__setattr__(self, "specs", bare)
        for index, spec in enumerate(bare):
            _check_member(bare[0], spec, index)
        if self.affine is not None:
            owner(self)


def switchable_norm(*, channels: str = "last", **fields: Any) -> Mixture:
    """Instance, layer and batch norm in one: switchable normalization (Luo 2018).

    Args:
        channels: ``"last"`` or ``"first"``.
        fields: fields of every member, for instance ``epsilon=1e-3``.

    Example:
        >>> [spec.pattern for spec in switchable_norm().specs]
        ['b [...] c', 'b [... c]', '[...] c']
    """
    instance = instance_norm(channels=channels, **fields)
    layer = "b [... c]" if channels == "last" else "b [c ...]"
    members = instance, layer_norm(**{"pattern": layer, **fields})
    return Mixture((*members, batch_norm(channels=channels, **fields)), affine="c")


def used_logits(mixture: Mixture) -> tuple[str, ...]:
    """The logits that have an effect: those of what is subtracted and divided by."""
    first = mixture.specs[0]
    used = (first.center, first.divide != "none")
    return tuple(name for name, use in zip(LOGITS, used, strict=True) if use)


def owner(mixture: Mixture) -> int:
    """The first member whose pattern has the axes of the affine part."""
    wanted = {dim.name for dim in dimensions(mixture.affine.axes)}
    for index, spec in enumerate(mixture.specs):
        if wanted <= {dim.name for dim in spec.parsed.dimensions}:
            return index
    patterns = ", ".join(f"'{spec.pattern}'" for spec in mixture.specs)
    raise ValueError(
        f"affine is over {mixture.affine.axes!r}, expected whole dimensions of one of "
        f"{patterns}"
    )


def _check_member(first: NormSpec, spec: NormSpec, index: int) -> None:
    """Refuse what one division after mixing cannot express."""
    for name in ALIKE:
        ours, theirs = getattr(first, name), getattr(spec, name)
        if ours != theirs:
            raise ValueError(
                f"{name} is {ours!r} in the first member and {theirs!r} in member "
                f"{index}: a mixture divides once, so give all members the same"
            )
    for name, plain in _PLAIN.items():
        value = attrgetter(name)(spec)
        if value != plain:
            raise ValueError(
                f"{name} is {value!r} in member {index}, expected {plain!r}: a mixture "
                "passes plain moments on"
            )
