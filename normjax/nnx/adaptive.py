"""Nnx layers that learn how to normalize, or what to modulate with."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax import Array

from normjax import mixture as mixtures
from normjax.mixture import Mixture
from normjax.nnx import norm
from normjax.running import State
from normjax.spec import NormSpec
from normjax.stateful import forward_mixture, fresh_states, modulated


class ModulatedNorm(nnx.Module):
    """A norm with a scale and a bias that are linear in a condition.

        y = scale(condition) · x̂ + bias(condition)

    Each is an ``nnx.Linear``, whose kernel begins at 0 and whose bias at the identity:
    a fresh layer is the spec without its affine part (adaLN-Zero). Stored statistics
    are those of ``Norm``.

    Args:
        spec: its affine axes begin with the condition's, for instance
            ``nj.adaptive_layer_norm()`` or ``nj.adaptive_instance_norm()``.
        shape: shape of an input, as for ``Norm``.
        condition_shape: shape of a condition: the leading affine axes, and then its own
            features; only the number of axes and the last size count.
        use_running_average: as in ``Norm``.
        dtype: of the Linear layers; None: as condition and parameters promote.
        param_dtype: dtype of the parameters.
        kernel_init: of the Linear layers.
        rngs: for it.

    Raises:
        ValueError: if the spec has no affine part, or its axes do not begin with those
            of the condition.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> x, condition = jnp.ones((8, 5, 6)), jnp.ones((8, 16))
        >>> spec, rngs = nj.adaptive_layer_norm(), nnx.Rngs(0)
        >>> layer = nj.nnx.ModulatedNorm(spec, x.shape, condition.shape, rngs=rngs)
        >>> layer(x, condition).shape, layer.scale.kernel.shape
        ((8, 5, 6), (16, 6))

    Reference: Perez et al., "FiLM" (2018), arXiv:1709.07871; Peebles, Xie, "Scalable
    Diffusion Models with Transformers" (2023), arXiv:2212.09748.
    """

    def __init__(
        self,
        spec: NormSpec,
        shape: tuple[int, ...],
        condition_shape: tuple[int, ...],
        *,
        use_running_average: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = jax.nn.initializers.zeros,
        rngs: nnx.Rngs,
    ):
        """Create the Linear layers and stored statistics."""
        self.spec = nnx.static(spec)
        self.use_running_average = use_running_average
        norm.hold(self, spec, shape)
        lead, linears = len(condition_shape) - 1, {}
        for name, start in modulated(spec, shape, condition_shape).items():
            linears[name] = nnx.Linear(
                condition_shape[-1],
                prod(start.shape[lead:]),
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                bias_init=nnx.initializers.constant(start.value),
                rngs=rngs,
            )
        self.scale = nnx.data(linears.get("scale"))
        self.bias = nnx.data(linears.get("bias"))

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
            use_running_average: in place of the attribute.
            update: as in ``Norm``.

        Returns:
            y in x's shape.

        Raises:
            ValueError: if the affine axes do not begin with the condition's.
        """
        starts = modulated(self.spec, x.shape, condition.shape)
        params = {
            name: getattr(self, name)(condition).reshape(start.shape)
            for name, start in starts.items()
        }
        return norm.apply(
            self, self.spec, x, params, use_running_average, mask=mask, update=update
        )


class MixtureNorm(nnx.Module):
    """A learned mixture of norms: ``nj.mixture`` with its logits and statistics.

    Parameters are those of ``nj.mixture.init``. Member k that stores statistics has
    ``mean_k``, ``var_k`` and ``count_k`` as ``nnx.BatchStat``, under the rules of
    ``Norm``.

    Args:
        mixture: for instance ``nj.mixture.switchable_norm()``.
        shape: shape of an input; only axes with parameters or stored statistics count.
        use_running_average: members that store statistics use the stored ones.
        param_dtype: dtype of the parameters.
        rngs: accepted as by Flax's own layers; nothing here is random.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> from flax import nnx
        >>> layer = nj.nnx.MixtureNorm(nj.mixture.switchable_norm(), (8, 5, 6))
        >>> y = layer(jnp.ones((8, 5, 6)))
        >>> sorted(nnx.state(layer, nnx.BatchStat)), layer.mean_2.get_value()[0].item()
        (['count_2', 'mean_2', 'var_2'], 0.01)

    Reference: Luo et al., "Differentiable Learning-to-Normalize via Switchable
    Normalization" (2018), arXiv:1806.10779.
    """

    def __init__(
        self,
        mixture: Mixture,
        shape: tuple[int, ...],
        *,
        use_running_average: bool = False,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        """Create logits, parameters and stored statistics."""
        del rngs
        self.mixture = nnx.static(mixture)
        self.use_running_average = use_running_average
        params = mixtures.init(mixture, shape, param_dtype)
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))
        self.learned = tuple(params)
        for k, state in fresh_states(mixture, shape).items():
            for name, value in zip(_names(k), jax.tree.leaves(state), strict=True):
                setattr(self, name, nnx.BatchStat(value))

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
            use_running_average: in place of the attribute.
            update: as in ``Norm``.

        Returns:
            y in x's shape.

        Raises:
            ValueError: if something does not fit x.
        """
        params = {name: getattr(self, name).get_value() for name in self.learned}
        states = {
            k: State(*(getattr(self, name).get_value() for name in _names(k)))
            for k, spec in enumerate(self.mixture.specs)
            if spec.running is not None
        }
        stored = norm.mode(self, use_running_average) if states else False
        y, new = forward_mixture(
            self.mixture, x, params, states, mask=mask, stored=stored, update=update
        )
        for k, state in jax.lax.stop_gradient(new).items():
            for name, value in zip(_names(k), jax.tree.leaves(state), strict=True):
                getattr(self, name).set_value(value)
        return y


def _names(k: int) -> list[str]:
    return [f"{name}_{k}" for name in ("mean", "var", "count")]
