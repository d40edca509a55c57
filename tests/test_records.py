from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import refuse

from normjax.records import (
    Record,
    check_choice,
    check_count,
    check_field,
    check_flag,
    check_number,
    names,
    pairs,
    suggest,
)


@dataclass(frozen=True, repr=False)
class Part(Record):
    axes: str
    flag: bool = True


@dataclass(frozen=True, repr=False)
class Whole(Record):
    word: str = "w"
    number: Any = 1.0
    several: tuple = ()
    sizes: tuple = ()
    part: Part | None = None


FULL = Whole("v", 2.0, ("a", "b"), (("g", 8),), Part("c", flag=False))


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (Whole(), "Whole()"),
        (Whole("v"), "Whole(word='v')"),
        (Whole(number=1), "Whole(number=1)"),
        (Whole(part=Part("c")), "Whole(part='c')"),
        (
            FULL,
            "Whole(word='v', number=2.0, several=('a', 'b'), sizes={'g': 8}, "
            "part=Part('c', flag=False))",
        ),
    ],
)
def test_repr_shows_what_differs_from_the_defaults(record: Whole, text: str):
    assert repr(record) == text


@pytest.mark.parametrize("number", [np.float64(1), jnp.zeros(2), object()])
def test_repr_compares_no_arrays_and_placeholders_with_the_default(number: object):
    assert repr(Whole(number=number)) == f"Whole(number={number!r})"


def test_repr_of_a_traced_record():
    shown = []
    jax.jit(lambda x: shown.append((repr(Whole(number=x)), repr(x))))(1.0)
    assert [text for text, _ in shown] == [f"Whole(number={x})" for _, x in shown]
    assert len(shown) == 1


def test_replace():
    assert FULL.replace(word="w", number=1.0) == dataclasses.replace(
        FULL, word="w", number=1.0
    )
    assert FULL.replace(**{"part.flag": True}).part == Part("c")
    both = FULL.replace(part=Part("d"), **{"part.flag": False, "sizes.h": 2})
    assert both.part == Part("d", flag=False)
    assert dict(both.sizes) == {"g": 8, "h": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wrod": 1}, "Whole has no field 'wrod'; did you mean 'word'?"),
        ({"x": 1}, "no field 'x'; expected one of word, number, several, sizes, part"),
        ({"prat.flag": 1}, "Whole has no field 'prat'; did you mean 'part'?"),
        ({"part.flga": 1}, "Part has no field 'flga'; did you mean 'flag'?"),
        (
            {"part": None, "part.flag": 1},
            "part.flag cannot be set, since part is None: set part as a whole",
        ),
        ({"word.x": 1}, "word.x cannot be set, since word is 'v': set word as"),
        ({"several.a": 1}, "several.a cannot be set, since several is ('a', 'b')"),
    ],
)
def test_replace_refuses(changes: dict[str, Any], message: str):
    with refuse(message):
        FULL.replace(**changes)


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError, match="word"):
        FULL.word = "w"  # pyright: ignore[reportAttributeAccessIssue]


def test_to_dict_is_plain_data():
    assert FULL.to_dict() == {
        "word": "v",
        "number": 2.0,
        "several": ["a", "b"],
        "sizes": {"g": 8},
        "part": {"axes": "c", "flag": False},
    }
    empty = Whole().to_dict()
    assert (empty["several"], empty["sizes"], empty["part"]) == ([], [], None)


@pytest.mark.parametrize("value", [np.float32(0.5), jnp.array(0.5), 0.5])
def test_to_dict_turns_numbers_of_numpy_and_jax_into_floats(value: Any):
    number = Whole(number=value).to_dict()["number"]
    assert type(number) is float
    assert number == 0.5


@pytest.mark.parametrize(
    ("value", "expected"), [("a", ("a",)), (["a", "b"], ("a", "b")), ((), ())]
)
def test_names(value: Any, expected: tuple[str, ...]):
    assert names(value) == expected


def test_pairs_are_sorted():
    assert pairs("sizes", {"h": 1, "g": 2}) == (("g", 2), ("h", 1))
    assert pairs("sizes", [("h", 1), ("g", 2)]) == (("g", 2), ("h", 1))


@pytest.mark.parametrize("value", [8, None, "g", ["gh", 3], {"g": 1, 2: 3}])
def test_pairs_refuse_what_is_no_dict(value: Any):
    message = f"sizes is {value!r}, expected a dict, for instance {{'g': 8}}"
    with refuse(message):
        pairs("sizes", value)


@pytest.mark.parametrize("value", [1, 0, None, "yes", np.bool_(True)])
def test_check_flag(value: object):
    check_flag("flag", True)
    check_flag("flag", False)
    message = f"flag is {value!r}, expected True or False"
    with refuse(message):
        check_flag("flag", value)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "2", np.int64(2)])
def test_check_count(value: object):
    check_count("ddof", 1, least=1)
    check_count("ddof", 0)
    message = f"ddof is {value!r}, expected a whole number, 1 or more"
    with refuse(message):
        check_count("ddof", value, least=1)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("sdt", "; did you mean 'std'?"),
        (None, ""),
        (["std"], "; did you mean 'std'?"),
        (2, ""),
    ],
)
def test_check_choice(value: object, hint: str):
    check_choice("divide", "rms", ("std", "rms"))
    message = f"divide is {value!r}, expected one of 'std', 'rms'{hint}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_choice("divide", value, ("std", "rms"))


def test_check_field():
    check_field(Part, "axes")
    with refuse("Part has no field 'axis'; did you mean 'ax"):
        check_field(Part, "axis")
    with refuse("Part has no field 'q'; expected one of axes, flag"):
        check_field(Part, "q")


@pytest.mark.parametrize(
    ("known", "hint"),
    [
        (["flag", "axes"], "; did you mean 'axes'?"),
        (iter(["flag", "wide"]), "; expected one of flag, wide"),
        ([], ""),
    ],
)
def test_suggest(known: Any, hint: str):
    assert suggest("axis", known) == hint


@pytest.mark.parametrize(
    "value", [0, 1.0, 0.5, np.float32(0.5), np.array(0.5), np.array(1), jnp.array(9.0)]
)
def test_check_number_accepts_real_numbers_and_scalar_arrays(value: object):
    check_number("decay", value, most=1)


def test_check_number_accepts_infinity_and_numbers_above_one_where_told():
    check_number("r_max", float("inf"), infinite=True)
    check_number("epsilon", 2.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "decay is None, expected a number"),
        ("0.9", "decay is '0.9', expected a number"),
        (True, "decay is True, expected a number"),
        (0.9j, "decay is 0.9j, expected a number"),
        (float("nan"), "decay is nan, expected a finite number"),
        (float("inf"), "decay is inf, expected a finite number"),
        (-0.1, "decay is -0.1, expected between 0 and 1"),
        (1.5, "decay is 1.5, expected between 0 and 1"),
        (
            np.ones(3),
            "decay has shape (3,) and dtype float64, expected one real number",
        ),
        (np.array(1j), "decay has shape () and dtype complex128, expected one real"),
        (np.array(True), "dtype bool, expected one real number; jax.vmap sweeps over"),
    ],
)
def test_check_number_refuses(value: object, message: str):
    with refuse(message):
        check_number("decay", value, most=1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "r_max is nan, expected a finite number"),
        (-1, "r_max is -1, expected 0 or more"),
    ],
)
def test_check_number_without_an_upper_bound(value: object, message: str):
    with refuse(message):
        check_number("r_max", value, infinite=True)
