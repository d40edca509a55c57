"""An arm that changes several properties, and every combination of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from normjax.study.arms import Change
from normjax.study.document import Document, Location, put
from normjax.study.generated import MOST, Builder, RefusedError, bits, members
from normjax.study.validation import canonical

Players = tuple[tuple[Change, ...], ...]


def decompose(builder: Builder, name: str, groups: bool | list) -> dict[str, Any]:
    """Add an arm for every combination of the properties that an arm changes.

    Args:
        builder: takes the arms.
        name: of the arm.
        groups: True, or the properties with those in a list that are changed as one.

    Returns:
        Arm, parent, players and lattice, as plain data: bit i of the place in the
        lattice says whether the i-th player is changed.

    Raises:
        ConfigError: if there are fewer than two or more than five, or a combination
            cannot be built; the message then has a grouping that can.
    """
    arm, at = builder.arms[name], ("arms", name, "decompose")
    assert arm.parent is not None
    labels = _labels([change.name for change in arm.changes])
    by_label = dict(zip(labels, arm.changes, strict=True))
    players = _players(groups, by_label, builder.document, at)
    if len(players) < 2:
        text = f"needs an arm that changes several properties: it changes {labels[0]}"
        raise builder.document.error(at, text)
    if len(players) > MOST:
        text = (
            f"{len(players)} properties make {2 ** len(players)} arms, expected at "
            f"most {MOST} properties: group some of {', '.join(labels)}"
        )
        raise builder.document.error(at, text)
    first = builder.arms[arm.parent]
    raws = [canonical(side.cell.settings) for side in (first, arm)]
    try:
        built = _lattice(builder, raws, players)
    except RefusedError as error:
        text = f"{error}; {_regrouping(builder, raws, players, by_label)}"
        raise builder.document.error(at, text) from None
    titles = ["&".join(_names(player, by_label)) for player in players]
    lattice = [first.name]
    for mask in range(1, len(built) - 1):
        lattice.append("+".join((name, *members(titles, mask))))
        parents = [lattice[mask ^ (1 << i)] for i in bits(mask)]
        builder.add(lattice[-1], built[mask], parents, "decomposition", at)
    return {
        "arm": name,
        "parent": first.name,
        "players": titles,
        "lattice": [*lattice, name],
    }


def _players(groups: Any, by_label: dict, document: Document, at: Location) -> Players:
    """What is changed as one: each property, or those that the config groups."""
    if groups is True:
        return tuple((change,) for change in by_label.values())
    named = [group if isinstance(group, list) else [group] for group in groups]
    flat = [label for group in named for label in group]
    if sorted(flat) != sorted(by_label):
        text = f"names {', '.join(flat)}, expected each of {', '.join(by_label)} once"
        raise document.error(at, text)
    return tuple(tuple(by_label[label] for label in group) for group in named)


def _names(player: tuple[Change, ...], by_label: Mapping[str, Change]) -> list[str]:
    return [label for label, change in by_label.items() if change in player]


def _labels(names: Sequence[str]) -> list[str]:
    """Names without the part that all have in common: center, affine.bias."""
    parts = [name.split(".") for name in names]
    least = min(len(p) for p in parts) - 1
    common = 0
    while common < least and len({p[common] for p in parts}) == 1:
        common += 1
    return [".".join(p[common:]).removesuffix(".present") for p in parts]


def _lattice(builder: Builder, raws: list[dict], players: Players) -> list[Any]:
    """Settings of every subset, by bit mask."""
    built = []
    axes = any(c.name.endswith(".affine.axes") for p in players for c in p)
    for mask in range(2 ** len(players)):
        changes = [c for i, p in enumerate(players) if mask >> i & 1 for c in p]
        try:
            built.append(builder.settings(_mixed(raws[0], raws[1], changes, axes)))
        except RefusedError as error:
            names = ", ".join(_labels([c.name for p in players for c in p]))
            chosen = ", ".join(c.name for c in changes)
            text = f"of {names}, {chosen} cannot be changed without the others: {error}"
            raise RefusedError(text) from None
    target = builder.settings(raws[1])
    if rest := builder.changes(built[-1], target):
        raise RefusedError(f"{', '.join(c.name for c in rest)} cannot be told apart")
    return built


def _mixed(before: dict, after: dict, changes: Sequence[Change], axes: bool) -> dict:
    """Settings with some properties of others; ``axes``: affine axes are one of all."""
    names = {change.name for change in changes}
    for name in names:
        keys = [name.removesuffix(".present")]
        if name.endswith(".pattern"):  # its sizes, and its names of the same axes
            norm = name.removesuffix(".pattern")
            keys.append(f"{norm}.sizes")
            both = _get(before, f"{norm}.affine") and _get(after, f"{norm}.affine")
            if both and not axes:
                keys.append(f"{norm}.affine.axes")
        for key in keys:
            before = put(before, key, _get(after, key))
    return before


def _get(raw: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        raw = raw[part]
    return raw


def _regrouping(
    builder: Builder, raws: list[dict], players: Players, by_label: Mapping[str, Change]
) -> str:
    """The finest grouping by one or two mergers that works, as a config says it."""
    level = [players]
    for _ in range(2):
        level = [merged for one in level for merged in _mergers(one)]
        for candidate in level:
            try:
                _lattice(builder, raws, candidate)
            except RefusedError:
                continue
            named = (_names(player, by_label) for player in candidate)
            shown = [
                f"[{', '.join(group)}]" if len(group) > 1 else group[0]
                for group in named
            ]
            return f"group what belongs together: decompose: [{', '.join(shown)}]"
    return "group what belongs together: decompose: [[a, b], c]"


def _mergers(players: Players) -> Iterator[Players]:
    for i, j in itertools.combinations(range(len(players)), 2):
        rest = [p for n, p in enumerate(players) if n not in (i, j)]
        if rest:
            yield (players[i] + players[j], *rest)
