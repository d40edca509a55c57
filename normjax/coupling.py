"""Coupling across examples: who moves whose output, from the closed form."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.arguments import Params, prepare
from normjax.factors import factors
from normjax.jacobian import outside_rows
from normjax.layout import Layout
from normjax.spec import NormSpec
from normjax.statistics import Moments, Statistics, divide_or_zero, total


def influence(
    spec: NormSpec,
    x: Array,
    params: Params | None = None,
    *,
    mask: Array | None = None,
    moments: Moments | Statistics | None = None,
    reference: Statistics | None = None,
) -> Array:
    """How far each example's output moves with each example's input.

    Iᵢⱼ = ‖∂yᵢ/∂xⱼ‖_F over everything but the example axis. From the closed form it
    costs O(examples² · groups); it is diagonal for every map that does not reduce over
    the example axis.

    Args:
        spec: the layer.
        x: the input.
        params: from ``init``; None leaves the affine part out.
        mask: as for ``normalize``.
        moments: as for ``normalize``.
        reference: as for ``normalize``.

    Returns:
        An array (examples, examples), not symmetric in general.

    Raises:
        ValueError: if the spec has no example axis, and as ``normalize``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[0.0, 1.0], [2.0, 3.0]])
        >>> print(nj.influence(nj.layer_norm(epsilon=1.0), x).round(4))
        [[0.7155 0.    ]
         [0.     0.7155]]
    """
    layout, program, inputs = prepare(spec, x, params, mask, moments, reference)
    axes = layout.example_axes(spec.example)
    if not axes:
        raise ValueError(
            f"'{spec.pattern}' on shape {layout.shape} has no example axis: "
            f"example={spec.example!r}"
        )
    if program.own and spec.axis_names:
        raise ValueError(
            f"axis_names is {spec.axis_names!r}: influence couples devices; ask for it "
            "on the whole batch, with axis_names=()"
        )
    found = factors(program, inputs)
    outside = outside_rows(program, inputs)
    scale = jnp.ones_like(found.gain) if inputs.scale is None else inputs.scale
    rows = jnp.broadcast_to((scale * found.gain) ** 2, layout.view_shape)
    if outside is not None:
        rows = jnp.where(outside, 0, rows)
    order, sizes, place = _by_example(layout, axes)

    def arrange(array: Array) -> Array:
        full = jnp.broadcast_to(array, layout.view_shape)
        return jnp.transpose(full, order).reshape(sizes)

    blocks = _squared_blocks(*map(arrange, (rows, found.c, found.a, found.b)))
    if outside is not None and spec.masked_output == "passthrough":
        passed = arrange(outside.astype(rows.dtype)).sum((1, 3))
        blocks = blocks + passed[:, :, None] * jnp.eye(sizes[2], dtype=rows.dtype)[None]
    full = jnp.zeros((place.size, place.size), rows.dtype)
    full = full.at[place[:, :, None], place[:, None, :]].set(blocks)
    return jnp.sqrt(full)


def _by_example(layout: Layout, axes: tuple[int, ...]):
    """Bring the view to (separate examples, groups, examples in a group, entries).

    Returns:
        The order of the view's axes, the four sizes, and which example stands where.
    """
    apart = [i for i in axes if i not in layout.reduced]
    together = [i for i in axes if i in layout.reduced]
    groups = [i for i in layout.mapped if i not in axes]
    entries = [i for i in layout.reduced if i not in axes]
    parts = (apart, groups, together, entries)
    sizes = tuple(prod(layout.view_shape[i] for i in part) for part in parts)
    index = np.arange(sizes[0] * sizes[2])
    index = index.reshape([layout.view_shape[i] for i in axes])
    place = index.transpose([axes.index(i) for i in (*apart, *together)])
    return (
        [*apart, *groups, *together, *entries],
        sizes,
        place.reshape(sizes[0], sizes[2]),
    )


def _squared_blocks(rows: Array, c: Array, a: Array, b: Array) -> Array:
    """Σ rowsₚ (δ_pq − a_q − cₚ b_q)² over the entries p of i and q of j, all groups.

    c is split into its mean over an example's rows and the rest, so that nothing but
    the entries themselves can cancel:

        Σₚ rowsₚ (a_q + cₚ b_q)² = Σ rows · (a_q + c̄ᵢ b_q)² + Σ rows (c − c̄ᵢ)² · b_q²

    Args:
        rows: weight of each output entry, (scale/s)².
        c: arrays of shape (separate, groups, examples, entries), as rows, a and b.
        a: column of V.
        b: column of V.

    Returns:
        An array (separate, examples, examples).
    """

    def one_group(rows: Array, c: Array, a: Array, b: Array) -> Array:
        weight = total((1,), rows)
        centre = divide_or_zero(total((1,), rows * c), weight)
        spread = total((1,), rows * (c - centre) ** 2)
        a2 = total((1,), a * a)
        along = divide_or_zero(total((1,), a * b), a2)
        across = total((1,), (b - a * along) ** 2)
        entry = jnp.sqrt(a2).T * (1 + centre * along.T)
        block = weight * (entry**2 + centre**2 * across.T)
        block = block + spread * total((1,), b * b).T
        own = a + c * b
        if rows.shape[1] == 1:  # (1 − own)² without the subtraction of squares
            diagonal = rows * (1 - own) ** 2
        else:
            left = total((1,), rows * (1 - 2 * own))
            diagonal = jnp.diagonal(block)[:, None] + left
        same = jnp.eye(rows.shape[0], dtype=bool)
        return jnp.where(same, jnp.maximum(diagonal, 0), block)

    def separate(*parts: Array) -> Array:
        start = jnp.zeros((rows.shape[2], rows.shape[2]), rows.dtype)
        return jax.lax.scan(
            lambda found, part: (found + one_group(*part), None), start, parts
        )[0]

    return jax.vmap(separate)(rows, c, a, b)
