"""Measured rounding errors lie under the bound, and the bound is not far above."""

from __future__ import annotations

import math

import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from rounding import (
    COMBINED,
    DTYPES,
    SIZES,
    U,
    groups,
    layer,
    measure,
    moments,
    normalized,
    offsets,
)

import normjax as nj
from normjax.verify import precision_bound
from normjax.verify.oracles import mpmath_reference
from normjax.verify.precision import SUM
from normjax.verify.tolerance import unit_roundoff


@pytest.mark.parametrize(
    ("dtype", "accumulate"),
    [
        ("float32", "float32"),
        ("float16", "float32"),
        ("float16", "float16"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
    ],
)
@pytest.mark.parametrize(("algorithm", "apply"), COMBINED)
def test_errors_are_under_the_bound(algorithm, apply, dtype, accumulate):
    spec = layer(algorithm, apply, accumulate)
    for n in SIZES:
        assert measure(spec, groups(n, dtype, offsets(dtype)), dtype).held(), n


def as_batch(spec: nj.NormSpec, x) -> np.ndarray:
    return normalized(spec, x.T).T


def as_groups(spec: nj.NormSpec, x) -> np.ndarray:
    """Rows in pairs, each a group of channels at several places."""
    n, places = x.shape[1], 4 if x.shape[1] % 4 == 0 else 1
    split = x.reshape(-1, 2, places, n // places).transpose(0, 2, 1, 3)
    y = normalized(spec, split.reshape(-1, places, 2 * n // places))
    back = y.reshape(-1, places, 2, n // places).transpose(0, 2, 1, 3)
    return back.reshape(-1, n)


KINDS = {
    "rms": (nj.rms_norm, normalized),
    "batch": (lambda **fields: nj.batch_norm(running=None, **fields), as_batch),
    "group": (lambda **fields: nj.group_norm(2, **fields), as_groups),
    "l2": (nj.l2_norm, normalized),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_other_layers_are_under_the_bound(kind, dtype):
    build, apply = KINDS[kind]
    for algorithm, application in COMBINED:
        precision = nj.Precision(algorithm=algorithm, apply=application)
        spec = build(affine=None, precision=precision)
        for n in (3, 1000):
            rows = groups(n, dtype, offsets(dtype)[::2])
            assert measure(spec, rows, dtype, apply).held(), (algorithm, application)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("divide", ["std", "rms", "l2", "none"])
@pytest.mark.parametrize(
    "placement", ["inside_sqrt", "outside_sqrt", "floor_var", "floor_std"]
)
def test_every_divisor_is_under_the_bound(placement, divide, center):
    """Also where ε dominates the variance."""
    rows = groups(64, "float32", (1, 30, 1e3, 1e5))
    for algorithm, epsilon in (
        ("shifted", 1e-5),
        ("one_pass", 1e-5),
        ("one_pass", 9.0),
    ):
        spec = layer(
            algorithm,
            center=center,
            divide=divide,
            epsilon=epsilon,
            epsilon_placement=placement,
        )
        assert measure(spec, rows, "float32").held(), (algorithm, epsilon)


def test_it_holds_for_a_long_reduction_down_the_rows():
    """As a batch norm adds: 131,072 terms, the last axis is not reduced."""
    rows = groups(2**17, "float32", (3.0, 1e4))[::5]
    spec = nj.batch_norm(running=None, affine=None)
    assert measure(spec, rows, "float32", as_batch).held()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("algorithm", "apply"), COMBINED)
def test_the_bound_is_not_vacuous(algorithm, apply, n):
    """Within 100 of the worst measured error, and 40 where the element is known."""
    rows = groups(n, "float32", offsets("float32"))
    found = measure(layer(algorithm, apply), rows, "float32")
    assert np.max(found.errors / found.bounds) > 1 / 100
    assert np.max(found.errors / found.anchored) > 1 / 40


def test_a_sum_errs_as_the_constant_says():
    """|error| in units of u log₂n mean|x|: below SUM, and above a third of it."""
    random, worst = np.random.default_rng(0), []
    for n in (2, 3, 16, 100, 1000, 4096, 65536):
        x = random.uniform(0, 1, (200, n)).astype(np.float32)
        x[:100] = x[:100, :1]
        exact = x.astype(np.float64).mean(1)
        for mean in (jnp.mean(jnp.asarray(x), 1), jnp.mean(jnp.asarray(x.T), 0)):
            gap = np.abs(np.asarray(mean, np.float64) - exact) / exact
            worst.append(gap.max() / (U * np.log2(n)))
    assert SUM / 3 < max(worst) < SUM


@pytest.mark.parametrize("n", SIZES)
def test_the_bound_of_a_lost_variance_is_reached(n):
    """1/√share, which is what a variance clamped to 0 leaves."""
    found = measure(
        layer("one_pass"), groups(n, "float32", offsets("float32")), "float32"
    )
    assert np.max(found.errors / found.bounds) > 0.9
    assert found.errors.max() > 300


def without_the_low_part(spec: nj.NormSpec, x) -> np.ndarray:
    """Shifted, but the mean is stored in one number."""
    found = nj.moments(spec, x)
    y = (x - found.mean[:, None]) / jnp.sqrt(found.variance() + spec.epsilon)[:, None]
    return np.asarray(y.astype(jnp.float64))


@pytest.mark.parametrize(
    ("spec", "judge", "kappa", "apply"),
    [
        (layer(), layer(), 1e6, without_the_low_part),
        (layer("two_pass"), layer(), 1e6, normalized),
        (layer(apply="folded"), layer(), 1e4, normalized),
        (layer("one_pass"), layer("two_pass"), 100.0, normalized),
        (layer("two_pass", accumulate="bfloat16"), layer("two_pass"), 11.3, normalized),
    ],
    ids=["mean in one number", "two_pass", "folded", "one_pass", "bfloat16"],
)
def test_a_worse_way_is_above_the_bound_of_a_better_one(spec, judge, kappa, apply):
    """Planted errors: each is judged by the bound of what it is not."""
    dtype = spec.precision.accumulate
    rows = groups(64, dtype, (kappa,))
    assert measure(spec, rows, dtype).held()
    wrong = measure(spec, rows, dtype, apply, judged_by=judge)
    assert np.max(wrong.errors / wrong.bounds) > 2


# N01, N05, N04 of the field cases, and one with an offset below its spread.
VECTORS = (
    [1e4, 10001.0, 10002.0, 10003.0],
    [1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3],
    [2.0**24, 2.0**24 + 2, 2.0**24 + 4, 2.0**24 + 6],
    [0.1, -0.3, 0.25, 1.5, 0.7],
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("algorithm", "apply"), COMBINED)
def test_small_groups_against_fifty_digits(algorithm, apply, dtype):
    spec = layer(algorithm, apply)
    for values in VECTORS:
        x = np.asarray(values, dtype)
        with mpmath.workdps(50):
            exact = mpmath_reference(
                [mpmath.mpf(float(v)) for v in x], epsilon=spec.epsilon
            )
            found = [mpmath.mpf(float(v)) for v in nj.normalize(spec, jnp.asarray(x))]
            gaps = [a - b for a, b in zip(found, exact, strict=True)]
            error = float(mpmath.norm(gaps) / mpmath.norm(exact))
        mean, std = moments(x[None].astype(np.float64))
        kappa = abs(mean[0]) / std[0]
        bound = precision_bound(spec, dtype, len(values), kappa, std=std[0])
        assert error <= bound.value


def test_the_default_is_right_on_every_field_case():
    right = [-1.3416, -0.4472, 0.4472, 1.3416]
    for values in VECTORS[:3]:
        y = nj.normalize(layer(), jnp.asarray(values, jnp.float32))
        np.testing.assert_allclose(y, right, atol=1e-4)


@pytest.mark.parametrize("kappa", [0.0, 3.0, 1e4, 1e7])
def test_the_parts_are_those_of_the_formula(kappa):
    """Written out for n = 4, so g = 4 u, and √(n−1) = √3."""
    q, g = np.hypot(1, kappa), 4 * U
    bound = precision_bound(layer(), "float32", 4, kappa)
    assert bound.deviation == pytest.approx(2 * g + 2 * U)
    assert bound.variance == pytest.approx(g + 4 * U + 4 * g**2)
    assert bound.divisor == pytest.approx((1 - (g + 4 * U)) ** -0.5 - 1)
    assert bound.rounding == 4 * U
    parts = (bound.deviation, bound.divisor, bound.rounding)
    assert bound.value == pytest.approx(np.prod([1 + part for part in parts]) - 1)
    two_pass = precision_bound(layer("two_pass"), "float32", 4, kappa)
    assert two_pass.deviation == pytest.approx(g * q + U)
    assert two_pass.variance == pytest.approx(g + 2 * U + (g * q) ** 2)
    high = np.sqrt((1 + 1e-5) / (1 + two_pass.variance + 1e-5))
    low = (1 - g - 2 * U) ** -0.5
    assert two_pass.divisor == pytest.approx(max(1 - high, low - 1))
    one_pass = precision_bound(layer("one_pass"), "float32", 4, kappa)
    assert one_pass.deviation == two_pass.deviation
    expected = g * q**2 + 2 * kappa * g * q + (g * q) ** 2
    assert one_pass.variance == pytest.approx(expected)
    folded = precision_bound(layer(apply="folded"), "float32", 4, kappa)
    assert folded.deviation == pytest.approx(bound.deviation + 4 * U * q)


def test_only_the_default_does_not_see_the_offset():
    def values(spec):
        return [precision_bound(spec, "float32", 64, k).value for k in (1, 1e3, 1e6)]

    assert len(set(values(layer()))) == 1
    for spec in (layer("two_pass"), layer("one_pass"), layer(apply="folded")):
        low, middle, high = values(spec)
        assert high > middle > 10 * low


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_narrow_output_is_rounded_once_more(dtype):
    wide = layer().replace(**{"precision.output": "float32"})
    first, second = (precision_bound(s, dtype, 64, 9.0) for s in (wide, layer()))
    extra = 0.0 if dtype == "float32" else unit_roundoff(dtype)
    assert second.rounding - first.rounding == pytest.approx(extra)


def test_a_lost_variance_is_said():
    """κ² g of 1 and more: at most the stabilizer is left, and nothing without it."""
    below = precision_bound(layer("one_pass"), "float32", 64, 100.0)
    assert not below.variance_lost
    assert below.value < 0.1
    above = precision_bound(layer("one_pass"), "float32", 64, 1e4)
    assert above.variance_lost
    assert above.divisor == pytest.approx((1e-5 / (1 + 1e-5)) ** -0.5 - 1)
    # Where ε is nearly all, what is lost is little, and what is invented is more.
    small = precision_bound(layer("one_pass"), "float32", 64, 1e4, std=1e-3)
    invented = np.sqrt((1e-6 + 1e-5) / (1e-6 * (1 + small.variance) + 1e-5))
    assert small.divisor == pytest.approx(1 - invented)
    none = layer("one_pass", epsilon=0.0)
    assert math.isinf(precision_bound(none, "float32", 64, 1e4).value)
    assert precision_bound(none, "float32", 64, 100.0).value < 0.1


def test_squares_that_leave_the_dtype_have_no_bound():
    """N06: the group is zero in float16, and right once it is rescaled."""
    precision = nj.Precision(accumulate="float16")
    spec = nj.rms_norm(affine=None, precision=precision)
    rows = np.array([[300.0, -300.0, 300.0, 300.0]])
    assert not measure(spec, rows, "float16").errors[0] < 0.9
    mean, std = (float(part[0]) for part in moments(rows))
    bound = precision_bound(spec, "float16", 4, mean / std, std=std)
    assert math.isinf(bound.value)
    rescaled = spec.replace(**{"precision.rescale": True})
    found = measure(rescaled, rows, "float16")
    assert found.held()
    assert found.bounds[0] < 0.02
    two_pass = layer("two_pass", accumulate="float16")
    assert math.isinf(precision_bound(two_pass, "float16", 1000, 100.0).value)
    assert math.isfinite(precision_bound(layer("two_pass"), "float16", 1000, 100).value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 1}, "n is 1, expected 2 or more elements in a group"),
        ({"kappa": -1.0}, "kappa is -1.0, expected a finite number 0 or more"),
        ({"kappa": math.inf}, "kappa is inf, expected a finite number 0 or more"),
        ({"kappa": math.nan}, "kappa is nan, expected a finite number 0 or more"),
        ({"std": 0.0}, "std is 0.0, expected a finite number above 0"),
        ({"anchor": -0.5}, "anchor is -0.5, expected a finite number 0 or more"),
        (
            {"spec": layer(statistics="blend")},
            "statistics is 'blend': only statistics=",
        ),
        ({"spec": "layer_norm"}, "spec is 'layer_norm', expected a NormSpec"),
    ],
)
def test_what_has_no_bound_is_refused(change, message):
    arguments = {"spec": layer(), "dtype": "float32", "n": 8, "kappa": 1.0} | change
    with pytest.raises(ValueError, match=message):
        precision_bound(**arguments)
