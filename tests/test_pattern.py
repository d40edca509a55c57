from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import refuse
from strategies import patterns, spaced

from normjax.pattern import Axis, Pattern, PatternError

quick = settings(deadline=None, derandomize=True, max_examples=200)

FAMILY = [
    "... [c]",
    "[...] c",
    "b [...] c",
    "b [...] (g [c])",
    "(g [b]) [...] c",
    "[h w i] o",
    "... [d]",
]


@quick
@given(st.data())
def test_prints_back_up_to_spaces(data: st.DataObject):
    pattern = data.draw(patterns())
    text = data.draw(spaced(pattern))
    assert Pattern.parse(text) == pattern
    assert str(Pattern.parse(text)).replace(" ", "") == text.replace(" ", "")


@quick
@given(patterns())
def test_text_is_canonical(pattern: Pattern):
    assert Pattern.parse(str(pattern)) == pattern
    assert hash(Pattern.parse(str(pattern))) == hash(pattern)


@quick
@given(patterns())
def test_axes_are_the_names_of_the_text_and_brackets_mark_the_reduced(pattern: Pattern):
    expected, depth = [], 0
    for token in re.findall(r"\.\.\.|\w+|[\[\]]", str(pattern)):
        if token in "[]":
            depth += 1 if token == "[" else -1
        else:
            expected.append(Axis(token, reduced=depth > 0))
    assert pattern.axes == tuple(expected)
    assert pattern.reduced == tuple(axis.name for axis in expected if axis.reduced)
    assert pattern.mapped == tuple(axis.name for axis in expected if not axis.reduced)


@pytest.mark.parametrize("text", FAMILY)
def test_the_family_is_written_canonically(text: str):
    assert str(Pattern.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "dimensions", "names"),
    [
        ("b [h w] c", ["b", "h", "w", "c"], ("b", "h", "w", "c")),
        ("b[h]w", ["b", "h", "w"], ("b", "h", "w")),
        ("b [...] (g [c])", ["b", "...", "(g c)"], ("b", "...", "g", "c", "(g c)")),
        ("(g [b]) [...] c", ["(g b)", "...", "c"], ("g", "b", "...", "c", "(g b)")),
        ("(a [b c] d) [e]", ["(a b c d)", "e"], ("a", "b", "c", "d", "e", "(a b c d)")),
        ("([c])", ["(c)"], ("c", "(c)")),
    ],
)
def test_dimensions_and_names(text: str, dimensions: list[str], names: tuple[str, ...]):
    pattern = Pattern.parse(text)
    assert [dimension.name for dimension in pattern.dimensions] == dimensions
    assert pattern.names == names


ERRORS = {
    "duplicate": ("b [h b]", "     ^", "'b' stands here twice: give each axis its own"),
    "duplicate in ( )": ("g (g [c])", "   ^", "'g' stands here twice"),
    "second ...": ("... [...]", "     ^", "'...' stands here twice"),
    "nested [ ]": ("b [h [w] c", "     ^", "brackets do not nest: close the first one"),
    "nested [ ] in ( )": ("(b [h [w]])", "      ^", "brackets do not nest"),
    "nested ( )": ("(g (h [c]))", "   ^", "parentheses do not nest: close the first"),
    "( ) in [ ]": ("[b (g) c]", "   ^", "write the brackets inside it"),
    "( ) in [ ], crossed": ("[b (g] c)", "   ^", "a parenthesis cannot stand inside"),
    "crossed": ("(b [g) c]", "     ^", "unexpected ')': close '[' first"),
    "crossed back": ("(b g] c", "    ^", "unexpected ']': close '(' first"),
    "unclosed [": ("b [h w", "  ^", "'[' is never closed: add ']'"),
    "unclosed (": ("[b] (g", "    ^", "'(' is never closed: add ')'"),
    "unclosed [ in (": ("b (g [c", "     ^", "'[' is never closed: add ']'"),
    "unopened ]": ("b h] c", "   ^", "unexpected ']': nothing is open"),
    "unopened )": ("[b] h)", "     ^", "unexpected ')': nothing is open"),
    "empty [ ]": ("b [ ] c", "    ^", "empty '[]': put names inside"),
    "empty ( )": ("[b] ()", "     ^", "empty '()': put names inside"),
    "empty": ("", "^", "empty pattern: name the axes"),
    "blank": ("   ", "^", "empty pattern: name the axes"),
    "a named ...": ("b s... [c]", "   ^", "'...' has no name: put a space before it"),
    "a name on ...": ("...s [c]", "^", "'...' has no name"),
    "... in ( )": ("[b] (... c)", "     ^", "'...' cannot share a dimension: name the"),
    "... in [ ] in ( )": ("(g [...])", "    ^", "'...' cannot share a dimension"),
    "minus": ("b-c", " ^", "unexpected '-': a pattern has names, '...', '[ ]' and"),
    "digit first": ("[2b]", " ^", "unexpected '2'"),
    "two dots": (".. [c]", "^", "unexpected '.'"),
    "four dots": (".... [c]", "   ^", "unexpected '.'"),
    "comma": ("[h, w]", "  ^", "unexpected ','"),
    "not ASCII": ("hé [c]", " ^", "unexpected 'é'"),
}


