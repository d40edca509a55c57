"""Nnx layers whose kernels are standardized before use."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from normjax import functional
from normjax.flax_rules import is_kernel, kernel_spec, one_kernel
from normjax.spec import NormSpec
from normjax.stateful import forward


class WeightStandardized(nnx.Module):
    """A Linear, Conv or ConvTranspose whose kernel is standardized before use.

    The parameters stay those of the layer, and no call changes them: the derivative
    goes through the standardization. All parameters named ``kernel`` are standardized,
    of a layer made of others too.

    Args:
        layer_instance: the layer.
        spec: of the kernel; None: each output channel over all that enters it. With an
            affine part, as ``nj.weight_standardization("... i", affine="o")`` has one,
            its ``scale`` and ``bias`` are parameters of this module.
        param_dtype: dtype of these.
        rngs: accepted as by Flax's own layers; nothing here is random.

    Raises:
        ValueError: if the layer has no kernel, or several and the spec an affine part.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> conv = nnx.Conv(4, 8, (3, 3), use_bias=False, rngs=nnx.Rngs(0))
        >>> y = nj.nnx.WeightStandardized(conv)(jnp.ones((1, 9, 9, 4)))
        >>> bool(jnp.abs(y[0, 4, 4]).max() < 1e-4)  # kernels of mean 0 see no constant
        True

    Reference: Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and
    Weight Standardization" (2019), arXiv:1903.10520.
    """

    def __init__(
        self,
        layer_instance: nnx.Module,
        *,
        spec: NormSpec | None = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        """Create the affine parameters, where the spec declares them."""
        del rngs
        self.layer_instance = layer_instance
        self.spec = nnx.static(kernel_spec(layer_instance, spec))
        params = nnx.state(layer_instance, nnx.Param)
        flat = nnx.to_flat_state(params)
        shape = one_kernel(self.spec, [(path, each.shape) for path, each in flat])
        for name, value in functional.init(self.spec, shape, param_dtype).items():
            setattr(self, name, nnx.Param(value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with standardized kernels; arguments are the layer's."""
        spec, affine = self.spec, self.spec.affine
        params = {
            name: getattr(self, name).get_value()
            for name in ("scale", "bias")
            if getattr(affine, name, False)
        }

        def standardized(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
            if not is_kernel(path):
                return variable
            value, _ = forward(spec, variable.get_value(), params)
            return variable.replace(value)

        graph, learned, rest = nnx.split(self.layer_instance, nnx.Param, ...)
        learned = nnx.map_state(standardized, learned)
        return nnx.merge(graph, learned, rest)(*args, **kwargs)
