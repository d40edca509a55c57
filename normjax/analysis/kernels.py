"""The numbers of one piece of the activations, on one device."""

from __future__ import annotations

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.analysis.measures import DTYPES, STABILIZED
from normjax.coupling import influence
from normjax.functional import normalize
from normjax.layout import Layout
from normjax.spec import NormSpec
from normjax.spectra import geometry

Columns = dict[str, Array]


def of_groups(spec: NormSpec, layout: Layout, x: Array) -> Columns:
    """The measures of every group of one unit.

    Args:
        spec: the layer.
        layout: of its pattern on one unit.
        x: one unit.

    Returns:
        Arrays (groups,): the group measures, the largest |x|, and how many entries are
        ``bad``, NaN or infinite.
    """
    found = geometry(spec, x)
    bad = jnp.sum(~jnp.isfinite(x.reshape(layout.view_shape)), layout.reduced)
    columns = {
        "share": found.share,
        "radial": found.spectrum.radial,
        "tangential": found.spectrum.tangential,
        "condition": found.condition,
        "distance": found.distance,
        "kappa": found.kappa,
        **{f"rounding_{dtype}": found.rounding(dtype) for dtype in DTYPES},
        **{f"cancellation_{dtype}": found.cancellation(dtype) for dtype in DTYPES},
        "largest": found.largest,
        "bad": bad,
    }
    return {name: array.reshape(-1) for name, array in columns.items()}


def of_examples(
    spec: NormSpec, layout: Layout, x: Array, groups: Columns
) -> tuple[Columns, Array]:
    """Who moves whom in one batch, and who is nearly the same.

    Groups that are not finite, or where ε decides the size (ρ ≥ 1/2), are left out: the
    gain of one dead channel, 1/√ε, would drown all others.

    Args:
        spec: the layer.
        layout: of its pattern on one batch.
        x: one batch.
        groups: the columns of its groups.

    Returns:
        Arrays (examples,), and the influence matrix (examples, examples). ``companion``
        moves an example most, ``nearest`` is the one most like it; ``seen``
        is how many groups were not left out.
    """
    seen = groups["bad"] == 0
    if spec.divide != "none":
        seen = seen & (groups["share"] < STABILIZED)
    mask = jnp.broadcast_to(seen.reshape(layout.keep_shape), layout.view_shape)
    mask = mask.reshape(x.shape)
    matrix = influence(spec, x, mask=mask)
    ghost = jnp.asarray(ghosts(layout, spec.example))
    together = (ghost[:, None] == ghost[None]) & ~jnp.eye(len(ghost), dtype=bool)
    own, others = jnp.diagonal(matrix), jnp.where(together, matrix, 0)
    moves = jnp.sqrt(jnp.sum(others**2, axis=0))
    everything = jnp.sum(others**2)
    most = jnp.max(others, axis=1)
    ratio = most / jnp.where(own > 0, own, 1)
    share = moves**2 / jnp.where(everything > 0, everything, 1)
    y = normalize(spec.replace(masked_output="zero"), x, mask=mask)
    y = y.astype(matrix.dtype).reshape(len(ghost), -1)
    size = jnp.sqrt(jnp.sum(y**2, axis=1, keepdims=True))
    unit = y / jnp.where(size > 0, size, 1)
    # Examples at the mean are the same as each other, and as no other one.
    unit = jnp.concatenate([unit, (size == 0).astype(unit.dtype)], axis=1)
    cosine = jnp.where(together, jnp.matmul(unit, unit.T, precision="highest"), -1)
    likeness = jnp.clip(jnp.max(cosine, axis=1), -1, 1)
    columns = {
        "pull": jnp.where(own > 0, ratio, jnp.where(most > 0, jnp.inf, 0)),
        "leverage": share * len(ghost),
        "gap": jnp.sqrt(2 - 2 * likeness),
        "likeness": likeness,
        "own": own,
        "moves": moves,
        "moved": jnp.sqrt(jnp.sum(others**2, axis=1)),
        "companion": jnp.argmax(others, axis=1),
        "nearest": jnp.argmax(cosine, axis=1),
        "seen": jnp.broadcast_to(jnp.sum(seen), own.shape),
    }
    return columns, matrix


def ghosts(layout: Layout, example: str | None) -> np.ndarray:
    """The ghost that each example belongs to; all to ghost 0 without ghosts."""
    axes = layout.example_axes(example)
    sizes = [layout.view_shape[i] for i in axes]
    places = np.indices(sizes).reshape(len(axes), -1)
    found = np.zeros(prod(sizes), np.int32)
    for size, place, axis in zip(sizes, places, axes, strict=True):
        if axis not in layout.reduced:
            found = found * size + place
    return found.astype(np.int32)


@partial(jax.jit, static_argnames=("layout", "units", "coupled", "mesh"))
def measured(
    spec: NormSpec, x: Array, *, layout: Layout, units: int, coupled: bool, mesh
):
    """The measures of a chunk, of which every device has an equal piece.

    Args:
        spec: the layer.
        x: (rows, ...), sharded over the mesh along the rows.
        layout: of the pattern on one unit.
        units: units in the piece of one device: the program of a piece depends on
            nothing else, so neither do its numbers.
        coupled: whether a unit is a batch of examples that see each other.
        mesh: of one axis.

    Returns:
        The columns of groups (units, groups); for coupled ones also those of examples
        and the influence matrices.
    """

    def one_unit(x: Array):
        groups = of_groups(spec, layout, x)
        return (groups, *of_examples(spec, layout, x, groups)) if coupled else (groups,)

    def piece(x: Array):
        parts = x.reshape(units, *layout.shape)
        return jax.lax.map(one_unit, parts) if coupled else jax.vmap(one_unit)(parts)

    rows = jax.sharding.PartitionSpec(mesh.axis_names)
    spread = jax.shard_map(
        piece, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
    )
    return spread(x)
