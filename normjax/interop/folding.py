"""Folding: a norm that is one multiplication and one addition goes into a kernel.

With stored statistics a norm is x·a + b for each feature, a = scale/S(σ²) and
b = bias − m·a; the scale and bias of any norm are one, too. Beside a linear layer:

    after it     norm(x·W + c)   = x·(W·a) + (c·a + b)      a over the outputs
    before it    norm(x)·W + c   = x·(a·W) + (b·W + c)      a over the inputs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax import running
from normjax.functional import normalize
from normjax.interop.kernels import Kernel
from normjax.interop.separable import feature_map
from normjax.records import check_choice
from normjax.running import State
from normjax.spec import NormSpec, check_numbers
from normjax.statistics import Statistics

Apply = Callable[[dict[str, Any], Array], Array]


@dataclass(frozen=True)
class Folded:
    """A linear layer that contains a norm, and how far it is from the two.

    Attributes:
        params: ``kernel``, and ``bias`` wherever it is not 0 by construction, in the
            shapes and dtypes of the layer's. A layer that had no bias may need one.
        rest: the norm that still stands beside the layer; None: it is gone.
        bound: what ``error`` is at most: 2 (n + 5) u T, with u of the kernel's dtype,
            n the fan-in, and T the largest sum of |terms| of an output, in which a
            kernel's share is multiplied by |a| = |scale|/S. It is for products in that
            dtype: on GPUs and TPUs ``jax.default_matmul_precision("float32")``.
        fan_in: n, the number of terms in one output.
        amplification: the largest |a|.
        size: the largest |entry| of an input that T holds for: the probe's, or 1.
        error: largest difference of an output on the probe; None without one.
        relative: ``error`` by the largest |output|.
        ulps: ``error`` in units of the last place of the largest |output|.
    """

    params: dict[str, Any]
    rest: NormSpec | None
    bound: float
    fan_in: int
    amplification: float
    size: float = 1.0
    error: float | None = None
    relative: float | None = None
    ulps: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the error is within the bound; None if none was measured."""
        return None if self.error is None else bool(self.error <= self.bound)


def fold(
    layer: Mapping[str, Any],
    spec: NormSpec,
    params: Mapping[str, Any] | None = None,
    state: State | Statistics | None = None,
    *,
    order: str = "after",
    part: str = "all",
    layout: str = "... i o",
    groups: int = 1,
    transposed: bool = False,
    padding: Any = None,
    x: Any = None,
    apply: Apply | None = None,
) -> Folded:
    """Fold a norm into the linear layer beside it, if that is exact.

        kernel′ = kernel · a        bias′ = bias · a + b            (after)
        kernel′ = a · kernel        bias′ = Σ b · kernel + bias     (before)

    It is computed in float64 and rounded once. What is lost comes with the form: a sum
    of terms as large as m·a that cancel, where the norm would subtract m first. Nothing
    may stand between the two, and nothing else may read what lies between them: a fold
    changes it, and other consumers cannot be seen from here.

    Args:
        layer: ``{"kernel": ..., "bias": ...}`` of a dense layer or a convolution; the
            bias may be missing.
        spec: the norm. Its features are the last axis or, channels first, the second.
        params: of the norm, as for ``nj.normalize``.
        state: its stored statistics. Folding uses them whatever the layer does in
            training.
        order: whether the norm comes ``"after"`` the layer or ``"before"`` it.
        part: ``"all"`` of the norm, or, before a layer, its ``"affine"`` part alone:
            that leaves a norm without parameters, and needs no stored statistics.
        layout: axes of the kernel: ``i`` inputs, ``o`` outputs, the others spatial.
            Flax has ``"... i o"``, PyTorch ``"o i ..."``, a query kernel ``"i o o"``.
        groups: of a grouped convolution.
        transposed: for a transposed convolution, whose groups share out the outputs.
        padding: of a convolution, as Flax says it. It is asked for where b ≠ 0 comes
            before a convolution.
        x: a probe, on which both are compared.
        apply: ``apply(layer, x)``: the layer as a function; without spatial axes it is
            x · kernel + bias.

    Returns:
        Folded.

    Raises:
        ValueError: if the norm reads statistics from its input, has other axes than
            the kernel, or adds b before zeros are padded: the border has fewer terms.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> layer = {"kernel": jnp.array([[2.0]]), "bias": jnp.array([1.0])}
        >>> norm = {"scale": jnp.array([3.0]), "bias": jnp.array([-1.0])}
        >>> stored = nj.Statistics(jnp.array([0.5]), jnp.array([0.25]))
        >>> spec = nj.batch_norm(epsilon=0.0)
        >>> folded = nj.interop.fold(layer, spec, norm, stored, x=jnp.ones((1, 1)))
        >>> {name: value.tolist() for name, value in folded.params.items()}
        {'kernel': [[12.0]], 'bias': [2.0]}
        >>> folded.error, folded.ok
        (0.0, True)

    Reference: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference" (2018), arXiv:1712.05877.
    """
    check_choice("order", order, ("after", "before"))
    check_choice("part", part, ("all", "affine"))
    check_numbers(spec)
    _check_foldable(spec, params, state, order, part)
    kernel = Kernel.of(layer, layout, groups, transposed)
    features = kernel.outputs if order == "after" else kernel.inputs
    stored = None
    if part == "all":
        stored = running.read(spec, state) if isinstance(state, State) else state
    a, b = feature_map(spec, params, stored, features)
    if order == "before":
        _check_border(kernel, b, padding)
    merged = kernel.scaled_outputs(a) if order == "after" else kernel.scaled_inputs(a)
    bias = kernel.bias * a + b if order == "after" else kernel.bias + kernel.shift(b)
    rest = None if part == "all" else spec.replace(affine=None)
    adds = kernel.has_bias or _offset(spec, params, part)
    folded = kernel.rounded(merged, bias if adds else None)
    size, found = 1.0, {}
    if x is not None:
        calls = _both(spec, params, stored, rest, order, apply or kernel.product)
        size, found = _measured(calls, kernel, layer, folded, x)
    beta = np.asarray((params or {}).get("bias", np.zeros(b.shape)), np.float64)
    offsets = np.abs(b) + 2 * np.abs(beta.ravel())  # |m·a| ≤ |b| + |β|
    terms = kernel.terms(a, offsets, size, order)
    return Folded(
        folded,
        rest,
        bound=2 * (kernel.fan_in + 5) * kernel.unit * terms,
        fan_in=kernel.fan_in,
        amplification=float(np.abs(a).max(initial=0)),
        size=size,
        **found,
    )


