"""What a backward pass keeps: the arrays that the function of ``jax.vjp`` holds."""

from __future__ import annotations

import jax


def kept(function, x, params, *, jit: bool) -> tuple[int, float]:
    """Arrays of x's size or more, and bytes, that are kept and are no input.

    Returns:
        How many activation-sized arrays, and bytes in units of x's own bytes.
    """
    function = jax.jit(function) if jit else function
    _, pull = jax.vjp(function, x, params)
    inputs = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((x, params))}
    leaves = [leaf for leaf in jax.tree.leaves(pull) if isinstance(leaf, jax.Array)]
    held = [leaf for leaf in leaves if leaf.unsafe_buffer_pointer() not in inputs]
    large = sum(leaf.size >= x.size for leaf in held)
    return large, sum(leaf.nbytes for leaf in held) / x.nbytes
