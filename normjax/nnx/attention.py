"""Attention of normalized queries and keys, for Flax's nnx attention layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from normjax.nnx.norm import Norm
from normjax.presets import qk_norm
from normjax.spec import NormSpec


class QKNormAttention(nnx.Module):
    """Normalizes queries and keys, each with parameters of its own, and attends.

    It is the ``attention_fn`` of ``flax.nnx.MultiHeadAttention``, whose
    ``normalize_qk`` is a layer norm over each head.

    Args:
        shape: (heads, head_dim).
        spec: of queries and keys, (..., positions, heads, head_dim); None:
            ``nj.qk_norm()``.
        attention_fn: is called with them.
        param_dtype: dtype of the parameters.
        rngs: accepted as by Flax's own layers; nothing here is random.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> layer = nnx.MultiHeadAttention(
        ...     num_heads=2,
        ...     in_features=6,
        ...     decode=False,
        ...     rngs=nnx.Rngs(0),
        ...     attention_fn=nj.nnx.QKNormAttention((2, 3)),
        ... )
        >>> layer(jnp.ones((8, 5, 6))).shape
        (8, 5, 6)

    Reference: Henry et al., "Query-Key Normalization for Transformers" (2020),
    arXiv:2010.04245; Dehghani et al. (2023), arXiv:2302.05442.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        spec: NormSpec | None = None,
        attention_fn: Callable[..., Array] = nnx.dot_product_attention,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        """Create the parameters."""
        del rngs
        spec = qk_norm() if spec is None else spec
        self.query_norm = Norm(spec, (1, *shape), param_dtype=param_dtype)
        self.key_norm = Norm(spec, (1, *shape), param_dtype=param_dtype)
        self.attention_fn = attention_fn

    def __call__(
        self, query: Array, key: Array, value: Array, *args: Any, **kwargs: Any
    ) -> Array:
        """Attend; what follows the value is passed on to ``attention_fn``."""
        query, key = self.query_norm(query), self.key_norm(key)
        return self.attention_fn(query, key, value, *args, **kwargs)
