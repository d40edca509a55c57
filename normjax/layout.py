"""A pattern bound to a shape: plain integers, all that the mathematics sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from normjax.pattern import ELLIPSIS, Dimension, Pattern, dimensions


class ParameterLayout(NamedTuple):
    """Where a learned parameter lives.

    ``shape`` is its stored shape, ``view_shape`` the one that broadcasts against the
    group view.
    """

    shape: tuple[int, ...]
    view_shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Axes and shapes of one pattern on one tensor.

    The *group view* is the tensor with every parenthesis split into its parts;
    ``names``, ``owner`` and ``reduced`` speak of the view's axes.

    Attributes:
        pattern: the bound pattern.
        shape: shape of the tensor.
        view_shape: shape of the group view (same elements, C order).
        names: a name for each view axis; ``...`` gives ``...0``, ``...1``, and so on.
        owner: for each view axis the tensor dimension that it came from.
        reduced: the view axes that are reduced together.

    Example:
        >>> layout = Layout.bind(
        ...     Pattern.parse("b [h w] (g [c])"), (2, 5, 5, 6), {"g": 3}
        ... )
        >>> layout.view_shape, layout.reduced, layout.mapped_shape, layout.group_size
        ((2, 5, 5, 3, 2), (1, 2, 4), (2, 3), 50)
    """

    pattern: Pattern
    shape: tuple[int, ...]
    view_shape: tuple[int, ...]
    names: tuple[str, ...]
    owner: tuple[int, ...]
    reduced: tuple[int, ...]

    @staticmethod
    def bind(
        pattern: Pattern,
        shape: tuple[int, ...],
        sizes: Mapping[str, int] | tuple[tuple[str, int], ...] = (),
    ) -> Layout:
        """Bind a pattern to a shape; ``sizes`` gives the parts of parentheses.

        Raises:
            ValueError: if the ranks do not match, a size does not divide its dimension,
                or a parenthesis has two unknown parts.
        """
        items = sizes.items() if isinstance(sizes, Mapping) else sizes
        return _bind(pattern, tuple(shape), tuple(sorted(items)))

    @cached_property
    def mapped(self) -> tuple[int, ...]:
        """The view axes that index the groups."""
        return tuple(i for i in range(len(self.names)) if i not in self.reduced)

    @cached_property
    def mapped_shape(self) -> tuple[int, ...]:
        """Shape of the statistics: the sizes of the mapped axes."""
        return tuple(self.view_shape[i] for i in self.mapped)

    @cached_property
    def keep_shape(self) -> tuple[int, ...]:
        """Shape of the statistics that broadcasts against the group view."""
        return tuple(
            1 if i in self.reduced else size for i, size in enumerate(self.view_shape)
        )

    @cached_property
    def group_size(self) -> int:
        """Number of elements in one reduction group."""
        return prod(self.view_shape[i] for i in self.reduced)

    @property
    def reduction_axes(self) -> tuple[int, ...]:
        """Reduced axes as tensor dimensions; a split one counts if any part does."""
        return tuple(sorted({self.owner[i] for i in self.reduced}))

    def example_axes(self, example: str | None) -> tuple[int, ...]:
        """View axes that index the examples; () where no axis does.

        ``"auto"`` is the first dimension of the pattern (of a ``...`` its first axis,
        of a parenthesis the whole of it), unless it is the bracketed last axis. A name
        takes the dimension that it belongs to.
        """
        dimension = self.pattern.example(example)
        if dimension is None:
            return ()
        axes = _find(self, dimension.name)
        if dimension.name == ELLIPSIS:
            axes = axes[:1]
        last = len(self.shape) == 1 and not dimension.composite
        return () if example == "auto" and last and axes == self.reduced else axes

    def named(self, axes: str) -> tuple[int, ...]:
        """View axes that a text of names speaks of, for instance ``"c"``."""
        return tuple(i for dim in dimensions(axes) for i in _find(self, dim.name))

    def parameter(self, axes: str) -> ParameterLayout:
        """Shapes of a parameter over ``axes``: ``"c"``, ``"(g c)"``, or ``""``, none.

        Raises:
            ValueError: if the axes are not in the order of the pattern.
        """
        view = [1] * len(self.view_shape)
        shape: list[int] = []
        last = -1
        for dimension in dimensions(axes):
            found = _find(self, dimension.name)
            if found and found[0] <= last:
                raise ValueError(
                    f"affine axes {axes!r} are not in the order of the pattern "
                    f"'{self.pattern}'"
                )
            for i in found:
                view[i], last = self.view_shape[i], i
            if dimension.composite:
                shape.append(prod(self.view_shape[i] for i in found))
            else:
                shape.extend(self.view_shape[i] for i in found)
        return ParameterLayout(tuple(shape), tuple(view))


