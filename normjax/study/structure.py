"""What of an arm's settings is the form of its program, and what a number in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from pydantic import BaseModel

from normjax.study.norm_setting import NormSetting
from normjax.study.schema import Leaf
from normjax.study.validation import canonical

# Numbers by the dotted path of their setting; a norm has several.
Leaves = dict[str, Any]


def leaves(settings: Any) -> Leaves:
    """The numbers that a program gets as arguments: fields marked with ``Leaf``.

    Of a marked ``NormSetting`` these are the leaves of its spec. A marked field that
    holds no number (None, a string) belongs to the form.

    Args:
        settings: of an arm.

    Returns:
        Numbers, and lists of them, by path.
    """
    return dict(_leaves(settings, ""))


def put_leaves(settings: Any, values: Mapping[str, Any]) -> Any:
    """The settings with other numbers, which may be traced, in place of its leaves."""
    return _put(settings, "", values) if values else settings


def form(settings: Any) -> str:
    """Text that two arms share if, and only if, one program serves both."""
    values = leaves(settings)
    same = jax.tree.map(lambda leaf: type(leaf)(0), values)
    kinds = jax.tree.map(lambda leaf: type(leaf).__name__, values)
    return json.dumps([canonical(put_leaves(settings, same)), kinds], sort_keys=True)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _leaves(settings: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value, marked in _fields(settings):
        path = f"{prefix}{name}"
        if marked and _number(value):
            yield path, value
        elif marked and isinstance(value, NormSetting):
            yield path, jax.tree.leaves(value.spec)
        elif isinstance(value, BaseModel) and not isinstance(value, NormSetting):
            yield from _leaves(value, f"{path}.")


def _put(settings: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    changed = {}
    for name, value, _ in _fields(settings):
        path = f"{prefix}{name}"
        if path in values and isinstance(value, NormSetting):
            tree = jax.tree.structure(value.spec)
            changed[name] = value.with_spec(jax.tree.unflatten(tree, values[path]))
        elif path in values:
            changed[name] = values[path]
        elif any(known.startswith(f"{path}.") for known in values):
            changed[name] = _put(value, f"{path}.", values)
    return settings.model_copy(update=changed)


def _fields(settings: Any) -> Iterator[tuple[str, Any, bool]]:
    """Name and value of every field, and whether it is marked; none of plain data."""
    if isinstance(settings, BaseModel):
        for name, field in type(settings).model_fields.items():
            marked = any(m is Leaf or isinstance(m, Leaf) for m in field.metadata)
            yield name, getattr(settings, name), marked
