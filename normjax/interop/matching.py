"""Which array of one model is which of another, by name, shape and kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from normjax.interop.moves import Kind, Move, Shape, arrived, flattened
from normjax.records import suggest

ATTENTION = ("query", "key", "value", "out")


@dataclass(frozen=True)
class Known:
    """What is known of their model beyond names and shapes.

    Attributes:
        kinds: by the name of a layer, the kinds that it may be.
        heads: by the name of an attention layer, its number of heads.
    """

    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """What the caller says about the correspondence; names are joined by "/"."""

    names: Mapping[str, str]
    kinds: Mapping[str, str]
    flatten: Mapping[str, Shape]
    ignore: tuple[str, ...]

    @classmethod
    def of(cls, names: Any, kinds: Any, flatten: Any, ignore: Any) -> Wanted:
        """Bring ``.`` to ``/``."""

        def keys(given: Any) -> dict[str, Any]:
            return {slashed(str(k)): v for k, v in (given or {}).items()}

        renamed = {k: slashed(str(v)) for k, v in keys(names).items()}
        patterns = tuple(map(slashed, ignore))
        return cls(renamed, keys(kinds), keys(flatten), patterns)

    def theirs(self, layer: str) -> str:
        """The name of our layer there: its longest named beginning, and the rest."""
        start = layer
        while start not in self.names:
            if not start:
                return layer
            start = start.rpartition("/")[0]
        rest = layer[len(start) :].strip("/")
        return "/".join(part for part in (self.names[start], rest) if part)


class Link(NamedTuple):
    """One move between two whole names."""

    move: Move
    theirs: str
    ours: str


class Matched(NamedTuple):
    """The links, and what has no other side but needs none: counters and ignored."""

    links: list[Link]
    only_theirs: list[str]
    only_ours: list[str]


def slashed(name: str) -> str:
    """Names of any library joined by ``/``."""
    return name.replace(".", "/")


def match(
    title: str,
    theirs: Mapping[str, Shape],
    ours: Mapping[str, Shape],
    library: Mapping[str, Kind],
    wanted: Wanted,
    known: Known,
) -> Matched:
    """Link every array of both models.

    Args:
        title: of the function, for messages.
        theirs: shapes by names joined by ``/``.
        ours: likewise.
        library: their kinds of layers.
        wanted: what the caller says.
        known: what their model says.

    Returns:
        Matched.

    Raises:
        ValueError: with all that is missing, left over or of another shape, or with
            the layers whose kind is not certain.
    """
    links: list[Link] = []
    missing: list[str] = []
    shapes: list[str] = []
    _check_said(wanted, _layers(ours, library), library)
    only_theirs = [name for name in theirs if _ignored(name, wanted)]
    only_ours = [name for name in ours if _ignored(name, wanted)]
    theirs = {k: v for k, v in theirs.items() if k not in only_theirs}
    layers = _layers({k: v for k, v in ours.items() if k not in only_ours}, library)
    unused = dict.fromkeys(theirs)
    leaves = {move.theirs for kind in library.values() for move in kind}
    for layer, own in layers.items():
        prefix = wanted.theirs(layer)
        start = f"{prefix}/" if prefix else ""
        other = {
            leaf: theirs[start + leaf]
            for leaf in sorted(leaves)
            if start + leaf in theirs
        }
        kind = _kind(title, layer, prefix, own, other, library, wanted, known)
        for leaf, shape in own.items():
            whole = f"{layer}/{leaf}".strip("/")
            moves = [move for move in kind if move.ours == leaf]
            found = [move for move in moves if move.theirs in other]
            if not found:
                if moves and all(move.optional for move in moves):
                    only_ours.append(whole)
                else:
                    names = " or ".join(start + move.theirs for move in moves)
                    missing.append(f"{whole} (from {names or 'nothing known'})")
                continue
            move, name = found[0], start + found[0].theirs
            unused.pop(name, None)
            links.append(Link(move, name, whole))
            if _arrives(move, theirs[name], shape) is None:
                shapes.append(f"{whole} is {shape}, {name} is {theirs[name]}")
        heads = known.heads.get(prefix)
        if heads is not None and own.get("query/kernel", (0, heads))[-2] != heads:
            shapes.append(
                f"{layer} has {own['query/kernel'][-2]} heads, {prefix} {heads}"
            )
    optional = {m.theirs for kind in library.values() for m in kind if m.optional}
    passed = [name for name in unused if name.rpartition("/")[2] in optional]
    problems = {
        "without a source": missing,
        "left over": [name for name in unused if name not in passed],
        "of another shape": shapes,
    }
    _report(title, problems)
    return Matched(links, only_theirs + passed, only_ours)


def _report(title: str, problems: Mapping[str, list[str]]) -> None:
    parts = []
    for what, found in problems.items():
        if found:
            more = f" and {len(found) - 6} more" if len(found) > 6 else ""
            parts.append(f"{what}: {', '.join(found[:6])}{more}")
    if parts:
        raise ValueError(
            f"{title}: {'; '.join(parts)}. names= maps our layers to theirs, ignore= "
            "leaves names out"
        )


def _ignored(name: str, wanted: Wanted) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in wanted.ignore)


def _layers(
    ours: Mapping[str, Shape], library: Mapping[str, Kind]
) -> dict[str, dict[str, Shape]]:
    """Our arrays by layers; an attention layer is one where theirs is one."""
    layers: dict[str, dict[str, Shape]] = {}
    for name, shape in ours.items():
        layer, _, leaf = name.rpartition("/")
        layers.setdefault(layer, {})[leaf] = shape
    if "attention" not in library:
        return layers
    outer = {layer.rpartition("/")[0] for layer in layers if layer}
    for attention in sorted(outer):
        start = f"{attention}/" if attention else ""
        parts = [f"{start}{part}" for part in ATTENTION]
        if attention not in layers and all(
            "kernel" in layers.get(p, {}) for p in parts
        ):
            layers[attention] = {
                f"{part}/{leaf}": shape
                for part, whole in zip(ATTENTION, parts, strict=True)
                for leaf, shape in layers.pop(whole).items()
            }
    return layers


def _check_said(wanted: Wanted, layers: Iterable[str], library: Iterable[str]) -> None:
    layers, library = list(layers), list(library)
    for pattern, kind in wanted.kinds.items():
        if kind not in library:
            raise ValueError(f"kinds has {kind!r}{suggest(str(kind), library)}")
        if not any(fnmatchcase(layer, pattern) for layer in layers):
            raise ValueError(f"kinds names {pattern!r}{suggest(pattern, layers)}")
    for layer in wanted.flatten:
        if layer not in layers:
            raise ValueError(f"flatten names {layer!r}{suggest(layer, layers)}")
    for layer in wanted.names:
        start = f"{layer}/" if layer else ""
        if not any(f"{each}/".startswith(start) for each in layers):
            raise ValueError(f"names has {layer!r}{suggest(layer, layers)}")


def _kind(
    title: str,
    layer: str,
    prefix: str,
    own: Mapping[str, Shape],
    other: Mapping[str, Shape],
    library: Mapping[str, Kind],
    wanted: Wanted,
    known: Known,
) -> Kind:
    """The one kind that fits, or the nearest, for the message about what does not."""
    said = [kind for at, kind in wanted.kinds.items() if fnmatchcase(layer, at)]
    allowed = said[-1:] or list(known.kinds.get(prefix, library))
    sizes = wanted.flatten.get(layer)
    kinds = {name: _flattened(library[name], sizes) for name in allowed}
    fitting = {name: kind for name, kind in kinds.items() if _fits(kind, own, other)}
    distinct = {tuple(_acts(kind, own)): name for name, kind in fitting.items()}
    if len(distinct) > 1:
        names = ", ".join(fitting)
        model = "" if prefix in known.kinds else ", or give the model, which may know"
        raise ValueError(
            f"{title}: the shapes of {prefix or 'the layer'} {other} fit {names}: say "
            f"kinds={{{layer!r}: ...}}{model}"
        )
    if fitting:
        return next(iter(fitting.values()))

    def covered(kind: Kind) -> int:
        pairs = {(move.theirs, move.ours) for move in kind}
        return sum(a in other for a, _ in pairs) + sum(b in own for _, b in pairs)

    return max(kinds.values(), key=covered)


def _flattened(kind: Kind, sizes: Shape | None) -> Kind:
    if sizes is None:
        return kind
    return tuple(
        flattened(move, tuple(sizes)) if move.ours == "kernel" else move
        for move in kind
    )


def _acts(kind: Kind, own: Mapping[str, Shape]) -> list[Any]:
    """What two kinds must share to be the same for these arrays."""
    flat = all(len(shape) < 2 for shape in own.values())
    return [
        (move.theirs, move.ours, None if flat else move.forth)
        for move in kind
        if move.ours in own
    ]


def _fits(kind: Kind, own: Mapping[str, Shape], other: Mapping[str, Shape]) -> bool:
    used = set()
    for leaf, shape in own.items():
        moves = [move for move in kind if move.ours == leaf]
        found = [move for move in moves if move.theirs in other]
        if not found and not (moves and all(move.optional for move in moves)):
            return False
        for move in found[:1]:
            used.add(move.theirs)
            if _arrives(move, other[move.theirs], shape) is None:
                return False
    optional = {move.theirs for move in kind if move.optional}
    return set(other) <= used | optional


def _arrives(move: Move, theirs: Shape, ours: Shape) -> np.ndarray | None:
    """Try a move on an array that takes no memory."""
    return arrived(move, np.broadcast_to(np.zeros((), np.int32), theirs), ours)
