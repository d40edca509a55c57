"""The comparison of libraries: its reference, what it must catch, and its form."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import correctness
from benchmarks.correctness import INPUTS, Input, error, exact, view
from benchmarks.libraries import Layer, layers
from benchmarks.readme import put

import normjax as nj

pytestmark = pytest.mark.jax_defaults


@pytest.mark.parametrize("kind", correctness.SHAPES)
def test_the_reference_gradient_is_that_of_the_reference_value(kind):
    """By central differences in float64, along a random direction."""
    shape = (2, 3, 2, 64) if kind == "group" else (5, 7)
    x, bar, along = np.random.default_rng(0).normal(1, 2, (3, *shape))
    step = 1e-6
    ends = [exact(kind, x + h * along, bar, 1e-3).y for h in (step, -step)]
    slope = np.sum((ends[0] - ends[1]) * bar.reshape(ends[0].shape)) / (2 * step)
    found = exact(kind, x, bar, 1e-3).gradient.reshape(shape)
    # u / step for the differences, step² for what they leave out.
    assert np.vdot(found, along) == pytest.approx(slope, rel=1e-6)
    assert view(kind, shape)[1][-1] in (-1, 0)


def test_errors_are_small_where_a_library_is_right_and_large_where_not():
    """N01: Flax's one-pass variance at an offset of 1e4; and a planted error."""
    shape, (benign, offset, *_) = (16, 64), INPUTS
    found = {}
    for given in (benign, offset):
        x = given.draw(shape)
        both, _ = layers("layer", x)
        for name in ("normjax", "linen"):
            found[name, given.name] = correctness.compared(name, "layer", both[name], x)
    u = 2.0**-24
    assert found["normjax", "benign"].value < 16 * u
    assert found["linen", "benign"].value < 64 * u
    assert found["normjax", "offset 1e4"].value < 16 * u
    assert found["normjax", "offset 1e4"].gradient < 1e4 * u
    assert found["linen", "offset 1e4"].value > 1
    assert found["linen", "offset 1e4"].gradient > 1e6

    x = benign.draw(shape)
    unbiased = Layer(lambda _, x: nj.normalize(nj.layer_norm(ddof=1), x), {})
    planted = correctness.compared("normjax", "layer", unbiased, x)
    assert planted.value == pytest.approx(1 - np.sqrt(63 / 64), rel=0.01)
    assert error(jnp.array([jnp.nan]), np.ones(1)) == np.inf


def test_stored_statistics_are_those_of_each_convention():
    x = Input("", 3, 2).draw((32, 4))
    both, _ = layers("batch", x)
    for name in ("normjax", "linen"):
        measured: Any = correctness.compared(name, "batch", both[name], x).stored
        assert measured < 64 * 2.0**-24
    wrong = both["linen"]._replace(stored=lambda x: (jnp.mean(x, 0), jnp.var(x, 0)))
    measured = correctness.compared("linen", "batch", wrong, x).stored
    assert measured > 1


def test_the_smallest_form_prints_every_table():
    text = list(correctness.sections(smoke=True))
    errors, stored, held = (part for part in text if part.startswith("|"))
    for part in (errors, stored, held):
        first = [line.split(" | ")[0].strip("| ") for line in part.splitlines()[2:]]
        assert [name.split(", ")[0] for name in first] == ["batch norm"] * 2
    heads = errors.splitlines()[0].strip("| ").split(" | ")[1:]
    absent = {part.split()[1].rstrip(":") for part in text if part[:7] == "Without"}
    here = {head.removeprefix("flax ") for head in heads}
    assert here | absent == set(correctness.LIBRARIES)
    assert {"normjax", "linen"} <= here


def test_a_block_is_put_between_its_markers(tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- a -->\nold\n<!-- b -->\nafter\n")
    put("new", "<!-- a -->", "<!-- b -->", path)
    assert path.read_text() == "before\n<!-- a -->\nnew\n<!-- b -->\nafter\n"
    with pytest.raises(SystemExit) as stopped:
        put("new", "<!-- c -->", "<!-- b -->", path)
    assert stopped.value.code == 2
    message = "page.md needs the lines <!-- c --> and <!-- b -->\n"
    assert capsys.readouterr().err == message


def test_moments_in_float64_do_not_cancel():
    """N04: x has 24 bits, the reference 53."""
    x = 2.0**24 + np.array([[0.0, 2, 4, 6]])
    right = exact("layer", x, np.ones((1, 4)), 0.0)
    np.testing.assert_allclose(right.y, (np.arange(4) - 1.5)[None] / np.sqrt(1.25))
