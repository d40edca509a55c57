"""The family as one-line specs; every field of ``NormSpec`` may be given as a keyword.

All share epsilon 1e-5, decay 0.99 and ddof 0, and have scale and bias over the feature
axes (RMS, L2 and QK: scale only; adaptive ones: for each example); only batch norms
store statistics. So a swap of presets never smuggles a number in. Framework defaults
are conventions, not presets.
"""

from __future__ import annotations

import re
from typing import Any

from normjax.records import check_choice, check_field
from normjax.spec import Affine, NormSpec, Running


def layer_norm(axes: str = "c", *, channels: str = "last", **fields: Any) -> NormSpec:
    """Layer norm: each position over its feature axes (Ba, Kiros, Hinton 2016).

    Example:
        >>> (
        ...     layer_norm(),
        ...     layer_norm("h w c").pattern,
        ...     layer_norm(channels="first").pattern,
        ... )
        (NormSpec('... [c]', affine='c'), '... [h w c]', 'b [c] ...')
    """
    pattern = f"... [{axes}]" if _last(channels) else f"b [{axes}] ..."
    return _spec(pattern, fields, affine=axes)


def rms_norm(axes: str = "c", *, channels: str = "last", **fields: Any) -> NormSpec:
    """RMS norm: x / √(mean(x²) + ε), scale only (Zhang, Sennrich 2019).

    Example:
        >>> rms_norm()
        NormSpec('... [c]', center=False, divide='rms', affine=Affine('c', bias=False))
    """
    pattern = f"... [{axes}]" if _last(channels) else f"b [{axes}] ..."
    scale = Affine(axes, bias=False)
    return _spec(pattern, fields, center=False, divide="rms", affine=scale)


def center_only(axes: str = "c", *, channels: str = "last", **fields: Any) -> NormSpec:
    """Layer norm's first half: x − m, nothing is divided.

    Example:
        >>> center_only()
        NormSpec('... [c]', divide='none', affine='c')
    """
    return layer_norm(axes, channels=channels, **{"divide": "none", **fields})


def scale_only(axes: str = "c", *, channels: str = "last", **fields: Any) -> NormSpec:
    """Layer norm's second half: x / √(σ² + ε), σ² about the mean, which stays in.

    Example:
        >>> scale_only()
        NormSpec('... [c]', center=False, affine='c')
    """
    return layer_norm(axes, channels=channels, **{"center": False, **fields})


def adaptive_layer_norm(*, channels: str = "last", **fields: Any) -> NormSpec:
    """Layer norm modulated by the caller: (1 + scale) x̂ + bias (Peebles, Xie 2023).

    ``params`` are not learned here but computed from a condition, scale and bias of
    shape (examples, channels), the same for every position. ``affine`` may name more
    axes, for instance ``Affine("b t c", stored="1+w")`` in ``"b t [c]"``.

    Example:
        >>> import jax.numpy as jnp, normjax as nj
        >>> x = jnp.array([[[1.0, 2.0, 3.0, 4.0]]])  # (examples, positions, channels)
        >>> shift = {"scale": jnp.zeros((1, 4)), "bias": jnp.ones((1, 4))}
        >>> print(nj.normalize(nj.adaptive_layer_norm(), x, shift).round(4))
        [[[-0.3416 0.5528 1.4472 2.3416]]]
    """
    pattern = "b ... [c]" if _last(channels) else "b [c] ..."
    return _spec(pattern, fields, affine=Affine("b c", stored="1+w"))


def adaptive_instance_norm(*, channels: str = "last", **fields: Any) -> NormSpec:
    """Instance norm with the caller's std and mean of a style (Huang, Belongie 2017).

    Example:
        >>> import normjax as nj
        >>> params = nj.init(adaptive_instance_norm(), (8, 5, 5, 3))
        >>> {name: value.shape for name, value in params.items()}
        {'scale': (8, 3), 'bias': (8, 3)}
    """
    return instance_norm(channels=channels, **{"affine": "b c", **fields})


def l2_norm(axes: str = "c", **fields: Any) -> NormSpec:
    """L2 norm: x / √(Σx² + ε), scale only.

    Example:
        >>> l2_norm(epsilon=1e-12).divide
        'l2'
    """
    scale = Affine(axes, bias=False)
    return _spec(f"... [{axes}]", fields, center=False, divide="l2", affine=scale)


def batch_norm(*, channels: str = "last", **fields: Any) -> NormSpec:
    """Batch norm: each channel over examples and positions (Ioffe, Szegedy 2015).

    Example:
        >>> batch_norm(), batch_norm(channels="first").pattern
        (NormSpec('[...] c', affine='c', running=Running()), '[b] c [...]')
    """
    pattern = "[...] c" if _last(channels) else "[b] c [...]"
    return _spec(pattern, fields, affine="c", running=Running())


def batch_renorm(*, channels: str = "last", **fields: Any) -> NormSpec:
    """Batch norm corrected towards stored statistics: r x̂ + d (Ioffe 2017).

    r = s/s₀ and d = (m − m₀)/s₀ carry no gradient and are clipped to ``r_max`` and
    ``d_max``. ``reference=`` gives m₀ and s₀². Start with r_max 1 and d_max 0.

    Example:
        >>> batch_renorm()
        NormSpec('[...] c', statistics='renorm', affine='c', running=Running())
    """
    return batch_norm(channels=channels, **{"statistics": "renorm", **fields})


