"""The nnx layer of any spec."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from normjax import functional, running
from normjax.spec import NormSpec
from normjax.stateful import forward
from normjax.statistics import Statistics


class Norm(nnx.Module):
    """The layer that a spec declares.

    ``scale`` and ``bias`` are ``nnx.Param``; stored statistics, where the spec declares
    them, are ``mean``, ``var`` and ``count`` as ``nnx.BatchStat``. They are updated by
    every call that uses the batch's own statistics, or says ``update``. A frozen layer
    is ``use_running_average=True``.

    Args:
        spec: the layer, with plain numbers in its leaves.
        shape: shape of an input; only axes with parameters or stored statistics count.
        use_running_average: normalize with the stored statistics; ``eval()`` and
            ``train()`` of the model set it.
        param_dtype: dtype of the parameters.
        rngs: accepted as by Flax's own layers; nothing here is random.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> layer = nj.nnx.Norm(nj.batch_norm(), (4, 3), rngs=nnx.Rngs(0))
        >>> y = layer(jnp.arange(12.0).reshape(4, 3))
        >>> layer.mean.get_value().round(3).tolist()
        [0.045, 0.055, 0.065]
    """

    def __init__(
        self,
        spec: NormSpec,
        shape: tuple[int, ...],
        *,
        use_running_average: bool = False,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        """Create parameters and stored statistics."""
        del rngs
        self.spec = nnx.static(spec)
        self.use_running_average = use_running_average
        params = functional.init(spec, shape, param_dtype)
        self.scale = nnx.Param(params["scale"]) if "scale" in params else nnx.data(None)
        self.bias = nnx.Param(params["bias"]) if "bias" in params else nnx.data(None)
        if spec.running is not None:
            state = running.init(spec, shape)
            self.mean = nnx.BatchStat(state.mean)
            self.var = nnx.BatchStat(state.variance)
            self.count = nnx.BatchStat(state.count)

    def __call__(
        self,
        x: Array,
        *,
        mask: Array | None = None,
        use_running_average: bool | None = None,
        update: bool | None = None,
        epsilon: Array | float | None = None,
        reference: Statistics | None = None,
    ) -> Array:
        """Normalize.

        Args:
            x: the input.
            mask: as for ``nj.normalize``.
            use_running_average: in place of the attribute.
            update: whether the stored statistics take this batch in, after they were
                used; None: unless they are what it is normalized with.
            epsilon: in place of the spec's, to vary it without recompiling.
            reference: as for ``nj.normalize``; None: the stored statistics, where the
                spec blends or renormalizes.

        Returns:
            y in x's shape.

        Raises:
            ValueError: if an update is asked of a spec that stores no statistics.
        """
        spec = self.spec if epsilon is None else self.spec.replace(epsilon=epsilon)
        params = {
            name: variable.get_value()
            for name, variable in (("scale", self.scale), ("bias", self.bias))
            if variable is not None
        }
        state, stored = None, use_running_average
        stored = self.use_running_average if stored is None else stored
        if spec.running is not None:
            state = running.State(
                self.mean.get_value(), self.var.get_value(), self.count.get_value()
            )
        y, new = forward(
            spec,
            x,
            params,
            state,
            mask=mask,
            stored=stored,
            update=update,
            reference=reference,
        )
        if new is not None:
            new = jax.lax.stop_gradient(new)
            self.mean.set_value(new.mean)
            self.var.set_value(new.variance)
            self.count.set_value(new.count)
        return y