@pytest.mark.parametrize(("text", "caret", "message"), ERRORS.values(), ids=ERRORS)
def test_the_caret_stands_under_the_error(text: str, caret: str, message: str):
    with pytest.raises(PatternError, match=re.escape(message)) as caught:
        Pattern.parse(text)
    error = caught.value
    assert error.position == caret.index("^")
    assert error.text == text
    assert str(error).split("\n") == [error.message, f"  {text}", f"  {caret}"]


def test_the_caret_stays_under_the_error_when_the_text_has_line_breaks():
    with pytest.raises(PatternError, match="never closed") as caught:
        Pattern.parse("b\n[c\td")
    assert str(caught.value).split("\n")[1:] == ["  b [c d", "    ^"]


def parse(text: str) -> Pattern | PatternError:
    try:
        return Pattern.parse(text)
    except PatternError as error:
        return error


@quick
@given(st.text(alphabet="ab_1[]() .é\n-", max_size=12))
def test_any_text_is_a_pattern_or_an_error_that_points_into_it(text: str):
    found = parse(text)
    if isinstance(found, Pattern):
        assert "".join(str(found).split()) == "".join(text.split())
        assert parse(str(found)) == found
    else:
        assert 0 <= found.position <= len(text)
        assert str(found).count("\n") == 2


@pytest.mark.parametrize("value", [["b"], None, 3, Pattern.parse("[c]")])
def test_what_is_no_text_is_refused_with_the_yaml_hint(value: Any):
    message = f"a pattern is a string, got {value!r}; in YAML put it in quotes"
    with pytest.raises(TypeError, match=re.escape(message)):
        Pattern.parse(value)


@quick
@given(st.data())
def test_from_axes_round_trip(data: st.DataObject):
    ndim = data.draw(st.integers(1, 6))
    chosen = data.draw(st.lists(st.integers(0, ndim - 1), unique=True))
    written = [axis - data.draw(st.sampled_from([0, ndim])) for axis in chosen]
    pattern = Pattern.from_axes(ndim, written)
    assert Pattern.parse(str(pattern)) == pattern
    assert [axis.name for axis in pattern.axes] == [f"x{i}" for i in range(ndim)]
    assert pattern.reduced == tuple(f"x{axis}" for axis in sorted(chosen))


@pytest.mark.parametrize(
    ("ndim", "axes", "text"),
    [
        (4, (1, 2), "x0 [x1 x2] x3"),
        (4, (3, 0), "[x0] x1 x2 [x3]"),
        (2, -1, "x0 [x1]"),
        (1, [0], "[x0]"),
    ],
)
def test_from_axes_joins_neighbors(ndim: int, axes: int | list[int], text: str):
    assert str(Pattern.from_axes(ndim, axes)) == text


@pytest.mark.parametrize("axis", [3, -4])
def test_from_axes_out_of_range(axis: int):
    message = f"reduction axis {axis} is out of range for 3 dimensions; choose from -3"
    with refuse(message):
        Pattern.from_axes(3, (0, axis))


def test_from_axes_refuses_one_axis_twice():
    message = "reduction axes (0, -3) name one axis twice: give each one once"
    with refuse(message):
        Pattern.from_axes(3, (0, -3))
