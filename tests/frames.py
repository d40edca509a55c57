"""Presets on small shapes, variations of them, and the oracle that goes with each.

A ``Frame`` is a public preset on a small shape, with the group view written by hand, so
that the oracle depends on neither the pattern nor the layout code. A ``Case`` varies
the fields of a frame's spec, and what is passed beside x.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import normjax as nj
from normjax.verify.oracles import reference


@dataclass(frozen=True)
class Frame:
    """A preset on a shape; ``view`` and ``axes`` say which entries are one group.

    ``affine_view`` is the shape in which the parameters broadcast to the view.
    """

    preset: Callable[..., nj.NormSpec]
    settings: dict[str, Any]
    shape: tuple[int, ...]
    view: tuple[int, ...]
    axes: tuple[int, ...]
    affine_view: tuple[int, ...]

    @property
    def mapped_shape(self) -> tuple[int, ...]:
        return tuple(n for i, n in enumerate(self.view) if i not in self.axes)

    @property
    def keep_shape(self) -> tuple[int, ...]:
        return tuple(1 if i in self.axes else n for i, n in enumerate(self.view))

    @property
    def group_size(self) -> int:
        return int(np.prod([self.view[i] for i in self.axes]))


FIRST = {"channels": "first"}
FRAMES = {
    "layer": Frame(nj.layer_norm, {}, (2, 6), (2, 6), (1,), (1, 6)),
    "layer_vector": Frame(nj.layer_norm, {}, (7,), (7,), (0,), (7,)),
    "layer_first": Frame(nj.layer_norm, FIRST, (2, 5, 2), (2, 5, 2), (1,), (1, 5, 1)),
    "layer_space": Frame(
        nj.layer_norm,
        {"axes": "h w c"},
        (2, 2, 2, 3),
        (2, 2, 2, 3),
        (1, 2, 3),
        (1, 2, 2, 3),
    ),
    "adaptive": Frame(
        nj.adaptive_layer_norm, {}, (2, 3, 5), (2, 3, 5), (2,), (2, 1, 5)
    ),
    "adaptive_first": Frame(
        nj.adaptive_layer_norm, FIRST, (2, 5, 3), (2, 5, 3), (1,), (2, 5, 1)
    ),
    "center": Frame(nj.center_only, {}, (2, 6), (2, 6), (1,), (1, 6)),
    "scale": Frame(nj.scale_only, {}, (2, 6), (2, 6), (1,), (1, 6)),
    "rms": Frame(nj.rms_norm, {}, (2, 6), (2, 6), (1,), (1, 6)),
    "rms_first": Frame(nj.rms_norm, FIRST, (2, 5, 2), (2, 5, 2), (1,), (1, 5, 1)),
    "l2": Frame(nj.l2_norm, {}, (2, 5), (2, 5), (1,), (1, 5)),
    "qk": Frame(nj.qk_norm, {}, (2, 2, 5), (2, 2, 5), (2,), (1, 1, 5)),
    "qk_heads": Frame(
        nj.qk_norm, {"axes": "h d"}, (3, 2, 4), (3, 2, 4), (1, 2), (1, 2, 4)
    ),
    "batch": Frame(nj.batch_norm, {}, (6, 2), (6, 2), (0,), (1, 2)),
    "batch_space": Frame(
        nj.batch_norm, {}, (3, 2, 2, 2), (3, 2, 2, 2), (0, 1, 2), (1, 1, 1, 2)
    ),
    "batch_first": Frame(nj.batch_norm, FIRST, (3, 2, 3), (3, 2, 3), (0, 2), (1, 2, 1)),
    "ghost": Frame(
        nj.ghost_batch_norm, {"ghosts": 2}, (10, 2), (2, 5, 2), (1,), (1, 1, 2)
    ),
    "ghost_space": Frame(
        nj.ghost_batch_norm,
        {"ghosts": 2},
        (4, 3, 2),
        (2, 2, 3, 2),
        (1, 2),
        (1, 1, 1, 2),
    ),
    "ghost_first": Frame(
        nj.ghost_batch_norm,
        {"ghosts": 2, **FIRST},
        (4, 2, 3),
        (2, 2, 2, 3),
        (1, 3),
        (1, 1, 2, 1),
    ),
    "instance": Frame(
        nj.instance_norm, {}, (2, 2, 3, 2), (2, 2, 3, 2), (1, 2), (1, 1, 1, 2)
    ),
    "instance_first": Frame(
        nj.instance_norm, FIRST, (2, 2, 5), (2, 2, 5), (2,), (1, 2, 1)
    ),
    "adaptive_instance": Frame(
        nj.adaptive_instance_norm, {}, (2, 5, 3), (2, 5, 3), (1,), (2, 1, 3)
    ),
    "group": Frame(
        nj.group_norm, {"groups": 2}, (2, 3, 4), (2, 3, 2, 2), (1, 3), (1, 1, 2, 2)
    ),
    "group_first": Frame(
        nj.group_norm,
        {"groups": 2, **FIRST},
        (2, 6, 2),
        (2, 2, 3, 2),
        (2, 3),
        (1, 2, 3, 1),
    ),
    "renorm": Frame(nj.batch_renorm, {}, (6, 2), (6, 2), (0,), (1, 2)),
    "center_only": Frame(nj.center_only, {}, (2, 6), (2, 6), (1,), (1, 6)),
    "scale_only": Frame(nj.scale_only, {}, (2, 6), (2, 6), (1,), (1, 6)),
    "weight": Frame(
        nj.weight_standardization, {}, (2, 2, 2, 3), (2, 2, 2, 3), (0, 1, 2), ()
    ),
    "weight_dense": Frame(
        nj.weight_standardization, {"axes": "i"}, (6, 3), (6, 3), (0,), ()
    ),
    "weight_transposed": Frame(
        nj.weight_standardization,
        {"axes": "(g i) o h", "sizes": {"g": 2}},
        (4, 3, 2),
        (2, 2, 3, 2),
        (1, 3),
        (),
    ),
}
# Not among the others: it needs a reference beside x.
RENORM = Frame(nj.batch_renorm, {}, (3, 2, 2, 2), (3, 2, 2, 2), (0, 1, 2), (1, 1, 1, 2))


@dataclass(frozen=True, eq=False)
class Case:
    """A spec on a frame, and what is passed beside x.

    Attributes:
        name: unique; the seed of everything random.
        frame: preset, shape and view.
        fields: fields of the spec that differ from the preset's.
        mask: None, or the kind of its entries: bool, int, float (0 and 1), weights.
        mask_shape: the mask's shape as a user passes it.
        given: None, "statistics", "stored" (without example axes) or "moments".
        affine: whether parameters are passed.
    """

    name: str
    frame: Frame
    fields: dict[str, Any] = field(default_factory=dict)
    mask: str | None = None
    mask_shape: tuple[int, ...] = ()
    given: str | None = None
    affine: bool = False

    def rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(f"{self.name} {purpose}".encode()))

    @cached_property
    def spec(self) -> nj.NormSpec:
        return self.frame.preset(**self.frame.settings, **self.fields)

    @cached_property
    def weights(self) -> np.ndarray | None:
        """The mask as a user passes it; every group has three valid entries or more."""
        if self.mask is None:
            return None
        rng, frame = self.rng("mask"), self.frame
        for _ in range(1000):
            valid = rng.random(self.mask_shape) < 0.7
            count = self.in_view(valid).sum(frame.axes)
            if count.min() >= 3 and not valid.all():
                break
        else:
            raise ValueError(f"{self.name}: no mask leaves three entries in each group")
        if self.mask == "weights":
            return valid * rng.integers(1, 9, self.mask_shape) / 2.0
        kinds = {"bool": bool, "int": np.int32, "float": np.float32}
        return valid.astype(kinds[self.mask])

    @property
    def valid(self) -> np.ndarray:
        """True where not masked, in x's shape."""
        mask = np.ones(self.frame.shape) if self.weights is None else self.weights
        return (self.in_view(mask) != 0).reshape(self.frame.shape)

    def in_view(self, mask: np.ndarray) -> np.ndarray:
        """Leading axes match, missing trailing ones broadcast: DESIGN.md's words."""
        padded = mask.reshape(*mask.shape, *[1] * (len(self.frame.shape) - mask.ndim))
        return np.broadcast_to(padded, self.frame.shape).reshape(self.frame.view)

    @cached_property
    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """A mean and a variance for every group, in the view's shape."""
        rng, keep = self.rng("statistics"), list(self.frame.keep_shape)
        if self.given == "stored":
            keep[0] = 1
        mean, variance = rng.normal(size=keep), rng.uniform(0.5, 2.0, keep)
        full = self.frame.keep_shape
        return np.broadcast_to(mean, full), np.broadcast_to(variance, full)

    @cached_property
    def parameters(self) -> dict[str, np.ndarray]:
        rng, affine = self.rng("parameters"), self.spec.affine
        if not self.affine or affine is None:
            return {}
        size = [n for n in self.frame.affine_view if n > 1]
        if isinstance(self.spec.affine.axes, str) and "(" in affine.axes:
            size = [int(np.prod(size))]
        scale = rng.uniform(0.5, 2.0, size) * rng.choice([-1.0, 1.0], size)
        params = {"scale": scale} if affine.scale else {}
        return params | ({"bias": rng.normal(size=size)} if affine.bias else {})

    def arguments(self, dtype: Any) -> dict[str, Any]:
        """What ``nj.normalize`` and ``nj.input_jacobian`` take beside spec and x."""
        wide = np.float64 if dtype == jnp.float64 else np.float32
        passed: dict[str, Any] = {}
        if self.affine:
            values = self.parameters.items()
            passed["params"] = {name: value.astype(wide) for name, value in values}
        if self.weights is not None:
            weights = self.weights
            passed["mask"] = weights.astype(wide) if self.mask == "weights" else weights
        mean, variance = (array.astype(wide) for array in self.statistics)
        shape = self.frame.mapped_shape
        if self.given == "stored":
            mean, variance, shape = mean[:1], variance[:1], shape[1:]
        mean, variance = mean.reshape(shape), variance.reshape(shape)
        if self.given == "moments":
            parts = np.full_like(mean, 5.0), mean, mean * wide(2**-30), 5 * variance
            passed["moments"] = nj.Moments(*map(jnp.asarray, parts))
        elif self.given:
            passed["moments"] = nj.Statistics(jnp.asarray(mean), jnp.asarray(variance))
        if self.spec.statistics != "input" and self.given in (None, "moments"):
            other = mean - wide(0.5), 2 * variance
            passed["reference"] = nj.Statistics(*map(jnp.asarray, other))
        return passed

    def call(self, x: Array, **changes: Any) -> Array:
        """``nj.normalize`` as a user calls it."""
        passed = self.arguments(x.dtype) | changes
        return nj.normalize(self.spec, x, passed.pop("params", None), **passed)

    def given_numbers(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The mean and variance that the oracle takes as given, in the view's shape."""
        spec, blend = self.spec, self.spec.statistics == "blend"
        if self.given is None and not blend:
            return None
        mean, variance = self.statistics
        other = mean - 0.5, 2.0 * variance
        if self.given is None:
            return other
        if self.given != "moments":
            return mean, variance
        count, m2 = 5.0, 5.0 * variance
        low = mean / 2**30
        square = m2 + count * (mean + low) ** 2
        seconds = {
            "std": m2 / (count - spec.ddof),
            "rms": square / (count - spec.ddof),
            "l2": square,
        }
        given = mean + low, seconds.get(spec.divide, variance)
        if blend:
            shares = spec.mean_weight, spec.variance_weight
            first, second = (
                p * a + (1 - p) * b
                for p, a, b in zip(shares, given, other, strict=True)
            )
            return first, second
        return given

    def oracle(self, x: Array, **changes: Any) -> Array:
        """The same layer from the plain reference, in x's dtype.

        ``changes`` replace epsilon, share, given, scale or bias (in the view's shape).
        """
        spec, frame = self.spec, self.frame
        view = x.reshape(frame.view)
        weights = self.weights
        given = changes.get("given", self.given_numbers())
        given = None if given is None else tuple(jnp.asarray(a, x.dtype) for a in given)
        blend = spec.statistics == "blend" and self.given is None
        renorm = None
        if spec.statistics == "renorm":
            mean, variance = (jnp.asarray(a, x.dtype) for a in self.statistics)
            renorm = (mean - 0.5, 2 * variance, spec.r_max, spec.d_max)
        own = (spec.mean_weight, spec.variance_weight) if blend else (1.0, 1.0)
        y = reference(
            view,
            frame.axes,
            epsilon=changes.get("epsilon", spec.epsilon),
            center=spec.center,
            divide=spec.divide,
            placement=spec.epsilon_placement,
            ddof=spec.ddof,
            weights=None if weights is None else jnp.asarray(self.in_view(weights)),
            given=given,
            share=changes.get("share", (0.0, 0.0) if self.given else own),
            detach=spec.detach,
            renorm=renorm,
        )
        for name, value in self.parameters.items():
            value = jnp.asarray(value, x.dtype).reshape(frame.affine_view)
            value = changes.get(name, value)
            plus_one = name == "scale" and spec.affine.stored == "1+w"
            value = 1 + value if plus_one else value
            y = y * value if name == "scale" else y + value
        if weights is not None and spec.masked_output != "keep":
            valid = jnp.asarray(self.in_view(weights) != 0)
            passed = spec.masked_output == "passthrough"
            y = jnp.where(valid, y, view if passed else jnp.zeros_like(view))
        return y.reshape(x.shape)


def inputs(
    case: Case, count: int, kappa: float = 1e6, spread: float = 3.0
) -> np.ndarray:
    """``count`` inputs in float64, with offsets up to ``kappa`` standard deviations.

    The standard deviation is log-uniform between 10^−spread and 10^spread, so that it
    lies on both sides of every floor. The first tenth has offsets below one. In every
    fifth input the first element, the x₀ of the shifted variance, is an outlier.
    """
    rng, shape = case.rng("inputs"), (count, *case.frame.shape)
    column = (count, *[1] * len(case.frame.shape))
    offset = 10.0 ** rng.uniform(-1, np.log10(kappa), column)
    offset[: count // 10] = rng.uniform(0, 1, (count // 10, *column[1:]))
    offset = offset * rng.choice([-1.0, 1.0], column)
    noise = rng.normal(size=shape)
    noise[4::5].reshape(-1, noise[0].size)[:, 0] *= 10.0
    return (noise + offset) * 10.0 ** rng.uniform(-spread, spread, column)
