"""Axes by number, as the libraries count them, written as patterns."""

from __future__ import annotations

from typing import Any

from normjax.pattern import ELLIPSIS, Pattern
from normjax.records import check_count

# Names of the last axes, from the end.
TRAILING = ("c", "w", "h", "d")


def written(axes: Any, features: Any = (), *, others: bool = False) -> tuple[str, str]:
    """A pattern, and the affine axes, of axes that are given by number.

    Axes from 0 on are counted from the front, negative ones from the end, and ``...``
    stands between. A spec does not know the rank; where the two ends would meet, the
    pattern does not fit the shape.

    Args:
        axes: the reduced ones: a number, several, or a slice like ``slice(1, -1)``.
        features: those with parameters: a number or several.
        others: reduce all axes but the given ones.

    Returns:
        The pattern, and its names for ``features``.

    Raises:
        ValueError: on what is neither, or a slice that counts from the wrong end.

    Example:
        >>> written(-1, -1), written((-3, -2), -1)
        (('... [c]', 'c'), ('... [h w] c', 'c'))
        >>> written(1, 1, others=True), written(slice(1, -1), -1)
        (('[b] c [...]', 'c'), ('b [...] c', 'c'))
    """
    start, stop, chosen = _read(axes)
    marked = _read(features)[2]
    front = [axis + 1 for axis in chosen | marked if axis >= 0]
    back = [-axis for axis in chosen | marked if axis < 0]
    lead = max([*front, start or 0])
    trail = max([*back, -(stop or 0)])

    def reduced(axis: int | None) -> bool:
        if start is None:
            return (axis in chosen) != others
        if axis is None:
            return True
        return axis >= start if axis >= 0 else axis < (stop or 0)

    places = [*range(lead), None, *range(-trail, 0)]
    names = {axis: _name(axis, marked) for axis in places}
    words = [f"[{names[axis]}]" if reduced(axis) else names[axis] for axis in places]
    pattern = " ".join(words).replace("] [", " ")
    return pattern, " ".join(names[axis] for axis in places if axis in marked)


def grouped(pattern: str) -> str:
    """The pattern with its last reduced axis ``c`` split into groups.

    Raises:
        ValueError: if the last axis is not reduced.

    Example:
        >>> grouped("b [... c]"), grouped("... [c]")
        ('b [...] (g [c])', '... (g [c])')
    """
    if not pattern.endswith("c]"):
        raise ValueError(
            f"the axes of a group norm are '{pattern}', expected the last one among "
            "the reduced ones: add -1"
        )
    inner = pattern.removesuffix("c]").rstrip()
    return (
        f"{inner.removesuffix('[')}(g [c])"
        if inner[-1] == "["
        else (f"{inner}] (g [c])")
    )


def kept(pattern: str) -> str:
    """The names that a pattern does not reduce.

    Example:
        >>> kept("[b] c [...]")
        'c'
    """
    return " ".join(Pattern.parse(pattern).mapped)


def trailing(shape: Any) -> tuple[tuple[int, ...], dict[str, int]]:
    """The last axes that a shape like torch's ``normalized_shape`` names, with sizes.

    Raises:
        ValueError: if it is no whole number or several.

    Example:
        >>> trailing((5, 6)), trailing(None)
        (((-2, -1), {'w': 5, 'c': 6}), ((-1,), {}))
    """
    if shape is None:
        return (-1,), {}
    sizes = (shape,) if isinstance(shape, int) else shape
    if not isinstance(sizes, tuple | list) or not all(
        isinstance(size, int) for size in sizes
    ):
        raise ValueError(f"shape is {shape!r}, expected a whole number or several")
    axes = tuple(range(-len(sizes), 0))
    return axes, {_name(a, set(axes)): n for a, n in zip(axes, sizes, strict=True)}


def channels(count: int | None, groups: int | None = None) -> dict[str, int]:
    """Sizes of the channel axis, where a constructor was told their number.

    Raises:
        ValueError: if there are no groups, or they do not divide it.

    Example:
        >>> channels(6), channels(6, groups=3), channels(None)
        ({'c': 6}, {'g': 3, 'c': 2}, {})
    """
    if groups is None:
        return {} if count is None else {"c": count}
    check_count("groups", groups, least=1)
    if count is None:
        return {"g": groups}
    if count % groups:
        raise ValueError(f"{groups} groups do not divide {count} channels")
    return {"g": groups, "c": count // groups}


def _read(axes: Any) -> tuple[int | None, int | None, set[int]]:
    """Start and stop of a slice, and the numbers; the start is None for no slice."""
    if isinstance(axes, slice):
        start, stop = axes.start or 0, axes.stop
        if start < 0 or (stop is not None and stop >= 0) or axes.step is not None:
            raise ValueError(
                f"axis is {axes!r}, expected a slice that starts at 0 or more and "
                "stops at the end or before it, like slice(1, -1)"
            )
        return start, stop, set()
    several = [axes] if isinstance(axes, int) else axes
    whole = isinstance(several, tuple | list) and all(
        isinstance(axis, int) and not isinstance(axis, bool) for axis in several
    )
    if not whole:
        raise ValueError(
            f"axis is {axes!r}, expected a whole number, or several in a tuple"
        )
    return None, None, set(several)


def _name(axis: int | None, features: set[int]) -> str:
    """``c`` is the one feature axis, or else the last axis."""
    if axis is None:
        return ELLIPSIS
    if features == {axis}:
        return "c"
    if axis >= 0:
        return f"x{axis}" if axis else "b"
    taken = len(features) == 1
    if -axis > len(TRAILING) or (taken and axis == -1):
        return f"z{-axis}"
    return TRAILING[-axis - 1]
