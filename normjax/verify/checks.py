"""The closed-form Jacobian against references that share no code with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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

LARGEST = 512
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

    The references run in float64 on the exact entries of x. Errors are normwise for
    each group (for a derivative at least relative to 1/s, since a group of two has
    nearly none) and must stay below ``rounding_tolerance``:

    - the value with a plain jnp function and with NumPy;
    - the operator with ``jacfwd`` of that plain function, and ``jacfwd`` and ``jacrev``
      of ``nj.normalize`` with the operator;
    - the operator with central differences of ``nj.normalize`` (float32 and float64,
      nothing detached or renormalized, the default arithmetic): the step u^(1/3) s
      leaves truncation h² and rounding √n u/h, so √n u^(2/3);
    - the operator with differences in 50 digits, for groups of at most 16.

    A term that is missing from the derivative changes it by 1/√n: that stays visible up
    to the 512 elements that are allowed.

    Args:
        spec: the layer; the affine part is left out.
        x: a small input.
        mask: as for ``normalize``; masked rows are compared too.
        moments: as for ``normalize``.
        blend_with: the ``reference`` of ``normalize``.

    Returns:
        One ``Check`` for each comparison.

    Raises:
        ValueError: if x has more than 512 elements, and as ``normalize``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[1.0, 2.0, 4.0, 8.0]])
        >>> all(check.ok for check in nj.verify.check_jacobian(nj.layer_norm(), x))
        True
    """
    x = jnp.asarray(x)
    if x.size > LARGEST:
        raise ValueError(
            f"x has {x.size} elements, expected at most {LARGEST}: the dense Jacobian "
            "has the square of that many entries"
        )
    with jax.enable_x64(True):
        case = Case.of(spec, x, mask, moments, blend_with)
        given = {"mask": mask, "moments": moments, "reference": blend_with}
        normalize = partial(functional.normalize, spec, **given)
        operator = input_jacobian(spec, x, **given).as_matrix()
        plain, wide = case.plain(), jnp.asarray(case.exact)
        value = normalize(x)
        found = [
            case.compare("value", "plain reference", value, plain(wide)),
            case.compare(
                "operator",
                "jacfwd of plain reference",
                operator,
                jax.jacfwd(plain)(wide),
            ),
            case.compare(
                "jacfwd of normalize", "operator", jax.jacfwd(normalize)(x), operator
            ),
            case.compare(
                "jacrev of normalize", "operator", jax.jacrev(normalize)(x), operator
            ),
        ]
        found += case.extended(value, operator)
        exact = not (spec.detach or case.program.renorm or case.rounds_the_mean)
        if jnp.finfo(x.dtype).bits >= 32 and exact:
            found.append(case.differences(normalize, operator))
        return tuple(found)


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
    spread: np.ndarray
    kappa: float

    @classmethod
    def of(cls, spec: NormSpec, x: Array, mask, moments, blend_with) -> Case:
        """Prepare; κ is the largest |mean|/s of a group."""
        passed = (x, None, mask, moments, blend_with)
        layout, program, inputs = prepare(spec, *passed)
        exact = np.asarray(x, np.float64)
        inv = np.asarray(factors(program, inputs).gain, np.float64)
        if spec.precision.rescale:  # the references take numbers as they are
            inputs = prepare(spec.replace(**{"precision.rescale": False}), *passed)[2]
        view = exact.reshape(layout.view_shape)
        mean = np.abs(view.mean(layout.reduced, keepdims=True))
        if spec.divide == "none":
            inv = 1 / np.maximum(view.std(layout.reduced, keepdims=True), 1e-300)
        inv = np.broadcast_to(inv, layout.view_shape)
        kappa = float(np.max(mean * inv, initial=0.0))
        spread = 1 / np.where(inv > 0, inv, 1)
        return cls(layout, program, inputs, exact, spread.reshape(x.shape), kappa)

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
        """One row for each group: y's entries, or their derivatives by all of x."""
        layout = self.layout
        ndim = len(layout.view_shape)
        full = np.asarray(array, np.float64).reshape(*layout.view_shape, -1)
        order = (*layout.mapped, *layout.reduced, ndim)
        return full.transpose(order).reshape(-1, layout.group_size * full.shape[-1])

    def compare(self, name: str, oracle: str, actual, expected) -> Check:
        """One comparison, normwise for each group."""
        x, n = self.inputs.x, self.layout.group_size
        one_pass = self.program.spec.precision.algorithm == "one_pass"
        kappa = self.kappa * (1 + self.kappa) if one_pass else self.kappa
        accumulate = self.accumulate
        output = accumulate if name == "operator" else np.asarray(actual).dtype
        limit = rounding_tolerance(accumulate, n, kappa, output=output)
        if oracle == "central differences":
            limit = difference_tolerance(accumulate, n, kappa)
        least = 1 / self.rows(self.spread).max(1)
        if name == "value":  # a rounded mean is seen where the right value is 0
            least = np.full_like(least, n**0.5 if self.rounds_the_mean else 0)
        error = normwise(self.rows(actual), self.rows(expected), least)
        return Check(
            name=f"{name} = {oracle}",
            subject=f"{x.dtype}{list(x.shape)}, κ={self.kappa:.2g}",
            measured=f"{error:.1e}",
            predicted="0",
            error=error,
            tolerance=limit,
            reason=f"rounding in {accumulate}, n={n}, κ={kappa:.2g}",
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

        def function(x: Array) -> Array:
            view = x.reshape(layout.view_shape)
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
            if inputs.weights is not None and spec.masked_output != "keep":
                valid = jnp.broadcast_to(inputs.weights.astype(bool), y.shape)
                other = view if spec.masked_output == "passthrough" else 0 * view
                y = jnp.where(valid, y, other)
            return y.reshape(layout.shape)

        return function

    def extended(self, value, operator) -> list[Check]:
        """NumPy values and 50-digit derivatives, where these references apply."""
        spec, layout = self.program.spec, self.layout
        if (
            self.program.source != "input"
            or self.program.renorm
            or spec.detach
            or self.inputs.weights is not None
        ):
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
        found = [self.compare("value", "NumPy float64", value, by_numpy)]
        n = layout.group_size
        if n <= LARGEST_EXACT:
            groups = self.rows(self.exact)
            exact = [mpmath_jacobian(group, **settings) for group in groups]
            blocks = self.rows(operator).reshape(len(groups), n, -1)
            place = self.rows(np.arange(self.exact.size)).astype(int)
            dense = np.zeros_like(blocks)
            for block, columns, target in zip(exact, place, dense, strict=True):
                target[:, columns] = block
            error = normwise(blocks, dense, 1 / self.rows(self.spread).max(1))
            check = self.compare("operator", "50 digits", operator, operator)
            found.append(replace(check, error=error, measured=f"{error:.1e}"))
        return found

    def differences(self, normalize: Callable, operator) -> Check:
        """Central differences of the value, all columns at once."""
        x = self.inputs.x
        step = unit_roundoff(x.dtype) ** (1 / 3) * self.spread
        steps = np.diag(step.ravel()).reshape(x.size, *x.shape).astype(x.dtype)
        up, down = x[None] + steps, x[None] - steps
        apply = jax.jit(jax.vmap(normalize))
        rise = np.asarray(apply(up), np.float64) - np.asarray(apply(down), np.float64)
        run = np.asarray(up, np.float64) - np.asarray(down, np.float64)
        run = run.reshape(x.size, x.size).sum(1)
        columns = rise.reshape(x.size, x.size) / run[:, None]
        return self.compare("operator", "central differences", operator, columns.T)
