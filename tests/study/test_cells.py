"""Blocks of seeds: what a seed gives depends on the seed alone."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_experiment import Settings, measure

from normjax.study.cells import (
    Cell,
    Curve,
    Row,
    fingerprint,
    kinds,
    program,
    run_block,
    stream,
)

pytestmark = pytest.mark.jax_defaults

PLAIN = Cell("plain", Settings(shift=2.0))


def rows(seeds: tuple[int, ...], size: int, cell: Cell = PLAIN) -> list[Row]:
    return run_block(measure, cell, seeds, size)


def of_seed(found: list[Row], seed: int) -> list[tuple]:
    """Rows of one seed without it, with NaN as text, so that they can be compared."""
    return [tuple(map(repr, row[1:])) for row in found if row.seed == seed]


def same(first: list[Row], second: list[Row], seed: int) -> None:
    """Rows of one seed are equal to a few units of rounding in float32."""
    ours, theirs = ([r for r in rows if r.seed == seed] for rows in (first, second))
    assert [row[:3] for row in ours] == [row[:3] for row in theirs]
    values = [np.array([r.value for r in rows], float) for rows in (ours, theirs)]
    np.testing.assert_allclose(*values, rtol=4 * 2.0**-23)


def test_rows_are_one_for_each_number():
    found = rows((4,), 1)
    assert {row.seed for row in found} == {4}
    by_name: dict[str, list[Row]] = {}
    for row in found:
        by_name.setdefault(row.metric, []).append(row)
    assert [row.coordinate for row in by_name["value"]] == [None]
    assert by_name["extra"] == [Row(4, "extra", None, None)]
    assert [row.coordinate for row in by_name["line"]] == [1.0, 2.0, 3.0]
    assert [row.value for row in by_name["line"]] == [2.0, 4.0, 6.0]
    assert [row.value for row in by_name["line_predicted"]] == [2.0, 4.0, 6.0]
    (diverged,) = by_name["diverged_at"]
    assert isinstance(diverged.value, float)
    assert math.isnan(diverged.value)


def test_values_are_those_of_measure():
    key = jax.random.key(5)
    expected = 2.0 + jax.random.normal(stream(key, "noise"))
    (value,) = [row.value for row in rows((3, 5), 2) if row[:2] == (5, "value")]
    assert value == float(expected)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_seed_does_not_depend_on_the_size_of_its_block(size: int):
    """But for the rounding: another size is another program."""
    same(rows((6, 7), size), rows((7,), 1), 7)


def test_a_seed_does_not_depend_on_its_companions():
    together, apart = rows((1, 2, 3), 3), rows((9, 3, 0), 3)
    assert of_seed(together, 3) == of_seed(apart, 3)
    assert of_seed(together, 3) != of_seed(together, 2)


def test_a_short_block_is_filled_up_and_the_surplus_dropped():
    short = rows((4, 5), 4)
    assert {row.seed for row in short} == {4, 5}
    full = rows((4, 5, 6, 7), 4)
    for seed in (4, 5):
        assert of_seed(short, seed) == of_seed(full, seed)
    assert len(short) == len(full) / 2


def test_blocks_of_one_arm_share_one_program():
    traces = []

    def counted(cell: Cell, key):
        traces.append(cell.arm)
        return measure(cell, key)

    compiled = program(counted, PLAIN)
    first = run_block(counted, PLAIN, (0, 1, 2), 3, compiled)
    second = run_block(counted, PLAIN, (3,), 3, compiled)
    assert traces == ["plain"]
    same(first, rows((2,), 1), 2)
    same(second, rows((3,), 1), 3)


def test_a_diverged_seed_does_not_poison_its_block():
    """Every other number of the block is the same, bit for bit."""
    poisoned = rows((0, 1, 2), 3, Cell("a", Settings(shift=2.0, poison=1)))
    healthy = rows((0, 1, 2), 3)
    for seed in (0, 2):
        assert of_seed(poisoned, seed) == of_seed(healthy, seed)
    bad = {r.metric: r.value for r in poisoned if r.seed == 1 and not r.coordinate}
    assert math.isnan(bad["value"] or 0.0)
    assert bad["diverged_at"] == 7.0
    assert math.isfinite(bad["check.shift"] or 0.0) is False


def test_an_exact_cell_gets_no_key_and_has_no_seed():
    def exact(cell: Cell, key: None) -> dict[str, Any]:
        assert key is None
        return {
            "x": np.float64(0.1),
            "one": 1,
            "pair": ([1, 2], [3.0, 4.0]),
            "none": None,
            "curve": Curve(jnp.array([5.0]), jnp.array([jnp.inf])),
            "arm": len(cell.arm),
        }

    assert run_block(exact, Cell("arm", None), (), 0) == [
        Row(None, "x", None, 0.1),
        Row(None, "one", None, 1.0),
        Row(None, "pair", 1.0, 3.0),
        Row(None, "pair", 2.0, 4.0),
        Row(None, "none", None, None),
        Row(None, "curve", 5.0, math.inf),
        Row(None, "arm", None, 3.0),
    ]


def test_a_curve_has_as_many_values_as_coordinates():
    def broken(cell: Cell, _key: None) -> dict[str, Any]:
        del cell
        return {"curve": ([1.0, 2.0], [1.0])}

    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter"):
        run_block(broken, Cell("a", None), (), 0)


def test_kinds_are_known_without_running():
    found = kinds(measure, PLAIN)
    assert found["value"] is True
    assert found["curve.loss"] is False
    assert found["line_predicted"] is False
    assert found["extra"] is None
    assert kinds(measure, Cell("a", Settings(form="extra")))["extra"] is True


def test_streams_depend_on_the_seed_and_the_name_alone():
    key = jax.random.key(3)
    draw = jax.random.normal(stream(key, "data"), (4,))
    jax.random.normal(stream(key, "noise"), (7,))
    np.testing.assert_array_equal(draw, jax.random.normal(stream(key, "data"), (4,)))
    names = ["data", "init", "order", "shuffle", "hidden_0/kernel", "hidden_1/kernel"]
    seen = {
        jax.random.key_data(stream(jax.random.key(seed), name)).tobytes()
        for name in names
        for seed in range(4)
    }
    assert len(seen) == len(names) * 4
    # Stable between versions of Python and machines: results can be compared.
    assert jax.random.key_data(stream(key, "data")).tolist() == [3063508493, 4100769839]


def test_fingerprints_tell_values_dtypes_and_shapes_apart():
    a = np.arange(6.0)
    assert fingerprint(a) == fingerprint(a.copy()) == fingerprint(a[::1])
    others = [a + 1, a.astype(np.float32), a.reshape(2, 3), a[::-1]]
    assert len({fingerprint(x) for x in (a, *others)}) == 5
    assert fingerprint(a, a) != fingerprint(a)
    assert fingerprint(np.arange(12.0)[::2]) == fingerprint(2 * np.arange(6.0))
