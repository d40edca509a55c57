"""How an audit calls its target: cast, counted, remembered, within a budget."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from normjax.auditing.formula import Floats


class Limits(NamedTuple):
    """What a dtype allows.

    Attributes:
        unit: the unit roundoff u.
        fit: the relative misfit of a right formula stays below this.
        exponent: probes have magnitudes about 2^exponent.
        smallest: probes for ε are scaled down to 2^smallest,
        largest: and up to 2^largest.
        held_out: error on inputs that the fit has not seen, relative to max|y|.
        floor: an output has changed if it moved by this share of max|y|.
    """

    unit: float
    fit: float
    exponent: int
    smallest: int
    largest: int
    held_out: float
    floor: float


# The misfits are 100 times what right formulas were measured to leave; bfloat16 has too
# few digits for a verdict on held-out inputs.
LIMITS = {
    "float64": Limits(2.0**-53, 1e-10, 10, -62, 16, 3e-9, 2.0**-52),
    "float32": Limits(2.0**-24, 3e-5, 10, -58, 16, 1e-3, 2.0**-23),
    "float16": Limits(2.0**-11, 6e-3, 3, -11, 2, 0.18, 2.0**-14),
    "bfloat16": Limits(2.0**-8, 4e-2, 10, -58, 16, np.inf, 2.0**-11),
}
_WIDTH = tuple(LIMITS)


class BudgetError(Exception):
    """The target was called as often as it may be."""


class Probe:
    """A target that takes float64 inputs and gives float64 outputs.

    Args:
        target: called as ``target(x)``; has ``dtype`` and ``shape``.
        seed: of every random number of the audit.
        max_calls: raise a ``BudgetError`` in place of a further call.
    """

    def __init__(self, target: Any, seed: int = 0, max_calls: int | None = None):
        self.target = target
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.max_calls = max_calls
        self.shape = tuple(target.shape)
        self.limits = LIMITS[np.dtype(target.dtype).name]
        self._known: dict[tuple, Floats] = {}

    def cast(self, x: np.ndarray) -> Floats:
        """The values of x in the target's dtype, in float64."""
        return np.asarray(np.asarray(x, self.target.dtype), np.float64)

    def __call__(self, x: np.ndarray, *, again: bool = False) -> Floats:
        """y of x; a known x is not asked ``again`` unless it is said."""
        values = np.asarray(x, self.target.dtype)
        key = (values.shape, values.tobytes())
        if key not in self._known or again:
            self.spend()
            y = self.target(values)
            if not self._known:
                self.limits = limits(self.target.dtype, y)
            self._known[key] = np.asarray(y, np.float64)
        return self._known[key]

    def spend(self) -> None:
        """Check that one call is left.

        Raises:
            BudgetError: if there is none.
        """
        if self.max_calls is not None and self.target.calls >= self.max_calls:
            raise BudgetError(f"stopped after {self.max_calls} calls")

    def normal(self) -> Floats:
        """Normal numbers in the target's shape."""
        return self.rng.normal(size=self.shape)


def limits(dtype: Any, y: np.ndarray) -> Limits:
    """The limits of a callable that takes ``dtype`` and gave y: the wider misfit.

    Float64 that only holds float32 numbers was computed in float32.
    """
    name, given = np.dtype(dtype).name, np.dtype(y.dtype).name
    if given == "float64" and np.all(y == y.astype(np.float32)):
        given = "float32"
    wider = max(name, given if given in LIMITS else name, key=_WIDTH.index)
    return LIMITS[wider]


def float_dtype(name: Any) -> np.dtype:
    """A floating dtype by its name.

    Raises:
        ValueError: on another one.
    """
    try:
        dtype = np.dtype(jnp.bfloat16 if str(name) == "bfloat16" else name)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in LIMITS:
        raise ValueError(f"dtype is {name!r}, expected one of {', '.join(LIMITS)}")
    return dtype


def checked_shape(shape: Any) -> tuple[int, ...]:
    """A shape in which there is something to probe.

    Raises:
        ValueError: if it is none.
    """
    sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    whole = all(isinstance(n, int | np.integer) and n > 0 for n in sizes)
    if not sizes or not whole:
        raise ValueError(
            f"shape is {shape!r}, expected positive whole numbers, batch included, "
            "like (8, 16)"
        )
    return tuple(int(n) for n in sizes)
