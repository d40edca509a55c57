"""What a spec does, in words and facts, and every property in which two differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from normjax.layout import Layout
from normjax.pattern import ELLIPSIS, Pattern
from normjax.spec import Affine, NormSpec

FORMULAS = {
    "inside_sqrt": "√({v} + ε)",
    "outside_sqrt": "√{v} + ε",
    "floor_var": "√max({v}, ε)",
    "floor_std": "max(√{v}, ε)",
}
# Texts that name axes differ by the names alone, unless one of these fields differs.
_CAUSES = {
    "statistics": {"pattern", "sizes", "statistics"},
    "reduced": {"pattern", "sizes"},
    "parameters": {"affine"},
    "degenerate": {"pattern", "sizes", "center", "divide", "running"},
}
_SECOND_MOMENT = {"std": "σ²", "rms": "mean(x²)", "l2": "Σx²"}


@dataclass(frozen=True)
class Properties:
    """What a layer does; the facts that ``verify`` checks by measurement.

    Attributes:
        formula: the map of one group.
        statistics: which elements share a mean and a variance.
        removes: what an output no longer tells about its group: ``"offset"`` (exactly),
            ``"scale"`` (up to ε).
        reduced: names of the axes over which one entry moves the others.
        couples_examples: whether an example's output depends on its companions.
        stores: statistics that are kept between batches.
        parameters: learned parameters and their axes.
        train_differs: whether training and inference compute different functions.
        symmetric_jacobian: whether ∂x̂/∂x is symmetric without weights.
        degenerate: where the layer loses its meaning.
    """

    formula: str
    statistics: str
    removes: tuple[str, ...]
    reduced: tuple[str, ...]
    couples_examples: bool
    stores: tuple[str, ...]
    parameters: tuple[str, ...]
    train_differs: bool
    symmetric_jacobian: bool
    degenerate: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """One property in which two specs differ.

    Attributes:
        name: a dotted field of the spec, or an attribute of ``Properties``.
        first: its value in the first spec.
        second: its value in the second spec.
        declared: True for a field; False for what follows from the fields.
    """

    name: str
    first: Any
    second: Any
    declared: bool


def properties(spec: NormSpec) -> Properties:
    """Say what a layer removes, couples and stores, and when it degenerates.

    Example:
        >>> import normjax as nj
        >>> found = nj.properties(nj.batch_norm())
        >>> found.formula, found.couples_examples, found.removes
        ('(x - m) / √(σ² + ε)', True, ('offset', 'scale'))
    """
    pattern = spec.parsed
    example = pattern.example(spec.example)
    couples = example is not None and any(part.reduced for part in example.parts)
    about_mean = spec.divide == "std"
    no_variance = spec.divide == "none" or "variance" in spec.detach
    no_mean = not spec.center or "mean" in spec.detach
    # A centred rms still sees the offset in what it divides by.
    removes = ("offset",) if spec.center and spec.divide in ("std", "none") else ()
    if spec.divide != "none":
        removes += ("scale",)
    return Properties(
        formula=_formula(spec),
        statistics=_statistics(spec, pattern),
        removes=removes,
        reduced=pattern.reduced,
        couples_examples=couples,
        stores=() if spec.running is None else ("mean", "variance"),
        parameters=_parameters(spec.affine),
        train_differs=spec.running is not None,
        symmetric_jacobian=spec.statistics == "input"
        and (spec.center == about_mean or no_variance or (no_mean and no_variance)),
        degenerate=_degenerate(spec, pattern, couples),
    )


def diff(
    first: NormSpec, second: NormSpec, shape: tuple[int, ...] | None = None
) -> tuple[Difference, ...]:
    """Every property that replacing one layer by another changes.

    Args:
        first: a spec.
        second: the spec in its place.
        shape: with it, axes are compared as they are bound to this shape, so that
            patterns with other names and the same meaning are equal.

    Returns:
        Declared differences (fields) first, then what follows from them. A part that
        only one of the two has is the one property ``affine.present`` or
        ``running.present``.

    Example:
        >>> import normjax as nj
        >>> for d in nj.diff(nj.batch_norm(), nj.layer_norm()):
        ...     if d.declared:
        ...         print(d.name, d.first, d.second)
        pattern [...] c ... [c]
        running.present True False
    """
    ours, theirs = flatten(first, shape), flatten(second, shape)
    if first.pattern == second.pattern:
        ours["pattern"] = theirs["pattern"] = first.pattern
    elif shape is not None:  # the bound pattern says it all
        ours, theirs = (
            {k: v for k, v in flat.items() if not k.startswith("sizes.")}
            for flat in (ours, theirs)
        )
    for part in ("affine", "running"):
        if ours[f"{part}.present"] != theirs[f"{part}.present"]:
            ours, theirs = (
                {
                    k: v
                    for k, v in flat.items()
                    if not k.startswith(f"{part}.") or k == f"{part}.present"
                }
                for flat in (ours, theirs)
            )
    names = [*ours, *(name for name in theirs if name not in ours)]
    declared = [
        Difference(name, ours.get(name), theirs.get(name), declared=True)
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
    before, after = vars(properties(first)), vars(properties(second))
    parts = {difference.name.partition(".")[0] for difference in declared}
    follows = [
        Difference(name, before[name], after[name], declared=False)
        for name in before
        if before[name] != after[name] and parts & _CAUSES.get(name, parts)
    ]
    return (*declared, *follows)


def flatten(spec: NormSpec, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Every field by its dotted name, in the order of the fields.

    With ``shape``, the pattern and the affine axes are written by tensor dimension, and
    parts of size one are left out: group norm with one group reads as layer norm does.

    Example:
        >>> import normjax as nj
        >>> flat = flatten(nj.group_norm(groups=1), (8, 5, 6))
        >>> flat["pattern"], flat["affine.axes"], flat["running.present"]
        ('x0 [x1 x2]', 'x2', False)
    """
    flat: dict[str, Any] = {}
    for name, value in spec.to_dict().items():
        if name in ("affine", "running"):
            flat[f"{name}.present"] = value is not None
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": inner for key, inner in value.items()})
        elif name not in ("affine", "running", "sizes"):
            flat[name] = tuple(value) if isinstance(value, list) else value
    if shape is not None:
        layout = Layout.bind(spec.parsed, shape, spec.sizes)
        flat["pattern"] = _bound(layout, range(len(layout.names)), brackets=True)
        flat["example"] = layout.example_axes(spec.example)
        if spec.affine is not None:
            view = layout.parameter(spec.affine.axes).view_shape
            used = [i for i, size in enumerate(view) if size == layout.view_shape[i]]
            named = _named(layout, spec.affine.axes)
            flat["affine.axes"] = _bound(layout, [i for i in used if i in named])
    return flat


