from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import refuse
from strategies import Bound, layouts

from normjax.layout import Layout, ParameterLayout
from normjax.pattern import ELLIPSIS, Pattern

quick = settings(deadline=None, derandomize=True, max_examples=150)


def bind(text: str, shape: tuple[int, ...], **sizes: int) -> Layout:
    return Layout.bind(Pattern.parse(text), shape, sizes)


@quick
@given(layouts())
def test_the_view_has_the_sizes_of_the_parts_and_the_same_elements(bound: Bound):
    layout = bound.layout
    assert layout.view_shape == bound.view
    for dim, size in enumerate(layout.shape):
        parts = [i for i, owner in enumerate(layout.owner) if owner == dim]
        assert prod(layout.view_shape[i] for i in parts) == size
    assert layout.owner == tuple(sorted(layout.owner))
    assert len(layout.names) == len(set(layout.names)) == len(layout.view_shape)


@quick
@given(layouts())
def test_mapped_and_reduced_axes_partition_the_view(bound: Bound):
    layout = bound.layout
    assert sorted(layout.mapped + layout.reduced) == list(range(len(bound.view)))
    bracketed = {axis.name for axis in layout.pattern.axes if axis.reduced}
    for i, name in enumerate(layout.names):
        written = ELLIPSIS if name.startswith(ELLIPSIS) else name
        assert (i in layout.reduced) == (written in bracketed)


@quick
@given(layouts())
def test_shapes_of_the_statistics_are_those_of_a_numpy_reduction(bound: Bound):
    layout = bound.layout
    view = np.zeros(layout.shape).reshape(layout.view_shape)
    assert view.sum(layout.reduced).shape == layout.mapped_shape
    assert view.sum(layout.reduced, keepdims=True).shape == layout.keep_shape
    assert layout.group_size * prod(layout.mapped_shape) == prod(layout.shape)


@quick
@given(st.data())
def test_parameters_have_one_entry_for_each_index_of_their_axes(data: st.DataObject):
    layout = data.draw(layouts()).layout
    dimensions = layout.pattern.dimensions
    chosen = [dim for dim in dimensions if data.draw(st.booleans())] or [dimensions[0]]
    shape, view_shape = layout.parameter(" ".join(dim.name for dim in chosen))
    # Over whole dimensions, a parameter is shaped as these dimensions of the tensor.
    names = {name for dim in chosen for name in dim.names}
    of = [ELLIPSIS if n.startswith(ELLIPSIS) else n for n in layout.names]
    kept = sorted({layout.owner[i] for i, name in enumerate(of) if name in names})
    assert shape == tuple(layout.shape[dim] for dim in kept)
    assert prod(view_shape) == prod(shape)
    assert np.broadcast_shapes(view_shape, layout.view_shape) == layout.view_shape


@quick
@given(st.data())
def test_integers_survive_the_notation(data: st.DataObject):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    indices = st.integers(0, len(shape) - 1)
    axes = data.draw(st.lists(indices, min_size=1, unique=True))
    layout = Layout.bind(Pattern.from_axes(len(shape), axes), shape)
    assert layout.reduction_axes == layout.reduced == tuple(sorted(axes))
    assert layout.view_shape == shape


# pattern, shape, sizes: view_shape, reduced, mapped_shape, reduction_axes
FAMILY = [
    ("... [c]", (2, 5, 6), {}, (2, 5, 6), (2,), (2, 5), (2,)),
    ("... [c]", (6,), {}, (6,), (0,), (), (0,)),
    ("... [h w c]", (2, 3, 4, 5), {}, (2, 3, 4, 5), (1, 2, 3), (2,), (1, 2, 3)),
    ("[...] c", (2, 5, 6), {}, (2, 5, 6), (0, 1), (6,), (0, 1)),
    ("[b] c [...]", (2, 6, 5), {}, (2, 6, 5), (0, 2), (6,), (0, 2)),
    ("b [...] c", (2, 5, 5, 6), {}, (2, 5, 5, 6), (1, 2), (2, 6), (1, 2)),
    ("b c [...]", (2, 6, 5, 5), {}, (2, 6, 5, 5), (2, 3), (2, 6), (2, 3)),
    ("b [...] (g [c])", (2, 5, 6), {"g": 3}, (2, 5, 3, 2), (1, 3), (2, 3), (1, 2)),
    ("b [...] (g [c])", (2, 5, 6), {"c": 3}, (2, 5, 2, 3), (1, 3), (2, 2), (1, 2)),
    ("b (g [c]) [...]", (2, 6, 5), {"g": 3}, (2, 3, 2, 5), (2, 3), (2, 3), (1, 2)),
    ("(g [b]) [...] c", (8, 5, 6), {"g": 4}, (4, 2, 5, 6), (1, 2), (4, 6), (0, 1)),
    ("b (g [h c])", (2, 12), {"g": 2, "h": 3}, (2, 2, 3, 2), (2, 3), (2, 2), (1,)),
    ("[h w i] o", (3, 3, 4, 8), {}, (3, 3, 4, 8), (0, 1, 2), (8,), (0, 1, 2)),
]


