"""From plain data to models, with errors that say where and what; and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from normjax.presets import PRESETS
from normjax.records import suggest
from normjax.study.document import Document, Location
from normjax.study.norm_setting import NormSetting
from normjax.study.schema import NAME


class InvalidError(Exception):
    """Data that does not fit a model: the path of the first problem, and what it is."""

    def __init__(self, location: Location, message: str):
        """Keep both, for whoever knows where the data came from."""
        super().__init__(message)
        self.location, self.message = location, message


def parse(kind: type[BaseModel], data: Any) -> Any:
    """An instance of a model.

    Args:
        kind: a pydantic model.
        data: plain data.

    Returns:
        An instance of ``kind``.

    Raises:
        InvalidError: for the first problem.
    """
    try:
        return kind.model_validate(data, by_alias=True)
    except ValidationError as error:
        # A key that is missing beside an unknown one is a typing error.
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        location, message = explain(first, kind)
        raise InvalidError(location, message) from None


def validate(
    kind: type[BaseModel], data: Any, document: Document, at: Location = ()
) -> Any:
    """An instance of a model, with errors that say where they stand.

    Args:
        kind: a pydantic model.
        data: plain data from the document.
        document: for the places.
        at: path of ``data`` in the document.

    Returns:
        An instance of ``kind``.

    Raises:
        ConfigError: for the first problem: file, line, column, key, what was got and
            what is expected.
    """
    try:
        return parse(kind, data)
    except InvalidError as error:
        raise document.error((*at, *error.location), error.message) from None


def explain(error: Mapping[str, Any], kind: type[BaseModel]) -> tuple[Location, str]:
    """The path and a message of one pydantic error."""
    location = tuple(part for part in error["loc"] if part != "[key]")
    context = error.get("ctx", {})
    value = error.get("input")
    if "key" in context:
        return (*location, *context["key"].split(".")), context["text"]
    if error["type"] == "extra_forbidden":
        known = _known(kind, location[:-1])
        return location, f"there is no such key{suggest(str(location[-1]), known)}"
    if error["type"] == "missing":
        return location, "is missing"
    expected = _EXPECTED.get(error["type"])
    if expected is None:
        return location, f"{error['msg']}, got {_shown(value)}"
    if context.get("pattern") == NAME:
        expected = "a letter, then letters, digits, '_' and '-'"
    text = f"expected {expected.format(**context)}, got {_shown(value)}"
    if error["type"] == "int_type" and isinstance(value, float) and value.is_integer():
        text += f"; write {value:.0f}"
    if error["type"] == "string_type" and isinstance(value, bool | int | float):
        text += "; put it in quotes"
    if error["type"] == "model_type" and isinstance(value, str) and value in PRESETS:
        text += f"; write {{preset: {value}}}"
    return location, text


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "literal_error": "{expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "too_short": "{min_length} or more items",
    "string_pattern_mismatch": "text that matches {pattern}",
}


def _known(kind: type[BaseModel], location: Location) -> list[str]:
    """Keys of the model at a path, as far as the annotations tell."""
    parts = iter(location)
    for part in parts:
        inner = kind.model_fields.get(str(part))
        models = [] if inner is None else _models(inner.annotation)
        if inner is None or not models:
            return []
        kind = models[0]
        if getattr(inner.annotation, "__origin__", None) in (dict, list):
            next(parts, None)  # the name or number of an item
    return [field.alias or name for name, field in kind.model_fields.items()]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    arguments = getattr(annotation, "__args__", ())
    return [model for argument in arguments for model in _models(argument)]


def _shown(value: Any) -> str:
    words = {"True": "true", "False": "false", "None": "null"}  # as YAML has them
    text = words.get(repr(value), repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def canonical(value: Any) -> Any:
    """Plain, ordered data of settings and specs, for hashes and for JSON."""
    if isinstance(value, NormSetting):
        return {"at": value.at, **value.spec.to_dict()}
    if isinstance(value, BaseModel):
        return {
            name: canonical(getattr(value, name)) for name in type(value).model_fields
        }
    if isinstance(value, Mapping):
        return {str(key): canonical(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    return float(value) if isinstance(value, np.floating) else value
