"""Coupling across examples: who moves whose output, from the closed form."""

from __future__ import annotations

from functools import partial
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
    costs O(examples² · groups), and O(examples · groups) memory beside it. The matrix
    is diagonal for every map that does not reduce over the example axis.

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
    if len(place) == 1:  # all examples in every group, in their order
        return jnp.sqrt(blocks[0])
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


# Numbers in one block of the matrix: a megabyte in float32.
_BLOCK = 2**18


def _squared_blocks(rows: Array, c: Array, a: Array, b: Array) -> Array:
    """Σ rowsₚ (δ_pq − a_q − cₚ b_q)² over the entries p of i and q of j, all groups.

    c is split into its mean over an example's rows and the rest, so that nothing but
    the entries themselves can cancel:

        Σₚ rowsₚ (a_q + cₚ b_q)² = Σ rows · (a_q + c̄ᵢ b_q)² + Σ rows (c − c̄ᵢ)² · b_q²

    A block of rows is summed over all groups before the next one, in what a cache
    holds: beside the result, memory is O(groups · examples).

    Args:
        rows: weight of each output entry, (scale/s)².
        c: arrays of shape (separate, groups, examples, entries), as rows, a and b.
        a: column of V.
        b: column of V.

    Returns:
        An array (separate, examples, examples).
    """

    def over_entries(array: Array) -> Array:
        return total((3,), array)[..., 0]

    own = a + c * b
    if rows.shape[3] == 1:  # there is no rest; 1 − own is formed before its square
        of_i, of_j = (
            tuple(array[..., 0] for array in pair) for pair in ((rows, c), (a, b))
        )
        diagonal, entries = over_entries(rows * (1 - own) ** 2), _one_entry
    else:
        weight = over_entries(rows)
        centre = divide_or_zero(over_entries(rows * c), weight)
        spread = over_entries(rows * (c - centre[..., None]) ** 2)
        a2, b2 = over_entries(a * a), over_entries(b * b)
        along = divide_or_zero(over_entries(a * b), a2)
        across = over_entries((b - a * along[..., None]) ** 2)
        of_i, of_j = (weight, centre, spread), (jnp.sqrt(a2), along, across, b2)
        left, entries = over_entries(rows * (1 - 2 * own)), _many_entries
        diagonal = entries(of_i, of_j) + left
    together = rows.shape[2]
    height = min(together, max(1, _BLOCK // together))
    blocks = -(-together // height)

    def one_block(of_i, of_j, index: Array) -> Array:
        """``height`` rows of the matrix; behind the end the last one again."""
        part = jnp.arange(height, dtype=index.dtype) + index * height
        part = jnp.minimum(part, together - 1)

        def add(found: Array, group):
            i = tuple(array[part, None] for array in group[0])
            j = tuple(array[None, :] for array in group[1])
            return found + entries(i, j), None

        start = jnp.zeros((height, together), rows.dtype)
        return jax.lax.scan(add, start, (of_i, of_j))[0]

    def separate(of_i, of_j) -> Array:
        block = partial(one_block, of_i, of_j)
        found = jax.lax.map(block, jnp.arange(blocks))
        return found.reshape(blocks * height, together)[:together]

    place = jnp.arange(together)
    full = jax.vmap(separate)(of_i, of_j)
    return full.at[:, place, place].set(jnp.maximum(diagonal, 0).sum(1))


def _one_entry(i: tuple[Array, ...], j: tuple[Array, ...]) -> Array:
    (rows, c), (a, b) = i, j
    return rows * (a + c * b) ** 2


def _many_entries(i: tuple[Array, ...], j: tuple[Array, ...]) -> Array:
    (weight, centre, spread), (a1, along, across, b2) = i, j
    first = a1 * (1 + centre * along)
    return weight * (first**2 + centre**2 * across) + spread * b2