def _check_foldable(
    spec: NormSpec, params: Any, state: Any, order: str, part: str
) -> None:
    if part == "affine":
        if order == "after":
            raise ValueError(
                "part='affine' with order='after': between the layer and the scale "
                "stands the normalization; use order='before' on the layer that follows"
            )
        if spec.affine is None or not params:
            raise ValueError(
                f"part='affine', but {spec!r} with params={params!r} has no scale and "
                "no bias: there is nothing to fold"
            )
        named = [name for name in ("bias", "scale") if getattr(spec.affine, name)]
        if sorted(params) != named:
            raise ValueError(
                f"params has {sorted(params)}, expected {named}: the spec says "
                f"affine={spec.affine!r}"
            )
        return
    if state is None:
        hint = " fold its scale and bias alone: part='affine'," if params else ""
        raise ValueError(
            f"'{spec.pattern}' reads its statistics from its input, which no kernel "
            f"does:{hint} or give the stored ones as state="
        )
    if not isinstance(state, State | Statistics):
        raise ValueError(
            f"state is a {type(state).__name__}, expected State (nj.running.init) or "
            "Statistics(mean, variance)"
        )


def _offset(spec: NormSpec, params: Any, part: str) -> bool:
    """Whether the map has a b at all, whatever its values are."""
    biased = spec.affine is not None and spec.affine.bias and bool(params)
    return biased or (part == "all" and spec.center)


def _check_border(kernel: Kernel, b: np.ndarray, padding: Any) -> None:
    """Refuse b before a convolution that pads zeros after it was added."""
    if not kernel.spatial or not b.any():
        return
    offset = f"the norm adds up to {np.abs(b).max():.3g} to its input, and "
    if kernel.transposed:
        raise ValueError(
            f"{offset}the outputs of a transposed convolution have different numbers "
            "of terms, so no one bias holds it: leave the norm, or fold it into the "
            "layer before it with order='after'"
        )
    flat = np.ravel(padding).tolist()
    words = [word.upper() for word in flat if isinstance(word, str)]
    point = max(kernel.spatial) == 1 and words in (["SAME"], ["CAUSAL"])
    inside = words in (["VALID"], ["CIRCULAR"], ["REFLECT"])
    numbers = all(isinstance(n, int) and n == 0 for n in flat)
    if point or inside or numbers:
        return
    if padding is None:
        raise ValueError(
            f"{offset}a kernel does not say how its layer pads: say padding='VALID' or "
            "what it is; with zeros at the border the fold is not exact"
        )
    raise ValueError(
        f"{offset}padding={padding!r} puts zeros around it, where normalized entries "
        "would not be 0: the border has fewer terms than one bias holds. Leave the "
        "norm, or pad with its mean − bias/a before it and use padding='VALID'"
    )


Call = Callable[[Mapping[str, Any], Array], Array]


def _both(
    spec: NormSpec, params: Any, stored: Any, rest: NormSpec | None, order: str, apply
) -> tuple[Call, Call, Callable[[Array], Array]]:
    """The two layers, the folded one, and what the folded kernel multiplies."""
    given = None if params is None else dict(params)

    def norm(z: Array) -> Array:
        return normalize(spec, z, given, moments=stored)

    def enters(x: Array) -> Array:
        return x if rest is None else normalize(rest, x)

    def apart(layer: Mapping[str, Any], x: Array) -> Array:
        if order == "after":
            return norm(apply(dict(layer), x))
        return apply(dict(layer), norm(x))

    return apart, lambda layer, x: apply(dict(layer), enters(x)), enters


def _measured(
    calls: Any, kernel: Kernel, layer: Mapping[str, Any], folded: Any, x: Any
) -> tuple[float, dict[str, float]]:
    apart, together, enters = calls
    x = jnp.asarray(x)
    size = float(np.abs(np.asarray(jax.jit(enters)(x), np.float64)).max(initial=0))
    want = np.asarray(jax.jit(apart)(dict(layer), x))
    got = np.asarray(jax.jit(together)(folded, x))
    if want.shape != got.shape:
        raise ValueError(
            f"apply gave shape {got.shape} and before {want.shape}: it must be the "
            "same function of (layer, x) for both"
        )
    largest = np.abs(want).max(initial=0)
    difference = np.abs(want.astype(np.float64) - got.astype(np.float64))
    error = float(difference.max(initial=0))
    spacing = float(largest) * 2 * kernel.unit
    if largest:
        _, exponent = np.frexp(np.float64(largest))
        spacing = 2.0 ** (int(exponent) - 1) * 2 * kernel.unit
    return size, {
        "error": error,
        "relative": error / float(largest) if largest else error,
        "ulps": error / spacing if spacing else error,
    }
