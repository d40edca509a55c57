"""The family as one-line specs; every field of ``NormSpec`` may be given as a keyword.

All share epsilon 1e-5, decay 0.99 and ddof 0, and have scale and bias over the feature
axes (RMS and L2: scale only); only batch norms store statistics. So a swap of presets
never smuggles a number in. Framework defaults are conventions, not presets.
"""

from __future__ import annotations

from typing import Any

from normjax.records import check_field
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

    Example:
        >>> weight_standardization(), weight_standardization("i").pattern
        (NormSpec('[h w i] o', example=None), '[i] o')
    """
    return _spec(f"[{axes}] o", fields, example=None)


def qk_norm(**fields: Any) -> NormSpec:
    """QK-norm: RMS norm of each head's queries and keys, scale over the head dimension.

    Example:
        >>> qk_norm().pattern, qk_norm().divide
        ('... [d]', 'rms')
    """
    scale = Affine("d", bias=False)
    return _spec("... [d]", fields, center=False, divide="rms", affine=scale)


PRESETS = {
    preset.__name__: preset
    for preset in (
        batch_norm,
        ghost_batch_norm,
        layer_norm,
        rms_norm,
        l2_norm,
        instance_norm,
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