def _find(layout: Layout, name: str) -> tuple[int, ...]:
    """View axes that a name of the pattern stands for."""
    if name == ELLIPSIS:
        return tuple(i for i, n in enumerate(layout.names) if n.startswith(ELLIPSIS))
    wanted = name.strip("()").split()
    return tuple(i for i, n in enumerate(layout.names) if n in wanted)


@lru_cache(maxsize=4096)
def _bind(
    pattern: Pattern, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]
) -> Layout:
    """Bind; cached, since layers ask again at every call."""
    known = dict(sizes)
    view: list[int] = []
    names: list[str] = []
    owner: list[int] = []
    reduced: list[int] = []
    for position, dimension in enumerate(_expand(pattern, shape)):
        for axis, size in _split(pattern, dimension, position, shape[position], known):
            if axis.reduced:
                reduced.append(len(view))
            view.append(size)
            names.append(axis.name)
            owner.append(position)
    return Layout(
        pattern, shape, tuple(view), tuple(names), tuple(owner), tuple(reduced)
    )


def _expand(pattern: Pattern, shape: tuple[int, ...]) -> list[Dimension]:
    """One Dimension for each tensor dimension: ``...`` becomes ``...0``, ``...1``."""
    dimensions = list(pattern.dimensions)
    dots = [i for i, dim in enumerate(dimensions) if dim.name == ELLIPSIS]
    extra = len(shape) - len(dimensions) + len(dots)
    if extra < 0 or (extra > 0 and not dots):
        least = "at least " if dots else ""
        raise ValueError(
            f"pattern '{pattern}' has {least}{len(dimensions) - len(dots)} dimensions, "
            f"the tensor has {len(shape)}: shape {shape}"
        )
    if dots:
        (axis,) = dimensions[dots[0]].parts
        named = [
            Dimension((type(axis)(f"{ELLIPSIS}{i}", axis.reduced),), composite=False)
            for i in range(extra)
        ]
        dimensions[dots[0] : dots[0] + 1] = named
    return dimensions


def _split(
    pattern: Pattern,
    dimension: Dimension,
    position: int,
    size: int,
    known: Mapping[str, int],
):
    """Sizes of a dimension's parts; the one unknown part is what the others leave."""
    given = {
        axis.name: known[axis.name] for axis in dimension.parts if axis.name in known
    }
    unknown = [axis.name for axis in dimension.parts if axis.name not in known]
    product = prod(given.values())
    text = " * ".join(f"{name}={value}" for name, value in given.items())
    if len(unknown) > 1:
        raise ValueError(
            f"pattern '{pattern}': {dimension.name} needs a size for all of its parts "
            f"but one; pass sizes={{'{unknown[0]}': ...}}"
        )
    if not unknown and product != size:
        raise ValueError(
            f"pattern '{pattern}': {text} does not match dimension {position} of size "
            f"{size}"
        )
    if unknown and size % product:
        raise ValueError(
            f"pattern '{pattern}': {text} does not divide dimension {position} of size "
            f"{size}"
        )
    left = size // product
    return [(axis, given.get(axis.name, left)) for axis in dimension.parts]
