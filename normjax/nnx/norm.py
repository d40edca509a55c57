"""The nnx layer of any spec."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from normjax import functional, running
from normjax.arguments import Params
from normjax.spec import NormSpec
from normjax.stateful import check_held, forward, parameter_shape
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
        hold(self, spec, shape)

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
            ValueError: if an update is asked of a spec that stores no statistics, one
                that stores some is not told which to use, or the layer was made for
                other features.
        """
        spec = self.spec if epsilon is None else self.spec.replace(epsilon=epsilon)
        params = {
            name: variable.get_value()
            for name, variable in (("scale", self.scale), ("bias", self.bias))
            if variable is not None
        }
        for name, value in params.items():
            check_held("Norm", name, value.shape, parameter_shape(spec, x.shape))
        return apply(
            self,
            spec,
            x,
            params,
            use_running_average,
            mask=mask,
            update=update,
            reference=reference,
        )


def mode(module: Any, given: bool | None) -> bool:
    """Whether stored statistics are used, as the call says, or else the module.

    Args:
        module: has ``use_running_average``.
        given: in the call.

    Returns:
        Which.

    Raises:
        ValueError: if neither says.
    """
    used = module.use_running_average if given is None else given
    if used is None:
        raise ValueError(
            "use_running_average is given nowhere: pass it to "
            f"{type(module).__name__} or to the call, or use train(), eval() or "
            "nnx.view of the model"
        )
    return used


def hold(module: Any, spec: NormSpec, shape: tuple[int, ...]) -> None:
    """Give a module the stored statistics of a spec, where it declares them."""
    if spec.running is not None:
        state = running.init(spec, shape)
        module.mean = nnx.BatchStat(state.mean)
        module.var = nnx.BatchStat(state.variance)
        module.count = nnx.BatchStat(state.count)


def apply(
    module: Any,
    spec: NormSpec,
    x: Array,
    params: Params,
    use_running_average: bool | None,
    **more: Any,
) -> Array:
    """Normalize with a module's statistics, and update them, as ``Norm`` does.

    Args:
        module: has been given to ``hold``, and has ``use_running_average``.
        spec: the layer.
        x: the input.
        params: as for ``nj.normalize``.
        use_running_average: of the call.
        more: ``mask``, ``update`` and ``reference`` of the call.

    Returns:
        y in x's shape.
    """
    if spec.running is None:
        return forward(spec, x, params, **more)[0]
    stored = mode(module, use_running_average)
    held = module.mean, module.var, module.count
    state = running.State(*(variable.get_value() for variable in held))
    needed = running.init(spec, x.shape).mean.shape
    check_held(type(module).__name__, "mean", state.mean.shape, needed)
    y, new = forward(spec, x, params, state, stored=stored, **more)
    if new is not None:
        new = jax.lax.stop_gradient(new)
        values = (new.mean, new.variance, new.count)
        for variable, value in zip(held, values, strict=True):
            variable.set_value(value)
    return y
