"""One call of a layer that holds arrays, for linen and nnx alike.

The layers hand their arrays in here; nothing below knows of linen or nnx.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from normjax import functional, running
from normjax.arguments import Params, bind
from normjax.mixture import Mixture
from normjax.mixture import normalize as normalize_mixture
from normjax.spec import NormSpec
from normjax.statistics import Statistics


def forward(
    spec: NormSpec,
    x: Array,
    params: Params | None,
    state: running.State | None = None,
    *,
    mask: Array | None = None,
    stored: bool = False,
    update: bool | None = None,
    reference: Statistics | None = None,
) -> tuple[Array, running.State | None]:
    """One call of a layer: normalize, and take the batch in at most once.

    Args:
        spec: the layer.
        x: the input.
        params: as for ``nj.normalize``.
        state: of the stored statistics, if the spec stores any.
        mask: as for ``nj.normalize``.
        stored: normalize with the stored statistics.
        update: whether they take this batch in, after they were used; None: unless they
            are what it is normalized with.
        reference: as for ``nj.normalize``; None: the stored statistics, where the spec
            blends or renormalizes.

    Returns:
        y, and the new state, None where it stays as it is.

    Raises:
        ValueError: if an update is asked of a spec that stores nothing.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> spec, x = nj.batch_norm(), jnp.arange(12.0).reshape(4, 3)
        >>> y, state = forward(spec, x, None, nj.running.init(spec, x.shape))
        >>> state.count.tolist()
        [1, 1, 1]
    """
    if update and spec.running is None:
        raise ValueError(
            f"update=True, but {spec!r} stores no statistics: give it "
            "running=Running(...)"
        )
    if state is not None and update is None:
        update = not stored

    def call(spec, x, params, state: running.State | None, mask, reference):
        if state is None:
            y = functional.normalize(spec, x, params, mask=mask, reference=reference)
            return y, None
        new = None
        if update:
            new = running.update(spec, state, functional.moments(spec, x, mask))
        given = running.statistics(spec, state, stored, reference)
        return functional.normalize(spec, x, params, mask=mask, **given), new

    given = (spec, x, params, state, mask, reference)
    return _automatic(call, x, state if update else None)(*given)


def forward_mixture(
    mixture: Mixture,
    x: Array,
    params: Params | None,
    states: Mapping[int, running.State],
    *,
    mask: Array | None = None,
    stored: bool = False,
    update: bool | None = None,
) -> tuple[Array, dict[int, running.State]]:
    """``forward`` of a mixture: each member that stores statistics has a state.

    Args:
        mixture: of K members.
        x: the input.
        params: as for ``nj.mixture.normalize``.
        states: by the number of the member.
        mask: as for ``nj.normalize``.
        stored: the members that store statistics use the stored ones.
        update: as for ``forward``.

    Returns:
        y, and the new states, {} where they stay as they are.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> mixture, x = nj.mixture.switchable_norm(), jnp.ones((8, 5, 3))
        >>> states = fresh_states(mixture, x.shape)
        >>> _, new = forward_mixture(mixture, x, None, states)
        >>> {k: state.count.tolist() for k, state in new.items()}
        {2: [1, 1, 1]}
    """
    update = not stored if update is None else update

    def call(x, params, states, mask):
        given: list[Statistics | None] = [None] * len(mixture.specs)
        new = {}
        for k, state in states.items():
            spec = mixture.specs[k]
            if stored:
                given[k] = running.read(spec, state)
            if update:
                new[k] = running.update(spec, state, functional.moments(spec, x, mask))
        return normalize_mixture(mixture, x, params, mask=mask, moments=given), new

    call = _automatic(call, x, states if update else {})
    return call(x, params, states, mask)


def _automatic(function: Callable[..., Any], *outputs: Any) -> Callable[..., Any]:
    """Leave sharding to XLA where a mesh has explicit axes, which the core does not.

    Args:
        function: of arrays and trees of them.
        outputs: trees that its outputs are sharded like.

    Returns:
        The function.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return function
    # Of arrays made before the mesh was set, the spec alone is what counts.
    like = jax.tree.map(
        lambda each: jax.typeof(jnp.asarray(each)).sharding.spec, outputs
    )
    return jax.sharding.auto_axes(function, out_sharding=like)


def fresh_states(mixture: Mixture, shape: tuple[int, ...]) -> dict[int, running.State]:
    """The states of a mixture's members that store statistics, before any update.

    Example:
        >>> import normjax as nj
        >>> list(fresh_states(nj.mixture.switchable_norm(), (8, 5, 3)))
        [2]
    """
    return {
        k: running.init(spec, shape)
        for k, spec in enumerate(mixture.specs)
        if spec.running is not None
    }


def parameter_shape(spec: NormSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of scale and bias; () where the spec has neither.

    Example:
        >>> import normjax as nj
        >>> parameter_shape(nj.group_norm(groups=2), (8, 5, 6))
        (6,)
    """
    if spec.affine is None:
        return ()
    return bind(spec, shape).parameter(spec.affine.axes).shape


def check_held(
    layer: str, name: str, found: tuple[int, ...], needed: tuple[int, ...]
) -> None:
    """Refuse an input of other features than those that a layer was made for.

    Args:
        layer: what the layer is called.
        name: of an array that it holds.
        found: the array's shape.
        needed: the shape that the input needs it to have.

    Raises:
        ValueError: if they differ.

    Example:
        >>> check_held("LayerNorm", "scale", (3,), (3,))
    """
    if found != needed:
        raise ValueError(
            f"{layer} holds {name} of shape {found}, and this input needs {needed}: "
            "give it the features that it was made for, or make it for these"
        )


class Start(NamedTuple):
    """Where a parameter that a condition gives begins: its shape, and its identity."""

    shape: tuple[int, ...]
    value: float


def modulated(
    spec: NormSpec, shape: tuple[int, ...], condition: tuple[int, ...]
) -> dict[str, Start]:
    """The parameters that a condition is to give.

    Args:
        spec: the layer.
        shape: of the input.
        condition: shape of the condition: leading affine axes, and its features.

    Returns:
        For scale and bias, those that there are, a shape and the value of the identity.

    Raises:
        ValueError: if there are none, or their axes do not begin with the condition's.

    Example:
        >>> import normjax as nj
        >>> modulated(nj.adaptive_layer_norm(), (8, 5, 6), (8, 16))["scale"]
        Start(shape=(8, 6), value=0.0)
    """
    shaped = parameter_shape(spec, shape)
    lead = condition[:-1]
    if spec.affine is None or shaped[: len(lead)] != lead or not condition:
        axes = None if spec.affine is None else spec.affine.axes
        raise ValueError(
            f"condition has shape {condition}, and the affine axes {axes!r} of "
            f"'{spec.pattern}' are {shaped}: expected their leading axes and then "
            "features, for instance with nj.adaptive_layer_norm()"
        )
    identity = 0.0 if spec.affine.stored == "1+w" else 1.0
    parts = {"scale": (spec.affine.scale, identity), "bias": (spec.affine.bias, 0.0)}
    return {name: Start(shaped, at) for name, (there, at) in parts.items() if there}
