"""A thin Flax linen layer: it holds parameters and statistics, and no mathematics."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from normjax import functional, running
from normjax.spec import NormSpec
from normjax.statistics import Statistics

_STORED = ("mean", "var", "count")


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
                ``batch_stats`` is not mutable, they are missing, or an update is asked
                of a spec that stores none.
        """
        spec = self.spec if epsilon is None else self.spec.replace(epsilon=epsilon)
        initializing = self.is_initializing()
        if initializing:  # outside of the transformation that names the axes
            spec = spec.replace(axis_names=())
        params = {
            name: self.param(name, lambda _, value=value: value)
            for name, value in functional.init(
                self.spec, x.shape, self.param_dtype
            ).items()
        }
        if spec.running is None:
            if update:
                raise ValueError(
                    f"update=True, but {spec!r} stores no statistics: give it "
                    "running=Running(...)"
                )
            return functional.normalize(spec, x, params, mask=mask, reference=reference)
        stored = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        missing = [n for n in _STORED if not self.has_variable("batch_stats", n)]
        if missing and not initializing:
            raise ValueError(
                f"{self.name or 'Norm'} misses {', '.join(missing)} in 'batch_stats': "
                f"init makes {', '.join(_STORED)}, and a checkpoint must hold them"
            )
        variables = self._stored(x.shape)
        state = running.State(*(variable.value for variable in variables))
        updates = not stored if update is None else update
        if updates and not initializing:
            if not self.is_mutable_collection("batch_stats"):
                raise ValueError(
                    f"{self.name or 'Norm'} updates its stored statistics, but "
                    "'batch_stats' is immutable: pass mutable=['batch_stats'] to "
                    "apply, or update=False"
                )
            moments = functional.moments(spec, jax.lax.stop_gradient(x), mask)
            new = running.update(spec, state, moments)
            for variable, value in zip(
                variables, (new.mean, new.variance, new.count), strict=True
            ):
                variable.value = value
        given = running.statistics(spec, state, stored, reference)
        return functional.normalize(spec, x, params, mask=mask, **given)

    def _stored(self, shape: tuple[int, ...]) -> list[nn.Variable]:
        """The three variables of the stored statistics."""
        fresh = running.init(self.spec, shape)
        values = (fresh.mean, fresh.variance, fresh.count)
        return [
            self.variable("batch_stats", name, lambda value=value: value)
            for name, value in zip(_STORED, values, strict=True)
        ]
