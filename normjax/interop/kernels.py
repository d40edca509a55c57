"""A kernel in any layout, seen as (positions, groups, inputs, outputs) in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.arguments import check_float
from normjax.records import check_count, check_flag


@dataclass(frozen=True)
class Kernel:
    """The kernel and the bias of a linear layer.

    Attributes:
        view: kernel as (positions, groups, inputs, outputs) of each group.
        bias: over the outputs; 0 where the layer has none.
        given: the layer's own arrays.
        order: the axes of its kernel as spatial, inputs, outputs.
        spatial: sizes of the spatial axes.
        inputs: sizes of the axes of the inputs, of all groups.
        outputs: likewise.
        transposed: whether it is a transposed convolution's.
    """

    view: np.ndarray
    bias: np.ndarray
    given: dict[str, Any]
    order: tuple[int, ...]
    spatial: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    transposed: bool

    @classmethod
    def of(
        cls, layer: Mapping[str, Any], layout: str, groups: int, transposed: bool
    ) -> Kernel:
        """Read a layer.

        Raises:
            ValueError: if it has other names than kernel and bias, or the shapes, the
                layout and the groups do not fit.

        Example:
            >>> import numpy as np
            >>> kernel = Kernel.of(
            ...     {"kernel": np.ones((3, 3, 2, 8))}, "... i o", 4, False
            ... )
            >>> kernel.view.shape, kernel.inputs, kernel.fan_in
            ((9, 4, 2, 2), (8,), 18)
        """
        check_count("groups", groups, least=1)
        check_flag("transposed", transposed)
        _check_names(layer)
        shape = np.shape(layer["kernel"])
        axes = _axes(layout, len(shape))
        parts = [[k for k, word in enumerate(axes) if word == each] for each in "io"]
        rest = [k for k, word in enumerate(axes) if word not in "io"]
        sizes = [tuple(shape[k] for k in part) for part in parts]
        split = 0 if transposed else 1  # the axis that all groups share
        if groups > 1 and (len(sizes[0]) != 1 or len(sizes[1]) != 1):
            raise ValueError(
                f"layout {layout!r} has several i or o, and groups={groups}"
            )
        if sizes[split] and prod(sizes[split]) % groups:
            raise ValueError(
                f"groups={groups} does not divide the {prod(sizes[split])} "
                f"{'inputs' if transposed else 'outputs'} of a kernel of shape {shape}"
            )
        order = (*rest, *parts[0], *parts[1])
        wide = np.asarray(layer["kernel"], np.float64).transpose(order)
        spatial = tuple(shape[k] for k in rest)
        inputs, outputs = map(prod, sizes)
        if transposed:
            view = wide.reshape(prod(spatial), groups, inputs // groups, outputs)
        else:
            view = wide.reshape(prod(spatial), inputs, groups, outputs // groups)
            view = np.moveaxis(view, 2, 1)
        if groups > 1:
            sizes[1 - split] = (sizes[1 - split][0] * groups,)
        bias = np.zeros(prod(sizes[1]))
        if "bias" in layer:
            bias = np.asarray(layer["bias"], np.float64)
            if bias.shape != sizes[1]:
                raise ValueError(
                    f"bias has shape {bias.shape}, and the kernel's outputs are "
                    f"{sizes[1]}: check layout=, groups= and transposed="
                )
        given = dict(layer)
        flat = bias.ravel()
        first, second = sizes
        return cls(view, flat, given, order, spatial, first, second, transposed)

    @property
    def has_bias(self) -> bool:
        """Whether the layer has one."""
        return "bias" in self.given

    @property
    def fan_in(self) -> int:
        """Number of terms of one output, at most."""
        return self.view.shape[0] * self.view.shape[2]

    @property
    def unit(self) -> float:
        """Unit roundoff of the kernel's dtype."""
        return float(jnp.finfo(self.given["kernel"].dtype).eps) / 2

    def scaled_outputs(self, a: np.ndarray) -> np.ndarray:
        """Kernel · a over the outputs."""
        return self.view * a.reshape(1, self.view.shape[1], 1, -1)

    def scaled_inputs(self, a: np.ndarray) -> np.ndarray:
        """A · kernel over the inputs."""
        return self.view * a.reshape(1, self.view.shape[1], -1, 1)

    def shift(self, b: np.ndarray) -> np.ndarray:
        """Σ b · kernel: what a constant b for each input gives."""
        return self.scaled_inputs(b).sum((0, 2)).ravel()

    def terms(self, a: np.ndarray, b: np.ndarray, size: float, order: str) -> float:
        """Largest sum of the |terms| of an output, for inputs of at most ``size``."""
        sizes, a = np.abs(self.view), np.abs(a)
        if order == "after":
            within = size * sizes.sum((0, 2)).ravel() + np.abs(self.bias)
            return float((a * within + b).max(initial=0))
        each = (a * size + b).reshape(1, sizes.shape[1], -1, 1)
        found = (sizes * each).sum((0, 2)).ravel() + np.abs(self.bias)
        return float(found.max(initial=0))

    def rounded(self, view: np.ndarray, bias: np.ndarray | None) -> dict[str, Any]:
        """New arrays in the layer's own shapes and dtypes.

        Raises:
            ValueError: if an entry leaves the range of the dtype.
        """
        like = self.given["kernel"]
        if not self.transposed:
            view = np.moveaxis(view, 1, 2)
        shape = np.shape(like)
        turned = view.reshape([shape[k] for k in self.order])
        found = {
            "kernel": _cast("kernel", turned.transpose(np.argsort(self.order)), like)
        }
        if bias is not None:
            dtype_of = self.given.get("bias", like)
            found["bias"] = _cast("bias", bias.reshape(self.outputs), dtype_of)
        return found

    def product(self, layer: Mapping[str, Any], x: Array) -> Array:
        """The layer as a function, where it has no spatial axes.

        Raises:
            ValueError: if it has.
        """
        if self.spatial:
            raise ValueError(
                "a kernel with spatial axes does not say its strides and padding: give "
                "the layer as apply=lambda layer, x: ..."
            )
        kernel = jnp.asarray(layer["kernel"]).transpose(self.order)
        n = len(self.inputs)
        y = jnp.tensordot(
            x, kernel, (tuple(range(x.ndim - n, x.ndim)), tuple(range(n)))
        )
        if "bias" not in layer:
            return y
        bias = jnp.asarray(layer["bias"])
        return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def _check_names(layer: Mapping[str, Any]) -> None:
    if not isinstance(layer, Mapping) or sorted(layer) not in (
        ["bias", "kernel"],
        ["kernel"],
    ):
        got = sorted(layer) if isinstance(layer, Mapping) else type(layer).__name__
        raise ValueError(
            f"layer is {got}, expected a dict with kernel, and bias or not"
        )
    for name, value in layer.items():
        if not isinstance(value, jax.Array | np.ndarray):
            raise ValueError(
                f"{name} is a {type(value).__name__}, expected an array of JAX or NumPy"
            )
        check_float(name, value.dtype)


def _axes(layout: str, ndim: int) -> list[str]:
    """One word for each axis; a ``...`` stands for those that are left."""
    words = str(layout).split()
    extra = ndim - len(words) + words.count("...")
    dots = words.index("...") if "..." in words else len(words)
    axes = [*words[:dots], *["..."] * extra, *words[dots + 1 :]]
    if (
        "i" not in axes
        or "o" not in axes
        or words.count("...") > 1
        or len(axes) != ndim
    ):
        raise ValueError(
            f"layout is {layout!r}, expected i, o and spatial axes of a kernel with "
            f"{ndim} axes, for instance '... i o'"
        )
    return axes


def _cast(name: str, value: np.ndarray, like: Any) -> Any:
    limits = jnp.finfo(like.dtype)
    largest = float(np.abs(value).max(initial=0))
    if largest > float(limits.max):
        raise ValueError(
            f"the folded {name} has entries up to {largest:.3g}, beyond the largest "
            f"{like.dtype}: fold it in a wider dtype"
        )
    rounded = value.astype(like.dtype)
    return rounded if isinstance(like, np.ndarray) else jnp.asarray(rounded)