@pytest.mark.parametrize(
    ("text", "shape", "sizes", "view", "reduced", "mapped", "axes"), FAMILY
)
def test_the_family(text, shape, sizes, view, reduced, mapped, axes):
    layout = bind(text, shape, **sizes)
    assert layout.view_shape == view
    assert layout.reduced == reduced
    assert layout.mapped_shape == mapped
    assert layout.reduction_axes == axes


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("b [h w] c", (2, 5, 6), "has 4 dimensions, the tensor has 3: shape (2, 5, 6)"),
        ("b [c]", (2, 5, 6), "pattern 'b [c]' has 2 dimensions, the tensor has 3"),
        ("b [...] c", (6,), "has at least 2 dimensions, the tensor has 1: shape (6,)"),
        ("b (g [c])", (2, 6), "(g c) needs a size for all of its parts but one; pass"),
        ("(g h [c])", (6,), "pass sizes={'g': ...}"),
    ],
)
def test_shapes_that_do_not_fit(text: str, shape: tuple[int, ...], message: str):
    with refuse(message):
        bind(text, shape)


@pytest.mark.parametrize(
    ("text", "shape", "sizes", "message"),
    [
        ("b (g [c])", (2, 6), {"g": 4}, "g=4 does not divide dimension 1 of size 6"),
        ("(g [b]) c", (9, 6), {"g": 4}, "g=4 does not divide dimension 0 of size 9"),
        (
            "b (g h [c])",
            (2, 8),
            {"g": 2, "h": 3},
            "g=2 * h=3 does not divide dimension 1 of size 8",
        ),
        (
            "b (g [c])",
            (2, 6),
            {"g": 2, "c": 4},
            "g=2 * c=4 does not match dimension 1 of size 6",
        ),
        ("b [c]", (2, 6), {"c": 4}, "c=4 does not match dimension 1 of size 6"),
    ],
)
def test_sizes_that_do_not_fit_name_both_numbers(text, shape, sizes, message):
    with refuse(f"pattern '{text}': {message}"):
        bind(text, shape, **sizes)


def test_sizes_may_be_pairs_in_any_order():
    pattern = Pattern.parse("b (g h [c])")
    pairs = Layout.bind(pattern, (2, 12), (("h", 2), ("g", 3)))
    assert pairs == bind("b (g h [c])", (2, 12), g=3, h=2)
    assert pairs.view_shape == (2, 3, 2, 2)


@pytest.mark.parametrize(
    ("text", "shape", "example", "axes"),
    [
        # "auto" is the first dimension of the pattern ...
        ("b [h w] c", (2, 3, 4, 5), "auto", (0,)),
        ("[b] c", (2, 3), "auto", (0,)),
        ("[h w i] o", (3, 3, 4, 8), "auto", (0,)),
        # ... of `...` its first axis, if it has one ...
        ("... [c]", (2, 3, 4), "auto", (0,)),
        ("[...] c", (2, 3, 4), "auto", (0,)),
        ("[...]", (2, 3), "auto", (0,)),
        ("... b [c]", (2, 3), "auto", ()),
        # ... of a parenthesis the whole dimension ...
        ("(g [b]) [...] c", (8, 5, 6), "auto", (0, 1)),
        # ... unless it is the bracketed last axis.
        ("[c]", (3,), "auto", ()),
        ("... [c]", (3,), "auto", ()),
        ("[...]", (3,), "auto", ()),
        ("[c] ...", (3,), "auto", ()),
        ("(g [c])", (8,), "auto", ()),
        # A name takes the dimension that it belongs to.
        ("[h w] b c", (3, 4, 2, 5), "b", (2,)),
        ("[b] c", (2, 3), "b", (0,)),
        ("t (g [b]) c", (5, 8, 6), "g", (1, 2)),
        ("t (g [b]) c", (5, 8, 6), "b", (1, 2)),
        ("t (g [b]) c", (5, 8, 6), "(g b)", (1, 2)),
        ("[c] ...", (3, 4, 5), "...", (1,)),
        ("[c] ...", (3,), "...", ()),
        ("[c]", (3,), "c", (0,)),
        # None says that there is none.
        ("[h w i] o", (3, 3, 4, 8), None, ()),
    ],
)
def test_example_axes(text, shape, example, axes):
    sizes = {"g": 4} if "g" in text else {}
    assert bind(text, shape, **sizes).example_axes(example) == axes


@pytest.mark.parametrize(
    ("text", "shape", "axes", "expected"),
    [
        ("... [c]", (2, 5, 6), "c", ((6,), (1, 1, 6))),
        ("... [h w c]", (2, 3, 4, 5), "h w c", ((3, 4, 5), (1, 3, 4, 5))),
        ("b [c] ...", (2, 6, 5), "c", ((6,), (1, 6, 1))),
        ("b [...] (g [c])", (2, 5, 6), "(g c)", ((6,), (1, 1, 3, 2))),
        ("b [...] (g [c])", (2, 5, 6), "g c", ((3, 2), (1, 1, 3, 2))),
        ("b [...] (g [c])", (2, 5, 6), "g", ((3,), (1, 1, 3, 1))),
        ("b [...] (g [c])", (2, 5, 6), "b (g c)", ((2, 6), (2, 1, 3, 2))),
        ("[b] ... c", (2, 4, 5, 6), "... c", ((4, 5, 6), (1, 4, 5, 6))),
        ("[b] ... c", (2, 6), "... c", ((6,), (1, 6))),
    ],
)
def test_parameter_shapes(text, shape, axes, expected):
    sizes = {"g": 3} if "g" in text else {}
    assert bind(text, shape, **sizes).parameter(axes) == ParameterLayout(*expected)


@pytest.mark.parametrize("axes", ["c b", "(g c) b", "c g"])
def test_parameter_axes_keep_the_order_of_the_pattern(axes: str):
    message = f"affine axes '{axes}' are not in the order of the pattern 'b (g [c])'"
    with refuse(message):
        bind("b (g [c])", (2, 6), g=3).parameter(axes)
