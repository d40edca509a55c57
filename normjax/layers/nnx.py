"""Nnx modules around a residual connection, with the norm where one word says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from normjax.arguments import full_rank
from normjax.layers.wiring import (
    PAIRS,
    PLACEMENTS,
    accepted,
    check_wiring,
    residual,
)
from normjax.nnx import Norm, QKNormAttention
from normjax.presets import layer_norm
from normjax.spec import NormSpec

# A spec, or what makes a layer: nnx.LayerNorm, partial(nnx.BatchNorm, momentum=0.9)
Normalization = NormSpec | Callable[..., nnx.Module]


class Residual(nnx.Module):
    """A residual connection around a block, with the norm where ``placement`` says.

        pre       y = x + a f(N(x))
        post      y = N(x + a f(x))
        sandwich  y = x + a M(f(N(x)))
        branch    y = x + a N(f(x))
        none      y = x + a f(x)

    Args:
        block: f, a module or a function, whose output has the shape of its input.
        norm: N, and M with parameters of its own: a spec, or what makes a layer by
            being called with a number of features and ``rngs``, as ``nnx.LayerNorm``
            does. Not used by ``none``.
        shape: shape of an input, as for ``nj.nnx.Norm``.
        placement: one of the five words.
        residual_scale: a, or what it begins with.
        learn_scale: ``no``; ``number``: a is one parameter (ReZero begins with 0);
            ``channel``: one for each channel (LayerScale begins with 1e-5 or so).
        dropout: the share that is dropped.
        dropout_at: ``norm_input``, what N sees; ``branch``, what a is multiplied with;
            or ``output``, y.
        param_dtype: dtype of the parameters that this module makes.
        rngs: for norms and dropout.

    Raises:
        ValueError: on a word that is none of the above, or a placement without its
            norm.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> layer = nj.layers.nnx.Residual(
        ...     lambda v: 2 * v, nj.layer_norm(), (1, 4), placement="post"
        ... )
        >>> print(layer(jnp.array([[1.0, 2, 3, 4]])).round(4))
        [[-1.3416 -0.4472 0.4472 1.3416]]

    Reference: that of ``nj.layers.wiring.residual``; Touvron et al., "Going Deeper with
    Image Transformers" (2021), arXiv:2103.17239 (LayerScale).
    """

    def __init__(
        self,
        block: Callable[..., Array],
        norm: Normalization | None,
        shape: tuple[int, ...],
        *,
        placement: str = "pre",
        residual_scale: float = 1.0,
        learn_scale: str = "no",
        dropout: float = 0.0,
        dropout_at: str = "branch",
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        """Create the norms and the scale."""
        check_wiring(placement, norm, learn_scale, dropout, dropout_at)
        self.block = block
        self.placement, self.dropout_at = placement, dropout_at
        for name in PLACEMENTS[placement]:
            if isinstance(norm, NormSpec):
                layer = Norm(norm, shape, param_dtype=param_dtype)
            else:
                assert norm is not None
                layer = norm(shape[-1], rngs=rngs)
            setattr(self, name, layer)
        wide = (shape[-1],) if learn_scale == "channel" else ()
        learned = nnx.Param(jnp.full(wide, residual_scale, param_dtype))
        self.scale = residual_scale if learn_scale == "no" else learned
        self.dropout = nnx.data(nnx.Dropout(dropout, rngs=rngs) if dropout else None)

    def __call__(
        self,
        x: Array,
        *args: Any,
        mask: Array | None = None,
        use_running_average: bool | None = None,
        deterministic: bool | None = None,
        **kwargs: Any,
    ) -> Array:
        """Call the block, the norm and the addition.

        Norms, block and dropout get of ``mask``, ``use_running_average`` and
        ``deterministic`` what their calls name as an argument; ``train()`` and
        ``eval()`` of the model set the latter two as well.

        Args:
            x: the input.
            *args: of the block, after its input.
            mask: 0 where padded: the leading axes of x, or all with size 1 to broadcast
                (as which norms get it). There the block sees 0, and y is 0.
            use_running_average: of norms that store statistics.
            deterministic: without dropout.
            **kwargs: of the block.

        Returns:
            y in x's shape.

        Raises:
            ValueError: if the block changes the shape, or the mask does not fit.
        """
        modes: dict[str, Any] = {
            "use_running_average": use_running_average,
            "deterministic": deterministic,
        }
        spread = None if mask is None else full_rank(mask, x.shape)
        norms = {
            name: _bound(getattr(self, name), mask=spread, **modes)
            for name in PLACEMENTS[self.placement]
        }
        if mask is not None and type(self.block) is nnx.MultiHeadAttention:
            raise ValueError(PAIRS.format("nnx", "MultiHeadAttention"))
        more = accepted(self.block, mask=mask, **modes) | kwargs
        scale = self.scale
        return residual(
            self.placement,
            x,
            lambda value: self.block(value, *args, **more),
            norms,
            scale=scale.get_value() if isinstance(scale, nnx.Variable) else scale,
            dropout=self.dropout and _bound(self.dropout, deterministic=deterministic),
            dropout_at=self.dropout_at,
            mask=mask,
        )


def _bound(layer: Any, **offered: Any) -> Callable[[Array], Array]:
    return partial(layer, **accepted(layer, **offered))


class SelfAttention(nnx.MultiHeadAttention):
    """Flax's attention of positions to each other, for a mask of positions.

    Args:
        num_heads: as in Flax.
        in_features: as in Flax.
        causal: no position attends to a later one.
        **more: as in Flax.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> layer = nj.layers.nnx.SelfAttention(2, 6, causal=True, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((8, 5, 6)), mask=jnp.ones((8, 5), bool)).shape
        (8, 5, 6)
    """

    def __init__(
        self, num_heads: int, in_features: int, *, causal: bool = False, **more: Any
    ):
        """Create the parameters."""
        super().__init__(num_heads, in_features, decode=False, **more)
        self.causal = causal

    def __call__(  # type: ignore[override]
        self,
        x: Array,
        *,
        mask: Array | None = None,
        deterministic: bool | None = None,
    ) -> Array:
        """Attend.

        Args:
            x: (..., positions, features).
            mask: (..., positions), 0 where padded: nothing attends to these.
            deterministic: without dropout of the weights.

        Returns:
            y in x's shape.
        """
        given = None if mask is None else mask != 0
        pairs = nnx.combine_masks(
            None
            if given is None
            else nnx.make_attention_mask(given, given, dtype=jnp.bool_),
            nnx.make_causal_mask(x[..., 0], dtype=jnp.bool_) if self.causal else None,
            dtype=jnp.bool_,
        )
        return super().__call__(x, mask=pairs, deterministic=deterministic)


class TransformerBlock(nnx.Module):
    """Attention and a perceptron, each in a ``Residual``.

    Args:
        num_heads: of the attention.
        features: of an input.
        mlp_width: features between the two Linear of the perceptron.
        norm: as in ``Residual``.
        placement: as in ``Residual``.
        qk_norm: of queries and keys, for instance ``nj.qk_norm()``; None: none.
        causal: no position attends to a later one.
        residual_scale: as in ``Residual``.
        learn_scale: as in ``Residual``.
        dropout: of each branch.
        param_dtype: dtype of the parameters.
        rngs: for the parameters and dropout.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> block = nj.layers.nnx.TransformerBlock(
        ...     2, 6, 16, nj.rms_norm(), "sandwich", rngs=nnx.Rngs(0)
        ... )
        >>> mask = jnp.arange(5) < jnp.arange(8)[:, None]
        >>> block(jnp.ones((8, 5, 6)), mask=mask).shape
        (8, 5, 6)
    """

    def __init__(
        self,
        num_heads: int,
        features: int,
        mlp_width: int,
        norm: Normalization | None = None,
        placement: str = "pre",
        *,
        qk_norm: NormSpec | None = None,
        causal: bool = False,
        residual_scale: float = 1.0,
        learn_scale: str = "no",
        dropout: float = 0.0,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Create both parts."""
        made: dict[str, Any] = {"param_dtype": param_dtype, "rngs": rngs}
        attend: Callable[..., Array] = nnx.dot_product_attention
        if qk_norm is not None:
            shape = (num_heads, features // num_heads)
            attend = QKNormAttention(shape, spec=qk_norm, param_dtype=param_dtype)
        attention = SelfAttention(
            num_heads, features, causal=causal, attention_fn=attend, **made
        )
        mlp = nnx.Sequential(
            nnx.Linear(features, mlp_width, **made),
            nnx.gelu,
            nnx.Linear(mlp_width, features, **made),
        )
        self.attention, self.mlp = (
            Residual(
                block,
                layer_norm() if norm is None else norm,
                (1, 1, features),
                placement=placement,
                residual_scale=residual_scale,
                learn_scale=learn_scale,
                dropout=dropout,
                **made,
            )
            for block in (attention, mlp)
        )

    def __call__(
        self,
        x: Array,
        *,
        mask: Array | None = None,
        use_running_average: bool | None = None,
        deterministic: bool | None = None,
    ) -> Array:
        """Attend, and map each position.

        Args:
            x: (..., positions, features).
            mask: (..., positions), 0 where padded: there y is 0, and no other position
                sees what x is there.
            use_running_average: as in ``Residual``.
            deterministic: without dropout.

        Returns:
            y in x's shape.
        """
        for layer in (self.attention, self.mlp):
            x = layer(
                x,
                mask=mask,
                use_running_average=use_running_average,
                deterministic=deterministic,
            )
        return x
