"""What a user typed on the command line, as specs, shapes and values."""

from __future__ import annotations

from typing import Any

from normjax.family import FAMILY
from normjax.pattern import PatternError
from normjax.presets import PRESET_KEYS, PRESETS
from normjax.records import suggest
from normjax.spec import NormSpec


class InputError(Exception):
    """Something that the user can mend: one line, exit status 2."""


def resolve(layer: str, changes: list[str]) -> NormSpec:
    """A spec from what a user typed.

    Args:
        layer: a preset, a pattern, or a layer of another library.
        changes: ``field=value``; of another library's layer also its own arguments.

    Returns:
        The spec.

    Raises:
        InputError: if it is neither, or a field or value does not fit.

    Example:
        >>> resolve("layer_norm", ["epsilon=1e-3"])
        NormSpec('... [c]', epsilon=0.001, affine='c')
    """
    values = {}
    for text in changes:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set got {text!r}, expected FIELD=VALUE")
        values[name.strip()] = _value(value.strip())
    own = {k: values.pop(k) for k in PRESET_KEYS if k in values}
    try:
        if layer in PRESETS:
            base = PRESETS[layer](**own)
        elif layer in FAMILY and not own:
            base = FAMILY[layer].layer
            if not isinstance(base, NormSpec):
                call = FAMILY[layer].call
                raise InputError(f"{layer} is no NormSpec, but {call}: it has a card")
        elif is_dotted(layer):
            values |= own
            base = _convention(layer, values)
        elif any(letter in layer for letter in "[]() .") and not own:
            base = NormSpec(layer)
        else:
            known = PRESETS if own else FAMILY
            raise InputError(f"there is no preset {layer!r}{suggest(layer, known)}")
        return NormSpec.from_dict(base.replace(**values).to_dict())
    except PatternError as error:
        raise InputError(f"pattern: {error}") from None
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from None


def is_dotted(layer: str) -> bool:
    """Whether it is written like torch.nn.LayerNorm, which is no pattern."""
    return "." in layer and layer.replace(".", "").isidentifier()


def _convention(layer: str, values: dict[str, Any]) -> NormSpec:
    """Another library's layer; takes its own arguments out of the values."""
    from normjax import interop

    own = {k: values.pop(k) for k in interop.arguments(layer) if k in values}
    return interop.convention(layer, **own)


def _value(text: str) -> Any:
    """Numbers, true, false, null; everything else is text."""
    words = {"true": True, "false": False, "null": None, "none": "none"}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def shape_of(text: str) -> tuple[int, ...]:
    """A shape like 8,5,16."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--shape got {text!r}, expected numbers like 8,5,16"
        ) from None
