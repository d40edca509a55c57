"""What a spec does, in words and facts, and every property in which two differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from normjax.layout import Layout
from normjax.pattern import ELLIPSIS, Dimension, Pattern, dimensions
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
    "degenerate": {
        "pattern",
        "sizes",
        "example",
        "center",
        "divide",
        "epsilon_placement",
        "ddof",
        "statistics",
        "detach",
        "running",
    },
}
# The divisor of a group without variance.
_AT_ZERO = {"inside_sqrt": "√ε", "floor_var": "√ε"}
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
    if spec.statistics != "input":
        removes = ()  # the reference still tells them
    return Properties(
        formula=_formula(spec),
        statistics=_statistics(spec, pattern),
        removes=removes,
        reduced=pattern.reduced,
        couples_examples=couples,
        stores=() if spec.running is None else ("mean", "variance"),
        parameters=_parameters(spec.affine, example),
        train_differs=spec.running is not None,
        symmetric_jacobian=spec.statistics != "blend"
        and (spec.center == about_mean or no_variance or (no_mean and no_variance)),
        degenerate=_degenerate(spec, pattern, example),
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
            named = layout.named(spec.affine.axes)
            flat["affine.axes"] = _bound(layout, [i for i in used if i in named])
    return flat


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
    top, second = "(x - m)" if spec.center else "x", _SECOND_MOMENT.get(spec.divide)
    if spec.statistics == "blend":
        top, second = top.replace("m", "m̄"), second and second.replace("σ", "σ̄")
    if second is None:
        text = top.strip("()")
    else:
        bottom = FORMULAS[spec.epsilon_placement].format(v=second)
        if spec.epsilon_placement == "outside_sqrt":
            bottom = f"({bottom})"
        text = f"{top} / {bottom}"
    return f"r · {text} + d" if spec.statistics == "renorm" else text


def _statistics(spec: NormSpec, pattern: Pattern) -> str:
    """Which elements share statistics."""
    over = ", ".join(pattern.reduced).replace(ELLIPSIS, "all other axes")
    each = ", ".join(pattern.mapped).replace(ELLIPSIS, "position")
    text = f"over {over}" + (f" for each {each}" if each else "")
    ways = {"blend": ", mixed with a reference", "renorm": ", corrected to a reference"}
    return text + ways.get(spec.statistics, "")


def _parameters(affine: Affine | None, example: Dimension | None) -> tuple[str, ...]:
    """Learned ones, or one for each example, which only the caller can know."""
    if affine is None:
        return ()
    named = {name for dim in dimensions(affine.axes) for name in dim.names}
    given = example is not None and named & set(example.names)
    over = f"over {affine.axes}" if affine.axes else "over no axis (one number)"
    return tuple(
        f"{name} {over}{' (given by the caller)' if given else ''}"
        for name in ("scale", "bias")
        if getattr(affine, name)
    )


def _degenerate(
    spec: NormSpec, pattern: Pattern, example: Dimension | None
) -> tuple[str, ...]:
    """Where a group is too small, and where statistics do not exist yet."""
    reduced = set(pattern.reduced)
    positions = example is not None and example.name != ELLIPSIS
    axes = "the positions" if positions else "the other axes"
    over = " and ".join(pattern.reduced).replace(ELLIPSIS, axes)
    found = [
        f"{case} over {over}: {outcome}"
        for case, outcome in _small_groups(spec).items()
    ]
    if positions and reduced == {ELLIPSIS} and _small_groups(spec):
        found[0] += " (instance norm on 1×1 maps)"
    own = set() if example is None else set(example.names)
    # Of a `...` the first axis is the example's, and the others may be positions.
    if reduced & own and (reduced - own or ELLIPSIS in own):
        one = "one example in a batch"
        if example is not None and example.composite:
            mapped = " ".join(part.name for part in example.parts if not part.reduced)
            one = f"one example in each {mapped}"
        found.append(f"{one}: its own positions are the statistics")
    if spec.running is not None:
        mean, variance = (0, 1) if spec.running.debias else spec.running.initial
        stored = f"mean {mean:g} and variance {variance:g}"
        found.append(f"inference before any update: {stored} are used")
        if spec.statistics != "input":
            found.append(f"training before any update: {stored} are the reference")
    return tuple(found)


def _small_groups(spec: NormSpec) -> dict[str, str]:
    """What comes out (x̂) of groups with too few elements or no variance."""
    zero = _AT_ZERO.get(spec.epsilon_placement, "ε")
    top = "(x - m)" if spec.center else "x"
    still = "" if spec.detach else ", no gradient"
    if spec.divide == "none":
        return {"one element": f"0 comes out{still}"} if spec.center else {}
    if spec.statistics == "blend":
        return {"one element": "only its distance from the reference's mean is left"}
    if spec.statistics == "renorm":
        if not (spec.center and spec.divide == "std"):
            return {}
        return {
            "one element": f"d comes out, the distance from the reference{still}",
            "two elements": f"±r + d comes out{still and ', almost no gradient'}",
        }
    found: dict[str, str] = {}
    amplified = f"0 comes out, and noise in x is amplified: times 1/{zero}"
    if spec.center:
        found["one element"] = f"0 comes out{still}"
        if spec.divide == "std":
            if spec.ddof < 2:
                size = "±1" if spec.ddof == 0 else "±1/√2"
                weak = ", almost no gradient" if still else ""
                found["two elements"] = f"{size} comes out{weak}"
            found["equal elements"] = amplified
    elif spec.divide == "std":
        found["one element, or equal ones,"] = f"the variance is 0, x/{zero} comes out"
    else:
        if spec.ddof == 0 or spec.divide == "l2":
            found["one element"] = "only the sign of x is left, almost no gradient"
        found["zeros"] = amplified
    if spec.ddof > 0 and spec.divide != "l2":
        few = "one element" if spec.ddof == 1 else f"{spec.ddof} elements or fewer"
        found.setdefault(few, f"the variance counts as 0, {top}/{zero} comes out")
    return found
