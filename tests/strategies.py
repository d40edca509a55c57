"""What hypothesis draws from: patterns, patterns bound to a shape, and specs."""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

from hypothesis import strategies as st

from normjax.layout import Layout
from normjax.pattern import ELLIPSIS, Bracket, Parenthesis, Pattern
from normjax.spec import Affine, NormSpec, Precision, Running

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,2}", fullmatch=True)
# A part is 0 for a name outside brackets, or the number of names in one bracket.
PARTS = st.integers(0, 2)
PARENTHESES = st.lists(PARTS, min_size=1, max_size=3)
ITEMS = st.lists(PARTS | PARENTHESES, min_size=1, max_size=4)


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    """Any valid pattern, with or without brackets, parentheses and ``...``."""
    items = draw(ITEMS)
    flat = [[item] if isinstance(item, int) else item for item in items]
    size = sum(max(1, part) for parts in flat for part in parts)
    names = iter(draw(st.lists(NAMES, min_size=size, max_size=size, unique=True)))

    def part(number: int) -> str | Bracket:
        if number == 0:
            return next(names)
        return Bracket(tuple(next(names) for _ in range(number)))

    built: list = [
        part(item) if isinstance(item, int) else Parenthesis(tuple(map(part, item)))
        for item in items
    ]
    if draw(st.booleans()):
        dots = draw(st.sampled_from([ELLIPSIS, Bracket((ELLIPSIS,))]))
        built.insert(draw(st.integers(0, len(built))), dots)
    return Pattern(tuple(built))


@st.composite
def spaced(draw: st.DrawFn, pattern: Pattern) -> str:
    """The pattern's text, with as few or as many spaces as the notation allows."""
    tokens = re.findall(r"\.\.\.|\w+|[^\w\s]", str(pattern))
    text = " " * draw(st.integers(0, 2))
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        words = token not in "[]()" and following not in ("", *"[]()")
        text += token + " " * draw(st.integers(int(words), 2))
    return text


class Bound(NamedTuple):
    """A layout, and the sizes that it was made from."""

    layout: Layout
    view: tuple[int, ...]
    sizes: dict[str, int]


@st.composite
def layouts(draw: st.DrawFn) -> Bound:
    """A pattern that reduces something, on a shape that it fits."""
    pattern = draw(patterns().filter(lambda p: p.reduced))
    alone = pattern.reduced == (ELLIPSIS,)
    extra = draw(st.integers(1 if alone else 0, 2))
    view: list[int] = []
    shape: list[int] = []
    sizes: dict[str, int] = {}
    for dimension in pattern.dimensions:
        count = extra if dimension.name == ELLIPSIS else len(dimension.parts)
        drawn = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
        view.extend(drawn)
        if not dimension.composite:
            shape.extend(drawn)
            continue
        shape.append(prod(drawn))
        given = dict(zip(dimension.names, drawn, strict=True))
        if draw(st.booleans()):
            del given[draw(st.sampled_from(dimension.names))]
        sizes |= given
    return Bound(Layout.bind(pattern, tuple(shape), sizes), tuple(view), sizes)


# For every field of NormSpec, values besides its default.
FIELDS: dict[str, list] = {
    "pattern": ["b [h] (g [c])", "[b h] (g [c])", "b h (g [c])"],
    "sizes": [{"g": 2}, {"g": 3, "c": 4}],
    "example": [None, "h", "(g c)"],
    "center": [False],
    "divide": ["rms", "l2", "none"],
    "epsilon": [0.0, 1e-3, 1],
    "epsilon_placement": ["outside_sqrt", "floor_var", "floor_std"],
    "ddof": [1, 2],
    "statistics": ["blend", "renorm"],
    "mean_weight": [0.0, 0.25],
    "variance_weight": [0, 0.5],
    "r_max": [1.0, 2],
    "d_max": [0.0, 7.5],
    "detach": ["mean", ("variance",), ["mean", "variance"]],
    "masked_output": ["zero", "passthrough"],
    "single": ["error"],
    "axis_names": ["i", ("i", "j")],
    "affine": ["c", "b (g c)", Affine("h", bias=False, stored="1+w", cast="before")],
    "running": [
        Running(),
        Running(0.9, ddof=1, debias=True, initial=(0, 0), nonfinite="skip"),
        Running(average="cumulative", initial=(1, 2)),
    ],
    "precision": [
        Precision("float64"),
        Precision(algorithm="two_pass", output="bfloat16"),
        Precision(algorithm="one_pass"),
    ],
}


def specs() -> st.SearchStrategy[NormSpec]:
    """Specs with any of their fields given."""
    choices = {name: st.sampled_from(values) for name, values in FIELDS.items()}
    pattern = {"pattern": choices.pop("pattern")}
    fields = st.fixed_dictionaries(pattern, optional=choices)
    return fields.map(lambda given: NormSpec(**given))
