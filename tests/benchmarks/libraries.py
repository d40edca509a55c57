"""The same layer of every library that has it, ready for ``jax.vjp``.

Each is built as its documentation says, with its default way of computing, and gets the
data in its own layout: Equinox has the channels first and one example at a time.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

import normjax as nj


class Layer(NamedTuple):
    """y = call(params, x), and where the channels of x and y are: -1 or 1.

    stored(x) are mean and variance that a fresh batch norm stores after x; None where
    the library does not say.
    """

    call: Callable[[Any, jax.Array], jax.Array]
    params: Any
    channel: int = -1
    stored: Callable[[jax.Array], tuple[Any, Any]] | None = None


SPECS = {
    "layer": nj.layer_norm(),
    "rms": nj.rms_norm(),
    "batch": nj.batch_norm(),
    "group": nj.group_norm(groups=32),
    "instance": nj.instance_norm(),
}


def ours(kind: str, x: jax.Array) -> Layer:
    spec = SPECS[kind]

    def stored(x):
        state = nj.running.init(spec, x.shape)
        found = nj.running.update(spec, state, nj.moments(spec, x))
        return found.mean, found.variance

    call = lambda p, x: nj.normalize(spec, x, p)  # noqa: E731
    return Layer(call, nj.init(spec, x.shape), stored=stored)


def by_linen(kind: str, x: jax.Array) -> Layer:
    layer = {
        "layer": linen.LayerNorm,
        "rms": linen.RMSNorm,
        "batch": partial(linen.BatchNorm, use_running_average=False),
        "group": linen.GroupNorm,
        "instance": linen.InstanceNorm,
    }[kind](dtype=x.dtype)
    stored = dict(layer.init(jax.random.key(0), x))
    params = stored.pop("params")

    def call(params, x):
        tree = {"params": params, **stored}
        y = layer.apply(tree, x, mutable=list(stored))
        return y[0] if isinstance(y, tuple) else y

    def new(x):
        tree = {"params": params, **stored}
        found = layer.apply(tree, x, mutable=["batch_stats"])[1]["batch_stats"]
        return found["mean"], found["var"]

    return Layer(call, params, stored=new)


def by_nnx(kind: str, x: jax.Array) -> Layer:
    made = {
        "layer": nnx.LayerNorm,
        "rms": nnx.RMSNorm,
        "batch": nnx.BatchNorm,
        "group": nnx.GroupNorm,
        "instance": nnx.InstanceNorm,
    }[kind](x.shape[-1], dtype=x.dtype, rngs=nnx.Rngs(0))
    static, params, rest = nnx.split(made, nnx.Param, ...)
    return Layer(lambda p, x: nnx.merge(static, p, rest, copy=True)(x), params)


def by_equinox(kind: str, x: jax.Array) -> Layer:
    eqx = import_module("equinox")
    size, channel = x.shape[-1], -1 if kind in ("layer", "rms") else 1
    if kind == "batch":
        return _equinox_batch_norm(eqx, size)
    layer = {
        "layer": lambda: eqx.nn.LayerNorm(size),
        "rms": lambda: eqx.nn.RMSNorm(size, use_bias=False),
        "group": lambda: eqx.nn.GroupNorm(32, size),
        "instance": lambda: eqx.nn.GroupNorm(size, size),
    }[kind]()
    params, static = eqx.partition(layer, eqx.is_array)

    def call(params, x):
        each = eqx.combine(params, static)
        for _ in range(x.ndim - 1 if channel == -1 else 1):
            each = jax.vmap(each)
        return each(x)

    return Layer(call, params, channel)


def _equinox_batch_norm(eqx: Any, size: int) -> Layer:
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(size, "i", mode="batch")
    params, static = eqx.partition(layer, eqx.is_inexact_array)

    def call(params, x):
        each = eqx.combine(params, static)
        over = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "i"}
        return jax.vmap(each, **over)(x, state)[0]

    return Layer(call, params, 1)


def by_haiku(kind: str, x: jax.Array) -> Layer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hk = import_module("haiku")
    both = {"create_scale": True, "create_offset": True}
    make = {
        "layer": lambda: hk.LayerNorm(-1, **both),
        "rms": lambda: hk.RMSNorm(-1),
        "batch": lambda: partial(hk.BatchNorm(**both, decay_rate=0.99), is_training=1),
        "group": lambda: hk.GroupNorm(32),
        "instance": lambda: hk.InstanceNorm(**both),
    }[kind]
    pure = hk.transform_with_state(lambda x: make()(x))
    params, state = pure.init(None, x)

    def stored(x):
        found = pure.apply(params, state, None, x)[1]
        mean, variance = (
            found[f"batch_norm/~/{name}_ema"]["average"] for name in ("mean", "var")
        )
        return mean, variance

    return Layer(lambda p, x: pure.apply(p, state, None, x)[0], params, stored=stored)


def by_keras(kind: str, x: jax.Array) -> Layer:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keras = import_module("keras")
    if keras.backend.backend() != "jax":
        raise ImportError(f"Keras runs on {keras.backend.backend()}")
    layers = keras.layers
    layer = {
        "layer": layers.LayerNormalization,
        "rms": layers.RMSNormalization,
        "batch": layers.BatchNormalization,
        "group": layers.GroupNormalization,
        "instance": partial(layers.GroupNormalization, -1),
    }[kind](dtype="mixed_bfloat16" if x.dtype == jnp.bfloat16 else "float32")
    layer.build(x.shape)
    params, rest = ([v.value for v in vs] for vs in (
        layer.trainable_variables, layer.non_trainable_variables
    ))  # fmt: skip
    more = {"training": True} if kind == "batch" else {}

    def stored(x):
        mean, variance = layer.stateless_call(params, rest, x, **more)[1][:2]
        return mean, variance

    call = lambda p, x: layer.stateless_call(p, rest, x, **more)[0]  # noqa: E731
    return Layer(call, params, stored=stored)


MAKERS = {
    "normjax": ours,
    "linen": by_linen,
    "nnx": by_nnx,
    "equinox": by_equinox,
    "haiku": by_haiku,
    "keras": by_keras,
}


def layers(kind: str, x: jax.Array) -> tuple[dict[str, Layer], dict[str, str]]:
    """The layer of every library, and why one is left out.

    Args:
        kind: a name of ``SPECS``.
        x: the data, channels last.

    Returns:
        Layers by library, ours first, and reasons by library.
    """
    found, missing = {}, {}
    for name, make in MAKERS.items():
        try:
            found[name] = make(kind, x)
        except ImportError as error:
            missing[name] = str(error)
    return found, missing
