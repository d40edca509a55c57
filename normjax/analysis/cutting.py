"""How an array is cut into units: single rows, or batches of examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from normjax.analysis.kernels import ghosts, of_examples, of_groups
from normjax.analysis.measures import group_measures
from normjax.analysis.source import AnalysisError, Source
from normjax.arguments import bind
from normjax.layout import Layout
from normjax.pattern import ELLIPSIS
from normjax.records import check_count
from normjax.spec import NormSpec
from normjax.traits import properties

# What one device computes at once. It decides the shapes of the arithmetic, so it
# depends on the size of a unit alone, not on the file, its blocks or the devices.
PIECE_BYTES = 4 * 2**20
# Who moves whom is a matrix of this size squared.
MOST_EXAMPLES = 8192


@dataclass(frozen=True)
class Cut:
    """Units of an array, each analyzed on its own.

    Attributes:
        spec: the layer as a unit sees it, without the affine part.
        layout: of its pattern on one unit.
        coupled: whether a unit is a batch.
        leading: how many axes of the array count as its rows.
        rows: rows of a unit: 1, or the batch size.
        units: how many units there are.
        piece: how many of them one device takes at once.
        axes: names of the columns that index a group.
        sizes: how far each of these goes.
    """

    spec: NormSpec
    layout: Layout
    coupled: bool
    leading: int
    rows: int
    units: int
    piece: int
    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def groups(self) -> int:
        """Groups of one unit."""
        return prod(self.layout.mapped_shape)

    @property
    def met(self) -> bool:
        """Whether any example has a companion."""
        if not self.coupled:
            return False
        found = ghosts(self.layout, self.spec.example)
        return len(set(found.tolist())) < len(found)

    @property
    def values(self) -> int:
        """Numbers of one example."""
        return prod(self.layout.shape) // self.rows

    def index(self, first: int, units: int) -> np.ndarray:
        """Where the groups of some units stand, shape (units · groups, columns)."""
        flat = np.arange(first * self.groups, (first + units) * self.groups)
        return np.stack(np.unravel_index(flat, self.sizes), axis=1)


def cut_up(
    source: Source,
    spec: NormSpec,
    axis_names: tuple[str, ...] | None,
    batch_size: int | None,
) -> tuple[Cut, Cut | None, int]:
    """Decide what is analyzed together.

    Args:
        source: what to cut.
        spec: the layer.
        axis_names: a name for each axis of the array.
        batch_size: for layers that couple examples.

    Returns:
        The cut, that of the last batch where it is smaller, and how many examples of
        such a batch are left out, since the layer cannot take it (ghosts do not divide
        it).

    Raises:
        AnalysisError: if array, spec, names and batch size do not fit.
    """
    bare = spec.replace(affine=None, running=None, axis_names=())
    try:
        if not properties(spec).couples_examples:
            if batch_size is not None:
                raise AnalysisError(
                    f"a batch size of {batch_size} was given, but '{spec.pattern}' "
                    "does not couple examples: leave it out"
                )
            return _checked(_by_row(source, bare, axis_names)), None, 0
        rest = _rest(source, spec, batch_size)
        whole = _checked(_by_batch(source, bare, axis_names, batch_size or 1))
    except AnalysisError:
        raise
    except ValueError as error:
        raise AnalysisError(f"{source.name}: {error}") from None
    if not rest:
        return whole, None, 0
    try:
        last = _checked(_by_batch(source, bare, axis_names, rest))
    except ValueError:
        return whole, None, rest
    sizes = (whole.units + 1, *last.sizes[1:])
    return whole, replace(last, units=1, piece=1, sizes=sizes), 0


def _rest(source: Source, spec: NormSpec, batch_size: int | None) -> int:
    """Examples behind the last whole batch."""
    if batch_size is None:
        raise AnalysisError(
            f"'{spec.pattern}' couples the examples of a batch: give the batch size "
            "(--batch-size) that the layer sees"
        )
    check_count("batch size", batch_size, least=1)
    count = source.shape[0]
    if batch_size > count:
        raise AnalysisError(
            f"batch size is {batch_size}, but {source.name} has {count} examples"
        )
    if batch_size > MOST_EXAMPLES:
        raise AnalysisError(
            f"batch size is {batch_size}, expected {MOST_EXAMPLES} at most: who moves "
            "whom is a matrix of its square"
        )
    return count % batch_size


def _by_row(source: Source, spec: NormSpec, axis_names) -> Cut:
    """Every index of the leading mapped axes is a unit."""
    whole = bind(spec, source.shape)
    leading = 0
    for axis in range(len(source.shape)):
        parts = [i for i, owner in enumerate(whole.owner) if owner == axis]
        if len(parts) > 1 or parts[0] in whole.reduced:
            break
        leading += 1
    if leading == 0:
        raise AnalysisError(
            f"'{spec.pattern}' on shape {source.shape} has no axis of its own in the "
            "first place: put the axis that counts the rows there, for instance by "
            "x[None]"
        )
    fixed = {n: s for n, s in spec.sizes if n not in whole.names[:leading]}
    spec = spec.replace(sizes=fixed)
    unit = bind(spec, (1,) * leading + source.shape[leading:])
    lead = source.shape[:leading]
    names = _names(source, whole, axis_names)
    inner = [i for i in whole.mapped if i >= leading]
    return Cut(
        spec=spec,
        layout=unit,
        coupled=False,
        leading=leading,
        rows=1,
        units=prod(lead),
        piece=max(1, PIECE_BYTES // (prod(unit.shape) * source.dtype.itemsize)),
        axes=(*names[:leading], *(names[i] for i in inner)),
        sizes=(*lead, *(whole.view_shape[i] for i in inner)),
    )


def _by_batch(source: Source, spec: NormSpec, axis_names, rows: int) -> Cut:
    """Every batch along the first axis is a unit."""
    unit = bind(spec, (rows, *source.shape[1:]))
    if {unit.owner[i] for i in unit.example_axes(spec.example)} != {0}:
        raise AnalysisError(
            f"the examples of '{spec.pattern}' are not on the first axis: move them "
            "there, for instance by np.moveaxis"
        )
    names = _names(source, unit, axis_names)
    size = prod(unit.shape) * source.dtype.itemsize
    return Cut(
        spec=spec,
        layout=unit,
        coupled=True,
        leading=1,
        rows=rows,
        units=source.shape[0] // rows,
        piece=max(1, PIECE_BYTES // max(size, 4 * rows * rows)),
        axes=("batch", *(names[i] for i in unit.mapped)),
        sizes=(source.shape[0] // rows, *unit.mapped_shape),
    )


def _names(source: Source, layout: Layout, given) -> list[str]:
    """A name for each axis of the group view; the given ones speak of the array."""
    rank = len(source.shape)
    if given is not None and len(given) != rank:
        raise AnalysisError(
            f"axis names {' '.join(given)!r} are {len(given)}, but {source.name} has "
            f"{rank} axes: shape {source.shape}"
        )
    names = []
    for i, name in enumerate(layout.names):
        axis = layout.owner[i]
        alone = layout.owner.count(axis) == 1
        if alone and given is not None:
            name = given[axis]
        elif name.startswith(ELLIPSIS):
            name = f"axis{axis}"
        names.append(name)
    if given is not None:
        _check_places(layout, given)
    taken = {"batch", "examples", *(measure.name for measure in group_measures())}
    for name in {*names, *(given or ())}:
        twice = names.count(name) > 1 or (given or ()).count(name) > 1
        if twice or name in taken or not name.isidentifier():
            raise AnalysisError(
                f"axis name {name!r} is no name, stands twice or is a column of the "
                "tables: choose others with axis names"
            )
    return names


def _check_places(layout: Layout, given: tuple[str, ...]) -> None:
    """A name of the pattern stands where the pattern has it."""
    for i, name in enumerate(layout.names):
        if name in given and given.index(name) != layout.owner[i]:
            raise AnalysisError(
                f"axis names {' '.join(given)!r} put {name!r} on axis "
                f"{given.index(name)}, '{layout.pattern}' has it on axis "
                f"{layout.owner[i]}: transpose the array, or rename"
            )


def _checked(cut: Cut) -> Cut:
    """Trace the programs once: what the layer refuses is said before any reading."""
    x = jax.ShapeDtypeStruct(cut.layout.shape, jnp.float32)
    groups = jax.eval_shape(partial(of_groups, cut.spec, cut.layout), x)
    if cut.coupled:
        jax.eval_shape(partial(of_examples, cut.spec, cut.layout), x, groups)
    return cut
