"""Small models with norms of every kind, Flax's and ours, in linen and in nnx."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import normjax as nj

KEY = jax.random.key(0)
FEATURES = 4
SPEC = nj.batch_norm(running=nj.Running(decay=0.9))


def batch(seed=0, shape=(6, FEATURES), offset=0.0, dtype: Any = np.float32):
    """Rows whose columns have scales of their own."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * np.arange(1, shape[-1] + 1) + offset
    return jnp.asarray(values, dtype)


class Mixed(nn.Module):
    """All kinds, a shared layer, and names that fool a rule about names."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x, train: bool):
        def batch_norm(kind, **more):
            return kind(use_running_average=not train, momentum=0.9, **more)

        x = batch_norm(nn.BatchNorm, name="first", dtype=self.dtype)(x)
        x = nn.Dense(FEATURES, name="scale", dtype=self.dtype)(x)
        shared = nn.LayerNorm(name="Dense_0", dtype=self.dtype)
        x = shared(jnp.tanh(shared(x)))
        x = batch_norm(nj.linen.BatchNorm, name="ours", dtype=self.dtype)(x)
        x = nn.GroupNorm(2, name="group", dtype=self.dtype)(x)
        x = nn.RMSNorm(name="rms", dtype=self.dtype)(x)
        return nj.linen.Norm(SPEC, name="norm")(x, use_running_average=not train)


class MixedNnx(nnx.Module):
    """The same layers in nnx; ``tied`` is ``shared`` again."""

    def __init__(self, dtype: Any = None, *, rngs: nnx.Rngs):
        more: Any = {"rngs": rngs, "dtype": dtype}
        self.first = nnx.BatchNorm(FEATURES, momentum=0.9, **more)
        self.scale = nnx.Linear(FEATURES, FEATURES, **more)
        self.shared = nnx.LayerNorm(FEATURES, **more)
        self.tied = self.shared
        self.rest = nnx.List(
            [
                nj.nnx.BatchNorm(FEATURES, momentum=0.9, **more),
                nnx.GroupNorm(FEATURES, num_groups=2, **more),
                nnx.RMSNorm(FEATURES, **more),
                nj.nnx.Norm(SPEC, (1, FEATURES)),
            ]
        )

    def __call__(self, x):
        x = self.scale(self.first(x))
        x = self.tied(jnp.tanh(self.shared(x)))
        for layer in self.rest:
            x = layer(x)
        return x


class Step(nn.Module):
    """The body of a scan."""

    @nn.compact
    def __call__(self, x, _):
        return nn.LayerNorm(name="norm")(2 * x), None


class Lifted(nn.Module):
    """Norms inside scan, remat, jit and vmap."""

    @nn.compact
    def __call__(self, x):
        more = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(Step, length=3, **more)(name="scan")(x, None)
        x = nn.remat(nn.BatchNorm)(use_running_average=False, name="remat")(x)
        x = nn.jit(nn.RMSNorm)(name="jit")(x)
        lanes = {"variable_axes": {"params": None}, "split_rngs": {"params": False}}
        return nn.vmap(nn.LayerNorm, **lanes)(name="vmap")(x)


def linen(model, x, *args, **kwargs):
    """A linen model and variables in which nothing is at its start."""
    variables = jax.jit(lambda x: model.init(KEY, x, *args, **kwargs))(x)
    leaves, tree = jax.tree.flatten(variables)
    rng = np.random.default_rng(1)
    moved = [
        jnp.asarray(leaf + rng.uniform(0.1, 0.5, leaf.shape), leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else leaf
        for leaf in leaves
    ]
    return model, jax.tree.unflatten(tree, moved)
