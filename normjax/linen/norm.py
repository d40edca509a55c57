"""The linen layer of any spec."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from normjax import functional, running
from normjax.arguments import Params
from normjax.linen import stored
from normjax.spec import NormSpec
from normjax.stateful import forward
from normjax.statistics import Statistics

STORED = ("mean", "var", "count")


class Norm(nn.Module):
    """The layer that a spec declares.

    Parameters are ``scale`` and ``bias`` in ``params``; stored statistics, where the
    spec declares them, are ``mean``, ``var`` and ``count`` in ``batch_stats``. They are
    updated by every call that uses the batch's own statistics (or says ``update``),
    except the one that initializes. A frozen layer is ``use_running_average=True``.

    Attributes:
        spec: the layer, with plain numbers in its leaves.
        use_running_average: normalize with the stored statistics; given here or in the
            call wherever the spec stores any.
        param_dtype: dtype of the parameters.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> x = jnp.arange(12.0).reshape(4, 3)
        >>> layer = nj.linen.Norm(nj.batch_norm())
        >>> variables = layer.init(jax.random.key(0), x, use_running_average=False)
        >>> y, state = layer.apply(
        ...     variables, x, use_running_average=False, mutable=["batch_stats"]
        ... )
        >>> state["batch_stats"]["mean"].round(3).tolist()
        [0.045, 0.055, 0.065]
    """

    spec: NormSpec
    use_running_average: bool | None = None
    param_dtype: Any = jnp.float32

    @nn.compact
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
            use_running_average: as the attribute.
            update: whether the stored statistics take this batch in, after they were
                used; None: unless they are what it is normalized with.
            epsilon: in place of the spec's, to vary it without recompiling.
            reference: as for ``nj.normalize``; None: the stored statistics, where the
                spec blends or renormalizes.

        Returns:
            y in x's shape.

        Raises:
            ValueError: if the spec stores statistics and ``use_running_average`` is
                given nowhere or twice, the statistics are to change and
                ``batch_stats`` is not mutable, they are missing, an update is asked of
                a spec that stores none, or the layer was made for other features.
        """
        spec = self.spec if epsilon is None else self.spec.replace(epsilon=epsilon)
        params = {
            name: stored.parameter(self, name, lambda *_, v=value: v, value.shape)
            for name, value in functional.init(
                self.spec, x.shape, self.param_dtype
            ).items()
        }
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
        module: inside its compact method; has ``use_running_average``.
        spec: the layer.
        x: the input.
        params: as for ``nj.normalize``.
        use_running_average: of the call.
        more: ``mask``, ``update`` and ``reference`` of the call.

    Returns:
        y in x's shape.
    """
    if module.is_initializing():  # outside of the transformation that names the axes
        spec = spec.replace(axis_names=())
    if spec.running is None:
        return forward(spec, x, params, **more)[0]
    average = nn.merge_param(
        "use_running_average", module.use_running_average, use_running_average
    )
    fresh = running.init(spec, x.shape)
    values = (fresh.mean, fresh.variance, fresh.count)
    held = stored.variables(module, dict(zip(STORED, values, strict=True)))
    state = running.State(*(variable.value for variable in held.values()))
    y, new = forward(spec, x, params, state, stored=average, **more)
    if new is not None:
        new = jax.lax.stop_gradient(new)
        stored.overwrite(module, held, [new.mean, new.variance, new.count])
    return y
