"""The defaults of other libraries as specs, in their own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from normjax.interop import equinox, flax, haiku, keras, torch
from normjax.interop.record import Convention
from normjax.records import check_flag, check_number, suggest
from normjax.spec import NormSpec, check_numbers

CONVENTIONS: dict[str, Convention] = {
    **torch.LAYERS,
    **flax.LAYERS,
    **equinox.LAYERS,
    **haiku.LAYERS,
    **keras.LAYERS,
}


def _check_whole(name: str, value: Any) -> None:
    """Refuse what is no whole number; the spec judges which ones fit."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected a whole number")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "bool": check_flag,
    "float": check_number,
    "int": _check_whole,
}


def convention(name: str, /, **arguments: Any) -> NormSpec:
    """The spec that computes what a layer of another library computes.

    It has the library's defaults and its arithmetic, the parts that lose digits too:
    ``spec.replace(precision=nj.Precision())`` is the same layer computed right.
    ``notes(name)`` says what no spec reproduces.

    Args:
        name: as it is imported, for instance ``"torch.nn.BatchNorm2d"``; the libraries
            are torch, flax.linen, flax.nnx, equinox, haiku and keras. None is needed.
        arguments: of the library's constructor, by its own names and with its meaning;
            only those that change the spec. Numbers of channels become ``sizes``.

    Returns:
        A NormSpec.

    Raises:
        ValueError: on a layer, an argument or a value that there is not, or an argument
            that is missing since the library has no default for it either.

    Example:
        >>> import normjax as nj
        >>> spec = nj.interop.convention("torch.nn.BatchNorm2d", momentum=0.2)
        >>> spec.pattern, spec.running
        ('[b] c [h w]', Running(decay=0.8, ddof=1))
        >>> nj.interop.convention("flax.linen.LayerNorm").epsilon
        1e-06
    """
    known = _known(name)
    taken = known.arguments
    for word in arguments:
        if word not in taken:
            raise ValueError(
                f"{name} has no argument {word!r} that changes its spec"
                f"{suggest(word, taken)}"
            )
    missing = [
        word
        for word, parameter in taken.items()
        if parameter.default is parameter.empty and word not in arguments
    ]
    if missing:
        raise ValueError(
            f"{name} has no default for {', '.join(missing)}: give it as "
            f"{', '.join(f'{word}=...' for word in missing)}"
        )
    for word, value in arguments.items():
        _check(word, str(taken[word].annotation).split(" | "), value)
    spec = known.build(**arguments)
    check_numbers(spec)
    return spec


def notes(name: str) -> tuple[str, ...]:
    """Where no spec, or another than the default one, gives a layer's numbers.

    Args:
        name: as for ``convention``.

    Returns:
        Sentences.

    Raises:
        ValueError: on a layer that is not known.

    Example:
        >>> import normjax as nj
        >>> nj.interop.notes("equinox.nn.RMSNorm")[0]
        'it has a bias unless use_bias=False says otherwise'
    """
    return _known(name).notes


def arguments(name: str) -> tuple[str, ...]:
    """The arguments of a layer's constructor that change its spec.

    Args:
        name: as for ``convention``.

    Returns:
        Their names.

    Raises:
        ValueError: on a layer that is not known.

    Example:
        >>> import normjax as nj
        >>> nj.interop.arguments("torch.nn.GroupNorm")
        ('num_groups', 'num_channels', 'eps', 'affine')
    """
    return tuple(_known(name).arguments)


def _known(name: str) -> Convention:
    if name not in CONVENTIONS:
        hint = suggest(str(name), CONVENTIONS)
        raise ValueError(f"there is no convention {name!r}{hint}")
    return CONVENTIONS[name]


def _check(word: str, kinds: list[str], value: Any) -> None:
    """What a builder's annotation says; other kinds are for the spec to judge."""
    if value is None and "None" in kinds:
        return
    if kinds[0] in _CHECKS:
        _CHECKS[kinds[0]](word, value)