def _named(layout: Layout, axes: str) -> set[int]:
    """View axes that a text of names speaks of."""
    wanted = {part.name for part in Pattern.parse(axes).axes}
    return {
        i
        for i, name in enumerate(layout.names)
        if name in wanted or (ELLIPSIS in wanted and name.startswith(ELLIPSIS))
    }


def _bound(layout: Layout, axes, brackets: bool = False) -> str:
    """View axes by tensor dimension; a split dimension shows its sizes."""
    words: list[tuple[str, bool]] = []
    for dim in range(len(layout.shape)):
        parts = [i for i in axes if layout.owner[i] == dim]
        whole = [i for i, owner in enumerate(layout.owner) if owner == dim]
        if len(whole) > 1:
            parts = [i for i in parts if layout.view_shape[i] != 1] or parts[:1]
            whole = [i for i in whole if layout.view_shape[i] != 1] or whole[:1]
        split = len(whole) > 1 and (brackets or len(parts) < len(whole))
        for i in parts if split or brackets else parts[:1]:
            place = whole.index(i)
            text = f"x{dim}.{place}={layout.view_shape[i]}" if split else f"x{dim}"
            words.append((text, brackets and i in layout.reduced))
    text = ""
    for position, (word, reduced) in enumerate(words):
        before = position > 0 and words[position - 1][1]
        after = position + 1 < len(words) and words[position + 1][1]
        text += " " if position else ""
        text += f"{'[' if reduced and not before else ''}{word}"
        text += "]" if reduced and not after else ""
    return text


def _formula(spec: NormSpec) -> str:
    """The map of one group, without the affine part."""
    top = "(x - m)" if spec.center else "x"
    if spec.divide == "none":
        return "x - m" if spec.center else "x"
    bottom = FORMULAS[spec.epsilon_placement].format(v=_SECOND_MOMENT[spec.divide])
    if spec.epsilon_placement == "outside_sqrt":
        bottom = f"({bottom})"
    return f"{top} / {bottom}"


def _statistics(spec: NormSpec, pattern: Pattern) -> str:
    """Which elements share statistics."""
    over = ", ".join(pattern.reduced).replace(ELLIPSIS, "all other axes")
    each = ", ".join(pattern.mapped).replace(ELLIPSIS, "position")
    text = f"over {over}" + (f" for each {each}" if each else "")
    return text if spec.statistics == "input" else f"{text}, {spec.statistics}"


def _parameters(affine: Affine | None) -> tuple[str, ...]:
    if affine is None:
        return ()
    return tuple(
        f"{name} over {affine.axes}"
        for name in ("scale", "bias")
        if getattr(affine, name)
    )


def _degenerate(spec: NormSpec, pattern: Pattern, couples: bool) -> tuple[str, ...]:
    """Where a group is too small, and where statistics do not exist yet."""
    over = " and ".join(pattern.reduced).replace(ELLIPSIS, "the other axes")
    found = []
    if spec.center:
        found.append(f"one element over {over}: only the bias comes out, no gradient")
        if spec.divide == "std":
            found.append(f"two elements over {over}: ±1 comes out, almost no gradient")
    elif spec.divide != "none":
        found.append(f"one element over {over}: only the sign of x is left")
    if couples:
        found.append("a batch of one example: its own positions are the statistics")
    if spec.running is not None and not spec.running.debias:
        found.append("inference before any update: the initial statistics are used")
    return tuple(found)
