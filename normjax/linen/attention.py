"""Attention of normalized queries and keys, for Flax's linen attention layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from normjax.linen.norm import Norm
from normjax.presets import qk_norm
from normjax.spec import NormSpec


def _takes_what_attention_takes(method: Any) -> Any:
    """Flax passes on, of mask, dropout and the like, what a signature names."""
    own = inspect.signature(method).parameters["self"]
    theirs = inspect.signature(nn.dot_product_attention).parameters.values()
    method.__signature__ = inspect.Signature([own, *theirs])
    return method


class QKNormAttention(nn.Module):
    """Normalizes queries and keys, each with parameters of its own, and attends.

    It is the ``attention_fn`` of ``flax.linen.MultiHeadDotProductAttention``, whose
    ``normalize_qk`` is a layer norm over each head.

    Attributes:
        spec: of queries and keys, (..., positions, heads, head_dim).
        attention_fn: is called with them.
        param_dtype: dtype of the parameters.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, normjax as nj
        >>> attend = nj.linen.QKNormAttention(nj.qk_norm(epsilon=1e-6))
        >>> layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=attend)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((8, 5, 6)))
        >>> jax.tree.map(jnp.shape, variables["params"]["attention_fn"])
        {'key_norm': {'scale': (3,)}, 'query_norm': {'scale': (3,)}}

    Reference: Henry et al., "Query-Key Normalization for Transformers" (2020),
    arXiv:2010.04245; Dehghani et al. (2023), arXiv:2302.05442.
    """

    spec: NormSpec = qk_norm()
    attention_fn: Callable[..., Array] = nn.dot_product_attention
    param_dtype: Any = jnp.float32

    @_takes_what_attention_takes
    @nn.compact
    def __call__(
        self, query: Array, key: Array, value: Array, *args: Any, **kwargs: Any
    ) -> Array:
        """Attend; what follows the value is passed on to ``attention_fn``."""
        query, key = (
            Norm(self.spec, param_dtype=self.param_dtype, name=name)(array)
            for name, array in (("query_norm", query), ("key_norm", key))
        )
        return self.attention_fn(query, key, value, *args, **kwargs)
