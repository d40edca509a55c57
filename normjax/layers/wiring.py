"""Where a norm stands beside a residual connection: five formulas, and no layer.

    pre       y = x + a f(N(x))
    post      y = N(x + a f(x))
    sandwich  y = x + a M(f(N(x)))
    branch    y = x + a N(f(x))
    none      y = x + a f(x)

``normjax.layers.linen`` and ``normjax.layers.nnx`` hold what they are formulas of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array

from normjax.arguments import full_rank
from normjax.records import check_choice
from normjax.statistics import select

Function = Callable[[Array], Array]

# The names of the norms that each placement has.
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "pre": ("norm",),
    "post": ("norm",),
    "sandwich": ("norm", "norm_after"),
    "branch": ("norm",),
    "none": (),
}
DROPOUT_AT = ("norm_input", "branch", "output")
LEARN_SCALE = ("no", "number", "channel")
PAIRS = (
    "mask is one of positions, and the block is Flax's {1}, whose mask is one of pairs "
    "of positions: use nj.layers.{0}.SelfAttention, or a function that calls the block "
    "with its own mask"
)


def check_wiring(
    placement: str, norm: Any, learn_scale: str, dropout: float, dropout_at: str
) -> None:
    """Refuse words that ``residual`` does not know, and what does not fit together.

    Args:
        placement: of the norm.
        norm: None where there is none.
        learn_scale: one of ``LEARN_SCALE``.
        dropout: the share that is dropped.
        dropout_at: one of ``DROPOUT_AT``.

    Raises:
        ValueError: with the word, what is expected, and the fix.

    Example:
        >>> check_wiring("pre", "a norm", "no", 0.0, "branch")
    """
    check_choice("placement", placement, tuple(PLACEMENTS))
    check_choice("learn_scale", learn_scale, LEARN_SCALE)
    check_choice("dropout_at", dropout_at, DROPOUT_AT)
    if PLACEMENTS[placement] and norm is None:
        raise ValueError(
            f"placement is {placement!r} and norm is None: give a norm, for instance "
            "nj.layer_norm(), or say placement='none'"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout!r}, expected a share from 0 to below 1")
    if dropout and dropout_at == "norm_input" and not PLACEMENTS[placement]:
        raise ValueError(
            "dropout_at is 'norm_input' and placement is 'none', which has no norm: "
            "say dropout_at='branch'"
        )


def residual(
    placement: str,
    x: Array,
    block: Function,
    norms: Mapping[str, Function],
    *,
    scale: Array | float = 1.0,
    dropout: Function | None = None,
    dropout_at: str = "branch",
    mask: Array | None = None,
) -> Array:
    """A residual connection around a block, with the norm where ``placement`` says.

    Args:
        placement: one of ``PLACEMENTS``; the module's docstring has the formulas.
        x: the input.
        block: f.
        norms: N as ``norm``, and M as ``norm_after``.
        scale: a; one number, or one for each channel.
        dropout: is called on what ``dropout_at`` names.
        dropout_at: ``norm_input`` (what the first norm sees), ``branch`` (what a is
            multiplied with) or ``output`` (y).
        mask: the leading axes of x, or all with size 1 to broadcast. Where it is 0 the
            block sees 0 and y is 0, whatever x holds there, NaN too.

    Returns:
        y in x's shape and dtype.

    Raises:
        ValueError: if the block changes the shape, or the mask does not fit.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x, spec = jnp.array([1.0, 2, 3, 4]), nj.layer_norm()
        >>> norm = {"norm": lambda v: nj.normalize(spec, v)}
        >>> residual("pre", x, lambda v: 2 * v, norm).tolist()
        [-1.683, 1.106, 3.894, 6.683]

    Reference: Xiong et al., "On Layer Normalization in the Transformer Architecture"
    (2020), arXiv:2002.04745; Kim et al., "Peri-LN" (2025), arXiv:2502.02732 (sandwich);
    Bachlechner et al., "ReZero" (2020), arXiv:2003.04887 (a, learned, from 0).
    """
    valid = None if mask is None else full_rank(mask, x.shape)

    def at(place: str, value: Array) -> Array:
        return value if dropout is None or place != dropout_at else dropout(value)

    def norm(name: str, value: Array) -> Array:
        value = at("norm_input", value) if name == "norm" else value
        return select(valid, norms[name](value))

    x = branch = select(valid, x)
    if placement in ("pre", "sandwich"):
        branch = norm("norm", branch)
    branch = select(valid, _same_shape(block(branch), x))
    if placement == "sandwich":
        branch = norm("norm_after", branch)
    if placement == "branch":
        branch = norm("norm", branch)
    if isinstance(scale, jax.Array):
        scale = scale.astype(branch.dtype)
    y = x + scale * at("branch", branch)
    if placement == "post":
        y = norm("norm", y)
    return at("output", y)


def _same_shape(value: Array, x: Array) -> Array:
    if value.shape != x.shape:
        raise ValueError(
            f"the block maps {x.shape} to {value.shape}, and what is added to x must "
            "have x's shape: let it end with as many features as it begins with"
        )
    return value


def accepted(function: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """What a function takes of what is offered: arguments that it names.

    Args:
        function: a layer, or a plain function.
        offered: by name; None counts as not offered.

    Returns:
        Keyword arguments for it.

    Example:
        >>> accepted(lambda x, mask: x, mask=1, deterministic=True, rngs=None)
        {'mask': 1}
    """
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of some callables Python knows no signature
        return {}
    return {
        name: value
        for name, value in offered.items()
        if value is not None and name in names
    }
