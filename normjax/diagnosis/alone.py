"""A norm layer of a model on its own: a few positions, parameters that differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from normjax.arguments import bind
from normjax.diagnosis.subject import BoundModel, Run
from normjax.layers.found import NormLayer, stores
from normjax.layers.replaced import ReplacedNorms
from normjax.layers.watch import modules
from normjax.layout import Layout
from normjax.spec import NormSpec, Precision
from normjax.stateful import parameter_shape


@dataclass(frozen=True)
class Alone:
    """A norm layer of a model as a function of a small input, in training.

    Attributes:
        spec: what it declares.
        layout: the spec on the small shape, or on the input's own where the layer
            takes no other.
        params: scale 1, 2, 3, 1, ... and bias 0, 10, 20, 30, 0, ... in the order in
            which they are stored, so that one on the wrong axis is seen.
        call: the layer itself, of Flax, of ours, or a subclass. It computes in the
            dtype of its input, whatever dtype the model gave it.
    """

    spec: NormSpec
    layout: Layout
    params: dict[str, np.ndarray]
    call: Callable[[Any], Any]


def alone(subject: BoundModel, run: Run, path: str) -> Alone | str:
    """One layer of a run on its own, or why it cannot be.

    Args:
        subject: the model.
        run: in which the layer was called.
        path: of the layer.

    Returns:
        An ``Alone``, or a few words.
    """
    layer = run.layers[path].layer
    why = _not_alone(subject, layer)
    if why:
        return why
    spec, layout = layer.spec, _small(layer)
    size = prod(parameter_shape(spec, layout.shape))
    values = {"scale": 1.0 + np.arange(size) % 3, "bias": 10.0 * (np.arange(size) % 4)}
    params = {name: values[name] for name in layer.params}
    shifted = spec.affine is not None and spec.affine.stored == "1+w"
    held = {
        name: (value - 1 if shifted and name == "scale" else value).reshape(
            layer.params[name].shape
        )
        for name, value in params.items()
    }
    if isinstance(subject.model, nnx.Module):
        call = _of_nnx(modules(subject.model)[path], held, layer)
    else:
        call = _of_linen(run.modules[path], held, layer)
    try:
        jax.eval_shape(call, jax.ShapeDtypeStruct(layout.shape, jnp.float32))
    except Exception:  # whatever a stranger's layer says of another size
        assert layer.shape is not None
        layout = bind(spec, layer.shape)
    return Alone(spec, layout, params, call)


def _not_alone(subject: BoundModel, layer: NormLayer) -> str:
    spec = layer.spec
    if not isinstance(spec, NormSpec) or layer.kind.endswith("ModulatedNorm"):
        return "it takes more than an input"
    if isinstance(subject.model, ReplacedNorms) or layer.shape is None:
        return "it is computed in place of another layer"
    if spec.statistics != "input" or spec.axis_names:
        return "it needs stored statistics or other devices"
    if set(layer.params) - {"scale", "bias"}:
        return "it has parameters of its own"
    if is_stacked(layer):
        return "its arrays are stacked, as by nn.scan or nn.vmap"
    return ""


def is_stacked(layer: NormLayer) -> bool:
    """Whether a layer's arrays hold several layers, of nn.scan, nn.vmap and the like.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> scale = {"scale": jnp.ones((2, 6))}
        >>> spec = nj.rms_norm()
        >>> is_stacked(NormLayer("blocks/norm", "", spec, scale, {}, (8, 6)))
        True
    """
    if not isinstance(layer.spec, NormSpec) or layer.shape is None:
        return False
    size = prod(parameter_shape(layer.spec, layer.shape))
    layout = bind(layer.spec, layer.shape)
    stored = {prod(layout.mapped_shape)} if layer.spec.running is not None else set()
    return any(each.size != size for each in layer.params.values()) or any(
        layer.stored[name].size not in stored
        for name in ("mean", "var")
        if name in layer.stored
    )


def _small(layer: NormLayer) -> Layout:
    """Two or three of every axis along which the layer holds nothing."""
    spec = layer.spec
    assert layer.shape is not None
    layout = bind(spec, layer.shape)
    kept = {each for each in layout.owner if layout.owner.count(each) > 1}
    if spec.affine is not None:
        view = layout.parameter(spec.affine.axes).view_shape
        kept |= {layout.owner[i] for i, size in enumerate(view) if size > 1}
    if stores(spec):
        mapped = set(range(len(layout.owner))) - set(layout.reduced)
        kept |= {layout.owner[i] for i in mapped}
    shape = tuple(
        size if axis in kept else min(size, 2 + axis % 2)
        for axis, size in enumerate(layer.shape)
    )
    return bind(spec, shape)


def _of_linen(module: Any, params: Any, layer: NormLayer) -> Callable[[Any], Any]:
    changes: dict[str, Any] = {"parent": None}
    if hasattr(module, "dtype"):
        changes["dtype"] = None
    if hasattr(module, "spec"):
        changes["spec"] = layer.spec.replace(precision=Precision())
    if stores(layer.spec):
        changes["use_running_average"] = False
    free = module.clone(**changes)

    def call(x: Any) -> Any:
        wide = jax.tree.map(lambda each: jnp.asarray(each, x.dtype), params)
        held = {"params": wide, "batch_stats": layer.stored}
        return free.apply(held, x, mutable=["batch_stats"])[0]

    return call


def _of_nnx(module: Any, params: Any, layer: NormLayer) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        free = nnx.clone(module)
        if hasattr(free, "dtype"):
            free.dtype = None
        if hasattr(free, "spec"):
            free.spec = layer.spec.replace(precision=Precision())
        if stores(layer.spec):
            free.use_running_average = False
        for name, value in {**layer.stored, **params}.items():
            getattr(free, name).set_value(jnp.asarray(value, _like(value, x)))
        return free(x)

    return call


def _like(value: Any, x: Any) -> Any:
    """The input's dtype for floats; counts stay what they are."""
    floats = jnp.issubdtype(value.dtype, jnp.floating)
    return x.dtype if floats else value.dtype
