"""Linen modules around a residual connection, with the norm where one word says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from normjax.arguments import full_rank
from normjax.layers.wiring import (
    PAIRS,
    PLACEMENTS,
    accepted,
    check_wiring,
    residual,
)
from normjax.linen import Norm, QKNormAttention
from normjax.presets import layer_norm
from normjax.spec import NormSpec

# A spec, or what makes a layer: nn.LayerNorm, partial(nn.BatchNorm, momentum=0.9), ...
Normalization = NormSpec | Callable[..., nn.Module]


class Residual(nn.Module):
    """A residual connection around a block, with the norm where ``placement`` says.

        pre       y = x + a f(N(x))
        post      y = N(x + a f(x))
        sandwich  y = x + a M(f(N(x)))
        branch    y = x + a N(f(x))
        none      y = x + a f(x)

    Attributes:
        block: f, a module or a function, whose output has the shape of its input. What
            a function makes stands beside N; a module stands under ``block``, where a
            compact method makes it with ``parent=None``.
        norm: N, and M with parameters of its own: a spec, or what makes a layer by
            being called with ``name``, as ``nn.LayerNorm`` does. Not used by ``none``.
        placement: one of the five words.
        residual_scale: a, or what it begins with.
        learn_scale: ``no``; ``number``: a is one parameter (ReZero begins with 0);
            ``channel``: one for each channel (LayerScale begins with 1e-5 or so).
        dropout: the share that is dropped.
        dropout_at: ``norm_input``, what N sees; ``branch``, what a is multiplied with;
            or ``output``, y.
        param_dtype: dtype of the parameters that this module makes.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[1.0, 2, 3, 4]])
        >>> layer = nj.layers.linen.Residual(lambda v: 2 * v, nj.layer_norm(), "post")
        >>> print(layer.init_with_output(jax.random.key(0), x)[0].round(4))
        [[-1.3416 -0.4472 0.4472 1.3416]]

    Reference: that of ``nj.layers.wiring.residual``; Touvron et al., "Going Deeper with
    Image Transformers" (2021), arXiv:2103.17239 (LayerScale).
    """

    block: Callable[..., Array]
    norm: Normalization | None = None
    placement: str = "pre"
    residual_scale: float = 1.0
    learn_scale: str = "no"
    dropout: float = 0.0
    dropout_at: str = "branch"
    param_dtype: Any = jnp.float32

    @nn.compact
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
        ``deterministic`` what their calls name as an argument.

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
            ValueError: on a word that is none of the above, a placement without its
                norm, or a block that changes the shape.
        """
        check_wiring(
            self.placement,
            self.norm,
            self.learn_scale,
            self.dropout,
            self.dropout_at,
        )
        modes: dict[str, Any] = {
            "use_running_average": use_running_average,
            "deterministic": deterministic,
        }
        spread = None if mask is None else full_rank(mask, x.shape)
        norms = {
            name: _bound(self._norm(name), mask=spread, **modes)
            for name in PLACEMENTS[self.placement]
        }
        drop = None
        if self.dropout:
            drop = partial(nn.Dropout(self.dropout), deterministic=deterministic)
        scale: Any = self.residual_scale
        if self.learn_scale != "no":
            shape = (x.shape[-1],) if self.learn_scale == "channel" else ()
            start = jax.nn.initializers.constant(scale)
            scale = self.param("scale", start, shape, self.param_dtype)
        if mask is not None and type(self.block) is nn.MultiHeadDotProductAttention:
            raise ValueError(PAIRS.format("linen", "MultiHeadDotProductAttention"))
        more = accepted(self.block, mask=mask, **modes) | kwargs
        return residual(
            self.placement,
            x,
            lambda value: self.block(value, *args, **more),
            norms,
            scale=scale,
            dropout=drop,
            dropout_at=self.dropout_at,
            mask=mask,
        )

    def _norm(self, name: str) -> nn.Module:
        if isinstance(self.norm, NormSpec):
            return Norm(self.norm, param_dtype=self.param_dtype, name=name)
        assert self.norm is not None
        return self.norm(name=name)


def _bound(layer: Any, **offered: Any) -> Callable[[Array], Array]:
    return partial(layer, **accepted(layer, **offered))


class SelfAttention(nn.MultiHeadDotProductAttention):
    """Flax's attention of positions to each other, for a mask of positions.

    Attributes:
        causal: no position attends to a later one. The others are Flax's.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> layer = nj.layers.linen.SelfAttention(num_heads=2, causal=True)
        >>> x, mask = jnp.ones((8, 5, 6)), jnp.ones((8, 5), bool)
        >>> layer.init_with_output(jax.random.key(0), x, mask=mask)[0].shape
        (8, 5, 6)
    """

    causal: bool = False

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
        pairs = nn.combine_masks(
            None if given is None else nn.make_attention_mask(given, given, dtype=bool),
            nn.make_causal_mask(x[..., 0], dtype=bool) if self.causal else None,
            dtype=bool,
        )
        return super().__call__(x, mask=pairs, deterministic=deterministic)


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each in a ``Residual``.

    Attributes:
        num_heads: of the attention.
        mlp_width: features between the two Dense of the perceptron.
        norm: as in ``Residual``.
        placement: as in ``Residual``.
        qk_norm: of queries and keys, for instance ``nj.qk_norm()``; None: none.
        causal: no position attends to a later one.
        residual_scale: as in ``Residual``.
        learn_scale: as in ``Residual``.
        dropout: of each branch.
        param_dtype: dtype of the parameters.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> block = nj.layers.linen.TransformerBlock(2, 16, nj.rms_norm(), "sandwich")
        >>> x, mask = jnp.ones((8, 5, 6)), jnp.arange(5) < jnp.arange(8)[:, None]
        >>> variables = block.init(jax.random.key(0), x, mask=mask)
        >>> list(variables["params"]), list(variables["params"]["mlp"])
        (['attention', 'mlp'], ['norm', 'Dense_0', 'Dense_1', 'norm_after'])
        >>> block.apply(variables, x, mask=mask).shape
        (8, 5, 6)
    """

    num_heads: int
    mlp_width: int
    norm: Normalization | None = layer_norm()
    placement: str = "pre"
    qk_norm: NormSpec | None = None
    causal: bool = False
    residual_scale: float = 1.0
    learn_scale: str = "no"
    dropout: float = 0.0
    param_dtype: Any = jnp.float32

    @nn.compact
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
        dtype: dict[str, Any] = {"param_dtype": self.param_dtype}
        attend = nn.dot_product_attention
        if self.qk_norm is not None:
            attend = QKNormAttention(self.qk_norm, **dtype, parent=None)
        attention = SelfAttention(
            self.num_heads,
            attention_fn=attend,
            causal=self.causal,
            **dtype,
            parent=None,
        )

        def mlp(value: Array) -> Array:
            value = nn.gelu(nn.Dense(self.mlp_width, **dtype)(value))
            return nn.Dense(x.shape[-1], **dtype)(value)

        for name, block in (("attention", attention), ("mlp", mlp)):
            layer = Residual(
                block,
                self.norm,
                self.placement,
                self.residual_scale,
                self.learn_scale,
                self.dropout,
                **dtype,
                name=name,
            )
            x = layer(
                x,
                mask=mask,
                use_running_average=use_running_average,
                deterministic=deterministic,
            )
        return x
