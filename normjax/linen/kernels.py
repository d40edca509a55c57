"""Linen layers whose kernels are standardized before use."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from normjax import functional
from normjax.flax_rules import is_kernel, kernel_spec, one_kernel
from normjax.spec import NormSpec
from normjax.stateful import forward


class WeightStandardized(nn.Module):
    """A Dense, Conv or ConvTranspose whose kernel is standardized before use.

    The parameters stay those of the layer, which is why a checkpoint of it loads as it
    is; the derivative goes through the standardization. All parameters named ``kernel``
    are standardized, of a layer made of others too.

    Attributes:
        layer_instance: the layer.
        spec: of the kernel; None: each output channel over all that enters it. With an
            affine part, as ``nj.weight_standardization("... i", affine="o")`` has one,
            its scale and bias are parameters of this module.
        param_dtype: dtype of these.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, normjax as nj
        >>> layer = nj.linen.WeightStandardized(nn.Conv(8, (3, 3), use_bias=False))
        >>> y, variables = layer.init_with_output(
        ...     jax.random.key(0), jnp.ones((1, 9, 9, 4))
        ... )
        >>> bool(jnp.abs(y[0, 4, 4]).max() < 1e-4)  # kernels of mean 0 see no constant
        True

    Reference: Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and
    Weight Standardization" (2019), arXiv:1903.10520.
    """

    layer_instance: nn.Module
    spec: NormSpec | None = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with standardized kernels; arguments are the layer's.

        Raises:
            ValueError: if the layer has no kernel, or several and the spec an affine
                part.
        """
        spec = kernel_spec(self.layer_instance, self.spec)

        def standardized(tree: Any) -> Any:
            flat = jax.tree.leaves_with_path(tree)
            shape = one_kernel(spec, [(path, leaf.shape) for path, leaf in flat])
            params = {
                name: self.param(name, lambda _, start=start: start)
                for name, start in functional.init(
                    spec, shape, self.param_dtype
                ).items()
            }
            return jax.tree.map_with_path(
                lambda path, value: (
                    forward(spec, value, params)[0] if is_kernel(path) else value
                ),
                tree,
            )

        mapped = nn.map_variables(
            lambda layer: layer(*args, **kwargs),
            "params",
            trans_in_fn=standardized,
            init=self.is_initializing(),
        )
        return mapped(self.layer_instance)
