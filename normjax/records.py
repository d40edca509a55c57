"""Frozen records that print as they are written, and turn into plain data and back."""

from __future__ import annotations

import dataclasses
import difflib
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
            if index == 0 and isinstance(value, str):
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
            elif isinstance(part, tuple):  # a mapping, kept as sorted pairs
                flat[head] = {**dict(part), **inner}
            else:
                raise ValueError(
                    f"{head}.{next(iter(inner))} cannot be set: {head} is {part!r}"
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
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
        raise ValueError(f"{kind.__name__} has no field {name!r}; {hint}")


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
