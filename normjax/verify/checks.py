"""The closed-form Jacobian against references that share no code with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax import functional
from normjax.arguments import prepare
from normjax.factors import factors
from normjax.jacobian import input_jacobian
from normjax.layout import Layout
from normjax.program import Inputs, Program
from normjax.spec import NormSpec
from normjax.statistics import Moments, Statistics, at_least
from normjax.verify.oracles import mpmath_jacobian, numpy_reference, reference
from normjax.verify.tolerance import (
    Check,
    difference_tolerance,
    normwise,
    rounding_tolerance,
    unit_roundoff,
)

DENSE = 512
LARGEST_EXACT = 16


def check_jacobian(
    spec: NormSpec,
    x: Array,
    *,
    mask: Array | None = None,
    moments: Moments | Statistics | None = None,
    blend_with: Statistics | None = None,
) -> tuple[Check, ...]:
    """Compare value, derivative rule and operator with independent references.

    The references run in float64 on the exact entries of x. The value is compared with
    a plain jnp function and with NumPy. Derivatives are compared as products J t and
    Jᵀ t, for t that show every term in every group: the common offset 1, the radial
    x − m and random signs; up to 512 elements every unit vector too, so all of J:

    - the operator with ``jax.jvp`` and ``jax.vjp`` of that plain function;
    - ``jax.jvp`` and ``jax.vjp`` of ``nj.normalize`` with the operator;
    - the operator with central differences of ``nj.normalize`` (float32 and float64,
      nothing detached or renormalized, the default arithmetic), within
      8 u^(2/3) (√n + κ);
    - the operator with differences in 50 digits, for groups of at most 16 and up to 512
      elements.

    Every error is the largest ‖error‖/max(‖J t‖, ‖t‖/s) over groups and t and must stay
    below 64 u (√n + κ), whatever the size of x. A missing term is an error of 1, and
    ddof 1 for 0 one of 1/n, which float32 shows up to n = 4000.

    ``jax.test_util.check_grads`` multiplies its tolerances by the size of the output.
    With its defaults (2e-3 in float32, 1e-5 in float64) its forward mode accepts at
    64 × 1024 a layer norm whose rule lacks the mean or the radial term; in float32 a
    zero or a negated one too. It notices the missing terms at 8 × 16 but not at 8 × 32
    in float32, at 32 × 256 in float64. Here they are 8000 times the tolerance in
    float32 and 4e12 times in float64. Its reverse mode compares one number per call,
    without that factor, and does notice them.

    Args:
        spec: the layer; the affine part is left out.
        x: the input.
        mask: as for ``normalize``; masked rows are compared too, so what stands there
            must be finite unless ``masked_output="zero"``.
        moments: as for ``normalize``.
        blend_with: the ``reference`` of ``normalize``.

    Returns:
        One ``Check`` for each comparison.

    Raises:
        ValueError: as ``normalize``.

    Example:
        >>> import jax, normjax as nj
        >>> x = jax.random.normal(jax.random.key(0), (64, 1024))
        >>> for check in nj.verify.check_jacobian(nj.layer_norm(), x):
        ...     print(check.ok, check.name)
        True value = plain reference
        True operator = plain reference
        True jvp of normalize = operator
        True vjp of normalize = operator
        True value = NumPy float64
        True operator = central differences
    """
    x = jnp.asarray(x)
    with jax.enable_x64(True):
        case = Case.of(spec, x, mask, moments, blend_with)
        given = {"mask": mask, "moments": moments, "reference": blend_with}
        normalize = partial(functional.normalize, spec, **given)
        plain, wide = case.plain(), jnp.asarray(case.exact)
        value = normalize(x)
        t = jnp.asarray(case.directions(value.dtype))
        closed = input_jacobian(spec, x, **given)
        operator = [jax.vmap(J.mv)(t.astype(J.dtype)) for J in (closed, closed.T)]
        push, pull = products(normalize, x, t)
        found = [
            case.value("plain reference", value, plain(wide)),
            case.derivative(
                "operator = plain reference", operator, products(plain, wide, t), t
            ),
            case.derivative("jvp of normalize = operator", [push], operator[:1], t),
            case.derivative("vjp of normalize = operator", [pull], operator[1:], t),
        ]
        found += case.extended(value, operator, t)
        exact = not (spec.detach or case.program.renorm or case.rounds_the_mean)
        if jnp.finfo(x.dtype).bits >= 32 and exact:
            found.append(case.differences(normalize, closed, t))
        return tuple(found)


def products(function: Callable, x: Array, t: Array) -> list[Array]:
    """J t by forward and Jᵀ t by reverse mode, for every t along the first axis."""
    y, pull = jax.vjp(function, x)
    push = jax.vmap(lambda t: jax.jvp(function, (x,), (t,))[1])
    return [push(t.astype(x.dtype)), jax.vmap(pull)(t.astype(y.dtype))[0]]


def neutral(spec: NormSpec, layout: Layout, dtype) -> Statistics | None:
    """Mean 0 and variance 1 for a spec that needs a reference, None for others."""
    if spec.statistics == "input":
        return None
    zeros = jnp.zeros(layout.mapped_shape, dtype)
    return Statistics(zeros, zeros + 1)


@dataclass(frozen=True)
class Case:
    """One spec on one input, and what its tolerances depend on."""

    layout: Layout
    program: Program
    inputs: Inputs
    exact: np.ndarray
    radial: np.ndarray
    spread: np.ndarray
    kappa: float

    @classmethod
    def of(cls, spec: NormSpec, x: Array, mask, moments, blend_with) -> Case:
        """Prepare; κ is the largest |mean|/s of a group, of its valid entries."""
        passed = (x, None, mask, moments, blend_with)
        layout, program, inputs = prepare(spec, *passed)
        exact = np.asarray(x, np.float64)
        inv = np.asarray(factors(program, inputs).gain, np.float64)
        if spec.precision.rescale:  # the references take numbers as they are
            inputs = prepare(spec.replace(**{"precision.rescale": False}), *passed)[2]
        view, w = exact.reshape(layout.view_shape), np.ones(1)
        if inputs.weights is not None:
            w = np.asarray(inputs.weights, np.float64)
        w = np.broadcast_to(w, view.shape)
        valid = np.where(w > 0, view, 0)
        mean, variance = _moments(valid, w, layout.reduced)
        radial = np.where(w > 0, valid - mean if program.about_mean else valid, 0)
        if spec.divide == "none":
            inv = 1 / np.maximum(np.sqrt(variance), 1e-300)
        inv = np.broadcast_to(inv, layout.view_shape)
        kappa = float(np.max(np.abs(mean) * inv, initial=0.0))
        spread = (1 / np.where(inv > 0, inv, 1)).reshape(x.shape)
        return cls(layout, program, inputs, exact, radial, spread, kappa)

    @property
    def accumulate(self) -> np.dtype:
        """The dtype of the statistics."""
        return at_least(self.inputs.x.dtype, self.program.spec.precision.accumulate)

    @property
    def rounds_the_mean(self) -> bool:
        """Whether the value errs by κ u and more, which differences of it lose."""
        precision = self.program.spec.precision
        return precision.algorithm != "shifted" or precision.apply == "folded"

    def rows(self, array) -> np.ndarray:
        """One row for each group; of many arrays, one after the other."""
        layout, (count, n) = self.layout, (self.exact.size, self.layout.group_size)
        many = np.size(array) // max(count, 1)
        full = np.asarray(array, np.float64).reshape(many, *layout.view_shape)
        order = (0, *(1 + i for i in (*layout.mapped, *layout.reduced)))
        return full.transpose(order).reshape(many * count // max(n, 1), n)

    def directions(self, output) -> np.ndarray:
        """Along which J is compared: exact in the dtypes of x and of the output.

        In each group the common offset 1, the radial direction and random signs (no x
        drawn with the same seed equals them); for a small x every unit vector too.
        """
        view, size = self.layout.view_shape, self.exact.size
        squares = np.sum(self.radial**2, self.layout.reduced, keepdims=True)
        length = np.sqrt(squares / max(self.layout.group_size, 1))
        found = np.stack(
            [
                np.ones(view),
                self.radial / np.where(length > 0, length, 1),
                np.random.default_rng(0).choice([-1.0, 1.0], view),
            ]
        )
        if size <= DENSE:
            found = np.concatenate([found, np.eye(size).reshape(size, *view)])
        narrow = found.astype(output).astype(self.inputs.x.dtype)
        return narrow.astype(np.float64).reshape(len(found), *self.exact.shape)

    def value(self, oracle: str, actual, expected) -> Check:
        """The value; a mean that was rounded is seen where the right value is 0."""
        least = self.layout.group_size**0.5 if self.rounds_the_mean else 0.0
        return self.compare(
            f"value = {oracle}", self.rows(actual), self.rows(expected), least, actual
        )

    def derivative(self, name: str, actual, expected, t) -> Check:
        """Products with every t, relative to ‖t‖/s in each group."""
        least = np.linalg.norm(self.rows(t), axis=1) * self.gain(len(t))
        first, second = (self.rows(jnp.stack(p)) for p in (actual, expected))
        return self.compare(name, first, second, np.tile(least, len(actual)), actual[0])

    def gain(self, count: int) -> np.ndarray:
        """1/s for each row of ``count`` arrays."""
        return np.tile(1 / self.rows(self.spread).max(1, initial=0), count)

    def compare(
        self, name: str, actual, expected, least, like, limit: float | None = None
    ) -> Check:
        """One comparison, normwise for each row; ``like`` has the dtype that is seen.

        Rounding errors of a sum of n terms partly cancel: √n of them are allowed for,
        so that an error of 1/n is seen up to n = 4000 in float32.
        """
        x, n = self.inputs.x, self.layout.group_size
        one_pass = self.program.spec.precision.algorithm == "one_pass"
        kappa = self.kappa * (1 + self.kappa) if one_pass else self.kappa
        if limit is None:
            limit = rounding_tolerance(
                self.accumulate, n**0.5, kappa, output=like.dtype
            )
        error = normwise(actual, expected, least)
        return Check(
            name=name,
            subject=f"{x.dtype}{list(x.shape)}, κ={self.kappa:.2g}",
            measured=f"{error:.1e}",
            predicted="0",
            error=error,
            tolerance=limit,
            reason=f"rounding in {self.accumulate}, √n={n**0.5:.3g}, κ={kappa:.2g}",
        )

    def plain(self) -> Callable[[Array], Array]:
        """The reference on float64 arrays of x's shape, masked rows as declared."""
        spec, layout, inputs = self.program.spec, self.layout, self.inputs
        wide = jax.tree.map(lambda a: a.astype(jnp.float64), inputs.numbers)
        share = {"input": (1.0, 1.0), "given": (0.0, 0.0)}.get(
            self.program.source, (wide.mean_weight, wide.variance_weight)
        )
        source = {"given": wide.given, "blend": wide.reference}
        mixed, aim = source.get(self.program.source), wide.reference
        outside = None
        if inputs.weights is not None and spec.masked_output != "keep":
            outside = ~jnp.broadcast_to(inputs.weights.astype(bool), layout.view_shape)

        def function(x: Array) -> Array:
            view = x.reshape(layout.view_shape)
            if outside is not None:
                view = jnp.where(outside, 0.0, view)
            y = reference(
                view,
                layout.reduced,
                epsilon=wide.epsilon,
                center=spec.center,
                divide=spec.divide,
                placement=spec.epsilon_placement,
                ddof=spec.ddof,
                weights=inputs.weights,
                given=mixed and (mixed.mean + mixed.mean_low, mixed.variance),
                share=share,
                detach=spec.detach,
                renorm=(aim.mean, aim.variance, wide.r_max, wide.d_max)
                if self.program.renorm
                else None,
            )
            if outside is not None:
                passed = spec.masked_output == "passthrough"
                y = jnp.where(outside, x.reshape(y.shape) if passed else 0.0, y)
            return y.reshape(layout.shape)

        return function

    def extended(self, value, operator, t) -> list[Check]:
        """NumPy values and 50-digit derivatives, where these references apply."""
        spec, layout = self.program.spec, self.layout
        given = self.program.source != "input" or self.program.renorm
        if given or spec.detach or self.inputs.weights is not None:
            return []
        settings = {
            "epsilon": float(self.inputs.numbers.epsilon),
            "center": spec.center,
            "divide": spec.divide,
            "placement": spec.epsilon_placement,
            "ddof": spec.ddof,
        }
        view = self.exact.reshape(layout.view_shape)
        by_numpy = numpy_reference(view, layout.reduced, **settings)
        found = [self.value("NumPy float64", value, by_numpy)]
        n = layout.group_size
        if n <= LARGEST_EXACT and self.exact.size <= DENSE:
            exact = np.zeros((self.exact.size, self.exact.size))
            places = self.rows(np.arange(self.exact.size)).astype(int)
            for place, group in zip(places, self.rows(self.exact), strict=True):
                exact[np.ix_(place, place)] = mpmath_jacobian(group, **settings)
            columns = np.asarray(t).reshape(len(t), self.exact.size)
            expected = [columns @ exact.T, columns @ exact]
            found.append(self.derivative("operator = 50 digits", operator, expected, t))
        return found

    def differences(self, normalize: Callable, operator, t) -> Check:
        """Central differences of the value along every t, relative to √n/s."""
        x, dtype = self.inputs.x, self.inputs.x.dtype
        scale = unit_roundoff(dtype) ** (1 / 3) * self.spread
        steps = jnp.asarray(scale * np.asarray(t), dtype)
        up, down = x[None] + steps, x[None] - steps
        apply = jax.jit(jax.vmap(normalize))
        rise, run = (
            (np.asarray(a, np.float64) - np.asarray(b, np.float64)) / (2 * scale)
            for a, b in ((apply(up), apply(down)), (up, down))
        )
        run = jnp.asarray(np.where(np.isfinite(run), run, 0), operator.dtype)
        predicted = jax.vmap(operator.mv)(run)
        n = self.layout.group_size
        return self.compare(
            "operator = central differences",
            self.rows(predicted),
            self.rows(rise),
            n**0.5 * self.gain(len(t)),
            predicted,
            difference_tolerance(self.accumulate, n, self.kappa),
        )


def _moments(valid: np.ndarray, w: np.ndarray, axes) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the valid entries of each group; 0 where there are none."""
    count = np.maximum(w.sum(axes, keepdims=True), 1e-300)
    mean = (w * valid).sum(axes, keepdims=True) / count
    return mean, (w * (valid - mean) ** 2).sum(axes, keepdims=True) / count
