"""Which elements share statistics, observed from what moves what."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normjax.auditing.probing import Probe
from normjax.auditing.record import Finding

# An element is moved by this much, both ways: one of the two changes the order of any
# two elements, so that groups of two and the sign function are seen.
STEP = 12.0
LARGEST_MATRIX = 512
Flags = NDArray[np.bool_]


class AxisKind(NamedTuple):
    """One axis: kept, reduced, blocks, interleaved, irregular, or of size one."""

    kind: str
    parts: int = 1

    def text(self, axis: int, size: int) -> str:
        """As the report has it."""
        if self.kind == "blocks":
            each = size // self.parts
            return f"axis {axis} in {self.parts} blocks of {each}"
        if self.kind == "interleaved":
            return f"axis {axis} in {self.parts} interleaved groups"
        return f"axis {axis} {self.kind}"


@dataclass(frozen=True)
class Grouping:
    """Elements that share statistics.

    Attributes:
        groups: in x's shape: the group of each element, -1 for none.
        axes: what happens along each axis.
        silent: whose output never changes.
        elementwise: no element depends on another one.
        matrix: moves[j, i], that element i moves output j, where this is no partition.
        runs: groups are runs in C order that are no product over axes.
    """

    groups: NDArray[np.int64]
    axes: tuple[AxisKind, ...]
    silent: Flags
    elementwise: bool = False
    matrix: Flags | None = None
    runs: bool = False

    @property
    def coupled(self) -> bool:
        """Whether one group spans several indices of the first axis."""
        if self.matrix is not None or self.groups.shape[0] == 1:
            return False
        first = np.broadcast_to(
            np.arange(self.groups.shape[0]).reshape(-1, *[1] * (self.groups.ndim - 1)),
            self.groups.shape,
        )
        return any(
            np.ptp(first[self.groups == group]) > 0
            for group in np.unique(self.groups[self.groups >= 0])
        )

    @property
    def size(self) -> int | None:
        """The number of elements of every group; None if they differ."""
        counts = np.unique(np.bincount(self.groups[self.groups >= 0].ravel()))
        counts = counts[counts > 0]
        return int(counts[0]) if len(counts) == 1 else None

    def finding(self) -> Finding:
        """For the report."""
        shape = self.groups.shape
        if self.runs:
            text = "groups follow memory, not axes: a reshape with the wrong axis order"
        else:
            pairs = zip(self.axes, shape, strict=True)
            text = " | ".join(k.text(i, n) for i, (k, n) in enumerate(pairs))
        examples = "coupled" if self.coupled else "independent"
        groups = len(np.unique(self.groups[self.groups >= 0]))
        facts = {
            "axes": [kind.kind for kind in self.axes],
            "parts": [kind.parts for kind in self.axes],
            "coupled": self.coupled,
            "groups": groups,
            "group_size": self.size,
            "silent": int(self.silent.sum()),
        }
        evidence = f"{groups} groups, each moved by a random member and no other"
        text = f"{text}; examples {examples}"
        # No library interleaves channel groups, or runs across axes.
        interleaved = any(kind.kind == "interleaved" for kind in self.axes)
        defect = self.runs or interleaved
        return Finding("grouping", text, "certain", evidence, defect, facts)


class NotDeterministic(Exception):
    """Two equal calls differ; ``zeros`` is the share of exact zeros."""

    def __init__(self, difference: float, zeros: float):
        super().__init__(
            f"two equal calls differ by {difference:.2g}; {zeros:.0%} exact zeros"
        )
        self.difference, self.zeros = difference, zeros


def silent_outputs(probe: Probe) -> Flags:
    """Outputs that are equal for three random inputs, and then for twelve more.

    Raises:
        NotDeterministic: if two equal calls differ by a thousandth.
        ValueError: if y does not have x's shape, or is not finite.
    """
    x = 3 * probe.normal()
    first, again = probe(x), probe(x, again=True)
    if first.shape != probe.shape:
        raise ValueError(
            f"the output has shape {first.shape}, expected that of the input, "
            f"{probe.shape}"
        )
    if not np.isfinite(first).all():
        raise ValueError(
            f"{np.sum(~np.isfinite(first))} of {first.size} outputs for a normal input "
            "are not finite: nothing can be fitted"
        )
    difference = np.abs(first - again).max()
    if difference > 1e-3 * np.abs(first).max():
        raise NotDeterministic(difference, float(np.mean(first == 0)))
    silent = np.ones(first.shape, bool)
    for draws in (2, 12):  # a rectified or saturated output is often the same
        if silent.any():
            others = [probe(3 * probe.normal()) for _ in range(draws)]
            silent &= np.all([first == other for other in others], axis=0)
    return silent


def find_groups(probe: Probe, silent: Flags) -> Grouping:
    """Find which elements share statistics.

    One element's block is extended to a hypothesis over all axes, which is then tested
    as a whole: groups have binary labels, and for each bit one random member of every
    group whose bit is one moves. If that fails, elements are asked one by one.
    """
    moved = _Moves(probe)
    if _is_elementwise(probe, moved, silent):
        groups = np.arange(silent.size).reshape(silent.shape)
        return Grouping(groups, (AxisKind("kept"),) * silent.ndim, silent, True)
    loud = np.flatnonzero(~silent)
    block = moved(probe.rng.choice(loud, 1))
    holes = moved.rectified or bool(silent.any())
    guess = _extended(block, holes=holes)
    if guess is not None and _holds(probe, moved, guess, silent):
        return _classified(guess, silent)
    groups = _one_by_one(moved, silent)
    if groups is not None:
        return _classified(groups, silent)
    matrix = None
    if silent.size <= LARGEST_MATRIX:
        columns = [moved(np.array([i])).ravel() for i in range(silent.size)]
        matrix = np.stack(columns, axis=1)
    irregular = (AxisKind("irregular"),) * silent.ndim
    nothing = np.full(silent.shape, -1)
    return Grouping(nothing, irregular, silent, matrix=matrix)


class _Moves:
    """Which outputs move when a set of elements does."""

    def __init__(self, probe: Probe):
        self.probe = probe
        self.bases = [self._base()]
        y = probe(self.bases[0])
        # Rectified: half of the outputs show nothing at one point, some hardly ever.
        self.rectified = bool(y.min() >= -0.3 and np.mean(y == 0) > 0.1)
        if self.rectified:
            self.bases += [self._base() for _ in range(7)]

    def _base(self) -> np.ndarray:
        # Away from zero: a small output would hide its own change.
        x = self.probe.normal()
        return x + 0.4 * np.sign(x)

    def __call__(self, elements: np.ndarray) -> Flags:
        probe, changed = self.probe, np.zeros(self.probe.shape, bool)
        unit, floor = probe.limits.unit, probe.limits.floor
        for base in self.bases:
            y = probe(base)
            for step in (STEP, -STEP):
                x = base.copy()
                x.flat[elements] += step
                other = probe(x)
                least = 8 * unit * (np.abs(y) + np.abs(other))
                least = least + floor * np.abs(y).max()
                changed |= ~(np.abs(other - y) <= least)
        return changed


def _is_elementwise(probe: Probe, moved: _Moves, silent: Flags) -> bool:
    for _ in range(3):
        chosen = probe.rng.random(silent.shape) < 0.5
        if not np.array_equal(moved(np.flatnonzero(chosen)), chosen & ~silent):
            return False
    return True


def axis_kind(indices: np.ndarray, size: int) -> AxisKind:
    """What a block's indices along an axis say about it.

    Example:
        >>> [axis_kind(np.array(i), 6).kind for i in ([2], [2, 3], [1, 4], [0, 3, 5])]
        ['kept', 'blocks', 'interleaved', 'irregular']
    """
    count = len(indices)
    if size == 1:
        return AxisKind("of size one")
    if count in (1, size):
        return AxisKind("kept" if count == 1 else "reduced")
    steps = np.unique(np.diff(indices))
    if size % count == 0 and len(steps) == 1:
        if steps[0] == 1 and indices[0] % count == 0:
            return AxisKind("blocks", size // count)
        if steps[0] == size // count:
            return AxisKind("interleaved", size // count)
    return AxisKind("irregular")


def _labels(kind: AxisKind, size: int) -> np.ndarray:
    """The part of each index along an axis."""
    index = np.arange(size)
    if kind.kind == "blocks":
        return index // (size // kind.parts)
    if kind.kind == "interleaved":
        return index % kind.parts
    return index if kind.kind == "kept" else np.zeros(size, int)


def _kinds(block: Flags, *, holes: bool = False) -> tuple[AxisKind, ...] | None:
    """What happens along each axis if the block is a product of index sets.

    With holes, of silent elements, more than half of an axis is taken for all of it.
    """
    sets = [np.unique(places) for places in np.nonzero(block)]
    if holes:
        pairs = zip(sets, block.shape, strict=True)
        sets = [np.arange(n) if 2 * len(s) > n else s for s, n in pairs]
    elif math.prod(map(len, sets)) != block.sum():
        return None
    pairs = zip(sets, block.shape, strict=True)
    return tuple(axis_kind(indices, size) for indices, size in pairs)


def _extended(block: Flags, *, holes: bool) -> NDArray[np.int64] | None:
    """All groups, if they are like this one."""
    kinds = _kinds(block, holes=holes) if block.any() else None
    if kinds is None or any(kind.kind == "irregular" for kind in kinds):
        return None
    return product_groups(kinds, block.shape)


def product_groups(
    kinds: tuple[AxisKind, ...], shape: tuple[int, ...]
) -> NDArray[np.int64]:
    """The group of each element, from what happens along each axis."""
    groups = np.zeros(shape, np.int64)
    for axis, (kind, size) in enumerate(zip(kinds, shape, strict=True)):
        labels = _labels(kind, size)
        row = [1] * len(shape)
        row[axis] = size
        groups = groups * (labels.max() + 1) + labels.reshape(row)
    return groups


def _holds(probe: Probe, moved: _Moves, groups: np.ndarray, silent: Flags) -> bool:
    """Whether every group is moved by any of its members, and by nothing else."""
    count = int(groups.max()) + 1
    bits = max(count - 1, 1).bit_length()
    labels = np.arange(count)
    chosen = [np.flatnonzero(labels >> bit & 1) for bit in range(bits)]
    chosen += [np.flatnonzero(probe.rng.random(count) < 0.5) for _ in range(2)]
    flat = groups.ravel()
    for some in chosen:
        members = [probe.rng.choice(np.flatnonzero(flat == group)) for group in some]
        expected = np.isin(groups, some)
        changed = moved(np.array(members, int))
        if moved.rectified:
            if np.any(changed & ~expected) or set(groups[changed]) != set(some):
                return False
        elif not np.array_equal(changed, expected & ~silent):
            return False
    return True


def _one_by_one(moved: _Moves, silent: Flags) -> NDArray[np.int64] | None:
    """Groups from each element's block; None if the blocks overlap.

    A silent element belongs where its input still feeds the statistics.
    """
    groups = np.full(silent.shape, -1)
    for element in range(silent.size):
        if groups.flat[element] >= 0:
            continue
        block = moved(np.array([element]))
        if not block.any():
            continue
        known = np.unique(groups[block])
        if list(known) == [-1]:
            others = np.flatnonzero(block)
            another = others[others != element][-1:]
            own = silent.flat[element] or block.flat[element]
            if not own or (another.size and not np.array_equal(moved(another), block)):
                return None
            groups[block] = groups.max() + 1
        elif len(known) > 1 or not np.array_equal(
            (groups == known[0]) & ~silent, block
        ):
            return None
        groups.flat[element] = groups[block].flat[0]
    return groups


def _classified(groups: NDArray[np.int64], silent: Flags) -> Grouping:
    """Say what happens along each axis."""
    present = np.unique(groups[groups >= 0])
    each = [_kinds(groups == group) for group in present]
    kinds: Any = each[0]
    if kinds is not None and all(other == kinds for other in each):
        return Grouping(groups, kinds, silent)
    irregular = (AxisKind("irregular"),) * groups.ndim
    flat = groups.ravel()
    runs = len(present) > 1 and np.sum(np.diff(flat) != 0) == len(present) - 1
    return Grouping(groups, irregular, silent, runs=bool(runs))
