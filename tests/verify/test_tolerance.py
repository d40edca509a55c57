from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from normjax.verify import Check, normwise, rounding_tolerance
from normjax.verify.tolerance import difference_tolerance


def test_tolerance_grows_with_size_and_conditioning_and_is_capped():
    u = 2.0**-24
    assert rounding_tolerance("float32", 10) == 64 * u * 10
    assert rounding_tolerance("float32", 10, 5.0) == 64 * u * 15
    assert rounding_tolerance(jnp.float64, 10) == 64 * 2.0**-53 * 10
    assert difference_tolerance("float32", 9, 2.0) == 8 * u ** (2 / 3) * 5
    assert rounding_tolerance("float32", 10**9) == 0.5


def test_a_narrower_output_is_rounded_once_more():
    wide = rounding_tolerance("float32", 10)
    assert rounding_tolerance("float32", 10, output="float32") == wide
    assert rounding_tolerance("float32", 10, output="bfloat16") == wide + 2 * 2.0**-8


def test_normwise_is_relative_to_each_row():
    expected = np.array([[3.0, 4.0], [0.3, 0.4]])
    first, second = (
        np.array([[0.0, 0.5], [0.0, 0.0]]),
        np.array([[0.0, 0.0], [0.0, 0.5]]),
    )
    assert normwise(expected + first, expected) == pytest.approx(0.1)
    assert normwise(expected + second, expected) == pytest.approx(1.0)


def test_normwise_does_not_grow_with_the_number_of_groups():
    expected = np.ones((1, 4))
    one = normwise(expected * 1.01, expected)
    many = normwise(np.ones((1000, 4)) * 1.01, np.ones((1000, 4)))
    assert many == pytest.approx(one)


def test_normwise_of_a_vanishing_row_is_relative_to_least():
    assert normwise(np.full((1, 1), 1e-9), np.zeros((1, 1))) == 1e-9
    assert normwise(np.full((1, 1), 1e-9), np.zeros((1, 1)), 10.0) == 1e-10


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_normwise_takes_no_non_finite_value_for_agreement(bad):
    actual, expected = np.array([[1.0, bad]]), np.array([[1.0, 2.0]])
    assert normwise(actual, expected) == np.inf
    assert normwise(expected, actual) == np.inf
    assert normwise(actual, actual) == 0.0


def test_a_check_with_a_nan_error_is_not_ok():
    parts = ("name", "subject", "1", "1")
    assert Check(*parts, error=0.1, tolerance=0.1, reason="").ok
    assert not Check(*parts, error=0.2, tolerance=0.1, reason="").ok
    assert not Check(*parts, error=float("nan"), tolerance=0.1, reason="").ok
