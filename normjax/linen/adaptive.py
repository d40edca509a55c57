"""Linen layers that learn how to normalize, or what to modulate with."""

from __future__ import annotations

from math import prod
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Initializer
from jax import Array

from normjax import mixture as mixtures
from normjax.linen import norm, stored
from normjax.mixture import Mixture
from normjax.spec import NormSpec
from normjax.stateful import forward_mixture, fresh_states, modulated


class ModulatedNorm(nn.Module):
    """A norm with a scale and a bias that are linear in a condition.

        y = scale(condition) · x̂ + bias(condition)

    Each comes from a Dense of its name, whose kernel begins at 0 and whose bias at the
    identity: a fresh layer is the spec without its affine part (adaLN-Zero). Stored
    statistics are those of ``Norm``.

    Attributes:
        spec: its affine axes begin with the condition's, for instance
            ``nj.adaptive_layer_norm()`` or ``nj.adaptive_instance_norm()``.
        use_running_average: as in ``Norm``.
        dtype: of the Dense layers; None: as condition and parameters promote.
        param_dtype: dtype of the parameters.
        kernel_init: of the Dense layers.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> x, condition = jnp.ones((8, 5, 6)), jnp.ones((8, 16))
        >>> layer = nj.linen.ModulatedNorm(nj.adaptive_layer_norm())
        >>> variables = layer.init(jax.random.key(0), x, condition)
        >>> jax.tree.map(jnp.shape, variables["params"]["scale"])
        {'bias': (6,), 'kernel': (16, 6)}

    Reference: Perez et al., "FiLM" (2018), arXiv:1709.07871; Peebles, Xie, "Scalable
    Diffusion Models with Transformers" (2023), arXiv:2212.09748.
    """

    spec: NormSpec
    use_running_average: bool | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = jax.nn.initializers.zeros

    @nn.compact
    def __call__(
        self,
        x: Array,
        condition: Array,
        *,
        mask: Array | None = None,
        use_running_average: bool | None = None,
        update: bool | None = None,
    ) -> Array:
        """Normalize and modulate.

        Args:
            x: the input.
            condition: the leading affine axes, and then its own features.
            mask: as for ``nj.normalize``.
            use_running_average: as in ``Norm``.
            update: as in ``Norm``.

        Returns:
            y in x's shape.

        Raises:
            ValueError: if the spec has no affine part, or its axes do not begin with
                those of the condition.
        """
        params = {}
        for name, start in modulated(self.spec, x.shape, condition.shape).items():
            lead = condition.ndim - 1
            dense = nn.Dense(
                prod(start.shape[lead:]),
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                kernel_init=self.kernel_init,
                bias_init=nn.initializers.constant(start.value),
                name=name,
            )
            params[name] = dense(condition).reshape(start.shape)
        return norm.apply(
            self, self.spec, x, params, use_running_average, mask=mask, update=update
        )


class MixtureNorm(nn.Module):
    """A learned mixture of norms: ``nj.mixture`` with its logits and statistics.

    Parameters are those of ``nj.mixture.init``. Member k that stores statistics has
    ``mean_k``, ``var_k`` and ``count_k`` in ``batch_stats``, under the rules of
    ``Norm``.

    Attributes:
        mixture: for instance ``nj.mixture.switchable_norm()``.
        use_running_average: as in ``Norm``, wherever a member stores statistics.
        param_dtype: dtype of the parameters.

    Example:
        >>> import jax, jax.numpy as jnp, normjax as nj
        >>> layer = nj.linen.MixtureNorm(nj.mixture.switchable_norm(), False)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((8, 5, 6)))
        >>> sorted(variables["params"]), sorted(variables["batch_stats"])
        (['bias', 'mean_logits', 'scale', 'variance_logits'],
         ['count_2', 'mean_2', 'var_2'])

    Reference: Luo et al., "Differentiable Learning-to-Normalize via Switchable
    Normalization" (2018), arXiv:1806.10779.
    """

    mixture: Mixture
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
    ) -> Array:
        """Normalize.

        Args:
            x: the input.
            mask: as for ``nj.normalize``.
            use_running_average: as in ``Norm``.
            update: as in ``Norm``.

        Returns:
            y in x's shape.

        Raises:
            ValueError: as ``Norm``.
        """
        mixture = self.mixture
        if self.is_initializing():  # outside of what names the axes
            alone = (spec.replace(axis_names=()) for spec in mixture.specs)
            mixture = mixture.replace(specs=tuple(alone))
        params = {
            name: self.param(name, lambda _, value=value: value)
            for name, value in mixtures.init(mixture, x.shape, self.param_dtype).items()
        }
        states, average = fresh_states(mixture, x.shape), False
        if states:
            average = nn.merge_param(
                "use_running_average", self.use_running_average, use_running_average
            )
        leaves, tree = jax.tree.flatten(states)
        names = [f"{name}_{k}" for k in states for name in norm.STORED]
        held = stored.variables(self, dict(zip(names, leaves, strict=True)))
        states = jax.tree.unflatten(tree, [each.value for each in held.values()])
        y, new = forward_mixture(
            mixture, x, params, states, mask=mask, stored=average, update=update
        )
        if new:
            leaves = jax.tree.leaves(jax.lax.stop_gradient(new))
            stored.overwrite(self, held, leaves)
        return y
