"""What an output still tells about its input: levels and scales that survive."""

from __future__ import annotations

from dataclasses import dataclass

from normjax.pattern import ELLIPSIS
from normjax.spec import NormSpec


@dataclass(frozen=True)
class Survival:
    """What becomes of a level (x + δ) and a scale (x · a) that vary along some axes.

    - ``"lost"``: no change of it changes the output.
    - ``"relative"``: what is common to a group is lost, differences (ratios) are not.
    - ``"partly"``: a reference that does not move tells it, mixed or within clips.
    - ``"kept"``: all of it.

    A scale is lost up to ε: the stabilizer share ρ says how much of it is left.

    Attributes:
        each: one number for each of these: ``"batch"``, ``"example"``, ``"group"``, or
            the name of an axis.
        axes: names of the axes along which it varies; () is one number for all.
        level: in the output.
        scale: in the output.
        level_gradient: in ∂x̂/∂x: lost if the change is in its null space.
        scale_gradient: in ∂x̂/∂x.
    """

    each: str
    axes: tuple[str, ...]
    level: str
    scale: str
    level_gradient: str
    scale_gradient: str


def recoverable(spec: NormSpec, *, given: bool = False) -> tuple[Survival, ...]:
    """Say which levels and scales of the input can be told from the output.

    A level that varies along A is in the null space of J = (I − U Vᵀ)/s if aᵀ1 = 1 (and
    bᵀ1 = 0) and it is constant inside every group: A meets no reduced axis. A scale is,
    at ε = 0, if bᵀx = 1. The function can lose what its derivative keeps: a detached
    mean is subtracted, and moves nothing.

    Args:
        spec: the layer.
        given: whether the statistics come from elsewhere, as at inference: they do not
            move with the input, so all is kept.

    Returns:
        One ``Survival`` for the batch and for an example (where the spec has one), one
        for a reduction group, and one for each axis.

    Example:
        >>> import normjax as nj
        >>> found = {row.each: row for row in nj.recoverable(nj.layer_norm())}
        >>> found["example"].level, found["c"].level
        ('lost', 'relative')
        >>> nj.recoverable(nj.batch_norm())[1].level  # relative to the batch's
        'relative'
        >>> nj.recoverable(nj.rms_norm())[0].level
        'kept'
    """
    pattern = spec.parsed
    example = pattern.example(spec.example)
    rows: dict[str, tuple[str, ...]] = {}
    if example is not None:
        rows = {"batch": (), "example": tuple(part.name for part in example.parts)}
    rows["group"] = pattern.mapped
    rows |= {axis.name: (axis.name,) for axis in pattern.axes}
    own_mean = spec.center and "mean" not in spec.detach
    own_variance = spec.divide != "none" and "variance" not in spec.detach
    # What is divided by must not see the level either.
    blind = spec.divide in ("std", "none")
    level = spec.center and blind
    level_gradient = own_mean and (blind or "variance" in spec.detach)
    scale = spec.divide != "none"
    scale_gradient = own_variance and (own_mean or not spec.center)
    output, gradient = _REFERENCE[spec.statistics]

    def word(lost: bool, axes: tuple[str, ...], otherwise: str) -> str:
        if given or not lost:
            return "kept"
        apart = set(axes) & set(pattern.reduced)
        return otherwise or ("relative" if apart else "lost")

    return tuple(
        Survival(
            each,
            axes,
            word(level, axes, output),
            word(scale, axes, output),
            word(level_gradient, axes, gradient),
            word(scale_gradient, axes, gradient),
        )
        for each, axes in rows.items()
    )


# Instead of "lost", in the output and in its derivative; renorm detaches r and d.
_REFERENCE = {
    "input": ("", ""),
    "blend": ("partly", "partly"),
    "renorm": ("partly", ""),
}


def example_axes(spec: NormSpec, ndim: int) -> tuple[int, ...]:
    """Positions of the example's axes among ``ndim`` mapped axes.

    Raises:
        ValueError: if the pattern does not map as many.
    """
    pattern = spec.parsed
    names = list(pattern.mapped)
    if ELLIPSIS in names:
        at = names.index(ELLIPSIS)
        names[at : at + 1] = [ELLIPSIS] * (ndim - len(names) + 1)
    if len(names) != ndim:
        raise ValueError(
            f"moments have {ndim} axes, expected those that '{pattern}' maps, "
            f"{' '.join(pattern.mapped)}: take nj.moments of this spec"
        )
    owner = pattern.example(spec.example)
    if owner is None:
        return ()
    if owner.name == ELLIPSIS:  # of a `...` its first axis
        return tuple(i for i, name in enumerate(names) if name == ELLIPSIS)[:1]
    return tuple(i for i, name in enumerate(names) if name in owner.names)
