"""How a computed array is compared with its oracle: normwise per group, in units of u.

The bound is 64·u·(n + κ): n bounds the rounding of a sum over the group, κ = |mean|/std
that of a mean that is subtracted, and 64 the handful of operations in a derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from frames import Case, Frame, inputs

import normjax as nj

FACTOR = 64.0


def unit_roundoff(dtype) -> float:
    return float(jnp.finfo(dtype).eps) / 2


def wide(tree) -> Any:
    """Arrays as NumPy float64, so that JAX's switches do not apply to them."""
    return jax.tree.map(lambda array: np.asarray(array).astype(np.float64), tree)


def rows(frame: Frame, array) -> np.ndarray:
    """(inputs, groups, entries and what they are differentiated by), in float64."""
    array = wide(array)
    lead, ndim = array.shape[0], len(frame.view)
    full = array.reshape(lead, *frame.view, -1)
    mapped = [i for i in range(ndim) if i not in frame.axes]
    order = [0, *(i + 1 for i in (*mapped, *frame.axes)), ndim + 1]
    groups = int(np.prod([frame.view[i] for i in mapped]))
    width = frame.group_size * full.shape[-1]
    return full.transpose(order).reshape(lead, groups, width)


def kappa(case: Case, x: np.ndarray) -> np.ndarray:
    """κ of every group, (inputs, groups), over its valid entries.

    |mean|/std; a blend subtracts the distance to the other mean too.
    """
    values = rows(case.frame, x)
    weights = np.ones_like(values)
    if case.weights is not None:
        full = np.broadcast_to(case.in_view(case.weights), (1, *case.frame.view))
        weights = weights * rows(case.frame, full)
    count = weights.sum(-1, keepdims=True)
    anchor = values[..., :1]
    mean = (weights * (values - anchor)).sum(-1, keepdims=True) / count
    variance = (weights * (values - anchor - mean) ** 2).sum(-1) / count[..., 0]
    size = np.abs(anchor + mean)[..., 0]
    given = case.given_numbers()
    if given is not None and case.given is None:
        size = size + np.abs(np.asarray(given[0]).reshape(1, -1))
    return size / np.sqrt(variance)


@dataclass(frozen=True)
class Measured:
    """Relative errors of many groups.

    Attributes:
        worst: the largest normwise relative error.
        units: of every group, its error in units of u·(n + κ).
        kappa: smallest and largest κ.
        identical: whether no bit differs.
    """

    worst: float
    units: np.ndarray
    kappa: tuple[float, float]
    identical: bool

    def check(self, factor: float = FACTOR) -> None:
        print(
            f"worst {self.worst:.1e}, {self.units.max():.2g} u (n + κ), κ", *self.kappa
        )
        assert self.units.max() <= factor, self

    def refute(self, factor: float = FACTOR) -> None:
        """The opposite of ``check``, on every single group."""
        assert self.units.min() > factor, self


def measure(
    case: Case,
    x: np.ndarray,
    actual,
    expected,
    dtype: Any = np.float64,
    *,
    entry: float = 0.0,
    any_offset: bool = False,
) -> Measured:
    """Compare arrays with a leading axis of inputs x.

    Args:
        case: which entries are one group.
        x: the inputs, as exactly representable float64.
        actual: computed in ``dtype``.
        expected: the oracle, in float64.
        dtype: of the computation; its u is the unit.
        entry: normwise error of storing the result in a narrower dtype, taken off
            before the rest is divided by the unit.
        any_offset: leave κ out of the unit: what the shifted variance promises.
    """
    actual, expected = rows(case.frame, actual), rows(case.frame, expected)
    assert np.isfinite(actual).all()
    assert np.isfinite(expected).all()
    size = np.linalg.norm(expected, axis=-1)
    error = np.linalg.norm(actual - expected, axis=-1)
    error = error / np.where(size > 0, size, 1)
    conditioning = kappa(case, x)
    offset = 0.0 if any_offset else conditioning
    unit = unit_roundoff(dtype) * (case.frame.group_size + offset)
    return Measured(
        float(error.max()),
        np.maximum(error - entry, 0) / unit,
        (float(conditioning.min()), float(conditioning.max())),
        bool(np.array_equal(actual, expected)),
    )


# Most of the time of these small programs is compilation, most of that optimization.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
jit = partial(jax.jit, compiler_options=QUICK)


def batched(function: Callable, dtype: Any = jnp.float64, exact: bool = False):
    """One program for many inputs; arrays in and out are NumPy's.

    ``exact`` evaluates with 64-bit types, whatever the mode.
    """
    compiled = jit(jax.vmap(function))

    def run(*x: np.ndarray):
        if exact:
            with jax.enable_x64(True):
                found = compiled(*(jnp.asarray(a, dtype) for a in x))
                return jax.tree.map(np.asarray, found)
        found = compiled(*(jnp.asarray(a, dtype) for a in x))
        return jax.tree.map(np.asarray, found)

    return run


def operator(case: Case, x) -> Any:
    """``nj.input_jacobian`` as a user calls it."""
    passed = case.arguments(x.dtype)
    return nj.input_jacobian(case.spec, x, passed.pop("params", None), **passed)


COUNT = 1000
FEW = 12


@dataclass(frozen=True)
class Evidence:
    """One case in float64 on 1000 inputs: the three comparisons, and what eig needs.

    Attributes:
        value, forward, reverse, operator: against the oracle.
        rule: ``jacfwd`` of ``normalize`` against the operator.
        x: the first inputs.
        values: y there.
        matrices: the operator there, dense.
        eigenvalues: the closed form there; None where it is refused.
    """

    value: Measured
    forward: Measured
    reverse: Measured
    operator: Measured
    rule: Measured
    x: np.ndarray
    values: np.ndarray
    matrices: np.ndarray
    eigenvalues: np.ndarray | None


@cache
def evidence(case: Case) -> Evidence:
    """Evaluate everything in one program."""

    def everything(x):
        J = operator(case, x)
        try:
            values = nj.eigenvalues(J)
        except ValueError:
            values = None
        return {
            "value": case.call(x),
            "forward": jax.jacfwd(case.call)(x),
            "reverse": jax.jacrev(case.call)(x),
            "operator": J.as_matrix(),
            "plain": case.oracle(x),
            "derivative": jax.jacfwd(case.oracle)(x),
            "eigenvalues": values,
        }

    x = inputs(case, COUNT)
    found = batched(everything)(x)

    def against(name: str, oracle: str) -> Measured:
        return measure(case, x, found[name], found[oracle])

    values = found["eigenvalues"]
    return Evidence(
        against("value", "plain"),
        against("forward", "derivative"),
        against("reverse", "derivative"),
        against("operator", "derivative"),
        against("forward", "operator"),
        x[:FEW],
        found["value"][:FEW],
        found["operator"][:FEW],
        None if values is None else values[:FEW],
    )
