"""Frozen records that print as they are written, and turn into plain data and back."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np


class Record:
    """Base of the declared dataclasses: repr, dotted ``replace``, plain data."""

    def __repr__(self) -> str:
        """Only what differs from the defaults, as the constructor takes it."""
        shown = []
        for index, field in enumerate(dataclasses.fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if index == 0 and field.default is dataclasses.MISSING:
                shown.append(repr(value))
            elif not _same(value, field.default):
                shown.append(f"{field.name}={_written(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def replace(self, **changes: Any):
        """A copy with fields changed; dotted names reach into the parts.

        Raises:
            ValueError: on an unknown field, or a dotted name into a part that is None.

        Example:
            >>> import normjax as nj
            >>> nj.batch_norm().replace(**{"running.decay": 0.9, "epsilon": 1e-3})
            NormSpec('[...] c', epsilon=0.001, affine='c', running=Running(decay=0.9))
        """
        flat: dict[str, Any] = {}
        nested: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            head, _, rest = name.partition(".")
            check_field(type(self), head)
            if rest:
                nested.setdefault(head, {})[rest] = value
            else:
                flat[head] = value
        for head, inner in nested.items():
            part = flat.get(head, getattr(self, head))
            if isinstance(part, Record):
                flat[head] = part.replace(**inner)
            elif head == "sizes":  # a mapping, kept as sorted pairs
                flat[head] = {**dict(part), **inner}
            else:
                raise ValueError(
                    f"{head}.{next(iter(inner))} cannot be set, since {head} is "
                    f"{part!r}: set {head} as a whole"
                )
        return dataclasses.replace(self, **flat)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data: numbers, strings, lists, dicts, None."""
        return {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }


def check_field(kind: type, name: str) -> None:
    """Refuse a name that is no field of ``kind``, naming the nearest one.

    Raises:
        ValueError: with the fields that there are.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    if name not in known:
        hint = suggest(name, known)
        raise ValueError(f"{kind.__name__} has no field {name!r}{hint}")


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest one, or what there is.

    Example:
        >>> suggest("centre", ["center", "divide"]), suggest("x", ["center", "divide"])
        ("; did you mean 'center'?", '; expected one of center, divide')
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; expected one of {', '.join(known)}" if known else ""


def check_flag(name: str, value: object) -> None:
    """Refuse what is not a bool.

    Raises:
        ValueError: with the field and the value.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected True or False")


def check_count(name: str, value: object, least: int = 0) -> None:
    """Refuse what is not a whole number of at least ``least``.

    Raises:
        ValueError: with the field, the value and the bound.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"{name} is {value!r}, expected a whole number, {least} or more"
        )


def check_number(
    name: str,
    value: object,
    *,
    least: float = 0,
    most: float = math.inf,
    infinite: bool = False,
) -> None:
    """Refuse what is not one number within bounds; traced ones pass.

    Raises:
        ValueError: with the field, the value and the bounds.
    """
    if isinstance(value, jax.Array | np.ndarray):
        if value.shape != () or value.dtype.kind in "bc":
            raise ValueError(
                f"{name} has shape {value.shape} and dtype {value.dtype}, expected one "
                "real number; jax.vmap sweeps over several"
            )
        return
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected a number")
    number = float(value)
    if math.isnan(number) or (math.isinf(number) and not infinite):
        raise ValueError(f"{name} is {value!r}, expected a finite number")
    if not least <= number <= most:
        upper = math.isfinite(most)
        bound = f"between {least} and {most}" if upper else f"{least} or more"
        raise ValueError(f"{name} is {value!r}, expected {bound}")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not one of ``allowed``, naming the nearest one.

    Raises:
        ValueError: with the field, the value and what is allowed.
    """
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        options = ", ".join(repr(option) for option in allowed)
        raise ValueError(f"{name} is {value!r}, expected one of {options}{hint}")


def names(value: Any) -> tuple:
    """One name or several as a tuple."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def pairs(name: str, value: Any) -> tuple[tuple[str, Any], ...]:
    """A dict as sorted pairs, which are hashable.

    Raises:
        ValueError: if it is no dict.
    """
    try:
        return tuple(sorted(dict(value).items()))
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} is {value!r}, expected a dict, for instance {{'g': 8}}"
        ) from None


def _same(value: Any, default: Any) -> bool:
    """Equality that also answers for arrays and placeholders."""
    return type(value) is type(default) and bool(value == default)


def _written(value: Any) -> str:
    """As the constructor takes it; a record with only its first field is a string."""
    if isinstance(value, Record):
        first = next(iter(value.to_dict().values()))
        if isinstance(first, str) and "=" not in repr(value):
            return repr(first)
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return repr(dict(value))
    return repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple) and all(isinstance(item, tuple) for item in value):
        return dict(value) if value else []
    if isinstance(value, tuple):
        return list(value)
    return float(value) if isinstance(value, jax.Array | np.generic) else value
