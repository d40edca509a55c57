"""The finite facts that this library starts from, each with explicit inputs.

Every function states its inputs, variance convention (biased, ddof 0), epsilon and
tolerance, and returns what was measured beside what was predicted. Values are computed
in float64 unless a fact is about float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from normjax import functional, presets, running
from normjax.jacobian import input_jacobian
from normjax.spec import Running
from normjax.spectra import spectrum
from normjax.verify.checks import check_jacobian
from normjax.verify.tolerance import Check, normwise, rounding_tolerance

EPSILONS = (1e-5, 1e-2)
PLACEMENTS = ("inside_sqrt", "outside_sqrt", "floor_var", "floor_std")


def check_facts() -> tuple[Check, ...]:
    """Every finite fact, in the order of the article.

    Returns:
        One ``Check`` each; ``normjax verify`` prints them.

    Example:
        >>> import normjax as nj
        >>> all(check.ok for check in nj.verify.check_facts())
        True
    """
    with jax.enable_x64(True):
        return (
            shift_invariance(),
            *scale_response(),
            *jacobian_agreement(),
            *eigen_relations(),
            *constant_group(),
            *two_examples(),
            *train_and_stored(),
            *large_offset(),
        )


def shift_invariance() -> Check:
    """N(x + 10·1) = N(x) for x = (1, 2, 4)."""
    spec, x = presets.layer_norm(), jnp.array([1.0, 2.0, 4.0])
    y, moved = functional.normalize(spec, x), functional.normalize(spec, x + 10)
    return _close(
        "offset is removed: N(x + 10) = N(x)",
        "x=(1,2,4), ddof 0, ε=1e-5",
        moved,
        y,
        kappa=10,
    )


def scale_response() -> list[Check]:
    """N(a x) = a c/√(a² σ² + ε) for a from 1e-6 to 1e6, and the sign flip."""
    x = np.array([1.0, 2.0, 4.0])
    c, variance = x - x.mean(), x.var()
    scales = 10.0 ** np.arange(-6, 7)
    found = []
    for epsilon in EPSILONS:
        spec = presets.layer_norm(epsilon=epsilon)
        y = jax.vmap(partial(functional.normalize, spec))(
            jnp.asarray(scales[:, None] * x)
        )
        predicted = (
            scales[:, None] * c / np.sqrt(scales**2 * variance + epsilon)[:, None]
        )
        subject = f"a=1e-6..1e6, x=(1,2,4), ddof 0, ε={epsilon:g}"
        found.append(_close("N(a x) = a c/√(a²σ²+ε)", subject, y, predicted))
        half = np.sqrt(epsilon / variance)
        at = functional.normalize(spec, jnp.asarray(half * x))
        subject = f"a=√(ε/σ²)={half:.3g}, ε={epsilon:g}"
        limit = c / np.sqrt(variance)
        found.append(_close("there the amplitude is 1/√2", subject, at, limit / 2**0.5))
        flipped = functional.normalize(spec, jnp.asarray(-x))
        found.append(
            _close(
                "a negative scale flips the sign: N(-x) = -N(x)",
                f"x=(1,2,4), ε={epsilon:g}",
                flipped,
                -functional.normalize(spec, jnp.asarray(x)),
            )
        )
    return found


def jacobian_agreement() -> list[Check]:
    """The closed Jacobian against automatic, central and 50-digit derivatives."""
    found = []
    x = jnp.array([[1.0, 2.0, 4.0], [-0.5, 0.25, 3.0]])
    specs = [presets.layer_norm(epsilon_placement=place) for place in PLACEMENTS]
    specs += [presets.rms_norm(), presets.batch_norm()]
    for spec in specs:
        name = f"{'rms ' if spec.divide == 'rms' else ''}{spec.pattern}"
        for check in check_jacobian(spec, x):
            if not check.name.startswith("value"):
                title = f"J of {name} {spec.epsilon_placement}: {check.name}"
                subject = "x=((1,2,4),(-.5,.25,3)), ddof 0, ε=1e-5"
                found.append(replace(check, name=title, subject=subject))
    return found


def eigen_relations() -> list[Check]:
    """J 1 = 0, J c = (ε/s³) c, J t = t/s, from forward mode through the rule."""
    x, epsilon = np.array([1.0, 2.0, 4.0, 9.0]), 1e-2
    spec = presets.layer_norm(epsilon=epsilon)
    c = x - x.mean()
    s = np.sqrt(x.var() + epsilon)
    orthogonal = np.linalg.svd(np.stack([np.ones(4), c]))[2][2:]
    push = partial(jax.jvp, partial(functional.normalize, spec), (jnp.asarray(x),))
    cases = [
        ("J 1 = 0", np.ones(4), np.zeros(4)),
        ("J c = (ε/s³) c", c, epsilon / s**3 * c),
        ("J t = t/s, t ⟂ 1, c", orthogonal[0], orthogonal[0] / s),
        ("J t = t/s, another t", orthogonal[1], orthogonal[1] / s),
    ]
    subject = f"x=(1,2,4,9), ddof 0, ε={epsilon:g}"
    found = [
        _close(name, subject, push((jnp.asarray(t),))[1], predicted, least=_norm(t) / s)
        for name, t, predicted in cases
    ]
    closed = spectrum(spec, jnp.asarray(x))
    gains = jnp.stack([closed.offset, closed.radial, closed.tangential])
    predicted = np.array([0, epsilon / s**3, 1 / s])
    found.append(_close("spectrum is (0, ε/s³, 1/s)", subject, gains, predicted))
    return found


def constant_group() -> list[Check]:
    """At σ² = 0 the declared derivative is P/S(0)."""
    found = []
    p = np.eye(3) - 1 / 3
    for place, s in zip(PLACEMENTS, (1e-5**0.5, 1e-5, 1e-5**0.5, 1e-5), strict=True):
        spec = presets.layer_norm(epsilon_placement=place)
        x = jnp.full(3, 7.0)
        subject = f"x=(7,7,7), ε=1e-5 {place}"
        operator = input_jacobian(spec, x).as_matrix()
        by_rule = jax.jacfwd(partial(functional.normalize, spec))(x)
        found.append(_close("J = P/S(0) at σ²=0", subject, operator, p / s))
        found.append(_close("and by the rule", subject, by_rule, p / s))
    return found


def two_examples() -> list[Check]:
    """BN(0; {0, b}) = −b/√(b² + 4ε): a companion decides the sign."""
    found = []
    for b, sign in ((2.0, -1), (-2.0, 1)):
        y = functional.normalize(presets.batch_norm(), jnp.array([[0.0], [b]]))[0, 0]
        exact = -b / np.sqrt(b * b + 4e-5)
        subject = f"batch {{0, {b:g}}}, ddof 0, ε=1e-5"
        found.append(_close(f"BN(0; {{0,{b:g}}}) = -b/√(b²+4ε)", subject, y, exact))
        found.append(
            Check(
                f"which is near {sign:+d}",
                subject,
                f"{float(y):.7f}",
                f"{sign:+d}",
                abs(float(y) - sign),
                2e-5 / b**2,
                "2ε/b², the second term of the series",
            )
        )
    return found


def train_and_stored() -> list[Check]:
    """The same inputs, normalized with the batch's and with stored statistics."""
    spec = presets.batch_norm(running=Running(decay=0.9, ddof=1))
    x = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    state = running.init(spec, x.shape, x.dtype)
    state = running.update(spec, state, functional.moments(spec, x))
    stored = functional.normalize(spec, x, moments=running.read(spec, state))
    mean, variance = 0.1 * 2.5, 0.9 + 0.1 * 5 / 3
    predicted = (np.asarray(x) - mean) / np.sqrt(variance + 1e-5)
    subject = "x=(1,2,3,4), one update from (0, 1), decay 0.9, stored ddof 1"
    batch = functional.normalize(spec, x)
    exact = (np.asarray(x) - 2.5) / np.sqrt(1.25 + 1e-5)
    return [
        _close("training uses mean 2.5, variance 1.25", subject, batch, exact),
        _close("inference uses mean 0.25, variance 1.0667", subject, stored, predicted),
    ]