def ghost_batch_norm(
    ghosts: int = 4, *, channels: str = "last", **fields: Any
) -> NormSpec:
    """Ghost batch norm: ``ghosts`` parts of consecutive examples (Hoffer 2017).

    Example:
        >>> ghost_batch_norm(ghosts=8).pattern, ghost_batch_norm(ghosts=8).sizes
        ('(g [b]) [...] c', (('g', 8),))
    """
    pattern = "(g [b]) [...] c" if _last(channels) else "(g [b]) c [...]"
    return _spec(pattern, fields, sizes={"g": ghosts}, affine="c", running=Running())


def instance_norm(*, channels: str = "last", **fields: Any) -> NormSpec:
    """Instance norm: each channel of each example over its positions (Ulyanov 2016).

    Example:
        >>> instance_norm().pattern, instance_norm(channels="first").pattern
        ('b [...] c', 'b c [...]')
    """
    pattern = "b [...] c" if _last(channels) else "b c [...]"
    return _spec(pattern, fields, affine="c")


def group_norm(groups: int = 32, *, channels: str = "last", **fields: Any) -> NormSpec:
    """Group norm: groups of consecutive channels with all positions (Wu, He 2018).

    One group is layer norm over all axes but the first; as many groups as channels is
    instance norm.

    Example:
        >>> group_norm(groups=8)
        NormSpec('b [...] (g [c])', sizes={'g': 8}, affine='(g c)')
    """
    pattern = "b [...] (g [c])" if _last(channels) else "b (g [c]) [...]"
    return _spec(pattern, fields, sizes={"g": groups}, affine="(g c)")


def weight_standardization(axes: str = "h w i", **fields: Any) -> NormSpec:
    """Weight standardization of a kernel, each output channel by itself (Qiao 2019).

    Args:
        axes: the kernel's axes in order; ``o`` is the output channel, the last one if
            it is not named. Everything but ``o`` and ``g`` is reduced.

            ====================================  ================================
            Flax Dense, Conv of any rank          ``"i"``, ``"h w i"``, ``"... i"``
            Flax Conv with feature groups         the same: i is in/groups
            Flax ConvTranspose                    ``"h w i"``
            … with ``transpose_kernel=True``      ``"h w o i"``
            PyTorch Linear, Conv2d                ``"o i"``, ``"o i h w"``
            PyTorch ConvTranspose2d               ``"i o h w"``
            … with groups                         ``"(g i) o h w"``, sizes={"g": 4}
            ====================================  ================================
        fields: fields of ``NormSpec``.

    Example:
        >>> weight_standardization(), weight_standardization("i").pattern
        (NormSpec('[h w i] o', example=None), '[i] o')
        >>> weight_standardization("(g i) o h w", sizes={"g": 4}).pattern
        '(g [i]) o [h w]'
    """
    kernel = axes if "o" in re.findall(r"\w+", axes) else f"{axes} o"
    bracketed = re.sub(r"\b(?![go]\b)\w+|\.\.\.", r"[\g<0>]", kernel)
    return _spec(re.sub(r"\]\s+\[", " ", bracketed), fields, example=None)


def qk_norm(axes: str = "d", scale: str | None = None, **fields: Any) -> NormSpec:
    """QK-norm: RMS norm of queries and keys, without bias (Henry 2020, Dehghani 2023).

    Args:
        axes: ``"d"``: each head by itself; ``"h d"``: all heads together.
        scale: ``"d"``: a scale for each entry of a head, shared by the heads; ``"h"``:
            one for each head; ``"h d"``: for each entry; ``""``: one number; ``axes``
            if None.
        fields: fields of ``NormSpec``. The last axes are (heads, head_dim);
            ``pattern="b h ... [d]"`` has the heads before the positions. Flax
            normalizes queries and keys with center=True, divide="std".

    Example:
        >>> qk_norm().pattern, qk_norm("h d").pattern, qk_norm(scale="h").pattern
        ('... [d]', '... [h d]', '... h [d]')
    """
    check_choice("axes", axes, ("d", "h d"))
    scale = axes if scale is None else scale
    check_choice("scale", scale, ("d", "h", "h d", ""))
    heads = "h " if axes == "d" and "h" in scale else ""
    own = {"center": False, "divide": "rms", "affine": Affine(scale, bias=False)}
    return _spec(f"... {heads}[{axes}]", fields, **own)


# What presets take beside the fields of a spec.
PRESET_KEYS = ("groups", "ghosts", "axes", "channels", "scale")
PRESETS = {
    preset.__name__: preset
    for preset in (
        batch_norm,
        batch_renorm,
        ghost_batch_norm,
        layer_norm,
        adaptive_layer_norm,
        center_only,
        scale_only,
        rms_norm,
        l2_norm,
        instance_norm,
        adaptive_instance_norm,
        group_norm,
        weight_standardization,
        qk_norm,
    )
}


def _spec(pattern: str, fields: dict[str, Any], **defaults: Any) -> NormSpec:
    """The preset's own fields, then the caller's."""
    for name in fields:
        check_field(NormSpec, name)
    return NormSpec(**{"pattern": pattern, **defaults, **fields})


def _last(channels: str) -> bool:
    if channels not in ("first", "last"):
        raise ValueError(f"channels is {channels!r}, expected 'first' or 'last'")
    return channels == "last"
