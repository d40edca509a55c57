"""Whether two callables are the same layer: their values, and what audits say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from normjax import running
from normjax.auditing.adapters import adapt, adapt_step
from normjax.auditing.probing import LIMITS, checked_shape, float_dtype
from normjax.auditing.procedure import audit
from normjax.auditing.record import Audit, Finding
from normjax.auditing.target import CallError, Target
from normjax.functional import init, normalize
from normjax.functional import moments as moments_of
from normjax.records import Record
from normjax.spec import NormSpec

# Two right implementations differ by a few roundoffs, by R u more at an offset of R
# standard deviations, and both by the rounding of sums: 32 covers what was measured.
ROUNDOFFS = 32
# What an audit says of values, in the order of the report, and the facts that decide.
PROPERTIES = {
    "kind": ("kind",),
    "grouping": ("axes", "parts"),
    "formula": ("measure", "center", "power"),
    "epsilon": ("placement", "epsilon"),
    "ddof": ("divisor",),
    "affine": ("scale_axes", "bias_axes"),
    "variance": ("algorithm",),
    "application": ("form",),
    "half types": ("cast", "overflow"),
    "mask": ("honored", "output"),
    "running": (
        "rule",
        "decay",
        "stored_ddof",
        "updates_in_inference",
        "training_uses",
    ),
}
# What a callable has to be asked in its own way: with a mask, in other sizes and types.
ASKED = ("variance", "application", "half types", "mask", "batch")


@dataclass(frozen=True, repr=False)
class Gap(Record):
    """How far two callables are apart on one kind of input.

    Attributes:
        kind: of input: ``"normal"``, ``"large offset"``, ``"near zero variance"``, ...
        difference: the largest one, relative to max|y|; infinite where only one of the
            two is finite or raises.
        tolerance: what rounding explains.
        index: where it is.
        values: both outputs there, or what was raised.
    """

    kind: str
    difference: float
    tolerance: float
    index: tuple[int, ...] = ()
    values: tuple[Any, Any] = (None, None)

    @property
    def ok(self) -> bool:
        """Whether rounding explains it."""
        return self.difference <= self.tolerance


@dataclass(frozen=True, repr=False)
class Equivalence(Record):
    """Whether two callables are the same layer.

    Attributes:
        same: values agree on every kind of input, and so do the audits.
        property: the first property that differs, in the order of an audit;
            ``"values"`` if only they do, None if nothing does.
        first: what the first callable has there.
        second: what the second one has.
        largest: the gap that is most above its tolerance.
        gaps: one for each kind of input.
    """

    same: bool
    property: str | None
    first: Any
    second: Any
    largest: Gap
    gaps: tuple[Gap, ...]


def equivalent(
    first: Callable | Target | NormSpec,
    second: Callable | Target | NormSpec,
    shape: tuple[int, ...] = (8, 16),
    dtype: Any = "float32",
    *,
    train: bool = False,
    seed: int = 0,
) -> Equivalence:
    """Whether two callables, or a callable and a spec, are the same layer.

    Values are compared with the parameters that a layer starts with, on inputs of many
    kinds; the audits, at random parameters, say in which property they differ.

    Args:
        first: as for ``audit``, or a spec.
        second: the same.
        shape: of the input.
        dtype: of the input.
        train: call them as in training.
        seed: of the inputs.

    Returns:
        Same or not, the first differing property, the largest difference and where.

    Raises:
        ValueError: if one of them refuses the input.

    Example:
        >>> import normjax as nj
        >>> from flax import linen
        >>> found = nj.equivalent(linen.RMSNorm(), nj.rms_norm(), shape=(4, 6))
        >>> found.same, found.property, found.first, found.second
        (False, 'epsilon', '1e-06 (inside the root)', '1e-05 (inside the root)')
        >>> nj.equivalent(linen.RMSNorm(), nj.rms_norm(epsilon=1e-6), (4, 6)).same
        True
    """
    name = float_dtype(dtype)
    shape = checked_shape(shape)
    starts = [_target(fn, shape, name, train, None) for fn in (first, second)]
    rng = np.random.default_rng(seed)
    gaps = [
        _gap(kind, starts[0], starts[1], x) for kind, x in _inputs(rng, shape, name)
    ]
    audits = [
        audit(_target(fn, shape, name, train, seed), seed=seed)
        for fn in (first, second)
    ]
    differing = next(
        (
            word
            for word in PROPERTIES
            if _differ(word, _facts(audits[0], word), _facts(audits[1], word))
        ),
        None,
    )
    largest = max(gaps, key=lambda gap: gap.difference / gap.tolerance)
    said: list[Any] = [None, None]
    if differing is not None:
        said = [_says(found, differing) for found in audits]
    elif not largest.ok:
        differing, said = "values", list(largest.values)
    same = differing is None
    return Equivalence(same, differing, said[0], said[1], largest, tuple(gaps))


def _target(
    fn: Any, shape: tuple[int, ...], dtype: np.dtype, train: bool, seed: int | None
) -> Target:
    """With random parameters, or with those that it starts with."""
    if not isinstance(fn, NormSpec):
        return adapt(fn, shape, dtype, train=train, seed=seed)
    wide = jnp.float64 if dtype == np.float64 else jnp.float32
    rng = np.random.default_rng(seed)
    params = {}
    for name, value in init(fn, shape).items():
        start = np.asarray(value, np.float64)
        if seed is not None:
            low, high = (-0.5, 0.5) if name == "scale" else (-2, 2)
            start = start + rng.uniform(low, high, start.shape)
        params[name] = start

    def layer(x: Any, mask: Any = None) -> Any:
        given = {name: jnp.asarray(value, wide) for name, value in params.items()}
        return normalize(fn, x, given or None, mask=mask)

    if fn.running is None:
        return adapt(layer, shape, dtype, train=train, name=repr(fn))

    def step(state: Any, x: Any, train: bool) -> tuple[Any, Any]:
        if train:
            return layer(x), running.update(fn, state, moments_of(fn, jnp.asarray(x)))
        given = {name: jnp.asarray(value, wide) for name, value in params.items()}
        stored = running.read(fn, state)
        return normalize(fn, jnp.asarray(x), given or None, moments=stored), state

    initial = running.init(fn, shape, wide)
    return adapt_step(step, initial, shape, dtype, train=train, name=repr(fn))


def _inputs(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype
) -> list[tuple[str, np.ndarray]]:
    """Inputs on which layers of one formula still may differ."""
    x = rng.normal(size=shape)
    limits = LIMITS[dtype.name]
    offset = 2.0 ** (14 if limits.unit < 2.0**-20 else limits.exponent)
    spiked = x.copy()
    spiked.flat[0] = 2.0**7
    made = {
        "normal": x,
        "large offset": x + offset,
        "near zero variance": 2.0**-9 * x,
        "constant": np.full(shape, 8.0),
        "zeros": np.zeros(shape),
        "one large element": spiked,
        "large": 2.0**limits.exponent * x,
    }
    inputs = [(kind, np.asarray(value, dtype)) for kind, value in made.items()]
    if dtype == np.float32:
        half = [
            (name, np.asarray(x, float_dtype(name))) for name in ("float16", "bfloat16")
        ]
        inputs += half
    return inputs


def _gap(kind: str, first: Target, second: Target, x: np.ndarray) -> Gap:
    """The largest difference on one input."""
    ys, raised = [], []
    for target in (first, second):
        try:
            ys.append(target(x))
            raised.append(None)
        except CallError as error:
            raised.append(str(error))
    wide = np.asarray(x, np.float64)
    units = [LIMITS[np.dtype(y.dtype).name].unit for y in ys if y.dtype.name in LIMITS]
    unit = max([LIMITS[np.dtype(x.dtype).name].unit, *units])
    spread = wide.std()
    ratio = np.abs(wide).max() / spread if spread else 1.0
    tolerance = ROUNDOFFS * unit * (1 + ratio)
    if len(ys) < 2:
        both = len(ys) == 0
        values = tuple(error or "no error" for error in raised)
        return Gap(kind, 0.0 if both else np.inf, tolerance, (), (values[0], values[1]))
    one, other = (np.asarray(y, np.float64) for y in ys)
    if one.shape != other.shape:
        return Gap(kind, np.inf, tolerance, (), (one.shape, other.shape))
    size = max(np.abs(y[np.isfinite(y)]).max(initial=0.0) for y in (one, other))
    with np.errstate(all="ignore"):
        apart = np.abs(one - other) / max(size, 1.0)
    apart = np.where(np.isnan(one) & np.isnan(other) | (one == other), 0.0, apart)
    apart = np.where(np.isnan(apart), np.inf, apart)
    place = np.unravel_index(int(np.argmax(apart)), apart.shape)
    index = tuple(int(i) for i in place)
    values = (float(one[place]), float(other[place]))
    return Gap(kind, float(apart[place]), tolerance, index, values)


def _differ(name: str, first: Any, second: Any) -> bool:
    """Whether two audits differ; that only one can be asked is no difference."""
    if name in ASKED and (first is None or second is None):
        return False
    return first != second


def _facts(found: Audit, name: str) -> Any:
    """What an audit says of a property, as far as it is sure."""
    if name == "kind":
        return found.kind
    finding = _finding(found, name)
    if finding is None or finding.confidence == "open":
        return None
    return [_near(finding.facts.get(key)) for key in PROPERTIES[name]]


def _finding(found: Audit, name: str) -> Finding | None:
    """None where an audit has nothing of that name."""
    if found.kind is not None:
        return None
    return next((each for each in found.findings if each.name == name), None)


def _near(value: Any) -> Any:
    """Numbers that a fit reads, to five digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _says(found: Audit, name: str) -> Any:
    if name == "kind":
        return found.kind or "a normalization"
    finding = _finding(found, name)
    return None if finding is None else finding.value