def large_offset() -> list[Check]:
    """float32 where one-pass and two-pass variances are wrong."""
    found = []
    right = np.array([-1.5, -0.5, 0.5, 1.5])
    for values, variance in (
        ((1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3), 1.25),
        ((2.0**24, 2.0**24 + 2, 2.0**24 + 4, 2.0**24 + 6), 5.0),
    ):
        x = jnp.array(values, jnp.float32)
        y = functional.normalize(presets.layer_norm(), x)
        predicted = right * (variance / 1.25) ** 0.5 / np.sqrt(variance + 1e-5)
        subject = f"float32 ({values[0]:.0f}, ...), ε=1e-5"
        found.append(_close("±1.3416, ±0.4472", subject, y, predicted))
    return found


def _close(
    name: str, subject: str, measured, predicted, kappa: float = 1.0, least: float = 0.0
) -> Check:
    """Compare two arrays normwise, row by row; each is shown by its first entries."""
    actual, expected = np.asarray(measured), np.asarray(predicted, np.float64)
    n = actual.shape[-1] if actual.ndim else 2
    first, second = (a.reshape(-1, n if a.ndim else 1) for a in (actual, expected))
    return Check(
        name,
        subject,
        _short(actual),
        _short(expected),
        normwise(first, second, least),
        rounding_tolerance(actual.dtype, n, kappa),
        f"64 u (n + κ), n={n}, κ={kappa:g}, {actual.dtype}",
    )


def _norm(t: np.ndarray) -> float:
    return float(np.linalg.norm(t))


def _short(values: np.ndarray) -> str:
    """The first three entries of the last row."""
    flat: Sequence[float] = np.atleast_1d(values)[..., :3].reshape(-1)[-3:].tolist()
    return " ".join(f"{value:.6g}" for value in flat)
