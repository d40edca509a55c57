"""NormSpec: everything that decides what a normalization layer computes, declared.

Per reduction group, with weights w (a mask is 0/1) and N = Σw:

    m  = Σ w x / N                      σ² = Σ w (x − m)² / (N − ddof)
    x̂  = (x − m) / S(σ²)                y  = scale · x̂ + bias
    S  = √(σ²+ε)  inside_sqrt           √σ² + ε      outside_sqrt
         √max(σ²,ε) floor_var           max(√σ²,ε)   floor_std
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from normjax.pattern import ELLIPSIS, Pattern, dimensions
from normjax.records import (
    Record,
    check_choice,
    check_count,
    check_field,
    check_flag,
    check_number,
    names,
    pairs,
)

DIVIDE = ("std", "rms", "l2", "none")
PLACEMENT = ("inside_sqrt", "outside_sqrt", "floor_var", "floor_std")
STATISTICS = ("input", "blend", "renorm")
MASKED_OUTPUT = ("keep", "zero", "passthrough")
ALGORITHM = ("shifted", "two_pass", "one_pass")
FLOATS = ("float16", "bfloat16", "float32", "float64")


def _static(default: Any, **kwargs: Any) -> Any:
    """A field that is part of the program, not of the data."""
    return field(default=default, metadata={"static": True}, **kwargs)


@jax.tree_util.register_static
@dataclass(frozen=True, repr=False)
class Affine(Record):
    """The learned part: y = scale · x̂ + bias over ``axes`` (names of the pattern).

    Attributes:
        axes: axes that each have their own parameter, for instance ``"c"``; ``""`` is
            one number for all.
        scale: whether there is a scale.
        bias: whether there is a bias.
        stored: ``"w"`` stores the scale, ``"1+w"`` its distance from one (the one is
            added in at least float32).
        cast: multiply, then cast to the output dtype (``"after"``), or cast x̂
            ``"before"``.
    """

    axes: str
    scale: bool = True
    bias: bool = True
    stored: str = "w"
    cast: str = "after"

    def __post_init__(self):
        """Validate."""
        parts = [axis for dim in dimensions(self.axes) for axis in dim.parts]
        if any(axis.reduced for axis in parts):
            raise ValueError(
                f"affine axes {self.axes!r} take no brackets: write the names"
            )
        check_flag("affine.scale", self.scale)
        check_flag("affine.bias", self.bias)
        check_choice("affine.stored", self.stored, ("w", "1+w"))
        check_choice("affine.cast", self.cast, ("after", "before"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Running(Record):
    """Stored statistics: decay · old + (1 − decay) · new.

    Attributes:
        decay: the share that is kept (a leaf). PyTorch's ``momentum`` is 1 − decay.
        ddof: degrees of freedom of the stored variance (PyTorch stores with 1).
        debias: divide by 1 − decayᵗ after t updates; needs ``initial`` (0, 0).
        initial: mean and variance before the first update.
        average: ``"exponential"``, or ``"cumulative"``: the mean of all updates.
        nonfinite: whether an update with NaN or inf is stored or skipped.
    """

    decay: Any = 0.99
    ddof: int = _static(0)
    debias: bool = _static(default=False)
    initial: tuple[float, float] = _static((0.0, 1.0))
    average: str = _static("exponential")
    nonfinite: str = _static("propagate")

    def __post_init__(self):
        """Validate the static fields."""
        check_count("running.ddof", self.ddof)
        check_flag("running.debias", self.debias)
        try:
            initial = tuple(map(float, self.initial))
        except (TypeError, ValueError):
            initial = ()
        if len(initial) != 2 or not all(map(math.isfinite, initial)) or initial[1] < 0:
            raise ValueError(
                f"running.initial is {self.initial!r}, expected finite numbers (mean, "
                "variance) with a variance of 0 or more"
            )
        object.__setattr__(self, "initial", initial)
        check_choice("running.average", self.average, ("exponential", "cumulative"))
        check_choice("running.nonfinite", self.nonfinite, ("propagate", "skip"))
        if self.debias and self.initial != (0.0, 0.0):
            raise ValueError(
                "running.debias divides out a start at zero: set running.initial to "
                f"(0, 0), got {self.initial}"
            )
        if self.debias and self.average == "cumulative":
            raise ValueError("running.debias has no meaning for a cumulative average")


@jax.tree_util.register_static
@dataclass(frozen=True, repr=False)
class Precision(Record):
    """Dtypes and order of the arithmetic.

    Attributes:
        accumulate: dtype of the statistics; a wider input keeps its own.
        algorithm: of the variance; see ``normjax.statistics``.
        rescale: divide each group by a power of two first, for squares that leave even
            the accumulation dtype. ``moments`` are those of the input as it is.
        apply: (x − m)·a ``"centered"``, or x·a + (b − m·a) ``"folded"``, which loses
            |m|/s times as much.
        output: dtype of y: ``"input"`` or a name.
    """

    accumulate: str = "float32"
    algorithm: str = "shifted"
    rescale: bool = False
    apply: str = "centered"
    output: str = "input"

    def __post_init__(self):
        """Validate."""
        check_choice("precision.accumulate", self.accumulate, FLOATS)
        check_choice("precision.algorithm", self.algorithm, ALGORITHM)
        check_flag("precision.rescale", self.rescale)
        check_choice("precision.apply", self.apply, ("centered", "folded"))
        check_choice("precision.output", self.output, ("input", *FLOATS))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class NormSpec(Record):
    """A normalization layer, stated completely.

    The numbers ``epsilon``, ``mean_weight``, ``variance_weight``, ``r_max``, ``d_max``
    and ``running.decay`` are leaves: a sweep over them never recompiles. All else is
    static.

    Attributes:
        pattern: axes and reduction, for instance ``"b [h w] c"``.
        sizes: sizes of axes, for instance the groups ``{"g": 8}``; kept as sorted
            pairs.
        example: the axis that indexes examples; ``"auto"`` is the first one.
        center: subtract the mean.
        divide: by the standard deviation, the root mean square, the L2 norm, or
            nothing.
        epsilon: the stabilizer ε, in units of x² (``inside_sqrt``, ``floor_var``) or x.
        epsilon_placement: where ε stands.
        ddof: N − ddof divides the squares.
        statistics: from the input, blended with given ones, or corrected towards
            them without gradient (batch renormalization): r x̂ + d.
        mean_weight: share of the input's mean in a blend.
        variance_weight: share of the input's variance in a blend.
        r_max: batch renormalization corrects the scale by 1/r_max … r_max.
        d_max: and shifts by −d_max … d_max standard deviations.
        detach: ``"mean"`` and/or ``"variance"``: no gradient flows through these.
        masked_output: masked entries of y: normalized, zero, or x itself.
        single: a group of one element is normalized to zero, or is an error.
        axis_names: named axes over which the statistics are merged.
        affine: the learned part, or None.
        running: the stored statistics, or None.
        precision: dtypes and algorithm.

    Example:
        >>> NormSpec("b [h w] c", affine="c")
        NormSpec('b [h w] c', affine='c')
        >>> NormSpec("... [c]", epsilon=1e-6).replace(center=False, divide="rms")
        NormSpec('... [c]', center=False, divide='rms', epsilon=1e-06)
    """

    pattern: str = field(metadata={"static": True})
    sizes: Any = _static(())
    example: str | None = _static("auto")
    center: bool = _static(default=True)
    divide: str = _static("std")
    epsilon: Any = 1e-5
    epsilon_placement: str = _static("inside_sqrt")
    ddof: int = _static(0)
    statistics: str = _static("input")
    mean_weight: Any = 1.0
    variance_weight: Any = 1.0
    r_max: Any = 3.0
    d_max: Any = 5.0
    detach: tuple[str, ...] = _static(())
    masked_output: str = _static("keep")
    single: str = _static("zero")
    axis_names: tuple[str, ...] = _static(())
    affine: Any = _static(None)
    running: Running | None = None
    precision: Precision = _static(Precision())

    def __post_init__(self):
        """Bring shorthand to its full form and validate the static fields."""
        if isinstance(self.affine, str):
            object.__setattr__(self, "affine", Affine(self.affine))
        object.__setattr__(self, "pattern", str(Pattern.parse(self.pattern)))
        object.__setattr__(self, "sizes", pairs("sizes", self.sizes))
        object.__setattr__(self, "detach", names(self.detach))
        object.__setattr__(self, "axis_names", names(self.axis_names))
        _validate(self)

    @property
    def parsed(self) -> Pattern:
        """The pattern as a ``Pattern``."""
        return Pattern.parse(self.pattern)

    @classmethod
    def from_dict(cls, declared: Mapping[str, Any]) -> NormSpec:
        """Build a spec from plain data, as ``to_dict`` gives it; parts may be left out.

        Raises:
            ValueError: on an unknown key, or a number that is none.
        """
        values = dict(declared)
        for name in values:
            check_field(cls, name)
        if "pattern" not in values:
            raise ValueError("pattern is missing: for instance '... [c]'")
        for name, kind in (("affine", Affine), ("running", Running)):
            if isinstance(values.get(name), Mapping):
                values[name] = _build(kind, name, values[name])
        if isinstance(values.get("precision"), Mapping):
            values["precision"] = _build(Precision, "precision", values["precision"])
        spec = cls(**values)
        check_numbers(spec)
        return spec


LEAVES = ("epsilon", "mean_weight", "variance_weight", "r_max", "d_max")


def check_numbers(spec: NormSpec) -> None:
    """Validate the leaves that are plain numbers; traced values pass.

    Raises:
        ValueError: naming the leaf, what was got and what is expected.
    """
    if not isinstance(spec, NormSpec):
        raise ValueError(
            f"spec is {spec!r}, expected a NormSpec: NormSpec('... [c]'), or a preset "
            "like layer_norm()"
        )
    leaves = [(name, getattr(spec, name)) for name in LEAVES]
    # Not in the constructor: in a transformation `running` may be any placeholder.
    if not isinstance(spec.running, Running | None):
        raise ValueError(
            f"running is {spec.running!r}, expected Running(decay=...) or None"
        )
    if spec.running is not None:
        leaves.append(("running.decay", spec.running.decay))
    for name, value in leaves:
        share = name.endswith(("weight", "decay"))
        check_number(
            name,
            value,
            least=1 if name == "r_max" else 0,
            most=1 if share else math.inf,
            infinite=name.endswith("max"),
        )


def _validate(spec: NormSpec) -> None:
    """Check static fields and what they say together."""
    pattern = spec.parsed
    if not pattern.reduced:
        raise ValueError(
            f"pattern '{pattern}' has no brackets: put them around the axes that are "
            "reduced together"
        )
    for name, size in spec.sizes:
        single = [axis.name for axis in pattern.axes if axis.name != ELLIPSIS]
        _check_axis("sizes", name, pattern, single)
        check_count(f"sizes.{name}", size, least=1)
    if spec.example not in (None, "auto"):
        _check_axis("example", spec.example, pattern, pattern.names)
    check_flag("center", spec.center)
    check_choice("divide", spec.divide, DIVIDE)
    check_choice("epsilon_placement", spec.epsilon_placement, PLACEMENT)
    check_count("ddof", spec.ddof)
    check_choice("statistics", spec.statistics, STATISTICS)
    check_choice("masked_output", spec.masked_output, MASKED_OUTPUT)
    check_choice("single", spec.single, ("zero", "error"))
    for name in spec.detach:
        check_choice("detach", name, ("mean", "variance"))
    if len(set(spec.detach)) < len(spec.detach):
        raise ValueError(f"detach is {spec.detach!r}: name each part once")
    if not isinstance(spec.precision, Precision):
        raise ValueError(f"precision is {spec.precision!r}, expected Precision(...)")
    if not isinstance(spec.affine, Affine | None):
        raise ValueError(
            f"affine is {spec.affine!r}, expected axes such as 'c', Affine(...) or None"
        )
    if spec.affine is not None:
        for dimension in dimensions(spec.affine.axes):
            _check_axis("affine", dimension.name, pattern, pattern.names)
    if spec.precision.rescale and spec.divide == "none":
        raise ValueError(
            "precision.rescale protects squares, and divide='none' takes none: use "
            "rescale=False"
        )
    cast_before = spec.affine is not None and spec.affine.cast == "before"
    if cast_before and spec.precision.apply == "folded":
        raise ValueError(
            "affine.cast='before' casts x̂, which precision.apply='folded' never forms: "
            "use cast='after'"
        )
    if not all(isinstance(name, str) for name in spec.axis_names):
        raise ValueError(f"axis_names is {spec.axis_names!r}, expected names of axes")


def _check_axis(field: str, name: object, pattern: Pattern, known) -> None:
    if name not in known:
        raise ValueError(
            f"{field} names {name!r}, no axis of '{pattern}'; expected one of "
            f"{', '.join(known)}"
        )


def _build(kind: type, prefix: str, declared: Mapping[str, Any]):
    for name in declared:
        check_field(kind, name)
    if kind is Affine and "axes" not in declared:
        raise ValueError(f"{prefix}.axes is missing: name the axes, for instance 'c'")
    return kind(**declared)
